"""Which patient belongs to which voter: dealt once by a random permutation and then fixed in a file.

The deal happens before any file is looked at, so whether a patient's scan is good decides nothing about anybody else:
a bad case leaves its slot empty. Slot i belongs to voter i mod m. A patient whose files are exchanged keeps the slot; a
patient who is no longer listed keeps it too, empty, and finds it again. A patient who is withdrawn is forgotten by name
and never dealt again: what stays is a hash under a key kept in this file alone, and the empty slot, which a patient who
comes later takes as the replacement. Further newcomers get new slots at the end. So nobody is ever in two voters.
Refuses another number of voters than was dealt for.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import secrets
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from common.canonical import check_hash, checked_fields, digest
from common.errors import InvalidInput
from common.objects import write_atomically

SLOTS_SCHEMA = 2
MAX_SEED = 1 << 62
_EMPTY = "#withdrawn-"


@dataclass(frozen=True, slots=True)
class Place:
    """Where a patient sits or sat: slot, its voter, and ``subject``, the keyed hash that stands for the case's name."""

    slot: int
    voter: int
    subject: str


@dataclass(frozen=True, slots=True)
class Slots:
    """``order[i]`` is the patient in slot i, named by the case where nothing says whose scan it is; ``seed`` dealt them
    and seeds the voters' training. ``withdrawn`` holds (slot, subject) of the patients who were taken out, ``key`` (in
    hex) what subjects are hashed under."""

    seed: int
    voters: int
    order: tuple[str, ...]
    key: str = field(default="", compare=False, repr=False)
    withdrawn: tuple[tuple[int, str], ...] = ()

    def subject(self, case: str) -> str:
        """HMAC-SHA256 of a case's name under this file's key: without the key it cannot be tried out on names."""
        return hmac.new(bytes.fromhex(self.key), case.encode(), hashlib.sha256).hexdigest()

    def place(self, case: str) -> Place:
        """Where ``case`` sits, or sat before it was withdrawn; InvalidInput for a case that never had a slot."""
        subject = self.subject(case)
        slot = next((slot for slot, known in self.withdrawn if known == subject), None)
        if slot is None and case in self.order:
            slot = self.order.index(case)
        if slot is None:
            raise InvalidInput(
                "case", value=case, limit="one that has a slot", remedy="give the case's name as the dataset lists it"
            )
        return Place(slot=slot, voter=slot % self.voters, subject=subject)

    def without(self, case: str) -> Slots:
        """These slots with ``case`` taken out: its slot stays, empty and nameless. Withdrawn already: unchanged."""
        place = self.place(case)
        if case not in self.order:
            return self
        order = tuple(f"{_EMPTY}{place.slot}" if name == case else name for name in self.order)
        return replace(self, order=order, withdrawn=(*self.withdrawn, (place.slot, place.subject)))

    @staticmethod
    def is_empty(name: str) -> bool:
        """Whether ``name`` in ``order`` stands for a slot whose patient was withdrawn and not replaced."""
        return name.startswith(_EMPTY)

    def part(self, voter: int) -> tuple[str, ...]:
        """The patients of one voter, in slot order; a slot emptied by a withdrawal is among them (``is_empty``)."""
        return self.order[voter :: self.voters]

    def voter_seed(self, voter: int) -> int:
        """The seed of one voter's training: a function of the stored seed and the voter's number alone."""
        return int(digest("voter-seed", {"seed": str(self.seed), "voter": voter})[:15], 16)


def deal(listed: Iterable[str], *, voters: int, seed: int, before: Slots | None = None) -> Slots:
    """Put every listed patient that has no slot yet into one, in random order: first into slots that a withdrawal
    emptied, then after those dealt before."""
    before = before or Slots(seed=seed, voters=voters, order=(), key=secrets.token_hex(32))
    gone = {subject for _, subject in before.withdrawn}
    new = sorted(name for name in set(listed) - set(before.order) if not gone or before.subject(name) not in gone)
    bad = next((name for name in new if Slots.is_empty(name)), None)
    if bad is not None:
        raise InvalidInput("case", value=bad, limit=f"a name that does not begin with {_EMPTY}", remedy="rename it")
    draws = np.random.default_rng([seed, len(before.order), len(gone)] if gone else [seed, len(before.order)])
    shuffled = [new[i] for i in draws.permutation(len(new))]
    order = [shuffled.pop() if shuffled and Slots.is_empty(name) else name for name in before.order]
    return replace(before, seed=seed, voters=voters, order=(*order, *shuffled))


def load_or_deal(path: Path, listed: Iterable[str], *, voters: int, seed: int | None = None) -> Slots:
    """The slots stored at ``path``, extended by patients that are new; dealt and stored at the first call.

    ``seed`` None draws one from the operating system. Raises InvalidInput for another seed or number of voters than
    stored, since dealing again would put a patient into two voters' released answers.
    """
    before = load_slots(path) if path.exists() else None
    remedy = "train into another site directory, and count it as a new edition of the teachers"
    if before is not None and before.voters != voters:
        raise InvalidInput("voters per site", value=voters, limit=f"the {before.voters} dealt before", remedy=remedy)
    if before is not None and seed not in (None, before.seed):
        raise InvalidInput("seed of the slots", value=seed, limit="the one dealt with before", remedy=remedy)
    if seed is None:
        seed = before.seed if before is not None else secrets.randbelow(MAX_SEED)
    slots = deal(listed, voters=voters, seed=seed, before=before)
    if slots != before:
        save_slots(path, slots)
    return slots


def save_slots(path: Path, slots: Slots) -> None:
    """Store the slots (mode 0600), whole or not at all."""
    record = {
        "schema": SLOTS_SCHEMA,
        "seed": slots.seed,
        "voters": slots.voters,
        "order": list(slots.order),
        "key": slots.key,
        "withdrawn": [list(item) for item in slots.withdrawn],
    }
    write_atomically(path, (json.dumps(record, indent=1) + "\n").encode(), mode=0o600)


def load_slots(path: Path) -> Slots:
    """Read stored slots; a file of schema 1, which knew no withdrawal, gets a key."""
    kinds: dict[str, type] = {"schema": int, "seed": int, "voters": int, "order": list}
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        if isinstance(document, dict) and document.get("schema") == 1:
            document |= {"schema": SLOTS_SCHEMA, "key": secrets.token_hex(32), "withdrawn": []}
        record = checked_fields(document, {**kinds, "key": str, "withdrawn": list})
        withdrawn = tuple((int(slot), check_hash(subject)) for slot, subject in record["withdrawn"])
        check_hash(record["key"])
    except (OSError, ValueError, TypeError, InvalidInput) as error:
        raise InvalidInput("slots file cannot be read", value=path.name, remedy="restore it from a backup") from error
    order = record["order"]
    if (
        record["schema"] != SLOTS_SCHEMA
        or record["voters"] < 1
        or not all(isinstance(name, str) for name in order)
        or len(set(order)) != len(order)
    ):
        raise InvalidInput("slots file", value=path.name, limit=f"schema {SLOTS_SCHEMA}, every case in one slot")
    return Slots(
        seed=record["seed"],
        voters=record["voters"],
        order=tuple(order),
        key=record["key"],
        withdrawn=withdrawn,
    )
