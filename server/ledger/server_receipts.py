"""The receipts that the server's ledger issues, made from its rows alone: one that was lost can be issued again."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from heapq import merge
from itertools import groupby
from operator import itemgetter

from common.ledger.charges import NOTHING, ReleaseRecord, RosterEntry, Spend, charge_of
from common.ledger.receipts import Receipt, ReceiptedRelease
from common.ledger.records import LostRecord, parse_body
from common.ledger.rows import Link, Position, body_digest
from common.ledger.server_state import Release
from server.ledger.server_file import ServerFile

_Charged = Release | ReleaseRecord | LostRecord


class IssuesReceipts(ServerFile):
    """The part of the server's ledger that tells sites what they were charged."""

    def site_receipts(self, site: str, *, after: int = 0) -> tuple[Receipt, ...]:
        """Every receipt of one site whose head is past row ``after``, in order: what it needs after a gap.

        Reads backwards from the newest row to ``after``, and on to the site's receipt before that, but not the rest.
        """
        self._catch_up()
        return tuple(self._receipts(site, after=after))[::-1]

    def _receipts(self, site: str, *, after: int) -> Iterator[Receipt]:
        """A site's receipts past row ``after``, newest first: its sums are today's less what was charged since."""
        totals: dict[str, Spend] = {}
        newer: Callable[[int], Receipt] | None = None  # waits to be told where the receipt before it ends
        for end, group in groupby(self._newest_charges(), key=lambda item: self._chain.transaction_end(item[0])):
            if newer is None and end <= after:
                return
            items = [item for _, item in group][::-1]
            released = [item for item in items if isinstance(item, Release)]
            entry = next((entry for entry in (released[0].roster if released else ()) if entry.site == site), None)
            if newer is not None and entry is not None:
                yield newer(end)
                newer = None
            if end <= after:
                continue
            reached = {pool: totals.get(pool, self._books.spent(pool)) for pool in self._pools_of(items, site)}
            totals |= {pool: self._less(spend, items, pool) for pool, spend in reached.items()}
            if entry is not None:
                spends = totals[entry.pool], reached[entry.pool]
                newer = partial(self._receipt, released, entry, end=end, spends=spends)
        if newer is not None:
            yield newer(0)

    def _newest_charges(self) -> Iterator[tuple[int, _Charged]]:
        """Row and facts of every charge, the newest first."""
        own = ((seq, release) for seq, release in reversed(self._books.charges.items()))
        recovered, lost = reversed(self._books.recovered.values()), reversed(self._books.lost.items())
        return merge(own, recovered, lost, key=itemgetter(0), reverse=True)

    def _pools_of(self, items: Iterable[_Charged], site: str) -> Iterator[str]:
        """The pools of one site that these charged."""
        for item in items:
            if isinstance(item, LostRecord):
                yield from (pool for pool in item.pools if self._books.pools[pool].site == site)
            else:
                yield from (entry.pool for entry in item.roster if entry.site == site)

    def _less(self, spend: Spend, items: list[_Charged], pool: str) -> Spend:
        """What a pool had spent before ``items``, of which ``spend`` is the sum after them."""
        protection = self._books.pools[pool].protection
        for item in items:
            if isinstance(item, LostRecord):
                spend = spend.beyond(item.pools.get(pool, NOTHING))
            elif any(entry.pool == pool for entry in item.roster):
                mechanism = item.mechanism if isinstance(item, Release) else item.query.mechanism
                cost = charge_of(mechanism, protection, self._books.studies[item.study_id].protection)
                spend = Spend(spend.mu_squared - cost, spend.releases - 1, spend.coordinates - mechanism.dimension)
        return spend

    def _receipt(
        self, released: list[Release], entry: RosterEntry, start: int, *, end: int, spends: tuple[Spend, Spend]
    ) -> Receipt:
        rows = self._chain.rows_between(start, end)
        seqs = {item.seq for item in released}
        records = {row.seq: ReleaseRecord.from_json(parse_body(row.body)) for row in rows if row.seq in seqs}
        receipt = Receipt(
            study_id=released[0].study_id,
            batch_id=released[0].batch_id,
            site=entry.site,
            declaration=self._books.pools[entry.pool],
            releases=tuple(ReceiptedRelease(item.seq, records[item.seq]) for item in released),
            before=spends[0],
            after=spends[1],
            previous=Position(start, rows[0].prev_hash),
            links=tuple(Link(row.time_utc, row.kind, body_digest(row.body)) for row in rows),
            head=self._chain.head(end),
        )
        return receipt.signed(self._chain.signing_key)
