"""Deletes a revoked hospital's data from the server's files, and states which data must stay and why.

`consilium provision forget` calls it. A site that is still admitted is refused. So is every site while a run or the
server's daemons are active, because they could write about the site again. Nothing is deleted from the ledger, because
the other hospitals' receipts refer to its rows.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common.canonical import canonical_text, sha256_bytes
from common.errors import DaemonFailed, InvalidInput
from common.events import rewrite_events
from common.ledger.records import REVOKED
from common.node_auth import read_admitted
from common.pki import read_node_public_key
from common.supervision import keeping
from common.witness.memory import FOLDER as WITNESSES
from common.wording import many
from server.aggregation.witnessing import forget_witness
from server.ledger.server_ledger import Ledger
from server.study.workspace import LEFT, LeftSite, Workspace

STAYS = (
    "its name, its patient pool and what it was charged, in the ledger: other hospitals' receipts contain each row, "
    "and no row contains patient data",
    "the released sums, labels and student: its codes were added to the others' with noise and cannot be taken out; "
    "the guarantee for its patients still holds",
    "its name and the hash of its node key, so that neither is admitted again",
    "its countersignatures in `witnesses/`: they would show that another party's ledger was rolled back",
    "in SuperLink's database the name, number and public key of its node, and encrypted messages, until `flower/` is "
    "deleted with the study",
)


@dataclass(frozen=True, slots=True)
class DeletionResult:
    """The result of deleting a site's data.

    Attributes:
        deleted: One phrase for each thing that was deleted.
        rows: Number of ledger rows that still name the site or its pool.
    """

    deleted: tuple[str, ...]
    rows: int


def forget(workspace: Workspace, name: str) -> DeletionResult:
    """Delete a revoked site's entry, keys, reports, verdict, figures and events, and the logs of all daemons.

    Args:
        workspace: The study's directory.
        name: The site's name.

    Returns:
        What was deleted, and how many ledger rows still name the site.

    Raises:
        InvalidInput: If no site has this name, or if it is still admitted.
        DaemonFailed: If the server's daemons are running.
    """
    workspace.study()  # raises, with a remedy, if the directory holds no study
    site = next((one for one in workspace.registered() if one.name == name), None)
    if site is None:
        raise InvalidInput(
            "no such site", value=name, limit="name of a registered site", remedy="see `consilium provision list`"
        )
    if name in {node.site for node in read_admitted(workspace.nodes_file)}:
        raise InvalidInput(
            "site is still admitted",
            value=name,
            limit="a revoked site",
            remedy=f"revoke {name} first with `consilium provision revoke`",
        )
    folders = (workspace.root / "logs", workspace.flower_dir / "logs")
    try:
        with workspace.locked(), workspace.changing_sites(), keeping(folders[0]), keeping(folders[1]):
            deleted = list(_delete(workspace, name))
    except DaemonFailed as error:
        raise DaemonFailed(
            "the logs that name the site cannot be deleted, because the server's daemons are running and write to "
            "them; to fix: end `server up`, then run the same command again"
        ) from error
    for folder in folders:
        if folder.is_dir():
            shutil.rmtree(folder)
            deleted.append(f"{folder.relative_to(workspace.root)}/ with every daemon's log")
    with Ledger.open(workspace.ledger_file) as ledger:
        note = f"{name}{REVOKED}{workspace.study().id}"
        texts = tuple(map(canonical_text, (name, site.pool, note)))
        rows = sum(any(text in row.body for text in texts) for row in ledger.rows())
    return DeletionResult(tuple(deleted), rows)


def _delete(workspace: Workspace, name: str) -> Iterator[str]:
    """Delete the site's data, except the ledger's rows and the logs; yield a phrase for each deletion."""
    key = workspace.node_keys_dir / f"{name}.pub"
    hashed = sha256_bytes(read_node_public_key(key).encode()) if key.exists() else ""
    workspace.save_records(LEFT, (*workspace.left(), LeftSite(name, hashed)))  # first: it is never admitted again
    workspace.save_sites(tuple(one for one in workspace.registered() if one.name != name))
    if name in workspace.revoked_names():
        workspace.save_revoked(workspace.revoked_names() - {name})
    yield "its entry in sites.json, with the key of its replies and its node's number"
    file_name = f"{name.replace('/', '%2f')}.json"
    for path, what in (
        (key, "its public node key"),
        (workspace.reports_dir / f"{name}.json", "the report about itself that it sent"),
        (workspace.verdicts_dir / file_name, "the verdict on the student that it sent"),
        (workspace.figures_dir / file_name, "the figures of the student that it sent"),
    ):
        if path.exists():
            path.unlink()
            yield what
    certified = workspace.certificate_dir / "certificate.json"
    if certified.exists() and canonical_text(name) in certified.read_text():
        shutil.rmtree(workspace.certificate_dir)
        yield "the study's copy of the newest certificate, which names it"
    if forget_witness(workspace.root / WITNESSES, name):
        yield "its record as a witness, and the newest head of its own ledger"
    masked = list(workspace.evidence_dir.glob(f"*/{file_name}"))
    for path in masked:
        path.unlink()
    if masked:
        yield f"its signed masked codes of {many(len(masked), 'draw')} of sealed sums, so these can have no dispute"
    if gone := _forget_events(workspace.events_file, name):
        yield f"{many(gone, 'event')} about it alone: what it answered or declined, and when"


def _forget_events(path: Path, name: str) -> int:
    """Delete one site's events, and its name from lists in other events; return the number of deleted events."""

    def without(event: dict[str, Any]) -> dict[str, Any] | None:
        lists = {key: [one for one in value if one != name] for key, value in event.items() if isinstance(value, list)}
        return None if event.get("site") == name else event | lists

    return rewrite_events(path, without)
