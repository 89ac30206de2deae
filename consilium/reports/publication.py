"""Publishes a finished study: the student in a signed folder, or the whole study in one archive.

The folder contains the student, its model card and the privacy certificate. `consilium student publish` and `consilium
study archive` call it. Both contain signed checksums and no private key. The module refuses a ledger that does not
verify or is an older copy, a study without an exported student, a bundle that is not the signed one or whose stated
guarantee no longer holds, a folder or file that exists, and a study that is still running.
"""

from __future__ import annotations

import shutil
import tarfile
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from common.canonical import sha256_file
from common.errors import InvalidInput, Refused
from common.ledger.keys import load_signing_key, public_pem
from common.objects import naming_full_disk
from common.witness.memory import FOLDER as WITNESSES
from consilium.reports.certificate import Sources, issue_certificate
from server.ledger.backup import backup
from server.protocols.rounds import FRAMES
from server.public.material import START_FILE
from server.study.evaluated import figures_on
from server.study.gate import gate_state, signed_files, statement_of
from server.study.read_facts import facts_of
from server.study.status import bundle_problem
from server.study.workspace import LEFT, PAIRED, REVOKED, VALIDATION, Workspace

HEADER, ARCHIVE_HEADER = "# consilium/student/v1\n", "# consilium/archive/v1\n"
"""First lines of SHA256SUMS of a published student and of an archive. A signature of one of these files is therefore
valid for no other file and for no row of the ledger.
"""

SUMS, SIGNATURE = "SHA256SUMS", "SHA256SUMS.sig"

ARCHIVED = (
    *("study.toml", "sites.json", REVOKED, LEFT, "public.json", PAIRED, VALIDATION, "codec.json", FRAMES, START_FILE),
    *("endpoint.json", "run.json", "events.jsonl", "decisions.jsonl", "spoiled-draw-accepted", "audit.json"),
    *("report.json", "objects", "labels", "student", "bundle", "certificate", "evidence", WITNESSES, "site-reports"),
    *("figures", "verdicts"),
)
"""Files and folders of a study's directory that its archive contains, besides a copy of the ledger. Everything else is
left out: keys, SuperLink's database of messages, and what people put there, such as another study with its keys."""


@dataclass(frozen=True, slots=True)
class Archive:
    """A written archive.

    Attributes:
        path: The file.
        sha256: Its SHA-256.
        files: Number of the study's files in it.
        left_out: Names of the other files and folders of the study's directory, without those of a running study.
    """

    path: Path
    sha256: str
    files: int
    left_out: tuple[str, ...]


def publish_student(workspace: Workspace, out: Path) -> tuple[str, ...]:
    """Write a folder with everything to publish about a student, signed with the ledger's key.

    It contains ``bundle/``, ``MODEL_CARD.md``, certificate, signed statement, scores if there are any,
    ``consortium.pem``, and SHA256SUMS with its signature.

    Args:
        workspace: The study's directory.
        out: The new folder.

    Returns:
        Names of its files.

    Raises:
        InvalidInput: If there is no exported student, its files differ from the student that was signed (to which the
            verdicts belong), its stated guarantee no longer holds, or the folder exists.
        Refused: ``not-released`` if the study's gate has not released the student.
        LedgerCorrupt: If the ledger does not verify.
    """
    from common.models.student_bundle import write_bundle  # torch, which an archive does without
    from consilium.reports.model_card import model_card

    statement = statement_of(workspace)
    if not workspace.bundle_dir.is_dir() or statement is None:
        raise InvalidInput(
            "student to publish",
            value=str(workspace.bundle_dir),
            remedy="export it first with `consilium student export`",
        )
    signed = signed_files(workspace, statement)
    if (problem := bundle_problem(workspace, facts_of(workspace).spending)) is not None:
        raise InvalidInput(f"the student cannot be published yet: {problem}", remedy="publish it again after that")
    if not (state := gate_state(workspace)).released:
        raise Refused("not-released", f"{state.words}; to fix: {state.remedy}")
    if out.exists():
        raise InvalidInput(
            "folder to publish", value=str(out), limit="a folder that does not exist yet", remedy="choose another --out"
        )
    key = load_signing_key(workspace.signing_key_file)
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=f".{out.name}.") as scratch:
        folder = Path(scratch) / "folder"
        write_bundle(folder / "bundle", signed)
        (folder / "MODEL_CARD.md").write_text(model_card(workspace), encoding="utf-8")
        if figures := figures_on(workspace):
            (folder / "figures").mkdir()
            for number, site in enumerate(sorted(figures), start=1):
                (folder / "figures" / f"{number}.json").write_bytes(figures[site].render())
        (folder / "statement.json").write_bytes(statement.render())
        if workspace.scores_file.exists():
            shutil.copy(workspace.scores_file, folder / "scores.json")
        issue_certificate(workspace, folder, Sources())
        (folder / "consortium.pem").write_bytes(public_pem(key))
        names = tuple(sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()))
        _write_sums(folder, HEADER, {name: sha256_file(folder / name) for name in names}, key)
        folder.rename(out)
    return (*names, SUMS, SIGNATURE)


def _write_sums(folder: Path, header: str, hashes: Mapping[str, str], key: Ed25519PrivateKey) -> None:
    """Write SHA256SUMS and its signature, for ``sha256sum --check`` and openssl."""
    sums = header + "".join(f"{hash_}  {name}\n" for name, hash_ in hashes.items())
    (folder / SUMS).write_text(sums, encoding="utf-8")
    (folder / SIGNATURE).write_bytes(key.sign(sums.encode()))


def archive_study(workspace: Workspace, out: Path) -> Archive:
    """Write a study without its keys into an archive, with a verified copy of its ledger.

    From the unpacked archive the ledger can be verified, and labels, student and certificate made again. Nobody can
    release or decrypt with it, because it contains no private key. SHA256SUMS, signed with the ledger's key, names
    every file, so that a changed or missing file is noticed.

    Args:
        workspace: The study's directory.
        out: The new file (``.tar.gz``).

    Returns:
        The archive.

    Raises:
        InvalidInput: If the file exists, its folder does not, or the ledger's key cannot be read.
        LedgerCorrupt: If the ledger does not verify.
    """
    if out.exists() or not out.parent.is_dir():
        raise InvalidInput("archive file", value=str(out), limit="a new file in an existing folder")
    root, ledger, key = workspace.root.absolute(), workspace.ledger_file, load_signing_key(workspace.signing_key_file)
    with (
        workspace.locked(),
        naming_full_disk(out.parent),
        tempfile.TemporaryDirectory(dir=out.parent, prefix=f".{out.name}.") as scratch,
    ):
        copy, made = Path(scratch) / "ledger.sqlite", Path(scratch) / "archive"
        backup(ledger, copy)
        others = {path.name for path in root.iterdir()} - {*ARCHIVED, Path(scratch).name}
        left_out = tuple(sorted(name for name in others if not _of_the_moment(name)))
        paths = [path for kept in ARCHIVED for path in (root / kept, *(root / kept).rglob("*"))]
        names = sorted(path.relative_to(root) for path in paths if path.is_file() and not path.is_symlink())
        hashes = {}
        packed = {**{str(name): root / name for name in names}, copy.name: copy}
        with tarfile.open(made, "w:gz") as tar:
            for name, path in packed.items():
                hashes[name] = sha256_file(path)
                tar.add(path, arcname=f"{root.name}/{name}", recursive=False)
            _write_sums(Path(scratch), ARCHIVE_HEADER, hashes, key)
            for name in (SUMS, SIGNATURE):
                tar.add(Path(scratch) / name, arcname=f"{root.name}/{name}")
        made.chmod(0o600)
        made.rename(out)
    return Archive(out, sha256_file(out), len(names) + 1, left_out)


def _of_the_moment(name: str) -> bool:
    """Return whether a file is of use only to the running study: a lock, a request to stop, the ledger in use (its copy
    is in the archive), or its standing file, which shows whether the ledger is the newest copy."""
    return name.endswith(".lock") or name.startswith("ledger.") or name == "stop-requested"
