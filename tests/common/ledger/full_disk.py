"""Simulates a full disk: a limit of the kernel refuses every write beyond a file's present size."""

from __future__ import annotations

import resource
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path


@contextmanager
def no_byte_more() -> Iterator[None]:
    """Make the kernel refuse every write that makes a file longer, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def leave_log(ledger: Path) -> None:
    """Leave a write-ahead log beside a closed ledger, like a killed process."""
    log = Path(f"{ledger}-wal")
    with closing(sqlite3.connect(ledger, isolation_level=None)) as opened:
        (version,) = opened.execute("PRAGMA user_version").fetchone()
        opened.execute(f"PRAGMA user_version = {version}")
        rows = log.read_bytes()
    assert rows
    log.write_bytes(rows)
