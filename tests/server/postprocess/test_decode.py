"""Tests that an answer of the ledger decodes to the meaning of its codes, and that nothing else decodes."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest

from common.codecs import Codec, fit_codec
from common.errors import InvalidInput
from common.privacy.gaussian import rounded_gaussian
from common.privacy.mechanism import Mechanism, radius_int
from common.privacy.quantise import quantise
from common.privacy.shares import share_std
from server.protocols.decode import decode_answer
from tests.contracts.codec_contract import CodecContract, dice, patients, soft


def noised(noise_std: Fraction, *, voters_per_site: int = 1, colluders: int | None = None) -> Mechanism:
    return Mechanism(1, 1 << 16, voters_per_site, noise_std, colluders=colluders)


class Pca(CodecContract):
    name = "pca"


@pytest.fixture(scope="module")
def codec() -> Codec:
    return fit_codec(Pca.study(), patients(16, seed=1), noise_std=0.01)


def test_a_sum_of_equal_codes_decodes_to_their_shape(codec: Codec) -> None:
    truth = patients(1, seed=9)[0]
    code = quantise(codec.encode(soft(truth)), radius_int=radius_int(codec.radius))
    decoded = decode_answer(codec, 5 * code, voters=5, mechanism=noised(Fraction(1)))
    mean_shape = codec.decode(np.zeros(codec.dimension), noise_std=0.0)
    assert dice(decoded.argmax(0), truth) > dice(mean_shape.argmax(0), truth)
    np.testing.assert_allclose(decoded, codec.decode(code / 2**16, noise_std=0.0), atol=1e-4)


def test_the_noise_on_the_mean_is_the_noise_on_the_sum_over_grid_and_voters() -> None:
    mechanism = noised(Fraction(3 * 2**16, 2))
    assert mechanism.mean_noise_std(voters=6) == 0.25
    draws = np.random.default_rng(0).normal(0, 1.5 * 2**16, 100_000) / 2**16 / 6
    assert mechanism.mean_noise_std(voters=6) == pytest.approx(draws.std(), rel=0.02)


@pytest.mark.parametrize(("sites", "colluders"), [(3, 1), (5, 0), (8, 2)])
def test_an_answer_drawn_in_shares_is_read_with_the_noise_that_all_shares_add_up_to(sites: int, colluders: int) -> None:
    mechanism = noised(Fraction(3 * 2**16), voters_per_site=2, colluders=colluders)
    drawn = [rounded_gaussian(50_000, share_std(mechanism, sites=sites)) for _ in range(sites)]
    mean = np.sum(drawn, axis=0) / 2**16 / (2 * sites)
    assert mechanism.mean_noise_std(voters=2 * sites) == pytest.approx(mean.std(), rel=0.02)
    with pytest.raises(InvalidInput, match="voters"):
        mechanism.mean_noise_std(voters=2 * sites + 1)


def test_the_same_sum_says_less_where_its_noise_was_drawn_in_shares(codec: Codec) -> None:
    code = quantise(codec.encode(soft(patients(1, seed=9)[0])), radius_int=radius_int(codec.radius))
    mean_shape = codec.decode(np.zeros(codec.dimension), noise_std=0.0)
    gaps = [
        np.abs(decode_answer(codec, 3 * code, voters=3, mechanism=noised(Fraction(30_000), colluders=t)) - mean_shape)
        for t in (None, 1)
    ]
    assert gaps[1].mean() < gaps[0].mean()


def test_the_more_noise_the_nearer_to_the_mean_shape(codec: Codec) -> None:
    code = quantise(codec.encode(soft(patients(1, seed=9)[0])), radius_int=radius_int(codec.radius))
    mean_shape = codec.decode(np.zeros(codec.dimension), noise_std=0.0)
    gaps = [
        np.abs(decode_answer(codec, code, voters=1, mechanism=noised(Fraction(s))) - mean_shape).mean()
        for s in (1, 10_000, 100_000, 10_000_000)
    ]
    assert gaps == sorted(gaps, reverse=True)
    assert gaps[-1] < 1e-4


def test_a_vector_that_is_no_answer_of_this_codec_is_refused(codec: Codec) -> None:
    answer = np.zeros(codec.dimension, np.int64)
    for bad in (answer[:-1], answer.astype(np.float64), answer.astype(np.int32), answer[None], list(answer)):
        with pytest.raises(InvalidInput, match="noisy sum"):
            decode_answer(codec, bad, voters=4, mechanism=noised(Fraction(1)))  # type: ignore[arg-type]
    for voters in (0, -1, True, 2.0):
        with pytest.raises(InvalidInput, match="voters"):
            decode_answer(codec, answer, voters=voters, mechanism=noised(Fraction(1)))  # type: ignore[arg-type]
