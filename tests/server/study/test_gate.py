"""Tests that no student is released until enough hospitals have stated, each by its own key, that it beats
public data.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from typer.testing import CliRunner

from client.teachers.comparison import (
    ALL,
    OWN_TEACHERS,
    PUBLIC_START,
    CaseComparison,
    MissedStructure,
    MissingComparison,
)
from client.teachers.evaluation import OWN_BETTER, Evaluation
from client.teachers.evaluation_text import comparison_lines
from client.teachers.pulled_student import check_gate
from client.teachers.verdict import word_of
from common.config import GateConfig, Study, parse_study, render_study
from common.errors import InvalidInput, Refused
from common.events import EventLog
from common.ledger.rows import format_time
from common.measured_gain import MeasuredGain
from common.node_auth import AdmittedNode, write_admitted
from common.site_verdict import MAX_VERDICT_BYTES, MEANINGS, SiteVerdict
from common.student_statement import StudentStatement
from consilium.cli.site import site_app
from consilium.cli.student import student_app
from consilium.reports.publication import publish_student
from server.ledger.server_ledger import Ledger
from server.postprocess.bundle import export_student
from server.study.consent_text import for_consortium, for_site
from server.study.gate import gate_state, publish_verdicts, take_verdict
from server.study.status import study_status
from server.study.workspace import Workspace
from tests.commands import refusal_of, typed
from tests.exported import exported_study, statement_file
from tests.federation import Federation, make_study
from tests.waiting import events_of

EARLY, LATE = "2026-11-24T09:00:00.000000Z", "2026-11-24T10:00:00.000000Z"


def gated(**privacy: object) -> Study:
    terms = {"quorum": 3, "aggregation": "sealed-sum", "planned_queries": 2} | privacy
    return make_study(gate=GateConfig(2), **terms)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Federation]:
    federation = exported_study(tmp_path_factory.mktemp("gate"), gated())
    yield federation
    federation.close()


@pytest.fixture
def fed(run: Federation) -> Federation:
    """Return the study without any verdict."""
    for path in Workspace(run.root).verdicts_dir.glob("*"):
        path.unlink()
    publish_verdicts(Workspace(run.root))
    return run


def statement(fed: Federation) -> StudentStatement:
    return StudentStatement.parse(statement_file(fed).read_bytes())


def verdict(fed: Federation, site: str, word: str = "better", *, time: str = EARLY, **other: str) -> SiteVerdict:
    said = SiteVerdict(fed.study.id, statement(fed).bundle, site, word, time)
    return replace(said, **other).signed_by(fed.site_ledgers.get(site, fed.site_ledgers["site-0"]).sign)


def pulled(fed: Federation, *, at: str = "site-0", to_evaluate: bool = False, voted: bool = False) -> str:
    ledger = fed.site_ledgers[at]
    return check_gate(statement(fed), study=fed.study, site=at, ledger=ledger, to_evaluate=to_evaluate, voted=voted)


def take(fed: Federation, *verdicts: SiteVerdict) -> None:
    workspace = Workspace(fed.root)
    for one in verdicts:
        take_verdict(workspace, one.render())
    publish_verdicts(workspace)


def test_a_student_is_pulled_for_evaluation_only_until_enough_hospitals_found_it_better(fed: Federation) -> None:
    with pytest.raises(Refused, match="NOT RELEASED") as refused:
        pulled(fed)
    assert refused.value.exit_code == 6
    assert "none yet" in pulled(fed, to_evaluate=True)
    take(fed, verdict(fed, "site-0"), verdict(fed, "site-1", "worse"))
    with pytest.raises(Refused, match="1 better, 1 worse"):
        pulled(fed)
    take(fed, verdict(fed, "site-2"))
    assert pulled(fed).endswith("released")
    assert re.search(r"3 verdicts .*\(2 better, 1 worse\)", pulled(fed))


def test_a_student_that_is_held_back_is_adapted_with_a_warning_and_never_into_a_network_that_may_leave(
    fed: Federation, tmp_path: Path
) -> None:
    site, refusal = fed.root / "site-0", "not released: 0 verdicts of hospitals .*NOT RELEASED"
    fed.write_site_files()
    shutil.copytree(Workspace(fed.root).bundle_dir, site / "student" / "bundle", dirs_exist_ok=True)
    adapt = ["adapt", "--site-dir", str(site), "--data", str(tmp_path / "none")]
    for said in (True, False):
        (site / "student" / "statement.json").write_bytes(statement_file(fed).read_bytes())
        assert bool(re.search(refusal, CliRunner().invoke(site_app, adapt).stderr)) is said
        leaving = CliRunner().invoke(site_app, [*adapt[:3], "--strategy", "dp-sgd", "--epsilon", "1"]).exception
        assert (getattr(leaving, "reason", "") == "not-released") is said
        take(fed, verdict(fed, "site-1"), verdict(fed, "site-2"))


def test_where_a_gate_decides_a_student_without_its_statement_is_not_adapted(fed: Federation, tmp_path: Path) -> None:
    """Its statement says whether it is released. A pull that was killed leaves none."""
    site = fed.root / "site-1"
    fed.write_site_files()
    shutil.copytree(Workspace(fed.root).bundle_dir, site / "student" / "bundle")
    said = refusal_of(site_app, "adapt", "--site-dir", site, "--data", tmp_path / "none")
    assert "student pull" in said.remedy


def test_a_site_that_has_voted_is_not_told_to_vote_again(fed: Federation) -> None:
    with pytest.raises(Refused, match="send the verdict"):
        pulled(fed, voted=True)
    take(fed, verdict(fed, "site-0", "worse"))
    assert pulled(fed, to_evaluate=True).startswith("1 verdict of hospitals")
    with pytest.raises(Refused, match="other hospitals") as counted:
        pulled(fed)
    assert "--verdict" not in str(counted.value)
    with pytest.raises(Refused, match="site evaluate --verdict"):
        pulled(fed, at="site-1")


def test_a_gate_that_the_verdicts_given_keep_shut_is_named_to_sites_and_operator(
    fed: Federation, tmp_path: Path
) -> None:
    workspace = Workspace(fed.root)
    take(fed, verdict(fed, "site-0", "worse"))
    assert "stays shut" not in "\n".join(study_status(workspace).lines())
    take(fed, verdict(fed, "site-1", "not-better"))
    shown = "\n".join(study_status(workspace).lines())
    assert "(1 not-better, 1 worse)" in shown
    assert "stays shut: 2 of the 3 " in shown
    for site in ("site-0", "site-2"):
        with pytest.raises(Refused, match="stays shut") as refused:
            pulled(fed, at=site)
        assert "site adapt" in str(refused.value)
        assert "--verdict" not in str(refused.value)
        assert ("--to-evaluate" in str(refused.value)) is (site == "site-2")
    with pytest.raises(Refused, match="stays shut") as unpublished:
        publish_student(workspace, tmp_path / "out")
    assert "--verdict" not in str(unpublished.value)
    take(fed, verdict(fed, "site-1", "better", time=LATE))
    assert "stays shut" not in "\n".join(study_status(workspace).lines())


def test_nothing_is_published_while_the_gate_is_shut(fed: Federation, tmp_path: Path) -> None:
    take(fed, verdict(fed, "site-0"))
    with pytest.raises(Refused, match="site evaluate --verdict"):
        publish_student(Workspace(fed.root), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_the_command_takes_verdicts_in_and_says_where_the_gate_stands(fed: Federation, tmp_path: Path) -> None:
    files = []
    for site, word in (("site-0", "better"), ("site-1", "not-better")):
        files.append(tmp_path / f"{site}.json")
        files[-1].write_bytes(verdict(fed, site, word).render())
    done = typed(student_app, "verdict", fed.root, *files)
    assert re.search(r"2 verdicts .*\(1 better, 1 not-better\).* 2 .*: NOT RELEASED", done.stdout)
    taken = events_of(fed.events_file, "verdict-taken")
    assert [(one["site"], one["word"]) for one in taken[-2:]] == [("site-0", "better"), ("site-1", "not-better")]


def test_taking_a_verdict_loads_no_torch(fed: Federation, tmp_path: Path) -> None:
    file = tmp_path / "verdict.json"
    file.write_bytes(verdict(fed, "site-0").render())
    code = (
        "import sys; from consilium.cli.main import main\n"
        f"sys.argv = ['consilium', 'student', 'verdict', {str(fed.root)!r}, {str(file)!r}]\n"
        "try: main()\nfinally: print({'torch', 'monai'} & set(sys.modules))"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=600, check=True)
    assert found.stdout.splitlines()[-1] == "set()"


@pytest.mark.parametrize("text", ["not a verdict", '{"a": 1}', "[]"])
def test_a_wrong_file_is_named_with_the_reason_and_what_to_do(fed: Federation, tmp_path: Path, text: str) -> None:
    wrong = tmp_path / "notes.txt"
    wrong.write_text(text)
    refused = refusal_of(student_app, "verdict", fed.root, wrong)
    assert str(refused).startswith(f"{wrong}: ")
    assert "to fix: give " in str(refused)


def test_a_verdict_on_another_student_or_of_nobody_admitted_is_not_taken(fed: Federation) -> None:
    workspace = Workspace(fed.root)
    genuine = verdict(fed, "site-0")
    for forged in (
        verdict(fed, "site-0", bundle="a" * 64),
        verdict(fed, "site-0", study_id="a" * 64),
        verdict(fed, "stranger"),
        replace(genuine, site="site-1"),  # signed by another site
        replace(genuine, word="worse"),
        replace(genuine, signature=""),
        replace(genuine, signature="zz"),
    ):
        with pytest.raises(InvalidInput, match="verdict of"):
            take_verdict(workspace, forged.render())
    for data in (b"", b"{}", b"[" * 5_000, b"x" * (MAX_VERDICT_BYTES + 1), genuine.render()[:-1], b"\xff" * 40):
        with pytest.raises(InvalidInput):
            take_verdict(workspace, data)
    assert gate_state(workspace).verdicts == ()


def test_a_hospitals_newer_verdict_replaces_its_older_one_and_never_the_reverse(fed: Federation) -> None:
    take(fed, verdict(fed, "site-0", "better"), verdict(fed, "site-0", "worse", time=LATE))
    with pytest.raises(InvalidInput, match="signed after"):
        take(fed, verdict(fed, "site-0", "better"))
    assert [one.word for one in gate_state(Workspace(fed.root)).verdicts] == ["worse"]


def test_a_verdict_signed_while_clocks_were_a_year_ahead_keeps_no_later_one_out_for_a_year(fed: Federation) -> None:
    workspace, then = Workspace(fed.root), datetime.now(UTC) + timedelta(days=365)
    ahead = verdict(fed, "site-0", "better", time=format_time(then)).render()
    with pytest.raises(InvalidInput, match="no later than now"):
        take_verdict(workspace, ahead)
    take_verdict(workspace, ahead, clock=lambda: then)  # this machine's clock was ahead as well
    take(fed, verdict(fed, "site-0", "worse"))
    assert [one.word for one in gate_state(workspace).verdicts] == ["worse"]


def test_the_verdict_of_a_hospital_that_was_revoked_counts_no_more(fed: Federation) -> None:
    """Otherwise two dishonest hospitals would open a gate of two, even after one of them was found and revoked."""
    take(fed, verdict(fed, "site-0"), verdict(fed, "site-1"))
    workspace = Workspace(fed.root)
    assert gate_state(workspace).released
    write_admitted(workspace.nodes_file, (AdmittedNode("site-0", "a"), AdmittedNode("site-2", "b")))
    try:
        publish_verdicts(workspace)
        assert not gate_state(workspace).released
        with pytest.raises(Refused, match="NOT RELEASED"):
            pulled(fed)
        with pytest.raises(InvalidInput, match="an admitted site"):
            take(fed, verdict(fed, "site-1", time=LATE))
    finally:
        workspace.nodes_file.unlink()


def test_several_verdicts_of_one_hospital_count_as_one(fed: Federation) -> None:
    take(fed, verdict(fed, "site-0"), verdict(fed, "site-0", time=LATE))
    assert not gate_state(Workspace(fed.root)).released


def test_a_server_can_invent_no_verdict_that_a_hospital_counts(fed: Federation) -> None:
    """The server signs a statement with invented verdicts, under known and made-up names."""
    puppet = Ed25519PrivateKey.generate()
    standing = statement(fed)
    invented = tuple(
        SiteVerdict(fed.study.id, standing.bundle, site, "better", EARLY).signed(puppet)
        for site in ("site-1", "site-2", "puppet")
    )
    repeated = (verdict(fed, "site-1"),) * 3
    for said in (invented, repeated):
        lying = replace(standing, verdicts=said).signed(fed.signing_key)
        with pytest.raises(Refused, match="NOT RELEASED"):
            check_gate(lying, study=fed.study, site="site-0", ledger=fed.site_ledgers["site-0"], to_evaluate=False)


def test_verdicts_stand_in_what_the_server_signs_and_survive_a_new_export(fed: Federation) -> None:
    take(fed, verdict(fed, "site-0"), verdict(fed, "site-1"))
    signed = statement(fed)
    assert signed.is_genuine(fed.signing_key.public_key())
    assert {one.site for one in signed.verdicts or ()} == {"site-0", "site-1"}
    export_student(Workspace(fed.root), events=EventLog(fed.events_file, study=fed.study.id))
    assert statement(fed).verdicts == signed.verdicts


def test_the_command_that_exports_another_bundle_says_that_verdicts_are_needed_again(fed: Federation) -> None:
    """The bundle names the ledger's head, so a row that changes the signing key makes another bundle."""
    take(fed, verdict(fed, "site-0"), verdict(fed, "site-1"))
    assert "gate:" not in typed(student_app, "export", fed.root).stdout
    with Ledger.open(Workspace(fed.root).ledger_file, signing_key=fed.signing_key) as ledger:
        ledger.note("another head")
    said = typed(student_app, "export", fed.root).stdout
    assert re.search(r"gate: 0 verdicts of hospitals .*NOT RELEASED.*--verdict", said)


def test_a_damaged_verdict_on_the_servers_disk_opens_no_gate_and_stops_nothing(fed: Federation) -> None:
    take(fed, verdict(fed, "site-0"), verdict(fed, "site-1"))
    (Workspace(fed.root).verdicts_dir / "site-1.json").write_bytes(b"{")
    assert not gate_state(Workspace(fed.root)).released


def test_a_study_without_a_gate_is_what_it_was() -> None:
    plain = make_study()
    assert "gate" not in render_study(plain)
    assert "gate" not in plain.to_json()
    assert gated().id != replace(gated(), gate=GateConfig()).id
    assert parse_study(render_study(gated())) == gated()


@pytest.mark.parametrize("verdicts", [-1, 4, True, 1.5, "2"])
def test_a_gate_that_no_quorum_can_open_is_refused(verdicts: object) -> None:
    with pytest.raises(InvalidInput, match=r"gate\.verdicts"):
        replace(gated(), gate=GateConfig(verdicts))  # type: ignore[arg-type]


def test_consent_sheet_and_plan_say_what_the_gate_asks_and_what_each_mode_costs() -> None:
    for text in (for_site(gated()), for_consortium(gated(), sites=4)):
        plain = " ".join(text.split())
        assert "one signed word" in plain
        assert "no ε covers it" in plain
        assert "Sealed: the server's operator is not trusted." in plain
        assert "Open: the server's operator is trusted" in plain
    assert "signed verdict. No ε covers it." in " ".join(for_site(gated()).split())
    open_text = " ".join(for_site(make_study()).split())
    assert "signed verdict" not in open_text
    assert "other choice. Sealed:" in open_text
    assert "one signed word" not in open_text


# --- the word


def evaluation(*differences: float, public: bool = True, gone: bool = False) -> Evaluation:
    """Return an evaluation whose student beats the public start by these differences, case by case."""
    mean, spread = float(np.mean(differences)), 0.01
    gain = MeasuredGain(0.5 + mean, 0.5, PUBLIC_START, mean, spread, len(differences))
    compared = CaseComparison(gain, public, ALL, 0, 0)
    lost = (MissedStructure("body", 3, 3),) if gone else ()
    return Evaluation(
        "w", ("body",), (), (), missed=lost, comparisons=(compared,), missing=(MissingComparison("x", "gone"),)
    )


@pytest.mark.parametrize(
    ("made", "word"),
    [
        (evaluation(0.1), "better"),
        (evaluation(0.005), "not-better"),
        (evaluation(-0.005), "not-better"),
        (evaluation(-0.1), "worse"),
        (evaluation(0.1, gone=True), "worse"),
    ],
)
def test_a_word_is_what_the_cases_can_tell_from_public_data(made: Evaluation, word: str) -> None:
    assert word_of(made) == word


def test_better_own_teachers_stand_beside_one_verdict_and_do_not_change_it() -> None:
    made = evaluation(0.1)
    own = CaseComparison(MeasuredGain(0.6, 0.7, OWN_TEACHERS, -0.1, 0.01, 3), False, ALL, 0, 0)
    both = replace(made, comparisons=(*made.comparisons, own))
    assert word_of(both) == "better"
    lines = comparison_lines(both)
    assert lines[0].startswith(f"Verdict: better ({MEANINGS['better']};")
    assert sum("erdict" in line for line in lines) == 2, "the verdict, and that the teachers do not change it"
    assert "speak against" not in " ".join(lines)
    assert any(OWN_BETTER in line for line in lines)


def test_there_is_no_word_without_anything_public_to_compare_with() -> None:
    with pytest.raises(InvalidInput, match="public start"):
        word_of(evaluation(0.1, public=False))


def test_a_verdict_has_no_field_for_a_figure_or_a_case_and_one_length_a_word() -> None:
    now = datetime(2026, 11, 24, tzinfo=UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
    said = SiteVerdict("a" * 64, "b" * 64, "north", "better", now).signed(Ed25519PrivateKey.generate())
    assert set(said.to_json()) == {"schema", "study", "bundle", "site", "word", "time_utc", "signature"}
    assert len(said.render()) < 600
