"""Tests joint queries on large grids: hospitals answer on a coarser grid, and the student has the full resolution."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import nibabel as nib
import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from client.teachers.comparison import _at
from common.config import CodecConfig, DataConfig, load_study, parse_study, render_study
from common.data.grid import asked_at
from common.data.msd import read_dataset
from common.data.synthetic import study_data
from common.data.volume import load_label, load_volume, onto_grid, volume_from_bytes
from common.errors import InvalidInput
from common.models.fit import predict
from consilium.cli.study import study_app
from consilium.predict import load_model
from server.postprocess.labels import read_released
from server.postprocess.networks import student_data_of
from server.protocols.joint.protocol import on_students_grid
from server.study import create_study as setup
from server.study.consent_text import for_consortium
from tests.commands import refusal_of
from tests.dashboard_study import make_study_directory
from tests.federation import make_study

DATA = DataConfig(labels=("background", "body"), spacing_mm=(1.0, 1.0, 1.0), grid=(160, 160, 96))


def test_above_the_limit_the_question_is_coarser_and_the_student_stays() -> None:
    asked = asked_at(DATA)
    assert (asked.grid, asked.spacing_mm, asked.finer) == ((80, 80, 48), (2.0, 2.0, 2.0), 2)
    assert asked.student == DATA
    assert asked_at(DATA, most=200_000).finer == 4
    assert asked_at(DATA, most=10_000) == DATA
    odd = replace(DATA, grid=(136, 136, 136))
    assert asked_at(odd) == odd
    assert asked_at(replace(DATA, grid=(128, 128, 128))).finer == 1


def test_a_study_file_has_the_finer_grid_only_if_set_and_the_consent_sheet_then_states_it() -> None:
    study = make_study(planned_queries=4)
    assert "finer" not in render_study(study)
    assert "finer" not in str(study.to_json())
    finer = replace(study, data=replace(study.data, finer=2), codec=CodecConfig(joint=True))
    assert parse_study(render_study(finer)) == finer
    assert "2 times that resolution" in for_consortium(finer, sites=3)
    for codec in (CodecConfig(), CodecConfig(protocol="appearance"), CodecConfig(joint=True, paired=2)):
        with pytest.raises(InvalidInput, match=r"data\.finer"):
            replace(finer, codec=codec)
    for value in (0, 3, True):
        with pytest.raises(InvalidInput, match=r"data\.finer"):
            replace(study.data, finer=value)
    with pytest.raises(InvalidInput, match=r"data\.grid"):
        replace(DATA, grid=(160, 160, 160), finer=4)


def init(directory: Path, grid: str) -> list[str]:
    said = ["init", str(directory), "--name", "s", "--labels", "background,core", "--grid", grid]
    return [*said, "--queries", "4", "--quorum", "3", "--joint"]


def test_study_init_asks_a_large_grid_coarsely_and_refuses_early_what_cannot_be_asked(tmp_path: Path) -> None:
    done = CliRunner().invoke(study_app, init(tmp_path / "s", "160,160,96"), catch_exceptions=False)
    assert "2 times that resolution" in done.stdout
    study = load_study(tmp_path / "s" / "study.toml")
    assert (study.data.grid, study.data.student.grid) == ((80, 80, 48), (160, 160, 96))
    assert study.student.patch == (96, 96, 96)
    refused = refusal_of(study_app, *init(tmp_path / "t", "136,136,136"))
    assert "data.finer" in str(refused)
    assert not (tmp_path / "t").exists()
    with pytest.raises(InvalidInput, match=r"student\.patch"):
        setup.create_study(setup.Workspace(tmp_path / "u"), replace(study, student=replace(study.student, patch=())))


@pytest.mark.parametrize("shape", [(50, 47, 41), (48, 48, 48), (31, 52, 40)])
def test_a_label_keeps_its_position_when_it_is_resampled_to_the_students_grid(
    tmp_path: Path, shape: tuple[int, int, int]
) -> None:
    """Grids with another spacing do not begin at the same voxel, so the label's position in millimetres decides."""
    fine = replace(DATA, grid=(48, 48, 48))
    coarse = asked_at(fine, most=24**3)
    axes = np.meshgrid(*(np.arange(n) for n in shape), indexing="ij")
    ball = (sum((axis - 0.47 * n) ** 2 for axis, n in zip(axes, shape, strict=True)) < 81).astype(np.uint8)
    noise = np.random.default_rng(0).normal(size=shape)
    for name, array in (("label", ball), ("image", (ball + noise).astype(np.float32))):
        nib.save(nib.Nifti1Image(array, np.eye(4)), tmp_path / f"{name}.nii.gz")
    maps = [load_label(tmp_path / "label.nii.gz", data) for data in (coarse, fine)]
    volumes = [load_volume(tmp_path / "image.nii.gz", data) for data in (coarse, fine)]
    moved = onto_grid(np.stack([maps[0] == 0, maps[0] == 1]).astype(np.float32), *volumes)
    assert moved.shape == (2, *fine.grid)
    np.testing.assert_allclose(moved.sum(axis=0), 1, atol=1e-5)
    centres = [np.array([axis.mean() for axis in np.nonzero(found)]) for found in (moved.argmax(axis=0), maps[1])]
    np.testing.assert_allclose(centres[0], centres[1], atol=0.3)


def test_references_at_a_hospital_answer_on_the_students_grid() -> None:
    found = np.random.default_rng(0).random((2, 8, 8, 8)).astype(np.float32)
    seen: list[tuple[int, ...]] = []

    def answer(image: np.ndarray) -> np.ndarray:
        seen.append(image.shape)
        return found

    assert _at(answer, 2)(np.zeros((1, 16, 16, 16))).shape == (2, 16, 16, 16)
    assert seen == [(1, 8, 8, 8)]
    assert _at(answer, 1) is answer


@pytest.mark.slow
def test_a_study_asked_coarsely_ends_with_a_student_of_the_full_resolution(tmp_path: Path) -> None:
    torch.set_num_threads(1)
    full = study_data(2)
    recorded = make_study_directory(tmp_path, steps=8, rounds=2, most=math.prod(full.grid) // 4)
    workspace, study = recorded.workspace, recorded.workspace.study()
    assert study.data.student == full != study.data
    phantoms = read_dataset(tmp_path / "phantoms")
    setup.publish_validation(workspace, replace(phantoms, cases=phantoms.cases[-2:]))
    recorded.run()
    assert (workspace.bundle_dir / "models").is_dir()
    transforms = json.loads((workspace.bundle_dir / "configs" / "inference.json").read_text())
    assert list(full.grid) in [each.get("spatial_size") for each in transforms["preprocessing"]["transforms"]]
    assert json.loads(workspace.scores_file.read_text())["cases"] == 2
    bundle = load_model(workspace.root)
    assert bundle.data == full
    released = read_released(workspace)
    volume, label = next(iter(released.labels.items()))
    student_data = student_data_of(released)
    assert label.shape[1:] == study.data.grid
    assert (
        student_data.image(volume).shape[1:] == on_students_grid(released.public, volume, label).shape[1:] == full.grid
    )
    assert predict(bundle.network, volume_from_bytes(workspace.objects.get(volume), full).image).shape[1:] == full.grid
    assert not list(workspace.student_dir.rglob("*.volumes"))
