"""Tests that commands which read a folder of public files name the number used, the other files, and the reason."""

from __future__ import annotations

import re
from pathlib import Path

import nibabel as nib
import numpy as np
import pytest

from consilium.cli.main import app
from server.study import create_study as setup
from server.study.workspace import Workspace
from tests.commands import typed
from tests.federation import make_study

pytestmark = pytest.mark.slow


@pytest.fixture
def world(tmp_path: Path) -> Path:
    """Make a study, six label maps (one named in capitals) and six images; each folder has three other files."""
    setup.create_study(Workspace(tmp_path / "trial"), make_study())
    grid = np.indices((8, 8, 8)) - 3.5
    for folder in ("maps", "images"):
        (tmp_path / folder).mkdir()
        for number in range(6):
            ball = ((grid**2).sum(axis=0) < (1.5 + number / 3) ** 2).astype(np.uint8)
            ball[0, 0, number] = 1  # no two the same
            data = ball if folder == "maps" else ball + np.random.default_rng(number).normal(0, 0.3, ball.shape)
            name = f"CASE_{number}.NII.GZ" if number == 0 else f"case_{number}.nii.gz"
            path = tmp_path / folder / name.lower()
            nib.save(nib.Nifti1Image(data, np.eye(4)), path)
            path.rename(tmp_path / folder / name)
        (tmp_path / folder / "readme.txt").write_text("of the atlas")
        (tmp_path / folder / "case_7.mha").write_bytes(b"MetaImage")
        (tmp_path / folder / "more").mkdir()
        (tmp_path / folder / ".DS_Store").write_bytes(b"")
    return tmp_path


def held(text: str, what: str) -> None:
    assert f"{what}, files: 6 used, 3 left out" in text
    for name, why in (("case_7.mha", ".nii.gz"), ("readme.txt", ".nii.gz"), ("more", "folder")):
        assert re.search(f"^{what}, left out {name}: .*{why}", text, re.M)
    assert ".DS_Store" not in text


def test_publish_and_codec_fit_count_what_they_read_and_name_what_they_leave_out(world: Path) -> None:
    published = typed(app, "study", "publish", world / "trial", "--images", world / "images")
    held(published.stdout, "public volumes")
    fitted = typed(app, "codec", "fit", world / "trial", "--label-maps", world / "maps", "--sites", "3")
    held(fitted.stdout, "public label maps")
    assert "fitted on 6 " in fitted.stdout


def test_plan_and_init_do_too_and_the_plans_json_stays_json(world: Path) -> None:
    planned = typed(app, "plan", "--label-maps", world / "maps", "--json")
    held(planned.stderr, "public label maps")
    assert planned.stdout.startswith("{")
    asked = ["--labels", "background,body", "--grid", "8,8,8", "--queries", "4", "--quorum", "3"]
    begun = typed(app, "study", "init", world / "new", "--name", "new", *asked, "--label-maps", world / "maps")
    held(begun.stdout, "public label maps")
