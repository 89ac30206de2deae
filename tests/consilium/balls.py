"""Makes patients with a ball in a noisy image."""

from __future__ import annotations

import numpy as np


def balls(count: int) -> tuple[np.ndarray, np.ndarray]:
    """Return images [n, 1, 16, 16, 16] and label maps [n, 16, 16, 16] of ``count`` patients."""
    rng = np.random.default_rng(0)
    place = np.stack(np.meshgrid(*[np.arange(16)] * 3, indexing="ij"), axis=-1)
    labels = np.stack(
        [np.linalg.norm(place - rng.uniform(6, 9, 3), axis=-1) < rng.uniform(3, 6) for _ in range(count)]
    ).astype(np.uint8)
    images = (labels + rng.normal(0, 0.2, labels.shape))[:, None].astype(np.float32)
    return images, labels
