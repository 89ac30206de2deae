"""Derives a study's mechanism from its terms, and describes a sealed sum in words."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

from common.canonical import check_integer
from common.config import Study
from common.errors import InvalidInput
from common.privacy.accounting import epsilon_by, max_mu_squared
from common.privacy.calibration import calibrate
from common.privacy.coalitions import against_whom, coalition_sentences, spare_sentence
from common.privacy.figures import delta_text, epsilon_text, percent_text
from common.privacy.mechanism import AccountantName, Budget, Mechanism, radius_int

USUAL_STUDIES = 2
"""Equal studies that a pool has room for unless its first study says otherwise."""


def usual_verdicts(quorum: int, *, sealed: bool) -> int:
    """How many hospitals must find a new study's student better unless it says otherwise: in a sealed one most of the
    quorum, which is more than the colluders it states by default; none where every code is tested."""
    return quorum // 2 + 1 if sealed else 0


def usual_pool_epsilon(accountant: AccountantName, budget: Budget) -> float:
    """ε for life of a pool whose first study has this budget, unless it says otherwise.

    A pool has room for :data:`USUAL_STUDIES` equal studies, so the first one takes that part of its Σμ². InvalidInput
    for a study's budget that no release can be held to; the study's own ε where no larger one can be accounted for.
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
    """What a pool that this study is the first to admit may spend in its life, and how much of that the study takes."""
    privacy, life = study.privacy, study.pool_budget
    share = max_mu_squared(privacy.accountant, privacy.budget) / max_mu_squared(privacy.accountant, life)
    whose = "Your patient pool, if no study had it before," if yours else "A patient pool that no study had before"
    stated = f"ε = {epsilon_text(life.epsilon)} ({privacy.accountant}), δ = {delta_text(life.delta)}"
    return (
        f"{whose} may spend {stated}, {privacy.protection} in its life, over all studies together. This study may "
        f"spend {'all' if share == 1 else percent_text(float(share))} of that, in Σμ², which adds up where ε does not."
    )


def study_mechanism(study: Study, *, dimension: int) -> Mechanism:
    """Return the mechanism whose noise pays for all of a study's planned queries.

    The server releases with it. A site computes it from the study's terms and accepts no smaller noise.

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
    privacy = study.privacy
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
    """The planned noise on every coordinate of the mean code of all voters of ``sites`` sites, in the code's units."""
    voters = check_integer("sites", sites, least=1) * study.privacy.voters_per_site
    return study_mechanism(study, dimension=1).mean_noise_std(voters=voters)


def sealed_sentences(study: Study, *, sites: int = 0, spent: Fraction = Fraction(0)) -> tuple[str, ...]:
    """Who sees what in a sealed study, against whom which ε holds, and what the budget holds.

    Of the whole budget, whatever is asked, or of the Σμ² that was ``spent`` where that is more. ``sites``: how many may
    answer, where that is known; the quorum at least. Empty for an open study.
    """
    privacy = study.privacy
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
