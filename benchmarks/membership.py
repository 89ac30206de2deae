"""Attacks networks by membership inference, with and without DP: by a loss threshold, and by a likelihood ratio.

``--models`` networks are trained, each on a random half of ``--examples`` records. By default a record is a noisy
vector of one of two classes, which a network can only memorise. With ``--data`` a record is a patient of an MSD dataset
at 2 mm, and the network is the 3D network of :data:`SMALL`, trained from random weights by the standard trainer and by
DP-SGD. Each network is attacked in turn. The likelihood ratio uses the other networks as shadow models (Carlini et al.
2022). It fits one Gaussian to the networks trained with the record and one to those trained without. The fitted value
is the logit of the true class' probability, or a patient's loss.

It reports the area under the ROC curve over all (network, record) pairs and the largest area that (ε, δ) allows. The
95 % interval comes from resampling whole networks. A failed attack is no proof of privacy: these are two attacks with
few shadow models, on one toy problem or one network.

    python -m benchmarks.membership --models 16 --epsilon 2
    python -m benchmarks.membership --models 8 --examples 40 --epsilon 8 --data data/Task04_Hippocampus
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable
from fractions import Fraction
from functools import partial
from pathlib import Path

import numpy as np
import torch
from scipy.stats import norm, rankdata

from client.records.journal import TrainingJournal, TrainingPlan
from client.training.contract import VoterData
from client.training.private.clipped_sums import silent
from client.training.private.engine import run
from client.training.private.settings import defaults
from client.training.private.teachers import train_privately
from client.training.standard import StandardTrainer
from common.config import DataConfig, TrainingConfig
from common.models.fit import one_hot, soft_dice_ce
from common.privacy.gaussian import rounded_gaussian
from common.privacy.training import MAX_MULTIPLIER, Neighbours, Sampling, TrainingEvent, plan_noise
from research.mlp import NetworkShape, forward
from research.mlp_strategies import MlpSgd
from research.roles import Cases, load_cases

DELTA = 1e-3
STEPS, RATE = 60, Fraction(1, 2)


def confidences(x: torch.Tensor, y: torch.Tensor, member: np.ndarray, epsilon: float | None, seed: int) -> np.ndarray:
    """Return log p/(1 − p) of the true class for every record, by a network trained on the members.

    Args:
        x: Records [n, d].
        y: One-hot classes [n, 2].
        member: Which records are trained on, bool [n].
        epsilon: ε; None for no privacy.
        seed: Seed of the initial weights.
    """
    rows = torch.from_numpy(np.flatnonzero(member))
    if epsilon is None:
        event = TrainingEvent(Sampling.POISSON, RATE, MAX_MULTIPLIER, STEPS)
    else:
        event = plan_noise(epsilon=epsilon, delta=DELTA, rate=RATE, steps=STEPS, neighbours=Neighbours.ADD_REMOVE)
    net = MlpSgd(NetworkShape((x.shape[1], 32, 2)), x[rows], y[rows], clip=1.0, rate=lambda s, t: 0.02, seed=seed)
    plan = TrainingPlan(event, epsilon or 8.0, DELTA, Neighbours.ADD_REMOVE, len(rows))
    run(net, TrainingJournal(plan), noise=silent if epsilon is None else rounded_gaussian)
    _, preacts = forward([w.detach() for w in net.weights], x, "relu")
    gap = (preacts[-1] * (2 * y - 1)).sum(dim=1)
    scores: np.ndarray = gap.double().numpy()
    return scores


VOLUMES = DataConfig(labels=("background", "anterior", "posterior"), spacing_mm=(2, 2, 2), grid=(24, 32, 24))
SMALL = TrainingConfig(channels=(4, 8, 16), steps=400)


def patient_scores(cases: Cases, member: np.ndarray, epsilon: float | None, seed: int) -> np.ndarray:
    """Return minus the loss of every patient, by a teacher trained on the members; see :func:`confidences`."""
    own, classes = cases[np.flatnonzero(member)], len(VOLUMES.labels)
    part = VoterData(own.images, own.labels, classes)
    if epsilon is None:
        model = StandardTrainer().train(part, SMALL, seed=seed).model
    else:
        settings = defaults("dp-sgd", epsilon=epsilon, delta=DELTA)
        model = train_privately(
            part, SMALL, settings, TrainingJournal(settings.plan(patients=len(own))), seed=seed
        ).model
    model.eval()
    targets = torch.tensor(np.stack([one_hot(labels, classes) for labels in cases.labels]))
    with torch.inference_mode():
        losses = [
            soft_dice_ce(model(torch.tensor(x, dtype=torch.float32)[None]), y[None])
            for x, y in zip(cases.images, targets, strict=True)
        ]
    scores: np.ndarray = -torch.cat(losses).double().numpy()
    return scores


def area(score: np.ndarray, member: np.ndarray) -> float:
    """Return the area under the ROC curve, computed from ranks.

    Args:
        score: Larger for records that look like members.
        member: Which records are members.

    >>> area(np.array([0.1, 0.9]), np.array([False, True]))
    1.0
    """
    ranks, inside = rankdata(score), member.sum()
    return float((ranks[member].sum() - inside * (inside + 1) / 2) / (inside * (~member).sum()))


def likelihood_ratio(logits: np.ndarray, members: np.ndarray) -> np.ndarray:
    """Return, for every network and record, the log density as a member minus that as a non-member.

    Args:
        logits: Scores [networks, records].
        members: Which records each network was trained on, of the same shape.
    """
    scores = np.zeros_like(logits)
    for target in range(len(logits)):
        others = np.arange(len(logits)) != target
        inside = np.where(members[others], logits[others], np.nan)
        outside = np.where(members[others], np.nan, logits[others])
        spread = np.sqrt(np.nanmean(np.nanvar(np.stack([inside, outside]), axis=1))) + 1e-9
        means = np.nanmean(inside, axis=0), np.nanmean(outside, axis=0)
        scores[target] = norm.logpdf(logits[target], means[0], spread) - norm.logpdf(logits[target], means[1], spread)
    return scores


def interval(score: np.ndarray, members: np.ndarray) -> tuple[float, float]:
    """Return the 95 % interval of the area, from resampling networks.

    Args:
        score: Scores [networks, records].
        members: Which records each network was trained on, of the same shape.
    """
    rng = np.random.default_rng(0)
    draws = [rng.integers(0, len(score), len(score)) for _ in range(400)]
    areas = [area(score[draw].ravel(), members[draw].ravel()) for draw in draws]
    low, high = np.quantile(areas, [0.025, 0.975])
    return round(float(low), 3), round(float(high), 3)


def most(epsilon: float) -> float:
    """Return the largest area under any (ε, δ) trade-off curve, by integrating the curve."""
    false = np.linspace(0, 1, 20_001)
    true = np.minimum.reduce(
        [np.ones_like(false), np.exp(epsilon) * false + DELTA, 1 - np.exp(-epsilon) * (1 - DELTA - false)]
    )
    return float(np.trapezoid(true, false))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=int, default=16)
    parser.add_argument("--examples", type=int, default=120)
    parser.add_argument("--epsilon", type=float, default=2.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--data", type=Path, help="an MSD dataset whose first patients are the records")
    options = parser.parse_args()
    torch.set_num_threads(1)
    rng = np.random.default_rng(options.seed)
    x = torch.tensor(rng.normal(size=(options.examples, 40)), dtype=torch.float32)
    y = torch.nn.functional.one_hot(torch.from_numpy(rng.integers(0, 2, options.examples)), 2).float()
    scores: Callable[[np.ndarray, float | None, int], np.ndarray] = partial(confidences, x, y)
    if options.data is not None:
        scores = partial(patient_scores, load_cases(options.data, VOLUMES)[np.arange(options.examples)])
    members = rng.random((options.models, options.examples)) < 0.5
    rows = []
    for epsilon in (None, options.epsilon):
        logits = np.stack([scores(member, epsilon, seed) for seed, member in enumerate(members)])
        for name, score in (("loss threshold", logits), ("likelihood ratio", likelihood_ratio(logits, members))):
            rows.append(
                {
                    "attack": name,
                    "epsilon": epsilon,
                    "auc": round(area(score.ravel(), members.ravel()), 3),
                    "interval": interval(score, members),
                    "at_most": None if epsilon is None else math.ceil(1000 * most(epsilon)) / 1000,
                }
            )
    unit = "record" if options.data is None else "patient"
    facts = {"delta": DELTA, "relation": "add-remove", "unit": unit, "models": options.models, "seed": options.seed}
    print(json.dumps({**facts, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
