"""Defines the controls: students trained by the identical recipe, but without the teachers' answers.

The protocols call this module. A control has the same seed, volumes, network, steps and augmentation as the student.
Only its labels differ:

* ``zero_code``: every answer is replaced by the zero code, decoded for the same voters and noise. The labels then
  contain nothing from hospitals: in the per-volume protocol they are the public mean shape, in a joint query the
  decoded codes of the public start.
* ``shuffled_codes``: each volume gets another volume's answer, by a fixed derangement. The set of codes and the noise
  stay the same; only the link from volume to code is broken. With only one labelled volume, this control equals
  ``zero_code`` in a joint query, and does not exist in the other protocols.
* ``public_only``: self-training on public data, which a consortium can do without any hospital. This is usually the
  control with the highest Dice. How it is trained depends on the protocol:

  * per volume: a fresh student learns the soft labels that the student of ``zero_code`` predicts;
  * joint query: the same network as ``zero_code``; with public pairs (public images with label maps), the public start
    trained on those pairs alone (the weights of the student and the other controls are kept near this network);
  * appearance query: with a public start, the start trained on its own codes; without one, as per volume.

A study that begins from a given network (``[start]``) has a fourth control:

* ``public_network``: the given network, unchanged. The training of the student and of the other controls starts from
  it.

The gain of the student over the best control is due to the teachers' answers; the rest of its score is due to public
data and the recipe. Controls use only public data and stored noisy answers, so they are post-processing and cost no
privacy.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, TypeVar

import numpy as np
from jaxtyping import Float

from common.canonical import digest
from common.config import Study
from common.errors import InvalidInput
from server.protocols.query_protocol import NetworkTraining, StudentData, protocol_of
from server.protocols.stored_labels import as_stored

if TYPE_CHECKING:
    import torch

STUDENT = "student"
CONTROLS = ("zero_code", "shuffled_codes", "public_only")
PUBLIC_NETWORK = "public_network"
"""Name of the additional control of studies that were given a network to begin from."""

L = TypeVar("L")

DERANGEMENT_SEED = 0
"""Seed of the derangement in ``shuffled_codes``. It is public and protects nothing."""


def controls_of(study: Study) -> tuple[str, ...]:
    """Return the names of a study's controls.

    Args:
        study: The study.

    Returns:
        The names, in the order in which the controls are trained.
    """
    return (*CONTROLS, *((PUBLIC_NETWORK,) if study.start.weights else ()))


def control_training(student_data: StudentData, name: str) -> NetworkTraining | None:
    """Return the training of a control, as the study's protocol defines it.

    The training of ``public_network`` consists of no step: it returns the network that the study was given.

    Args:
        student_data: Public data and released labels to learn from.
        name: Name of the control.

    Returns:
        The training; None if the protocol has no such control for this student_data.

    Raises:
        InvalidInput: If there is no answer, no label, or no control of this name.
    """
    study = student_data.public.study
    if name != PUBLIC_NETWORK:
        return protocol_of(study).control(student_data, name)

    def as_given(_files: object, _on_step: object) -> torch.nn.Module:
        from server.protocols.student_fit import given_model

        model = given_model(student_data.public)
        assert model is not None  # studies without a given network have no such control
        return model

    return NetworkTraining(digest("given-network", [study.id, study.start.weights]), as_given, steps=0)


def derangement(count: int, *, seed: int) -> tuple[int, ...]:
    """Return a permutation of 0 … count - 1 without a fixed point: one random cycle through all of them.

    Args:
        count: Number of elements, at least 2.
        seed: The same seed gives the same permutation.

    Returns:
        The permutation.

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
            "answers to shuffle between volumes", value=count, limit="at least 2", remedy="plan two queries or more"
        )
    draws = np.random.default_rng(seed)
    order = list(range(count))
    for last in range(count - 1, 0, -1):
        other = int(draws.integers(last))  # below ``last``, hence one cycle and no fixed point
        order[last], order[other] = order[other], order[last]
    return tuple(order)


def shuffled(labels: Mapping[str, L]) -> dict[str, L]:
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


def predicted(student_data: StudentData) -> dict[str, Float[np.ndarray, "k x y z"]]:
    """Return the soft predictions of the ``zero_code`` student for the student's volumes.

    Args:
        student_data: Gives the volumes and the trained ``zero_code`` network.

    Returns:
        Probabilities [k, x, y, z] of k classes by volume hash, rounded as stored labels are.

    Raises:
        InvalidInput: If the ``zero_code`` control is not trained yet.
    """
    from common.models.fit import predict

    model = student_data.trained("zero_code")
    return {volume: as_stored(predict(model, student_data.image(volume))) for volume in student_data.labels}
