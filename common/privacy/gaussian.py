"""Draws the production noise on integers, the rounded Gaussian, from the operating system's CSPRNG.

A value is round(N(0, σ²)): a normal variable with mean 0 and standard deviation σ, rounded to an integer.

Called by :mod:`common.privacy.release` for every answer, and by sites for their shares of a sealed sum. Rounding
commutes with integer shifts. An integer sum plus this noise is therefore post-processing (rounding) of the continuous
Gaussian mechanism, so the analytic curve holds unchanged at any σ. There is no seed; only tests inject another sampler.
Refuses a σ that is not a rational from 2⁻⁴ to 2⁴⁵ (codes are integers, in grid steps of 2⁻¹⁶).

How close the sampler is to the exact distribution, where φ is the density of the standard normal distribution and Φ̄
the probability that its variable is larger:

1. A sample is round(σ·Z) with Z = s·Φ̄⁻¹(P), a random sign s, and P uniform on (0, 1/2). P = 0.b₁b₂… is an infinite
   string of random bits, of which the first 64 are drawn (b₁ = 0). So P ∈ [n, n + 1]·2⁻⁶⁴ for a 63-bit n.
2. Let z be the float64 quantile at (n + ½)·2⁻⁶⁴. Every point of that interval has its quantile within

       guard(n) = 2⁻³⁹·(1 + |z|) + 2/n

   of z, for two reasons.

   * The float64 argument is off by at most p·2⁻⁵³ + 2⁻⁶⁵, and an error dp moves the quantile by dp/φ(z) ≤ 1.26·dp/p at
     p ≥ dp (Mills' ratio: Φ̄(z)/φ(z) ≤ √(π/2) for z ≥ 0). That is at most 2⁻⁵² from the argument and 1.26/n from the
     interval.
   * The quantile function (scipy's ``ndtri``, from Cephes) has a documented relative error below 7.2e-16, under a
     thousandth of 2⁻⁴⁰ ≈ 9.1e-13. Float64's product with σ and the conversion of σ add under 2⁻⁵¹·|z|.

3. If no rounding boundary k + ½ lies within σ·guard of σ·z, every continuation of the bits gives the same rounded
   value, and that value is returned.
4. Otherwise, and whenever n < 2²⁰, the sample is settled exactly. mpmath computes the boundary probabilities
   Φ̄((k ± ½)/σ) to 60 bits more than are drawn, and further random bits are drawn until P lies strictly between two of
   them.

The output therefore has exactly the distribution of the rounded Gaussian, with one exception: for |Z| > 2¹⁶ the product
σ·Z can be too large for int64. Such a Z has probability below e^(−2³¹). The total variation of one coordinate is below
:data:`SAMPLER_TV` = 2⁻⁴⁰⁹⁶. Tests compare ``ndtri`` with mpmath to a thousandth of the guard. Two things are assumed:
the CSPRNG, and mpmath's erfc.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from fractions import Fraction
from typing import Any, TypeAlias

import mpmath
import numpy as np
from jaxtyping import Int64, UInt64
from scipy.special import ndtri

from common.canonical import check_integer
from common.errors import InvalidInput

Sampler: TypeAlias = Callable[[int, Fraction], Int64[np.ndarray, "l"]]
"""A function from a number of values and a standard deviation σ, in grid steps, to that many integers of noise.
Production uses :func:`rounded_gaussian`; tests inject others."""

Entropy: TypeAlias = Callable[[int], bytes]
"""A function from a number of bytes to random bytes. Tests inject others than the system's."""

SAMPLER_TV = Fraction(1, 2**4096)
"""Upper bound on the total variation distance between one sampled coordinate and the true rounded Gaussian."""

MIN_NOISE_STD = Fraction(1, 16)
MAX_NOISE_STD = Fraction(2**45)
"""Largest σ that can be drawn; a :class:`~common.privacy.mechanism.Mechanism` may state a larger one."""
MAX_SIZE = 1 << 24

_BLOCK = 1 << 17
_DEEP_TAIL = 1 << 20  # for n below this, the interval is too wide for the guard's formula
_GUARD = 2.0**-39


def rounded_gaussian(size: int, noise_std: Fraction) -> Int64[np.ndarray, "l"]:
    """Draw independent values of the rounded Gaussian round(N(0, σ²)) from the operating system's secure generator.

    Each value is within :data:`SAMPLER_TV` in total variation of the exact distribution (see the module). Up to σ ≈ 2²⁸
    the function draws millions of values a second, beyond that gradually fewer.

    Args:
        size: Number of values, from 1 to 2²⁴.
        noise_std: Standard deviation σ before rounding, in grid steps of 2⁻¹⁶, a rational from 2⁻⁴ to 2⁴⁵.

    Returns:
        Int64 array of shape [size].

    Raises:
        InvalidInput: If an argument is outside its range, or σ is a float.

    >>> noise = c.rounded_gaussian(1000, Fraction(100))
    >>> noise.dtype, bool(abs(noise.mean()) < 30)
    (dtype('int64'), True)
    """
    return sample(size, noise_std, entropy=os.urandom)


def sample(size: int, noise_std: Fraction, *, entropy: Entropy) -> Int64[np.ndarray, "l"]:
    """Draw from the rounded Gaussian as :func:`rounded_gaussian` does, with random bytes from ``entropy``.

    Production code never calls this function directly.

    Args:
        size: Number of values, from 1 to 2²⁴.
        noise_std: Standard deviation σ before rounding, in grid steps of 2⁻¹⁶, a rational from 2⁻⁴ to 2⁴⁵.
        entropy: Returns the given number of random bytes.

    Returns:
        Int64 array of shape [size].

    Raises:
        InvalidInput: If an argument is outside its range.
    """
    check_integer("number of noise samples", size, least=1, most=MAX_SIZE)
    if not isinstance(noise_std, Fraction) or not MIN_NOISE_STD <= noise_std <= MAX_NOISE_STD:
        raise InvalidInput("noise standard deviation", value=noise_std, limit="a rational from 2^-4 to 2^45 grid steps")
    result = np.empty(size, dtype=np.int64)
    for start in range(0, size, _BLOCK):
        stop = min(start + _BLOCK, size)
        words = np.frombuffer(entropy(8 * (stop - start)), dtype="<u8")
        result[start:stop] = _block(words, noise_std, entropy)
    return result


def _block(words: UInt64[np.ndarray, "b"], noise_std: Fraction, entropy: Entropy) -> Int64[np.ndarray, "b"]:
    negative = (words & np.uint64(1)).astype(bool)
    n = words >> np.uint64(1)
    numerator = n.astype(np.float64) + 0.5
    z = -ndtri(numerator * 2.0**-64)
    x = float(noise_std) * z
    nearest = np.floor(x + 0.5)
    guard = float(noise_std) * (_GUARD * (1 + z) + 2 / numerator)
    unsure = (0.5 - np.abs(x - nearest) <= guard) | (n < _DEEP_TAIL)
    magnitude: Int64[np.ndarray, "b"] = nearest.astype(np.int64)
    for index in np.flatnonzero(unsure):
        magnitude[index] = _settle(int(n[index]), noise_std, entropy)
    magnitude[negative] *= -1
    return magnitude


_contexts = threading.local()


def _context(bits: int) -> Any:
    """Return this thread's own mpmath context at ``bits``, because all threads share the precision of mpmath's global
    context.
    """
    if not hasattr(_contexts, "mp"):
        _contexts.mp = mpmath.MPContext()
    _contexts.mp.prec = bits
    return _contexts.mp


def _settle(n: int, noise_std: Fraction, entropy: Entropy) -> int:
    """Return the exact rounded magnitude of the sample whose uniform variable P starts with the 64 bits of ``n``.

    More bits are drawn as needed.
    """
    bits = 64
    while True:
        n, bits = n << 64 | int.from_bytes(entropy(8), "little"), bits + 64
        value = _between_boundaries(n, bits, noise_std) if n else None  # n = 0 leaves the magnitude unbounded
        if value is not None:
            return value


def _between_boundaries(n: int, bits: int, noise_std: Fraction) -> int | None:
    """Return k if every probability in [n, n + 1]·2^-bits gives a sample of rounded magnitude k; otherwise None."""
    mp = _context(bits + 128)
    low, high = mp.mpf(n) * mp.mpf(2) ** -bits, mp.mpf(n + 1) * mp.mpf(2) ** -bits
    slack = mp.mpf(2) ** -(bits + 60)  # mpmath's erfc is accurate to a few units of bits + 128
    unit = mp.mpf(noise_std.denominator) / (noise_std.numerator * mp.sqrt(2))  # 1/(σ√2)

    def tail(twice: int) -> Any:  # Φ̄(twice/2/σ)
        return mp.erfc(unit * twice / 2) / 2

    k = max(0, round(float(noise_std) * _quantile((low + high) / 2, mp)))  # a first guess; the loop corrects it
    for _ in range(4096):
        upper = tail(2 * k - 1) if k > 0 else mp.mpf(1) / 2
        lower = tail(2 * k + 1)
        if k > 0 and low >= upper * (1 + slack):
            k -= 1
        elif high <= lower * (1 - slack):
            k += 1
        elif (k == 0 or high < upper * (1 - slack)) and low > lower * (1 + slack):
            return k
        else:
            return None
    return None


def _quantile(p: Any, mp: Any) -> float:
    """Return the z that a standard normal variable exceeds with probability p.

    It has about float64's accuracy, even for a p that float64 cannot hold.
    """
    if p > mp.mpf(2) ** -1000:
        return -float(ndtri(float(p)))
    z = mp.sqrt(-2 * mp.log(p))
    for _ in range(6):  # Newton's method on log Φ̄, which is nearly a parabola in the tail
        tail = mp.erfc(z / mp.sqrt(2)) / 2
        z += (mp.log(tail) - mp.log(p)) * tail / mp.npdf(z)
    return float(z)
