"""Defines a hospital's signed verdict on a study's student: one word that the hospital consented to send.

The word states whether the student is better than public data alone on the hospital's own labelled cases. It is
computed from patients' data, and no ε bounds what it reveals; nothing else leaves the hospital. A study may require a
number of verdicts: its student is then released once that many hospitals have found it better than public data alone
(:func:`released`). Refuses a verdict on another student, of a site whose key is not known, and any other word.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar, TypeVar

from common.document import Key, OneOf, Sha256, StoredDocument
from common.errors import InvalidInput
from common.ledger.charges import SiteName
from common.ledger.keys import Signed, signing_public_key
from common.ledger.rows import Time
from common.wording import many

BETTER, NOT_BETTER, WORSE = "better", "not-better", "worse"
WORDS = (BETTER, NOT_BETTER, WORSE)
MEANINGS = {
    BETTER: "better than public data alone, by more than chance",
    NOT_BETTER: "not shown to be better than public data alone",
    WORSE: "worse than public data alone, or a structure is lost",
}
"""What each word of a verdict says about the student on the hospital's own cases."""
MAX_VERDICT_BYTES = 4_096
MAX_VERDICTS = 4_096


class StatementOnStudent(Signed, StoredDocument):
    """Base of a hospital's signed statement about a student, identified by its study and its bundle's SHA-256."""

    __slots__ = ()

    FILE: ClassVar[tuple[str, int]]

    study_id: str
    bundle: str
    site: str

    def check_signed(self, keys: Mapping[str, str], *, study: str, bundle: str) -> None:
        """Check that an admitted site signed this statement about exactly this student.

        Args:
            keys: Ledger keys (Ed25519, hex) by site.
            study: Id of the study.
            bundle: SHA-256 of the bundle's archive.

        Raises:
            InvalidInput: If the signature is missing or invalid, or the statement is about another student.
        """
        what, _ = self.FILE  # also the option of `site evaluate` that makes the statement
        remedy = f"ask the hospital to pull the student again and run `consilium site evaluate` with --{what}"
        if (self.study_id, self.bundle) != (study, bundle):
            raise InvalidInput(
                f"student in the {what} of {self.site} (its SHA-256)",
                value=self.bundle[:16],
                limit=f"this study's student, {bundle[:16]}",
                remedy=remedy,
            )
        if self.site not in keys or not self.is_genuine(signing_public_key(keys[self.site])):
            raise InvalidInput(
                f"{what} of {self.site}", limit="a statement signed by the key of an admitted site", remedy=remedy
            )


@dataclass(frozen=True, slots=True)
class SiteVerdict(StatementOnStudent):
    """A site's signed verdict ``word`` on the student whose bundle archive has the SHA-256 ``bundle``."""

    DOMAIN: ClassVar = b"consilium/site-verdict/v1"
    SCHEMA: ClassVar = ("site's verdict", 1)
    FILE: ClassVar = ("verdict", MAX_VERDICT_BYTES)

    study_id: Annotated[Sha256, Key("study")]
    bundle: Sha256
    site: SiteName
    word: Annotated[str, OneOf("word of a verdict", WORDS)]
    time_utc: Time
    signature: str = ""


S = TypeVar("S", bound=StatementOnStudent)


def genuine(said: Iterable[S], keys: Mapping[str, str], *, check: Callable[[S], None]) -> tuple[S, ...]:
    """Return the valid statements. If one key signed several, only the first of them is returned.

    Args:
        said: Statements of hospitals.
        keys: Ledger keys (Ed25519, hex) by site.
        check: Raises InvalidInput for an invalid statement.

    Returns:
        The valid statements.
    """
    found: dict[str, S] = {}
    for one in said:
        try:
            check(one)
        except InvalidInput:
            continue
        found.setdefault(keys[one.site], one)
    return tuple(found.values())


def released(verdicts: Sequence[SiteVerdict], *, needed: int) -> bool:
    """Return whether enough hospitals found the student better than public data alone, so that it may be released.

    Args:
        verdicts: Checked verdicts, one for each hospital.
        needed: Number of hospitals that the study requires to find the student better.

    Returns:
        True if the student may be released.
    """
    return sum(verdict.word == BETTER for verdict in verdicts) >= needed


def cannot_be_released(verdicts: Sequence[SiteVerdict], *, needed: int, sites: int) -> bool:
    """Return whether the student stays unreleased even if all hospitals without a verdict find it better.

    Args:
        verdicts: Checked verdicts, one for each hospital.
        needed: Number of hospitals that the study requires to find the student better.
        sites: Number of hospitals whose verdicts count.

    Returns:
        True if only a changed verdict, or a further hospital, can release the student.
    """
    return sites - sum(verdict.word != BETTER for verdict in verdicts) < needed


def in_words(verdicts: Sequence[SiteVerdict], *, needed: int, sites: int) -> str:
    """Return the number of verdicts, their words, and whether the student is released or can still be.

    Args:
        verdicts: Checked verdicts, one for each hospital.
        needed: Number of hospitals that the study requires to find the student better.
        sites: Number of hospitals whose verdicts count.

    Returns:
        A sentence, or two.
    """
    counts = Counter(verdict.word for verdict in verdicts)
    said = ", ".join(f"{counts[word]} {word}" for word in WORDS if counts[word]) or "none yet"
    state = "released" if released(verdicts, needed=needed) else "NOT RELEASED, for evaluation only"
    if cannot_be_released(verdicts, needed=needed, sites=sites):
        against = len(verdicts) - counts[BETTER]
        state += f". The gate stays shut: {against} of the {sites} hospitals did not find it better"
    return f"{many(len(verdicts), 'verdict')} of hospitals ({said}), {needed} must find it better: {state}"
