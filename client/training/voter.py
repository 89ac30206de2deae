"""Trains one voter on its own patients and stores the teacher with its record; interrupted training resumes.

``client.training.side_by_side`` calls it in a process of its own. Rules:

1. A case that cannot be read leaves its slot empty, is reported and counted, and does not stop the training. Two faults
   stop it before the first step and keep an earlier teacher: too little memory, and a folder of several cases that is
   gone or closed. Other voters' trainings take memory, and their patients must not decide which cases are left out.
2. A voter without any usable case has no weights and contributes the zero code.
3. A private training of such a voter runs all its steps and makes weights from noise, so the existence of weights
   reveals nothing about the patients.
4. A finished voter is kept while its own files, the recipe and the study's data settings stay the same.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import monai
import numpy as np
import torch

from client.records.voter_files import TRAIN_SCHEMA
from client.training.contract import TrainedVoter, Trainer, VoterData
from client.training.private.settings import STRATEGIES
from client.training.private.trainer import private_trainer
from client.training.standard import StandardTrainer
from client.training.task import VoterOutcome, VoterReport, VoterTask
from common.canonical import digest, sha256_file
from common.config import TrainingConfig
from common.data.access import check_still_there, why_unread
from common.data.dataset import Problem
from common.data.dicom_structures import is_structure_set
from common.data.memory import assuming_free, free_memory_bytes
from common.data.patients import content_hash
from common.data.volume import load_example
from common.data.volume_cache import DEFAULT_BUDGET_BYTES, VolumeCache, read, together
from common.errors import InvalidInput
from common.metrics import Structures, dice_per_class, mean_present
from common.models.fit import NEAR, OnStep, average_with_start, predict
from common.models.unet import input_weights, load_weights, network_for, save_weights, tensors_to_bytes
from common.objects import finite, write_atomically, write_json
from common.privacy.training import Neighbours, TrainingEvent, guarantee_of
from common.reading import lenient_json
from common.system_errors import lacks_memory

MakeTrainer = Callable[[VoterTask], Trainer]

TRAINERS: dict[str, MakeTrainer] = {
    "standard": lambda task: StandardTrainer(start=task.start),
}
"""Every trainer by name, beside the private strategies (:data:`~client.training.private.settings.STRATEGIES`)."""


def trainer_of(name: str) -> MakeTrainer:
    """Return the factory of a trainer.

    Args:
        name: Name of the trainer.

    Returns:
        A function from a task to its trainer.

    Raises:
        InvalidInput: If no trainer has this name.
    """
    known = {*TRAINERS, *STRATEGIES}
    if name not in known:
        raise InvalidInput("trainer", value=name, limit=", ".join(sorted(known)))
    return TRAINERS.get(name, private_trainer)


def train_voter(task: VoterTask, *, on_step: OnStep, cache_bytes: int = DEFAULT_BUDGET_BYTES) -> VoterOutcome:
    """Train one voter from its own task, resume its training, or keep the finished teacher; then store the record.

    A scan that cannot be used is reported as a problem. If the data make a standard training impossible (the loss
    diverges), the voter gets no weights and contributes the zero code, so taking part reveals nothing about the data.
    In a private training non-finite gradients count as zero and a patient without a scan is an empty slot.

    Args:
        task: The voter's task.
        on_step: Called after each step with its number and loss.
        cache_bytes: Volumes beyond this size are kept in files during the training; the weights do not depend on it.

    Returns:
        The voter's report and the problems of its scans.

    Raises:
        InvalidInput: If a private training's plan is refused; raised before a step is spent.
    """
    with VolumeCache(task.directory / "cache", budget_bytes=cache_bytes) as cache:
        return _train_voter(task, cache, on_step=on_step)


def _train_voter(task: VoterTask, cache: VolumeCache, *, on_step: OnStep) -> VoterOutcome:
    usable, problems = load_scans(task, cache)
    slots = [tuple(usable[scan] for scan in scans if scan in usable) for _, scans in task.patients]
    training, held_out = slots[: task.training_slots], slots[task.training_slots :]  # independent of the files
    identity = _identity(task, list(chain(*training)), list(chain(*held_out)))
    done = _finished(task.directory, identity)
    if done is not None and (done.weights is not None or task.private is None):
        on_step(task.steps, math.nan)
        return VoterOutcome(done, problems)
    filled = sum(map(bool, training)), sum(map(bool, held_out))
    report = VoterReport(task.voter, trained_on=filled[0], held_out=filled[1], empty_slots=len(slots) - sum(filled))
    checkpoint = task.directory / "checkpoint.pt"
    result: TrainedVoter | None = None
    if any(training) or task.private is not None:
        try:
            result = trainer_of(task.trainer)(task).train(
                _part(training, task), task.recipe, seed=task.seed, checkpoint=checkpoint, on_step=on_step
            )
        except InvalidInput as error:
            if task.private is not None:
                raise
            report = dataclasses.replace(report, problem=str(error))
    if result is not None and task.paired and task.start is not None and task.private is None:
        _keep_near(task.start, result.model, task, list(chain(*held_out)))
    if result is not None and task.absent:
        _forget(result, task.absent)
    if result is None:
        (task.directory / "weights.pt").unlink(missing_ok=True)
    else:
        report = _saved(report, result, task, list(chain(*held_out)))
    _record(task, report, identity, result=result)
    checkpoint.unlink(missing_ok=True)
    return VoterOutcome(report, problems)


def _forget(result: TrainedVoter, absent: tuple[int, ...]) -> None:
    """Set the network's weights on channels that the site does not have to zero.

    Public volumes have these channels, but the network has never seen them. Which channels are absent is the site's own
    statement, not a property of a patient's files.
    """
    spread = result.deviations or {}
    with torch.no_grad():
        for name in input_weights(result.model):
            for weights in (result.model.get_parameter(name), *([spread[name]] if name in spread else ())):
                weights[:, list(absent)] = 0


def _saved(report: VoterReport, result: TrainedVoter, task: VoterTask, held_out: list[LabelledScan]) -> VoterReport:
    """Save the weights, score them on the voter's held-out patients, and return the completed report."""
    dice = _dice(result.model, held_out, recipe=task.recipe, structures=task.data.members)
    return dataclasses.replace(
        report,
        weights=save_weights(task.directory / "weights.pt", result.model, mode=0o600),
        dice=dice,
        mean_dice=finite(mean_present(math.nan if d is None else d for d in dice)),
        steps=result.steps,
        lost_steps=0 if result.event is None else result.event.steps - result.steps,
        loss=result.loss,
        seconds=round(result.seconds, 3),
        guarantees=_guarantees(task, result.event),
    )


def _keep_near(start: Path, model: torch.nn.Module, task: VoterTask, held_out: list[LabelledScan]) -> None:
    """Move a teacher's weights near its start, a network trained on labelled public cases.

    If the start itself scores better on the held-out patients, it replaces the teacher.

    The choice uses only this voter's patients, and the voter's code is clipped like any other, so one patient still
    changes one voter's vector by at most 2C.
    """
    begun = network_for(task.recipe, task.data)
    load_weights(start, begun)
    begun.to(next(model.parameters()).device)
    average_with_start(begun.state_dict(), model)
    known = [_dice(each, held_out, recipe=task.recipe, structures=task.data.members) for each in (begun, model)]
    old, new = (mean_present(math.nan if dice is None else dice for dice in each) for each in known)
    if old > new:  # False if nothing was held out, since both are nan
        model.load_state_dict(begun.state_dict())


@dataclass(frozen=True, slots=True)
class LabelledScan:
    """One scan on the study's grid.

    Attributes:
        image: The image, or the file that holds it in the cache.
        label: The label map, or its file in the cache.
        hashes: Hashes of the files that were read.
    """

    image: np.ndarray | Path
    label: np.ndarray | Path
    hashes: tuple[str, ...]


def load_scans(task: VoterTask, cache: VolumeCache) -> tuple[dict[str, LabelledScan], tuple[Problem, ...]]:
    """Read a task's scans. A scan that cannot be read becomes a problem; only faults under Raises stop the training.

    Args:
        task: The voter's task.
        cache: Where volumes beyond the memory limit are kept.

    Returns:
        The usable scans by id, and the problems.

    Raises:
        InvalidInput: If a folder of several cases is gone or closed, so that the teacher would lack all of them, or if
            there is too little memory to read a scan.
    """
    usable: dict[str, LabelledScan] = {}
    problems: list[Problem] = []
    cases = {case.id: case for case in task.cases}
    known = {problem.case: problem for problem in task.known}
    free = free_memory_bytes()  # scans kept from one patient must not decide which scans of another are too large
    for scan in (scan for _, scans in task.patients for scan in scans):
        case = cases.get(scan)
        if case is None or case.label is None:
            problems.append(
                known.get(
                    scan,
                    Problem(
                        scan,
                        "no longer in the dataset; to fix: put it back, or withdraw the patient with "
                        "`consilium site withdraw-patient`",
                    ),
                )
            )
            continue
        try:
            with assuming_free(free):
                example = load_example(case, task.data)
            hashes = [content_hash(path) for path in (*case.images, case.label)]
            if case.channel_order or case.label_map:
                hashes.append(repr((case.channel_order, case.label_map)))
            if case.structures and is_structure_set(case.label):
                hashes.append(repr(case.structures))
        except Exception as error:  # any other error, even from a defect in our code, costs this scan only
            if lacks_memory(error):
                raise InvalidInput(
                    "too little memory to read a scan",
                    remedy="end other programs (for `site train`, also give --jobs 1), then run the command again",
                ) from error
            problems.append(Problem(scan, why_unread(error)))
            continue
        usable[scan] = LabelledScan(cache.keep(example.volume.image), cache.keep(example.label), tuple(hashes))
    if problems:
        check_still_there((*case.images, case.label) for case in task.cases if case.label is not None)
    return usable, tuple(problems)


def _part(slots: Sequence[tuple[LabelledScan, ...]], task: VoterTask) -> VoterData:
    """Join the scans of all patients to arrays, and number each scan's patient by the patient's position in ``slots``.

    Without patients, the first dimension of the arrays is 0.
    """
    examples = list(chain(*slots))
    grid, channels = task.data.grid, len(task.data.channels)
    return VoterData(
        images=together([one.image for one in examples]) if examples else np.zeros((0, channels, *grid), np.float32),
        labels=together([one.label for one in examples]) if examples else np.zeros((0, *grid), np.uint8),
        classes=len(task.data.labels),
        places=tuple(place for place, scans in enumerate(slots) for _ in scans),
    )


def _identity(task: VoterTask, training: list[LabelledScan], held_out: list[LabelledScan]) -> str:
    """Return a hash of everything a voter's weights depend on, including its own files.

    A private training is identified without its files: a changed scan must not start it again and spend again.
    """
    if task.private is not None:
        return digest("voter-training", {"data": repr(task.data), "private": private_trainer(task).identity})
    begun = {} if task.start is None else {"start": sha256_file(task.start)}
    if task.paired:
        begun["near"] = str(NEAR)
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
    model: torch.nn.Module, held_out: list[LabelledScan], *, recipe: TrainingConfig, structures: Structures
) -> tuple[float | None, ...]:
    if not held_out:
        return ()
    rows = [
        dice_per_class(
            predict(model, read(example.image), patch=recipe.patch, amp=recipe.amp).argmax(axis=0).astype(np.uint8),
            read(example.label),
            structures,
        )
        for example in held_out
    ]
    return tuple(finite([mean_present(column) for column in zip(*rows, strict=True)]))


def _guarantees(task: VoterTask, event: TrainingEvent | None) -> tuple[str, ...]:
    """Describe what the event costs a patient, under each relation."""
    if event is None or task.private is None:
        return ()
    return tuple(str(guarantee_of(event, delta=task.private.delta, neighbours=relation)) for relation in Neighbours)


def _record(task: VoterTask, report: VoterReport, identity: str, *, result: TrainedVoter | None) -> None:
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
    write_json(task.directory / "train.json", record, mode=0o600)


def is_finished(task: VoterTask) -> bool:
    """Tell whether a private task's folder contains a finished teacher of the same training and data settings.

    Args:
        task: The task of a private training.

    Returns:
        True if a further training of the task would keep the teacher.
    """
    return _finished(task.directory, _identity(task, [], [])) is not None


def _finished(directory: Path, identity: str) -> VoterReport | None:
    """Return the report of an earlier run with the same identity.

    Returns None if there is no such run, or if the weights on disk are not those that it recorded.
    """
    try:
        record: dict[str, Any] = lenient_json((directory / "train.json").read_text(encoding="utf-8"))
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
