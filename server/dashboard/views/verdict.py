"""Judges whether the hospitals' answers improved the student, for the first line of the first page.

The Overview page uses it. If there is a ``report.json`` in the study's directory or in its parent directory, the
student is compared with the best of its controls on labelled cases. Otherwise the planner's prediction is shown. It is
marked as not measured, and it is never shown as a success. A report that is invalid or of another study is ignored.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from common.config import Study
from common.measured_gain import ONE_RUN, GainVerdict, MeasuredGain
from common.privacy.figures import percent_text
from server.planning.planner import Plan, PlanVerdict
from server.planning.recommend import PAIRS, study_prospects

MEND_FIRST = "Do not pass the student on before the ledger verifies: its privacy cost is unknown. See the alarms above."


@dataclass(frozen=True, slots=True)
class StudyVerdict:
    """The verdict on a student.

    Attributes:
        name: ``proven``, ``not-proven`` or ``worse`` if it was measured; otherwise ``doubtful`` or ``unknown``.
        learned: True if a gain is proven and the ledger has no problem.
        words: The verdict as a headline.
        basis: The figures on which the verdict is based, in words.
        next: What the operator should do next.
    """

    name: str
    learned: bool
    words: str
    basis: str
    next: str

    @property
    def measured(self) -> bool:
        """True if the gain was measured, even if it is not proven or negative."""
        return self.name in {word.replace(" ", "-") for word in GainVerdict}


def verdict(
    study: Study,
    *,
    gain: MeasuredGain | None,
    plan: Plan | None,
    hospitals: int,
    answers: int,
    running: bool = False,
    trained: bool = False,
    cases: bool = False,
    broken: bool = False,
) -> StudyVerdict:
    """Return the verdict from the measured gain; if none was measured, from the planner's prediction, marked as such.

    Args:
        study: The study.
        gain: The student's measured gain over its best control; None if it was not measured.
        plan: The plan for the study's own settings; None if there is none.
        hospitals: Number of registered hospitals.
        answers: Number of stored answers.
        running: True if a run is active.
        trained: True if the student is trained.
        cases: True if labelled cases are published, on which a run scores the student.
        broken: True if the ledger has a problem. Then nothing is shown as a success, and the advice is to repair the
            ledger.

    Returns:
        The verdict.
    """
    if gain is not None:
        found = of_measured(gain)
    else:
        found = _unmeasured(
            study,
            plan,
            hospitals=hospitals,
            begun=running or answers > 0,
            how=_how(answers, running, trained, cases),
        )
    return replace(found, learned=False, next=MEND_FIRST) if broken else found


def _how(answers: int, running: bool, trained: bool, cases: bool) -> str:
    """Return the steps from the study's current state to a measured gain."""
    first = (
        "Wait for the run to end."
        if running
        else "Score the student and its controls with `consilium student export`."
        if trained
        else "Continue the run with `consilium study resume`."
        if answers
        else "Start the run with `consilium study run`."
    )
    publish = "Publish labelled cases that nobody trained on: `consilium study publish --validation`. "
    scored = "" if trained and not running else " It scores the student and its controls on the labelled cases."
    return f"{'' if cases else publish}{first}{scored} This page then shows the gain."


def _unmeasured(study: Study, plan: Plan | None, *, hospitals: int, begun: bool, how: str) -> StudyVerdict:
    if study.codec.paired >= PAIRS:
        return _expected(PlanVerdict.PRIOR, f"about no gain beside {study.codec.paired} public pairs, as measured", how)
    prospects = study_prospects(study, hospitals=hospitals) if hospitals else None
    if prospects is not None:
        return _expected(
            PlanVerdict.INFORMATIVE if prospects.worth_asking else PlanVerdict.WEAK,
            f"a gain of about {prospects.gain:+.3f} Dice over the best control from "
            f"{prospects.hospitals} hospitals, as on the hippocampus task",
            how,
        )
    if plan is not None:
        share = (
            f"that the answers explain at most {percent_text(plan.explained_at_most)} of the variance of the "
            "teachers' codes"
        )
        advised = f"To make it informative, for example {plan.advice[0]}." if plan.advice else how
        return _expected(plan.verdict, share, how if begun else advised)
    return StudyVerdict(
        "unknown",
        False,
        "Not measured yet",
        "No site is registered, so nothing can be planned.",
        "Admit the hospitals with `consilium provision approve`.",
    )


def _expected(expected: PlanVerdict, why: str, then: str) -> StudyVerdict:
    says = {
        PlanVerdict.INFORMATIVE: "a gain is expected",
        PlanVerdict.WEAK: "a small gain is expected, if any",
        PlanVerdict.PRIOR: "no gain is expected",
    }[expected]
    return StudyVerdict(
        "unknown" if expected is PlanVerdict.INFORMATIVE else "doubtful",
        False,
        f"Not measured yet; by the plan {says}",
        f"The planner expects {why}. This was computed from public numbers, not measured in this study.",
        then,
    )


def of_measured(found: MeasuredGain) -> StudyVerdict:
    """Return the verdict on a measured gain."""
    then = {
        GainVerdict.PROVEN: "Hospitals score the exported bundle on their own cases with `consilium site evaluate`.",
        GainVerdict.NOT_PROVEN: "More validation cases narrow the interval: `consilium study publish --validation`. "
        "Before you spend more budget, see on the Planner page what would raise the gain.",
        GainVerdict.WORSE: "Do not use this student: public data alone give a better one. Spend no more of this budget "
        "without another plan; see the Planner page.",
    }[found.word]
    basis = f"{found.figures}. {ONE_RUN}"
    return StudyVerdict(found.word.replace(" ", "-"), found.word is GainVerdict.PROVEN, found.title, basis, then)
