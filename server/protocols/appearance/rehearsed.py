"""Trains the public start (if any) and a student without answers, for a rehearsal of an appearance query.

:mod:`server.protocols.rehearsal` calls it. The student learns from labels computed with the prior: the appearance of
structures that is assumed before any hospital answers.
"""

from __future__ import annotations

import numpy as np
import torch

from common.codecs.codec import LinearCodec
from common.config import TrainingConfig
from common.models.fit import predict
from server.protocols.appearance.labels import labelled, placed
from server.protocols.appearance.look import prior_look
from server.protocols.public_start import public_start
from server.protocols.query_protocol import STUDENT_SEED
from server.protocols.rehearsal import PublicCases
from server.protocols.student_fit import train_student


def begin(
    cases: PublicCases,
    codec: LinearCodec,
    recipe: TrainingConfig,
    pairs: np.ndarray | None,
    given: torch.nn.Module | None = None,
) -> tuple[torch.nn.Module | None, torch.nn.Module]:
    """Train the public start and the control of an appearance query; see :class:`~server.protocols.rehearsal.Begin`.

    Args:
        cases: The public cases.
        codec: A codec fitted on other public label maps.
        recipe: The student's training recipe.
        pairs: Not used by this protocol.
        given: The network that the study begins from; None if there is none.

    Returns:
        The public start, or None if shapes do not overlap enough, and the control ``zero_code``.
    """
    look = prior_look(structures=len(cases.data.labels) - 1, channels=cases.images.shape[1])
    begun = predicted = None
    if given is not None or placed(codec):
        begun = public_start(cases.images, codec, codec.powers, recipe, seed=STUDENT_SEED, given=given).model
        predicted = [predict(begun, image) for image in cases.images]
    targets = np.stack(list(labelled(list(cases.images), codec, look, begun=predicted)))
    return begun, train_student(cases.images, targets, recipe, seed=STUDENT_SEED, start=begun)[0]
