"""Dice and HD95 of label maps, by MONAI, with the empty cases decided here and not left to a default.

A structure is a label value or, where structures overlap, a set of them (``DataConfig.members``).

A structure that is in neither map has no Dice and no distance: nan, left out of a mean. One that is in only one of
them: Dice 0, HD95 infinite.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Sequence
from typing import TypeAlias

import numpy as np
import torch
from jaxtyping import UInt8
from monai.metrics import compute_dice, compute_hausdorff_distance

from common.errors import InvalidInput

Structures: TypeAlias = int | Sequence[tuple[int, ...]]
"""The label values of every structure, or how many classes there are, each by itself and background among them."""


def dice_per_class(
    prediction: UInt8[np.ndarray, "x y z"], truth: UInt8[np.ndarray, "x y z"], structures: Structures
) -> tuple[float, ...]:
    """Dice of every structure: 2 |P∩T| / (|P| + |T|), in [0, 1].

    nan for a structure in neither map. Raises InvalidInput for different shapes or values of no structure.
    """
    found, drawn = (_masks(labels, structures) for labels in _checked(prediction, truth, structures))
    dice = compute_dice(found, drawn, ignore_empty=False)[0]
    there = (found | drawn).flatten(2).any(dim=2)[0]
    return tuple(float(value) if present else math.nan for value, present in zip(dice, there, strict=True))


def mean_dice(prediction: UInt8[np.ndarray, "x y z"], truth: UInt8[np.ndarray, "x y z"], classes: Structures) -> float:
    """Mean Dice of the structures present in either map; nan where there is none."""
    return mean_present(dice_per_class(prediction, truth, classes))


def mean_present(values: Iterable[float]) -> float:
    """Mean of what is not nan; nan where nothing is left."""
    present = [value for value in values if not math.isnan(value)]
    return math.fsum(present) / len(present) if present else math.nan


def hd95_mm(
    prediction: UInt8[np.ndarray, "x y z"],
    truth: UInt8[np.ndarray, "x y z"],
    structures: Structures,
    *,
    spacing_mm: tuple[float, float, float],
) -> tuple[float, ...]:
    """95th percentile of the symmetric surface distance in mm, per structure.

    nan for a structure in neither map, inf for one in only one of them.
    """
    found, drawn = (_masks(labels, structures) for labels in _checked(prediction, truth, structures))
    result: list[float] = []
    for inside_p, inside_t in zip(found[0], drawn[0], strict=True):
        if not inside_p.any() or not inside_t.any():
            result.append(math.nan if not inside_p.any() and not inside_t.any() else math.inf)
            continue
        pair = [mask[None, None] for mask in (inside_p, inside_t)]
        with warnings.catch_warnings():  # MONAI 1.6 calls itself with an argument it has deprecated
            warnings.filterwarnings("ignore", message=".*always_return_as_numpy", category=FutureWarning)
            distance = compute_hausdorff_distance(
                *pair, include_background=True, percentile=95, spacing=list(spacing_mm)
            )
        result.append(float(distance[0, 0]))
    return tuple(result)


def _members(structures: Structures) -> Sequence[tuple[int, ...]]:
    return [(value,) for value in range(1, structures)] if isinstance(structures, int) else structures


def _masks(labels: UInt8[np.ndarray, "x y z"], structures: Structures) -> torch.Tensor:
    """[1, structures, x, y, z] of bool."""
    return torch.from_numpy(np.stack([np.isin(labels, values) for values in _members(structures)]))[None]


def _checked(prediction: np.ndarray, truth: np.ndarray, structures: Structures) -> tuple[np.ndarray, np.ndarray]:
    most = max(max(values) for values in _members(structures))
    if prediction.shape != truth.shape or truth.ndim != 3:
        raise InvalidInput("label maps to compare", value=(prediction.shape, truth.shape), limit="two equal 3D shapes")
    for name, labels in (("prediction", prediction), ("truth", truth)):
        if labels.size and (labels.min() < 0 or labels.max() > most):
            raise InvalidInput(f"largest value in the {name}", value=int(labels.max()), limit=f"0 to {most}")
    return prediction, truth
