"""Measures the processor time of ten commands' ``--help`` and of shell completion, in turn with ``flwr --help``."""

from __future__ import annotations

import os
import statistics
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from benchmarks.run import RATIO, Figure, command_cpu_s, figure, ratios

COMMANDS = (
    "",
    "study init",
    "study run",
    "study watch",
    "codec fit",
    "provision approve",
    "server up",
    "site init",
    "site doctor",
    "predict",
)
REPETITIONS = 3
AIM = "under 0.3 s"


def figures() -> Iterator[Figure]:
    """Yield the time of each command's help, of completing ``consilium study`` and of Flower's help, and their
    ratio.
    """
    here = Path(sys.executable).parent
    tab = {"_CONSILIUM_COMPLETE": "complete_bash", "COMP_WORDS": "consilium study ", "COMP_CWORD": "2"}
    asked: dict[str, tuple[list[str | Path], Mapping[str, str]]] = {
        f"consilium {command} --help".replace("  ", " "): ([here / "consilium", *command.split(), "--help"], {})
        for command in COMMANDS
    }
    asked["Tab after consilium study"] = [here / "consilium"], tab
    asked["flwr --help"] = [here / "flwr", "--help"], {"FLWR_TELEMETRY_ENABLED": "0"}
    found: dict[str, list[float]] = {name: [] for name in asked}
    for _ in range(REPETITIONS):
        for name, (command, environment) in asked.items():
            found[name].append(command_cpu_s(command, env=os.environ | environment))
    for name, values in found.items():
        yield figure(name, values, "CPU s", aim="" if name.startswith("flwr") else AIM)
    ours = [statistics.mean(found[name][turn] for name in asked if "consilium" in name) for turn in range(REPETITIONS)]
    yield figure("mean of the above beside flwr --help", ratios(ours, found["flwr --help"]), RATIO)
