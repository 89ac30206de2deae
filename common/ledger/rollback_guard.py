"""A ledger's standing, kept beside the file: its newest charged head and what was spent by then.

A ledger restored from an older copy is valid in itself; only something kept outside it can tell. The standing is
written after every charge, so it never runs ahead of the ledger, and it says exactly how much an older copy has
forgotten. It may lie on another disk, behind a link. Refuses a link that leads nowhere. It holds no code, no answer and
no name.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Self

from common.document import Document, Sha256
from common.errors import InvalidInput, LedgerCorrupt
from common.ledger.charges import PoolDeclaration, Spend, Spends
from common.ledger.rows import Position, SignedHead
from common.objects import write_atomically


@dataclass(frozen=True, slots=True)
class KeptStanding(Document):
    """What both ledgers' standings have in common: the newest head that charged something."""

    ROLE: ClassVar[str]
    WHAT: ClassVar[str]
    REMEDY: ClassVar[str]

    head: SignedHead

    def check(self) -> None:
        if self.head.role != self.ROLE or not self.head.is_genuine():
            raise InvalidInput("head", limit=f"a {self.ROLE} ledger's, signed by its key")

    def save(self, path: Path) -> None:
        """Replace the file at ``path`` (mode 0600). A power cut may leave the one before it, which tells less."""
        text = json.dumps(self.to_json(), indent=1, sort_keys=True) + "\n"
        write_atomically(path, text.encode(), mode=0o600, flush_name=False)

    def against(
        self, *, ledger_id: str, rows: int, contains: Callable[[Position], bool], this: str, beside: str
    ) -> str | None:
        """What this standing, kept ``beside`` a file, shows against ``this`` file of so many rows; None if nothing."""
        if self.head.ledger_id != ledger_id:
            return f"the standing kept {beside} is of another ledger, {self.head.ledger_id}"
        if contains(Position(self.head.seq, self.head.hash)):
            return None
        return (
            f"{this} ends at row {rows} and had charged in row {self.head.seq} before: an older copy was put in its "
            "place"
        )

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read what :meth:`save` wrote; InvalidInput for anything else."""
        try:
            return cls.from_json(json.loads(path.read_text(encoding="utf-8")))
        except (OSError, ValueError, RecursionError, InvalidInput) as error:
            raise InvalidInput(
                f"standing of {cls.WHAT}", value=str(path), limit="as the ledger wrote it", remedy=cls.REMEDY
            ) from error


@dataclass(frozen=True, slots=True)
class Standing(KeptStanding):
    """A site ledger's. ``pool`` is spent in all under the pool's protection, ``studies`` in each study under its own;
    ``queries`` were accepted on ``day`` (UTC), and those in ``pending`` (ids) had no receipt yet."""

    ROLE = "site"
    WHAT = "a site ledger"
    REMEDY = "restore it; if it is lost, treat the ledger as restored: `consilium site recover --own-ledger`"

    pool: Spend
    studies: dict[Sha256, Spend]
    day: str
    queries: int
    pending: tuple[Sha256, ...]


@dataclass(frozen=True, slots=True)
class ServerStanding(KeptStanding):
    """The server ledger's: what every pool spent in all, and by study and pool within each study, and how the pools
    were declared, since a copy may have lost that too."""

    ROLE = "server"
    WHAT = "the server's ledger"
    REMEDY = (
        "restore it; if it is lost, take the file away and run `consilium ledger recover` with every site's receipts"
    )

    pools: Spends
    studies: dict[Sha256, Spends]
    declarations: tuple[PoolDeclaration, ...]


def standing_path(ledger: Path) -> Path:
    """Where the standing of the ledger at this path lies: beside it, or where a link beside it leads."""
    path = ledger.with_suffix(".standing")
    return Path(os.path.realpath(path)) if path.is_symlink() else path


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
