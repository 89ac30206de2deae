"""Summarises and prints a utility benchmark: means over seeds, and the student's paired gain over each control.

`consilium bench utility` uses it. Intervals are Student's t at 95 % over the seeds' differences; with one seed there is
no interval, and the table states so.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from client.adapting.methods import Method
from common.intervals import mean_interval
from common.metrics import mean_present
from common.privacy.figures import delta_text, epsilon_text
from research.ablation import VARIANTS
from research.scores import at_site
from research.setting import (
    ARMS,
    BOUNDS,
    CENTRAL,
    CENTRAL_PAPER,
    SHARED,
    SILOS,
    SILOS_MEAN,
    Setting,
    mean_noise,
    settings_json,
)
from server.planning.recommend import PAIRS, predicted_gain
from server.protocols.controls import CONTROLS

NAMES = {
    "student": "student",
    "labels": "decoded labels, on their own volumes",
    "zero_code": "control: zero code",
    "shuffled_codes": "control: shuffled codes",
    "public_only": "control: public only",
    SHARED: "the release, offsets dealt to other volumes",
    "non_private": "student without noise",
    "mean_predictions": "student of the teachers' mean predictions",
    "true_labels": "student of the public volumes' true labels",
    "mean_teacher": "mean teacher",
    "ensemble": "ensemble of teachers",
    "mean_teacher_m1": "mean teacher, one a site",
    "ensemble_m1": "ensemble, one teacher a site",
    "all_data": "one network on all patients",
    CENTRAL: "DP-SGD on all patients, unit patient",
    CENTRAL_PAPER: "the same, every layer clipped to 4",
    SILOS: "DP-SGD at each hospital near the hospitals' mean, mean over hospitals",
    SILOS_MEAN: "the mean of these networks' weights",
}
"""Name of each row in the table."""


def summary(setting: Setting, rows: Sequence[dict[str, float]]) -> dict[str, Any]:
    """Return the table as plain JSON.

    It contains the setting; the Dice of every seed with mean and standard deviation; the paired gains over the
    controls; the metrics of every structure; each hospital's gain over its own teacher; and the Dice of the networks
    that each hospital can adapt or train itself.

    Args:
        setting: The row of the table.
        rows: The values of each seed, by name.
    """
    columns = {name: [row[name] for row in rows] for name in (*ARMS, SHARED, "labels", *BOUNDS) if name in rows[0]}
    gains = {name: paired(columns["student"], columns[name]) for name in (*CONTROLS, SHARED) if name in columns}
    best = max(CONTROLS, key=lambda name: float(np.mean(columns[name])))
    each = [max(row[control] for control in CONTROLS) for row in rows]
    return {
        "schema": 3,
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
        "structures": structures(rows, columns),
        "sites": sites(rows),
        "home": home(rows),
        "gain": {
            **gains,
            "best_control": {**gains[best], "name": best},
            "best_control_of_each_seed": paired(columns["student"], each),
        },
        "predicted_gain": predicted_gain(mean_noise(setting), rounds=setting.rounds)
        if setting.recipe == "joint" and setting.paired < PAIRS
        else None,
    }


def structures(rows: Sequence[dict[str, float]], arms: Iterable[str]) -> dict[str, Any]:
    """Return every arm's metrics (:mod:`research.scores`) by structure: each seed's values and their mean."""
    found: dict[str, Any] = {}
    for name in rows[0]:
        arm, *rest = name.split("|")
        if rest and arm in arms:
            metric, structure = rest
            each = [row[name] for row in rows]
            values = {"each": [_finite(value) for value in each], "mean": _finite(mean_present(each))}
            found.setdefault(structure, {}).setdefault(arm, {})[metric] = values
    return found


def sites(rows: Sequence[dict[str, float]]) -> dict[str, Any]:
    """Return, for each hospital, its number of cases and the student's gain over the hospital's own teacher.

    The gain is measured on all held-out cases and, in seeds that hold out cases of this hospital, on those as well.
    """
    found: dict[str, Any] = {}
    for site in _named(rows, "cases"):
        teachers = [row[at_site("teacher", site)] for row in rows]
        students = [row["student"] for row in rows]
        found[site] = {
            "cases": mean_present([row[at_site("cases", site)] for row in rows]),
            "teacher": mean_present(teachers),
            "gain": paired(students, teachers),
        }
        own = [tuple(row.get(at_site(f"{arm} on its own", site)) for arm in ("student", "teacher")) for row in rows]
        scored = [(ours, theirs) for ours, theirs in own if ours is not None and theirs is not None]
        if scored:
            ours, theirs = zip(*scored, strict=True)
            found[site]["on_its_own"] = {"seeds": len(scored), "teacher": mean_present(theirs)} | {
                "gain": paired(ours, theirs)
            }
    return found


def home(rows: Sequence[dict[str, float]]) -> dict[str, Any]:
    """Return the Dice of each hospital's networks, as :mod:`research.home` measured it.

    Args:
        rows: The values of each seed, by name.

    Returns:
        For each hospital its number of patients and, for each way of adapting, the Dice and its difference to the
        network that the hospital trains alone. Empty if nothing of this was measured.
    """
    found: dict[str, Any] = {}
    for site in _named(rows, "home patients"):
        there = [row for row in rows if at_site("home patients", site) in row]
        columns = {
            way: [row[at_site(f"home {way}", site)] for row in there]
            for way in (*map(str, Method), "chosen")
            if at_site(f"home {way}", site) in there[0]
        }
        found[site] = {
            "patients": mean_present([row[at_site("home patients", site)] for row in there]),
            "seeds": len(there),
            "ways": {
                way: {"each": each, "mean": mean_present(each), "over_own": paired(each, columns[Method.OWN])}
                for way, each in columns.items()
            },
        }
    return found


def _named(rows: Sequence[dict[str, float]], what: str) -> list[str]:
    """Return the hospitals for which any seed has a number of this name."""
    names = dict.fromkeys(name.partition(at_site(what, ""))[2] for row in rows for name in row)
    return [name for name in names if name]


def ablation_summary(setting: Setting, rows: Sequence[dict[str, float]]) -> dict[str, Any]:
    """Return the mean of every variant, and the recipe's gain over it with an interval over the seeds' differences."""
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
    """Return mean and half-width of the 95 % interval of the differences, seed by seed.

    Args:
        ours: Values of one arm.
        theirs: Values of the other, in the same order.
    """
    mean, half = mean_interval([a - b for a, b in zip(ours, theirs, strict=True)])
    return {"mean": mean, "half_width": half}


def render(document: dict[str, Any], console: Console) -> None:
    """Print the table."""
    heading(document, console)
    table = Table(box=None, pad_edge=False)
    for header in ("", "Dice", "sd", "gain of the student (95 %)"):
        table.add_column(header, justify="left" if not header else "right")
    for key, name in NAMES.items():
        if key not in document["dice"]:
            continue
        if key == "public_only" and document["setting"]["paired"]:
            name = f"control: the {document['setting']['paired']} paired public cases alone"
        dice, gain = document["dice"][key], document["gain"].get(key)
        sd = "–" if dice["sd"] is None else f"{dice['sd']:.4f}"
        table.add_row(name, f"{dice['mean']:.4f}", sd, "" if gain is None else _gain(gain))
    console.print(table)
    gain = document["gain"]
    console.print(f"gain over the best control ({NAMES[gain['best_control']['name']]}): {_gain(gain['best_control'])}")
    console.print(f"gain over the best control of each seed: {_gain(gain['best_control_of_each_seed'])}")
    if document["predicted_gain"] is not None:
        console.print(f"gain the planner predicts: {document['predicted_gain']:+.3f}")
    low = gain["best_control"]["mean"] - (gain["best_control"]["half_width"] or 0)
    if document["seeds"] > 1 and low <= 0:
        console.print("Nothing gained that these seeds can tell from nothing: the student is its controls.")
    console.print(_structures_table(document["structures"]))
    console.print(_sites_table(document["sites"]))
    if document.get("home"):
        console.print(_home_table(document["home"]))


def _structures_table(document: dict[str, Any]) -> Table:
    """Return a table of every structure's Dice and HD95; in brackets the cases in which only one label map contains
    it.
    """
    table = Table(box=None, pad_edge=False, title="by structure: Dice, HD95 in mm (cases missed)", title_justify="left")
    table.add_column("")
    for structure in document:
        table.add_column(structure, justify="right")
    for arm, name in NAMES.items():
        cells = [_structure(arms[arm]) for arms in document.values() if arm in arms]
        if cells:
            table.add_row(name, *cells)
    return table


def _structure(metrics: dict[str, Any]) -> str:
    dice, distance = (metrics[name]["mean"] for name in ("dice", "hd95_mm"))
    missed = sum(metrics["missed"]["each"])
    texts = ["–" if value is None else f"{value:.{digits}f}" for value, digits in ((dice, 4), (distance, 1))]
    return ", ".join(texts) + (f" ({round(missed, 2):g})" if missed else "")


def _sites_table(document: dict[str, Any]) -> Table:
    """Return a table of the Dice of each hospital's own teacher, and of the student's gain over it."""
    table = Table(box=None, pad_edge=False, title="hospital by hospital: its own teacher", title_justify="left")
    for header in ("", "cases", "Dice", "gain of the student (95 %)", "on its own cases", "gain of the student"):
        table.add_column(header, justify="left" if not header else "right")
    for site, row in document.items():
        own = row.get("on_its_own")
        cells = ("", "") if own is None else (f"{own['teacher']:.4f}", _gain(own["gain"]))
        table.add_row(site, f"{row['cases']:g}", f"{row['teacher']:.4f}", _gain(row["gain"]), *cells)
    return table


def _home_table(document: dict[str, Any]) -> Table:
    """Return a table of each hospital's networks: the Dice of each way, and its difference to the own network."""
    ways = next(iter(document.values()))["ways"]
    table = Table(box=None, pad_edge=False, title="at home: Dice, and the difference to own", title_justify="left")
    for header in ("", "patients", *ways):
        table.add_column(header, justify="left" if not header else "right")
    for site, row in document.items():
        cells = [
            f"{one['mean']:.4f}" + ("" if way == Method.OWN else f" {_gain(one['over_own'])}")
            for way, one in row["ways"].items()
        ]
        table.add_row(site, f"{row['patients']:g}", *cells)
    return table


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def heading(document: dict[str, Any], console: Console) -> None:
    """Print the setting under which a table was measured, with its guarantee."""
    setting = document["setting"]
    console.print(
        f"recipe {setting['recipe']}, {setting['hospitals']} sites × {setting['voters']} voters, "
        f"ε = {epsilon_text(setting['epsilon'])}, δ = {delta_text(setting['delta'])}, unit {setting['unit']}, "
        f"relation replace-one, {document['seeds']} seeds"
    )
    if "scored" in document:
        console.print(f"scored on {document['scored']} cases{_counted(document.get('report'))}")


def _counted(report: dict[str, Any] | None) -> str:
    """Return how many reports of this dataset were made, as text."""
    if report is None:
        return ""
    same = report["recipes"][report["recipe"]]
    return f"; report {report['times']} of this dataset, {same} by this recipe ({report['recipe']})"


def _gain(gain: dict[str, float | None]) -> str:
    if gain["half_width"] is None:
        return f"{gain['mean']:+.4f} (one seed)"
    return f"{gain['mean']:+.4f} ± {gain['half_width']:.4f}"
