"""The gate before a student is released: verdicts that hospitals signed, taken in, and what they amount to.

A student whose study asks for verdicts is exported and may be fetched for evaluation, and is not released before enough
hospitals found it better than public data alone. Refuses a verdict on another student, or of a site that is not
admitted, and counts none of a site that was revoked; an older one of a site never takes the place of a newer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

from common.errors import InvalidInput, Refused
from common.objects import write_atomically
from common.site_figures import SiteFigures
from common.site_verdict import SiteVerdict, genuine, in_words, released
from common.student_statement import StudentStatement
from server.public.said import STUDENTS, said_file
from server.study.workspace import Workspace

S = TypeVar("S", SiteVerdict, SiteFigures)


@dataclass(frozen=True, slots=True)
class GateState:
    """How many verdicts a student needs and which it has; ``needed`` is 0 where the study has no gate."""

    needed: int
    verdicts: tuple[SiteVerdict, ...]

    @property
    def released(self) -> bool:
        """Whether the student may be published."""
        return released(self.verdicts, needed=self.needed)

    @property
    def words(self) -> str:
        """The same for a reader; empty without a gate."""
        return in_words(self.verdicts, needed=self.needed) if self.needed else ""


def verdicts_on(workspace: Workspace, bundle: str) -> tuple[SiteVerdict, ...] | None:
    """Every kept verdict of an admitted site on the student with this archive's hash; None without a gate."""
    study = workspace.study()
    if not study.gate.verdicts:
        return None
    keys = site_keys(workspace)
    check = partial(SiteVerdict.check_is_of, keys=keys, study=study.id, bundle=bundle)
    return genuine(read_kept(workspace.verdicts_dir, SiteVerdict.parse), keys, check=check)


def read_kept(folder: Path, parse: Callable[[bytes], S]) -> Iterator[S]:
    """What :func:`keep_newest` kept there and can still be read; nobody is believed by it yet."""
    for path in sorted(folder.glob("*.json")):
        try:
            yield parse(path.read_bytes())
        except (OSError, InvalidInput):
            continue  # damaged on disk: the site has it, and it counts once it is taken in again


def gate_state(workspace: Workspace) -> GateState:
    """How the gate of the exported student stands; nothing is in it before there is one."""
    study, statement = workspace.study(), statement_of(workspace)
    found = () if statement is None else verdicts_on(workspace, statement.bundle) or ()
    return GateState(study.gate.verdicts, found)


def take_verdict(workspace: Workspace, data: bytes) -> SiteVerdict:
    """Check a hospital's verdict on the exported student and keep it.

    Raises:
        InvalidInput: If it is on another student, of no admitted site, older than the one that is kept, or if there is
            no student, or no gate.
    """
    study, statement = workspace.study(), statement_of(workspace)
    if not study.gate.verdicts:
        raise InvalidInput("gate.verdicts", value=0, limit="1 or more in study.toml: this study asks for no verdict")
    if statement is None:
        raise InvalidInput("student to judge", value=str(workspace.bundle_dir), remedy="`consilium student export`")
    verdict = SiteVerdict.parse(data)
    verdict.check_is_of(site_keys(workspace), study=study.id, bundle=statement.bundle)
    keep_newest(workspace.verdicts_dir, verdict, SiteVerdict.parse, what="verdict")
    return verdict


def keep_newest(folder: Path, said: S, parse: Callable[[bytes], S], *, what: str) -> None:
    """Keep what a site said, one file a site; InvalidInput for an older one than is kept of the same student."""
    path = folder / f"{said.site.replace('/', '%2f')}.json"
    if path.exists():
        try:
            kept = parse(path.read_bytes())
        except InvalidInput:
            kept = None
        if kept is not None and kept.bundle == said.bundle and kept.time_utc > said.time_utc:
            raise InvalidInput(
                f"{what} of {said.site}", value=said.time_utc, limit=f"{what} signed after {kept.time_utc}"
            )
    write_atomically(path, said.render())


def check_released(workspace: Workspace) -> None:
    """Refused (``not-released``) while the student's gate is shut."""
    state = gate_state(workspace)
    if not state.released:
        raise Refused(
            "not-released",
            f"{state.words}; to fix: ask hospitals to run `consilium site student pull --to-evaluate` and `consilium "
            "site evaluate --verdict`, then `consilium student verdict`",
        )


def statement_of(workspace: Workspace) -> StudentStatement | None:
    """What is said of the exported student; None before there is one."""
    path = said_file(workspace.objects_dir, STUDENTS, workspace.study().id)
    return StudentStatement.parse(path.read_bytes()) if path.exists() else None


def site_keys(workspace: Workspace) -> dict[str, str]:
    """The key that every admitted site signs with, by its name; none of a site that was revoked."""
    sites = workspace.admitted() if workspace.registered() else ()
    return {site.name: site.answer_key for site in sites if site.answer_key}
