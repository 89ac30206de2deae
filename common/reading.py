"""Reads text and records that another party wrote, and converts every parser's errors to InvalidInput.

Called wherever a file or message from outside is parsed. Sizes, counts and depths are limited before parsing, so that a
small file cannot become a large object. Refuses files that are not regular, text that is not UTF-8, unpaired
surrogates, and NaN, infinities and repeated keys in JSON.
"""

from __future__ import annotations

import errno
import json
import os
import re
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from math import isfinite
from pathlib import Path
from typing import Any

from common.errors import ConsiliumError, InvalidInput
from common.objects import read_regular
from common.system_errors import FULL, explain, system_cause

MAX_JSON_BYTES = 1 << 26
MAX_JSON_VALUES = 2_000_000
MAX_TOML_BYTES = 1 << 18
MAX_DEPTH = 64
"""Largest depth of nested lists and mappings, and largest number of dots in a TOML key."""

FINITE_JSON = "JSON in UTF-8 with finite numbers"
"""The allowed content of a file or line of another party, for errors."""

_HALF = re.compile(r"\\u[dD][89a-fA-F]")
_ENDS_A_NAME = re.compile(r"[=\[\]{},\n]")


@contextmanager
def parsing(what: str, *, value: object = None, limit: str = "", remedy: str = "") -> Iterator[None]:
    """Convert any exception raised in the block to InvalidInput; Consilium's own errors pass unchanged.

    It is meant for code that parses input of other parties, because no parser documents all errors that it may raise.

    Args:
        what: Name of the input or of the failure, for the error.
        value: The value, for the error.
        limit: The allowed values, for the error.
        remedy: What to do, for the error.

    Returns:
        A context.

    Raises:
        InvalidInput: If the block raises.
        OSError: If a disk is full.

    >>> with parsing("number cannot be read", limit="digits"):
    ...     int("x")
    Traceback (most recent call last):
    common.errors.InvalidInput: number cannot be read; allowed: digits
    """
    try:
        yield
    except ConsiliumError:
        raise
    except Exception as error:
        if isinstance(error, OSError) and error.errno in FULL:  # the input is not at fault
            raise
        raise InvalidInput(what, value=value, limit=limit, remedy=remedy) from error


@contextmanager
def naming_file(path: Path, *, remedy: str) -> Iterator[None]:
    """Add a file's name and a remedy to every InvalidInput raised in the block that lacks them.

    Args:
        path: The file that the block reads.
        remedy: What to do about a wrong file, for an error without a remedy.

    Returns:
        A context.

    Raises:
        InvalidInput: If the block raises it.

    >>> with naming_file(Path("notes.txt"), remedy="give the verdict that the hospital sent"):
    ...     raise c.InvalidInput("text is not JSON")
    Traceback (most recent call last):
    common.errors.InvalidInput: notes.txt: text is not JSON; to fix: give the verdict that the hospital sent
    """
    try:
        yield
    except InvalidInput as error:
        what = error.what if str(path) in str(error) else f"{path}: {error.what}"
        raise InvalidInput(what, value=error.value, limit=error.limit, remedy=error.remedy or remedy) from error


def as_path(value: object, *, what: str) -> Path:
    """Return a path that is given as a path or a string.

    Args:
        value: The path.
        what: Name of the file or folder in the error.

    Returns:
        The path.

    Raises:
        InvalidInput: For anything else.
    """
    if not isinstance(value, str | Path):
        raise InvalidInput(f"path of the {what}", value=type(value).__name__, limit="a path, or a string")
    return Path(value)


def read_text(path: Path, *, what: str, most_bytes: int, remedy: str = "", absent: str = "check the path") -> str:
    """Return the text of a regular file.

    Args:
        path: The file.
        what: Name of the file in the error.
        most_bytes: Largest size.
        remedy: What to do about wrong contents, for the error; a missing permission or a failing disk has a remedy of
            its own.
        absent: What to do if there is no such file, for the error.

    Returns:
        The text.

    Raises:
        InvalidInput: If it cannot be read, with the reason.
    """
    try:
        if path.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        return read_regular(path, most_bytes=most_bytes).decode("utf-8")
    except (OSError, ValueError) as error:
        why = (error.strerror if isinstance(error, OSError) else None) or "not UTF-8"
        if isinstance(error, OSError):
            remedy = explain(error)[1] if system_cause(error) else absent
        raise InvalidInput(f"{what} cannot be read ({why})", value=str(path), remedy=remedy) from error


def lenient_json(text: str | bytes) -> Any:
    """Parse a JSON text for a caller that handles invalid JSON. NaN is allowed, because older records contain it.

    Args:
        text: The text.

    Returns:
        The value.

    Raises:
        ValueError: If it is not JSON, or is nested too deeply.
    """
    try:
        return json.loads(text)
    except RecursionError as error:
        raise ValueError("JSON is nested too deeply") from error


def parse_json(data: bytes | str, *, what: str, value: object = None, limit: str = "JSON", remedy: str = "") -> Any:
    """Return the value of a JSON text.

    Args:
        data: The text; bytes are read as UTF-8.
        what: Name of the text in the error.
        value: The value, for the error.
        limit: The allowed form, for the error.
        remedy: What to do, for the error.

    Returns:
        Lists, mappings, texts, numbers, booleans and None, nested at most :data:`MAX_DEPTH` deep.

    Raises:
        InvalidInput: If it is no JSON, or exceeds a limit of this module.
    """
    if len(data) > MAX_JSON_BYTES:
        raise InvalidInput(f"size of {what}", value=len(data), limit=f"at most {MAX_JSON_BYTES} bytes", remedy=remedy)
    with parsing(f"{what} cannot be read", value=value, limit=limit, remedy=remedy):
        text = data.decode("utf-8") if isinstance(data, bytes) else data
        opened = text.count("[") + text.count("{")
        if opened + text.count(",") > MAX_JSON_VALUES:
            raise InvalidInput(f"values in {what}", limit=f"at most {MAX_JSON_VALUES}", remedy=remedy)
        try:
            found = json.loads(text, parse_constant=_no_constant, parse_float=_finite, object_pairs_hook=_once_each)
        except _KeyTwice as error:
            raise InvalidInput(f"keys in {what}", limit="each key once in a mapping", remedy=remedy) from error
        except json.JSONDecodeError as error:
            where = f"line {error.lineno}, column {error.colno}"
            raise InvalidInput(f"{what} cannot be read ({where})", value=value, limit=limit, remedy=remedy) from error
        if opened > MAX_DEPTH:
            _check_depth(found, what=what, remedy=remedy)
        if _HALF.search(text) or not text.isascii():
            json.dumps(found, ensure_ascii=False).encode()
        return found


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
        return parse_json(read_regular(path, most_bytes=most_bytes), what="the content", limit=FINITE_JSON)
    except OSError as error:
        raise InvalidInput(
            f"cannot read {path.name} ({error.strerror})", remedy="check that it is there and readable"
        ) from error


def parse_toml(text: str, *, what: str, value: object = None, remedy: str = "") -> dict[str, Any]:
    """Return the table of a TOML text.

    Args:
        text: At most :data:`MAX_TOML_BYTES` characters. It may begin with a byte order mark, as some editors save it.
        what: Name of the text in the error.
        value: The value, for the error.
        remedy: What to do, for the error.

    Returns:
        The table.

    Raises:
        InvalidInput: If it is too large, too deep or no TOML, with the line that is wrong.
    """
    if len(text) > MAX_TOML_BYTES:
        raise InvalidInput(
            f"size of {what}", value=len(text), limit=f"at most {MAX_TOML_BYTES} characters", remedy=remedy
        )
    if any(part.count(".") > MAX_DEPTH for part in _ENDS_A_NAME.split(text)):  # a name of n parts costs n² steps
        raise InvalidInput(f"dots in a name of {what}", limit=f"at most {MAX_DEPTH} dots in one key", remedy=remedy)
    try:
        found = tomllib.loads(text.lstrip("\ufeff"))
    except tomllib.TOMLDecodeError as error:
        raise InvalidInput(f"{what} is not TOML ({error})", value=value, remedy=remedy) from error
    except Exception as error:
        raise InvalidInput(f"{what} is not TOML", value=value, remedy=remedy) from error
    _check_depth(found, what=what, remedy=remedy)
    return found


def _check_depth(value: Any, *, what: str, remedy: str) -> None:
    level, depth = [value], 0
    while level := [one for one in level if isinstance(one, dict | list)]:
        depth += 1
        if depth > MAX_DEPTH:
            raise InvalidInput(
                f"depth of {what}", limit=f"lists and mappings nested at most {MAX_DEPTH} deep", remedy=remedy
            )
        level = [one for outer in level for one in (outer.values() if isinstance(outer, dict) else outer)]


class _KeyTwice(Exception):
    """Raised if a mapping contains a key twice."""


def _once_each(members: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(members)
    if len(found) < len(members):  # programs differ in which of the two values they use
        raise _KeyTwice
    return found


def _no_constant(text: str) -> float:
    raise ValueError(text)


def _finite(digits: str) -> float:
    if not isfinite(value := float(digits)):
        raise ValueError(digits)
    return value
