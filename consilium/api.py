"""Collects the public names that ``import consilium`` provides; docs/api.md shows them in use.

Only these names keep their parameters between minor versions; everything else in the packages may change with any
release. Importing loads numpy and the accountants, but no torch, no Flower and no SciPy optimiser.

The examples in the docstrings begin from ``import consilium as c``, ``import numpy as np``, ``Fraction`` and ``Path``;
a ``study`` of unit patient on a grid of 8 x 8 x 8 voxels with a quorum of three; four public ``images`` with their
label ``maps``; ``teachers`` for eight sites; and the path of a server's ``ledger``. The tests run the examples with
these values.
"""

from __future__ import annotations

from common.codecs.codec import Codec, fit_codec, load_codec
from common.config import CodecConfig, Study, TrainingConfig, load_study, parse_study
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
from consilium.memory.asked import Asked, ask
from consilium.memory.folder import read_cases
from consilium.memory.networks import Comparison, Controls, Network, compare, train_student
from server.ledger.verify import VerifyReport, verify
from server.planning.planner import Plan, plan
from server.planning.public_shapes import PublicShapes, read_shapes
from server.planning.recommend import Recommendation, Rehearsal, recommend

__all__ = [
    "AccountantName",
    "Asked",
    "Budget",
    "Codec",
    "CodecConfig",
    "Comparison",
    "ConsiliumError",
    "Controls",
    "Guarantee",
    "InvalidInput",
    "Mechanism",
    "Neighbours",
    "Network",
    "Plan",
    "Protection",
    "PublicShapes",
    "Recommendation",
    "Rehearsal",
    "Relation",
    "Sampling",
    "Study",
    "TrainingConfig",
    "TrainingEvent",
    "Unit",
    "VerifyReport",
    "admits",
    "ask",
    "calibrate",
    "clip",
    "compare",
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
    "read_cases",
    "read_shapes",
    "recommend",
    "rounded_gaussian",
    "sensitivity",
    "study_mechanism",
    "train_student",
    "verify",
    "within",
]
