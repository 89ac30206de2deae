"""Keeps a ledger's standing beside the file, by which a ledger restored from an older copy is detected and recharged.

Both ledgers use it. A ledger restored from an older copy is valid in itself; only something outside the file can tell.
The standing contains the newest head, what was spent by then, and the ends of earlier transactions (``marks``). It is
written after every transaction of any kind, so it never runs ahead of the ledger. A ledger that continued from an older
copy contains one of the marks. The standing therefore tells what was charged since the two diverged, and not only by
how much their totals differ now.

The standing may be on another disk, behind a link. It contains no code, no answer and no name. Refuses a link that
leads nowhere.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, ClassVar, Self

from common.canonical import canonical_text
from common.document import LATER, Document, Sha256
from common.errors import InvalidInput, LedgerCorrupt
from common.ledger.charges import Number, PoolDeclaration, PoolName, Spend, Spends
from common.ledger.rows import Position, SignedHead
from common.ledger.teacher_records import PatientRecord
from common.objects import write_atomically
from common.reading import parse_json


@dataclass(frozen=True, slots=True)
class KeptStanding(Document):
    """Base of both ledgers' standings: the newest head, and earlier ends of transactions, newest first.

    A standing of an early version has no ``marks``; where it diverged from a ledger is then unknown.
    """

    ROLE: ClassVar[str]
    WHAT: ClassVar[str]
    REMEDY: ClassVar[str]

    head: SignedHead
    marks: Annotated[tuple[tuple[Number, Sha256], ...], LATER] = field(default=(), kw_only=True)

    def check(self) -> None:
        """Refuse a head of another kind of ledger, or one whose signature is not genuine."""
        if self.head.role != self.ROLE or not self.head.is_genuine():
            raise InvalidInput("head", limit=f"a {self.ROLE} ledger's, signed by its key")

    @property
    def position(self) -> Position:
        """The newest row that the standing knows."""
        return Position(self.head.seq, self.head.hash)

    def positions(self) -> Iterator[Position]:
        """Return every row that the standing names, newest first."""
        yield self.position
        for seq, hashed in self.marks:
            if seq < self.head.seq:
                yield Position(seq, hashed)

    def save(self, path: Path) -> None:
        """Replace the file (mode 0600). A power cut may leave the file before it, which is older but valid.

        Args:
            path: The standing's file.
        """
        text = canonical_text(self.to_json()) + "\n"
        write_atomically(path, text.encode(), mode=0o600, flush_name=False)

    def against(
        self, *, ledger_id: str, rows: int, covers: Callable[[Position], bool], this: str, beside: str
    ) -> str | None:
        """Return words on what this standing shows against a ledger file.

        Args:
            ledger_id: Id of the ledger in the file.
            rows: Number of its rows.
            covers: Returns whether all charges up to a row are in the ledger.
            this: Words for the ledger's file.
            beside: Words for where the standing is kept.

        Returns:
            The words; None if the ledger covers the standing.
        """
        if self.head.ledger_id != ledger_id:
            return f"the standing kept {beside} is of another ledger, {self.head.ledger_id}"
        if covers(self.position):
            return None
        return (
            f"{this} ends at row {rows} and lacks row {self.head.seq} as the standing kept {beside} knows it: an older "
            "copy was put in its place"
        )

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read the file that :meth:`save` wrote.

        Args:
            path: The standing's file.

        Returns:
            The standing.

        Raises:
            InvalidInput: For anything else.
        """
        try:
            return cls.from_json(parse_json(path.read_bytes(), what=f"standing of {cls.WHAT}"))
        except (OSError, ValueError, InvalidInput) as error:
            raise InvalidInput(
                f"standing of {cls.WHAT}", value=str(path), limit="as the ledger wrote it", remedy=cls.REMEDY
            ) from error


@dataclass(frozen=True, slots=True)
class SiteLedgerStanding(KeptStanding):
    """The standing of a site's ledger.

    Attributes:
        pool: Total spent, under the pool's protection.
        studies: Total by study, under the study's protection.
        day: UTC date of the newest acceptances.
        queries: Number of queries accepted on that day.
        pending: Ids of accepted queries without a receipt.
        patients: Withdrawals of patients on record, by keyed hashes.
        left: Studies from which the site withdrew for good.
    """

    ROLE = "site"
    WHAT = "a site ledger"
    REMEDY = "restore it; if it is lost, treat the ledger as restored: `consilium site recover --own-ledger`"

    pool: Spend
    studies: dict[Sha256, Spend]
    day: str
    queries: int
    pending: tuple[Sha256, ...]
    patients: Annotated[tuple[PatientRecord, ...], LATER] = ()
    left: Annotated[tuple[Sha256, ...], LATER] = ()


@dataclass(frozen=True, slots=True)
class ServerStanding(KeptStanding):
    """The standing of the server's ledger.

    Attributes:
        pools: Total spent of every pool.
        studies: Total by study and pool.
        declarations: How the pools were declared, since an older copy may lack that too.
        books: Id of the site ledger that keeps each pool's accounts.
    """

    ROLE = "server"
    WHAT = "the server's ledger"
    REMEDY = (
        "restore it; if it is lost, take the file away and run `consilium ledger recover` with every site's receipts "
        "and --charge-all"
    )

    pools: Spends
    studies: dict[Sha256, Spends]
    declarations: tuple[PoolDeclaration, ...]
    books: Annotated[dict[PoolName, str], LATER] = field(default_factory=dict)


def standing_path(ledger: Path) -> Path:
    """Return the path of a ledger's standing: beside the ledger, or where a link beside it leads.

    Args:
        ledger: The ledger's file.

    Returns:
        The path; the file may not exist.
    """
    path = ledger.with_suffix(".standing")
    return Path(os.path.realpath(path)) if path.is_symlink() else path


def lies_with_its_key(ledger: Path) -> bool:
    """Return whether a signing key is beside the ledger, so that it is in use here and no read-only copy.

    Args:
        ledger: The ledger's file.

    Returns:
        True if there is a key.
    """
    key = ledger.with_suffix(".key")
    return key.exists() or (key.parent / "keys" / key.name).exists()


def kept_standing(ledger: Path) -> Path | None:
    """Return the file of a ledger's standing.

    Args:
        ledger: The ledger's file.

    Returns:
        The path; None if there is none.

    Raises:
        LedgerCorrupt: If its link leads nowhere, since a rollback could then not be detected.
    """
    path = standing_path(ledger)
    if path.exists():
        return path
    if ledger.with_suffix(".standing").is_symlink():
        raise LedgerCorrupt(
            f"the standing of {ledger} is not at {path}; to fix: mount that disk, or bring the file back"
        )
    return None
