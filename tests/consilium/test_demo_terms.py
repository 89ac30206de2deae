"""Tests the terms of a demo: who adds the noise, and how many hospitals must answer."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import nibabel as nib
import numpy as np
import pytest

from common.config import SEALED_SUM
from common.errors import InvalidInput, Refused
from consilium.cli.simulate import app
from consilium.demo import run
from consilium.demo.options import DemoFolders, DemoOptions
from consilium.demo.run import DemoProgress, _claim
from consilium.demo.terms import _protocol, terms
from tests.commands import refusal_of

WATCH = DemoProgress(*[lambda *_: None] * 5)


@pytest.mark.parametrize(
    ("hospitals", "aggregation", "sealed", "quorum"),
    [(2, None, False, 2), (3, None, True, 3), (4, None, True, 3), (8, None, True, 5), (3, "open", False, 2)],
)
def test_a_demo_of_three_hospitals_or_more_trusts_no_operator_unless_it_says_so(
    hospitals: int, aggregation: str | None, sealed: bool, quorum: int
) -> None:
    privacy = terms(DemoOptions(aggregation=aggregation), DemoFolders(Path()), [], [15] * hospitals).privacy
    assert (privacy.sealed, privacy.quorum) == (sealed, quorum)


def test_a_sealed_demo_has_two_hospitals_beside_its_colluders() -> None:
    with pytest.raises(InvalidInput, match="sealed sum: got"):
        terms(DemoOptions(colluders=2), DemoFolders(Path()), [], [15] * 3)


@pytest.mark.parametrize(("places", "protocol"), [((7.5, 8.5), "joint"), ((3.0, 13.0), "appearance")])
def test_a_demo_on_data_asks_as_the_planner_says_of_its_public_maps(
    tmp_path: Path, places: tuple[float, float], protocol: str
) -> None:
    maps, draws = [tmp_path / f"map-{number}.nii.gz" for number in range(8)], np.random.default_rng(0)
    voxels = np.stack(np.meshgrid(*[np.arange(16)] * 3, indexing="ij"), axis=-1)
    for path in maps:
        ball = np.linalg.norm(voxels - draws.uniform(*places, 3), axis=-1) < draws.uniform(2, 3)
        nib.save(nib.Nifti1Image(ball.astype(np.uint8), np.eye(4)), path)
    assert _protocol(DemoOptions(data="set"), maps)[0] == protocol
    assert _protocol(DemoOptions(data="set", rounds=True), maps)[0] == "joint"
    assert _protocol(DemoOptions(data="set", rounds=False), maps)[0] == "per-volume"
    assert _protocol(DemoOptions(data="set", codec="paper-pca"), maps)[0] == "per-volume"


def test_one_label_map_from_which_no_codec_can_be_fitted_is_refused_before_the_folder_is_claimed() -> None:
    with pytest.raises(InvalidInput, match=r"--label-maps: got 1; allowed: 2 to"):
        DemoOptions(data="set", label_maps=1)


@pytest.mark.parametrize("name", ["hospitals", "queries", "label_maps", "voters", "teacher_steps", "student_steps"])
def test_a_zero_is_refused_and_not_taken_as_not_given(name: str) -> None:
    with pytest.raises(InvalidInput, match="got 0; allowed: "):
        DemoOptions(data="set", **{name: 0})  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["epsilon", "delta", "training_epsilon", "seed", "paired", "colluders"])
def test_no_number_of_a_demo_is_nan_or_negative(name: str) -> None:
    for value in (float("nan"), -1):
        with pytest.raises(InvalidInput, match="allowed: "):
            DemoOptions(**{name: value})  # type: ignore[arg-type]


@pytest.mark.parametrize("given", [{"labels": "a,b"}, {"label_maps": 5}, {"channels": "T1"}, {"layout": "msd"}])
def test_options_that_phantoms_would_ignore_are_refused(tmp_path: Path, given: dict[str, str]) -> None:
    words = [word for name, value in given.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    refused = refusal_of(app, "--phantoms", "--out", tmp_path / "out", *words)
    assert words[0] in str(refused)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "options",
    [
        DemoOptions(epsilon=0.0),
        DemoOptions(hospitals=2, aggregation=SEALED_SUM),
        DemoOptions(aggregation="shut"),
        DemoOptions(codec="ball-ae", rounds=True),
        DemoOptions(data="set", colluders=63),
    ],
)
def test_terms_are_checked_before_the_output_folder_is_claimed(tmp_path: Path, options: DemoOptions) -> None:
    with pytest.raises(InvalidInput):
        _claim(tmp_path / "out", options)
    assert not (tmp_path / "out").exists()


def test_a_refused_sealed_sum_names_options_with_which_it_runs(tmp_path: Path) -> None:
    for options in (DemoOptions(hospitals=2, aggregation=SEALED_SUM), DemoOptions(colluders=2)):
        with pytest.raises(InvalidInput, match=f"--hospitals {options.colluders + 2} .*--aggregation open"):
            _claim(tmp_path / "out", options)
    _claim(tmp_path / "sealed", DemoOptions(hospitals=4, colluders=2))
    _claim(tmp_path / "open", DemoOptions(hospitals=2, aggregation="open"))


def test_two_runs_never_write_to_one_output_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The lock ends with its process, so a killed run can be resumed."""
    out, options = tmp_path / "out", DemoOptions()
    monkeypatch.setattr(run, "_demo", lambda out, *_, **__: out / "report.html")
    holder = f"import fcntl, sys; file = open({str(out / '.lock')!r}, 'ab'); fcntl.flock(file, fcntl.LOCK_EX); "
    out.mkdir()
    with subprocess.Popen(
        [sys.executable, "-S", "-c", holder + "print(flush=True); sys.stdin.read()"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as other:
        assert other.stdout is not None
        other.stdout.readline()
        with pytest.raises(Refused, match=r"one run at a time .*to fix: .*another --out"):
            run.run_demo(out, options, watch=WATCH)
        assert not (out / "demo.json").exists()
        other.kill()
    assert run.run_demo(out, options, watch=WATCH) == out / "report.html"
    assert run.run_demo(out, options, watch=WATCH) == out / "report.html"


def test_a_folder_with_other_files_gets_no_lock_file(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("")
    with pytest.raises(InvalidInput, match="other files"):
        run.run_demo(tmp_path, DemoOptions(), watch=WATCH)
    assert [one.name for one in tmp_path.iterdir()] == ["mine"]
