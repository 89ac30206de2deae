"""Tests that a withdrawn patient is in no later result: not scored, not counted, not pictured."""

from __future__ import annotations

import json
import shutil
from datetime import UTC, datetime
from pathlib import Path

import pytest

from client.policy import load_site
from client.site.books import joined_study, slots_file
from client.teachers.evaluation import evaluate
from client.teachers.evaluation_text import table
from common.data.msd import read_dataset
from common.errors import InvalidInput
from consilium.cli.site_decisions import patients_of
from tests.own_site import make_own_site

pytestmark = pytest.mark.slow

NOW = datetime(2026, 3, 1, tzinfo=UTC)


def test_a_withdrawn_patient_is_neither_scored_nor_counted_nor_pictured(tmp_path: Path) -> None:
    site = make_own_site(tmp_path, "after-a-withdrawal")
    listed = [case.id for case in read_dataset(tmp_path / "data").labelled]
    withdrawn = listed[1]  # as in this state of the site
    result, folder = evaluate(site, now=NOW)
    assert [score.case for score in result.scores] == [case for case in listed if case != withdrawn]
    assert result.withdrawn == 1
    assert "not scored: 1 " in table(result)
    assert json.loads((folder / "evaluation.json").read_text())["withdrawn"] == 1
    for text in (folder / name for name in ("cases.csv", "evaluation.json", "evaluation.html")):
        assert withdrawn not in text.read_text(), text.name
    assert "1 case of withdrawn patients" in (folder / "evaluation.html").read_text()
    assert patients_of(load_site(site), joined_study(load_site(site))) == len(listed) - 1


def test_other_cases_of_a_withdrawn_patient_are_not_scored_either(tmp_path: Path) -> None:
    site = make_own_site(tmp_path, "after-a-withdrawal")
    result, _ = evaluate(site, now=NOW, data=tmp_path / "data")
    assert (len(result.scores), result.withdrawn) == (3, 1)


def test_cases_of_known_patients_count_as_trained_on_in_another_folder_too(tmp_path: Path) -> None:
    site = make_own_site(tmp_path, "after-a-student")
    own, _ = evaluate(site, now=NOW)
    shutil.copytree(tmp_path / "data", tmp_path / "copy")
    copy, _ = evaluate(site, now=NOW.replace(day=2), data=tmp_path / "copy")
    assert {score.part for score in own.scores} != {"not used"}
    assert [score.part for score in copy.scores] == [score.part for score in own.scores]


def test_nobody_is_scored_if_the_withdrawn_patients_are_unknown(tmp_path: Path) -> None:
    site = make_own_site(tmp_path, "after-a-withdrawal")
    slots_file(load_site(site)).unlink()
    with pytest.raises(InvalidInput, match="identifies withdrawn patients"):
        evaluate(site, now=NOW)
    assert not (site / "evaluation").exists()
    assert patients_of(load_site(site), joined_study(load_site(site))) is None
