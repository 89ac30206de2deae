"""Tests figures given by consent: signed by the hospital that measured them, and absent for fewer than five
patients.
"""

from __future__ import annotations

import errno
import json
import math
import re
import shutil
import statistics
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from unittest.mock import Mock

import nibabel as nib
import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from typer.testing import CliRunner

from client.policy import load_site
from client.site.books import read_books
from client.teachers.evaluation import CaseScore, Evaluation
from client.teachers.verdict import figures_of
from client.witnessing import Witnessing
from common.config import GateConfig
from common.data.msd import Case, write_dataset
from common.errors import InvalidInput
from common.events import EventLog
from common.ledger.records import NoteRecord, parse_record
from common.ledger.rows import format_time
from common.models.unet import build_unet, save_weights
from common.node_auth import AdmittedNode, write_admitted
from common.objects import write_atomically
from common.pki import create_node_keys
from common.site_figures import LEAST_PATIENTS, MAX_FIGURES_BYTES, SiteFigures, StructureFigure
from common.site_verdict import SiteVerdict
from common.student_statement import StudentStatement
from consilium.audit.witnesses import witnesses_of
from consilium.cli.main import app
from consilium.cli.provision import provision_app
from consilium.cli.site import site_app
from consilium.cli.study import study_app
from consilium.reports.certificate import Sources, certificate_facts, issue_certificate
from consilium.reports.certificate_paper import certificate_paper
from consilium.reports.publication import publish_student
from server.aggregation.witnessing import Witnesses
from server.operations.provision import revoke
from server.study.evaluated import evaluated, figures_on, take_figures
from server.study.gate import publish_verdicts, take_verdict
from server.study.status import study_status
from server.study.workspace import Workspace
from tests.commands import refusal_of, typed
from tests.exported import exported_study, statement_file
from tests.federation import Federation, ball, make_study

EARLY, LATE = "2026-11-24T09:00:00.000000Z", "2026-11-24T10:00:00.000000Z"
RUN = CliRunner()


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Federation]:
    federation = exported_study(tmp_path_factory.mktemp("evaluated"), make_study(planned_queries=2))
    yield federation
    federation.close()


@pytest.fixture
def fed(run: Federation) -> Federation:
    """Return the study without any figures."""
    for path in Workspace(run.root).figures_dir.glob("*"):
        path.unlink()
    return run


def test_a_wrong_file_of_figures_is_named_with_what_to_do(fed: Federation, tmp_path: Path) -> None:
    wrong = tmp_path / "notes.txt"
    wrong.write_text("not figures")
    refused = refusal_of(study_app, "evaluate", fed.root, wrong)
    assert str(refused).startswith(f"{wrong}: ")
    assert "`site evaluate --figures`" in refused.remedy


def figures(fed: Federation, site: str, hundredths: int = 80, *, time: str = EARLY, **other: object) -> SiteFigures:
    bundle = StudentStatement.parse(statement_file(fed).read_bytes()).bundle
    said = SiteFigures(fed.study.id, bundle, site, (StructureFigure("body", hundredths),), time)
    return replace(said, **other).signed_by(fed.site_ledgers.get(site, fed.site_ledgers["site-0"]).sign)


def test_two_of_three_hospitals_consent_and_the_third_is_named(fed: Federation, tmp_path: Path) -> None:
    files = []
    for site, value in (("site-0", 80), ("site-2", 61)):
        files.append(str(tmp_path / f"{site}.json"))
        Path(files[-1]).write_bytes(figures(fed, site, value).render())
    done = RUN.invoke(study_app, ["evaluate", str(fed.root), *files], catch_exceptions=False)
    assert re.search(r"2 of 3 hospitals .*\(site-0, site-2\)", done.stdout)
    assert "nothing sent: site-1" in done.stdout
    assert "body: mean 0.705" in done.stdout
    assert "worst 0.61 at site-2" in done.stdout
    found = json.loads(RUN.invoke(study_app, ["evaluate", str(fed.root), "--json"]).stdout)
    (row,) = found["structures"]
    half = 12.7062 * statistics.stdev([0.8, 0.61]) / math.sqrt(2)  # Student's t of 1 degree of freedom, from a table
    assert row["half_width"] == pytest.approx(half, rel=1e-4)
    assert (row["sites"], row["worst_site"], found["silent"]) == (2, "site-2", ["site-1"])


def test_figures_that_no_admitted_hospital_signed_about_this_student_are_not_taken(fed: Federation) -> None:
    workspace, genuine = Workspace(fed.root), figures(fed, "site-0")
    twice = (StructureFigure("body", 80), StructureFigure("body", 90))
    for forged in (
        figures(fed, "site-0", bundle="a" * 64),
        figures(fed, "site-0", study_id="a" * 64),
        figures(fed, "stranger"),
        replace(genuine, site="site-1"),
        replace(genuine, dice=(StructureFigure("body", 99),)),
        replace(genuine, signature=""),
        figures(fed, "site-0", dice=(StructureFigure("liver", 80),)),
        figures(fed, "site-0", dice=twice),
    ):
        with pytest.raises(InvalidInput, match="figures of"):
            take_figures(workspace, forged.render())
    for data in (b"", b"{}", b"[" * 5_000, b"x" * (MAX_FIGURES_BYTES + 1), genuine.render()[:-1], b"\xff" * 40):
        with pytest.raises(InvalidInput):
            take_figures(workspace, data)
    assert figures_on(workspace) == {}


@pytest.mark.parametrize("wrong", [-1, 101, 80.5, True, "80", None, math.nan])
def test_no_number_but_0_to_100_is_a_figure(fed: Federation, wrong: object) -> None:
    facts = json.loads(figures(fed, "site-0").render())
    facts["dice"][0]["hundredths"] = wrong
    with pytest.raises(InvalidInput):
        SiteFigures.parse(json.dumps(facts, sort_keys=True, separators=(",", ":")).encode())


def test_figures_have_no_field_for_a_case_a_count_or_a_spread(fed: Federation) -> None:
    facts = json.loads(figures(fed, "site-0").render())
    assert facts.keys() == {"schema", "study", "bundle", "site", "dice", "time_utc", "signature"}
    assert [one.keys() for one in facts["dice"]] == [{"structure", "hundredths"}]
    for more in ({"cases": 7}, {"spread": "0.1"}):
        with pytest.raises(InvalidInput):
            SiteFigures.parse(json.dumps({**facts, **more}, sort_keys=True, separators=(",", ":")).encode())


def test_a_hospitals_newer_figures_take_the_place_of_its_older_and_never_the_other_way(fed: Federation) -> None:
    workspace = Workspace(fed.root)
    take_figures(workspace, figures(fed, "site-0", 80, time=LATE).render())
    with pytest.raises(InvalidInput, match="figures signed after"):
        take_figures(workspace, figures(fed, "site-0", 99).render())
    assert [one.mean for one in evaluated(workspace).structures] == [0.8]


def test_figures_signed_in_the_future_are_refused(fed: Federation) -> None:
    ahead = format_time(datetime.now(UTC) + timedelta(days=365))
    with pytest.raises(InvalidInput, match="no later than now"):
        take_figures(Workspace(fed.root), figures(fed, "site-0", time=ahead).render())


def test_the_figures_of_a_hospital_that_was_revoked_count_no_more(fed: Federation) -> None:
    workspace = Workspace(fed.root)
    for site in ("site-0", "site-1"):
        take_figures(workspace, figures(fed, site).render())
    write_admitted(workspace.nodes_file, (AdmittedNode("site-0", "a"), AdmittedNode("site-2", "b")))
    try:
        found = evaluated(workspace)
        assert (found.gave, found.silent) == (("site-0",), ("site-2",))
        with pytest.raises(InvalidInput, match="an admitted site"):
            take_figures(workspace, figures(fed, "site-1", time=LATE).render())
    finally:
        workspace.nodes_file.unlink()


@pytest.mark.slow
def test_a_site_that_left_leaves_neither_verdict_nor_figures_nor_witness_behind(tmp_path: Path) -> None:
    """Its verdict and figures depend on its patients' data, and no ε covers them."""
    study = make_study(gate=GateConfig(1), quorum=3, aggregation="sealed-sum", planned_queries=2)
    with exported_study(tmp_path / "study", study) as fed:
        name, workspace = fed.sites[0].name, Workspace(fed.root)
        files = [create_node_keys(tmp_path / one.name).public for one in fed.sites]
        keys = [" ".join(path.read_text().split()[:2]) for path in files]
        nodes = (AdmittedNode(one.name, key, one.node_id) for one, key in zip(fed.sites, keys, strict=True))
        write_admitted(workspace.nodes_file, tuple(nodes))
        measured = figures(fed, name)
        verdict = SiteVerdict(study.id, measured.bundle, name, "worse", EARLY)
        take_verdict(workspace, verdict.signed_by(fed.site_ledgers[name].sign).render())
        publish_verdicts(workspace)
        take_figures(workspace, measured.render())
        for site in fed.sites:
            ledger = fed.site_ledgers[site.name]
            folder, server = fed.root / site.name / "witnesses", (fed.signing_key.public_key(),)
            fed.workers[site.node_id]._witness = Witnessing(folder, site=site.name, ledger=ledger, server_keys=server)
        events = EventLog(fed.events_file, study=study.id)
        Witnesses(workspace.root / "witnesses", study=study.id, ledger=fed.ledger, events=events).ask(
            fed.sites, fed.transport
        )
        issue_certificate(workspace, tmp_path / "certificate", Sources())
    revoke(workspace, name, unregister=lambda _node: None)
    publish_verdicts(workspace)
    said = typed(provision_app, "forget", workspace.root, name).stdout
    for gone in ("verdict", "figures", "witness", "certificate"):
        assert gone in said
    hospitals = {one.name for one in fed.sites}  # this test keeps the hospitals' folders inside the study's
    left = [path.relative_to(workspace.root) for path in workspace.root.rglob("*") if path.is_file()]
    naming = {path.name for path in left if name in str(path) or name.encode() in (workspace.root / path).read_bytes()}
    kept = {path.name for path in left if path.parts[0] in hospitals} | {
        "ledger.sqlite",
        "ledger.standing",
        "left.json",
    }
    countersigned = {path.name for path in workspace.root.glob("witnesses/*.note")}
    assert naming <= kept | countersigned
    assert len(countersigned) == len(fed.sites)  # the server's ledger and the other sites', not its own
    assert set(json.loads((workspace.root / "witnesses" / "sites.json").read_text())) == hospitals - {name}
    assert witnesses_of(workspace.ledger_file, role="server").problems == ()
    status = study_status(workspace)
    assert status.sites[name].state == "revoked"
    assert status.sites[name].charged == status.sites[fed.sites[1].name].charged > 0
    assert status.facts.pools[fed.sites[0].pool].revoked  # it pays for no further query


def test_the_model_card_has_the_measured_figures_with_the_signed_files(fed: Federation, tmp_path: Path) -> None:
    workspace = Workspace(fed.root)
    publish_student(workspace, tmp_path / "without")
    assert "No hospital sent" in (tmp_path / "without" / "MODEL_CARD.md").read_text()
    genuine = figures(fed, "site-1", 74)
    take_figures(workspace, genuine.render())
    names = publish_student(workspace, tmp_path / "out")
    card = (tmp_path / "out" / "MODEL_CARD.md").read_text()
    assert re.search(r"body: mean 0\.740 .*0\.74 at site-1", card)
    assert "nothing sent: site-0, site-2" in card
    assert "No hospital sent" not in card
    assert "figures/1.json" in names
    assert (tmp_path / "out" / "figures" / "1.json").read_bytes() == genuine.render()


# --- at the hospital


def evaluation(dice: list[tuple[str, float, float]]) -> Evaluation:
    scores = tuple(CaseScore(f"c{i}", "not used", (a, b), (0.0, 0.0), patient=p) for i, (p, a, b) in enumerate(dice))
    return Evaluation("w" * 64, ("body", "core"), scores, ())


def test_a_figure_is_the_mean_over_patients_and_none_is_given_of_fewer_than_five() -> None:
    """Patient p0 has three scans, which count as one; of the core only four patients have a figure."""
    rows = [("p0", 0.2, 0.5), ("p0", 0.4, 0.5), ("p0", 0.6, 0.5)]
    rows += [(f"p{i}", 0.9, 0.5 if i < 4 else math.nan) for i in range(1, 5)]
    (only,) = figures_of(evaluation(rows))
    assert (only.structure, only.hundredths) == ("body", round(100 * (0.4 + 4 * 0.9) / 5))
    assert figures_of(evaluation(rows[:6])) == ()
    assert LEAST_PATIENTS == 5


def test_one_patient_exchanged_moves_a_figure_by_a_fifth_at_most() -> None:
    same = [(f"p{i}", 0.7, 0.7) for i in range(1, LEAST_PATIENTS)]
    moved = [figures_of(evaluation([("p0", value, value), *same]))[0].hundredths for value in (0.0, 1.0)]
    assert abs(moved[1] - moved[0]) == 100 // LEAST_PATIENTS


def student_answer() -> np.ndarray:
    return np.stack([1.0 - ball((4, 4, 4), 2.0), ball((4, 4, 4), 2.0)]).astype(np.float32)


def site_to_evaluate(fed: Federation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, cases: int = 5) -> list[str]:
    """Return the command line of `site evaluate` for a site with the pulled student and cases."""
    site, workspace = fed.root / "site-0", Workspace(fed.root)
    fed.write_site_files()
    shutil.copytree(workspace.bundle_dir, site / "student" / "bundle", dirs_exist_ok=True)
    (site / "student" / "statement.json").write_bytes(statement_file(fed).read_bytes())
    made = []
    for i in range(cases):
        label = ball((4, 4, 3 + i % 2), 2.0)
        (tmp_path / "raw").mkdir(parents=True, exist_ok=True)
        paths = [tmp_path / "raw" / f"c{i}.nii.gz", tmp_path / "raw" / f"c{i}-label.nii.gz"]
        image = np.random.default_rng(i).normal(label * 2.0, 0.3).astype(np.float32)
        for path, array in zip(paths, (image, label), strict=True):
            nib.save(nib.Nifti1Image(array, np.eye(4)), path)
        made.append(Case(f"c{i}", *paths))
    write_dataset(tmp_path / "set", name="own", labels=("background", "body"), channels=("MRI",), cases=made)
    monkeypatch.setattr("client.teachers.evaluation.predict", lambda network, image, patch=(): student_answer())
    return ["evaluate", "--site-dir", str(site), "--data", str(tmp_path / "set")]


@pytest.mark.slow
def test_a_hospital_makes_signed_figures_of_the_pulled_student_and_its_ledger_notes_it_without_them(
    fed: Federation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = site_to_evaluate(fed, tmp_path, monkeypatch)
    site, workspace = fed.root / "site-0", Workspace(fed.root)
    typed(site_app, *words, "--figures", tmp_path / "f.json")
    truths, fixed = [ball((4, 4, 3 + i % 2), 2.0) for i in range(5)], student_answer()
    by_hand = [2 * (fixed[1] * truth).sum() / (fixed[1].sum() + truth.sum()) for truth in truths]
    (figure,) = take_figures(workspace, (tmp_path / "f.json").read_bytes()).dice
    assert figure.hundredths == round(100 * np.mean(by_hand))
    with read_books(load_site(site)) as ledger:
        notes = [parse_record("site", row.kind, row.body) for row in ledger.rows() if row.kind == "note"]
    texts = [note.text for note in notes if isinstance(note, NoteRecord) and "figures" in note.text]
    assert len(texts) == 1
    assert str(figure.hundredths) not in texts[0].replace(fed.study.id, "").replace(figures(fed, "site-0").bundle, "")
    for more in (["--native"], ["--model", str(workspace.bundle_dir)]):
        refusal_of(site_app, *words, "--figures", tmp_path / "g.json", *more)
    assert not (tmp_path / "g.json").exists()
    assert datetime.now(UTC) > datetime.fromisoformat(json.loads((tmp_path / "f.json").read_text())["time_utc"])


def another_export(site: Path, _statement: StudentStatement, _key: Ed25519PrivateKey) -> None:
    facts = site / "student" / "bundle" / "configs" / "privacy.json"
    facts.write_text(json.dumps({**json.loads(facts.read_text()), "ledger_head": "0" * 64}))


def another_study(site: Path, statement: StudentStatement, key: Ed25519PrivateKey) -> None:
    other = replace(statement, study_id="0" * 64, signature="")
    (site / "student" / "statement.json").write_bytes(other.signed(key).render())


def nobody_signed(site: Path, statement: StudentStatement, _key: Ed25519PrivateKey) -> None:
    (site / "student" / "statement.json").write_bytes(replace(statement, size=statement.size + 1).render())


def another_network(site: Path, _statement: StudentStatement, _key: Ed25519PrivateKey) -> None:
    """Restore the weights of another export, whose privacy figures are the same."""
    weights = site / "student" / "bundle" / "models" / "model.pt"
    save_weights(weights, build_unet((4, 8), in_channels=1, out_channels=2, seed=6))


@pytest.mark.slow
@pytest.mark.parametrize("wrong", [another_export, another_study, nobody_signed, another_network])
def test_nothing_is_signed_on_a_student_whose_statement_is_not_about_the_bundle_beside_it(
    fed: Federation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wrong: Callable[..., None]
) -> None:
    words = site_to_evaluate(fed, tmp_path, monkeypatch)
    site, signed = fed.root / "site-0", StudentStatement.parse(statement_file(fed).read_bytes())
    wrong(site, signed, fed.signing_key)
    monkeypatch.setattr("client.teachers.evaluation.evaluate", pytest.fail)  # refused before the cases are scored
    said = refusal_of(site_app, *words, "--figures", tmp_path / "f.json")
    assert said.remedy
    assert "student" in str(said)
    assert not (tmp_path / "f.json").exists()


def test_site_evaluate_and_predict_check_the_statement_beside_the_student_or_note_that_it_is_absent(
    fed: Federation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words, site = site_to_evaluate(fed, tmp_path, monkeypatch, cases=1), fed.root / "site-0"
    for function in ("client.teachers.evaluation.evaluate", "consilium.predict.predict_images"):
        monkeypatch.setattr(function, Mock(side_effect=InvalidInput("scored")))
    predicting = ["predict", tmp_path / "set", "--model", site / "student" / "bundle", "--out", tmp_path / "out"]
    for refused in (partial(RUN.invoke, site_app, words), partial(RUN.invoke, app, [str(word) for word in predicting])):
        (site / "student" / "statement.json").write_bytes(statement_file(fed).read_bytes())
        assert (str((done := refused()).exception), done.stderr) == ("scored", "")
        another_study(site, StudentStatement.parse(statement_file(fed).read_bytes()), fed.signing_key)
        assert "another study" in str(refused().exception)
        (site / "student" / "statement.json").unlink()
        (site / "site-ledger.sqlite").rename(tmp_path / "ledger")  # only a gate needs it
        (site / "student" / "statement.json").write_bytes(statement_file(fed).read_bytes())
        assert str(refused().exception) == "scored"
        (tmp_path / "ledger").rename(site / "site-ledger.sqlite")
        (site / "student" / "statement.json").unlink()
        assert "statement is not beside the student" in (done := refused()).stderr
        assert str(done.exception) == "scored"


@pytest.mark.slow
def test_figures_are_not_signed_for_a_student_that_was_pulled_while_another_was_evaluated(
    fed: Federation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = site_to_evaluate(fed, tmp_path, monkeypatch)
    weights = fed.root / "site-0" / "student" / "bundle" / "models" / "model.pt"

    def predict(network: object, image: object, patch: object = ()) -> np.ndarray:
        weights.write_bytes(b"another student")
        return student_answer()

    monkeypatch.setattr("client.teachers.evaluation.predict", predict)
    said = refusal_of(site_app, *words, "--figures", tmp_path / "f.json")
    assert "replaced while it was evaluated" in str(said)
    assert not (tmp_path / "f.json").exists()


@pytest.mark.slow
def test_verdict_and_figures_are_given_together_or_not_at_all(
    fed: Federation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words, out = site_to_evaluate(fed, tmp_path, monkeypatch, cases=LEAST_PATIENTS - 1), tmp_path / "out"
    site, own = fed.root / "site-0", fed.root / "site-0" / "student" / "verdict.json"
    monkeypatch.setattr(Evaluation, "verdict", "better")
    both = ["--verdict", str(out / "v.json"), "--figures", str(out / "f.json")]

    def refused(*more: str) -> str:
        done = RUN.invoke(site_app, [*words, *more])
        assert done.exit_code, done.output
        assert not (out / "v.json").exists()
        assert not own.exists()
        return f"{done.output} {done.exception}"

    with read_books(load_site(site)) as ledger:
        before = list(ledger.rows())
    assert "too few patients" in refused(*both)
    with read_books(load_site(site)) as ledger:
        assert list(ledger.rows()) == before
    words = site_to_evaluate(fed, tmp_path / "more", monkeypatch)
    out.mkdir()
    (out / "f.json").write_text("older")
    with monkeypatch.context() as patch:
        # It refuses before scoring, which takes hours.
        patch.setattr("client.teachers.evaluation.evaluate", pytest.fail)
        assert "exists already" in refused(*both)
        assert "two files" in refused("--verdict", str(out / "v.json"), "--figures", str(out / "v.json"))
    assert (out / "f.json").read_text() == "older"
    (out / "f.json").unlink()
    for broken in ("v.json", "f.json", "student/verdict.json"):
        with monkeypatch.context() as patch:
            patch.setattr("client.teachers.verdict.write_atomically", failing_at(broken))
            assert "No space left" in refused(*both)
            assert not (out / "f.json").exists()
    typed(site_app, *words, *both)
    assert own.read_bytes() == (out / "v.json").read_bytes()
    assert (out / "f.json").is_file()


@pytest.mark.slow
@pytest.mark.parametrize("broken", ["f.json", "v.json", "student/verdict.json"])
def test_a_repeated_command_completes_the_pair_of_a_killed_one_and_keeps_other_files(
    fed: Federation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, broken: str
) -> None:
    words, out = site_to_evaluate(fed, tmp_path, monkeypatch), tmp_path / "out"
    own = fed.root / "site-0" / "student" / "verdict.json"
    monkeypatch.setattr(Evaluation, "verdict", "better")
    both = ["--verdict", str(out / "v.json"), "--figures", str(out / "f.json")]
    with monkeypatch.context() as patch:  # a killed process removes nothing
        patch.setattr("client.teachers.verdict.write_atomically", failing_at(broken))
        patch.setattr("client.teachers.verdict.all_or_nothing", lambda *files: nullcontext())
        assert RUN.invoke(site_app, [*words, *both]).exit_code
    assert (out / "f.json").exists() == (broken != "f.json")
    assert not (out / "v.json").exists()
    typed(site_app, *words, *both)
    measured = SiteFigures.parse((out / "f.json").read_bytes())
    assert measured.time_utc == SiteVerdict.parse((out / "v.json").read_bytes()).time_utc
    assert own.read_bytes() == (out / "v.json").read_bytes()
    again = RUN.invoke(site_app, [*words, *both])  # a complete pair is never overwritten
    assert "exists already" in str(again.exception)


@pytest.mark.slow
def test_a_file_that_a_killed_command_did_not_write_is_never_overwritten(
    fed: Federation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words, out = site_to_evaluate(fed, tmp_path, monkeypatch), tmp_path / "out"
    monkeypatch.setattr(Evaluation, "verdict", "better")
    both = ["--verdict", str(out / "v.json"), "--figures", str(out / "f.json")]
    with monkeypatch.context() as patch:
        patch.setattr("client.teachers.verdict.write_atomically", failing_at("v.json"))
        patch.setattr("client.teachers.verdict.all_or_nothing", lambda *files: nullcontext())
        assert RUN.invoke(site_app, [*words, *both]).exit_code
    (out / "f.json").write_text("another file")
    assert "exists already" in str(RUN.invoke(site_app, [*words, *both]).exception)
    assert (out / "f.json").read_text() == "another file"


def failing_at(name: str) -> Callable[..., None]:
    def write(path: Path, data: bytes, **more: int) -> None:
        if str(path).endswith(name) and (name != "v.json" or "student" not in str(path)):
            raise OSError(errno.ENOSPC, "No space left on device", str(path))
        write_atomically(path, data, **more)

    return write


def test_the_certificate_has_the_measured_figures_and_without_figures_says_nothing_of_them(fed: Federation) -> None:
    workspace = Workspace(fed.root)
    assert "measured" not in certificate_facts(workspace)
    for site, value in (("site-0", 80), ("site-1", 74)):
        take_figures(workspace, figures(fed, site, value).render())
    facts = certificate_facts(workspace)
    (row,) = facts["measured"]["structures"]
    assert (row["mean"], row["worst"], row["worst_site"]) == (pytest.approx(0.77), 0.74, "site-1")
    paper = certificate_paper(facts, document_sha256="a" * 64)
    section = next(one for one in paper.sections if one.heading == "The student as hospitals measured it")
    assert any("worst 0.74 at site-1" in point for point in section.points)
