"""Which patient belongs to which voter: dealt once by a random permutation and then fixed in a file.

The deal happens before any file is looked at, so whether a patient's scan is good decides nothing about anybody else:
a bad case leaves its slot empty. Slot i belongs to voter i mod m. Patients who come later get new slots at the end;
a patient who leaves leaves the slot empty. Refuses another number of voters than was dealt for.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from common.canonical import checked_fields, digest
from common.errors import InvalidInput
from common.objects import write_atomically

SLOTS_SCHEMA = 1
MAX_SEED = 1 << 62


@dataclass(frozen=True, slots=True)
class Slots:
    """``order[i]`` is the case in slot i; ``seed`` dealt them and seeds the voters' training."""

    seed: int
    voters: int
    order: tuple[str, ...]

    def part(self, voter: int) -> tuple[str, ...]:
        """The cases of one voter, in slot order."""
        return self.order[voter :: self.voters]

    def voter_seed(self, voter: int) -> int:
        """The seed of one voter's training: a function of the stored seed and the voter's number alone."""
        return int(digest("voter-seed", {"seed": str(self.seed), "voter": voter})[:15], 16)


def deal(listed: Iterable[str], *, voters: int, seed: int, before: Slots | None = None) -> Slots:
    """Put every listed case that has no slot yet into one, in random order, after those dealt before."""
    order = before.order if before else ()
    new = sorted(set(listed) - set(order))
    shuffled = np.random.default_rng([seed, len(order)]).permutation(len(new))
    return Slots(seed=seed, voters=voters, order=(*order, *(new[i] for i in shuffled)))


def load_or_deal(path: Path, listed: Iterable[str], *, voters: int, seed: int | None = None) -> Slots:
    """The slots stored at ``path``, extended by cases that are new; dealt and stored at the first call.

    ``seed`` None draws one from the operating system. Raises InvalidInput for another seed or number of voters than
    stored, since dealing again would put a patient into two voters' released answers.
    """
    before = _load(path) if path.exists() else None
    remedy = "train into another site directory, and count it as a new edition of the teachers"
    if before is not None and before.voters != voters:
        raise InvalidInput("voters per site", value=voters, limit=f"the {before.voters} dealt before", remedy=remedy)
    if before is not None and seed not in (None, before.seed):
        raise InvalidInput("seed of the slots", value=seed, limit="the one dealt with before", remedy=remedy)
    if seed is None:
        seed = before.seed if before is not None else secrets.randbelow(MAX_SEED)
    slots = deal(listed, voters=voters, seed=seed, before=before)
    if slots != before:
        record = {"schema": SLOTS_SCHEMA, "seed": slots.seed, "voters": slots.voters, "order": list(slots.order)}
        write_atomically(path, (json.dumps(record, indent=1) + "\n").encode(), mode=0o600)
    return slots


def _load(path: Path) -> Slots:
    try:
        record = checked_fields(
            json.loads(path.read_text(encoding="utf-8")), {"schema": int, "seed": int, "voters": int, "order": list}
        )
    except (OSError, ValueError, InvalidInput) as error:
        raise InvalidInput("slots file cannot be read", value=path.name, remedy="restore it from a backup") from error
    order = record["order"]
    if (
        record["schema"] != SLOTS_SCHEMA
        or record["voters"] < 1
        or not all(isinstance(name, str) for name in order)
        or len(set(order)) != len(order)
    ):
        raise InvalidInput("slots file", value=path.name, limit=f"schema {SLOTS_SCHEMA}, every case in one slot")
    return Slots(seed=record["seed"], voters=record["voters"], order=tuple(order))
