"""``consilium bench networks``: the networks a study may name, each trained for the same processor time.

A teacher learns the private patients' own labels, as if they were one hospital; a student learns the public images
from one teacher's answers, the default network's, the same for every student, without codec or noise: of small tumours
a codec of few maps would leave nothing to learn. How many steps the time buys is measured first, so that the learning
rate ends at nothing as in any training. What a network did when it is done is kept.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from common.config import DataConfig, TrainingConfig
from common.intervals import mean_interval
from common.models.fit import fit, one_hot, predict
from research.bench import Bench
from research.kept import Cell
from research.scores import named
from research.setting import Setting, settings_json

WIDTHS = {
    "unet": (16, 32, 64),
    "residual": (16, 32, 64),
    "dynunet": (8, 16, 32),
    "paper-unet": (8, 8, 16, 32, 64),
}
"""Feature maps a level: half as many where the finest level has the full resolution, whose steps cost so much more."""

ROLES = ("teacher", "student")
_TIMED = 4  # steps, after one that does not count


def measure_networks(bench: Bench, seconds: float, report: Callable[[str], None]) -> dict[str, float]:
    """One seed: Dice, steps and processor seconds of every network as teacher and as student."""
    cell = Cell(bench.kept.file("networks", [repr(bench.setting), seconds, bench.seed, WIDTHS], ".json"))
    patients = np.concatenate([site.images for site in bench.roles.private])
    labels = np.concatenate([site.labels for site in bench.roles.private])
    targets = np.stack([one_hot(label, bench.classes) for label in labels])
    taught: np.ndarray | None = None
    for role in ROLES:
        for network, channels in WIDTHS.items():
            arm = f"{network} {role}"
            if arm in cell.values():
                continue
            report(arm)
            recipe = replace(getattr(bench.setting, role), network=network, channels=channels)
            if role == "teacher":
                cell.add(_trained(bench, arm, recipe, patients, targets, seconds=seconds))
                continue
            taught = _answers(bench, patients, targets) if taught is None else taught
            cell.add(_trained(bench, arm, recipe, bench.images, taught, seconds=seconds))
    return cell.values()


def _answers(bench: Bench, patients: np.ndarray, targets: np.ndarray) -> np.ndarray:
    """What the setting's own teacher says of the public images."""

    def train() -> torch.nn.Module:
        model = bench.empty(bench.setting.teacher, seed=bench.seed)
        fit(model, patients, targets, bench.setting.teacher, seed=bench.seed)
        return model

    path = bench.kept.file("networks-teacher", [repr(bench.setting.teacher), bench.seed], ".pt")
    teacher = bench.kept.network(path, bench.empty(bench.setting.teacher), train)
    return np.stack([predict(teacher, image) for image in bench.images])


def _trained(
    bench: Bench, arm: str, recipe: TrainingConfig, images: np.ndarray, targets: np.ndarray, *, seconds: float
) -> dict[str, float]:
    marks: list[float] = []
    timed, note = replace(recipe, steps=_TIMED + 1), lambda _step, _loss: marks.append(time.process_time())
    fit(bench.empty(recipe), images, targets, timed, seed=bench.seed, on_step=note)
    recipe = replace(recipe, steps=max(1, round(seconds * _TIMED / (marks[-1] - marks[0]))))
    model, started = bench.empty(recipe, seed=bench.seed), time.process_time()
    fit(model, images, targets, recipe, seed=bench.seed)
    took = time.process_time() - started
    facts = {"steps": recipe.steps, "seconds": took, "weights": sum(each.numel() for each in model.parameters())}
    return bench.scored(arm, model) | {named(arm, "cost", name): float(value) for name, value in facts.items()}


def networks_summary(
    setting: Setting, data: DataConfig, seconds: float, rows: Sequence[dict[str, float]]
) -> dict[str, Any]:
    """Every network's mean and deviation over seeds, and the paired gap to the default network's, role by role."""
    found = []
    for role in ROLES:
        for network, channels in WIDTHS.items():
            arm, other = f"{network} {role}", f"{TrainingConfig().network} {role}"
            each = [row[arm] for row in rows]
            gaps = [row[arm] - row[other] for row in rows]
            line: dict[str, Any] = {"role": role, "network": network, "channels": channels, "each": each}
            line |= {"mean": statistics.fmean(each), "sd": statistics.stdev(each) if rows[1:] else None}
            line |= {"over_default": statistics.fmean(gaps), "gaps": gaps}
            for metric, names in (("dice", data.structures), ("cost", ("steps", "seconds", "weights"))):
                line |= {name: statistics.fmean(row[named(arm, metric, name)] for row in rows) for name in names}
            found.append(line)
    return {"setting": settings_json(setting), "cpu_seconds": seconds, "seeds": len(rows), "networks": found}


def networks_markdown(document: dict[str, Any]) -> str:
    """The table for people: over the default is paired over seeds, with Student's interval."""
    lines = [
        f"{document['cpu_seconds']:g} processor seconds a training, {document['seeds']} seeds",
        "",
        "| role | network | feature maps | weights | steps | Dice, mean ± deviation | over the default, ± 95 % |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in document["networks"]:
        spread = "" if row["sd"] is None else f" ± {row['sd']:.3f}"
        gap, half = mean_interval(row["gaps"])
        over = f"{gap:+.3f}" if half is None else f"{gap:+.3f} ± {half:.3f}"
        widths = ", ".join(map(str, row["channels"]))
        cells = (row["role"], row["network"], widths, f"{row['weights']:.0f}", f"{row['steps']:.0f}")
        default = row["network"] == TrainingConfig().network
        lines.append(f"| {' | '.join(cells)} | {row['mean']:.3f}{spread} | {'' if default else over} |")
    return "\n".join([*lines, ""])
