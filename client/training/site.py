"""Train a site's teachers: one per voter, each on its own patients, resumable, and recorded beside its weights.

A case that cannot be read leaves its slot empty, is reported and counted, and stops nobody. A voter whose slots are
all empty has no weights and contributes the zero code; trained privately, it goes through every step like any other and
its weights are made of noise, so that it has some says nothing of anybody. A finished voter is not trained again while
its own files, the recipe and the study's data settings stay the same.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import monai
import numpy as np
import torch

from client.training.base import Part, Trained, Trainer
from client.training.lock import writing
from client.training.patient_deal import ANOTHER_DIRECTORY, load_or_deal
from client.training.private.settings import PrivateSettings
from client.training.private.trainer import private_trainer
from client.training.standard import StandardTrainer
from common.canonical import digest, sha256_file
from common.config import DataConfig, TrainingConfig
from common.data.dataset import Case, Dataset, Problem, check_labels
from common.data.patients import content_hash
from common.data.volume import load_example
from common.data.volume_cache import DEFAULT_BUDGET_BYTES, StoredVolumes, VolumeCache, read, together
from common.errors import InvalidInput
from common.metrics import dice_per_class, mean_present
from common.models.fit import OnStep, predict
from common.models.unet import build_unet, load_weights, save_weights, tensors_to_bytes
from common.objects import write_atomically
from common.privacy.training import Neighbours, TrainingEvent, guarantee_of

TRAIN_SCHEMA = 1
HELD_OUT_SHARE = 0.1
LEAST_SLOTS_TO_HOLD_OUT = 5

MakeTrainer = Callable[["VoterTask"], Trainer]

TRAINERS: dict[str, MakeTrainer] = {
    "standard": lambda task: StandardTrainer(start=task.start),
    "dp-sgd": private_trainer,
    "dp-mac": private_trainer,
    "dp-bbb": private_trainer,
}

OnProgress = Callable[[int, int, float], None]
"""Called after every step with the voter, the steps it has done and the step's loss (nan for a voter kept)."""


@dataclass(frozen=True, slots=True)
class VoterReport:
    """One voter's training, as ``train.json`` holds it. ``dice`` is over its own held-out patients, one per structure.

    ``trained_on`` and ``held_out`` count patients. ``weights`` is the SHA-256 of weights.pt; None for a voter without a
    single usable case or whose training is impossible (``problem`` says why), never for a private one. ``guarantees``
    say what a patient of this training risks, under each relation; none for a training without differential privacy.
    """

    voter: int
    trained_on: int
    held_out: int
    empty_slots: int
    weights: str | None
    dice: tuple[float | None, ...]
    mean_dice: float | None
    steps: int
    loss: float | None
    seconds: float
    reused: bool = False
    problem: str | None = None
    guarantees: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class SiteReport:
    """What ``consilium site train`` did. Case ids in ``problems`` are for the site's own eyes.

    ``voters`` are those that came to their end; ``crashes`` the others.
    """

    voters: tuple[VoterReport, ...]
    problems: tuple[Problem, ...]
    crashes: tuple[Crash, ...] = ()

    def to_json(self) -> dict[str, object]:
        return {"schema": TRAIN_SCHEMA, **dataclasses.asdict(self)}


def voter_directory(teachers: Path, voter: int) -> Path:
    return teachers / f"voter-{voter:03d}"


def held_out_count(slots: int) -> int:
    """How many of a voter's slots are kept for its own validation: a tenth, none where there are fewer than five."""
    return 0 if slots < LEAST_SLOTS_TO_HOLD_OUT else max(1, round(HELD_OUT_SHARE * slots))


@dataclass(frozen=True, slots=True)
class VoterTask:
    """All that one voter's training may read: its own patients' scans and public values, nothing of another voter's.

    ``patients`` are (name, ids of the scans) in slot order; ``cases`` and ``known`` (what the index says is wrong with
    a scan) are of these scans alone. ``deal`` names the dealing of patients to voters; ``private`` is what a private
    trainer may spend; ``start`` is a file of public weights that training begins from, None for random ones.
    """

    voter: int
    patients: tuple[tuple[str, tuple[str, ...]], ...]
    cases: tuple[Case, ...]
    known: tuple[Problem, ...]
    directory: Path
    seed: int
    data: DataConfig
    recipe: TrainingConfig
    trainer: str
    deal: str
    private: PrivateSettings | None = None
    start: Path | None = None

    @property
    def steps(self) -> int:
        """Steps of the training when it is done."""
        return self.recipe.steps if self.private is None else self.private.steps

    @property
    def training_slots(self) -> int:
        """How many of the voter's patients are for training, whatever their files hold."""
        return len(self.patients) - held_out_count(len(self.patients))


@dataclass(frozen=True, slots=True)
class VoterOutcome:
    """A voter's report, and what is wrong with scans of its own patients."""

    report: VoterReport
    problems: tuple[Problem, ...]


@dataclass(frozen=True, slots=True)
class Crash:
    """A voter whose training did not come to an end: nothing was recorded, and running it again goes on."""

    voter: int
    reason: str


RunVoters = Callable[[Sequence[VoterTask], OnProgress], list[VoterOutcome | Crash]]
"""Trains the tasks, in their order in the result; the progress callback is given a task's place in the sequence."""


def one_after_another(tasks: Sequence[VoterTask], on_progress: OnProgress) -> list[VoterOutcome | Crash]:
    """Train the voters in this process; an unexpected error in one ends all."""
    return [train_voter(task, on_step=partial(on_progress, place)) for place, task in enumerate(tasks)]


def train_site(
    dataset: Dataset,
    *,
    teachers: Path,
    data: DataConfig,
    recipe: TrainingConfig,
    voters: int,
    trainer: str = "standard",
    private: PrivateSettings | None = None,
    start: Path | None = None,
    seed: int | None = None,
    run: RunVoters = one_after_another,
    on_progress: OnProgress = lambda voter, step, loss: None,
) -> SiteReport:
    """Deal the patients, then train every voter into ``teachers``/voter-000 …

    How they are run (``run``: in this process, or side by side in others) changes no weight. Interrupted, it goes on
    where it stopped when called again. Raises what :func:`plan_site` raises, and Refused while somebody else trains in
    this directory or takes a patient out.
    """
    with writing(teachers):
        tasks = plan_site(
            dataset,
            teachers=teachers,
            data=data,
            recipe=recipe,
            voters=voters,
            trainer=trainer,
            private=private,
            start=start,
            seed=seed,
        )
        return site_report(run(tasks, on_progress))


def plan_site(
    dataset: Dataset,
    *,
    teachers: Path,
    data: DataConfig,
    recipe: TrainingConfig,
    voters: int,
    trainer: str = "standard",
    private: PrivateSettings | None = None,
    start: Path | None = None,
    seed: int | None = None,
    slots_file: Path | None = None,
    withdrawn: Collection[str] = (),
) -> tuple[VoterTask, ...]:
    """Deal the patients (or read how they were dealt) and say what each voter is trained on; opens no scan.

    ``start``: public weights to begin from, for every trainer. ``seed`` decides the deal and the trainings, of
    synthetic data alone. ``slots_file``: where the pool keeps how its patients are dealt to this many voters,
    ``slots.json`` beside the teachers unless given; ``withdrawn``: patients who left the pool, whom no deal takes in
    any more. The caller holds the locks (:func:`client.training.lock.writing`) of both places.
    Raises InvalidInput for a dataset of other labels or channels, an unknown trainer, a start that is not this
    network's weights, a seed for patients, fewer patients than voters, and a scan that its table gives to another
    patient than before: all of it is decided by what a person wrote, none of it by what a scan holds.
    """
    if trainer not in TRAINERS:
        raise InvalidInput("trainer", value=trainer, limit=", ".join(sorted(TRAINERS)))
    check_labels(dataset, data)
    if seed is not None and not dataset.synthetic:
        raise InvalidInput(
            "seed",
            value=seed,
            limit="data that Consilium made itself: who knows the seed could tell one patient from another by the deal",
            remedy="leave it out; patients are dealt at random, once, and the deal is stored",
        )
    if start is not None:  # before a private training is charged: weights of another network could not be trained
        empty = build_unet(recipe.channels, in_channels=len(data.channels), out_channels=len(data.labels))
        load_weights(start, empty)
    scans = {patient: ids for patient, ids in scans_by_patient(dataset).items() if patient not in withdrawn}
    slots = load_or_deal(slots_file or teachers / "slots.json", scans, voters=voters, seed=seed)
    regrouped = sorted({scan for ids in scans.values() for scan in ids} & set(slots.order) - scans.keys())
    if regrouped:
        raise InvalidInput(
            "scans that were dealt as patients of their own and now belong to others",
            value=regrouped[:3],
            remedy=f"give each scan the patient it had; for a new grouping {ANOTHER_DIRECTORY}",
        )
    tasks = []
    for voter in range(voters):
        patients = tuple((name, scans.get(name, (name,))) for name in slots.part(voter) if not slots.is_empty(name))
        own = {scan for _, ids in patients for scan in ids}
        task = VoterTask(
            voter=voter,
            patients=patients,
            cases=tuple(case for case in dataset.labelled if case.id in own),
            known=tuple(problem for problem in dataset.problems if problem.case in own),
            directory=voter_directory(teachers, voter),
            seed=slots.voter_seed(voter),
            data=data,
            recipe=recipe,
            trainer=trainer,
            deal=digest("deal", {"key": slots.key}),
            private=private,
            start=start,
        )
        tasks.append(task)
    return tuple(tasks)


def scans_by_patient(dataset: Dataset) -> dict[str, tuple[str, ...]]:
    """The ids of each patient's scans listed for training, good or bad; a patient is what the dataset says, or a scan.

    Decided by the index alone, before any file is looked at.
    """
    scans: dict[str, list[str]] = {}
    for scan in dataset.listed:
        scans.setdefault(dataset.patient_of(scan), []).append(scan)
    return {patient: tuple(sorted(ids)) for patient, ids in scans.items()}


def site_report(outcomes: Iterable[VoterOutcome | Crash]) -> SiteReport:
    """The outcomes as one report, whatever they are: a site without one usable case takes part like any other."""
    outcomes = tuple(outcomes)
    done = [outcome for outcome in outcomes if isinstance(outcome, VoterOutcome)]
    crashes = tuple(outcome for outcome in outcomes if isinstance(outcome, Crash))
    problems = tuple(problem for outcome in done for problem in outcome.problems)
    return SiteReport(voters=tuple(outcome.report for outcome in done), problems=problems, crashes=crashes)


def train_voter(task: VoterTask, *, on_step: OnStep, cache_bytes: int = DEFAULT_BUDGET_BYTES) -> VoterOutcome:
    """Train (or resume, or keep) one voter from its own task alone, and record it beside its weights.

    A scan that cannot be used is a Problem. A training that its data make impossible (a diverging loss) leaves the
    voter without weights, so that it contributes the zero code: whether a site takes part says nothing of its data. A
    private training has no such data: gradients that are not finite count as zero, no scan is an empty slot, so what it
    refuses concerns its plan and is raised before a step is spent.
    Volumes beyond ``cache_bytes`` lie in files meanwhile, which changes no weight.
    """
    with VolumeCache(task.directory / "cache", budget_bytes=cache_bytes) as cache:
        return _train_voter(task, cache, on_step=on_step)


def _train_voter(task: VoterTask, cache: VolumeCache, *, on_step: OnStep) -> VoterOutcome:
    usable, problems = _load(task, cache)
    count = len(task.patients)
    parts: tuple[list[_Example], list[_Example]] = ([], [])
    filled = [0, 0]
    places: list[int] = []
    for place, (_, scans) in enumerate(task.patients):
        examples = [usable[scan] for scan in scans if scan in usable]
        held = place >= task.training_slots  # by slot, whatever the files hold
        parts[held].extend(examples)
        filled[held] += bool(examples)
        places += [place] * len(examples) * (not held)
    training, held_out = parts
    identity = _identity(task, training, held_out)
    done = _finished(task.directory, identity)
    if done is not None and (done.weights is not None or task.private is None):
        on_step(task.steps, math.nan)
        return VoterOutcome(done, problems)
    report = VoterReport(
        voter=task.voter,
        trained_on=filled[0],
        held_out=filled[1],
        empty_slots=count - sum(filled),
        weights=None,
        dice=(),
        mean_dice=None,
        steps=0,
        loss=None,
        seconds=0.0,
    )
    checkpoint = task.directory / "checkpoint.pt"
    result: Trained | None = None
    if training or task.private is not None:
        images, labels = _arrays(training, task.data)
        part = Part(
            images=images,
            labels=labels,
            classes=len(task.data.labels),
            places=tuple(places),
            patients=task.training_slots,
        )
        try:
            result = TRAINERS[task.trainer](task).train(
                part, task.recipe, seed=task.seed, checkpoint=checkpoint, on_step=on_step
            )
        except InvalidInput as error:
            if task.private is not None:
                raise
            report = dataclasses.replace(report, problem=str(error))
        else:
            dice = _dice(result.model, held_out, recipe=task.recipe, classes=len(task.data.labels))
            report = dataclasses.replace(
                report,
                weights=save_weights(task.directory / "weights.pt", result.model, mode=0o600),
                dice=dice,
                mean_dice=_number(mean_present(math.nan if d is None else d for d in dice)),
                steps=result.steps,
                loss=result.loss,
                seconds=round(result.seconds, 3),
                guarantees=_guarantees(task, result.event),
            )
    if report.weights is None:
        (task.directory / "weights.pt").unlink(missing_ok=True)
    _record(task, report, identity, result=result)
    checkpoint.unlink(missing_ok=True)
    return VoterOutcome(report, problems)


@dataclass(frozen=True, slots=True)
class _Example:
    image: np.ndarray | Path
    label: np.ndarray | Path
    hashes: tuple[str, ...]


def _load(task: VoterTask, cache: VolumeCache) -> tuple[dict[str, _Example], tuple[Problem, ...]]:
    """Read one voter's scans; whatever is wrong with one is that one's Problem."""
    usable: dict[str, _Example] = {}
    problems: list[Problem] = []
    cases = {case.id: case for case in task.cases}
    known = {problem.case: problem for problem in task.known}
    for scan in (scan for _, scans in task.patients for scan in scans):
        case = cases.get(scan)
        if case is None or case.label is None:
            problems.append(
                known.get(
                    scan,
                    Problem(
                        scan, "no longer in the dataset; to fix: put it back, or `consilium site withdraw-patient`"
                    ),
                )
            )
            continue
        try:
            example = load_example(case, task.data)
            hashes = [content_hash(path) for path in (*case.images, case.label)]
            if case.channel_order or case.label_map:
                hashes.append(repr((case.channel_order, case.label_map)))
        except InvalidInput as error:
            problems.append(Problem(scan, str(error)))
            continue
        except OSError as error:
            problems.append(
                Problem(scan, f"cannot be read ({error.strerror}); to fix: look at its permissions and the disk")
            )
            continue
        except Exception as error:  # noqa: BLE001  # no scan may stop a site, not even by a fault of ours
            kind = type(error).__name__
            problems.append(Problem(scan, f"cannot be read ({kind}, a fault of this software); to fix: report it"))
            continue
        usable[scan] = _Example(cache.keep(example.volume.image), cache.keep(example.label), tuple(hashes))
    return usable, tuple(problems)


def _arrays(
    examples: Sequence[_Example], data: DataConfig
) -> tuple[np.ndarray | StoredVolumes, np.ndarray | StoredVolumes]:
    """Images and label maps of these scans, in order; none have the study's shapes as well."""
    if not examples:
        channels = len(data.channels)
        return np.zeros((0, channels, *data.grid), np.float32), np.zeros((0, *data.grid), np.uint8)
    return together([example.image for example in examples]), together([example.label for example in examples])


def _identity(task: VoterTask, training: list[_Example], held_out: list[_Example]) -> str:
    """Names everything a voter's weights depend on, its own files among it and no other voter's.

    A private training goes by its own identity, without its files: a scan that changed must not start it again and
    spend again.
    """
    if task.private is not None:
        return digest("voter-training", {"data": repr(task.data), "private": private_trainer(task).identity})
    begun = {} if task.start is None else {"start": sha256_file(task.start)}
    return digest(
        "voter-training",
        {
            **begun,
            "data": repr(task.data),
            "recipe": repr(task.recipe),
            "trainer": task.trainer,
            "seed": str(task.seed),
            "training": [list(example.hashes) for example in training],
            "held_out": [list(example.hashes) for example in held_out],
        },
    )


def _dice(
    model: torch.nn.Module, held_out: list[_Example], *, recipe: TrainingConfig, classes: int
) -> tuple[float | None, ...]:
    if not held_out:
        return ()
    rows = [
        dice_per_class(
            predict(model, read(example.image), patch=recipe.patch, amp=recipe.amp).argmax(axis=0).astype(np.uint8),
            read(example.label),
            classes,
        )
        for example in held_out
    ]
    return tuple(_number(mean_present(column)) for column in zip(*rows, strict=True))


def _number(value: float) -> float | None:
    return None if math.isnan(value) else round(value, 5)


def _guarantees(task: VoterTask, event: TrainingEvent | None) -> tuple[str, ...]:
    """What the event costs a patient, under each relation, in words."""
    if event is None or task.private is None:
        return ()
    return tuple(str(guarantee_of(event, delta=task.private.delta, neighbours=relation)) for relation in Neighbours)


def _record(task: VoterTask, report: VoterReport, identity: str, *, result: Trained | None) -> None:
    deviations = None if result is None else result.deviations
    posterior = task.directory / "posterior.pt"
    if deviations is None:
        posterior.unlink(missing_ok=True)
    else:
        write_atomically(posterior, tensors_to_bytes(deviations), mode=0o600)
    record = {
        "schema": TRAIN_SCHEMA,
        "identity": identity,
        "trainer": task.trainer,
        "event": None if result is None or result.event is None else result.event.to_json(),
        "posterior": None if deviations is None else sha256_file(posterior),
        "report": dataclasses.asdict(report),
        "data": dataclasses.asdict(task.data),
        "recipe": dataclasses.asdict(task.recipe),
        "versions": {"monai": monai.__version__, "torch": torch.__version__},
    }
    write_atomically(task.directory / "train.json", (json.dumps(record, indent=1) + "\n").encode(), mode=0o600)


def _finished(directory: Path, identity: str) -> VoterReport | None:
    """The report of an earlier run with the same identity whose weights are still those it recorded."""
    try:
        record: dict[str, Any] = json.loads((directory / "train.json").read_text(encoding="utf-8"))
        report = VoterReport(
            **{
                **record["report"],
                "dice": tuple(record["report"]["dice"]),
                "guarantees": tuple(record["report"].get("guarantees", ())),
                "reused": True,
            }
        )
        if record["identity"] != identity or record["schema"] != TRAIN_SCHEMA:
            return None
        if report.weights is not None and sha256_file(directory / "weights.pt") != report.weights:
            return None
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return report
