"""Tests that all places agree on a study's number of answers, the answers left and the student's gain.

Answers are counted from the ledger's rows; the verdict is read off SciPy's interval of the paired differences.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy.stats import ttest_rel

from common.measured_gain import GainVerdict, MeasuredGain, Score
from common.study_facts import StudyFacts
from consilium.reports.certificate import certificate_facts
from consilium.reports.certificate_paper import certificate_paper
from consilium.reports.report_facts import CONTROLS
from consilium.reports.study_report import render_html, report_json
from server.postprocess.scores import figures
from server.study.workspace import Workspace
from tests.server.printed import places
from tests.server.printed.lives import Life, live
from tests.server.printed.places import View, view
from tests.server.printed.rules import lines_of
from tests.server.printed.truth import Truth

LIVES = 1
MORE_LIVES = 12
CASES = 9
KINDS = {"proven": 0.12, "worse": -0.12, "not proven": 0.0}
SENTENCE = re.compile(
    r"(Gain proven over|Gain not proven over|Worse than) the control ([a-z ]+):? (?:is )?([+-]\d\.\d{3}) Dice "
    r"\(95 % interval ([+-]\d\.\d{3}) to ([+-]\d\.\d{3}), paired over (\d+) cases\); student (\d\.\d{3}), "
    r"the control [a-z ]+ (\d\.\d{3})"
)
TITLES = {"Gain proven over": "proven", "Gain not proven over": "not proven", "Worse than": "worse"}


@dataclass(frozen=True)
class Dice:
    """Holds the measured Dice of a study: one value for each network and case."""

    student: tuple[float, ...]
    controls: dict[str, tuple[float, ...]]

    @property
    def truth(self) -> dict[str, Any]:
        best = max(self.controls, key=lambda name: float(np.mean(self.controls[name])))
        interval = ttest_rel(self.student, self.controls[best]).confidence_interval(0.95)
        word = "proven" if interval.low > 0 else "worse" if interval.high < 0 else "not proven"
        gain = float(np.mean(self.student) - np.mean(self.controls[best]))
        return {"word": word, "over": best.replace("_", " "), "gain": gain, "low": interval.low, "high": interval.high}

    def report(self, study: str) -> str:
        def dice(cases: tuple[float, ...]) -> dict[str, Any]:
            return {"dice": {"mean": float(np.mean(cases)), "cases": list(cases)}}

        controls = {name: dice(cases) for name, cases in self.controls.items()}
        return json.dumps({"study": {"id": study}, "student": dice(self.student), "controls": controls})

    def score(self, cases: tuple[float, ...]) -> Score:
        return Score((float(np.mean(cases)),), float(np.mean(cases)), cases)


def measured(seed: int, kind: str) -> Dice:
    """Draw Dice from a seed, for a student that gained, lost, or did neither for certain."""
    rng = np.random.default_rng(seed)
    base = rng.uniform(0.4, 0.7, CASES)
    spread = 0.02 if KINDS[kind] else 0.15
    student = np.clip(base + KINDS[kind] + rng.normal(0, spread, CASES), 0, 1)
    controls = {name: np.clip(base - 0.01 * n + rng.normal(0, 0.01, CASES), 0, 1) for n, name in enumerate(CONTROLS)}
    return Dice(tuple(map(float, student)), {name: tuple(map(float, found)) for name, found in controls.items()})


def planned(workspace: Workspace) -> int:
    return workspace.study().privacy.planned_queries


# --- answers, of planned ones: (answers, planned or None). What is left, test_printed_figures.py holds.


def counts(seen: View) -> Iterator[tuple[str, int, int | None]]:
    root = seen.workspace.root
    status = places.command(places.study_app, "status", root)
    found = re.search(r"^answers (?:at least )?(\d+) of (\d+) planned", status, re.M)
    assert found is not None, status
    yield "study status", int(found[1]), int(found[2])
    document = json.loads(places.command(places.study_app, "status", root, "--json"))
    yield "status.json", document["answers"], document["planned_queries"]
    if not seen.life.doubt:
        facts = certificate_facts(seen.workspace)
        yield "certificate.json", facts["answers"], facts["study"]["planned_queries"]
        paper = certificate_paper(facts, document_sha256="0" * 64)
        text = "\n".join(map(str, (*paper.lead, paper.foot)))
        if facts["answers"] or "Nothing was released" not in text:
            yield from of_text(text, r"(\d+) of (\d+) planned answers", "certificate.pdf")
    yield from of_text(lines_of(seen.text("/")), r"(\d+) of (\d+) planned answers released", "/")
    overview = seen.json("/api/overview")
    yield "/api/overview", overview["answers"], overview["planned"]
    row = next(one for one in seen.json("/api/studies") if one["here"])
    yield "/api/studies", row["answers"], row["planned"]
    flat = next(one for one in seen.csv("studies") if one["here"] in ("True", "true"))
    yield "studies.csv", int(flat["answers"]), int(flat["planned"])
    text = seen.client.get("/metrics", headers={"authorization": f"Bearer {'m' * 20}"}).text
    released = re.search(r'^pate_releases_total\{outcome="released"\} (\S+)$', text, re.M)
    wanted = re.search(r"^pate_study_queries_planned (\S+)$", text, re.M)
    assert released is not None
    assert wanted is not None
    yield "/metrics", int(float(released[1])), int(float(wanted[1]))
    report = places.report_facts(seen)
    privacy = report_json(report)["privacy"]
    yield "report.json", privacy["queries"], privacy["planned_queries"]
    if stated := places.bundle_facts(seen):
        yield "privacy.json", stated.queries, None
        yield "model card", int(re.findall(r"with (\d+) answers", stated.spent())[0]), None


def of_text(text: str, pattern: str, where: str) -> Iterator[tuple[str, int, int | None]]:
    found = re.findall(pattern, text)
    assert found, f"{where} does not say how many answers there are: {text[:400]}"
    for answers, wanted in found:
        yield where, int(answers), int(wanted)


# --- the verdict: (word, reference or None, gain, low, high)


def verdicts(seen: View, dice: Dice) -> Iterator[tuple[str, str, str | None, float, float, float]]:
    root = seen.workspace.root
    yield from of_sentence(places.command(places.study_app, "status", root), "study status")
    stated = json.loads(places.command(places.study_app, "status", root, "--json"))["gain"]
    yield of_json(stated, "status.json")
    page = " ".join(lines_of(seen.text("/")).split())
    yield from of_sentence(re.sub(r"(the control [a-z ]+?) ([+-]\d)", r"\1: \2", page), "/")
    verdict = seen.json("/api/overview")["verdict"]
    yield from of_sentence(f"{verdict['words']}: {verdict['basis']}", "/api/overview")
    for where, rows in (("/api/studies", seen.json("/api/studies")), ("studies.csv", seen.csv("studies"))):
        row = next(one for one in rows if one["here"] in (True, "True", "true"))
        low, high = json.loads(str(row["interval"]).replace("(", "[").replace(")", "]"))
        yield where, row["word"], None, float(row["gain"]), float(low), float(high)
    report = places.report_facts(seen, student=dice.student, controls=dice.controls)
    yield of_json(report_json(report)["worth"], "report.json")
    yield from of_sentence(" ".join(lines_of(render_html(report)).split()), "report.html")
    scores = {name: Score((0.0,), float(np.mean(cases)), cases) for name, cases in dice.controls.items()}
    card = figures({"student": Score((0.0,), float(np.mean(dice.student)), dice.student), **scores})
    name = next(key for key in card if key.startswith("gain over") and "," not in key and key[-1] != "o")
    low, high = card[f"{name}, 95 per cent from"], card[f"{name}, to"]
    word = "proven" if low > 0 else "worse" if high < 0 else "not proven"
    yield "model card", word, name.removeprefix("gain over the control "), card[name], low, high


def of_sentence(text: str, where: str) -> Iterator[tuple[str, str, str | None, float, float, float]]:
    found = SENTENCE.findall(text)
    assert found, f"{where} does not say what the student gained: {text[:600]}"
    for title, over, gain, low, high, cases, *_ in found:
        assert int(cases) == CASES
        yield where, TITLES[title], over.strip(), float(gain), float(low), float(high)


def of_json(stated: dict[str, Any], where: str) -> tuple[str, str, str | None, float, float, float]:
    over = stated["reference"].removeprefix("the control ")
    return where, stated["word"], over, stated["gain"], *stated["interval"]


# --- held


def hold(life: Life, folder: Path, *, kinds: Sequence[str] = tuple(KINDS)) -> dict[str, set[str]]:
    """Check the statements about both studies at every place; the kinds of gains alternate."""
    truth, said = Truth(life.path), {}
    for number, workspace in enumerate(life.studies):
        study, kind = workspace.study().id, kinds[(life.seed + number) % len(kinds)]
        dice = measured(life.seed * 2 + number, kind)
        (workspace.root / "report.json").write_text(dice.report(study))
        seen = view(life, workspace, folder / f"state-{number}")
        answers, wanted = truth.answers[study], planned(workspace)
        for where, stated, of in counts(seen):
            assert stated == answers, f"{where} says {stated} answers, and there are {answers}"
            assert of in (None, wanted), where
        if not answers:
            assert json.loads(places.command(places.study_app, "status", workspace.root, "--json"))["gain"] is None
            assert "Gain " not in places.command(places.study_app, "status", workspace.root)
            continue
        true = dice.truth
        for where, word, over, gain, low, high in verdicts(seen, dice):
            assert word == true["word"], f"{where} says {word}, and it is {true['word']}"
            assert over in (None, true["over"]), where
            assert (gain, low, high) == pytest.approx((true["gain"], true["low"], true["high"]), abs=6e-4), where
            said.setdefault(where, set()).add(word)
    return said


def lived(seed: int, folder: Path) -> Life:
    (folder / str(seed)).mkdir(parents=True)
    return live(seed, folder / str(seed))


@pytest.mark.slow
def test_every_place_counts_the_same_answers_and_words_the_same_verdict(tmp_path: Path) -> None:
    for seed in range(LIVES):
        assert hold(lived(seed, tmp_path), tmp_path / f"held-{seed}")


@pytest.mark.slow
def test_every_place_counts_and_words_alike_over_many_more_lives(tmp_path: Path) -> None:
    said: dict[str, set[str]] = {}
    for seed in range(LIVES, LIVES + MORE_LIVES):
        for where, words in hold(lived(seed, tmp_path), tmp_path / f"held-{seed}").items():
            said.setdefault(where, set()).update(words)
    assert all(words == set(KINDS) for words in said.values()), said


# --- former faults are found


def answered(folder: Path) -> Life:
    for seed in range(100):
        life = lived(seed, folder)
        truth = Truth(life.path)
        if not life.doubt and all(truth.answers[one.study().id] for one in life.studies):
            return life
    raise AssertionError("no such life")


@pytest.mark.slow
def test_a_text_that_counts_answers_of_its_own_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    life = answered(tmp_path)
    monkeypatch.setattr(
        StudyFacts, "answers_line", property(lambda self: f"answers 0 of {self.planned} planned, 0 left")
    )
    with pytest.raises(AssertionError, match="study status says 0 answers"):
        hold(life, tmp_path / "found")


@pytest.mark.slow
def test_a_text_that_judges_a_gain_by_another_rule_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The old rule called any mean above the control's a gain."""
    life = answered(tmp_path)
    monkeypatch.setattr(
        MeasuredGain, "word", property(lambda self: GainVerdict.PROVEN if self.gain > 0 else GainVerdict.WORSE)
    )
    with pytest.raises(AssertionError, match=r"says (proven|worse), and it is not proven"):
        hold(life, tmp_path / "found", kinds=("not proven",))
