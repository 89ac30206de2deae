"""The student of a joint query: what its labels are made of, and that its controls do the same work."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from common.codecs import fit_codec
from common.codecs.frame import Observation, prior_variances, volume_rotation
from common.codecs.pca import PcaCodec
from common.config import TrainingConfig
from common.errors import InvalidInput
from server.joint import PASSES, SPREAD, SPREAD_COORDINATES, Start, labels_of, public_start, refine, restore_spread
from tests.contracts.codec_contract import CodecContract, patients

RECIPE = TrainingConfig(channels=(4, 8), steps=9, learning_rate=1e-3)


class _Linear(CodecContract):
    name = "pca"


@pytest.fixture(scope="module")
def codec() -> PcaCodec:
    terms = _Linear.study()
    study = replace(terms, codec=replace(terms.codec, joint=True), privacy=replace(terms.privacy, planned_queries=1))
    fitted = fit_codec(study, list(patients(10, seed=1)), noise_std=0.05)
    assert isinstance(fitted, PcaCodec)
    return fitted


@pytest.fixture(scope="module")
def images() -> np.ndarray:
    maps = patients(6, seed=3)
    noise = np.random.default_rng(0).normal(0, 0.1, maps.shape)
    return ((maps > 0) + noise)[:, None].astype(np.float32)


@pytest.fixture(scope="module")
def start(codec: PcaCodec, images: np.ndarray) -> Start:
    return public_start(images, codec, codec.powers, RECIPE, seed=0)


def test_a_joint_codec_keeps_every_component_in_proportion_to_its_variance(codec: PcaCodec) -> None:
    np.testing.assert_allclose(codec.powers / codec.variances, codec.powers[0] / codec.variances[0])
    assert codec.powers.sum() <= codec.radius**2


def test_spread_is_restored_and_never_taken_away() -> None:
    rng = np.random.default_rng(0)
    variances = np.full(SPREAD_COORDINATES, 2.0)
    timid = rng.normal(0, 0.1, (40, SPREAD_COORDINATES)) + 5
    bold = restore_spread(timid, variances)
    np.testing.assert_allclose(bold.mean(axis=0), timid.mean(axis=0))
    assert np.square(bold - bold.mean(axis=0)).sum() / 40 == pytest.approx(SPREAD * variances.sum())
    wide = 100 * timid
    np.testing.assert_allclose(restore_spread(wide, variances), wide)
    np.testing.assert_array_equal(restore_spread(np.ones((3, 16)), variances), np.ones((3, 16)))


def test_an_exact_observation_is_the_label_whatever_the_student_thinks(
    codec: PcaCodec, images: np.ndarray, start: Start
) -> None:
    rotation, _ = volume_rotation(images)
    codes = np.random.default_rng(1).normal(0, 0.1, start.codes.shape)
    seen = Observation(rotation=rotation, value=rotation @ codes, variance=np.zeros_like(codes))
    prior = prior_variances(images, codec.powers, residual=0.45)
    _, last = refine(start, images, codec, [seen], RECIPE, prior=prior, seed=0)
    np.testing.assert_allclose(labels_of(codec, last), labels_of(codec, codes), atol=1e-4)


def test_every_arm_takes_the_same_steps_from_the_same_public_start(
    codec: PcaCodec, images: np.ndarray, start: Start
) -> None:
    rotation, _ = volume_rotation(images)
    prior = prior_variances(images, codec.powers, residual=0.45)
    centre = rotation @ start.codes
    seen = Observation(rotation=rotation, value=centre, variance=np.full_like(centre, 0.1))
    before = [tensor.clone() for tensor in start.model.state_dict().values()]
    counts: list[list[int]] = []
    for observations in ([], [seen]):
        steps: list[int] = []
        refine(
            start,
            images,
            codec,
            observations,
            RECIPE,
            prior=prior,
            seed=0,
            on_step=lambda step, _loss, steps=steps: steps.append(step),  # type: ignore[misc]
        )
        counts.append(steps)
    assert counts[0] == counts[1] == list(range(1, RECIPE.steps + 1))
    for then, now in zip(before, start.model.state_dict().values(), strict=True):
        assert torch.equal(then, now)  # the start is shared by all arms and left as it was


def test_too_few_steps_for_the_passes_are_refused(codec: PcaCodec, images: np.ndarray, start: Start) -> None:
    few = TrainingConfig(channels=(4, 8), steps=PASSES - 1)
    with pytest.raises(InvalidInput, match="steps"):
        refine(start, images, codec, [], few, prior=np.ones_like(start.codes), seed=0)
