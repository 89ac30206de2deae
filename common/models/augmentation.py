"""Augments a training volume: applies the same spatial transform to image and target, and varies intensities.

The training loop calls this module. The result depends only on the tensors and one seed. It is computed on the device
where the tensors are.

``smooth``         Small rotations, scalings, shears and shifts (up to a twelfth of the grid), and changes of contrast,
                   brightness and noise. Nothing is mirrored, because left and right are different labels in many
                   anatomies. The random numbers equal those of MONAI's transforms with the same ranges and seed. Image
                   and target are resampled once and together, which saves time.
``wide``           As ``smooth``, with larger ranges: rotations about the third axis of up to 0.8 rad, scalings of up to
                   30 %, and stronger changes of contrast, brightness and noise.
``wider``          As ``wide``, with rotations of up to 1.2 rad, scalings of up to 45 %, and changes of contrast,
                   brightness and noise that are about twice as large.
``wide-mirror``    As ``wide``, and each of the first two axes is mirrored in half of the samples. Only for structures
                   that keep their label in a mirror image.
``rotate-mirror``  Half of the samples are rotated or mirrored, the others unchanged, as in Fay et al. 2021, "Base
                   models". The paper gives no angles; ours are up to 0.25 rad about every axis.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import TypeAlias

import numpy as np
import torch
from jaxtyping import Float
from monai.transforms import Compose, OneOf, RandAxisFlipd, RandRotated

Image: TypeAlias = Float[torch.Tensor, "c x y z"]
Target: TypeAlias = Float[torch.Tensor, "k x y z"]
Augment: TypeAlias = Callable[[Image, Target, int], tuple[Image, Target]]
"""A function that takes image, target and a seed below 2³², and returns the changed image and target."""

_SHEAR = 0.08
_MOVED, _CONTRASTED, _NOISY, _MIRRORED = 0.9, 0.5, 0.5, 0.5  # probabilities
_FLOOR = 1e-7


@dataclass(frozen=True, slots=True)
class Ranges:
    """The largest changes of an augmentation.

    Attributes:
        rotate: Rotation about each axis, in rad.
        scale: Relative change of the size along each axis.
        gamma: Lowest and highest exponent of the contrast.
        bright: Relative change of all values. It is also the largest shift added to all values, in standard deviations
            of the normalised image.
        noise: Largest standard deviation of the noise.
        mirrored: Axes that are mirrored, each with probability ½.
    """

    rotate: tuple[float, float, float]
    scale: float
    gamma: tuple[float, float]
    bright: float
    noise: float
    mirrored: tuple[int, ...] = ()


SMOOTH = Ranges((0.25, 0.25, 0.25), 0.15, (0.7, 1.5), 0.2, 0.15)
WIDE = Ranges((0.25, 0.25, 0.8), 0.3, (0.6, 1.7), 0.3, 0.2)
WIDER = Ranges((0.25, 0.25, 1.2), 0.45, (0.45, 2.2), 0.6, 0.4)
MIRRORED = replace(WIDE, mirrored=(0, 1))


def smooth(image: Image, target: Target, seed: int, *, within: Ranges = SMOOTH) -> tuple[Image, Target]:
    """Apply the augmentation ``smooth``: one random spatial transform of image and target, and random changes of
    intensity.

    Args:
        image: Tensor [c, x, y, z] with c channels.
        target: Tensor [k, x, y, z] with k classes.
        seed: Seed below 2³².
        within: The largest changes.

    Returns:
        The changed image and target.
    """
    draws = np.random.RandomState(seed)
    parts = (int(draws.randint(1 << 32, dtype="uint32")) for _ in range(5 + len(within.mirrored)))
    move, contrast, scale, shift, noise, *flips = parts
    if _drawn(draws, move, 31)[0] < _MOVED:
        matrix = affine(_drawn(draws, move, 30)[15:], image.shape[1:], within)
        both = resample(torch.cat([image, target]), matrix)
        image, target = both[: len(image)], both[len(image) :]
    chance, where = _drawn(draws, contrast, 2)
    if chance < _CONTRASTED:
        low, high = torch.aminmax(image)
        gamma = within.gamma[0] + (within.gamma[1] - within.gamma[0]) * where
        image = ((image - low) / (high - low + _FLOOR)) ** gamma * (high - low) + low
    factor, offset = (within.bright * (2 * _drawn(draws, part, 2)[1] - 1) for part in (scale, shift))
    image = image * (1 + factor) + offset
    chance, where = _drawn(draws, noise, 2)
    if chance < _NOISY:
        values = draws.normal(0, within.noise * where, size=image.shape)
        image = image + torch.as_tensor(values, dtype=torch.float32).to(image.device)
    for axis, flip in zip(within.mirrored, flips, strict=True):
        if _drawn(draws, flip, 1)[0] < _MIRRORED:
            image, target = image.flip(axis + 1), target.flip(axis + 1)
    return image, target


def _rotate_mirror(image: Image, target: Target, seed: int) -> tuple[Image, Target]:
    """Apply the augmentation ``rotate-mirror``: rotate or mirror image [c, x, y, z] and target [k, x, y, z] together,
    with probability ½.
    """
    transform = _rotate_or_mirror()
    transform.set_random_state(seed=seed)
    pair = transform({"image": image, "target": target})
    return pair["image"].as_tensor(), pair["target"].as_tensor()


def affine(uniform: Float[np.ndarray, "15"], grid: tuple[int, ...], within: Ranges) -> Float[np.ndarray, "3 4"]:
    """Return the matrix that maps an output voxel to the position in the input from which its value is taken.

    Positions are in voxels from the grid's centre. The matrix is the product of rotations about the three axes, shear,
    shift and scale; the scale is applied to the voxel first.

    Args:
        uniform: 15 numbers drawn from [0, 1).
        grid: Shape of the volume.
        within: The largest rotations and scalings.

    Returns:
        Matrix of shape [3, 4].
    """
    limits = [*within.rotate, *[_SHEAR] * 6, *(n / 12 for n in grid), *[within.scale] * 3]
    drawn = np.array(limits) * (2 * uniform - 1)
    result = np.eye(4)
    for axis, angle in enumerate(drawn[:3]):
        turn, (first, second) = np.eye(4), ((1, 2), (2, 0), (0, 1))[axis]
        turn[[first, second], [first, second]] = np.cos(angle)
        turn[[second, first], [first, second]] = np.sin(angle), -np.sin(angle)
        result = result @ turn
    shears = np.eye(4)
    for axis, (first, second) in enumerate(((1, 2), (0, 2), (0, 1))):
        shear = np.eye(4)
        shear[axis, [first, second]] = drawn[3 + 2 * axis : 5 + 2 * axis]
        shears = shear @ shears
    shift = np.eye(4)
    shift[:3, 3] = drawn[9:12]
    moved: np.ndarray = (result @ shears @ shift @ np.diag([*(1 + drawn[12:]), 1]))[:3]
    return moved


def resample(
    volume: Float[torch.Tensor, "c x y z"], matrix: Float[np.ndarray, "3 4"]
) -> Float[torch.Tensor, "c x y z"]:
    """Resample a volume trilinearly by a matrix of :func:`affine`. Beyond the border, the edge value is used.

    Args:
        volume: Tensor [c, x, y, z].
        matrix: Shape [3, 4].

    Returns:
        Tensor [c, x, y, z].
    """
    rows = (matrix / (np.array(volume.shape[1:]) / 2)[:, None])[::-1]  # in grid_sample's units, last axis first
    along = torch.tensor(rows.copy(), dtype=torch.float32, device=volume.device)
    x, y, z = (torch.arange(n, dtype=torch.float32, device=volume.device) - (n - 1) / 2 for n in volume.shape[1:])
    plane = along[:, 1, None, None] * y[:, None] + (along[:, 2, None] * z + along[:, 3, None])[:, None]
    places = ((along[:, 0, None] * x)[:, :, None, None] + plane[:, None]).movedim(0, -1)
    moved = torch.nn.functional.grid_sample(volume[None], places[None], padding_mode="border", align_corners=False)
    return moved[0]


def _drawn(draws: np.random.RandomState, seed: int, count: int) -> Float[np.ndarray, "n"]:
    """Seed the generator ``draws``, and return its first random numbers in [0, 1). Later calls of the generator
    continue after these.
    """
    draws.seed(seed)
    return draws.random_sample(count)


@cache
def _rotate_or_mirror() -> Compose:
    both = ["image", "target"]
    turn = RandRotated(
        keys=both, prob=0.5, range_x=0.25, range_y=0.25, range_z=0.25, mode="bilinear", padding_mode="border"
    )
    return Compose([OneOf([turn, RandAxisFlipd(keys=both, prob=0.5)])])


AUGMENTS: Mapping[str, Augment] = {
    "smooth": smooth,
    "wide": partial(smooth, within=WIDE),
    "wider": partial(smooth, within=WIDER),
    "wide-mirror": partial(smooth, within=MIRRORED),
    "rotate-mirror": _rotate_mirror,
}
"""Every augmentation by its name."""
