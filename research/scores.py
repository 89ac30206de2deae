"""Scores networks in a benchmark: Dice and HD95 of every structure, as numbers by name.

The benchmarks use it. A network's mean Dice has the network's name, such as ``student``. Values of one structure, here
of ``core``, have three parts:

* ``student|dice|core``: the structure's Dice;
* ``student|hd95_mm|core``: its HD95 in mm, over the cases in which truth and prediction both contain it;
* ``student|missed|core``: the number of cases in which only the truth or only the prediction contains it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from jaxtyping import UInt8

from common.config import DataConfig
from common.metrics import hd95_mm, mean_present, score


def named(arm: str, metric: str, structure: str) -> str:
    """Return the name of one structure's metric.

    >>> named("student", "dice", "core")
    'student|dice|core'
    """
    return f"{arm}|{metric}|{structure}"


def at_site(what: str, site: str) -> str:
    """Return the name of a number that belongs to one hospital."""
    return f"{what}@{site}"


def scored(
    arm: str, labels: UInt8[np.ndarray, "n x y z"], truth: UInt8[np.ndarray, "n x y z"], data: DataConfig
) -> dict[str, float]:
    """Return the metrics of label maps, by name; NaN if a metric is undefined.

    Args:
        arm: Name that the metrics begin with.
        labels: Predicted label maps, uint8 [n, x, y, z].
        truth: True label maps of the same shape.
        data: The study's structures and voxel spacing.
    """
    dice = score(labels, truth, data.members)
    distances = [hd95_mm(a, b, data.members, spacing_mm=data.spacing_mm) for a, b in zip(labels, truth, strict=True)]
    values = {arm: dice.mean}
    for number, structure in enumerate(data.structures):
        each = [case[number] for case in distances]
        values[named(arm, "dice", structure)] = dice.per_class[number]
        values[named(arm, "hd95_mm", structure)] = mean_present(math.nan if math.isinf(d) else d for d in each)
        values[named(arm, "missed", structure)] = float(sum(map(math.isinf, each)))
    return values


def own_cases(site: str, sites: Sequence[str]) -> np.ndarray:
    """Return the rows of the held-out cases that belong to a site."""
    return np.flatnonzero([each == site for each in sites])
