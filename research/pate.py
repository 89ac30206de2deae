"""Repeats the experiment of Fay et al. 2021, with further controls and the true cost of the paper's noise.

`consilium bench pate` calls it, one seed for each job. It trains and scores these networks (*arms*), and stores each
when it is finished:

* the students of Algorithms 1 and 2 with the paper's noise, and their controls ``zero_code``, ``shuffled_codes`` and
  ``public_only``;
* the students of both algorithms trained on codes without noise;
* the teachers, one by one and as an ensemble;
* one network trained on all patients;
* DP-SGD with every layer clipped to norm 4: once with σ² = 6, as the paper prints it, and once with the noise that the
  exact accountant requires.

The result lists the paper's printed numbers next to ours. The experiment differs from the paper in four points. Codes
are computed from probabilities. The codec is fitted on public label maps of other cases. DP-SGD learns from the
teachers' patients alone. σ² is read as in Abadi et al., as a multiple of the clipping norm in every layer.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from typing import Any

import numpy as np

from client.records.journal import TrainingPlan
from client.training.private.settings import PrivateSettings
from client.training.private.strategies_3d import layer_parts
from common.config import DataConfig
from common.privacy.accounting import compose, epsilon_exact, epsilon_paper, epsilon_rdp
from common.privacy.figures import delta_text, epsilon_text, noise_text
from common.privacy.training import Neighbours, Sampling, TrainingEvent, epsilon_of
from common.study_mechanism import study_mechanism
from research.bench import Bench
from research.scores import named
from research.setting import Setting, settings_json, study_of
from research.stored_results import NumbersFile
from research.utility import PAPER_CLIP, PARTS, Report, run_part

ALGORITHMS = {"Algorithm 1": "paper-pca", "Algorithm 2": "paper-ae"}
PRINTED = {"Algorithm 2: student": 0.561, "mean_teacher": 0.547, "DP-SGD, printed noise": 0.53}
PRINTED_VARIANCE = 6
DP_SGD = ("DP-SGD, printed noise", "DP-SGD, planned noise")
_COST = "ε"


def measure_pate(bench: Bench, report: Report) -> dict[str, float]:
    """Return one seed's metrics by arm.

    Args:
        bench: Any setting of a recipe with one query per volume.
        report: Called with each arm's name.
    """
    values: dict[str, float] = {}
    for name, recipe in ALGORITHMS.items():
        at = bench.at(replace(bench.setting, recipe=recipe))
        for part in PARTS:
            for key, value in run_part(at, part, report).items():
                own = part != "bounds" or key.partition("|")[0] == "non_private"  # the other bounds ask no teacher
                values[f"{name}: {key}" if own else key] = value
    cell = NumbersFile(bench.kept.file("pate", [repr(bench.setting), bench.seed], ".json"))
    for arm in DP_SGD:
        if arm not in cell.values():
            report(arm)
            cell.add(dp_sgd(bench, arm))
    return values | cell.values()


def dp_sgd(bench: Bench, arm: str) -> dict[str, float]:
    """Train with DP-SGD on all private patients in one place, every layer clipped to 4.

    The paper does not print the number of DP-SGD's steps. The default recipe's number is used, or a teacher's if that
    is smaller.

    Args:
        bench: The setting and seed.
        arm: One of :data:`DP_SGD`.

    Returns:
        Metrics, and ε by neighbouring relation.
    """
    own, patients = bench.dp_sgd(None), sum(map(len, bench.roles.private))
    settings = replace(own, clip=PAPER_CLIP, per_layer=True, steps=min(own.steps, bench.setting.teacher.steps))
    plan = settings.plan(patients=patients) if arm == DP_SGD[1] else printed_plan(bench, settings, patients)
    costs = {
        f"{arm}|{_COST}|{relation}": epsilon_of(plan.event, delta=settings.delta, neighbours=relation)
        for relation in Neighbours
    }
    return bench.scored(arm, bench.central(settings, None, plan)) | costs


def printed_plan(bench: Bench, settings: PrivateSettings, patients: int) -> TrainingPlan:
    """Plan the training with the noise that the paper prints, charged at its true cost.

    σ² = 6 in every one of L layers is a noise multiplier of √(6/L) for the whole vector.

    Args:
        bench: The setting, whose teacher network has the L layers.
        settings: Sampling rate, steps, δ and relation.
        patients: Number of patients.
    """
    layers = len(layer_parts(bench.empty(bench.setting.teacher), PAPER_CLIP).names)
    noise = Fraction((PRINTED_VARIANCE / layers) ** 0.5).limit_denominator(1000)
    event = TrainingEvent(Sampling.POISSON, settings.rate, noise, settings.steps)
    cost = epsilon_of(event, delta=settings.delta, neighbours=settings.neighbours)
    return TrainingPlan(event, cost, settings.delta, settings.neighbours, patients)


def pate_summary(setting: Setting, data: DataConfig, rows: Sequence[dict[str, float]]) -> dict[str, Any]:
    """Return every arm's mean and deviation over seeds, by structure and in total, and the releases' cost.

    Args:
        setting: The setting.
        data: The study's labels and grid.
        rows: The values of each seed, by name.
    """
    arms = [key for key in rows[0] if "|" not in key and "@" not in key]
    found = []
    for arm in arms:
        row: dict[str, Any] = {"arm": arm, "printed": PRINTED.get(arm), "seeds": len(rows)}
        keys = {"mean": arm, **{name: named(arm, "dice", name) for name in data.structures}}
        for name, key in keys.items():
            values = [r[key] for r in rows if not np.isnan(r.get(key, np.nan))]
            spread = statistics.stdev(values) if len(values) > 1 else None
            row[name] = {"mean": statistics.fmean(values) if values else None, "sd": spread}
        costs = {str(relation): rows[0].get(f"{arm}|{_COST}|{relation}") for relation in Neighbours}
        found.append(row | ({"training_epsilon": costs} if arm in DP_SGD else {}))
    return {"setting": settings_json(setting), "arms": found, "costs": costs_of(setting, data)}


def costs_of(setting: Setting, data: DataConfig) -> dict[str, Any]:
    """Return each algorithm's noise on the mean, its ε by three accountants, and a bound on its information in bits.

    Args:
        setting: The setting.
        data: The study's labels and grid.
    """
    costs: dict[str, Any] = {}
    for name, recipe in ALGORITHMS.items():
        study = study_of(replace(setting, recipe=recipe), data)
        mechanism = study_mechanism(study, dimension=1)
        mu = compose([mechanism] * setting.queries, study.privacy.protection)
        voters = setting.hospitals * setting.voters
        costs[name] = {
            "noise_on_the_mean": mechanism.mean_noise_std(voters=voters),
            "paper": epsilon_paper(mu, setting.delta),
            "rdp": epsilon_rdp(mu, setting.delta),
            "exact": epsilon_exact(mu, setting.delta),
            # K codes in balls of radius R: power (K·R)² over σ², a bound for any number of coordinates
            "ceiling_bits": float(mu) * voters**2 / 8 / np.log(2),
        }
    return costs


def pate_markdown(document: dict[str, Any]) -> str:
    """Render the table, and below it the ε of the paper's noise and the bits that its answers can carry."""
    setting = document["setting"]
    structures = [
        key for key in document["arms"][0] if key not in ("arm", "printed", "seeds", "mean", "training_epsilon")
    ]
    lines = [
        f"K = {setting['hospitals']}, N = {setting['queries']}, claimed ε {epsilon_text(setting['epsilon'])}, "
        f"δ {delta_text(setting['delta'])}, unit hospital, relation replace-one; DP-SGD: unit patient",
        "",
        f"| arm | printed | Dice | {' | '.join(structures)} | ε by the exact accountant |",
        f"|{'---|' * (len(structures) + 4)}",
    ]
    for row in document["arms"]:
        cost = "–"
        if "training_epsilon" in row:
            cost = ", ".join(
                f"{epsilon_text(value, 3)} {relation}" for relation, value in row["training_epsilon"].items()
            )
        elif row["arm"].endswith(": student") or row["arm"].endswith(": shuffled_codes"):
            cost = epsilon_text(document["costs"][row["arm"].partition(":")[0]]["exact"], 3)
        cells = [_shown(row[name]) for name in ("mean", *structures)]
        printed = "–" if row["printed"] is None else f"{row['printed']:g}"
        lines.append(f"| {row['arm'].replace('_', ' ')} | {printed} | {' | '.join(cells)} | {cost} |")
    lines.append("")
    for name, cost in document["costs"].items():
        by = ", ".join(f"{epsilon_text(cost[how], 3)} by {how}" for how in ("paper", "rdp", "exact"))
        lines.append(
            f"{name}: noise {noise_text(cost['noise_on_the_mean'], 4)} on the mean code; ε {by}; all its answers "
            f"together carry at most {cost['ceiling_bits']:.0f} bits about the codes"
        )
    return "\n".join([*lines, ""])


def _shown(value: dict[str, float | None]) -> str:
    if value["mean"] is None:
        return "–"
    return f"{value['mean']:.3f}" + ("" if value["sd"] is None else f" ± {value['sd']:.3f}")
