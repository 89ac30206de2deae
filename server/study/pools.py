"""Computes how many of a study's planned queries each patient pool can still pay for.

The commands that create or run a study call it. A pool has one budget for life, so earlier studies of the same ledger
may have spent it. A study is refused if it shares a ledger in which no pool can pay for a query. A run is refused if it
could release nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from common.config import Study
from common.errors import BudgetExceeded, ConsiliumError, InvalidInput
from common.ledger.charges import PoolDeclaration
from common.ledger.records import AFTER_ALL_CHARGED, ALL_CHARGED
from server.ledger.server_ledger import Ledger
from server.study.workspace import LeftSite, Site, Workspace

NONE_REVOKED: Mapping[str, str] = MappingProxyType({})
_REMEDY = (
    "choose a smaller ε (`study init --epsilon`) that the pools can still pay for; spent budget never returns to a "
    "pool, so otherwise admit pools of other patients"
)


class PoolsSpent(ConsiliumError):
    """A run released nothing, because too few pools can pay for one query."""

    exit_code = BudgetExceeded.exit_code


@dataclass(frozen=True, slots=True)
class PoolCapacity:
    """The number of a study's releases that a pool can pay for.

    Attributes:
        site: Name of the pool's site.
        pool: The pool's name.
        releases: How many of the ``wanted`` releases the pool can pay for.
        wanted: Number of releases that the study may still charge to the pool, spare draws of sealed sums included.
        revoked: Value of :func:`revoked_pools`; empty for a pool that is not among them.
    """

    site: str
    pool: str
    releases: int
    wanted: int
    revoked: str = ""

    @property
    def sentence(self) -> str:
        """How much of the study the pool can pay for, as a sentence."""
        room = f"room for {self.releases} of the {self.wanted} releases that this study may need"
        if self.revoked == "here":
            said = "the site is revoked, so it answers no query of this study"
        elif self.revoked:
            said = f"the site is revoked in another study; if admitted here: {room}"
        elif not self.wanted:
            said = "this study's budget for it is spent"
        else:
            said = room if self.releases else "its budget for life is spent"
        return f"pool {self.pool} of {self.site}: {said}"


def rooms(
    ledger: Ledger, study: Study, *, pools: Sequence[str] | None = None, revoked: Mapping[str, str] = NONE_REVOKED
) -> tuple[PoolCapacity, ...]:
    """Return, for each pool, the number of the study's releases that it can pay for. Nothing is charged.

    Args:
        ledger: The server's ledger.
        study: The study.
        pools: Names of the pools; by default all pools of the ledger.
        revoked: Result of :func:`revoked_pools`.

    Returns:
        One entry for each pool.
    """
    found = []
    for one in ledger.study_facts(study).pools.values():
        if pools is None or one.pool in pools:
            wanted = max(0, study.privacy.charges - one.in_study.spend.releases)
            found.append(PoolCapacity(one.site, one.pool, min(one.room, wanted), wanted, revoked.get(one.pool, "")))
    return tuple(found)


def gone_pools(
    pools: Iterable[PoolDeclaration], *, revoked: Iterable[Site], left: Iterable[LeftSite]
) -> frozenset[str]:
    """Return the names of the patient pools whose sites were revoked from a study or left it.

    Args:
        pools: The declared pools of the study's ledger.
        revoked: The study's registered sites that are revoked.
        left: Sites whose records the study deleted. Only the ledger still has their pools.

    Returns:
        The pools' names.
    """
    names = {site.name for site in left}
    return frozenset(site.pool for site in revoked) | {one.pool for one in pools if one.site in names}


def revoked_pools(ledger: Ledger, workspace: Workspace) -> Mapping[str, str]:
    """Return the pools of sites that this study, or the study that holds its ledger, has revoked, or that left it.

    Args:
        ledger: The study's ledger.
        workspace: The study's directory.

    Returns:
        A mapping from the pool's name to ``here`` if this study revoked its site, or to ``before`` if only the study
        that holds the ledger did. A pool of a site that this study admits is left out.
    """
    here, holder = {site.pool for site in workspace.registered()}, Workspace(workspace.books_dir)
    before, gone = (gone_pools(ledger.pools(), revoked=one.revoked(), left=one.left()) for one in (holder, workspace))
    return dict.fromkeys(before - here, "before") | dict.fromkeys(gone, "here")


def short(found: Sequence[PoolCapacity]) -> tuple[str, ...]:
    """Describe the pools that cannot pay for the whole study.

    Args:
        found: Result of :func:`rooms`.

    Returns:
        A sentence for each such pool.
    """
    return tuple(room.sentence for room in found if room.releases < room.wanted)


def check_shared(ledger: Ledger, study: Study) -> None:
    """Check that a new study can still spend budget of the ledger that it shares.

    Args:
        ledger: The shared ledger.
        study: The new study.

    Raises:
        InvalidInput: If the ledger has pools, and none can pay for a query of this study.
    """
    found = rooms(ledger, study)
    if found and not any(room.releases for room in found):
        raise InvalidInput(
            "pools of the shared ledger",
            value="; ".join(short(found)),
            limit="at least one pool that can pay for a query of this study",
            remedy=_remedy(ledger),
        )


def _remedy(ledger: Ledger) -> str:
    return AFTER_ALL_CHARGED if ALL_CHARGED in ledger.books.notes else _REMEDY


def check_answers(ledger: Ledger, study: Study, *, pools: Sequence[str]) -> None:
    """Check that the patient pools of enough sites can pay for one query; a study that has an answer always passes.

    Args:
        ledger: The server's ledger.
        study: The study.
        pools: Pools of the study's sites.

    Raises:
        PoolsSpent: If the study has no answer, and fewer pools than the quorum can pay for a query.
    """
    if ledger.study_facts(study).answers:
        return
    found = rooms(ledger, study, pools=pools)
    if sum(room.releases > 0 for room in found) < study.privacy.quorum:
        spent = "; ".join(room.sentence for room in found if not room.releases)
        raise PoolsSpent(f"nothing can be released, and nothing was charged: {spent}; to fix: {_remedy(ledger)}")
