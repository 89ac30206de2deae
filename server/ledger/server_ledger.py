"""The server's privacy ledger: what every patient pool has spent, and every noisy answer ever released.

``release_batch`` is the one door through which answers come into being. In one transaction it decides which queries
fit, draws their noise, writes charge and answer, signs the head, and commits; only then is an answer returned. A query
is known by its id: asked again, it returns the stored answer and costs nothing. Refuses a release below the study's
quorum, past a pool's lifetime budget (over all studies, editions and runs) or past the study's own budget, by any site
or pool that was not declared, and an answer that is not the mechanism's ``int64[l]``; and, for writing, a file that is
older than its standing (``common/ledger/rollback_guard.py``), which is written before an answer is returned.

Threads must take turns by a lock of the caller's. Several processes may open the same file: SQLite lets one write at a
time, and each reads what the others wrote before it decides.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from heapq import merge
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from numpy.typing import NDArray

from common.canonical import canonical_bytes, check_hash, rational, sha256_bytes
from common.config import Study
from common.errors import InvalidInput, LedgerCorrupt, QuorumNotReached
from common.ledger.base_ledger import OpenLedger
from common.ledger.chain import Chain, Clock, Row, SignedHead, body_digest, utc_now
from common.ledger.keys import public_hex, signing_public_key
from common.ledger.receipts import Link, Position, Receipt, ReceiptedRelease, check_arithmetic
from common.ledger.records import (
    MAX_NOTE_CHARACTERS,
    NOTHING,
    LostRecord,
    PoolDeclaration,
    ReleaseRecord,
    ReuseRecord,
    Roster,
    RosterEntry,
    Spend,
    StudyRecord,
    StudyTerms,
    charge_of,
    check_name,
    check_roster,
    parse_body,
    parse_release,
    release_body,
    release_digest,
    spends_to_json,
)
from common.ledger.rollback_guard import ServerStanding, kept_standing, standing_path
from common.ledger.server_state import Books, Charge, Obstacle, Release
from common.privacy.accounting import Guarantee, guarantee
from common.privacy.mechanism import AccountantName, QuerySpec

__all__ = [
    "BatchResult",
    "Candidate",
    "Ledger",
    "PoolDeclaration",
    "RosterEntry",
    "Row",
    "SignedHead",
    "Spend",
    "StoredAnswer",
]


_Charged = Release | ReleaseRecord | LostRecord


@dataclass(frozen=True, slots=True)
class Candidate:
    """A query put forward for release. ``make_answer`` draws the noisy sum; it is called at most once, and only when
    the query's charge has been admitted and nothing is stored for it."""

    query: QuerySpec
    make_answer: Callable[[], NDArray[np.int64]]


@dataclass(frozen=True, slots=True)
class StoredAnswer:
    """A released answer as it stands in the ledger: ``noisy_sum`` int64[l], read-only, over ``voters`` = K′ codes."""

    query: QuerySpec
    noisy_sum: NDArray[np.int64]
    roster: Roster
    voters: int
    seq: int
    row_hash: str
    study_id: str
    batch_id: str


@dataclass(frozen=True, slots=True)
class BatchResult:
    """Answers in the order asked, stored and new alike; and the ids of the queries that did not fit the budget."""

    answers: tuple[StoredAnswer, ...]
    refused: tuple[str, ...]


class Ledger(OpenLedger[Books]):
    """A privacy ledger file. ``create`` or ``open`` it; a context manager, closed by ``close``."""

    def __init__(self, chain: Chain) -> None:
        """Use :meth:`create` or :meth:`open`."""
        super().__init__(chain, Books())
        self._standing_due = False

    # --- opening and closing

    @classmethod
    def create(
        cls, path: Path, *, signing_key: Ed25519PrivateKey, clock: Clock = utc_now, standing: Path | None = None
    ) -> Ledger:
        """Make a new ledger (mode 0600) and open it for writing; an existing path is refused.

        ``standing``: a new file on another disk for the ledger's standing, which is a link then; beside the ledger
        unless given. LedgerCorrupt where a standing lies whose ledger is gone.
        """
        link = path.with_suffix(".standing")
        if link.exists() or link.is_symlink() or (standing is not None and standing.exists()):
            raise LedgerCorrupt(
                f"the ledger {path} is gone and its standing is still there; to fix: put the newest copy of the ledger "
                "in its place, then `consilium ledger recover`"
            )
        ledger = cls(Chain.create(path, role="server", genesis={}, signing_key=signing_key, clock=clock))
        try:
            if standing is not None:
                link.symlink_to(standing.resolve())
                ledger._keep_standing()
        except BaseException:
            ledger.close()
            raise
        return ledger

    @classmethod
    def open(
        cls,
        path: Path,
        *,
        signing_key: Ed25519PrivateKey | None = None,
        clock: Clock = utc_now,
        restored: bool = False,
    ) -> Ledger:
        """Open a ledger; without ``signing_key`` it can only be read.

        Replays every row: LedgerCorrupt names the first that breaks the chain or a rule. InvalidInput if the key is not
        the one that signs this ledger now. Signatures other than the newest, and payloads, are ``verify``'s to check.
        For writing, LedgerCorrupt if the file is older than its standing, unless ``restored`` says that
        :meth:`recover` comes next.
        """
        ledger = cls(Chain.open(path, role="server", signing_key=signing_key, clock=clock))
        try:
            if signing_key is not None and not restored:
                if (problem := ledger.forgotten()) is not None:
                    raise LedgerCorrupt(f"{problem}; to fix: `consilium ledger recover`")
                ledger._make_good_standing()
        except BaseException:
            ledger.close()
            raise
        return ledger

    # --- declaring

    def register_study(self, study: Study) -> str:
        """Put a study's consent text on record and return its id; a known study adds no row."""
        text = study.to_json()
        terms = StudyTerms.from_json(text)
        with self._writing():
            if terms.id not in self._books.studies:
                row = self._chain.append("study", {"study": text, "study_id": terms.id})
                self._books.enter(row, StudyRecord(terms, pool=None))
        return terms.id

    def declare_pool(self, declaration: PoolDeclaration) -> None:
        """Declare a site's patient pool and its lifetime budget, or tighten it.

        The same declaration adds no row. InvalidInput for a looser one (a larger ε, δ or Σμ²), for another site or
        another protection. A budget tightened below what is spent admits nothing more.
        """
        with self._writing():
            if self._books.pools.get(declaration.pool) != declaration:
                self._books.check_pool(declaration)
                self._books.enter(self._chain.append("pool", declaration.to_json()))

    def declare_books(self, pool: str, ledger_id: str) -> None:
        """Put on record which site ledger keeps a declared pool's books at its hospital; again, it adds no row.

        InvalidInput for another one than the pool has, and for one that keeps another pool's.
        """
        with self._writing():
            self._books.check_books(pool, ledger_id)
            if pool not in self._books.pool_books:
                self._books.enter(self._chain.append("books", {"books": ledger_id, "pool": pool}))

    def note(self, text: str) -> None:
        """Put a remark on record; it changes no sum. Not a place for patients' data."""
        if not isinstance(text, str) or not 1 <= len(text) <= MAX_NOTE_CHARACTERS:
            raise InvalidInput("note", value=len(text), limit=f"1 to {MAX_NOTE_CHARACTERS} characters")
        with self._writing():
            self._books.enter(self._chain.append("note", {"text": text}))

    def rotate_key(self, new_key: Ed25519PrivateKey) -> None:
        """Hand signing over: the old key signs the row that introduces ``new_key``, the new one all later heads."""
        with self._writing():
            body: dict[str, object] = {"proof": self._chain.possession(new_key), "public_key": public_hex(new_key)}
            row = self._chain.append("key", body)
            self._books.enter(row)
        self._chain.use_key(new_key)

    def recover(self, receipts: Iterable[Receipt], *, standing: ServerStanding | None = None) -> int:
        """After an old copy was restored: enter as spent every receipted charge this ledger lost; how many there were.

        What ``standing`` (by default the one kept beside the file, if the file is older) shows beyond that is charged
        too, in one row: answers that were drawn, and perhaps used, before any receipt arrived.

        The answers are gone; asked again, such a query is a new release and a new charge. Charges are entered even
        where they pass a limit: what was released was released. A pool that was lost too is declared again as its own
        site's receipts, or the standing, state it. InvalidInput for a receipt this ledger's key did not sign, for
        receipts or a standing of another ledger or of a study that must be registered again first, and for a pool
        nothing given here declares.
        """
        entered = 0
        receipts = tuple(receipts)
        if standing is None and self.forgotten() is not None:
            standing = ServerStanding.load(standing_path(self._chain.path))
        with self._writing():
            for receipt in receipts:
                self._check_origin(receipt)
                if receipt.declaration.pool not in self._books.pools:
                    self._books.enter(self._chain.append("pool", receipt.declaration.to_json()))
            if standing is not None:
                self._check_standing(standing)
            for receipt in receipts:
                self._check_recoverable(receipt)
                for release in receipt.releases:
                    release_hash = release_digest(release.body)
                    known = self._books.releases.get(release.body["query_id"])
                    if release_hash in self._books.recovered or (known and self._is_here(known, release.body)):
                        continue
                    body: dict[str, object] = {
                        "origin": receipt.site,
                        "release": release.body,
                        "release_hash": release_hash,
                    }
                    self._books.enter(self._chain.append("recovered", body))
                    entered += 1
            if standing is not None:
                self._charge_lost(standing)
                self._standing_due = True  # also where nothing was missing but the rows' numbers
        return entered

    def _check_standing(self, standing: ServerStanding) -> None:
        """That the standing is of this ledger; pools the copy does not know are declared again as it states them."""
        if standing.head.ledger_id != self.ledger_id:
            raise InvalidInput("standing", value=standing.head.ledger_id, limit=f"of this ledger, {self.ledger_id}")
        unknown = sorted(standing.studies.keys() - self._books.studies.keys())
        if unknown:
            raise InvalidInput("studies of the standing", value=unknown, remedy="register them again: --study FILE")
        for declaration in standing.declarations:
            if declaration.pool not in self._books.pools:
                self._books.enter(self._chain.append("pool", declaration.to_json()))

    def _charge_lost(self, standing: ServerStanding) -> None:
        """Charge what the standing shows beyond the rows; nothing if they hold it all."""
        pools = {pool: spend.beyond(self._books.spent(pool)) for pool, spend in standing.pools.items()}
        studies = {
            study: {pool: spend.beyond(self._books.spent_in(study, pool)) for pool, spend in spends.items()}
            for study, spends in standing.studies.items()
        }
        if any(spend != NOTHING for spends in (pools, *studies.values()) for spend in spends.values()):
            body: dict[str, object] = {
                "kept_row": standing.head.seq,
                "pools": spends_to_json(pools),
                "studies": {study: spends_to_json(spends) for study, spends in studies.items()},
            }
            self._books.enter(self._chain.append("lost", body))

    def forgotten(self) -> str | None:
        """What shows that this file is an older copy than the one that charged last; None if nothing does.

        The standing beside the file tells. Where it was rolled back together with the file, sites do that hold a later
        receipt; where none had arrived yet, nothing can.
        """
        path = kept_standing(self._chain.path)
        if path is None:
            return None
        head = ServerStanding.load(path).head
        if head.ledger_id != self.ledger_id:
            return f"the standing kept with {self._chain.path} is of another ledger, {head.ledger_id}"
        if self.contains(Position(head.seq, head.hash)):
            return None
        return (
            f"the ledger {self._chain.path} ends at row {self._books.row_count} and had charged in row {head.seq} "
            "before: an older copy was put in its place"
        )

    def lost(self) -> dict[str, Spend]:
        """What was charged to each pool because an older copy had forgotten it and no receipt told of it."""
        self._catch_up()
        found: dict[str, Spend] = {}
        for record in self._books.lost.values():
            for pool, spend in record.pools.items():
                found[pool] = found.get(pool, NOTHING) + spend
        return found

    def _make_good_standing(self) -> None:
        """Write a standing that a crash, or a version before there were any, left out."""
        path = kept_standing(self._chain.path)
        known = 0 if path is None else ServerStanding.load(path).head.seq
        if known < self._books.last_charge:
            self._keep_standing()

    def _keep_standing(self) -> None:
        with self._chain.transaction():  # the writer's place, so that no earlier standing replaces a later one
            self._catch_up()
            ServerStanding(
                head=self._chain.head(),
                pools=self._books.all_spent(),
                studies=self._books.all_spent_in(),
                declarations=tuple(self._books.pools.values()),
            ).save(standing_path(self._chain.path))
        self._standing_due = False

    def _check_origin(self, receipt: Receipt) -> None:
        if receipt.ledger_id != self.ledger_id:
            raise InvalidInput("receipt", value=receipt.ledger_id, limit=f"of this ledger, {self.ledger_id}")
        if not any(receipt.is_genuine(signing_public_key(key)) for _, key in self._books.key.history):
            raise InvalidInput("receipt", limit="signed by this ledger's key")

    def _check_recoverable(self, receipt: Receipt) -> None:
        study = self._books.studies.get(receipt.study_id)
        pools = {pool for release in receipt.releases for _, pool in release.body["roster"]}
        lost = sorted(pools - self._books.pools.keys())
        if study is None or lost:
            raise InvalidInput(
                "receipt names what this ledger does not know",
                value=lost or receipt.study_id,
                remedy="register the study again, and give the receipts of all sites at once",
            )
        check_arithmetic(receipt, study)

    def _is_here(self, known: Release, body: dict[str, Any]) -> bool:
        return known.answer_sha256 == body["answer_sha256"] and self._chain.row(known.seq).body == _text(body)

    # --- releasing

    def release_batch(
        self, *, study_id: str, batch_id: str, roster: tuple[RosterEntry, ...], candidates: Sequence[Candidate]
    ) -> BatchResult:
        """Charge and answer the longest prefix of ``candidates`` that fits, in one transaction.

        A new query must fit every roster pool's lifetime budget and the study's budget for that pool, each by its own
        gate accountant. The first that does not ends the batch: it and every later query without a stored answer are
        ``refused``, and a refusal row is written once. A query that has an answer returns it, byte for byte, costs its
        pools nothing and draws nothing; one that another study asked is entered as reused, so that this study's own
        sum counts it.

        Raises QuorumNotReached (no row) for a roster below the study's quorum; InvalidInput (no row) for an unknown
        study, an undeclared pool, a query named twice or one that does not fit the study; whatever ``make_answer``
        raises, or InvalidInput if it returns anything but int64[l]. After an exception nothing is charged or stored,
        except where the commit itself was interrupted: asking again tells.
        """
        check_name(batch_id, what="batch id")
        ordered = check_roster(tuple(roster))
        queries = [(candidate, candidate.query.id) for candidate in candidates]
        if len({query_id for _, query_id in queries}) != len(queries):
            raise InvalidInput("queries of a batch", limit="each query once")
        answers: list[StoredAnswer] = []
        refused: list[str] = []
        with self._writing():
            study = self._books.studies.get(study_id)
            if study is None:
                raise InvalidInput("study", value=study_id, limit="a study registered in this ledger")
            if len(ordered) < study.quorum:
                raise QuorumNotReached(
                    f"{len(ordered)} sites are on the roster and the study's quorum is {study.quorum}; "
                    "nothing was charged; to fix: wait for more sites, then ask again"
                )
            obstacle: Obstacle | None = None
            for candidate, query_id in queries:
                if query_id in self._books.releases:
                    obstacle = obstacle or self._reuse(study, query_id)
                    if self._uses(study, query_id):
                        answers.append(self._stored(query_id))
                    else:
                        refused.append(query_id)
                    continue
                if obstacle is None:
                    self._books.check_release(ordered, candidate.query.mechanism, study)
                    planned = self._books.plan(candidate.query.mechanism, study_id=study_id, roster=ordered)
                    if isinstance(planned, Charge):
                        answers.append(self._charge(study, batch_id, candidate, query_id, ordered, planned))
                        continue
                    obstacle = planned
                refused.append(query_id)
            if obstacle is not None and (study_id, batch_id, tuple(refused)) not in self._books.refusals:
                self._refuse(study_id, batch_id, refused, obstacle)
        return BatchResult(tuple(answers), tuple(refused))

    def _charge(
        self, study: StudyTerms, batch_id: str, candidate: Candidate, query_id: str, roster: Roster, charge: Charge
    ) -> StoredAnswer:
        query = candidate.query
        noisy = _checked_answer(candidate.make_answer(), dimension=query.mechanism.dimension)
        data = noisy.astype("<i8").tobytes()
        answer_sha256 = sha256_bytes(data)
        body = release_body(
            study=study,
            batch_id=batch_id,
            query=query,
            query_id=query_id,
            roster=roster,
            answer_sha256=answer_sha256,
        )
        row = self._chain.append("release", body, payload=(query_id, data))
        voters = len(roster) * query.mechanism.voters_per_site
        record = ReleaseRecord(
            study_id=study.id,
            batch_id=batch_id,
            query=query,
            query_id=query_id,
            roster=roster,
            voters=voters,
            answer_sha256=answer_sha256,
        )
        self._books.enter(row, record, charge=charge)
        return StoredAnswer(
            query=query,
            noisy_sum=noisy,
            roster=roster,
            voters=voters,
            seq=row.seq,
            row_hash=row.hash,
            study_id=study.id,
            batch_id=batch_id,
        )

    def _uses(self, study: StudyTerms, query_id: str) -> bool:
        return self._books.releases[query_id].study_id == study.id or query_id in self._books.reused.get(study.id, {})

    def _reuse(self, study: StudyTerms, query_id: str) -> Obstacle | None:
        """Enter another study's answer as used by this one too, unless it already is; the obstacle if it cannot be."""
        if self._uses(study, query_id):
            return None
        roster = self._books.releases[query_id].roster
        if len(roster) < study.quorum:
            raise QuorumNotReached(
                f"query {query_id[:12]} was answered by {len(roster)} sites for another study and the quorum "
                f"of this one is {study.quorum}; to fix: ask it with other settings, as a query of its own"
            )
        planned = self._books.plan_reuse(query_id, study_id=study.id)
        if isinstance(planned, Obstacle):
            return planned
        row = self._chain.append("reuse", {"query_ids": [query_id], "study": study.id})
        self._books.enter(row, ReuseRecord(study_id=study.id, query_ids=(query_id,)), charge=planned)
        return None

    def _refuse(self, study_id: str, batch_id: str, refused: list[str], obstacle: Obstacle) -> None:
        body: dict[str, object] = {
            "batch": batch_id,
            "pool": obstacle.pool,
            "query_ids": refused,
            "reason": obstacle.reason,
            "remaining": rational(obstacle.remaining),
            "requested": rational(obstacle.requested),
            "study": study_id,
        }
        self._books.enter(self._chain.append("refusal", body))

    # --- reading

    def answer(self, query_id: str) -> StoredAnswer | None:
        """The stored answer of a query, whichever study asked it, or None. LedgerCorrupt if it is not as charged."""
        check_hash(query_id)
        self._catch_up()
        return self._stored(query_id) if query_id in self._books.releases else None

    def answers(self, study_id: str) -> tuple[StoredAnswer, ...]:
        """Every answer a study may use, in the order released: its own, and those it reuses."""
        self._catch_up()
        own = (query_id for query_id, release in self._books.releases.items() if release.study_id == study_id)
        found = [self._stored(query_id) for query_id in (*own, *self._books.reused.get(study_id, {}))]
        return tuple(sorted(found, key=lambda answer: answer.seq))

    def spent(self, pool: str, study_id: str | None = None) -> Spend:
        """What a pool has spent in all under its own protection; or in one study, under the study's protection."""
        self._catch_up()
        return self._books.spent(pool) if study_id is None else self._books.spent_in(study_id, pool)

    def remaining(self, pool: str, study_id: str | None = None) -> Fraction:
        """Σμ² left to a declared pool in all, or to it in one study; below 0 if a budget was tightened or recovered."""
        self._catch_up()
        try:
            if study_id is None:
                return self._books.limit(pool) - self._books.spent(pool).mu_squared
            return self._books.study_limit(study_id) - self._books.spent_in(study_id, pool).mu_squared
        except KeyError as error:
            raise InvalidInput("pool or study", value=error.args[0], limit="one that is on record") from None

    def pools(self) -> tuple[PoolDeclaration, ...]:
        """Declared pools as they stand now, by name."""
        self._catch_up()
        return tuple(self._books.pools[name] for name in sorted(self._books.pools))

    def books_of(self, pool: str) -> str | None:
        """The id of the site ledger that keeps a pool's books, None where no join request ever said."""
        self._catch_up()
        return self._books.pool_books.get(pool)

    def studies(self) -> tuple[StudyTerms, ...]:
        """Registered studies in order of registration."""
        self._catch_up()
        return tuple(self._books.studies.values())

    def study_guarantees(self, study_id: str) -> dict[AccountantName, Guarantee]:
        """What the study's answers cost the pool they cost most, by every gate accountant, at the study's δ."""
        self._catch_up()
        study = self._books.studies.get(study_id)
        if study is None:
            raise InvalidInput("study", value=study_id, limit="a study registered in this ledger")
        sums = (self._books.spent_in(study_id, pool).mu_squared for pool in self._books.study_pools(study_id))
        worst = max(sums, default=Fraction(0))
        return {name: guarantee(worst, study.budget, study.protection, name) for name in AccountantName}

    def pool_guarantees(self, pool: str) -> dict[AccountantName, Guarantee]:
        """What all studies together have cost a pool, by every gate accountant, at the pool's δ and protection."""
        self._catch_up()
        if pool not in self._books.pools:
            raise InvalidInput("pool", value=pool, limit="a declared pool")
        declared, spend = self._books.pools[pool], self._books.spent(pool)
        return {
            name: guarantee(spend.mu_squared, declared.budget, declared.protection, name) for name in AccountantName
        }

    def batch_receipts(self, study_id: str, batch_id: str) -> tuple[Receipt, ...]:
        """Signed receipts for what a batch released: one for each transaction and each site on its roster.

        They are made from the rows alone: a receipt that was lost can be issued again, with the same head and totals.
        """
        self._catch_up()
        released = (r for r in self._books.releases.values() if (r.study_id, r.batch_id) == (study_id, batch_id))
        sites = dict.fromkeys(entry.site for release in released for entry in release.roster)
        found = (receipt for site in sites for receipt in self.site_receipts(site) if receipt.batch_id == batch_id)
        return tuple(sorted(found, key=lambda receipt: receipt.head.seq))

    def site_receipts(self, site: str, *, after: int = 0) -> tuple[Receipt, ...]:
        """Every receipt of one site whose head is past row ``after``, in order: what it needs after a gap.

        Reads backwards from the newest row to ``after``, and on to the site's receipt before that, but not the rest.
        """
        self._catch_up()
        return tuple(self._receipts(site, after=after))[::-1]

    def contains(self, position: Position) -> bool:
        """Whether this very row is in the ledger: if a site holds a signed head that is not, the ledger was rolled
        back or forked. The place before the first row is in every ledger."""
        self._catch_up()
        if position == Position():
            return True
        found = self._chain.rows_between(position.seq - 1, position.seq)
        return bool(found) and found[0].hash == position.hash

    @property
    def ledger_id(self) -> str:
        """The random name this ledger got when it was made; every signature covers it."""
        return self._books.key.ledger_id

    @property
    def public_key(self) -> str:
        """The key that signs heads now, in hex."""
        return self._books.key.public_key

    # --- helpers

    def _stored(self, query_id: str) -> StoredAnswer:
        release = self._books.releases[query_id]
        found = self._chain.payload(query_id)
        if found is None or found[0] != release.seq or sha256_bytes(found[1]) != release.answer_sha256:
            raise LedgerCorrupt("the stored answer is not the one that was charged", row=release.seq)
        query = parse_release(parse_body(self._chain.row(release.seq).body)).query
        noisy = np.frombuffer(found[1], dtype="<i8").astype(np.int64)
        noisy.flags.writeable = False
        return _answer(query, noisy, release)

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
        own = ((release.seq, release) for release in reversed(self._books.releases.values()))
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
        bodies = {row.seq: row.body for row in rows}
        receipt = Receipt(
            study_id=released[0].study_id,
            batch_id=released[0].batch_id,
            site=entry.site,
            declaration=self._books.pools[entry.pool],
            releases=tuple(ReceiptedRelease(item.seq, parse_body(bodies[item.seq])) for item in released),
            before=spends[0],
            after=spends[1],
            previous=Position(start, rows[0].prev_hash),
            links=tuple(Link(row.time_utc, row.kind, body_digest(row.body)) for row in rows),
            head=self._chain.head(end),
        )
        return receipt.signed(self._chain.signing_key)

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """One write transaction: read what others wrote, let the block append, commit; on any exception undo it all.

        If it charged something, the standing follows it. Where that fails the charge is durable and the caller gets the
        error; the next write, or the next opening, makes the standing good.
        """
        try:
            with self._chain.transaction():
                self._catch_up()
                before = self._books.last_charge
                if self._chain.public_key != self._books.key.public_key:
                    raise InvalidInput(
                        "signing key", limit="the ledger's current key", remedy="it was rotated; open with the new key"
                    )
                self._books.begin()
                yield
        except BaseException:
            self._books.roll_back()
            raise
        self._books.settle()
        self._standing_due |= self._books.last_charge != before
        if self._standing_due:
            self._keep_standing()


def _text(body: dict[str, Any]) -> str:
    return canonical_bytes(body).decode()


def _answer(query: QuerySpec, noisy: NDArray[np.int64], release: Release) -> StoredAnswer:
    return StoredAnswer(
        query=query,
        noisy_sum=noisy,
        roster=release.roster,
        voters=release.voters,
        seq=release.seq,
        row_hash=release.row_hash,
        study_id=release.study_id,
        batch_id=release.batch_id,
    )


def _checked_answer(noisy: object, *, dimension: int) -> NDArray[np.int64]:
    if not isinstance(noisy, np.ndarray) or noisy.dtype != np.int64 or noisy.shape != (dimension,):
        got = f"{noisy.dtype}{list(noisy.shape)}" if isinstance(noisy, np.ndarray) else type(noisy).__name__
        raise InvalidInput("noisy answer", value=got, limit=f"int64[{dimension}], the mechanism's dimension")
    answer = noisy.copy()
    answer.flags.writeable = False
    return answer
