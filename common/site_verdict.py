"""Defines a hospital's signed verdict on a study's student: one word that it consented to send.

Better than public data alone by the hospital's own labelled cases, or not. The word is made of patients' data and is
under no ε: it says on which side of public data the student came out, and nothing else leaves. A student whose study
has a gate is released once enough hospitals have found it better (:func:`released`). Refuses a verdict on another
student, of a site whose key is not known, and any word but these.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar, Protocol, TypeVar

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from common.document import Filed, Key, OneOf, Sha256
from common.errors import InvalidInput
from common.ledger.charges import SiteName
from common.ledger.keys import Signed, signing_public_key
from common.ledger.rows import Time

BETTER, NOT_BETTER, WORSE = "better", "not-better", "worse"
WORDS = (BETTER, NOT_BETTER, WORSE)
MAX_VERDICT_BYTES = 4_096
MAX_VERDICTS = 4_096


@dataclass(frozen=True, slots=True)
class SiteVerdict(Signed, Filed):
    """``word`` of ``site`` on the student whose bundle's archive has this SHA-256, signed by its ledger's key."""

    DOMAIN: ClassVar = b"consilium/site-verdict/v1"
    SCHEMA: ClassVar = ("site's verdict", 1)
    FILE: ClassVar = ("verdict", MAX_VERDICT_BYTES)

    study_id: Annotated[Sha256, Key("study")]
    bundle: Sha256
    site: SiteName
    word: Annotated[str, OneOf("word of a verdict", WORDS)]
    time_utc: Time
    signature: str = ""

    def check_is_of(self, keys: Mapping[str, str], *, study: str, bundle: str) -> None:
        """InvalidInput unless a site of ``keys`` (name → Ed25519, hex) signed it about this very student."""
        check_said(self, keys, study=study, bundle=bundle, what="verdict", option="--verdict")


class SaidOfStudent(Protocol):
    """What a hospital says of a student: whose word it is, on which, signed."""

    @property
    def study_id(self) -> str: ...
    @property
    def bundle(self) -> str: ...
    @property
    def site(self) -> str: ...
    def is_genuine(self, public_key: Ed25519PublicKey, /) -> bool: ...


S = TypeVar("S", bound=SaidOfStudent)


def check_said(
    said: SaidOfStudent, keys: Mapping[str, str], *, study: str, bundle: str, what: str, option: str
) -> None:
    """InvalidInput unless a site of ``keys`` (name → Ed25519, hex) signed it about this very student.

    ``what`` it is and by which ``option`` of `site evaluate` it is made go into the error.
    """
    remedy = f"ask the hospital to pull the student again and run `consilium site evaluate` with {option}"
    if (said.study_id, said.bundle) != (study, bundle):
        raise InvalidInput(f"{what} of {said.site}", value=said.bundle[:16], limit=bundle[:16], remedy=remedy)
    if said.site not in keys or not said.is_genuine(signing_public_key(keys[said.site])):
        raise InvalidInput(f"{what} of {said.site}", limit="signed by the key of an admitted site", remedy=remedy)


def genuine(said: Iterable[S], keys: Mapping[str, str], *, check: Callable[[S], None]) -> tuple[S, ...]:
    """Those that ``check`` finds to be on this student and signed by one of ``keys``, one a site and one a key."""
    found: dict[str, S] = {}
    for one in said:
        try:
            check(one)
        except InvalidInput:
            continue
        found.setdefault(keys[one.site], one)
    return tuple(found.values())


def released(verdicts: Sequence[SiteVerdict], *, needed: int) -> bool:
    """Whether as many sites found the student better as its study asks for. ``verdicts``: checked, one a site."""
    return sum(verdict.word == BETTER for verdict in verdicts) >= needed


def in_words(verdicts: Sequence[SiteVerdict], *, needed: int) -> str:
    """How many verdicts there are, what they say, and whether the student is released by them."""
    counts = Counter(verdict.word for verdict in verdicts)
    said = ", ".join(f"{counts[word]} {word}" for word in WORDS if counts[word]) or "none yet"
    state = "released" if released(verdicts, needed=needed) else "NOT RELEASED, for evaluation only"
    return f"{len(verdicts)} verdicts of hospitals ({said}), {needed} must find it better: {state}"
