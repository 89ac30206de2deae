"""Keeps a ledger's standing beside the file: its newest head, what was spent by then, and earlier heads.

A ledger restored from an older copy is valid in itself; only something kept outside it can tell. The standing is
written after every transaction, whichever kind of row it added, so it never runs ahead of the ledger. It names the ends
of earlier transactions too (``marks``). A ledger that went on from an older copy holds one of them, so the standing
says what was charged since the two parted, not only by how much their sums differ now. It may lie on another disk,
behind a link. Refuses a link that leads nowhere. It holds no code, no answer and no name.
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
    """What both ledgers' standings have in common: the newest head, and earlier ends of transactions as ``marks``,
    newest first. A standing of a version that knew no marks has none: where it parted from a ledger is then unknown."""

    ROLE: ClassVar[str]
    WHAT: ClassVar[str]
    REMEDY: ClassVar[str]

    head: SignedHead
    marks: Annotated[tuple[tuple[Number, Sha256], ...], LATER] = field(default=(), kw_only=True)

    def check(self) -> None:
        if self.head.role != self.ROLE or not self.head.is_genuine():
            raise InvalidInput("head", limit=f"a {self.ROLE} ledger's, signed by its key")

    @property
    def position(self) -> Position:
        """The newest row it knows."""
        return Position(self.head.seq, self.head.hash)

    def positions(self) -> Iterator[Position]:
        """Every row it names, the newest first."""
        yield self.position
        for seq, hashed in self.marks:
            if seq < self.head.seq:
                yield Position(seq, hashed)

    def save(self, path: Path) -> None:
        """Replace the file at ``path`` (mode 0600). A power cut may leave the one before it, which tells less."""
        text = canonical_text(self.to_json()) + "\n"
        write_atomically(path, text.encode(), mode=0o600, flush_name=False)

    def against(
        self, *, ledger_id: str, rows: int, covers: Callable[[Position], bool], this: str, beside: str
    ) -> str | None:
        """What this standing, kept ``beside`` a file, shows against ``this`` file of so many rows; None if nothing."""
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
        """Read what :meth:`save` wrote; InvalidInput for anything else."""
        try:
            return cls.from_json(parse_json(path.read_bytes(), what=f"standing of {cls.WHAT}"))
        except (OSError, ValueError, InvalidInput) as error:
            raise InvalidInput(
                f"standing of {cls.WHAT}", value=str(path), limit="as the ledger wrote it", remedy=cls.REMEDY
            ) from error


@dataclass(frozen=True, slots=True)
class SiteLedgerStanding(KeptStanding):
    """A site ledger's. ``pool`` is spent in all under the pool's protection, ``studies`` in each study under its own;
    ``queries`` were accepted on ``day`` (UTC), and those in ``pending`` (ids) had no receipt yet. ``patients`` are the
    withdrawals on record, by keyed hashes; from the studies ``left`` the site withdrew for good."""

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
    """The server ledger's: what every pool spent in all, and by study and pool within each study. It has how the pools
    were declared and where their books are (``books``), since a copy may have lost that too."""

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
    """Where the standing of the ledger at this path lies: beside it, or where a link beside it leads."""
    path = ledger.with_suffix(".standing")
    return Path(os.path.realpath(path)) if path.is_symlink() else path


def lies_with_its_key(ledger: Path) -> bool:
    """Whether a signing key lies beside the ledger: it is in use here, and no copy that is only read."""
    key = ledger.with_suffix(".key")
    return key.exists() or (key.parent / "keys" / key.name).exists()


def kept_standing(ledger: Path) -> Path | None:
    """The standing's file, None if there is none. LedgerCorrupt if its link leads nowhere: then nothing can be told."""
    path = standing_path(ledger)
    if path.exists():
        return path
    if ledger.with_suffix(".standing").is_symlink():
        raise LedgerCorrupt(
            f"the standing of {ledger} is not at {path}; to fix: mount that disk, or bring the file back"
        )
    return None
