"""How networks are scored in a benchmark: Dice and HD95 of every structure, as plain numbers by name.

``student`` is a network's mean Dice; ``student|dice|core`` that of one structure, ``student|hd95_mm|core`` its HD95
over the cases in which both maps have it, ``student|missed|core`` the cases in which only one of them has.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from jaxtyping import UInt8

from common.config import DataConfig
from common.metrics import hd95_mm, mean_present, score

METRICS = ("dice", "hd95_mm", "missed")


def named(arm: str, metric: str, structure: str) -> str:
    """The name of one structure's metric."""
    return f"{arm}|{metric}|{structure}"


def at_site(what: str, site: str) -> str:
    """The name of a number that belongs to one hospital."""
    return f"{what}@{site}"


def scored(
    arm: str, labels: UInt8[np.ndarray, "n x y z"], truth: UInt8[np.ndarray, "n x y z"], data: DataConfig
) -> dict[str, float]:
    """The metrics of label maps against the truth under the arm's name; nan where nothing can be measured."""
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
    """Rows of the held-out cases that are the site's own."""
    return np.flatnonzero([each == site for each in sites])
