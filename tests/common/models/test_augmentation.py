"""Tests augmentation: its allowed changes to a volume, against MONAI's transforms with the same seed."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from common.models.augmentation import AUGMENTS, SMOOTH, WIDE, WIDER, Ranges, affine
from tests.common.models.monai_augmentation import monais


def balls() -> tuple[torch.Tensor, torch.Tensor]:
    """Return a noisy volume with a bright ball on the left and a dark one on the right, and its one-hot target."""
    place = np.stack(np.meshgrid(*[np.arange(16)] * 3, indexing="ij"), axis=-1)
    labels = sum(value * (np.linalg.norm(place - low, axis=-1) < 3) for value, low in ((1, 5), (2, 11)))
    noise = np.random.default_rng(0).normal(0, 0.5, labels.shape)
    image = torch.tensor(np.choose(labels, [0, 3, -3]) + noise, dtype=torch.float32)[None]
    return image, torch.nn.functional.one_hot(torch.tensor(labels), 3).movedim(-1, 0).float()


@pytest.mark.parametrize("grid", [(16, 16, 16), (12, 20, 10)])
@pytest.mark.parametrize("kind", ["smooth", "wide", "wider", "wide-mirror"])
def test_smooth_and_wide_are_monais_transforms_with_the_same_seed(kind: str, grid: tuple[int, ...]) -> None:
    generator = torch.Generator().manual_seed(0)
    image = torch.randn(2, *grid, generator=generator)
    target = torch.softmax(torch.randn(3, *grid, generator=generator), dim=0)
    expected, kept = monais(grid, kind=kind), image.clone()
    for seed in range(25):
        expected.set_random_state(seed=seed)
        wanted = expected({"image": image, "target": target})
        moved, labels = AUGMENTS[kind](image, target, seed)
        torch.testing.assert_close(moved, wanted["image"].as_tensor(), rtol=0, atol=5e-5)
        torch.testing.assert_close(labels, wanted["target"].as_tensor(), rtol=0, atol=5e-5)
    assert torch.equal(image, kept)


@pytest.mark.parametrize("kind", ["smooth", "wide"])
def test_augmentation_moves_image_and_target_alike_and_never_mirrors(kind: str) -> None:
    before, truth = balls()
    transform = AUGMENTS[kind]
    left_right = []
    for seed in range(12):
        moved, labels = transform(before, truth, seed)
        image, target = moved.numpy()[0], labels.numpy()
        np.testing.assert_allclose(target.sum(axis=0), 1, atol=1e-4)
        inside = image[target[1] > 0.9].mean(), image[target[0] > 0.9].mean(), image[target[2] > 0.9].mean()
        assert inside[0] > inside[1] > inside[2]
        where = [np.average(np.arange(16), weights=target[c].sum(axis=(1, 2))) for c in (1, 2)]
        left_right.append(where[0] < where[1])
    assert all(left_right)


@pytest.mark.parametrize("within", [SMOOTH, WIDE, WIDER])
def test_no_drawn_transform_mirrors(within: Ranges) -> None:
    draws = np.random.default_rng(0)
    found = [np.linalg.det(affine(draws.uniform(size=15), (40, 24, 16), within)[:, :3]) for _ in range(1000)]
    assert min(found) > 0


def test_rotate_mirror_leaves_half_of_the_samples_and_turns_or_mirrors_the_others() -> None:
    before, truth = balls()
    transform = AUGMENTS["rotate-mirror"]
    kept = mirrored = turned = 0
    flips = [np.flip(before.numpy(), axis=axis) for axis in (1, 2, 3)]
    for seed in range(100):
        moved, labels = transform(before, truth, seed)
        image, target = moved.numpy(), labels.numpy()
        np.testing.assert_allclose(target.sum(axis=0), 1, atol=1e-4)
        # Image and labels were moved alike.
        assert image[0][target[1] > 0.9].mean() > image[0][target[2] > 0.9].mean() + 3
        if np.array_equal(image, before.numpy()):
            kept += 1
        elif any(np.array_equal(image, flip) for flip in flips):
            mirrored += 1
        else:
            turned += 1
    assert 30 < kept < 70  # 50 ± 4 standard deviations
    assert min(mirrored, turned) > 8


@pytest.mark.slow
def test_rotate_mirror_turns_by_up_to_a_quarter_radian_about_every_axis() -> None:
    """The angle of a turned straight rod through the centre never exceeds .25, and some angles come near it."""
    rods = {axis: torch.zeros(1, 25, 25, 25) for axis in range(3)}
    for axis, rod in rods.items():
        at: list[slice | int] = [12, 12, 12]
        at[axis] = slice(2, 23)
        rod[(0, *at)] = 1
    transform = AUGMENTS["rotate-mirror"]
    angles = []
    for seed in range(60):
        for axis, rod in rods.items():
            moved = transform(rod, rod, seed)[0].numpy()[0]
            place = np.argwhere(moved > 0.2) - 12
            length = np.linalg.svd(place - place.mean(axis=0))[2][0]
            angles.append(float(np.arccos(min(1, abs(length[axis])))))
    assert 0.2 < max(angles) < 0.25 * math.sqrt(2) + 0.05  # a rod is turned about the two other axes
