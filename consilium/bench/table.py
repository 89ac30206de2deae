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

from consilium.bench.utility import ARMS, BOUNDS, Setting, settings_json
from server.controls import CONTROLS

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
    columns = {name: [row[name] for row in rows] for name in (*ARMS, "labels", *BOUNDS)}
    gains = {}
    for control in CONTROLS:
        mean, half = interval([s - c for s, c in zip(columns["student"], columns[control], strict=True)])
        gains[control] = {"mean": mean, "half_width": half}
    best = [max(row[control] for control in CONTROLS) for row in rows]
    mean, half = interval([s - b for s, b in zip(columns["student"], best, strict=True)])
    return {
        "schema": 1,
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
        "gain": {**gains, "best_control": {"mean": mean, "half_width": half}},
    }


def render(document: dict[str, Any], console: Console) -> None:
    """Print the table."""
    setting = document["setting"]
    console.print(
        f"recipe {setting['recipe']}, {setting['hospitals']} sites × {setting['voters']} voters, "
        f"ε = {setting['epsilon']:g}, δ = {setting['delta']:g}, unit {setting['unit']}, relation replace-one, "
        f"{document['seeds']} seeds"
    )
    table = Table(box=None, pad_edge=False)
    for header in ("", "Dice", "sd", "gain of the student (95 %)"):
        table.add_column(header, justify="left" if not header else "right")
    names = {
        "student": "student",
        "labels": "decoded labels, on their own volumes",
        "zero_code": "control: zero code",
        "shuffled_codes": "control: shuffled codes",
        "public_only": "control: public only",
        "non_private": "student without noise",
        "mean_teacher": "mean teacher",
        "ensemble": "ensemble of teachers",
        "all_data": "one network on all patients",
    }
    for key, name in names.items():
        dice, gain = document["dice"][key], document["gain"].get(key)
        sd = "–" if dice["sd"] is None else f"{dice['sd']:.4f}"
        table.add_row(name, f"{dice['mean']:.4f}", sd, "" if gain is None else _gain(gain))
    console.print(table)
    console.print(f"gain over the best control of each seed: {_gain(document['gain']['best_control'])}")


def _gain(gain: dict[str, float | None]) -> str:
    if gain["half_width"] is None:
        return f"{gain['mean']:+.4f} (one seed)"
    return f"{gain['mean']:+.4f} ± {gain['half_width']:.4f}"
