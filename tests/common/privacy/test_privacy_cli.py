"""Tests ``consilium plan`` as a user runs it, and the settings that ``consilium audit`` shares with it."""

from __future__ import annotations

import json
import re
from pathlib import Path

import nibabel as nib
import numpy as np
import pytest
import typer

from common.data.synthetic import write_phantoms
from common.errors import InvalidInput
from consilium.cli.audit import audit_app
from consilium.cli.privacy import plan_app
from consilium.cli.say import json_text
from server.planning.recommend import Rehearsal
from tests.commands import ended
from tests.worlds import study_toml

STUDY = study_toml("tumour", grid=(64, 64, 64), name="brats", planned_queries=40, quorum=6)


def call(app: typer.Typer, *arguments: str) -> tuple[int, str]:
    result = ended(app, *arguments)
    return result.exit_code, result.stdout


def test_plan_prints_the_papers_headline_with_its_verdict() -> None:
    code, text = call(plan_app, "--queries", "80")
    flat = " ".join(text.replace("│", " ").split())
    assert code == 0
    assert "ε = 8 (exact) at δ = 0.001, unit hospital, relation replace-one" in flat
    assert "1.07334 a coordinate" in flat
    assert "80 answers with at most 0.62 bits each" in flat
    assert "8.876" in flat


def words_of(text: str) -> str:
    return " ".join(text.replace("│", " ").split())


def test_a_plan_is_of_one_study_and_has_one_verdict_about_it() -> None:
    flat = words_of(call(plan_app, "--hospitals", "8", "--delta", "1e-5")[1])
    assert "recommended study" in flat
    assert "queries N 4 planned" in flat
    assert re.search(" verdict a joint query .*4 rounds", flat)
    assert "information ceiling" not in flat, "a figure of separate queries about each volume"
    assert "mostly reflect" not in flat
    assert json.loads(call(plan_app, "--json")[1])["plan_of"] == "the recommended study"


def test_the_recommended_study_has_the_voters_that_were_given_in_every_row() -> None:
    patient = ("--unit", "patient", "--hospitals", "8", "--delta", "1e-5")
    few, more = (words_of(call(plan_app, *patient, "--voters", count)[1]) for count in ("3", "5"))
    assert "8 hospitals × 3 voters" in few
    assert "3 teachers a site" in few
    assert "5 teachers a site" not in few
    assert "5 teachers a site" in more


def test_a_plan_of_separate_queries_calls_the_recommendation_another_study() -> None:
    flat = words_of(call(plan_app, "--queries", "80")[1])
    assert "plan of separate queries" in flat
    assert re.search("recommended another study.*: a joint query", flat)


def test_plan_says_the_plain_sentence_and_warns_of_a_delta_that_is_large_for_the_patients() -> None:
    code, text = call(plan_app, "--json")
    facts = json.loads(text)
    assert code == 0
    assert facts["guess_right_at_most"] == pytest.approx(0.85121, abs=1e-5)
    assert "85.2 %" in facts["in_words"]
    assert facts["delta_warning"] is None
    patients = ("--unit", "patient", "--hospitals", "8", "--patients")
    for count, warned in (("12", False), ("13", True)):  # 8 · 12 = 96 and 8 · 13 = 104 against 1e-3
        assert (json.loads(call(plan_app, *patients, count, "--json")[1])["delta_warning"] is not None) is warned
        flat = " ".join(call(plan_app, *patients, count)[1].replace("│", " ").split())
        assert ("1/(10 · 104 patients)" in flat) is warned
        assert "any other patient's" in flat


def test_plan_reads_a_study_file_a_spectrum_and_writes_a_chart(tmp_path: Path) -> None:
    (tmp_path / "study.toml").write_text(STUDY)
    (tmp_path / "spectrum.json").write_text(json.dumps([0.5, 0.25, 0.125]))
    code, text = call(
        plan_app,
        *("--study", str(tmp_path / "study.toml"), "--spectrum", str(tmp_path / "spectrum.json")),
        *("--chart", str(tmp_path / "plan.png"), "--json"),
    )
    data = json.loads(text)
    assert code == 0
    assert (data["queries"], data["hospitals"], data["dimension"]) == (40, 6, 3)
    assert data["errors"]["wiener"] <= data["errors"]["hard_threshold"] <= data["errors"]["total"]
    assert (tmp_path / "plan.png").read_bytes().startswith(b"\x89PNG")


def test_flags_beside_a_study_file_are_refused(tmp_path: Path) -> None:
    (tmp_path / "study.toml").write_text(STUDY)
    for app in (plan_app, audit_app):
        with pytest.raises(InvalidInput, match="options together with --study"):
            call(app, "--study", str(tmp_path / "study.toml"), "--epsilon", "4")


@pytest.mark.parametrize("flag", ["epsilon", "delta", "radius", "queries", "hospitals", "voters", "dimension"])
def test_a_zero_is_refused_by_both_commands_and_not_taken_as_not_given(flag: str) -> None:
    for app in (plan_app, audit_app):
        with pytest.raises(InvalidInput):
            call(app, f"--{flag}", "0")


@pytest.mark.parametrize("flag", ["rounds", "draws"])
def test_an_audit_of_nothing_is_refused(flag: str) -> None:
    with pytest.raises(InvalidInput):
        call(audit_app, f"--{flag}", "0")


@pytest.mark.parametrize("aggregation", ["open", "sealed-sum"])
def test_fewer_than_no_colluders_are_refused_with_a_limit_one_can_keep(aggregation: str) -> None:
    with pytest.raises(InvalidInput, match=r"--colluders.*-1.*an integer from 0"):
        call(plan_app, "--hospitals", "8", "--aggregation", aggregation, "--colluders", "-1")


def test_unit_patient_with_zero_out_is_refused_with_the_reason() -> None:
    for app in (plan_app, audit_app):
        with pytest.raises(InvalidInput, match=r"zero-out; .*replace-one"):
            call(app, "--unit", "patient", "--relation", "zero-out")


@pytest.mark.parametrize("name", ["plan", "plan.txt", "nowhere/plan.png", "folder.png"])
def test_a_chart_that_cannot_be_written_is_refused_in_one_line(name: str, tmp_path: Path) -> None:
    (tmp_path / "folder.png").mkdir()
    with pytest.raises(InvalidInput, match=r"chart file|output file"):
        call(plan_app, "--chart", str(tmp_path / name))


@pytest.mark.parametrize("name", ["plan.png", "plan.svg", "plan.pdf"])
def test_a_chart_is_written_for_plans_of_any_size(name: str, tmp_path: Path) -> None:
    size = ("--hospitals", "700", "--queries", "200000") if name == "plan.svg" else ()
    assert call(plan_app, "--chart", str(tmp_path / name), *size)[0] == 0
    assert (tmp_path / name).stat().st_size > 1000


def test_more_voters_than_patients_are_refused_since_each_needs_patients_of_its_own() -> None:
    for more in ((), ("--queries", "8")):
        with pytest.raises(InvalidInput, match=r"voters a site: got 16; allowed: at most 15"):
            call(plan_app, "--unit", "patient", "--delta", "1e-5", "--voters", "16", "--patients", "15", *more)


def test_queries_below_one_are_not_made_up_for_by_spare_draws() -> None:
    with pytest.raises(InvalidInput, match="queries"):
        call(plan_app, "--queries", "-1", "--aggregation", "sealed-sum", "--spare-draws", "4")


def test_json_of_a_plan_is_json_for_every_spectrum_that_is_accepted(tmp_path: Path) -> None:
    path = tmp_path / "spectrum.json"
    options = ("--spectrum", str(path), "--json", "--epsilon", "1e-3")
    path.write_text("[1e200, 1e-300]")
    json.loads(call(plan_app, *options)[1], parse_constant=pytest.fail)
    path.write_text("[1e308, 1e308]")
    with pytest.raises(InvalidInput, match=r"spectrum.*1e\+200"):
        call(plan_app, *options)
    nonsense = json_text({"gain": float("nan"), "ends": (float("inf"), 1.5)})
    assert json.loads(nonsense, parse_constant=pytest.fail) == {"gain": None, "ends": [None, 1.5]}


def test_a_code_of_another_length_than_the_spectrum_is_refused(tmp_path: Path) -> None:
    (tmp_path / "spectrum.json").write_text("[0.5, 0.25]")
    with pytest.raises(InvalidInput, match=r"length .*: got 3"):
        call(plan_app, "--spectrum", str(tmp_path / "spectrum.json"), "--dimension", "3")


def examples_of(app: typer.Typer) -> list[str]:
    """Return the commands that the help gives as examples."""
    code, text = call(app, "--help")
    assert code == 0
    assert "\\" not in text
    examples = [" ".join(part.split("\n\n")[0].split()) for part in text.split("Example: ")[1:]]
    assert all(example.startswith("consilium ") for example in examples)
    return examples


@pytest.mark.parametrize(("app", "number"), [(plan_app, 5), (audit_app, 2)])
def test_help_gives_examples_and_no_stray_escapes(app: typer.Typer, number: int) -> None:
    assert len(examples_of(app)) == number


@pytest.mark.slow
@pytest.mark.parametrize("app", [plan_app, audit_app])
def test_the_examples_in_the_help_run(app: typer.Typer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small = STUDY.replace("= 40", "= 2").replace("= 6", "= 2")
    (tmp_path / "study.toml").write_text(STUDY if app is plan_app else small)
    maps = tmp_path / "label-maps"
    maps.mkdir()
    for number in range(4):
        body = np.zeros((8, 8, 8), dtype=np.uint8)
        body[1 : 3 + number, 2:5, 2:6] = 1
        nib.save(nib.Nifti1Image(body, np.eye(4)), maps / f"{number}.nii.gz")
    write_phantoms(tmp_path / "validation", cases=4, seed=0)
    rehearsed = Rehearsal(
        3, (0.7, 0.72, 0.69, 0.71), (0.5, 0.51, 0.5, 0.5)
    )  # a rehearsal takes minutes and has its own tests
    monkeypatch.setattr("server.protocols.rehearsal.rehearse", lambda *_, **__: rehearsed)
    for example in examples_of(app):
        arguments = example.replace("study.toml", str(tmp_path / "study.toml")).split()[2:]
        arguments = [str(tmp_path / a) if a.endswith(".png") else a for a in arguments]
        folders = {"split/public/label-maps": maps, "split/validation": tmp_path / "validation"}
        arguments = [str(folders.get(a, a)) for a in arguments]
        quick: tuple[str, ...] = ()
        if app is audit_app:  # the last of two values counts
            quick = ("--runs", "20", "--draws", "1", "--dimension", "8")
            quick += () if "--study" in arguments else ("--hospitals", "2", "--rounds", "2")
        assert call(app, *arguments, *quick)[0] == 0


@pytest.mark.parametrize("text", ["{", "3", '["a"]', "[true]"])
def test_an_unreadable_spectrum_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "spectrum.json").write_text(text)
    with pytest.raises(InvalidInput, match="spectrum file"):
        call(plan_app, "--spectrum", str(tmp_path / "spectrum.json"))


SEALED = ("--aggregation", "sealed-sum")


@pytest.mark.parametrize(
    ("asked", "remedy", "followed"),
    [
        (("--colluders", "2"), "add --aggregation sealed-sum", ("--colluders", "2", *SEALED)),
        (("--spare-draws", "3"), "add --aggregation sealed-sum", ("--spare-draws", "3", *SEALED)),
        (("--hospitals", "2", *SEALED), "give --hospitals 3,", ("--hospitals", "3", *SEALED)),
        (("--hospitals", "2", *SEALED), "choose --aggregation open", ("--hospitals", "2", "--aggregation", "open")),
        (("--colluders", "7", *SEALED), "give --hospitals 9,", ("--colluders", "7", *SEALED, "--hospitals", "9")),
    ],
)
def test_the_remedy_of_a_refused_sealed_plan_works(
    asked: tuple[str, ...], remedy: str, followed: tuple[str, ...]
) -> None:
    with pytest.raises(InvalidInput) as refused:
        call(plan_app, *asked)
    assert remedy in refused.value.remedy
    assert call(plan_app, *followed)[0] == 0


def test_a_start_that_is_missing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="--start"):
        call(plan_app, "--start", str(tmp_path / "none"))
