"""Defines one frozen type for each kind of ledger row, and reads rows strictly.

The server's and a site's ledger write and replay these records. Each type declares its JSON form
(:mod:`common.document`). Refuses a body with an unknown, missing or ill-typed field, and a row of an unknown kind,
because the cost of a row that is not understood is unknown.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Annotated, Any

from common.canonical import canonical_bytes, canonical_text, parse_canonical, parse_rational, sha256_bytes
from common.document import FLAT, LATER, Between, Document, Key, OneOf, OrEmpty, Sha256
from common.errors import InvalidInput
from common.ledger.charges import (
    BatchName,
    HashOrEmpty,
    Number,
    PoolDeclaration,
    PoolName,
    ReleaseRecord,
    Roster,
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
from common.ledger.rows import Position, body_digest
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
    """Refuse a note that is empty or too long.

    Args:
        text: 1 to :data:`MAX_NOTE_CHARACTERS` characters.

    Raises:
        InvalidInput: For anything else.
    """
    if not isinstance(text, str) or not 1 <= len(text) <= MAX_NOTE_CHARACTERS:
        raise InvalidInput("note", value=len(text), limit=f"1 to {MAX_NOTE_CHARACTERS} characters")


LedgerName = Annotated[str, partial(check_ledger_name, what="ledger id")]
Amount = Annotated[str, OrEmpty(parse_rational)]


REVOKED = " is revoked in study "
"""The words between the site's name and the study's id in the note of a revocation."""
ALL_CHARGED = "the standing was lost: everything left counts as spent, also of pools declared from now on"
"""The note of a recovery of the server's ledger that charged all remaining budget."""
AFTER_ALL_CHARGED = (
    "set up a new study with a ledger of its own (`consilium study init` without --ledger); the hospital's own ledger "
    "still counts all that its pool has spent"
)
"""What to do when a ledger with the note :data:`ALL_CHARGED` can pay for nothing."""


# --- in both ledgers


@dataclass(frozen=True, slots=True)
class GenesisRecord(Document):
    """The first row: the ledger's id, role and schema, and the key that signs the ledger.

    ``standing`` is 1 if a standing file (:mod:`common.ledger.rollback_guard`) has been kept from this row on. It is
    None in ledgers of earlier versions, which first wrote the standing file with the first charge.
    """

    ledger_id: str
    public_key: IdentityKey
    role: str
    schema: int
    site: SiteName | None = None
    standing: Annotated[int, Between("form of a standing", 1, 1)] | None = None


@dataclass(frozen=True, slots=True)
class StudyRecord(Document):
    """The consent text of a study."""

    study: dict[str, object]
    study_id: str

    @property
    def terms(self) -> StudyTerms:
        """The part of the study that a ledger acts on."""
        return StudyTerms.from_json(self.study)

    def check(self) -> None:
        """Refuse an id that is not the hash of the consent text."""
        if self.terms.id != self.study_id:
            raise InvalidInput("study id", value=self.study_id, limit="the hash of the consent text")


@dataclass(frozen=True, slots=True)
class RefusalRecord(Document):
    """Queries that the server did not release or the site did not accept, and the reason. A refusal costs nothing.

    ``pool`` is the pool whose limit the first refused query would have exceeded. ``requested`` is the μ² of this query,
    and ``remaining`` the μ² that the pool's budget, or the study's budget for the pool, had left. Both are empty if the
    reason was neither a budget nor the number of coordinates.
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
    """A change of the signing key. The old key signs the row, and ``proof`` is the new key's own signature."""

    public_key: IdentityKey
    proof: str


@dataclass(frozen=True, slots=True)
class NoteRecord(Document):
    """A note by a person or a command. It changes no total."""

    text: Annotated[str, check_note]


# --- in the server's


@dataclass(frozen=True, slots=True)
class PoolRecord(Document):
    """The declaration of a pool. A later row for the same pool may only tighten it."""

    declaration: Annotated[PoolDeclaration, FLAT]


@dataclass(frozen=True, slots=True)
class RecoveredRecord(Document):
    """A release whose row this ledger lost and that a site's receipt proves. Its charge counts; its answer is lost.

    ``origin`` is the site whose receipt proves the release, and ``release_hash`` the SHA-256 of the release's body.
    """

    release: ReleaseRecord
    origin: SiteName
    release_hash: Sha256
    head: Position | None = None
    """Head of the receipt, which was one of the lost rows; None in rows of earlier versions."""
    charged: Annotated[int, Between("row that charges a recovered release", 1)] | None = None
    """Number of the row of kind ``lost`` that charges the release already; None if this row charges it."""

    def check(self) -> None:
        """Refuse a hash that is not the hash of the release."""
        if release_digest(self.release) != self.release_hash:
            raise InvalidInput("hash of a recovered release", limit="the SHA-256 of the release in the same row")


@dataclass(frozen=True, slots=True)
class LostRecord(Document):
    """Charges that were lost when an older copy of the server's ledger was restored, entered again without a receipt.

    Attributes:
        pools: Lost charges by pool, under the pool's protection.
        studies: Lost charges by study and pool, under the study's protection.
        kept_row: Number of the newest row in the standing file from which the charges were computed. If the record
            charges all remaining budget instead, number of this ledger's row before the record.
        kept_hash: Hash of the standing file's newest row. None if the record charges all remaining budget, and in rows
            of earlier versions.
        fork: Newest row named by the standing file that this ledger contains, or whose charges an earlier recovery
            entered. This record has the charges after that row. None in rows of earlier versions.
        marks: The other rows after ``fork`` in the standing file, newest first. None if there are none, and in rows of
            earlier versions.
        charged: Rows that an earlier recovery charged; see :class:`~common.ledger.rollback_guard.ServerStanding`.
    """

    pools: Spends
    studies: dict[Sha256, Spends]
    kept_row: Annotated[int, Between("kept row", 1)]
    kept_hash: Sha256 | None = None
    fork: Position | None = None
    marks: tuple[tuple[Number, Sha256], ...] | None = None
    charged: tuple[tuple[Number, Sha256], ...] | None = None


@dataclass(frozen=True, slots=True)
class BooksRecord(Document):
    """The assignment of a pool to one site ledger, named by its id: the ledger in which the hospital counts the pool's
    charges. A pool is assigned once and never again.
    """

    pool: PoolName
    ledger_id: Annotated[LedgerName, Key("books")]


@dataclass(frozen=True, slots=True)
class ReuseRecord(Document):
    """A list of stored answers of other studies that this study also uses. No pool's lifetime budget is charged again,
    but the answers count in this study's own total.
    """

    study_id: StudyId
    query_ids: tuple[Sha256, ...]


# --- in a site's


@dataclass(frozen=True, slots=True)
class ConsentRecord(StudyRecord):
    """A study that the site consents to, and the pool that takes part in it."""

    pool: PoolName


@dataclass(frozen=True, slots=True)
class CapsRecord(Document):
    """The site's own caps: the budget of its pool, and the largest number of queries that it accepts in a day."""

    declaration: PoolDeclaration
    queries_per_day: Annotated[int, Between("queries per day", 0)]

    def check_after(self, before: CapsRecord | None) -> None:
        """Refuse caps that change the pool, or the pool's unit or relation. The site may lower or raise its own ε.

        Args:
            before: The caps that these replace; None for the first ones.

        Raises:
            InvalidInput: If the pool or the protection differs.
        """
        if before is None:
            return
        for what, first, now in (
            ("pool", before.declaration.pool, self.declaration.pool),
            ("protection", before.declaration.protection, self.declaration.protection),
        ):
            if first != now:
                raise InvalidInput(
                    f"{what} of this site's ledger",
                    value=str(now),
                    limit=f"{first}, as first declared",
                    remedy="a pool keeps its ledger for life; another pool needs another ledger",
                )


@dataclass(frozen=True, slots=True)
class ReservationRecord(Document):
    """A row of a site's ledger: a query that the site accepted. It is charged when it is accepted and never refunded.

    Attributes:
        study_id: Content hash of the study.
        query: The query.
        query_id: Its id, as stored.
        pool: The pool that is charged.
        ledger: Id of the server's ledger that offered the query; empty in rows of earlier versions.
        sealing_key: Server's public key in hex to which the code is to be sealed; empty in rows of earlier versions.
        draw: In a sealed study, number of the attempt at the sum that this charge pays for. Another attempt is another
            charge.
    """

    study_id: StudyId
    query: QuerySpec
    query_id: str
    pool: PoolName
    ledger: Annotated[str, OrEmpty(partial(check_ledger_name, what="ledger id")), LATER] = ""
    sealing_key: Annotated[HashOrEmpty, LATER] = ""
    draw: Number | None = None
    """In a sealed study, number of the attempt at the sum that this charge pays for; None in an open study."""

    def check(self) -> None:
        """Refuse a wrong query id, a draw number in an open study, and a missing draw number in a sealed study."""
        check_query_id(self.query, self.query_id)
        if (self.draw is None) != (self.query.mechanism.colluders is None):
            raise InvalidInput(
                "draw of a reservation", value=self.draw, limit="a number in a sealed study, no number in an open study"
            )


ZERO_CODE = "zero-code"
"""Outcome of a code for which every voter counted as the zero code, because a public object could not be read."""

MAX_NAMED = 16
"""Largest number of failed voters that an outcome names."""


def code_outcome(*, without: int, failed: Sequence[int]) -> str:
    """Return the word for how a code was computed.

    Args:
        without: Number of voters without a teacher that may vote.
        failed: Numbers of the voters that failed.

    Returns:
        ``stored`` if every voter voted. Otherwise ``zero-votes-N`` for N voters that counted as the zero code; if some
        of these failed, ``/failed-`` and their numbers follow, at most :data:`MAX_NAMED` of them.

    >>> code_outcome(without=1, failed=[0, 3])
    'zero-votes-3/failed-0.3'
    """
    if not (zero := without + len(failed)):
        return "stored"
    return f"zero-votes-{zero}" + (f"/failed-{'.'.join(map(str, failed[:MAX_NAMED]))}" if failed else "")


def failed_voters(outcome: str) -> tuple[int, ...]:
    """Return the voters that :func:`code_outcome` named as failed.

    Args:
        outcome: The word. Versions up to 0.2.0 wrote ``zero-votes-N`` without names.

    Returns:
        Their numbers.

    >>> failed_voters("zero-votes-3/failed-0.3")
    (0, 3)
    """
    found = re.fullmatch(r"zero-votes-[0-9]+/failed-([0-9]+(?:\.[0-9]+)*)", outcome)
    return tuple(map(int, found[1].split("."))) if found else ()


@dataclass(frozen=True, slots=True)
class CodeRecord(Document):
    """A record that the code for a reserved query was computed and will not change.

    A code may be computed anew after a patient was withdrawn. A second row for the query then replaces the first.

    Attributes:
        query_id: The query's id.
        dimension: Length of the code.
        outcome: How the code was computed, in one word: :data:`ZERO_CODE`, or what :func:`code_outcome` returns.
        code_sha256: Hash of the code.
        teachers: Digest of the :class:`TeachersRecord` of the teachers that computed the code; empty if unknown.
    """

    query_id: Sha256
    dimension: Annotated[int, Between("dimension of a code", 1)]
    outcome: Annotated[str, partial(check_ledger_name, what="outcome")]
    code_sha256: Sha256
    teachers: Annotated[HashOrEmpty, LATER] = ""


@dataclass(frozen=True, slots=True)
class DecisionRecord(Document):
    """A decision of the hospital's staff to stop answering a study (``pause``, or ``withdraw`` for good), or to end a
    pause (``resume``).
    """

    study_id: StudyId
    decision: Annotated[str, OneOf("decision", DECISIONS)]


@dataclass(frozen=True, slots=True)
class SealingKeyRecord(Document):
    """A server's announcement of a new sealing key. Codes for queries that were accepted under the key ``replaces`` may
    be encrypted to ``sealing_key`` instead.
    """

    sealing_key: Sha256
    replaces: Sha256


@dataclass(frozen=True, slots=True)
class ReceiptRecord(Document):
    """The whole text of a server's receipt that passed every check."""

    receipt: Receipt


@dataclass(frozen=True, slots=True)
class AlarmRecord(Document):
    """A receipt that the server signed and that contradicts what the site knows. The record contains the whole receipt.
    The site then answers no study until a person ends the alarm.
    """

    receipt: Receipt
    problem: str


@dataclass(frozen=True, slots=True)
class SupersededRecord(Document):
    """A receipt that the server signed before its ledger was recovered. The total of the recovered ledger must contain
    the receipt's charges.
    """

    receipt: Receipt
    charged: Annotated[int, Between("row that charges the releases of a superseded receipt", 1)] | None = None
    """None if the site charges the receipt's releases in this row. Otherwise the site has charged them before: accepted
    receipts show that the server charged them again in rows ``recovered``. The value is then the number of the newest
    row of this ledger that stores one of these receipts.
    """


@dataclass(frozen=True, slots=True)
class RecoveryRecord(Document):
    """A person's statement that an alarm was examined. Receipts of the server's ledger that the row names are accepted
    again, from the ledger's recovered state on.
    """

    ledger_id: str


@dataclass(frozen=True, slots=True)
class RestoredRecord(Document):
    """Charges that a site's ledger lost when it was restored from an older copy, entered again.

    Attributes:
        pool: Lost charges of all studies, under the pool's protection.
        studies: Lost charges by study, under the study's protection.
        queries: Number of queries that lost rows had accepted on the day of this row. They count towards that day's
            cap.
        pending: Ids of lost queries that may be offered again without a further charge.
        kept_row: Number of the newest row in the standing file from which the charges were computed. 0 if there was no
            standing file; then everything that caps and budgets had left is charged.
        kept_hash: Hash of that row; None if there was no standing file, and in rows of earlier versions.
        fork: Newest row named by the standing file that this ledger contains, or whose charges an earlier recovery
            entered. This record has the charges after that row. None in rows of earlier versions.
        marks: The other rows after ``fork`` that the standing file names, newest first. None if there are none, and in
            rows of earlier versions.
    """

    pool: Spend
    studies: dict[Sha256, Spend]
    queries: Number
    pending: tuple[Sha256, ...]
    kept_row: Number
    kept_hash: Sha256 | None = None
    fork: Position | None = None
    marks: tuple[tuple[Number, Sha256], ...] | None = None


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
"""The type of record for each kind of row, in the server's ledger and in a site's."""

_NAMES = {role: {record: kind for kind, record in kinds.items()} for role, kinds in KINDS.items()}


def kind_of(role: str, record: Document) -> str:
    """Return the kind of row that stores a record.

    Args:
        role: ``server`` or ``site``: the ledger that stores the record.
        record: The record.

    Returns:
        The kind, as in :data:`KINDS`.
    """
    return _NAMES[role][type(record)]


def parse_body(text: str) -> dict[str, Any]:
    """Return a row's body as a mapping. Only canonical text (one spelling for one value, no floats) is accepted.

    Args:
        text: The body.

    Returns:
        The mapping.

    Raises:
        InvalidInput: For anything else.
    """
    value = parse_canonical(text)
    if not isinstance(value, dict):
        raise InvalidInput("body of a row", limit="a mapping")
    return value


def parse_record(role: str, kind: str, text: str) -> Document:
    """Return the record that a row holds.

    Args:
        role: ``server`` or ``site``.
        kind: Kind of the row.
        text: The row's body.

    Returns:
        The record.

    Raises:
        InvalidInput: If the kind is unknown in this ledger or the body is invalid.
    """
    try:
        record = KINDS[role][kind]
    except KeyError:
        raise InvalidInput("kind of row", value=kind, limit=", ".join(KINDS.get(role, ()))) from None
    return record.from_json(parse_body(text))


def kept_of(record: LostRecord | RestoredRecord) -> dict[Position, Document]:
    """Return the rows that a record names among those that it charges as lost, each mapped to the record.

    Args:
        record: The record that charges the lost rows.

    Returns:
        A mapping from the position of each such row; empty if the record does not state the hash of its newest lost
        row.
    """
    if record.kept_hash is None:
        return {}
    named = ((record.kept_row, record.kept_hash), *(record.marks or ()))
    return {Position(seq, hashed): record for seq, hashed in named}


def release_digest(release: ReleaseRecord) -> str:
    """Return the hash of a release's body, which identifies a release whose row is lost.

    Args:
        release: The release.

    Returns:
        The SHA-256, which the lost row's hash covered.
    """
    return sha256_bytes(canonical_bytes(release.to_json()))


def recovered_bodies(
    receipt: Receipt, rosters: Mapping[str, Roster], charged: Sequence[int | None] = (None,)
) -> Iterator[tuple[str, Iterator[str]]]:
    """Compute which rows of kind ``recovered`` can charge a receipt's releases, for a caller with rows' hashes alone.

    Args:
        receipt: The receipt, whose parts are consistent.
        rosters: Known rosters, by the SHA-256 of their rows' bodies.
        charged: Values that the field ``charged`` of such a row can have.

    Yields:
        For each release its query's id, and the SHA-256 of the body of each such row. There are several, because any
        site of the roster can be its origin.
    """
    head = Position(receipt.head.seq, receipt.head.hash)
    for release in (item.release for item in receipt.releases):
        digest, sites = release_digest(release), [entry.site for entry in release.roster_in(rosters)]
        rows = (RecoveredRecord(release, site, digest, head, by) for by, site in product(charged, sites))
        yield release.query_id, (body_digest(canonical_text(row.to_json())) for row in rows)
