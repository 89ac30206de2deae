"""What the server's books know of releases: what one would cost, what it was charged as, where its answer stands."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

from common.ledger.charges import Roster, Spend
from common.privacy.mechanism import Mechanism


@dataclass(frozen=True, slots=True)
class Obstacle:
    """Why a release may not be written: the limit it would pass, for which pool, and by how much."""

    reason: str
    pool: str
    requested: Fraction
    remaining: Fraction


@dataclass(frozen=True, slots=True)
class Charge:
    """New totals that a release brings about, not yet entered: by pool, and by (study, pool)."""

    pools: dict[str, Spend]
    studies: dict[tuple[str, str], Spend]


@dataclass(frozen=True, slots=True)
class Answer:
    """Where a noisy answer stands, by row and hash, and the SHA-256 of its bytes."""

    seq: int
    row_hash: str
    sha256: str


@dataclass(frozen=True, slots=True)
class Release:
    """What a query was charged as in row ``seq``, and which row has its answer; a draw has none at first, or ever."""

    seq: int
    study_id: str
    batch_id: str
    query_id: str
    mechanism: Mechanism
    roster: Roster
    voters: int
    draw: int | None = None
    masks: str | None = None
    answer: Answer | None = None
    lost: bool = False


@dataclass(frozen=True, slots=True)
class Recovered:
    """A charge known from a site's receipt, whose row this ledger lost."""

    study_id: str
    mechanism: Mechanism
    roster: Roster
