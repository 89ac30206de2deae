"""Tests predictions for images with similar names: each has its own result, or is left out with a reason beforehand."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import nibabel as nib
import numpy as np
import pytest
from typer.testing import CliRunner

from common.config import DataConfig
from common.models.bundle import Bundle
from common.models.unet import build_unet
from consilium.cli.predict import app

DATA = DataConfig(("background", "core"), (1, 1, 1), (8, 8, 8))


def volume(path: Path, *, label: bool = False) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    array = np.random.default_rng(len(path.name)).integers(0, 2 if label else 200, (8, 8, 8)).astype(np.uint8)
    nib.save(nib.Nifti1Image(array, np.eye(4)), path.with_name("draft.nii.gz" if path.name.endswith("gz") else "d.nii"))
    path.with_name("draft.nii.gz" if path.name.endswith("gz") else "d.nii").rename(path)


@pytest.fixture
def predicted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Return a function that runs `predict` on a folder and returns exit code, output and the names of the
    label maps.
    """
    bundle = Bundle(build_unet((4, 8), in_channels=1, out_channels=2, seed=1).eval(), DATA, "w" * 64)
    monkeypatch.setattr("consilium.predict.load_model", lambda _: bundle)
    (tmp_path / "model").mkdir()

    def predict(*more: str) -> tuple[int, str, list[str]]:
        words = [str(tmp_path / "images"), "--model", str(tmp_path / "model"), "--out", str(tmp_path / "out"), *more]
        done = CliRunner().invoke(app, words)
        return (
            done.exit_code,
            f"{done.output} {done.exception}",
            sorted(p.name for p in (tmp_path / "out").glob("*.gz")),
        )

    return predict


def test_of_two_images_that_would_have_one_result_neither_is_used_and_the_others_are(tmp_path: Path, predicted) -> None:
    for name in ("a.nii", "a.nii.gz", "b.nii.gz", "c.NII.GZ", "c.nii"):
        volume(tmp_path / "images" / name)
    code, said, maps = predicted()
    assert (code, maps) == (12, ["b_seg.nii.gz"])
    assert said.count("two files of this name") == 4
    assert "left out a.nii.gz: two files" in said
    assert "4 of 5 files" in said


def test_scores_name_files_of_patients_so_they_are_as_private_as_the_user_asks(tmp_path: Path, predicted) -> None:
    volume(tmp_path / "images" / "a.nii")
    (tmp_path / "out").mkdir(mode=0o755)
    for mask, mode in ((0o077, 0o600), (0o022, 0o644)):
        before = os.umask(mask)
        try:
            code, said, _ = predicted()
        finally:
            os.umask(before)
        assert code == 0, said
        assert (tmp_path / "out" / "scores.json").stat().st_mode & 0o777 == mode


def test_an_image_is_not_scored_on_one_of_two_label_maps(tmp_path: Path, predicted) -> None:
    for name in ("a.nii", "b.nii"):
        volume(tmp_path / "images" / name)
    for name in ("a.nii", "a.nii.gz", "b.NII"):
        volume(tmp_path / "labels" / name, label=True)
    code, said, maps = predicted("--labels", str(tmp_path / "labels"))
    assert (code, maps) == (12, ["b_seg.nii.gz"])
    assert "left out a: two label maps" in said
    assert "core Dice" in said


def test_label_maps_that_belong_to_no_image_are_not_silently_left_out(tmp_path: Path, predicted) -> None:
    volume(tmp_path / "images" / "a.nii")
    volume(tmp_path / "labels" / "b.nii", label=True)
    code, said, maps = predicted("--labels", str(tmp_path / "labels"))
    assert (code, maps) == (1, [])
    assert "label maps that have the names of the images" in said


def test_an_image_whose_name_is_not_utf8_is_left_out_and_a_second_run_reads_the_scores(
    tmp_path: Path, predicted
) -> None:
    for name in ("a.nii", os.fsdecode(b"M\xfcller.nii")):
        volume(tmp_path / "images" / name)
    for _ in range(2):
        code, said, maps = predicted()
        assert (code, maps) == (12, ["a_seg.nii.gz"])
        assert "not UTF-8" in said


def test_a_case_whose_id_is_no_file_name_is_left_out_and_nothing_is_written_elsewhere(
    tmp_path: Path, predicted
) -> None:
    for name in ("a.nii", "b.nii", "c.nii"):
        volume(tmp_path / "images" / name)
    (tmp_path / "images/cases.csv").write_text("case_id,image\n../a,a.nii\nx/b,b.nii\nc,c.nii\n")
    code, said, maps = predicted()
    assert (code, maps) == (12, ["c_seg.nii.gz"])
    assert said.count("cannot name a file") == 2
    assert not list(tmp_path.glob("*_seg.nii.gz"))


def test_a_prediction_that_finds_no_room_names_the_folder_and_the_same_command_finishes_it_later(
    tmp_path: Path, predicted, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Formerly a part of the label map remained, and the next run refused the case because its file existed."""
    volume(tmp_path / "images" / "a.nii")
    with monkeypatch.context() as patched:
        patched.setattr("nibabel.save", write_a_part)
        code, said, maps = predicted()
    assert (code, maps) == (1, [])
    assert f"No space left on device: '{tmp_path / 'out'}'" in said
    assert [path.name for path in (tmp_path / "out").iterdir()] == []
    code, said, maps = predicted()
    assert (code, maps) == (0, ["a_seg.nii.gz"]), said


def write_a_part(_image: object, path: Path) -> None:
    path.write_bytes(b"\0" * 10)
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
