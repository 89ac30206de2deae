"""Tests the documents that a hospital files: figures equal the certificate's, blanks are marked, three
formats agree.
"""

from __future__ import annotations

import io
import json
import re
import shutil
from datetime import UTC, datetime
from fractions import Fraction
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from pypdf import PdfReader
from typer.testing import CliRunner

from common.errors import LedgerCorrupt
from common.ledger.charges import ReleaseRecord
from common.ledger.keys import load_signing_key, public_hex
from common.ledger.records import parse_record
from common.privacy.figures import epsilon_text
from common.site_figures import SiteFigures, StructureFigure
from common.site_verdict import SiteVerdict
from consilium.cli.governance import app
from consilium.reports import certificate
from consilium.reports.certificate import certificate_facts
from consilium.reports.governance import papers
from consilium.reports.papers import Blank, Paper, PaperSection
from server.ledger.backup import backup
from server.ledger.server_ledger import Ledger
from server.ledger.verify import VerifyReport
from server.study.workspace import Workspace
from tests.commands import typed
from tests.dashboard_study import Recorded, make_study_directory

pytestmark = pytest.mark.slow

NAMES = ("dpia", "nist-800-226", "registry", "egress", "processing")


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Recorded:
    study = make_study_directory(tmp_path_factory.mktemp("governance"))
    study.collect()
    return study


@pytest.fixture(scope="module")
def made(recorded: Recorded, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("papers")
    typed(app, recorded.workspace.root, "--out", out)
    return out


@pytest.mark.slow
def test_every_paper_is_there_in_three_forms_and_a_person_is_told_how_many_blanks(made: Path) -> None:
    assert {path.name for path in made.iterdir()} == {
        f"{name}.{end}" for name in NAMES for end in ("md", "json", "pdf")
    }
    for name in NAMES:
        paper = json.loads((made / f"{name}.json").read_text())
        text = (made / f"{name}.md").read_text()
        assert len(paper["to_fill_in"]) == text.count("TO FILL IN") >= 1
        said = re.sub(r"\\(.)", r"\1", text)
        for section in paper["sections"]:
            cells = [*section["paragraphs"], *section["points"], *(cell for row in section["rows"] for cell in row)]
            for cell in cells:
                assert " ".join((cell.get("text") or cell["to_fill_in"]).split()) in said


def test_every_paper_is_made_from_the_verified_copy_alone(
    recorded: Recorded, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A row that is added meanwhile appears in none of the documents."""
    shutil.copytree(recorded.workspace.root, tmp_path / "study", symlinks=True)
    workspace = Workspace(tmp_path / "study")
    before = [paper.to_json() for paper in papers(workspace, now=datetime(2026, 1, 1, tzinfo=UTC))]

    def copied(ledger: Path, copy: Path) -> VerifyReport:
        report = backup(ledger, copy)
        ledger.unlink()
        return report

    monkeypatch.setattr(certificate, "backup", copied)
    after = [paper.to_json() for paper in papers(workspace, now=datetime(2026, 1, 1, tzinfo=UTC))]
    assert after == before


def test_every_epsilon_in_a_paper_is_the_certificate_s_with_its_delta_unit_and_relation(
    made: Path, recorded: Recorded
) -> None:
    facts = certificate_facts(recorded.workspace)
    pools = [each for pool in facts["pools"] for each in (pool["study"]["epsilon"], pool["lifetime"]["epsilon"])]
    right = {epsilon_text(value) for value in (facts["guarantee"]["epsilon"], facts["spent"]["epsilon"], *pools)}
    right |= {epsilon_text(pool["cap_epsilon"]) for pool in facts["pools"]}
    right |= set(re.findall(r"ε = ([\d.]+)", " ".join(facts["in_words"])))
    for name in NAMES:
        text = (made / f"{name}.md").read_text()
        for found in re.finditer(r"ε = ([\d.]+\d)([^|\n]{0,160})", text):
            assert found[1] in right, (name, found[0])
            whole = "unit" in found[2] or "δ" in found[2]
            assert whole or f"ε = {found[1]} |" in text or found[0][:40] in " ".join(facts["in_words"])


def test_the_egress_record_has_every_charged_query_of_the_ledger_and_no_other(made: Path, recorded: Recorded) -> None:
    left = json.loads((made / "egress.json").read_text())["facts"]
    with Ledger.open(recorded.workspace.ledger_file) as ledger:
        rows = [row for row in ledger.rows() if row.kind == "release"]
    records = [parse_record("server", row.kind, row.body) for row in rows]
    assert all(isinstance(record, ReleaseRecord) for record in records)
    assert [one["row"] for one in left["left"]] == [row.seq for row in rows]
    assert [one["time_utc"] for one in left["left"]] == [row.time_utc for row in rows]
    assert [one["query"] for one in left["left"]] == [json.loads(row.body)["query_id"] for row in rows]
    charged = sum((Fraction(json.loads(row.body)["event"]["mu_squared"]) for row in rows), Fraction(0))
    assert Fraction(left["mu_squared"]) == charged > 0


def test_what_hospitals_sent_by_consent_stands_in_the_papers(recorded: Recorded, tmp_path: Path) -> None:
    """The assessment and the egress record state that verdict and figures depend on patients' data, without an ε."""
    study = tmp_path / "study"
    shutil.copytree(recorded.workspace.root, study)
    workspace, key = Workspace(study), Ed25519PrivateKey.generate()
    before = {paper.name: paper.facts for paper in papers(workspace)}
    assert before["egress"]["sent_by_consent"] == []
    about = (workspace.study().id, "b" * 64, "north")
    verdict = SiteVerdict(*about, "worse", "2026-03-01T12:00:00.000000Z").signed(key)
    figures = SiteFigures(*about, (StructureFigure("body", 71),), "2026-03-02T12:00:00.000000Z").signed(key)
    for folder, said in ((workspace.verdicts_dir, verdict), (workspace.figures_dir, figures)):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "north.json").write_bytes(said.render())
    after = {paper.name: paper for paper in papers(workspace)}
    assert [(one["kind"], one["site"], one["value"]) for one in after["egress"].facts["sent_by_consent"]] == [
        ("verdict", "north", "worse"),
        ("figures", "north", "mean Dice: body 0.71"),
    ]
    told = json.dumps(after["dpia"].to_json(), ensure_ascii=False)
    assert "1 verdict, 1 figures" in told
    assert "no ε covers it" in told


def test_the_registry_s_entry_leaves_out_what_nobody_said(made: Path) -> None:
    entry = json.loads((made / "registry.json").read_text())["facts"]["entry"]
    assert entry["data_curator"] is entry["intended_use"] is entry["justification"] is None
    assert entry["privacy_loss_epsilon"] > 0
    assert entry["privacy_loss_delta"] > 0


def test_the_pdf_is_tagged_and_archivable_and_says_what_it_is(made: Path) -> None:
    for name in NAMES:
        data = (made / f"{name}.pdf").read_bytes()
        assert data.startswith(b"%PDF-1.7")
        for mark in (
            b"/StructTreeRoot",
            b"/MarkInfo",
            b"/Lang",
            b"pdfaid:part>2<",
            b"pdfaid:conformance>A<",
            b"pdfuaid:part>1<",
        ):
            assert mark in data, (name, mark)


HOSTILE = '#panic("run") <script>x</script> [link](http://x) | *b* `c` \\ $y$ # head\nnext'
HOSTILE += "\x1b[2J\u202e\0\ue000\u6d77\u0378"


def test_a_sentence_that_names_a_hash_is_not_broken_within_words_in_the_pdf() -> None:
    words = f"Anybody who has the ledger of hash {'5a' * 32} can make this document again."
    paper = Paper("x", "x", datetime(2026, 11, 24, tzinfo=UTC), [PaperSection("a", [words])])
    printed = " ".join(page.extract_text() for page in PdfReader(io.BytesIO(paper.pdf())).pages)
    assert set(words.split()) <= set(printed.split())


def test_a_study_s_words_are_text_in_every_form_and_start_nothing(recorded: Recorded) -> None:
    section = PaperSection(HOSTILE, [HOSTILE], [HOSTILE, Blank(HOSTILE)], [(HOSTILE, "b"), (HOSTILE, Blank("c"))])
    paper = Paper("x", HOSTILE, datetime(2026, 11, 24, tzinfo=UTC), [section])
    assert paper.pdf() == paper.pdf()  # typst's #panic would end the making
    lines = paper.markdown().splitlines()
    for line in lines:
        bare = re.sub(r"\\[\\`*_\[\]<>#|]", "", line)
        assert not re.search(r"<script|\]\(|`c`", bare), line
    assert sum(line.startswith("#") for line in lines) == 2
    (row,) = [line for line in lines if line.endswith(r"\[TO FILL IN: c\]** |")]
    assert len(re.findall(r"(?<!\\)\|", row)) == 3
    json.dumps(paper.to_json())


def test_papers_are_made_with_a_key_or_say_that_none_was_given(recorded: Recorded, tmp_path: Path) -> None:
    root = str(recorded.workspace.root)
    key = public_hex(load_signing_key(recorded.workspace.signing_key_file))
    for given, warned in (([], True), (["--public-key", key], False)):
        done = typed(app, root, "--out", tmp_path / str(warned), *given)
        assert ("to fix: give --public-key" in done.stderr) is warned
        for name in NAMES:
            text = " ".join((tmp_path / str(warned) / f"{name}.md").read_text().split())
            assert ("ONLY with the key" in text) is warned, name
    wrong = CliRunner().invoke(app, [root, "--out", str(tmp_path / "wrong"), "--public-key", "a" * 64])
    assert isinstance(wrong.exception, LedgerCorrupt)
    assert not (tmp_path / "wrong").exists()


def test_a_ledger_that_does_not_hold_gets_no_papers(recorded: Recorded, tmp_path: Path) -> None:
    study = tmp_path / "study"
    shutil.copytree(recorded.workspace.root, study)
    data = bytearray((study / "ledger.sqlite").read_bytes())
    at = data.find(b'"pool"')
    data[at + 1 : at + 5] = b"loop"
    (study / "ledger.sqlite").write_bytes(data)
    done = CliRunner().invoke(app, [str(study), "--out", str(tmp_path / "out")])
    assert done.exit_code != 0
    assert not (tmp_path / "out").exists()
