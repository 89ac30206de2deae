"""Signs this hospital's verdict on the study's student, after recording it in the site's ledger.

`consilium site evaluate --verdict` calls it, on the evaluation of the pulled student. It refuses to judge another
model, or a student that could not be compared with any public model.
"""

from __future__ import annotations

from datetime import datetime
from pathlib import Path

from client.policy import SiteConfig, load_site
from client.site.books import open_books
from client.teachers.evaluation import Evaluation
from client.teachers.pulled_student import OWN_VERDICT, STUDENT_DIR
from common.config import Study, load_study
from common.errors import InvalidInput
from common.ledger.rows import format_time
from common.objects import write_atomically
from common.site_verdict import SiteVerdict
from common.student_statement import StudentStatement


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


def give_verdict(site_dir: Path, evaluation: Evaluation, *, out: Path, now: datetime) -> SiteVerdict:
    """Record the verdict in the site's ledger and write it, signed.

    Args:
        site_dir: The site's directory.
        evaluation: The evaluation of the pulled student.
        out: File to write.
        now: Time in the verdict.

    Returns:
        The signed verdict.

    Raises:
        InvalidInput: If no student was pulled, ``out`` exists, or the student was compared with no public model.
    """
    config, study, bundle = judged(site_dir, out=out, option="--verdict")
    word = word_of(evaluation)
    with open_books(config) as ledger:
        ledger.note(f"verdict on student {bundle} of study {study.id}: {word}")
        said = SiteVerdict(study.id, bundle, config.site, word, format_time(now)).signed_by(ledger.sign)
    write_atomically(site_dir / STUDENT_DIR / OWN_VERDICT, said.render(), mode=0o600)
    write_atomically(out, said.render(), mode=0o600)
    return said


def judged(site_dir: Path, *, out: Path, option: str) -> tuple[SiteConfig, Study, str]:
    """Return the site, its study, and the hash of the pulled student's archive.

    Args:
        site_dir: The site's directory.
        out: File about to be written.
        option: The option that names ``out``, for the error.

    Returns:
        Site, study and hash.

    Raises:
        InvalidInput: If no student was pulled, or ``out`` exists.
    """
    if out.exists():
        raise InvalidInput("the output file exists already", value=str(out), remedy=f"choose another with {option}")
    config = load_site(site_dir)
    study, pulled = load_study(config.path(config.study)), site_dir / STUDENT_DIR / "statement.json"
    if not pulled.is_file():
        raise InvalidInput(
            "student to judge",
            value=str(pulled),
            limit="a pulled student",
            remedy="run `consilium site student pull`",
        )
    return config, study, StudentStatement.parse(pulled.read_bytes()).bundle
