"""A utility benchmark's table: means over seeds, and what the student gains over each control, paired.

Intervals are Student's t at 95 % over the seeds' differences. Refuses nothing: with one seed there is no interval, and
the table says so.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table
from scipy.stats import t as student_t

from common.privacy.figures import delta_text, epsilon_text
from consilium.research.ablation import VARIANTS
from consilium.research.setting import ARMS, BOUNDS, CENTRAL, CENTRAL_PAPER, SHARED, Setting, mean_noise, settings_json
from server.planning.recommend import predicted_gain
from server.protocols.controls import CONTROLS

CONFIDENCE = 0.95


def interval(values: Sequence[float]) -> tuple[float, float | None]:
    """Mean of ``values`` and the half-width of its 95 % interval by Student's t; None with fewer than two."""
    array = np.asarray(values, dtype=np.float64)
    if len(array) < 2:
        return float(array.mean()), None
    spread = float(array.std(ddof=1)) / math.sqrt(len(array))
    return float(array.mean()), float(student_t.ppf((1 + CONFIDENCE) / 2, len(array) - 1)) * spread


def summary(setting: Setting, rows: Sequence[dict[str, float]]) -> dict[str, Any]:
    """The table as plain JSON: the setting, every seed's Dice, means, deviations, and paired gains over controls."""
    columns = {name: [row[name] for row in rows] for name in (*ARMS, SHARED, "labels", *BOUNDS) if name in rows[0]}
    gains = {name: paired(columns["student"], columns[name]) for name in (*CONTROLS, SHARED) if name in columns}
    best = max(CONTROLS, key=lambda name: float(np.mean(columns[name])))
    each = [max(row[control] for control in CONTROLS) for row in rows]
    return {
        "schema": 2,
        "setting": {**settings_json(setting), "relation": "replace-one", "accountant": "exact"},
        "seeds": len(rows),
        "dice": {
            name: {
                "each": values,
                "mean": float(np.mean(values)),
                "sd": float(np.std(values, ddof=1)) if rows[1:] else None,
            }
            for name, values in columns.items()
        },
        "gain": {
            **gains,
            "best_control": {**gains[best], "name": best},
            "best_control_of_each_seed": paired(columns["student"], each),
        },
        "predicted_gain": predicted_gain(mean_noise(setting), rounds=setting.rounds)
        if setting.recipe == "joint"
        else None,
    }


def ablation_summary(setting: Setting, rows: Sequence[dict[str, float]]) -> dict[str, Any]:
    """What leaving each idea out costs: means, and the recipe's gain over every variant, paired over seeds."""
    return {
        "schema": 1,
        "setting": {**settings_json(setting), "relation": "replace-one", "accountant": "exact"},
        "seeds": len(rows),
        "variants": {
            name: {
                "what": variant.what,
                "each": [row[name] for row in rows],
                "mean": float(np.mean([row[name] for row in rows])),
                "recipe_over_it": paired([row["recipe"] for row in rows], [row[name] for row in rows]),
            }
            for name, variant in VARIANTS.items()
        },
    }


def render_ablation(document: dict[str, Any], console: Console) -> None:
    """Print an ablation."""
    heading(document, console)
    table = Table(box=None, pad_edge=False)
    for header in ("", "Dice", "what the recipe has over it (95 %)"):
        table.add_column(header, justify="left" if not header else "right")
    for name, row in document["variants"].items():
        table.add_row(row["what"], f"{row['mean']:.4f}", "" if name == "recipe" else _gain(row["recipe_over_it"]))
    console.print(table)


def paired(ours: Sequence[float], theirs: Sequence[float]) -> dict[str, float | None]:
    """Mean and half-width of what ours has over theirs, seed by seed."""
    mean, half = interval([a - b for a, b in zip(ours, theirs, strict=True)])
    return {"mean": mean, "half_width": half}


def render(document: dict[str, Any], console: Console) -> None:
    """Print the table."""
    heading(document, console)
    table = Table(box=None, pad_edge=False)
    for header in ("", "Dice", "sd", "gain of the student (95 %)"):
        table.add_column(header, justify="left" if not header else "right")
    names = {
        "student": "student",
        "labels": "decoded labels, on their own volumes",
        "zero_code": "control: zero code",
        "shuffled_codes": "control: shuffled codes",
        "public_only": "control: public only",
        SHARED: "the release, offsets dealt to other volumes",
        "non_private": "student without noise",
        "mean_teacher": "mean teacher",
        "ensemble": "ensemble of teachers",
        "mean_teacher_m1": "mean teacher, one a site",
        "ensemble_m1": "ensemble, one teacher a site",
        "all_data": "one network on all patients",
        CENTRAL: "DP-SGD on all patients, unit patient",
        CENTRAL_PAPER: "the same, every layer clipped to 4",
    }
    for key, name in names.items():
        if key not in document["dice"]:
            continue
        dice, gain = document["dice"][key], document["gain"].get(key)
        sd = "–" if dice["sd"] is None else f"{dice['sd']:.4f}"
        table.add_row(name, f"{dice['mean']:.4f}", sd, "" if gain is None else _gain(gain))
    console.print(table)
    gain = document["gain"]
    console.print(f"gain over the best control ({names[gain['best_control']['name']]}): {_gain(gain['best_control'])}")
    console.print(f"gain over the best control of each seed: {_gain(gain['best_control_of_each_seed'])}")
    if document["predicted_gain"] is not None:
        console.print(f"gain the planner predicts: {document['predicted_gain']:+.3f}")
    low = gain["best_control"]["mean"] - (gain["best_control"]["half_width"] or 0)
    if document["seeds"] > 1 and low <= 0:
        console.print("Nothing gained that these seeds can tell from nothing: the student is its controls.")


def heading(document: dict[str, Any], console: Console) -> None:
    """Print the setting under which a table was measured, with its guarantee."""
    setting = document["setting"]
    console.print(
        f"recipe {setting['recipe']}, {setting['hospitals']} sites × {setting['voters']} voters, "
        f"ε = {epsilon_text(setting['epsilon'])}, δ = {delta_text(setting['delta'])}, unit {setting['unit']}, "
        f"relation replace-one, {document['seeds']} seeds"
    )


def _gain(gain: dict[str, float | None]) -> str:
    if gain["half_width"] is None:
        return f"{gain['mean']:+.4f} (one seed)"
    return f"{gain['mean']:+.4f} ± {gain['half_width']:.4f}"
