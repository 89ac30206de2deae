"""Computes how many of a study's planned queries each patient pool can still answer.

A pool's budget is for its life, so an earlier study of the same ledger may have spent it. Refuses a study that shares a
ledger in which no pool has room for one query, and a run that could release nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from common.config import Study
from common.errors import BudgetExceeded, ConsiliumError, InvalidInput
from common.ledger.charges import charge_of
from common.study_mechanism import study_mechanism
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
    mechanism, privacy = study_mechanism(study, dimension=1), study.privacy
    known = any(terms.id == study.id for terms in ledger.studies())
    found = []
    for declared in ledger.pools():
        if pools is None or declared.pool in pools:
            cost = charge_of(mechanism, declared.protection, privacy.protection)
            spent = ledger.spent(declared.pool, study.id).releases if known else 0
            wanted = max(0, privacy.charges - spent)  # the study's own budget admits as many
            found.append(
                Room(declared.site, declared.pool, min(ledger.pool_spending(declared.pool).room(cost), wanted), wanted)
            )
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
    if ledger.answers(study.id):
        return
    found = rooms(ledger, study, pools=pools)
    if sum(room.releases > 0 for room in found) < study.privacy.quorum:
        spent = "; ".join(room.sentence for room in found if not room.releases)
        raise PoolsSpent(f"nothing can be released, and nothing was charged: {spent}; to fix: {_REMEDY}")
