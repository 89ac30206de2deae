"""Trains the student: a U-Net on public volumes and their pseudo-labels.

The protocols call it. It uses only public volumes, released answers and public settings, so training the student is
post-processing. Pseudo-labels that are not an array of at least two classes are refused.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Float

from common.config import Study, TrainingConfig
from common.data.volume_cache import StoredVolumes, VolumeCache, together
from common.errors import InvalidInput
from common.models.fit import FitResult, OnStep, fit
from common.models.unet import network_for, network_of, weights_from_bytes
from server.protocols.query_protocol import FitFiles, StudentData
from server.public.material import PublicMaterial

CACHE_BYTES = 1 << 29
"""Bytes of volumes and labels kept in memory while a student is trained; the others are read from files."""


def learn(
    student_data: StudentData,
    labels: Mapping[str, Float[np.ndarray, "k x y z"]],
    files: FitFiles | None,
    on_step: OnStep,
    *,
    start: torch.nn.Module | None = None,
) -> torch.nn.Module:
    """Train a network on the study's volumes with these labels, by the study's student recipe.

    Args:
        student_data: Public data and released labels.
        labels: Float32 probabilities [k, x, y, z] by volume hash.
        files: Files of the training, for its checkpoint and for volumes that do not fit into memory; None keeps all
            volumes in memory.
        on_step: Called with step and loss.
        start: A network of the same recipe, from which the training begins; by default the study's given network, or
            random weights if there is none.

    Returns:
        The trained network.
    """
    start = given_model(student_data.public) if start is None else start
    with ExitStack() as stack:
        keep: Callable[[np.ndarray], np.ndarray | Path] = np.asarray
        if files is not None:
            cache = VolumeCache(files.weights.with_suffix(".cache"), budget_bytes=CACHE_BYTES)
            keep = stack.enter_context(cache).keep
        model, _ = train_student(
            together([keep(student_data.image(name)) for name in labels]),
            together([keep(label) for label in labels.values()]),
            student_data.public.study.student,
            seed=student_data.seed,
            start=start,
            checkpoint=None if files is None else files.checkpoint,
            on_step=on_step,
        )
    return model


def train_student(
    images: Float[np.ndarray, "n c x y z"] | StoredVolumes,
    pseudo_labels: Float[np.ndarray, "n k x y z"] | StoredVolumes,
    recipe: TrainingConfig,
    *,
    seed: int,
    start: torch.nn.Module | None = None,
    checkpoint: Path | None = None,
    on_step: OnStep | None = None,
) -> tuple[torch.nn.Module, FitResult]:
    """Train a U-Net on soft pseudo-labels.

    The same arguments give the same weights on the same machine with the same number of threads.

    Args:
        images: Public volumes, float [n, c, x, y, z].
        pseudo_labels: Float32 probabilities [n, k, x, y, z], background first.
        recipe: The training recipe.
        seed: Seed of initial weights and batches.
        start: A network of the same recipe, whose weights the training begins from; by default they are random.
        checkpoint: File to resume from; deleted at the end.
        on_step: Called with step and loss.

    Returns:
        The network and the result of its training.

    Raises:
        InvalidInput: If the pseudo-labels have another shape or fewer than two classes.
    """
    if pseudo_labels.ndim != 5 or pseudo_labels.shape[1] < 2:
        raise InvalidInput("pseudo-labels", value=pseudo_labels.shape, limit="shape [n, k, x, y, z] with k ≥ 2 classes")
    model = network_of(recipe, channels=images.shape[1], classes=pseudo_labels.shape[1], seed=seed)
    if start is not None:
        model.load_state_dict(start.state_dict())
    result = fit(model, images, pseudo_labels, recipe, seed=seed, checkpoint=checkpoint, on_step=on_step)
    if checkpoint is not None:
        checkpoint.unlink(missing_ok=True)
    return model, result


def read_start(weights: bytes, study: Study) -> torch.nn.Module:
    """Return the network of a public start.

    Args:
        weights: The stored weights of the public start.
        study: The study, whose student recipe defines the network's architecture.

    Returns:
        The network with these weights.
    """
    data = study.data
    model = network_for(study.student, data)
    weights_from_bytes(weights, model)
    return model


def given_model(public: PublicMaterial) -> torch.nn.Module | None:
    """Return the network that the consortium gave the study to begin from.

    Args:
        public: The study's public material (terms, codec, volumes).

    Returns:
        The network in evaluation mode; None if none was given.
    """
    weights = public.given_start()
    return None if weights is None else read_start(weights, public.study).eval()
