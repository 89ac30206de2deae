"""Prints a command's output; the only way to a terminal, so that nothing from elsewhere acts on it.

Refuses a test of the sources: no other module of the command line writes to stdout or stderr.
"""

from __future__ import annotations

import sys
import traceback
from types import TracebackType
from typing import TYPE_CHECKING, Any

import typer

from common.plain import plain_lines

if TYPE_CHECKING:
    from rich.console import Console


def say(text: object = "", *, err: bool = False, nl: bool = True) -> None:
    """Print lines, to stderr with ``err``, without the last line end unless ``nl``."""
    typer.echo(plain_lines(text), err=err, nl=nl)


def console(*, stderr: bool = False, **options: Any) -> Console:
    """A console of rich that takes no markup, and shows every text as :func:`say` does."""
    from rich.console import Console
    from rich.text import Text

    class Plain(Console):
        def render_str(self, text: str, **given: Any) -> Text:
            return super().render_str(plain_lines(text), **given | {"markup": False, "emoji": False})

    return Plain(stderr=stderr, markup=False, emoji=False, **options)


def say_unexpected(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Print the traceback of an unexpected error, escaped: its text may come from a network."""
    sys.stderr.write(plain_lines("".join(traceback.format_exception(kind, error, trace))))
