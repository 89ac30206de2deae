"""Derives a study's noise mechanism and usual settings from its terms, and describes its guarantee in sentences.

Called by the planner, when a study is created, and for consent sheets and reports. Refuses a budget that is
too small for a single release.
"""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

from common.canonical import check_integer
from common.config import Study
from common.errors import InvalidInput
from common.privacy.accounting import epsilon_by, max_mu_squared
from common.privacy.calibration import calibrate
from common.privacy.checks import check_kind
from common.privacy.coalitions import against_whom, coalition_sentences, spare_sentence
from common.privacy.figures import delta_text, epsilon_text, percent_text
from common.privacy.mechanism import AccountantName, Budget, Mechanism, radius_int

USUAL_STUDIES = 2
"""Number of equal studies that a pool's budget allows, unless its first study states another budget."""


def usual_verdicts(quorum: int, *, sealed: bool) -> int:
    """Return the default number of hospitals that must find a new study's student better before it is released.

    Args:
        quorum: Least number of sites of a release.
        sealed: True for a sealed study.

    Returns:
        In a sealed study, more than half of the quorum, so that no hospital alone can release a student. In an open
        study, 0, because there the server tests every code.

    >>> usual_verdicts(5, sealed=True), usual_verdicts(5, sealed=False)
    (3, 0)
    """
    return quorum // 2 + 1 if sealed else 0


def usual_pool_epsilon(accountant: AccountantName, budget: Budget) -> float:
    """Return the default ε that a pool may spend in all studies together, if this study is the first to admit the pool.

    It suffices for the Σμ² of :data:`USUAL_STUDIES` equal studies.

    Args:
        accountant: The study's accountant.
        budget: The study's budget.

    Returns:
        The default ε; the study's own ε if the accountant cannot compute a larger one.

    Raises:
        InvalidInput: If no release fits the study's budget.
    """
    wanted = USUAL_STUDIES * max_mu_squared(accountant, budget)
    try:
        found = float(epsilon_text(epsilon_by(accountant, wanted, budget.analytic_delta)))
        while max_mu_squared(accountant, replace(budget, epsilon=found)) < wanted:
            found = float(epsilon_text(found * (1 + 1e-4)))
    except InvalidInput:
        return budget.epsilon
    return found


def pool_sentence(study: Study, *, yours: bool = False) -> str:
    """Return sentences on the lifetime budget of a newly admitted pool, and on the share that this study may spend.

    Args:
        study: The study.
        yours: True if they address the hospital that is asked for consent.

    Returns:
        The sentences.
    """
    privacy, life = study.privacy, study.pool_budget
    share = max_mu_squared(privacy.accountant, privacy.budget) / max_mu_squared(privacy.accountant, life)
    whose = "Your patient pool, if it is in no study yet," if yours else "A patient pool that was in no study before"
    stated = f"ε = {epsilon_text(life.epsilon)} ({privacy.accountant}), δ = {delta_text(life.delta)}"
    return (
        f"{whose} may spend {stated}, {privacy.protection} over its whole life, in all studies together. This study "
        f"may spend {'all' if share == 1 else percent_text(float(share))} of that, measured in Σμ²: the Σμ² of several "
        "studies add up, their ε do not."
    )


def study_mechanism(study: Study, *, dimension: int) -> Mechanism:
    """Return the noise mechanism of a study's releases, calibrated so that all its charges fit its budget.

    The server uses it for its releases. A site computes it from the study's terms and accepts no smaller noise.

    Args:
        study: The study's terms.
        dimension: Length l of a code.

    Returns:
        The mechanism, calibrated for the study's accountant.

    Raises:
        InvalidInput: If no noise that the sampler can draw fits the terms.

    >>> c.study_mechanism(study, dimension=4).voters_per_site
    5
    """
    privacy = check_kind("study", study, Study).privacy
    radius = radius_int(study.codec.radius)
    noise_std = calibrate(
        budget=privacy.budget,
        accountant=privacy.accountant,
        queries=privacy.charges,
        radius_int=radius,
        voters_per_site=privacy.voters_per_site,
        protection=privacy.protection,
    )
    return Mechanism(
        dimension=dimension,
        radius_int=radius,
        voters_per_site=privacy.voters_per_site,
        noise_std=noise_std,
        colluders=privacy.sealed_colluders,
    )


def mean_noise_std(study: Study, *, sites: int) -> float:
    """Return the planned standard deviation of the noise on each coordinate of the mean code of all voters.

    Args:
        study: The study.
        sites: Number of sites.

    Returns:
        Standard deviation in the code's units.

    Raises:
        InvalidInput: If ``sites`` is below 1.
    """
    voters = check_integer("sites", sites, least=1) * study.privacy.voters_per_site
    return study_mechanism(study, dimension=1).mean_noise_std(voters=voters)


def sealed_sentences(study: Study, *, sites: int = 0, spent: Fraction = Fraction(0)) -> tuple[str, ...]:
    """Return sentences on a sealed study: what each party sees, ε against each coalition, and the cost of repeated
    sums.

    Args:
        study: The study.
        sites: Number of sites that may answer, if it is known; at least the quorum is assumed.
        spent: Spent Σμ²; used if it is more than the budget allows.

    Returns:
        The sentences; empty for an open study.
    """
    privacy = check_kind("study", study, Study).privacy
    if not privacy.sealed:
        return ()
    most = max(check_integer("sites", sites, least=0), privacy.quorum)
    found = against_whom(
        max(max_mu_squared(privacy.accountant, privacy.budget), spent),
        *(privacy.budget, privacy.protection, privacy.accountant),
        least=privacy.quorum,
        most=most,
        colluders=privacy.colluders,
    )
    return (
        *coalition_sentences(found, least=privacy.quorum, most=most, colluders=privacy.colluders),
        spare_sentence(answers=privacy.planned_queries, spare=privacy.spare_draws),
    )
