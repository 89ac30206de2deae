"""What the rows of a ledger say: one frozen type for each kind of body, read back strictly.

A body with an unknown, missing or ill-typed field is refused, and so is an unknown kind: a reader that does not
understand a row cannot know what was spent. Everything derived (a query's id, the voters, the event) is computed again
from the facts it derives from and must agree.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from typing import Any

from common.canonical import (
    canonical_bytes,
    check_hash,
    checked_fields,
    digest,
    parse_canonical,
    parse_rational,
    rational,
    sha256_bytes,
)
from common.config import Study
from common.data.dataset import PatientIdentity
from common.errors import InvalidInput
from common.privacy.mechanism import (
    AccountantName,
    Budget,
    Mechanism,
    Protection,
    QuerySpec,
    Relation,
    Unit,
    sensitivity,
)
from common.privacy.training import TrainingEvent

MAX_NOTE_CHARACTERS = 2_000
_NAME = re.compile(r"[A-Za-z0-9._/-]{1,128}")


def check_name(text: object, *, what: str) -> str:
    """A site's, pool's or batch's name: 1 to 128 letters, digits, ``-_./``. Not a place for a person's name."""
    if not isinstance(text, str) or not _NAME.fullmatch(text):
        raise InvalidInput(what, value=text, limit="1 to 128 letters, digits, '-', '_', '.', '/'")
    return text


@dataclass(frozen=True, slots=True)
class PoolDeclaration:
    """A site's patient pool and what may be spent on it in its whole life, over all studies, editions and runs."""

    pool: str
    site: str
    budget: Budget
    accountant: AccountantName
    protection: Protection

    def __post_init__(self) -> None:
        check_name(self.pool, what="pool name")
        check_name(self.site, what="site name")
        object.__setattr__(self, "accountant", AccountantName(self.accountant))

    def to_json(self) -> dict[str, object]:
        return {
            "accountant": str(self.accountant),
            "delta": float(self.budget.delta).hex(),
            "epsilon": float(self.budget.epsilon).hex(),
            "pool": self.pool,
            "relation": str(self.protection.relation),
            "site": self.site,
            "unit": str(self.protection.unit),
        }

    @classmethod
    def from_json(cls, data: object) -> PoolDeclaration:
        names = ("accountant", "delta", "epsilon", "pool", "relation", "site", "unit")
        fields = checked_fields(data, dict.fromkeys(names, str))
        try:
            declaration = cls(
                pool=fields["pool"],
                site=fields["site"],
                budget=Budget(epsilon=float.fromhex(fields["epsilon"]), delta=float.fromhex(fields["delta"])),
                accountant=AccountantName(fields["accountant"]),
                protection=Protection(unit=Unit(fields["unit"]), relation=Relation(fields["relation"])),
            )
        except (ValueError, OverflowError) as error:
            raise InvalidInput("pool declaration", value=str(error)) from error
        if declaration.to_json() != data:
            raise InvalidInput("pool declaration", limit="numbers as float.hex writes them")
        return declaration


@dataclass(frozen=True, slots=True)
class StudyTerms:
    """The part of a study a ledger acts on, read from the consent text that is stored in full."""

    id: str
    name: str
    budget: Budget
    accountant: AccountantName
    protection: Protection
    quorum: int
    voters_per_site: int
    radius: float

    @classmethod
    def of(cls, study: Study) -> StudyTerms:
        return cls.from_json(study.to_json())

    @classmethod
    def from_json(cls, text: object) -> StudyTerms:
        """Read the consent JSON of a study (:meth:`common.config.Study.to_json`); its hash is the study's id."""
        try:
            if not isinstance(text, dict):
                raise TypeError("not a mapping")
            privacy, codec = text["privacy"], text["codec"]
            return cls(
                id=digest("study", text),
                name=text["name"],
                budget=Budget(epsilon=_number(privacy["epsilon"]), delta=_number(privacy["delta"])),
                accountant=AccountantName(privacy["accountant"]),
                protection=Protection(unit=Unit(privacy["unit"]), relation=Relation(privacy["relation"])),
                quorum=_whole(privacy["quorum"]),
                voters_per_site=_whole(privacy["voters_per_site"]),
                radius=_number(codec["radius"]),
            )
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise InvalidInput(
                "consent text of a study", value=type(error).__name__, limit="as Study writes it"
            ) from error


@dataclass(frozen=True, slots=True, order=True)
class RosterEntry:
    """One site of a release and the pool its teachers were trained on."""

    site: str
    pool: str

    def __post_init__(self) -> None:
        check_name(self.site, what="site name")
        check_name(self.pool, what="pool name")


Roster = tuple[RosterEntry, ...]


@dataclass(frozen=True, slots=True)
class Spend:
    """What a pool has spent: Σμ² exactly, in how many releases, of how many noisy coordinates in all."""

    mu_squared: Fraction = Fraction(0)
    releases: int = 0
    coordinates: int = 0

    def plus(self, mu_squared: Fraction, coordinates: int) -> Spend:
        """With one more release."""
        return Spend(self.mu_squared + mu_squared, self.releases + 1, self.coordinates + coordinates)

    def __add__(self, other: Spend) -> Spend:
        return Spend(
            self.mu_squared + other.mu_squared, self.releases + other.releases, self.coordinates + other.coordinates
        )

    def beyond(self, other: Spend) -> Spend:
        """What of this goes beyond ``other``: the difference, each figure at least 0."""
        return Spend(
            max(self.mu_squared - other.mu_squared, Fraction(0)),
            max(self.releases - other.releases, 0),
            max(self.coordinates - other.coordinates, 0),
        )

    def to_json(self) -> dict[str, object]:
        return {"coordinates": self.coordinates, "mu_squared": rational(self.mu_squared), "releases": self.releases}

    @classmethod
    def from_json(cls, data: object) -> Spend:
        fields = checked_fields(data, {"coordinates": int, "mu_squared": str, "releases": int})
        spend = cls(parse_rational(fields["mu_squared"]), fields["releases"], fields["coordinates"])
        if spend.mu_squared < 0 or spend.releases < 0 or spend.coordinates < 0:
            raise InvalidInput("totals", limit="0 or more")
        return spend


NOTHING = Spend()


def check_roster(roster: Roster) -> Roster:
    """The roster sorted by site; a site or a pool that occurs twice is refused (its patients would count double)."""
    ordered = tuple(sorted(roster))
    for attribute in ("site", "pool"):
        names = [getattr(entry, attribute) for entry in ordered]
        if len(set(names)) != len(names):
            raise InvalidInput(f"roster: one {attribute} is named twice", value=names, limit=f"each {attribute} once")
    return ordered


@lru_cache(maxsize=4096)
def charge_of(mechanism: Mechanism, protection: Protection, study_protection: Protection) -> Fraction:
    """μ² that one release under a study's rules costs a pool protected for ``protection``, exactly.

    A release moves a patient's pool by one voter's code only if the study promises disjoint teachers (unit
    ``patient``). Where it does not, a pool that is accounted per patient is charged for all m voters of the site.
    """
    if protection.unit is Unit.PATIENT and study_protection.unit is Unit.HOSPITAL:
        protection = Protection(unit=Unit.HOSPITAL, relation=Relation.REPLACE_ONE)
    return mechanism.mu_squared(protection)


@lru_cache(maxsize=4096)
def _event(mechanism: Mechanism, protection: Protection) -> tuple[str, int, str]:
    moved = sensitivity(
        radius_int=mechanism.radius_int,
        voters_per_site=mechanism.voters_per_site,
        unit=protection.unit,
        relation=protection.relation,
    )
    return rational(mechanism.noise_std / moved), moved, rational(mechanism.mu_squared(protection))


def event_json(mechanism: Mechanism, protection: Protection) -> dict[str, object]:
    """The release as any accountant replays it: a Gaussian of noise multiplier z = σ/Δ under the study's protection."""
    multiplier, moved, mu_squared = _event(mechanism, protection)
    return {
        "kind": "gaussian",
        "mu_squared": mu_squared,
        "noise_multiplier": multiplier,
        "relation": str(protection.relation),
        "sensitivity": moved,
        "unit": str(protection.unit),
    }


@dataclass(frozen=True, slots=True)
class GenesisRecord:
    """The first row: which ledger this is, of which schema, and the key that signs it."""

    ledger_id: str
    public_key: str
    role: str
    schema: int
    site: str | None


@dataclass(frozen=True, slots=True)
class StudyRecord:
    """A study's consent text; ``pool`` is set in a site's ledger only: which pool the site lends to it."""

    terms: StudyTerms
    pool: str | None


@dataclass(frozen=True, slots=True)
class PoolRecord:
    """A declared pool, or a tighter declaration of it; the daily cap is set in a site's ledger only."""

    declaration: PoolDeclaration
    queries_per_day: int | None


@dataclass(frozen=True, slots=True)
class ReleaseRecord:
    """One charged and answered query."""

    study_id: str
    batch_id: str
    query: QuerySpec
    query_id: str
    roster: Roster
    voters: int
    answer_sha256: str


@dataclass(frozen=True, slots=True)
class RecoveredRecord:
    """A release known from a site's receipt whose row this ledger lost: its charge stands, its answer is gone."""

    release: ReleaseRecord
    origin: str
    release_hash: str


@dataclass(frozen=True, slots=True)
class ReuseRecord:
    """Stored answers of other studies that this study uses too: no pool pays again, the study's own sum counts them."""

    study_id: str
    query_ids: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class RefusalRecord:
    """Queries that were not released (server) or not accepted (site), and why; costs nothing.

    ``requested`` and ``remaining`` are μ² of the first refused query and of what the named pool had left, or empty.
    """

    study_id: str
    batch_id: str
    query_ids: tuple[str, ...]
    reason: str
    pool: str
    requested: str
    remaining: str


@dataclass(frozen=True, slots=True)
class KeyRecord:
    """The signing key changes: the row is signed by the old key, and ``proof`` is the new key's own signature."""

    public_key: str
    proof: str


@dataclass(frozen=True, slots=True)
class NoteRecord:
    """Something a person or a command wants on record; it has no effect on any sum."""

    text: str


@dataclass(frozen=True, slots=True)
class ReservationRecord:
    """Site: an accepted query, charged at acceptance and never given back.

    ``ledger`` is the id of the server's ledger that offered it, ``sealing_key`` the server's public key (hex) that its
    code is to be sealed to. Both are empty in rows of before they were recorded: those name their study alone.
    """

    study_id: str
    query: QuerySpec
    query_id: str
    pool: str
    ledger: str
    sealing_key: str


@dataclass(frozen=True, slots=True)
class CodeRecord:
    """Site: the code that answers a reserved query is fixed; ``outcome`` says in one word whether it is a real one.

    ``teachers`` is the digest of the :class:`TeachersRecord` it was computed with, empty where that is not known. A
    second one for the query takes the first one's place after a patient was withdrawn in between.
    """

    query_id: str
    dimension: int
    outcome: str
    code_sha256: str
    teachers: str


@dataclass(frozen=True, slots=True)
class DecisionRecord:
    """Site: a veto (``pause``, or ``withdraw`` for good) on one study, or the end of a pause (``resume``)."""

    study_id: str
    decision: str


@dataclass(frozen=True, slots=True)
class PatientRecord:
    """Site: a patient was withdrawn, and the voter in whose ``slot`` the patient sat is silent until it is retrained.

    ``subject`` is a keyed hash of the case's name whose key is not in the ledger; ``weights`` are those of the voter's
    teacher at that moment, or empty if it had none.
    """

    slot: int
    voter: int
    subject: str
    weights: str


@dataclass(frozen=True, slots=True)
class TrainingRecord:
    """Site: a voter's training began; ``event`` is all it may spend on each of its patients, None for no guarantee.

    Charged in full before the first step and never given back. ``deal`` names how patients were dealt to voters: under
    one deal two voters share no patient.
    """

    training_id: str
    voter: int
    deal: str
    strategy: str
    event: TrainingEvent | None


@dataclass(frozen=True, slots=True)
class TrainedRecord:
    """Site: a training on record came to its end, and ``served`` is the SHA-256 of the teacher it made."""

    training_id: str
    voter: int
    served: str


@dataclass(frozen=True, slots=True)
class TeachersRecord:
    """Site: what its worker loaded: for every voter the SHA-256 of its teacher and the training that made it.

    Both are empty for a voter without a teacher; the training is empty where none on record made these bytes.
    """

    voters: tuple[tuple[str, str], ...]

    @property
    def digest(self) -> str:
        """What a code's row names these teachers by."""
        return digest("teachers", [list(voter) for voter in self.voters])


@dataclass(frozen=True, slots=True)
class SealingKeyRecord:
    """Site: by the server's notice, what was accepted for the key ``replaces`` may be sealed to ``sealing_key``."""

    sealing_key: str
    replaces: str


@dataclass(frozen=True, slots=True)
class IdentityRecord:
    """Site: what counts as one patient of its pool from this row on, as its dataset says it."""

    identity: PatientIdentity


@dataclass(frozen=True, slots=True)
class BooksRecord:
    """Server: the site ledger, by its id, that keeps a pool's books at its hospital. Once for a pool, for life."""

    pool: str
    ledger_id: str


@dataclass(frozen=True, slots=True)
class LostRecord:
    """Server: this ledger was restored from an older copy; what no receipt told of stays charged in these sums.

    ``pools`` under each pool's own protection, ``studies`` by study and pool under the study's; ``kept_row`` is the
    lost row whose kept standing gave the figures.
    """

    pools: dict[str, Spend]
    studies: dict[str, dict[str, Spend]]
    kept_row: int


@dataclass(frozen=True, slots=True)
class ReceiptRecord:
    """Site: a server's receipt that passed every check, kept word for word."""

    receipt: dict[str, Any]


@dataclass(frozen=True, slots=True)
class AlarmRecord:
    """Site: a genuine receipt that contradicts what the site knows, kept word for word; it stops the site."""

    receipt: dict[str, Any]
    problem: str


@dataclass(frozen=True, slots=True)
class SupersededRecord:
    """Site: a genuine receipt signed between a rollback and the recovery: its charges must be in the recovered sum."""

    receipt: dict[str, Any]


@dataclass(frozen=True, slots=True)
class RecoveryRecord:
    """Site: a person has looked into the alarm; the server's ledger of this id may go on from a recovered state."""

    ledger_id: str


@dataclass(frozen=True, slots=True)
class RestoredRecord:
    """Site: this ledger was restored from an older copy; what it had accepted since stays charged in one sum.

    ``pool`` is that sum under the pool's protection, ``studies`` each study's share under its own; ``queries`` count
    towards the day's cap, and those in ``pending`` may be offered again within the sum. ``kept_row`` is the lost row
    whose kept standing gave the figures, 0 if there was none and everything the caps and budgets had left is spent.
    """

    pool: Spend
    studies: dict[str, Spend]
    queries: int
    pending: tuple[str, ...]
    kept_row: int


Record = (
    GenesisRecord
    | StudyRecord
    | PoolRecord
    | ReleaseRecord
    | RecoveredRecord
    | ReuseRecord
    | RefusalRecord
    | KeyRecord
    | NoteRecord
    | ReservationRecord
    | CodeRecord
    | DecisionRecord
    | PatientRecord
    | TrainingRecord
    | TrainedRecord
    | TeachersRecord
    | SealingKeyRecord
    | IdentityRecord
    | BooksRecord
    | LostRecord
    | ReceiptRecord
    | AlarmRecord
    | SupersededRecord
    | RecoveryRecord
    | RestoredRecord
)

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


def release_body(
    *,
    study: StudyTerms,
    batch_id: str,
    query: QuerySpec,
    query_id: str,
    roster: Roster,
    answer_sha256: str,
) -> dict[str, object]:
    """The body of a release row."""
    mechanism = query.mechanism
    return {
        "answer_sha256": answer_sha256,
        "batch": batch_id,
        "event": event_json(mechanism, study.protection),
        "query": query.to_json(),
        "query_id": query_id,
        "roster": [[entry.site, entry.pool] for entry in roster],
        "study": study.id,
        "voters": len(roster) * mechanism.voters_per_site,
    }


def parse_body(text: str) -> dict[str, Any]:
    """A row's body as a mapping; only canonical text (one spelling for one value, no floats) is accepted."""
    value = parse_canonical(text)
    if not isinstance(value, dict):
        raise InvalidInput("body of a row", limit="a mapping")
    return value


def parse_record(role: str, kind: str, text: str) -> Record:
    """The record a row holds; InvalidInput for a kind this role's ledger does not know or an ill-formed body."""
    try:
        reader = _READERS[role][kind]
    except KeyError:
        raise InvalidInput("kind of row", value=kind, limit=", ".join(_READERS.get(role, ()))) from None
    return reader(parse_body(text))


def parse_release(body: dict[str, Any]) -> ReleaseRecord:
    """Read a release body; every derived field must follow from the query (the event is checked by the books)."""
    fields = checked_fields(
        body,
        {
            "answer_sha256": str,
            "batch": str,
            "event": dict,
            "query": dict,
            "query_id": str,
            "roster": list,
            "study": str,
            "voters": int,
        },
    )
    query = QuerySpec.from_json(fields["query"])
    query_id = _query_id(query, fields)
    roster = tuple(RosterEntry(site=_text(pair, 0), pool=_text(pair, 1)) for pair in fields["roster"])
    if check_roster(roster) != roster:
        raise InvalidInput("roster", limit="sorted by site")
    voters = len(roster) * query.mechanism.voters_per_site
    if fields["voters"] != voters:
        raise InvalidInput("voters", value=fields["voters"], limit=str(voters))
    return ReleaseRecord(
        study_id=check_hash(fields["study"]),
        batch_id=check_name(fields["batch"], what="batch id"),
        query=query,
        query_id=query_id,
        roster=roster,
        voters=voters,
        answer_sha256=check_hash(fields["answer_sha256"]),
    )


def release_digest(body: dict[str, Any]) -> str:
    """What a release body is known by when its row is lost: the hash that its row's hash took in."""
    return sha256_bytes(canonical_bytes(body))


def _query_id(query: QuerySpec, fields: dict[str, Any]) -> str:
    query_id = query.id
    if fields["query_id"] != query_id:
        raise InvalidInput("query id", value=fields["query_id"], limit="the hash of the query itself")
    return query_id


def _genesis(body: dict[str, Any]) -> GenesisRecord:
    kinds: dict[str, type] = {"ledger_id": str, "public_key": str, "role": str, "schema": int}
    if "site" in body:
        kinds["site"] = str
    fields = checked_fields(body, kinds)
    return GenesisRecord(
        ledger_id=fields["ledger_id"],
        public_key=check_hash(fields["public_key"]),
        role=fields["role"],
        schema=fields["schema"],
        site=check_name(fields["site"], what="site name") if "site" in fields else None,
    )


def _study(body: dict[str, Any]) -> StudyRecord:
    fields = checked_fields(body, {"study": dict, "study_id": str})
    return StudyRecord(terms=_terms(fields), pool=None)


def _consent(body: dict[str, Any]) -> StudyRecord:
    fields = checked_fields(body, {"pool": str, "study": dict, "study_id": str})
    return StudyRecord(terms=_terms(fields), pool=check_name(fields["pool"], what="pool name"))


def _terms(fields: dict[str, Any]) -> StudyTerms:
    terms = StudyTerms.from_json(fields["study"])
    if terms.id != fields["study_id"]:
        raise InvalidInput("study id", value=fields["study_id"], limit="the hash of the consent text")
    return terms


def _pool(body: dict[str, Any]) -> PoolRecord:
    return PoolRecord(declaration=PoolDeclaration.from_json(body), queries_per_day=None)


def _site_pool(body: dict[str, Any]) -> PoolRecord:
    fields = checked_fields(body, {"declaration": dict, "queries_per_day": int})
    if fields["queries_per_day"] < 0:
        raise InvalidInput("queries per day", value=fields["queries_per_day"], limit="0 or more")
    return PoolRecord(
        declaration=PoolDeclaration.from_json(fields["declaration"]), queries_per_day=fields["queries_per_day"]
    )


def _recovered(body: dict[str, Any]) -> RecoveredRecord:
    fields = checked_fields(body, {"origin": str, "release": dict, "release_hash": str})
    if release_digest(fields["release"]) != fields["release_hash"]:
        raise InvalidInput("hash of a recovered release", limit="that of the release itself")
    return RecoveredRecord(
        release=parse_release(fields["release"]),
        origin=check_name(fields["origin"], what="site name"),
        release_hash=check_hash(fields["release_hash"]),
    )


def _reuse(body: dict[str, Any]) -> ReuseRecord:
    fields = checked_fields(body, {"query_ids": list, "study": str})
    ids = tuple(check_hash(value) for value in fields["query_ids"])
    return ReuseRecord(study_id=check_hash(fields["study"]), query_ids=ids)


def _refusal(body: dict[str, Any]) -> RefusalRecord:
    kinds: dict[str, type] = dict.fromkeys(("batch", "pool", "reason", "remaining", "requested", "study"), str)
    fields = checked_fields(body, {**kinds, "query_ids": list})
    for amount in (fields["requested"], fields["remaining"]):
        if amount:
            parse_rational(amount)
    if fields["reason"] not in REFUSAL_REASONS:
        raise InvalidInput("reason of a refusal", value=fields["reason"], limit=", ".join(REFUSAL_REASONS))
    return RefusalRecord(
        study_id=check_hash(fields["study"]),
        batch_id=check_name(fields["batch"], what="batch id"),
        query_ids=tuple(check_hash(value) for value in fields["query_ids"]),
        reason=fields["reason"],
        pool=fields["pool"],
        requested=fields["requested"],
        remaining=fields["remaining"],
    )


def _key(body: dict[str, Any]) -> KeyRecord:
    fields = checked_fields(body, {"proof": str, "public_key": str})
    return KeyRecord(public_key=check_hash(fields["public_key"]), proof=fields["proof"])


def _note(body: dict[str, Any]) -> NoteRecord:
    text: str = checked_fields(body, {"text": str})["text"]
    if not 1 <= len(text) <= MAX_NOTE_CHARACTERS:
        raise InvalidInput("note", value=len(text), limit=f"1 to {MAX_NOTE_CHARACTERS} characters")
    return NoteRecord(text=text)


def _reservation(body: dict[str, Any]) -> ReservationRecord:
    known_for = {"ledger": "", "sealing_key": ""}  # a row of before these were recorded has neither
    kinds: dict[str, type] = {"pool": str, "query": dict, "query_id": str, "study": str}
    fields = checked_fields(known_for | body, kinds | dict.fromkeys(known_for, str))
    query = QuerySpec.from_json(fields["query"])
    return ReservationRecord(
        study_id=check_hash(fields["study"]),
        query=query,
        query_id=_query_id(query, fields),
        pool=check_name(fields["pool"], what="pool name"),
        ledger=fields["ledger"] and check_name(fields["ledger"], what="ledger id"),
        sealing_key=fields["sealing_key"] and check_hash(fields["sealing_key"]),
    )


def _code(body: dict[str, Any]) -> CodeRecord:
    kinds = {"code_sha256": str, "dimension": int, "outcome": str, "query_id": str, "teachers": str}
    fields = checked_fields({"teachers": ""} | body, kinds)
    return CodeRecord(
        query_id=check_hash(fields["query_id"]),
        dimension=_whole(fields["dimension"]),
        outcome=check_name(fields["outcome"], what="outcome"),
        code_sha256=check_hash(fields["code_sha256"]),
        teachers=fields["teachers"] and check_hash(fields["teachers"]),
    )


def _decision(body: dict[str, Any]) -> DecisionRecord:
    fields = checked_fields(body, {"decision": str, "study": str})
    if fields["decision"] not in DECISIONS:
        raise InvalidInput("decision", value=fields["decision"], limit=", ".join(DECISIONS))
    return DecisionRecord(study_id=check_hash(fields["study"]), decision=fields["decision"])


def _patient(body: dict[str, Any]) -> PatientRecord:
    fields = checked_fields(body, {"slot": int, "subject": str, "voter": int, "weights": str})
    if fields["slot"] < 0 or fields["voter"] < 0:
        raise InvalidInput("slot and voter", value=(fields["slot"], fields["voter"]), limit="numbers from 0")
    if fields["weights"]:
        check_hash(fields["weights"])
    check_hash(fields["subject"])
    return PatientRecord(**fields)


def _training(body: dict[str, Any]) -> TrainingRecord:
    fields = checked_fields(body, {"deal": str, "events": list, "strategy": str, "training": str, "voter": int})
    if fields["voter"] < 0 or len(fields["events"]) > 1:
        raise InvalidInput("voter and event of a training", value=fields["voter"], limit="a number from 0, one event")
    return TrainingRecord(
        training_id=check_hash(fields["training"]),
        voter=fields["voter"],
        deal=check_hash(fields["deal"]),
        strategy=check_name(fields["strategy"], what="training strategy"),
        event=TrainingEvent.from_json(fields["events"][0]) if fields["events"] else None,
    )


def _trained(body: dict[str, Any]) -> TrainedRecord:
    fields = checked_fields(body, {"served": str, "training": str, "voter": int})
    if fields["voter"] < 0:
        raise InvalidInput("voter of a training", value=fields["voter"], limit="a number from 0")
    return TrainedRecord(check_hash(fields["training"]), fields["voter"], check_hash(fields["served"]))


def _teachers(body: dict[str, Any]) -> TeachersRecord:
    voters = checked_fields(body, {"voters": list})["voters"]
    for voter in voters:
        if not isinstance(voter, list) or len(voter) != 2 or not all(isinstance(value, str) for value in voter):
            raise InvalidInput("voter's teacher", limit="its hash and its training's, each may be empty")
        for value in filter(None, voter):
            check_hash(value)
    return TeachersRecord(tuple((served, training) for served, training in voters))


def _sealing_key(body: dict[str, Any]) -> SealingKeyRecord:
    fields = checked_fields(body, {"replaces": str, "sealing_key": str})
    return SealingKeyRecord(check_hash(fields["sealing_key"]), check_hash(fields["replaces"]))


def _identity(body: dict[str, Any]) -> IdentityRecord:
    text = checked_fields(body, {"identity": str})["identity"]
    try:
        return IdentityRecord(PatientIdentity(text))
    except ValueError:
        raise InvalidInput("what a patient is", value=text, limit=", ".join(PatientIdentity)) from None


def _books(body: dict[str, Any]) -> BooksRecord:
    fields = checked_fields(body, {"books": str, "pool": str})
    return BooksRecord(
        pool=check_name(fields["pool"], what="pool name"), ledger_id=check_name(fields["books"], what="ledger id")
    )


def _lost(body: dict[str, Any]) -> LostRecord:
    fields = checked_fields(body, {"kept_row": int, "pools": dict, "studies": dict})
    if fields["kept_row"] < 1:
        raise InvalidInput("kept row", value=fields["kept_row"], limit="a number from 1")
    return LostRecord(
        pools=spends_from_json(fields["pools"]),
        studies={check_hash(study): spends_from_json(pools) for study, pools in fields["studies"].items()},
        kept_row=fields["kept_row"],
    )


def spends_from_json(data: object) -> dict[str, Spend]:
    """Sums by the name of the pool."""
    if not isinstance(data, dict):
        raise InvalidInput("sums of pools", limit="a mapping")
    return {check_name(pool, what="pool name"): Spend.from_json(spend) for pool, spend in data.items()}


def spends_to_json(spends: Mapping[str, Spend]) -> dict[str, object]:
    """What :func:`spends_from_json` reads."""
    return {pool: spend.to_json() for pool, spend in sorted(spends.items())}


def _receipt(body: dict[str, Any]) -> ReceiptRecord:
    return ReceiptRecord(receipt=checked_fields(body, {"receipt": dict})["receipt"])


def _alarm(body: dict[str, Any]) -> AlarmRecord:
    fields = checked_fields(body, {"problem": str, "receipt": dict})
    return AlarmRecord(receipt=fields["receipt"], problem=fields["problem"])


def _superseded(body: dict[str, Any]) -> SupersededRecord:
    return SupersededRecord(receipt=checked_fields(body, {"receipt": dict})["receipt"])


def _recovery(body: dict[str, Any]) -> RecoveryRecord:
    return RecoveryRecord(ledger_id=checked_fields(body, {"ledger_id": str})["ledger_id"])


def _restored(body: dict[str, Any]) -> RestoredRecord:
    fields = checked_fields(body, {"kept_row": int, "pending": list, "pool": dict, "queries": int, "studies": dict})
    if fields["queries"] < 0 or fields["kept_row"] < 0:
        raise InvalidInput("queries and kept row", limit="numbers from 0")
    return RestoredRecord(
        pool=Spend.from_json(fields["pool"]),
        studies={check_hash(study): Spend.from_json(spend) for study, spend in fields["studies"].items()},
        queries=fields["queries"],
        pending=tuple(check_hash(query) for query in fields["pending"]),
        kept_row=fields["kept_row"],
    )


def _number(value: object) -> float:
    if isinstance(value, str):
        return float.fromhex(value)
    return float(_whole(value))


def _whole(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise InvalidInput("number in a record", value=value, limit="an integer from 1")
    return value


def _text(pair: object, index: int) -> str:
    if not isinstance(pair, list) or len(pair) != 2 or not isinstance(pair[index], str):
        raise InvalidInput("roster entry", limit="a site and a pool")
    return str(pair[index])


_READERS: dict[str, dict[str, Callable[[dict[str, Any]], Record]]] = {
    "server": {
        "genesis": _genesis,
        "study": _study,
        "pool": _pool,
        "release": parse_release,
        "recovered": _recovered,
        "lost": _lost,
        "books": _books,
        "reuse": _reuse,
        "refusal": _refusal,
        "key": _key,
        "note": _note,
    },
    "site": {
        "genesis": _genesis,
        "study": _consent,
        "pool": _site_pool,
        "reservation": _reservation,
        "code": _code,
        "decision": _decision,
        "patient": _patient,
        "training": _training,
        "trained": _trained,
        "teachers": _teachers,
        "sealing-key": _sealing_key,
        "identity": _identity,
        "refusal": _refusal,
        "receipt": _receipt,
        "alarm": _alarm,
        "superseded": _superseded,
        "recovery": _recovery,
        "restored": _restored,
        "key": _key,
        "note": _note,
    },
}
