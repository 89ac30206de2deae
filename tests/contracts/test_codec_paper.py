"""Tests that the paper's linear algorithm keeps the codecs' contract except two promises, which show its weakness."""

from __future__ import annotations

import numpy as np

from common.codecs import Codec
from common.codecs.paper import paper_radius
from tests.contracts.codec_contract import GRID, LABELS, CodecContract, soft


class TestPaperPca(CodecContract):
    name = "paper-pca"
    radius = paper_radius(labels=LABELS, grid=GRID)
    planned_noise = 1.0

    def test_codes_of_different_patients_differ(self, codec: Codec, others: np.ndarray) -> None:
        """Codes differ only by a small part of the ball for which noise is calibrated, since real maps are far from its
        corners.
        """
        codes = np.stack([codec.encode(soft(label_map)) for label_map in others])
        assert 0 < codes.var(axis=0).sum() < 0.1 * codec.radius**2

    def test_at_least_half_of_the_coordinates_carry_something(self, codec: Codec, others: np.ndarray) -> None:
        """Eq (7) keeps coordinates above the planned noise on the fitted maps; half of them exceed it on other maps."""
        variances = np.var([codec.encode(soft(label_map)) for label_map in others], axis=0)
        assert (variances > self.planned_noise**2).mean() >= 0.5

    def test_knowing_the_noise_makes_decoding_better(self, codec: Codec, others: np.ndarray) -> None:
        """Algorithm 1 breaks this promise: it decodes as if there were no noise."""
        code = codec.encode(soft(others[0]))
        np.testing.assert_array_equal(codec.decode(code, noise_std=0.0), codec.decode(code, noise_std=9.0))
