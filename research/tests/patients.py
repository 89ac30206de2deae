"""Makes synthetic patients for the benchmarks' tests, and assigns them to hospitals."""

from __future__ import annotations

import numpy as np

from common.config import DataConfig
from research.roles import CaseRoles, Cases
from tests.consilium import balls as made

DATA = DataConfig(labels=("background", "core"), spacing_mm=(1.0, 1.0, 1.0), grid=(16, 16, 16))


def balls(count: int) -> Cases:
    """Return patients with a ball in a noisy image."""
    return Cases(*made.balls(count))


def deal(cases: Cases, *, hospitals: int) -> CaseRoles:
    """Take 12 public images, 10 public maps and 12 held-out cases, and deal the rest to the hospitals."""
    public, maps, held_out, private = np.split(np.arange(len(cases)), [12, 22, 34])
    names = tuple(f"hospital-{i + 1:02d}" for i in range(hospitals))
    dealt = tuple(cases[part] for part in np.array_split(private, hospitals))
    sites = tuple(names[row % hospitals] for row in range(12))
    return CaseRoles(dealt, cases[public], cases[maps], cases[held_out], sites=names, held_out_sites=sites)
