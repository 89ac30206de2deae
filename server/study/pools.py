"""Computes how many of a study's planned queries each patient pool can still answer.

A pool's budget is for its life, so an earlier study of the same ledger may have spent it. Refuses a study that shares a
ledger in which no pool has room for one query, and a run that could release nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from common.config import Study
from common.errors import BudgetExceeded, ConsiliumError, InvalidInput
from server.ledger.server_ledger import Ledger

_REMEDY = (
    "ask for a smaller ε (`study init --epsilon`) while something is left; what was spent comes back to no pool, so "
    "otherwise other patients must answer"
)


class PoolsSpent(ConsiliumError):
    """A run released nothing, because too few pools have room for one query."""

    exit_code = BudgetExceeded.exit_code


@dataclass(frozen=True, slots=True)
class Room:
    """A pool, and how many of the study's ``wanted`` releases it has room for, lost draws among them."""

    site: str
    pool: str
    releases: int
    wanted: int

    @property
    def sentence(self) -> str:
        share = f"room for {self.releases} of the {self.wanted} releases that this study may need"
        return f"pool {self.pool} of {self.site}: {share if self.releases else 'its budget for life is spent'}"


def rooms(ledger: Ledger, study: Study, *, pools: Sequence[str] | None = None) -> tuple[Room, ...]:
    """Every pool of the ledger, or those named, by how much of the study it can answer. Charges nothing."""
    found = []
    for one in ledger.study_facts(study).pools.values():
        if pools is None or one.pool in pools:
            wanted = max(0, study.privacy.charges - one.in_study.spend.releases)
            found.append(Room(one.site, one.pool, min(one.room, wanted), wanted))
    return tuple(found)


def short(found: Sequence[Room]) -> tuple[str, ...]:
    """A sentence for each pool that cannot answer the whole study."""
    return tuple(room.sentence for room in found if room.releases < room.wanted)


def check_shared(ledger: Ledger, study: Study) -> None:
    """InvalidInput for a new study on a ledger whose every pool is spent."""
    found = rooms(ledger, study)
    if found and not any(room.releases for room in found):
        raise InvalidInput(
            "pools of the shared ledger",
            value="; ".join(short(found)),
            limit="at least one with room for a query of this study",
            remedy=_REMEDY,
        )


def check_answers(ledger: Ledger, study: Study, *, pools: Sequence[str]) -> None:
    """PoolsSpent where nothing was released and too few of the pools of a study's sites have room for one query."""
    if ledger.study_facts(study).answers:
        return
    found = rooms(ledger, study, pools=pools)
    if sum(room.releases > 0 for room in found) < study.privacy.quorum:
        spent = "; ".join(room.sentence for room in found if not room.releases)
        raise PoolsSpent(f"nothing can be released, and nothing was charged: {spent}; to fix: {_REMEDY}")
