"""The joint query's linear algebra against dense Gaussian conditioning and plain projections."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest

from common.codecs.frame import FILL, Frame, Observation, estimate, plan_frame, prior_variances, volume_rotation
from common.errors import InvalidInput

CODEC = hashlib.sha256(b"codec").hexdigest()
VARIANCES = np.array([0.5, 0.25, 0.1, 0.02])


def images(volumes: int = 6, *, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    latent, maps = rng.normal(size=(volumes, 3)) * (3, 2, 1), rng.normal(size=(3, 64))
    return (latent @ maps + 0.1 * rng.normal(size=(volumes, 64))).reshape(volumes, 1, 4, 4, 4)


def frame(*, noise_std: float = 0.01, volumes: int = 6) -> Frame:
    centre = np.random.default_rng(1).normal(size=(volumes, 4))
    return plan_frame(
        images=images(volumes),
        centre=centre,
        variances=VARIANCES,
        residual=0.5,
        noise_std=noise_std,
        radius=1.0,
        codec=CODEC,
    )


def test_the_rotation_puts_what_volumes_share_first() -> None:
    rotation, shares = volume_rotation(images())
    np.testing.assert_allclose(rotation @ rotation.T, np.eye(6), atol=1e-12)
    np.testing.assert_allclose(rotation[0], 6**-0.5)
    assert shares.sum() == pytest.approx(6)
    assert (np.diff(shares) <= 1e-12).all()
    left = np.linalg.svd(images().reshape(6, -1) - images().reshape(6, -1).mean(axis=0))[0][:, 0]
    assert abs(rotation[1] @ left) == pytest.approx(1, abs=1e-9)


@pytest.mark.parametrize("alike", [True, False])
def test_volumes_that_repeat_or_stand_alone_still_have_a_rotation(alike: bool) -> None:
    volumes = np.ones((5, 1, 4, 4, 4)) if alike else images(1)
    rotation, shares = volume_rotation(volumes)
    np.testing.assert_allclose(rotation @ rotation.T, np.eye(len(volumes)), atol=1e-9)
    assert np.isfinite(shares).all()


def test_a_code_of_the_expected_size_fills_the_radius() -> None:
    planned = frame()
    prior = prior_variances(images(), VARIANCES, residual=0.5)
    assert (planned.weights**2 * prior).sum() == pytest.approx(FILL**2, rel=1e-9)


def test_more_noise_sends_fewer_coordinates_and_never_none() -> None:
    sizes = [frame(noise_std=noise).dimension for noise in (1e-3, 0.05, 0.5, 50.0)]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] == 24
    assert sizes[-1] >= 1


def test_what_is_sent_without_noise_is_what_is_read() -> None:
    planned = frame(noise_std=1e-6)
    codes = np.random.default_rng(2).normal(size=(6, 4))
    seen = planned.read(planned.encode(codes), noise_std=0.0)
    np.testing.assert_allclose(planned.rotation.T @ seen.value, codes, atol=1e-9)


def test_a_mean_of_joint_codes_reads_as_the_joint_code_of_the_mean() -> None:
    planned = frame()
    codes = np.random.default_rng(3).normal(size=(5, 6, 4))
    mean = np.mean([planned.encode(code) for code in codes], axis=0)
    np.testing.assert_allclose(mean, planned.encode(codes.mean(axis=0)), atol=1e-12)


@pytest.mark.parametrize("rounds", [1, 2])
def test_the_estimate_is_the_gaussian_posterior(rounds: int) -> None:
    """Oracle: one dense covariance over all coordinates, conditioned by a linear solve."""
    rng = np.random.default_rng(4)
    rotation, _ = volume_rotation(images())
    expected, variances = rng.normal(size=(6, 4)), rng.uniform(0.1, 2, size=(6, 4))
    observations = []
    for _ in range(rounds):
        variance = rng.uniform(0.05, 1, size=(6, 4))
        variance[rng.uniform(size=(6, 4)) < 0.3] = np.inf
        observations.append(Observation(rotation=rotation, value=rng.normal(size=(6, 4)), variance=variance))
    found = estimate(observations, expected=expected, variances=variances)

    turn = np.kron(rotation, np.eye(4))  # codes in one long vector, volume by volume
    prior = turn.T @ np.diag(variances.ravel()) @ turn
    rows, values, noise = [], [], []
    for observation in observations:
        known = np.isfinite(observation.variance.ravel())
        rows.append(turn[known])
        values.append(observation.value.ravel()[known])
        noise.append(observation.variance.ravel()[known])
    design, seen, spread = np.concatenate(rows), np.concatenate(values), np.concatenate(noise)
    gain = prior @ design.T @ np.linalg.inv(design @ prior @ design.T + np.diag(spread))
    oracle = expected.ravel() + gain @ (seen - design @ expected.ravel())
    np.testing.assert_allclose(found.ravel(), oracle, atol=1e-9)


def test_without_observations_the_estimate_is_what_was_expected() -> None:
    expected = np.random.default_rng(5).normal(size=(6, 4))
    found = estimate([], expected=expected, variances=np.ones((6, 4)))
    np.testing.assert_array_equal(found, expected)
    assert found is not expected


def test_a_frame_keeps_its_bytes_and_refuses_others() -> None:
    planned = frame()
    data = planned.to_bytes()
    again = Frame.from_bytes(data)
    assert again.to_bytes() == data
    np.testing.assert_array_equal(again.weights, planned.weights)
    with pytest.raises(InvalidInput):
        Frame.from_bytes(data + b" ")


@pytest.mark.parametrize(
    ("name", "spoil"),
    [
        ("rotation", lambda array: array * 1.01),
        ("centre", lambda array: array * np.nan),
        ("weights", lambda array: -array),
        ("weights", lambda array: array * 0),
        ("weights", lambda array: array[:, :2]),
    ],
)
def test_a_frame_that_could_not_be_read_back_is_refused(name: str, spoil: object) -> None:
    planned = frame()
    arrays = {field: getattr(planned, field) for field in ("rotation", "centre", "weights")}
    arrays[name] = spoil(arrays[name])  # type: ignore[operator]
    with pytest.raises(InvalidInput):
        Frame(codec=CODEC, **arrays)


@pytest.mark.parametrize("codes", [np.zeros((5, 4)), np.full((6, 4), np.nan), [[0.0]]])
def test_codes_of_other_volumes_and_broken_ones_are_refused(codes: object) -> None:
    with pytest.raises(InvalidInput):
        frame().encode(codes)  # type: ignore[arg-type]
