"""What asking in rounds can be expected to give the student, from public numbers alone.

A round at noise σ a coordinate of the mean code, relative to the clipping norm C, leaves v_i σ² / (p_i + σ²) of the
variance v of what the teachers know beyond the public start along the directions of its tangent kernel, with p the
radius spread over them by water-filling; the next round spreads it anew over what is left. The spectrum is so much
alike over data splits that its octaves are constants here; what a share is worth in Dice was measured on one task, and
is scaled to another by what its public label maps say (:mod:`server.planning.public_shapes`). The interval's widths are
chosen so that they hold what was measured by then (docs/utility.md): a rule, no confidence level. Whether teachers know
more than a network of public data cannot be seen from label maps, and is not predicted. Of an appearance query the
numbers are few, so that nearly all of them comes through: what that is worth is what it was worth on one other task,
with an interval as wide as that task's rotations and more.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import sqrt

import numpy as np

from common.codecs.pca import water_fill
from common.config import JOINT_ROUNDS, STUDENT_RECIPE, TrainingConfig
from common.errors import InvalidInput
from common.privacy.calibration import calibrate
from common.privacy.mechanism import AccountantName, Budget, Mechanism, Protection, Unit, radius_int
from server.planning.public_shapes import PublicShapes

OCTAVES = (0.088, 0.067, 0.102, 0.128, 0.108, 0.091, 0.080, 0.077, 0.076, 0.072)
"""Shares of the variance in directions 1, 2, 3–4, 5–8 … 257–512; the rest lies beyond and is never sent."""

DICE_OF_ALL = 0.072
"""Dice over the best control if all of it were recovered: hippocampus, 120 patients, 30 public images."""

FIRST_PARTS = 0.75
"""The gain grows with this power of the share: what is recovered first is worth most.

Both numbers from two settings of five rotations in one round: .041 where 44 % is recovered, .058 where 75 % is."""

WORTH_ASKING = 0.02
"""A predicted gain below this is within what seeds and tasks differ by."""


UNSURE = 0.06
"""How far below the prediction a gain was found where almost nothing is recovered; less in proportion to what is."""

AT_MOST = 2.5
"""Times the prediction: other tasks gained so much more than hippocampi."""

HIPPOCAMPUS = PublicShapes(held=0.89, mean_shape=0.65)
"""The task that :data:`DICE_OF_ALL` was measured on, by ten of its label maps."""

HELD = 0.6
"""A codec that holds less of the public maps' own structures loses more than the teachers can say."""

PLACE = 0.15
"""Structures that the mean shape misses have no place of their own: a public start finds none of them."""

PAIRS = 4
"""Public cases with their labels beside which no gain was seen: four tumours gave Dice .59, all patients .65."""

LOOKS = 0.4
"""Where the mean shape has less Dice, asking for looks gave more: on hearts (.27 to .37), one rotation."""

LOOK_SPECTRUM = (0.307,) * 3 + (0.026,) * 3
"""Shares of the variance of three means and three spreads before anybody is asked: a structure in three channels, or
three in one."""

DICE_OF_LOOKS = 0.2
"""Dice over the best control if all looks were known: hearts, five rotations, +.19 ± .09 (+.11 to +.29)."""

ENOUGH = 0.8
"""More voters are not worth weaker teachers once this share is recovered."""

PATIENTS_A_TEACHER = 3
"""Below it teachers lose more than less noise brings, as long as :data:`SCARCE` is recovered."""

SCARCE = 0.4


MOST_VOTERS = 256
"""Voters a site are not searched beyond it."""


@dataclass(frozen=True, slots=True)
class Recommendation:
    """How to ask, before anything is spent: ``voters`` a site, and what is expected of a joint query.

    ``noise`` on every coordinate of the mean code, in clipping norms; ``gain`` in Dice over the best control, on this
    task where its public ``shapes`` are known and else on one like hippocampi, between ``low`` and ``high``. So many
    ``paired`` public cases have their labels, and every control has them too.
    """

    voters: int
    noise: float
    recovered: float
    gain: float
    shapes: PublicShapes | None = None
    paired: int = 0

    @property
    def low(self) -> float:
        if self.protocol == "appearance":
            return 0.4 * self.gain - UNSURE * (1 - self.recovered)
        return self.gain - UNSURE * (1 - self.recovered) * max(1.0, _scale(self.shapes))

    @property
    def high(self) -> float:
        if self.protocol == "appearance":
            return 2 * self.gain + UNSURE * (1 - self.recovered)
        return AT_MOST * self.gain + UNSURE * (1 - self.recovered)

    @property
    def protocol(self) -> str:
        """How to ask: :func:`protocol_for` what is public."""
        return protocol_for(None if self.shapes is None else self.shapes.mean_shape, paired=self.paired)

    @property
    def objection(self) -> str:
        """What public cases say against a joint query, whatever the noise; empty where nothing is."""
        if self.paired >= PAIRS:
            return f"{self.paired} public pairs alone teach a network most of what few patients a teacher can add"
        if self.shapes is None or self.protocol == "appearance":
            return ""
        if self.shapes.held < HELD:
            return f"the codec holds the public maps' structures with Dice {self.shapes.held:.2f} only"
        if self.shapes.mean_shape < PLACE:
            return f"the structures have no fixed place: their mean shape has Dice {self.shapes.mean_shape:.2f}"
        return ""

    @property
    def worth_asking(self) -> bool:
        return self.gain >= WORTH_ASKING and self.low > 0 and not self.objection

    @property
    def summary(self) -> str:
        """One sentence, with its numbers and what they stand on."""
        teachers = "one teacher a site" if self.voters == 1 else f"{self.voters} teachers a site on disjoint patients"
        asked, told, basis = (
            ("a joint query", "what teachers know beyond public data", "by the public label maps")
            if self.protocol == "joint"
            else ("an appearance query", "what structures look like", "as on hearts, by looks and not by the place")
        )
        how = "codec.joint = true" if self.protocol == "joint" else 'codec.protocol = "appearance"'
        what = (
            f"{asked} in {JOINT_ROUNDS} rounds ({how}), {teachers}: noise of {self.noise:.3g} C on "
            f"the mean code if one spent all, about {self.recovered:.0%} of {told} "
            f"comes through, Dice {self.gain:+.3f} ({self.low:+.3f} to {self.high:+.3f}) over the best control, "
            + ("as on the hippocampus task" if self.shapes is None else basis)
        )
        if not self.worth_asking:
            return f"{what}: {self.objection or 'perhaps nothing to be gained'}; do not spend this budget"
        if self.shapes is None:
            return f"{what}; for another task --label-maps says what its own shapes let expect"
        return f"{what}; whether teachers know more than public data shows only when they are asked"


def protocol_for(mean_shape: float | None, *, paired: int = 0) -> str:
    """``appearance`` where the mean public shape has little Dice, so that it says little of the place, and no public
    pair shows what lies there; else ``joint``, as where nothing is known."""
    return "appearance" if mean_shape is not None and mean_shape < LOOKS and not paired else "joint"


def training_for(protocol: str) -> tuple[TrainingConfig, TrainingConfig]:
    """How teachers and student are trained, as it was measured: teachers of a joint query begin from its public start,
    others from nothing."""
    if protocol == "joint":
        return TrainingConfig(steps=150, learning_rate=5e-3), STUDENT_RECIPE
    if protocol == "appearance":
        return TrainingConfig(steps=100), replace(STUDENT_RECIPE, steps=400)
    return TrainingConfig(), STUDENT_RECIPE


def recommend(
    *,
    budget: Budget,
    accountant: AccountantName,
    protection: Protection,
    hospitals: int,
    patients: int | None = None,
    colluders: int | None = None,
    shapes: PublicShapes | None = None,
    paired: int = 0,
) -> Recommendation:
    """The recipe and the voters a site for a budget, of a consortium whose sites have ``patients`` each (None: many).

    Unit ``hospital``: one teacher, since m of them share one hospital's sensitivity. Unit ``patient``: the fewest
    voters that recover :data:`ENOUGH`, with :data:`PATIENTS_A_TEACHER` each; down to one patient a teacher only where
    less than :data:`SCARCE` is recovered otherwise. ``shapes``: of the task's public label maps; ``paired``: how many
    public cases have labels. All from public numbers. Charges nothing.
    """
    _check_count("hospitals", hospitals)
    _check_count("patients a site", 1 if patients is None else patients)
    _check_count("public pairs", paired + 1 if type(paired) is int else paired)

    def at(voters: int) -> Recommendation:
        noise = joint_noise(
            budget=budget,
            accountant=accountant,
            protection=protection,
            hospitals=hospitals,
            voters=voters,
            colluders=colluders,
        )
        known = Recommendation(
            voters, noise, recovered_share(noise), predicted_gain(noise) * _scale(shapes), shapes, paired
        )
        if known.protocol == "joint":
            return known
        share = recovered_share(noise, spectrum=LOOK_SPECTRUM)
        return replace(known, recovered=share, gain=DICE_OF_LOOKS * share)

    if protection.unit is Unit.HOSPITAL:
        return at(1)
    most = MOST_VOTERS if patients is None else min(MOST_VOTERS, patients)
    usual = max(1, most if patients is None else patients // PATIENTS_A_TEACHER)
    found = at(1)
    for voters in range(1, most + 1):
        found = at(voters)
        share = recovered_share(found.noise)  # of a joint query: looks would need fewer voters, and had these
        if share >= ENOUGH or (voters >= usual and share >= SCARCE):
            break
    return found


def joint_noise(
    *,
    budget: Budget,
    accountant: AccountantName,
    protection: Protection,
    hospitals: int,
    voters: int,
    colluders: int | None = None,
) -> float:
    """Noise on every coordinate of the mean code when one release spends the budget, in units of the clipping norm.

    ``colluders`` of a sealed sum, whose noise is drawn at the sites.
    """
    _check_count("hospitals", hospitals)
    bound = radius_int(1.0)
    noise_std = calibrate(
        budget=budget,
        accountant=accountant,
        queries=1,
        radius_int=bound,
        voters_per_site=voters,
        protection=protection,
    )
    mechanism = Mechanism(1, bound, voters, noise_std, colluders=colluders)
    return mechanism.noise_in_sum(hospitals) / bound / (hospitals * voters)


def recovered_share(noise: float, *, rounds: int = JOINT_ROUNDS, spectrum: Sequence[float] = ()) -> float:
    """The share of what teachers know beyond public data that a joint query can carry, in (0, 1).

    ``spectrum``: shares of its variance by direction, descending; a tangent kernel's unless given.

    ``noise``: standard deviation on every coordinate of the mean code if one release spent the budget, in units of the
    clipping norm; each of ``rounds`` has √rounds times that. Falls with noise, grows with rounds.
    """
    if not 0 < noise < 1e6:
        raise InvalidInput("noise on the mean code", value=noise, limit="above 0, below a million clipping norms")
    _check_count("rounds", rounds)
    shares = list(spectrum) or [OCTAVES[0]]
    for octave, share in enumerate(() if spectrum else OCTAVES[1:]):
        shares += [share / 2**octave] * 2**octave
    variance, left = rounds * noise**2, np.array(shares)
    for _ in range(rounds):
        left = left * variance / (water_fill(left, noise_std=sqrt(variance), power=1.0) + variance)
    return sum(shares) - float(sum(left.tolist()))


def predicted_gain(noise: float, *, rounds: int = JOINT_ROUNDS) -> float:
    """Dice the student of a joint query should have over its best control; see the module for what it stands on."""
    return float(DICE_OF_ALL * recovered_share(noise, rounds=rounds) ** FIRST_PARTS)


def _scale(shapes: PublicShapes | None) -> float:
    """How much more a task's codes can say beyond its mean shape than those of hippocampi."""
    return 1.0 if shapes is None else shapes.room / HIPPOCAMPUS.room


def _check_count(what: str, value: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise InvalidInput(what, value=value, limit="an integer from 1")
