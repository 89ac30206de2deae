"""Train a site's teachers: one per voter, each on its own patients, resumable, and recorded beside its weights.

A case that cannot be read leaves its slot empty, is reported and counted, and stops nobody. A voter whose slots are
all empty has no weights and contributes the zero code. A finished voter is not trained again while its own files, the
recipe and the study's data settings stay the same.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import monai
import numpy as np
import torch

from client.training.base import Part, Trainer
from client.training.slots import Slots, load_or_deal
from client.training.standard import StandardTrainer
from common.canonical import digest, sha256_file
from common.config import DataConfig, TrainingConfig
from common.data.msd import Case, Dataset, Problem, check_labels
from common.data.volume import load_label, load_volume
from common.errors import InvalidInput
from common.metrics import dice_per_class, mean_present
from common.models.fit import predict
from common.models.unet import save_weights
from common.objects import write_atomically

TRAIN_SCHEMA = 1
HELD_OUT_SHARE = 0.1
LEAST_SLOTS_TO_HOLD_OUT = 5

TRAINERS: dict[str, Trainer] = {"standard": StandardTrainer()}

OnProgress = Callable[[int, int, float], None]
"""Called after every step with the voter, the steps it has done and the step's loss (nan for a voter skipped)."""


@dataclass(frozen=True, slots=True)
class VoterReport:
    """One voter's training, as ``train.json`` holds it. ``dice`` is over its own held-out patients, one per structure.

    ``weights`` is the SHA-256 of weights.pt, None for a voter without a single usable case.
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


@dataclass(frozen=True, slots=True)
class SiteReport:
    """What ``consilium site train`` did. Case ids in ``problems`` are for the site's own eyes."""

    voters: tuple[VoterReport, ...]
    problems: tuple[Problem, ...]

    def to_json(self) -> dict[str, object]:
        return {"schema": TRAIN_SCHEMA, **dataclasses.asdict(self)}


def voter_directory(teachers: Path, voter: int) -> Path:
    return teachers / f"voter-{voter:03d}"


def held_out_count(slots: int) -> int:
    """How many of a voter's slots are kept for its own validation: a tenth, none where there are fewer than five."""
    return 0 if slots < LEAST_SLOTS_TO_HOLD_OUT else max(1, round(HELD_OUT_SHARE * slots))


def train_site(
    dataset: Dataset,
    *,
    teachers: Path,
    data: DataConfig,
    recipe: TrainingConfig,
    voters: int,
    trainer: str = "standard",
    seed: int | None = None,
    on_progress: OnProgress | None = None,
) -> SiteReport:
    """Deal the patients, then train every voter into ``teachers``/voter-000 … one after the other.

    Interrupted, it goes on where it stopped when called again. Raises InvalidInput for a dataset of other labels or
    channels, an unknown trainer, fewer patients than voters, and when no case at all is usable.
    """
    if trainer not in TRAINERS:
        raise InvalidInput("trainer", value=trainer, limit=", ".join(sorted(TRAINERS)))
    check_labels(dataset, data)
    if len(dataset.listed) < voters:
        raise InvalidInput(
            "patients for training", value=len(dataset.listed), limit=f"at least one for {voters} voters"
        )
    slots = load_or_deal(teachers / "slots.json", dataset.listed, voters=voters, seed=seed)
    known = {problem.case: problem for problem in dataset.problems}
    cases = {case.id: case for case in dataset.labelled}
    reports: list[VoterReport] = []
    problems: list[Problem] = []
    for voter in range(voters):
        report, found = _train_voter(
            voter, slots, cases, known, teachers, data=data, recipe=recipe, trainer=trainer, on_progress=on_progress
        )
        reports.append(report)
        problems += found
    if not any(report.weights for report in reports):
        reasons = sorted({problem.reason for problem in problems})
        raise InvalidInput("no usable case in the dataset", value=reasons[:3], remedy="repair the data and run again")
    return SiteReport(voters=tuple(reports), problems=tuple(problems))


def _train_voter(
    voter: int,
    slots: Slots,
    cases: Mapping[str, Case],
    known: Mapping[str, Problem],
    teachers: Path,
    *,
    data: DataConfig,
    recipe: TrainingConfig,
    trainer: str,
    on_progress: OnProgress | None,
) -> tuple[VoterReport, list[Problem]]:
    names = slots.part(voter)
    directory = voter_directory(teachers, voter)
    seed = slots.voter_seed(voter)
    usable, problems = _load(names, cases, known, data)
    held_out_names = set(names[len(names) - held_out_count(len(names)) :])  # by slot, whatever the files hold
    training = [usable[name] for name in names if name in usable and name not in held_out_names]
    held_out = [usable[name] for name in names if name in usable and name in held_out_names]
    identity = _identity(training, held_out, data=data, recipe=recipe, trainer=trainer, seed=seed)
    done = _finished(directory, identity)
    if done is not None:
        if on_progress is not None:
            on_progress(voter, recipe.steps, math.nan)
        return done, problems
    blank = VoterReport(
        voter=voter,
        trained_on=len(training),
        held_out=len(held_out),
        empty_slots=len(names) - len(usable),
        weights=None,
        dice=(),
        mean_dice=None,
        steps=0,
        loss=None,
        seconds=0.0,
    )
    if not training:
        (directory / "weights.pt").unlink(missing_ok=True)
        _record(directory, blank, identity, data=data, recipe=recipe, trainer=trainer, event=None)
        return blank, problems
    part = Part(
        images=np.stack([example.image for example in training]),
        labels=np.stack([example.label for example in training]),
        classes=len(data.labels),
    )
    checkpoint = directory / "checkpoint.pt"
    result = TRAINERS[trainer].train(
        part,
        recipe,
        seed=seed,
        checkpoint=checkpoint,
        on_step=None if on_progress is None else lambda step, loss: on_progress(voter, step, loss),
    )
    dice = _dice(result.model, held_out, classes=len(data.labels))
    report = dataclasses.replace(
        blank,
        weights=save_weights(directory / "weights.pt", result.model),
        dice=dice,
        mean_dice=_number(mean_present(math.nan if d is None else d for d in dice)),
        steps=result.steps,
        loss=result.loss,
        seconds=round(result.seconds, 3),
    )
    _record(directory, report, identity, data=data, recipe=recipe, trainer=trainer, event=result.event)
    checkpoint.unlink(missing_ok=True)
    return report, problems


@dataclass(frozen=True, slots=True)
class _Example:
    image: np.ndarray
    label: np.ndarray
    hashes: tuple[str, str]


def _load(
    names: tuple[str, ...], cases: Mapping[str, Case], known: Mapping[str, Problem], data: DataConfig
) -> tuple[dict[str, _Example], list[Problem]]:
    """Read one voter's cases; whatever is wrong with one is that one's Problem."""
    usable: dict[str, _Example] = {}
    problems: list[Problem] = []
    for name in names:
        case = cases.get(name)
        if case is None or case.label is None:
            problems.append(known.get(name, Problem(name, "no longer in the dataset")))
            continue
        try:
            volume = load_volume(case.image, data)
            label = load_label(case.label, data, volume=volume)
            hashes = (sha256_file(case.image), sha256_file(case.label))
        except InvalidInput as error:
            problems.append(Problem(name, str(error)))
            continue
        except OSError as error:
            problems.append(Problem(name, f"cannot be read ({error.strerror})"))
            continue
        usable[name] = _Example(volume.image, label, hashes)
    return usable, problems


def _identity(
    training: list[_Example],
    held_out: list[_Example],
    *,
    data: DataConfig,
    recipe: TrainingConfig,
    trainer: str,
    seed: int,
) -> str:
    """Names everything a voter's weights depend on, its own files among it and no other voter's."""
    return digest(
        "voter-training",
        {
            "data": repr(data),
            "recipe": repr(recipe),
            "trainer": trainer,
            "seed": str(seed),
            "training": [list(example.hashes) for example in training],
            "held_out": [list(example.hashes) for example in held_out],
        },
    )


def _dice(model: torch.nn.Module, held_out: list[_Example], *, classes: int) -> tuple[float | None, ...]:
    if not held_out:
        return ()
    rows = [
        dice_per_class(predict(model, example.image).argmax(axis=0).astype(np.uint8), example.label, classes)
        for example in held_out
    ]
    return tuple(_number(mean_present(column)) for column in zip(*rows, strict=True))


def _number(value: float) -> float | None:
    return None if math.isnan(value) else round(value, 5)


def _record(
    directory: Path,
    report: VoterReport,
    identity: str,
    *,
    data: DataConfig,
    recipe: TrainingConfig,
    trainer: str,
    event: str | None,
) -> None:
    record = {
        "schema": TRAIN_SCHEMA,
        "identity": identity,
        "trainer": trainer,
        "event": event,
        "report": dataclasses.asdict(report),
        "data": dataclasses.asdict(data),
        "recipe": dataclasses.asdict(recipe),
        "versions": {"monai": monai.__version__, "torch": torch.__version__},
    }
    write_atomically(directory / "train.json", (json.dumps(record, indent=1) + "\n").encode(), mode=0o600)


def _finished(directory: Path, identity: str) -> VoterReport | None:
    """The report of an earlier run with the same identity whose weights are still those it recorded."""
    try:
        record: dict[str, Any] = json.loads((directory / "train.json").read_text(encoding="utf-8"))
        report = VoterReport(**{**record["report"], "dice": tuple(record["report"]["dice"]), "reused": True})
        if record["identity"] != identity or record["schema"] != TRAIN_SCHEMA:
            return None
        if report.weights is not None and sha256_file(directory / "weights.pt") != report.weights:
            return None
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return report
