"""What researchers may build on, by its own names; ``import consilium`` gives all of it (docs/api.md).

Loads numpy and the accountants, no torch and no Flower. Everything else in the packages may change with any release.
"""

from __future__ import annotations

from common.codecs.base import Codec, fit_codec, load_codec
from common.config import Study, load_study, parse_study
from common.errors import ConsiliumError, InvalidInput
from common.privacy.accounting import (
    Guarantee,
    admits,
    compose,
    delta_exact,
    epsilon_exact,
    epsilon_paper,
    epsilon_pld,
    epsilon_rdp,
    guarantee,
    max_mu_squared,
)
from common.privacy.calibration import calibrate, epsilon_of_plan, noise_multiplier, queries_left
from common.privacy.gaussian import rounded_gaussian
from common.privacy.mechanism import (
    AccountantName,
    Budget,
    Mechanism,
    Protection,
    Relation,
    Unit,
    radius_int,
    sensitivity,
)
from common.privacy.quantise import clip, quantise, within
from common.privacy.release import noisy_sum
from common.privacy.training import Neighbours, Sampling, TrainingEvent, epsilon_of, plan_noise
from common.study_mechanism import study_mechanism
from server.ledger.verify import VerifyReport, verify
from server.planning.planner import Plan, plan
from server.planning.public_shapes import PublicShapes, read_shapes
from server.planning.recommend import Recommendation, Rehearsal, recommend

__all__ = [
    "AccountantName",
    "Budget",
    "Codec",
    "ConsiliumError",
    "Guarantee",
    "InvalidInput",
    "Mechanism",
    "Neighbours",
    "Plan",
    "Protection",
    "PublicShapes",
    "Recommendation",
    "Rehearsal",
    "Relation",
    "Sampling",
    "Study",
    "TrainingEvent",
    "Unit",
    "VerifyReport",
    "admits",
    "calibrate",
    "clip",
    "compose",
    "delta_exact",
    "epsilon_exact",
    "epsilon_of",
    "epsilon_of_plan",
    "epsilon_paper",
    "epsilon_pld",
    "epsilon_rdp",
    "fit_codec",
    "guarantee",
    "load_codec",
    "load_study",
    "max_mu_squared",
    "noise_multiplier",
    "noisy_sum",
    "parse_study",
    "plan",
    "plan_noise",
    "quantise",
    "queries_left",
    "radius_int",
    "read_shapes",
    "recommend",
    "rounded_gaussian",
    "sensitivity",
    "study_mechanism",
    "verify",
    "within",
]
