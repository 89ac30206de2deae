"""Signs this hospital's mean scores of the student, so that they may go to the consortium if staff consent.

`consilium site evaluate --figures` calls it. A figure is the pulled student's mean Dice of a structure over patients,
in hundredths. Structures with fewer than :data:`~common.site_figures.LEAST_PATIENTS` patients are left out. It refuses
another model, and a site where no structure has enough patients. The command refuses scores on another grid than the
study's.
"""

from __future__ import annotations

import math
from datetime import datetime
from pathlib import Path

from client.site.books import open_books
from client.teachers.evaluation import Evaluation
from client.teachers.verdict import judged
from common.errors import InvalidInput
from common.ledger.rows import format_time
from common.metrics import mean_present
from common.objects import write_atomically
from common.site_figures import LEAST_PATIENTS, SiteFigures, StructureFigure


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


def give_figures(site_dir: Path, evaluation: Evaluation, *, out: Path, now: datetime) -> SiteFigures:
    """Record in the site's ledger that figures were made, then sign them and write them to a file.

    Args:
        site_dir: The site's directory.
        evaluation: The evaluation of the pulled student.
        out: File to write.
        now: Time in the statement.

    Returns:
        The signed figures.

    Raises:
        InvalidInput: If no student was pulled, ``out`` exists, no structure has enough patients, or the cases do not
            fit this site's models.
    """
    evaluation.fit.check("figures")
    dice = figures_of(evaluation)
    if not dice:
        raise InvalidInput(
            "too few patients with a score for the same structure",
            limit=f"at least {LEAST_PATIENTS} patients; figures over fewer patients do not leave a hospital",
        )
    config, study, bundle = judged(site_dir, out=out, option="--figures")
    with open_books(config) as ledger:
        ledger.note(f"figures on student {bundle} of study {study.id}")
        said = SiteFigures(study.id, bundle, config.site, dice, format_time(now)).signed_by(ledger.sign)
    write_atomically(out, said.render(), mode=0o600)
    return said
