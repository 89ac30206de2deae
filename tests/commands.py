"""Runs commands in the test's own process."""

from __future__ import annotations

from typing import Any

from click.testing import Result
from typer import Typer
from typer.testing import CliRunner

from common.errors import InvalidInput


def ended(app: Typer, *words: object, **more: Any) -> Result:
    """Run a command and return its result; raise its error, if any. ``more`` are arguments of ``CliRunner.invoke``."""
    done = CliRunner().invoke(app, [str(word) for word in words], **more)
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    return done


def typed(app: Typer, *words: object, **more: Any) -> Result:
    """Run a command that must succeed, and return its result; ``more`` are arguments of ``CliRunner.invoke``."""
    done = ended(app, *words, **more)
    assert done.exit_code == 0, done.output
    return done


def refusal_of(app: Typer, *words: object, **more: Any) -> InvalidInput:
    """Return the error of a command that refuses its arguments."""
    done = CliRunner().invoke(app, [str(word) for word in words], **more)
    assert isinstance(done.exception, InvalidInput), done.output
    return done.exception
