"""Computes the figures of a study that texts show: spent and guaranteed ε, remaining queries, and the student's gain.

The figures come from a ledger's totals and from the student's scores. The command line, the consent text, the report,
the certificate, the bundle, the metrics and the dashboard all take them from here, so they cannot disagree.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from common.config import Study
from common.ledger.charges import StudyTerms, charge_of
from common.ledger.server_state import ServerBooks
from common.ledger.spending import Spending, of_pool, of_pool_in_study, of_study
from common.measured_gain import MeasuredGain
from common.study_mechanism import study_mechanism


@dataclass(frozen=True, slots=True)
class PoolFacts:
    """A declared patient pool.

    Attributes:
        site: Name of the site.
        pool: Name of the pool.
        in_study: What this study may spend of the pool, and what it has spent.
        for_life: Lifetime budget of the pool, and the part that all studies spent.
        room: Number of further queries of the study that both budgets allow according to the ledger.
        answers_left: Number of planned queries that have no answer yet and that both budgets (``in_study`` and
            ``for_life``) still cover. It is never more than ``room``. In a sealed study ``room`` can be larger, because
            it also counts repetitions of failed sums. It is 0 if the site is revoked, or if more budget may have been
            spent than the ledger shows.
        revoked: True if the site's admission to the study was revoked.
    """

    site: str
    pool: str
    in_study: Spending
    for_life: Spending
    room: int
    answers_left: int
    revoked: bool = False

    @property
    def exhausted(self) -> bool:
        """True if the pool's budgets allow no further query of the study."""
        return self.room == 0

    @property
    def can_answer(self) -> bool:
        """True if the site is admitted and the pool's budgets allow a further query of the study."""
        return not self.revoked and not self.exhausted


@dataclass(frozen=True, slots=True)
class StudyFacts:
    """The figures of one study.

    Attributes:
        study_id: Id of the study.
        spending: Budget and spending of the pool on which the study spent most.
        planned: Number of planned queries; None if the consent text of another version does not state it.
        answers: Number of answers that the study may use.
        lost_draws: In a sealed study, number of charged draws without an answer.
        room: Number of further queries that the study's budget allows; None if the study's file is not available.
        quorum_room: Number of further queries that the budgets of a quorum of the sites' pools allow; None if the
            study's file is not available.
        pools: Facts of each pool by name; empty if the study's file is not available.
        gain: Gain of the student over its best control; None before it is measured.
    """

    study_id: str
    spending: Spending
    planned: int | None
    answers: int = 0
    lost_draws: int = 0
    room: int | None = None
    quorum_room: int | None = None
    pools: Mapping[str, PoolFacts] = field(default_factory=dict)
    gain: MeasuredGain | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "pools", MappingProxyType(dict(self.pools)))

    @property
    def unanswered(self) -> int:
        """Number of planned queries without an answer, including those that the budgets no longer allow."""
        return max(0, (self.planned or 0) - self.answers)

    @property
    def answers_left(self) -> int:
        """Number of planned queries without an answer that the pools of a quorum of sites can still pay for.

        The study's budget and each pool's lifetime budget limit it. It is 0 if more may have been spent than the ledger
        shows. If the study's file is not available, it is the number of all planned queries without an answer.
        """
        if self.spending.doubt:
            return 0
        return self.unanswered if self.quorum_room is None else min(self.unanswered, self.quorum_room)

    @property
    def answers_line(self) -> str:
        """A line with the number of answered, planned and remaining queries."""
        if self.spending.doubt:
            return f"answers at least {self.answers} of {self.planned} planned, what is left is not known"
        said = f"answers {self.answers} of {self.planned} planned"
        if self.answers_left < self.unanswered:
            return f"{said}; the budgets have room for {self.answers_left} of the {self.unanswered} left"
        return f"{said}, {self.unanswered} left"

    @property
    def gain_line(self) -> str:
        """A sentence that says whether the student is better than its best control, and by how much."""
        return "gain not measured" if self.gain is None else self.gain.sentence


def study_facts(
    study: Study,
    books: ServerBooks | None = None,
    *,
    doubt: str | None = None,
    gain: MeasuredGain | None = None,
    asked: Collection[str] | None = None,
    revoked: Collection[str] = (),
) -> StudyFacts:
    """Return the figures of a study.

    Args:
        study: The study.
        books: The ledger's totals; None if there is no ledger yet, so that nothing was spent.
        doubt: Reason why more may have been spent than the ledger shows; None if there is none.
        gain: Gain of the student. It is used only if the study has an answer, because a copy of a study's directory may
            contain the report of another run.
        asked: Pools of the study's sites; by default all declared pools. If they are fewer than the quorum, pools that
            gave earlier answers are added. If they are still too few, sites that may yet join are assumed, whose pools
            have spent nothing.
        revoked: Pools of the study's revoked sites, which answer nothing and do not count towards a quorum.

    Returns:
        What the study promised, what was spent of it, and how many answers the budgets still have room for.
    """
    privacy, books = study.privacy, books or ServerBooks()
    mechanism, protection = study_mechanism(study, dimension=1), privacy.protection
    cost = charge_of(mechanism, protection, protection)
    answers = books.answers(study.id) if study.id in books.studies else 0
    unanswered = max(0, privacy.planned_queries - answers)

    def of(pool: str) -> PoolFacts:
        life, inside = of_pool(books, pool, doubt=doubt), Spending.of(privacy, doubt=doubt)
        if study.id in books.studies:
            inside = of_pool_in_study(books, study.id, pool, doubt=doubt)
        room = min(life.room(charge_of(mechanism, life.protection, protection)), inside.room(cost))
        gone = pool in revoked
        left = 0 if gone or doubt else min(unanswered, room)
        return PoolFacts(books.pools[pool].site, pool, inside, life, room, left, gone)

    pools = {pool: of(pool) for pool in sorted(books.pools)}
    unspent, least = Spending.of(privacy).room(cost), StudyTerms.of(study).least_roster
    able = [pool for pool in (pools if asked is None else asked) if pool not in revoked]
    if len(able) < least:
        able += [pool for pool in books.study_pools(study.id) if pool not in able and pool not in revoked]
    rooms = [pools[pool].room if pool in pools else unspent for pool in able] + [unspent] * (least - len(able))
    quorum_room = sorted(rooms, reverse=True)[least - 1]
    if study.id not in books.studies:
        spending = Spending.of(privacy, doubt=doubt)
        return StudyFacts(study.id, spending, privacy.planned_queries, quorum_room=quorum_room, pools=pools)
    found = recorded_facts(study.id, books, planned=privacy.planned_queries, doubt=doubt, gain=gain)
    return replace(found, room=found.spending.room(cost), quorum_room=quorum_room, pools=pools)


def recorded_facts(
    study_id: str,
    books: ServerBooks,
    *,
    planned: int | None,
    doubt: str | None = None,
    gain: MeasuredGain | None = None,
) -> StudyFacts:
    """Return the figures of a study in the ledger, from the terms that the ledger contains.

    Args:
        study_id: Id of the study.
        books: The ledger's totals.
        planned: Number of planned queries, if it is known.
        doubt: Reason why more may have been spent than the ledger shows; None if there is none.
        gain: Gain of the student; used only if the study has an answer.

    Returns:
        The figures, without ``room`` and ``pools``.

    Raises:
        KeyError: If the study is not in the ledger.
    """
    answers, sealed = books.answers(study_id), books.studies[study_id].colluders is not None
    return StudyFacts(
        study_id=study_id,
        spending=of_study(books, study_id, doubt=doubt),
        planned=planned,
        answers=answers,
        lost_draws=books.releases.lost_in(study_id) if sealed else 0,
        gain=gain if answers else None,
    )
