"""The mechanism that a study's terms describe; what is computed from the terms stands in ``common/privacy``."""

from __future__ import annotations

from common.config import Study
from common.privacy.calibration import calibrate
from common.privacy.mechanism import Mechanism, radius_int


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
        colluders=privacy.colluders if privacy.sealed else None,
    )
