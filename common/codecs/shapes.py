"""Label maps as smooth numbers a linear codec can work on: log-ratios to background on a coarser grid, and back.

Log-ratios of pooled probabilities behave like a truncated signed distance, so a linear combination of shapes is again a
shape, and any vector maps back to probabilities. Also the public augmentation that stands in for a larger population.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from jaxtyping import Float, UInt8
from scipy.special import softmax

PROBABILITY_FLOOR = 0.01
MAX_FEATURES = 1 << 17


def pooling_factor(grid: tuple[int, int, int], *, labels: int, most: int = MAX_FEATURES) -> int:
    """Return the smallest coarsening of 2, 4 and 8 that leaves at most ``most`` numbers a map, else 8."""
    for factor in (2, 4):
        if (labels - 1) * int(np.prod([n // factor for n in grid])) <= most:
            return factor
    return 8


def pool(array: Float[np.ndarray, "... x y z"], *, factor: int) -> Float[np.ndarray, "... u v w"]:
    """Mean over blocks of ``factor``³ voxels; the grid's sizes must be multiples of ``factor``."""
    *lead, x, y, z = array.shape
    blocks = array.reshape(*lead, x // factor, factor, y // factor, factor, z // factor, factor)
    result: np.ndarray = blocks.mean(axis=(-5, -3, -1))
    return result


def enlarge(array: Float[np.ndarray, "... u v w"], *, factor: int) -> Float[np.ndarray, "... x y z"]:
    """Linear interpolation between block centres, constant beyond the outermost: the way back from :func:`pool`."""
    for axis in (-3, -2, -1):
        size = array.shape[axis]
        at = np.clip((np.arange(size * factor) + 0.5) / factor - 0.5, 0, size - 1)
        low = np.minimum(at.astype(int), size - 1)
        high = np.minimum(low + 1, size - 1)
        share = (at - low).reshape(-1, *(1,) * (-axis - 1))
        array = (1 - share) * array.take(low, axis=axis) + share * array.take(high, axis=axis)
    return array


def to_log_ratios(
    probabilities: Float[np.ndarray, "c x y z"], *, factor: int, floor: float = PROBABILITY_FLOOR
) -> Float[np.ndarray, "k u v w"]:
    """ln(p_c / p_0) of pooled probabilities for the k = c - 1 structures, each probability lifted by ``floor``.

    Bounded by ln((1 + floor) / floor) for probabilities in [0, 1].
    """
    pooled = np.log(np.maximum(pool(probabilities, factor=factor), 0) + floor)
    result: np.ndarray = pooled[1:] - pooled[:1]
    return result


def to_probabilities(ratios: Float[np.ndarray, "k u v w"], *, factor: int) -> Float[np.ndarray, "c x y z"]:
    """Softmax of the enlarged log-ratios: float32, non-negative, summing to 1 for any finite input."""
    full = enlarge(ratios, factor=factor)
    result: np.ndarray = softmax(np.concatenate([np.zeros_like(full[:1]), full]), axis=0).astype(np.float32)
    return result


def one_hot(label_map: UInt8[np.ndarray, "x y z"], *, labels: int) -> Float[np.ndarray, "c x y z"]:
    """A label map as float32 probabilities of 0 and 1."""
    result: np.ndarray = np.arange(labels, dtype=np.uint8)[:, None, None, None] == label_map
    return result.astype(np.float32)


def augmented(
    label_maps: Sequence[UInt8[np.ndarray, "x y z"]], *, labels: int, copies: int, seed: int, coarse: int = 1
) -> Iterator[Float[np.ndarray, "c x y z"]]:
    """``copies`` deformed soft maps, dealt over ``label_maps`` in turn, by MONAI's Rand3DElastic.

    Copy i depends on (seed, i) alone. Affine part: rotations to 0.15 rad, shears to 0.04, scale to ±10 %, shifts to
    grid/24; elastic part: displacements smooth over grid/8, of standard deviation up to grid/48 voxels. ``coarse``: the
    maps are pooled over blocks of that many voxels an axis before they are deformed, which large grids need.
    """
    if copies == 0:
        return
    import torch  # only where a codec is fitted: reading and using one needs no torch
    from monai.transforms import Rand3DElastic

    grid = tuple(n // coarse for n in label_maps[0].shape)
    smooth = min(grid) / 8
    # White noise uniform on [-a, a], smoothed by a Gaussian of std s, has standard deviation a/√3 / (2√π s)^(3/2).
    magnitude = min(grid) / 48 * np.sqrt(3) * (2 * np.sqrt(np.pi) * smooth) ** 1.5
    deform = Rand3DElastic(
        sigma_range=(0.75 * smooth, 1.25 * smooth),
        magnitude_range=(0.0, float(magnitude)),
        prob=1.0,
        rotate_range=(0.15,) * 3,
        shear_range=(0.04,) * 6,
        translate_range=tuple(n / 24 for n in grid),
        scale_range=(0.1,) * 3,
        mode="bilinear",
        padding_mode="border",
    )
    draws = np.random.default_rng(seed)
    for i in range(copies):
        deform.set_random_state(seed=int(draws.integers(1 << 32)))
        soft = deform(torch.tensor(pool(one_hot(label_maps[i % len(label_maps)], labels=labels), factor=coarse)))
        yield np.asarray(soft, dtype=np.float32)
