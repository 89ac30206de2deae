"""Private principal components: one noisy second-moment matrix, charged like any release, and whitening for free.

Rows are scaled to unit norm (a zero row stays zero), so adding or removing one moves XᵀX by at most 1 in Frobenius
norm. Noise goes on the upper triangle and is mirrored. Everything after that is post-processing: the signed
eigenvectors, and whitening by the noisy eigenvalues. Scaling by statistics of the data would not be: constants only.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

import numpy as np
from jaxtyping import Float

from client.training.private.clipped_sums import RADIUS_INT
from common.errors import InvalidInput
from common.privacy.gaussian import Sampler as NoiseSampler
from common.privacy.gaussian import rounded_gaussian
from research.grid import SUMMED_NORM, grid_sum


@dataclass(frozen=True, slots=True)
class Projection:
    """``components`` [d, k] as columns, ``scale`` [k] multiplies the projected coordinates (ones without whitening)."""

    components: Float[np.ndarray, "d k"]
    scale: Float[np.ndarray, "k"]

    def apply(self, rows: Float[np.ndarray, "n d"]) -> Float[np.ndarray, "n k"]:
        """Unit rows, projected and scaled; the same for training and test data."""
        result: np.ndarray = (unit_rows(rows) @ self.components) * self.scale
        return result


def unit_rows(rows: Float[np.ndarray, "n d"]) -> Float[np.ndarray, "n d"]:
    """x/‖x‖ in float64; zero and non-finite rows become zero."""
    safe = np.where(np.isfinite(rows).all(axis=1, keepdims=True), rows, 0.0).astype(np.float64)
    norms = np.linalg.norm(safe, axis=1, keepdims=True)
    result: np.ndarray = np.divide(safe, norms, out=np.zeros_like(safe), where=norms > 0)
    return result


def noisy_second_moment(
    rows: Float[np.ndarray, "n d"], *, noise_multiplier: Fraction, noise: NoiseSampler = rounded_gaussian
) -> Float[np.ndarray, "d d"]:
    """XᵀX + E, E symmetric with N(0, z²) on and above the diagonal: one Gaussian release of multiplier z."""
    units = unit_rows(rows)
    size = units.shape[1]
    upper = np.triu_indices(size)
    total = (units.T @ units)[upper] * SUMMED_NORM  # the triangle's norm is below the matrix's
    released = grid_sum(total, coordinates=total.size) + noise(total.size, noise_multiplier * RADIUS_INT)
    result = np.zeros((size, size))
    result[upper] = released / RADIUS_INT
    mirrored: np.ndarray = result + np.triu(result, 1).T
    return mirrored


def private_pca(
    rows: Float[np.ndarray, "n d"],
    *,
    components: int,
    noise_multiplier: Fraction,
    whiten: bool = True,
    noise: NoiseSampler = rounded_gaussian,
) -> Projection:
    """The leading ``components`` eigenvectors of the noisy second moment, by signed eigenvalue.

    With ``whiten`` each coordinate is divided by √(λ/n), λ the noisy eigenvalue held at or above the noise level z·√d,
    so that unit rows come out with about unit variance a coordinate. n counts rows and is public.
    """
    if not 1 <= components <= rows.shape[1]:
        raise InvalidInput("principal components", value=components, limit=f"1 to {rows.shape[1]}")
    moment = noisy_second_moment(rows, noise_multiplier=noise_multiplier, noise=noise)
    values, vectors = np.linalg.eigh(moment)
    values, vectors = values[::-1][:components], vectors[:, ::-1][:, :components]
    floor = max(float(noise_multiplier) * np.sqrt(rows.shape[1]), 1e-12)
    scale = 1 / np.sqrt(np.maximum(values, floor) / len(rows)) if whiten else np.ones(components)
    return Projection(components=np.ascontiguousarray(vectors), scale=scale)
