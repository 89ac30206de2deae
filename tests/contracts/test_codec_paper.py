"""The paper's linear algorithm keeps the contract of all codecs but for two promises, which say why it is drowned."""

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
        """They do, by a small part of the ball that the noise is calibrated for: real maps are far from its corners."""
        codes = np.stack([codec.encode(soft(label_map)) for label_map in others])
        assert 0 < codes.var(axis=0).sum() < 0.1 * codec.radius**2

    def test_at_least_half_of_the_coordinates_carry_something(self, codec: Codec, others: np.ndarray) -> None:
        """Eq (7) keeps what exceeds the planned noise on maps it was fitted on; so half do elsewhere."""
        variances = np.var([codec.encode(soft(label_map)) for label_map in others], axis=0)
        assert (variances > self.planned_noise**2).mean() >= 0.5

    def test_knowing_the_noise_makes_decoding_better(self, codec: Codec, others: np.ndarray) -> None:
        """It does not: Algorithm 1 decodes as if there were none."""
        code = codec.encode(soft(others[0]))
        np.testing.assert_array_equal(codec.decode(code, noise_std=0.0), codec.decode(code, noise_std=9.0))
