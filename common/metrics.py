"""Dice and HD95 of label maps, by MONAI, with the empty cases decided here and not left to a default.

A structure that is in neither map has no Dice and no distance: nan, left out of a mean. One that is in only one of
them: Dice 0, HD95 infinite.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable

import numpy as np
import torch
from jaxtyping import UInt8
from monai.metrics import compute_dice, compute_hausdorff_distance

from common.errors import InvalidInput


def dice_per_class(
    prediction: UInt8[np.ndarray, "x y z"], truth: UInt8[np.ndarray, "x y z"], classes: int
) -> tuple[float, ...]:
    """Dice of the structures 1 … classes - 1 (``classes`` counts background): 2 |P∩T| / (|P| + |T|), in [0, 1].

    nan for a structure in neither map. Raises InvalidInput for different shapes or values ≥ ``classes``.
    """
    _check(prediction, truth, classes)
    dice = compute_dice(_one_hot(prediction, classes), _one_hot(truth, classes), ignore_empty=False)[0, 1:]
    return tuple(
        float(dice[c - 1]) if (prediction == c).any() or (truth == c).any() else math.nan for c in range(1, classes)
    )


def mean_dice(prediction: UInt8[np.ndarray, "x y z"], truth: UInt8[np.ndarray, "x y z"], classes: int) -> float:
    """Mean Dice of the structures present in either map; nan where there is none."""
    return mean_present(dice_per_class(prediction, truth, classes))


def mean_present(values: Iterable[float]) -> float:
    """Mean of what is not nan; nan where nothing is left."""
    present = [value for value in values if not math.isnan(value)]
    return math.fsum(present) / len(present) if present else math.nan


def hd95_mm(
    prediction: UInt8[np.ndarray, "x y z"],
    truth: UInt8[np.ndarray, "x y z"],
    classes: int,
    *,
    spacing_mm: tuple[float, float, float],
) -> tuple[float, ...]:
    """95th percentile of the symmetric surface distance in mm, per structure 1 … classes - 1.

    nan for a structure in neither map, inf for one in only one of them.
    """
    _check(prediction, truth, classes)
    result: list[float] = []
    for value in range(1, classes):
        inside_p, inside_t = prediction == value, truth == value
        if not inside_p.any() or not inside_t.any():
            result.append(math.nan if not inside_p.any() and not inside_t.any() else math.inf)
            continue
        pair = [torch.tensor(mask[None, None]) for mask in (inside_p, inside_t)]
        with warnings.catch_warnings():  # MONAI 1.6 calls itself with an argument it has deprecated
            warnings.filterwarnings("ignore", message=".*always_return_as_numpy", category=FutureWarning)
            distance = compute_hausdorff_distance(
                *pair, include_background=True, percentile=95, spacing=list(spacing_mm)
            )
        result.append(float(distance[0, 0]))
    return tuple(result)


def _one_hot(labels: UInt8[np.ndarray, "x y z"], classes: int) -> torch.Tensor:
    return torch.nn.functional.one_hot(torch.tensor(labels, dtype=torch.long), classes).movedim(-1, 0)[None]


def _check(prediction: np.ndarray, truth: np.ndarray, classes: int) -> None:
    if prediction.shape != truth.shape or truth.ndim != 3:
        raise InvalidInput("label maps to compare", value=(prediction.shape, truth.shape), limit="two equal 3D shapes")
    for name, labels in (("prediction", prediction), ("truth", truth)):
        if labels.size and (labels.min() < 0 or labels.max() >= classes):
            raise InvalidInput(f"largest value in the {name}", value=int(labels.max()), limit=f"0 to {classes - 1}")
