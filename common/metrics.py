"""Dice and HD95 of label maps, by MONAI, with the empty cases decided here and not left to a default.

A structure is a label value or, where structures overlap, a set of them (``DataConfig.members``).

A structure that is in neither map has no Dice and no distance: nan, left out of a mean. One that is in only one of
them: Dice 0, HD95 infinite. :func:`lesion_wise` is what the BraTS challenge does instead.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import torch
from jaxtyping import Bool, UInt8
from monai.metrics import compute_dice, compute_hausdorff_distance
from scipy import ndimage

from common.errors import InvalidInput

Structures: TypeAlias = int | Sequence[tuple[int, ...]]
"""The label values of every structure, or how many classes there are, each by itself and background among them."""


@dataclass(frozen=True, slots=True)
class Score:
    """Dice of predictions against label maps: ``per_class`` (structure 1 first) and ``mean`` over the structures.

    ``per_class`` averages over the volumes that hold the structure in either map; nan where none does.
    ``cases``: the mean over its structures of every volume in which one is drawn, in order, by which networks compare.
    """

    per_class: tuple[float, ...]
    mean: float
    cases: tuple[float, ...]


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


def score(
    predictions: Iterable[UInt8[np.ndarray, "x y z"]],
    label_maps: Iterable[UInt8[np.ndarray, "x y z"]],
    structures: Structures,
) -> Score:
    """Dice of label maps against label maps, volume by volume; also for teachers, ensembles and pseudo-labels."""
    each, cases = [], []
    for prediction, truth in zip(predictions, label_maps, strict=True):
        each.append(dice_per_class(prediction, truth, structures))
        if truth.any():
            cases.append(mean_present(each[-1]))
    if not each:
        raise InvalidInput("no volume to score", remedy="give labelled cases")
    per_class = tuple(mean_present(values) for values in zip(*each, strict=True))
    return Score(per_class=per_class, mean=mean_present(v for v in per_class if not math.isnan(v)), cases=tuple(cases))


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


LESION_REACH, LESION_LEAST_MM3, LESION_MISSED_MM = 3, 50.0, 374.0
"""Of BraTS 2023: dilations that join parts of one lesion, volume below which a drawn lesion is not counted, and HD95 of
one that is missed or made up."""


def lesion_wise(
    prediction: UInt8[np.ndarray, "x y z"],
    truth: UInt8[np.ndarray, "x y z"],
    structures: Structures,
    *,
    spacing_mm: tuple[float, float, float],
) -> tuple[tuple[float, float], ...]:
    """Dice and HD95 in mm of every structure as BraTS 2023 has them: lesion by lesion, then their mean.

    A drawn lesion is a 26-connected part of the dilated map; what was found touching it is its answer, together. A
    lesion missed, and a found part that touches none, count as Dice 0 and 374 mm. A structure in neither map has
    Dice 1 and 0 mm, as the challenge scores it, where :func:`dice_per_class` leaves it out.
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
