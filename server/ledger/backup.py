"""Makes a verified copy of a ledger while other processes read and write it.

`consilium ledger backup` calls it. SQLite's online backup makes the copy, so the copy is one committed state in a
single file. It is verified before it gets its final name. An existing path and a copy that does not verify are refused.
Private keys are in separate files and are never copied. A site's ledger contains its codes, so the copy is readable by
its owner only.
"""

from __future__ import annotations

import os
import sqlite3
from contextlib import closing
from pathlib import Path

from common.errors import InvalidInput
from common.ledger.sqlite_file import appearing, connect, ledger_error
from server.ledger.verify import VerifyReport, verify


def backup(ledger: Path, out: Path) -> VerifyReport:
    """Copy a ledger to a new file with mode 0600, durably, completely or not at all.

    Restoring an old copy loses the charges made since. The sites detect this, and `consilium ledger recover` enters the
    lost charges from their receipts.

    Args:
        ledger: The ledger's file.
        out: The copy; it must not exist, and its folder must.

    Returns:
        The report of verifying the copy.

    Raises:
        InvalidInput: If ``out`` exists, or its folder does not.
        LedgerCorrupt: If the ledger cannot be read or the copy does not verify; the copy is deleted then.
        StorageFailed: If the disk of the ledger or of the copy is full or fails.
    """
    if out.exists() or not out.parent.is_dir():
        raise InvalidInput(
            "backup file",
            value=str(out),
            limit="a new file in an existing folder",
            remedy="give another name, for example with today's date" if out.exists() else "make the folder first",
        )
    with appearing(out, what="backup file") as draft:
        with (
            closing(connect(ledger, read_only=True)) as source,
            closing(sqlite3.connect(draft, isolation_level=None)) as target,
        ):
            try:
                source.backup(target)
                target.execute("PRAGMA wal_checkpoint(TRUNCATE)")
            except sqlite3.Error as error:
                raise ledger_error(error, f"the ledger {ledger} cannot be copied", out) from error
        with draft.open("rb") as stream:
            os.fsync(stream.fileno())
        report = verify(draft)
        report.raise_for_problems()
    return report
