"""Computes the figures of a site that texts show: spent and remaining budget, answers, and its patients' guarantee.

The figures come from the site's own ledger (:func:`site_facts`), or from the status report that the site printed
(:meth:`SiteFacts.from_json`). The command line, the site's own page, the account (the shorter report that a site may
share with the server), the dashboard, the report and the certificate all take the figures from here, so they cannot
disagree. Status reports do not show whether patients were withdrawn. Refuses a report of another form.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from math import inf
from typing import Any

from common.data.dataset import PatientIdentity
from common.errors import InvalidInput
from common.ledger.charges import check_ledger_name
from common.ledger.records import ZERO_CODE, failed_voters
from common.ledger.site_state import SiteBooks
from common.ledger.spending import Spending
from common.privacy.accounting import Guarantee
from common.privacy.mechanism import AccountantName, Protection, Relation, Unit
from common.privacy.patient_guarantee import EXCHANGED, UNPROTECTED, Trainings, combine
from common.privacy.training import Neighbours, TrainingGuarantee, epsilon_of
from common.reading import parsing
from common.wording import many

ADAPTED_UNKNOWN = (
    "no patient-level ε, because the ledger was restored without its standing file, or is in doubt, and may lack the "
    "training of a network that may leave the hospital"
)
"""Line in the place of a patient's ε if the ledger may lack such a training."""

PRINTED = "what `consilium site status --json` prints"
"""Name of a status report in error messages."""

REPAIR = (
    "read logs/worker.log, repair the voter's teacher, and restart `consilium site up`; until then the voter also "
    "votes zero in later rounds about the same volumes"
)
READ = "read logs/worker.log; `consilium site doctor` checks the connection to the server"
"""Remedies for voters that voted zero although they had a teacher."""

MAX_LISTED, MAX_TEXT = 20, 300
"""Limits on a list of texts that a hospital wrote: the number of texts shown, and the characters shown of each."""


def _each(trainings: Trainings, *, delta: float) -> Iterator[str]:
    """Yield a line for each strategy and noise: trainings, unfinished ones, and the cost of one to a patient."""
    relation = Neighbours(EXCHANGED.relation)
    unfinished = Counter((one.strategy, one.event) for one in trainings.all if not one.finished)
    for (strategy, event), count in Counter((one.strategy, one.event) for one in trainings.all).items():
        cost = "no guarantee of its own"
        if event is not None:
            cost = str(TrainingGuarantee(epsilon_of(event, delta=delta, neighbours=relation), delta, relation))
        left = f" ({unfinished[strategy, event]} not finished)" if unfinished[strategy, event] else ""
        yield f"{strategy}, {many(count, 'training')}{left}: {cost}{' each' if count > 1 else ''}"


@dataclass(frozen=True, slots=True)
class TrainingFacts:
    """The ε that a site's recorded teacher trainings cost one of its patients.

    Attributes:
        count: Number of recorded private trainings.
        strategies: Training strategies (such as ``dp-sgd``) of all trainings that were charged or whose teachers
            answered.
        guarantees: ε of all trainings composed, for each neighbouring relation; None for a relation without a
            guarantee; all None if ``adapted_unknown``.
        adapted: The guarantee of adapted networks that may leave the hospital; None if there is no such network, and
            if ``adapted_unknown``.
        covers_every_release: True if every release used only teachers of finished private trainings.
        adapted_unknown: True if the ledger may lack trainings of networks that may leave the hospital; then no ε covers
            a patient.
        each: For each kind of recorded training its strategy, the number of its trainings, and the ε of one, in words.
            They are not in the JSON.
    """

    count: int = 0
    strategies: tuple[str, ...] = ()
    guarantees: tuple[TrainingGuarantee | None, ...] = ()
    adapted: TrainingGuarantee | None = None
    covers_every_release: bool = False
    adapted_unknown: bool = False
    each: tuple[str, ...] = field(default=(), compare=False)

    @classmethod
    def of(cls, trainings: Trainings, *, delta: float) -> TrainingFacts:
        """Return the facts of recorded trainings.

        If trainings of networks that may leave the hospital may be missing, no ε is stated: it would be too small.

        Args:
            trainings: The trainings.
            delta: δ at which ε is stated.

        Returns:
            The facts.
        """
        unknown = trainings.adapted_unknown
        guarantees = (
            None if unknown else trainings.guarantee(delta=delta, neighbours=of) for of in Neighbours if trainings.all
        )
        return cls(
            count=len(trainings.private),
            strategies=tuple(sorted({one.strategy for one in trainings.all if one.served or one.event is not None})),
            guarantees=tuple(guarantees),
            adapted=None if unknown else trainings.adapted(delta=delta, neighbours=Neighbours(EXCHANGED.relation)),
            covers_every_release=trainings.covers_every_release,
            adapted_unknown=unknown,
            each=tuple(_each(trainings, delta=delta)),
        )

    @classmethod
    def from_json(cls, stated: Mapping[str, Any]) -> TrainingFacts:
        """Read the key ``trainings`` of a status report.

        Args:
            stated: The JSON values.

        Returns:
            The facts.

        Raises:
            Exception: InvalidInput or a built-in exception, if the values do not have this form.
                :meth:`SiteFacts.from_json` raises InvalidInput in its place.
        """
        guarantees = [None if one is None else _training(one) for one in _listed(stated["guarantees"])]
        return cls(
            count=_count(stated["count"]),
            strategies=_texts(stated["strategies"]),
            guarantees=tuple(guarantees),
            adapted=_training(stated["adapted"]) if "adapted" in stated else None,
            covers_every_release=bool(stated.get("covers_every_release")),
            adapted_unknown=bool(stated.get("adapted_unknown")),
        )

    def to_json(self) -> dict[str, object]:
        """Return the facts as plain JSON.

        ``adapted`` is present only if an adapted network may leave the hospital, ``adapted_unknown`` only if it is
        true.
        """
        return {
            "count": self.count,
            "strategies": list(self.strategies),
            "guarantees": [None if one is None else one.to_json() for one in self.guarantees],
            **({} if self.adapted is None else {"adapted": self.adapted.to_json()}),
            "covers_every_release": self.covers_every_release,
            **({"adapted_unknown": True} if self.adapted_unknown else {}),
        }

    def lines(self, release: Guarantee) -> tuple[str, ...]:
        """Describe a patient's privacy cost in lines: the ε of the trainings, and the ε of trainings and releases
        together.

        Args:
            release: The guarantee of the releases.

        Returns:
            The lines; empty without a private training.
        """
        if self.adapted_unknown:
            return (ADAPTED_UNKNOWN,)
        if not self.count:
            return ()
        found = [one for one in self.guarantees if one is not None]
        same = [one for one in found if str(one.neighbours) == EXCHANGED.relation]
        training, covers = next(iter(same or found), None), self.covers_every_release
        try:
            both = str(combine(training, release, every_release_used_it=covers, adapted=self.adapted))
        except InvalidInput:  # zero-out releases: ε for an exchanged patient is too large to be useful
            both = f"no useful figure for {EXCHANGED}"
        return (
            *([str(one) for one in found] or [f"{UNPROTECTED}: no patient-level ε of training"]),
            *([] if self.adapted is None else [f"networks adapted here that may leave the hospital: {self.adapted}"]),
            f"with all releases: {both}",
        )


STOPPED = {"pause": "paused", "withdraw": "withdrawn", "alarm": "stopped by an alarm"}
"""Words for the states in which a study is not answered: staff paused it or withdrew, or an alarm stops it."""


@dataclass(frozen=True, slots=True)
class SiteStudy:
    """A study in a site's ledger.

    Attributes:
        id: Id of the study.
        name: Name of the study.
        state: ``open``, ``pause``, ``withdraw``, ``alarm`` if an alarm stops every study, or ``spent`` if the budget
            has no room for one more query like the newest.
        spending: The study's budget, and the part of it that the site has charged. No status report contains it.
        consents: One sentence for each consent: who gave it, and when. No status report contains them.
    """

    id: str
    name: str
    state: str
    spending: Spending
    consents: tuple[str, ...] = ()

    @property
    def words(self) -> str:
        """The state in a word for a reader."""
        return STOPPED.get(self.state, self.state)

    def to_json(self) -> dict[str, str]:
        """Return the part of a status report about the study."""
        return {"id": self.id, "name": self.name, "state": self.state}


@dataclass(frozen=True, slots=True)
class SiteFacts:
    """The figures of one site and its patient pool, over all studies, according to the site's own ledger.

    Attributes:
        site: Name of the site.
        pool: Name of the patient pool.
        cap: The most that the pool may ever spend in all studies, as the site has set it.
        by: ε and δ of everything spent so far, by each accountant.
        doubt: Reason why more may have been spent than the ledger shows; None if there is none.
        accepted: Number of accepted queries.
        receipted: Number of queries with a receipt.
        refused: Number of recorded offers that the site declined.
        alarms: Sentences about receipts that contradict the site's record.
        share: Spent share of the Σμ² that the cap allows; None in figures that were read from a report.
        today: Queries accepted today.
        per_day: Queries that the site accepts in a day.
        codes: Number of queries for which a code was ever stored; None if a report does not state it.
        released_again: Number of releases beyond the first of each query.
        restored: Number of times that the ledger was restored from an older copy.
        identities: Definitions of "one patient", each with the ledger row from which it holds.
        disclosures: Noise shares that were disclosed to an auditor.
        trainings: ε that the teachers' trainings cost a patient.
        studies: The pool's studies; empty if read from a report.
        stopped: True if an alarm stops every study; False if read from a report.
        withdrawn: Number of withdrawals of patients, counted in each assignment of patients to voters. No report
            contains it.
        silent: Numbers of the voters for which the newest worker found no teacher. No report contains them.
        failed: For each voter that ever failed, the number of queries in whose code it counted as zero for that reason.
            No report contains it.
        unread: Number of queries in whose code all voters counted as zero, because a public object could not be read.
            No report contains it.
    """

    site: str
    pool: str
    cap: Guarantee
    by: Mapping[AccountantName, Guarantee]
    doubt: str | None
    accepted: int
    receipted: int
    refused: int
    alarms: tuple[str, ...]
    share: float | None = None
    today: int = 0
    per_day: int = 0
    codes: int | None = None
    released_again: int = 0
    restored: int = 0
    identities: tuple[tuple[int, PatientIdentity], ...] = ()
    disclosures: tuple[Mapping[str, object], ...] = ()
    trainings: TrainingFacts = field(default_factory=TrainingFacts)
    studies: tuple[SiteStudy, ...] = ()
    stopped: bool = False
    withdrawn: int = 0
    silent: tuple[int, ...] = ()
    failed: Mapping[int, int] = field(default_factory=dict)
    unread: int = 0

    @property
    def zero_votes(self) -> tuple[tuple[str, str], ...]:
        """Pairs of problem and remedy: one for each voter that failed, and one if a public file could not be read."""
        return (
            *(
                (f"voter {voter} failed in {count} of {many(self.codes or 0, 'code')}, and voted zero there", REPAIR)
                for voter, count in sorted(self.failed.items())
            ),
            *(
                [(f"a public file could not be read for {many(self.unread, 'code')}, and all voters voted zero", READ)]
                if self.unread
                else []
            ),
        )

    @property
    def spent(self) -> Guarantee:
        """ε and δ of everything spent so far, by the accountant of the cap."""
        return self.by[AccountantName(self.cap.accountant)]

    @property
    def least(self) -> str:
        """Words that texts print before a spent figure: ``at least`` if more may have been spent, otherwise nothing."""
        return "at least " if self.doubt else ""

    @property
    def patient_lines(self) -> tuple[str, ...]:
        """Lines on the ε of one patient by trainings and releases; empty without a private training."""
        return self.trainings.lines(self.spent)

    @property
    def identity_lines(self) -> tuple[str, ...]:
        """Lines that define one patient, one for each row of the ledger that states a definition."""
        return tuple(f"from row {row} of its ledger on, {identity.sentence}" for row, identity in self.identities)

    def study(self, study_id: str) -> SiteStudy | None:
        """Return a study in the site's ledger.

        Args:
            study_id: The study's id.

        Returns:
            The study; None if nobody has consented to it.
        """
        return next((one for one in self.studies if one.id == study_id), None)

    def account(self) -> dict[str, Any]:
        """Return the account, the shorter report that a site may share with the server, as plain JSON. It states the
        pool's cap and spending, the numbers of accepted queries, of queries with a receipt and of declined offers, and
        alarms. It does not depend on the patients' data.

        If the spending may be larger than stated, ``at_least`` gives the reason; otherwise this key is absent.
        """
        return {
            "site": self.site,
            "pool": self.pool,
            "spent": {str(name): one.to_json() for name, one in self.by.items()},
            **({} if self.doubt is None else {"at_least": self.doubt}),
            "cap": {"accountant": self.cap.accountant, "epsilon": self.cap.epsilon, "delta": self.cap.delta},
            "queries_accepted": self.accepted,
            "receipted": self.receipted,
            "refusals": self.refused,
            "alarms": list(self.alarms),
        }

    def to_json(self) -> dict[str, Any]:
        """Return everything that a status report states, as plain JSON: the account, trainings, studies and more."""
        return {
            **self.account(),
            "share_spent": self.share,
            "queries_today": self.today,
            "queries_per_day": self.per_day,
            "codes_stored": self.codes,
            "released_again": self.released_again,
            "patient_identity": [
                {"row": row, "identity": str(identity), "sentence": identity.sentence}
                for row, identity in self.identities
            ],
            "restored": self.restored,
            "disclosures": [dict(one) for one in self.disclosures],
            "trainings": self.trainings.to_json(),
            "studies": [one.to_json() for one in self.studies],
        }

    @classmethod
    def from_json(cls, said: Mapping[str, Any]) -> SiteFacts:
        """Read a status report, or the shorter account that a site shares.

        Args:
            said: The JSON values.

        Returns:
            The facts.

        Raises:
            InvalidInput: If it has another form.
        """
        with parsing("status report of a site cannot be read", limit=PRINTED):
            by, cap = {name: read_guarantee(said["spent"][str(name)]) for name in AccountantName}, said["cap"]
            gate = AccountantName(cap["accountant"])
            return cls(
                site=check_ledger_name(_text(said["site"]), what="site of a status report"),
                pool=check_ledger_name(_text(said["pool"]), what="pool of a status report"),
                cap=Guarantee(_number(cap["epsilon"]), by[gate].delta, str(gate), by[gate].protection),
                by=by,
                doubt=_text(said["at_least"]) if "at_least" in said else None,
                accepted=_count(said["queries_accepted"]),
                receipted=_count(said["receipted"]),
                refused=_count(said.get("refusals", 0)),
                alarms=_texts(said["alarms"]),
                codes=_count(said["codes_stored"]) if "codes_stored" in said else None,
                identities=tuple(
                    (_count(one["row"]), PatientIdentity(one["identity"]))
                    for one in _listed(said.get("patient_identity") or [])
                ),
                trainings=TrainingFacts.from_json(said["trainings"]) if said.get("trainings") else TrainingFacts(),
            )


def site_facts(
    books: SiteBooks,
    *,
    site: str,
    today: str,
    doubt: str | None,
    stopped: bool,
    alarms: Sequence[str],
    trainings: Trainings | None,
    consents: Mapping[str, Sequence[str]],
) -> SiteFacts:
    """Return the figures of a site.

    Args:
        books: Totals of the site's ledger.
        site: Name of the site.
        today: Today's date, as the ledger writes it.
        doubt: Reason why more may have been spent than the ledger shows; None if there is none.
        stopped: True if an alarm stops every study.
        alarms: Sentences about receipts that contradict the record.
        trainings: The recorded trainings; None to leave them out of the figures.
        consents: By study, one sentence for each consent: who gave it, and when.

    Returns:
        The figures.
    """
    spending = Spending.of(books.declared.declaration, books.spent(), doubt=doubt)
    cap = Guarantee(spending.budget.epsilon, spending.budget.delta, str(spending.accountant), spending.protection)
    newest = books.teachers.newest
    return SiteFacts(
        site=site,
        pool=books.declared.declaration.pool,
        cap=cap,
        by=spending.readings(),
        doubt=doubt,
        accepted=len(books.reservations),
        receipted=len(books.reservations.receipted),
        refused=books.refused,
        alarms=tuple(alarms),
        share=spending.share,
        today=books.per_day.get(today, 0),
        per_day=books.declared.queries_per_day,
        codes=len(books.teachers.codes),  # includes deleted codes, so that a withdrawal does not show
        released_again=books.reservations.released_again,
        restored=len(books.restored_at),
        identities=tuple((row, record.identity) for row, record in books.teachers.identities),
        disclosures=tuple(
            {"draw": one.masks, "auditor": one.auditor, "queries": one.queries, "mu_squared": float(one.mu_squared)}
            for one in books.sealed.disclosed
        ),
        trainings=TrainingFacts() if trainings is None else TrainingFacts.of(trainings, delta=cap.delta),
        studies=tuple(
            SiteStudy(
                id=terms.id,
                name=terms.name,
                state=_state(books, terms.id, stopped=stopped),
                spending=Spending.of(terms, books.spent_in(terms.id), doubt=doubt),
                consents=tuple(consents.get(terms.id, ())),
            )
            for terms in books.studies.values()
        ),
        stopped=stopped,
        withdrawn=len(books.teachers.patients),
        failed=Counter(chain.from_iterable(map(failed_voters, books.teachers.outcomes.values()))),
        unread=list(books.teachers.outcomes.values()).count(ZERO_CODE),
        silent=() if newest is None else tuple(n for n, (served, _) in enumerate(newest.voters) if not served),
    )


def few(stated: Sequence[str]) -> tuple[str, ...]:
    """Return the first few of a hospital's texts, each shortened, so that they cannot fill a page.

    Args:
        stated: The texts.

    Returns:
        At most :data:`MAX_LISTED` texts of at most :data:`MAX_TEXT` characters, then the number of further ones.
    """
    more = (f"and {len(stated) - MAX_LISTED:,} more",) if len(stated) > MAX_LISTED else ()
    return (*(one[:MAX_TEXT] for one in stated[:MAX_LISTED]), *more)


def read_guarantee(stated: Mapping[str, Any]) -> Guarantee:
    """Read a guarantee that :meth:`~common.privacy.accounting.Guarantee.to_json` wrote.

    Args:
        stated: The JSON values.

    Returns:
        The guarantee.
    """
    protection = Protection(unit=Unit(stated["unit"]), relation=Relation(stated["relation"]))
    return Guarantee(
        _number(stated["epsilon"]), _number(stated["delta"]), str(AccountantName(stated["accountant"])), protection
    )


def _state(books: SiteBooks, study_id: str, *, stopped: bool) -> str:
    if study_id in books.paused:
        return books.paused[study_id]
    if stopped:
        return "alarm"
    newest = books.reservations.newest_in(study_id)
    return "spent" if newest and books.shortfall([newest], study_id=study_id) else "open"


def _training(stated: Mapping[str, Any]) -> TrainingGuarantee:
    epsilon, delta = _number(stated["epsilon"]), _number(stated["delta"])
    if not 0 <= epsilon < inf or not 0 < delta < 1:
        raise ValueError
    return TrainingGuarantee(epsilon, delta, Neighbours(stated["relation"]))


def _number(stated: Any) -> float:
    if isinstance(stated, bool) or not isinstance(stated, int | float):
        raise TypeError
    return float(stated)


def _text(stated: Any) -> str:
    if not isinstance(stated, str):
        raise TypeError
    return stated


def _listed(stated: Any) -> list[Any]:
    if not isinstance(stated, list):
        raise TypeError
    return stated


def _texts(stated: Any) -> tuple[str, ...]:
    return tuple(map(_text, _listed(stated)))


def _count(stated: Any) -> int:
    if isinstance(stated, bool) or not isinstance(stated, int) or not 0 <= stated < 1 << 53:
        raise ValueError
    return stated
