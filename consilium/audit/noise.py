"""Tests the noise itself: its variance overall and in parts, its distribution, and the independence of its values.

``consilium.audit.run`` calls it with noise [runs, queries, l] from complete runs of a study, in the order in which it
was drawn, and with its claimed standard deviation σ. Each test's null distribution is exact (χ², or a normal by
conditioning on one factor), or its tail is bounded by a union over pairs. The false alarm rate therefore holds for all
but very small numbers of draws. If the noise is as claimed, a finding is an alarm with probability at most
:data:`ALPHA`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from math import ceil, log, log2, pi, sqrt
from typing import TypeAlias

import numpy as np
from jaxtyping import Float, Int64
from scipy.fft import dctn, irfft, rfft
from scipy.stats import chi2, norm

from common.privacy.audit import AuditFinding, residual_finding, spectral_finding

ALPHA = 1e-5
"""False alarm rate of one finding."""

_STRETCH_ALPHA = 1e-6
_FEWEST_SQUARES = 8
_MOST_PAIRS = 2_000  # vectors, or coordinates, of which all pairs are tested
_MOST_LAGS = 128  # longer lags are covered by the spectrum and by repeated stretches


_Sums: TypeAlias = tuple[np.ndarray, np.ndarray, int]
"""Three facts about several parts of the noise: for each part, the largest and the smallest sum of squares that its
values may have had before rounding; and the number of values in a part.
"""


def noise_findings(noise: Int64[np.ndarray, "runs queries l"], noise_std: float) -> tuple[AuditFinding, ...]:
    """Run every test of this module on the noise of several runs of a study.

    Args:
        noise: int64 array [runs, queries, l] in grid steps of 2⁻¹⁶.
        noise_std: The claimed standard deviation, in the same steps.

    Returns:
        The findings.
    """
    scaled = noise / sqrt(noise_std**2 + 1 / 12)  # rounding adds 1/12
    vectors = scaled.reshape(-1, scaled.shape[-1])
    findings = [
        variance_finding(scaled),
        _least_likely(
            "variance by place",
            _places(scaled, half=0.5 / noise_std),
            "lowest p of any run, round, vector or coordinates",
        ),
        residual_finding(noise, noise_std),
        _least_likely(
            "spectrum of the draws",
            _frequencies(vectors),
            "lowest p of any frequency, along vectors and time",
        ),
        _remainders(noise, noise_std),
        _largest("pairs of vectors at any shift", _vector_pairs(scaled)),
        _largest("pairs of coordinates", _coordinate_pairs(vectors)),
        _largest("neighbours in a vector", _lags(vectors)),
        repeated_stretches(noise.reshape(-1), noise_std),
        coincidences(noise, noise_std),
    ]
    for name, rows in (
        ("rounds", np.moveaxis(scaled, 1, 0).reshape(scaled.shape[1], -1)),
        ("coordinates", np.moveaxis(scaled, 2, 0).reshape(scaled.shape[2], -1)),
    ):
        if 4 * len(rows) <= rows.shape[1]:  # with fewer samples the bound is void
            findings.append(spectral_finding(name, rows))
    return tuple(findings)


def variance_finding(scaled: Float[np.ndarray, "runs queries l"]) -> AuditFinding:
    """Test the standard deviation of all noise values against the claimed one, by a two-sided χ² test.

    Args:
        scaled: Noise divided by its claimed standard deviation.

    Returns:
        The finding.
    """
    n = scaled.size
    measured = sqrt(float((scaled**2).sum()) / n)
    low, high = (sqrt(chi2.ppf(q, n) / n) for q in (ALPHA / 2, 1 - ALPHA / 2))
    return AuditFinding(
        "variance",
        measured,
        low,
        not low <= measured <= high,
        f"σ measured over {n} draws, divided by the claimed σ; at least",
    )


def smallest_fault(draws: int) -> float:
    """Return the ratio of true to claimed σ that :func:`variance_finding` detects with probability 95 %.

    Args:
        draws: Number of noise values.

    Returns:
        The ratio, below 1.
    """
    return 1 - float(norm.isf(ALPHA / 2) + norm.isf(0.05)) / sqrt(2 * draws)


def repeated_stretches(values: Int64[np.ndarray, "n"], noise_std: float) -> AuditFinding:
    """Find stretches of noise values whose absolute values occur a second time in the sequence, at any position.

    Independent draws repeat a given stretch of length w with probability at most p^w, where p is the probability of the
    most likely absolute value. w is chosen so that the sum over all pairs of positions is below 1e-6.
    """
    likeliest = min(0.5, 2 / (noise_std * sqrt(2 * pi)))
    pairs = values.size**2 / 2
    length = max(2, ceil(log(pairs / _STRETCH_ALPHA) / -log(likeliest)))
    repeated = 0
    if length < values.size:
        mixed = np.random.default_rng(0).integers(1, 2**63, size=length, dtype=np.uint64) | np.uint64(1)
        sizes = np.abs(values).astype(np.uint64)
        marks = np.zeros(values.size - length + 1, dtype=np.uint64)
        for place in range(length):  # one 64-bit hash for each stretch; collisions are rarer than equal stretches
            marks += _scramble(sizes[place : place + marks.size] + mixed[place])
        repeated = marks.size - np.unique(marks).size
    return AuditFinding.at_most("noise used twice", repeated, 0, f"stretches of {length} draws seen before")


def coincidences(noise: Int64[np.ndarray, "runs queries l"], noise_std: float) -> AuditFinding:
    """Find noise values that are used again in another order, by counting pairs of equal absolute values in each run.

    The expected number of such pairs among n values is n²/2·Σp², where p are the probabilities of the absolute values;
    its standard deviation follows from Σp² and Σp³. The limit lies 8 standard deviations plus 25 above the expected
    number. For any n, independent draws exceed the limit with a probability below :data:`ALPHA`.
    """
    n = noise[0].size
    square, cube = 1 / (noise_std * sqrt(pi)), 2 / (sqrt(3) * pi * noise_std**2)
    expected = n * n / 2 * square
    spread = sqrt(expected + n**3 * max(0.0, cube - square**2))
    limit = expected + 8 * spread + 25
    worst = 0
    for run in noise:
        counts = np.unique(np.abs(run), return_counts=True)[1].astype(np.int64)
        worst = max(worst, int((counts * (counts - 1) // 2).sum()))
    return AuditFinding.at_most("values dealt again", worst, limit, "pairs of equal size in a run")


def _scramble(values: np.ndarray) -> np.ndarray:
    """Hash each value by splitmix64's finaliser."""
    mixed = values * np.uint64(0x9E3779B97F4A7C15)
    mixed ^= mixed >> np.uint64(30)
    mixed *= np.uint64(0xBF58476D1CE4E5B9)
    mixed ^= mixed >> np.uint64(27)
    mixed *= np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))


def _places(scaled: Float[np.ndarray, "runs queries l"], *, half: float) -> Iterator[_Sums]:
    """Yield bounds on the sum of squares in each part of the noise, such as a round, a vector or a coordinate.

    A fault could make the noise in one of these parts too small. A value before rounding differs from the rounded value
    by at most ``half``, so each sum has an upper and a lower bound.
    """
    sizes = np.abs(scaled)
    for (most, squares), (least, _) in zip(
        _parts((sizes + half) ** 2), _parts(np.maximum(sizes - half, 0) ** 2), strict=True
    ):
        yield most, least, squares


def _parts(squares: Float[np.ndarray, "runs queries l"]) -> Iterator[tuple[np.ndarray, int]]:
    """Yield sums of squared noise values, and the number of values in each, by parts of the noise.

    The parts are runs, rounds, vectors, coordinates, and stretches of coordinates.
    """
    runs, queries, size = squares.shape
    yield squares.sum(axis=(1, 2)), queries * size
    yield squares.sum(axis=(0, 2)), runs * size
    yield squares.sum(axis=2), size
    yield squares.sum(axis=(0, 1)), runs * queries
    for parts in (2**k for k in range(1, int(log2(size)))):
        width = size // parts
        blocks = squares[..., : parts * width].reshape(runs, queries, parts, width).sum(axis=-1)
        yield blocks.sum(axis=(0, 1)), runs * queries * width
        yield blocks.sum(axis=0), runs * width
        yield squares[..., parts:].sum(axis=2), size - parts


def _frequencies(vectors: Float[np.ndarray, "t l"]) -> Iterator[_Sums]:
    """Yield sums of squared noise at each frequency of cosine transforms along vectors, along time, and along both.

    An orthonormal transform of independent normals gives independent normals.
    """
    along, time = dctn(vectors, axes=(1,), norm="ortho"), dctn(vectors, axes=(0,), norm="ortho")
    both = dctn(vectors, norm="ortho").ravel()
    for sums, squares in (
        ((along**2).sum(axis=0), len(vectors)),
        ((time**2).sum(axis=1), vectors.shape[1]),
        (both**2, 1),
    ):
        # rounded draws may cancel exactly, so with few squares only the largest sum is tested
        yield sums if squares >= _FEWEST_SQUARES else np.full(1, float(squares)), sums, squares


def _vector_pairs(scaled: Float[np.ndarray, "runs queries l"]) -> Iterator[np.ndarray]:
    """Yield ⟨a, b⟩/‖b‖ of pairs of noise vectors a and b, which is standard normal given b.

    All pairs of the first 2,000 vectors are compared as they are. Within each run, all pairs are also compared with one
    vector cyclically shifted, for every shift.
    """
    vectors = scaled.reshape(-1, scaled.shape[-1])[:_MOST_PAIRS]
    yield _upper_products(vectors)
    for run in scaled:
        spectrum, lengths = rfft(run, axis=1), np.linalg.norm(run, axis=1)
        for other in range(1, len(run)):
            shifted = irfft(spectrum[:other] * spectrum[other].conj(), n=run.shape[1], axis=1)
            yield _over(shifted, float(lengths[other]))


def _coordinate_pairs(vectors: Float[np.ndarray, "t l"]) -> Iterator[np.ndarray]:
    yield _upper_products(np.ascontiguousarray(vectors.T[:_MOST_PAIRS]))


def _upper_products(rows: Float[np.ndarray, "n k"]) -> Float[np.ndarray, "p"]:
    """Return ⟨a, b⟩/‖b‖ of every pair of rows a and b."""
    products = _over(rows @ rows.T, np.linalg.norm(rows, axis=1))
    upper: np.ndarray = products[np.triu_indices(len(rows), k=1)]
    return upper


def _lags(vectors: Float[np.ndarray, "t l"]) -> Iterator[np.ndarray]:
    """Yield two tests of each lag s: a sum of products v_j·v_(j+s) of noise values, divided by the norm of the v_(j+s).

    The coordinates j are split into blocks of length s. One sum runs over the even blocks, the other over the odd ones.
    No value is then both a v_j and a v_(j+s) of one sum. Given the v_(j+s), each result is therefore standard normal.
    """
    size = vectors.shape[1]
    for lag in range(1, min(size, _MOST_LAGS + 1)):
        block = (np.arange(size - lag) // lag) % 2
        for half in (0, 1):
            first = np.flatnonzero(block == half)
            if first.size:
                later = vectors[:, first + lag]
                yield _over((vectors[:, first] * later).sum(), float(np.linalg.norm(later))).ravel()


def _over(value: np.ndarray | float, length: np.ndarray | float) -> np.ndarray:
    """Divide two arrays, with x/0 = 0. Noise that is missing altogether is detected by the variance test."""
    return np.divide(value, length, out=np.zeros(np.shape(value)), where=np.asarray(length) > 0)


def _least_likely(name: str, groups: Iterable[_Sums], what: str) -> AuditFinding:
    """Test whether the lowest two-sided p-value of all sums of squares is below ALPHA divided by their number."""
    lowest, tests = 1.0, 0
    for most, least, squares in groups:
        tests += least.size
        lowest = min(lowest, 2 * float(chi2.cdf(most.min(), squares)), 2 * float(chi2.sf(least.max(), squares)))
    limit = ALPHA / tests
    return AuditFinding.at_least(name, lowest, limit, what)


def _remainders(noise: Int64[np.ndarray, "runs queries l"], noise_std: float) -> AuditFinding:
    """Test whether remainders of the noise are uniform: noise without random low bits would not hide a sum's low bits.

    The test is χ² over the remainders of the noise modulo 3, 5 and 7, and over those of ⌊noise/2^k⌋ modulo 16 (four
    neighbouring bits) for every k with 16·2^k ≤ σ/8, where σ is the noise's standard deviation. A rounded Gaussian
    modulo a number q ≤ σ/8 is uniform up to e^(−2π²·64).
    """
    values, lowest, tests = noise.ravel(), 1.0, 0
    scales = [1 << shift for shift in range(max(0, int(log2(noise_std)) - 6))]
    for scale, cells in [*((scale, 16) for scale in scales), (1, 3), (1, 5), (1, 7)]:
        if scale * cells <= noise_std / 8 and values.size >= 20 * cells:
            counts = np.bincount((values // scale) % cells, minlength=cells)
            expected = values.size / cells
            lowest = min(lowest, float(chi2.sf(((counts - expected) ** 2).sum() / expected, cells - 1)))
            tests += 1
    limit = ALPHA / max(tests, 1) / 10  # χ² of counts is approximate
    return AuditFinding.at_least("remainders", lowest, limit, "lowest p of remainders at any scale")


def _largest(name: str, parts: Iterable[np.ndarray]) -> AuditFinding:
    """Test whether the largest absolute value of several standard normals is too large.

    The level is ALPHA divided by their number, so the normals may depend on each other.
    """
    largest, tests = 0.0, 0
    for values in parts:
        if values.size:
            tests += values.size
            largest = max(largest, float(np.abs(values).max()))
    limit = float(norm.isf(ALPHA / 2 / max(tests, 1)))
    return AuditFinding.at_most(name, largest, limit, f"largest of {tests} correlations, in spreads")
