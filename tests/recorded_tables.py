"""Writes the measured tables of the documents from the records in ``benchmarks/results``.

``python -m tests.recorded_tables`` writes them again. A table stands between ``<!-- recorded: NAME -->`` and
``<!-- end -->``, where NAME is a file in ``benchmarks/results`` without its ending. There are two kinds of records:

* A record of ``tables/`` has a head and rows. Numbers are shown with three digits. Its field ``how`` is ``measured``,
  or ``transcribed`` if the output is lost and the figures were copied from the page. The table states which.
* A name without a folder is a file of ``papers/``. It was written by ``consilium bench pate`` or ``bench networks``
  with ``--out``, or contains the measured rows of ``bench papers``' ``papers.json``.

:mod:`tests.results_table` writes the first table of README.md and docs/utility.md.
"""

from __future__ import annotations

import json
import math
import re
import statistics
from pathlib import Path
from typing import Any

from client.adapting.methods import MANY_PATIENTS, Method, usual
from common.privacy.figures import epsilon_text
from research import papers
from research.networks import networks_markdown
from research.pate import pate_markdown
from research.recipes import PUBLISHED
from research.volumes import volume_markdown

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"
MARK = re.compile(r"(<!-- recorded: ([A-Za-z0-9/-]+) -->\n).*?(<!-- end -->)", re.DOTALL)
DOCUMENTS = sorted((ROOT / "docs").rglob("*.md"))

ARMS = {
    "labels": "decoded labels, on their volumes",
    "student": "**student**",
    "zero_code": "control: zero code",
    "shuffled_codes": "control: shuffled codes",
    "public_only": "control: public only",
}
RECIPE = {
    "student": "**student**",
    "labels": "decoded labels, on their own volumes",
    "zero_code": "control: zero code",
    "public_only": "control: public only",
    "shuffled_codes": "control: shuffled codes",
    "shuffled_offsets": "the release, offsets dealt to other volumes (`--offsets`)",
    "non_private": "student without noise",
    "mean_teacher": "mean teacher",
    "ensemble": "ensemble",
    "mean_teacher_m1": "one teacher a site: mean teacher",
    "ensemble_m1": "one teacher a site: ensemble",
    "all_data": "one network on all patients",
}
SETTINGS = {
    "utility/hippocampus": {
        "hippocampus-hospital-8": "hospital, 1 voter a site, (8, 1e-3)",
        "hippocampus-patient-8": "patient, 5 voters a site, (8, 1e-5)",
        "hippocampus-patient-2": "patient, 5 voters a site, (2, 1e-5)",
    },
    "utility/hearts": {
        "hearts-hospital-8": "hospital, 1 voter a site, (8, 1e-3)",
        "hearts-patient-8": "patient, 3 voters a site, (8, 1e-5)",
        "hearts-patient-2": "patient, 8 voters a site, (2, 1e-5)",
    },
    "utility/tumours": {
        "tumours-hospital-8": "hospital, 1 voter a site, (8, 1e-3)",
        "tumours-patient-8": "patient, 2 voters a site, (8, 1e-5)",
        "tumours-patient-2": "patient, 5 voters a site, (2, 1e-5)",
    },
}
"""A table of several settings side by side → its files in ``utility/`` and their columns."""
STRATEGIES = {
    "dp-sgd": "DP-SGD",
    "dp-sgd-layers": "DP-SGD, a clip a layer",
    "dp-bbb": "DP-BBB",
    "dp-mac": "**DP-MAC**",
}
HEARD = {
    "length": "DP-MAC's mean gradient, the last block's = 1",
    "back_propagation": "back-propagation's, the last block's = 1",
    "cosine": "cosine of the two",
    "apart": "clipped sums: distance over back-propagation's length",
}
AT_HOME = {
    "hippocampus": "home/hippocampus",
    "hearts": "home/hearts",
    "tumours": "home/tumours",
}
"""Dataset → the start of the names of its records with figures of ``--home``."""

BARS = {
    "student": "student",
    "central_dp_sgd": "DP-SGD on all patients in one place",
    "silo_dp_sgd": "DP-SGD at each hospital near the mean (MR-MTL), mean over hospitals",
    "silo_dp_sgd_mean": "the mean of their weights",
    "all_data": "all patients, no privacy",
}
"""Networks with the same (ε, δ) for one patient with which the student is compared, and one without privacy."""

WAYS_MEASURED = {
    "forty of hippocampus": "home/hippocampus-40-development",
    **{task: f"{file}-development" for task, file in AT_HOME.items()},
}
"""Dataset → its record of every way to adapt, on development cases."""

PARTS = ("development", "report")
"""The parts of the cases, with which these names end."""


def figure(value: float, *, digits: int = 3, sign: bool = False) -> str:
    """Return a Dice as the documents write it: .804, +.046, −.007."""
    text = f"{abs(value):.{digits}f}".removeprefix("0") if abs(value) < 1 else f"{abs(value):.{digits}f}"
    return ("−" if value < 0 else "+" if sign else "") + text


def shown(cell: str | float | list[float]) -> str:
    """Return a text unchanged, a number with three digits, and a list of numbers separated by commas."""
    if isinstance(cell, list):
        return ", ".join(map(shown, cell))
    return cell if isinstance(cell, str) else figure(cell)


def gain(found: dict[str, float]) -> str:
    return f"{figure(found['mean'], sign=True)} ± {figure(found['half_width'])}"


def markdown(head: list[str], rows: list[list[str]]) -> str:
    lines = [f"| {' | '.join(cells)} |" for cells in (head, *rows)]
    return "\n".join([lines[0], f"|{'---|' * len(head)}", *lines[1:]])


def rotations(found: dict[str, Any]) -> str:
    """Return what ``consilium bench utility --out`` recorded, rotation by rotation."""
    count, gains = found["seeds"], found["gain"]
    head = ["Dice", "rotation 0", *map(str, range(1, count)), "mean"]
    rows = []
    for name, words in ARMS.items():
        mean = figure(found["dice"][name]["mean"])
        rows.append([words, *map(figure, found["dice"][name]["each"]), f"**{mean}**" if name == "student" else mean])
    controls = [found["dice"][name]["each"] for name in ("zero_code", "shuffled_codes", "public_only")]
    best = [max(each) for each in zip(*controls, strict=True)]
    each = [one - other for one, other in zip(found["dice"]["student"]["each"], best, strict=True)]
    signed = [figure(one, sign=True) for one in each]
    rows.append(["gain over the best of the rotation", *signed, gain(gains["best_control_of_each_seed"])])
    return markdown(head, rows)


def recipe(settings: dict[str, str]) -> str:
    """Return a task's settings side by side."""
    found = [_record(f"utility/{name}") for name in settings]
    rows = []
    for arm, words in RECIPE.items():
        cells = []
        for one in found:
            # With one voter for each site both are the same.
            known = arm if arm in one["dice"] else arm.removesuffix("_m1")
            if known not in one["dice"]:
                continue
            cell = figure(one["dice"][known]["mean"])
            if arm == "student":
                cell = f"**{cell}** (sd {figure(one['dice'][arm]['sd'])})"
            cells.append(f"{cell}, {gain(one['gain'][arm])}" if arm in one["gain"] else cell)
        if cells:
            assert len(cells) == len(found)
            rows.append([words, *cells])
    return markdown(["", *settings.values()], rows)


def at_home() -> str:
    """Return Dice of each hospital's own network, the student, and the network that `consilium site adapt` makes."""
    rows = []
    for task, file in AT_HOME.items():
        parts = {part: _home(f"{file}-{part}") for part in PARTS}
        for site, one in parts[PARTS[0]].items():
            way = usual(math.floor(one["patients"]), public=True)
            patients = figure(one["patients"], digits=1).removesuffix(".0")
            cells = [cell for part in PARTS for cell in _adapted(parts[part].get(site), way)]
            rows.append([task, site, patients, way.replace("-", " "), *cells])
    head = ["", "hospital", "private patients", "adapted by"]
    figures = [cell for part in PARTS for cell in (f"{part} cases: alone", "student", "adapted", "over alone")]
    return markdown([*head, *figures], rows)


def bars() -> str:
    """Return the student beside networks that DP-SGD trains at the same budget, on development cases."""
    rows = []
    for path in sorted((RESULTS / "bars").glob("*.json")):
        dice = _record(f"bars/{path.stem}")["dice"]
        rotations_run = str(len(dice["student"]["each"]))
        rows.append(
            [path.stem, rotations_run, *(figure(dice[arm]["mean"]) if arm in dice else "not run" for arm in BARS)]
        )
    return markdown(["data", "rotations", *BARS.values()], rows)


def many_at_home() -> str:
    """Return results of forty hospitals with three patients each: alone, by the student, and by each way to adapt."""
    rows = []
    for part in PARTS:
        hospitals = _home(f"home/hippocampus-40-{part}").values()
        for way in next(iter(hospitals))["ways"] if hospitals else ():
            dice = statistics.mean(one["ways"][way]["mean"] for one in hospitals)
            gains = [one["ways"][way]["over_own"]["mean"] for one in hospitals]
            over = [figure(of(gains), sign=True) for of in (statistics.mean, min, max)]
            ahead = f"{sum(each > 0 for each in gains)} of {len(gains)}"
            words = [f"{part} cases", "alone" if way == "own" else way.replace("-", " "), figure(dice)]
            rows.append([*words, *(("", "", "", "") if way == "own" else (*over, ahead))])
    head = ["scored on", "network", "mean Dice", "mean gain over alone", "least", "largest", "hospitals that gain"]
    return markdown(head, rows)


def ways_at_home() -> str:
    """Return for every way to adapt the mean gain over the hospital's own network, on development cases."""
    hospitals = {
        (task, many): [one["ways"] for one in _home(file).values() if (one["patients"] >= MANY_PATIENTS) is many]
        for task, file in WAYS_MEASURED.items()
        for many in (False, True)
    }
    there = {place: ways for place, ways in hospitals.items() if ways}
    head = [f"{task}, {len(ways)} of {'7 or more' if many else 'fewer than 7'}" for (task, many), ways in there.items()]
    rows = [
        [
            f"`{way}`",
            *(
                figure(statistics.mean(one[way]["over_own"]["mean"] for one in ways), sign=True)
                for ways in there.values()
            ),
        ]
        for way in Method
        if way is not Method.OWN
    ]
    return markdown(["mean gain over `own`", *head], rows)


def _home(name: str) -> dict[str, Any]:
    """Return the figures of ``--home`` by hospital; none without such a record."""
    return _record(name).get("home", {}) if (RESULTS / f"{name}.json").exists() else {}


def _adapted(one: dict[str, Any] | None, way: str) -> list[str]:
    if one is None:
        return ["not measured", "", "", ""]
    ways = one["ways"]
    return [*(figure(ways[each]["mean"]) for each in ("own", "student", way)), gain(ways[way]["over_own"])]


def _record(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
    return found


def codecs(found: dict[str, Any]) -> str:
    """Return what ``benchmarks.codec_fidelity`` recorded."""
    head = ["", "l", "planned noise σ/C", "mean shape", "decoded without noise", "decoded at σ"]
    rows = []
    for row in found["rows"]:
        dice = [figure(row[name]) for name in ("mean_shape", "no_noise", "noise")]
        variances = f"{figure(row['least_variance'], digits=2)}, {figure(row['median_variance'], digits=2)}"
        rows.append([f"`{row['codec']}`", str(row["dimension"]), str(row["planned_noise"]), *dice, variances])
    return markdown([*head, "variance of a coordinate in C²/l: least, median"], rows)


def private(found: dict[str, Any]) -> str:
    """Return what ``consilium bench private`` recorded: mean and deviation over seeds, paired gaps, a step's time."""
    rows = []
    for row in found["rows"]:
        gaps = [
            figure(statistics.fmean(row[name]), sign=True) if row["method"] != itself else "–"
            for name, itself in (("over_dp_sgd", "dp-sgd"), ("over_dp_sgd_layers", "dp-sgd-layers"))
        ]
        score = figure(row["mean"]) + ("" if row["sd"] is None else f" ± {figure(row['sd'])}")
        step = f"{figure(row['times_dp_sgd'], digits=1)} times"
        first = "public" if row["begun"] else "random"
        terms = [f"T {row['steps']}, z {figure(row['noise_multiplier'])}", str(len(row["seeds"]))]
        rows.append([first, STRATEGIES[row["method"]], *terms, score, *gaps, step])
    head = ["start", "strategy", "steps, noise", "seeds", "Dice", "over DP-SGD", "over its clip a layer"]
    return markdown([*head, "a step's processor time, DP-SGD's = 1"], rows)


def heard(found: dict[str, Any]) -> str:
    """Return from the same record how each block's gradient compares with back-propagation's, as means over seeds."""
    rows = []
    for begun, start in ((True, "public"), (False, "random")):
        cells = [cell["blocks"] for cell in found["cells"] if "blocks" in cell and cell["begun"] is begun]
        if not cells:
            continue
        for when, words in (("before", "before the training"), ("after", "after it")):
            blocks = list(zip(*(cell[when] for cell in cells), strict=True))
            for name, what in HEARD.items():
                each = [figure(statistics.fmean(one[name] for one in seeds), digits=2) for seeds in blocks]
                rows.append([f"{start}, {words}", what, *each])
    return markdown(["start", "", *(f"block {number}" for number in range(1, len(rows[0]) - 1))], rows)


def plain(found: dict[str, Any]) -> str:
    """Return a record of ``tables/``; if its figures were copied by hand, also their origin."""
    assert found["how"] in ("measured", "transcribed")
    assert all(found[key] for key in ("date", "commit", "command"))
    rows = [[shown(cell) for cell in row] for row in found["rows"]]
    assert {len(row) for row in rows} == {len(found["head"])}
    lines = markdown(found["head"], rows)
    if found["how"] == "measured":
        return lines
    origin = f"{found['command']}; in the documents since {found['commit']}, {found['date']}"
    return f"{lines}\n\n*Copied by hand, the output is gone: {origin}.*"


def digits(found: dict[str, Any]) -> str:
    """Return the cells of ``consilium bench papers`` with each seed's score: mean and deviation by method and ε."""
    places = {"mnist": 4, "usps": 2}
    groups: dict[str, dict[float | None, list[dict[str, Any]]]] = {}
    for cell in found["cells"]:
        of = cell["cell"]
        groups.setdefault(of["name"], {}).setdefault(of["epsilon"], []).append(cell)
    rows = []
    for name, levels in groups.items():
        for epsilon, cells in sorted(levels.items(), key=lambda level: (level[0] is None, level[0] or 0)):
            scores = [cell["score"] for cell in cells]
            data = cells[0]["cell"]["data"]
            mean = figure(statistics.fmean(scores), digits=places[data])
            spread = f" ± {figure(statistics.stdev(scores), digits=places[data])}" if scores[1:] else ""
            spent, fixed = (cells[0][key] for key in ("epsilon", "epsilon_fixed_batches"))
            costs = ["–" if value is None else epsilon_text(value, 3) for value in (spent, fixed)]
            printed = PUBLISHED.get((data, name.removesuffix("-paper")), {}).get(epsilon)
            beside = "–" if printed is None else f"{printed:g}"
            claimed = "no privacy" if epsilon is None else f"{epsilon:g}"
            rows.append([name, claimed, *costs, mean + spread, str(len(scores)), beside])
    return markdown(["cell", "claimed ε", "ε spent", "in fixed batches", "here", "seeds", "published"], rows)


def of_papers(found: Any) -> str:
    """Return a record of one of these commands as the command prints it."""
    if isinstance(found, list):
        volumes = [row for row in found if row["data"] == "hippocampus"]
        return "\n".join(volume_markdown(volumes) if volumes else [papers.markdown(found)]).strip()
    return (pate_markdown if "arms" in found else networks_markdown)(found).strip()


def table(name: str) -> str:
    """Return one recorded result as Markdown."""
    if "/" not in name:
        return of_papers(_record(f"papers/{name}"))
    if name in SETTINGS:
        return recipe(SETTINGS[name])
    if name == "utility/at-home":
        return at_home()
    if name == "bars/all":
        return bars()
    if name == "home/forty":
        return many_at_home()
    if name == "home/ways":
        return ways_at_home()
    if name.endswith("-blocks"):
        return heard(_record(name.removesuffix("-blocks")))
    kind = name.partition("/")[0]
    return {
        "utility": rotations,
        "pairs": rotations,
        "codecs": codecs,
        "digits": digits,
        "tables": plain,
        "private": private,
    }[kind](_record(name))


def page(text: str) -> str:
    """Return a document with its recorded tables."""
    return MARK.sub(lambda mark: f"{mark[1]}{table(mark[2])}\n{mark[3]}", text)


if __name__ == "__main__":
    for path in DOCUMENTS:
        path.write_text(page(path.read_text(encoding="utf-8")), encoding="utf-8")
