"""Defines ``consilium bench``: benchmarks of recipes, whose code is in a clone's ``research/``, not in the wheel."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import typer

from common.errors import InvalidInput

CLONE = Path(__file__).resolve().parents[2]


def commands(clone: Path) -> typer.Typer:
    """Return the benchmark commands of a clone; without a clone, a command that says where they are.

    The clone is put first on the import path, so that another installed package called ``research`` is not used.

    Args:
        clone: Root of the clone.

    Returns:
        The commands.
    """
    if not (clone / "research" / "command.py").is_file():
        return _absent()
    if str(clone) not in sys.path:
        sys.path.insert(0, str(clone))
    app: typer.Typer = importlib.import_module("research.command").app
    return app


def _absent() -> typer.Typer:
    app = typer.Typer(help="Compare recipes on benchmarks; only in a clone of the repository.", add_completion=False)

    @app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
    def bench(_arguments: typer.Context) -> None:
        """Compare recipes on benchmarks; only in a clone of the repository."""
        raise InvalidInput(
            "consilium bench needs the research code, which is not installed",
            remedy="clone the repository, run `pip install -e .` there, and then `consilium bench`",
        )

    return app


app = commands(CLONE)
