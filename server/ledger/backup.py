"""A whole copy of a ledger while others read and write it, checked before it gets its name.

The copy is made by SQLite's online backup, so that it is one committed state and needs no file beside it. Refuses an
existing path and a copy that does not verify. Private keys lie in files of their own and are in no copy; the codes in a
site's ledger are, so the copy is readable by its owner only.
"""

from __future__ import annotations

import os
import sqlite3
from contextlib import closing
from pathlib import Path

from common.errors import InvalidInput
from common.ledger.sqlite_file import appearing, connect
from server.ledger.verify import VerifyReport, verify


def backup(ledger: Path, out: Path) -> VerifyReport:
    """Copy ``ledger`` to ``out`` (mode 0600, durable, complete or absent) and return what verifying the copy found.

    A copy of an older state is a rollback when it is restored: the sites notice, and their receipts repair it.
    LedgerCorrupt, and no copy, if the ledger is damaged.
    """
    if out.exists() or not out.parent.is_dir():
        raise InvalidInput("backup file", value=str(out), limit="a new file in an existing folder")
    with appearing(out, what="backup file") as draft:
        with (
            closing(connect(ledger, read_only=True)) as source,
            closing(sqlite3.connect(draft, isolation_level=None)) as target,
        ):
            source.backup(target)
            target.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        with draft.open("rb") as stream:
            os.fsync(stream.fileno())
        report = verify(draft)
        report.raise_for_problems()
    return report
