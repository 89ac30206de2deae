"""Measures how uncertain labels are, by samples from their posterior given the answers and the known noise.

The protocols and the dashboard use it. A voxel's *doubt* is the share of samples in which its label differs from the
one that is released. It depends only on the answers, the codec and the noise. A student's uncertainty is not used,
because the student is trained on these labels. This is post-processing and does not import torch.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float, UInt8

DRAWS = 8
DRAW_SEED = 0
"""Seed of the samples, so that pictures can be reproduced. It is public and protects nothing."""


@dataclass(frozen=True, slots=True, eq=False)
class LabelUncertainty:
    """A volume's label before any answer, and how uncertain its label after the answers is.

    Attributes:
        volume: The volume's hash.
        centre: Label map [x, y, z] before any answer.
        doubt: Float array [x, y, z]: for each voxel, the share of samples with another label than the label after the
            answers.
    """

    volume: str
    centre: UInt8[np.ndarray, "x y z"]
    doubt: Float[np.ndarray, "x y z"]


def doubt_of(
    label: Float[np.ndarray, "k x y z"], draws: Iterable[Float[np.ndarray, "k x y z"]]
) -> Float[np.ndarray, "x y z"]:
    """Return, for each voxel, the share of samples whose most probable class is not the label's.

    Args:
        label: Probabilities of k classes after the answers, [k, x, y, z].
        draws: Sampled probabilities of the same shape.

    Returns:
        Float32 array [x, y, z] of values from 0 to 1.
    """
    hard = label.argmax(axis=0)
    found = np.stack([one.argmax(axis=0) != hard for one in draws])
    result: np.ndarray = found.mean(axis=0).astype(np.float32)
    return result
