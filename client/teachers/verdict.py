"""Signs this hospital's verdict on the study's student, and its figures, after recording them in the site's ledger.

`consilium site evaluate --verdict` and `--figures` call it, on the evaluation of the pulled student. It refuses to
judge a student that could not be compared with any public model.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path

from client.policy import load_site
from client.site.books import open_books
from client.teachers.evaluation import Evaluation
from client.teachers.pulled_student import OWN_VERDICT, STUDENT_DIR, signed_student
from common.canonical import sha256_bytes, sha256_file
from common.errors import InvalidInput
from common.ledger.rows import format_time
from common.metrics import mean_present
from common.models.student_bundle import WEIGHTS
from common.objects import all_or_nothing, check_new, write_atomically
from common.reading import lenient_json
from common.site_figures import LEAST_PATIENTS, SiteFigures, StructureFigure
from common.site_verdict import SiteVerdict

BEGUN = "statements.begun"
"""File in the student's folder that lists the statements being written. It remains if the process is killed."""


def word_of(evaluation: Evaluation) -> str:
    """Return the verdict on an evaluated student.

    Args:
        evaluation: The evaluation.

    Returns:
        :attr:`~client.teachers.evaluation.Evaluation.verdict`.

    Raises:
        InvalidInput: If the student was compared with no public model, or the cases do not fit this site's models.
    """
    evaluation.fit.check("verdict")
    if evaluation.verdict is None:
        raise InvalidInput(
            "verdict on a student",
            limit="a student that was compared with the public start or the mean shape",
            remedy="; ".join(missing.reason for missing in evaluation.missing) or "evaluate with other cases (--data)",
        )
    return evaluation.verdict


def figures_of(evaluation: Evaluation) -> tuple[StructureFigure, ...]:
    """Compute each structure's mean Dice over patients, and leave out structures with too few patients.

    Means of fewer than :data:`~common.site_figures.LEAST_PATIENTS` patients do not leave a hospital.

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


def check_outputs(site_dir: Path, *, verdict: Path | None, figures: Path | None) -> None:
    """Refuse output files that exist, and a site without a pulled student, before the cases are scored.

    A file that a killed command left may exist; it will be replaced.

    Args:
        site_dir: The site's directory.
        verdict: File for the verdict; None for no verdict.
        figures: File for the figures; None for no figures.

    Raises:
        InvalidInput: If a file exists, if both options name the same file, or if a file is asked for and
            :func:`~client.teachers.pulled_student.signed_student` refuses the student.
    """
    _check_files(site_dir, verdict=verdict, figures=figures)
    if verdict is not None or figures is not None:
        signed_student(site_dir)


def give_statements(
    site_dir: Path, evaluation: Evaluation, *, verdict: Path | None, figures: Path | None, now: datetime
) -> tuple[SiteVerdict | None, SiteFigures | None]:
    """Sign the verdict and the figures that are asked for, and write both or none.

    1. Compute both first, so that nothing is recorded if one of them is refused.
    2. Record in the site's ledger that they were made, then sign them.
    3. Write the files. If one cannot be written, those written before are removed. If the process is killed, the
       list of the files remains, and the same command, repeated, replaces those that were written.

    Args:
        site_dir: The site's directory.
        evaluation: The evaluation of the pulled student.
        verdict: File for the verdict; None for no verdict.
        figures: File for the figures; None for no figures.
        now: Time in the statements.

    Returns:
        The signed verdict and figures; None for the one that is not asked for.

    Raises:
        InvalidInput: If :func:`check_outputs` or :func:`word_of` refuses, if no structure has enough patients for
            figures, or if another student was pulled during the evaluation.
    """
    word = None if verdict is None else word_of(evaluation)  # 1.
    dice = None if figures is None else _figures_to_sign(evaluation)
    if word is None and dice is None:
        return None, None
    weights = site_dir / STUDENT_DIR / "bundle" / WEIGHTS
    if sha256_file(weights) != evaluation.weights:
        raise InvalidInput(
            "the pulled student was replaced while it was evaluated",
            value=str(weights),
            limit="the student that was evaluated",
            remedy="run `consilium site evaluate` again",
        )
    _check_files(site_dir, verdict=verdict, figures=figures)
    statement, _ = signed_student(site_dir)
    config, bundle, time = load_site(site_dir), statement.bundle, format_time(now)
    study = config.load_study()
    said: SiteVerdict | None = None
    measured: SiteFigures | None = None
    with open_books(config) as ledger:  # 2.
        if word is not None:
            ledger.note(f"verdict on student {bundle} of study {study.id}: {word}")
            said = SiteVerdict(study.id, bundle, config.site, word, time).signed_by(ledger.sign)
        if dice is not None:
            ledger.note(f"figures on student {bundle} of study {study.id}")
            measured = SiteFigures(study.id, bundle, config.site, dice, time).signed_by(ledger.sign)
    files: dict[Path, bytes] = {}
    if figures is not None and measured is not None:
        files[figures] = measured.render()
    if verdict is not None and said is not None:
        files |= {site_dir / STUDENT_DIR / OWN_VERDICT: said.render(), verdict: said.render()}
    for out in filter(None, (verdict, figures)):
        out.unlink(missing_ok=True)  # left by a killed command, as check_outputs found
    begun = site_dir / STUDENT_DIR / BEGUN
    with all_or_nothing(begun.parent, *filter(None, (verdict, figures))):  # 3.
        sums = {str(path.absolute()): sha256_bytes(data) for path, data in files.items()}
        write_atomically(begun, json.dumps(sums).encode(), mode=0o600)
        for path, data in files.items():
            write_atomically(path, data, mode=0o600)
        begun.unlink()
    return said, measured


def _check_files(site_dir: Path, *, verdict: Path | None, figures: Path | None) -> None:
    """Refuse output files that exist, unless a killed command left them, and one file for both."""
    begun = _begun(site_dir)
    for option, out in {"--verdict": verdict, "--figures": figures}.items():
        if out is not None and not _is_left_over(out, begun):
            check_new(out, option=option)
    if verdict is not None and figures is not None and verdict.resolve() == figures.resolve():
        raise InvalidInput("--verdict and --figures name the same file", value=str(figures), limit="two files")


def _figures_to_sign(evaluation: Evaluation) -> tuple[StructureFigure, ...]:
    """Return the figures of an evaluation that may leave if staff consent; refuse if there are none."""
    evaluation.fit.check("figures")
    dice = figures_of(evaluation)
    if not dice:
        raise InvalidInput(
            "too few patients with a score for the same structure",
            limit=f"at least {LEAST_PATIENTS} patients; figures over fewer patients do not leave a hospital",
            remedy="evaluate more patients (--data), or leave out --figures",
        )
    return dice


def _begun(site_dir: Path) -> dict[str, str]:
    """Return the SHA-256 of each file that a killed command was writing, by path; empty if no command was killed.

    The hash is that of the file's complete content.
    """
    path = site_dir / STUDENT_DIR / BEGUN
    try:
        found = lenient_json(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _is_left_over(out: Path, begun: Mapping[str, str]) -> bool:
    expected = begun.get(str(out.absolute()))
    return expected is not None and out.is_file() and sha256_file(out) == expected
