"""Computes the content of the Planner page: the noise and the expected benefit that a privacy budget allows.

The pages, the API and the verdict on the Overview page use it. The package ``server.planning`` computes the plans.
Values out of range are refused, and so are new requests while too many are waiting.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from fastapi import HTTPException
from pydantic import BaseModel, Field

from common.config import Study
from common.privacy.accounting import Guarantee
from common.privacy.figures import delta_text, epsilon_text, noise_text, percent_text
from common.privacy.mechanism import AccountantName, Budget, Protection, Relation, Unit
from common.wording import ACCOUNTANTS
from server.planning.planner import MAX_HOSPITALS, Plan, plan

MOST_QUERIES = 100_000
MOST_DIMENSION = 4096
MOST_WAITING = 6


class PlannerForm(BaseModel, frozen=True):
    """The values that a user enters on the Planner page.

    ``dimension`` is the length l of a code. If the study's codec has codes of this length, the plan uses the standard
    deviation of each coordinate over public shapes (`codec_stds`). Otherwise the plan assumes the same standard
    deviation for all coordinates.
    """

    epsilon: float = Field(8.0, ge=0.05, le=1000, description="Budget ε")
    delta: float = Field(1e-5, ge=1e-10, le=0.1, description="Budget δ")
    queries: int = Field(16, ge=1, le=MOST_QUERIES, description="Planned queries N")
    hospitals: int = Field(8, ge=1, le=MAX_HOSPITALS, description="Hospitals K")
    voters: int = Field(1, ge=1, le=1000, description="Voters m a site")
    dimension: int = Field(64, ge=1, le=MOST_DIMENSION, description="Length of a code l")
    accountant: AccountantName = AccountantName.EXACT
    unit: Unit = Unit.HOSPITAL
    relation: Relation = Relation.REPLACE_ONE
    aggregation: Literal["open", "sealed-sum"] = "open"
    colluders: int = Field(1, ge=0, le=1000, description="In a sealed study, sites t that may collude with the server")
    spare_draws: int = Field(0, ge=0, le=1000, description="In a sealed study, draws (attempted sums) that may be lost")


def form_of(study: Study, *, hospitals: int, stds: Sequence[float]) -> PlannerForm:
    """Return a study's settings as values of the Planner page, without checking the limits of that page.

    Args:
        study: The study.
        hospitals: Number of registered hospitals.
        stds: The result of `codec_stds`, one value for each coordinate of a code.

    Returns:
        The values; ``hospitals`` is at least the study's quorum.
    """
    privacy = study.privacy
    return PlannerForm.model_construct(
        epsilon=privacy.epsilon,
        delta=privacy.delta,
        queries=privacy.planned_queries,
        hospitals=max(privacy.quorum, hospitals),
        voters=privacy.voters_per_site,
        dimension=len(stds) or study.codec.max_dimension,
        accountant=privacy.accountant,
        unit=privacy.unit,
        relation=privacy.relation,
        aggregation="sealed-sum" if privacy.sealed else "open",
        colluders=privacy.colluders,
        spare_draws=privacy.spare_draws,
    )


@dataclass(frozen=True, slots=True)
class PlannerResult:
    """The values of the Planner page's form, with the plan for them.

    Attributes:
        form: The values that were planned with.
        plan: Noise, information and verdict for these values.
        uses_codec_spectrum: True if the study's codec has the planned length, so that its spectrum was used.
        components_above_noise: Number of coordinates whose standard deviation exceeds the noise; None without a
            spectrum.
    """

    form: PlannerForm
    plan: Plan
    uses_codec_spectrum: bool
    components_above_noise: int | None

    def to_json(self) -> dict[str, object]:
        """Return the result as JSON values; the key ``written`` contains the main numbers as rounded text."""
        plan = self.plan
        return {
            **plan.to_json(),
            "written": {
                "guarantees": [_written(one) for one in plan.guarantees],
                "explained": percent_text(plan.explained_at_most),
                "noise_multiplier": noise_text(plan.noise_multiplier, 4),
                "noise_per_coordinate": noise_text(plan.noise_per_coordinate, 4),
                "noise_norm": noise_text(plan.noise_norm, 4),
                "known_twice": None if plan.known_twice is None else _written(plan.known_twice),
            },
            "uses_codec_spectrum": self.uses_codec_spectrum,
            "components_above_noise": self.components_above_noise,
            "form": self.form.model_dump(mode="json"),
        }


@lru_cache(maxsize=512)
def planned(form: PlannerForm, study: Study, stds: tuple[float, ...]) -> PlannerResult:
    """Return the plan for these values.

    Args:
        form: The values.
        study: The study, whose clipping norm is used.
        stds: The result of `codec_stds`; without effect if codes of another length are planned.

    Returns:
        The plan.

    Raises:
        InvalidInput: If these values cannot be combined.
    """
    fits = len(stds) == form.dimension
    result = plan(
        budget=Budget(epsilon=form.epsilon, delta=form.delta),
        accountant=form.accountant,
        protection=Protection(unit=form.unit, relation=form.relation),
        queries=form.queries,
        hospitals=form.hospitals,
        voters_per_site=form.voters,
        radius=study.codec.radius,
        dimension=form.dimension,
        spectrum=[std**2 for std in stds] if fits else None,
        colluders=None if form.aggregation == "open" else form.colluders,
        spare_draws=0 if form.aggregation == "open" else form.spare_draws,
    )
    above = sum(std > result.noise_per_coordinate for std in stds) if fits else None
    return PlannerResult(form, result, fits, above)


class PlannerQueue:
    """Computes plans for all users, one at a time in a thread, so that other pages stay responsive."""

    def __init__(self) -> None:
        self._one = asyncio.Semaphore(1)
        self._waiting = 0

    async def plan(self, form: PlannerForm, study: Study, stds: tuple[float, ...]) -> PlannerResult:
        """Compute the plan for these values in a thread; see :func:`planned`.

        Args:
            form: The values.
            study: The study, whose clipping norm is used.
            stds: The result of `codec_stds`.

        Returns:
            The plan.

        Raises:
            InvalidInput: If these values cannot be combined.
            HTTPException: 503 if too many plans are waiting.
        """
        if self._waiting >= MOST_WAITING:
            raise HTTPException(
                503, "too many plans are waiting; try again in a few seconds", headers={"retry-after": "2"}
            )
        self._waiting += 1
        try:
            async with self._one:
                return await asyncio.to_thread(planned, form, study, stds)
        finally:
            self._waiting -= 1


def _written(one: Guarantee) -> dict[str, object]:
    """Return a guarantee with ε, δ and the accountant as text; the page's script does no rounding."""
    named = ACCOUNTANTS[str(one.accountant)]
    return {**one.to_json(), "epsilon": epsilon_text(one.epsilon), "delta": delta_text(one.delta), "named": named}
