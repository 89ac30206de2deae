"""Defines the canonical encoding of values: one byte string for one value, which is hashed, signed and stored.

Called wherever something is hashed, signed or stored in a ledger. Canonical JSON here is UTF-8 with sorted keys and no
spaces. It contains only ``None``, booleans, 64-bit integers, strings, lists and string-keyed mappings. Refuses floats,
because two machines may print the same float differently. A rational is written as ``"numerator/denominator"``, a
measured float as the string of ``float.hex``.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from enum import StrEnum
from fractions import Fraction
from functools import lru_cache
from math import isfinite
from pathlib import Path
from typing import Any, TypeVar

from common import __version__
from common.errors import InvalidInput

MAX_INTEGER = 2**63 - 1
"""Largest absolute value of an integer in canonical JSON: it fits into a 64-bit column of a database."""

MAX_RATIONAL_DIGITS = 4_000
"""Largest number of digits of a rational's numerator or denominator. Python converts at most 4,300 digits to text. A
sum of rationals gets more digits with every new denominator; a sum that could not be written is refused before it is
charged."""

Member = TypeVar("Member", bound=StrEnum)
Json = object  # None | bool | int | str | list | dict with string keys, nested


def canonical_bytes(value: Json) -> bytes:
    """Return the canonical encoding of a value. Equal values give equal bytes.

    Args:
        value: None, bool, int, str, list or mapping, nested.

    Returns:
        UTF-8 bytes.

    Raises:
        InvalidInput: For floats, sets, bytes, and integers beyond :data:`MAX_INTEGER`.

    >>> canonical_bytes({"b": [1, None], "a": "x"})
    b'{"a":"x","b":[1,null]}'
    """
    _, data = _encoded(value)
    return data


def canonical_text(value: Json) -> str:
    """Return the text of :func:`canonical_bytes`.

    Args:
        value: None, bool, int, str, list or mapping, nested.

    Returns:
        The text.

    Raises:
        InvalidInput: If :func:`canonical_bytes` refuses the value.
    """
    return _encoded(value)[0]


def _encoded(value: Json) -> tuple[str, bytes]:
    try:
        _check(value)
        text = _ENCODER.encode(value)
        return text, text.encode()
    except UnicodeEncodeError as error:
        raise InvalidInput("text cannot be encoded as UTF-8", limit="Unicode without unpaired surrogates") from error
    except (RecursionError, ValueError) as error:
        raise InvalidInput(
            "value cannot be encoded as JSON", limit="lists and mappings that are less deeply nested"
        ) from error


def canonical_members(members: Mapping[str, str]) -> str:
    """Return the canonical text of a mapping whose values are given as canonical texts.

    Args:
        members: Canonical texts by key.

    Returns:
        The text.
    """
    return "{" + ",".join(f"{_ENCODER.encode(key)}:{members[key]}" for key in sorted(members)) + "}"


def parse_canonical(data: bytes | str) -> Json:
    """Read canonical bytes or text.

    Args:
        data: The encoding.

    Returns:
        The value.

    Raises:
        InvalidInput: If the value does not encode to exactly ``data``.
    """
    try:
        text = data.decode() if isinstance(data, bytes) else data
        value: Json = _DECODER.decode(text)
        again = _ENCODER.encode(value)
        again.encode()
    except (ValueError, RecursionError) as error:
        raise InvalidInput("text is not canonical JSON", limit="UTF-8, sorted keys, no spaces, no floats") from error
    if again != text:
        raise InvalidInput("text is not canonical JSON", limit="UTF-8, sorted keys, no spaces, no floats")
    return value


def digest(domain: str, value: Json) -> str:
    """Return the SHA-256 of a value: of ``consilium/<domain>/v1``, a NUL byte and the value's canonical bytes.

    Equal values of different kinds have different hashes, because the domain differs.

    Args:
        domain: Kind of the hashed value, for instance ``study``.
        value: None, bool, int, str, list or mapping, nested.

    Returns:
        The hash in hex.

    Raises:
        InvalidInput: If :func:`canonical_bytes` refuses the value.
    """
    return hashlib.sha256(f"consilium/{domain}/v1".encode() + b"\0" + canonical_bytes(value)).hexdigest()


def sha256_bytes(data: bytes) -> str:
    """Return the SHA-256 of bytes in hex, the content hash of a public object.

    Args:
        data: The bytes.

    Returns:
        64 hex digits.
    """
    return hashlib.sha256(data).hexdigest()


def sha256_file(path: Path) -> str:
    """Return the SHA-256 of a file in hex, read in blocks.

    Args:
        path: The file.

    Returns:
        64 hex digits.
    """
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def rational(value: Fraction) -> str:
    """Return a fraction as ``"numerator/denominator"`` in lowest terms.

    Args:
        value: The fraction.

    Returns:
        The text.

    Raises:
        InvalidInput: If it has more than :data:`MAX_RATIONAL_DIGITS` digits.

    >>> rational(Fraction(6, 4))
    '3/2'
    """
    if max(abs(value.numerator), value.denominator).bit_length() > _RATIONAL_BITS:
        raise InvalidInput(
            "digits of a rational number", limit=f"at most {MAX_RATIONAL_DIGITS} in numerator and in denominator"
        )
    return f"{value.numerator}/{value.denominator}"


@lru_cache(maxsize=256)
def parse_rational(text: str) -> Fraction:
    """Read the text that :func:`rational` wrote.

    Args:
        text: The text.

    Returns:
        The fraction.

    Raises:
        InvalidInput: For anything else, including other spellings of the same number.
    """
    numerator, _, denominator = text.partition("/")
    if max(len(numerator), len(denominator)) > MAX_RATIONAL_DIGITS:
        raise InvalidInput(
            "digits of a rational number",
            value=len(text),
            limit=f"at most {MAX_RATIONAL_DIGITS} in numerator and in denominator",
        )
    try:
        value = Fraction(int(numerator), int(denominator))
    except (ValueError, ZeroDivisionError) as error:
        raise InvalidInput("rational number", value=text, limit="numerator/denominator") from error
    if rational(value) != text:
        raise InvalidInput("rational number", value=text, limit="lowest terms, as numerator/denominator")
    return value


def parse_float(text: str) -> float:
    """Read a finite float that ``float.hex`` wrote.

    Args:
        text: The text.

    Returns:
        The float.

    Raises:
        InvalidInput: For anything else, including other spellings.
    """
    try:
        value = float.fromhex(text)
    except (ValueError, OverflowError):
        raise InvalidInput(
            "number in a record", value=text[:80], limit="a number as Python's float.hex writes it"
        ) from None
    if not isfinite(value) or value.hex() != text:
        raise InvalidInput(
            "number in a record", value=text[:80], limit="a finite number as Python's float.hex writes it"
        )
    return value


def check_hash(text: object) -> str:
    """Return a text if it is a SHA-256 in lower-case hex.

    Args:
        text: The text.

    Returns:
        The text.

    Raises:
        InvalidInput: For anything else.
    """
    if not isinstance(text, str) or not _HASH.fullmatch(text):
        raise InvalidInput("content hash", value=text, limit="64 lower-case hex digits")
    return text


def check_name(text: object, *, what: str) -> str:
    """Return a name if it is safe as a path segment and as a word of a command line.

    Args:
        text: The name: 1 to 64 letters, digits, ``-``, ``_`` and ``.``, beginning with a letter or digit.
        what: What the name is for, in the words of an error.

    Returns:
        The name.

    Raises:
        InvalidInput: For anything else.
    """
    if not isinstance(text, str) or not _NAME.fullmatch(text):
        like = re.sub(r"[^A-Za-z0-9._-]+", "-", str(text)).strip("-._")[:64]
        raise InvalidInput(
            what,
            value=str(text)[:80],
            limit="1 to 64 letters, digits, '-', '_', '.', beginning with a letter or digit, no space",
            remedy=f"use for instance {like!r}" if _NAME.fullmatch(like) else "",
        )
    return text


def check_pool(text: object, *, what: str) -> str:
    """Return a text if it names a patient pool: names with ``/`` between them, at most 64 characters in all.

    Args:
        text: The name.
        what: What the name is for, in the words of an error.

    Returns:
        The name.

    Raises:
        InvalidInput: For anything else.
    """
    if not isinstance(text, str) or len(text) > 64 or not all(map(_NAME.fullmatch, text.split("/"))):
        limit = "names of letters, digits, '-', '_', '.', with '/' between them; 1 to 64 characters"
        raise InvalidInput(what, value=str(text)[:80], limit=limit)
    return text


def check_integer(what: str, value: object, *, least: int, most: int | None = None, limit: str = "") -> int:
    """Return a value if it is an integer within bounds. A bool is not accepted as an integer.

    Args:
        what: Name of the value in the error.
        value: The value.
        least: Lower bound.
        most: Upper bound; None if there is none.
        limit: Description of the bounds in the error; by default it is made from ``least`` and ``most``.

    Returns:
        The value.

    Raises:
        InvalidInput: For anything else.
    """
    if type(value) is not int or value < least or (most is not None and value > most):
        bounds = f"an integer from {least}" if most is None else f"{least} to {most}"
        raise InvalidInput(what, value=value, limit=limit or bounds)
    return value


def member(kind: type[Member], value: Any, *, what: str) -> Member:
    """Return the member of an enumeration that has a value.

    Args:
        kind: The enumeration.
        value: The value.
        what: Name of the value in the error.

    Returns:
        The member.

    Raises:
        InvalidInput: For a value that no member has.
    """
    try:
        return kind(value)
    except ValueError:
        raise InvalidInput(what, value=value, limit=", ".join(kind)) from None


def check_schema(what: str, found: object, *, known: int) -> None:
    """Refuse a format version that is not the known one.

    The error states whether an older or a newer version of Consilium wrote the data, the version found, the version
    that runs here, and which of the two must be upgraded.

    Args:
        what: Name of the format in the error.
        found: The version found.
        known: The known version.

    Raises:
        InvalidInput: If they differ.
    """
    if type(found) is int and found == known:
        return
    if type(found) is not int:
        remedy = "give a file that Consilium wrote; this one is damaged or from another program"
        raise InvalidInput(f"{what} schema", value=found, limit=str(known), remedy=remedy)
    who, remedy = "an older Consilium", "upgrade Consilium where it was written"
    if found > known:
        who, remedy = "a newer Consilium", "upgrade Consilium here to the version that wrote it"
    limit = f"{known}, which Consilium {__version__} reads, the version that runs here"
    raise InvalidInput(f"{what} schema of {who}", value=found, limit=limit, remedy=remedy)


def checked_fields(data: object, kinds: dict[str, type]) -> dict[str, Any]:
    """Return a mapping if it has exactly the expected keys and types.

    Args:
        data: The mapping.
        kinds: Type by key.

    Returns:
        A copy.

    Raises:
        InvalidInput: For anything else.
    """
    if not isinstance(data, dict):
        raise InvalidInput("type of a record", value=type(data).__name__, limit="a mapping")
    if data.keys() != kinds.keys():
        wrong = sorted(data.keys() ^ kinds.keys())
        raise InvalidInput("missing or unknown record keys", value=wrong, limit=f"exactly {sorted(kinds)}")
    for key, kind in kinds.items():
        if not isinstance(data[key], kind) or (kind is int and isinstance(data[key], bool)):
            raise InvalidInput(f"type of record key {key}", value=type(data[key]).__name__, limit=kind.__name__)
    return dict(data)


def _no_float(text: str) -> float:
    raise ValueError(f"a float in canonical JSON: {text}")


def _integer(text: str) -> int:
    if len(text) < 19:  # at most 18 characters, so below 10^18
        return int(text)
    if len(text) > 20 or not -MAX_INTEGER <= (value := int(text)) <= MAX_INTEGER:
        raise ValueError("an integer of more than 64 bits in canonical JSON")
    return value


_ATOMS, _LISTS, _MAPPINGS = (str, bool), (list, tuple), (dict, Mapping)  # a union of types would be made at each call
_RATIONAL_BITS = int((MAX_RATIONAL_DIGITS - 1) * 3.3219)
_DECODER = json.JSONDecoder(parse_float=_no_float, parse_int=_integer, parse_constant=_no_float)
_HASH = re.compile(r"[0-9a-f]{64}")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_ENCODER = json.JSONEncoder(sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)


def _check(value: Json) -> None:
    if value is None or isinstance(value, _ATOMS):
        return
    if isinstance(value, int):
        if not -MAX_INTEGER <= value <= MAX_INTEGER:
            raise InvalidInput(
                "bits of an integer to encode", value=value.bit_length(), limit="at most 63, besides the sign"
            )
    elif isinstance(value, _LISTS):
        for item in value:
            if type(item) is not str:  # most items are; this saves a call for each
                _check(item)
    elif isinstance(value, _MAPPINGS):
        for key, item in value.items():
            if type(key) is not str and not isinstance(key, str):
                raise InvalidInput("key of a mapping", value=key, limit="a string")
            if type(item) is not str:
                _check(item)
    else:
        raise InvalidInput(
            "type of a value to encode",
            value=type(value).__name__,
            limit="None, bool, int, str, list, mapping",
            remedy="write a rational as 'numerator/denominator', bytes as hex",
        )
