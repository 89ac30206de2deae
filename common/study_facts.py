"""Works out once what a study spent, guarantees, was answered, has left and gained; every text of a study renders this.

The figures come from a ledger's books and from what was measured of the student. The command line, the consent text,
the report, the certificate, the bundle, the metrics and the dashboard compute none of them a second time.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from common.config import Study
from common.ledger.charges import charge_of
from common.ledger.server_state import Books
from common.ledger.spending import Spending, of_pool, of_pool_in_study, of_study
from common.study_mechanism import study_mechanism
from common.worth import Worth


@dataclass(frozen=True, slots=True)
class PoolFacts:
    """A declared pool of patients: what this study spent of it, and what all studies together did.

    ``room`` is how many further queries of the study both budgets admit, by what the books show.
    """

    site: str
    pool: str
    in_study: Spending
    for_life: Spending
    room: int

    @property
    def exhausted(self) -> bool:
        """Whether it takes no further query. What the books do not show can only have been spent on top."""
        return self.room == 0


@dataclass(frozen=True, slots=True)
class StudyFacts:
    """What holds of one study.

    ``spending`` is of the pool that the study cost most. ``planned`` is None where a consent text of another version
    does not say. ``room`` is how many further queries the study's own budget admits; None, and no ``pools``, for a
    study whose terms are not at hand. ``gain`` is the student's over its best control, None before it is measured.
    """

    study_id: str
    spending: Spending
    planned: int | None
    answers: int = 0
    lost_draws: int = 0
    room: int | None = None
    pools: Mapping[str, PoolFacts] = field(default_factory=dict)
    gain: Worth | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "pools", MappingProxyType(dict(self.pools)))

    @property
    def answers_left(self) -> int:
        """Planned queries that have no answer yet."""
        return max(0, (self.planned or 0) - self.answers)

    @property
    def fit(self) -> int:
        """How many further answers are known to fit the study's budget; none while more may have been spent."""
        return 0 if self.spending.doubt else self.room or 0

    @property
    def answers_line(self) -> str:
        """How many planned queries were answered and how many are left, in words."""
        least = "at least " if self.spending.doubt else ""
        return f"answers {least}{self.answers} of {self.planned} planned, {self.answers_left} left"

    @property
    def gain_line(self) -> str:
        """The verdict on the student in words."""
        return "gain not measured" if self.gain is None else self.gain.sentence


def study_facts(
    study: Study, books: Books | None = None, *, doubt: str | None = None, gain: Worth | None = None
) -> StudyFacts:
    """The facts of a study by a ledger's books; nothing was spent without books, or before it is on record in them.

    ``doubt``: why more may have been spent than the books show. A ``gain`` counts once the study has an answer: a copy
    of a study's directory may hold the report of another run.
    """
    privacy, books = study.privacy, books or Books()
    mechanism, protection = study_mechanism(study, dimension=1), privacy.protection
    cost = charge_of(mechanism, protection, protection)

    def of(pool: str) -> PoolFacts:
        life, inside = of_pool(books, pool, doubt=doubt), Spending.of(privacy, doubt=doubt)
        if study.id in books.studies:
            inside = of_pool_in_study(books, study.id, pool, doubt=doubt)
        room = min(life.room(charge_of(mechanism, life.protection, protection)), inside.room(cost))
        return PoolFacts(books.pools[pool].site, pool, inside, life, room)

    pools = {pool: of(pool) for pool in sorted(books.pools)}
    if study.id not in books.studies:
        return StudyFacts(study.id, Spending.of(privacy, doubt=doubt), privacy.planned_queries, pools=pools)
    found = recorded_facts(study.id, books, planned=privacy.planned_queries, doubt=doubt, gain=gain)
    return replace(found, room=found.spending.room(cost), pools=pools)


def recorded_facts(
    study_id: str, books: Books, *, planned: int | None, doubt: str | None = None, gain: Worth | None = None
) -> StudyFacts:
    """The facts of a study that is on record in the books, by the terms that they hold; KeyError for any other."""
    answers, sealed = books.answers(study_id), books.studies[study_id].colluders is not None
    return StudyFacts(
        study_id=study_id,
        spending=of_study(books, study_id, doubt=doubt),
        planned=planned,
        answers=answers,
        lost_draws=books.releases.lost_in(study_id) if sealed else 0,
        gain=gain if answers else None,
    )
