"""Defines the facts that a bundle contains beside its weights: privacy facts, library versions, measured figures.

The server writes them when it exports a bundle. Sites read them from bundles that another party packed, so every value
is checked when the object is created. Values outside their ranges and unknown fields are refused.
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
    """The study's guarantee, and the part of it that was spent according to the ledger when the bundle was exported.

    Attributes:
        budget_epsilon: ε of the promised budget. All of it may still be spent under the same consent.
        epsilon_exact: ε spent, by the exact accountant.
        epsilon_rdp: ε spent, by Rényi DP.
        delta: δ at which every ε holds.
        protection: Unit and relation for which every ε holds.
        accountant: The accountant that decided the budget.
        noise_multiplier: Noise multiplier z of one release: the noise's standard deviation divided by the sensitivity.
        queries: Number of answers.
        sites: Number of sites.
        voters_per_site: Number of voters at each site.
        ledger_head: Hash of the ledger's signed head.
        study: Content hash of the study.
        codec: Content hash of the codec.
        epsilon_paper: ε spent, by eq (14) of Fay et al. 2021; required if ``accountant`` is ``paper``.

    Raises:
        InvalidInput: If a value is outside its range.
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
    """ε spent by eq (14) of Fay et al. 2021; required if ``accountant`` is ``paper``."""

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
        """ε spent, by the accountant that decided the budget."""
        by = {AccountantName.RDP: self.epsilon_rdp, AccountantName.PAPER: self.epsilon_paper}
        return by.get(self.accountant) or self.epsilon_exact

    @property
    def guaranteed(self) -> float:
        """ε that holds after all further releases: the larger of the budget's ε and the spent ε."""
        return max(self.budget_epsilon, self.epsilon)

    @property
    def spent_beyond(self) -> Fraction:
        """An upper bound on the spent Σμ² if the spent ε exceeds the budget's ε; otherwise 0."""
        if self.epsilon <= self.budget_epsilon:
            return Fraction(0)
        return max_mu_squared(self.accountant, Budget(self.epsilon, self.delta)) * (1 + Fraction(1, 2**50))

    def guarantee(self) -> str:
        """Return :attr:`guaranteed` with δ, accountant, unit and relation, in one line."""
        return f"(ε, δ) = ({epsilon_text(self.guaranteed)}, {self._terms()}"

    def spent(self) -> str:
        """Return the spent (ε, δ) and the number of answers, in one line.

        The spent ε includes charges for attempts that gave no answer.
        """
        return f"(ε, δ) = ({epsilon_text(self.epsilon)}, {self._terms()}, with {self.queries} answers"

    def sentence(self) -> str:
        """Return guarantee and spending in one line, each ε with δ, accountant, unit and relation."""
        return f"guaranteed {self.guarantee()}; spent of it {self.spent()}"

    def _terms(self) -> str:
        return f"{delta_text(self.delta)}) by the {self.accountant} accountant, {self.protection}"

    def to_json(self) -> dict[str, object]:
        """Return the facts and the derived fields as plain JSON."""
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
        """Read the facts that :meth:`to_json` wrote; derived fields are ignored.

        Args:
            record: The parsed JSON.

        Returns:
            The facts.

        Raises:
            InvalidInput: If a field is missing, unknown or outside its range.
        """
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
class LibraryVersions:
    """Versions of the libraries with which the student was trained. The bundle's metadata states them."""

    monai: str
    pytorch: str
    numpy: str
    nibabel: str

    def __post_init__(self) -> None:
        for name in ("monai", "pytorch", "numpy", "nibabel"):
            if not re.fullmatch(r"[0-9][0-9A-Za-z.+-]{0,63}", getattr(self, name)):
                raise InvalidInput(
                    f"version of {name} in a bundle",
                    value=getattr(self, name)[:64],
                    limit="a version number such as 1.4.0",
                )

    @classmethod
    def here(cls) -> LibraryVersions:
        """Return the versions of the libraries that this process has loaded."""
        return cls(
            monai=monai.__version__,
            pytorch=str(torch.__version__),
            numpy=np.__version__,
            nibabel=nibabel.__version__,
        )


def checked_figures(figures: object) -> dict[str, float]:
    """Return measured figures by name if they are valid, else raise InvalidInput.

    Args:
        figures: Names and finite numbers, at most :data:`MAX_FIGURES`.

    Returns:
        The figures as floats.

    Raises:
        InvalidInput: If there are too many, or a value is not a finite number.
    """
    if not isinstance(figures, Mapping) or len(figures) > MAX_FIGURES:
        raise InvalidInput("figures of a bundle", limit=f"a table of at most {MAX_FIGURES} names, each with its number")
    for name, value in figures.items():
        check_text(name, what="name of a bundle's figure")
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise InvalidInput(f"figure {name} of a bundle", value=str(value)[:32], limit="a finite number")
    return {name: float(value) for name, value in figures.items()}
