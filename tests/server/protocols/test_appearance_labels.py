"""Tests labels computed from looks: they find structures where public shapes only say that there is one."""

from __future__ import annotations

import numpy as np
import pytest

from common.codecs.pca import PcaCodec
from common.config import CodecConfig, DataConfig
from common.metrics import dice_per_class
from server.planning.public_shapes import codec_of
from server.protocols.appearance.labels import labelled, placed
from server.protocols.appearance.look import Look, first_frame
from tests.worlds import make_study

GRID = (24, 24, 16)
NOISE = 0.163
STUDY = make_study(
    data=DataConfig(
        labels=("background", "dead", "oedema", "enhancing"),
        spacing_mm=(4.0, 4.0, 4.0),
        grid=(32, 32, 32),
        channels=("FLAIR", "T1", "T1ce", "T2"),
    ),
    codec=CodecConfig(protocol="appearance"),
)
KNOWN = Look(np.array([[2.0, np.log(0.5)]]), np.full((1, 2), 0.01))
DOUBTED = Look(np.array([[1.0, 0.0]]), np.full((1, 2), 0.1))
UNKNOWN = Look(np.array([[0.0, -0.4]]), np.array([[1.44, 0.12]]))


def ball(centre: tuple[int, int, int]) -> np.ndarray:
    away = np.indices(GRID) - np.array(centre).reshape(3, 1, 1, 1)
    return (np.square(away).sum(axis=0) <= 16).astype(np.uint8)


def case(seed: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    truth = ball(tuple(np.array([12, 12, 8]) + rng.integers(-4, 5, 3)))
    image = np.where(truth == 1, rng.normal(2.0, 0.5, GRID), rng.normal(0.0, 1.0, GRID))[None].astype(np.float32)
    return image, truth


def anywhere(rng: np.random.Generator) -> list[np.ndarray]:
    """Return label maps whose structures have no common position."""
    return [ball((int(x), int(y), 8)) for x, y in rng.integers(5, 19, (8, 2))]


pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def codec() -> PcaCodec:
    rng = np.random.default_rng(9)
    return codec_of([ball(tuple(np.array([12, 12, 8]) + rng.integers(-4, 5, 3))) for _ in range(8)], labels=2)


def test_known_looks_find_what_public_shapes_alone_do_not(codec: PcaCodec) -> None:
    cases = [case(seed) for seed in range(4)]
    scores = []
    for look in (KNOWN, UNKNOWN):
        found = list(labelled([image for image, _ in cases], codec, look))
        for label in found:
            np.testing.assert_allclose(label.sum(axis=0), 1, atol=1e-5)
        hard = [label.argmax(axis=0).astype(np.uint8) for label in found]
        scores.append(np.mean([dice_per_class(one, truth, 2)[0] for one, (_, truth) in zip(hard, cases, strict=True)]))
    assert scores[0] > 0.8
    assert scores[0] > scores[1] + 0.2


def test_known_looks_find_structures_that_have_no_place() -> None:
    """If structures have no common position, only their grey values tell where one is."""
    rng, image = np.random.default_rng(3), np.zeros((1, *GRID), np.float32)
    strewn = codec_of(anywhere(rng), labels=2)
    truth = ball((18, 6, 8))
    image[0] = np.where(truth == 1, rng.normal(2.0, 0.5, GRID), rng.normal(0.0, 1.0, GRID))
    dice = []
    for look in (KNOWN, UNKNOWN):
        (label,) = labelled([image], strewn, look)
        dice.append(dice_per_class(label.argmax(axis=0).astype(np.uint8), truth, 2)[0])
    assert dice[0] > 0.6
    assert dice[0] > dice[1] + 0.2


def test_volumes_of_another_brightness_get_the_same_labels(codec: PcaCodec) -> None:
    image, _ = case(0)
    plain, brighter = (next(labelled([each], codec, KNOWN)) for each in (image, 3 * image + 5))
    np.testing.assert_allclose(brighter, plain, atol=1e-4)


def test_a_public_starts_prediction_moves_the_labels_of_every_volume(codec: PcaCodec) -> None:
    """A start that predicts a wrong place moves the labels there. A start with the right place improves them."""
    image, truth = case(2)
    dice = []
    for said in (None, truth, ball((4, 19, 3))):
        begun = None if said is None else [np.stack([1 - said, said]).astype(np.float32)]
        (label,) = labelled([image], codec, DOUBTED, begun=begun)
        dice.append(dice_per_class(label.argmax(axis=0).astype(np.uint8), truth, 2)[0])
    alone, right, wrong = dice
    assert right > alone > wrong


def test_shapes_with_a_common_place_are_distinguished_from_those_without() -> None:
    near = [ball((x, y, 8)) for x in (11, 12, 13) for y in (11, 12, 13)]
    assert placed(codec_of(near, labels=2))
    assert not placed(codec_of(anywhere(np.random.default_rng(4)), labels=2))


def test_looks_of_tumours_in_four_contrasts_come_through_the_clip_in_four_rounds() -> None:
    """The looks are means and spreads of the made-up tumours. Noise is planned for 18 voters at (8, 1e-5), but not
    drawn.
    """
    means = [[1.81, 0.74, 1.35, 2.81], [2.63, 1.09, 1.20, 2.26], [2.26, 1.14, 2.58, 2.11]]
    stds = [[0.26, 0.26, 0.38, 0.29], [0.37, 0.30, 0.32, 0.34], [0.29, 0.27, 0.37, 0.28]]
    looks = np.concatenate([means, np.log(stds)], axis=1).reshape(1, -1)
    frame = first_frame(STUDY, codec="a" * 64, noise_std=NOISE)
    for _ in range(4):
        code = frame.encode(looks)
        seen = frame.read(code * min(1.0, 1 / np.linalg.norm(code)), noise_std=NOISE)
        frame = frame.after(seen, noise_std=NOISE, radius=1.0)
    short = np.abs(frame.centre - looks).reshape(3, 2, 4)[:, 0]
    assert short.max() < 0.4, short


@pytest.mark.parametrize("overlap", [True, False])
def test_a_nearest_public_shape_is_a_labels_prior_only_where_public_shapes_overlap(
    overlap: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the mean shape always replaced the nearest one, labels would change only where shapes overlap."""
    near = [ball((x, y, 8)) for x in (10, 12, 14) for y in (10, 12, 14)]
    used = codec_of(near if overlap else anywhere(np.random.default_rng(4)), labels=2)
    rng, truth = np.random.default_rng(3), ball((14, 14, 8))
    image = np.where(truth == 1, rng.normal(2.0, 0.5, GRID), rng.normal(0.0, 1.0, GRID))[None].astype(np.float32)
    (label,) = labelled([image], used, DOUBTED)
    monkeypatch.setattr(PcaCodec, "encode", lambda self, _probabilities: np.zeros(self.dimension))
    (of_mean,) = labelled([image], used, DOUBTED)
    assert np.array_equal(label, of_mean) is not overlap
    if overlap:
        dice = [dice_per_class(one.argmax(axis=0).astype(np.uint8), truth, 2)[0] for one in (label, of_mean)]
        assert dice[0] > dice[1]
