"""A ledger's standing, kept beside the file: its newest charged head and what was spent by then.

A ledger restored from an older copy is valid in itself; only something kept outside it can tell. The standing is
written after every charge, so it never runs ahead of the ledger, and it says exactly how much an older copy has
forgotten. It may lie on another disk, behind a link. Refuses a link that leads nowhere. It holds no code, no answer and
no name.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from common.canonical import check_hash, checked_fields
from common.errors import InvalidInput, LedgerCorrupt
from common.ledger.chain import SignedHead
from common.ledger.records import PoolDeclaration, Spend, spends_from_json, spends_to_json
from common.objects import write_atomically


@dataclass(frozen=True, slots=True)
class Standing:
    """A site ledger's. ``pool`` is spent in all under the pool's protection, ``studies`` in each study under its own;
    ``queries`` were accepted on ``day`` (UTC), and those in ``pending`` (ids) had no receipt yet."""

    head: SignedHead
    pool: Spend
    studies: dict[str, Spend]
    day: str
    queries: int
    pending: tuple[str, ...]

    def save(self, path: Path) -> None:
        """Replace the file at ``path`` (mode 0600). A power cut may leave the one before it, which tells less."""
        document = {
            "day": self.day,
            "head": self.head.to_json(),
            "pending": list(self.pending),
            "pool": self.pool.to_json(),
            "queries": self.queries,
            "studies": {study: spend.to_json() for study, spend in self.studies.items()},
        }
        write_atomically(path, (json.dumps(document, indent=1) + "\n").encode(), mode=0o600, flush_name=False)

    @classmethod
    def load(cls, path: Path) -> Standing:
        """Read what :meth:`save` wrote; InvalidInput for anything else."""
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
            kinds: dict[str, type] = {"day": str, "head": dict, "pool": dict, "queries": int, "studies": dict}
            kinds["pending"] = list
            fields = checked_fields(data, kinds)
            head = SignedHead.from_json(fields["head"])
            if head.role != "site" or not head.is_genuine():
                raise InvalidInput("head", limit="a site ledger's, signed by its key")
            return cls(
                head=head,
                pool=Spend.from_json(fields["pool"]),
                studies={check_hash(study): Spend.from_json(spend) for study, spend in fields["studies"].items()},
                day=fields["day"],
                queries=fields["queries"],
                pending=tuple(check_hash(query) for query in fields["pending"]),
            )
        except (OSError, ValueError, InvalidInput) as error:
            raise InvalidInput(
                "standing of a site ledger",
                value=str(path),
                limit="as the ledger wrote it",
                remedy="restore it; if it is lost, treat the ledger as restored: `consilium site recover --own-ledger`",
            ) from error


@dataclass(frozen=True, slots=True)
class ServerStanding:
    """The server ledger's: what every pool spent in all, and by study and pool within each study, and how the pools
    were declared, since a copy may have lost that too."""

    head: SignedHead
    pools: dict[str, Spend]
    studies: dict[str, dict[str, Spend]]
    declarations: tuple[PoolDeclaration, ...]

    def save(self, path: Path) -> None:
        """Replace the file at ``path`` (mode 0600). A power cut may leave the one before it, which tells less."""
        document = {
            "declarations": [declaration.to_json() for declaration in self.declarations],
            "head": self.head.to_json(),
            "pools": spends_to_json(self.pools),
            "studies": {study: spends_to_json(pools) for study, pools in self.studies.items()},
        }
        write_atomically(path, (json.dumps(document, indent=1) + "\n").encode(), mode=0o600, flush_name=False)

    @classmethod
    def load(cls, path: Path) -> ServerStanding:
        """Read what :meth:`save` wrote; InvalidInput for anything else."""
        try:
            kinds: dict[str, type] = {"declarations": list, "head": dict, "pools": dict, "studies": dict}
            fields = checked_fields(json.loads(path.read_text(encoding="utf-8")), kinds)
            head = SignedHead.from_json(fields["head"])
            if head.role != "server" or not head.is_genuine():
                raise InvalidInput("head", limit="a server ledger's, signed by its key")
            return cls(
                head=head,
                pools=spends_from_json(fields["pools"]),
                studies={check_hash(study): spends_from_json(pools) for study, pools in fields["studies"].items()},
                declarations=tuple(PoolDeclaration.from_json(item) for item in fields["declarations"]),
            )
        except (OSError, ValueError, InvalidInput) as error:
            raise InvalidInput(
                "standing of the server's ledger",
                value=str(path),
                limit="as the ledger wrote it",
                remedy="restore it; if it is lost, take the file away and run `consilium ledger recover` with every "
                "site's receipts",
            ) from error


def standing_path(ledger: Path) -> Path:
    """Where the standing of the ledger at this path lies: beside it, or where a link beside it leads."""
    path = ledger.with_suffix(".standing")
    return path.resolve() if path.is_symlink() else path


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
