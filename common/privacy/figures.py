"""How ε, δ and chances are written: one way each, rounded up, so that no text promises more than the number behind it.

Pure decimal arithmetic. Refuses NaN and negative numbers. The bounds are on privacy lost, so up is the careful side.
"""

from __future__ import annotations

from decimal import ROUND_CEILING, Context, Decimal
from math import isnan

from common.canonical import check_integer
from common.errors import InvalidInput

_MOST_DECIMALS = 4  # of a percentage: closer to 100 % than that is written as 100 %
_PLAIN = range(-5, 16)  # powers of ten of the leading digit written without an exponent


def epsilon_text(epsilon: float, digits: int = 4) -> str:
    """The least decimal of ``digits`` significant digits that is not below ``epsilon``, without trailing zeros.

    8.0 → ``8``, 8.00000005 → ``8.001``, 3.30134 → ``3.302``; 1.1 → ``1.1``: a float64 stands for the shortest decimal
    that names it. The text read back is never below the value, and less than a unit of its last possible digit above.
    Edge cases: 0 → ``0``; infinity → ``∞``; below 1e-5 and from 1e16 on with an exponent; NaN, negative → InvalidInput.
    """
    value = _checked("epsilon to be written", epsilon)
    if value.is_infinite():
        return "∞"
    rounded = _up(value, digits)
    return f"{rounded:f}" if rounded.is_zero() or rounded.adjusted() in _PLAIN else f"{rounded:e}"


def delta_text(delta: float, digits: int = 3) -> str:
    """δ in at most ``digits`` significant digits, rounded up: 0.001, ``1e-05``, 1.0001e-5 → ``1.01e-05``.

    The text read back is never below ``delta``. NaN, infinite and negative → InvalidInput.
    """
    value = _checked("delta to be written", delta)
    if value.is_infinite():
        raise InvalidInput("delta to be written", value=delta, limit="a finite number, 0 or above")
    return f"{float(_up(value, digits)):.{digits}g}"


def percent_text(share: float) -> str:
    """A share as a percentage rounded up to a tenth, further next to 100: 0.8512 → ``85.2 %``.

    Edge cases: above 99.9999 % → ``100 %``; NaN, negative, above 1 → InvalidInput.
    """
    _checked("share to be written", share)
    value = 100 * Decimal(share)  # exactly: nobody types a share
    if value > 100:
        raise InvalidInput("share to be written", value=share, limit="0 to 1")
    for places in range(1, _MOST_DECIMALS + 1):
        rounded = value.quantize(Decimal(1).scaleb(-places), rounding=ROUND_CEILING)
        if rounded < 100:
            return f"{_short(rounded):f} %"
    return "100 %"


def _checked(what: str, value: float) -> Decimal:
    """The shortest decimal that names the float64: what was typed, where it was typed."""
    if isinstance(value, bool) or not isinstance(value, int | float) or isnan(value) or value < 0:
        raise InvalidInput(what, value=value, limit="a number, 0 or above")
    return Decimal(repr(float(value)))


def _up(value: Decimal, digits: int) -> Decimal:
    check_integer("digits to be written", digits, least=1, most=15, limit="an integer from 1 to 15")
    return _short(Context(prec=digits, rounding=ROUND_CEILING).plus(value))


def _short(value: Decimal) -> Decimal:
    return Decimal(0) if value.is_zero() else value.normalize()
