"""Explains a guarantee in sentences to people who are asked for consent.

The sentences say what the guarantee means for one unit and for groups of units, and whether δ is small enough.

Called for the consent sheet, the certificate and the reports. Every figure follows from a bound on Σμ² and the
settings, and is rounded up. The module draws, charges and measures nothing. Refuses NaN, infinite and negative figures.
"""

from __future__ import annotations

from fractions import Fraction
from math import floor, inf, nextafter, sqrt

from common.canonical import check_integer
from common.errors import InvalidInput
from common.privacy.accounting import Guarantee, delta_exact, guarantee
from common.privacy.checks import check_delta, check_rational
from common.privacy.figures import delta_text, epsilon_text, percent_text
from common.privacy.mechanism import SAMPLER_DELTA, AccountantName, Budget, Protection, Relation, Unit

GROUPS = (1, 2, 3, 4, 5)
"""Sizes of the groups of units whose ε is stated before consent and in the certificate."""


def guess_right_at_most(mu_squared: Fraction) -> float:
    """Return the largest probability with which anybody can guess which of two neighbouring worlds is the real one.

    Both worlds are equally likely beforehand. The bound is (1 + TV)/2 with TV = 2Φ(μ/2) − 1, the total variation
    distance of N(0, 1) and N(μ, 1), plus half of ``SAMPLER_DELTA`` for the noise sampler. The bound holds for every
    method of guessing.

    Args:
        mu_squared: Σμ² of the releases, at least 0.

    Returns:
        The probability, rounded up, at most 1; 1/2 if nothing was released.

    Raises:
        InvalidInput: If ``mu_squared`` is no rational or is negative.

    Source: Dong, Roth & Su 2022, Theorem 2.13 and eq (6); Neyman & Pearson 1933.

    >>> guess_right_at_most(Fraction(0)), round(guess_right_at_most(Fraction(1)), 3)
    (0.5, 0.691)
    """
    check_rational("mu^2", mu_squared, zero=True)
    if mu_squared == 0:
        return 0.5
    distance = delta_exact(nextafter(sqrt(mu_squared), inf), 0.0)
    return min(1.0, nextafter((1 + distance) / 2, inf) + float(SAMPLER_DELTA) / 2)


def guess_sentence(protection: Protection, mu_squared: Fraction, *, colluders: int | None, yours: bool = False) -> str:
    """Return the bound of :func:`guess_right_at_most` as a sentence.

    Args:
        protection: Unit and relation.
        mu_squared: Σμ² of all releases that the study may make.
        colluders: Number of hospitals whose noise shares the guesser may know in a sealed sum; None in an open study.
        yours: True if the sentence addresses the hospital that is asked for consent.

    Returns:
        The sentence.

    Raises:
        InvalidInput: If ``mu_squared`` is no rational or is negative.
    """
    hospital = "your hospital's" if yours else "a hospital's"
    if protection.unit is Unit.PATIENT:
        asked = f"one patient's data at {'your' if yours else 'a'} hospital were used, or had been exchanged for any "
        asked += "other patient's,"
    elif protection.relation is Relation.ZERO_OUT:
        asked = f"{hospital} codes were counted, or had been left out, counting as zero,"
    else:
        asked = f"{hospital} data were used, or had been exchanged for any other hospital's,"
    unknown = "the noise"
    if colluders is not None:
        some = "one hospital's share" if colluders == 1 else f"{colluders} hospitals' shares"
        unknown = f"the hospitals' noise{f' (of which they may know {some})' if colluders else ''}"
    right = percent_text(guess_right_at_most(mu_squared))
    return (
        f"A guess whether {asked} is right at most {right} of the time; a coin toss is right 50 % of the time. This "
        "holds even for somebody who sees all that this study ever releases and knows everything else except "
        f"{unknown}."
    )


def spent_sentence(mu_squared: Fraction, *, sealed: bool) -> str:
    """Return a sentence with an upper bound on how often a guess is right, given what was released so far.

    The guess is the one that :func:`guess_sentence` describes: whether one unit's data were used.

    Args:
        mu_squared: Σμ² of the releases so far.
        sealed: True for a sealed study. The masks of codes rest on ciphers, so the sentence then does not claim that
            the bound holds for unlimited computing power.

    Returns:
        The sentence.

    Raises:
        InvalidInput: If ``mu_squared`` is no rational or is negative.
    """
    power = "" if sealed else " and for unlimited computing power"
    return (
        "After what was released so far, such a guess is right at most "
        f"{percent_text(guess_right_at_most(mu_squared))} of the time. Both percentages are upper bounds for the "
        f"worst case over all data{power}; neither is a measurement."
    )


def group_guarantees(
    mu_squared: Fraction, budget: Budget, protection: Protection, accountant: AccountantName | str
) -> tuple[Guarantee, ...]:
    """Return the guarantee of every group size in :data:`GROUPS`, at the budget's δ.

    Args:
        mu_squared: Σμ² for one unit.
        budget: Its δ is used.
        protection: Unit and relation.
        accountant: Name of the accountant.

    Returns:
        One guarantee for each size from 1. The tuple ends before the first size that is outside the accountants' range.

    Raises:
        InvalidInput: If not even one unit has a guarantee.
    """
    found = []
    for size in GROUPS:
        try:
            found.append(guarantee(mu_squared, budget, protection, accountant, group=size))
        except InvalidInput:
            if size == 1:
                raise
            break
    return tuple(found)


def group_sentence(groups: tuple[Guarantee, ...]) -> str:
    """Return a sentence with the larger ε that holds for several units together.

    Args:
        groups: The result of :func:`group_guarantees`.

    Returns:
        The sentence.
    """
    first = groups[0]
    if first.protection.unit is Unit.PATIENT:
        who = "Patients who change together, or one person known at several hospitals,"
    else:
        who = "Hospitals whose data change together, because they share patients,"
    stated = [f"{epsilon_text(one.epsilon)} for {one.group}" for one in groups]
    beyond = "" if len(groups) == len(GROUPS) else f"; for more than {len(groups)} nothing useful is promised"
    return (
        f"{who} are hidden less well: ε = {', '.join(stated)}{beyond} ({first.accountant} accountant, "
        f"δ = {delta_text(first.delta)}, {first.protection})."
    )


def delta_rule(delta: float, *, unit: Unit) -> str:
    """Return a sentence that says for how many units n at most δ satisfies the usual rule δ ≤ 1/(10 n).

    Args:
        delta: δ, above 0 and below 1.
        unit: The unit that is counted.

    Returns:
        The sentence.

    Raises:
        InvalidInput: If δ is outside its range.
    """
    most = floor(1 / (10 * check_delta("delta", delta)))
    kept = f"for n up to {most:,} {unit}{'' if most == 1 else 's'}" if most else "for no number n of units"
    return f"δ = {delta_text(delta)} keeps the usual rule, δ at most 1/(10 n), {kept}."


def warn_about(delta: float, *, unit: Unit, units: int) -> str | None:
    """Return a warning if δ > 1/(10 n) for n units. Such a δ would allow a mechanism that discloses whole records.

    Args:
        delta: δ, above 0 and below 1.
        unit: The unit that is counted.
        units: Number n of units, at least 1.

    Returns:
        The sentence, or None if δ is small enough.

    Raises:
        InvalidInput: If an argument is outside its range.
    """
    check_delta("delta", delta)
    check_integer(f"{Unit(unit)}s", units, least=1)
    if delta <= 1 / (10 * units):
        return None
    whom = f"{Unit(unit)}{'' if units == 1 else 's'}"
    return (
        f"δ = {delta_text(delta)} is above 1/(10 · {units} {whom}), so the guarantee would allow that one of them is "
        "disclosed whole now and then; choose a smaller δ"
    )
