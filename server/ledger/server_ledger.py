"""Keeps the server's privacy ledger: what every patient pool has spent, and every noisy answer that was released.

The aggregator, the pipeline, the commands and the dashboard open it. In an open study, :meth:`Ledger.release_batch` is
the only way to create an answer; for a sealed study see :mod:`server.ledger.server_draws`. The method takes these steps
in one transaction, in order; the code repeats their numbers:

1. Check the roster against the study, and each query's charge against every budget it touches.
2. Draw the noise.
3. Write the charge and the answer, and sign the ledger's head.
4. Commit, and update the *standing*, a small file beside the ledger that records its newest row and totals. Only then
   is the answer returned.

A query that is asked again, with the same id, returns its stored answer, and no pool's lifetime budget is charged.

The ledger refuses a release with fewer sites than the quorum, one that exceeds a pool's lifetime budget (over all
studies and runs) or the study's own budget, one by an undeclared site or pool, and an answer that is not an int64 array
of the mechanism's dimension. It refuses to write to a file that is older than its standing
(``common/ledger/rollback_guard.py``).

A ledger object is not thread-safe: threads that share one need a lock. Several processes may open the same file: SQLite
lets one write at a time, and each reads what the others wrote before it decides.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Sequence
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
from common.ledger.charges import PoolDeclaration, ReleaseRecord, RosterEntry, RosterRecord, Spend, StudyTerms
from common.ledger.keys import public_hex
from common.ledger.records import (
    AFTER_ALL_CHARGED,
    ALL_CHARGED,
    REVOKED,
    KeyRecord,
    NoteRecord,
    PoolRecord,
    StudyRecord,
    check_note,
    parse_body,
)
from common.ledger.releases import ChargedTotals
from common.ledger.spending import Spending, of_pool, of_study
from common.measured_gain import MeasuredGain
from common.privacy.mechanism import QuerySpec
from common.study_facts import StudyFacts, study_facts
from server.ledger.server_draws import AnswersQueries, BatchResult, StoredAnswer, checked_answer


class Ledger(AnswersQueries):
    """The server's privacy ledger, opened from its file. :meth:`create` and :meth:`open` return one.

    As a context manager it closes the file on exit.
    """

    # --- opening and closing

    @classmethod
    def create(
        cls, path: Path, *, signing_key: Ed25519PrivateKey, clock: Clock = utc_now, standing: Path | None = None
    ) -> Ledger:
        """Create a new ledger with mode 0600, and open it for writing.

        Args:
            path: The new file.
            signing_key: Key that signs the ledger's heads.
            clock: Returns the time written into rows.
            standing: New file on another disk for the ledger's standing, the small file that records its newest row;
                the file beside the ledger is then a link to it.

        Returns:
            The open ledger.

        Raises:
            InvalidInput: If ``path`` or ``standing`` exists, or the folder of ``standing`` does not.
            LedgerCorrupt: If a standing exists whose ledger is gone.
        """
        link = path.with_suffix(".standing")
        if standing is not None and (os.path.lexists(standing) or not standing.parent.is_dir()):
            remedy = "mount that disk, or name another file; if its ledger is lost, run `consilium ledger recover`"
            limit = "a new file in an existing folder, for the small file that records the ledger's newest row"
            raise InvalidInput("file of the ledger's standing", value=str(standing), limit=limit, remedy=remedy)
        if os.path.lexists(link):
            raise LedgerCorrupt(
                f"the ledger {path} is missing, but its standing exists (the small file beside it); to fix: put the "
                "newest copy of the ledger in its place, then run `consilium ledger recover`"
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
        """Open a ledger and replay every row.

        Only the newest signature is checked here. :func:`server.ledger.verify.verify` checks every signature and the
        stored answers. With a signing key, the checkpoint file that versions before 0.3.0 wrote is deleted.

        Args:
            path: The ledger's file.
            signing_key: Key that signs; without it the ledger can only be read.
            clock: Returns the time written into rows.
            restored: True if the file is a restored copy and the caller calls :meth:`recover` next.

        Returns:
            The open ledger.

        Raises:
            LedgerCorrupt: If a row breaks the hash chain or a rule; the error's ``row`` is the first such row. Also if
                the file is older than its standing, ``signing_key`` is given and ``restored`` is False.
            InvalidInput: If the key is not the one that signs this ledger now.
        """
        ledger = cls(Chain.open(path, role="server", signing_key=signing_key, clock=clock))
        try:
            ledger._restoring = restored
            if signing_key is not None and not restored:
                if (problem := ledger.forgotten()) is not None:
                    raise LedgerCorrupt(
                        f"{problem}; to fix: put the newest copy of the ledger in its place; if it is lost, run "
                        "`consilium ledger recover`"
                    )
                ledger._make_good_standing()
                path.with_suffix(".checkpoint").unlink(missing_ok=True)
        except BaseException:
            ledger.close()
            raise
        return ledger

    # --- declaring

    def register_study(self, study: Study, *, older: bool = False) -> str:
        """Record a study's terms, as sites consent to them; no row is added if the study is already registered.

        Every new study passes through here, so the checks of new studies are made here.

        Args:
            study: The study.
            older: True for a study that was created before, and whose row this copy of the ledger lost.

        Returns:
            The study's id.

        Raises:
            InvalidInput: If hospitals cannot tell two labels or channels of a new study apart.
        """
        with self._writing():
            if study.id not in self._books.studies:
                if not older:
                    study.data.check_new()
                self._append(StudyRecord(study.to_json(), study.id))
        return study.id

    def declare_pool(self, declaration: PoolDeclaration) -> None:
        """Declare a site's patient pool and its lifetime budget, or tighten the budget.

        Repeating a declaration adds no row. If a budget is tightened below what is spent, the pool admits no further
        release.

        Args:
            declaration: The pool, its site, budget, accountant and protection.

        Raises:
            InvalidInput: If the pool is declared already with a smaller ε, δ or Σμ², for another site, or with another
                protection (unit of privacy and relation). Also for a new pool, if a recovery without a standing has
                charged all remaining budget of this ledger.
        """
        with self._writing():
            if self._books.pools.get(declaration.pool) != declaration:
                self._books.check_pool(declaration)
                if declaration.pool not in self._books.pools and ALL_CHARGED in self._books.notes:
                    raise InvalidInput(
                        "new pool in a ledger that was recovered without its standing file",
                        value=declaration.pool,
                        limit="a pool that is already in this ledger; the lost ledger may have charged any other",
                        remedy=AFTER_ALL_CHARGED,
                    )
                self._append(PoolRecord(declaration))

    def declare_books(self, pool: str, ledger_id: str) -> None:
        """Record which site ledger keeps a declared pool's budget at its hospital; a repeated call adds no row.

        Args:
            pool: The pool.
            ledger_id: Id of the site's ledger.

        Raises:
            InvalidInput: If the pool has another site ledger, or the ledger keeps another pool's budget.
        """
        with self._writing():
            self._name_books(pool, ledger_id)

    def note(self, text: str) -> None:
        """Record a remark. It changes no total, and must not contain patient data.

        Args:
            text: The remark.

        Raises:
            InvalidInput: If the text is empty or too long.
        """
        check_note(text)
        with self._writing():
            self._append(NoteRecord(text))

    def revoked(self, study_id: str) -> frozenset[str]:
        """Return the sites that notes in this ledger name as revoked.

        Args:
            study_id: Id of the study from which they were revoked.

        Returns:
            Their names.
        """
        parts = (text.rpartition(REVOKED) for text in self.books.notes)
        return frozenset(site for site, words, of in parts if words and of == study_id)

    def notes(self) -> tuple[str, ...]:
        """Return the texts of all notes in this ledger, in order."""
        self._catch_up()
        return tuple(str(parse_body(row.body)["text"]) for row in self._chain.rows_of("note"))

    def rotate_key(self, new_key: Ed25519PrivateKey) -> None:
        """Replace the ledger's signing key.

        The old key signs the row that introduces the new key. The new key signs every later row.

        Args:
            new_key: The new private key.
        """
        with self._writing():
            self._append(KeyRecord(public_hex(new_key), self._chain.possession(new_key)))
        self._chain.use_key(new_key)

    # --- releasing

    def release_batch(
        self,
        *,
        study_id: str,
        batch_id: str,
        roster: tuple[RosterEntry, ...],
        queries: Sequence[QuerySpec],
        draw: Callable[[QuerySpec], NDArray[np.int64]],
    ) -> BatchResult:
        """Charge and answer the longest prefix of ``queries`` that fits the budgets, in one transaction.

        A new query must fit two budgets of every pool on the roster: the pool's lifetime budget and the study's budget
        for that pool, each by the accountant declared for it. The first query that does not fit ends the batch: it and
        every later query without an answer that the study may use are ``refused``, and one row records the refusal.

        For a query that has an answer, the stored answer is returned byte for byte: no noise is drawn, and no pool's
        lifetime budget is charged. If another study asked for that answer, a row records that this study uses it too,
        and the answer's charge counts against the budget of this study.

        After an exception nothing is charged or stored, unless the commit itself was interrupted. Calling again with
        the same queries then either returns their stored answers or charges them.

        Args:
            study_id: The study that asks.
            batch_id: The batch's id.
            roster: The sites, each with the pool that pays.
            queries: The queries.
            draw: Function that draws a query's noise and returns the noisy sum. It is called at most once for each
                query, and not for one that is refused or that has an answer.

        Returns:
            The answers in the order of ``queries``, and the ids of refused queries.

        Raises:
            QuorumNotReached: If the roster is below the study's quorum; no row is written.
            InvalidInput: For an unknown study, an undeclared pool, a query that is named twice or does not fit the
                study, or an answer that is not int64[l]; no row is written. Errors of ``draw`` are passed on.
        """

        def charge(study: StudyTerms, query: QuerySpec, ordered: RosterRecord, planned: ChargedTotals) -> StoredAnswer:
            # step 2; step 1 is _charge_batch, step 4 is _writing
            query_id = query.id
            noisy = checked_answer(draw(query), dimension=query.mechanism.dimension)
            data = noisy.astype("<i8").tobytes()
            named = self._named(ordered)  # step 3
            record = ReleaseRecord.of(study, batch_id, query, query_id, ordered.roster, sha256_bytes(data), named=named)
            row = self._chain.append("release", record.to_json(), payload=(query_id, data))
            self._books.enter(row, record, charge=planned)
            return StoredAnswer(query, noisy, ordered.roster, record.voters, row.seq, row.hash, study.id, batch_id)

        return self._charge_batch(study_id, batch_id, roster, queries, charge)

    # --- reading

    def answer(self, query_id: str) -> StoredAnswer | None:
        """Return the stored answer of a query of any study.

        Args:
            query_id: The query.

        Returns:
            The answer; None if there is none.

        Raises:
            InvalidInput: If ``query_id`` is not a hash.
            LedgerCorrupt: If the stored answer is not the one that was charged.
        """
        check_hash(query_id)
        return self._stored(query_id) if self.books.releases.answered(query_id) else None

    def answers(self, study_id: str) -> tuple[StoredAnswer, ...]:
        """Return every answer that a study may use: its own, and those of other studies that it reuses.

        Args:
            study_id: The study.

        Returns:
            The answers, in the order of release.

        Raises:
            LedgerCorrupt: If a stored answer is not the one that was charged.
        """
        self._catch_up()
        own = (one.query_id for one in self._books.releases.of_study(study_id) if one.answer is not None)
        found = [self._stored(query_id) for query_id in (*own, *self._books.reused.get(study_id, {}))]
        return tuple(sorted(found, key=lambda answer: answer.seq))

    def spent(self, pool: str) -> Spend:
        """Return what a pool has spent in all studies, under its own protection (unit of privacy and relation).

        Args:
            pool: The pool.

        Returns:
            Σμ² and the numbers of releases and coordinates.
        """
        return self.books.spent(pool)

    def remaining(self, pool: str, study_id: str | None = None) -> Fraction:
        """Return the Σμ² that a declared pool has left.

        Args:
            pool: The pool.
            study_id: Return what is left of this study's budget; by default, of the pool's lifetime budget.

        Returns:
            The remaining Σμ². It is negative if a budget was tightened below what is spent, or exceeded by recovered
            charges.

        Raises:
            InvalidInput: If the pool or the study is unknown.
        """
        self._catch_up()
        try:
            if study_id is None:
                return self._books.limit(pool) - self._books.spent(pool).mu_squared
            return self._books.study_limit(study_id) - self._books.spent_in(study_id, pool).mu_squared
        except KeyError as error:
            raise InvalidInput(
                "pool or study", value=error.args[0], limit="name of a pool, or id of a study, in this ledger"
            ) from None

    def pools(self) -> tuple[PoolDeclaration, ...]:
        """Return the declared pools as they are now, by name."""
        return tuple(pool for _, pool in sorted(self.books.pools.items()))

    def study_facts(
        self,
        study: Study,
        *,
        gain: MeasuredGain | None = None,
        asked: Collection[str] | None = None,
        revoked: Collection[str] = (),
    ) -> StudyFacts:
        """Return a study's figures: what it spent of each pool, how many answers it has, and what it has left.

        Args:
            study: The study.
            gain: Gain of the student, to be included in the figures.
            asked: Pools of the study's sites, from which the remaining budget is computed; by default all declared
                pools.
            revoked: Pools of the study's revoked sites.

        Returns:
            The figures (:func:`common.study_facts.study_facts`).
        """
        doubt = self.standing_problem() or self.study_missing(study.id)
        return study_facts(study, self.books, doubt=doubt, gain=gain, asked=asked, revoked=revoked)

    def study_missing(self, study_id: str) -> str | None:
        """Return an error's text if the ledger lacks a study that has a directory.

        A study is registered before its directory is complete. If it is missing, study.toml was changed or the ledger
        is an older copy. A standing of the same age as that copy does not show which.

        Args:
            study_id: Id of the study in the directory.

        Returns:
            The text; None if the study is registered.
        """
        if study_id in self.books.studies:
            return None
        return (
            f"the ledger {self._chain.path} lacks study {study_id[:12]}: study.toml was changed, or ledger and "
            "standing file are older copies; to fix: if study.toml was changed, restore the one with which the study "
            "ran; if not, run `consilium ledger recover` with --study and the receipts file of every site"
        )

    def study_spending(self, study_id: str) -> Spending:
        """Return what a study has spent of the pool that it charged most, and the guarantee for that pool.

        Args:
            study_id: The study.

        Returns:
            The spending.

        Raises:
            InvalidInput: If the study is unknown.
        """
        self._catch_up()
        self._study(study_id)
        return of_study(self._books, study_id, doubt=self.standing_problem())

    def pool_spending(self, pool: str) -> Spending:
        """Return what all studies together have spent of a pool's budget, and the guarantee for the pool.

        Args:
            pool: The pool.

        Returns:
            The spending.

        Raises:
            InvalidInput: If the pool is not declared.
        """
        if pool not in self.books.pools:
            raise InvalidInput("pool", value=pool, limit="name of a pool that this ledger declares")
        return of_pool(self._books, pool, doubt=self.standing_problem())
