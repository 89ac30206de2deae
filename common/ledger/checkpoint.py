"""What a server ledger's rows came to by one of its heads, signed, so that opening need not replay what is before it.

It lies beside the ledger and stands for nothing but the rows: whoever opens the ledger believes it only if the
ledger's own key signed it, the row it names is in the file, and the rows that declare studies and pools are the ones it
was made from; else it is ignored and every row is replayed. ``verify`` replays every row whatever it says. It holds
totals, ids and hashes, no code and no answer. None is made of a ledger that was recovered.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Generic, Self, TypeVar

from common.canonical import canonical_bytes, digest, parse_canonical
from common.document import Sha256
from common.errors import InvalidInput, LedgerCorrupt
from common.ledger.charges import BatchName, Roster, Spend, Spends, check_roster
from common.ledger.keys import Signed, signing_public_key
from common.ledger.packed import packed
from common.ledger.release_table import Terms
from common.ledger.rows import Row, SignedHead, check_own_hash
from common.ledger.server_state import Books
from common.objects import write_atomically
from common.privacy.mechanism import Mechanism

CHECKPOINT_ROWS = 2_000
"""Rows that are replayed before another checkpoint is made."""

CHARGING = ("release", "answer", "lost-draw", "reuse")
"""Kinds of row that a checkpoint stands for; rows of all other kinds are entered one by one."""

T = TypeVar("T")
_COLUMNS = 9
_HASH = 64
_HASHES = 96  # bytes of a charge's three hashes
_NONE = "0" * _HASH


def checkpoint_path(ledger: Path) -> Path:
    """Where the checkpoint of the ledger at this path lies."""
    return ledger.with_suffix(".checkpoint")


@dataclass(frozen=True, slots=True)
class Checkpoint(Signed):
    """The totals by ``head``, and every charge in columns.

    ``charges`` has nine integers for each: its row; study, batch, mechanism and roster by their place in the lists; its
    draw and its masks' place, both counted from 1, or 0; its answer's row or 0; 1 for a draw that was lost. ``hashes``
    has for each its query's id, its answer's row's hash and its answer's SHA-256. ``declared`` are the rows that say
    the rest, of which ``declared_sha256`` is the digest.
    """

    DOMAIN: ClassVar = b"consilium/checkpoint/v1"
    SCHEMA: ClassVar = ("checkpoint", 1)

    head: SignedHead
    declared: tuple[int, ...]
    declared_sha256: Sha256
    pools: Spends
    studies: dict[Sha256, Spends]
    batches: tuple[BatchName, ...]
    mechanisms: tuple[Mechanism, ...]
    rosters: tuple[Roster, ...]
    masks: tuple[Sha256, ...]
    reused: dict[Sha256, tuple[Sha256, ...]]
    charges: tuple[int, ...]
    hashes: str
    signature: str = ""

    @classmethod
    def of(cls, books: Books, head: SignedHead, declared: Sequence[Row]) -> Self | None:
        """What these books came to at ``head``; None where receipts or a standing were entered as charges."""
        if books.recovered or books.lost:
            return None
        studies = {study: number for number, study in enumerate(books.studies)}
        batches, mechanisms, rosters, masks = _Places[str](), _Places[Mechanism](), _Places[Roster](), _Places[str]()
        charges: list[int] = []
        hashes: list[str] = []
        for seq, one in books.releases.by_row():
            charges += (
                seq,
                studies[one.study_id],
                batches.of(one.batch_id),
                mechanisms.of(one.mechanism),
                rosters.of(one.roster),
                one.draw or 0,
                0 if one.masks is None else 1 + masks.of(one.masks),
                0 if one.answer is None else one.answer.seq,
                int(one.lost),
            )
            answer = (_NONE, _NONE) if one.answer is None else (one.answer.row_hash, one.answer.sha256)
            hashes += (one.query_id, *answer)
        return cls(
            head=head,
            declared=tuple(row.seq for row in declared),
            declared_sha256=_digest(declared),
            pools=books.all_spent(),
            studies=books.all_spent_in(),
            batches=batches.values,
            mechanisms=mechanisms.values,
            rosters=rosters.values,
            masks=masks.values,
            reused={study: tuple(queries) for study, queries in books.reused.items()},
            charges=tuple(charges),
            hashes="".join(hashes),
        )

    def save(self, path: Path) -> None:
        """Replace the file at ``path`` (mode 0600)."""
        write_atomically(path, canonical_bytes(self.to_json()), mode=0o600, flush_name=False)

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read what :meth:`save` wrote; InvalidInput or OSError for anything else. The signature is not checked."""
        return cls.from_json(parse_canonical(path.read_bytes()))

    def check(self) -> None:
        releases, rest = divmod(len(self.charges), _COLUMNS)
        if rest or len(self.hashes) != 3 * _HASH * releases or self.head.role != "server":
            raise InvalidInput(
                "checkpoint", limit="nine integers and three hashes for each charge of a server's ledger"
            )

    def books(self, row: Callable[[int], Row]) -> Books:
        """The books as they stood; ``row`` reads one of the ledger's rows.

        LedgerCorrupt unless the ledger's key at that row signed this, and the rows it names are those it was made of.
        """
        books = Books()
        declared = [row(seq) for seq in self.declared]
        last = row(self.head.seq)
        for one in (*declared, last):
            check_own_hash("server", one)
        if last.hash != self.head.hash or _digest(declared) != self.declared_sha256:
            raise LedgerCorrupt("the checkpoint is of other rows", row=self.head.seq)
        for one in declared:
            books.enter(one)
        signed = books.key.ledger_id, books.key.at(self.head.seq)
        genuine = self.head.is_genuine() and self.is_genuine(signing_public_key(books.key.public_key))
        if (self.head.ledger_id, self.head.public_key) != signed or not genuine:
            raise LedgerCorrupt("the checkpoint is not signed by the ledger's key", row=self.head.seq)
        self._fill(books)
        return books

    def _fill(self, books: Books) -> None:
        known: dict[Spend, Spend] = {}  # pools mostly stand alike: one object for one sum, as the books have it
        pools = {pool: known.setdefault(spend, spend) for pool, spend in self.pools.items()}
        studies = {
            (study, pool): known.setdefault(spend, spend)
            for study, spends in self.studies.items()
            for pool, spend in spends.items()
        }
        books.continue_from(self.head.seq, pools, studies)
        books.reused = {study: dict.fromkeys(queries) for study, queries in self.reused.items()}
        for roster in self.rosters:
            if check_roster(roster) != roster:
                raise InvalidInput("roster", limit="sorted by site")
        named = {roster: roster for roster in books.named.values()}
        rosters = tuple(named.get(roster, roster) for roster in self.rosters)
        ids, hashes, alike, terms = tuple(books.studies), packed(self.hashes), None, None
        columns = zip(*(iter(self.charges),) * _COLUMNS, strict=True)
        for at, (seq, *named_by, answered, lost) in zip(range(0, len(hashes), _HASHES), columns, strict=True):
            if terms is None or named_by != alike:
                alike, terms = named_by, self._terms(ids, rosters, *named_by)
                books.take_masks(seq, terms)
            books.releases.add_packed(seq, hashes[at : at + _HASHES], terms, answered_in=answered, lost=bool(lost))

    def _terms(
        self,
        ids: Sequence[str],
        rosters: Sequence[Roster],
        study: int,
        batch: int,
        mechanism: int,
        roster: int,
        draw: int,
        masks: int,
    ) -> Terms:
        sites, made = rosters[roster], self.mechanisms[mechanism]
        voters, known = len(sites) * made.voters_per_site, self.masks[masks - 1] if masks else None
        return Terms(ids[study], self.batches[batch], made, sites, voters, draw=draw or None, masks=known)


class _Places(Generic[T]):
    """Each value's place in a list of distinct ones."""

    def __init__(self) -> None:
        self._places: dict[T, int] = {}
        self._by_identity: dict[int, int] = {}

    def of(self, value: T) -> int:
        place = self._by_identity.get(id(value))
        if place is None:
            place = self._by_identity[id(value)] = self._places.setdefault(value, len(self._places))
        return place

    @property
    def values(self) -> tuple[T, ...]:
        return tuple(self._places)


def _digest(rows: Sequence[Row]) -> str:
    return digest("checkpoint-declared", [[row.seq, row.hash] for row in rows])
