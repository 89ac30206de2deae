"""Tests volumes with bounded memory: memory and disk give the same numbers, and no file is left behind."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from common.data.volume_cache import StoredVolumes, VolumeCache, together
from common.errors import InvalidInput


def arrays(count: int = 4) -> list[np.ndarray]:
    return [np.random.default_rng(i).normal(size=(2, 3, 4, 5)).astype(np.float32) for i in range(count)]


def test_beyond_the_budget_volumes_lie_in_private_files_and_read_back_exactly(tmp_path: Path) -> None:
    volumes = arrays()
    with VolumeCache(tmp_path / "c", budget_bytes=2 * volumes[0].nbytes) as cache:
        stored = StoredVolumes([cache.keep(volume) for volume in volumes])
        files = list((tmp_path / "c").iterdir())
        assert len(files) == 2
        assert all(file.stat().st_mode & 0o077 == 0 for file in files)
        assert (tmp_path / "c").stat().st_mode & 0o077 == 0
        assert stored.shape == (4, 2, 3, 4, 5)
        for i, volume in enumerate(volumes):
            np.testing.assert_array_equal(stored[i], volume)
    assert not (tmp_path / "c").exists()


def test_what_a_run_that_died_left_is_gone_at_the_next_start(tmp_path: Path) -> None:
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / "00000.npy").write_bytes(b"half a patient")
    VolumeCache(tmp_path / "c")
    assert not (tmp_path / "c").exists()


def test_small_data_stay_one_array_and_shapes_must_agree() -> None:
    volumes = arrays()
    np.testing.assert_array_equal(together(volumes), np.stack(volumes))
    with pytest.raises(InvalidInput, match="one shape"):
        StoredVolumes([volumes[0], volumes[1][:1]])
