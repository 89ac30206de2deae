"""Tests which labels of a folder are read: those decoded and not rejected, in the order of the volumes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from common.canonical import sha256_file
from server.protocols.stored_labels import StoredLabels

HALF = np.full((2, 1, 1, 1), 0.5, dtype=np.float32)
VOLUMES = ("b", "a", "c")


def test_a_rejected_label_is_left_out_until_another_is_stored(tmp_path: Path) -> None:
    labels = StoredLabels(tmp_path, VOLUMES)
    assert (list(labels), len(labels), labels.hashes()) == ([], 0, [])
    for volume in ("a", "b"):
        labels.store(volume, HALF)
    assert list(labels) == ["b", "a"]
    rejected = StoredLabels(tmp_path, VOLUMES, rejected={("a", sha256_file(tmp_path / "a.npz"))})
    assert (list(rejected), len(rejected)) == (["b"], 1)
    assert rejected.hashes() == [sha256_file(tmp_path / "b.npz")]
    assert "a" not in rejected
    with pytest.raises(KeyError):
        rejected["a"]
    rejected.store("a", np.stack([HALF[0], 3 * HALF[0]]))
    assert list(rejected) == ["b", "a"]
    np.testing.assert_allclose(rejected["a"].ravel(), [0.25, 0.75])


def test_a_label_of_another_volume_in_the_folder_is_none_of_the_studys(tmp_path: Path) -> None:
    StoredLabels(tmp_path, ["z"]).store("z", HALF)
    assert dict(StoredLabels(tmp_path, VOLUMES)) == {}
