"""Tests the joint query's linear algebra against dense Gaussian conditioning and plain projections."""

from __future__ import annotations

import hashlib
from dataclasses import replace

import numpy as np
import pytest

from common.codecs.codec import pack
from common.errors import InvalidInput
from common.protocols.frame import (
    FILL,
    MAX_COORDINATES,
    Frame,
    Observation,
    plan_frame,
    sharpen,
)

CODEC = hashlib.sha256(b"codec").hexdigest()
VOLUMES, KEPT, LENGTH = 6, 3, 4
VARIANCES = np.array([0.5, 0.25, 0.1, 0.02])


def kernel(*, seed: int = 0, rank: int = VOLUMES * KEPT) -> np.ndarray:
    factors = np.random.default_rng(seed).normal(size=(VOLUMES * KEPT, rank)) * np.geomspace(1, 0.05, rank)
    return factors @ factors.T


def frame(*, noise_std: float = 0.01, rank: int = VOLUMES * KEPT) -> Frame:
    return plan(kernel(rank=rank), noise_std=noise_std)


def plan(moves: np.ndarray, *, noise_std: float = 0.01) -> Frame:
    return plan_frame(
        kernel=moves,
        centre=np.random.default_rng(1).normal(size=(VOLUMES, LENGTH)),
        variances=VARIANCES,
        residual=0.5,
        temperature=0.5,
        noise_std=noise_std,
        radius=1.0,
        codec=CODEC,
    )


def dense_basis(planned: Frame) -> np.ndarray:
    """Return the asked directions over all coordinates of all volumes, volume by volume."""
    full = np.zeros((planned.dimension, VOLUMES, LENGTH))
    full[:, :, :KEPT] = planned.basis[planned.weights > 0]
    return full.reshape(planned.dimension, -1)


def test_a_basis_begins_where_most_is_expected_and_its_rows_are_orthonormal() -> None:
    planned = frame(noise_std=1e-6)
    rows = dense_basis(planned)
    np.testing.assert_allclose(rows @ rows.T, np.eye(len(rows)), atol=1e-6)
    assert (np.diff(planned.variances) <= 0).all()
    assert planned.variances.sum() == pytest.approx(0.5 * VOLUMES * VARIANCES.sum())
    direction = np.linalg.svd(kernel())[0][:, 0]
    assert abs(direction @ planned.basis[0].ravel()) == pytest.approx(1, abs=1e-6)


def test_a_code_of_the_expected_size_fills_the_radius() -> None:
    planned = frame()
    assert (planned.weights**2 * planned.variances).sum() == pytest.approx(FILL**2, rel=1e-9)


def test_more_noise_sends_fewer_coordinates_and_never_none() -> None:
    sizes = [frame(noise_std=noise).dimension for noise in (1e-6, 0.05, 0.5, 50.0)]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] == VOLUMES * KEPT
    assert sizes[-1] >= 1


def test_a_large_batch_of_volumes_sends_no_more_than_the_limit() -> None:
    volumes, size = 60, 10
    planned = plan_frame(
        kernel=np.eye(volumes * size),
        centre=np.zeros((volumes, size)),
        variances=np.ones(size),
        residual=0.5,
        temperature=1.0,
        noise_std=1e-6,
        radius=1.0,
        codec=CODEC,
    )
    assert planned.dimension == MAX_COORDINATES


def test_directions_in_which_nothing_can_be_learnt_are_not_sent() -> None:
    assert frame(noise_std=1e-9, rank=2).dimension == 2


def test_a_frame_reads_without_noise_the_codes_that_were_encoded() -> None:
    planned = frame(noise_std=1e-6)
    codes = planned.centre + planned.across(np.random.default_rng(2).normal(size=planned.dimension))
    seen = planned.read(planned.encode(codes), noise_std=0.0)
    np.testing.assert_allclose(planned.estimate(seen), codes, atol=1e-5)


def test_a_mean_of_joint_codes_reads_as_the_joint_code_of_the_mean() -> None:
    planned = frame()
    codes = np.random.default_rng(3).normal(size=(5, VOLUMES, LENGTH))
    mean = np.mean([planned.encode(code) for code in codes], axis=0)
    np.testing.assert_allclose(mean, planned.encode(codes.mean(axis=0)), atol=1e-12)


def test_the_estimate_is_the_gaussian_posterior() -> None:
    """The oracle conditions one dense covariance over all coordinates by a linear solve."""
    planned, rng = frame(noise_std=0.05), np.random.default_rng(4)
    seen = Observation(value=rng.normal(size=planned.dimension), variance=rng.uniform(0.05, 1, size=planned.dimension))
    found = planned.estimate(seen)

    rows = dense_basis(planned)
    prior = rows.T @ np.diag(planned.variances[planned.weights > 0]) @ rows
    gain = prior @ rows.T @ np.linalg.inv(rows @ prior @ rows.T + np.diag(seen.variance))
    oracle = planned.centre.ravel() + gain @ seen.value
    np.testing.assert_allclose(found.ravel(), oracle, atol=1e-5)


def test_where_only_noise_was_seen_the_estimate_is_the_centre() -> None:
    planned = frame()
    found = planned.estimate(Observation(np.ones(planned.dimension), np.full(planned.dimension, np.inf)))
    np.testing.assert_array_equal(found, planned.centre)
    assert found is not planned.centre


def noisy(planned: Frame, codes: np.ndarray, *, noise_std: float, seed: int) -> Observation:
    """Return the observation that a release of these mean codes gives; codes this short are never clipped."""
    noise = np.random.default_rng(seed).normal(0, noise_std, planned.dimension)
    return planned.read(planned.encode(codes) + noise, noise_std=noise_std)


def test_after_two_rounds_the_estimate_is_the_posterior_of_both_observations() -> None:
    """The oracle conditions the dense prior covariance once on both rounds' observations by a linear solve."""
    first, sigma = frame(noise_std=0.05), 0.05
    codes = first.centre + 0.1 * np.random.default_rng(7).normal(size=first.centre.shape)
    one = noisy(first, codes, noise_std=sigma, seed=8)
    second = first.after(one, noise_std=sigma, radius=1.0)
    two = noisy(second, codes, noise_std=sigma, seed=9)
    found = second.estimate(two)

    full = np.zeros((len(first.basis), VOLUMES, LENGTH))
    full[:, :, :KEPT] = first.basis
    full = full.reshape(len(first.basis), -1)
    prior = full.T @ np.diag(first.variances) @ full
    rows = np.concatenate([dense_basis(first), dense_basis(second)])
    # The second round is measured from its own centre.
    moved = dense_basis(second) @ (second.centre - first.centre).ravel()
    values = np.concatenate([one.value, two.value + moved])
    noise = np.diag(np.concatenate([one.variance, two.variance]))
    oracle = first.centre.ravel() + prior @ rows.T @ np.linalg.solve(rows @ prior @ rows.T + noise, values)
    np.testing.assert_allclose(found.ravel(), oracle, atol=1e-5)


def test_the_next_round_fills_the_radius_with_what_is_still_open() -> None:
    first = frame(noise_std=0.2)
    second = first.after(noisy(first, first.centre, noise_std=0.2, seed=1), noise_std=0.2, radius=1.0)
    assert (second.weights**2 * second.variances).sum() == pytest.approx(FILL**2, rel=1e-9)
    assert (second.variances <= first.variances).all()
    assert second.variances.sum() < first.variances.sum()
    np.testing.assert_array_equal(second.basis, first.basis)


@pytest.mark.parametrize("noise_std", [0.05, 0.2, 1.0])
def test_more_rounds_of_the_same_budget_leave_less_error(noise_std: float) -> None:
    """Each of R rounds has √R times the noise; the remaining error does not depend on the answers."""

    def left(rounds: int) -> float:
        sigma = noise_std * rounds**0.5
        asked = frame(noise_std=sigma)
        for _ in range(rounds):
            asked = asked.after(noisy(asked, asked.centre, noise_std=sigma, seed=0), noise_std=sigma, radius=1.0)
        return float(asked.variances.sum())

    errors = [left(rounds) for rounds in (1, 2, 4, 8)]
    assert errors == sorted(errors, reverse=True)
    assert errors[2] < 0.99 * errors[0]


def test_sharpening_keeps_the_likeliest_class_and_the_sum() -> None:
    soft = np.array([0.5, 0.3, 0.2]).reshape(3, 1, 1, 1)
    sharp = frame().sharpen(soft)  # squares over their sum
    np.testing.assert_allclose(sharp.ravel(), np.array([0.25, 0.09, 0.04]) / 0.38)
    np.testing.assert_allclose(sharpen(soft, temperature=1.0), soft)


@pytest.mark.parametrize("broken", [np.full((3, 2, 2, 2), np.nan), np.full((3, 2, 2, 2), 2.0)])
def test_what_are_no_probabilities_cannot_hide_behind_sharpening(broken: np.ndarray) -> None:
    with pytest.raises(InvalidInput):
        frame().sharpen(broken)


def test_a_frame_keeps_its_bytes_and_refuses_others() -> None:
    planned = frame()
    data = planned.to_bytes()
    again = Frame.from_bytes(data)
    assert again.to_bytes() == data
    np.testing.assert_array_equal(again.weights, planned.weights)
    assert again.temperature == planned.temperature
    with pytest.raises(InvalidInput):
        Frame.from_bytes(data + b" ")


@pytest.mark.parametrize(
    ("name", "spoil"),
    [
        ("basis", lambda array: array * 1.01),
        ("basis", lambda array: array[:, :-1]),
        ("centre", lambda array: array * np.nan),
        ("centre", lambda array: array[:, :2]),
        ("weights", lambda array: -array),
        ("weights", lambda array: array * 0),
        ("weights", lambda array: array[:2]),
        ("variances", lambda array: array * 0),
    ],
)
def test_a_frame_that_could_not_be_read_back_is_refused(name: str, spoil: object) -> None:
    planned = frame()
    with pytest.raises(InvalidInput):
        replace(planned, **{name: spoil(getattr(planned, name))})  # type: ignore[operator, arg-type]


@pytest.mark.parametrize("temperature", [0.0, -1.0, 1.5, float("nan")])
def test_temperatures_that_do_not_sharpen_are_refused(temperature: float) -> None:
    with pytest.raises(InvalidInput, match="temperature"):
        replace(frame(), temperature=temperature)


@pytest.mark.parametrize(
    "wrong", [np.zeros((18, 18)), np.full((18, 18), np.nan), np.eye(17), np.ones((18, 12)), np.eye(60)]
)
def test_kernels_that_fit_no_volumes_are_refused(wrong: np.ndarray) -> None:
    with pytest.raises(InvalidInput, match="kernel"):
        plan(wrong)


@pytest.mark.parametrize("codes", [np.zeros((5, 4)), np.full((6, 4), np.nan), [[0.0]]])
def test_codes_of_other_volumes_and_broken_ones_are_refused(codes: object) -> None:
    with pytest.raises(InvalidInput):
        frame().encode(codes)  # type: ignore[arg-type]


def test_a_small_file_of_a_huge_frame_is_refused_before_it_is_worked_on() -> None:
    few = {"variances": np.ones(100_000), "weights": np.ones(100_000), "centre": np.zeros((1, 1))}
    arrays = {"basis": np.ones((100_000, 1, 1), dtype=np.float32), **few}
    header = {"codec": "c" * 64, "name": "round-frame", "schema": 1, "temperature": (1.0).hex()}
    with pytest.raises(InvalidInput, match="basis"):  # its Gram matrix would take 80 GB
        Frame.from_bytes(pack(header, arrays))


def test_an_array_that_announces_more_than_the_file_holds_is_refused_before_it_is_allocated() -> None:
    planned = frame().to_bytes()
    header = planned.index(b"'shape': (")
    spoilt = bytearray(planned)
    end = spoilt.index(b")", header)
    spoilt[header + 10 : end] = b"9" * (end - header - 12) + b", "
    with pytest.raises(InvalidInput):
        Frame.from_bytes(bytes(spoilt))
