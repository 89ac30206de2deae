"""Which evaluation the hospital's own page takes its cases' Dice from."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path

import pytest

from client.operations.evaluated import student_dice
from client.teachers.evaluation import evaluate
from client.teachers.pulled_student import STUDENT_DIR
from common.models.student_bundle import WEIGHTS
from tests.own_site import make_own_site, page_of


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_own_site(tmp_path_factory.mktemp("root"), "after-a-student")


def test_the_page_offers_the_evaluations_cases_by_its_names_the_worst_first(site: Path) -> None:
    assert student_dice(site) == ({}, "")
    done, folder = evaluate(site, now=datetime(2026, 11, 25, 10, tzinfo=UTC))
    scores = {score.case: score.mean_dice for score in done.scores}
    facts = page_of(site).facts()
    assert facts.evaluated == "2026-11-25"
    assert {case.name: case.dice for case in facts.cases} == pytest.approx(scores)
    assert [case.dice for case in facts.cases] == sorted(scores.values())
    page = (folder / "evaluation.html").read_text()
    listed = page[page.index("Every case, the worst first") :]
    places = [listed.index(f"<td>{case.name}</td>") for case in facts.cases]
    assert places == sorted(places)
    assert "cases.csv" in page


def test_evaluations_of_other_cases_networks_or_weights_are_passed_over(site: Path) -> None:
    _, folder = evaluate(site, now=datetime(2026, 11, 25, 11, tzinfo=UTC))
    found, _ = student_dice(site)
    file = folder.parent / "20261126T000000.000000Z" / "evaluation.json"
    file.parent.mkdir()
    told = json.loads((folder / "evaluation.json").read_text())
    other = [case | {"mean_dice": 0.123} for case in told["cases"]]
    for change in ({"elsewhere": True}, {"adapted": True}, {"weights": "0" * 64}):
        file.write_text(json.dumps(told | {"cases": other} | change))
        assert student_dice(site) == (found, "2026-11-25")
    file.write_text("no evaluation")
    assert student_dice(site) == (found, "2026-11-25")
    file.write_text(json.dumps(told | {"cases": other}))
    assert student_dice(site)[1] == "2026-11-26"
    (site / STUDENT_DIR / "bundle" / WEIGHTS).unlink()
    assert student_dice(site) == ({}, "")
