"""Assigns patients to voters once, by a random permutation, and keeps this assignment (the *deal*) in a file.

Each patient gets a numbered *slot*, and each slot belongs to one voter. Training, withdrawal and the ledger of the
site's teachers use the stored slots. Rules:

1. The deal is made from names only, before any scan is opened. Whether a patient's scan is usable therefore changes
   nothing for other patients: an unusable case leaves its slot empty.
2. With m voters, slot i belongs to voter i mod m.
3. A patient whose files are replaced keeps the slot. So does a patient who is no longer listed; the slot is used again
   if the patient is listed again.
4. A withdrawn patient's name is deleted and never dealt again. A hash under a key that only this file contains remains,
   with an empty slot, which the next new patient takes.
5. All other new patients get new slots at the end.

No patient is therefore ever in two voters. It refuses another number of voters than that of the stored deal.

A restored backup of this file may be older than the newest deal. The site's ledger contains the hash of the patient in
every slot, and :meth:`Slots.following` updates the file from it before use. Only the file contains the names and the
key.

**Why one patient moves one voter.** Names are sorted and then shuffled uniformly (:func:`by_os`). Let patient x be
replaced by y. Sorting gives y another rank than x, so the sorted lists of the two worlds differ by a permutation σ of
ranks. Let π be the permutation by which the list is shuffled. If π is uniform then π·σ is uniform, so the deal with y
has the same distribution as the deal with x in which y takes x's slot and nobody else moves. Under this coupling the
two worlds differ in one voter only. The argument needs a shuffle that is random: with a fixed seed, π·σ is another deal
than π, and among 23 patients in four voters one exchange moves up to 16 other patients to another voter. A seed is
therefore for synthetic data only (:func:`by_seed`). The number of slots is public; a missing patient is an empty slot.
A patient whose name and scans are both renamed between two deals counts as one who leaves and one who joins, in two
slots. If only the name changes, :mod:`client.records.scan_patients` refuses the dataset.

The stored ``seed`` is that of the voters' trainings (initial weights, order, augmentation). It is drawn independently
of names and scans. It need not be secret, because the bound on a patient's influence holds for each of its values.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import unicodedata
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, ClassVar

import numpy as np

from common.canonical import digest
from common.data.dataset import case_names
from common.document import Between, Document, Sha256
from common.errors import InvalidInput
from common.names import is_utf8
from common.objects import write_json
from common.reading import parse_json
from common.wording import many

ANOTHER_DIRECTORY = "set up a directory with `consilium site join --from`, which uses this pool's ledger"
"""The remedy if teachers cannot be trained again in their directory: a new directory that uses the same ledger."""

SLOTS_SCHEMA = 2
MAX_SEED = 1 << 62
_EMPTY, _UNKNOWN = "#withdrawn-", "#unknown-"
_LOST_AT_END = ". "
"""Characters that Windows removes from the end of a folder's name."""

Shuffle = Callable[[Sequence[str]], Sequence[str]]
"""Function that takes sorted names and returns them in the order in which they are dealt."""


@dataclass(frozen=True, slots=True)
class PatientSlot:
    """The slot of a patient, now or before a withdrawal.

    Attributes:
        slot: Number of the slot.
        voter: Voter to which the slot belongs.
        subject: Keyed hash of the case's name.
    """

    slot: int
    voter: int
    subject: str


@dataclass(frozen=True, slots=True)
class Slots(Document):
    """The content of a slots file: which patient is in which slot, and which slots were emptied by a withdrawal.

    Attributes:
        seed: Seed of the voters' trainings.
        voters: Number of voters m at the site.
        order: Name of the patient in each slot; the case's name if the dataset does not name patients.
        key: Key, in hex, under which names are hashed.
        withdrawn: Slot and keyed hash of every withdrawn patient.
    """

    SCHEMA: ClassVar = ("slots file", SLOTS_SCHEMA)

    seed: int
    voters: Annotated[int, Between("voters", 1)]
    order: tuple[str, ...]
    key: Sha256 = field(default="", compare=False, repr=False)
    withdrawn: tuple[tuple[int, Sha256], ...] = ()

    def check(self) -> None:
        """Refuse a file in which a case has two slots.

        Raises:
            InvalidInput: If a case occurs twice in ``order``.
        """
        if len(set(self.order)) != len(self.order):
            raise InvalidInput(
                "slots file in which a case has two slots",
                limit="one slot for each case",
                remedy="restore the file from a backup",
            )

    @property
    def deal(self) -> str:
        """The ledger's name of this deal (assignment of patients to slots), a hash that reveals nothing of patients."""
        return digest("deal", {"key": self.key})

    def subject(self, case: str) -> str:
        """Return the keyed hash that stands for a case's name in the ledger.

        Without this file's key nobody can test whether a name belongs to a hash.

        Args:
            case: Name of a case, or the placeholder of a slot whose patient's name this file does not know.

        Returns:
            HMAC-SHA256 of the name in hex; for a placeholder, the hash it contains.
        """
        if case.startswith(_UNKNOWN):
            return case.removeprefix(_UNKNOWN)
        return hmac.new(bytes.fromhex(self.key), case.encode(), hashlib.sha256).hexdigest()

    def has_placed(self, case: str) -> bool:
        """Tell whether a case has a slot, or had one before it was withdrawn.

        Args:
            case: Name of the case.

        Returns:
            True if the case has or had a slot.
        """
        return case in self.order or self.subject(case) in {subject for _, subject in self.withdrawn}

    def place(self, case: str) -> PatientSlot:
        """Find the slot of a case, or the slot it had before it was withdrawn.

        Args:
            case: Name of the case.

        Returns:
            Slot, voter and keyed hash.

        Raises:
            InvalidInput: If the case never had a slot.
        """
        subject = self.subject(case)
        slot = next((slot for slot, known in self.withdrawn if known == subject), None)
        if slot is None and case in self.order:
            slot = self.order.index(case)
        if slot is None:
            raise InvalidInput(
                "patient",
                value=case,
                limit="a patient who was assigned to a voter",
                remedy="give the name of the patient, or of one of the patient's cases, as the dataset lists it",
            )
        return PatientSlot(slot=slot, voter=slot % self.voters, subject=subject)

    def without(self, case: str) -> Slots:
        """Return slots from which a case is withdrawn: its slot is empty and its name is deleted.

        Args:
            case: Name of the case.

        Returns:
            New slots in which the case's slot is empty; the same slots if the case was withdrawn before.

        Raises:
            InvalidInput: If the case never had a slot.
        """
        place = self.place(case)
        if case not in self.order:
            return self
        order = tuple(f"{_EMPTY}{place.slot}" if name == case else name for name in self.order)
        return replace(self, order=order, withdrawn=(*self.withdrawn, (place.slot, place.subject)))

    @property
    def seats(self) -> dict[int, str]:
        """The keyed hash of the patient in every slot that is not empty."""
        return {slot: self.subject(name) for slot, name in enumerate(self.order) if not self.is_empty(name)}

    def following(self, seats: Mapping[int, str], *, gone: Mapping[str, int], names: Iterable[str]) -> Slots:
        """Update these slots to what the site's ledger has on record.

        Each patient is put into the slot that the ledger states, under the name that matches the hash; if no name
        matches, the slot is marked as taken. If the ledger states another slot for a patient of this file, or a
        withdrawal, the patient's old slot becomes empty. Entries that the ledger does not contain are not changed: they
        belong to a deal that is not recorded yet.

        Args:
            seats: The patient's keyed hash by slot, from the ledger.
            gone: The slot of each withdrawn patient, by keyed hash.
            names: Names of cases in the dataset, to match against hashes.

        Returns:
            The updated slots.
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
        """Tell whether an entry of ``order`` marks a slot whose patient was withdrawn and not replaced.

        Args:
            name: An entry of ``order``.

        Returns:
            True for the marker of an emptied slot.
        """
        return name.startswith(_EMPTY)

    def part(self, voter: int) -> tuple[str, ...]:
        """Return the patients of one voter in slot order.

        Args:
            voter: The voter's number.

        Returns:
            Entries of ``order``, including the markers of emptied slots (:meth:`is_empty`).
        """
        return self.order[voter :: self.voters]

    def voter_seed(self, voter: int) -> int:
        """Return the seed of one voter's training.

        Args:
            voter: The voter's number.

        Returns:
            An integer that depends on the stored seed and the voter's number only.
        """
        return int(digest("voter-seed", {"seed": str(self.seed), "voter": voter})[:15], 16)


def by_os(names: Sequence[str]) -> Sequence[str]:
    """Shuffle names uniformly with the operating system's random generator; no seed is kept.

    Args:
        names: Sorted names.

    Returns:
        The same names in random order.
    """
    return secrets.SystemRandom().sample(names, len(names))


def by_seed(seed: int, before: Slots | None = None) -> Shuffle:
    """Return a shuffle that a seed determines; for synthetic data and tests only (see the module's docstring).

    Args:
        seed: The seed.
        before: Slots assigned earlier; the order also depends on their number and on the number of withdrawals.

    Returns:
        A function from names to shuffled names; a second call continues the generator's sequence.
    """
    dealt, gone = (0, 0) if before is None else (len(before.order), len(before.withdrawn))
    draws = np.random.default_rng([seed, dealt, gone] if gone else [seed, dealt])
    return lambda names: [names[i] for i in draws.permutation(len(names))]


def deal(
    listed: Iterable[str],
    *,
    voters: int,
    seed: int,
    shuffle: Shuffle = by_os,
    before: Slots | None = None,
    stored: Sequence[Slots] = (),
) -> Slots:
    """Give a slot to every patient of the dataset who has none yet, in random order.

    Slots emptied by a withdrawal are filled first; then slots are added at the end.

    Args:
        listed: Names of all patients of the dataset.
        voters: Number of voters m.
        seed: Seed of the voters' trainings. It does not influence who gets which slot.
        shuffle: The random permutation; tests inject another one.
        before: Slots assigned earlier; None at the first time.
        stored: The pool's other assignments, whose names are known too.

    Returns:
        The slots with the new patients.

    Raises:
        InvalidInput: If a name begins with a marker of this file, is not UTF-8, or is another spelling of a name that
            is listed or has a slot.
    """
    before, listed = before or Slots(seed=seed, voters=voters, order=(), key=secrets.token_hex(32)), set(listed)
    _check_utf8(listed)
    gone = {subject for _, subject in before.withdrawn}
    new = sorted(
        name for name in listed - set(before.order) if not gone or gone.isdisjoint(map(before.subject, spellings(name)))
    )
    _check_spelling({*new, *(listed & set(before.order))}, before, stored)
    bad = next((name for name in new if name.startswith((_EMPTY, _UNKNOWN))), None)
    if bad is not None:
        raise InvalidInput(
            "case",
            value=bad,
            limit=f"names not beginning with {_EMPTY} or {_UNKNOWN}",
            remedy="rename the case in the dataset",
        )
    shuffled = list(shuffle(new))
    order = [shuffled.pop() if shuffled and Slots.is_empty(name) else name for name in before.order]
    return replace(before, seed=seed, voters=voters, order=(*order, *shuffled))


def _check_utf8(listed: set[str]) -> None:
    """Refuse a name that is not UTF-8, because a slots file that contains it could not be read again."""
    wrong = next((name for name in listed if not is_utf8(name)), None)
    if wrong is not None:
        raise InvalidInput("name of a case", value=ascii(wrong), limit="UTF-8", remedy="rename the file of the case")


def spellings(name: str) -> frozenset[str]:
    """Return the spellings of a name that another file system or another program may give it.

    Copying a dataset to another file system may change upper to lower case, and whether a letter such as ü is stored as
    one character or two. Windows removes dots and blanks at the end of a folder's name. A spreadsheet or a web page may
    add characters that nobody sees, which the plain spelling lacks.

    Args:
        name: Name of a case.

    Returns:
        The spellings, ``name`` among them.
    """
    cases = [
        each
        for one in {name, _as_seen(name)}
        for each in (one, one.upper(), one.lower(), one.casefold(), one.title(), one.capitalize())
    ]
    forms = {name, *(unicodedata.normalize(form, case) for case in cases for form in ("NFC", "NFD"))}
    return frozenset(forms | {form.rstrip(_LOST_AT_END) + end for form in forms for end in ("", *_LOST_AT_END)})


def _as_seen(name: str) -> str:
    """Return a name with compatibility characters replaced (² by 2), without invisible ones, and with single blanks."""
    plain = unicodedata.normalize("NFKC", name)
    return " ".join("".join(one for one in plain if unicodedata.category(one) != "Cf").split())


def _folded(name: str) -> str:
    """Return the text that all spellings of a name have in common (Unicode's caseless matching of visible text)."""
    return unicodedata.normalize("NFD", unicodedata.normalize("NFD", _as_seen(name)).casefold()).rstrip(_LOST_AT_END)


_DRAWN_ALIKE = str.maketrans(
    "авекмнорстухіјѕһԁԛԝαβεζηικμνορτυχ" + "’‘ʼ′−",
    "abekmhopctyxijshdqwabezhikmnoptyx" + "''''-",
)
"""Cyrillic and Greek letters that look like Latin ones, in lower or upper case; forms of the apostrophe; the minus."""


def look_alikes(path: Path | None, listed: Iterable[str]) -> tuple[tuple[str, ...], ...]:
    """Find names of patients that a person would read as one name.

    They differ in letters of another script (Cyrillic а for Latin a), in the script of digits, or in the kind of hyphen
    or apostrophe. Such patients stay two patients; a person decides.

    Args:
        path: The file of the slots, which need not exist; its patients are compared too. None without a site.
        listed: Names of all patients of the dataset.

    Returns:
        Groups of two or more names, sorted.

    >>> look_alikes(None, ["pat-1", "pat\u20131", "p\u0430t-1", "pat-2"])
    (('pat-1', 'pat–1', 'pаt-1'),)
    """
    groups: dict[str, dict[str, str]] = {}
    stored = load_slots(path).order if path is not None and path.exists() else ()
    for name in {*listed, *stored}:
        if not Slots.is_empty(name):
            folded = _folded(name)
            groups.setdefault("".join(map(_drawn, folded)).translate(_DRAWN_ALIKE), {})[folded] = name
    return tuple(sorted(tuple(sorted(group.values())) for group in groups.values() if len(group) > 1))


def look_alike_text(groups: Sequence[Sequence[str]]) -> str:
    """Return what look-alike names mean for the guarantee, without a name.

    Args:
        groups: As :func:`look_alikes` returns them; at least one.

    Returns:
        The text.
    """
    names = many(sum(map(len, groups)), "name")
    return f"{names} of patients look like other names: a patient with several names is protected less well"


def look_alike_names(groups: Sequence[Sequence[str]]) -> str:
    """Return look-alike names, with letters beyond ASCII as escapes, which show how the names differ.

    Args:
        groups: As :func:`look_alikes` returns them.

    Returns:
        The text, which may name patients.
    """
    return case_names([", ".join(map(ascii, group)) for group in groups])


LOOK_ALIKE_REMEDY = "if they are one patient, write one name, with the same letters and hyphens, for all scans"
"""What to do about look-alike names."""


def _drawn(character: str) -> str:
    """Return ``-`` for a kind of hyphen or dash, the digit 0 to 9 for a digit of any script, else the character."""
    if unicodedata.category(character) == "Pd":
        return "-"
    return str(unicodedata.decimal(character, character))


def _check_spelling(listed: set[str], before: Slots, stored: Sequence[Slots]) -> None:
    """Refuse a name if another spelling of it is listed or has a slot, because the patient would get two slots.

    Two names that differ only in case or at their end are accepted if one stored deal has a slot for each: a dataset
    listed both, so they are two patients.
    """
    alike: dict[str, set[str]] = {}
    for name in listed.union(before.order, *(slots.order for slots in stored)):
        alike.setdefault(_folded(name), set()).add(name)
    for name in sorted(listed, key=lambda name: (name in before.order, name)):
        names = alike[_folded(name)]
        apart = len({unicodedata.normalize("NFC", one) for one in names}) == len(names)
        if len(names) == 1 or (apart and any(names <= set(slots.order) for slots in (before, *stored))):
            continue
        raise InvalidInput(
            "name of a case that differs from another one only in upper and lower case, in its letters' encoding, in "
            "invisible characters, kinds of blanks or special forms of a character (² and 2), or in dots and blanks at "
            "its end",
            value=[ascii(name), ascii(min(names - {name}))],
            limit="the spelling that this site has already used",
            remedy="write it in the dataset as it was when it was first trained on; if the two are different patients, "
            "rename the new case",
        )


def check_listed(path: Path | None, listed: Iterable[str]) -> None:
    """Refuse names of patients that :func:`load_or_deal` would refuse. Nothing is stored.

    Args:
        path: The file of the slots, which need not exist; None without a site.
        listed: Names of all patients of the dataset.

    Raises:
        InvalidInput: If :func:`deal` refuses a name, or a stored file cannot be read.
    """
    before = load_slots(path) if path is not None and path.exists() else None
    stored = [] if path is None else _others(path)
    deal(listed, voters=1 if before is None else before.voters, seed=0, shuffle=list, before=before, stored=stored)


def _others(path: Path) -> list[Slots]:
    """Return the pool's assignments for other numbers of voters."""
    return [load_slots(other) for other in sorted(path.parent.glob("slots*.json")) if other != path]


def load_or_deal(path: Path, listed: Iterable[str], *, voters: int, seed: int | None = None) -> Slots:
    """Load the stored assignment of patients to slots, give slots to new patients, and store it.

    The first call makes the assignment.

    With fewer patients than voters some voters get no patient, and send the zero code.

    Args:
        path: The file of the slots.
        listed: Names of all patients of the dataset.
        voters: Number of voters m.
        seed: None for a random assignment. A number fixes the assignment, which is for synthetic data only; the caller
            is responsible for that.

    Returns:
        The slots, as they are now stored.

    Raises:
        InvalidInput: If the dataset lists no patient at the first call, or if the number of voters or the seed is not
            the stored one: a second assignment could put a patient into two voters.
    """
    listed = sorted(set(listed))
    before = load_slots(path) if path.exists() else None
    stored = _others(path)
    if before is None and not listed:
        raise InvalidInput("patients for training", value=0, limit="at least one")
    if before is not None and before.voters != voters:
        raise InvalidInput(
            "voters per site",
            value=voters,
            limit=f"{before.voters}, as in the stored assignment of patients to voters",
            remedy=ANOTHER_DIRECTORY,
        )
    if before is not None and seed not in (None, before.seed):
        raise InvalidInput(
            "seed of the assignment of patients to voters",
            value=seed,
            limit="the seed of the stored assignment",
            remedy=ANOTHER_DIRECTORY,
        )
    if seed is not None:
        slots = deal(listed, voters=voters, seed=seed, shuffle=by_seed(seed, before), before=before, stored=stored)
    else:
        drawn = secrets.randbelow(MAX_SEED) if before is None else before.seed
        slots = deal(listed, voters=voters, seed=drawn, before=before, stored=stored)
    save_slots(path, slots)  # also when unchanged: a file of schema 1 has just been given a key
    return slots


def save_slots(path: Path, slots: Slots) -> None:
    """Store the slots in one atomic write, readable by their owner only (mode 0600).

    Args:
        path: The file of the slots.
        slots: The slots.
    """
    write_json(path, slots.to_json(), mode=0o600)


def load_slots(path: Path) -> Slots:
    """Read stored slots. A file of schema 1 is older than withdrawals and has no key; its slots get a new key.

    Args:
        path: The file of the slots.

    Returns:
        The slots.

    Raises:
        InvalidInput: If the file cannot be read.
    """
    try:
        document = parse_json(path.read_bytes(), what="slots file")
        if isinstance(document, dict) and document.get("schema") == 1:
            document |= {"schema": SLOTS_SCHEMA, "key": secrets.token_hex(32), "withdrawn": []}
        return Slots.from_json(document)
    except (OSError, ValueError, InvalidInput) as error:
        raise InvalidInput("slots file cannot be read", value=path.name, remedy="restore it from a backup") from error
