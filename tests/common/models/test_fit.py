"""Tests the training loop: it learns, is reproducible, and ends with the same weights after an interruption."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from monai.inferers import SimpleInferer, SlidingWindowInferer
from monai.losses import DiceLoss

from common.config import TrainingConfig
from common.data.volume_cache import StoredVolumes, VolumeCache
from common.errors import InvalidInput
from common.models.fit import (
    batch_of,
    fit,
    inferer_of,
    learning_rate,
    one_hot,
    predict,
    soft_dice_ce,
)
from common.models.unet import build_unet, weights_to_bytes

RECIPE = TrainingConfig(channels=(4, 8), steps=60, batch_size=2, learning_rate=1e-2)


def balls(count: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Return noisy volumes with one bright and one dark ball each, and their one-hot targets."""
    rng = np.random.default_rng(seed)
    axes = np.stack(np.meshgrid(*[np.arange(16)] * 3, indexing="ij"), axis=-1)
    images, targets = [], []
    for _ in range(count):
        labels = np.zeros((16, 16, 16), dtype=np.uint8)
        for value, low in ((1, 4), (2, 10)):
            labels[np.linalg.norm(axes - rng.uniform(low, low + 2, 3), axis=-1) < 3] = value
        images.append(rng.normal(np.choose(labels, [0, 3, -3]), 0.5).astype(np.float32)[None])
        targets.append(one_hot(labels, 3))
    return np.stack(images), np.stack(targets)


def model(seed: int = 1) -> torch.nn.Module:
    return build_unet(RECIPE.channels, in_channels=1, out_channels=3, seed=seed)


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def test_it_learns_and_predicts_probabilities() -> None:
    images, targets = balls(4)
    net = model()
    result = fit(net, images, targets, RECIPE, seed=5)
    assert result.steps == 60
    assert result.loss < 0.6
    unseen, truth = balls(1, seed=9)
    probabilities = predict(net, unseen[0])
    assert probabilities.dtype == np.float32
    np.testing.assert_allclose(probabilities.sum(axis=0), 1, atol=1e-5)
    agreement = (probabilities.argmax(0) == truth[0].argmax(0)).mean()
    assert agreement > 0.97


def test_a_seed_repeats_the_run_exactly_and_global_randomness_is_left_alone() -> None:
    images, targets = balls(3)
    recipe = TrainingConfig(channels=(4, 8), steps=6, batch_size=2)
    torch_state, numpy_state = torch.get_rng_state(), np.random.get_state()[1].copy()  # noqa: NPY002
    weights = []
    for seed in (5, 5, 6):
        net = model()
        fit(net, images, targets, recipe, seed=seed)
        weights.append(weights_to_bytes(net))
    assert weights[0] == weights[1] != weights[2]
    assert torch.equal(torch.get_rng_state(), torch_state)
    np.testing.assert_array_equal(np.random.get_state()[1], numpy_state)  # noqa: NPY002


class Stopped(Exception):
    pass


@pytest.mark.slow
def test_an_interrupted_run_resumes_to_bit_identical_weights(tmp_path: Path) -> None:
    images, targets = balls(3)
    whole = model()
    expected = fit(whole, images, targets, RECIPE, seed=5)

    def stop(step: int, loss: float) -> None:
        if step == 53:
            raise Stopped

    checkpoint = tmp_path / "checkpoint.pt"
    with pytest.raises(Stopped):
        fit(model(), images, targets, RECIPE, seed=5, checkpoint=checkpoint, on_step=stop)
    steps: list[int] = []
    for _ in range(2):  # the second time nothing is left to train
        resumed = model()
        again = {"seed": 5, "checkpoint": checkpoint, "on_step": lambda step, _loss: steps.append(step)}
        assert fit(resumed, images, targets, RECIPE, **again).loss == expected.loss
        assert weights_to_bytes(resumed) == weights_to_bytes(whole)
        assert steps == list(range(51, 61))


@pytest.mark.parametrize("change", ["data", "seed", "start", "damage"])
def test_a_checkpoint_of_another_run_is_not_continued(tmp_path: Path, change: str) -> None:
    images, targets = balls(3)
    recipe = TrainingConfig(channels=(4, 8), steps=3, batch_size=1)
    checkpoint = tmp_path / "checkpoint.pt"
    fit(model(), images, targets, recipe, seed=5, checkpoint=checkpoint)
    if change == "data":
        images[0, 0, 0, 0, 0] += 1
    if change == "damage":
        checkpoint.write_bytes(checkpoint.read_bytes()[:100])
    net, seed, steps = model(2 if change == "start" else 1), 6 if change == "seed" else 5, []
    fit(net, images, targets, recipe, seed=seed, checkpoint=checkpoint, on_step=lambda step, _loss: steps.append(step))
    assert steps == [1, 2, 3]


def test_the_loss_is_smallest_where_the_prediction_is_the_soft_target() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(1, 3, 6, 6, 6, generator=generator)
    target = torch.softmax(logits, dim=1)
    best = soft_dice_ce(logits, target)
    for scale in (0.5, 0.9, 1.1, 2.0):
        assert (soft_dice_ce(logits * scale, target) > best).all()


def test_on_one_hot_targets_the_loss_is_cross_entropy_plus_one_minus_soft_dice() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(2, 3, 6, 6, 6, generator=generator)
    target = torch.nn.functional.one_hot(torch.randint(3, (2, 6, 6, 6), generator=generator), 3).movedim(-1, 1).float()
    p = torch.softmax(logits, 1)
    dice = 2 * (p * target).sum((2, 3, 4)) / (p + target).sum((2, 3, 4))
    cross_entropy = -(target * p.log()).sum(1).mean((1, 2, 3))
    torch.testing.assert_close(soft_dice_ce(logits, target), (1 - dice).mean(1) + cross_entropy, rtol=1e-4, atol=1e-4)


def test_the_loss_and_its_gradient_are_monais_soft_dice_and_torchs_cross_entropy() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(2, 3, 6, 6, 6, generator=generator, requires_grad=True)
    target = torch.softmax(torch.randn(2, 3, 6, 6, 6, generator=generator), dim=1)
    dice = DiceLoss(softmax=True, soft_label=True, reduction="none")(logits, target).flatten(1).mean(1)
    cross_entropy = torch.nn.functional.cross_entropy(logits, target, reduction="none").flatten(1).mean(1)
    ours, theirs = soft_dice_ce(logits, target), dice + cross_entropy
    torch.testing.assert_close(ours, theirs)
    (gradient,), (expected,) = (torch.autograd.grad(each.sum(), logits, retain_graph=True) for each in (ours, theirs))
    torch.testing.assert_close(gradient, expected)


def test_every_epoch_shows_every_case_once() -> None:
    order = [pick for step in range(10) for pick in batch_of(step, cases=5, batch_size=3, seed=1)]
    for epoch in range(6):
        assert sorted(order[5 * epoch : 5 * epoch + 5]) == [0, 1, 2, 3, 4]
    assert order[:5] != order[5:10]


def test_the_learning_rate_warms_up_peaks_and_ends_near_zero() -> None:
    rates = [learning_rate(step, TrainingConfig(steps=100, learning_rate=0.01)) for step in range(100)]
    assert rates[0] == pytest.approx(0.001)
    assert max(rates) == rates[10] == pytest.approx(0.01)
    assert rates[-1] < 1e-5
    assert all(math.isfinite(learning_rate(0, TrainingConfig(steps=s))) for s in (1, 2))


def test_patches_of_the_named_size_are_cut_alike_from_volume_and_target() -> None:
    images, targets = balls(2)
    seen = []

    class Watching(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = model()

        def forward(self, image: torch.Tensor) -> torch.Tensor:
            seen.append(image.detach().clone())
            result: torch.Tensor = self.net(image)
            return result

    recipe = TrainingConfig(channels=(4, 8), steps=4, batch_size=2, patch=(8, 16, 8))
    fit(Watching(), images, targets, recipe, seed=1, augment=False)
    assert {tuple(batch.shape) for batch in seen} == {(2, 1, 8, 16, 8)}
    windows = np.lib.stride_tricks.sliding_window_view(images[:, 0], (8, 16, 8), axis=(1, 2, 3))
    for patch in (patch[0].numpy() for batch in seen for patch in batch):
        assert (windows == patch).all(axis=(4, 5, 6)).any()  # a part of a volume as it is
    with pytest.raises(InvalidInput, match="patch"):
        fit(model(), images, targets, TrainingConfig(channels=(4, 8), steps=1, patch=(32, 16, 16)), seed=1)


@pytest.mark.parametrize(
    "wrong", [{"patch": (64, 64)}, {"patch": (64, 64, 60)}, {"patch": (4, 64, 64)}, {"augmentation": "mirrors"}]
)
def test_a_patch_the_network_cannot_halve_and_an_unknown_augmentation_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(InvalidInput, match="training"):
        TrainingConfig(channels=(2, 4, 8, 16, 32), **wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("recipe", "size", "said"),
    [
        ({"channels": (4, 8)}, (13, 8, 8), "multiples of 2"),
        ({"channels": (2, 4, 4, 8, 8)}, (8, 16, 16), "multiples of 16"),
        ({"channels": (2, 4, 4, 8)}, (8, 8, 8), "one at least 16"),
        ({"channels": (2, 4, 4, 8), "patch": (8, 8, 8)}, (16, 16, 16), "one at least 16"),
        ({"channels": (4, 8), "network": "dynunet"}, (8, 8, 8), "at least 3"),
    ],
    ids=str,
)
def test_volumes_that_the_network_cannot_halve_are_refused_before_the_training(
    recipe: dict[str, object], size: tuple[int, ...], said: str
) -> None:
    images, targets = np.zeros((2, 1, *size), np.float32), np.zeros((2, *size), np.uint8)
    with pytest.raises(InvalidInput, match=said):
        fit(model(), images, targets, TrainingConfig(steps=1, **recipe), seed=1, classes=3)  # type: ignore[arg-type]


def test_the_process_s_default_type_changes_no_weight() -> None:
    images, targets = balls(2)
    recipe, weights = TrainingConfig(channels=(4, 8), steps=3), []
    for default in (torch.float32, torch.float64):
        torch.set_default_dtype(default)
        try:
            net = model()
            fit(net, images, targets, recipe, seed=5)
        finally:
            torch.set_default_dtype(torch.float32)
        weights.append(weights_to_bytes(net))
    assert weights[0] == weights[1]


def test_arrays_that_do_not_fit_are_refused() -> None:
    images, targets = balls(2)
    recipe = TrainingConfig(channels=(4, 8), steps=1)
    for bad_images, bad_targets, word in [
        (images[:0], targets[:0], "no volume"),
        (images[:1], targets, "arrays"),
        (images * np.nan, targets, "NaN"),
        (images, targets * 2, "probabilities"),
    ]:
        with pytest.raises(InvalidInput, match=word):
            fit(model(), bad_images, bad_targets, recipe, seed=1)


def label_maps(targets: np.ndarray) -> np.ndarray:
    return targets.argmax(axis=1).astype(np.uint8)


@pytest.mark.parametrize("patch", [(), (8, 8, 8)])
def test_label_maps_and_stored_volumes_give_the_weights_of_whole_one_hot_arrays(
    tmp_path: Path, patch: tuple[int, ...]
) -> None:
    images, targets = balls(3)
    recipe = TrainingConfig(channels=(4, 8), steps=4, batch_size=2, patch=patch)
    with VolumeCache(tmp_path / "cache", budget_bytes=images[0].nbytes) as cache:
        stored = StoredVolumes([cache.keep(image) for image in images])
        assert len(list((tmp_path / "cache").iterdir())) == 2
        weights = []
        for data, truth, classes in (
            (images, targets, None),
            (images, label_maps(targets), 3),
            (stored, label_maps(targets), 3),
        ):
            net = model()
            fit(net, data, truth, recipe, seed=5, classes=classes)
            weights.append(weights_to_bytes(net))
    assert weights[0] == weights[1] == weights[2]


def test_mixed_precision_learns_too_and_stays_finite() -> None:
    images, targets = balls(4)
    recipe = TrainingConfig(channels=(4, 8), steps=60, batch_size=2, learning_rate=1e-2, amp=True)
    net = model()
    assert fit(net, images, label_maps(targets), recipe, seed=5, classes=3).loss < 0.7
    assert all(parameter.dtype == torch.float32 for parameter in net.parameters())
    unseen, truth = balls(1, seed=9)
    probabilities = predict(net, unseen[0], amp=True)
    np.testing.assert_allclose(probabilities.sum(axis=0), 1, atol=1e-5)
    assert (probabilities.argmax(0) == truth[0].argmax(0)).mean() > 0.95


def test_a_network_trained_on_patches_is_given_windows_of_their_size() -> None:
    inferer = inferer_of((8, 16, 8), (32, 16, 4))
    assert isinstance(inferer, SlidingWindowInferer)
    assert tuple(inferer.roi_size) == (8, 16, 4)
    assert isinstance(inferer_of((), (128, 128, 128)), SimpleInferer)
    assert isinstance(inferer_of((), (240, 240, 160)), SlidingWindowInferer)
    net = model()
    image = np.random.default_rng(0).normal(size=(1, 32, 16, 16)).astype(np.float32)
    tiled = predict(net, image, patch=(16, 16, 16))
    windows = SlidingWindowInferer(roi_size=(16, 16, 16), overlap=0.25, mode="gaussian", sw_batch_size=1)
    with torch.inference_mode():
        expected = torch.softmax(windows(torch.from_numpy(image)[None], net.eval())[0], dim=0).numpy()
    np.testing.assert_array_equal(tiled, expected)
    assert not np.allclose(tiled, predict(net, image), atol=1e-4)


def test_label_maps_that_do_not_fit_are_refused() -> None:
    images, targets = balls(2)
    recipe = TrainingConfig(channels=(4, 8), steps=1)
    for bad, classes in [(label_maps(targets), 2), (label_maps(targets).astype(np.int64), 3), (targets, 3)]:
        with pytest.raises(InvalidInput, match="training"):
            fit(model(), images, bad, recipe, seed=1, classes=classes)
