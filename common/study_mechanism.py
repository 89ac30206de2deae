"""What a study's terms describe: its mechanism, and a sealed sum in words; both are computed in ``common/privacy``."""

from __future__ import annotations

from common.canonical import check_integer
from common.config import OPEN, SEALED_SUM, Study
from common.privacy.accounting import max_mu_squared
from common.privacy.calibration import calibrate
from common.privacy.coalitions import against_whom, coalition_sentences, spare_sentence
from common.privacy.mechanism import HONEST_SITES, Mechanism, radius_int


def usual_aggregation(quorum: int) -> str:
    """How a new study adds up unless it says otherwise: sealed where a colluder and two honest sites answer."""
    return SEALED_SUM if quorum >= 1 + HONEST_SITES else OPEN


def study_mechanism(study: Study, *, dimension: int) -> Mechanism:
    """Noise for all planned queries under the gate accountant, and no less, on codes of ``dimension`` coordinates.

    The server releases by it and a site accepts no less noise: each computes it from the terms by itself.
    InvalidInput where no noise of the sampler's fits the terms.
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


def sealed_sentences(study: Study, *, sites: int = 0) -> tuple[str, ...]:
    """Who sees what in a sealed study, against whom which ε holds, and what the budget holds.

    Of the whole budget, whatever is asked. ``sites``: how many may answer, where that is known; the quorum at least.
    Empty for an open study.
    """
    privacy = study.privacy
    if not privacy.sealed:
        return ()
    most = max(check_integer("sites", sites, least=0), privacy.quorum)
    found = against_whom(
        max_mu_squared(privacy.accountant, privacy.budget),
        *(privacy.budget, privacy.protection, privacy.accountant),
        least=privacy.quorum,
        most=most,
        colluders=privacy.colluders,
    )
    return (
        *coalition_sentences(found, least=privacy.quorum, most=most, colluders=privacy.colluders),
        spare_sentence(answers=privacy.planned_queries, spare=privacy.spare_draws),
    )
