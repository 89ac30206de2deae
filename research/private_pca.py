"""Computes private principal components from one noisy second-moment matrix, charged like any release.

``cells`` uses it. Rows are scaled to unit norm (a zero row stays zero), so adding or removing one row moves XᵀX by at
most 1 in Frobenius norm. Noise is added to the upper triangle and mirrored. The eigenvectors, and whitening by the
noisy eigenvalues, are post-processing. Scaling by other statistics of the data would not be post-processing, so data
are otherwise scaled by constants only.
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
    """A linear projection of unit rows.

    Attributes:
        components: Eigenvectors as columns, float [d, k].
        scale: Factors of the projected coordinates, float [k]; ones without whitening.
    """

    components: Float[np.ndarray, "d k"]
    scale: Float[np.ndarray, "k"]

    def apply(self, rows: Float[np.ndarray, "n d"]) -> Float[np.ndarray, "n k"]:
        """Scale rows to unit norm, project and scale them; used alike for training and test data."""
        result: np.ndarray = (unit_rows(rows) @ self.components) * self.scale
        return result


def unit_rows(rows: Float[np.ndarray, "n d"]) -> Float[np.ndarray, "n d"]:
    """Return each row divided by its norm, in float64; zero and non-finite rows become zero."""
    safe = np.where(np.isfinite(rows).all(axis=1, keepdims=True), rows, 0.0).astype(np.float64)
    norms = np.linalg.norm(safe, axis=1, keepdims=True)
    result: np.ndarray = np.divide(safe, norms, out=np.zeros_like(safe), where=norms > 0)
    return result


def noisy_second_moment(
    rows: Float[np.ndarray, "n d"], *, noise_multiplier: Fraction, noise: NoiseSampler = rounded_gaussian
) -> Float[np.ndarray, "d d"]:
    """Return XᵀX + E for the matrix X of rows, with a symmetric noise matrix E: one Gaussian release.

    The entries of E on and above the diagonal are normal, with the noise multiplier z as their standard deviation.

    Guarantee: ℓ2 sensitivity 1 under add-remove of one row.

    Args:
        rows: Float array [n, d]; scaled to unit norm first.
        noise_multiplier: Noise multiplier z.
        noise: Draws integer noise.
    """
    units = unit_rows(rows)
    size = units.shape[1]
    upper = np.triu_indices(size)
    total = (units.T @ units)[upper] * SUMMED_NORM  # the norm of the triangle is at most that of the matrix
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
    """Return a projection on the k leading eigenvectors of the noisy second moment of the rows, scaled to norm 1.

    The eigenvalues are sorted in decreasing order with their sign, so a negative eigenvalue comes last. With
    ``whiten``, each coordinate is divided by √(λ/n). Here λ is the noisy eigenvalue, or z·√d if that is larger. Rows of
    norm 1 then have a variance of about 1 in each coordinate. The number of rows n is public.

    Args:
        rows: Float array [n, d]; each row is first scaled to norm 1.
        components: Number of components k.
        noise_multiplier: Noise multiplier z.
        whiten: Scale coordinates to unit variance.
        noise: Draws integer noise.

    Returns:
        The projection, with components [d, k] and scale [k].

    Raises:
        InvalidInput: If ``components`` is not within 1 to d.
    """
    if not 1 <= components <= rows.shape[1]:
        raise InvalidInput("principal components", value=components, limit=f"1 to {rows.shape[1]}")
    moment = noisy_second_moment(rows, noise_multiplier=noise_multiplier, noise=noise)
    values, vectors = np.linalg.eigh(moment)
    values, vectors = values[::-1][:components], vectors[:, ::-1][:, :components]
    floor = max(float(noise_multiplier) * np.sqrt(rows.shape[1]), 1e-12)
    scale = 1 / np.sqrt(np.maximum(values, floor) / len(rows)) if whiten else np.ones(components)
    return Projection(components=np.ascontiguousarray(vectors), scale=scale)
