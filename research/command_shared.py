"""Reads a dataset's study, and prints and stores results, for all commands of `consilium bench`."""

from __future__ import annotations

import json
import os
import re
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from common.config import DataConfig
from common.errors import InvalidInput
from consilium.cli.options import triple
from consilium.cli.say import console, say
from research.commit import commit

if TYPE_CHECKING:
    from rich.console import Console

    from research.roles import BenchData


Layout = Annotated[str, typer.Option("--layout", help="The data's layout; recognised if not given.")]
Spacing = Annotated[str, typer.Option("--spacing", help="Voxel spacing in mm; by default that of the public maps.")]
Labels = Annotated[str, typer.Option("--labels", help="Label names, background first; by default those of the data.")]
Channels = Annotated[str, typer.Option("--channels", help="Channel names; by default those of the data.")]
Width = Annotated[str, typer.Option("--width", help="Feature maps at each level of the network.")]
SEEDS: dict[str, Any] = {"min": 1, "max": 10_000}
"""Limits of an option for a number of repetitions."""


def study_data(source: BenchData, *, grid: str, spacing: str) -> DataConfig:
    """Return the study's data configuration; empty options take grid and spacing from the public label maps.

    Args:
        source: The dataset.
        grid: ``x,y,z`` in voxels, or empty.
        spacing: ``x,y,z`` in mm, or empty.
    """
    return source.study_data(
        grid=triple(grid, int, what="--grid") if grid else None,
        spacing_mm=triple(spacing, float, what="--spacing") if spacing else None,
    )


def widths(text: str) -> tuple[int, ...]:
    """Parse a network's widths, comma-separated.

    Args:
        text: The option ``--width``.

    Returns:
        The feature maps at each level.

    Raises:
        InvalidInput: If a part is not an integer.
    """
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError as error:
        raise InvalidInput("--width", value=text, limit="integers separated by commas, e.g. 16,32,64") from error


def as_text(made: Callable[[dict[str, Any]], str]) -> Callable[[dict[str, Any], Console], None]:
    """Turn a function that renders a result as text into one that prints it."""
    return lambda document, console: console.out(made(document), end="", highlight=False)


def show(
    document: dict[str, Any],
    render: Callable[[dict[str, Any], Console], None],
    *,
    data: Path,
    out: Path | None,
    as_json: bool,
) -> None:
    """Print a result, and optionally write it to a file with the data's name, the command and the commit.

    Args:
        document: The result.
        render: Prints it for people.
        data: The dataset.
        out: File to write, if any.
        as_json: Print JSON in place of the rendering.
    """
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps(_made_by(data) | document, indent=1) + "\n", encoding="utf-8")
    if as_json:
        say(json.dumps(document, indent=1))
    else:
        render(document, console(file=sys.stdout, highlight=False))


def _made_by(data: Path) -> dict[str, str]:
    """Return the data's name, the command line without local paths, and the commit."""
    words = [re.sub(r"(^|=)/.*/", r"\1", word) for word in sys.argv[1:]]
    return {
        "data": Path(os.path.abspath(data)).name,
        "command": shlex.join(["consilium", *words]),
        "commit": commit(),
    }
