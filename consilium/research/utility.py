"""What a student is worth under a guarantee, beside everything it must be compared with.

The production functions do the work: codec, frame, clip and quantise, noise, decoding, student. Left out are the
daemons, the sealing and the ledger, which change no number. Each arm of a seed is one cell, computed once and kept, so
a run that was stopped goes on where it was. All arms of a seed share roles, teachers, public start and steps.
"""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property, partial
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Float, Int64

from client.training.base import Part
from client.training.private.journal import Journal
from client.training.private.settings import defaults
from client.training.private.teachers import train_privately
from common.canonical import digest, sha256_bytes
from common.codecs import fit_codec
from common.codecs.pca import PcaCodec
from common.config import JOINT_ROUNDS, CodecConfig, DataConfig, PrivacyConfig, Study, TrainingConfig
from common.models.fit import fit, one_hot, predict
from common.models.unet import build_unet, load_weights, save_weights, weights_to_bytes
from common.objects import write_atomically
from common.privacy.mechanism import GRID_BITS, AccountantName, Budget, Mechanism, Protection, Relation, Unit
from common.privacy.quantise import quantise
from common.privacy.release import noisy_sum
from common.privacy.training import Neighbours
from common.protocols.joint.frame import FRAME, MAX_COORDINATES, Frame, Observation
from common.study_mechanism import study_mechanism
from consilium.research.roles import Cases, Roles
from server.planning.recommend import joint_noise
from server.protocols.controls import CONTROLS, DERANGEMENT_SEED, derangement
from server.protocols.decode import decode_answer, mean_noise_std
from server.protocols.joint.belief import control as control_of
from server.protocols.joint.belief import labels_of
from server.protocols.joint.kernel import MAX_ROWS, MAX_WEIGHTS, tangent_kernel
from server.protocols.joint.student import (
    RESIDUAL,
    SPREAD,
    TEMPERATURE,
    Start,
    codes_of,
    joint_frame,
    public_start,
    refine,
)
from server.protocols.student import score

SHARED = "shuffled_offsets"
ARMS = ("student", *CONTROLS, "non_private")
CENTRAL = "central_dp_sgd"
CENTRAL_PAPER = "central_dp_sgd_clip_4"
PAPER_CLIP = 4.0
"""Of every layer of its own: Fay et al. 2021, "Baseline"."""
RECIPE = (FRAME, MAX_COORDINATES, RESIDUAL, TEMPERATURE, MAX_ROWS, MAX_WEIGHTS)
"""The joint recipe's constants: what is kept is named by them too."""
BOUNDS = ("mean_teacher", "ensemble", "mean_teacher_m1", "ensemble_m1", "all_data", CENTRAL, CENTRAL_PAPER)
PARTS = ("student", "controls", "bounds")
"""A seed's work, in pieces that may run side by side once the first is done: it trains what the others read."""
OFFSETS = "offsets"
"""One piece more, when it is asked for: :data:`SHARED`."""
_ARMS_OF: dict[str, tuple[str, ...]] = {
    "student": ("student", "zero_code", "public_only"),
    "controls": ("shuffled_codes", "non_private"),
    OFFSETS: (SHARED,),
}


@dataclass(frozen=True, slots=True)
class Setting:
    """One row of the table: a recipe under a guarantee. ``recipe``: ``joint`` or ``pca``.

    ``rounds`` of a joint query, ``queries`` of the other. ``central``: also train on all patients in one place with
    DP-SGD, at the same (ε, δ) for one patient.
    """

    recipe: str
    hospitals: int
    voters: int
    epsilon: float
    delta: float
    unit: Unit
    queries: int
    teacher: TrainingConfig
    student: TrainingConfig
    central: bool = False
    rounds: int = JOINT_ROUNDS

    @property
    def name(self) -> str:
        return f"{self.recipe}-{self.hospitals}x{self.voters}-{self.unit}-{self.epsilon:g}-{self.delta:g}"


def study_of(setting: Setting, data: DataConfig) -> Study:
    """The study this setting stands for. Every round of a joint query is one release about all volumes."""
    joint = setting.recipe == "joint"
    return Study(
        name="bench-utility",
        data=data,
        privacy=PrivacyConfig(
            epsilon=setting.epsilon,
            delta=setting.delta,
            planned_queries=setting.rounds if joint else setting.queries,
            quorum=setting.hospitals,
            unit=setting.unit,
            voters_per_site=setting.voters,
        ),
        codec=CodecConfig(joint=joint),
        teacher=setting.teacher,
        student=setting.student,
    )


class Bench:
    """One setting at one seed. ``cache`` keeps what is expensive by the hash of all it depends on."""

    def __init__(self, setting: Setting, roles: Roles, data: DataConfig, *, seed: int, cache: Path) -> None:
        self.setting, self.roles, self.seed, self._cache = setting, roles, seed, cache
        self.study = study_of(setting, data)
        self.images = roles.public.images if setting.recipe == "joint" else roles.public.images[: setting.queries]
        self._data = digest(
            "bench-roles", [_hash(part) for part in (*roles.private, roles.public, roles.maps, roles.held_out)]
        )

    # --- what the arms share

    @cached_property
    def codec(self) -> PcaCodec:
        """The study's codec, fitted on the public maps."""
        voters = self.setting.hospitals * self.setting.voters
        noise_std = mean_noise_std(study_mechanism(self.study, dimension=1).noise_std, voters=voters)
        codec = fit_codec(self.study, list(self.roles.maps.labels), noise_std=noise_std, seed=0)
        assert isinstance(codec, PcaCodec)
        return codec

    @cached_property
    def codec_hash(self) -> str:
        """Of what the codec does, not of the noise it was planned for: settings that share it share what is kept."""
        codec = self.codec
        arrays = (codec.basis, codec.centre, codec.metric, codec.variances, codec.powers)
        return digest("bench-codec", [sha256_bytes(np.ascontiguousarray(array).tobytes()) for array in arrays])

    def at(self, setting: Setting) -> Bench:
        """The same roles, seed and cache at another setting."""
        return Bench(setting, self.roles, self.study.data, seed=self.seed, cache=self._cache)

    def start(self, *, spread: float = SPREAD) -> Start:
        """The public start, trained once a seed."""
        codec = self.codec
        path = self.start_file() if spread == SPREAD else self.start_file().with_suffix(f".{spread:g}.pt")
        if not path.exists():
            start = public_start(self.images, codec, codec.powers, self.setting.student, seed=self.seed, spread=spread)
            save_weights(path, start.model)
        model = self._empty(self.setting.student)
        load_weights(path, model)
        return Start(model=model, codes=codes_of(model, self.images, codec, temperature=TEMPERATURE))

    def frame(self, start: Start) -> Frame:
        """The frame of the first round, planned once a seed."""
        noise_std = self.mechanism(1)[1]
        parts: list[object] = [self.codec_hash, _weights_hash(start.model), noise_std.hex(), RECIPE]
        path = self.file("frame", parts, "")
        if not path.exists():
            kernel = self.kernel(start, temperature=TEMPERATURE)
            radius = self.study.codec.radius
            frame = joint_frame(start, self.codec, kernel=kernel, noise_std=noise_std, radius=radius)
            write_atomically(path, frame.to_bytes())
        return Frame.from_bytes(path.read_bytes())

    def kernel(self, start: Start, *, temperature: float) -> Float[np.ndarray, "k k"]:
        """The tangent kernel of a start, kept: settings and variants of an ablation share one."""
        parts = [self.codec_hash, _weights_hash(start.model), temperature, MAX_ROWS, MAX_WEIGHTS]
        make = partial(tangent_kernel, start.model, self.images, self.codec, temperature=temperature)
        return _kept(self.file("kernel", list(parts), ".npy"), make)

    def start_file(self) -> Path:
        """Where :meth:`start` keeps its weights."""
        return self.file("start", [self.codec_hash, repr(self.setting.student), self.seed], ".pt")

    def teachers(self, start: Start | None) -> list[torch.nn.Module]:
        """One teacher a voter; with ``start`` trained on from its weights, which are public."""
        weights = None if start is None else _weights_hash(start.model)
        models = []
        for hospital, site in enumerate(self.roles.private):
            for voter in range(self.setting.voters):
                part = site[np.arange(voter, len(site), self.setting.voters)]
                seed = 1000 * hospital + voter
                path = self.file("teacher", [repr(self.setting.teacher), _hash(part), seed, weights or "random"], ".pt")
                model = self._empty(self.setting.teacher, seed=seed)
                if path.exists():
                    load_weights(path, model)
                else:
                    if start is not None:
                        model.load_state_dict(start.model.state_dict())
                    targets = np.stack([one_hot(label, self.study_classes) for label in part.labels])
                    fit(model, part.images, targets, self.setting.teacher, seed=seed)
                    save_weights(path, model)
                model.eval()
                models.append(model)
        return models

    @property
    def study_classes(self) -> int:
        return len(self.study.data.labels)

    def codes(self, teachers: list[torch.nn.Module], *, temperature: float | None = None) -> Float[np.ndarray, "k n l"]:
        """Every teacher's codes of the public volumes. # sensitive: in a benchmark of stand-in data only"""
        if temperature is None:
            temperature = TEMPERATURE if self.study.codec.joint else 1.0
        result = []
        for model in teachers:
            path = self.file("codes", [self.codec_hash, _weights_hash(model), len(self.images), temperature], ".npy")
            make = partial(codes_of, model, self.images, self.codec, temperature=temperature)
            result.append(_kept(path, make))
        return np.stack(result)

    # --- arms

    def run(self, report: Callable[[str], None]) -> dict[str, float]:
        """Dice of every arm and bound on the held-out cases, and of the decoded labels on the public volumes."""
        done: dict[str, float] = {}
        for part in PARTS:
            done |= self.run_part(part, report)
        return done

    def run_part(self, part: str, report: Callable[[str], None]) -> dict[str, float]:
        """One of :data:`PARTS`, or :data:`OFFSETS`. Done arms are kept, so a part that was stopped goes on."""
        joint = self.setting.recipe == "joint"
        start = self.start() if joint else None
        report("frame")
        frame = None if start is None else self.frame(start)
        asked = self.codec_hash if frame is None else sha256_bytes(frame.to_bytes())
        path = self.file("cell", [repr(self.setting), self.seed, asked, part], ".json")
        done: dict[str, float] = json.loads(path.read_text()) if path.exists() else {}
        report("teachers")
        teachers = self.teachers(start)

        def keep(values: dict[str, float]) -> None:
            done.update(values)
            write_atomically(path, (json.dumps(done, indent=1) + "\n").encode())

        if part == "bounds":
            self._bound(teachers, start, done, keep, report)
            return done
        codes = self.codes(teachers)
        for arm in _ARMS_OF[part]:
            if arm not in done:
                report(arm)
                if start is None or frame is None:
                    keep(self.single(arm, codes))
                else:
                    keep(self._joint(arm, start, frame, codes))
        return done

    def _bound(
        self,
        teachers: list[torch.nn.Module],
        start: Start | None,
        done: dict[str, float],
        keep: Callable[[dict[str, float]], None],
        report: Callable[[str], None],
    ) -> None:
        """What the student is compared with besides its controls: teachers, and networks on everybody's patients."""
        if "ensemble" not in done:
            keep(self._of_teachers(teachers))
        if self.setting.voters > 1 and "ensemble_m1" not in done:
            report("one teacher a site")
            one = self.at(replace(self.setting, voters=1))
            keep({f"{name}_m1": dice for name, dice in one._of_teachers(one.teachers(start)).items()})
        if "all_data" not in done:
            report("all_data")
            keep({"all_data": self._all_data()})
        for name, clip in ((CENTRAL, None), (CENTRAL_PAPER, PAPER_CLIP)):
            if self.setting.central and name not in done:
                report(name)
                keep({name: self._central(start, layer_clip=clip)})

    def _joint(self, arm: str, start: Start, frame: Frame, codes: Float[np.ndarray, "k n l"]) -> dict[str, float]:
        if arm == "non_private":  # the teachers' mean codes as they are: no frame, no clip, no noise
            final = codes.mean(axis=0)
        else:
            final = self.believed(frame, codes)
            final = final if arm == "student" else control_of(arm, start.codes, final)
        values = {arm: self.taught(start, final)}
        if arm == "student":
            values["labels"] = score(
                _hard(labels_of(self.codec, final)), self.roles.public.labels[: len(self.images)], self.study_classes
            ).mean
        return values

    def taught(self, start: Start, codes: Float[np.ndarray, "n l"]) -> float:
        """Dice of the student of these codes, trained once: controls that come to the same labels are the same."""
        parts = [self.codec_hash, _weights_hash(start.model), repr(self.setting.student), self.seed]
        path = self.file("taught", [*parts, sha256_bytes(np.ascontiguousarray(codes).tobytes())], ".json")
        if not path.exists():
            model = refine(start.model, self.images, self.codec, codes, self.setting.student, seed=self.seed + 100)
            write_atomically(path, json.dumps(self.dice(model, self.roles.held_out)).encode())
        return float(json.loads(path.read_text()))

    def single(self, arm: str, codes: Float[np.ndarray, "k n l"]) -> dict[str, float]:
        codec = self.codec
        mechanism, noise_std = self.mechanism(codec.dimension)
        voters = len(codes)
        silence = codec.decode(np.zeros(codec.dimension), noise_std=noise_std)
        if arm in ("zero_code", "public_only"):
            labels = np.repeat(silence[None], len(self.images), axis=0)
        elif arm == "non_private":
            labels = np.stack([codec.decode(code, noise_std=0.0) for code in codes.mean(axis=0)])
        else:
            answers = self.released("single", list(codes), mechanism)
            labels = np.stack(
                [decode_answer(codec, a, voters=voters, noise_std_int=mechanism.noise_std) for a in answers]
            )
            if arm == "shuffled_codes":
                labels = labels[list(derangement(len(labels), seed=DERANGEMENT_SEED))]
        model = self._student(labels)
        if arm == "public_only":  # self-training: the zero code's student labels the volumes for a fresh one
            model = self._student(np.stack([predict(model, image) for image in self.images]))
        values = {arm: self.dice(model, self.roles.held_out)}
        if arm == "student":
            truth = self.roles.public.labels[: len(self.images)]
            values["labels"] = score(_hard(labels), truth, self.study_classes).mean
        return values

    # --- pieces

    def mechanism(self, dimension: int) -> tuple[Mechanism, float]:
        mechanism = study_mechanism(self.study, dimension=dimension)
        return mechanism, mean_noise_std(mechanism.noise_std, voters=self.setting.hospitals * self.setting.voters)

    def believed(
        self,
        frame: Frame,
        codes: Float[np.ndarray, "k n l"],
        *,
        kind: str = "joint",
        shrunk: bool = True,
    ) -> Float[np.ndarray, "n l"]:
        """The volumes' codes after all rounds; not ``shrunk``: observations are taken as they are."""
        noise_std, radius = self.mechanism(1)[1], self.study.codec.radius
        for number in range(1, self.setting.rounds + 1):
            seen = self.observed(f"{kind}-{number}", frame, codes)
            taken = seen if shrunk else replace(seen, variance=np.zeros_like(seen.variance))
            final = frame.estimate(taken)
            if number < self.setting.rounds:
                frame = replace(frame.after(seen, noise_std=noise_std, radius=radius), centre=final)
        return final

    def observed(self, kind: str, frame: Frame, codes: Float[np.ndarray, "k n l"]) -> Observation:
        """What one release of the voters' codes of all volumes says."""
        mechanism, noise_std = self.mechanism(frame.dimension)
        answer = self.released(kind, [[frame.encode(each)] for each in codes], mechanism)[0]
        return frame.read(answer / (len(codes) * 2.0**GRID_BITS), noise_std=noise_std)

    def released(
        self, kind: str, codes: Sequence[Iterable[Float[np.ndarray, "d"]]], mechanism: Mechanism
    ) -> Int64[np.ndarray, "q d"]:
        """The noisy sums of the voters' codes [k][q], drawn once and kept: student and control read one release."""

        def release() -> np.ndarray:
            sums = []
            for query in zip(*codes, strict=True):
                integers = [quantise(code, radius_int=mechanism.radius_int) for code in query]
                sums.append(noisy_sum(integers, mechanism))
            return np.stack(sums)

        parts = [repr(self.setting), self.seed, mechanism.dimension, _array_hash(codes)]
        return _kept(self.file(f"release-{kind}", parts, ".npy"), release)

    def _student(self, labels: Float[np.ndarray, "n k x y z"]) -> torch.nn.Module:
        model = self._empty(self.setting.student, seed=self.seed)
        fit(model, self.images, labels, self.setting.student, seed=self.seed)
        return model

    def _of_teachers(self, teachers: list[torch.nn.Module]) -> dict[str, float]:
        total = np.zeros((len(self.roles.held_out), self.study_classes, *self.study.data.grid), dtype=np.float32)
        each = []
        for model in teachers:
            probabilities = np.stack([predict(model, image) for image in self.roles.held_out.images])
            each.append(score(_hard(probabilities), self.roles.held_out.labels, self.study_classes).mean)
            total += probabilities
        ensemble = score(_hard(total), self.roles.held_out.labels, self.study_classes).mean
        return {"mean_teacher": float(np.mean(each)), "ensemble": ensemble}

    def _all_data(self) -> float:
        """One network on everybody's patients: what no hospital may do. The same at every setting, and kept."""
        pooled, recipe = self._pooled(), TrainingConfig(steps=self.setting.student.steps)
        model = self._empty(recipe, seed=self.seed)
        path = self.file("all-data", [repr(recipe), self.seed], ".pt")
        if path.exists():
            load_weights(path, model)
        else:
            targets = np.stack([one_hot(label, self.study_classes) for label in pooled.labels])
            fit(model, pooled.images, targets, recipe, seed=self.seed)
            save_weights(path, model)
        return self.dice(model, self.roles.held_out)

    def _central(self, start: Start | None, *, layer_clip: float | None) -> float:
        """DP-SGD on everybody's patients in one place, replace-one, from the same public start: its default recipe.

        ``layer_clip``: every layer is clipped to it, in place of the recipe's one clip of all. The unit is the patient
        also where the study's is the hospital, which it could not hide at all.
        """
        settings = defaults("dp-sgd", epsilon=self.setting.epsilon, delta=self.setting.delta, begun=start is not None)
        settings = replace(settings, neighbours=Neighbours.REPLACE_ONE)
        pooled = self._pooled()
        part = Part(pooled.images, pooled.labels, self.study_classes)
        journal = Journal(settings.plan(patients=len(pooled)))
        begun = None if start is None else self.start_file()
        trained = train_privately(
            part, self.setting.teacher, settings, journal, seed=self.seed, start=begun, layer_clip=layer_clip
        )
        return self.dice(trained.model, self.roles.held_out)

    def _pooled(self) -> Cases:
        return Cases(*(np.concatenate([getattr(site, f) for site in self.roles.private]) for f in ("images", "labels")))

    def dice(self, model: torch.nn.Module, cases: Cases) -> float:
        predictions = np.stack([predict(model, image) for image in cases.images])
        return score(_hard(predictions), cases.labels, self.study_classes).mean

    def _empty(self, recipe: TrainingConfig, *, seed: int = 0) -> torch.nn.Module:
        channels = len(self.study.data.channels)
        return build_unet(recipe.channels, in_channels=channels, out_channels=self.study_classes, seed=seed)

    def kept(self, kind: str, parts: list[object], make: Callable[[], np.ndarray]) -> np.ndarray:
        """An array that depends on the roles and ``parts``, made once."""
        return _kept(self.file(kind, parts, ".npy"), make)

    def file(self, kind: str, parts: list[object], suffix: str) -> Path:
        """Where a thing that depends on the roles and ``parts`` is kept."""
        key = digest(f"bench-{kind}", [self._data, *(str(part) for part in parts)])[:32]
        return self._cache / f"{kind}-{key}{suffix}"


def _kept(path: Path, make: Callable[[], np.ndarray]) -> np.ndarray:
    if not path.exists():
        content = io.BytesIO()
        np.save(content, make())
        write_atomically(path, content.getvalue())
    array: np.ndarray = np.load(path)
    return array


def mean_noise(setting: Setting) -> float:
    """The noise on every coordinate of the mean code if one release spent the budget, in units of the clipping norm."""
    return joint_noise(
        budget=Budget(setting.epsilon, setting.delta),
        accountant=AccountantName.EXACT,
        protection=Protection(setting.unit, Relation.REPLACE_ONE),
        hospitals=setting.hospitals,
        voters=setting.voters,
    )


def settings_json(setting: Setting) -> dict[str, object]:
    """The setting as plain JSON."""
    return json.loads(json.dumps(asdict(setting), default=str))  # type: ignore[no-any-return]


def _hard(probabilities: Float[np.ndarray, "n k x y z"]) -> np.ndarray:
    result: np.ndarray = probabilities.argmax(axis=1).astype(np.uint8)
    return result


def _hash(cases: Cases) -> str:
    images, labels = np.ascontiguousarray(cases.images), np.ascontiguousarray(cases.labels)
    return sha256_bytes(images.tobytes() + labels.tobytes())


def _array_hash(codes: Sequence[Iterable[np.ndarray]]) -> str:
    return sha256_bytes(b"".join(np.ascontiguousarray(each).tobytes() for voter in codes for each in voter))


def _weights_hash(model: torch.nn.Module) -> str:
    return sha256_bytes(weights_to_bytes(model))
