"""Prints a command's output, and escapes control characters in it, because texts may come from other parties.

A test of the sources refuses any other module of the command line that writes to stdout or stderr.
"""

from __future__ import annotations

import json
import signal
import sys
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any

import typer

from common.objects import finite
from common.plain import plain_lines

if TYPE_CHECKING:
    from rich.console import Console


def say(text: object = "", *, err: bool = False, nl: bool = True) -> None:
    """Print text with control characters escaped.

    Args:
        text: The text.
        err: Print to stderr.
        nl: End with a line break.
    """
    typer.echo(plain_lines(text), err=err, nl=nl)


def ask_yes_no(question: str, *, err: bool = False) -> bool:
    """Ask a question with the answers yes and no.

    Args:
        question: The question.
        err: Ask on stderr.

    Returns:
        True for yes; False for no, Ctrl-C, or an input that ends without an answer.
    """
    try:
        return typer.confirm(question, err=err)
    except typer.Abort:
        _handle(_interrupt, instead_of=(_ignore,))  # Ctrl-C answered the question; the next one ends the command
        return False


def json_text(facts: object) -> str:
    """Return facts as the text that ``--json`` prints.

    JSON has no NaN and no infinity, so such a number is written as null.

    Args:
        facts: Values that JSON can represent, or floats that are not finite.

    Returns:
        The text.
    """
    return json.dumps(finite(facts), indent=1, ensure_ascii=False, allow_nan=False)


@contextmanager
def interruptible(told: str = "interrupted: run the same command again to resume") -> Iterator[None]:
    """End the command with exit code 130, with a sentence on stderr, if Ctrl-C, SIGTERM or SIGHUP stops the block.

    Without this, SIGTERM and SIGHUP would leave temporary files behind, which may be copies of patients' scans. For the
    same reason further signals do not stop the cleaning up.

    Args:
        told: The sentence.

    Returns:
        A context.

    Raises:
        typer.Exit: With code 130, if the block was stopped.
    """
    before = interrupt_once()
    try:
        yield
    except KeyboardInterrupt:
        ignore_interrupts()
        say(told, err=True)
        raise typer.Exit(130) from None
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def interrupt_once() -> dict[int, Any]:
    """Raise KeyboardInterrupt at the first Ctrl-C, SIGTERM or SIGHUP, and ignore later ones.

    Returns:
        The earlier handlers. A signal that is ignored, as nohup ignores SIGHUP, stays ignored.
    """
    return _handle(_interrupt, instead_of=(signal.SIG_DFL, signal.default_int_handler, _ignore))


def ignore_interrupts() -> None:
    """Ignore Ctrl-C, SIGTERM and SIGHUP from now on, unless somebody else handles them."""
    _handle(_ignore, instead_of=(_interrupt,))


def _interrupt(signum: int, frame: FrameType | None) -> None:
    ignore_interrupts()
    raise KeyboardInterrupt


def _ignore(signum: int, frame: FrameType | None) -> None:
    """Ignore a signal. Child processes do not inherit this, in contrast to SIG_IGN."""


def _handle(handler: Any, *, instead_of: tuple[Any, ...]) -> dict[int, Any]:
    if threading.current_thread() is not threading.main_thread():
        return {}
    numbers = [n for n in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP) if signal.getsignal(n) in instead_of]
    return {number: signal.signal(number, handler) for number in numbers}


def console(*, stderr: bool = False, **options: Any) -> Console:
    """Return a rich console without markup, whose texts are escaped as in :func:`say`.

    Args:
        stderr: Print to stderr.
        options: Further options of rich.

    Returns:
        The console.
    """
    from rich.console import Console
    from rich.text import Text

    class Plain(Console):
        def render_str(self, text: str, **given: Any) -> Text:
            return super().render_str(plain_lines(text), **given | {"markup": False, "emoji": False})

    return Plain(stderr=stderr, markup=False, emoji=False, **options)


def say_unexpected(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Print the traceback of an unexpected error, escaped, because its text may come from a network.

    Args:
        kind: Type of the error.
        error: The error.
        trace: Its traceback.
    """
    sys.stderr.write(plain_lines("".join(traceback.format_exception(kind, error, trace))))
