"""Notes in the server's ledger which sites were revoked, so that a restored list of sites brings none of them back.

``provision revoke`` writes the note, and a run reads it. The lists of sites are files of the study's directory, which a
backup can make older. A run is refused while a list admits a site that the ledger names as revoked.
"""

from __future__ import annotations

from contextlib import suppress

from common.config import Study
from common.errors import ConsiliumError, InvalidInput
from common.ledger.records import NoteRecord, parse_body
from common.ledger.rows import Row
from server.ledger.server_ledger import Ledger
from server.study.create_study import open_ledger
from server.study.workspace import Workspace

_WORDS = " is revoked in study "


def note_revoked(workspace: Workspace, site: str) -> None:
    """Note in the ledger that a site is revoked.

    A ledger that cannot be written, for example because it is an older copy, prevents no revocation: no run begins on
    it.

    Args:
        workspace: The study.
        site: The site's name.
    """
    with suppress(ConsiliumError, OSError), open_ledger(workspace) as ledger:
        ledger.note(f"{site}{_WORDS}{workspace.study().id}")


def check_revoked(workspace: Workspace, ledger: Ledger, study: Study) -> None:
    """Refuse a list of sites that admits a site which the ledger names as revoked.

    Args:
        workspace: The study's directory, with the list.
        ledger: The server's ledger.
        study: The study.

    Raises:
        InvalidInput: If there is such a site.
    """
    revoked = {revoked_in(row, study.id) for row in ledger.rows()}
    if back := sorted({site.name for site in workspace.admitted()} & revoked):
        raise InvalidInput(
            "sites in the list of admitted sites that were revoked (an older copy of the list was perhaps restored)",
            value=", ".join(back),
            limit="no revoked site",
            remedy="revoke again: "
            + "; ".join(f"`consilium provision revoke {workspace.root} {site}`" for site in back),
        )


def revoked_in(row: Row, study_id: str) -> str | None:
    """Return the name of the site whose revocation a row of the ledger notes.

    Args:
        row: The row.
        study_id: Id of the study from which the site was revoked.

    Returns:
        The name; None if the row notes no such revocation.
    """
    if row.kind != "note":
        return None
    site, _, of = NoteRecord.from_json(parse_body(row.body)).text.partition(_WORDS)
    return site if of == study_id else None
