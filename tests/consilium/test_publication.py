"""Tests the end of a study: a signed folder to publish, an archive, and the deletion of a leaving hospital's data."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
from scipy.stats import t as student_t

from common.errors import DaemonFailed, InvalidInput
from common.events import read_events
from common.ledger.keys import load_signing_key, public_pem
from common.ledger.records import parse_record
from common.node_auth import AdmittedNode, write_admitted
from common.pki import create_node_keys
from common.plain import RESEARCH_ONLY
from common.supervision import keeping
from consilium.cli.provision import provision_app
from consilium.cli.student import student_app
from consilium.cli.study import study_app
from consilium.reports.model_card import model_card
from consilium.reports.publication import ARCHIVED, archive_study
from server.ledger.server_ledger import Ledger
from server.ledger.verify import verify
from server.operations import provision
from server.operations.leaving import forget
from server.study.status import study_status
from server.study.workspace import Workspace
from tests.commands import typed
from tests.dashboard_study import make_study_directory
from tests.earlier_versions import unpack

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Workspace:
    made = make_study_directory(tmp_path_factory.mktemp("publication"), steps=3, volumes=4)
    made.run()
    return made.workspace


def test_the_student_is_published_with_card_certificate_and_checksums_that_openssl_takes(
    workspace: Workspace, tmp_path: Path
) -> None:
    out = tmp_path / "trial-student"
    typed(student_app, "publish", workspace.root, "--out", out)
    assert {"bundle", "MODEL_CARD.md", "certificate.pdf", "certificate.json", "statement.json"} <= {
        path.name for path in out.iterdir()
    }
    check = ["openssl", "pkeyutl", "-verify", "-rawin", "-pubin", "-inkey", "consortium.pem"]
    signed = [*check, "-sigfile", "SHA256SUMS.sig", "-in", "SHA256SUMS"]
    assert "Verified Successfully" in subprocess.run(signed, cwd=out, capture_output=True, text=True, check=True).stdout
    subprocess.run(["sha256sum", "--check", "--quiet", "SHA256SUMS"], cwd=out, check=True, capture_output=True)
    listed = {line.split("  ")[1] for line in (out / "SHA256SUMS").read_text().splitlines()[1:]}
    files = {str(path.relative_to(out)) for path in out.rglob("*") if path.is_file()}
    assert listed == files - {"SHA256SUMS", "SHA256SUMS.sig"}
    secrets = [path.read_bytes() for path in (workspace.root / "keys").glob("*.key")]
    assert not any(secret in (out / name).read_bytes() for secret in secrets for name in files)
    with pytest.raises(InvalidInput, match=f"{out}.*--out"):
        typed(student_app, "publish", workspace.root, "--out", out)


@pytest.mark.parametrize("how", ["edited", "gone"])
def test_no_student_is_published_but_the_signed_one(workspace: Workspace, tmp_path: Path, how: str) -> None:
    """Hospitals gave their verdicts on the signed student. The bundle's folder may hold another student."""
    study = Workspace(tmp_path / "study")
    shutil.copytree(workspace.root, study.root)
    for path in [path for path in sorted(study.bundle_dir.rglob("*")) if path.is_file()]:
        content = path.read_bytes()
        if how == "gone":
            path.unlink()
        else:
            path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
        with pytest.raises(InvalidInput, match=re.escape(str(path)) + r".*consilium student export") as refused:
            typed(student_app, "publish", study.root, "--out", tmp_path / "out")
        assert "signed student" in str(refused.value)
        path.write_bytes(content)
    assert not (tmp_path / "out").exists()


def test_the_model_card_states_purpose_quality_limits_and_unknowns(workspace: Workspace, tmp_path: Path) -> None:
    """The card shows the figures computed from the stored scores. Without scores it says that there are none."""
    study = workspace.study()
    typed(student_app, "publish", workspace.root, "--out", tmp_path / "without")
    card = (tmp_path / "without" / "MODEL_CARD.md").read_text()
    assert "were not measured" in card
    dice, far = [[0.8, 0.5], [0.6, None], [0.7, 0.3]], [[1.0, 2.0], [2.0, None], [3.0, 4.0]]
    record = {"schema": 1, "student_cases": {"dice": dice, "hd95_mm": far, "ece": 0.0625}}
    workspace.scores_file.write_text(json.dumps(record))
    try:
        card = model_card(workspace)
    finally:
        workspace.scores_file.unlink()
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in card.splitlines() if line.startswith("| ")]
    first, second = (next(row for row in rows if row[0] == name) for name in study.data.structures)
    half = {n: float(student_t.ppf(0.975, n - 1)) / n**0.5 for n in (2, 3)}
    assert first[1:] == [f"0.700 ± {0.1 * half[3]:.3f}", "0.600", f"2.0 ± {half[3]:.1f}", "3"]
    assert second[1:] == [f"0.400 ± {2**-0.5 * 0.2 * half[2]:.3f}", "0.300", f"3.0 ± {2**0.5 * half[2]:.1f}", "2"]
    assert re.search("worst of 3 cases .*0.500", card)
    assert "0.062" in card or "0.063" in card
    headings = ["Intended use", "How good it is", "As hospitals measured it", "Limits", "Not known", "Use"]
    places = [card.index(f"\n## {name}\n") for name in (*headings, "What it reveals about patients")]
    assert places == sorted(places)
    for said in (RESEARCH_ONLY, "--centre", "consilium predict --dicom", "Scanners", "monai.bundle run", "δ"):
        assert said in card
    box = " × ".join(f"{n * s:.0f}" for n, s in zip(study.data.grid, study.data.spacing_mm, strict=True))
    assert f"one box of {box} mm" in card


def test_an_archive_verifies_makes_the_certificate_again_and_holds_no_key(workspace: Workspace, tmp_path: Path) -> None:
    out = tmp_path / "trial.tar.gz"
    said = typed(study_app, "archive", workspace.root, "--out", out).stdout
    assert "keep keys/ elsewhere" in said
    assert out.stat().st_mode & 0o777 == 0o600
    with tarfile.open(out) as tar:
        unpack(tar, tmp_path)
    kept = Workspace(tmp_path / workspace.root.name)
    assert verify(kept.ledger_file).ok
    with Ledger.open(kept.ledger_file) as copy, Ledger.open(workspace.ledger_file) as ledger:
        assert copy.head() == ledger.head()
    secrets = [path.read_bytes() for path in (workspace.root / "keys").glob("*.key")]
    assert secrets
    for path in (path for path in kept.root.rglob("*") if path.is_file()):
        assert not any(secret in path.read_bytes() for secret in secrets), path
    assert (kept.bundle_dir / "models" / "model.pt").exists()
    with workspace.locked(), pytest.raises(Exception, match="already active"):
        typed(study_app, "archive", workspace.root, "--out", tmp_path / "second.tar.gz")


def test_archiving_loads_no_torch(workspace: Workspace, tmp_path: Path) -> None:
    words = ["consilium", "study", "archive", str(workspace.root), "--out", str(tmp_path / "trial.tar.gz")]
    code = (
        f"import sys; from consilium.cli.main import main\nsys.argv = {words}\n"
        "try: main()\nfinally: print({'torch', 'monai'} & set(sys.modules))"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=600, check=True)
    assert found.stdout.splitlines()[-1] == "set()"


def test_every_changed_or_missing_file_of_an_unpacked_archive_is_noticed_and_only_the_consortium_can_sign_another_list(
    workspace: Workspace, tmp_path: Path
) -> None:
    """The ledger protects only its own rows. The signed list protects `report.json`, `events.jsonl` and all other
    files.
    """
    typed(study_app, "archive", workspace.root, "--out", tmp_path / "trial.tar.gz")
    with tarfile.open(tmp_path / "trial.tar.gz") as tar:
        unpack(tar, tmp_path)
    root = tmp_path / workspace.root.name
    assert verify(root / "ledger.sqlite").ok

    def holds(*command: str) -> bool:
        return subprocess.run(command, cwd=root, capture_output=True).returncode == 0

    check = ("sha256sum", "--check", "--strict", "--quiet", "SHA256SUMS")
    assert holds(*check)
    files = {path for path in root.rglob("*") if path.is_file()} - {root / "SHA256SUMS", root / "SHA256SUMS.sig"}
    assert len(files) > 10
    for path in files:
        content = path.read_bytes()
        path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]) if content else b"\n")
        assert not holds(*check), path
        path.unlink()
        assert not holds(*check), path
        path.write_bytes(content)
    assert holds(*check)
    (tmp_path / "consortium.pem").write_bytes(public_pem(load_signing_key(workspace.signing_key_file)))
    signed = ("openssl", "pkeyutl", "-verify", "-rawin", "-pubin", "-inkey", "../consortium.pem")
    signed = (*signed, "-sigfile", "SHA256SUMS.sig", "-in", "SHA256SUMS")
    assert holds(*signed)
    text = (root / "SHA256SUMS").read_text()
    (root / "SHA256SUMS").write_text(text.replace("events.jsonl", "events.jsonk"))
    assert not holds(*signed)


def test_an_archive_holds_nothing_of_another_study_or_of_a_dashboard_in_the_studys_directory(
    workspace: Workspace, tmp_path: Path
) -> None:
    root = tmp_path / "study"  # with the folders that docs/deployment.md names for containers
    shutil.copytree(workspace.root, root)
    (root / "studies" / "second").mkdir(parents=True)
    shutil.copytree(root / "keys", root / "studies" / "second" / "keys")
    for name in ("studies/second/flower/operator.secret", "dashboard/users.json", "stranger/node", "an-older.tar.gz"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text("a secret")
    out = root / "trial.tar.gz"
    said = typed(study_app, "archive", root, "--out", out).stdout
    left_out = re.search("left out: (.*)", said)[1].split(", ")
    assert {"an-older.tar.gz", "dashboard", "keys", "stranger", "studies"} <= {*left_out}
    with tarfile.open(out) as tar:
        packed = {Path(name).parts[1] for name in tar.getnames()}
    assert packed <= {*ARCHIVED, "ledger.sqlite", "SHA256SUMS", "SHA256SUMS.sig"}
    assert packed >= {"study.toml", "sites.json", "public.json", "codec.json", "objects", "labels", "student", "bundle"}
    assert packed.isdisjoint(left_out)


def test_the_data_of_a_site_that_left_are_deleted_at_the_server_and_the_ledger_verifies(
    tmp_path: Path,
) -> None:
    made = make_study_directory(tmp_path, steps=3, volumes=4)
    made.collect()
    workspace, name = made.workspace, "north"
    keys = create_node_keys(tmp_path / "node")
    public = " ".join(keys.public.read_text().split()[:2])
    workspace.node_keys_dir.mkdir()
    (workspace.node_keys_dir / f"{name}.pub").write_text(f"{public} {name}\n")
    site = next(one for one in workspace.sites() if one.name == name)
    nodes = [AdmittedNode(site=name, key=public, node_id=site.node_id)]
    for other in workspace.sites():
        if other.name != name:
            key = " ".join(create_node_keys(tmp_path / other.name).public.read_text().split()[:2])
            nodes.append(AdmittedNode(site=other.name, key=key, node_id=other.node_id))
    write_admitted(workspace.nodes_file, nodes)
    (workspace.root / "site-reports").mkdir()
    (workspace.root / "site-reports" / f"{name}.json").write_text(json.dumps({"site": name, "cases": 40}))
    (workspace.root / "logs").mkdir(exist_ok=True)
    (workspace.root / "logs" / "core.log").write_text(f"site={name}\n")
    events = list(read_events(workspace.events_file))
    kept = [(event["seq"], event["time"]) for event in events if event.get("site") != name]
    assert len(kept) < len(events)
    before = verify(workspace.ledger_file)

    with pytest.raises(InvalidInput, match="still admitted"):
        forget(workspace, name)
    provision.revoke(workspace, name, unregister=lambda _node: None)
    head = study_status(workspace).ledger_head  # with the note of the revocation
    with keeping(workspace.root / "logs"), pytest.raises(DaemonFailed, match="`server up`"):
        forget(workspace, name)
    said = typed(provision_app, "forget", workspace.root, name).stdout
    assert "GDPR" in said

    holding = {
        path.relative_to(workspace.root).name
        for path in workspace.root.rglob("*")
        if path.is_file() and (name.encode() in path.read_bytes() or public.split()[1].encode() in path.read_bytes())
    }
    assert holding <= {"ledger.sqlite", "ledger.sqlite-wal", "ledger.standing", "left.json"}
    after = verify(workspace.ledger_file)
    assert before.ok
    assert after.ok
    status = study_status(workspace)
    assert status.ledger_head == head
    events = list(read_events(workspace.events_file))
    assert [(event["seq"], event["time"]) for event in events] == kept
    with Ledger.open(workspace.ledger_file) as ledger:
        named = sum(name in str(parse_record("server", row.kind, row.body)) for row in ledger.rows())
    assert f"stays ({named} rows" in said
    assert named > 0

    made.run("2")  # the study goes on without it
    assert (workspace.bundle_dir / "configs" / "metadata.json").exists()


def test_an_archive_that_finds_no_room_names_the_folder_and_leaves_nothing_in_it(
    workspace: Workspace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        patched.setattr("tarfile.TarFile.add", full)
        with pytest.raises(OSError, match=f"No space left on device: '{tmp_path}'$"):
            archive_study(workspace, tmp_path / "trial.tar.gz")
    assert not list(tmp_path.iterdir())
    archive_study(workspace, tmp_path / "trial.tar.gz")
