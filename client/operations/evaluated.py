"""Reads which Dice the pulled student had on the site's own cases in the newest evaluation at this site.

The hospital's own page sorts its cases by it. Evaluations of other cases, other networks or other weights are passed
over; so is a file that is not an evaluation.
"""

from __future__ import annotations

from pathlib import Path

from client.teachers.pulled_student import STUDENT_DIR
from common.canonical import sha256_file
from common.errors import InvalidInput
from common.models.student_bundle import WEIGHTS
from common.reading import parse_json


def student_dice(site_dir: Path) -> tuple[dict[str, float], str]:
    """Return the student's mean Dice on the site's own cases.

    Args:
        site_dir: The site's directory.

    Returns:
        Dice by the case's id, and the evaluation's day, such as ``2026-11-27``; both empty without an evaluation.
    """
    weights = site_dir / STUDENT_DIR / "bundle" / WEIGHTS
    if not weights.is_file():
        return {}, ""
    student = sha256_file(weights)
    for file in sorted(site_dir.glob("evaluation/*/evaluation.json"), reverse=True):
        try:
            told = parse_json(file.read_bytes(), what="evaluation")
            if told["weights"] != student or told["elsewhere"] is not False or told["adapted"] is not False:
                continue
            dice = {str(one["case"]): float(one["mean_dice"]) for one in told["cases"] if one["mean_dice"] is not None}
        except (InvalidInput, OSError, KeyError, TypeError, ValueError):
            continue
        day = file.parent.name[:8]
        return dice, f"{day[:4]}-{day[4:6]}-{day[6:]}"
    return {}, ""
