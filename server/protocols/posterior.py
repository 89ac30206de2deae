"""Samples the labels that are still possible given the answers and the known noise.

A voxel's doubt is the share of draws in which it has another label. It is made of the answers, the codec and the noise
alone, never of a student, which has learnt these labels. Post-processing of what the ledger stores. Free of torch.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float, UInt8

DRAWS = 8
DRAW_SEED = 0
"""Fixes the draws, so that pictures made anew are the same; it protects nothing."""


@dataclass(frozen=True, slots=True, eq=False)
class Doubt:
    """A volume's label before any answer (``centre``), and the share of draws that contradict the one after them."""

    volume: str
    centre: UInt8[np.ndarray, "x y z"]
    doubt: Float[np.ndarray, "x y z"]


def doubt_of(
    label: Float[np.ndarray, "c x y z"], draws: Iterable[Float[np.ndarray, "c x y z"]]
) -> Float[np.ndarray, "x y z"]:
    """The share of draws whose most probable label is not the label's, 0 to 1 in every voxel."""
    hard = label.argmax(axis=0)
    found = np.stack([one.argmax(axis=0) != hard for one in draws])
    result: np.ndarray = found.mean(axis=0).astype(np.float32)
    return result
