"""Computes labels of public volumes from how structures look.

A public volume's label is where the public shapes lie, times how likely a voxel's values are of each structure, smooth
over neighbours (a mean field), moved as a whole to where the structures are found, and as large in the mean as public
shapes are. Where public shapes share a place, the public start has a say in every volume too. The same function makes
the controls, from the looks that nobody was asked for. Post-processing. Free of torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from jaxtyping import Float
from scipy.ndimage import center_of_mass, gaussian_filter, shift

from common.codecs.codec import LinearCodec
from common.protocols.appearance import standardised, window_of
from server.protocols.appearance.look import Look

SHAPES = 48
"""Shapes drawn from the codec: the atlas is their mean."""

BLUR = 2.0
"""Voxels that the atlas is blurred by: shapes of few maps do not cover all places."""

FLOOR = 1e-3
SHARPNESS = 1.6
"""Power of the likelihood of a voxel's values."""

FAR = 8.0
"""Natural logarithms that a voxel's values may speak against a structure at most."""

COUPLING = 3.0
"""How much a voxel takes from its neighbours' labels."""

NEAR = 1.0
"""Width of the neighbourhood in voxels."""

START_SHARE = 0.5
"""Power of what the public start says of a voxel: it learnt the atlas' shapes, so what it says is not all new."""

PLACED = 0.15
"""Least Dice of the codec's shapes with their mean from which a public start knows where structures are."""

PASSES, FIELD_PASSES = 4, 4
BINS = 64
LABELS = (SHAPES, BLUR, FLOOR, SHARPNESS, FAR, COUPLING, NEAR, START_SHARE, PLACED, PASSES, FIELD_PASSES, BINS)
"""The labels' constants: what is made of them and kept is named by them too."""


def drawn_shapes(codec: LinearCodec, *, count: int = SHAPES, seed: int = 0) -> Float[np.ndarray, "s k x y z"]:
    """Shapes as the codec's public maps have them, float32 probabilities."""
    rng = np.random.default_rng(seed)
    codes = rng.normal(size=(count, codec.dimension)) * np.sqrt(codec.powers)
    return np.stack([codec.decode(code, noise_std=0.0) for code in codes]).astype(np.float32)


def placed(codec: LinearCodec) -> bool:
    """Whether the mean Dice of the codec's label shapes with their own mean is at least :data:`PLACED`."""
    from common.metrics import dice_per_class, mean_present  # torch

    shapes = drawn_shapes(codec)
    mean = shapes.mean(axis=0).argmax(axis=0).astype(np.uint8)
    each = [dice_per_class(mean, shape.argmax(axis=0).astype(np.uint8), codec.labels) for shape in shapes]
    return float(np.mean([mean_present(dice) for dice in each])) >= PLACED


def labelled(
    images: Sequence[Float[np.ndarray, "c x y z"]],
    codec: LinearCodec,
    look: Look,
    *,
    begun: Sequence[Float[np.ndarray, "k x y z"]] | None = None,
) -> Iterator[Float[np.ndarray, "k x y z"]]:
    """Float32 labels of public volumes under a look; ``begun``: what the public start, if any, says of each."""
    window, mean = window_of(codec), drawn_shapes(codec).mean(axis=0)
    images = [standardised(image, window) for image in images]
    sizes = mean.reshape(len(mean), -1).mean(axis=1)
    atlas = _normal(np.stack([gaussian_filter(one, BLUR) for one in mean]) + FLOOR)
    evidence = [_evidence(image, atlas[0], look) for image in images]
    if begun is not None:
        evidence = [seen + START_SHARE * _said(start) for seen, start in zip(evidence, begun, strict=True)]
    places, bias = [np.log(atlas)] * len(images), np.zeros(len(mean))
    found: list[np.ndarray] = []
    for _ in range(PASSES):
        found = []
        for row, seen in enumerate(evidence):
            fields = places[row] + seen + bias[:, None, None, None]
            label = _softmax(fields)
            for _ in range(FIELD_PASSES):
                label = _softmax(fields + COUPLING * np.stack([gaussian_filter(one, NEAR) for one in label]))
            found.append(label)
            places[row] = np.log(_moved(atlas, label))
        shares = np.mean([label.reshape(len(mean), -1).mean(axis=1) for label in found], axis=0)
        bias += np.clip(np.log((sizes + FLOOR / 10) / (shares + FLOOR / 10)), -2, 2)
        bias -= bias[0]
    return (label.astype(np.float32) for label in found)


def _said(start: Float[np.ndarray, "k x y z"]) -> Float[np.ndarray, "k x y z"]:
    """Logarithm of the public start's prediction, blurred by a voxel: where it draws a boundary is not certain."""
    result: np.ndarray = np.log(_normal(np.stack([gaussian_filter(one, NEAR) for one in start]) + FLOOR))
    return result


def _evidence(
    image: Float[np.ndarray, "c x y z"], outside: Float[np.ndarray, "x y z"], look: Look
) -> Float[np.ndarray, "k x y z"]:
    """Logarithm of how likely each voxel's values are of each class, up to a constant a voxel: Gaussians for the
    structures, for the background the volume's own histogram where the atlas has none."""
    variances = look.stds**2 + look.mean_variances
    evidence = np.zeros((1 + len(variances), *image.shape[1:]))
    for channel, values in enumerate(image):
        for structure, variance in enumerate(variances[:, channel]):
            away = (values - look.means[structure, channel]) ** 2 / variance
            evidence[1 + structure] -= (away + np.log(2 * np.pi * variance)) / 2
        counts, edges = np.histogram(values, bins=BINS, weights=outside, density=True)
        density = gaussian_filter(counts, 1.5) + FLOOR / 10
        evidence[0] += np.log(density[np.clip(np.digitize(values, edges) - 1, 0, BINS - 1)])
    evidence *= SHARPNESS
    result: np.ndarray = np.maximum(evidence - evidence.max(axis=0), -FAR)
    return result


def _moved(atlas: Float[np.ndarray, "k x y z"], label: Float[np.ndarray, "k x y z"]) -> Float[np.ndarray, "k x y z"]:
    """The atlas moved most of the way to where the label's structures lie, near where it expects them."""
    expected = 1 - atlas[0]
    seen = (1 - label[0]) ** 2 * np.maximum(expected, 20 * FLOOR)
    if seen.sum() <= FLOOR:
        return atlas
    way = 0.8 * (np.array(center_of_mass(seen)) - np.array(center_of_mass(expected**2)))
    return _normal(np.maximum(np.stack([shift(one, way, order=1, mode="nearest") for one in atlas]), FLOOR / 10))


def _normal(values: Float[np.ndarray, "k x y z"]) -> Float[np.ndarray, "k x y z"]:
    result: np.ndarray = values / values.sum(axis=0)
    return result


def _softmax(fields: Float[np.ndarray, "k x y z"]) -> Float[np.ndarray, "k x y z"]:
    return _normal(np.exp(fields - fields.max(axis=0)))
