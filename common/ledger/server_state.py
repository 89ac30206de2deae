"""Computes the server ledger's totals from its rows alone, and applies the rules that every row must obey.

The server's ledger and the verifier use it. The same object decides whether a release may be written and replays stored
rows. A ledger that breaks a rule anywhere (an exceeded budget, too few sites, a pool declared again with a larger
budget, a wrong derived value) can neither be opened nor verified. Each Σμ² is an exact rational, and no cached total is
read.
"""

from __future__ import annotations

from fractions import Fraction
from typing import Any

from common.document import Document
from common.errors import InvalidInput
from common.ledger.base_state import RowState, refuse_second, second_row_error
from common.ledger.charges import (
    NOTHING,
    PoolDeclaration,
    ReleaseRecord,
    Roster,
    RosterRecord,
    Spend,
    StudyTerms,
    charge_of,
    event_json,
)
from common.ledger.records import (
    ALL_CHARGED,
    KINDS,
    REVOKED,
    BooksRecord,
    LostRecord,
    NoteRecord,
    PoolRecord,
    RecoveredRecord,
    RefusalRecord,
    ReuseRecord,
    StudyRecord,
    kept_of,
)
from common.ledger.releases import AnswerRow, ChargedTotals, ExceededLimit, RecoveredCharge, Release, Releases
from common.ledger.rows import Row
from common.ledger.sealed_records import AnswerRecord, LostDrawRecord
from common.privacy.accounting import MAX_POOL_COORDINATES, admits, max_mu_squared
from common.privacy.figures import delta_text, epsilon_text
from common.privacy.mechanism import Mechanism


class ServerBooks(RowState):
    """Totals and rules of a server's ledger. Rows are entered through :meth:`enter`, in order, each once."""

    role = "server"

    def __init__(self) -> None:
        super().__init__()
        self.studies: dict[str, StudyTerms] = {}
        self.study_rows: dict[str, int] = {}
        self.pools: dict[str, PoolDeclaration] = {}
        self.pool_books: dict[str, str] = {}
        self.releases = Releases()
        self.rosters: dict[str, int] = {}
        self.named: dict[str, Roster] = {}
        self.recovered_draws: dict[str, int] = {}
        self.reused: dict[str, dict[str, None]] = {}
        self.recovered: dict[str, tuple[int, RecoveredCharge]] = {}
        self.lost: dict[int, LostRecord] = {}
        self.refusals: dict[tuple[str, str, tuple[str, ...]], int] = {}
        self.notes: dict[str, int] = {}
        """Row numbers of the notes that a recovery must enter again, by the note's text."""
        self._answers: dict[str, int] = {}
        self._spent: dict[str, Spend] = {}
        self._study_spent: dict[tuple[str, str], Spend] = {}
        self._limits: dict[str, Fraction] = {}
        self._study_limits: dict[str, Fraction] = {}
        self._undo: list[tuple[dict[Any, Any], Any, Any]] | None = None
        self._before = (0, self.key)
        self._roster: Roster = ()

    # --- totals

    def answers(self, study_id: str) -> int:
        """Return the number of answers that a study may use: its own, and those that it reuses from other studies.

        Args:
            study_id: The study's id.

        Returns:
            The number.
        """
        return self._answers.get(study_id, 0)

    def spent(self, pool: str) -> Spend:
        """Return what all releases cost a pool in total, computed with the unit and relation that the pool declared.

        Args:
            pool: Name of the pool.

        Returns:
            The total.
        """
        return self._spent.get(pool, NOTHING)

    def spent_in(self, study_id: str, pool: str) -> Spend:
        """Return what a study's releases cost a pool in total, computed with the study's unit and relation.

        Args:
            study_id: The study's id.
            pool: Name of the pool.

        Returns:
            The total.
        """
        return self._study_spent.get((study_id, pool), NOTHING)

    def all_spent(self) -> dict[str, Spend]:
        """Return the total of every pool that spent anything."""
        return dict(self._spent)

    def all_spent_in(self) -> dict[str, dict[str, Spend]]:
        """Return what each study has spent of each pool, by the ids of the studies and the names of the pools."""
        found: dict[str, dict[str, Spend]] = {}
        for (study, pool), spend in self._study_spent.items():
            found.setdefault(study, {})[pool] = spend
        return found

    def last_draw(self, query_id: str) -> int:
        """Return the number of the newest draw (attempt at the sealed sum) of a query, from rows and recovered
        receipts.

        Args:
            query_id: The query's id.

        Returns:
            The number; 0 if there is none.
        """
        return max(self.releases.last_draw(query_id), self.recovered_draws.get(query_id, 0))

    def study_pools(self, study_id: str) -> tuple[str, ...]:
        """Return the pools on which the study spent anything, by its own releases or by answers that it reuses, sorted
        by name.

        Args:
            study_id: The study's id.

        Returns:
            Names of pools.
        """
        return tuple(sorted(pool for study, pool in self._study_spent if study == study_id))

    def largest_roster(self, study_id: str) -> int:
        """Return an upper bound on the number of sites of any roster behind a study's answers and charges.

        Args:
            study_id: The study's id.

        Returns:
            The number; 0 if there is none.
        """
        reused = (len(self.releases[query_id].roster) for query_id in self.reused.get(study_id, {}))
        recovered = (len(one.roster) for _, one in self.recovered.values() if one.study_id == study_id)
        # Lost charges are recorded by pool and not by release, so their number of pools is an upper bound.
        lost = (len(record.studies.get(study_id, {})) for record in self.lost.values())
        return max(self.releases.largest_roster(study_id), *reused, *recovered, *lost, 0)

    def limit(self, pool: str) -> Fraction:
        """Return the Σμ² that all releases together may ever spend on a pool.

        Args:
            pool: Name of a declared pool.

        Returns:
            The limit.

        Raises:
            KeyError: If the pool is not declared.
        """
        return self._limits[pool]

    def study_limit(self, study_id: str) -> Fraction:
        """Return the Σμ² that a study may spend on each pool.

        Args:
            study_id: The study's id.

        Returns:
            The limit.

        Raises:
            KeyError: If the ledger has no such study.
        """
        return self._study_limits[study_id]

    # --- rules

    def plan(self, mechanism: Mechanism, *, study_id: str, roster: Roster) -> ChargedTotals | ExceededLimit:
        """Return the totals after a release, or the first limit that the release would exceed.

        Args:
            mechanism: The release's mechanism.
            study_id: The study's id.
            roster: The sites; pools are tested in this order.

        Returns:
            The totals after the release, which are not entered yet; or the obstacle, if a limit would be exceeded.
        """
        study = self.studies[study_id]
        own = charge_of(mechanism, study.protection, study.protection)
        allowed = self._study_limits[study_id]
        pools: dict[str, Spend] = {}
        studies: dict[tuple[str, str], Spend] = {}
        whole, within = _Sums(mechanism.dimension), _Sums(mechanism.dimension)
        costs = {study.protection: own}
        for entry in roster:
            protection = self.pools[entry.pool].protection
            cost = costs.get(protection)
            if cost is None:
                cost = costs[protection] = charge_of(mechanism, protection, study.protection)
            spend, limit = self.spent(entry.pool), self._limits[entry.pool]
            after = whole.after(spend, cost, limit)
            if after is None:
                return ExceededLimit("pool-budget", entry.pool, cost, limit - spend.mu_squared)
            if after.coordinates > MAX_POOL_COORDINATES:
                return ExceededLimit("coordinates", entry.pool, cost, limit - spend.mu_squared)
            inside = self.spent_in(study_id, entry.pool)
            after_inside = within.after(inside, own, allowed)
            if after_inside is None:
                return ExceededLimit("study-budget", entry.pool, own, allowed - inside.mu_squared)
            pools[entry.pool], studies[study_id, entry.pool] = after, after_inside
        return ChargedTotals(pools, studies)

    def plan_reuse(self, query_id: str, *, study_id: str) -> ChargedTotals | ExceededLimit:
        """Return a study's totals after it uses another study's answer, for which the pools have paid already.

        Args:
            query_id: An answered query of another study.
            study_id: The study that uses the answer.

        Returns:
            The study's totals after the reuse, which are not entered yet; or the obstacle, if a limit would be
            exceeded.
        """
        release, study = self.releases[query_id], self.studies[study_id]
        cost = charge_of(release.mechanism, study.protection, self.studies[release.study_id].protection)
        allowed = self._study_limits[study_id]
        studies: dict[tuple[str, str], Spend] = {}
        for entry in release.roster:
            inside = self.spent_in(study_id, entry.pool)
            if not admits(inside.mu_squared, cost, allowed):
                return ExceededLimit("study-budget", entry.pool, cost, allowed - inside.mu_squared)
            studies[study_id, entry.pool] = inside.plus(cost, release.mechanism.dimension)
        return ChargedTotals({}, studies)

    def check_pool(self, new: PoolDeclaration) -> None:
        """Refuse a declaration of a pool that allows more than an earlier declaration of the same pool.

        Args:
            new: The declaration.

        Raises:
            InvalidInput: If its site or its protection differs from the earlier declaration, or its budget is larger.
        """
        old = self.pools.get(new.pool)
        if old is None:
            return
        for what, before, after in (("site", old.site, new.site), ("protection", old.protection, new.protection)):
            if before != after:
                raise InvalidInput(f"{what} of pool {new.pool}", value=str(after), limit=f"{before}, as first declared")
        limit = max_mu_squared(new.accountant, new.budget)
        if (
            new.budget.epsilon > old.budget.epsilon
            or new.budget.delta > old.budget.delta
            or limit > self._limits[new.pool]
        ):
            raise InvalidInput(
                f"budget of pool {new.pool}",
                value=_stated(new),
                limit=f"at most {_stated(old)}",
                remedy="declare the earlier budget or a smaller one; a pool's budget can only be made tighter",
            )

    def check_books(self, pool: str, ledger_id: str) -> None:
        """Refuse to assign a pool to a site ledger if the pool has another ledger or the ledger has another pool.

        A pool has one site ledger for life, and a site ledger has one pool. A second ledger for the same patients would
        start with a full budget.

        Args:
            pool: Name of the pool.
            ledger_id: Id of the site ledger.

        Raises:
            InvalidInput: If the assignment contradicts an earlier one, or the pool is not declared.
        """
        if pool not in self.pools:
            raise InvalidInput("pool", value=pool, limit="a declared pool")
        known = self.pool_books.get(pool, ledger_id)
        other = next((name for name, found in self.pool_books.items() if found == ledger_id and name != pool), None)
        if known != ledger_id or other is not None:
            raise InvalidInput(
                f"ledger of pool {pool}" if other is None else f"ledger of pool {other}, named for pool {pool}",
                value=ledger_id,
                limit=f"{known}, as first declared" if other is None else "one ledger for each pool",
                remedy="join with the site's existing ledger: `consilium site join --from` its directory, or move the "
                "ledger to this machine (docs/deployment.md)",
            )

    # --- entering rows

    def enter(self, row: Row, record: Document | None = None, *, charge: ChargedTotals | None = None) -> Document:
        """Enter a row into the totals.

        Args:
            row: The next row.
            record: The record, if the caller has just written the row.
            charge: The totals that :meth:`plan` or :meth:`plan_reuse` returned, if the caller has just written the row.

        Returns:
            The row's record.

        Raises:
            LedgerCorrupt: If the row breaks a rule. Then nothing is changed.
        """
        return self._take(row, record, lambda found: self._enter(row, found, charge))

    def begin(self) -> None:
        """Begin to record changes, so that :meth:`settle` can make them final or :meth:`roll_back` can revert them."""
        self._undo, self._before = [], (self.row_count, self.key)
        self.releases.mark()

    def settle(self) -> None:
        """Make every change since :meth:`begin` final. Called after the transaction was committed."""
        self._undo = None
        self.releases.settle()

    def roll_back(self) -> None:
        """Revert everything entered since :meth:`begin`. Called after the transaction failed.

        Does nothing if :meth:`begin` was not called.
        """
        if self._undo is None:
            return
        for mapping, key, old in reversed(self._undo):
            if old is None:
                del mapping[key]
            else:
                mapping[key] = old
        self.releases.undo()
        self.row_count, self.key = self._before
        self._undo = None

    def _enter(self, row: Row, record: Document, charge: ChargedTotals | None) -> None:
        match record:
            case ReleaseRecord():
                self._release(row, record, charge)
            case RosterRecord():
                refuse_second(record.id, self.named, "roster")
                self._set(self.named, record.id, record.roster)
            case AnswerRecord():
                self._check_open(record.query_id, record.draw)
                self.releases.end(record.query_id, AnswerRow(row.seq, row.hash, record.answer_sha256))
                self._count_answers(self.releases[record.query_id].study_id, 1)
            case LostDrawRecord():
                for query_id in record.query_ids:
                    self._check_open(query_id, record.draw)
                    self.releases.end(query_id, None)
            case StudyRecord(terms=terms):
                refuse_second(terms.id, self.studies, "study")
                self._set(self._study_limits, terms.id, max_mu_squared(terms.accountant, terms.budget))
                self._set(self.study_rows, terms.id, row.seq)
                self._set(self.studies, terms.id, terms)
            case PoolRecord(declaration=declaration):
                self.check_pool(declaration)
                self._set(self._limits, declaration.pool, max_mu_squared(declaration.accountant, declaration.budget))
                self._set(self.pools, declaration.pool, declaration)
            case RecoveredRecord():
                refuse_second(record.release_hash, self.recovered, "recovered release")
                self._recovered(row, record)
            case LostRecord():
                self._lost(row, record)
            case BooksRecord(pool=pool, ledger_id=ledger_id):
                self.check_books(pool, ledger_id)
                self._set(self.pool_books, pool, ledger_id)
            case ReuseRecord():
                self._reuse(record, charge)
            case NoteRecord(text=text):
                if text == ALL_CHARGED or REVOKED in text:
                    self._set(self.notes, text, row.seq)
            case RefusalRecord():
                self._set(self.refusals, (record.study_id, record.batch_id, record.query_ids), row.seq)
            case _:
                raise InvalidInput("kind of row", value=row.kind, limit=", ".join(KINDS["server"]))

    def _check_open(self, query_id: str, draw: int) -> None:
        release = self.releases[query_id]
        if release.draw != draw or release.answer is not None or release.lost:
            raise InvalidInput(
                f"draw of query {query_id[:12]}",
                value=draw,
                limit="the query's newest draw, if it has no answer and is not lost",
            )

    def _release(self, row: Row, record: ReleaseRecord, charge: ChargedTotals | None) -> None:
        if self.releases.answered(record.query_id):
            raise second_row_error(record.query_id, "query")
        if record.draw is not None and record.draw <= (last := self.last_draw(record.query_id)):
            raise InvalidInput("draw of a query", value=record.draw, limit=f"above {last}, the query's newest draw")
        study, mechanism, roster = self.studies[record.study_id], record.query.mechanism, record.roster_in(self.named)
        if charge is None:  # a replayed row: every rule is applied again
            self.check_release(roster, mechanism, study)
            if record.event != event_json(mechanism, study.protection):
                raise InvalidInput(
                    "event of a release",
                    limit="the privacy event computed from the query's mechanism and the study's protection",
                )
            planned = self.plan(mechanism, study_id=study.id, roster=roster)
            if isinstance(planned, ExceededLimit):
                raise InvalidInput(f"the release exceeds a limit ({planned.reason}) of pool {planned.pool!r}")
            charge = planned
        self._apply(charge)
        if roster != self._roster:  # consecutive releases usually have equal rosters, which then share one object
            self._roster = roster
        answer = AnswerRow(row.seq, row.hash, record.answer_sha256) if record.answer_sha256 else None
        of = row.seq, study.id, record.batch_id, record.query_id, mechanism, self._roster, record.voters
        self.releases.add(Release(*of, record.draw, record.masks, answer))
        if answer is not None:
            self._count_answers(study.id, 1)
        # Only the first row of a draw introduces its roster with masks.
        if record.masks is not None and record.masks not in self.rosters:
            self._set(self.rosters, record.masks, row.seq)

    def check_release(self, roster: Roster, mechanism: Mechanism, study: StudyTerms) -> None:
        """Refuse a release whose roster, pools or mechanism the study and the declarations do not allow.

        Args:
            roster: The sites.
            mechanism: The release's mechanism.
            study: The study's terms.

        Raises:
            InvalidInput: If a rule is broken.
        """
        if len(roster) < study.least_roster:
            raise InvalidInput(
                "sites on a roster", value=len(roster), limit=f"at least {study.least_roster}, the study's quorum"
            )
        if mechanism.colluders != study.colluders:
            raise InvalidInput(
                "colluders of a query", value=mechanism.colluders, limit=f"{study.colluders}, as in the study's terms"
            )
        if mechanism.voters_per_site != study.voters_per_site:
            raise InvalidInput(
                "voters per site of a query",
                value=mechanism.voters_per_site,
                limit=f"{study.voters_per_site}, as in the study's terms",
            )
        for entry in roster:
            if entry.pool not in self.pools:
                raise InvalidInput("pool of a roster", value=entry.pool, limit="a declared pool")
            if self.pools[entry.pool].site != entry.site:
                raise InvalidInput(
                    f"site of pool {entry.pool}", value=entry.site, limit=f"{self.pools[entry.pool].site}, as declared"
                )

    def _recovered(self, row: Row, record: RecoveredRecord) -> None:
        """Enter a charge from a receipt, even beyond a limit, since the release has happened.

        If a row of kind ``lost`` charges the release already, only its draw number is entered.
        """
        release, release_hash, head = record.release, record.release_hash, record.head
        study, mechanism = self.studies[release.study_id], release.query.mechanism
        roster = release.roster_in(self.named)
        for entry in roster:
            _ = self.pools[entry.pool]
        if (by := record.charged) is not None:
            _ = self.lost[by]
        found = RecoveredCharge(study.id, mechanism, roster, head, charged=by is None)
        self._set(self.recovered, release_hash, (row.seq, found))
        if release.draw is not None:
            self._set(self.recovered_draws, release.query_id, max(release.draw, self.last_draw(release.query_id)))
        if by is not None:
            return
        own = mechanism.mu_squared(study.protection)
        for entry in roster:
            cost = charge_of(mechanism, self.pools[entry.pool].protection, study.protection)
            self._set(self._spent, entry.pool, self.spent(entry.pool).plus(cost, mechanism.dimension))
            inside = self.spent_in(study.id, entry.pool)
            self._set(self._study_spent, (study.id, entry.pool), inside.plus(own, mechanism.dimension))

    def _lost(self, row: Row, record: LostRecord) -> None:
        """Enter charges missing in a restored older copy, even beyond a limit, since the releases have happened."""
        for pool, spend in record.pools.items():
            self._set(self._spent, self.pools[pool].pool, self.spent(pool) + spend)
        for study, pools in record.studies.items():
            for pool, spend in pools.items():
                self._set(self._study_spent, (self.studies[study].id, pool), self.spent_in(study, pool) + spend)
        self._set(self.lost, row.seq, record)
        for place in kept_of(record):
            self._set(self.kept, place, record)

    def _reuse(self, record: ReuseRecord, charge: ChargedTotals | None) -> None:
        known = self.reused.get(record.study_id, {})
        for query_id in record.query_ids:
            if not self.releases.answered(query_id):
                raise InvalidInput("reused answer", value=query_id, limit="a query that is already answered")
            if query_id in known or self.releases[query_id].study_id == record.study_id:
                raise InvalidInput(
                    "reused answer", value=query_id, limit="an answer of another study that was not listed before"
                )
            if len(self.releases[query_id].roster) < self.studies[record.study_id].quorum:
                raise InvalidInput("roster of a reused answer", limit="at least as many sites as the study's quorum")
            if self.releases[query_id].mechanism.colluders != self.studies[record.study_id].colluders:
                raise InvalidInput("colluders of a reused answer", limit="the number in the study's terms")
            planned = charge or self.plan_reuse(query_id, study_id=record.study_id)
            if isinstance(planned, ExceededLimit):
                raise InvalidInput(f"the reused answer exceeds a limit ({planned.reason}) of pool {planned.pool!r}")
            self._apply(planned)
        self._set(self.reused, record.study_id, {**known, **dict.fromkeys(record.query_ids)})
        self._count_answers(record.study_id, len(record.query_ids))

    def _count_answers(self, study_id: str, more: int) -> None:
        self._set(self._answers, study_id, self.answers(study_id) + more)

    def _apply(self, charge: ChargedTotals) -> None:
        if self._undo is None:  # rows are replayed
            self._spent.update(charge.pools)
            self._study_spent.update(charge.studies)
            return
        for pool, spend in charge.pools.items():
            self._set(self._spent, pool, spend)
        for key, inside in charge.studies.items():
            self._set(self._study_spent, key, inside)

    def _set(self, mapping: dict[Any, Any], key: Any, value: Any) -> None:
        if self._undo is not None:
            self._undo.append((mapping, key, mapping.get(key)))
        mapping[key] = value


class _Sums:
    """Computes the totals of pools after one more release of a given number of coordinates.

    Most pools have the same total, so the last result is stored and returned for the next pool with the same input.
    """

    def __init__(self, coordinates: int) -> None:
        self._coordinates = coordinates
        self._of: tuple[Spend, Fraction, Fraction] | None = None
        self._after: Spend | None = None

    def after(self, spend: Spend, cost: Fraction, limit: Fraction) -> Spend | None:
        """Return the total with one more release of this cost, or None if that would exceed ``limit``."""
        of = self._of
        if of is None or spend is not of[0] or cost is not of[1] or limit is not of[2]:
            self._of = spend, cost, limit
            self._after = spend.plus(cost, self._coordinates) if admits(spend.mu_squared, cost, limit) else None
        return self._after


def _stated(pool: PoolDeclaration) -> str:
    return f"epsilon {epsilon_text(pool.budget.epsilon)}, delta {delta_text(pool.budget.delta)} ({pool.accountant})"
