"""Reads untrusted JSON within limits, and refuses invalid content.

Hospitals' reports and the lines of the event log are read with it before pages show them. For invalid content of any
kind, its functions raise InvalidInput, so the caller can report one bad line or file and continue with the others.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from common import reading
from common.errors import InvalidInput
from common.objects import read_regular


def read_json(path: Path, *, most_bytes: int) -> Any:
    """Read a JSON file. Pipes and devices are refused, so reading never blocks.

    Args:
        path: The file.
        most_bytes: Largest allowed size in bytes.

    Returns:
        The parsed JSON.

    Raises:
        InvalidInput: If the file cannot be read, is too large, or is not valid JSON.
    """
    try:
        return parse_json(read_regular(path, most_bytes=most_bytes))
    except OSError as error:
        raise InvalidInput(
            f"cannot read {path.name} ({error.strerror})", remedy="check that it is there and readable"
        ) from error


def parse_json(content: bytes) -> Any:
    """Parse JSON in UTF-8.

    Args:
        content: The bytes.

    Returns:
        The parsed JSON.

    Raises:
        InvalidInput: If the bytes are not JSON in UTF-8, see :func:`common.reading.parse_json`.
    """
    return reading.parse_json(content, what="the content", limit="JSON in UTF-8 with finite numbers")
