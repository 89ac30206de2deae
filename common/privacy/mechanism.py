"""Defines a release and its sensitivity: the facts that every accountant uses.

A release is one integer vector: the sum of the sites' clipped integer codes plus rounded Gaussian noise. Its privacy
facts are exact numbers: the integer radius of one voter's code, the number of voters that a site sums, and the noise
standard deviation as a rational. Ledgers store these facts with every charge. Refuses unit ``patient`` with relation
``zero-out`` (see :func:`sensitivity`).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from fractions import Fraction
from functools import lru_cache
from math import floor, sqrt
from typing import ClassVar

from common.canonical import check_hash, check_integer, digest, member
from common.document import Document
from common.errors import InvalidInput
from common.privacy.checks import check_kind, check_number, check_rational

GRID_BITS = 16
"""Codes live on the grid 2⁻¹⁶: the integer q stands for q · 2⁻¹⁶."""

SAMPLER_DELTA = Fraction(1, 2**40)
"""The part of every δ that covers the noise sampler's distance from the true rounded Gaussian (see ``gaussian``)."""

HONEST_SITES = 2
"""Least number of honest sites in a sealed sum. With only one honest site, the server and the colluders could subtract
their own codes and learn that site's noisy code."""

MAX_DIMENSION = 1 << 20
MAX_VOTERS_PER_SITE = 1 << 12
MAX_RADIUS_INT = 1 << 62
MAX_STATED_STD = 1 << 60
"""Largest σ on the integer sum that a query may state, in grid steps: noise must fit into int64."""
MAX_NOISE_BITS = 128
"""Largest number of bits of σ's numerator, and of σ's denominator. The limit keeps stored sums of μ² short."""


class Unit(StrEnum):
    """The unit of privacy: whose data the guarantee protects.

    ``hospital`` protects everything that one hospital holds, ``patient`` protects one patient.

    >>> c.Unit("patient") is c.Unit.PATIENT
    True
    """

    HOSPITAL = "hospital"
    PATIENT = "patient"


class Relation(StrEnum):
    """The neighbouring relation of a study's releases: which two worlds the guarantee compares.

    ``replace-one`` exchanges one unit for any other. ``zero-out`` sets the code of one unit to the zero code.

    >>> [str(relation) for relation in c.Relation]
    ['replace-one', 'zero-out']
    """

    REPLACE_ONE = "replace-one"
    ZERO_OUT = "zero-out"


class AccountantName(StrEnum):
    """Name of the accountant that decides whether a release fits a study's budget.

    ``exact`` is the analytic Gaussian curve and needs the least noise. ``rdp`` is Rényi DP. ``paper`` reproduces Fay et
    al. 2021, whose eq (15) asks for 1.15 to 1.5 times the noise of ``exact``; it is sound.

    >>> [str(name) for name in c.AccountantName]
    ['exact', 'rdp', 'paper']
    """

    EXACT = "exact"
    RDP = "rdp"
    PAPER = "paper"


def sensitivity(*, radius_int: int, voters_per_site: int, unit: Unit, relation: Relation) -> int:
    """Return the ℓ2 sensitivity Δ of the integer sum of codes: the largest change that one unit can cause.

    A hospital can change all m codes of its site: Δ = 2·m·R under ``replace-one`` and m·R under ``zero-out``. A patient
    can change the code of one of m teachers, which are trained on disjoint patients, to any point of the ball: Δ = 2·R.

    Args:
        radius_int: Norm bound R of one voter's code, in grid steps of 2⁻¹⁶.
        voters_per_site: Number m of voters of a site.
        unit: The unit of privacy.
        relation: The neighbouring relation.

    Returns:
        Δ in grid steps of 2⁻¹⁶.

    Raises:
        InvalidInput: For ``patient`` with ``zero-out``. A teacher without one of its patients still answers, so its
            code does not become zero and the smaller Δ = R would not hold.

    Source: the sum form of Fay et al. 2021, Proposition 2; Abadi et al. 2016 for clipping.

    >>> c.sensitivity(radius_int=65536, voters_per_site=5, unit=c.Unit.PATIENT, relation=c.Relation.REPLACE_ONE)
    131072
    """
    _check_voters(radius_int, voters_per_site)
    match member(Unit, unit, what="unit of privacy"), member(Relation, relation, what="neighbouring relation"):
        case Unit.PATIENT, Relation.ZERO_OUT:
            raise InvalidInput(
                "unit patient with relation zero-out",
                limit="patient needs replace-one",
                remedy="use relation = 'replace-one', because a teacher without one patient still answers and its code "
                "does not become zero",
            )
        case Unit.PATIENT, Relation.REPLACE_ONE:
            return 2 * radius_int
        case Unit.HOSPITAL, Relation.REPLACE_ONE:
            return 2 * voters_per_site * radius_int
        case _:
            return voters_per_site * radius_int


def _check_voters(radius_int: int, voters_per_site: int) -> None:
    check_integer("integer radius", radius_int, least=1, most=MAX_RADIUS_INT, limit="an integer from 1 to 2^62")
    check_integer("voters per site", voters_per_site, least=1, most=MAX_VOTERS_PER_SITE)


@dataclass(frozen=True, slots=True)
class Protection(Document):
    """The unit of privacy and the neighbouring relation for which a guarantee is stated.

    Attributes:
        unit: ``hospital`` or ``patient``.
        relation: ``replace-one`` or ``zero-out``.

    Raises:
        InvalidInput: For unit ``patient`` with relation ``zero-out``, which is not sound.

    >>> print(c.Protection(c.Unit.PATIENT, c.Relation.REPLACE_ONE))
    unit patient, relation replace-one
    """

    unit: Unit
    relation: Relation

    def __post_init__(self) -> None:
        object.__setattr__(self, "unit", member(Unit, self.unit, what="unit of privacy"))
        object.__setattr__(self, "relation", member(Relation, self.relation, what="neighbouring relation"))
        sensitivity(radius_int=1, voters_per_site=1, unit=self.unit, relation=self.relation)

    def __str__(self) -> str:
        return f"unit {self.unit}, relation {self.relation}"


@dataclass(frozen=True, slots=True)
class Budget(Document):
    """The privacy budget (ε, δ) that all releases about a patient pool may spend together.

    Attributes:
        epsilon: ε, finite and above 0.
        delta: δ, above 2⁻³⁹ and below 1.

    Raises:
        InvalidInput: If a value is outside its range, NaN or infinite.

    >>> budget = c.Budget(epsilon=8.0, delta=1e-5)
    >>> budget.analytic_delta < budget.delta
    True
    """

    epsilon: float
    delta: float

    def __post_init__(self) -> None:
        check_number("epsilon", self.epsilon)
        if not isinstance(self.delta, float) or not 2 * SAMPLER_DELTA < self.delta < 1:
            raise InvalidInput("delta", value=self.delta, limit="above 2^-39 and below 1")

    @property
    def analytic_delta(self) -> float:
        """δ − :data:`SAMPLER_DELTA`: the part of δ that the Gaussian mechanism's formulas may use."""
        return _analytic(self.delta)


@lru_cache(maxsize=256)
def _analytic(delta: float) -> float:
    return float(Fraction(delta) - SAMPLER_DELTA)


@dataclass(frozen=True, slots=True)
class Mechanism(Document):
    """The noise mechanism of one release: the sum of integer codes plus round(N(0, σ²)) on every coordinate.

    Attributes:
        dimension: Length l of a code.
        radius_int: Norm bound R = ⌊C·2¹⁶⌋ of one voter's code, in grid steps of 2⁻¹⁶; C is the clipping norm.
        voters_per_site: Number m of voters of a site. A site sends the sum of its m codes, which has norm at most m·R.
        noise_std: Standard deviation σ on the integer sum, in grid steps of 2⁻¹⁶, as a rational.
        name: ``rounded-gaussian-sum``, the only mechanism.
        colluders: None if the server draws the noise. Otherwise the sites draw it in shares, and σ is the noise that
            remains unknown to a party that knows t = ``colluders`` of the shares (:mod:`common.privacy.shares`).

    Raises:
        InvalidInput: If a value is outside its range.

    >>> release = c.Mechanism(dimension=64, radius_int=65536, voters_per_site=5, noise_std=Fraction(131072))
    >>> release.mu_squared(c.Protection(c.Unit.PATIENT, c.Relation.REPLACE_ONE))
    Fraction(1, 1)
    """

    STATED: ClassVar = {"grid_bits": GRID_BITS}

    dimension: int
    radius_int: int
    voters_per_site: int
    noise_std: Fraction
    name: str = "rounded-gaussian-sum"
    colluders: int | None = None

    def __post_init__(self) -> None:
        if self.colluders is not None:
            check_integer("colluders", self.colluders, least=0)
        check_integer("code dimension", self.dimension, least=1, most=MAX_DIMENSION)
        _check_voters(self.radius_int, self.voters_per_site)
        check_rational("noise standard deviation", self.noise_std)
        if max(self.noise_std.numerator, self.noise_std.denominator).bit_length() > MAX_NOISE_BITS:
            raise InvalidInput(
                "noise standard deviation",
                limit=f"at most {MAX_NOISE_BITS} bits in its numerator and in its denominator",
            )
        if self.noise_std > MAX_STATED_STD:
            raise InvalidInput(
                "noise standard deviation",
                value=float(self.noise_std),
                limit=f"at most {MAX_STATED_STD:.3g} grid steps",
            )
        if check_kind("mechanism", self.name, str) != "rounded-gaussian-sum":
            raise InvalidInput("mechanism", value=self.name, limit="rounded-gaussian-sum")

    def noise_in_sum(self, sites: int) -> float:
        """Return the noise standard deviation that a sum over ``sites`` sites carries.

        Args:
            sites: Sites on the roster; more than ``colluders``.

        Returns:
            In grid steps of 2⁻¹⁶: ``noise_std`` if the server draws the noise, otherwise ``noise_std`` · √(K / (K − t))
            for K sites and t ``colluders``.

        Raises:
            InvalidInput: If there are too few sites.
        """
        if self.colluders is None:
            return float(self.noise_std)
        honest = check_integer("sites on a roster", sites, least=self.colluders + 1) - self.colluders
        return float(self.noise_std) * sqrt(sites / honest)

    def mean_noise_std(self, *, voters: int) -> float:
        """Return the noise standard deviation on every coordinate of the mean code.

        Args:
            voters: Voters in the mean; a multiple of ``voters_per_site``.

        Returns:
            The standard deviation in the code's units, not in grid steps.

        Raises:
            InvalidInput: If ``voters`` is not a multiple of ``voters_per_site``.
        """
        check_integer("voters", voters, least=1)
        sites, rest = divmod(voters, self.voters_per_site)
        if rest:
            raise InvalidInput(
                "voters", value=voters, limit=f"a multiple of {self.voters_per_site}, the voters of a site"
            )
        return self.noise_in_sum(sites) / (voters << GRID_BITS)

    @property
    def site_radius_int(self) -> int:
        """The norm bound m·R of the vector that one site sends: its number m of voters times ``radius_int``."""
        return self.voters_per_site * self.radius_int

    def sensitivity(self, protection: Protection) -> int:
        """Return the ℓ2 sensitivity Δ of the sum, in grid steps.

        Args:
            protection: Unit and relation.

        Returns:
            Δ, as :func:`sensitivity` computes it.
        """
        check_kind("protection", protection, Protection)
        return sensitivity(
            radius_int=self.radius_int,
            voters_per_site=self.voters_per_site,
            unit=protection.unit,
            relation=protection.relation,
        )

    def mu_squared(self, protection: Protection) -> Fraction:
        """Return the cost μ² = (Δ/σ)² of one release, exactly: (sensitivity / standard deviation of the noise)².

        Args:
            protection: Unit and relation, which determine the sensitivity Δ.

        Returns:
            μ² as a rational.

        Source: Dong, Roth & Su 2022, Theorem 2.7.
        """
        return Fraction(self.sensitivity(protection)) ** 2 / self.noise_std**2


@dataclass(frozen=True, slots=True)
class QuerySpec(Document):
    """Everything that determines one answer; its hash is the query's id.

    Attributes:
        edition: Number of the pool's set of teachers. It is raised by 1 each time the teachers are trained anew.
        codec: Content hash of the codec.
        volumes: Content hashes of the public volumes in order; several for a joint query.
        round: Number of the round, from 1.
        centre: ``"zero"``, or the content hash of a public object (a frame) relative to which codes are computed.
        weights: ``"codec"`` for the codec's own weights, or the content hash of a public object that contains other
            weights.
        mechanism: The noise mechanism.
    """

    edition: int
    codec: str
    volumes: tuple[str, ...]
    round: int
    centre: str
    weights: str
    mechanism: Mechanism
    _id: str = field(default="", init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        check_integer("pool edition", self.edition, least=1)
        check_integer("round", self.round, least=1)
        object.__setattr__(self, "volumes", tuple(self.volumes))
        for value in (self.codec, *self.volumes):
            check_hash(value)
        if not self.volumes or len(set(self.volumes)) != len(self.volumes):
            raise InvalidInput(
                "volumes of a query",
                value=f"{len(self.volumes)} hashes, {len(set(self.volumes))} of them different",
                limit="at least one hash, and no hash twice",
            )
        if self.centre != "zero":
            check_hash(self.centre)
        if self.weights != "codec":
            check_hash(self.weights)

    @property
    def id(self) -> str:
        """SHA-256 over every field. A joint query has one id for all its volumes. A query with other volumes has
        another id and another charge.
        """
        if not self._id:
            object.__setattr__(self, "_id", digest("query", self.to_json()))
        return self._id


def radius_int(radius: float) -> int:
    """Return the clipping norm in grid steps of 2⁻¹⁶: R = ⌊C·2¹⁶⌋.

    Args:
        radius: Clipping norm C in the code's units, from 2⁻¹⁶ to below 2²⁴.

    Returns:
        R as an integer, at least 1.

    Raises:
        InvalidInput: If C is outside its range, NaN or infinite.

    >>> c.radius_int(1.0)
    65536
    """
    check_number("clipping norm C", radius)
    value: int = floor(Fraction(radius) * 2**GRID_BITS)
    if not 1 <= value < 2**40:
        raise InvalidInput("clipping norm C", value=radius, limit="2^-16 to 2^24")
    return value
