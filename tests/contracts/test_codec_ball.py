"""Tests that the autoencoder codec keeps the contract of all codecs, and that a collapsed one breaks it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from common.codecs import Codec, ball_autoencoder
from common.codecs.ball_autoencoder import BallAutoencoder
from tests.contracts.codec_contract import CodecContract


class TestBallAutoencoder(CodecContract):
    name = "ball-ae"

    @pytest.fixture(scope="class", autouse=True)
    @classmethod
    def _shorter(cls) -> Iterator[None]:
        """Shorten the seven fits of the contract; tests/common/codecs/test_ball_autoencoder tests a whole fit."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(ball_autoencoder, "STEPS", 25)
            yield

    @pytest.mark.parametrize("kind", ["constant", "one coordinate", "constant length"])
    def test_a_collapsed_codec_breaks_the_contract(
        self, codec: Codec, maps: np.ndarray, others: np.ndarray, kind: str
    ) -> None:
        assert isinstance(codec, BallAutoencoder)
        weights = {name: array.copy() for name, array in codec.weights.items()}
        weights["encoder_dense"][:] = 0
        if kind == "constant":  # every patient has the same code
            weights["encoder_linear"][:] = 0
            weights["encoder_dense_bias"][:] = 1
        elif kind == "one coordinate":  # all other coordinates are 0
            weights["encoder_linear"][1:] = 0
        else:  # codes stay near the centre
            weights["encoder_dense_bias"][0] = -20 * codec.dimension
        collapsed = replace(codec, weights=weights)
        broken = []
        for promise in (
            "test_codes_of_different_patients_differ",
            "test_at_least_half_of_the_coordinates_carry_something",
            "test_decoding_beats_the_mean_shape_on_patients_it_was_not_fitted_on",
        ):
            getattr(self, promise)(codec, others)
            try:
                getattr(self, promise)(collapsed, others)
            except AssertionError:
                broken.append(promise)
        assert len(broken) >= 2


class TestBallAutoencoderOfAnotherRadius(TestBallAutoencoder):
    radius = 3.0
    planned_noise = 0.15
