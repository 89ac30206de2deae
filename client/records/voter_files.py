"""Defines where a voter's teacher lies in a site's directory, and the version of its record."""

from __future__ import annotations

from pathlib import Path

TRAIN_SCHEMA = 1


def voter_directory(teachers: Path, voter: int) -> Path:
    """The folder of one voter's teacher."""
    return teachers / f"voter-{voter:03d}"
