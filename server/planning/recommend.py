"""Predicts the student's gain from public numbers, and recommends a query protocol and a number of voters.

`consilium plan`, `consilium study init` and the dashboard call it. It refuses arguments outside their range, and
charges nothing. The prediction has two factors.

The first factor is the share of the teachers' knowledge that can be recovered from the noisy answers. It is computed.
Teachers' knowledge means here the difference between their predictions and those of the public start, a network trained
on public data alone. Let v_i be the variance of this difference along direction i of the public start's tangent kernel.
Answers are collected in rounds. In a round with noise of standard deviation σ on each coordinate of the mean code, the
variance v_i σ² / (p_i + σ²) remains unknown, where p_i is the variance of the code along direction i. The p_i add up to
the squared clipping norm. In each round they are distributed over the directions by water-filling of the variance that
remains. The spectrum v_i is so similar over data splits that constants are used for it: its sums over directions 1, 2,
3–4, 5–8 and so on (:data:`OCTAVES`). An appearance query, about image intensities, has so few coordinates that nearly
all of its information is recovered.

The second factor is how much the teachers know, which cannot be computed in advance. It is estimated from the best
source that is given:

* A rehearsal (:mod:`server.protocols.rehearsal`): stand-in teachers are trained on public cases, and their Dice on
  other public cases is compared with that of the control.
* Otherwise public label maps. They show by how much the Dice of a map after encoding and decoding exceeds that of the
  mean shape (:attr:`PublicShapes.room`). This difference is multiplied by the mean of the ratios in :data:`TASKS`,
  which were measured on other tasks. The interval is Student's prediction interval for one more task. It is usually too
  wide for a decision.
* Otherwise the gain that was measured on the hippocampus task.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import sqrt
from statistics import fmean

import numpy as np

from common.canonical import check_integer
from common.codecs.pca import water_fill
from common.config import JOINT_ROUNDS, MAX_PAIRS, STUDENT_RECIPE, Study, TrainingConfig
from common.errors import InvalidInput
from common.intervals import mean_interval, next_interval
from common.privacy.calibration import calibrate
from common.privacy.checks import check_kind
from common.privacy.figures import noise_text
from common.privacy.mechanism import AccountantName, Budget, Mechanism, Protection, Unit, radius_int
from common.protocol_terms import PLAIN, PROTOCOLS, GainFactors, choosing_line, suited, terms_of
from common.study_mechanism import study_mechanism
from server.planning.planner import MAX_HOSPITALS
from server.planning.public_shapes import PublicShapes

OCTAVES = (0.088, 0.067, 0.102, 0.128, 0.108, 0.091, 0.080, 0.077, 0.076, 0.072)
"""Share of the variance of the teachers' knowledge in directions 1, 2, 3–4, 5–8 … 257–512 of the tangent kernel.

The variance in all other directions counts as not recovered.
"""

DICE_OF_ALL = 0.095
"""Gain in Dice over the best control if the answers recovered all of the teachers' knowledge.

Measured on the hippocampus task with 120 patients and 30 public images.
"""

FIRST_PARTS = 0.62
"""Exponent of :func:`recovered_share` in the formula for the gain (:func:`predicted_gain`).

It is below 1, because the first directions contribute most.

This exponent and :data:`DICE_OF_ALL` are fitted to three studies with a query in four rounds, each measured on five
splits of the data. The gain in Dice was .065 at a recovered share of 51 %, .063 at 55 % and .085 at 82 %.
"""

WORTH_ASKING = 0.02
"""Smallest gain in Dice worth spending a budget on; smaller gains are within the differences between random seeds."""

OFF = 0.02
"""Half the width of the interval around :func:`predicted_gain`, in Dice. It is slightly more than the largest measured
deviation.
"""

TASKS = (0.48, 0.56, 0.67, 0.41, -0.01)
"""For each measured task: gain in Dice divided by (recovered share × :attr:`PublicShapes.room`), mean over its studies.

The tasks are hippocampi, hearts, tumours, the demo's phantoms and plain phantoms (docs/lab/utility-measured.md). On the
plain phantoms the public start knows as much as the teachers; label maps cannot show this.
"""

PAIRS = 4
"""From this number of public pairs (public images with label maps), no gain from the hospitals' answers is expected.

A network trained on four labelled tumours alone had a Dice of .59, one trained on all patients .65. With eight pairs,
the gain over the best control was within :data:`OFF` of 0 on tumours and hippocampi (docs/lab/utility-measured.md).
"""

SCATTERED = 0.08
"""If the Dice of the mean public shape (:attr:`PublicShapes.mean_shape`) is below this, the structures of the public
label maps have no common place.

A mirrored volume is then as plausible as the original, so the student is trained with mirrored volumes, too.

Among eight label maps it was 0 to .05 for tumours and .11 to .45 for hearts (20 random choices each).
"""

LOOKS = 0.4
"""If the Dice between public label maps and their mean shape (:attr:`PublicShapes.mean_shape`) is below this, an
appearance query (about image intensities) is recommended.

On hearts, where this Dice was .27 to .37, an appearance query gained more than a joint query about shapes. This was
measured on one split of the data.
"""

AHEAD = (0.35, 3.5)
"""Assumed range of the ratio of a student's gain to (recovered share × the stand-in teachers' lead in Dice).

The ratios of all measured settings lie in this range.
"""

ENOUGH = 0.8
"""If the answers recover at least this share of the teachers' knowledge (:func:`recovered_share`), more voters do not
help.

More voters lower the noise, but each teacher then has fewer patients, and that costs more Dice.
"""

NOT_REHEARSED = (
    "The gain over the given network is not known: every figure here was measured without one, and the better the "
    "network is, the less can be gained. To estimate the gain: `consilium plan --start BUNDLE --label-maps DIR --cases "
    "DIR`"
)
"""Note on the plan of a study whose networks begin from a network that the consortium supplies, without a rehearsal."""

REHEARSED = (
    "In the rehearsal, the public start and the stand-in teachers begin from the given network. The control is the "
    "better of two networks: the given one, and a student trained from it without answers"
)
"""Note on the plan of a study whose networks begin from a network that the consortium supplies, after a rehearsal."""

PATIENTS_A_TEACHER = 3
"""Fewest patients that a teacher should have, if the answers recover at least the share :data:`SCARCE`.

With fewer patients, the teachers lose more Dice than the lower noise of more voters gains.
"""

SCARCE = 0.4
"""If the answers recover less than this share of the teachers' knowledge beyond public data (:func:`recovered_share`),
:func:`recommend` also tries more voters, each with fewer than :data:`PATIENTS_A_TEACHER` patients.
"""


LEAST_CASES = 4
"""Fewest public cases on which a rehearsal compares stand-in teachers and control."""

MOST_VOTERS = 256
"""Largest number of voters per site that :func:`recommend` tries."""


@dataclass(frozen=True, slots=True)
class Rehearsal:
    """Result of a rehearsal, a trial of the protocol on public cases: Dice of stand-in teachers and of the control.

    The stand-in teachers are trained on other public cases in place of the hospitals' patients.

    Attributes:
        patients: Number of patients that each stand-in teacher was trained on.
        teachers: Mean Dice of the stand-in teachers on each case.
        control: Dice of the control on each case.

    Raises:
        InvalidInput: For fewer than four cases, lists of different lengths, or a Dice outside 0 to 1.

    >>> rehearsal = c.Rehearsal(3, teachers=(0.8, 0.82, 0.79, 0.81), control=(0.7, 0.71, 0.72, 0.7))
    >>> round(rehearsal.ahead[0], 4)
    0.0975
    """

    patients: int
    teachers: tuple[float, ...]
    control: tuple[float, ...]

    def __post_init__(self) -> None:
        check_integer("patients of a stand-in teacher", self.patients, least=1)
        for name in ("teachers", "control"):
            if not isinstance(getattr(self, name), list | tuple):
                raise InvalidInput(f"Dice of the {name} in a rehearsal", limit="a list of numbers")
            object.__setattr__(self, name, tuple(getattr(self, name)))
        if len(self.teachers) != len(self.control) or len(self.control) < LEAST_CASES:
            raise InvalidInput(
                "public cases of a rehearsal, a trial of the protocol with stand-in teachers",
                value=len(self.control),
                limit=f"at least {LEAST_CASES}, each with one Dice of the teachers and one of the control",
            )
        each = (*self.teachers, *self.control)
        if not all(isinstance(value, int | float) and 0 <= value <= 1 for value in each):
            raise InvalidInput("Dice of a public case", limit="a number from 0 to 1")

    @property
    def ahead(self) -> tuple[float, float]:
        """Mean Dice of the stand-in teachers minus that of the control, and half the width of its 95 % interval."""
        mean, half = mean_interval([t - c for t, c in zip(self.teachers, self.control, strict=True)])
        assert half is not None
        return mean, half


@dataclass(frozen=True, slots=True)
class Recommendation:
    """The recommended query protocol and number of voters, with the expected gain, before anything is spent.

    The expected gain is an estimate for this task if the task's public shapes or a rehearsal are known. Otherwise it is
    the gain that was measured on the hippocampus task.

    Attributes:
        voters: Recommended voters of each site.
        noise: Standard deviation of the noise on every coordinate of the mean code, in units of the clipping norm, if
            one release spent the whole budget.
        shapes: What the task's public label maps show; None if no label maps were given.
        paired: Number of the study's public pairs (public images with label maps).
        rehearsal: Result of a rehearsal with stand-in teachers; None if there was none.
        rounds: Number of rounds of the query.
        hospitals: Number of hospitals for which an existing study's gain was predicted (:func:`study_prospects`); None
            for a recommendation.

    >>> c.Recommendation(voters=5, noise=0.06).protocol
    'joint'
    """

    voters: int
    noise: float
    shapes: PublicShapes | None = None
    paired: int = 0
    rehearsal: Rehearsal | None = None
    rounds: int = JOINT_ROUNDS
    hospitals: int | None = None

    @property
    def protocol(self) -> str:
        """Name of the recommended query protocol."""
        return protocol_for(None if self.shapes is None else self.shapes.mean_shape, paired=self.paired)

    @property
    def prospects(self) -> GainFactors:
        """Measured facts about the recommended protocol, from which the planner predicts the gain."""
        found = terms_of(self.protocol).prospects
        assert found is not None  # only such protocols are recommended
        return found

    @property
    def recovered(self) -> float:
        """Share, from 0 to 1, of the teachers' knowledge beyond public data that the noisy answers recover."""
        return recovered_share(self.noise, rounds=self.rounds, spectrum=self.prospects.spectrum)

    @property
    def gain(self) -> float:
        """Expected gain in Dice over the best control."""
        if self.rehearsal is not None:
            return self.recovered * sqrt(AHEAD[0] * AHEAD[1]) * self.rehearsal.ahead[0]
        return sum(self._ends) / 2

    @property
    def low(self) -> float:
        """Lower end of the interval around :attr:`gain`."""
        return self._ends[0]

    @property
    def high(self) -> float:
        """Upper end of the interval around :attr:`gain`."""
        return self._ends[1]

    @property
    def _ends(self) -> tuple[float, float]:
        if self.rehearsal is not None:
            mean, half = self.rehearsal.ahead
            each = [self.recovered * times * lead for times in AHEAD for lead in (mean - half, mean + half)]
            return min(each), min(max(each), 1 - fmean(self.rehearsal.control))
        if self.objection:
            return -OFF, OFF
        if self.shapes is not None:
            mean, half = next_interval(TASKS)
            scale = self.recovered * self.shapes.room
            return scale * (mean - half), scale * (mean + half)
        gain = predicted_gain(self.noise, rounds=self.rounds)
        return gain - OFF, gain + OFF

    @property
    def objection(self) -> str:
        """Reason against asking the hospitals unless a rehearsal shows a gain; empty if there is no such reason."""
        if self.rehearsal is None and self.paired >= PAIRS:
            return (
                f"a network trained on {self.paired} public labelled cases already knows most of what teachers of few "
                "patients can add"
            )
        return ""

    @property
    def worth_asking(self) -> bool:
        """True if a gain is expected: :attr:`low` > 0, :attr:`high` ≥ :data:`WORTH_ASKING`, no :attr:`objection`."""
        return self.low > 0 and self.high >= WORTH_ASKING and not self.objection

    @property
    def summary(self) -> str:
        """One sentence with the prediction's numbers and their source."""
        teachers = "one teacher a site" if self.voters == 1 else f"{self.voters} teachers a site on disjoint patients"
        prospects, how = self.prospects, choosing_line(self.protocol)
        what = (
            f"{prospects.query} in {self.rounds} rounds ({how}), {teachers}: noise of {noise_text(self.noise, 3)} C "
            f"on the mean code if one release spent the whole budget. The answers recover about {self.recovered:.0%} "
            f"of {prospects.knowledge}. "
            f"Expected gain in Dice over the best control: {self.gain:+.3f} ({self.low:+.3f} to "
            f"{self.high:+.3f}), {self._basis}"
        )
        if self.worth_asking:
            return what if self.rehearsal else f"{what}. For another task, add --label-maps and --cases"
        unsure = "there may be no gain"
        doubt = unsure if self.rehearsal or not self.shapes else f"{unsure}, which label maps alone cannot show"
        until = "" if self.rehearsal else " before a rehearsal on public cases with labels shows a gain (--cases)"
        return f"{what}. Do not spend this budget{until}: {self.objection or doubt}"

    @property
    def _basis(self) -> str:
        if self.rehearsal is not None:
            mean, half = self.rehearsal.ahead
            return (
                f"estimated by stand-in teachers of {self.rehearsal.patients} patients, whose Dice on "
                f"{len(self.rehearsal.control)} public cases was {mean:+.3f} ± {half:.3f} above the control's"
            )
        if self.objection:
            return "as measured on tumours and hippocampi with eight public labelled cases"
        if self.shapes is None:
            return "as measured on the hippocampus task"
        return "estimated from the public label maps"


def protocol_for(mean_shape: float | None, *, paired: int = 0) -> str:
    """Return the name of the protocol that suits a task.

    Args:
        mean_shape: Dice between public label maps and their mean shape; None if unknown.
        paired: Number of the study's public pairs (public images with label maps).

    Returns:
        The protocol for structures that do not overlap in the public label maps, if the mean shape has a Dice below
        :data:`LOOKS` and there are no public pairs; otherwise the protocol for structures that overlap.
    """
    return suited(placed=mean_shape is None or mean_shape >= LOOKS or paired > 0)


def training_for(protocol: str, *, mean_shape: float | None = None) -> tuple[TrainingConfig, TrainingConfig]:
    """Return the training recipes that were used when the protocol's gain was measured.

    Args:
        protocol: Name of a protocol; for an unknown name the default recipes are returned.
        mean_shape: Dice between public label maps and their mean shape; None if unknown.

    Returns:
        The recipe of a teacher and that of the student.
    """
    terms = PROTOCOLS.get(protocol, PROTOCOLS[PLAIN])
    scattered = terms.scattered if mean_shape is not None and mean_shape < SCATTERED else {}
    return replace(TrainingConfig(), **terms.teacher), replace(STUDENT_RECIPE, **{**terms.student, **scattered})


def recommend(
    *,
    budget: Budget,
    accountant: AccountantName,
    protection: Protection,
    hospitals: int,
    voters: int | None = None,
    patients: int | None = None,
    colluders: int | None = None,
    shapes: PublicShapes | None = None,
    paired: int = 0,
) -> Recommendation:
    """Recommend the query protocol and the number of voters for a budget. Nothing is charged.

    For unit ``hospital`` the recommendation is one voter, because one hospital can change the codes of all its voters.
    For unit ``patient`` more voters lower the noise. The recommendation is then the smallest number of voters that
    recovers the share :data:`ENOUGH` of the teachers' knowledge. Each voter keeps at least :data:`PATIENTS_A_TEACHER`
    patients, unless less than the share :data:`SCARCE` would be recovered in this way.

    Args:
        budget: ε and δ of the study.
        accountant: The accountant that decides.
        protection: Unit and relation.
        hospitals: Number of hospitals that answer.
        voters: Number of voters of each hospital, if it is not to be recommended.
        patients: Number of patients of each hospital; None if the number of voters is not limited by patients.
        colluders: Sites that may collude with the server in a sealed sum; None in an open study.
        shapes: What the task's public label maps show; None if no label maps were given.
        paired: Number of the study's public pairs (public images with label maps).

    Returns:
        The recommendation, computed from public numbers only.

    Raises:
        InvalidInput: If an argument is outside its range.

    >>> patient, budget = c.Protection(c.Unit.PATIENT, c.Relation.REPLACE_ONE), c.Budget(epsilon=8.0, delta=1e-5)
    >>> exact = c.AccountantName.EXACT
    >>> c.recommend(budget=budget, accountant=exact, protection=patient, hospitals=8, patients=15).voters
    5
    """
    check_kind("protection", protection, Protection)
    if shapes is not None:
        check_kind("shapes", shapes, PublicShapes)
    check_integer("hospitals", hospitals, least=1, most=MAX_HOSPITALS)
    check_integer("patients a site", 1 if patients is None else patients, least=1)
    check_voters(voters, patients=patients)
    check_integer("public pairs", paired, least=0, most=MAX_PAIRS)

    bound = radius_int(1.0)

    def at(voters: int) -> Recommendation:
        noise_std = calibrate(  # one release spends the whole budget
            budget=budget,
            accountant=accountant,
            queries=1,
            radius_int=bound,
            voters_per_site=voters,
            protection=protection,
        )
        mechanism = Mechanism(1, bound, voters, noise_std, colluders=colluders)
        return Recommendation(voters, mechanism.noise_in_sum(hospitals) / bound / (hospitals * voters), shapes, paired)

    if voters is not None or protection.unit is Unit.HOSPITAL:
        return at(1 if voters is None else voters)
    most = MOST_VOTERS if patients is None else min(MOST_VOTERS, patients)
    usual = max(1, most if patients is None else patients // PATIENTS_A_TEACHER)
    found = at(1)
    for number in range(1, most + 1):
        found = at(number)
        share = recovered_share(found.noise)  # that of a joint query, also for other protocols, as in the measurements
        if share >= ENOUGH or (number >= usual and share >= SCARCE):
            break
    return found


def check_voters(voters: int | None, *, patients: int | None) -> None:
    """Refuse more voters than patients at a site, because each voter needs patients of its own.

    Args:
        voters: Voters of each site; None if they are to be recommended.
        patients: Patients of each site; None if unknown.

    Raises:
        InvalidInput: If there are more voters than patients, or no patient.
    """
    if patients is not None:
        check_integer("patients a site", patients, least=1)
    if voters is not None and patients is not None and check_integer("voters a site", voters, least=1) > patients:
        raise InvalidInput(
            "voters a site",
            value=voters,
            limit=f"at most {patients}, the patients a site, because each voter needs patients of its own",
            remedy="choose fewer voters",
        )


def study_prospects(study: Study, *, hospitals: int) -> Recommendation | None:
    """Predict the gain of a study from its terms: its voters, rounds, public pairs, colluders and spare draws.

    `consilium plan --study`, `study init`, `study run` and the dashboard state this figure, so they agree.

    Args:
        study: The study.
        hospitals: Number of hospitals that answer; a smaller number than the quorum counts as the quorum.

    Returns:
        The prediction; None for a query protocol to which the planner's formula was not fitted.

    Raises:
        InvalidInput: If no noise that the sampler can draw fits the terms, or ``hospitals`` is negative.
    """
    check_integer("hospitals", hospitals, least=0)
    prospects, privacy = study.codec.terms.prospects, study.privacy
    if prospects is None or not prospects.fitted:
        return None
    sites, mechanism = max(hospitals, privacy.quorum), study_mechanism(study, dimension=1)
    in_a_round = mechanism.noise_in_sum(sites) / mechanism.radius_int / (sites * privacy.voters_per_site)
    return Recommendation(
        voters=privacy.voters_per_site,
        noise=in_a_round / sqrt(privacy.planned_queries),
        paired=study.codec.paired,
        rounds=privacy.planned_queries,
        hospitals=sites,
    )


def recovered_share(noise: float, *, rounds: int = JOINT_ROUNDS, spectrum: Sequence[float] = ()) -> float:
    """Return the share of the teachers' knowledge beyond public data that a query in rounds can recover.

    Args:
        noise: Noise standard deviation on every coordinate of the mean code if one release spent the budget, in units
            of the clipping norm. Each of ``rounds`` rounds has √rounds times that noise.
        rounds: Number of rounds.
        spectrum: Shares of the variance by direction, descending; by default those of a tangent kernel.

    Returns:
        A share between 0 and 1. It is smaller for more noise and larger for more rounds.

    Raises:
        InvalidInput: If the noise or the number of rounds is outside its range.
    """
    if not 0 < noise < 1e6:
        raise InvalidInput(
            "noise on the mean code", value=noise, limit="a number above 0 and below 1,000,000 clipping norms"
        )
    check_integer("rounds", rounds, least=1)
    shares = list(spectrum) or [OCTAVES[0]]
    for octave, share in enumerate(() if spectrum else OCTAVES[1:]):
        shares += [share / 2**octave] * 2**octave
    variance, left = rounds * noise**2, np.array(shares)
    for _ in range(rounds):
        left = left * variance / (water_fill(left, noise_std=sqrt(variance), power=1.0) + variance)
    return sum(shares) - float(sum(left.tolist()))


def predicted_gain(noise: float, *, rounds: int = JOINT_ROUNDS) -> float:
    """Return the expected gain in Dice of a joint query's student over its best control on the hippocampus task.

    The formula is fitted to measurements, which are stated at :data:`DICE_OF_ALL` and :data:`FIRST_PARTS`.

    Args:
        noise: Noise standard deviation on every coordinate of the mean code if one release spent the budget, in units
            of the clipping norm.
        rounds: Number of rounds.

    Returns:
        The gain; measured gains differed from it by less than :data:`OFF`.

    Raises:
        InvalidInput: If the noise or the number of rounds is outside its range.
    """
    return float(DICE_OF_ALL * recovered_share(noise, rounds=rounds) ** FIRST_PARTS)
