"""Computes Dice and HD95 of label maps with MONAI, with a defined result for empty structures.

Called by every evaluation. A structure is a label value or, if structures overlap, a set of them
(``DataConfig.members``). A structure in neither map has Dice and distance nan and is left out of a mean. A structure in
only one of them has Dice 0 and infinite HD95. :func:`lesion_wise` uses the rules of the BraTS challenge instead.
Refuses label maps of different shapes and values that belong to no structure.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Sequence
from typing import TypeAlias

import numpy as np
import torch
from jaxtyping import Bool, UInt8
from monai.metrics import compute_dice, compute_hausdorff_distance
from scipy import ndimage

from common.errors import InvalidInput
from common.measured_gain import Score

# MONAI 1.6 uses an argument that it has deprecated itself.
warnings.filterwarnings("ignore", message=".*always_return_as_numpy", category=FutureWarning)

Structures: TypeAlias = int | Sequence[tuple[int, ...]]
"""The label values of each structure, or a number of classes (background included). A number n stands for the
structures 1 to n − 1, one label value each."""


def dice_per_class(
    prediction: UInt8[np.ndarray, "x y z"], truth: UInt8[np.ndarray, "x y z"], structures: Structures
) -> tuple[float, ...]:
    """Return the Dice of every structure: 2 |P∩T| / (|P| + |T|), for its voxels P in the prediction and T in the truth.

    Args:
        prediction: Label map, [x, y, z].
        truth: Label map of the same shape.
        structures: Label values of each structure, or the number of classes.

    Returns:
        Numbers in [0, 1]; nan for a structure in neither map.

    Raises:
        InvalidInput: If shapes differ or a value belongs to no structure.
    """
    found, drawn = (_masks(labels, structures) for labels in _checked(prediction, truth, structures))
    dice = compute_dice(found, drawn, ignore_empty=False)[0]
    there = (found | drawn).flatten(2).any(dim=2)[0]
    return tuple(float(value) if present else math.nan for value, present in zip(dice, there, strict=True))


def mean_dice(prediction: UInt8[np.ndarray, "x y z"], truth: UInt8[np.ndarray, "x y z"], classes: Structures) -> float:
    """Return the mean Dice of the structures present in either map.

    Args:
        prediction: Label map, [x, y, z].
        truth: Label map of the same shape.
        classes: Label values of each structure, or the number of classes.

    Returns:
        The mean; nan if no structure is present.
    """
    return mean_present(dice_per_class(prediction, truth, classes))


def mean_present(values: Iterable[float]) -> float:
    """Return the mean of the values that are not nan.

    Args:
        values: Numbers.

    Returns:
        The mean; nan if there is none.

    >>> mean_present([1.0, float("nan"), 0.5])
    0.75
    """
    present = [value for value in values if not math.isnan(value)]
    return math.fsum(present) / len(present) if present else math.nan


def score(
    predictions: Iterable[UInt8[np.ndarray, "x y z"]],
    label_maps: Iterable[UInt8[np.ndarray, "x y z"]],
    structures: Structures,
) -> Score:
    """Return the Dice of many predictions, by structure and by volume.

    Args:
        predictions: Label maps.
        label_maps: The true label maps, in the same order.
        structures: Label values of each structure, or the number of classes.

    Returns:
        The scores.

    Raises:
        InvalidInput: If there is no volume, or :func:`dice_per_class` refuses a pair of label maps.
    """
    each, cases = [], []
    for prediction, truth in zip(predictions, label_maps, strict=True):
        each.append(dice_per_class(prediction, truth, structures))
        if truth.any():
            cases.append(mean_present(each[-1]))
    if not each:
        raise InvalidInput("no volume to score", remedy="give labelled cases")
    per_class = tuple(mean_present(values) for values in zip(*each, strict=True))
    return Score(per_class=per_class, mean=mean_present(per_class), cases=tuple(cases))


def hd95_mm(
    prediction: UInt8[np.ndarray, "x y z"],
    truth: UInt8[np.ndarray, "x y z"],
    structures: Structures,
    *,
    spacing_mm: tuple[float, float, float],
) -> tuple[float, ...]:
    """Return the 95th percentile of the symmetric surface distance of every structure, in mm.

    Args:
        prediction: Label map, [x, y, z].
        truth: Label map of the same shape.
        structures: Label values of each structure, or the number of classes.
        spacing_mm: Voxel size on each axis.

    Returns:
        Distances; nan for a structure in neither map, inf for a structure in only one of them.

    Raises:
        InvalidInput: If shapes differ or a value belongs to no structure.
    """
    found, drawn = (_masks(labels, structures) for labels in _checked(prediction, truth, structures))
    result: list[float] = []
    for inside_p, inside_t in zip(found[0], drawn[0], strict=True):
        if not inside_p.any() or not inside_t.any():
            result.append(math.nan if not inside_p.any() and not inside_t.any() else math.inf)
            continue
        pair = [mask[None, None] for mask in (inside_p, inside_t)]
        distance = compute_hausdorff_distance(*pair, include_background=True, percentile=95, spacing=list(spacing_mm))
        result.append(float(distance[0, 0]))
    return tuple(result)


def _members(structures: Structures) -> Sequence[tuple[int, ...]]:
    return [(value,) for value in range(1, structures)] if isinstance(structures, int) else structures


def _masks(labels: UInt8[np.ndarray, "x y z"], structures: Structures) -> torch.Tensor:
    """Return the structures' masks, bool [1, structures, x, y, z]."""
    return torch.from_numpy(np.stack([np.isin(labels, values) for values in _members(structures)]))[None]


def _checked(prediction: np.ndarray, truth: np.ndarray, structures: Structures) -> tuple[np.ndarray, np.ndarray]:
    most = max(max(values) for values in _members(structures))
    if prediction.shape != truth.shape or truth.ndim != 3:
        raise InvalidInput(
            "label maps to compare", value=(prediction.shape, truth.shape), limit="two 3D arrays with equal shapes"
        )
    for name, labels in (("prediction", prediction), ("truth", truth)):
        if labels.size and (labels.min() < 0 or labels.max() > most):
            raise InvalidInput(f"largest value in the {name}", value=int(labels.max()), limit=f"0 to {most}")
    return prediction, truth


LESION_REACH, LESION_LEAST_MM3, LESION_MISSED_MM = 3, 50.0, 374.0
"""Constants of BraTS 2023: number of dilations by which parts of one lesion are joined; volume in mm³ up to which a
true lesion is not counted; HD95 in mm that a missed or a falsely predicted lesion counts as."""


def lesion_wise(
    prediction: UInt8[np.ndarray, "x y z"],
    truth: UInt8[np.ndarray, "x y z"],
    structures: Structures,
    *,
    spacing_mm: tuple[float, float, float],
) -> tuple[tuple[float, float], ...]:
    """Return Dice and HD95 in mm of every structure as BraTS 2023 scores them: lesion by lesion, then the mean.

    A lesion is a 26-connected part of the dilated true map. Its prediction is the union of all predicted parts that
    touch it. A lesion of at most :data:`LESION_LEAST_MM3` is not counted. A missed lesion, and a predicted part that
    touches no lesion, count as Dice 0 and 374 mm. A structure without any counted lesion or part has Dice 1 and 0 mm.
    :func:`dice_per_class`, in contrast, returns nan for a structure in neither map.

    Args:
        prediction: Label map, [x, y, z].
        truth: Label map of the same shape.
        structures: Label values of each structure, or the number of classes.
        spacing_mm: Voxel size on each axis.

    Returns:
        (Dice, HD95) of every structure.

    Raises:
        InvalidInput: If shapes differ or a value belongs to no structure.

    Source: github.com/rachitsaluja/BraTS-2023-Metrics.
    """
    found, drawn = (_masks(labels, structures).numpy()[0] for labels in _checked(prediction, truth, structures))
    return tuple(_by_lesion(p, t, spacing_mm) for p, t in zip(found, drawn, strict=True))


def _by_lesion(
    found: Bool[np.ndarray, "x y z"], drawn: Bool[np.ndarray, "x y z"], spacing_mm: tuple[float, float, float]
) -> tuple[float, float]:
    near = ndimage.generate_binary_structure(3, 2)
    every = np.ones((3, 3, 3))
    dilated = ndimage.binary_dilation(drawn, near, iterations=LESION_REACH) if drawn.any() else drawn
    lesions, many = ndimage.label(dilated, every)
    parts, count = ndimage.label(found, every)
    made_up, scores = set(range(1, count + 1)), []
    for lesion in range(1, many + 1):
        touched = set(np.unique(parts[lesions == lesion]).tolist()) - {0}
        made_up -= touched
        own = drawn & (lesions == lesion)
        if own.sum() * math.prod(spacing_mm) <= LESION_LEAST_MM3:
            continue
        answer = np.isin(parts, list(touched)).astype(np.uint8)
        (dice,) = dice_per_class(answer, own.astype(np.uint8), 2)
        (far,) = hd95_mm(answer, own.astype(np.uint8), 2, spacing_mm=spacing_mm)
        scores.append((dice, far if math.isfinite(far) else LESION_MISSED_MM))
    scores += [(0.0, LESION_MISSED_MM)] * len(made_up)
    if not scores:
        return 1.0, 0.0
    dices, distances = zip(*scores, strict=True)
    return math.fsum(dices) / len(scores), math.fsum(distances) / len(scores)
