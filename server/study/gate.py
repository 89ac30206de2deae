"""Collects the verdicts that hospitals signed, and decides whether a student may be released.

A *verdict* is one signed word of a hospital: whether the student is better, not better or worse, on the hospital's own
cases, than a network trained on public data alone. A study has a *gate* if its terms require verdicts. Sites may then
fetch the exported student only for evaluation until enough of them have found it better. This module refuses a verdict
on another student or by a site that is not admitted, one with a time in the future, and an older verdict in place of a
newer one. Verdicts of revoked sites do not count.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from common.bundle_archive import from_archive
from common.clock import CLOCKS_DIFFER, Clock, utc_now
from common.errors import ConsiliumError, InvalidInput
from common.ledger.keys import load_signing_key
from common.ledger.rows import format_time
from common.objects import write_atomically
from common.site_verdict import GateState, SiteVerdict, StatementOnStudent, genuine
from common.student_statement import StudentStatement
from server.public.public_files import STUDENTS, said_file
from server.study.workspace import Workspace

S = TypeVar("S", bound=StatementOnStudent)


def verdicts_on(workspace: Workspace, bundle: str) -> tuple[SiteVerdict, ...] | None:
    """Return every stored verdict of an admitted site on a student; None if the study has no gate.

    Args:
        workspace: The study.
        bundle: SHA-256 of the student's archive.

    Returns:
        The verdicts whose signatures are valid.
    """
    study = workspace.study()
    if not study.gate.verdicts:
        return None
    kept = read_kept(workspace.verdicts_dir, SiteVerdict)
    return genuine(kept, site_keys(workspace), study=study, bundle=bundle)


def read_kept(folder: Path, kind: type[S]) -> Iterator[S]:
    """Yield the statements that :func:`keep_newest` stored in a folder; the caller must verify their signatures.

    Args:
        folder: The folder.
        kind: Type of the statements.

    Yields:
        Each statement; a file that cannot be read or parsed is skipped.
    """
    for path in sorted(folder.glob("*.json")):
        try:
            yield kind.parse(path.read_bytes())
        except (OSError, InvalidInput):
            continue  # damaged on disk: it counts again once the site sends it again


def gate_state(workspace: Workspace) -> GateState:
    """Return the hospitals' verdicts on the exported student.

    Args:
        workspace: The study's directory.

    Returns:
        The number of verdicts needed, and the verdicts; no verdicts if no student is exported.
    """
    study, statement = workspace.study(), statement_of(workspace)
    found = () if statement is None else verdicts_on(workspace, statement.bundle) or ()
    sites = max(len(site_keys(workspace)), study.privacy.quorum)  # a further site may still be admitted
    return GateState(study.gate.verdicts, found, sites)


def shown_gate(workspace: Workspace) -> GateState:
    """Return the hospitals' verdicts for display. If they cannot be read, return a state without verdicts, whereas
    :func:`gate_state` raises an error.

    Args:
        workspace: The study's directory.

    Returns:
        The number of verdicts needed, and the verdicts.
    """
    try:
        return gate_state(workspace)
    except (ConsiliumError, OSError):
        return GateState(needed := workspace.study().gate.verdicts, (), sites=needed)


def shut_line(workspace: Workspace) -> str:
    """Return a line with the verdicts on an exported student that is not released yet.

    Args:
        workspace: The study's directory.

    Returns:
        ``gate:`` and :attr:`~common.site_verdict.GateState.sentence`; empty if no student is exported yet, or if the
        student is released.
    """
    if not workspace.bundle_dir.exists() or (state := shown_gate(workspace)).released:
        return ""
    return f"gate: {state.sentence}"


def take_verdict(workspace: Workspace, data: bytes, *, clock: Clock = utc_now) -> SiteVerdict:
    """Check a hospital's verdict on the exported student and store it.

    Args:
        workspace: The study.
        data: The signed verdict.
        clock: Returns the current time.

    Returns:
        The verdict.

    Raises:
        InvalidInput: If the verdict is on another student, lacks the valid signature of an admitted site, has a time in
            the future, or is older than the site's stored verdict; or if the study has no exported student or no gate.
    """
    if not workspace.study().gate.verdicts:
        raise InvalidInput("gate.verdicts", value=0, limit="1 or more in study.toml: this study asks for no verdict")
    return take_statement(workspace, SiteVerdict, data, folder=workspace.verdicts_dir, clock=clock)


def take_statement(workspace: Workspace, kind: type[S], data: bytes, *, folder: Path, clock: Clock = utc_now) -> S:
    """Check a hospital's signed statement on the exported student and store it.

    Args:
        workspace: The study.
        kind: Type of the statement.
        data: The statement.
        folder: Folder of the stored statements of this type.
        clock: Returns the current time.

    Returns:
        The statement.

    Raises:
        InvalidInput: If no student is exported, :meth:`~common.site_verdict.StatementOnStudent.check_signed` refuses
            the statement, or it has a time in the future or is older than the site's stored one.
    """
    statement = statement_of(workspace)
    if statement is None:
        raise InvalidInput(
            f"student of the {kind.FILE[0]}",
            value=str(workspace.bundle_dir),
            limit="an exported student",
            remedy="run `consilium student export`",
        )
    said = kind.parse(data)
    said.check_signed(site_keys(workspace), study=workspace.study(), bundle=statement.bundle)
    keep_newest(folder, said, clock=clock)
    return said


def keep_newest(folder: Path, said: StatementOnStudent, *, clock: Clock) -> None:
    """Store a site's signed statement in the site's file, unless a newer one is stored there.

    A stored statement with a time in the future does not count as newer. Otherwise it would block the site's new
    statements until that time.

    Args:
        folder: The folder.
        said: The statement.
        clock: Returns the current time.

    Raises:
        InvalidInput: If the statement's time is later than now by more than
            :data:`~common.clock.CLOCKS_DIFFER`, or if a newer statement of the site about the same student is stored.
    """
    now, (what, _) = clock(), said.FILE
    latest = format_time(now + CLOCKS_DIFFER)
    if said.time_utc > latest:
        raise InvalidInput(
            f"time of the {what} of {said.site}",
            value=said.time_utc,
            limit=f"no later than now, {format_time(now)}",
            remedy="set the clock of the machine that is wrong, this one or the site's; the site then runs `consilium "
            "site evaluate` again",
        )
    path = folder / f"{said.site.replace('/', '%2f')}.json"
    if path.exists():
        try:
            kept = type(said).parse(path.read_bytes())
        except InvalidInput:
            kept = None
        if kept is not None and kept.bundle == said.bundle and said.time_utc < kept.time_utc <= latest:
            raise InvalidInput(
                f"{what} of {said.site}",
                value=said.time_utc,
                limit=f"{what} signed after {kept.time_utc}, when the stored file was signed",
                remedy=f"keep the stored file, or give the newest {what} of this site",
            )
    write_atomically(path, said.render())


def signed_files(workspace: Workspace, statement: StudentStatement) -> dict[str, bytes]:
    """Return the files of the signed student, to which the hospitals' verdicts belong.

    Args:
        workspace: The study's directory.
        statement: The published statement about the student.

    Returns:
        File contents by path in the bundle.

    Raises:
        InvalidInput: If a file of the exported bundle differs from the signed file. This happens if the export of
            another student was killed.
    """
    signed = from_archive(workspace.objects.get(statement.bundle))
    for name, content in signed.items():
        path = workspace.bundle_dir / name
        if not path.is_file() or path.read_bytes() != content:
            raise InvalidInput(
                "file of the exported student differs from the signed student",
                value=str(path),
                remedy="run `consilium student export`; a study with a gate then needs the hospitals' verdicts on "
                "the new export",
            )
    return signed


def statement_of(workspace: Workspace) -> StudentStatement | None:
    """Return the published statement about the exported student.

    Args:
        workspace: The study's directory.

    Returns:
        The statement; None before the student is exported.

    Raises:
        InvalidInput: If the stored statement is invalid.
    """
    path = said_file(workspace.objects_dir, STUDENTS, workspace.study().id)
    return StudentStatement.parse(path.read_bytes()) if path.exists() else None


def publish_verdicts(workspace: Workspace) -> None:
    """Sign and publish the statement about the student again, with the hospitals' newest verdicts on it.

    Nothing is done if the study requires no verdicts, or if no student is published.

    Args:
        workspace: The study, with its signing key.
    """
    standing = statement_of(workspace)
    if workspace.study().gate.verdicts and standing is not None:
        publish_statement(workspace, replace(standing, verdicts=verdicts_on(workspace, standing.bundle), signature=""))


def publish_statement(workspace: Workspace, statement: StudentStatement) -> None:
    """Sign a statement about the student and publish it, unless the published one has the same content.

    Args:
        workspace: The study, with its signing key.
        statement: The statement; a signature on it is replaced.
    """
    path = said_file(workspace.objects_dir, STUDENTS, statement.study_id)
    signed = statement.signed(load_signing_key(workspace.signing_key_file))
    with contextlib.suppress(OSError, InvalidInput):
        standing = StudentStatement.parse(path.read_bytes())
        if replace(signed, created_utc=standing.created_utc, signature="") == replace(standing, signature=""):
            return
    write_atomically(path, signed.render())


def site_keys(workspace: Workspace) -> dict[str, str]:
    """Return the public signing keys of the admitted sites.

    Args:
        workspace: The study's directory.

    Returns:
        Key in hexadecimal by site name, without revoked sites and sites registered without a key.
    """
    sites = workspace.admitted() if workspace.registered() else ()
    return {site.name: site.answer_key for site in sites if site.answer_key}
