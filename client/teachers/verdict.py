"""This hospital's word on the study's student, signed by its ledger's key; on record before it leaves.

Made of :mod:`client.teachers.evaluation` on the student that was pulled and of nothing else. Refuses to judge another
model than that, or without anything public to compare it with.
"""

from __future__ import annotations

from datetime import datetime
from pathlib import Path

from client.policy import SiteConfig, load_site
from client.site.books import open_books
from client.teachers.comparison import ALL
from client.teachers.evaluation import Evaluation
from client.teachers.pulled_student import STUDENT_DIR
from common.config import Study, load_study
from common.errors import InvalidInput
from common.ledger.rows import format_time
from common.objects import write_atomically
from common.site_verdict import BETTER, NOT_BETTER, WORSE, SiteVerdict
from common.student_statement import StudentStatement
from common.worth import GainWord

SENT = "verdict.json"
"""This site's newest verdict, beside the student it is on."""


def word_of(evaluation: Evaluation) -> str:
    """``worse`` where something speaks against the student, ``better`` where these cases tell it from public data.

    InvalidInput where it was compared with nothing that is public.
    """
    compared = [one for one in evaluation.comparisons if one.public and one.structure == ALL]
    if not compared:
        raise InvalidInput(
            "verdict",
            limit="a student compared with the public start or the mean shape",
            remedy="; ".join(missing.reason for missing in evaluation.missing) or "evaluate with other cases (--data)",
        )
    if evaluation.alarms:
        return WORSE
    return BETTER if all(one.word is GainWord.PROVEN for one in compared) else NOT_BETTER


def give_verdict(site_dir: Path, evaluation: Evaluation, *, out: Path, now: datetime) -> SiteVerdict:
    """Put the verdict on record in the site's ledger and write it, signed, to ``out``.

    Raises:
        InvalidInput: If no student was pulled, or ``out`` exists.
    """
    config, study, bundle = judged(site_dir, out=out, option="--verdict")
    word = word_of(evaluation)
    with open_books(config) as ledger:
        ledger.note(f"verdict on student {bundle} of study {study.id}: {word}")
        said = SiteVerdict(study.id, bundle, config.site, word, format_time(now)).signed_by(ledger.sign)
    write_atomically(site_dir / STUDENT_DIR / SENT, said.render(), mode=0o600)
    write_atomically(out, said.render(), mode=0o600)
    return said


def judged(site_dir: Path, *, out: Path, option: str) -> tuple[SiteConfig, Study, str]:
    """The site, its study and the archive's hash of the student that was pulled.

    Raises:
        InvalidInput: If no student was pulled, or the file ``out`` that ``option`` names exists.
    """
    if out.exists():
        raise InvalidInput("file exists", value=str(out), remedy=f"choose another with {option}")
    config = load_site(site_dir)
    study, pulled = load_study(config.path(config.study)), site_dir / STUDENT_DIR / "statement.json"
    if not pulled.is_file():
        raise InvalidInput(
            "student to judge",
            value=str(pulled),
            limit="a student that was pulled",
            remedy="`consilium site student pull`",
        )
    return config, study, StudentStatement.parse(pulled.read_bytes()).bundle


def own_verdict(site_dir: Path, bundle: str) -> SiteVerdict | None:
    """What this site has said of this student; None where it said nothing."""
    path = site_dir / STUDENT_DIR / SENT
    if not path.is_file():
        return None
    found = SiteVerdict.parse(path.read_bytes())
    return found if found.bundle == bundle else None
