"""Notes in the server's ledger which sites were revoked, so that a restored list of sites brings none of them back.

``provision revoke`` writes the note. A run reads the notes, and first writes those that could not be written before.
The lists of sites are files of the study's directory, each of which may be restored from an older backup. A run is
refused while a list, such as the gateway's, admits a site that the ledger names as revoked.
"""

from __future__ import annotations

import os
import shlex
from contextlib import suppress

from common.config import Study
from common.errors import ConsiliumError, InvalidInput
from common.ledger.records import REVOKED
from common.node_auth import read_admitted
from server.ledger.server_ledger import Ledger
from server.study.create_study import open_ledger
from server.study.workspace import Workspace


def note_revoked(workspace: Workspace, site: str) -> None:
    """Note in the ledger that a site is revoked.

    If the ledger cannot be written, for example because it is an older copy, no error is raised, so the site can still
    be revoked. No run begins on such a ledger, and :func:`check_revoked` writes the note before the next run.

    Args:
        workspace: The study.
        site: The site's name.
    """
    with suppress(ConsiliumError, OSError), open_ledger(workspace) as ledger:
        ledger.note(f"{site}{REVOKED}{workspace.study().id}")


def noted_revoked(workspace: Workspace) -> frozenset[str]:
    """Return the sites that the ledger notes as revoked from the study.

    Args:
        workspace: The study.

    Returns:
        Their names; none if the ledger cannot be read.
    """
    with suppress(ConsiliumError, OSError), Ledger.open(workspace.ledger_file) as ledger:
        return ledger.revoked(workspace.study().id)
    return frozenset()


def check_revoked(workspace: Workspace, ledger: Ledger, study: Study) -> None:
    """Note revocations that the ledger lacks, and refuse a list of sites that is missing or admits a revoked site.

    Args:
        workspace: The study's directory, with the list.
        ledger: The server's ledger, open for writing.
        study: The study.

    Raises:
        InvalidInput: If the list admits a site which the ledger names as revoked, or if the gateway's list is missing.
    """
    for site in sorted(workspace.revoked_names() - ledger.revoked(study.id)):
        ledger.note(f"{site}{REVOKED}{study.id}")
    revoked, listed = ledger.revoked(study.id), {site.name for site in workspace.admitted()}
    if workspace.registered() and (workspace.root / "endpoint.json").exists() and not workspace.nodes_file.exists():
        raise InvalidInput(
            "missing list of admitted sites, without which the gateway lets no site in",
            value=str(workspace.nodes_file),
            limit="the list that `consilium provision approve` wrote",
            remedy="put its newest copy back, or run `consilium provision approve` again with each site's request",
        )
    if os.access(workspace.nodes_file, os.R_OK):  # the gateway's list may be older than the others
        listed |= {node.site for node in read_admitted(workspace.nodes_file)}
    if back := sorted(listed & revoked):
        again = (f"`{shlex.join(['consilium', 'provision', 'revoke', str(workspace.root), name])}`" for name in back)
        raise InvalidInput(
            "sites in the list of admitted sites that were revoked (an older copy of the list was perhaps restored)",
            value=", ".join(back),
            limit="no revoked site",
            remedy=f"revoke again: {'; '.join(again)}",
        )
