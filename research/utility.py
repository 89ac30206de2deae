"""Measures the Dice of the student under a guarantee, of its controls, and of the networks that bound it.

`consilium bench utility` runs it through :mod:`research.jobs`. The functions of a real run make the queries, labels and
networks. Daemons, encryption and ledger are left out, because they change no result. The results of each seed and part
are stored network by network, so a stopped benchmark continues.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Float, Int64

from common.canonical import sha256_bytes
from common.config import TrainingConfig
from common.metrics import mean_present
from common.models.fit import fit, one_hot, predict
from common.privacy.mechanism import QuerySpec
from common.protocols.site_protocol import Encoder
from consilium.memory.asked import AnswerInMemory
from research.asked import ask, noised
from research.bench import Bench, hard
from research.home import CHOSEN, HOME, measure_home
from research.scores import at_site, scored
from research.setting import CENTRAL, CENTRAL_PAPER, SHARED, SILOS, SILOS_MEAN
from research.silos import at_silos
from research.stored_results import NumbersFile, array_hash, weights_hash
from server.postprocess.networks import fit_once
from server.protocols.public_start import Start
from server.protocols.query_protocol import FitFiles, StudentData, protocol_of
from server.protocols.stored_labels import StoredLabels, as_stored
from server.protocols.student_fit import train_student
from server.public.material import PublicMaterial

Report = Callable[[str], None]
PAPER_CLIP = 4.0
"""Clipping norm of each layer, from Fay et al. 2021, "Baseline"."""
PARTS = ("student", "controls", "bounds")
"""Parts of a seed's work. The first trains what the others read; the others may then run in parallel."""
OFFSETS = "offsets"
"""Name of an optional part: the control :data:`~research.setting.SHARED`, with the releases shuffled between volumes.
"""
_ARMS_OF: dict[str, tuple[str, ...]] = {
    "student": ("student", "zero_code", "public_only"),
    "controls": ("shuffled_codes",),
    "bounds": ("non_private", "mean_predictions", "true_labels"),
    OFFSETS: (SHARED,),
}


def run(bench: Bench, report: Report) -> dict[str, float]:
    """Return the metrics of every arm and bound on the held-out cases, and of the decoded labels on the public
    volumes.
    """
    done: dict[str, float] = {}
    for part in PARTS:
        done |= run_part(bench, part, report)
    return done


def run_part(bench: Bench, part: str, report: Report) -> dict[str, float]:
    """Run one part and return its metrics; finished arms are stored.

    Args:
        bench: The setting and seed.
        part: One of :data:`PARTS`, or :data:`OFFSETS`, :data:`~research.home.HOME`, :data:`~research.home.CHOSEN`.
        report: Called with the name of the next step.
    """
    start = bench.start() if bench.begun else None
    report("teachers")
    teachers = bench.teachers(start)
    named = [repr(bench.setting), bench.seed, bench.codec_hash, "" if start is None else weights_hash(start.model)]
    named += bench.schooling
    cell = NumbersFile(bench.kept.file("cell", [*named, part], ".json"))
    if part == "bounds":
        bounds(bench, teachers, start, cell, report)
    report("frame")
    study = BenchAnswers(bench, start, bench.codes(teachers))
    if part in (HOME, CHOSEN):
        return measure_home(bench, study.trained("student"), part, cell, report)
    for arm in _ARMS_OF[part]:
        if arm not in cell.values():
            report(arm)
            cell.add(study.arm(arm))
    return cell.values()


class BenchAnswers:
    """The study of one setting, with its noisy answers.

    The noise is drawn once and stored, so the student and all its controls use the same answers.

    Args:
        bench: The setting and seed.
        start: The public start, if any.
        codes: The teachers' codes, float [k, n, l].
    """

    def __init__(self, bench: Bench, start: Start | None, codes: Float[np.ndarray, "k n l"]) -> None:
        self._bench, self._start, self._codes = bench, start, codes
        frame = bench.frame(start) if bench.joint and start is not None else None
        asked = bench.codec_hash if frame is None else sha256_bytes(frame.to_bytes())
        folder = bench.kept.file("study", [repr(bench.setting), bench.seed, asked, array_hash(codes)], "")
        self.folder, self.public = folder, bench.public(folder, start=start, frame=frame)
        self.protocol = protocol_of(bench.study)
        self._rows = {volume: row for row, volume in enumerate(self.public.volumes)}
        self.answers: tuple[AnswerInMemory, ...] = ask(self.public, self._vote, voters=bench.voters, draw=self._draw)
        labels = self._labels(self.folder, self.public, self.answers)
        self._student_data = StudentData(self.public, self.answers, labels, seed=bench.seed)

    def arm(self, name: str) -> dict[str, float]:
        """Return an arm's metrics on the held-out cases; for the student also those of the labels on the public
        volumes.
        """
        bench = self._bench
        values = bench.scored(name, self._network(name))
        if name == "student":
            labels = hard(np.stack(list(self._student_data.labels.values())))
            values |= scored("labels", labels, bench.roles.public.labels[: len(labels)], bench.study.data)
        return values

    def _network(self, name: str) -> torch.nn.Module:
        bench, asked = self._bench, len(self.public.volumes)
        match name:
            case "non_private":
                return self._unprotected()
            case "mean_predictions":
                teachers = bench.teachers(self._start)
                means = [np.mean([predict(one, image) for one in teachers], axis=0) for image in bench.images]
                return self._trained_on_labels(name, means)
            case "true_labels":
                return self._trained_on_labels(
                    name, [one_hot(label, bench.classes) for label in bench.roles.public.labels[:asked]]
                )
            case _:
                return self.trained(name)

    def _trained_on_labels(self, name: str, labels: Sequence[Float[np.ndarray, "k x y z"]]) -> torch.nn.Module:
        """Return the student trained on given labels of the public volumes, as if these had been released.

        The student of a joint query learns them voxel by voxel from its public start, not as codes.
        """
        bench, stored = self._bench, StoredLabels(self.folder / name, self.public.volumes)
        for volume, label in zip(self.public.volumes, labels, strict=True):
            stored.store(volume, label)
        if bench.joint and self._start is not None:
            told, recipe = np.stack(list(stored.values())), bench.setting.student
            return train_student(bench.images, told, recipe, seed=bench.seed, start=self._start.model)[0]
        files = FitFiles.at(self.folder / "networks", name)
        return self.protocol.finish(replace(self._student_data, labels=stored)).train(files, lambda _step, _loss: None)

    def trained(self, name: str) -> torch.nn.Module:
        """Return the network of an arm, trained once and stored."""
        student_data = replace(self._student_data, trained=self.trained)
        training = (
            self.protocol.finish(student_data) if name == "student" else self.protocol.control(student_data, name)
        )
        assert training is not None  # a benchmark asks about at least two volumes
        files = FitFiles.at(self.folder / "networks", name)
        fit_once(training, files=files, on_step=lambda _step, _loss: None)
        empty = self._bench.empty(self._bench.setting.student)
        return self._bench.kept.network(files.weights, empty, lambda: empty)

    def _unprotected(self) -> torch.nn.Module:
        """Return the student trained on the teachers' mean codes, without frame, clipping and noise.

        For an appearance query only the noise is left out.
        """
        bench, codes = self._bench, self._codes.mean(axis=0)
        if bench.setting.recipe == "appearance":
            return self._silently_asked()
        if self._start is not None:
            return bench.refined(self._start, codes)
        labels = np.stack([as_stored(bench.codec.decode(code, noise_std=0.0)) for code in codes])
        return train_student(bench.images, labels, bench.setting.student, seed=bench.seed)[0]

    def _silently_asked(self) -> torch.nn.Module:
        """Return the student trained on the labels of an appearance query whose sums have no noise."""
        folder = self.folder / "exact"
        public = self._bench.public(folder, start=self._start, frame=None)
        drawn = ask(public, self._vote, voters=self._bench.voters, draw=lambda _query, votes: np.sum(votes, axis=0))
        labels = self._labels(folder, public, drawn)
        student_data = StudentData(public, drawn, labels, seed=self._bench.seed)
        files = FitFiles.at(folder, "student")
        return self.protocol.finish(student_data).train(files, lambda _step, _loss: None)

    def _vote(self, encoder: Encoder, query: QuerySpec, voter: int) -> Float[np.ndarray, "d"]:
        if voter >= len(self._codes):  # a voter without patients
            return np.zeros(query.mechanism.dimension)
        return encoder.of_voter(self._codes[voter, [self._rows[volume] for volume in query.volumes]])

    def _draw(self, query: QuerySpec, votes: Sequence[Int64[np.ndarray, "d"]]) -> Int64[np.ndarray, "d"]:
        parts = [repr(self._bench.setting), self._bench.seed, query.id, array_hash(*votes)]
        return self._bench.kept.array("release", parts, lambda: noised(votes, query.mechanism))

    def _labels(self, folder: Path, public: PublicMaterial, answers: Sequence[AnswerInMemory]) -> StoredLabels:
        labels = StoredLabels(folder / "labels", public.volumes)
        for label in self.protocol.aggregate(public, answers).labels():
            labels.store(label.volume, label.probabilities)
        return labels


def bounds(
    bench: Bench, teachers: list[torch.nn.Module], start: Start | None, cell: NumbersFile, report: Report
) -> None:
    """Score the networks that the student is compared with besides its controls, and add their metrics to ``cell``.

    They are the teachers, a network trained on all patients and, if the setting asks for it, networks trained with
    DP-SGD.

    Args:
        bench: The setting and seed.
        teachers: The teachers.
        start: The public start, if any.
        cell: Where results are stored.
        report: Called with what is done next.
    """
    if "ensemble" not in cell.values():
        cell.add(of_teachers(bench, teachers))
    if not any(name.startswith(at_site("teacher", "")) for name in cell.values()):
        report("one teacher a site")
        one = bench.at(replace(bench.setting, voters=1))
        alone = one.teachers(start)
        if bench.setting.voters > 1:
            cell.add(of_teachers(one, alone, suffix="_m1"))
        cell.add(of_sites(one, alone))
    if "all_data" not in cell.values():
        report("all_data")
        cell.add(bench.scored("all_data", all_data(bench)))
    for name, clip in ((CENTRAL, None), (CENTRAL_PAPER, PAPER_CLIP)):
        if bench.setting.central and name not in cell.values():
            report(name)
            settings = bench.dp_sgd(start)
            settings = settings if clip is None else replace(settings, clip=clip, per_layer=True)
            cell.add(bench.scored(name, bench.central(settings, start)))
    if bench.setting.central and SILOS not in cell.values():
        report(SILOS)
        networks, mean = at_silos(bench, start)
        each = [bench.scored(SILOS, network) for network in networks]
        cell.add({name: mean_present(values[name] for values in each) for name in each[0]})
        cell.add(bench.scored(SILOS_MEAN, mean))


def of_teachers(bench: Bench, teachers: list[torch.nn.Module], *, suffix: str = "") -> dict[str, float]:
    """Return the mean of the teachers' metrics, and the metrics of their mean prediction."""
    held_out, data = bench.roles.held_out, bench.study.data
    total = np.zeros((len(held_out), bench.classes, *data.grid), dtype=np.float32)
    each = []
    for model in teachers:
        probabilities = np.stack([predict(model, image) for image in held_out.images])
        each.append(scored(f"mean_teacher{suffix}", hard(probabilities), held_out.labels, data))
        total += probabilities
    means = {name: mean_present(values[name] for values in each) for name in each[0]}
    return means | scored(f"ensemble{suffix}", hard(total), held_out.labels, data)


def of_sites(bench: Bench, teachers: list[torch.nn.Module]) -> dict[str, float]:
    """Return each hospital's number of cases, and the Dice of its own teacher, trained on all of these cases."""
    values: dict[str, float] = {}
    for site, cases, model in zip(bench.roles.sites, bench.roles.private, teachers, strict=True):
        found = bench.scored("teacher", model)
        own = at_site("teacher on its own", site)
        values |= {at_site("cases", site): float(len(cases)), at_site("teacher", site): found["teacher"]}
        values |= {own: found[own]} if own in found else {}
    return values


def all_data(bench: Bench) -> torch.nn.Module:
    """Return one network trained on all patients, which hospitals cannot do.

    It is stored, and shared by all settings whose student has the same network and steps.
    """
    student = bench.setting.student
    recipe = TrainingConfig(steps=student.steps, channels=student.channels, network=student.network)

    def train() -> torch.nn.Module:
        pooled, model = bench.roles.pooled, bench.empty(recipe, seed=bench.seed)
        targets = np.stack([one_hot(label, bench.classes) for label in pooled.labels])
        fit(model, pooled.images, targets, recipe, seed=bench.seed)
        return model

    path = bench.kept.file("all-data", [repr(recipe), bench.seed], ".pt")
    return bench.kept.network(path, bench.empty(recipe), train)
