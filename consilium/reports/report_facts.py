"""Defines the facts of the demo's report.

Refuses other controls than :data:`CONTROLS`.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from types import MappingProxyType

from common.config import Study
from common.data.dataset import Problem
from common.errors import InvalidInput
from common.ledger.spending import Spending
from common.measured_gain import ONE_RUN, GainVerdict, MeasuredGain, Score, case_mean, over_best
from consilium.reports.report_pictures import Picture
from server.study.consent_text import BatchRoster

SIMULATION = "simulation"
"""Name of every simulated study. The name is part of the consent text, whose hash is the study's id."""

CONTROLS: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "zero_code": ("Zero code", "every label decoded from the zero code, as if no hospital had answered"),
        "shuffled_codes": ("Shuffled codes", "the same noisy answers, assigned to the wrong volumes"),
        "public_only": ("Public only", "self-training: public volumes with a network's own labels, without any answer"),
    }
)
"""By name in ``report.json``, each control's title on the page and a description of its labels."""


@dataclass(frozen=True, slots=True)
class NamedScore:
    """A teacher's name and Dice."""

    name: str
    score: Score


@dataclass(frozen=True, slots=True)
class CaseDice:
    """The student's Dice on one test case: mean, and each structure's; NaN for a structure in neither map."""

    name: str
    mean: float
    per_class: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class DaemonFact:
    """One process of the demo's federation: its role and its process id."""

    role: str
    pid: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SiteFact:
    """Facts about one hospital for the report.

    Attributes:
        name: Its name.
        pool: Its patient pool.
        patients: Number of patients.
        codes_sent: Number of codes it sent.
        epsilon_spent: ε spent by its pool, by the study's accountant, δ, unit and relation.
        patient: Lines on one patient's ε, if the teachers were trained with differential privacy; otherwise empty.
    """

    name: str
    pool: str
    patients: int
    codes_sent: int
    epsilon_spent: float
    patient: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ReportFacts:
    """All facts of a report.

    Attributes:
        study: The study.
        spending: Its budget, and the part that was spent according to the ledger.
        queries: Number of answers.
        voters: Teachers summed in a release, over all sites.
        teachers: Score of each teacher.
        ensemble: Score of all teachers together, without noise.
        mean_shape: Score of the mean public label map.
        student: Score of the student.
        controls: Score of each control; None if it could not be trained.
        decoded_labels: Score of the pseudo-labels against the demo's true label maps; None without them.
        daemons: Processes of the federation.
        refused_node: Evidence that an unregistered node was refused.
        sites: The hospitals.
        releases: Roster and number of queries of each batch.
        seconds: Duration of each stage.
        run_seconds: Duration of the stages within the study's run.
        pictures: Pictures.
        ledger_head: Hash of the ledger's newest row.
        ledger_rows: Rows of the ledger.
        version: Version of Consilium.
        seeds: Seeds by purpose.
        finished: Date on the page.
        known: For synthetic data, a sentence on what the hospitals know that public data do not show; otherwise empty.
        student_ece: The student's expected calibration error over voxels of structures.
        cases_used: Cases that were used.
        left_out: Cases that were left out.
        test_cases: The student's Dice on each test case.

    Raises:
        InvalidInput: If the controls are not those of :data:`CONTROLS`.
    """

    study: Study
    spending: Spending
    queries: int
    voters: int
    teachers: tuple[NamedScore, ...]
    ensemble: Score
    mean_shape: Score
    student: Score
    controls: Mapping[str, Score | None]
    decoded_labels: Score | None
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
    finished: datetime | None = None
    known: str = ""
    student_ece: float = math.nan
    cases_used: int = 0
    left_out: tuple[Problem, ...] = ()
    test_cases: tuple[CaseDice, ...] = ()

    def __post_init__(self) -> None:
        if self.controls.keys() != CONTROLS.keys():
            raise InvalidInput("names of controls", value=sorted(self.controls), limit=f"exactly {', '.join(CONTROLS)}")

    @property
    def simulated(self) -> bool:
        """True if the study was simulated: one person held every party's data and keys, without a federation."""
        return self.study.name == SIMULATION

    @property
    def labels(self) -> tuple[str, ...]:
        """Names of the structures: the study's regions, or its labels without background."""
        return self.study.data.structures

    @property
    def mean_teacher(self) -> Score | None:
        """Mean of the teachers' scores, in which NaN is ignored; None without teachers."""
        if not self.teachers:
            return None
        columns = zip(*(teacher.score.per_class for teacher in self.teachers), strict=True)
        return Score(tuple(map(_mean, columns)), _mean([teacher.score.mean for teacher in self.teachers]))

    @property
    def measured_gain(self) -> MeasuredGain | None:
        """The student's gain over the best of its controls; None if no control was scored."""
        return over_best(self.student, self.controls)

    @property
    def bought(self) -> str:
        """A sentence on the student's gain over its best control.

        If the gain is proven, the sentence also states it as a share of the gain of all teachers together without
        noise.
        """
        found, most = self.measured_gain, case_mean(self.ensemble)
        if found is None:
            return "What the budget bought could not be measured: no control was scored."
        if not (math.isfinite(most) and most > found.other and found.word is GainVerdict.PROVEN):
            return found.sentence
        share = min(1.0, found.gain / (most - found.other))
        return f"{found.sentence} That is {share:.0%} of the way to all teachers together without noise."

    @property
    def behind(self) -> str:
        """A sentence that most single teachers are better than the student; empty if they are not."""
        scored = [one.score.mean for one in self.teachers if math.isfinite(one.score.mean)]
        better = sum(mean > self.student.mean for mean in scored)
        if 2 * better <= len(scored):
            return ""
        return f"But {better} of the {len(scored)} single teachers have a higher Dice than the student."

    @property
    def spread(self) -> str:
        """A sentence with the student's lowest and median Dice over test cases; empty without cases."""
        cases = [case for case in self.student.cases if math.isfinite(case)]
        if not cases:
            return ""
        worst, median = min(cases), statistics.median(cases)
        return f"The student's Dice is {worst:.3f} on the worst of {len(cases)} test cases; the median is {median:.3f}."

    @property
    def worst_first(self) -> tuple[CaseDice, ...]:
        """The test cases, those with the lowest Dice first and those without Dice last."""
        return tuple(sorted(self.test_cases, key=lambda case: (math.isnan(case.mean), case.mean)))

    @property
    def certainty(self) -> str:
        """A sentence that says what the gain's interval covers, or that there is no interval."""
        return "There is no interval." if self.measured_gain is None or self.measured_gain.interval is None else ONE_RUN


def _mean(values: Sequence[float]) -> float:
    present = [value for value in values if math.isfinite(value)]
    return sum(present) / len(present) if present else math.nan
