"""Tests the certificate: it states what the ledger states, and a ledger that does not verify gets none."""

from __future__ import annotations

import json
import re
import sqlite3
from datetime import UTC, datetime, timedelta
from pathlib import Path
from statistics import NormalDist
from typing import Any

import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from typer.testing import CliRunner

from common.canonical import sha256_bytes
from common.config import Study
from common.data.dataset import PatientIdentity
from common.errors import InvalidInput, LedgerCorrupt
from common.ledger.charges import RosterEntry
from common.ledger.keys import load_signing_key, public_hex
from common.privacy.accounting import epsilon_exact
from common.site_account import signed_account
from consilium.cli.certificate import app
from consilium.cli.ledger import verify_app
from consilium.reports.certificate import NOT_ANCHORED, Sources, certificate_facts
from consilium.reports.certificate_paper import certificate_paper
from consilium.reports.papers import Paper
from server.dashboard.app import Options
from server.ledger.server_ledger import Ledger
from server.ledger.verify import verify
from server.protocols.per_volume import plan_queries
from server.public.material import CodecRecord
from server.study import create_study as setup
from server.study.workspace import Site, Workspace
from tests.backups import copy_of, put_copy
from tests.commands import typed
from tests.server.dashboard.conftest import glance
from tests.studies import made_study
from tests.worlds import make_study, receipts_of

pytestmark = pytest.mark.slow

RUN = CliRunner()
YEAR = timedelta(days=365)


@pytest.fixture
def workspace(tmp_path: Path) -> Workspace:
    """Return a study of six queries over three hospitals; four are answered, in two batches."""
    made = made_study(tmp_path / "study", make_study("anterior", "posterior", name="trial"))
    made.save_codec(CodecRecord(sha256="c" * 64, dimension=5))
    for number, name in enumerate(("aachen", "bergen", "cadiz")):
        setup.add_site(made, Site(name=name, pool=f"{name}-mri", node_id=number))
    release(made, 0, 2, ("aachen", "bergen", "cadiz"))
    release(made, 2, 4, ("aachen", "bergen"))
    return made


def release(workspace: Workspace, first: int, last: int, sites: tuple[str, ...], *, answer: int = 0) -> None:
    study = workspace.study()
    queries = plan_queries(study, codec=workspace.codec(), volumes=[f"{n:064x}" for n in range(6)])[first:last]
    with setup.open_ledger(workspace) as ledger:
        ledger.release_batch(
            study_id=study.id,
            batch_id=f"b{first}",
            roster=tuple(RosterEntry(site=site, pool=f"{site}-mri") for site in sites),
            queries=queries,
            draw=lambda _: np.full(5, answer, dtype=np.int64),
        )


def sealed_facts(folder: Path) -> dict[str, Any]:
    """Return the certificate's facts of a sealed study that has asked nothing yet."""
    made = Workspace(folder / "study")
    sealed_sum = {"planned_queries": 4, "quorum": 3, "aggregation": "sealed-sum", "spare_draws": 1}
    setup.create_study(made, make_study(name="trial", **sealed_sum))
    return certificate_facts(made)


def test_a_sealed_study_certifies_against_whom_it_holds_and_trusts_no_operator(tmp_path: Path) -> None:
    facts = sealed_facts(tmp_path)
    sealed = facts["study"]["sealed_sum"]
    assert (sealed["colluders"], sealed["spare_draws"], sealed["sites_at_least"]) == (1, 1, 3)
    assert sealed["knowing_no_share"]["epsilon"] < facts["guarantee"]["epsilon"] < sealed["knowing_one_more"]["epsilon"]
    said = " ".join(facts["in_words"] + facts["proves"] + facts["cannot_prove"])
    assert re.search("ε = 8 holds against the server's operator .*any one hospital", said)
    assert "every draw, lost or answered, was charged" in said
    assert "except the hospitals' noise" in said
    assert "the ciphers of the masks" in said
    for only_open in ("is trusted to add it", "unlimited computing power", "in the transaction that stored it"):
        assert only_open not in said
    assert RUN.invoke(app, [str(tmp_path / "study"), "--out", str(tmp_path / "out")]).exit_code == 0


def test_it_states_what_the_ledger_holds(workspace: Workspace) -> None:
    facts = certificate_facts(workspace, clock=lambda: datetime(2025, 3, 1, 9, 0, tzinfo=UTC))
    study = workspace.study()
    with Ledger.open(workspace.ledger_file) as ledger:
        spent = ledger.spent("aachen-mri").mu_squared
        assert facts["ledger"]["head"] == ledger.head().to_json()
    assert facts["issued"] == "2025-03-01T09:00:00+00:00"
    terms = {"accountant": "exact", "delta": 1e-3, "relation": "replace-one", "unit": "hospital"}
    assert facts["guarantee"] == {**terms, "epsilon": 8.0}
    assert facts["spent"] | {"epsilon": 0} == {**terms, "epsilon": 0}
    assert facts["spent"]["epsilon"] == pytest.approx(epsilon_exact(spent, 1e-3), rel=1e-9)
    guess = facts["guess_right_at_most"]
    assert guess["spent"] == pytest.approx(NormalDist().cdf(float(spent) ** 0.5 / 2))
    assert guess["guaranteed"] == pytest.approx(NormalDist().cdf(1 / 0.480014 / 2), abs=1e-5)
    assert [(len(b["queries"]), b["sites"], b["voters"]) for b in facts["releases"]] == [
        (2, ["aachen", "bergen", "cadiz"], 3),
        (2, ["aachen", "bergen"], 2),
    ]
    assert {pool["pool"]: pool["releases"] for pool in facts["pools"]} == {
        "aachen-mri": 4,
        "bergen-mri": 4,
        "cadiz-mri": 2,
    }
    assert facts["mechanisms"][0]["releases"] == 4
    assert facts["hashes"]["study"] == study.id
    assert facts["audit"] is None
    assert facts["sites"] == []
    assert facts["study"]["asked_about"].endswith(" public volumes")  # the noun must follow for a joint query, too
    assert "public volumes public volumes" not in json.dumps(facts)


def test_every_epsilon_in_words_has_its_terms_and_is_never_rounded_down(workspace: Workspace) -> None:
    text = " ".join(certificate_facts(workspace)["in_words"])
    assert re.search(r"ε = [\d.]+ and δ = 0.001", text)
    assert "unit hospital, relation replace-one" in text


def test_the_budget_is_the_guarantee_and_what_was_spent_stands_beside_it(workspace: Workspace, tmp_path: Path) -> None:
    facts = certificate_facts(workspace)
    assert facts["guarantee"]["epsilon"] == 8.0
    assert 6 < facts["spent"]["epsilon"] < 6.5  # four answers of six: √(4/6) of μ
    assert facts["guess_right_at_most"]["spent"] < facts["guess_right_at_most"]["guaranteed"]
    guarantee, spend, groups, _ = facts["in_words"]
    assert "ε = 8 and δ = 0.001" in guarantee
    assert "85.2 %" in spend
    assert "80.3 %" in spend  # Φ(√(4/6)/.480014/2)
    assert "ε = 8 for 1, 20.82 for 2, 38.04 for 3, 59.63 for 4, 85.57 for 5" in groups
    assert [one.get("group", 1) for one in facts["groups"]] == [1, 2, 3, 4, 5]
    printed = RUN.invoke(app, [str(workspace.root), "--out", str(tmp_path / "filed")]).stdout
    assert re.search(r"guaranteed ε = 8 \(exact\) .*0\.001, unit hospital, relation replace-one", printed)
    assert re.search(r"spent .*ε = 6\.\d+ \(exact\) .*0\.001, unit hospital, relation replace-one", printed)


def test_the_front_names_one_epsilon_and_a_table_says_what_each_other_one_is(tmp_path: Path) -> None:
    facts = sealed_facts(tmp_path)
    front, table = paper_of(facts).sections[:2]
    assert re.findall(r"ε = [\d.]+", " ".join(map(str, front.paragraphs))) == ["ε = 8"]
    # This limit rests on no ε, so the front still states it.
    assert "ciphers of the masks" in " ".join(map(str, front.paragraphs))
    _, *rows = table.rows
    assert len({row[0] for row in rows}) == len(rows)
    assert all(re.fullmatch(r"\w+, δ = 0.001, unit hospital, replace-one", str(row[2])) for row in rows)
    stated = {str(row[0]): float(str(row[1]).removeprefix("ε = ")) for row in rows}
    sealed = facts["study"]["sealed_sum"]
    assert stated["Guaranteed"] == 8
    assert stated["Sealed sum, one share more"] == pytest.approx(sealed["knowing_one_more"]["epsilon"], rel=1e-3)
    (two,) = (epsilon for name, epsilon in stated.items() if name.startswith("Guaranteed for 2 "))
    assert two == pytest.approx(20.82)
    whom = {str(row[0]): str(row[3]) for row in rows}
    assert re.search("server's operator .*1 hospital", whom["Guaranteed"])
    assert "2 hospitals of 3" in whom["Sealed sum, one share more"]


def test_the_front_leaves_out_what_the_table_lists_however_it_is_worded(tmp_path: Path) -> None:
    facts = sealed_facts(tmp_path)
    tabled = [facts["in_words"][place] for place in facts["in_words_tabled"]]
    assert [text for text in facts["in_words"][1:] if "ε = " in text] == tabled
    said = [f"{place} says ε = 1" for place in range(len(facts["in_words"]))]
    front = paper_of(facts | {"in_words": said}).sections[0].paragraphs
    assert [text for text in said if text in front] == [
        text for place, text in enumerate(said) if place not in facts["in_words_tabled"]
    ]


@pytest.mark.parametrize("unit", ["hospital", "patient"])
def test_the_front_says_where_every_file_counted_as_a_patient(workspace: Workspace, unit: str) -> None:
    facts = certificate_facts(workspace)
    facts["study"]["unit"] = unit
    given = {"patient": [], "signed": "", "alarms": [], "queries_accepted": 0, "receipted": 0}
    spent = {"epsilon": 1.0, **{name: facts["spent"][name] for name in ("accountant", "delta", "unit", "relation")}}
    given |= {"cap": spent, "spent": {spent["accountant"]: spent}}
    counted = {"aachen": PatientIdentity.FILE, "bergen": PatientIdentity.TABLE, "cadiz": PatientIdentity.FILE}
    facts["sites"] = [
        {**given, "site": name, "pool": f"{name}-mri", "patient_is": [f"from row 4 of its ledger on, {one.sentence}"]}
        for name, one in counted.items()
    ]
    front = " ".join(map(str, paper_of(facts).sections[0].paragraphs))
    assert re.search("every image file .* at aachen, cadiz", front)
    assert ("person with several files" in front) == (unit == "patient")
    facts["sites"] = []
    assert "every image file" not in " ".join(map(str, paper_of(facts).sections[0].paragraphs))


def test_a_study_that_released_nothing_still_guarantees_its_budget_and_spent_nothing(tmp_path: Path) -> None:
    made = made_study(tmp_path / "study")
    facts = certificate_facts(made)
    assert (facts["guarantee"]["epsilon"], facts["spent"]["epsilon"]) == (8.0, 0.0)
    assert facts["guess_right_at_most"]["spent"] == 0.5
    assert RUN.invoke(app, [str(made.root), "--out", str(tmp_path / "filed")]).exit_code == 0


def test_one_of_anything_is_named_in_the_singular(tmp_path: Path) -> None:
    made = made_study(tmp_path / "study", make_study(planned_queries=1))
    facts = certificate_facts(made)
    said = paper_of(facts | {"reused_answers": 1, "recovered_charges": 1, "lost_draws": 1, "charges_by_standing": 1})
    assert not re.search(r"\b1 (stored )?(volumes|answers|charges|draws|rows|signatures)\b", said.markdown())
    assert "up to 1 public volume:" in said.markdown()


def test_pdf_and_json_are_written_and_the_json_anchors_verify(workspace: Workspace, tmp_path: Path) -> None:
    key = public_hex(load_signing_key(workspace.signing_key_file))
    out = tmp_path / "filed"
    result = typed(app, workspace.root, "--out", out, "--public-key", key)
    for word in ("ε = ", "δ = 0.001", "unit hospital", "relation replace-one", "4 answers"):
        assert word in result.stdout
    assert (out / "certificate.pdf").read_bytes().startswith(b"%PDF-")
    facts = json.loads((out / "certificate.json").read_text())
    assert facts["ledger"]["anchored"]
    arguments = [str(workspace.ledger_file), "--public-key", key, "--head", str(out / "certificate.json")]
    assert RUN.invoke(verify_app, arguments).exit_code == 0
    private = load_signing_key(workspace.signing_key_file).private_bytes_raw()
    for path in out.iterdir():
        assert private not in path.read_bytes()
        assert private.hex().encode() not in path.read_bytes()


def test_without_a_key_the_terminal_and_the_certificate_say_what_was_not_checked_and_with_one_neither_does(
    workspace: Workspace, tmp_path: Path
) -> None:
    key = public_hex(load_signing_key(workspace.signing_key_file))
    for given, warned in (([], True), (["--public-key", key], False)):
        out = tmp_path / f"filed-{warned}"
        done = typed(app, workspace.root, "--out", out, *given)
        assert ("without --public-key" in done.stderr) is warned
        facts = json.loads((out / "certificate.json").read_text())
        assert (NOT_ANCHORED in facts["cannot_prove"]) is warned
        said = certificate_paper(facts, document_sha256="a" * 64).markdown()
        assert ("ONLY with the key" in said) is warned


@pytest.mark.parametrize(
    ("name", "value"), [("epsilon", 0.5), ("delta", 1e-9), ("unit", "patient"), ("relation", "zero-out")]
)
def test_a_certificate_that_promises_more_than_the_ledger_does_not_verify(
    workspace: Workspace, tmp_path: Path, name: str, value: object
) -> None:
    assert RUN.invoke(app, [str(workspace.root), "--out", str(tmp_path)]).exit_code == 0
    file = tmp_path / "certificate.json"
    facts = json.loads(file.read_text())
    facts["guarantee"][name] = value
    file.write_text(json.dumps(facts))
    done = RUN.invoke(verify_app, [str(workspace.ledger_file), "--head", str(file)])
    assert done.exit_code == 5
    assert f"states {name} {value!r}" in done.stdout


def test_a_certificate_of_a_study_whose_recovered_charges_passed_its_budget_verifies_and_an_earlier_one_does_not(
    workspace: Workspace, tmp_path: Path
) -> None:
    names = ("aachen", "bergen")
    assert RUN.invoke(app, [str(workspace.root), "--out", str(tmp_path / "early")]).exit_code == 0
    copy = copy_of(workspace.ledger_file, tmp_path / "copy.sqlite")
    release(workspace, 4, 6, names)
    with setup.open_ledger(workspace) as ledger:
        receipts = [receipt for name in names for receipt in receipts_of(ledger, name)]
    put_copy(copy, workspace.ledger_file, standing=True)
    release(workspace, 4, 6, names, answer=1)
    with setup.open_ledger(workspace) as ledger:
        ledger.recover(receipts)
    assert RUN.invoke(app, [str(workspace.root), "--out", str(tmp_path / "late")]).exit_code == 0
    stated = json.loads((tmp_path / "late" / "certificate.json").read_text())["guarantee"]["epsilon"]
    assert stated > 8
    for name, code in (("late", 0), ("early", 5)):
        head = tmp_path / name / "certificate.json"
        done = RUN.invoke(verify_app, [str(workspace.ledger_file), "--head", str(head)])
        assert done.exit_code == code, done.stdout
    assert f"states epsilon 8.0, but the study in this ledger has {stated!r}" in done.stdout


def test_a_certificate_of_a_study_that_the_ledger_lacks_does_not_verify(workspace: Workspace, tmp_path: Path) -> None:
    assert RUN.invoke(app, [str(workspace.root), "--out", str(tmp_path)]).exit_code == 0
    file = tmp_path / "certificate.json"
    facts = json.loads(file.read_text())
    facts["study"]["id"] = "0" * 64
    file.write_text(json.dumps(facts))
    done = RUN.invoke(verify_app, [str(workspace.ledger_file), "--head", str(file)])
    assert done.exit_code == 5
    assert "does not contain" in done.stdout


def test_a_ledger_that_does_not_verify_gets_no_certificate(workspace: Workspace, tmp_path: Path) -> None:
    connection = sqlite3.connect(workspace.ledger_file, isolation_level=None)
    connection.execute("DROP TRIGGER answers_no_update")
    connection.execute("UPDATE answers SET data = zeroblob(8)")
    connection.close()
    result = RUN.invoke(app, [str(workspace.root), "--out", str(tmp_path / "filed")])
    assert isinstance(result.exception, LedgerCorrupt)
    assert not (tmp_path / "filed").exists()


def test_a_key_other_than_the_ledgers_gets_no_certificate(workspace: Workspace, tmp_path: Path) -> None:
    result = RUN.invoke(app, [str(workspace.root), "--out", str(tmp_path / "f"), "--public-key", "a" * 64])
    assert result.exception is not None
    assert not (tmp_path / "f").exists()


def test_refusals_audit_and_the_hospitals_own_figures_are_included(workspace: Workspace, tmp_path: Path) -> None:
    release(workspace, 4, 6, ("aachen", "bergen"))
    study = workspace.study()
    second = plan_queries(study, codec=CodecRecord(sha256="d" * 64, dimension=5), volumes=["e" * 64] * 6)[:1]
    with setup.open_ledger(workspace) as ledger:
        result = ledger.release_batch(
            study_id=study.id,
            batch_id="late",
            roster=tuple(RosterEntry(site=site, pool=f"{site}-mri") for site in ("aachen", "bergen")),
            queries=second,
            draw=lambda _: np.zeros(5, dtype=np.int64),
        )
    assert result.refused
    report = {"summary": "No fault found.", "exceeded": False, "runs": 200, "confidence": 0.9995, "claimed_mu": 2.0}
    (workspace.root / "audit.json").write_text(json.dumps({"memory": {**report, "findings": []}}))
    (workspace.root / "site-reports").mkdir()
    (workspace.root / "site-reports" / "aachen.json").write_text(json.dumps(site_status(tmp_path, study)))
    facts = certificate_facts(workspace)
    assert [(r["queries"], r["reason"]) for r in facts["refusals"]] == [(1, "pool-budget")]
    assert facts["audit"]["memory"] == report
    assert facts["sites"][0]["site"] == "aachen"
    (said,) = facts["sites"][0]["patient_is"]
    assert "row 4 of its ledger" in said
    assert PatientIdentity.FILE.sentence in said
    assert RUN.invoke(app, [str(workspace.root), "--out", str(tmp_path / "filed")]).exit_code == 0
    no_site_keeps_the_others_from_their_certificate(workspace, tmp_path / "aside")


def no_site_keeps_the_others_from_their_certificate(workspace: Workspace, out: Path) -> None:
    """Check that an invalid report is set aside by name, and that a report given by hand is refused."""
    folder = workspace.reports_dir
    (folder / "bergen.json").write_text("[" * 100_000)
    (folder / "celle.json").write_bytes((folder / "aachen.json").read_bytes())
    (folder / "dover.json").symlink_to("/dev/zero")
    facts = certificate_facts(workspace)
    assert facts["reports_set_aside"] == ["bergen.json", "celle.json", "dover.json"]
    assert [report["site"] for report in facts["sites"]] == ["aachen"]
    assert RUN.invoke(app, [str(workspace.root), "--out", str(out)]).exit_code == 0
    with pytest.raises(InvalidInput, match=r"bergen\.json"):
        certificate_facts(workspace, Sources(sites=(folder / "bergen.json",)))


ANYTHING = "\x1b[2J\u202egnol\u200b\0\ue000\ufffe\u6d77\U0001f600\u0378 signed by all"


@pytest.mark.parametrize("where", ["alarms", "at_least", "pool", "accountant"])
def test_no_words_of_a_hospital_act_in_a_certificate_fill_it_or_keep_the_others_from_theirs(
    workspace: Workspace, tmp_path: Path, where: str
) -> None:
    """A letter of another script in one report once prevented the PDF of every hospital's certificate."""
    key, status = Ed25519PrivateKey.generate(), site_status(tmp_path, workspace.study())
    workspace.save_sites((Site("aachen", "aachen-mri", 1, public_hex(key)),))
    flood = [ANYTHING, *(f"alarm {number} {'x' * 1000}" for number in range(40))]
    spent: Any = status["spent"]
    false = {name: {**one, "accountant": ANYTHING} for name, one in spent.items()}
    lie = {"alarms": {"alarms": flood}, "accountant": {"spent": false}}.get(where, {where: ANYTHING})
    workspace.reports_dir.mkdir()
    said = signed_account({**status, **lie}, sign=key.sign, now=datetime(2026, 5, 1, tzinfo=UTC))
    (workspace.reports_dir / "aachen.json").write_text(json.dumps(said))
    assert RUN.invoke(app, [str(workspace.root), "--out", str(tmp_path / "out")]).exit_code == 0
    facts = certificate_facts(workspace)
    assert [one["site"] for one in facts["sites"]] == ([] if where in ("pool", "accountant") else ["aachen"])
    paper = certificate_paper(facts, document_sha256="0" * 64)
    assert len(str(paper.sections)) < 40_000
    assert not {"\x1b", "\u202e", "\u200b"} & set(paper.markdown())


def test_the_certificate_prefers_a_hospitals_newest_signed_report_and_refuses_forged_ones(
    workspace: Workspace, tmp_path: Path
) -> None:
    """The newest signed report counts, whether it arrived by the dashboard or was put into the study's directory."""
    key, at = Ed25519PrivateKey.generate(), datetime(2026, 5, 1, 12, tzinfo=UTC)
    status = site_status(tmp_path, workspace.study())
    named = [Site("aachen", "aachen-mri", 1, public_hex(key)), Site("bergen", "bergen-mri", 2, "b" * 64)]
    workspace.save_sites(tuple(named))
    mail = tmp_path / "handed-in"
    for folder in (workspace.reports_dir, mail):
        folder.mkdir()

    def lie(folder: Path, said: dict[str, object]) -> None:
        (folder / f"{said['site']}.json").write_text(json.dumps(said))

    def stated() -> tuple[object, ...]:
        facts = certificate_facts(workspace, Sources(reports=mail))
        reports = [(one["site"], one["signed"], one["queries_accepted"]) for one in facts["sites"]]
        return reports, facts.get("reports_set_aside", [])

    lie(workspace.reports_dir, {**status, "queries_accepted": 9})
    assert stated() == ([("aachen", "", 9)], [])
    lie(mail, signed_account(status, sign=key.sign, now=at))
    mailed = ("aachen", "2026-05-01T12:00:00+00:00", status["queries_accepted"])
    assert stated() == ([mailed], [])
    lie(workspace.reports_dir, signed_account({**status, "queries_accepted": 0}, sign=key.sign, now=at - YEAR))
    assert stated() == ([mailed], [])
    lie(workspace.reports_dir, {**signed_account(status, sign=key.sign, now=at + YEAR), "queries_accepted": 0})
    assert stated() == ([mailed], ["aachen.json"])
    lie(mail, signed_account({**status, "site": "bergen"}, sign=key.sign, now=at))
    assert stated() == ([mailed], ["aachen.json", "bergen.json"])
    assert RUN.invoke(app, [str(workspace.root), "--out", str(tmp_path / "out"), "--reports", str(mail)]).exit_code == 0
    with pytest.raises(InvalidInput, match=r"aachen\.json: signature of a site's status report"):
        certificate_facts(workspace, Sources(sites=(workspace.reports_dir / "aachen.json",)))


def site_status(folder: Path, study: Study) -> dict[str, object]:
    from client.ledger.site_ledger import SiteLedger
    from client.policy import Caps

    with SiteLedger.open(folder / "s.sqlite", "aachen-mri", caps=Caps(epsilon=8, delta=1e-3), site="aachen") as ledger:
        ledger.consent(study)
        ledger.state_identity(PatientIdentity.FILE)
        ledger.reserve(study.id, plan_queries(study, codec=CodecRecord("c" * 64, 5), volumes=["a" * 64]))
        return ledger.facts("aachen", present=()).to_json()


@pytest.mark.parametrize("text", ["{", "[]", '{"memory": {}}'])
def test_a_file_that_is_no_audit_is_refused(workspace: Workspace, text: str) -> None:
    (workspace.root / "audit.json").write_text(text)
    with pytest.raises(InvalidInput, match="audit"):
        certificate_facts(workspace)


def paper_of(facts: dict[str, Any]) -> Paper:
    return certificate_paper(facts, document_sha256="0" * 64)


def test_the_same_facts_make_the_same_bytes(workspace: Workspace) -> None:
    facts = certificate_facts(workspace)
    assert paper_of(facts).pdf() == paper_of(facts).pdf()


def test_every_batch_of_a_long_study_has_its_row(workspace: Workspace) -> None:
    facts = certificate_facts(workspace)
    few = len(paper_of(facts).pdf())
    facts["releases"] = [
        {**facts["releases"][0], "sites": [f"hospital-{n}-of-the-north" for n in range(12)]} for _ in range(60)
    ]
    (rows,) = (one.rows for one in paper_of(facts).sections if one.heading.startswith("What was released"))
    assert len(rows) == 61
    assert len(paper_of(facts).pdf()) > few


def test_a_study_that_released_nothing_says_so(tmp_path: Path) -> None:
    made = made_study(tmp_path / "study")
    assert RUN.invoke(app, [str(made.root), "--out", str(tmp_path / "filed")]).exit_code == 0
    assert json.loads((tmp_path / "filed" / "certificate.json").read_text())["answers"] == 0
    assert verify(made.ledger_file).ok


def test_the_pages_are_tagged_and_archivable_and_signed_by_hand_at_the_end(workspace: Workspace) -> None:
    """The test looks for the marks of PDF/A-2a and PDF/UA-1 that a validator reads first."""
    paper = paper_of(certificate_facts(workspace))
    data = paper.pdf()
    for mark in (b"/MarkInfo", b"/StructTreeRoot", b"/Lang", b"pdfaid:part>2<", b"pdfuaid:part>1<"):
        assert mark in data, mark
    assert len(paper.sign) == 2
    assert paper.blanks == ()


def test_a_name_in_a_study_is_text_in_the_certificate_and_no_command(workspace: Workspace) -> None:
    facts = certificate_facts(workspace)
    facts["study"] = {**facts["study"], "name": '#panic("x") $1 [a]'}
    assert paper_of(facts).pdf()


def test_the_dashboard_shows_a_certificate_that_a_command_issued(workspace: Workspace, tmp_path: Path) -> None:
    (workspace.root / "codec.json").unlink()  # the fixture stores no codec object to draw a spectrum from
    seen = glance(Options(study=workspace.root, state=tmp_path / "state"))
    assert "/api/certificate.json" not in seen.get("/study").text
    assert seen.get("/api/certificate.json").status_code == 404
    typed(app, workspace.root, "--out", tmp_path / "elsewhere")
    written = (tmp_path / "elsewhere" / "certificate.json").read_bytes()
    page = seen.get("/study").text
    assert "/api/certificate.json" in page
    assert sha256_bytes(written) in page
    assert seen.get("/api/certificate.json").content == written
    assert 'href="/api/certificate.pdf"' in page


def test_a_certificate_is_issued_where_the_study_cannot_be_written(workspace: Workspace, tmp_path: Path) -> None:
    workspace.certificate_dir.write_text("a file is in the way of the folder")
    done = typed(app, workspace.root, "--out", tmp_path / "elsewhere")
    assert "cannot be written" in done.output
    assert (tmp_path / "elsewhere" / "certificate.pdf").exists()
