"""Tests the student at a hospital: accepted only with proof, unpacked in one place, scored without telling anybody."""

from __future__ import annotations

import html
import json
import re
import shutil
import socket
import stat
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime
from fractions import Fraction
from pathlib import Path

import httpx
import nibabel as nib
import numpy as np
import pytest
import uvicorn
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from typer.testing import CliRunner

from client.policy import load_site
from client.site import fetch
from client.site.fetch import PublicObjects
from client.teachers.comparison import MEAN_SHAPE
from client.teachers.evaluation import ADAPTED_OWN_BETTER, OWN_BETTER, evaluate
from client.teachers.evaluation_text import table
from client.teachers.fit_of_cases import CHECK
from client.teachers.pulled_student import check_statement, pull, pulled_statement
from common.bundle_archive import from_archive, to_archive
from common.calibration import NOTHING, reliability
from common.canonical import sha256_bytes, sha256_file
from common.config import Study, render_study
from common.data.msd import Case, write_dataset
from common.errors import InvalidInput, LedgerCorrupt
from common.events import EventLog
from common.ledger.keys import public_hex
from common.ledger.rows import NO_HASH, SignedHead, head_message, row_hash
from common.metrics import dice_per_class, hd95_mm
from common.models.bundle import SEEN_WEIGHTS
from common.models.unet import build_unet, save_weights
from common.node_auth import AdmittedNode, write_admitted
from common.objects import ObjectStore
from common.pki import create_authority, create_node_keys, issue_server_certificate, read_node_public_key
from common.privacy.mechanism import AccountantName
from common.sockets import free_port
from common.student_statement import StudentStatement
from consilium.cli.site import site_app
from server.operations.gateway import GatewayFiles, gateway_app
from server.postprocess.bundle import export_student, ranges_seen
from server.protocols.stored_labels import StoredLabels
from server.study.workspace import Workspace
from tests.commands import refusal_of, typed
from tests.exported import exported_study, statement_file
from tests.federation import Federation, ball
from tests.small_servers import serving_app
from tests.undrawn import leave_undrawn

pytestmark = pytest.mark.slow

RUN = CliRunner()


@pytest.fixture(scope="module")
def fed(tmp_path_factory: pytest.TempPathFactory):
    """Return a study that was run and exported; a TLS server on loopback serves its objects."""
    root = tmp_path_factory.mktemp("student")
    federation, workspace = exported_study(root), Workspace(root)
    identity = issue_server_certificate(create_authority(root / "authority"), root / "tls", names=["localhost"])
    port = free_port()
    keys = {site.name: create_node_keys(root / site.name / "node" / "keys") for site in federation.sites}
    nodes = tuple(AdmittedNode(site=name, key=read_node_public_key(pair.public)) for name, pair in keys.items())
    write_admitted(root / "nodes.json", nodes)
    files = GatewayFiles(
        objects=workspace.objects_dir,
        nodes=root / "nodes.json",
        certificate=identity.certificate,
        key=identity.key,
    )
    upstream = httpx.AsyncClient(
        base_url="https://none", transport=httpx.MockTransport(lambda request: httpx.Response(500))
    )
    config = uvicorn.Config(
        gateway_app(files, upstream=upstream),
        host="127.0.0.1",
        port=port,
        ssl_certfile=str(identity.certificate),
        ssl_keyfile=str(identity.key),
        log_level="critical",
        ws="none",
    )
    for site in federation.sites:
        folder = root / site.name
        text = federation.site_toml(site.name, site.pool).replace("https://localhost", f"https://localhost:{port}")
        (folder / "site.toml").write_text(text)
        (folder / "study.toml").write_text(render_study(federation.study))
        (folder / "ca.crt").write_bytes(identity.authority.read_bytes())
    with serving_app(config):
        yield federation
    federation.close()


@pytest.fixture
def statement(fed: Federation) -> StudentStatement:
    return StudentStatement.parse(statement_file(fed).read_bytes())


def check(fed: Federation, statement: StudentStatement, *, study: Study | None = None) -> int:
    keys = (fed.signing_key.public_key(),)
    return check_statement(statement, study=study or fed.study, keys=keys, ledger=fed.site_ledgers["site-0"])


def lie(fed: Federation, statement: StudentStatement, **changes) -> StudentStatement:
    """Return a statement that a lying server could sign for this site: changed, but with matching hashes and head."""
    changed = replace(statement, **changes)
    hashed = NO_HASH
    for seq, link in enumerate(changed.links, start=1):
        hashed = row_hash(
            "server", seq=seq, time_utc=link.time_utc, kind=link.kind, body_sha256=link.body_sha256, prev_hash=hashed
        )
    head = changed.head
    message = head_message("server", ledger_id=head.ledger_id, seq=head.seq, row_hash=hashed)
    signed = SignedHead(
        "server", head.ledger_id, head.seq, hashed, head.public_key, fed.signing_key.sign(message).hex()
    )
    return replace(changed, head=signed).signed(fed.signing_key)


# --- the statement


def test_an_honest_statement_agrees_with_every_receipt(fed: Federation, statement: StudentStatement) -> None:
    assert check(fed, statement) == len(fed.site_ledgers["site-0"].receipts()) > 0
    assert StudentStatement.parse(statement.render()) == statement
    spent = fed.ledger.study_spending(fed.study.id).readings()
    for name in AccountantName:
        terms = fed.study.privacy
        assert statement.guarantee(terms.budget, terms.protection, name) == spent[name]
    assert statement.positions()[statement.head.seq] == fed.ledger.head().hash
    assert all(statement.positions()[row.seq] == row.hash for row in fed.ledger.rows())


def test_a_statement_of_another_key_or_with_a_changed_word_is_refused(
    fed: Federation, statement: StudentStatement
) -> None:
    for forged in (
        statement.signed(Ed25519PrivateKey.generate()),
        replace(statement, bundle="0" * 64),
        replace(statement, mu_squared=statement.mu_squared / 2),
        replace(statement, signature=""),
        replace(statement, signature="00" * 64),
    ):
        with pytest.raises(InvalidInput, match=r"signed .*site\.toml"):
            check(fed, forged)


def test_a_statement_about_another_study_is_refused(fed: Federation, statement: StudentStatement) -> None:
    with pytest.raises(InvalidInput, match="another study"):
        check(fed, replace(statement, study_id="a" * 64).signed(fed.signing_key))


def test_a_rewritten_row_under_a_genuine_head_contradicts_the_receipts(
    fed: Federation, statement: StudentStatement
) -> None:
    links = list(statement.links)
    links[1] = replace(links[1], body_sha256="0" * 64)
    with pytest.raises(LedgerCorrupt, match=r"contradicts.*receipts"):
        check(fed, lie(fed, statement, links=tuple(links)))
    with pytest.raises(LedgerCorrupt, match="signed head"):
        check(fed, replace(statement, links=tuple(links)).signed(fed.signing_key))


def test_another_ledger_for_the_same_study_is_refused(fed: Federation, statement: StudentStatement) -> None:
    other = replace(statement.head, ledger_id="0" * len(statement.head.ledger_id))
    with pytest.raises(LedgerCorrupt, match="a different ledger"):
        check(fed, lie(fed, statement, head=other))


def test_a_statement_that_counts_less_than_the_receipts_is_refused(
    fed: Federation, statement: StudentStatement
) -> None:
    for less in (
        lie(fed, statement, mu_squared=statement.mu_squared - Fraction(1, 10**12)),
        lie(fed, statement, links=statement.links[:-1], head=replace(statement.head, seq=statement.head.seq - 1)),
    ):
        with pytest.raises(InvalidInput, match=r"got 'row \d+'; allowed: row \d+.*student export"):
            check(fed, less)


def test_a_statement_past_the_studys_budget_is_refused(fed: Federation, statement: StudentStatement) -> None:
    with pytest.raises(LedgerCorrupt, match="budget"):
        check(fed, lie(fed, statement, mu_squared=statement.mu_squared * 2))


def test_exporting_again_publishes_nothing_new_and_packs_the_same_bytes(
    fed: Federation, statement: StudentStatement
) -> None:
    before = statement_file(fed).read_bytes()
    export_student(Workspace(fed.root), events=EventLog(fed.events_file, study=fed.study.id))
    assert statement_file(fed).read_bytes() == before
    assert fed.events("bundle-exported")[-1]["sha256"] == statement.bundle
    assert sha256_file(fed.root / "objects" / statement.bundle) == statement.bundle


# --- pulling


def test_a_site_pulls_the_student_over_tls_and_has_the_servers_very_files(fed: Federation) -> None:
    done = typed(site_app, "student", "pull", "--site-dir", fed.root / "site-1")
    assert "ε = " in done.stdout
    assert "δ = 0.001, hospital, replace-one" in done.stdout.replace("unit ", "").replace("relation ", "")
    bundle = fed.root / "site-1" / "student" / "bundle"
    ours = {p.relative_to(bundle): p.read_bytes() for p in bundle.rglob("*") if p.is_file()}
    there = fed.root / "bundle"
    assert ours == {p.relative_to(there): p.read_bytes() for p in there.rglob("*") if p.is_file()}
    again = RUN.invoke(site_app, ["student", "pull", "--site-dir", str(fed.root / "site-1"), "--json"])
    facts = json.loads(again.stdout)
    assert facts["sha256"] in {path.name for path in (fed.root / "objects").iterdir()}
    assert facts["receipts"] > 0


@pytest.mark.parametrize("lie_about", [{"epsilon_exact": 1.0}, {"budget_epsilon": 1.0}, {"delta": 1e-9}])
def test_nothing_is_unpacked_when_a_check_fails(
    fed: Federation,
    statement: StudentStatement,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    lie_about: dict[str, object],
) -> None:
    files = from_archive((fed.root / "objects" / statement.bundle).read_bytes())
    facts = json.loads(files["configs/privacy.json"]) | lie_about
    other = to_archive({**files, "configs/privacy.json": json.dumps(facts).encode()})
    served = {sha256_bytes(other): other}
    lying = replace(statement, bundle=sha256_bytes(other), size=len(other)).signed(fed.signing_key)
    monkeypatch.setattr(PublicObjects, "statement", lambda self, study_id: lying.render())
    monkeypatch.setattr(PublicObjects, "get", lambda self, name, on_bytes: served[name])
    with pytest.raises(InvalidInput, match=r"figures .*signed"):
        pull(fed.root / "site-0", out=tmp_path / "student")
    assert not (tmp_path / "student").exists()
    (tmp_path / "student" / "bundle").mkdir(parents=True)
    (tmp_path / "student" / "bundle" / "thesis.doc").write_text("mine")
    with pytest.raises(InvalidInput, match=str(tmp_path / "student")):
        pull(fed.root / "site-0", out=tmp_path / "student")
    assert (tmp_path / "student" / "bundle" / "thesis.doc").read_text() == "mine"


def test_a_killed_pull_leaves_no_statement_about_another_student_than_the_one_in_the_folder(
    fed: Federation, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A verdict names the student by the statement, and is about the scores of the student in the folder."""
    site_dir = fed.root / "site-1"
    pull(site_dir)

    def killed(path: Path, data: bytes) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("client.teachers.pulled_student.write_atomically", killed)
        with pytest.raises(KeyboardInterrupt):
            pull(site_dir)
    with pytest.raises(InvalidInput, match="student pull"):
        pulled_statement(site_dir)
    pull(site_dir)
    assert pulled_statement(site_dir).study_id == fed.study.id


def test_an_interrupted_pull_goes_on_where_it_stopped(
    fed: Federation, statement: StudentStatement, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetch, "CHUNK_BYTES", 4096)
    counts: list[int] = []

    def stop(count: int) -> None:
        counts.append(count)
        if len(counts) == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        pull(fed.root / "site-2", on_bytes=stop)
    assert not (fed.root / "site-2" / "student").exists()
    pulled = pull(fed.root / "site-2", out=fed.root / "elsewhere", on_bytes=counts.append)
    assert counts[:4] == [4096 * n for n in range(1, 5)]  # nothing was fetched twice
    assert (pulled.bundle / "configs" / "privacy.json").is_file()
    assert counts[-1] == statement.size


def test_a_study_without_a_student_and_an_unknown_certificate_are_said_so(
    fed: Federation, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(fetch, "PAUSE_S", 0)
    objects = PublicObjects(load_site(fed.root / "site-0"))
    with pytest.raises(InvalidInput, match="no student yet"):
        objects.statement("b" * 64)
    stranger = create_authority(tmp_path / "authority").certificate.read_bytes()
    ours = fed.root / "site-0" / "ca.crt"
    kept = ours.read_bytes()
    ours.write_bytes(stranger)
    try:
        with pytest.raises(InvalidInput, match="cannot be fetched"):
            PublicObjects(load_site(fed.root / "site-0")).statement(fed.study.id)
    finally:
        ours.write_bytes(kept)


# --- scoring


def write_cases(root: Path) -> Path:
    cases = []
    for i in range(4):
        label = ball((4, 4, 3 + i % 2), 2.0)
        image = np.random.default_rng(i).normal(label * 2.0, 0.3).astype(np.float32)
        affine = np.diag([1.0, 1.0, 1.0, 1.0])
        (root / "raw").mkdir(parents=True, exist_ok=True)
        paths = [root / "raw" / f"c{i}.nii.gz", root / "raw" / f"c{i}-label.nii.gz"]
        nib.save(nib.Nifti1Image(image, affine), paths[0])
        nib.save(nib.Nifti1Image(label, affine), paths[1])
        cases.append(Case(f"c{i}", *paths))
    write_dataset(root / "set", name="own", labels=("background", "body"), channels=("MRI",), cases=cases)
    (root / "set" / "imagesTr" / "c3.nii.gz").write_bytes(b"broken")
    return root / "set"


@pytest.fixture(autouse=True)
def _undrawn(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Draw pictures only in the test of an evaluation's files, which needs them."""
    if request.function is not test_figures_stay_below_the_sites_directory_for_its_owner_alone_and_nothing_is_sent:
        leave_undrawn(monkeypatch)


@pytest.fixture
def pulled(fed: Federation) -> Path:
    pull(fed.root / "site-0")
    return fed.root / "site-0"


def test_scores_are_those_of_the_labels_and_a_bad_case_is_counted(
    fed: Federation, pulled: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from client.teachers import evaluation

    data = write_cases(tmp_path)
    fixed = np.zeros((2, 8, 8, 8), dtype=np.float32)
    fixed[1] = ball((4, 4, 4), 2.0)
    fixed[0] = 1 - fixed[1]
    monkeypatch.setattr(evaluation, "predict", lambda network, image, patch=(): fixed)
    result, folder = evaluate(pulled, now=datetime(2026, 1, 2, tzinfo=UTC), data=data)
    for i, score in enumerate(result.scores):
        truth = ball((4, 4, 3 + i % 2), 2.0)
        assert score.dice == pytest.approx(dice_per_class(fixed[1].astype(np.uint8), truth, 2))
        expected = hd95_mm(fixed[1].astype(np.uint8), truth, 2, spacing_mm=(1, 1, 1))
        assert score.hd95_mm == pytest.approx(expected)
        assert score.mean_dice == (1.0 if i == 1 else pytest.approx(2 * (fixed[1] * truth).sum() / (2 * truth.sum())))
    assert [problem.case for problem in result.problems] == ["c3"]
    written = json.loads((folder / "evaluation.json").read_text())
    assert written["all"]["cases"] == 3
    assert written["all"]["mean_dice"] == pytest.approx(np.mean([s.mean_dice for s in result.scores]), abs=1e-5)
    assert (folder / "cases.csv").read_text().splitlines()[2].startswith("c1,not used,1,")
    sure = sum(
        (reliability(fixed, ball((4, 4, 3 + i % 2), 2.0)) for i in range(3)),
        NOTHING,
    )
    assert written["calibration"]["the student"]["ece"] == pytest.approx(sure.error, abs=1e-5)
    assert sure.error > 0.05  # two of three balls lie elsewhere


def test_native_scores_are_on_each_files_own_voxels_in_its_own_millimetres(
    fed: Federation, pulled: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The grid cuts the volume of 12³ voxels. A structure outside counts as missed natively and is absent on
    the grid.
    """
    truth = np.zeros((12, 12, 12), dtype=np.uint8)
    truth[2:6, 4:8, 4:8] = 1
    truth[0:2, 5:7, 5:7] = 1  # off the grid, which holds voxels 2 to 9
    image = np.random.default_rng(1).normal(truth * 2.0, 0.3).astype(np.float32)
    (tmp_path / "raw").mkdir()
    paths = [tmp_path / "raw" / "c.nii.gz", tmp_path / "raw" / "c-label.nii.gz"]
    for path, array in zip(paths, (image, truth), strict=True):
        nib.save(nib.Nifti1Image(array, np.eye(4)), path)
    case = Case("c", *paths)
    write_dataset(tmp_path / "set", name="own", labels=("background", "body"), channels=("MRI",), cases=[case])
    seen = truth[2:10, 2:10, 2:10].astype(np.float32)
    for module in ("client.teachers.evaluation", "common.models.native"):
        monkeypatch.setattr(f"{module}.predict", lambda network, image, patch=(): np.stack([1 - seen, seen]))
    given = {"now": datetime(2026, 2, 2, tzinfo=UTC), "data": tmp_path / "set"}
    (on_grid,) = evaluate(pulled, **given)[0].scores
    native, folder = evaluate(pulled, **given | {"now": datetime(2026, 2, 3, tzinfo=UTC)}, native=True)
    assert on_grid.dice == (1.0,)
    inside, everything = int(seen.sum()), int(truth.sum())
    assert native.scores[0].dice == pytest.approx((2 * inside / (inside + everything),))
    expected = hd95_mm(np.pad(seen.astype(np.uint8), 2), truth, 2, spacing_mm=(1, 1, 1))
    assert native.scores[0].hd95_mm == pytest.approx(expected)
    assert json.loads((folder / "evaluation.json").read_text())["scored_on"].endswith("own voxels")


def test_figures_stay_below_the_sites_directory_for_its_owner_alone_and_nothing_is_sent(
    fed: Federation, pulled: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("a connection was tried")

    for name in ("connect", "connect_ex", "sendto", "bind"):
        monkeypatch.setattr(socket.socket, name, refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    arguments = ["evaluate", "--site-dir", str(pulled), "--data", str(write_cases(tmp_path))]
    done = typed(site_app, *arguments)
    assert "1 case left out" in done.stdout
    (folder,) = (path for path in (pulled / "evaluation").iterdir() if str(path) in done.stdout)
    files = {path.name for path in folder.iterdir()}
    assert files == {"evaluation.html", "evaluation.json", "cases.csv", "best.png", "worst.png", "reliability.png"}
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert {stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()} == {0o600}


# --- worse than public data


def maps_of(body: np.ndarray) -> np.ndarray:
    body = body.astype(np.float32)
    return np.stack([1 - body, body])


def answering(monkeypatch: pytest.MonkeyPatch, *, student: np.ndarray, start: np.ndarray) -> None:
    """Replace the trained networks by ones that find these maps in every volume."""
    monkeypatch.setattr("client.teachers.evaluation.predict", lambda network, image, patch=(): maps_of(student))
    monkeypatch.setattr("client.teachers.comparison.predict", lambda network, image, patch=(): maps_of(start))


@pytest.fixture
def begun(pulled: Path) -> Iterator[Path]:
    """Return a site whose kit held a public start."""
    save_weights(pulled / "start.pt", build_unet((4, 8), in_channels=1, out_channels=2, seed=9))
    yield pulled
    (pulled / "start.pt").unlink()


def evaluated(site_dir: Path, data: Path, *options: str) -> tuple[int, str]:
    done = RUN.invoke(site_app, ["evaluate", "--site-dir", str(site_dir), "--data", str(data), *options])
    return done.exit_code, done.stdout


@pytest.mark.parametrize("native", [False, True])
def test_terminal_page_and_json_report_a_student_that_lost_a_structure(
    begun: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, native: bool
) -> None:
    nothing = np.zeros((8, 8, 8))
    answering(monkeypatch, student=nothing, start=ball((4, 4, 4), 2.0))
    data, options = write_cases(tmp_path), ["--native"] if native else []
    code, text = evaluated(begun, data, *options)
    assert code == 0
    assert re.search("body: GONE: .* 3 of 3 cases", text)
    assert re.search(r"in 3 of .* in 0\b", text)
    assert "speak against" in text
    code, text = evaluated(begun, data, "--strict", "--json", *options)
    assert code == 10
    facts = json.loads(text)
    worst = next(row for row in facts["comparisons"] if row["structure"] == "body")
    truths = [ball((4, 4, 3 + i % 2), 2.0) for i in range(3)]
    by_hand = [2 * (ball((4, 4, 4), 2.0) & truth).sum() / (2 * truth.sum()) for truth in truths]
    assert (worst["student"], worst["missed"], worst["reference_missed"]) == (0, 3, 0)
    assert worst["other"] == pytest.approx(np.mean(by_hand), abs=1e-5)
    assert facts["alarms"]
    page = (Path(facts["folder"]) / "evaluation.html").read_text()
    assert "body: GONE" in page
    assert "<script" not in page
    assert "http" not in page


def test_a_student_that_beats_the_public_start_raises_no_alarm_and_strict_ends_with_nought(
    begun: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answering(monkeypatch, student=ball((4, 4, 3), 2.0), start=ball((6, 6, 6), 2.0))
    code, text = evaluated(begun, write_cases(tmp_path), "--strict")
    assert code == 0
    assert re.search(r"Verdict: better \(.*the public start\)", text)
    assert "Gain proven" in text
    assert "speak against" not in text


def test_a_start_that_cannot_be_read_is_reported_and_stops_no_evaluation(
    begun: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (begun / "start.pt").write_bytes(b"not weights")
    answering(monkeypatch, student=ball((4, 4, 4), 2.0), start=ball((4, 4, 4), 2.0))
    data = write_cases(tmp_path)
    code, text = evaluated(begun, data, "--strict")
    assert code == 0
    assert "not compared with" in text
    assert "cannot be compared" in text
    answering(monkeypatch, student=np.zeros((8, 8, 8)), start=ball((4, 4, 4), 2.0))
    assert evaluated(begun, data, "--strict")[0] == 10


def test_without_a_public_start_the_codecs_mean_shape_is_what_the_student_must_beat(
    fed: Federation, pulled: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The codec decodes a zero code to the mean of its public maps. The test computes this shape's Dice itself."""
    data = write_cases(tmp_path)
    code, text = evaluated(pulled, data)
    assert code == 0
    assert re.search("not compared with the public mean shape: .*codec", text)
    ObjectStore(pulled / "cache").put(fed.codec.to_bytes())
    monkeypatch.setattr(
        "client.teachers.evaluation.predict", lambda network, image, patch=(): maps_of(np.zeros((8, 8, 8)))
    )
    code, text = evaluated(pulled, data, "--strict", "--json")
    shape = fed.codec.decode(np.zeros(fed.codec.dimension), noise_std=0.0).argmax(axis=0)
    truths = [ball((4, 4, 3 + i % 2), 2.0) for i in range(3)]
    by_hand = np.mean([2 * (shape & truth).sum() / (shape.sum() + truth.sum()) for truth in truths])
    row = next(row for row in json.loads(text)["comparisons"] if row["structure"] == "body")
    assert row["reference"] == MEAN_SHAPE
    assert row["other"] == pytest.approx(by_hand, abs=1e-5)
    assert code == 10


def own_teachers(monkeypatch: pytest.MonkeyPatch, *maps: np.ndarray | None) -> None:
    """Let this site's own teachers find these maps in every image; None stands for a voter without a teacher."""
    from client.teachers import comparison

    class Fake:
        models = tuple(None if one is None else object() for one in maps)

        @staticmethod
        def load(directory: Path, *, data: object) -> Fake:
            return Fake()

        def predict(self, image: np.ndarray) -> list[np.ndarray | None]:
            return list(maps)

    monkeypatch.setattr(comparison, "Teachers", Fake)


def test_teachers_are_compared_on_cases_that_none_of_them_was_trained_on(
    pulled: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from client.teachers import evaluation

    own_teachers(monkeypatch, maps_of(ball((4, 4, 4), 2.0)), None)
    monkeypatch.setattr(evaluation, "parts_of", lambda site, dataset: {"c0": ("trained on", 0), "c1": ("held out", 0)})
    (pulled / "data").symlink_to(write_cases(tmp_path))
    try:
        facts = evaluate(pulled, now=datetime(2026, 3, 3, tzinfo=UTC))[0].to_json()
    finally:
        (pulled / "data").unlink()
    row = next(row for row in facts["comparisons"] if row["reference"] == "this site's own teachers")
    assert row["cases"] == 2  # c1 and c2, not c0


def test_a_case_that_trained_one_voter_is_compared_with_the_others_and_worse_than_them_is_not_green(
    pulled: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from client.teachers import evaluation

    truths = [ball((4, 4, 3 + i % 2), 2.0) for i in range(3)]
    by_heart, by_merit = 3 * maps_of(ball((1, 1, 1), 1.0)), maps_of(truths[0])
    own_teachers(monkeypatch, by_heart, by_merit)
    monkeypatch.setattr(
        evaluation, "parts_of", lambda site, dataset: dict.fromkeys(["c0", "c1", "c2"], ("trained on", 0))
    )
    monkeypatch.setattr(evaluation, "predict", lambda network, image, patch=(): maps_of(ball((6, 4, 3), 2.0)))
    (pulled / "data").symlink_to(write_cases(tmp_path))
    try:
        result, folder = evaluate(pulled, now=datetime(2026, 3, 4, tzinfo=UTC))
    finally:
        (pulled / "data").unlink()
    row = next(row for row in result.comparisons if not row.public and row.structure == "all structures")
    by_hand = [2 * (truths[0] & truth).sum() / (truths[0].sum() + truth.sum()) for truth in truths]
    assert (row.measured.cases, row.measured.other) == (3, pytest.approx(np.mean(by_hand)))
    assert row.measured.word == "worse"
    page = (folder / "evaluation.html").read_text()
    assert re.search("Worse than .*own teachers", page.split("<h2>Comparisons")[0])
    assert 'class="ok"' not in page
    for text in (html.unescape(page), table(result)):
        assert "speak against" not in text, "only public data decides the verdict"
        assert OWN_BETTER in text
    assert re.search("Worse than .*own teachers", table(result))
    assert result.alarms == ()  # a verdict for the consortium compares with public data only


@pytest.fixture
def swapped(pulled: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Make cases whose labels are not the balls that teachers and public start predict."""
    own_teachers(monkeypatch, *[maps_of(ball((4, 4, 3), 2.0))] * 2)
    answering(monkeypatch, student=np.zeros((8, 8, 8)), start=ball((4, 4, 4), 2.0))
    save_weights(pulled / "start.pt", build_unet((4, 8), in_channels=1, out_channels=2, seed=9))
    (pulled / "data").symlink_to(write_cases(tmp_path / "home"))
    other = write_cases(tmp_path / "other")
    for path in (other / "labelsTr").iterdir():
        label = nib.load(path)
        flat = np.zeros((8, 8, 8), dtype=np.uint8)
        flat[0, :, 0] = 1
        nib.save(nib.Nifti1Image(flat, label.affine), path)
    yield other
    (pulled / "data").unlink()
    (pulled / "start.pt").unlink()


def test_cases_with_wrong_labels_are_not_blamed_on_other_sites_and_get_no_verdict(
    pulled: Path, swapped: Path, tmp_path: Path
) -> None:
    code, text = evaluated(pulled, swapped, "--strict")
    assert code == 10
    assert text.index("do not fit") < text.index("GONE")
    assert CHECK in text
    assert "dishonest" not in text
    assert "This is expected" not in text
    for option in ("--verdict", "--figures"):
        words = ["evaluate", "--site-dir", str(pulled), "--data", str(swapped), option, str(tmp_path / "said.json")]
        refused = refusal_of(site_app, *words)
        assert "--even-if-unfit" in str(refused)
        assert not (tmp_path / "said.json").exists()
    code, text = evaluated(pulled, swapped, "--json", "--even-if-unfit")
    facts = json.loads(text)
    assert facts["verdict"] == "worse"
    page = html.unescape((Path(facts["folder"]) / "evaluation.html").read_text())
    assert "do not fit" in page
    assert "dishonest" not in page


def test_cases_that_do_not_fit_prove_neither_a_gain_nor_the_opposite(
    pulled: Path, swapped: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The student beats the public start by more than chance, but the labels are wrong."""
    found = ball((4, 4, 3), 2.0)
    found[0, :6, 0] = 1
    answering(monkeypatch, student=found, start=ball((6, 6, 6), 2.0))
    facts = json.loads(evaluated(pulled, swapped, "--json")[1])
    assert facts["fit"]["verdict_refused"]
    assert facts["comparisons"][0]["word"] == "proven"
    text = evaluated(pulled, swapped)[1]
    page = (Path(facts["folder"]) / "evaluation.html").read_text()
    for told in (text, page, *(row["sentence"] for row in facts["comparisons"])):
        assert "Gain" not in told
        assert "Worse than" not in told
    assert f"{facts['comparisons'][0]['student']:.3f}" in text
    assert "<td>proven</td>" not in page
    assert "Gain proven" in evaluated(pulled, swapped, "--even-if-unfit")[1]


def test_an_adapted_network_gets_no_advice_that_is_meant_for_the_student(
    pulled: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own_teachers(monkeypatch, *[maps_of(ball((4, 4, 3), 2.0))] * 2)
    answering(monkeypatch, student=ball((6, 6, 6), 2.0), start=ball((4, 4, 4), 2.0))
    save_weights(pulled / "start.pt", build_unet((4, 8), in_channels=1, out_channels=2, seed=9))
    adapted = tmp_path / "adapted"
    shutil.copytree(pulled / "student" / "bundle", adapted)
    (adapted / "models" / "model.pt").rename(adapted / SEEN_WEIGHTS)
    data = write_cases(tmp_path)
    try:
        text = evaluated(pulled, data, "--model", str(adapted))[1]
        facts = json.loads(evaluated(pulled, data, "--model", str(adapted), "--json")[1])
    finally:
        (pulled / "start.pt").unlink()
    assert facts["own_teachers_better"]
    assert facts["alarms"]
    page = html.unescape((Path(facts["folder"]) / "evaluation.html").read_text())
    for told in (text, page):
        assert OWN_BETTER not in told
        assert "because the student" not in told
        assert "this student" not in told
        assert ADAPTED_OWN_BETTER in told


def test_a_student_that_lost_a_structure_on_good_cases_is_blamed(pulled: Path, swapped: Path, tmp_path: Path) -> None:
    text = evaluated(pulled, write_cases(tmp_path / "good"))[1]
    assert "do not fit" not in text
    assert "dishonest" in text


def test_cases_unlike_the_public_volumes_are_named(pulled: Path, tmp_path: Path) -> None:
    """The study's public volumes are noise; the hospital's cases show balls."""
    text = evaluated(pulled, write_cases(tmp_path))[1]
    assert re.search("3 of 3 cases .*public volume", text)
    assert "  c1: " in text


def test_a_bundle_records_the_mean_size_of_each_structure_in_its_labels(fed: Federation) -> None:
    workspace = Workspace(fed.root)
    assert ranges_seen(workspace).structures_mm3 == ()  # no label is stored yet
    for volume, side in zip(workspace.volumes()[:2], (2, 3), strict=True):
        box = np.zeros(workspace.study().data.grid, dtype=np.float32)
        box[:side, :side, :side] = 1.0
        StoredLabels(workspace.labels_dir, [volume]).store(volume, np.stack([1 - box, box]))
    try:
        assert ranges_seen(workspace).structures_mm3 == (17.5,)  # 8 and 27 voxels of 1 mm³
    finally:
        shutil.rmtree(workspace.labels_dir)


def test_an_adapted_network_is_not_scored_on_the_patients_it_was_trained_on(
    pulled: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from client.teachers import evaluation

    data, adapted = write_cases(tmp_path), tmp_path / "adapted"
    shutil.copytree(pulled / "student" / "bundle", adapted)
    (adapted / "models" / "model.pt").rename(adapted / SEEN_WEIGHTS)
    seen = {"c0", "c2"}
    monkeypatch.setattr(evaluation, "trained_on", lambda books, patients, *, seen: frozenset(patients) & {"c0", "c2"})
    code, text = evaluated(pulled, data, "--model", str(adapted))
    assert code == 0
    assert "not scored: 2 " in text
    facts = json.loads(evaluated(pulled, data, "--model", str(adapted), "--json")[1])
    assert ([case["case"] for case in facts["cases"]], set(facts["trained_on"])) == (["c1"], seen)
    assert "the student" not in facts["calibration"]
    assert "adapted network" in (Path(facts["folder"]) / "evaluation.html").read_text()
    assert [case["case"] for case in json.loads(evaluated(pulled, data, "--json")[1])["cases"]] == ["c0", "c1", "c2"]
    monkeypatch.setattr(evaluation, "trained_on", lambda books, patients, *, seen: frozenset(patients))
    with pytest.raises(InvalidInput, match=r"4 cases.*--data"):
        evaluate(pulled, now=datetime(2026, 5, 1, tzinfo=UTC), data=data, model=adapted)


def test_a_model_of_another_study_or_none_at_all_is_refused(fed: Federation, pulled: Path, tmp_path: Path) -> None:
    now = datetime.now(UTC)
    with pytest.raises(InvalidInput, match="student pull"):
        evaluate(fed.root / "site-2", now=now, data=write_cases(tmp_path))
    other = tmp_path / "bundle"
    for path in (pulled / "student" / "bundle").rglob("*"):
        if path.is_file():
            target = other / path.relative_to(pulled / "student" / "bundle")
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(path.read_bytes())
    metadata = other / "configs" / "metadata.json"
    metadata.write_text(metadata.read_text().replace('"body"', '"heart"'))
    with pytest.raises(InvalidInput, match="'heart'"):
        evaluate(pulled, now=now, data=tmp_path / "set", model=other)
    assert public_hex(fed.signing_key) in (pulled / "site.toml").read_text()
