"""Issues the receipts of the server's ledger, which tell sites what was charged to their pools.

Receipts are made from the ledger's rows alone, so a lost receipt can be issued again. The aggregator sends them to the
sites. The text that the receipts of one transaction have in common is computed once for all sites. A row with a wrong
hash or link is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cached_property, partial
from heapq import merge
from itertools import groupby, pairwise
from operator import itemgetter

from common.canonical import canonical_members, canonical_text
from common.errors import LedgerCorrupt
from common.ledger.chain import Chain
from common.ledger.charges import NOTHING, Roster, RosterEntry, Spend, charge_of
from common.ledger.receipts import Receipt, common_digest, signed_text
from common.ledger.records import LostRecord, parse_body
from common.ledger.releases import RecoveredCharge, Release
from common.ledger.rows import Link, Position, Row, body_digest, check_link, check_own_hash
from common.privacy.mechanism import Protection
from server.ledger.server_file import ServerFile

_Charged = Release | RecoveredCharge | LostRecord

MAX_SHARED_CHARACTERS = 64 << 20
"""Limit on the cached text that receipts of several sites have in common, in characters; a fuller cache is emptied."""


@dataclass(frozen=True)
class _Transaction:
    """The charges of one transaction, oldest first.

    Attributes:
        end: Number of the transaction's last row.
        items: Its charges: releases, and charges that a recovery entered.
        costs: Cache of the transaction's total μ² and number of coordinates, by protection (unit of privacy and
            relation).
    """

    end: int
    items: tuple[_Charged, ...]
    costs: dict[Protection, tuple[Fraction, int]] = field(default_factory=dict)

    @cached_property
    def released(self) -> tuple[Release, ...]:
        """The releases among the transaction's items."""
        return tuple(item for item in self.items if isinstance(item, Release))

    @cached_property
    def entries(self) -> dict[str, RosterEntry]:
        """The roster of the transaction's releases, by site; empty if the transaction contains no release."""
        return {entry.site: entry for entry in self.released[0].roster} if self.released else {}

    @cached_property
    def pools(self) -> tuple[frozenset[str], ...]:
        """The names of the pools that each of :attr:`items` charged, in the order of ``items``."""
        found: list[frozenset[str]] = []
        roster, names = Roster(), frozenset[str]()
        for item in self.items:
            if isinstance(item, LostRecord):
                found.append(frozenset(item.pools))
                continue
            if item.roster != roster:  # usually the same as the item before
                roster, names = item.roster, frozenset(entry.pool for entry in item.roster)
            found.append(names)
        return tuple(found)

    @cached_property
    def one_roster(self) -> bool:
        """True if every item is a release with the same pools."""
        return len(self.released) == len(self.items) and len(set(self.pools)) == 1


@dataclass(frozen=True)
class _Shared:
    """The common text of one transaction's receipts, for all sites whose previous receipts end at the same row.

    Attributes:
        members: The common JSON members, by name.
        digest: Digest of the common members, if the receipts' signatures cover this digest; None if they cover the
            members' text.
        rosters: One pair for each long roster that the covered rows introduce: the names of the sites on the roster,
            and the roster's text. The receipts of these sites contain the roster.
    """

    members: dict[str, str]
    digest: str | None
    rosters: tuple[tuple[frozenset[str], str], ...]

    @property
    def characters(self) -> int:
        return sum(map(len, self.members.values())) + sum(len(text) for _, text in self.rosters)


class IssuesReceipts(ServerFile):
    """The part of the server's ledger that issues receipts, which tell sites what they were charged."""

    def __init__(self, chain: Chain) -> None:
        super().__init__(chain)
        self._read: list[_Transaction] = []
        self._older: Iterator[_Transaction] = iter(())
        self._read_at = 0
        self._shared: dict[tuple[int, int], _Shared] = {}
        self._shared_characters = 0

    def receipts_due(self, site: str, *, after: int = 0) -> Sequence[Callable[[], str]]:
        """Return the receipts of one site, each as a function that renders and signs its text.

        Rows are read only back to the last receipt of the site that ends at or before row ``after``.

        Args:
            site: The site's name.
            after: Return only receipts whose head is past this row.

        Returns:
            One function for each receipt, oldest first. It returns the same text as :meth:`Receipt.render`, and raises
            LedgerCorrupt if the hash or link of a row is wrong.
        """
        self._catch_up()
        return tuple(self._due(site, after=after))[::-1]

    def _due(self, site: str, *, after: int) -> Iterator[Callable[[], str]]:
        """Yield a site's receipts past row ``after``, newest first, each as a function that renders its text.

        The totals in a receipt are the current totals less the charges after the receipt.
        """
        totals: dict[str, Spend] = {}
        newer: Callable[[int], str] | None = None  # its argument is the row at which the receipt before it ends
        for transaction in self._transactions():
            end = transaction.end
            if newer is None and end <= after:
                return
            entry = transaction.entries.get(site)
            if newer is not None and entry is not None:
                yield partial(newer, end)
                newer = None
            if end <= after:
                continue
            reached = {pool: totals.get(pool, self._books.spent(pool)) for pool in self._pools_of(transaction, site)}
            totals |= {pool: self._less(spend, transaction, pool) for pool, spend in reached.items()}
            if entry is not None:
                newer = partial(self._text, transaction, entry, totals[entry.pool], reached[entry.pool])
        if newer is not None:
            yield partial(newer, 0)

    def _transactions(self) -> Iterator[_Transaction]:
        """Yield every transaction that charged something, newest first; the cache is emptied when a row is added."""
        if self._read_at != self._books.row_count:
            groups = groupby(self._newest_charges(), key=lambda item: self._chain.transaction_end(item[0]))
            self._older = (_Transaction(end, tuple(item for _, item in group)[::-1]) for end, group in groups)
            self._read, self._read_at = [], self._books.row_count
            self._forget_shared()
        at = 0
        while True:
            if at == len(self._read):
                older = next(self._older, None)
                if older is None:
                    return
                self._read.append(older)
            yield self._read[at]
            at += 1

    def _newest_charges(self) -> Iterator[tuple[int, _Charged]]:
        """Yield the row number and the record of every charge, newest first."""
        own = self._books.releases.by_row(newest_first=True)
        recovered = (item for item in reversed(self._books.recovered.values()) if item[1].charged)
        lost = reversed(self._books.lost.items())
        return merge(own, recovered, lost, key=itemgetter(0), reverse=True)

    def _pools_of(self, transaction: _Transaction, site: str) -> Iterable[str]:
        """Return the pools of one site that a transaction charged."""
        if transaction.one_roster:
            entry = transaction.entries.get(site)
            return () if entry is None else (entry.pool,)
        charged = frozenset().union(*transaction.pools)
        return [pool for pool in charged if self._books.pools[pool].site == site]

    def _less(self, spend: Spend, transaction: _Transaction, pool: str) -> Spend:
        """Return what a pool had spent before ``transaction``, given ``spend``, the total after it."""
        protection = self._books.pools[pool].protection
        if transaction.one_roster:
            if protection not in transaction.costs:
                charges = [self._cost(item, protection) for item in transaction.released]
                coordinates = sum(item.mechanism.dimension for item in transaction.released)
                transaction.costs[protection] = sum(charges, Fraction(0)), coordinates
            cost, coordinates = transaction.costs[protection]
            return Spend(
                spend.mu_squared - cost, spend.releases - len(transaction.items), spend.coordinates - coordinates
            )
        for item, charged in zip(transaction.items, transaction.pools, strict=True):
            if isinstance(item, LostRecord):
                spend = spend.beyond(item.pools.get(pool, NOTHING))
            elif pool in charged:
                dimension = item.mechanism.dimension
                cost = self._cost(item, protection)
                spend = Spend(spend.mu_squared - cost, spend.releases - 1, spend.coordinates - dimension)
        return spend

    def _cost(self, item: Release | RecoveredCharge, protection: Protection) -> Fraction:
        return charge_of(item.mechanism, protection, self._books.studies[item.study_id].protection)

    def _text(self, transaction: _Transaction, entry: RosterEntry, before: Spend, after: Spend, start: int) -> str:
        """Return the signed receipt of one site: the common text, and the totals of its pool."""
        shared = self._shared_text(transaction, start)
        own = {
            "after": canonical_text(after.to_json()),
            "before": canonical_text(before.to_json()),
            "pool": canonical_text(self._books.pools[entry.pool].to_json()),
            "site": canonical_text(entry.site),
        }
        if shared.digest is None:
            message = Receipt.DOMAIN + b"\0" + canonical_members(shared.members | own).encode()
        else:
            message = signed_text(own, common=shared.digest)
        last = {"signature": canonical_text(self._chain.signing_key.sign(message).hex())}
        if rosters := [text for sites, text in shared.rosters if entry.site in sites]:
            last["rosters"] = f"[{','.join(rosters)}]"
        return canonical_members(shared.members | own | last)

    def _shared_text(self, transaction: _Transaction, start: int) -> _Shared:
        """Return the common text of a transaction's receipts for sites whose previous receipt ends at row ``start``."""
        key = start, transaction.end
        if key not in self._shared:
            shared = self._written(transaction, self._chain.rows_between(start, transaction.end))
            if self._shared_characters > MAX_SHARED_CHARACTERS:
                self._forget_shared()
            self._shared[key] = shared
            self._shared_characters += shared.characters
        return self._shared[key]

    def _written(self, transaction: _Transaction, rows: Sequence[Row]) -> _Shared:
        head = self._chain.head(transaction.end)
        check_own_hash("server", rows[0])
        for before, row in pairwise(rows):
            check_link("server", row, before)
        if rows[-1].hash != head.hash:
            raise LedgerCorrupt("the signed head has another hash than its row", row=head.seq)
        bodies = {row.seq: row.body for row in rows}
        releases = (
            canonical_members({"body": bodies[item.seq], "seq": str(item.seq)}) for item in transaction.released
        )
        links = [Link(row.time_utc, row.kind, body_digest(row.body)) for row in rows]
        named = "roster_sha256" in parse_body(bodies[transaction.released[0].seq])
        named |= any(link.kind == "roster" for link in links)
        members = {
            "batch": canonical_text(transaction.released[0].batch_id),
            "head": canonical_text(head.to_json()),
            "links": canonical_text([link.to_json() for link in links]),
            "previous": canonical_text(Position(rows[0].seq - 1, rows[0].prev_hash).to_json()),
            "releases": f"[{','.join(releases)}]",
            "schema": "3" if named else "1",
            "study": canonical_text(transaction.released[0].study_id),
        }
        rosters = tuple(
            (frozenset(entry.site for entry in self._books.named[link.body_sha256]), row.body)
            for link, row in zip(links, rows, strict=True)
            if link.kind == "roster"
        )
        return _Shared(members, common_digest(members) if named else None, rosters)

    def _forget_shared(self) -> None:
        self._shared, self._shared_characters = {}, 0
