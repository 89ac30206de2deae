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

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

import numpy as np
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from numpy.typing import NDArray

from common.canonical import check_hash, sha256_bytes
from common.clock import Clock, utc_now
from common.config import Study
from common.errors import InvalidInput, LedgerCorrupt
from common.ledger.chain import Chain
from common.ledger.charges import (
    PoolDeclaration,
    ReleaseRecord,
    RosterEntry,
    RosterRecord,
    Spend,
    StudyTerms,
)
from common.ledger.keys import public_hex
from common.ledger.records import (
    BooksRecord,
    KeyRecord,
    NoteRecord,
    PoolRecord,
    StudyRecord,
    check_note,
)
from common.ledger.releases import ChargedTotals
from common.ledger.spending import Spending, of_pool, of_pool_in_study, of_study
from common.privacy.accounting import Guarantee
from common.privacy.mechanism import AccountantName, QuerySpec
from server.ledger.server_draws import AnswersQueries, BatchResult, StoredAnswer, checked_answer


@dataclass(frozen=True, slots=True)
class Candidate:
    """A query put forward for release. ``make_answer`` draws the noisy sum; it is called at most once, and only when
    the query's charge has been admitted and nothing is stored for it."""

    query: QuerySpec
    make_answer: Callable[[], NDArray[np.int64]]


class Ledger(AnswersQueries):
    """A privacy ledger file. :meth:`create` or :meth:`open` it; a context manager, closed by ``close``."""

    # --- opening and closing

    @classmethod
    def create(
        cls, path: Path, *, signing_key: Ed25519PrivateKey, clock: Clock = utc_now, standing: Path | None = None
    ) -> Ledger:
        """Make a new ledger (mode 0600) and open it for writing; an existing path is refused.

        ``standing``: a new file on another disk for the ledger's standing, which is a link then; beside the ledger
        unless given. InvalidInput for one that is there and for a folder that is not. LedgerCorrupt where a standing
        lies whose ledger is gone.
        """
        link = path.with_suffix(".standing")
        if standing is not None and (os.path.lexists(standing) or not standing.parent.is_dir()):
            remedy = "mount that disk, or name another; where its ledger is lost, `consilium ledger recover` a copy"
            limit = "a new one, in a folder that is there"
            raise InvalidInput("file of the standing", value=str(standing), limit=limit, remedy=remedy)
        if os.path.lexists(link):
            raise LedgerCorrupt(
                f"the ledger {path} is gone and its standing is still there; to fix: put the newest copy of the ledger "
                "in its place, then `consilium ledger recover`"
            )
        ledger = cls(Chain.create(path, role="server", genesis={"standing": 1}, signing_key=signing_key, clock=clock))
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

        Replays every row: LedgerCorrupt names the first that breaks the chain or a rule. InvalidInput if the key is
        not the one that signs this ledger now. Signatures other than the newest, and payloads, are ``verify``'s to
        check. A checkpoint, which versions before 0.3.0 wrote beside the ledger, is not read, and removed by a writer.
        For writing, LedgerCorrupt if the file is older than its standing, unless ``restored`` says that
        :meth:`recover` comes next.
        """
        ledger = cls(Chain.open(path, role="server", signing_key=signing_key, clock=clock))
        try:
            ledger._restoring = restored
            if signing_key is not None and not restored:
                if (problem := ledger.forgotten()) is not None:
                    raise LedgerCorrupt(problem)
                ledger._make_good_standing()
                path.with_suffix(".checkpoint").unlink(missing_ok=True)
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
                self._append(StudyRecord(text, terms.id))
        return terms.id

    def declare_pool(self, declaration: PoolDeclaration) -> None:
        """Declare a site's patient pool and its lifetime budget, or tighten it.

        The same declaration adds no row. InvalidInput for a looser one (a larger ε, δ or Σμ²), for another site or
        another protection. A budget tightened below what is spent admits nothing more.
        """
        with self._writing():
            if self._books.pools.get(declaration.pool) != declaration:
                self._books.check_pool(declaration)
                self._append(PoolRecord(declaration))

    def declare_books(self, pool: str, ledger_id: str) -> None:
        """Put on record which site ledger keeps a declared pool's books at its hospital; again, it adds no row.

        InvalidInput for another one than the pool has, and for one that keeps another pool's.
        """
        with self._writing():
            self._books.check_books(pool, ledger_id)
            if pool not in self._books.pool_books:
                self._append(BooksRecord(pool, ledger_id))

    def note(self, text: str) -> None:
        """Put a remark on record; it changes no sum. Not a place for patients' data."""
        check_note(text)
        with self._writing():
            self._append(NoteRecord(text))

    def rotate_key(self, new_key: Ed25519PrivateKey) -> None:
        """Hand signing over: the old key signs the row that introduces ``new_key``, the new one all later heads."""
        with self._writing():
            self._append(KeyRecord(public_hex(new_key), self._chain.possession(new_key)))
        self._chain.use_key(new_key)

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
        make = {candidate.query.id: candidate.make_answer for candidate in candidates}

        def charge(study: StudyTerms, query: QuerySpec, ordered: RosterRecord, planned: ChargedTotals) -> StoredAnswer:
            return self._charge(study, batch_id, Candidate(query, make[query.id]), ordered, planned)

        return self._charge_batch(study_id, batch_id, roster, [candidate.query for candidate in candidates], charge)

    def _charge(
        self, study: StudyTerms, batch_id: str, candidate: Candidate, roster: RosterRecord, charge: ChargedTotals
    ) -> StoredAnswer:
        query, query_id = candidate.query, candidate.query.id
        noisy = checked_answer(candidate.make_answer(), dimension=query.mechanism.dimension)
        data = noisy.astype("<i8").tobytes()
        named = self._named(roster)
        record = ReleaseRecord.of(study, batch_id, query, query_id, roster.roster, sha256_bytes(data), named=named)
        row = self._chain.append("release", record.to_json(), payload=(query_id, data))
        self._books.enter(row, record, charge=charge)
        return StoredAnswer(query, noisy, roster.roster, record.voters, row.seq, row.hash, study.id, batch_id)

    # --- reading

    def answer(self, query_id: str) -> StoredAnswer | None:
        """The stored answer of a query, whichever study asked it, or None. LedgerCorrupt if it is not as charged."""
        check_hash(query_id)
        self._catch_up()
        return self._stored(query_id) if self._books.releases.answered(query_id) else None

    def answers(self, study_id: str) -> tuple[StoredAnswer, ...]:
        """Every answer a study may use, in the order released: its own, and those it reuses."""
        self._catch_up()
        own = (one.query_id for one in self._books.releases.of_study(study_id) if one.answer is not None)
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

    def study_spending(self, study_id: str) -> Spending:
        """What the study has spent of its budget on the pool it cost most, and what is guaranteed; InvalidInput for a
        study that is not on record."""
        self._catch_up()
        self._study(study_id)
        return of_study(self._books, study_id, doubt=self.standing_problem())

    def spending_in_study(self, study_id: str, pool: str) -> Spending:
        """The same of one pool; InvalidInput for a study that is not on record."""
        self._catch_up()
        self._study(study_id)
        return of_pool_in_study(self._books, study_id, pool, doubt=self.standing_problem())

    def pool_spending(self, pool: str) -> Spending:
        """What all studies together have spent of a pool's budget; InvalidInput for a pool that is not declared."""
        self._catch_up()
        if pool not in self._books.pools:
            raise InvalidInput("pool", value=pool, limit="a declared pool")
        return of_pool(self._books, pool, doubt=self.standing_problem())

    def study_guarantees(self, study_id: str) -> dict[AccountantName, Guarantee]:
        """What the study's answers cost the pool they cost most, by every gate accountant, at the study's δ."""
        self._catch_up()
        self._study(study_id)
        return of_study(self._books, study_id).readings()

    def pool_guarantees(self, pool: str) -> dict[AccountantName, Guarantee]:
        """What all studies together have cost a pool, by every gate accountant, at the pool's δ and protection."""
        return self.pool_spending(pool).readings()
