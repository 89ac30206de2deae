"""Trains the student and its controls as the study's protocol defines them, and stores their weights.

``pipeline.finish`` and `consilium student train` call it. A finished training for the same inputs is not repeated; an
interrupted one continues from its checkpoint. A training without any label is refused.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch

from common.config import Study
from common.errors import InvalidInput
from common.events import EventLog
from common.models.fit import OnStep
from common.models.unet import load_weights, network_for, save_weights
from common.objects import write_atomically
from server.postprocess.labels import Released
from server.postprocess.student_curves import PROGRESS_STEPS, StudentCurves
from server.protocols.controls import CONTROLS, control_training, controls_of
from server.protocols.query_protocol import FitFiles, NetworkTraining, StudentData, protocol_of


def fit_student(released: Released, *, events: EventLog) -> None:
    """Train the student on the released answers, and store its weights in ``student/weights.pt``.

    Args:
        released: Result of :func:`~server.postprocess.labels.read_released`.
        events: The event log.

    Raises:
        InvalidInput: If there is no label.
    """
    student_data, files = student_data_of(released), FitFiles.at(released.student_dir)
    training = protocol_of(released.public.study).finish(student_data)
    curves = StudentCurves(released, training, files=files, events=events)
    if (fitted := fit_once(training, files=files, on_step=curves.after)) is not None:
        weights, seconds = fitted
        events.emit("student-trained", weights=weights, seconds=seconds)


def fit_controls(released: Released, *, events: EventLog) -> None:
    """Train every control, and store its weights in ``student/controls/<name>.pt``.

    Args:
        released: Result of :func:`~server.postprocess.labels.read_released`.
        events: The event log.

    Raises:
        InvalidInput: If there is no label.
    """
    study = released.public.study
    student_data = replace(
        student_data_of(released), trained=lambda name: load_control(study, released.student_dir, name)
    )
    for index, name in enumerate(controls_of(study)):  # zero_code comes before public_only, which needs its predictions
        training, files = control_training(student_data, name), _control_files(released.student_dir, name)
        if training is None:
            files.discard()  # delete the weights of an earlier student's control
            continue
        on_step = _log_progress(events, before=index * study.student.steps, steps=study.student.steps)
        if (fitted := fit_once(training, files=files, on_step=on_step)) is not None:
            weights, seconds = fitted
            events.emit("control-trained", name=name, weights=weights, seconds=seconds)


def student_data_of(released: Released) -> StudentData:
    """Return the data on which the student and its controls are trained.

    Args:
        released: Result of :func:`~server.postprocess.labels.read_released`.

    Returns:
        The public data, the answers, and the labels that were not rejected.

    Raises:
        InvalidInput: If there is no label.
    """
    if not released.labels:
        raise InvalidInput(
            "number of pseudo-labels to train on",
            value=0,
            limit="at least one",
            remedy="run `consilium study run` first, or accept a rejected label on the dashboard's page Labels",
        )
    return StudentData(released.public, released.answers, released.labels)


def fit_once(training: NetworkTraining, *, files: FitFiles, on_step: OnStep) -> tuple[str, float] | None:
    """Train a network and store its weights, unless weights for the same inputs are stored already.

    Args:
        training: The network and its inputs.
        files: Files of the weights, of the inputs' digest and of the checkpoint.
        on_step: Called after each training step with the step's number and loss.

    Returns:
        SHA-256 of the weights and the seconds that the training took; None if nothing had to be done.
    """
    if files.weights.exists() and files.inputs.exists() and files.inputs.read_text(encoding="utf-8") == training.inputs:
        return None
    files.weights.parent.mkdir(parents=True, exist_ok=True)
    started = time.monotonic()
    name = save_weights(files.weights, training.train(files, on_step))
    write_atomically(files.inputs, training.inputs.encode())
    return name, round(time.monotonic() - started, 3)


def load_student(study: Study, student_dir: Path) -> torch.nn.Module:
    """Return the trained student in evaluation mode.

    Args:
        study: The study.
        student_dir: The study's folder of networks.

    Returns:
        The network.

    Raises:
        InvalidInput: If the student is not trained yet.
    """
    path = FitFiles.at(student_dir).weights
    if not path.exists():
        raise InvalidInput("there is no student yet", remedy="run `consilium student train`")
    return _network(study, path)


def load_control(study: Study, student_dir: Path, name: str) -> torch.nn.Module:
    """Return a trained control in evaluation mode.

    Args:
        study: The study.
        student_dir: The study's folder of networks.
        name: Name of the control.

    Returns:
        The network.

    Raises:
        InvalidInput: If the control is not trained yet.
    """
    if not control_trained(student_dir, name):
        raise InvalidInput("this control is not trained yet", value=name, remedy="run `consilium study resume`")
    return _network(study, _control_files(student_dir, name).weights)


def control_trained(student_dir: Path, name: str) -> bool:
    """Return whether a control's weights are stored.

    Args:
        student_dir: The study's folder of networks.
        name: Name of the control.

    Returns:
        True if they are.
    """
    return _control_files(student_dir, name).weights.exists()


def _control_files(student_dir: Path, name: str) -> FitFiles:
    """Return the files of a control's training."""
    return FitFiles.at(student_dir / "controls", name)


def _network(study: Study, weights: Path) -> torch.nn.Module:
    """Return a network of the study's student recipe with these weights, in evaluation mode."""
    data = study.data
    model = network_for(study.student, data)
    load_weights(weights, model)
    model.eval()
    return model


def _log_progress(events: EventLog, *, before: int, steps: int) -> Callable[[int, float], None]:
    """Return a callback that logs a control's steps, counted from the start of the first control's training."""

    def on_step(step: int, _loss: float) -> None:
        if step % PROGRESS_STEPS == 0 or step == steps:
            events.emit("stage-progress", stage="controls", done=before + step, total=len(CONTROLS) * steps)

    return on_step
