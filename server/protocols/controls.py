"""Controls: the student again, by the identical recipe, without what the teachers say about its volumes.

Same seed, volumes, network, steps and augmentation as the student; only what it is told of its volumes differs:

* ``zero_code``: every answer is the zero code, with its release's voters and noise: what the decoder says when nobody
  answers. Per volume that is by every codec's promise its public mean shape; of a joint query the public start's shape.
* ``shuffled_codes``: the codes, dealt to the wrong volumes by a fixed derangement: the same codes, noise and variety,
  without the link from volume to code. Needs two labelled volumes; with one it is left out.
* ``public_only``: self-training on public data, which is what a consortium gets without asking anybody, and usually the
  hardest control to beat. Per volume: the student of ``zero_code``, which has seen public volumes and the public mean
  shape and nothing else, labels the volumes itself (its soft predictions); a fresh student learns those. Of a joint
  query: the student of ``zero_code`` itself; in a study with paired public cases, the start trained on from them alone,
  which student and other controls stay near alike. Of an appearance query with a public start: what that start teaches
  itself, as in a joint query; without one, as per volume.

Whatever the student scores above all three is what the teachers' answers gave it; whatever they score too, public data
and the recipe give anyway. All is made of public data and of noisy answers that the ledger stores and has charged, so
this is post-processing and costs no privacy.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

import numpy as np
from jaxtyping import Float

from common.errors import InvalidInput
from server.protocols.query_protocol import Lesson
from server.protocols.stored_labels import as_stored

STUDENT = "student"
CONTROLS = ("zero_code", "shuffled_codes", "public_only")

L = TypeVar("L")

DERANGEMENT_SEED = 0
"""Fixes who gets whose answer in ``shuffled_codes``; it protects nothing."""


def derangement(count: int, *, seed: int) -> tuple[int, ...]:
    """A permutation of 0 … count - 1 that leaves nothing in its place: one random cycle through all of them.

    Source: Sattolo 1986. The same arguments give the same permutation. Fewer than two have none and are refused.
    """
    if count < 2:
        raise InvalidInput(
            "answers to deal to the wrong volumes", value=count, limit="at least 2", remedy="plan two queries or more"
        )
    draws = np.random.default_rng(seed)
    order = list(range(count))
    for last in range(count - 1, 0, -1):
        other = int(draws.integers(last))  # never ``last`` itself: so one cycle, and no fixed point
        order[last], order[other] = order[other], order[last]
    return tuple(order)


def dealt(labels: Mapping[str, L]) -> dict[str, L]:
    """The labels of ``shuffled_codes``: every volume has another's. Empty where there is no other to deal from."""
    volumes = list(labels)
    if len(volumes) < 2:
        return {}
    order = derangement(len(volumes), seed=DERANGEMENT_SEED)
    return {volume: labels[volumes[other]] for volume, other in zip(volumes, order, strict=True)}


def predicted(lesson: Lesson) -> dict[str, Float[np.ndarray, "c x y z"]]:
    """What the student of ``zero_code`` says of each of the student's volumes, rounded as labels are."""
    from common.models.fit import predict

    model = lesson.trained("zero_code")
    return {volume: as_stored(predict(model, lesson.image(volume))) for volume in lesson.labels}
