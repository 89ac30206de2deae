"""Reads which witnesses countersigned a ledger. Their keys come from a study's or a site's directory."""

from __future__ import annotations

from pathlib import Path

from client.ledger.site_ledger import SiteLedger
from common.errors import ConsiliumError
from common.ledger.records import parse_body
from common.witness.memory import FOLDER, SHOWN, HeadMemory, blinded
from common.witness.notes import origin_of
from common.witness.verify import Countersigned, countersigned
from server.ledger.server_ledger import Ledger
from server.study.workspace import Workspace


def witnesses_of(ledger: Path, *, role: str) -> Countersigned | None:
    """Read the countersignatures beside a ledger's file.

    At the server the witnesses are the registered sites; at a site they are the peers confirmed there.

    Args:
        ledger: The ledger's file.
        role: ``server`` or ``site``.

    Returns:
        The countersignatures; None if the ledger cannot be read. `verify` reports that error.
    """
    try:
        opened: Ledger | SiteLedger = Ledger.open(ledger) if role == "server" else SiteLedger.read(ledger)
        with opened:
            signers, studies = list[str](), list[str]()
            for row in opened.rows():
                if row.kind in ("genesis", "key"):
                    signers.append(str(parse_body(row.body)["public_key"]))
                elif row.kind == "study":
                    studies.append(str(parse_body(row.body)["study_id"]))
            if isinstance(opened, SiteLedger):
                keys = {site: key for study in studies for site, key in opened.peers(study).items()}
            else:
                keys = _sites(ledger.parent)
            head, leaves = opened.head(), opened.row_hashes(kinds=SHOWN if role == "site" else ())
        if role == "site":
            leaves = blinded(leaves, ledger.parent / FOLDER)
        return countersigned(ledger.parent, head, leaves, signers=signers, witnesses=keys)
    except (ConsiliumError, KeyError):
        return None


def _sites(folder: Path) -> dict[str, str]:
    workspace = Workspace(folder)
    try:
        return {site.name: site.answer_key for site in workspace.sites() if site.answer_key}
    except ConsiliumError:
        return {}


def forget_head(ledger: Path) -> None:
    """Delete the countersigned head after a recovery, because the restored ledger lacks the row that the head signs.

    Args:
        ledger: The server's ledger file.
    """
    with Ledger.open(ledger) as opened:
        HeadMemory(ledger.parent / FOLDER).forget(origin_of("server", opened.ledger_id))
