"""Reproduces DP-MAC's Tables 1 and 2 and Figures 1 and 3, cell by cell.

`consilium bench papers` calls it. A finished cell is a JSON file named by its data set, method, ε and seed; it is used
again as long as its recipe is the same. A stopped run continues, also within a cell. Tables and figures are made from
the files that exist, and state the number of seeds of each value. It refuses a selection that matches no cell.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Any

from common.errors import InvalidInput
from common.objects import write_atomically
from common.privacy.figures import epsilon_text, noise_text

if TYPE_CHECKING:
    from research.recipes import Cell
    from research.volumes import VolumeCell


@dataclass(frozen=True, slots=True)
class Tables:
    """The results.

    Attributes:
        rows: Rows of all tables, ready for JSON.
        text: The tables as Markdown.
    """

    rows: tuple[dict[str, Any], ...]
    text: str


def papers(
    data: Path,
    out: Path,
    *,
    seeds: int,
    only: str = "",
    changes: Mapping[str, str] | None = None,
    threads: int = 1,
    report_only: bool = False,
) -> Tables:
    """Train the missing cells, and make tables and figures of all finished ones.

    Args:
        data: Folder of the data sets.
        out: Folder of the results.
        seeds: Number of seeds.
        only: Only cells whose name contains this, for instance ``mnist/dp-mac/8``.
        changes: Fields of these cells' recipes to change; the results are other cells with names of their own.
        threads: CPU threads.
        report_only: Train nothing.

    Raises:
        InvalidInput: If no cell matches ``only``.
    """
    import torch
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    from research.recipes import all_cells
    from research.volumes import volume_cells, volume_markdown, volume_rows

    torch.set_num_threads(threads)
    known: list[Cell | VolumeCell] = [*all_cells(seeds), *volume_cells(seeds)]
    cells = [cell for cell in known if only in cell.id]
    if not cells:
        raise InvalidInput("cells to run", value=only, limit="part of a name such as mnist/dp-mac/8/0")
    if changes:
        cells = [_changed(cell, changes) for cell in cells]
        known += cells
    if not report_only:
        missing = [cell for cell in cells if _stored(out, cell.id, cell.to_json()) is None]
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        with Progress(*columns, console=Console(stderr=True)) as bar:
            task = bar.add_task("cells", total=len(cells), completed=len(cells) - len(missing))
            for cell in missing:
                bar.update(task, description=cell.id)
                result = json.dumps(_run(cell, data, out), indent=1, allow_nan=False)
                write_atomically(out / "cells" / f"{cell.id.replace('/', '_')}.json", (result + "\n").encode())
                _forget(cell, out)
                bar.advance(task)
    results = [found for cell in known if (found := _stored(out, cell.id, cell.to_json())) is not None]
    digits = [result for result in results if "curve" in result]
    rows, volumes = table(digits), volume_rows(result for result in results if "cases" in result)
    text = "\n".join([markdown(rows), *volume_markdown(volumes)])
    write_atomically(out / "papers.json", (json.dumps([*rows, *volumes], indent=1) + "\n").encode())
    write_atomically(out / "cells.json", (json.dumps(scores(results), indent=1) + "\n").encode())
    write_atomically(out / "papers.md", text.encode())
    figure1(digits, out / "figure1.png")
    figure3(digits, out / "figure3.png")
    return Tables((*rows, *volumes), text)


def _run(cell: Cell | VolumeCell, data: Path, out: Path) -> dict[str, Any]:
    from research.cells import run_cell
    from research.recipes import Cell
    from research.volumes import run_volume_cell

    if isinstance(cell, Cell):
        return run_cell(cell, data, _checkpoint(cell, out))
    return run_volume_cell(cell, data, out / "cache", _checkpoint(cell, out))


def _changed(cell: Cell | VolumeCell, changes: Mapping[str, str]) -> Cell | VolumeCell:
    from research.recipes import Cell, changed
    from research.volumes import changed_volume

    return changed(cell, changes) if isinstance(cell, Cell) else changed_volume(cell, changes)


def _checkpoint(cell: Cell | VolumeCell, out: Path) -> Path:
    """Return the file from which a stopped cell continues."""
    return out / "cells" / f"{cell.id.replace('/', '_')}.checkpoint"


def _forget(cell: Cell | VolumeCell, out: Path) -> None:
    """Delete checkpoint and journal of a finished cell."""
    checkpoint = _checkpoint(cell, out)
    for path in checkpoint.parent.iterdir():
        if path.name == checkpoint.name or (path.suffix == ".journal" and path.name.startswith(f"{checkpoint.stem}.")):
            path.unlink()


def _stored(out: Path, name: str, cell: dict[str, Any]) -> dict[str, Any] | None:
    """Return a finished cell of the same recipe, or None."""
    path = out / "cells" / f"{name.replace('/', '_')}.json"
    try:
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return found if found.get("cell") == json.loads(json.dumps(cell)) else None


def scores(results: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """List every finished cell with its seed, recipe and score, without its curve.

    Args:
        results: Finished cells, as :func:`research.cells.run_cell` returns them.

    Returns:
        One JSON-ready dict for each cell, sorted by name: what tables are rendered from.
    """
    kept = ({key: value for key, value in result.items() if key != "curve"} for result in results)
    return sorted(kept, key=lambda result: str(result["id"]))


def table(results: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return one row for each data set, method and ε: mean, deviation, seeds, and the paper's value.

    Args:
        results: Finished cells, as :func:`research.cells.run_cell` returns them.
    """
    from research.recipes import PUBLISHED

    groups: dict[tuple[str, str, float | None], list[dict[str, Any]]] = {}
    for result in results:
        cell = result["cell"]
        groups.setdefault((cell["data"], cell["name"], cell["epsilon"]), []).append(result)
    rows: list[dict[str, Any]] = []
    for (data, name, epsilon), members in groups.items():
        scores = [member["score"] for member in members]
        row: dict[str, Any] = {
            "data": data,
            "method": name,
            "epsilon": epsilon,
            "true_epsilon": members[0]["epsilon"],
            "delta": members[0]["delta"],
            "relation": members[0]["relation"],
            "noise_multiplier": members[0]["noise_multiplier"],
            "mean": statistics.fmean(scores),
            "sd": statistics.stdev(scores) if len(scores) > 1 else None,
            "seeds": len(scores),
            "epsilon_fixed_batches": members[0].get("epsilon_fixed_batches"),
            "gradient_ratios": members[0].get("gradient_ratios"),
            "published": PUBLISHED.get((data, name.removesuffix("-paper")), {}).get(epsilon),
            "recipe": members[0]["cell"]["recipe"],
        }
        for key in ("sampled_ece", "mean_ece", "sampled_nll", "mean_nll", "mean_accuracy"):
            if key in members[0]:
                row[key] = statistics.fmean(member[key] for member in members)
        rows.append(row)
    there = {(row["data"], row["method"], row["epsilon"]) for row in rows}
    rows += [
        {"data": data, "method": name, "epsilon": epsilon, "mean": None, "seeds": 0, "published": value}
        for (data, name), printed in PUBLISHED.items()
        for epsilon, value in printed.items()
        if (data, name, epsilon) not in there
    ]
    return rows


def markdown(rows: list[dict[str, Any]]) -> str:
    """Render the tables: test scores beside the paper's, calibration, and settings."""
    lines = ["unit example, relation add-remove, δ = 1e-5, Poisson sampling, PLD accountant, private PCA charged", ""]
    for data, what in (("mnist", "test accuracy"), ("usps", "½Σ(error²) a test image")):
        mine = [row for row in rows if row["data"] == data]
        if not mine:
            continue
        lines += [f"### {data}: {what}", "", "| method | ε | ours | seeds | published |", "|---|---|---|---|---|"]
        for row in sorted(mine, key=lambda r: (r["method"], r["epsilon"] is None, r["epsilon"] or 0)):
            epsilon = epsilon_text(inf if row["epsilon"] is None else row["epsilon"])
            true = row.get("true_epsilon")
            if true is not None and row["epsilon"] is not None and abs(true / row["epsilon"] - 1) > 0.01:
                epsilon = f"{epsilon} claimed, {epsilon_text(true, 3)} true"
            if row.get("epsilon_fixed_batches") is not None:
                epsilon += f" ({epsilon_text(row['epsilon_fixed_batches'], 4)} in fixed batches)"
            ours = "–" if row["mean"] is None else f"{row['mean']:.4f}" if data == "mnist" else f"{row['mean']:.2f}"
            if row.get("sd") is not None:
                ours += f" ± {row['sd']:.4f}" if data == "mnist" else f" ± {row['sd']:.2f}"
            published = "–" if row["published"] is None else f"{row['published']:g}"
            lines.append(f"| {row['method']} | {epsilon} | {ours} | {row['seeds']} | {published} |")
        lines.append("")
    calibrated = [row for row in rows if "sampled_ece" in row]
    if calibrated:
        lines += ["### DP-BBB: sampled predictions beside the mean network", ""]
        lines += ["| ε | ECE sampled | ECE mean | NLL sampled | NLL mean |", "|---|---|---|---|---|"]
        for row in sorted(calibrated, key=lambda r: r["epsilon"]):
            numbers = (row["sampled_ece"], row["mean_ece"], row["sampled_nll"], row["mean_nll"])
            lines.append(
                f"| {epsilon_text(row['epsilon'])} | " + " | ".join(f"{number:.4f}" for number in numbers) + " |"
            )
        lines.append("")
    ratios = [row for row in rows if row.get("gradient_ratios")]
    if ratios:
        lines += ["### DP-MAC: length of each layer's summed gradient over the last layer's, un-noised, first seed", ""]
        lines += ["| cell | layers, first to last |", "|---|---|"]
        for row in ratios:
            at = epsilon_text(inf if row["epsilon"] is None else row["epsilon"])
            found = ", ".join(f"{ratio:.1e}" for ratio in row["gradient_ratios"])
            lines.append(f"| {row['data']} {row['method']} {at} | {found} |")
        lines.append("")
    settled = [row for row in rows if "recipe" in row]
    if settled:
        lines += [
            "### settings",
            "",
            "| cell | batch | epochs | lr | clip | noise z | PCA z |",
            "|---|---|---|---|---|---|---|",
        ]
        for row in settled:
            recipe, epsilon = row["recipe"], epsilon_text(inf if row["epsilon"] is None else row["epsilon"])
            settings = [recipe["batch"], recipe["epochs"], f"{recipe['rate']:g}", f"{recipe['clip']:g}"]
            settings += [noise_text(row["noise_multiplier"], 4), recipe["pca_noise"] or "–"]
            lines.append(f"| {row['data']} {row['method']} {epsilon} | " + " | ".join(map(str, settings)) + " |")
        lines.append("")
    return "\n".join(lines)


def figure1(results: list[dict[str, Any]], path: Path) -> None:
    """Draw the paper's Figure 1: reconstruction error of the USPS autoencoders over epochs, DP-MAC beside DP-SGD."""
    levels = {1.0: "#7a4aa0", 2.0: "#2563a8", 4.0: "#b4552d", 8.0: "#3a7d44", None: "#333333"}
    _curves(results, path, data="usps", methods=("dp-mac", "dp-sgd"), levels=levels, what="½Σ error² a USPS image")


def figure3(results: list[dict[str, Any]], path: Path) -> None:
    """Draw the paper's Figure 3: error of the MNIST classifiers over epochs, with our DP-SGD and DP-BBB."""
    levels: dict[float | None, str] = {0.5: "#b4552d", 2.0: "#2563a8", 8.0: "#3a7d44"}
    _curves(results, path, data="mnist", methods=("dp-mac", "dp-sgd", "dp-bbb"), levels=levels, what="MNIST error")


def _curves(
    results: list[dict[str, Any]],
    path: Path,
    *,
    data: str,
    methods: tuple[str, ...],
    levels: Mapping[float | None, str],
    what: str,
) -> None:
    """Draw one panel for each method, with a curve over epochs for every ε.

    A solid line is the test error, in a band of one standard deviation over seeds; a dotted line is the training error.
    """
    import numpy as np
    from matplotlib.figure import Figure

    drawn = Figure(figsize=(3.7 * len(methods), 3.6), layout="constrained")
    axes = drawn.subplots(1, len(methods), sharey=True)
    for axis, method in zip(axes, methods, strict=True):
        for level, colour in levels.items():
            own = (data, method, level)
            runs = [r["curve"] for r in results if (r["cell"]["data"], r["cell"]["name"], r["cell"]["epsilon"]) == own]
            if not runs:
                continue
            length = min(len(run) for run in runs)
            epochs = [point["epoch"] for point in runs[0][:length]]
            test, train = (
                np.array([[point[key] for point in run[:length]] for run in runs]) for key in ("test", "train")
            )
            if data == "mnist":
                test, train = 1 - test, 1 - train
            at = epsilon_text(inf if level is None else level)
            axis.plot(epochs, test.mean(axis=0), color=colour, label=f"ε {at}, test ({len(runs)} seeds)")
            axis.plot(epochs, train.mean(axis=0), color=colour, linestyle=":", label=f"ε {at}, train")
            if len(runs) > 1:
                mean, sd = test.mean(axis=0), test.std(axis=0, ddof=1)
                axis.fill_between(epochs, mean - sd, mean + sd, color=colour, alpha=0.2, linewidth=0)
        axis.set_title(method)
        axis.set_xlabel("epoch")
        axis.set_yscale("log")
        axis.grid(color="#d9dee4", linewidth=0.6)
        if axis.get_legend_handles_labels()[1]:
            axis.legend(fontsize=7)
    axes[0].set_ylabel(what)
    path.parent.mkdir(parents=True, exist_ok=True)
    drawn.savefig(path, dpi=120)
