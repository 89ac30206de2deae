"""Computes the Studies page: the settings, spending and measured gain of each study of the ledger.

The Studies page uses it. Settings and spending come from the ledger. A study's gain is known only if the study's
directory is beside this one and holds a report of the student's scores.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common.config import load_study
from common.errors import ConsiliumError
from common.ledger.charges import StudyTerms
from common.measured_gain import MeasuredGain
from common.protocol_terms import framed_in
from common.study_facts import StudyFacts, recorded_facts
from server.dashboard.ledger_fold import History
from server.dashboard.read_model import Follower
from server.study.read_facts import read_measured

MOST_NEIGHBOURS = 50


@dataclass(frozen=True, slots=True)
class StudyRow:
    """One study of the ledger, as a row of the Studies page.

    Attributes:
        here: True for the study that this dashboard follows.
        epsilon: Largest ε that the study spent on one pool, by its own accountant; a lower bound if there is ``doubt``.
        guaranteed: The larger of ``epsilon`` and ``budget``; None if there is ``doubt``.
        share: Spent share of the Σμ² (the quantity that adds up over releases) that the study's budget allows.
        doubt: Reason why more may have been spent than the ledger shows; None if there is no such reason.
        noise: Who adds the noise, in words.
        asks: What one query asks about, in words.
        word: Verdict on the measured gain; None if none was measured.
        gain: Mean Dice of the student minus that of its best control; None if it was not measured.
    """

    id: str
    name: str
    here: bool
    registered: str
    last: str | None
    unit: str
    relation: str
    delta: float
    accountant: str
    budget: float
    epsilon: float
    guaranteed: float | None
    share: float
    doubt: str | None
    quorum: int
    voters_per_site: int
    noise: str
    asks: str
    planned: int | None
    answers: int
    refused: int
    sites: int
    word: str | None
    gain: float | None
    interval: tuple[float, float] | None
    student: float | None
    control: float | None


def study_rows(follower: Follower) -> tuple[StudyRow, ...]:
    """Return every study of the ledger.

    Args:
        follower: The read model.

    Returns:
        The studies, newest first.
    """
    gains = _gains(follower.workspace.root, follower.study.id)
    books, rows = follower.ledger.books, []
    for study_id, history in follower.ledger.histories.items():
        planned = _table(history.consent, "privacy").get("planned_queries")
        facts = recorded_facts(
            study_id,
            books,
            planned=planned if isinstance(planned, int) else None,
            doubt=follower.doubt,
            gain=gains.get(study_id),
        )
        rows.append(_row(books.studies[study_id], history, facts, here=study_id == follower.study.id))
    return tuple(sorted(rows, key=lambda row: row.registered, reverse=True))


def _row(terms: StudyTerms, history: History, facts: StudyFacts, *, here: bool) -> StudyRow:
    spending, gain = facts.spending, facts.gain
    return StudyRow(
        id=facts.study_id,
        name=terms.name,
        here=here,
        registered=history.registered,
        last=history.last,
        unit=str(terms.protection.unit),
        relation=str(terms.protection.relation),
        delta=terms.budget.delta,
        accountant=str(terms.accountant),
        budget=terms.budget.epsilon,
        epsilon=spending.spent.epsilon,
        guaranteed=None if spending.doubt else spending.guaranteed.epsilon,
        share=spending.share,
        doubt=spending.doubt,
        quorum=terms.quorum,
        voters_per_site=terms.voters_per_site,
        noise="the server" if terms.colluders is None else f"the hospitals, up to {terms.colluders} colluding",
        asks="all volumes in one query, in rounds"
        if framed_in(_table(history.consent, "codec"))
        else "one volume a query",
        planned=facts.planned,
        answers=facts.answers,
        refused=history.refused,
        sites=len(history.sites),
        word=None if gain is None else str(gain.word),
        gain=None if gain is None else gain.gain,
        interval=None if gain is None else gain.interval,
        student=None if gain is None else gain.student,
        control=None if gain is None else gain.other,
    )


def _table(consent: Mapping[str, object], name: str) -> Mapping[str, Any]:
    found = consent.get(name)
    return found if isinstance(found, dict) else {}


def _gains(root: Path, own: str) -> dict[str, MeasuredGain]:
    """Return the measured gain of this study and of those in the same folder, by study id."""
    found = {own: read_measured(root, own)}
    neighbours = (path.parent for path in sorted(root.absolute().parent.glob("*/study.toml"))[:MOST_NEIGHBOURS])
    for folder in neighbours:
        try:
            study_id = load_study(folder / "study.toml").id
        except (ConsiliumError, OSError):
            continue
        if found.get(study_id) is None:
            found[study_id] = read_measured(folder, study_id)
    return {study_id: one.measured_gain for study_id, one in found.items() if one is not None}
