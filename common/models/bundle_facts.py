"""Defines the facts in a bundle beside its weights: privacy facts, library versions, measured figures.

Each is checked where it is made, since a site reads them from a bundle that somebody else packed.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from fractions import Fraction

import monai
import nibabel
import numpy as np
import torch

from common.canonical import check_hash, checked_fields
from common.errors import InvalidInput
from common.names import check_text
from common.privacy.accounting import max_mu_squared
from common.privacy.figures import delta_text, epsilon_text
from common.privacy.mechanism import AccountantName, Budget, Protection, Relation, Unit

MAX_FIGURES = 64
_SENTENCES = ("guarantee", "spent")


@dataclass(frozen=True, slots=True)
class BundlePrivacy:
    """What the study guarantees, and what the student's pseudo-labels have spent of it by the ledger.

    ε values hold at ``delta`` for ``protection`` (unit and relation); ``accountant`` is the one the budget was kept by.
    ``budget_epsilon`` was promised, and can still be spent under the same consent; the others are what was spent.
    ``noise_multiplier`` is z = σ/Δ of one release; ``ledger_head`` the hash of the ledger's signed head; ``study`` and
    ``codec`` are content hashes.
    """

    budget_epsilon: float
    epsilon_exact: float
    epsilon_rdp: float
    delta: float
    protection: Protection
    accountant: AccountantName
    noise_multiplier: float
    queries: int
    sites: int
    voters_per_site: int
    ledger_head: str
    study: str
    codec: str
    epsilon_paper: float | None = None
    """By eq (14) of Fay et al. 2021; needed where it is the accountant."""

    def __post_init__(self) -> None:
        paper = ("epsilon_paper",) if self.accountant is AccountantName.PAPER else ()
        for name in ("budget_epsilon", "epsilon_exact", "epsilon_rdp", "noise_multiplier", *paper):
            value = getattr(self, name)
            if not isinstance(value, int | float) or not math.isfinite(value) or value < 0:
                raise InvalidInput(f"privacy facts: {name}", value=value, limit="a finite number ≥ 0")
        for name in ("queries", "sites", "voters_per_site"):
            value = getattr(self, name)
            if type(value) is not int or not 1 <= value <= 1_000_000_000:
                raise InvalidInput(f"privacy facts: {name}", value=value, limit="an integer from 1 to 10^9")
        if not isinstance(self.delta, float) or not 0 < self.delta < 1:
            raise InvalidInput("privacy facts: delta", value=self.delta, limit="above 0 and below 1")
        for name in ("ledger_head", "study", "codec"):
            check_hash(getattr(self, name))

    @property
    def epsilon(self) -> float:
        """ε spent, by the accountant that kept the budget."""
        by = {AccountantName.RDP: self.epsilon_rdp, AccountantName.PAPER: self.epsilon_paper}
        return by.get(self.accountant) or self.epsilon_exact

    @property
    def guaranteed(self) -> float:
        """ε that holds after all further releases: the larger of the budget and what was spent."""
        return max(self.budget_epsilon, self.epsilon)

    @property
    def spent_beyond(self) -> Fraction:
        """A Σμ² not below what was spent, where that is more than the budget; 0 elsewhere."""
        if self.epsilon <= self.budget_epsilon:
            return Fraction(0)
        return max_mu_squared(self.accountant, Budget(self.epsilon, self.delta)) * (1 + Fraction(1, 2**50))

    def guarantee(self) -> str:
        """:attr:`guaranteed` in one line."""
        return f"(ε, δ) = ({epsilon_text(self.guaranteed)}, {self._terms()}"

    def spent(self) -> str:
        """What has been spent of it so far, lost draws with it, in one line."""
        return f"(ε, δ) = ({epsilon_text(self.epsilon)}, {self._terms()}, with {self.queries} answers"

    def sentence(self) -> str:
        """Guarantee and spend in one line, each with everything an ε must stand beside."""
        return f"guaranteed {self.guarantee()}; spent of it {self.spent()}"

    def _terms(self) -> str:
        return f"{delta_text(self.delta)}) by the {self.accountant} accountant, {self.protection}"

    def to_json(self) -> dict[str, object]:
        facts = asdict(self) | {
            "accountant": str(self.accountant),
            "epsilon": self.epsilon,
            "unit": str(self.protection.unit),
            "relation": str(self.protection.relation),
            "guarantee": self.guarantee(),
            "spent": self.spent(),
        }
        del facts["protection"]
        if self.epsilon_paper is None:
            del facts["epsilon_paper"]
        return dict(sorted(facts.items()))

    @classmethod
    def from_json(cls, record: object) -> BundlePrivacy:
        """Read what :meth:`to_json` gave, derived fields left aside; InvalidInput for anything else."""
        if not isinstance(record, dict):
            raise InvalidInput("privacy facts", value=type(record).__name__, limit="a mapping")
        floats = ("budget_epsilon", "epsilon_exact", "epsilon_rdp", "delta", "noise_multiplier")
        kinds: dict[str, type] = dict.fromkeys(floats, float)
        kinds |= dict.fromkeys(("queries", "sites", "voters_per_site"), int)
        kinds |= dict.fromkeys(("accountant", "unit", "relation", "ledger_head", "study", "codec"), str)
        kinds |= dict.fromkeys(_SENTENCES, str)
        kinds |= {name: float for name in ("epsilon", "epsilon_paper") if name in record}
        given = checked_fields(record, kinds)
        for derived in (*_SENTENCES, "epsilon"):
            given.pop(derived, None)
        try:
            protection = Protection(unit=Unit(given.pop("unit")), relation=Relation(given.pop("relation")))
            return cls(**{**given, "accountant": AccountantName(given["accountant"]), "protection": protection})
        except ValueError as error:
            raise InvalidInput("privacy facts", limit="a known unit, relation and accountant") from error


@dataclass(frozen=True, slots=True)
class Libraries:
    """Versions of what the student was trained with, as the metadata names them."""

    monai: str
    pytorch: str
    numpy: str
    nibabel: str

    def __post_init__(self) -> None:
        for name in ("monai", "pytorch", "numpy", "nibabel"):
            if not re.fullmatch(r"[0-9][0-9A-Za-z.+-]{0,63}", getattr(self, name)):
                raise InvalidInput(f"version of {name} in a bundle", value=getattr(self, name)[:64], limit="a version")

    @classmethod
    def here(cls) -> Libraries:
        """Those of this process."""
        return cls(
            monai=monai.__version__,
            pytorch=str(torch.__version__),
            numpy=np.__version__,
            nibabel=nibabel.__version__,
        )


def checked_figures(figures: object) -> dict[str, float]:
    """Measured figures by name, as they stand in the metadata."""
    if not isinstance(figures, Mapping) or len(figures) > MAX_FIGURES:
        raise InvalidInput("figures of a bundle", limit=f"at most {MAX_FIGURES}, by name")
    for name, value in figures.items():
        check_text(name, what="name of a bundle's figure")
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise InvalidInput(f"figure {name} of a bundle", value=str(value)[:32], limit="a finite number")
    return {name: float(value) for name, value in figures.items()}
