"""Measures the processor time of ten commands' ``--help`` and of shell completion, beside ``flwr --help``, in turn."""

from __future__ import annotations

import os
import resource
import statistics
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from benchmarks.run import RATIO, Figure, figure

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


def seconds(command: Sequence[str | Path], environment: Mapping[str, str]) -> float:
    """Return the processor seconds of a command and its children; the command must succeed.

    Args:
        command: The command.
        environment: Variables to add.
    """
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(command, check=True, capture_output=True, env=os.environ | environment)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


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
            found[name].append(seconds(command, environment))
    for name, values in found.items():
        yield figure(name, values, "CPU s", aim="" if name.startswith("flwr") else AIM)
    ours = [statistics.mean(found[name][turn] for name in asked if "consilium" in name) for turn in range(REPETITIONS)]
    yield figure(
        "mean of the above beside flwr --help",
        [one / flwr for one, flwr in zip(ours, found["flwr --help"], strict=True)],
        RATIO,
    )
