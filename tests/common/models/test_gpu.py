"""Tests that need a GPU; `make test-gpu` runs them, and without a GPU they are skipped with a reason."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from statistics import median

import numpy as np
import pytest
import torch
from monai.inferers import sliding_window_inference

from client.teachers.teacher import Teachers
from common.config import DataConfig, TrainingConfig
from common.data.msd import Case, write_dataset
from common.data.volume import load_volume
from common.models.fit import WINDOW_OVERLAP, best_device, fit, mixed_precision, predict
from common.models.unet import build_unet
from tests.trained_sites import train_site

pytestmark = pytest.mark.gpu

CHANNELS, LEVELS, CLASSES = 4, (16, 32, 64, 128), 4


@pytest.fixture(scope="module")
def device() -> torch.device:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    return best_device()


@pytest.mark.parametrize("amp", [False, True], ids=["float32", "mixed precision"])
def test_a_brats_sized_volume_takes_at_most_a_tenth_longer_than_monais_inferer_alone(
    device: torch.device, amp: bool
) -> None:
    """Both go from array to array in memory, with the same windows; the median of seven interleaved runs counts."""
    image = np.random.default_rng(0).normal(size=(CHANNELS, 240, 240, 160)).astype(np.float32)
    patch = (128, 128, 128)
    model = build_unet(LEVELS, in_channels=CHANNELS, out_channels=CLASSES, seed=1).to(device).eval()

    def alone() -> np.ndarray:
        with torch.inference_mode(), mixed_precision(device, enabled=amp):
            batch = torch.tensor(image)[None].to(device)
            logits = sliding_window_inference(batch, patch, 1, model, overlap=WINDOW_OVERLAP, mode="gaussian")
            result: np.ndarray = logits.float().cpu().numpy()
        return result

    def ours() -> np.ndarray:
        return predict(model, image, patch=patch, amp=amp)

    expected, found = torch.softmax(torch.tensor(alone()[0]), dim=0).numpy(), ours()  # and both are warm now
    np.testing.assert_allclose(found, expected, atol=1e-4)
    seconds: dict[str, list[float]] = {"alone": [], "ours": []}
    for _ in range(7):
        for name, run in (("alone", alone), ("ours", ours)):
            torch.cuda.synchronize()
            started = time.perf_counter()
            run()
            torch.cuda.synchronize()
            seconds[name].append(time.perf_counter() - started)
    print({name: round(median(times), 4) for name, times in seconds.items()})
    assert median(seconds["ours"]) <= 1.10 * median(seconds["alone"])


def test_mixed_precision_trains_patches_on_the_gpu_and_learns(device: torch.device) -> None:
    labels = np.zeros((2, 96, 96, 96), dtype=np.uint8)
    labels[:, 30:60, 30:60, 30:60] = 1
    noise = np.random.default_rng(0).normal(0, 0.1, (2, 1, 96, 96, 96))
    images = (labels[:, None] + noise).astype(np.float32)
    model = build_unet((8, 16, 32, 64), in_channels=1, out_channels=2, seed=1).to(device)
    recipe = TrainingConfig(channels=(8, 16, 32, 64), steps=60, batch_size=2, patch=(64, 64, 64), amp=True)
    first = fit(model, images, labels, replace(recipe, steps=1), seed=1, classes=2)
    last = fit(model, images, labels, recipe, seed=1, classes=2)
    assert next(model.parameters()).device.type == "cuda"
    assert last.loss < 0.7 * first.loss


def test_a_sites_teachers_train_and_answer_on_the_gpu(device: torch.device, tmp_path: Path) -> None:
    import nibabel as nib

    cases = []
    for number in range(2):
        label = np.zeros((32, 32, 32), dtype=np.uint8)
        label[8:20, 8:20, 8:20] = 1
        scan = np.random.default_rng(number).normal(label * 3.0, 0.5).astype(np.float32)
        paths = [tmp_path / f"{kind}{number}.nii.gz" for kind in ("image", "label")]
        for path, array in zip(paths, (scan, label), strict=True):
            nib.save(nib.Nifti1Image(array, np.eye(4)), path)
        cases.append(Case(f"p{number}", *paths))
    data = DataConfig(labels=("background", "core"), spacing_mm=(1, 1, 1), grid=(32, 32, 32))
    dataset = write_dataset(tmp_path / "set", name="s", labels=data.labels, channels=data.channels, cases=cases)
    recipe = TrainingConfig(channels=(4, 8), steps=3, amp=True)
    train_site(dataset, teachers=tmp_path / "t", data=data, recipe=recipe, voters=1)
    teachers = Teachers.load(tmp_path / "t", data=data)
    assert teachers.models[0] is not None
    assert next(teachers.models[0].parameters()).device.type == device.type
    (answer,) = teachers.predict(load_volume(dataset.cases[0].image, data).image)
    assert answer is not None
    np.testing.assert_allclose(answer.sum(axis=0), 1, atol=1e-4)
