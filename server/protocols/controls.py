"""Defines the controls: students trained by the identical recipe, but without the teachers' answers.

The protocols call it. A control has the same seed, volumes, network, steps and augmentation as the student. Only its
labels differ:

* ``zero_code``: every answer is replaced by the zero code, with its release's voters and noise. This is what the
decoder gives without any answer: per volume the public mean shape, in a joint query the public start's shape.
* ``shuffled_codes``: each volume gets another volume's answer, by a fixed derangement. Codes, noise and variety stay
the same; the link from volume to code is broken. It is left out if there is only one labelled volume.
* ``public_only``: self-training on public data, which a consortium can do without asking anyone. It is usually the
hardest control to beat. Per volume, the student of ``zero_code`` predicts soft labels for the volumes, and a fresh
student learns those. In a joint query, it is the student of ``zero_code`` itself; with paired public cases it is the
public start trained on those alone, which student and other controls are kept near. In an appearance query with a
public start, it is the start trained on its own codes, as in a joint query; without a start, it is made as per volume.

A study that begins from a given network (``[start]``) has a fourth control:

* ``public_network``: the given network as it is. Student and other controls are trained on from it.

The score by which a student exceeds all of them comes from the teachers' answers; the rest comes from public data and
the recipe. Controls use only public data and stored noisy answers, so they are post-processing and cost no privacy.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, TypeVar

import numpy as np
from jaxtyping import Float

from common.canonical import digest
from common.config import Study
from common.errors import InvalidInput
from server.protocols.query_protocol import Lesson, NetworkTraining, protocol_of
from server.protocols.stored_labels import as_stored

if TYPE_CHECKING:
    import torch

STUDENT = "student"
CONTROLS = ("zero_code", "shuffled_codes", "public_only")
PUBLIC_NETWORK = "public_network"
"""The control of studies that were given a network to begin from."""

L = TypeVar("L")

DERANGEMENT_SEED = 0
"""Seed of the derangement in ``shuffled_codes``. It is public and protects nothing."""


def controls_of(study: Study) -> tuple[str, ...]:
    """The study's controls, in the order in which they are trained."""
    return (*CONTROLS, *((PUBLIC_NETWORK,) if study.start.weights else ()))


def control_training(lesson: Lesson, name: str) -> NetworkTraining | None:
    """How a control is made: as the study's protocol has it, or without a training step for the given network.

    None where the protocol has no such control of this lesson.
    """
    study = lesson.public.study
    if name != PUBLIC_NETWORK:
        return protocol_of(study).finish(lesson, name)

    def as_given(_files: object, _on_step: object) -> torch.nn.Module:
        from server.protocols.public_start import given_model

        model = given_model(lesson.public)
        assert model is not None  # studies without a given network have no such control
        return model

    return NetworkTraining(digest("given-network", [study.id, study.start.weights]), as_given, steps=0)


def derangement(count: int, *, seed: int) -> tuple[int, ...]:
    """Return a permutation of 0 … count - 1 without a fixed point: one random cycle through all of them.

    Args:
        count: Number of elements, at least 2.
        seed: The same seed gives the same permutation.

    Raises:
        InvalidInput: If ``count`` is below 2, for which no such permutation exists.

    Source: Sattolo 1986.

    >>> sorted(derangement(4, seed=0))
    [0, 1, 2, 3]
    >>> any(place == value for place, value in enumerate(derangement(4, seed=0)))
    False
    """
    if count < 2:
        raise InvalidInput(
            "answers to deal to the wrong volumes", value=count, limit="at least 2", remedy="plan two queries or more"
        )
    draws = np.random.default_rng(seed)
    order = list(range(count))
    for last in range(count - 1, 0, -1):
        other = int(draws.integers(last))  # below ``last``, hence one cycle and no fixed point
        order[last], order[other] = order[other], order[last]
    return tuple(order)


def dealt(labels: Mapping[str, L]) -> dict[str, L]:
    """Return the labels of ``shuffled_codes``: every volume gets another volume's label.

    Args:
        labels: Labels by volume.

    Returns:
        Labels by the same volumes; empty if there are fewer than two.
    """
    volumes = list(labels)
    if len(volumes) < 2:
        return {}
    order = derangement(len(volumes), seed=DERANGEMENT_SEED)
    return {volume: labels[volumes[other]] for volume, other in zip(volumes, order, strict=True)}


def predicted(lesson: Lesson) -> dict[str, Float[np.ndarray, "c x y z"]]:
    """Return the soft predictions of the ``zero_code`` student for the student's volumes, rounded as stored labels
    are.
    """
    from common.models.fit import predict

    model = lesson.trained("zero_code")
    return {volume: as_stored(predict(model, lesson.image(volume))) for volume in lesson.labels}
