"""Measures the processor seconds of whole commands, beside a Python process that only imports dp-accounting."""

from __future__ import annotations

import sys
import tarfile
import tempfile
from collections.abc import Iterator
from pathlib import Path

from benchmarks.run import RATIO, Figure, command_cpu_s, figure, ratios

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
                took[name].append(command_cpu_s(command, cwd=folder))
    for name in commands:
        beside = ratios(took[name][1:], took["library"][1:])
        yield figure(f"consilium {name} beside importing dp-accounting", beside, RATIO)
        yield figure(f"consilium {name}", took[name][1:], "s")
