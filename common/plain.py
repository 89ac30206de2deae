"""Escapes text from other parties, so that it can neither control a terminal nor make a log misleading.

Called for every error, log line and printed field. Control characters can clear a terminal's screen, move its cursor or
write to the clipboard. Characters without width, or that change the direction of writing, make one name look like
another. All of them are escaped as in JSON, and so are line ends in a text that is one field of a line. A JSON text
therefore keeps its meaning.
"""

from __future__ import annotations

import logging
import re
import sys
import time
import unicodedata
from collections.abc import Iterable
from functools import lru_cache
from typing import TextIO

RESEARCH_ONLY = "Research only: not a medical device, not for diagnosis."
"""Statement on every report, page and bundle that shows what a network found, and in the output of predictions."""

_ACTING = frozenset({"Cc", "Cf", "Cs", "Zl", "Zp"})
"""Unicode categories that are escaped: controls, formats, surrogates, line and paragraph separators."""
_UNSEEN = frozenset("\u034f\u115f\u1160\u17b4\u17b5\u180b\u180c\u180d\u180f\u2800\u3164\uffa0")
"""Letters and marks without a visible form."""
_SUSPECT = re.compile(r"[^ -~¡-¬®-ͯ]|\u034f")


def plain(text: object) -> str:
    r"""Return a text as one field of a line, with control characters, line ends and hidden characters escaped.

    Args:
        text: Any value.

    Returns:
        The escaped text.

    >>> plain("north\x1b[2J\n")
    'north\\u001b[2J\\u000a'
    """
    return _SUSPECT.sub(_escaped, str(text))


def plain_lines(text: object) -> str:
    """Return a text with line ends and tabs kept, and all other characters escaped as by :func:`plain`.

    Args:
        text: Any value.

    Returns:
        The escaped text.
    """
    return _SUSPECT.sub(_escaped_but_lines, str(text))


def joined(lines: Iterable[object]) -> str:
    """Join lines to one text. A line break inside one of them is escaped, so it does not start a new line.

    Args:
        lines: The lines.

    Returns:
        The escaped text.
    """
    return "\n".join(map(plain, lines))


def _escaped_but_lines(found: re.Match[str]) -> str:
    return found[0] if found[0] in "\n\t" else _escaped(found)


def _escaped(found: re.Match[str]) -> str:
    return _shown(found[0])


@lru_cache(maxsize=4096)
def _shown(character: str) -> str:
    code = ord(character)
    hidden = unicodedata.category(character) in _ACTING or character in _UNSEEN
    if not hidden and not 0xFE00 <= code <= 0xFE0F and not 0xE0000 <= code <= 0xE0FFF:
        return character
    if code < 0x10000:
        return f"\\u{code:04x}"
    code -= 0x10000
    return f"\\u{0xD800 + (code >> 10):04x}\\u{0xDC00 + (code & 0x3FF):04x}"


class PlainFormatter(logging.Formatter):
    """Formats log records with escaped characters. A message is one line; a traceback has several."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802  # logging's name
        return plain(super().formatMessage(record))

    def format(self, record: logging.LogRecord) -> str:
        """Return a record's text, escaped.

        Args:
            record: The log record.

        Returns:
            One line, followed by a traceback's lines if the record has one.
        """
        return plain_lines(super().format(record))


class OncePerSecond(logging.Filter):
    """Passes each message up to level WARNING at most once a second, and every message above this level. It is for
    messages that unauthenticated senders cause. Messages are equal if their format strings are.
    """

    def __init__(self) -> None:
        super().__init__()
        self._at: dict[str, float] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether a record is logged.

        Args:
            record: The log record.

        Returns:
            True if its level is above WARNING, or its message was not logged in the last second.
        """
        now, said = time.monotonic(), str(record.msg)
        if record.levelno > logging.WARNING or now - self._at.get(said, -1.0) >= 1.0:
            self._at[said] = now
            return True
        return False


def log_to_stderr(stream: TextIO | None = None) -> None:
    """Make this process log to stderr, from level INFO on, with escaped text.

    Args:
        stream: Another stream; stderr if None.
    """
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(PlainFormatter("%(asctime)s %(levelname)s %(name)s %(message)s"))
    logging.basicConfig(handlers=[handler], level=logging.INFO)
