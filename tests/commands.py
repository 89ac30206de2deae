"""Runs commands in the test's own process."""

from __future__ import annotations

import contextlib
import io
import signal
import subprocess
import sys
from functools import cache
from typing import Any

import pytest
from click.testing import CliRunner, Result
from typer import Typer
from typer.main import get_command

from common.errors import InvalidInput

_command = cache(get_command)
"""Typer builds an application's commands anew for every call, which takes longer than many commands do."""


def ended(app: Typer, *words: object, **more: Any) -> Result:
    """Run a command and return its result; raise its error, if any. ``more`` are arguments of ``CliRunner.invoke``."""
    done = CliRunner().invoke(_command(app), [str(word) for word in words], **more)
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
    done = CliRunner().invoke(_command(app), [str(word) for word in words], **more)
    assert isinstance(done.exception, InvalidInput), done.output
    return done.exception


def run_here(*words: object) -> subprocess.CompletedProcess[str]:
    """Run ``consilium`` as a terminal does, but in this process, which has imported the libraries already.

    A process of its own needs seconds to import them. An expected error is one line of ``stderr``, with its exit code.
    """
    from consilium.cli.main import main

    out, err, code = io.StringIO(), io.StringIO(), 0
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    try:
        with pytest.MonkeyPatch.context() as patched, contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            patched.setattr(sys, "argv", ["consilium", *map(str, words)])
            patched.setattr(sys, "excepthook", sys.excepthook)
            main()
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    return subprocess.CompletedProcess(list(map(str, words)), code, out.getvalue(), err.getvalue())
