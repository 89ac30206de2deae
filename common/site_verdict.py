"""Defines a hospital's signed verdict on a study's student: one word that the hospital consented to send.

The word states whether the student is better than public data alone on the hospital's own labelled cases. It is
computed from patients' data, and no ε bounds what it reveals; nothing else leaves the hospital. A study may require a
number of verdicts: its student is then released once that many hospitals have found it better than public data alone
(:class:`GateState`). Refuses a verdict on another student, of a site whose key is not known, and any other word.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated, ClassVar, TypeVar

from common.config import Study
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
    time_utc: str

    def check_signed(self, keys: Mapping[str, str], *, study: Study, bundle: str) -> None:
        """Check that an admitted site signed this statement about exactly this student.

        Args:
            keys: Ledger keys (Ed25519, hex) by site.
            study: The study.
            bundle: SHA-256 of the bundle's archive.

        Raises:
            InvalidInput: If the signature is missing or invalid, or the statement is about another student.
        """
        what, _ = self.FILE  # also the option of `site evaluate` that makes the statement
        remedy = f"ask the hospital to pull the student again and run `consilium site evaluate` with --{what}"
        if (self.study_id, self.bundle) != (study.id, bundle):
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


@dataclass(frozen=True, slots=True)
class GateState:
    """The hospitals' verdicts on a student, and how many favourable ones its release needs.

    Attributes:
        needed: Number of hospitals that must find the student better; 0 if the study requires no verdicts (has no
            gate).
        verdicts: The checked verdicts so far, one for each hospital.
        sites: Number of hospitals whose verdicts count.
    """

    needed: int
    verdicts: tuple[SiteVerdict, ...]
    sites: int

    @property
    def released(self) -> bool:
        """True if enough hospitals found the student better than public data alone, so that it may be released."""
        return sum(verdict.word == BETTER for verdict in self.verdicts) >= self.needed

    @property
    def shut(self) -> bool:
        """True if the student stays unreleased even if all hospitals without a verdict find it better.

        Only a changed verdict, or a further hospital, can then release it.
        """
        return self.sites - sum(verdict.word != BETTER for verdict in self.verdicts) < self.needed

    @property
    def words(self) -> str:
        """The verdicts, the number needed and whether the student is released, in words; empty if the study has no
        gate.
        """
        if not self.needed:
            return ""
        counts = Counter(verdict.word for verdict in self.verdicts)
        said = ", ".join(f"{counts[word]} {word}" for word in WORDS if counts[word]) or "none yet"
        state = "released" if self.released else "NOT RELEASED, for evaluation only"
        if self.shut:
            against = len(self.verdicts) - counts[BETTER]
            state += f". The gate stays shut: {against} of the {self.sites} hospitals did not find it better"
        return (
            f"{many(len(self.verdicts), 'verdict')} of hospitals ({said}), {self.needed} must find it better: {state}"
        )

    @property
    def sentence(self) -> str:
        """:attr:`words` and, until the student is released, what the operator can do."""
        return self.words if self.released else f"{self.words}; to fix: {self.remedy}"

    @property
    def remedy(self) -> str:
        """What the operator can do about a student that is not released."""
        if self.shut:
            return "keep this student unpublished, or train another, on which the hospitals give new verdicts"
        return (
            "ask hospitals to run `consilium site student pull --to-evaluate` and `consilium site evaluate --verdict "
            "FILE`, then `consilium student verdict`"
        )


S = TypeVar("S", bound=StatementOnStudent)


def genuine(said: Iterable[S], keys: Mapping[str, str], *, study: Study, bundle: str) -> tuple[S, ...]:
    """Return the statements that pass :meth:`~StatementOnStudent.check_signed`, at most one (the first) for each key.

    Args:
        said: Statements of hospitals.
        keys: Ledger keys (Ed25519, hex) by site.
        study: The study.
        bundle: SHA-256 of the bundle's archive.

    Returns:
        The valid statements.
    """
    found: dict[str, S] = {}
    for one in said:
        try:
            one.check_signed(keys, study=study, bundle=bundle)
        except InvalidInput:
            continue
        found.setdefault(keys[one.site], one)
    return tuple(found.values())
