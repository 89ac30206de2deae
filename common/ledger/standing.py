"""A site ledger's standing, kept beside the file: its newest charged head and what was spent by then.

A ledger restored from an older copy is valid in itself; only something kept outside it can tell. The standing is
written after every charge, so it never runs ahead of the ledger, and it says exactly how much an older copy has
forgotten. Refuses a ledger that does not contain it. It holds no code and no name.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from common.canonical import check_hash, checked_fields
from common.errors import InvalidInput
from common.ledger.chain import SignedHead
from common.ledger.records import Spend
from common.objects import write_atomically


@dataclass(frozen=True, slots=True)
class Standing:
    """``pool`` is spent in all under the pool's protection, ``studies`` in each study under its own; ``queries`` were
    accepted on ``day`` (UTC), and those in ``pending`` (ids) had no receipt yet."""

    head: SignedHead
    pool: Spend
    studies: dict[str, Spend]
    day: str
    queries: int
    pending: tuple[str, ...]

    def save(self, path: Path) -> None:
        """Replace the file at ``path`` (mode 0600, durable)."""
        document = {
            "day": self.day,
            "head": self.head.to_json(),
            "pending": list(self.pending),
            "pool": self.pool.to_json(),
            "queries": self.queries,
            "studies": {study: spend.to_json() for study, spend in self.studies.items()},
        }
        write_atomically(path, (json.dumps(document, indent=1) + "\n").encode(), mode=0o600)

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


def standing_path(ledger: Path) -> Path:
    """Where the standing of the ledger at this path lies."""
    return ledger.with_suffix(".standing")
