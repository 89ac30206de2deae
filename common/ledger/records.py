"""Defines one frozen type for each kind of ledger row, and reads rows strictly.

A body with an unknown, missing or ill-typed field is refused, and so is an unknown kind: a reader that does not
understand a row cannot know what was spent. How a body is written and read is declared by the type
(:mod:`common.document`).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any

from common.canonical import canonical_bytes, parse_canonical, parse_rational, sha256_bytes
from common.document import FLAT, LATER, Between, Document, Key, OneOf, OrEmpty, Sha256
from common.errors import InvalidInput
from common.ledger.charges import (
    BatchName,
    HashOrEmpty,
    Number,
    PoolDeclaration,
    PoolName,
    ReleaseRecord,
    RosterRecord,
    SiteName,
    Spend,
    Spends,
    StudyId,
    StudyTerms,
    check_ledger_name,
    check_query_id,
)
from common.ledger.receipts import Receipt
from common.ledger.rows import Position
from common.ledger.sealed_records import (
    AnswerRecord,
    DisclosureRecord,
    LostDrawRecord,
    MaskedRecord,
    MaskKeyRecord,
    PeerRecord,
)
from common.ledger.teacher_records import (
    DealRecord,
    DrawnRecord,
    ForeignRecord,
    IdentityRecord,
    PatientRecord,
    TeachersRecord,
    TrainedRecord,
    TrainingRecord,
)
from common.privacy.mechanism import QuerySpec
from common.public_keys import IdentityKey

MAX_NOTE_CHARACTERS = 2_000
REFUSAL_REASONS = (
    "pool-budget",
    "study-budget",
    "coordinates",
    "daily-cap",
    "paused",
    "alarm",
    "not-allowed",
    "released-before",
)
DECISIONS = ("pause", "resume", "withdraw")


def check_note(text: str) -> None:
    """InvalidInput for a remark that is empty or too long."""
    if not isinstance(text, str) or not 1 <= len(text) <= MAX_NOTE_CHARACTERS:
        raise InvalidInput("note", value=len(text), limit=f"1 to {MAX_NOTE_CHARACTERS} characters")


LedgerName = Annotated[str, partial(check_ledger_name, what="ledger id")]
Amount = Annotated[str, OrEmpty(parse_rational)]


# --- in both ledgers


@dataclass(frozen=True, slots=True)
class GenesisRecord(Document):
    """The first row: which ledger this is, of which schema, and the key that signs it.

    ``standing`` is 1 where a standing has been kept from this row on; None in ledgers of earlier versions, which wrote
    theirs with the first charge.
    """

    ledger_id: str
    public_key: IdentityKey
    role: str
    schema: int
    site: SiteName | None = None
    standing: Annotated[int, Between("form of a standing", 1, 1)] | None = None


@dataclass(frozen=True, slots=True)
class StudyRecord(Document):
    """A study's consent text."""

    study: dict[str, object]
    study_id: str

    @property
    def terms(self) -> StudyTerms:
        """What a ledger acts on."""
        return StudyTerms.from_json(self.study)

    def check(self) -> None:
        if self.terms.id != self.study_id:
            raise InvalidInput("study id", value=self.study_id, limit="the hash of the consent text")


@dataclass(frozen=True, slots=True)
class RefusalRecord(Document):
    """Queries that were not released (server) or not accepted (site), and why; costs nothing.

    ``requested`` and ``remaining`` are μ² of the first refused query and of what the named pool had left, or empty.
    """

    study_id: StudyId
    batch_id: Annotated[BatchName, Key("batch")]
    query_ids: tuple[Sha256, ...]
    reason: Annotated[str, OneOf("reason of a refusal", REFUSAL_REASONS)]
    pool: str
    requested: Amount = ""
    remaining: Amount = ""


@dataclass(frozen=True, slots=True)
class KeyRecord(Document):
    """The signing key changes: the row is signed by the old key, and ``proof`` is the new key's own signature."""

    public_key: IdentityKey
    proof: str


@dataclass(frozen=True, slots=True)
class NoteRecord(Document):
    """Something a person or a command wants on record; it has no effect on any sum."""

    text: Annotated[str, check_note]


# --- in the server's


@dataclass(frozen=True, slots=True)
class PoolRecord(Document):
    """A declared pool, or a tighter declaration of it."""

    declaration: Annotated[PoolDeclaration, FLAT]


@dataclass(frozen=True, slots=True)
class RecoveredRecord(Document):
    """A release known from a site's receipt whose row this ledger lost: its charge stands, its answer is gone."""

    release: ReleaseRecord
    origin: SiteName
    release_hash: Sha256
    head: Position | None = None
    """The receipt's head, in the rows that were lost; None in rows of before it was recorded."""

    def check(self) -> None:
        if release_digest(self.release) != self.release_hash:
            raise InvalidInput("hash of a recovered release", limit="the hash of the release itself")


@dataclass(frozen=True, slots=True)
class LostRecord(Document):
    """This ledger was restored from an older copy; what no receipt told of stays charged in these sums.

    ``pools`` under each pool's own protection, ``studies`` by study and pool under the study's; ``kept_row`` is the
    lost row whose kept standing gave the figures, ``kept_hash`` that row's hash. ``fork`` is the place up to which that
    standing's rows are this ledger's, or were charged before; the figures are what it charged from there on. Both are
    None in rows of before they were recorded.
    """

    pools: Spends
    studies: dict[Sha256, Spends]
    kept_row: Annotated[int, Between("kept row", 1)]
    kept_hash: Sha256 | None = None
    fork: Position | None = None


@dataclass(frozen=True, slots=True)
class BooksRecord(Document):
    """The id of the site ledger that a pool uses at its hospital. A pool has one such row for life."""

    pool: PoolName
    ledger_id: Annotated[LedgerName, Key("books")]


@dataclass(frozen=True, slots=True)
class ReuseRecord(Document):
    """Stored answers of other studies that this study uses too: no pool pays again, the study's own sum counts them."""

    study_id: StudyId
    query_ids: tuple[Sha256, ...]


# --- in a site's


@dataclass(frozen=True, slots=True)
class ConsentRecord(StudyRecord):
    """A study that the site consents to, and the pool that it lends to it."""

    pool: PoolName


@dataclass(frozen=True, slots=True)
class CapsRecord(Document):
    """The site's pool as its own caps declare it, and how many queries it answers in a day."""

    declaration: PoolDeclaration
    queries_per_day: Annotated[int, Between("queries per day", 0)]


@dataclass(frozen=True, slots=True)
class ReservationRecord(Document):
    """An accepted query, charged at acceptance and never given back.

    ``ledger`` is the id of the server's ledger that offered it, ``sealing_key`` the server's public key (hex) that its
    code is to be sealed to. Both are empty in rows of before they were recorded: those name their study alone.
    """

    study_id: StudyId
    query: QuerySpec
    query_id: str
    pool: PoolName
    ledger: Annotated[str, OrEmpty(partial(check_ledger_name, what="ledger id")), LATER] = ""
    sealing_key: Annotated[HashOrEmpty, LATER] = ""
    draw: Number | None = None
    """Which sum of the query this pays for, in a sealed study: another sum is another charge."""

    def check(self) -> None:
        check_query_id(self.query, self.query_id)
        if (self.draw is None) != (self.query.mechanism.colluders is None):
            raise InvalidInput(
                "draw of a reservation", value=self.draw, limit="a draw number in a sealed sum, none in an open one"
            )


@dataclass(frozen=True, slots=True)
class CodeRecord(Document):
    """The code that answers a reserved query is fixed; ``outcome`` says in one word whether it is a real one.

    ``teachers`` is the digest of the :class:`TeachersRecord` it was computed with, empty where that is not known. A
    second one for the query takes the first one's place after a patient was withdrawn in between.
    """

    query_id: Sha256
    dimension: Annotated[int, Between("dimension of a code", 1)]
    outcome: Annotated[str, partial(check_ledger_name, what="outcome")]
    code_sha256: Sha256
    teachers: Annotated[HashOrEmpty, LATER] = ""


@dataclass(frozen=True, slots=True)
class DecisionRecord(Document):
    """A veto (``pause``, or ``withdraw`` for good) on one study, or the end of a pause (``resume``)."""

    study_id: StudyId
    decision: Annotated[str, OneOf("decision", DECISIONS)]


@dataclass(frozen=True, slots=True)
class SealingKeyRecord(Document):
    """By the server's notice, what was accepted for the key ``replaces`` may be sealed to ``sealing_key``."""

    sealing_key: Sha256
    replaces: Sha256


@dataclass(frozen=True, slots=True)
class ReceiptRecord(Document):
    """A server's receipt that passed every check, kept word for word."""

    receipt: Receipt


@dataclass(frozen=True, slots=True)
class AlarmRecord(Document):
    """A genuine receipt that contradicts what the site knows, kept word for word; it stops the site."""

    receipt: Receipt
    problem: str


@dataclass(frozen=True, slots=True)
class SupersededRecord(Document):
    """A genuine receipt signed between a rollback and the recovery: its charges must be in the recovered sum."""

    receipt: Receipt


@dataclass(frozen=True, slots=True)
class RecoveryRecord(Document):
    """A person has looked into the alarm; the server's ledger of this id may go on from a recovered state."""

    ledger_id: str


@dataclass(frozen=True, slots=True)
class RestoredRecord(Document):
    """This ledger was restored from an older copy; what it had accepted since stays charged in one sum.

    ``pool`` is that sum under the pool's protection, ``studies`` each study's share under its own; ``queries`` count
    towards the day's cap, and those in ``pending`` may be offered again within the sum. ``kept_row`` is the lost row
    whose kept standing gave the figures, 0 if there was none and everything the caps and budgets had left is spent.
    ``kept_hash`` and ``fork`` are as in :class:`LostRecord`.
    """

    pool: Spend
    studies: dict[Sha256, Spend]
    queries: Number
    pending: tuple[Sha256, ...]
    kept_row: Number
    kept_hash: Sha256 | None = None
    fork: Position | None = None


KINDS: dict[str, dict[str, type[Document]]] = {
    "server": {
        "genesis": GenesisRecord,
        "study": StudyRecord,
        "pool": PoolRecord,
        "roster": RosterRecord,
        "release": ReleaseRecord,
        "recovered": RecoveredRecord,
        "lost": LostRecord,
        "books": BooksRecord,
        "reuse": ReuseRecord,
        "answer": AnswerRecord,
        "lost-draw": LostDrawRecord,
        "refusal": RefusalRecord,
        "key": KeyRecord,
        "note": NoteRecord,
    },
    "site": {
        "genesis": GenesisRecord,
        "study": ConsentRecord,
        "pool": CapsRecord,
        "reservation": ReservationRecord,
        "code": CodeRecord,
        "mask-key": MaskKeyRecord,
        "masked": MaskedRecord,
        "disclosure": DisclosureRecord,
        "decision": DecisionRecord,
        "patient": PatientRecord,
        "deal": DealRecord,
        "training": TrainingRecord,
        "drawn": DrawnRecord,
        "trained": TrainedRecord,
        "foreign": ForeignRecord,
        "teachers": TeachersRecord,
        "sealing-key": SealingKeyRecord,
        "peer": PeerRecord,
        "identity": IdentityRecord,
        "refusal": RefusalRecord,
        "receipt": ReceiptRecord,
        "alarm": AlarmRecord,
        "superseded": SupersededRecord,
        "recovery": RecoveryRecord,
        "restored": RestoredRecord,
        "key": KeyRecord,
        "note": NoteRecord,
    },
}
"""Which record a row of each kind holds, by whose ledger it is in."""

_NAMES = {role: {record: kind for kind, record in kinds.items()} for role, kinds in KINDS.items()}


def kind_of(role: str, record: Document) -> str:
    """The kind of the rows of this role's ledger that hold such records."""
    return _NAMES[role][type(record)]


def parse_body(text: str) -> dict[str, Any]:
    """A row's body as a mapping; only canonical text (one spelling for one value, no floats) is accepted."""
    value = parse_canonical(text)
    if not isinstance(value, dict):
        raise InvalidInput("body of a row", limit="a mapping")
    return value


def parse_record(role: str, kind: str, text: str) -> Document:
    """The record a row holds; InvalidInput for a kind this role's ledger does not know or an ill-formed body."""
    try:
        record = KINDS[role][kind]
    except KeyError:
        raise InvalidInput("kind of row", value=kind, limit=", ".join(KINDS.get(role, ()))) from None
    return record.from_json(parse_body(text))


def kept_of(record: LostRecord | RestoredRecord) -> dict[Position, Document]:
    """The record by the newest row of the standing it charged; nothing where that is not on record."""
    return {} if record.kept_hash is None else {Position(record.kept_row, record.kept_hash): record}


def release_digest(release: ReleaseRecord) -> str:
    """What a release is known by when its row is lost: the hash of its body, that its row's hash took in."""
    return sha256_bytes(canonical_bytes(release.to_json()))
