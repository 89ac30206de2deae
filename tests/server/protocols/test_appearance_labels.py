"""Labels from looks: with what a structure looks like it is found where public shapes only know that there is one."""

from __future__ import annotations

import numpy as np
import pytest

from common.metrics import dice_per_class
from server.protocols.appearance.labels import labelled, made_up, placed
from server.protocols.appearance.look import Look
from server.protocols.appearance.protocol import _dealt

GRID = (24, 24, 16)
KNOWN = Look(np.array([[2.0, np.log(0.5)]]), np.full((1, 2), 0.01))
UNKNOWN = Look(np.array([[0.0, -0.4]]), np.array([[1.44, 0.12]]))


def ball(centre: tuple[int, int, int]) -> np.ndarray:
    away = np.indices(GRID) - np.array(centre).reshape(3, 1, 1, 1)
    return (np.square(away).sum(axis=0) <= 16).astype(np.uint8)


def case(seed: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    truth = ball(tuple(np.array([12, 12, 8]) + rng.integers(-4, 5, 3)))
    image = np.where(truth == 1, rng.normal(2.0, 0.5, GRID), rng.normal(0.0, 1.0, GRID))[None].astype(np.float32)
    return image, truth


@pytest.fixture(scope="module")
def shapes() -> np.ndarray:
    rng = np.random.default_rng(9)
    maps = [ball(tuple(np.array([12, 12, 8]) + rng.integers(-4, 5, 3))) for _ in range(8)]
    return np.stack([np.stack([1 - one, one]).astype(np.float32) for one in maps])


def test_known_looks_find_what_public_shapes_alone_do_not(shapes: np.ndarray) -> None:
    cases = [case(seed) for seed in range(4)]
    scores = []
    for look in (KNOWN, UNKNOWN):
        found = list(labelled([image for image, _ in cases], shapes, look))
        for label in found:
            np.testing.assert_allclose(label.sum(axis=0), 1, atol=1e-5)
        hard = [label.argmax(axis=0).astype(np.uint8) for label in found]
        scores.append(np.mean([dice_per_class(one, truth, 2)[0] for one, (_, truth) in zip(hard, cases, strict=True)]))
    assert scores[0] > 0.8
    assert scores[0] > scores[1] + 0.2


def test_a_made_up_case_has_its_structure_in_its_looks_and_spares_the_image(shapes: np.ndarray) -> None:
    image = np.random.default_rng(0).normal(size=(1, *GRID)).astype(np.float32)
    before = image.copy()
    made, targets = made_up([image], shapes, KNOWN, seed=0)
    again, _ = made_up([image], shapes, KNOWN, seed=0)
    np.testing.assert_array_equal(image, before)
    np.testing.assert_array_equal(made, again)
    inside = [one[0][target[1] > 0.5].mean() for one, target in zip(made, targets, strict=True)]
    assert min(inside) > 0.4
    np.testing.assert_allclose(made.reshape(len(made), -1).mean(axis=1), 0, atol=1e-4)


def test_shapes_have_a_place_where_their_mean_meets_them(shapes: np.ndarray) -> None:
    corners = [np.roll(shapes[0], offset, axis=(1, 2)) for offset in ((0, 0), (9, 0), (0, 9), (9, 9))]
    assert placed(np.stack([np.roll(shapes[0], step, axis=1) for step in range(4)]))
    assert not placed(np.stack(corners))


def test_dealt_looks_are_no_structures_own() -> None:
    look = Look(np.arange(12.0).reshape(2, 6), np.ones((2, 6)))
    assert not np.isclose(_dealt(look).values, look.values).any()
    assert sorted(_dealt(look).means.ravel()) == sorted(look.means.ravel())
    np.testing.assert_array_equal(_dealt(KNOWN).means, -KNOWN.means)
