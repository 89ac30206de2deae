"""Tests the student's scores: measured beside its controls on the validation set, and stated alike everywhere."""

from __future__ import annotations

import gzip
import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from scipy.stats import ttest_rel
from typer.testing import CliRunner

from common.data.msd import Case, read_dataset, write_dataset
from common.data.synthetic import write_phantoms
from common.data.volume import load_label, load_volume
from common.errors import InvalidInput
from common.measured_gain import Score
from common.metrics import mean_dice
from common.models.fit import predict
from consilium.cli.study import study_app
from server.postprocess import bundle
from server.postprocess.networks import load_control, load_student
from server.postprocess.scores import figures, kept_scores
from server.protocols.controls import CONTROLS
from server.study.create_study import add_volumes, publish_validation
from server.study.read_facts import read_measured
from tests.commands import typed
from tests.dashboard_study import Recorded, make_study_directory

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Recorded:
    return make_study_directory(tmp_path_factory.mktemp("scores"), steps=4, volumes=4)


@pytest.fixture(scope="module")
def validation(recorded: Recorded, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write labelled cases that no site and no query has."""
    folder, data = tmp_path_factory.mktemp("validation"), recorded.workspace.study().data
    write_phantoms(folder, cases=5, seed=77)
    assert read_dataset(folder).labels == data.labels
    return folder


@pytest.mark.slow
def test_a_run_ends_with_its_worth_in_terminal_report_and_model_card(recorded: Recorded, validation: Path) -> None:
    workspace, study = recorded.workspace, recorded.workspace.study()
    runner = CliRunner()
    typed(study_app, "publish", workspace.root, "--validation", validation)
    recorded.run("1")

    cases = read_dataset(validation).labelled
    truths = [load_label(case.label, study.data) for case in cases if case.label]
    images = [load_volume(case.image, study.data).image for case in cases]
    networks = {"student": load_student(study, workspace.student_dir)}
    networks |= {name: load_control(study, workspace.student_dir, name) for name in CONTROLS}
    dice = {
        name: [
            mean_dice(predict(network, image).argmax(0).astype(np.uint8), truth, len(study.data.labels))
            for image, truth in zip(images, truths, strict=True)
        ]
        for name, network in networks.items()
    }
    assert {name: list(one.cases) for name, one in kept_scores(workspace).items()} == dice
    each = json.loads(workspace.scores_file.read_text())["student_cases"]
    known = [[value for value in row if value is not None] for row in each["dice"]]
    assert [np.mean(row) for row in known] == pytest.approx(dice["student"])
    assert len(each["hd95_mm"]) == 5
    assert 0 <= each["ece"] <= 1

    best = max(CONTROLS, key=lambda name: np.mean(dice[name]))
    interval = ttest_rel(dice["student"], dice[best]).confidence_interval(0.95)
    found = read_measured(workspace.root, study.id)
    assert found is not None
    assert found.measured_gain.interval == pytest.approx((interval.low, interval.high))
    assert found.measured_gain.cases == 5

    ended = runner.invoke(study_app, ["watch", str(workspace.root)]).stdout
    assert f"student {np.mean(dice['student']):.3f}; controls: zero code {np.mean(dice['zero_code']):.3f}" in ended
    assert f"interval {interval.low:+.3f} to {interval.high:+.3f}, paired over 5 cases" in ended
    assert found.measured_gain.sentence in ended
    card = (workspace.bundle_dir / "docs" / "README.md").read_text()
    assert f"| student | {np.mean(dice['student']):.3f} |" in card
    assert f"control {best.replace('_', ' ')} | {np.mean(dice['student']) - np.mean(dice[best]):.3f} |" in card
    measured = json.loads((workspace.bundle_dir / "configs" / "metadata.json").read_text())["eval_metrics"]
    assert measured["cases"] == 5


def test_the_card_rounds_a_score_once_as_every_page_does() -> None:
    score = Score(per_class=(0.0634996,), mean=0.0634996, cases=(0.0634996,))  # 0.06350 in five digits, 0.064 in three
    assert f"{figures({'student': score})['student']:.3f}" == f"{score.mean:.3f}" == "0.063"


def test_the_card_states_the_dice_whose_difference_is_the_gain() -> None:
    """If a case lacks a structure, the mean over structures differs from the mean over cases."""
    student, control = Score((0.5, 0.9), 0.7, (0.6, 0.8, 0.7)), Score((0.5, 0.5), 0.5, (0.65, 0.7, 0.6))
    card = figures({"student": student, "zero_code": control})
    assert card["gain over the control zero code"] == pytest.approx(card["student"] - card["control zero code"])


@pytest.mark.slow
def test_an_export_that_is_killed_leaves_no_scores_beside_the_student_of_another_export(
    recorded: Recorded, validation: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    workspace = recorded.workspace
    typed(study_app, "publish", workspace.root, "--validation", validation)
    recorded.run("1")
    assert workspace.scores_file.exists()

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(bundle, "publish_statement", killed)
    with pytest.raises(KeyboardInterrupt):
        bundle.export_student(workspace, events=recorded.log())
    assert not workspace.scores_file.exists()


def test_without_a_validation_set_the_end_says_how_to_get_one(recorded: Recorded) -> None:
    workspace = recorded.workspace
    (workspace.root / "validation.json").unlink(missing_ok=True)
    recorded.run("2")
    assert not workspace.scores_file.exists()
    ended = CliRunner().invoke(study_app, ["watch", str(workspace.root)]).stdout
    assert "--validation DIR" in ended
    assert "No figures" in (workspace.bundle_dir / "docs" / "README.md").read_text()


def test_a_validation_case_given_twice_is_refused_although_its_files_differ(
    recorded: Recorded, validation: Path, tmp_path: Path
) -> None:
    dataset = read_dataset(validation)
    first, again = dataset.labelled[0], tmp_path / "again.nii.gz"
    again.write_bytes(gzip.compress(gzip.decompress(first.image.read_bytes()), compresslevel=1, mtime=7))
    with pytest.raises(InvalidInput, match="given twice"):
        publish_validation(
            recorded.workspace, replace(dataset, cases=(*dataset.cases, replace(first, id="again", image=again)))
        )


@pytest.mark.parametrize("level", [None, 1])
def test_nothing_the_student_learns_from_is_a_validation_case_however_it_is_compressed(
    recorded: Recorded, validation: Path, tmp_path: Path, level: int | None
) -> None:
    workspace, dataset = recorded.workspace, read_dataset(validation)
    learnt = tmp_path / "learnt.nii.gz"
    content = workspace.objects.get(workspace.volumes()[0])
    if level is not None:
        content = gzip.compress(gzip.decompress(content) if content[:2] == b"\x1f\x8b" else content, level, mtime=7)
    learnt.write_bytes(content)
    case = Case("learnt", image=learnt, label=dataset.labelled[0].label)
    wrong = write_dataset(
        tmp_path / "wrong", name="wrong", labels=dataset.labels, channels=dataset.channels, cases=[case]
    )
    with pytest.raises(InvalidInput, match="validation cases: got 1"):
        publish_validation(workspace, wrong)
    shutil.rmtree(tmp_path / "wrong")
    assert not workspace.validation()


def test_a_volume_published_later_is_no_validation_case_and_a_refusal_publishes_nothing(tmp_path: Path) -> None:
    made = make_study_directory(tmp_path, volumes=6, later=3)
    workspace, phantoms = made.workspace, read_dataset(tmp_path / "phantoms")
    asked, later = workspace.volumes(), replace(phantoms, cases=phantoms.labelled[3:4])
    images, others = [later.labelled[0].image], replace(phantoms, cases=phantoms.labelled[-1:])
    with pytest.raises(InvalidInput, match="validation cases: got 1"):
        add_volumes(workspace, images, validation=later)
    assert (workspace.volumes(), workspace.validation()) == (asked, ())
    publish_validation(workspace, later)
    with pytest.raises(InvalidInput, match="validation cases: got 1"):
        add_volumes(workspace, images)
    assert workspace.volumes() == asked
    assert len(add_volumes(workspace, images, validation=others)) == 4
    assert len(workspace.validation()) == 1
