"""Tests that the student learns from soft pseudo-labels, is reproducible, and is scored honestly."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from common.config import TrainingConfig
from common.errors import InvalidInput
from common.metrics import score
from common.models.fit import predict
from common.models.unet import weights_to_bytes
from server.protocols.student_fit import train_student
from tests.contracts.codec_contract import LABELS, patients, soft

torch.set_num_threads(1)
RECIPE = TrainingConfig(channels=(4, 8), steps=40, batch_size=1, learning_rate=1e-2)


def volumes(label_maps: np.ndarray, *, seed: int) -> np.ndarray:
    """Return noisy images whose brightness shows the structures."""
    clean = np.array([0.0, 1.5, -1.5], dtype=np.float32)[label_maps]
    return (clean + np.random.default_rng(seed).normal(0, 0.3, clean.shape)).astype(np.float32)[:, None]


@pytest.fixture(scope="module")
def public() -> tuple[np.ndarray, np.ndarray]:
    label_maps = patients(4, seed=1)
    return volumes(label_maps, seed=1), np.stack([soft(m) for m in label_maps])


def test_it_learns_what_the_pseudo_labels_say(public: tuple[np.ndarray, np.ndarray]) -> None:
    model, result = train_student(*public, RECIPE, seed=0)
    test = patients(3, seed=2)
    assert result.steps == RECIPE.steps
    found = (predict(model, image).argmax(axis=0).astype(np.uint8) for image in volumes(test, seed=2))
    assert score(found, test, LABELS).mean > 0.75


def test_the_same_seed_gives_the_same_student_and_another_seed_another(
    public: tuple[np.ndarray, np.ndarray], tmp_path: Path
) -> None:
    short = TrainingConfig(channels=(4, 8), steps=3, batch_size=1)
    torch.manual_seed(3)
    first, again, other = (weights_to_bytes(train_student(*public, short, seed=s)[0]) for s in (0, 0, 1))
    assert first == again != other
    checkpoint = tmp_path / "student.ckpt"
    kept, _ = train_student(*public, short, seed=0, checkpoint=checkpoint)
    assert weights_to_bytes(kept) == first
    assert not checkpoint.exists()


def test_pseudo_labels_that_are_no_probabilities_are_refused(public: tuple[np.ndarray, np.ndarray]) -> None:
    images, labels = public
    for bad in (2 * labels, labels[:-1], labels[:, :1], labels[0], np.full_like(labels, np.nan)):
        with pytest.raises(InvalidInput):
            train_student(images, bad, RECIPE, seed=0)


def test_scores_are_dice_worked_out_by_hand() -> None:
    truth = np.zeros((2, 8, 8, 8), np.uint8)
    truth[0, :2], truth[0, 4:6], truth[1, :2] = 1, 2, 1  # the second volume holds no structure 2
    guess = truth.copy()
    guess[0, 1] = 0  # half of structure 1: Dice 2·1/(1 + 2)
    result = score(guess, truth, 3)
    assert result.per_class == pytest.approx(((2 / 3 + 1) / 2, 1.0))
    assert result.mean == pytest.approx((5 / 6 + 1) / 2)
    assert len(result.cases) == 2
    with pytest.raises(InvalidInput):
        score([], [], 3)
