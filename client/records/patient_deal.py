"""Deals patients to voters once by a random permutation, and keeps the result in a file.

The deal happens before any file is looked at, so whether a patient's scan is good decides nothing about anybody else:
a bad case leaves its slot empty. Slot i belongs to voter i mod m. A patient whose files are exchanged keeps the slot; a
patient who is no longer listed keeps it too, empty, and finds it again. A patient who is withdrawn is forgotten by name
and never dealt again: what stays is a hash under a key kept in this file alone, and the empty slot, which a patient who
comes later takes as the replacement. Further newcomers get new slots at the end. So nobody is ever in two voters.
Refuses another number of voters than was dealt for.

The file may come back from a backup, older than the deal: the site's ledger has every seat, by hash, and
:meth:`Slots.following` brings the file up to date before it is used. So it only has to keep names and key.

**Why one patient moves one voter.** Names are sorted and then shuffled uniformly (:func:`by_os`). Let x be exchanged
for y. Sorting puts y in another rank than x, so the two worlds' lists differ by a permutation σ of ranks; but π·σ is
uniform where π is, so the deal with y has the distribution of the deal with x in which y took x's slot and nobody else
moved. Under that coupling everything below the slots differs in one voter alone. It holds for a shuffle that nobody
chose: at a known seed π·σ is another deal than π, and of 23 patients in four voters one exchange takes up to 16 others
to another voter. So a seed is for data that are nobody's (:func:`by_seed`). The number of slots is public, and what
counts as a patient less is an empty slot. Someone who is renamed between two deals is one who leaves and one who comes,
in two slots; withdrawn under the old name first, the new one takes the slot that this emptied.

The stored ``seed`` seeds the voters' trainings (first weights, order, augmentation). It is drawn without looking at
names or scans, and need not be secret: what a patient can move is bounded at each of its values.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, ClassVar

import numpy as np

from common.canonical import digest
from common.document import Between, Document, Sha256
from common.errors import InvalidInput
from common.objects import write_atomically
from common.reading import parse_json

ANOTHER_DIRECTORY = "set one up with `consilium site join --from`, which keeps this pool's books"
"""The remedy wherever teachers cannot be trained in their directory as they were: never a directory without books."""

SLOTS_SCHEMA = 2
MAX_SEED = 1 << 62
_EMPTY, _UNKNOWN = "#withdrawn-", "#unknown-"

Shuffle = Callable[[Sequence[str]], Sequence[str]]
"""Sorted names → the same names in the order in which they are dealt."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a patient sits or sat: slot, its voter, and ``subject``, the keyed hash that stands for the case's name."""

    slot: int
    voter: int
    subject: str


@dataclass(frozen=True, slots=True)
class Slots(Document):
    """``order[i]`` is the patient in slot i, named by the case where nothing says whose scan it is; ``seed`` seeds the
    voters' training. ``withdrawn`` holds (slot, subject) of the patients who were taken out, ``key`` (in
    hex) what subjects are hashed under."""

    SCHEMA: ClassVar = ("slots file", SLOTS_SCHEMA)

    seed: int
    voters: Annotated[int, Between("voters", 1)]
    order: tuple[str, ...]
    key: Sha256 = field(default="", compare=False, repr=False)
    withdrawn: tuple[tuple[int, Sha256], ...] = ()

    def check(self) -> None:
        if len(set(self.order)) != len(self.order):
            raise InvalidInput("slots file", limit="each case in exactly one slot")

    @property
    def deal(self) -> str:
        """What the site's ledger names this deal by; nothing can be read from it."""
        return digest("deal", {"key": self.key})

    def subject(self, case: str) -> str:
        """HMAC-SHA256 of a case's name under this file's key: without the key it cannot be tried out on names.

        Of a patient whose name the file does not know it is what stands in the name's place.
        """
        if case.startswith(_UNKNOWN):
            return case.removeprefix(_UNKNOWN)
        return hmac.new(bytes.fromhex(self.key), case.encode(), hashlib.sha256).hexdigest()

    def has_placed(self, case: str) -> bool:
        """Whether ``case`` has a slot, or had one before it was withdrawn."""
        return case in self.order or self.subject(case) in {subject for _, subject in self.withdrawn}

    def place(self, case: str) -> Place:
        """Where ``case`` sits, or sat before it was withdrawn; InvalidInput for a case that never had a slot."""
        subject = self.subject(case)
        slot = next((slot for slot, known in self.withdrawn if known == subject), None)
        if slot is None and case in self.order:
            slot = self.order.index(case)
        if slot is None:
            raise InvalidInput(
                "case",
                value=case,
                limit="a case that was dealt to a voter",
                remedy="give the case's name as the dataset lists it",
            )
        return Place(slot=slot, voter=slot % self.voters, subject=subject)

    def without(self, case: str) -> Slots:
        """These slots with ``case`` taken out: its slot stays, empty and nameless. Withdrawn already: unchanged."""
        place = self.place(case)
        if case not in self.order:
            return self
        order = tuple(f"{_EMPTY}{place.slot}" if name == case else name for name in self.order)
        return replace(self, order=order, withdrawn=(*self.withdrawn, (place.slot, place.subject)))

    @property
    def seats(self) -> dict[int, str]:
        """The subject in every slot that is not empty."""
        return {slot: self.subject(name) for slot, name in enumerate(self.order) if not self.is_empty(name)}

    def following(self, seats: Mapping[int, str], *, gone: Mapping[str, int], names: Iterable[str]) -> Slots:
        """These slots as the site's ledger has them: ``seats`` (slot, subject), and ``gone``, who was withdrawn from
        which slot.

        Whoever the ledger seats sits there, under a name among ``names`` or in this file; where no such name is known
        the slot stays taken until it is. Who sits elsewhere by the ledger, or was withdrawn, leaves an empty slot. What
        the ledger does not know, a deal it was never told of, stays as it is.
        """
        gone = {**{subject: slot for slot, subject in self.withdrawn}, **gone}
        known = {self.subject(name): name for name in {*self.order, *names} if not self.is_empty(name)}
        taken = set(seats.values())
        order = []
        for slot in range(max(len(self.order), max(seats, default=-1) + 1)):
            name = self.order[slot] if slot < len(self.order) else f"{_EMPTY}{slot}"
            seated = seats.get(slot)
            if seated is not None and seated not in gone:
                name = known.get(seated, f"{_UNKNOWN}{seated}")
            elif not self.is_empty(name) and self.subject(name) in taken | gone.keys():
                name = f"{_EMPTY}{slot}"
            order.append(name)
        left = {subject for _, subject in self.withdrawn}
        own = ((slot, subject) for subject, slot in gone.items() if subject in taken or subject in known)
        more = tuple(sorted((slot, subject) for slot, subject in own if subject not in left))
        return replace(self, order=tuple(order), withdrawn=(*self.withdrawn, *more))

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


def by_os(names: Sequence[str]) -> Sequence[str]:
    """A uniform shuffle from the operating system's CSPRNG: nobody chose it, and nothing of it is kept."""
    return secrets.SystemRandom().sample(names, len(names))


def by_seed(seed: int, before: Slots | None = None) -> Shuffle:
    """The shuffle that ``seed`` decides after the deals ``before``: for synthetic data and tests (see the module)."""
    dealt, gone = (0, 0) if before is None else (len(before.order), len(before.withdrawn))
    draws = np.random.default_rng([seed, dealt, gone] if gone else [seed, dealt])
    return lambda names: [names[i] for i in draws.permutation(len(names))]


def deal(
    listed: Iterable[str], *, voters: int, seed: int, shuffle: Shuffle = by_os, before: Slots | None = None
) -> Slots:
    """Put every listed patient that has no slot yet into one, in random order: first into slots that a withdrawal
    emptied, then after those dealt before. ``seed`` is the voters', not the deal's; tests inject a ``shuffle``."""
    before = before or Slots(seed=seed, voters=voters, order=(), key=secrets.token_hex(32))
    gone = {subject for _, subject in before.withdrawn}
    new = sorted(name for name in set(listed) - set(before.order) if not gone or before.subject(name) not in gone)
    bad = next((name for name in new if name.startswith((_EMPTY, _UNKNOWN))), None)
    if bad is not None:
        raise InvalidInput("case", value=bad, limit=f"a name without {_EMPTY} or {_UNKNOWN} before it", remedy="rename")
    shuffled = list(shuffle(new))
    order = [shuffled.pop() if shuffled and Slots.is_empty(name) else name for name in before.order]
    return replace(before, seed=seed, voters=voters, order=(*order, *shuffled))


def load_or_deal(path: Path, listed: Iterable[str], *, voters: int, seed: int | None = None) -> Slots:
    """The slots stored at ``path``, extended by patients that are new; dealt and stored at the first call.

    ``seed`` decides the deal and is for synthetic data alone, which the caller answers for; None deals at random.
    Of fewer patients than voters some voters get none and send the zero code. Raises InvalidInput for nobody at the
    first deal, and for another seed or number of voters than stored, since dealing again would put a patient into two
    voters' released answers.
    """
    listed = sorted(set(listed))
    before = load_slots(path) if path.exists() else None
    if before is None and not listed:
        raise InvalidInput("patients for training", value=0, limit="at least one")
    if before is not None and before.voters != voters:
        raise InvalidInput(
            "voters per site", value=voters, limit=f"the {before.voters} dealt before", remedy=ANOTHER_DIRECTORY
        )
    if before is not None and seed not in (None, before.seed):
        raise InvalidInput("seed of the slots", value=seed, limit="the one dealt with before", remedy=ANOTHER_DIRECTORY)
    if seed is not None:
        slots = deal(listed, voters=voters, seed=seed, shuffle=by_seed(seed, before), before=before)
    else:
        drawn = secrets.randbelow(MAX_SEED) if before is None else before.seed
        slots = deal(listed, voters=voters, seed=drawn, before=before)
    save_slots(path, slots)  # unchanged, too: a file of schema 1 was given a key
    return slots


def save_slots(path: Path, slots: Slots) -> None:
    """Store the slots (mode 0600), whole or not at all."""
    write_atomically(path, (json.dumps(slots.to_json(), indent=1) + "\n").encode(), mode=0o600)


def load_slots(path: Path) -> Slots:
    """Read stored slots; a file of schema 1, which knew no withdrawal, gets a key."""
    try:
        document = parse_json(path.read_bytes(), what="slots file")
        if isinstance(document, dict) and document.get("schema") == 1:
            document |= {"schema": SLOTS_SCHEMA, "key": secrets.token_hex(32), "withdrawn": []}
        return Slots.from_json(document)
    except (OSError, ValueError, InvalidInput) as error:
        raise InvalidInput("slots file cannot be read", value=path.name, remedy="restore it from a backup") from error
