"""Makes the results table of README and docs/utility.md from the records of ``consilium bench utility --out FILE``.

``python -m tests.results_table`` writes it anew. Each row is one setting: its report, with development figures beside
it. Each is a file of ``benchmarks/results/utility``. A setting without a report shows records from before the cases
were divided, when recipes were chosen on the cases that they were scored on, and the row says so. A row of
:data:`SETTINGS` without any file says that it was not measured. Files of other datasets and settings are refused.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from common.privacy.figures import delta_text, epsilon_text

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "utility"
DOCUMENTS = (ROOT / "README.md", ROOT / "docs" / "utility.md")
BEGIN, END = "<!-- results: begin -->", "<!-- results: end -->"

DATASETS = {
    "Task04_Hippocampus": "hippocampus",
    "ACDC_ED": "hearts (ACDC)",
    "TCGA_LGG": "tumours (LGG)",
}
"""The dataset's folder → its name in the table."""
SETTINGS = (("hospital", 8.0, 1e-3), ("patient", 8.0, 1e-5), ("patient", 2.0, 1e-5))
"""Unit, ε, δ."""
HEAD = (
    "data",
    "unit; voters × hospitals",
    "ε, δ",
    "student",
    "zero code",
    "shuffled codes",
    "public only",
    "gain over the best control, 95 %",
    "rotations",
    "scored on",
    "on development cases: student, gain",
)
SCORED = {
    "report": "report cases, report {times}",
    "development": "**development cases**",
    "all": "**all cases, chosen in sight of them**",
}
"""The part of the cases → its words in the table; older records name no part."""
FIRST = ("report", "all", "development")
"""The parts whose figures a row may show; it shows the first one that was recorded."""


def recorded() -> list[dict[str, Any]]:
    """Return every recorded result."""
    return [json.loads(path.read_text(encoding="utf-8")) for path in sorted(RESULTS.glob("*.json"))]


def table() -> str:
    """Return the table as Markdown."""
    found: dict[tuple[str, str, float, float], list[str]] = {}
    rows: dict[tuple[Any, ...], dict[str, dict[str, Any]]] = {}
    for result in recorded():
        setting = result["setting"]
        key = (result["data"], setting["unit"], setting["epsilon"], setting["delta"])
        if key[0] not in DATASETS or key[1:] not in SETTINGS:
            raise SystemExit(f"{key} is no row of the table: tests/results_table.py names datasets and settings")
        parts = rows.setdefault((*key, setting["paired"]), {})
        part = scored(result)
        if part in parts:
            raise SystemExit(f"two records of {key} on {part} cases: keep the one that the recipe of today made")
        parts[part] = result
    for (data, unit, epsilon, delta, _), parts in sorted(rows.items(), key=lambda each: -each[0][4]):
        found.setdefault((data, unit, epsilon, delta), []).append(row(parts))
    lines = [f"| {' | '.join(HEAD)} |", f"|{'---|' * len(HEAD)}"]
    for data, name in DATASETS.items():
        if not any(key[0] == data for key in found):
            lines.append(f"| {name} | all three | | not measured |" + " |" * (len(HEAD) - 4))
            continue
        for unit, epsilon, delta in SETTINGS:
            none = f"| {name} | {unit} | {epsilon_text(epsilon)}, {delta_text(delta)} | not measured |"
            lines += found.get((data, unit, epsilon, delta), [none + " |" * (len(HEAD) - 4)])
    return "\n".join(lines)


def scored(result: dict[str, Any]) -> str:
    """Return the part of the cases that a record covers."""
    part: str = result.get("scored", "all")
    return part


def row(parts: dict[str, dict[str, Any]]) -> str:
    """Return a setting's row, from its records on report cases and on development cases."""
    part = next(name for name in FIRST if name in parts)
    result = parts[part]
    setting = result["setting"]
    controls = (_mean(result, name) for name in ("zero_code", "shuffled_codes", "public_only"))
    recipe = "" if setting["recipe"] == "joint" else f", recipe {setting['recipe']}"
    pairs = f", beside {setting['paired']} public pairs" if setting["paired"] else ""
    beside = "not run"
    if "development" in parts:
        beside = f"{_mean(parts['development'], 'student')}, {_gain(parts['development'])}"
    cells = (
        DATASETS[result["data"]],
        f"{setting['unit']}; {setting['voters']} × {setting['hospitals']}{recipe}{pairs}",
        f"{epsilon_text(setting['epsilon'])}, {delta_text(setting['delta'])}",
        f"**{_mean(result, 'student')}**",
        *controls,
        _gain(result),
        str(result["seeds"]),
        SCORED[part].format(**result.get("report", {})),
        beside,
    )
    return f"| {' | '.join(cells)} |"


def _gain(result: dict[str, Any]) -> str:
    gain = result["gain"]["best_control"]
    interval = "" if gain["half_width"] is None else f" ± {_figure(gain['half_width'])}"
    return f"{'−' if gain['mean'] < 0 else '+'}{_figure(abs(gain['mean']))}{interval}"


def _mean(result: dict[str, Any], arm: str) -> str:
    return _figure(result["dice"][arm]["mean"]) if arm in result["dice"] else "not measured"


def _figure(value: float) -> str:
    return f"{value:.3f}".removeprefix("0")


def page(text: str) -> str:
    """Return a document with the recorded table."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{table()}\n{END}{after}"


if __name__ == "__main__":
    for path in DOCUMENTS:
        path.write_text(page(path.read_text(encoding="utf-8")), encoding="utf-8")
