"""Checks arguments of the privacy arithmetic: classes, finite numbers, exact rationals, and a guarantee's δ."""

from __future__ import annotations

from fractions import Fraction
from sys import float_info
from typing import TypeVar

from common.errors import InvalidInput

Kind = TypeVar("Kind")
AS_FRACTION = 'give a fractions.Fraction, such as Fraction("0.1")'
"""What to do about a number of another type where a rational is needed."""


def check_kind(what: str, value: object, kind: type[Kind]) -> Kind:
    """Return a value if it is an instance of a class.

    Args:
        what: Name of the value in the error.
        value: The value.
        kind: The class.

    Returns:
        The value.

    Raises:
        InvalidInput: For anything else.
    """
    if not isinstance(value, kind):
        raise InvalidInput(what, value=type(value).__name__, limit=f"an object of class {kind.__name__}")
    return value


def check_number(what: str, value: float, *, zero: bool = False) -> float:
    """Return a value if it is a finite number above 0. A bool is not accepted as a number.

    Args:
        what: Name of the value in the error.
        value: The value.
        zero: True to allow 0, too.

    Returns:
        The value.

    Raises:
        InvalidInput: For anything else.
    """
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not abs(value) <= float_info.max or value < 0 or (value == 0 and not zero):
        raise InvalidInput(
            what, value=value, limit="a finite number, 0 or above" if zero else "a finite number above 0"
        )
    return value


def check_rational(what: str, value: Fraction, *, zero: bool = False) -> Fraction:
    """Return a value if it is a rational above 0, held exactly.

    Args:
        what: Name of the value in the error.
        value: The value.
        zero: True to allow 0, too.

    Returns:
        The value.

    Raises:
        InvalidInput: For anything else.
    """
    if not isinstance(value, Fraction) or value.numerator < 0 or (value.numerator == 0 and not zero):
        raise InvalidInput(
            what,
            value=value,
            limit="a rational, 0 or above" if zero else "a positive rational",
            remedy="" if isinstance(value, Fraction) else AS_FRACTION,
        )
    return value


def check_delta(what: str, value: float) -> float:
    """Return a value if it is a float above 0 and below 1.

    Args:
        what: Name of the value in the error.
        value: The value.

    Returns:
        The value.

    Raises:
        InvalidInput: For anything else.
    """
    if not isinstance(value, float) or not 0 < value < 1:
        raise InvalidInput(what, value=value, limit="above 0 and below 1")
    return value
