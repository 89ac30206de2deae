"""An answer of the ledger decodes to what its codes mean, and nothing else decodes."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest

from common.codecs import Codec, fit_codec
from common.errors import InvalidInput
from common.privacy.mechanism import radius_int
from common.privacy.quantise import quantise
from server.protocols.decode import decode_answer, mean_noise_std
from tests.contracts.codec_contract import CodecContract, dice, patients, soft


class Pca(CodecContract):
    name = "pca"


@pytest.fixture(scope="module")
def codec() -> Codec:
    return fit_codec(Pca.study(), patients(16, seed=1), noise_std=0.01)


def test_a_sum_of_equal_codes_decodes_to_their_shape(codec: Codec) -> None:
    truth = patients(1, seed=9)[0]
    code = quantise(codec.encode(soft(truth)), radius_int=radius_int(codec.radius))
    decoded = decode_answer(codec, 5 * code, voters=5, noise_std_int=Fraction(1))
    mean_shape = codec.decode(np.zeros(codec.dimension), noise_std=0.0)
    assert dice(decoded.argmax(0), truth) > dice(mean_shape.argmax(0), truth)
    np.testing.assert_allclose(decoded, codec.decode(code / 2**16, noise_std=0.0), atol=1e-4)


def test_the_noise_on_the_mean_is_the_noise_on_the_sum_over_grid_and_voters() -> None:
    assert mean_noise_std(Fraction(3 * 2**16, 2), voters=6) == 0.25
    draws = np.random.default_rng(0).normal(0, 1.5 * 2**16, 100_000) / 2**16 / 6
    assert mean_noise_std(Fraction(3 * 2**16, 2), voters=6) == pytest.approx(draws.std(), rel=0.02)


def test_the_more_noise_the_nearer_to_the_mean_shape(codec: Codec) -> None:
    code = quantise(codec.encode(soft(patients(1, seed=9)[0])), radius_int=radius_int(codec.radius))
    mean_shape = codec.decode(np.zeros(codec.dimension), noise_std=0.0)
    gaps = [
        np.abs(decode_answer(codec, code, voters=1, noise_std_int=Fraction(s)) - mean_shape).mean()
        for s in (1, 10_000, 100_000, 10_000_000)
    ]
    assert gaps == sorted(gaps, reverse=True)
    assert gaps[-1] < 1e-4


def test_what_is_no_answer_of_this_codec_is_refused(codec: Codec) -> None:
    answer = np.zeros(codec.dimension, np.int64)
    for bad in (answer[:-1], answer.astype(np.float64), answer.astype(np.int32), answer[None], list(answer)):
        with pytest.raises(InvalidInput, match="noisy sum"):
            decode_answer(codec, bad, voters=4, noise_std_int=Fraction(1))  # type: ignore[arg-type]
    for voters in (0, -1, True, 2.0):
        with pytest.raises(InvalidInput, match="voters"):
            decode_answer(codec, answer, voters=voters, noise_std_int=Fraction(1))  # type: ignore[arg-type]
    for noise in (Fraction(0), Fraction(-1), 1.0):
        with pytest.raises(InvalidInput, match="noise"):
            decode_answer(codec, answer, voters=4, noise_std_int=noise)  # type: ignore[arg-type]
