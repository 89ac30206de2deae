"""Compares the networks that a study may name, each trained for the same processor time.

`consilium bench networks` calls it. A teacher learns the private patients' own labels, as if they were one hospital. A
student learns a teacher's predictions on the public images. The predictions are not encoded by a codec, because a codec
fitted to few label maps loses too much detail. The number of steps that the time allows is measured first, so that the
learning rate ends at zero as in any training. Finished results are stored.
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
from research.scores import named
from research.setting import Setting, settings_json
from research.stored_results import NumbersFile

WIDTHS = {
    "unet": (16, 32, 64),
    "residual": (16, 32, 64),
    "dynunet": (8, 16, 32),
    "paper-unet": (8, 8, 16, 32, 64),
}
"""Feature maps at each level, by network. A network whose finest level has the images' full resolution has half as many
at each level, because its finest level costs more.
"""

ROLES = ("teacher", "student")
_TIMED = 4  # number of timed steps, after one that is not counted


def measure_networks(bench: Bench, seconds: float, report: Callable[[str], None]) -> dict[str, float]:
    """Return one seed's metrics, steps, seconds and number of weights of every network, as teacher and as student.

    Args:
        bench: The setting and seed.
        seconds: Processor seconds of each training.
        report: Called with each network's name.
    """
    cell = NumbersFile(bench.kept.file("networks", [repr(bench.setting), seconds, bench.seed, WIDTHS], ".json"))
    pooled = bench.roles.pooled
    targets = np.stack([one_hot(label, bench.classes) for label in pooled.labels])
    taught: np.ndarray | None = None
    for role in ROLES:
        for network, channels in WIDTHS.items():
            arm = f"{network} {role}"
            if arm in cell.values():
                continue
            report(arm)
            recipe = replace(getattr(bench.setting, role), network=network, channels=channels)
            if role == "teacher":
                cell.add(_trained(bench, arm, recipe, pooled.images, targets, seconds=seconds))
                continue
            taught = _answers(bench, pooled.images, targets) if taught is None else taught
            cell.add(_trained(bench, arm, recipe, bench.images, taught, seconds=seconds))
    return cell.values()


def _answers(bench: Bench, patients: np.ndarray, targets: np.ndarray) -> np.ndarray:
    """Return the predictions for the public images of a teacher trained by the setting's own recipe."""

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
    """Return for each role and network the Dice over seeds, its difference to the default network, and its cost.

    Args:
        setting: The setting.
        data: The study's labels.
        seconds: Processor seconds of each training.
        rows: The values of each seed.
    """
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
    """Render the result as a Markdown table; differences to the default have a paired 95 % interval."""
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
