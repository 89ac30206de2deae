"""What the commands of ``consilium bench`` share: the study of a dataset, and how a result is shown and kept."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from common.config import DataConfig
from consilium.cli.options import triple
from consilium.cli.say import console, say

if TYPE_CHECKING:
    from rich.console import Console

    from research.roles import Source


def study_data(source: Source, *, grid: str, spacing: str) -> DataConfig:
    """The study's data as the options have it; grid and spacing that are empty are those of the public maps."""
    return source.study_data(
        grid=triple(grid, int, what="--grid") if grid else None,
        spacing_mm=triple(spacing, float, what="--spacing") if spacing else None,
    )


def as_text(made: Callable[[dict[str, Any]], str]) -> Callable[[dict[str, Any], Console], None]:
    """A text of a result, as something that prints it."""
    return lambda document, console: console.out(made(document), end="", highlight=False)


def show(
    document: dict[str, Any],
    render: Callable[[dict[str, Any], Console], None],
    *,
    data: Path,
    out: Path | None,
    as_json: bool,
) -> None:
    """Print a result, as JSON or by ``render``, and write it to ``out`` with data, command and commit."""
    if out is not None:
        out.write_text(json.dumps(_made_by(data) | document, indent=1) + "\n", encoding="utf-8")
    if as_json:
        say(json.dumps(document, indent=1))
    else:
        render(document, console(file=sys.stdout, highlight=False))


def _made_by(data: Path) -> dict[str, str]:
    """What a recorded result says of itself, without a path of this machine: data, command line and commit."""
    words = [re.sub(r"(^|=)/.*/", r"\1", word) for word in sys.argv[1:]]
    git = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"]
    said = subprocess.run(git, capture_output=True, text=True, check=False)
    return {
        "data": data.resolve().name,
        "command": shlex.join(["consilium", *words]),
        "commit": said.stdout.strip() or "unknown",
    }
