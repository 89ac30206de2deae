"""Names by hash the teachers that a site's voters would answer with, without loading a model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from client.records.declared import DECLARED, Declared, has_foreign
from client.records.voter_files import voter_directory
from common.canonical import digest, sha256_file
from common.errors import InvalidInput

RETIRED = "withdrawn"
"""What stands for a training's identity in ``train.json`` once a patient of that voter was withdrawn."""


def served_hash(weights: str, posterior: str | None) -> str:
    """Names what a teacher answers with: the SHA-256 of its weights, for dp-bbb a hash over weights and posterior."""
    if posterior is None:
        return weights
    return digest("posterior-teacher", {"posterior": posterior, "weights": weights})


def trained_hash(directory: Path) -> str:
    """What the teacher in one voter's directory answers with; empty where there is none that a worker would load.

    One that whoever asks may not read has a hash that no training made.
    """
    try:
        record = json.loads((directory / "train.json").read_text(encoding="utf-8"))
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
    """What each of so many voters would answer with if a worker were started now, trained or brought; empty for none.

    A brought teacher whose declaration cannot be read, on which no worker starts, is named by its bytes.
    """
    found = []
    for voter in range(voters):
        directory = voter_directory(teachers, voter)
        if not has_foreign(teachers, voter):
            found.append(trained_hash(directory))
            continue
        try:
            found.append(Declared.read(directory / DECLARED).served)
        except InvalidInput:
            found.append(sha256_file(directory / DECLARED))
    return tuple(found)


def retired_voters(teachers: Path) -> frozenset[int]:
    """Voters whose teacher was trained on a patient since withdrawn, by what lies beside their weights."""
    found = (int(path.name.removeprefix("voter-")) for path in teachers.glob("voter-[0-9][0-9][0-9]"))
    return frozenset(voter for voter in found if (training_record(teachers, voter) or {}).get("identity") == RETIRED)


def training_record(teachers: Path, voter: int) -> dict[str, Any] | None:
    """A voter's training record; None where there is none or it cannot be read, since then nothing loads it either."""
    path = voter_directory(teachers, voter) / "train.json"
    try:
        record: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        _ = record["report"]["weights"], record["identity"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return record
