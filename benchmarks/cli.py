"""Measures the processor seconds of whole commands, beside a Python that only imports dp-accounting."""

from __future__ import annotations

import resource
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks.run import RATIO, Figure, figure

REPEATS = 7
PROGRAM = "from consilium.cli.main import main; main()"
COMMANDS = {
    "plan": ("plan", "--hospitals", "8", "--epsilon", "8", "--delta", "1e-5", "--queries", "4"),
    "verify": ("verify", "study/ledger.sqlite"),
    "study status": ("study", "status", "study"),
}
STUDY = Path(__file__).parents[1] / "tests" / "golden" / "joint-0.1.0.tar.xz"


def figures() -> Iterator[Figure]:
    """Yield each command's processor seconds, and their ratio to the import."""
    library = [sys.executable, "-c", "import dp_accounting"]
    commands = {name: [sys.executable, "-P", "-c", PROGRAM, *words] for name, words in COMMANDS.items()}
    took: dict[str, list[float]] = {name: [] for name in (*commands, "library")}
    with tempfile.TemporaryDirectory() as folder:
        with tarfile.open(STUDY) as archive:
            archive.extractall(folder, filter="data")
        for _ in range(REPEATS + 1):
            for name, command in (*commands.items(), ("library", library)):
                took[name].append(_cpu(command, folder=folder))
    for name in commands:
        ratios = [one / other for one, other in zip(took[name][1:], took["library"][1:], strict=True)]
        yield figure(f"consilium {name} beside importing dp-accounting", ratios, RATIO)
        yield figure(f"consilium {name}", took[name][1:], "s")


def _cpu(command: Sequence[str], *, folder: str) -> float:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(command, check=True, capture_output=True, cwd=folder)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
