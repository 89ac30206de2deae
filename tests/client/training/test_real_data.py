"""Tests reading and training on real MRI: no loss when reading, and teachers good enough to ask.

Runs where the Decathlon's hippocampus task lies (fixture ``hippocampus``).
"""

from __future__ import annotations

from pathlib import Path

import nibabel as nib
import numpy as np
import pytest
import torch

from client.teachers.teacher import Teachers
from common.config import DataConfig, TrainingConfig
from common.data.msd import read_dataset, write_dataset
from common.data.split import SplitCounts, plan_split
from common.data.volume import load_label, load_volume, to_native
from common.metrics import mean_dice
from tests.trained_sites import train_site

DATA = DataConfig(labels=("background", "anterior", "posterior"), spacing_mm=(1, 1, 1), grid=(32, 48, 32))


def test_real_volumes_are_all_usable_and_the_grid_loses_almost_nothing(hippocampus: Path) -> None:
    dataset = read_dataset(hippocampus)
    assert dataset.problems == ()
    before = after = 0
    for case in dataset.cases[::8]:
        assert case.label is not None
        volume = load_volume(case.image, DATA)
        label = load_label(case.label, DATA, volume=volume)
        native = np.asarray(nib.load(case.label).dataobj)
        assert mean_dice(to_native(label, volume), native.astype(np.uint8), 3) > 0.99
        before += int((native > 0).sum())
        after += int((label > 0).sum())
    assert after > 0.999 * before


@pytest.mark.slow
def test_teachers_of_a_dozen_real_patients_reach_dice_082(tmp_path: Path, hippocampus: Path) -> None:
    torch.set_num_threads(1)
    dataset = read_dataset(hippocampus)
    counts = SplitCounts(hospitals=8, public_images=50, label_maps=12, validation=8, test=30)
    split = plan_split(dataset, counts, seed=1)
    scores = []
    for name in sorted(split.sites)[:2]:
        site = write_dataset(
            tmp_path / name, name=name, labels=dataset.labels, channels=dataset.channels, cases=split.sites[name]
        )
        recipe = TrainingConfig(channels=(16, 32, 64), steps=600, learning_rate=1e-2)
        train_site(site, teachers=tmp_path / name / "teachers", data=DATA, recipe=recipe, voters=1)
        teachers = Teachers.load(tmp_path / name / "teachers", data=DATA)
        for case in split.test:
            assert case.label is not None
            (probabilities,) = teachers.predict(load_volume(case.image, DATA).image)
            assert probabilities is not None
            scores.append(mean_dice(probabilities.argmax(0).astype(np.uint8), load_label(case.label, DATA), 3))
    assert np.mean(scores) >= 0.82
