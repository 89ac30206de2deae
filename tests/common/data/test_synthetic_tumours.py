"""Tests made-up brain tumours: BraTS' folders, nested regions, reproducible by seed, each contrast showing its own."""

from __future__ import annotations

from pathlib import Path

import nibabel as nib
import numpy as np
import pytest

from client.data.layouts import DatasetSettings, named_dataset, open_for_training
from common.config import DataConfig
from common.data.msd import read_dataset, write_dataset
from common.data.split import SplitCounts, plan_split, without_channel, write_split
from common.data.synthetic_tumours import DEAD, ENHANCING, OEDEMA, tumour, write_tumours
from common.errors import InvalidInput

pytestmark = pytest.mark.slow

CHANNELS = ("FLAIR", "T1", "T1ce", "T2")


def test_only_t1ce_shows_the_rim_and_outside_the_brain_all_is_zero() -> None:
    rim, oedema = [], []
    for number in range(4):
        contrasts, labels = tumour(number, seed=3)
        again = tumour(number, seed=3)
        np.testing.assert_array_equal(labels, again[1])
        np.testing.assert_array_equal(contrasts["t2f"], again[0]["t2f"])
        assert all((array[0, 0] == 0).all() for array in contrasts.values())
        assert {DEAD, OEDEMA, ENHANCING} <= set(np.unique(labels))
        rim.append({name: array[labels == ENHANCING].mean() for name, array in contrasts.items()})
        oedema.append({name: array[labels == OEDEMA].mean() for name, array in contrasts.items()})
    assert all(a["t1c"] > 1.4 * b["t1c"] and a["t2f"] < b["t2f"] for a, b in zip(rim, oedema, strict=True))
    assert ENHANCING not in tumour(5, seed=3)[1]


def test_regions_go_with_the_deal_and_a_hospital_may_lack_a_contrast(tmp_path: Path) -> None:
    write_tumours(tmp_path / "raw", cases=12, seed=1)
    dataset = named_dataset(tmp_path / "raw", channels=CHANNELS)
    counts = SplitCounts(2, public_images=2, label_maps=2, validation=1, test=1)
    write_split(plan_split(dataset, counts, seed=0), dataset, tmp_path / "split")
    site = tmp_path / "split" / "sites" / "hospital-01"
    whole = read_dataset(site)
    assert [one.partition(" ")[0] for one in whole.regions] == ["WT", "TC", "ET"]
    before = {case.id: np.asanyarray(nib.load(case.image).dataobj) for case in whole.cases}
    assert without_channel(site, "T1ce").channels == ("FLAIR", "T1", "T2")
    study = DataConfig(dataset.labels, (4, 4, 4), (32, 32, 32), CHANNELS, dataset.regions)
    found = open_for_training(site, study, DatasetSettings(absent=("T1ce",)))
    assert not found.problems
    for case in found.cases:
        np.testing.assert_array_equal(np.asanyarray(nib.load(case.image).dataobj), before[case.id][..., [0, 1, 3]])
    with pytest.raises(InvalidInput, match=r"channel .*: got 'T1ce'"):
        without_channel(site, "T1ce")


def test_regions_of_other_labels_are_no_dataset(tmp_path: Path) -> None:
    write_tumours(tmp_path / "raw", cases=2, seed=1)
    dataset = named_dataset(tmp_path / "raw", channels=CHANNELS)
    with pytest.raises(InvalidInput, match="regions"):
        write_dataset(
            tmp_path / "set",
            name="set",
            labels=("background", "edema"),
            channels=("FLAIR",),
            cases=dataset.cases,
            regions=("WT = edema + ghost",),
        )
