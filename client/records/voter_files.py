"""Defines the folder of each voter's teacher in a site's directory, and the version of its training record."""

from __future__ import annotations

from pathlib import Path

TRAIN_SCHEMA = 1


def voter_directory(teachers: Path, voter: int) -> Path:
    """Return the folder of one voter's teacher.

    Args:
        teachers: The site's directory of teachers.
        voter: The voter's number.

    Returns:
        The folder ``voter-NNN``; it need not exist.
    """
    return teachers / f"voter-{voter:03d}"
