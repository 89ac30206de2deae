"""Publishes statements about a study that may change: its student's statement and its sites' keys."""

from __future__ import annotations

from pathlib import Path

from common.canonical import check_hash

STUDENTS, PEERS = "students", "peers"


def said_file(objects: Path, what: str, study_id: str) -> Path:
    """Where what is said of a study's student or peers lies, below the object store's directory."""
    return objects / what / check_hash(study_id)
