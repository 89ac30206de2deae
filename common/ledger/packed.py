"""Hashes and numbers of many queries in little memory: 32 bytes a hash and 4 a number, where objects took hundreds.

Whole hashes are kept and compared: what is found is what was put in, whoever chose the hashes.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Mapping

from common.errors import InvalidInput, LedgerCorrupt
from common.ledger.rows import Row

_BYTES, _HALF = 32, 16


def hash_bytes(text: str) -> bytes | None:
    """The 32 bytes that 64 lower-case hexadecimal digits say; None for any other text."""
    try:
        found = bytes.fromhex(text)
    except ValueError:
        return None
    return found if len(found) == _BYTES and found.hex() == text else None


def packed(text: str) -> bytes:
    """The bytes of one or more hashes written after each other; InvalidInput for a text that is something else."""
    try:
        found = bytes.fromhex(text)
    except ValueError:
        found = b""
    if len(found) % _BYTES or found.hex() != text:
        raise InvalidInput("hashes", value=text[:200], limit="64 lower-case hexadecimal digits each")
    return found


class _Packed:
    """Hashes by their places 0, 1, 2 …, in the order they were added."""

    def __init__(self) -> None:
        self._packed = bytearray()

    def __len__(self) -> int:
        return len(self._packed) // _BYTES

    def __getitem__(self, place: int) -> str:
        return self._packed[_BYTES * place : _BYTES * (place + 1)].hex()


class Hashes(_Packed):
    """Hashes by their places, the same one as often as it is added."""

    def add(self, found: bytes) -> None:
        """Add a hash's 32 bytes."""
        self._packed += found

    def put(self, place: int, text: str) -> None:
        """Another hash in a place that has one."""
        self._packed[_BYTES * place : _BYTES * (place + 1)] = _hash(text)

    def drop_last(self) -> None:
        del self._packed[-_BYTES:]


class Digests(_Packed):
    """Hashes by their places, each once, and each found by its text.

    An open-addressing table of places, probed one by one from Python's own seeded hash of the 32 bytes.
    """

    def __init__(self) -> None:
        super().__init__()
        self._slots = _numbers(8)  # a place + 1; 0 where free

    def find(self, text: str) -> int | None:
        """The place of a hash; None for one that was not added, and for a text that is none."""
        wanted = hash_bytes(text)
        place = -1 if wanted is None else self._slots[self._slot(wanted)] - 1
        return None if place < 0 else place

    def add(self, text: str) -> int:
        """The place of a hash, which is added if it is new; InvalidInput for what is none."""
        return self.add_packed(_hash(text))

    def add_packed(self, wanted: bytes) -> int:
        """The same for a hash's 32 bytes."""
        slot = self._slot(wanted)
        if self._slots[slot]:
            return self._slots[slot] - 1
        place = len(self)
        self._packed += wanted
        self._slots[slot] = place + 1
        if 2 * (place + 1) > len(self._slots):  # fuller, a probe takes longer
            self._widen()
        return place

    def drop_last(self) -> None:
        """Take the newest hash back: probing stops where it did before it was added."""
        self._slots[self._slot(bytes(self._packed[-_BYTES:]))] = 0
        del self._packed[-_BYTES:]

    def _slot(self, wanted: bytes) -> int:
        """Where the place of these 32 bytes stands, or would."""
        packed, slots, last = self._packed, self._slots, len(self._slots) - 1
        slot = hash(wanted) & last
        while (found := slots[slot]) and packed[_BYTES * (found - 1) : _BYTES * found] != wanted:
            slot = (slot + 1) & last
        return slot

    def _widen(self) -> None:
        self._slots = _numbers(2 * len(self._slots))
        for place in range(len(self)):
            self._slots[self._slot(bytes(self._packed[_BYTES * place : _BYTES * (place + 1)]))] = place + 1


class Column(Mapping[str, int]):
    """A number from 1 for some of the hashes of a table, in that table's order."""

    def __init__(self, digests: Digests) -> None:
        self._digests = digests
        self._values = _numbers(0)
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[str]:
        return (self._digests[place] for place, value in enumerate(self._values) if value)

    def __contains__(self, text: object) -> bool:
        return isinstance(text, str) and self._find(text) > 0

    def __getitem__(self, text: str) -> int:
        """KeyError for a hash that has no number."""
        value = self._find(text)
        if not value:
            raise KeyError(text)
        return value

    def __setitem__(self, text: str, value: int) -> None:
        """Give a number to a hash of the table, or another one; KeyError for a hash that is not in it."""
        place = self._digests.find(text)
        if place is None or value < 1:
            raise KeyError(text)
        self._values.extend(_numbers(max(place + 1 - len(self._values), 0)))
        self._count += not self._values[place]
        self._values[place] = value

    def without(self) -> Iterator[str]:
        """The hashes of the table that have no number, in order."""
        values = self._values
        unset = (place for place, value in enumerate(values) if not value)
        yield from map(self._digests.__getitem__, unset)
        yield from map(self._digests.__getitem__, range(len(values), len(self._digests)))

    def _find(self, text: str) -> int:
        place = self._digests.find(text)
        return 0 if place is None or place >= len(self._values) else self._values[place]


class Rows(Column):
    """A ledger's row for some of the hashes of a table: its number, and half of its own hash to know it again by."""

    def __init__(self, digests: Digests) -> None:
        super().__init__(digests)
        self._halves = bytearray()

    def enter(self, text: str, row: Row) -> None:
        """This row from now on, in the place of one before."""
        self[text] = row.seq
        self._halves.extend(bytes(_HALF * len(self._values) - len(self._halves)))
        at = _HALF * (self._digests.find(text) or 0)
        self._halves[at : at + _HALF] = _hash(row.hash)[:_HALF]

    def check(self, text: str, row: Row) -> None:
        """LedgerCorrupt unless this row, read back, is the one that was entered."""
        at = _HALF * (self._digests.find(text) or 0)
        if self.get(text) != row.seq or self._halves[at : at + _HALF] != _hash(row.hash)[:_HALF]:
            raise LedgerCorrupt("the row was altered while the ledger was open", row=row.seq)


def _hash(text: str) -> bytes:
    found = hash_bytes(text)
    if found is None:
        raise InvalidInput("hash", value=text, limit="64 lower-case hexadecimal digits")
    return found


def _numbers(count: int) -> array[int]:
    return array("I", bytes(4 * count))
