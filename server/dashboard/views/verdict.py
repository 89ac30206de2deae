"""Whether the hospitals' answers taught the student anything: the first line of the first page.

Measured is the student against the best of its controls on labelled cases, as ``report.json`` in the study's directory
or beside it says; before that there is the planner's outlook, which promises nothing and is never shown as a success.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from common.config import Study
from common.errors import InvalidInput
from common.intervals import mean_interval
from common.privacy.figures import percent_text
from server.dashboard.quarantine import read_json
from server.planning.planner import Outlook, Plan
from server.planning.recommend import PAIRS, WORTH_ASKING, joint_noise, predicted_gain

MEND_FIRST = "Hand nothing on before the ledger verifies: what it cost is not known until then. See the alarms above."

BARELY = 0.005
"""A gain in Dice below this is nothing, as the demo's report has it."""

MAX_BYTES = 4 << 20


@dataclass(frozen=True, slots=True)
class Measured:
    """The student's mean Dice beside its best control's; the gain's paired 95 % interval where cases are given."""

    student: float
    control: float
    best: str
    interval: tuple[float, float] | None
    cases: int | None
    controls: Mapping[str, float] = field(default_factory=dict)

    @property
    def gain(self) -> float:
        return self.student - self.control

    def line(self) -> str:
        """The student and every control."""
        each = [f"{name.replace('_', ' ')} {dice:.3f}" for name, dice in self.controls.items()]
        return f"student {self.student:.3f}; controls: {', '.join(each)}"


@dataclass(frozen=True, slots=True)
class Verdict:
    """``name``: informative, weak, prior or unknown; ``learned``: measured, and more than seeds and tasks differ by."""

    name: str
    learned: bool
    words: str
    basis: str
    next: str


def read_measured(root: Path, study_id: str) -> Measured | None:
    """The scores of this study's student and controls; None where nobody measured, or the file is another study's."""
    for path in (root / "report.json", root.parent / "report.json"):
        try:
            found = read_json(path, most_bytes=MAX_BYTES)
            if found["study"]["id"] == study_id:
                return _measured(found)
        except (InvalidInput, LookupError, TypeError, AttributeError, ValueError):
            continue
    return None


def _measured(report: dict[str, Any]) -> Measured | None:
    student = report["student"]["dice"]
    scored = {name: one["dice"] for name, one in report["controls"].items() if one["dice"] is not None}
    means = {str(name): _dice(one["mean"]) for name, one in scored.items()}
    best = max(means, key=lambda name: means[name])
    mine, theirs = student.get("cases"), scored[best].get("cases")
    both = zip(mine, theirs, strict=True) if mine and theirs else ()
    paired = [_dice(a) - _dice(b) for a, b in both if a is not None and b is not None]
    return Measured(_dice(student["mean"]), means[best], best, interval_of(paired), len(paired) or None, means)


def _dice(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1:
        raise InvalidInput("Dice of a report", limit="a number from 0 to 1")
    return float(value)


def interval_of(differences: Sequence[float]) -> tuple[float, float] | None:
    """Student's 95 % interval of the mean of paired differences; None for fewer than two."""
    if not differences:
        return None
    mean, half = mean_interval(differences)
    return None if half is None else (mean - half, mean + half)


def verdict(
    study: Study,
    *,
    measured: Measured | None,
    outlook: Plan | None,
    hospitals: int,
    answers: int,
    running: bool = False,
    trained: bool = False,
    broken: bool = False,
) -> Verdict:
    """The verdict from what was measured; else what the planner expects, marked as not measured.

    While the ledger is ``broken`` nothing is green, and to mend it comes first.
    """
    if measured is not None:
        found = of_measured(measured)
    else:
        found = _unmeasured(
            study, outlook, hospitals=hospitals, begun=running or answers > 0, how=_how(answers, running, trained)
        )
    return replace(found, learned=False, next=MEND_FIRST) if broken else found


def _how(answers: int, running: bool, trained: bool) -> str:
    """What leads to a measurement from where the study stands."""
    score = "score student and controls on labelled cases that nobody trained on; a report of it counts here."
    before = (
        "Wait for the run to end; then "
        if running
        else f"`consilium study {'resume` goes on with' if answers else 'run` begins'} the run; then "
    )
    return f"{score[0].upper()}{score[1:]}" if trained else before + score


def _unmeasured(study: Study, outlook: Plan | None, *, hospitals: int, begun: bool, how: str) -> Verdict:
    if study.codec.paired >= PAIRS:
        return _expected("prior", f"about no gain beside {study.codec.paired} public pairs, as measured", how)
    if study.codec.joint and hospitals:
        privacy = study.privacy
        noise = joint_noise(
            budget=privacy.budget,
            accountant=privacy.accountant,
            protection=privacy.protection,
            hospitals=hospitals,
            voters=privacy.voters_per_site,
        )
        gain = predicted_gain(noise, rounds=privacy.planned_queries)
        name = "informative" if gain >= WORTH_ASKING else "weak" if gain >= BARELY else "prior"
        return _expected(
            name, f"a gain of about {gain:+.3f} Dice over the best control, as on the hippocampus task", how
        )
    if outlook is not None:
        share = (
            f"the answers explain at most {percent_text(outlook.explained_at_most)} of what the teachers' codes vary"
        )
        advised = f"To make it informative, for example {outlook.advice[0]}." if outlook.advice else how
        return _expected(str(outlook.verdict), share, how if begun else advised)
    return Verdict(
        "unknown",
        False,
        "Not measured yet",
        "No site is registered, so nothing can be planned.",
        "Admit the hospitals with `consilium provision approve`.",
    )


NAMES = {"informative": "informative", "weak": "weak", "prior": "the prior does the work"}


def _expected(name: str, why: str, then: str) -> Verdict:
    return Verdict(
        name if Outlook(name) is not Outlook.INFORMATIVE else "unknown",
        False,
        f"Not measured yet; by the plan {NAMES[name]}",
        f"The planner expects {why}. That is a bound from public numbers, no result.",
        then,
    )


def of_measured(found: Measured) -> Verdict:
    """The verdict on what was measured."""
    low, high = found.interval or (found.gain, found.gain)
    name = "informative" if low >= WORTH_ASKING else "weak" if found.gain >= BARELY and low > -BARELY else "prior"
    control = found.best.replace("_", " ")
    within = (
        f"95 % interval {low:+.3f} to {high:+.3f}, paired over {found.cases} cases (Student's t)"
        if found.interval
        else "no interval: the report names no cases"
    )
    words = {
        "informative": "Informative: the hospitals' answers taught the student something",
        "weak": "Weak: the hospitals' answers taught the student little, if anything",
        "prior": "Harmful: public data alone give more than with the hospitals' answers"
        if high < -BARELY
        else "The prior does the work: public data alone give as much",
    }[name]
    then = {
        "informative": "Export the bundle; hospitals score it on their own cases with `consilium site evaluate`.",
        "weak": "Before spending more see Planner for what would raise it: hospitals, a joint query, another unit.",
        "prior": "Do not use the student for what public data give anyway; spend no more of this budget without another"
        " plan: see Planner.",
    }[name]
    basis = (
        f"Gain over the best control ({control}): {found.gain:+.3f} Dice, {within}; student {found.student:.3f}, "
        f"control {found.control:.3f}. A gain below {WORTH_ASKING} is within what seeds and tasks differ by."
    )
    return Verdict(name, name == "informative", words, basis, then)
