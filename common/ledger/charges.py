"""Defines pools, studies with their budgets, releases, and what a release costs a pool.

Everything derived (a query's id, the voters, the event) is computed again from the facts it derives from and must
agree.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from functools import lru_cache, partial
from typing import Annotated, ClassVar

from common.canonical import canonical_bytes, check_hash, check_integer, digest, rational, sha256_bytes
from common.config import OPEN, SEALED_SUM, Study
from common.document import FLAT, Between, Document, Key, OrEmpty, Sha256
from common.errors import InvalidInput
from common.privacy.mechanism import (
    HONEST_SITES,
    AccountantName,
    Budget,
    Mechanism,
    Protection,
    QuerySpec,
    Relation,
    Unit,
    sensitivity,
)

MAX_REPEATED_ROSTER = 16
"""Sites of a roster that every release names in full, as release 0.1.0 wrote it; a longer one has a row of its own."""

_NAME = re.compile(r"[A-Za-z0-9._/-]{1,128}")


def check_ledger_name(text: object, *, what: str) -> str:
    """A site's, pool's or batch's name: 1 to 128 letters, digits, ``-_./``. Not a place for a person's name."""
    if not isinstance(text, str) or not _NAME.fullmatch(text):
        raise InvalidInput(what, value=text, limit="1 to 128 letters, digits, '-', '_', '.', '/'")
    return text


SiteName = Annotated[str, partial(check_ledger_name, what="site name")]
PoolName = Annotated[str, partial(check_ledger_name, what="pool name")]
BatchName = Annotated[str, partial(check_ledger_name, what="batch id")]
HashOrEmpty = Annotated[str, OrEmpty(check_hash)]
StudyId = Annotated[Sha256, Key("study")]
Number = Annotated[int, Between("number in a record", 0)]


@dataclass(frozen=True, slots=True)
class PoolDeclaration(Document):
    """A site's patient pool and what may be spent on it in its whole life, over all studies, editions and runs."""

    pool: str
    site: str
    budget: Annotated[Budget, FLAT]
    accountant: AccountantName
    protection: Annotated[Protection, FLAT]

    def __post_init__(self) -> None:
        check_ledger_name(self.pool, what="pool name")
        check_ledger_name(self.site, what="site name")
        object.__setattr__(self, "accountant", AccountantName(self.accountant))


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
    colluders: int | None = None
    """Of a sealed sum; None where the server adds the noise."""

    @property
    def least_roster(self) -> int:
        """Sites that a release names at least: the quorum, and in a sealed sum two beside the colluders."""
        return max(self.quorum, 0 if self.colluders is None else self.colluders + HONEST_SITES)

    @classmethod
    def of(cls, study: Study) -> StudyTerms:
        """The terms of a study: what :meth:`from_json` reads from its consent text."""
        privacy = study.privacy
        return cls(
            id=study.id,
            name=study.name,
            budget=Budget(epsilon=float(privacy.epsilon), delta=float(privacy.delta)),
            accountant=privacy.accountant,
            protection=privacy.protection,
            quorum=privacy.quorum,
            voters_per_site=privacy.voters_per_site,
            radius=float(study.codec.radius),
            colluders=privacy.sealed_colluders,
        )

    @classmethod
    def from_json(cls, text: object) -> StudyTerms:
        """Read the consent JSON of a study (:meth:`common.config.Study.to_json`); its hash is the study's id."""
        try:
            if not isinstance(text, dict):
                raise TypeError("not a mapping")
            privacy, codec = text["privacy"], text["codec"]
            sealed = privacy.get("aggregation", OPEN) == SEALED_SUM
            return cls(
                id=digest("study", text),
                name=text["name"],
                budget=Budget(epsilon=_number(privacy["epsilon"]), delta=_number(privacy["delta"])),
                accountant=AccountantName(privacy["accountant"]),
                protection=Protection(unit=Unit(privacy["unit"]), relation=Relation(privacy["relation"])),
                quorum=_whole(privacy["quorum"]),
                voters_per_site=_whole(privacy["voters_per_site"]),
                radius=_number(codec["radius"]),
                colluders=check_integer("colluders", privacy["colluders"], least=0) if sealed else None,
            )
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise InvalidInput(
                "consent text of a study", value=type(error).__name__, limit="the text that Study writes"
            ) from error


@dataclass(frozen=True, slots=True, order=True)
class RosterEntry(Document):
    """One site of a release and the pool its teachers were trained on."""

    AS_LIST: ClassVar = True
    SHARED: ClassVar = True

    site: str
    pool: str

    def __post_init__(self) -> None:
        check_ledger_name(self.site, what="site name")
        check_ledger_name(self.pool, what="pool name")


Roster = tuple[RosterEntry, ...]


@dataclass(frozen=True, slots=True)
class Spend(Document):
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

    def check(self) -> None:
        if self.mu_squared < 0 or self.releases < 0 or self.coordinates < 0:
            raise InvalidInput("totals", limit="0 or more")


NOTHING = Spend()
Spends = dict[PoolName, Spend]
"""Sums by the name of the pool."""


def check_roster(roster: Roster) -> Roster:
    """The roster sorted by site; a site or a pool that occurs twice is refused (its patients would count double)."""
    ordered = tuple(sorted(roster))
    for attribute in ("site", "pool"):
        names = [getattr(entry, attribute) for entry in ordered]
        if len(set(names)) != len(names):
            raise InvalidInput(f"roster: one {attribute} is named twice", value=names, limit=f"each {attribute} once")
    return ordered


@dataclass(frozen=True, slots=True)
class RosterRecord(Document):
    """A roster in a row of its own, which later rows and receipts name by its :attr:`id`."""

    roster: Roster
    _id: str = field(default="", init=False, repr=False, compare=False)

    def check(self) -> None:
        if check_roster(self.roster) != self.roster:
            raise InvalidInput("roster", limit="sorted by site")

    @property
    def is_long(self) -> bool:
        """Whether rows name it by its id."""
        return len(self.roster) > MAX_REPEATED_ROSTER

    @property
    def id(self) -> str:
        """SHA-256 of the body of its row, which that row's hash takes in."""
        if not self._id:
            object.__setattr__(self, "_id", sha256_bytes(canonical_bytes(self.to_json())))
        return self._id


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
class ReleaseRecord(Document):
    """One charged query; ``event`` is what :func:`event_json` gives, which who knows the study checks.

    A short roster is in the row, a long one in an earlier row of its own, by whose id it is named here.
    Its answer stands beside the row, with its hash in it. In a sealed sum the row is written before any site is asked:
    ``draw`` counts the sums begun for the query, ``masks`` is the id of the roster with its mask keys, the hash of an
    answer is empty, and the answer, if it comes, gets a row of its own.
    """

    study_id: Annotated[Sha256, Key("study")]
    batch_id: Annotated[BatchName, Key("batch")]
    query: QuerySpec
    query_id: str
    voters: int
    event: dict[str, object]
    answer_sha256: HashOrEmpty
    roster: Roster | None = None
    draw: Annotated[int, Between("number of a draw", 1)] | None = None
    masks: Sha256 | None = None
    roster_sha256: Sha256 | None = None

    @classmethod
    def of(
        cls,
        study: StudyTerms,
        batch_id: str,
        query: QuerySpec,
        query_id: str,
        roster: Roster,
        answer_sha256: str,
        draw: tuple[int, str] | None = None,
        named: str | None = None,
    ) -> ReleaseRecord:
        """What an answer under a study is put on record as; or a ``draw`` by its number and its masks' id.

        ``named``: the id of the roster's own row, where it has one.
        """
        mechanism = query.mechanism
        voters, event = len(roster) * mechanism.voters_per_site, event_json(mechanism, study.protection)
        number, masks = draw or (None, None)
        return cls(
            study.id,
            batch_id,
            query,
            query_id,
            voters,
            event,
            answer_sha256,
            roster=None if named else roster,
            draw=number,
            masks=masks,
            roster_sha256=named,
        )

    def check(self) -> None:
        check_query_id(self.query, self.query_id)
        if (self.roster is None) == (self.roster_sha256 is None):
            raise InvalidInput("roster of a release", limit="its sites, or the id of the row that names them")
        if self.roster is not None:
            RosterRecord(self.roster).check()
            self.check_voters(self.roster)
        sealed = self.query.mechanism.colluders is not None
        if {sealed} != {self.draw is not None, self.masks is not None, not self.answer_sha256}:
            raise InvalidInput(
                "release", limit="in a sealed sum a draw with its masks and no answer yet; otherwise an answer"
            )

    def check_voters(self, roster: Roster) -> None:
        """InvalidInput unless it counts the voters of this roster."""
        voters = len(roster) * self.query.mechanism.voters_per_site
        if self.voters != voters:
            raise InvalidInput("voters", value=self.voters, limit=str(voters))

    def roster_in(self, named: Mapping[str, Roster]) -> Roster:
        """Whom it was made with: the sites it names, or those of the row it names them by, of these. KeyError where
        that is not among them; InvalidInput for other voters than the roster has."""
        if self.roster is not None:
            return self.roster
        roster = named[self.roster_sha256 or ""]
        self.check_voters(roster)
        return roster


def check_query_id(query: QuerySpec, query_id: str) -> None:
    """InvalidInput unless this is the query's id."""
    if query_id != query.id:
        raise InvalidInput("query id", value=query_id, limit="the hash of the query's contents")


def _number(value: object) -> float:
    if isinstance(value, str):
        return float.fromhex(value)
    return float(_whole(value))


def _whole(value: object) -> int:
    return check_integer("number in a record", value, least=1)
