"""Stores the masked codes that sites signed in sealed sums, as evidence in a dispute.

Each draw, one attempt at a sealed sum, has a folder with one file for each site. The aggregator checks the signatures
and writes the files; `consilium dispute` reads them. To somebody who does not know the masks, masked codes are
uniformly distributed, so a stolen folder reveals no code.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from common.errors import InvalidInput
from common.evidence import DrawEvidence, SiteCodes
from common.objects import write_atomically
from common.peers import Peer, Peers
from server.ledger.server_ledger import Ledger
from server.study.workspace import Workspace


def store_codes(folder: Path, codes: SiteCodes) -> None:
    """Store one site's signed masked codes of a draw.

    Masked codes without evidence must not be added up. Any error of writing is therefore passed on and ends the run.

    Args:
        folder: The study's ``evidence/``.
        codes: The signed masked codes.
    """
    write_atomically(_file(folder, codes.roster, codes.site), codes.render(), mode=0o600)


def evidence_of(workspace: Workspace, draw: str) -> DrawEvidence:
    """Return the server's evidence of one draw, from which an auditor can find out which site spoiled the draw.

    The auditor also needs each site's disclosure, which contains its private mask key for this draw. Only the sites
    themselves can send it.

    Args:
        workspace: The study.
        draw: Id of the draw's roster, or at least its first twelve digits.

    Returns:
        The roster, the queries and the sites' signed masked codes.

    Raises:
        InvalidInput: If there is no such draw, or no site's masked codes for this draw are stored.
    """
    with Ledger.open(workspace.ledger_file) as ledger:
        found = ledger.drawn(workspace.study().id, draw)
    names = [name for name in found.roster.sites if _file(workspace.evidence_dir, found.roster.id, name).exists()]
    kept = [_file(workspace.evidence_dir, found.roster.id, name).read_bytes() for name in names]
    if not kept:
        raise InvalidInput(
            "evidence of this draw (one attempt at a sealed sum)",
            value=draw[:16],
            limit="a draw for which at least one site sent masked codes",
            remedy="choose one from the list that `consilium dispute evidence` prints without an id",
        )
    evidence = DrawEvidence(found.roster, found.queries, tuple(map(SiteCodes.parse, kept)))
    evidence.check()
    return evidence


def peers_of(workspace: Workspace, evidence: DrawEvidence) -> Peers:
    """Return the identity keys of a draw's sites for an auditor, with those of sites that were revoked since.

    Args:
        workspace: The study.
        evidence: The evidence of the draw (attempt at a sealed sum).

    Returns:
        The list of the draw's sites, without sites whose records were deleted.
    """
    known = (site for site in workspace.registered() if site.name in evidence.roster.sites and site.answer_key)
    return Peers.of(evidence.roster.study, (Peer(site.name, site.answer_key) for site in known))


def draws(workspace: Workspace) -> Iterator[str]:
    """Describe each draw of the study in one line; a draw is one attempt at a sealed sum.

    Args:
        workspace: The study's directory.

    Yields:
        A line with the draw's id, its result, and the number of sites whose signed masked codes are stored.
    """
    study = workspace.study()
    with Ledger.open(workspace.ledger_file) as ledger:
        lost = {draw.masks: draw.reason for draw in ledger.ended_without_answer(study.id)}
        for roster, sites in ledger.rosters_drawn(study.id).items():
            kept = sum(_file(workspace.evidence_dir, roster, name).exists() for name in sites)
            yield f"{roster[:16]}  {lost.get(roster, 'answered or open')}  signed codes of {kept} of {len(sites)} sites"


def _file(folder: Path, roster: str, site: str) -> Path:
    return folder / roster / f"{site.replace('/', '%2f')}.json"
