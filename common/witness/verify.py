"""Verifies who countersigned a ledger's heads, from the notes (signed heads) beside the ledger.

Called by the commands that verify and audit a ledger. Refuses nothing: a note of another ledger is ignored. A note
that counts more rows than the ledger has, or whose root differs from that of the ledger's rows, is reported as a
problem, because a ledger that was never rolled back or forked contains every head that it signed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

from common.ledger.rows import SignedHead
from common.witness.memory import FOLDER, read_note
from common.witness.merkle import root
from common.witness.notes import origin_of, witness_name


@dataclass(frozen=True, slots=True)
class Countersigned:
    """The countersignatures in the notes (signed heads) beside a ledger.

    Attributes:
        rows: Number of the ledger's rows that its heads cover.
        size: Number of rows at the newest countersigned head; 0 if there is none.
        witnesses: Times at which that head was countersigned, by the witness's name.
        known: Number of witnesses whose keys were tried.
        problems: Sentences about notes that contradict the ledger.
    """

    rows: int
    size: int
    witnesses: Mapping[str, datetime]
    known: int
    problems: tuple[str, ...]

    @property
    def line(self) -> str:
        """The result in one sentence."""
        if not self.known:
            return "witnesses: 0, since no witness's key is known here"
        if not self.size:
            return f"witnesses: 0 of {self.known} have countersigned a head"
        names = ", ".join(f"{name} ({time:%Y-%m-%d})" for name, time in sorted(self.witnesses.items()))
        newest = "the newest row" if self.size == self.rows else f"row {self.size} of {self.rows}"
        return f"witnesses: {len(self.witnesses)} of {self.known} have countersigned {newest}: {names}"

    def to_json(self) -> dict[str, object]:
        """Return the result as plain JSON."""
        times = {name: time.isoformat() for name, time in sorted(self.witnesses.items())}
        return asdict(self) | {"problems": list(self.problems), "witnesses": times}


def countersigned(
    folder: Path, head: SignedHead, leaves: Sequence[bytes], *, signers: Iterable[str], witnesses: Mapping[str, str]
) -> Countersigned:
    """Compare the notes (signed and countersigned heads) in ``folder/witnesses`` with a ledger's rows.

    Args:
        folder: Folder of the ledger.
        head: The ledger's newest head.
        leaves: Leaves of its tree in order: hashes of the rows that heads count, blinded in a site's ledger.
        signers: Keys (hex) that ever signed this ledger's heads.
        witnesses: Key (hex) of each witness, by site.

    Returns:
        The countersignatures, and the notes that contradict the ledger.
    """
    origin, keys = origin_of(head.role, head.ledger_id), tuple(signers)
    problems: list[str] = []
    best: tuple[int, dict[str, datetime]] = 0, {}
    for path in sorted((folder / FOLDER).glob("*")):
        note = None if path.suffix == ".json" else read_note(path)
        if note is None or note.origin != origin:
            continue
        seen = {
            site: datetime.fromtimestamp(time, UTC)
            for site, key in witnesses.items()
            if (time := note.cosigned_at(name=witness_name(site), key=key)) is not None
        }
        if not any(note.is_signed(key) for key in keys):
            continue  # no key of this ledger signed it; another ledger may use this one's name
        if note.size > len(leaves):
            problems.append(f"a head of row {note.size} was signed, but the ledger ends at row {len(leaves)}")
        elif root(leaves[: note.size]) != note.root:
            problems.append(f"the ledger's rows up to {note.size} differ from the rows that a signed head covers")
        elif (note.size, len(seen)) > (best[0], len(best[1])) and seen:
            best = note.size, seen
    return Countersigned(len(leaves), best[0], best[1], len(witnesses), tuple(dict.fromkeys(problems)))
