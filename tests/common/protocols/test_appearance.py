"""Tests a voter's statistics of its structures: which values they contain, and which they never contain."""

from __future__ import annotations

from typing import cast

import numpy as np
import pytest
from jaxtyping import Float

from common.codecs.codec import Codec
from common.config import CodecConfig, DataConfig
from common.errors import InvalidInput
from common.privacy.quantise import quantise
from common.protocols.appearance import LEAST_STD, AppearanceEncoder, window_of
from common.protocols.frame import Frame
from server.protocols.appearance.look import first_frame
from tests.worlds import make_study

GRID, CHANNELS = (8, 8, 8), 2
WINDOW = np.random.default_rng(7).uniform(0.1, 1, GRID)


@pytest.fixture
def frame() -> Frame:
    data = DataConfig(labels=("background", "a", "b"), spacing_mm=(1, 1, 1), grid=GRID, channels=("t1", "t2"))
    study = make_study(data=data, codec=CodecConfig(protocol="appearance"))
    return first_frame(study, codec="a" * 64, noise_std=0.01)


@pytest.fixture
def encoder(frame: Frame) -> AppearanceEncoder:
    return AppearanceEncoder(frame, WINDOW, labels=3, channels=CHANNELS)


def volume(seed: int) -> tuple[Float[np.ndarray, "k x y z"], Float[np.ndarray, "c x y z"]]:
    rng = np.random.default_rng(seed)
    found = rng.integers(0, 3, GRID)
    probabilities = np.where(found == np.arange(3)[:, None, None, None], 0.8, 0.1).astype(np.float32)
    return probabilities, rng.normal(found, 0.5 + 0.2 * found, (CHANNELS, *GRID)).astype(np.float32)


def relative(image: Float[np.ndarray, "c x y z"]) -> Float[np.ndarray, "c x y z"]:
    """Return the image with weighted mean 0 and spread 1 for each channel, by numpy's weighted statistics."""
    found = []
    for values in image.astype(np.float64):
        mean = np.average(values, weights=WINDOW)
        found.append((values - mean) / np.sqrt(np.average((values - mean) ** 2, weights=WINDOW)))
    return np.stack(found)


def offsets(code: Float[np.ndarray, "d"], frame: Frame) -> Float[np.ndarray, "j 2c"]:
    seen = frame.read(code, noise_std=0.0)
    return (frame.centre + frame.across(seen.value))[0].reshape(2, 2 * CHANNELS)


def test_a_code_is_mean_and_log_spread_of_all_its_voxels(encoder: AppearanceEncoder, frame: Frame) -> None:
    volumes = [volume(seed) for seed in range(3)]
    codes = np.stack([encoder.of_volume(labels, lambda one=image: one) for labels, image in volumes])
    found = offsets(encoder.of_voter(codes), frame)
    for structure in (1, 2):
        inside = np.concatenate([relative(x)[:, p.argmax(axis=0) == structure] for p, x in volumes], axis=1)
        expected = np.concatenate([inside.mean(axis=1), np.log(inside.std(axis=1) + LEAST_STD)])
        np.testing.assert_allclose(found[structure - 1], expected, rtol=1e-5)


def test_a_volumes_brightness_and_contrast_change_no_code(encoder: AppearanceEncoder) -> None:
    labels, image = volume(1)
    plain, other = (encoder.of_volume(labels, lambda one=each: one) for each in (image, 40 * image - 300))
    np.testing.assert_allclose(other, plain, rtol=1e-3, atol=1e-2)


def test_a_channel_of_one_value_says_nothing_of_it_and_breaks_nothing(encoder: AppearanceEncoder) -> None:
    labels, image = volume(1)
    flat = np.stack([np.full_like(image[0], 3.0), image[1]])
    sums = encoder.of_volume(labels, lambda: flat).reshape(2, 1 + 2 * CHANNELS)
    assert not sums[:, [1, 3]].any()
    assert np.isfinite(sums).all()


def test_the_window_is_the_mean_shapes_place_and_nowhere_nothing() -> None:
    corner = np.zeros((2, 16, 16, 16), np.float32)
    corner[0], corner[:, :4, :4, :4] = 1, [[[[0.0]]], [[[1.0]]]]

    class MeanShape:
        dimension = 1

        @staticmethod
        def decode(code: Float[np.ndarray, "l"], *, noise_std: float) -> Float[np.ndarray, "k x y z"]:
            assert not code.any()
            return corner

    window = window_of(cast("Codec", MeanShape()))
    assert window.max() == window[0, 0, 0]
    assert 0 < window.min() < window.max() / 5


def test_a_structure_that_is_found_nowhere_says_nothing(encoder: AppearanceEncoder, frame: Frame) -> None:
    flat = np.full((3, *GRID), 1 / 3, dtype=np.float32)  # no class is predicted anywhere
    codes = np.stack([encoder.of_volume(flat, lambda: volume(0)[1])] * 2)
    np.testing.assert_allclose(encoder.of_voter(codes), 0, atol=1e-12)


def test_whatever_a_voter_says_is_clipped_to_the_radius(encoder: AppearanceEncoder, frame: Frame) -> None:
    """The few voxels of its structure are the brightest of all, in every channel."""
    _, image = volume(1)
    labels, corner = np.zeros((3, *GRID), np.float32), (slice(0, 3),) * 3
    labels[0], labels[:, *corner], image[:, *corner] = 1, np.array([0, 1, 0]).reshape(3, 1, 1, 1), 1e4
    code = encoder.of_voter(encoder.of_volume(labels, lambda: image)[None])
    assert np.linalg.norm(code) > 1
    assert np.linalg.norm(quantise(code, radius_int=1 << 10)) <= 1 << 10


def test_a_value_that_is_no_number_is_refused(encoder: AppearanceEncoder) -> None:
    labels, image = volume(1)
    broken = np.where(labels[1:2].argmax(axis=0) == 0, np.nan, image)
    with pytest.raises(InvalidInput):
        encoder.of_voter(encoder.of_volume(labels, lambda: broken)[None])


def test_another_image_or_prediction_is_refused(encoder: AppearanceEncoder) -> None:
    labels, image = volume(1)
    with pytest.raises(InvalidInput, match="channels"):
        encoder.of_volume(labels, lambda: image[:1])
    with pytest.raises(InvalidInput, match="probabilities"):
        encoder.of_volume(labels[:2], lambda: image)
