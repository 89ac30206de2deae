"""Tests from which evaluation the hospital's own page takes the Dice of its cases."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import pytest

from client.operations.evaluated import adapted_verdict, newest_evaluation, student_verdict
from client.operations.own_page import SitesOwnPage
from client.teachers import evaluation
from client.teachers.comparison import ALL, OWN_TEACHERS
from client.teachers.evaluation import evaluate
from client.teachers.pulled_student import STUDENT_DIR
from common.config import load_study
from common.data.msd import read_dataset
from common.data.synthetic import write_phantoms
from common.errors import InvalidInput
from common.models.student_bundle import WEIGHTS
from tests.own_site import make_own_site, page_of
from tests.trained_sites import train_site


@pytest.fixture(scope="module", autouse=True)
def _no_pictures() -> Iterator[None]:
    """Draw no pictures, since no test here reads them; ``tests/client/teachers/test_student.py`` does."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(evaluation, "case_picture", lambda *_, **__: b"")
        patch.setattr(evaluation, "reliability_picture", lambda _: b"")
        yield


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_own_site(tmp_path_factory.mktemp("root"), "after-a-student")


@pytest.mark.slow
def test_the_page_offers_the_evaluations_cases_by_its_names_the_worst_first(site: Path) -> None:
    assert newest_evaluation(site) is None
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
    found = newest_evaluation(site)
    assert found is not None
    file = folder.parent / "20261126T000000.000000Z" / "evaluation.json"
    file.parent.mkdir()
    told = json.loads((folder / "evaluation.json").read_text())
    other = [case | {"mean_dice": 0.123} for case in told["cases"]]
    for change in ({"elsewhere": True}, {"adapted": True}, {"weights": "0" * 64}):
        file.write_text(json.dumps(told | {"cases": other} | change))
        assert newest_evaluation(site) == found
    file.write_text("no evaluation")
    assert newest_evaluation(site) == found
    file.write_text(json.dumps(told | {"cases": other}))
    newest = newest_evaluation(site)
    assert newest is not None
    assert newest.day == "2026-11-26"
    weights = site / STUDENT_DIR / "bundle" / WEIGHTS
    weights.rename(site / "aside")
    assert newest_evaluation(site) is None
    (site / "aside").rename(weights)


# --- whether a network is better than the own teachers


@pytest.fixture(scope="module")
def evaluated(site: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a copy of the site on which the student was evaluated together with two of the site's own teachers."""
    before, root = str(site.parent), tmp_path_factory.mktemp("evaluated") / "root"
    shutil.copytree(site.parent, root)
    site = root / "site"
    (site / "site.toml").write_text((site / "site.toml").read_text().replace(before, str(root)))
    shutil.rmtree(site / "evaluation", ignore_errors=True)
    study, dataset = load_study(site / "study.toml"), read_dataset(root / "data")
    shutil.rmtree(site / "teachers")
    train_site(dataset, teachers=site / "teachers", data=study.data, recipe=study.teacher, voters=2)
    evaluate(site, now=datetime(2026, 11, 25, 10, tzinfo=UTC))
    return site


def own_sentence(site: Path) -> str:
    """Return the evaluation's sentence that compares the student with the site's own teachers."""
    (file,) = site.glob("evaluation/*/evaluation.json")
    compared = json.loads(file.read_text())["comparisons"]
    (own,) = [one for one in compared if (one["reference"], one["structure"]) == (OWN_TEACHERS, ALL)]
    return own["sentence"]


def test_the_page_quotes_how_the_student_does_beside_the_own_teachers(evaluated: Path) -> None:
    shown = {one.name: one.verdict for one in page_of(evaluated).facts().networks}
    assert own_sentence(evaluated) in shown["student"]
    assert "2026-11-25" in shown["student"]
    assert shown["own"] == ""
    assert "consilium site evaluate" in student_verdict(None, withdrawn=0)


def test_a_verdict_that_a_withdrawn_patient_is_in_is_not_quoted(evaluated: Path) -> None:
    found, quoted = newest_evaluation(evaluated), own_sentence(evaluated)
    assert quoted in student_verdict(found, withdrawn=0)
    assert quoted not in student_verdict(found, withdrawn=1)
    assert "again" in student_verdict(found, withdrawn=1)


@pytest.mark.parametrize(
    ("told", "said"),
    [
        ({"way": "averaged", "ahead": {"own-teachers": {"mean": 0.1, "half_width": 0.05}}}, "Gain proven"),
        ({"way": "averaged", "ahead": {"own-teachers": {"mean": -0.1, "half_width": 0.05}}}, "Worse than this site's"),
        ({"way": "averaged", "ahead": {"own": {"mean": 0.1, "half_width": 0.2}}}, "Gain not proven over a network"),
        ({"way": "averaged", "ahead": {"own-teachers": None, "own": {"mean": 0.1, "half_width": None}}}, "not proven"),
        ({"way": "own", "ahead": {"own": {"mean": 0.0, "half_width": 0.0}}}, "It is a network"),
        ({"way": "half-way", "folds": 0, "ahead": {}}, "Not known"),
        ({"way": "half-way"}, "Not known"),
        ([], "Not known"),
    ],
)
def test_the_page_says_whether_the_adapted_network_is_better_than_the_own_ones(
    tmp_path: Path, told: object, said: str
) -> None:
    assert "Not known" in adapted_verdict(tmp_path)
    (tmp_path / "adapted.json").write_text(json.dumps({"folds": 5} | told if isinstance(told, dict) else told))
    assert said in adapted_verdict(tmp_path)


def test_the_page_shows_the_cases_of_another_folder_without_the_own_datasets_figures(evaluated: Path) -> None:
    write_phantoms(evaluated.parent / "moved", cases=2, seed=6)
    facts = SitesOwnPage(
        evaluated, sheet=lambda study, patients: str(patients), data=evaluated.parent / "moved"
    ).facts()
    assert [(case.number, case.dice) for case in facts.cases] == [(1, None), (2, None)]
    assert (facts.elsewhere, facts.evaluated, facts.sheet) == (True, "", "None")
    with pytest.raises(InvalidInput):
        SitesOwnPage(evaluated, sheet=lambda study, patients: "", data=evaluated.parent / "nowhere")
