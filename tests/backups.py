"""Copies a ledger and its standing, and puts the copies back as in a restore of the machine."""

from __future__ import annotations

import shutil
from pathlib import Path

from common.ledger.keys import create_signing_key
from common.ledger.rollback_guard import standing_path
from server.ledger.backup import backup
from server.ledger.server_ledger import Ledger


def copy_of(ledger: Path, copy: Path) -> Path:
    """Back up a ledger and its present standing; return ``copy``."""
    backup(ledger, copy)
    shutil.copy(standing_path(ledger), standing_path(copy))
    return copy


def delete_ledger(ledger: Path) -> None:
    """Delete the file of a closed ledger and keep its standing."""
    for suffix in ("", "-wal", "-shm"):
        Path(f"{ledger}{suffix}").unlink(missing_ok=True)


def put_copy(copy: Path, ledger: Path, *, standing: bool = False) -> None:
    """Replace a closed ledger by a copy; with ``standing``, replace its standing, too."""
    delete_ledger(ledger)
    shutil.copy(copy, ledger)
    if standing:
        shutil.copy(standing_path(copy), standing_path(ledger))


def anothers_standing(folder: Path, standing: Path) -> None:
    """Create another ledger in ``folder``, and copy its standing to ``standing``."""
    with Ledger.create(folder / "other.sqlite", signing_key=create_signing_key(folder / "other.key")) as other:
        other._keep_standing()
    shutil.copy(folder / "other.standing", standing)
