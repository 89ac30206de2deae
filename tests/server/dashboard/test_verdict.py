"""Tests the page's first line: it says whether anything was learned, in green only if that was measured."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from fastapi.testclient import TestClient
from scipy.stats import ttest_1samp

from common.measured_gain import MeasuredGain
from consilium.cli.study_words import say_outlook
from server.dashboard.planning import MOST_QUERIES, form_of, planned
from server.dashboard.views.verdict import verdict
from server.study.read_facts import read_measured
from tests.dashboard_study import SITES, Recorded
from tests.federation import make_study

STUDY = make_study(planned_queries=4)


def report(student: float, controls: dict[str, float | None], **more: object) -> str:
    scored = {name: {"dice": None if value is None else {"mean": value}} for name, value in controls.items()}
    return json.dumps({"study": {"id": STUDY.id}, "student": {"dice": {"mean": student, **more}}, "controls": scored})


def said(gain: MeasuredGain | None, *, joint: bool = False, hospitals: int = 4):
    study = replace(STUDY, codec=replace(STUDY.codec, joint=joint))
    return verdict(study, gain=gain, plan=None, hospitals=hospitals, answers=4)


@pytest.mark.parametrize(
    ("gain", "half", "name"),
    [
        (0.05, None, "not-proven"),
        (0.05, 0.02, "proven"),
        (0.05, 0.051, "not-proven"),
        (0.01, 0.005, "proven"),
        (-0.01, 0.02, "not-proven"),
        (-0.03, 0.02, "worse"),
        (-0.03, None, "not-proven"),
    ],
)
def test_green_is_a_gain_that_is_proven_by_the_rule_of_every_other_text(gain, half, name):
    measured = MeasuredGain(0.5 + gain, 0.5, "the control public only", gain, half, 12 if half else 0)
    found = said(measured)
    assert found.name == name == measured.word.replace(" ", "-")
    assert found.learned is (name == "proven")
    assert measured.title == found.words
    assert measured.figures in found.basis
    assert found.next


@pytest.mark.parametrize("hospitals", [0, 2, 8, 500])
def test_nothing_is_green_before_it_was_measured_however_good_the_plan(hospitals):
    found = said(None, joint=True, hospitals=hospitals)
    assert not found.learned
    assert found.name in ("unknown", "doubtful")
    assert found.words.startswith("Not measured yet")


@pytest.mark.parametrize(
    ("state", "words"),
    [
        ({"cases": True, "running": True}, "Wait for the run to end. It scores the student"),
        ({"cases": True, "trained": True}, "`consilium student export`. This page"),
        ({"cases": True}, "Continue the run with `consilium study resume`. It scores"),
        ({}, "`consilium study publish --validation`. Continue the run"),
    ],
)
def test_the_next_step_names_the_command_that_leads_to_a_measured_gain(state, words):
    study = replace(STUDY, codec=replace(STUDY.codec, joint=True))
    assert words in verdict(study, gain=None, plan=None, hospitals=8, answers=4, **state).next


@pytest.mark.parametrize(("paired", "expected"), [(8, "8 public pairs"), (0, "hippocampus task")])
def test_beside_public_pairs_no_gain_is_promised_that_was_measured_without_any(paired, expected):
    study = replace(STUDY, codec=replace(STUDY.codec, joint=True, paired=paired))
    found = verdict(study, gain=None, plan=None, hospitals=8, answers=0)
    assert expected in found.basis


def test_the_gain_is_over_the_best_control_and_of_this_study_alone(tmp_path: Path):
    folder = tmp_path / "study"
    folder.mkdir()
    assert read_measured(folder, STUDY.id) is None
    (tmp_path / "report.json").write_text(report(0.8, {"zero_code": 0.6, "shuffled_codes": 0.75, "public_only": None}))
    found = read_measured(folder, STUDY.id)
    assert found is not None
    assert (found.measured_gain.reference, found.measured_gain.interval) == (
        "the control shuffled codes",
        None,
    )
    assert found.measured_gain.gain == pytest.approx(0.05)
    assert read_measured(folder, "f" * 64) is None


@pytest.mark.parametrize(
    "bad", ["[" * 100_000, "{}", "null", report(float("nan"), {"a": 0.1}), report(2.0, {"a": 0.1})]
)
def test_a_report_that_does_not_hold_is_no_measurement(tmp_path: Path, bad: str):
    (tmp_path / "report.json").write_text(bad)
    assert read_measured(tmp_path, STUDY.id) is None


def test_a_report_without_controls_is_no_measurement(tmp_path: Path):
    (tmp_path / "report.json").write_text(report(0.8, {"zero_code": None}))
    assert read_measured(tmp_path, STUDY.id) is None


def test_the_first_page_begins_with_the_verdict(reader):
    text = reader.get("/").text
    assert text.index("Not measured yet") < text.index('id="live-budget"')
    assert " learned" not in text.split("<main")[1].split("</section>")[0]


def test_nothing_is_green_and_nothing_is_to_be_exported_while_the_ledger_is_broken():
    gain = MeasuredGain(0.7, 0.5, "the control public only", 0.2, 0.05, 12)
    found = verdict(STUDY, gain=gain, plan=None, hospitals=4, answers=4, broken=True)
    assert not found.learned
    assert "Export" not in found.next
    assert verdict(STUDY, gain=gain, plan=None, hospitals=4, answers=4).learned


def test_a_case_without_a_score_is_left_out_of_the_pairs(tmp_path: Path):
    found = json.loads(report(0.8, {"zero_code": 0.6}, cases=[0.8, None, 0.82, 0.78]))
    found["controls"]["zero_code"]["dice"]["cases"] = [0.6, 0.5, None, 0.61]
    (tmp_path / "report.json").write_text(json.dumps(found))
    measured = read_measured(tmp_path, STUDY.id)
    assert measured is not None
    assert measured.measured_gain.cases == 2
    expected = ttest_1samp([0.2, 0.17], 0).confidence_interval(0.95)
    assert measured.measured_gain.interval == pytest.approx((expected.low, expected.high))


def test_a_study_beyond_what_the_planners_form_takes_is_planned_all_the_same():
    study = make_study()
    study = replace(study, privacy=replace(study.privacy, planned_queries=MOST_QUERIES + 66))
    own = form_of(study, hospitals=64, stds=())
    assert planned(own, study, ()).plan.queries == MOST_QUERIES + 66


def test_the_command_line_and_the_dashboard_say_the_same_of_a_fitted_codec(
    collected: Recorded, reader: TestClient, capsys: pytest.CaptureFixture[str]
):
    study = collected.workspace.study()
    say_outlook(study, hospitals=len(SITES), workspace=collected.workspace)
    found = re.search(r"explain at most ([\d.]+ %)", capsys.readouterr().out)
    assert found is not None
    assert f"explain at most {found[1]} of the variance" in reader.get("/").text
