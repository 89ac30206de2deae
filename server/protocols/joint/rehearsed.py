"""Trains, for a rehearsal of a joint query, its public start and the student without any hospital's answer.

:mod:`server.protocols.rehearsal` calls it.
"""

from __future__ import annotations

import numpy as np
import torch

from common.codecs.codec import LinearCodec
from common.config import TrainingConfig
from server.protocols.public_start import public_start, refine
from server.protocols.query_protocol import STUDENT_SEED
from server.protocols.rehearsal import PublicCases
from server.public.paired import Paired


def begin(
    cases: PublicCases,
    codec: LinearCodec,
    recipe: TrainingConfig,
    pairs: np.ndarray | None,
    given: torch.nn.Module | None = None,
) -> tuple[torch.nn.Module | None, torch.nn.Module]:
    """Train the public start and the control of a joint query; see :class:`~server.protocols.rehearsal.Begin`.

    With public pairs (images with label maps), the start is trained on them and is itself the control. Without pairs,
    the control is the start trained on its own codes.

    Args:
        cases: The public cases.
        codec: A codec fitted on other public label maps.
        recipe: The student's training recipe.
        pairs: Indices of the cases that are the study's public pairs; None if it has none.
        given: The network that the study begins from; None if there is none.

    Returns:
        The public start and the control.
    """
    known = None
    if pairs is not None:
        known = Paired(cases.images[pairs], cases.labels[pairs], len(cases.data.labels))
    start = public_start(cases.images, codec, codec.powers, recipe, seed=STUDENT_SEED, paired=known, given=given)
    if pairs is not None:
        return start.model, start.model
    return start.model, refine(start.model, cases.images, codec, start.codes, recipe, seed=STUDENT_SEED)
