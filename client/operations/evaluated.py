"""Reads from the site's own reports how good the pulled student and the adapted network are on the site's own cases.

The hospital's own page sorts its cases by the student's Dice, and says whether either network is better than the site's
own teachers. It ignores evaluations of other cases, other networks or other weights, and files that are no evaluation.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from client.adapting.methods import LEAST_FOR_FOLDS, TEACHERS, Method
from client.teachers.comparison import ALL, OWN_TEACHERS
from client.teachers.pulled_student import STUDENT_DIR
from common.canonical import sha256_file
from common.errors import InvalidInput
from common.measured_gain import MeasuredGain
from common.models.student_bundle import WEIGHTS
from common.reading import parse_json

_UNKNOWN = f"Not known whether it is better than {OWN_TEACHERS}"
_OTHERS = {TEACHERS: OWN_TEACHERS, Method.OWN: "a network trained on this site's patients alone"}
"""The networks that an adapted one is compared with; the first that the report has is quoted."""


@dataclass(frozen=True, slots=True)
class OwnEvaluation:
    """The newest evaluation of the pulled student on the site's own cases.

    Attributes:
        day: Its day, such as ``2026-11-27``.
        dice: The student's mean Dice, by the case's id.
        withdrawn: Number of cases that it left out because their patients were withdrawn.
        verdict: Whether the student is better than the site's own teachers, as a sentence.
    """

    day: str
    dice: Mapping[str, float]
    withdrawn: int
    verdict: str


def newest_evaluation(site_dir: Path) -> OwnEvaluation | None:
    """Return the newest evaluation of the pulled student on the site's own cases.

    Args:
        site_dir: The site's directory.

    Returns:
        The evaluation; None if there is none.
    """
    weights = site_dir / STUDENT_DIR / "bundle" / WEIGHTS
    if not weights.is_file():
        return None
    student = sha256_file(weights)
    for file in sorted(site_dir.glob("evaluation/*/evaluation.json"), reverse=True):
        try:
            told = parse_json(file.read_bytes(), what="evaluation")
            if told["weights"] != student or told["elsewhere"] is not False or told["adapted"] is not False:
                continue
            dice = {str(one["case"]): float(one["mean_dice"]) for one in told["cases"] if one["mean_dice"] is not None}
            day = file.parent.name[:8]
            return OwnEvaluation(
                f"{day[:4]}-{day[4:6]}-{day[6:]}", dice, int(told.get("withdrawn", 0)), _against_own_teachers(told)
            )
        except (InvalidInput, OSError, KeyError, TypeError, ValueError):
            continue
    return None


def _against_own_teachers(told: Mapping[str, Any]) -> str:
    for one in told["comparisons"]:
        if (one["reference"], one["structure"]) == (OWN_TEACHERS, ALL):
            return str(one["sentence"])
    reasons = [str(one["reason"]) for one in told["not_compared"] if one["with"] == OWN_TEACHERS]
    return f"{_UNKNOWN}: {'; '.join(reasons) or 'they have no score'}."


def student_verdict(found: OwnEvaluation | None, *, withdrawn: int) -> str:
    """Return whether the student is better than the site's own teachers.

    Args:
        found: The newest evaluation; None if there is none.
        withdrawn: Number of labelled cases whose patients are withdrawn now. If the evaluation left out fewer, it may
            have scored a patient who is withdrawn, and is not quoted.

    Returns:
        A sentence. If the answer is not known, the sentence says so, and how to find out.
    """
    if found is None:
        return f"{_UNKNOWN}: run `consilium site evaluate`."
    if found.withdrawn < withdrawn:
        return f"{_UNKNOWN}: a patient was withdrawn since {found.day}; run `consilium site evaluate` again."
    return f"{found.verdict} Evaluation of {found.day}."


def adapted_verdict(report: Path) -> str:
    """Return whether the adapted network is better than the site's own teachers, by the report of `site adapt`.

    Args:
        report: The report's folder.

    Returns:
        A sentence. If the answer is not known, the sentence says so. Without scores of the teachers, the adapted
        network is compared with a network that was trained on the site's patients alone.
    """
    try:
        told = parse_json((report / "adapted.json").read_bytes(), what="report of an adaptation")
        if not told["folds"]:
            return f"{_UNKNOWN}: a comparison needs at least {LEAST_FOR_FOLDS} patients."
        other = next(way for way in _OTHERS if told["ahead"].get(way) is not None)
        gain, half = told["ahead"][other]["mean"], told["ahead"][other]["half_width"]
        compared = MeasuredGain(gain, 0.0, _OTHERS[other], gain, half, 0)
    except (InvalidInput, OSError, KeyError, TypeError, ValueError, AttributeError, StopIteration):
        return f"{_UNKNOWN}: the report of `consilium site adapt` does not say so."
    if told["way"] == other:
        return f"It is {_OTHERS[other]}."
    interval = compared.interval
    within = "" if interval is None else f" (95 % interval {interval[0]:+.3f} to {interval[1]:+.3f})"
    return f"{compared.title}: {gain:+.3f} Dice{within}, over patients that trained neither network."
