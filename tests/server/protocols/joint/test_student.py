"""Tests the student of a joint query: what its labels consist of, and that its controls are trained alike."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.special import softmax

from common.codecs.pca import PcaCodec
from common.config import TrainingConfig
from common.errors import InvalidInput
from common.models import fit as fitting
from common.models.fit import fit, predict
from common.models.unet import build_unet, weights_to_bytes
from common.protocols.frame import Frame, sharpen
from server.protocols import public_start as joint
from server.protocols.controls import CONTROLS
from server.protocols.joint import kernel as tangent
from server.protocols.joint.belief import control
from server.protocols.public_start import (
    PUBLIC_PASSES,
    SPREAD,
    SPREAD_COORDINATES,
    STUDENT_PASSES,
    TEMPERATURE,
    Start,
    codes_of,
    joint_frame,
    moved,
    public_start,
    refine,
    restore_spread,
)
from server.protocols.query_protocol import FitFiles
from tests.contracts.codec_contract import patients

RECIPE = TrainingConfig(channels=(4, 8), steps=9, learning_rate=1e-3)


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


@pytest.fixture(scope="module")
def frame(codec: PcaCodec, images: np.ndarray, start: Start) -> Frame:
    kernel = tangent.tangent_kernel(start.model, images, codec, temperature=TEMPERATURE)
    return joint_frame(start, codec, codec_sha256="a" * 64, kernel=kernel, noise_std=0.01, radius=codec.radius)


@pytest.mark.slow
def test_the_kernel_is_how_the_codes_move_when_a_weight_does(
    codec: PcaCodec, images: np.ndarray, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The oracle is a finite difference of production codes by every eighth of the drawn weights."""
    drawn = tangent.drawn_weights
    monkeypatch.setattr(tangent, "drawn_weights", lambda count: drawn(count)[::8])
    model = copy.deepcopy(start.model).double()
    weights = torch.nn.utils.parameters_to_vector(model.parameters()).detach()
    size = tangent.coordinates(codec.dimension, volumes=len(images))

    def codes(vector: torch.Tensor) -> np.ndarray:
        torch.nn.utils.vector_to_parameters(vector, model.parameters())
        with torch.inference_mode():
            logits = model(torch.tensor(images, dtype=torch.float64)).numpy()
        sharp = softmax(logits / TEMPERATURE, axis=1)
        return np.stack([codec.encode(each) for each in sharp])[:, :size].ravel()

    rows = []
    for index in tangent.drawn_weights(len(weights)).tolist():
        step = torch.zeros_like(weights)
        step[index] = 1e-6
        rows.append((codes(weights + step) - codes(weights - step)) / 2e-6)
    jacobian = np.stack(rows, axis=1)
    scale = np.sqrt(np.square(jacobian).mean(axis=0))
    felt = scale > 1e-6  # biases before a normalization have no effect
    oracle = (jacobian[:, felt] / scale[felt]) @ jacobian[:, felt].T
    found = tangent.tangent_kernel(start.model, images, codec, temperature=TEMPERATURE)
    np.testing.assert_allclose(found, oracle, atol=1e-3 * np.trace(oracle) / len(oracle))


@pytest.mark.parametrize(("channels", "grid"), [((4, 8), (6, 8, 10)), ((4, 6, 8), (8, 16, 12))])
def test_gradients_of_many_rows_at_once_are_those_of_a_backward_pass_each(
    channels: tuple[int, ...], grid: tuple[int, ...]
) -> None:
    network = build_unet(channels, in_channels=2, out_channels=3, seed=1)
    generator = torch.Generator().manual_seed(0)
    image, slopes = torch.randn(2, *grid, generator=generator), torch.randn(5, 3, *grid, generator=generator)
    found = tangent.weight_gradients(network, image, slopes)
    logits = network(image[None])
    for row, slope in enumerate(slopes):
        expected = torch.autograd.grad(logits, list(network.parameters()), slope[None], retain_graph=True)
        for weight, gradient in zip(network.parameters(), expected, strict=True):
            torch.testing.assert_close(found[weight][row], gradient.flatten(), rtol=1e-4, atol=1e-4)
    assert all(weight.grad is None for weight in network.parameters())
    with pytest.raises(TypeError, match="Linear"):
        tangent.weight_gradients(torch.nn.Linear(2, 2), image, slopes)


def test_a_kernel_leaves_the_start_as_it_was(codec: PcaCodec, images: np.ndarray, start: Start) -> None:
    before = [tensor.clone() for tensor in start.model.state_dict().values()]
    tangent.tangent_kernel(start.model, images[:1], codec, temperature=TEMPERATURE)
    for then, now in zip(before, start.model.state_dict().values(), strict=True):
        assert torch.equal(then, now)


def test_of_many_volumes_only_leading_coordinates_enter_the_kernel(
    codec: PcaCodec, images: np.ndarray, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[int] = []
    whole = tangent.tangent_kernel(start.model, images, codec, temperature=TEMPERATURE, on_volume=told.append)
    assert len(whole) == len(images) * codec.dimension
    assert told == list(range(1, len(images) + 1))
    monkeypatch.setattr(tangent, "MAX_ROWS", 2 * len(images) + 1)
    leading = tangent.tangent_kernel(start.model, images, codec, temperature=TEMPERATURE)
    assert len(leading) == 2 * len(images)
    assert tangent.coordinates(128, volumes=10**6) == 1


@pytest.mark.slow
def test_every_arm_takes_the_same_steps_from_the_same_public_start(
    codec: PcaCodec, images: np.ndarray, start: Start, frame: Frame
) -> None:
    believed = frame.centre + 0.1
    before = [tensor.clone() for tensor in start.model.state_dict().values()]
    for name in ("student", *CONTROLS, "shuffled_offsets"):
        steps: list[int] = []
        refine(
            start.model,
            images,
            codec,
            believed if name == "student" else control(name, frame.centre, believed),
            RECIPE,
            seed=0,
            on_step=lambda step, _loss, steps=steps: steps.append(step),  # type: ignore[misc]
        )
        assert steps == list(range(1, RECIPE.steps + 1))
    for then, now in zip(before, start.model.state_dict().values(), strict=True):
        assert torch.equal(then, now)  # the start is shared by all arms and left as it was


def test_a_student_learns_from_codes_first_and_then_from_its_own_predictions_moved_to_them(
    codec: PcaCodec, images: np.ndarray, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    taught: list[np.ndarray] = []

    def watched(
        model: torch.nn.Module, images: np.ndarray, targets: np.ndarray, *args: object, **named: object
    ) -> None:
        taught.append(targets)
        fit(model, images, targets, *args, **named)  # type: ignore[arg-type]

    monkeypatch.setattr(joint, "fit", watched)
    codes = start.codes + 0.2
    first = refine(start.model, images, codec, codes, replace(RECIPE, steps=3), seed=0, passes=1)
    whole = refine(start.model, images, codec, codes, replace(RECIPE, steps=3 * STUDENT_PASSES), seed=0)
    assert len(taught) == 1 + STUDENT_PASSES
    for each in taught[:2]:
        np.testing.assert_array_equal(each, np.stack([codec.decode(code, noise_std=0.0) for code in codes]))
    np.testing.assert_array_equal(taught[2], moved(first, images, codec, codes))
    assert weights_to_bytes(whole) != weights_to_bytes(first)


def test_details_that_no_code_contains_are_the_students_own(codec: PcaCodec, images: np.ndarray, start: Start) -> None:
    """A prediction moved to its own code stays unchanged, including what the codec cannot represent."""
    own = codes_of(start.model, images, codec, temperature=TEMPERATURE)
    predicted = np.stack([sharpen(predict(start.model, image), temperature=TEMPERATURE) for image in images])
    np.testing.assert_allclose(moved(start.model, images, codec, own), predicted, atol=1e-5)
    drawn = np.stack([codec.decode(code, noise_std=0.0) for code in own])
    assert abs(drawn - predicted).max() > 0.01


@pytest.mark.slow
@pytest.mark.parametrize("killed_at", [2, 4, 8])
def test_a_student_killed_in_any_pass_goes_on_to_the_same_weights(
    codec: PcaCodec, images: np.ndarray, start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, killed_at: int
) -> None:
    monkeypatch.setattr(fitting, "CHECKPOINT_EVERY", 1)
    recipe, codes, files = replace(RECIPE, steps=9), start.codes + 0.2, FitFiles.at(tmp_path, "student")
    expected = weights_to_bytes(refine(start.model, images, codec, codes, recipe, seed=0))

    def killed(step: int, _loss: float) -> None:
        if step == killed_at:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        refine(start.model, images, codec, codes, recipe, seed=0, checkpoint=files.checkpoint, on_step=killed)
    steps: list[int] = []
    again = refine(
        start.model,
        images,
        codec,
        codes,
        recipe,
        seed=0,
        checkpoint=files.checkpoint,
        on_step=lambda step, _loss: steps.append(step),
    )
    assert weights_to_bytes(again) == expected
    assert steps == list(range(killed_at + 1, recipe.steps + 1))
    assert list(tmp_path.iterdir()) == []
    files.checkpoint.with_name(f"{files.checkpoint.name}.1").touch()
    files.discard()
    assert list(tmp_path.iterdir()) == []


def test_controls_get_less_information_than_the_student() -> None:
    draws = np.random.default_rng(2)
    start, own = draws.normal(size=(5, 3)), draws.normal(size=(5, 3))
    np.testing.assert_array_equal(control("zero_code", start, own), start)
    np.testing.assert_array_equal(control("public_only", start, own), start)  # one control under two names
    shuffled = control("shuffled_codes", start, own)
    assert not np.isclose(shuffled, own).all(axis=1).any()
    np.testing.assert_allclose(np.sort(shuffled, axis=0), np.sort(own, axis=0))
    apart = control("shuffled_offsets", start, own)
    assert not np.isclose(apart, own).all(axis=1).any()
    np.testing.assert_allclose(np.sort(apart - start, axis=0), np.sort(own - start, axis=0))
    np.testing.assert_array_equal(control("shuffled_codes", start[:1], own[:1]), start[:1])
    with pytest.raises(InvalidInput, match="control"):
        control("anything", start, own)


def test_too_few_steps_for_the_public_passes_are_refused(codec: PcaCodec, images: np.ndarray) -> None:
    few = TrainingConfig(channels=(4, 8), steps=PUBLIC_PASSES)
    with pytest.raises(InvalidInput, match="steps"):
        public_start(images, codec, codec.powers, few, seed=0)
