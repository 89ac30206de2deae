"""Formats ε, δ, probabilities and noise, rounded so that no text promises more than the number.

Called by every text and page that shows such a figure. ε, δ and probabilities bound a loss, so they are rounded up.
Noise protects, so it is rounded down. The arithmetic is decimal and exact. Refuses NaN and negative numbers.
"""

from __future__ import annotations

from decimal import ROUND_CEILING, ROUND_FLOOR, Context, Decimal
from fractions import Fraction
from math import inf, isinf, isnan

from common.canonical import check_integer
from common.errors import InvalidInput

_MOST_DECIMALS = 4  # most decimals of a percentage; anything closer to 100 % is written as 100 %
_PLAIN_POWERS = range(-5, 16)  # powers of ten of the leading digit written without an exponent


def epsilon_text(epsilon: float, digits: int = 4) -> str:
    """Return ε in at most ``digits`` significant digits, rounded up, without trailing zeros.

    If a decimal of at most ``digits`` digits reads back as this float, it is printed: 1.1 gives ``1.1``, although the
    nearest float is 9e-17 above it. Any other float is printed as the smallest decimal of ``digits`` digits that is not
    below its exact value. Read back as a float, the text is therefore never below ``epsilon``.

    Args:
        epsilon: ε, 0 or above; infinity is printed as ``∞``.
        digits: Most significant digits, from 1 to 15.

    Returns:
        The text, with an exponent below 1e-5 and from 1e16 on.

    Raises:
        InvalidInput: For NaN and negative numbers.

    >>> epsilon_text(1.1), epsilon_text(3.30134), epsilon_text(8.00000005)
    ('1.1', '3.302', '8.001')
    """
    if isinstance(epsilon, float) and epsilon == inf:
        return "∞"
    # Rounding up the float's shortest decimal equals rounding up its exact value: no shorter decimal lies between.
    return _plain(_up(_checked("epsilon to be written", epsilon), digits))


def delta_text(delta: float) -> str:
    """Return δ in at most three significant digits, rounded up; the text read back is never below ``delta``.

    Args:
        delta: δ, finite and at least 0.

    Returns:
        The text.

    Raises:
        InvalidInput: If δ is NaN, infinite or negative.

    >>> delta_text(1e-5), delta_text(1.0001e-5)
    ('1e-05', '1.01e-05')
    """
    return f"{float(_up(_checked('delta to be written', delta), 3)):.3g}"


def noise_text(noise: float | Fraction, digits: int = 6) -> str:
    """Return a noise multiplier z or a noise standard deviation in at most ``digits`` significant digits, rounded down.

    The text is never above the exact value of ``noise``.

    Args:
        noise: The multiplier or standard deviation, at least 0; a rational if it is known exactly.
        digits: Most significant digits, from 1 to 15. Trailing zeros are left out.

    Returns:
        The text, with an exponent below 1e-5 and from 1e16 on.

    Raises:
        InvalidInput: For NaN, infinity and negative numbers.

    >>> noise_text(1.200549, 5), noise_text(0.48001399)
    ('1.2005', '0.480013')
    """
    if not isinstance(noise, Fraction):
        _checked("noise to be written", noise)
    check_integer("digits to be written", digits, least=1, most=15, limit="an integer from 1 to 15")
    exact, down = Fraction(noise), Context(prec=digits, rounding=ROUND_FLOOR)
    if exact < 0:
        raise InvalidInput("noise to be written", value=float(exact), limit="a number, 0 or above")
    return _plain(_short(down.divide(Decimal(exact.numerator), Decimal(exact.denominator))))


def percent_text(share: float) -> str:
    """Return a share as a percentage rounded up to a tenth, with more digits close to 100 %.

    Args:
        share: From 0 to 1.

    Returns:
        The text; ``100 %`` above 99.9999 %.

    Raises:
        InvalidInput: If the share is NaN, negative or above 1.

    >>> percent_text(0.8512)
    '85.2 %'
    """
    _checked("share to be written", share)
    value = 100 * Decimal(share)  # the exact value, because shares are computed, not typed
    if value > 100:
        raise InvalidInput("share to be written", value=share, limit="0 to 1")
    for places in range(1, _MOST_DECIMALS + 1):
        rounded = value.quantize(Decimal(1).scaleb(-places), rounding=ROUND_CEILING)
        if rounded < 100:
            return f"{_short(rounded):f} %"
    return "100 %"


def spent_text(share: float) -> str:
    """Return the spent part of a budget as a percentage rounded up to a hundredth.

    Args:
        share: Spent over allowed, at least 0. It is above 1 if the budget was exceeded.

    Returns:
        The text.

    Raises:
        InvalidInput: If the share is NaN, infinite or negative.

    >>> spent_text(0.27501)
    '27.51 %'
    """
    _checked("share to be written", share)
    return f"{(100 * Decimal(share)).quantize(Decimal('0.01'), rounding=ROUND_CEILING):f} %"


def _checked(what: str, value: float) -> Decimal:
    """Return the shortest decimal that reads back as this float64. That is usually the number that somebody typed.

    Args:
        what: Name of the value in the error.
        value: The value.

    Raises:
        InvalidInput: If the value is no number, NaN or negative.
    """
    if isinstance(value, bool) or not isinstance(value, int | float) or isnan(value) or value < 0:
        raise InvalidInput(what, value=value, limit="a number, 0 or above")
    if isinf(value):
        raise InvalidInput(what, value=value, limit="a finite number, 0 or above")
    return Decimal(repr(float(value)))


def _up(value: Decimal, digits: int) -> Decimal:
    check_integer("digits to be written", digits, least=1, most=15, limit="an integer from 1 to 15")
    return _short(Context(prec=digits, rounding=ROUND_CEILING).plus(value))


def _plain(rounded: Decimal) -> str:
    return f"{rounded:f}" if rounded.is_zero() or rounded.adjusted() in _PLAIN_POWERS else f"{rounded:e}"


def _short(value: Decimal) -> Decimal:
    return Decimal(0) if value.is_zero() else value.normalize()
