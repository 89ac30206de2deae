"""Converts label maps to log-ratios on a coarser grid, and log-ratios back to label probabilities.

A log-ratio is the logarithm of a structure's probability divided by that of the background. The codecs, the planner and
the joint protocol call this module. Log-ratios of pooled probabilities behave like a truncated signed distance to a
structure's surface. A linear combination of several shapes' log-ratios is therefore again a shape, and any log-ratios
map back to probabilities. The module also makes deformed copies of public label maps, which stand in for a larger
population.

Shapes of arrays: k classes with the background, s = k − 1 structures, x × y × z the grid, u × v × w the pooled grid.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from jaxtyping import Float, UInt8
from scipy.special import softmax

from common.data.label_maps import one_hot

PROBABILITY_FLOOR = 0.01
MAX_FEATURES = 1 << 17


def pooling_factor(grid: tuple[int, int, int], *, labels: int, most: int = MAX_FEATURES) -> int:
    """Return the smallest of the pooling factors 2 and 4 with which a map has at most ``most`` numbers, else 8.

    Args:
        grid: Shape of a volume in voxels.
        labels: Number of classes.
        most: Largest number of log-ratios in a pooled map: structures times coarse voxels.

    Returns:
        The factor.

    >>> pooling_factor((64, 64, 64), labels=2), pooling_factor((256, 256, 128), labels=2)
    (2, 4)
    """
    for factor in (2, 4):
        if (labels - 1) * int(np.prod([n // factor for n in grid])) <= most:
            return factor
    return 8


def pool(array: Float[np.ndarray, "... x y z"], *, factor: int) -> Float[np.ndarray, "... u v w"]:
    """Average an array over blocks of ``factor``³ voxels.

    Args:
        array: Shape [..., x, y, z]; the last three sizes must be multiples of ``factor``.
        factor: Edge of a block in voxels.

    Returns:
        Array of shape [..., x / factor, y / factor, z / factor].
    """
    *lead, x, y, z = array.shape
    blocks = array.reshape(*lead, x // factor, factor, y // factor, factor, z // factor, factor)
    result: np.ndarray = blocks.mean(axis=(-5, -3, -1))
    return result


def enlarge(array: Float[np.ndarray, "... u v w"], *, factor: int) -> Float[np.ndarray, "... x y z"]:
    """Enlarge an array by linear interpolation between block centres, the approximate inverse of :func:`pool`.

    Beyond the outermost centres, values are constant.

    Args:
        array: Shape [..., u, v, w].
        factor: Edge of a block in voxels.

    Returns:
        Array of shape [..., u · factor, v · factor, w · factor].
    """
    for axis in (-3, -2, -1):
        size = array.shape[axis]
        at = np.clip((np.arange(size * factor) + 0.5) / factor - 0.5, 0, size - 1)
        low = np.minimum(at.astype(int), size - 1)
        high = np.minimum(low + 1, size - 1)
        share = (at - low).reshape(-1, *(1,) * (-axis - 1))
        array = (1 - share) * array.take(low, axis=axis) + share * array.take(high, axis=axis)
    return array


def to_log_ratios(probabilities: Float[np.ndarray, "k x y z"], *, factor: int) -> Float[np.ndarray, "s u v w"]:
    """Return the log-ratios of pooled probabilities: for each structure, the logarithm of its probability divided by
    that of the background.

    Args:
        probabilities: Class probabilities, shape [k, x, y, z].
        factor: Pooling factor.

    Returns:
        Log-ratios, shape [s, u, v, w]; at most ln((1 + f) / f) in absolute value, f being :data:`PROBABILITY_FLOOR`.
    """
    pooled = np.log(np.maximum(pool(probabilities, factor=factor), 0) + PROBABILITY_FLOOR)
    result: np.ndarray = pooled[1:] - pooled[:1]
    return result


def to_probabilities(ratios: Float[np.ndarray, "s u v w"], *, factor: int) -> Float[np.ndarray, "k x y z"]:
    """Return the softmax of enlarged log-ratios, the approximate inverse of :func:`to_log_ratios`.

    Args:
        ratios: Log-ratios, shape [s, u, v, w]; any finite numbers.
        factor: Pooling factor.

    Returns:
        Float32 array of shape [k, x, y, z], non-negative and summing to 1 in every voxel.
    """
    full = enlarge(ratios, factor=factor)
    result: np.ndarray = softmax(np.concatenate([np.zeros_like(full[:1]), full]), axis=0).astype(np.float32)
    return result


def augmented(
    label_maps: Sequence[UInt8[np.ndarray, "x y z"]], *, labels: int, copies: int, seed: int, coarse: int = 1
) -> Iterator[Float[np.ndarray, "k x y z"]]:
    """Make deformed copies of label maps by MONAI's Rand3DElastic.

    The affine part has rotations of up to 0.15 rad, shears of up to 0.04, scaling by up to ±10 % and shifts of up to a
    24th of each side of the grid. The elastic part has displacements with a standard deviation of up to a 48th of the
    shortest side, smoothed over about an eighth of it. The random numbers of copy i depend on (seed, i) only.

    Args:
        label_maps: Public label maps; copies take them in turn.
        labels: Number of classes.
        copies: Number of copies.
        seed: Seed of the deformations.
        coarse: Edge in voxels of the blocks over which maps are pooled before they are deformed, to save memory on
            large grids.

    Returns:
        An iterator over soft maps, float32 [k, x, y, z].
    """
    if copies == 0:
        return
    import torch  # imported here, because reading and using a codec needs no torch
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
        soft = deform(torch.tensor(pool(one_hot(label_maps[i % len(label_maps)], labels), factor=coarse)))
        yield np.asarray(soft, dtype=np.float32)
