"""Computes this hospital's mean scores of the student, which may go to the consortium if staff consent.

`consilium site evaluate --figures` calls it; :mod:`client.teachers.verdict` signs them. A figure is the pulled
student's mean Dice of a structure over patients, in hundredths. Structures with fewer than
:data:`~common.site_figures.LEAST_PATIENTS` patients are left out. It refuses a site where no structure has enough
patients. The command refuses another model, and scores on another grid than the study's.
"""

from __future__ import annotations

import math

from client.teachers.evaluation import Evaluation
from common.errors import InvalidInput
from common.metrics import mean_present
from common.site_figures import LEAST_PATIENTS, StructureFigure


def figures_of(evaluation: Evaluation) -> tuple[StructureFigure, ...]:
    """Compute each structure's mean Dice over patients, and leave out structures with too few patients.

    Args:
        evaluation: The evaluation.

    Returns:
        One figure for each structure, in hundredths.
    """
    found = []
    for place, structure in enumerate(evaluation.structures):
        patients: dict[str, list[float]] = {}
        for score in evaluation.scores:
            patients.setdefault(score.patient, []).append(score.dice[place])
        means = [mean for values in patients.values() if not math.isnan(mean := mean_present(values))]
        if len(means) >= LEAST_PATIENTS:
            found.append(StructureFigure(structure, round(100 * math.fsum(means) / len(means))))
    return tuple(found)


def figures_to_sign(evaluation: Evaluation) -> tuple[StructureFigure, ...]:
    """Return the figures of an evaluation that may leave if staff consent.

    Args:
        evaluation: The evaluation of the pulled student.

    Returns:
        :func:`figures_of`.

    Raises:
        InvalidInput: If no structure has enough patients, or the cases do not fit this site's models.
    """
    evaluation.fit.check("figures")
    dice = figures_of(evaluation)
    if not dice:
        raise InvalidInput(
            "too few patients with a score for the same structure",
            limit=f"at least {LEAST_PATIENTS} patients; figures over fewer patients do not leave a hospital",
            remedy="evaluate more patients (--data), or leave out --figures",
        )
    return dice
