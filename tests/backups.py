"""Copies of a ledger and its standing, kept and put back as somebody would who restores a machine."""

from __future__ import annotations

import shutil
from pathlib import Path

from common.ledger.keys import create_signing_key
from common.ledger.rollback_guard import standing_path
from server.ledger.backup import backup
from server.ledger.server_ledger import Ledger


def copy_of(ledger: Path, copy: Path) -> Path:
    """A backup of a ledger, and beside it the standing as it is now; returns ``copy``."""
    backup(ledger, copy)
    shutil.copy(standing_path(ledger), standing_path(copy))
    return copy


def delete_ledger(ledger: Path) -> None:
    """The file of a closed ledger goes; its standing stays."""
    for suffix in ("", "-wal", "-shm"):
        Path(f"{ledger}{suffix}").unlink(missing_ok=True)


def put_copy(copy: Path, ledger: Path, *, standing: bool = False) -> None:
    """Put a copy of a closed ledger in its place; with ``standing``, also the copy's standing beside it."""
    delete_ledger(ledger)
    shutil.copy(copy, ledger)
    if standing:
        shutil.copy(standing_path(copy), standing_path(ledger))


def anothers_standing(folder: Path, standing: Path) -> None:
    """The standing of another ledger, made in ``folder``, stands at ``standing``."""
    with Ledger.create(folder / "other.sqlite", signing_key=create_signing_key(folder / "other.key")) as other:
        other._keep_standing()
    shutil.copy(folder / "other.standing", standing)
