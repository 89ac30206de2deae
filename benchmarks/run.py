"""Runs ``make bench``: measures speed and size, records the results, and writes their table.

    python -m benchmarks.run [PART …]      measure these parts, or all, and record the results
    python -m benchmarks.run --table       write the table in docs/lab/performance.md from the recorded results

A part is a module with ``figures()``, listed in :data:`PARTS`. If a ratio is worse than its recorded value by more than
the larger of the two spreads, the run ends with status 1 and keeps the recorded value; ``--accept`` records the new
one.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import platform
import resource
import sqlite3
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from research.commit import commit

HERE = Path(__file__).parent
RESULTS = HERE / "results"
PAGE = HERE.parent / "docs" / "lab" / "performance.md"
BEGIN, END = "<!-- measured: begin -->", "<!-- measured: end -->"
RATIO = "×"
PACKAGES = ("numpy", "scipy", "torch", "monai", "flwr", "cryptography", "fastapi", "consilium")

PARTS = {
    "core": "benchmarks.core",
    "ledger": "benchmarks.ledger_scale",
    "pace": "benchmarks.ledger_speed",
    "hand": "benchmarks.hand",
    "dashboard": "benchmarks.dashboard",
    "sampler": "benchmarks.sampler",
    "round": "benchmarks.round",
    "nodes": "benchmarks.nodes",
    "scale": "benchmarks.scale",
    "long": "benchmarks.long_run",
    "sealed": "benchmarks.sealed_sum",
    "training": "benchmarks.training",
    "kernel": "benchmarks.kernel",
    "demo": "benchmarks.demo",
    "cli": "benchmarks.cli",
    "tests": "benchmarks.suite",
}
"""Module of each part, by name. Each is imported only when it runs, so that no part pays for another's imports."""


RESOLUTION = 0.04
"""Smallest spread of a ratio, as a share of it.

Two runs on a quiet machine differed by up to .032 (docs/lab/performance.md), more than repetitions within one run do,
because memory addresses and the time of day differ between runs.
"""


@dataclass(frozen=True, slots=True)
class Figure:
    """One measured figure.

    Attributes:
        name: What was measured.
        value: Median of the repetitions.
        unit: Its unit. Only a ratio within one run (:data:`RATIO`) is compared with the recorded value.
        spread: Half the distance between the smallest and the largest repetition.
        more_is_better: False if less is better.
        aim: The target in words, if there is one.
    """

    name: str
    value: float
    unit: str
    spread: float = 0.0
    more_is_better: bool = False
    aim: str = ""

    def worse_than(self, before: Figure) -> bool:
        """Return whether this ratio is worse than an earlier one by more than the larger spread.

        >>> Figure("a", 1.3, RATIO, 0.1).worse_than(Figure("a", 1.0, RATIO, 0.1))
        True
        """
        loss = (before.value - self.value) if self.more_is_better else (self.value - before.value)
        return self.unit == RATIO == before.unit and loss > max(self.spread, before.spread)


def figure(name: str, values: Sequence[float], unit: str, *, more_is_better: bool = False, aim: str = "") -> Figure:
    """Return the figure of some repetitions.

    The spread of a ratio is at least :data:`RESOLUTION` of it, or a tenth of it if it was measured once.

    Args:
        name: What was measured.
        values: The repetitions.
        unit: Their unit.
        more_is_better: False if less is better.
        aim: The target in words, if there is one.
    """
    spread = (max(values) - min(values)) / 2
    if unit == RATIO:
        spread = max(spread, abs(statistics.median(values)) * (RESOLUTION if len(values) > 1 else 0.1))
    return Figure(name, _short(statistics.median(values)), unit, _short(spread), more_is_better, aim)


def measured_alone(module: str, *arguments: object) -> Any:
    """Return what ``python -m module arguments`` prints as JSON, run in a process of its own with one thread."""
    command = [sys.executable, "-m", module, *map(str, arguments)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return json.loads(subprocess.run(command, check=True, capture_output=True, env=environment).stdout)


def cpu_s(work: Callable[[], object]) -> float:
    """Return the processor seconds of a call."""
    started = time.process_time()
    work()
    return time.process_time() - started


def command_cpu_s(command: Sequence[str | Path], **options: Any) -> float:
    """Return the processor seconds of a command and its children; the command must succeed.

    Args:
        command: The command.
        options: Further arguments of :func:`subprocess.run`.
    """
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(command, check=True, capture_output=True, **options)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def process_cpu_s(pid: int | str) -> float:
    """Return the processor seconds so far of a process without its children. Linux only."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def ratios(ours: Sequence[float], others: Sequence[float]) -> list[float]:
    """Return ``ours`` divided by ``others``, repetition by repetition; the two are measured in turn."""
    return [one / other for one, other in zip(ours, others, strict=True)]


def memory_mib(what: str = "VmRSS", *, pid: int | str = "self") -> float:
    """Return a process's memory in MiB, now (``VmRSS``) or at its highest since its program began (``VmHWM``). Linux
    only.

    It is 0 for a process that has ended and is still listed. ``ru_maxrss`` is not used, because it includes the
    parent's memory from before the program began.

    Args:
        what: ``VmRSS`` or ``VmHWM``.
        pid: The process.
    """
    lines = Path(f"/proc/{pid}/status").read_text(encoding="utf-8").splitlines()
    return int(next((line.split()[1] for line in lines if line.startswith(f"{what}:")), 0)) / 1024


def recorded(part: str) -> dict[str, Figure]:
    """Return a part's recorded figures by name; empty if it was never measured."""
    path = RESULTS / f"{part}.json"
    found = json.loads(path.read_text())["figures"] if path.exists() else []
    return {one["name"]: Figure(**one) for one in found}


def record(part: str, figures: Sequence[Figure]) -> None:
    """Write a part's result: commit, machine, versions and figures."""
    RESULTS.mkdir(exist_ok=True)
    document = {
        "part": part,
        "commit": commit(),
        "machine": _machine(),
        "versions": _versions(),
        "figures": [asdict(one) for one in figures],
    }
    (RESULTS / f"{part}.json").write_text(json.dumps(document, indent=1, ensure_ascii=False) + "\n")


def table(results: Sequence[dict[str, Any]]) -> str:
    """Return the recorded results as a Markdown table."""
    lines = ["| part | figure | value | spread | aim | commit |", "|---|---|---|---|---|---|"]
    for result in results:
        for one in (Figure(**values) for values in result["figures"]):
            spread = f"± {_text(one.spread)}" if one.spread else ""
            cells = (result["part"], one.name, f"{_text(one.value)} {one.unit}", spread, one.aim, result["commit"])
            lines.append(f"| {' | '.join(cells)} |")
    machines = sorted({result["machine"] for result in results})
    return "\n".join([*lines, "", f"Measured on: {'; '.join(machines)}."])


def all_recorded() -> list[dict[str, Any]]:
    """Return every recorded result, in the order of :data:`PARTS`."""
    return [json.loads((RESULTS / f"{part}.json").read_text()) for part in PARTS if (RESULTS / f"{part}.json").exists()]


def page(text: str) -> str:
    """Return the page's text with its table replaced by the recorded one."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{table(all_recorded())}\n{END}{after}"


def run(part: str, *, accept: bool) -> list[str]:
    """Measure one part and record it.

    Args:
        part: Its name.
        accept: Record ratios that got worse, too.

    Returns:
        One line for each ratio that got worse; if there is any, nothing is recorded.
    """
    measure: Callable[[], Iterator[Figure]] = importlib.import_module(PARTS[part]).figures
    before, found = recorded(part), []
    for one in measure():
        print(f"{part}: {one.name}: {_text(one.value)} {one.unit} ± {_text(one.spread)}", flush=True)
        found.append(one)
    worse = [
        f"{part}: {one.name} was {_text(before[one.name].value)} and is {_text(one.value)}"
        for one in found
        if one.name in before and one.worse_than(before[one.name])
    ]
    if accept or not worse:
        record(part, found)
        worse = []
    return worse


def _machine() -> str:
    """Return the kind of machine, without anything that identifies it."""
    models = [line.split(":", 1)[1].strip() for line in _lines("/proc/cpuinfo") if line.startswith("model name")]
    total = next((int(line.split()[1]) for line in _lines("/proc/meminfo") if line.startswith("MemTotal")), 0)
    model = models[0] if models else platform.machine()
    return f"{model}, {os.cpu_count()} cores, {round(total / 2**20)} GiB, {platform.system()}"


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version(), "sqlite": sqlite3.sqlite_version}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text().splitlines()
    except OSError:
        return []


def _short(value: float) -> float:
    return float(f"{value:.4g}")


def _text(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", choices=[[], *PARTS], metavar="PART", help=", ".join(PARTS))
    parser.add_argument("--table", action="store_true", help="measure nothing, write the table anew")
    parser.add_argument("--accept", action="store_true", help="record ratios that got worse")
    given = parser.parse_args()
    worse: list[str] = []
    for part in () if given.table else given.parts or PARTS:
        worse += run(part, accept=given.accept)
    PAGE.write_text(page(PAGE.read_text()))
    if worse:
        sys.exit("worse than recorded, by more than the spread:\n" + "\n".join(worse))


if __name__ == "__main__":
    main()
