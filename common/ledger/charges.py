"""Defines pools, studies with their budgets, releases, and the cost of a release for a pool.

The server's and a site's ledger use these types. Derived values (a query's id, the number of voters, the privacy event)
are stored, and computed again when they are read. Refuses a record whose stored and computed values differ, and names
with characters other than letters, digits and ``-_./``.
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
)
from common.reading import parsing

MAX_REPEATED_ROSTER = 16
"""Largest roster, in sites, that each release repeats in full. A larger roster has a row of its own."""

_NAME = re.compile(r"[A-Za-z0-9._/-]{1,128}")


def check_ledger_name(text: object, *, what: str) -> str:
    """Return the name of a site, pool or batch if it is valid. It must not identify a person.

    Args:
        text: 1 to 128 letters, digits, ``-``, ``_``, ``.`` or ``/``.
        what: What the name is for, such as "name of a pool"; used in the error.

    Returns:
        The name.

    Raises:
        InvalidInput: For anything else.
    """
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
    """The declaration of a site's patient pool, with the budget that all studies together may ever spend on the pool.

    Attributes:
        pool: Name of the pool.
        site: Name of the site.
        budget: ε and δ that all releases of all studies together may spend.
        accountant: The accountant that decides whether a release fits the budget.
        protection: Privacy unit and neighbouring relation.
    """

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
    """The terms of a study that ledgers enforce, read from the consent text. The consent text is stored in full.

    Attributes:
        id: Content hash of the study.
        name: Name of the study.
        budget: ε and δ that the study may spend on each pool.
        accountant: The accountant that decides whether a release fits the budget.
        protection: Privacy unit and neighbouring relation.
        quorum: Least number of sites of a release.
        voters_per_site: Number m of voters at each site.
        radius: Clipping norm C.
        colluders: Number t of sites that may collude with the server in a sealed sum; None if the server adds the
            noise.
    """

    id: str
    name: str
    budget: Budget
    accountant: AccountantName
    protection: Protection
    quorum: int
    voters_per_site: int
    radius: float
    colluders: int | None = None

    @property
    def least_roster(self) -> int:
        """Smallest number of sites of a release: the quorum, and in a sealed sum at least ``colluders`` + 2."""
        return max(self.quorum, 0 if self.colluders is None else self.colluders + HONEST_SITES)

    @classmethod
    def of(cls, study: Study) -> StudyTerms:
        """Return the terms of a study, equal to what :meth:`from_json` reads from its consent text.

        Args:
            study: The study.

        Returns:
            The terms.
        """
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
        """Read the consent JSON of a study (:meth:`common.config.Study.to_json`). Its hash is the study's id.

        Args:
            text: The parsed JSON.

        Returns:
            The terms.

        Raises:
            InvalidInput: If a field is missing or invalid.
        """
        with parsing("consent text of a study", limit="the JSON that Study.to_json writes"):
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


@dataclass(frozen=True, slots=True, order=True)
class RosterEntry(Document):
    """A site of a release, and the pool that its teachers were trained on."""

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
    """The total cost of releases for a pool.

    Attributes:
        mu_squared: Σμ² as an exact rational.
        releases: Number of releases.
        coordinates: Number of noisy coordinates of all releases.
    """

    mu_squared: Fraction = Fraction(0)
    releases: int = 0
    coordinates: int = 0

    def plus(self, mu_squared: Fraction, coordinates: int) -> Spend:
        """Return the total with one more release.

        Args:
            mu_squared: μ² of the release.
            coordinates: Its number of coordinates.

        Returns:
            The new total.
        """
        return Spend(self.mu_squared + mu_squared, self.releases + 1, self.coordinates + coordinates)

    def __add__(self, other: Spend) -> Spend:
        return Spend(
            self.mu_squared + other.mu_squared, self.releases + other.releases, self.coordinates + other.coordinates
        )

    def beyond(self, other: Spend) -> Spend:
        """Return the difference by which this total exceeds another; a negative difference counts as 0.

        Args:
            other: The other total.

        Returns:
            The difference.
        """
        return Spend(
            max(self.mu_squared - other.mu_squared, Fraction(0)),
            max(self.releases - other.releases, 0),
            max(self.coordinates - other.coordinates, 0),
        )

    def check(self) -> None:
        """Refuse negative figures."""
        if self.mu_squared < 0 or self.releases < 0 or self.coordinates < 0:
            raise InvalidInput("totals", limit="0 or more")


NOTHING = Spend()
Spends = dict[PoolName, Spend]
"""Totals by the name of the pool."""


def check_roster(roster: Roster) -> Roster:
    """Return the roster sorted by site.

    Args:
        roster: The sites of a release.

    Returns:
        The sorted roster.

    Raises:
        InvalidInput: If a site or a pool occurs twice, because its patients would then count twice.
    """
    ordered = tuple(sorted(roster))
    for attribute in ("site", "pool"):
        names = [getattr(entry, attribute) for entry in ordered]
        if len(set(names)) != len(names):
            raise InvalidInput(f"roster: one {attribute} is named twice", value=names, limit=f"each {attribute} once")
    return ordered


@dataclass(frozen=True, slots=True)
class RosterRecord(Document):
    """A ledger row that contains only a roster. Later rows and receipts refer to the roster by its :attr:`id`."""

    roster: Roster
    _id: str = field(default="", init=False, repr=False, compare=False)

    def check(self) -> None:
        """Refuse a roster that is not sorted or names a site or a pool twice."""
        if check_roster(self.roster) != self.roster:
            raise InvalidInput("roster", limit="sorted by site")

    @property
    def is_long(self) -> bool:
        """True if rows refer to the roster by its id, because it has more than :data:`MAX_REPEATED_ROSTER` sites."""
        return len(self.roster) > MAX_REPEATED_ROSTER

    @property
    def id(self) -> str:
        """SHA-256 of the row's body, which the row's hash covers."""
        if not self._id:
            object.__setattr__(self, "_id", sha256_bytes(canonical_bytes(self.to_json())))
        return self._id


@lru_cache(maxsize=4096)
def charge_of(mechanism: Mechanism, protection: Protection, study_protection: Protection) -> Fraction:
    """Return the μ² that one release under a study's rules costs a pool, as an exact rational.

    With disjoint teachers, a patient changes a single voter's code. Only studies of unit ``patient`` promise disjoint
    teachers. In a study of unit ``hospital``, a pool that is accounted per patient is charged for all m voters of its
    site.

    Args:
        mechanism: The release's mechanism.
        protection: Unit and relation of the pool.
        study_protection: Unit and relation of the study.

    Returns:
        μ² as a rational.
    """
    if protection.unit is Unit.PATIENT and study_protection.unit is Unit.HOSPITAL:
        protection = Protection(unit=Unit.HOSPITAL, relation=Relation.REPLACE_ONE)
    return mechanism.mu_squared(protection)


@lru_cache(maxsize=4096)
def _event(mechanism: Mechanism, protection: Protection) -> tuple[str, int, str]:
    moved = mechanism.sensitivity(protection)
    return rational(mechanism.noise_std / moved), moved, rational(mechanism.mu_squared(protection))


def event_json(mechanism: Mechanism, protection: Protection) -> dict[str, object]:
    """Return a release as a privacy event that any accountant can replay: Gaussian noise with its noise multiplier.

    Args:
        mechanism: The release's mechanism.
        protection: The study's unit and relation.

    Returns:
        A mapping with ``kind``, ``mu_squared``, ``noise_multiplier``, ``relation``, ``sensitivity`` and ``unit``.
    """
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
    """One charged query. Its answer is stored in another table, and the row contains the answer's hash.

    A short roster is in the row. A long roster is in an earlier row of its own, whose id is named here. In a sealed sum
    the row is written before any site is asked; the answer, if it arrives, gets a row of its own.

    Attributes:
        study_id: Content hash of the study.
        batch_id: Name of the batch.
        query: The query.
        query_id: The query's id, as stored.
        voters: Number of voters of the roster.
        event: The result of :func:`event_json`; checked by readers that know the study.
        answer_sha256: Hash of the answer; empty in a sealed sum.
        roster: The sites, if the roster is short.
        draw: In a sealed sum, number of this attempt at the query's sum, from 1.
        masks: In a sealed sum, one id for the roster and its sites' mask keys together.
        roster_sha256: Id of the roster's row, if the roster is long.
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
        """Return the record of an answer in an open study, or of a draw (one attempt at a sealed sum) in a sealed
        study.

        Args:
            study: The study's terms.
            batch_id: Name of the batch.
            query: The query.
            query_id: Its id.
            roster: The sites.
            answer_sha256: Hash of the answer; empty for a draw.
            draw: (number of the draw, id of its masks) in a sealed sum.
            named: Id of the roster's own row if it has one.

        Returns:
            The record.
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
        """Refuse a wrong query id, a wrong roster and a wrong number of voters.

        Also refuse a release of an open study without an answer, and a release of a sealed study without a draw number
        and masks, or with an answer.
        """
        check_query_id(self.query, self.query_id)
        if (self.roster is None) == (self.roster_sha256 is None):
            raise InvalidInput("roster of a release", limit="either its sites or the id of the row that names them")
        if self.roster is not None:
            RosterRecord(self.roster).check()
            self.check_voters(self.roster)
        sealed = self.query.mechanism.colluders is not None
        if {sealed} != {self.draw is not None, self.masks is not None, not self.answer_sha256}:
            raise InvalidInput(
                "fields of a release",
                limit="in a sealed study the draw's number and the id of its masks, without an answer; "
                "in an open study an answer, without a draw and masks",
            )

    def check_voters(self, roster: Roster) -> None:
        """Check the stored number of voters.

        Args:
            roster: The sites of the release.

        Raises:
            InvalidInput: If it is not the number of sites times the voters per site.
        """
        voters = len(roster) * self.query.mechanism.voters_per_site
        if self.voters != voters:
            raise InvalidInput(
                "voters", value=self.voters, limit=f"{voters}, the voters per site times the sites on the roster"
            )

    def roster_in(self, named: Mapping[str, Roster]) -> Roster:
        """Return the roster of the release.

        Args:
            named: Known rosters by id.

        Returns:
            The sites in the row, or the sites of the roster that the row names.

        Raises:
            KeyError: If the named roster is unknown.
            InvalidInput: If the stored number of voters does not match the roster.
        """
        if self.roster is not None:
            return self.roster
        roster = named[self.roster_sha256 or ""]
        self.check_voters(roster)
        return roster


def check_query_id(query: QuerySpec, query_id: str) -> None:
    """Refuse a query id that is not the hash of the query.

    Args:
        query: The query.
        query_id: The id to check.

    Raises:
        InvalidInput: If they differ.
    """
    if query_id != query.id:
        raise InvalidInput("query id", value=query_id, limit="the hash of the query's contents")


def _number(value: object) -> float:
    if isinstance(value, str):
        return float.fromhex(value)
    return float(_whole(value))


def _whole(value: object) -> int:
    return check_integer("number in a record", value, least=1)
