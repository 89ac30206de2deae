"""Defines the demo report's content as frozen facts.

Refuses scores whose classes are not the study's, and controls of another name.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from fractions import Fraction
from types import MappingProxyType

from common.config import Study
from common.data.dataset import Problem
from common.errors import InvalidInput
from common.ledger.charges import Spend
from common.ledger.spending import Spending
from common.worth import ONE_RUN, GainWord, Worth, control_name, of_means, worth
from consilium.reports.report_pictures import Picture
from server.study.consent_text import BatchRoster

SIMULATION = "simulation"
"""The name of every simulated study: it stands in the consent text, whose hash is the study's id."""

CONTROLS: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "zero_code": ("Zero code", "every label decoded from the zero code, as if no hospital had answered"),
        "shuffled_codes": ("Shuffled codes", "the same noisy answers, dealt to the wrong volumes"),
        "public_only": ("Public only", "self-training: public volumes with labels of a network's own, no answer heard"),
    }
)
"""The controls by their name in ``report.json``: how the page calls them, and what their labels are."""


@dataclass(frozen=True, slots=True)
class DiceScore:
    """Dice on the test set: the mean, and one figure per structure in the order of the study's labels 1, 2, …

    A figure that could not be computed is NaN. ``cases``: every case's own mean, in one order for all. ``hd95_mm`` of
    every structure, over the cases in which both maps have it; empty where it was not taken.
    """

    mean: float
    per_class: tuple[float, ...]
    cases: tuple[float, ...] = ()
    hd95_mm: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "per_class", tuple(self.per_class))
        object.__setattr__(self, "cases", tuple(self.cases))
        for value in (self.mean, *self.per_class, *self.cases):
            if not math.isnan(value) and not 0 <= value <= 1:
                raise InvalidInput("Dice", value=value, limit="0 to 1, or NaN where there is none")


@dataclass(frozen=True, slots=True)
class NamedScore:
    """The Dice of one named teacher."""

    name: str
    score: DiceScore


@dataclass(frozen=True, slots=True, kw_only=True)
class PrivacyFacts:
    """What the study guarantees and what the run spent of it, read from the ledger.

    ``planned_epsilon`` is the budget, hence the guarantee; ``mu_squared`` is the Σμ² of the pool it cost most, whose
    ``epsilon_exact`` and ``epsilon_rdp`` were spent at ``delta`` for ``unit`` under ``relation``; ``accountant`` is
    the one that gates; where that is the paper's, ``epsilon_paper`` is given. ``noise_multiplier`` is z = σ/Δ of one
    release, ``voters`` the teachers summed in a release over all sites, ``clipping_norm`` is C; ``largest_roster``
    is how many sites the largest roster of all charges has, lost draws among them.
    """

    epsilon_exact: float
    epsilon_rdp: float
    mu_squared: Fraction
    delta: float
    unit: str
    relation: str
    accountant: str
    planned_epsilon: float
    noise_multiplier: float
    queries: int
    planned_queries: int
    voters: int
    clipping_norm: float
    epsilon_paper: float | None = None
    largest_roster: int = 0

    @property
    def epsilon_gate(self) -> float:
        """What was spent according to the accountant that gates the budget."""
        by = {"rdp": self.epsilon_rdp, "paper": self.epsilon_paper}
        return by.get(self.accountant) or self.epsilon_exact

    @property
    def epsilon_guaranteed(self) -> float:
        """What no unit loses more than: the budget, or what was spent, should that ever be more."""
        return max(self.planned_epsilon, self.epsilon_gate)


@dataclass(frozen=True, slots=True)
class DaemonFact:
    """One process of the federation."""

    role: str
    pid: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SiteFact:
    """One hospital: ``epsilon_spent`` is its pool's, by the gate accountant at the study's δ, unit and relation.

    ``patient`` says in words what a patient risks where the site's teachers were trained with a guarantee.
    """

    name: str
    pool: str
    patients: int
    codes_sent: int
    epsilon_spent: float
    patient: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ReportFacts:
    """Everything a report says. ``refused_node`` is the evidence that an unregistered node was turned away;
    ``decoded_labels`` scores the pseudo-labels against the demo's truth; ``controls`` has a score for every name in
    :data:`CONTROLS`, None for one that could not be trained; ``finished`` dates the page; ``known`` says what the
    hospitals know and public data does not, where the data were made so; ``student_ece`` is the student's expected
    calibration error in the voxels of structures; ``run_seconds`` are the stages within what ``seconds`` calls the
    study's run; ``cases_used`` of the data went somewhere, those ``left_out`` nowhere."""

    study: Study
    privacy: PrivacyFacts
    teachers: tuple[NamedScore, ...]
    ensemble: DiceScore
    mean_shape: DiceScore
    student: DiceScore
    controls: Mapping[str, DiceScore | None]
    decoded_labels: DiceScore | None
    daemons: tuple[DaemonFact, ...]
    refused_node: str
    sites: tuple[SiteFact, ...]
    releases: tuple[BatchRoster, ...]
    seconds: Mapping[str, float]
    run_seconds: Mapping[str, float]
    pictures: tuple[Picture, ...]
    ledger_head: str
    ledger_rows: int
    version: str
    seeds: Mapping[str, int]
    spacing_mm: tuple[float, float, float]
    finished: datetime | None = field(default=None)
    known: str = ""
    student_ece: float = math.nan
    cases_used: int = 0
    left_out: tuple[Problem, ...] = ()

    @property
    def spending(self) -> Spending:
        """What was spent of the study's budget, as what stands in words is worked out from it."""
        largest = max((self.privacy.largest_roster, len(self.sites), *(len(one.roster) for one in self.releases)))
        return Spending.of(self.study.privacy, Spend(self.privacy.mu_squared), largest_roster=largest)

    def __post_init__(self) -> None:
        for name in ("teachers", "daemons", "sites", "releases", "pictures", "spacing_mm", "left_out"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
        if self.controls.keys() != CONTROLS.keys():
            raise InvalidInput("controls", value=sorted(self.controls), limit=", ".join(CONTROLS))
        for name in ("seconds", "run_seconds", "seeds", "controls"):
            object.__setattr__(self, name, MappingProxyType(dict(getattr(self, name))))
        if len(self.spacing_mm) != 3 or not all(s > 0 for s in self.spacing_mm):
            raise InvalidInput("spacing_mm", value=self.spacing_mm, limit="three numbers above 0")
        for score in self._scores():
            if len(score.per_class) != len(self.labels):
                raise InvalidInput("classes of a score", value=len(score.per_class), limit=", ".join(self.labels))

    @property
    def simulated(self) -> bool:
        """Whether one person held every party's data and keys, and there was no federation."""
        return self.study.name == SIMULATION

    @property
    def labels(self) -> tuple[str, ...]:
        """Names of the structures: the study's regions, or its labels without background."""
        return self.study.data.structures

    @property
    def mean_teacher(self) -> DiceScore | None:
        """The teachers' figures averaged, NaN left out; None without teachers."""
        if not self.teachers:
            return None
        columns = zip(*(teacher.score.per_class for teacher in self.teachers), strict=True)
        return DiceScore(_mean([teacher.score.mean for teacher in self.teachers]), tuple(map(_mean, columns)))

    @property
    def worth(self) -> Worth | None:
        """The student's worth over the best of its controls; None where none was scored."""
        scored = {name: one for name, one in self.controls.items() if one is not None and math.isfinite(one.mean)}
        if not scored or not math.isfinite(self.student.mean):
            return None
        best = max(scored, key=lambda name: scored[name].mean)
        ours, theirs = self.student.cases, scored[best].cases
        pairs = list(zip(ours, theirs, strict=True)) if len(ours) == len(theirs) else []
        name = control_name(best)
        return worth(pairs, reference=name) or of_means(self.student.mean, scored[best].mean, reference=name)

    @property
    def bought(self) -> str:
        """What the budget bought in this run: the verdict with its figures, and how far that is of the way."""
        found, most = self.worth, self.ensemble.mean
        if found is None:
            return "What the budget bought could not be measured: no control was scored."
        if not (math.isfinite(most) and most > found.other and found.word is GainWord.PROVEN):
            return found.sentence
        share = min(1.0, found.gain / (most - found.other))
        return f"{found.sentence} That is {share:.0%} of the way to all teachers together without noise."

    @property
    def certainty(self) -> str:
        """What the interval counts, or that there is none."""
        return "There is no interval." if self.worth is None or self.worth.interval is None else ONE_RUN

    def _scores(self) -> list[DiceScore]:
        named = [teacher.score for teacher in self.teachers]
        optional = [score for score in (self.decoded_labels, *self.controls.values()) if score is not None]
        return [*named, self.ensemble, self.mean_shape, self.student, *optional]


def _mean(values: Sequence[float]) -> float:
    present = [value for value in values if math.isfinite(value)]
    return sum(present) / len(present) if present else math.nan
