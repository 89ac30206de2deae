"""Computes the hashes that identify the teachers a site would answer with, without loading a model.

The ledger and `site status` compare them with the trainings on record. A teacher that cannot be loaded has the empty
hash; one that this process may not read has a hash that matches no training. It raises no errors.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from client.records.declared import DECLARED, TeacherDeclaration, has_foreign
from client.records.voter_files import voter_directory
from common.canonical import digest, sha256_file
from common.errors import InvalidInput
from common.reading import lenient_json

RETIRED = "withdrawn"
"""The value of ``identity`` in ``train.json`` after a patient of that voter was withdrawn."""


def served_hash(weights: str, posterior: str | None) -> str:
    """Return the hash that identifies a trained teacher.

    Args:
        weights: SHA-256 of its weights.
        posterior: SHA-256 of its posterior over the weights, which only the strategy ``dp-bbb`` has; else None.

    Returns:
        The hash of the weights, or for dp-bbb a hash over weights and posterior.
    """
    if posterior is None:
        return weights
    return digest("posterior-teacher", {"posterior": posterior, "weights": weights})


def trained_hash(directory: Path) -> str:
    """Return the hash of the trained teacher in a voter's directory.

    Args:
        directory: The voter's directory.

    Returns:
        The hash; empty if the directory has no teacher that a worker would load. Without permission to read it, a hash
        that matches no training.
    """
    try:
        record = lenient_json((directory / "train.json").read_text(encoding="utf-8"))
        weights, posterior = record["report"]["weights"], record.get("posterior")
        if weights is None or sha256_file(directory / "weights.pt") != weights:
            return ""
        if posterior is not None and sha256_file(directory / "posterior.pt") != posterior:
            return ""
    except PermissionError:
        return digest("unread-teacher", directory.name)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return ""
    return served_hash(weights, posterior)


def found_in(teachers: Path, *, voters: int) -> tuple[str, ...]:
    """Return the hash of the teacher that each voter would use if a worker started now.

    Args:
        teachers: The site's directory of teachers.
        voters: Number of voters.

    Returns:
        One hash for each voter; empty for a voter without a teacher. A teacher from elsewhere with an unreadable
        declaration, which no worker would load, has the hash of the declaration's bytes.
    """
    found = []
    for voter in range(voters):
        directory = voter_directory(teachers, voter)
        if not has_foreign(teachers, voter):
            found.append(trained_hash(directory))
            continue
        try:
            found.append(TeacherDeclaration.read(directory / DECLARED).served)
        except InvalidInput:
            found.append(sha256_file(directory / DECLARED))
    return tuple(found)


def retired_voters(teachers: Path) -> frozenset[int]:
    """Return the voters whose teacher was trained on a patient who was withdrawn since.

    Args:
        teachers: The site's directory of teachers.

    Returns:
        Numbers of the voters whose training record is marked as withdrawn.
    """
    found = (int(path.name.removeprefix("voter-")) for path in teachers.glob("voter-[0-9][0-9][0-9]"))
    return frozenset(voter for voter in found if (training_record(teachers, voter) or {}).get("identity") == RETIRED)


def training_record(teachers: Path, voter: int) -> dict[str, Any] | None:
    """Read the record of a voter's training.

    Args:
        teachers: The site's directory of teachers.
        voter: The voter's number.

    Returns:
        The content of ``train.json``; None if it is missing or cannot be read, in which case no worker loads the
        teacher.
    """
    path = voter_directory(teachers, voter) / "train.json"
    try:
        record: dict[str, Any] = lenient_json(path.read_text(encoding="utf-8"))
        _ = record["report"]["weights"], record["identity"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return record
