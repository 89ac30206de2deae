"""Patients of the bench: a ball in a noisy image."""

from __future__ import annotations

import numpy as np

from common.config import DataConfig
from consilium.research.roles import Cases, Roles

DATA = DataConfig(labels=("background", "core"), spacing_mm=(1.0, 1.0, 1.0), grid=(16, 16, 16))


def balls(count: int) -> Cases:
    rng = np.random.default_rng(0)
    place = np.stack(np.meshgrid(*[np.arange(16)] * 3, indexing="ij"), axis=-1)
    labels = np.stack(
        [np.linalg.norm(place - rng.uniform(6, 9, 3), axis=-1) < rng.uniform(3, 6) for _ in range(count)]
    ).astype(np.uint8)
    images = (labels + rng.normal(0, 0.2, labels.shape))[:, None].astype(np.float32)
    return Cases(images, labels)


def deal(cases: Cases, *, hospitals: int) -> Roles:
    """12 public images, 10 public maps, 12 held-out cases, the rest private."""
    public, maps, held_out, private = np.split(np.arange(len(cases)), [12, 22, 34])
    names = tuple(f"hospital-{i + 1:02d}" for i in range(hospitals))
    dealt = tuple(cases[part] for part in np.array_split(private, hospitals))
    sites = tuple(names[row % hospitals] for row in range(12))
    return Roles(dealt, cases[public], cases[maps], cases[held_out], sites=names, held_out_sites=sites)
