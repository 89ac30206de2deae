"""Computes labels of public volumes from how structures look.

The appearance protocol calls it after each answer. The answer tells how structures look: the mean and the spread of
their grey values. The *atlas* is the mean of public shapes; it states how probable each class is at each voxel. The
labels are computed in :data:`PASSES` passes:

1. The probability of a class at a voxel is proportional to the prior at this voxel times the likelihood of the voxel's
   values for this class. In the first pass the prior is the atlas. If there is a public start, a network trained on
   public data alone, its prediction is a third factor.
2. A mean-field approximation makes each voxel's label agree with those of its neighbours.
3. A prior for each volume is computed for the next pass. If public shapes overlap enough (:data:`PLACED`), it is the
   public shape nearest to the volume's label. Otherwise it is the atlas, shifted most of the way towards the structures
   found in this volume.
4. A bias for each class is updated, so that the structures have the mean size that they have in public shapes.

Controls use the same function, with the appearance that is assumed before any answer. Everything here is
post-processing. The module imports torch only to measure how far public shapes overlap.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

import numpy as np
from jaxtyping import Float
from scipy.ndimage import center_of_mass, gaussian_filter, shift

from common.codecs.codec import LinearCodec
from common.protocols.appearance import standardised, window_of
from server.protocols.appearance.look import Look

SHAPES = 48
"""Number of random shapes drawn from the codec's distribution of public label maps; the atlas is their mean."""

BLUR = 2.0
"""Standard deviation, in voxels, of the Gaussian that blurs the atlas, because the shapes of few label maps do not
cover all positions.
"""

FLOOR = 1e-3
SHARPNESS = 1.6
"""Exponent of the likelihood of a voxel's values."""

FAR = 8.0
"""Largest log-likelihood ratio that counts against a class at a voxel; larger ones are clipped to it."""

COUPLING = 3.0
"""Weight of the neighbours' labels in the mean field."""

NEAR = 1.0
"""Standard deviation, in voxels, of the Gaussian that weights the neighbours' labels."""

START_SHARE = 0.5
"""Exponent of the public start's prediction. It is below 1 because the prediction and the atlas are no independent
evidence: both come from the same public label maps.
"""

PLACED = 0.15
"""Smallest mean Dice, between shapes drawn from the codec and their mean, at which public shapes count as overlapping.
If they do not overlap, no public start is trained, and the prior of a volume is the shifted atlas.
"""

PASSES, FIELD_PASSES = 4, 4
BINS = 64
VERSION = 2
"""Version of this computation. Increase it with a change that changes labels and that shows in no constant above."""

LABELS = (VERSION, SHAPES, BLUR, FLOOR, SHARPNESS, FAR, COUPLING, NEAR, START_SHARE, PLACED, PASSES, FIELD_PASSES, BINS)
"""All constants of this module that change labels. The digest of a network trained on the labels includes them."""


def _drawn_shapes(codec: LinearCodec) -> Float[np.ndarray, "s k x y z"]:
    """Draw :data:`SHAPES` shapes, as probabilities, from the codec's distribution of public label maps."""
    rng = np.random.default_rng(0)
    codes = rng.normal(size=(SHAPES, codec.dimension)) * np.sqrt(codec.powers)
    return np.stack([codec.decode(code, noise_std=0.0) for code in codes]).astype(np.float32)


def placed(codec: LinearCodec) -> bool:
    """Return whether public shapes overlap enough to train a public start.

    Args:
        codec: The study's codec, fitted on public label maps.

    Returns:
        True if the mean Dice between shapes drawn from the codec and their mean shape is at least :data:`PLACED`.
    """
    return _overlap(_drawn_shapes(codec))


def labelled(
    images: Sequence[Float[np.ndarray, "c x y z"]],
    codec: LinearCodec,
    look: Look,
    *,
    begun: Sequence[Float[np.ndarray, "k x y z"]] | None = None,
) -> Iterator[Float[np.ndarray, "k x y z"]]:
    """Compute the labels of public volumes, given how structures look.

    Args:
        images: Public volumes, float [c, x, y, z].
        codec: The study's codec.
        look: How structures look: mean and spread of their values.
        begun: The public start's prediction for each volume; None if there is no public start.

    Yields:
        Float32 probabilities [k, x, y, z] of k classes for each volume.
    """
    window, shapes = window_of(codec), _drawn_shapes(codec)
    mean = shapes.mean(axis=0)
    images = [standardised(image, window) for image in images]
    sizes = mean.reshape(len(mean), -1).mean(axis=1)
    atlas = _normal(np.stack([gaussian_filter(one, BLUR) for one in mean]) + FLOOR)
    evidence = [_evidence(image, atlas[0], look) for image in images]
    if begun is not None:
        evidence = [seen + START_SHARE * _log_of_start(start) for seen, start in zip(evidence, begun, strict=True)]
    prior = partial(_nearest, codec) if _overlap(shapes) else partial(_moved, atlas)
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
            places[row] = np.log(prior(label))
        shares = np.mean([label.reshape(len(mean), -1).mean(axis=1) for label in found], axis=0)
        bias += np.clip(np.log((sizes + FLOOR / 10) / (shares + FLOOR / 10)), -2, 2)
        bias -= bias[0]
    return (label.astype(np.float32) for label in found)


def _overlap(shapes: Float[np.ndarray, "s k x y z"]) -> bool:
    """Return whether the mean Dice between the shapes and their mean is at least :data:`PLACED`."""
    from common.metrics import dice_per_class, mean_present  # imports torch

    mean = shapes.mean(axis=0)
    hard = mean.argmax(axis=0).astype(np.uint8)
    each = [dice_per_class(hard, shape.argmax(axis=0).astype(np.uint8), len(mean)) for shape in shapes]
    return float(np.mean([mean_present(dice) for dice in each])) >= PLACED


def _log_of_start(start: Float[np.ndarray, "k x y z"]) -> Float[np.ndarray, "k x y z"]:
    """Return the logarithm of the public start's blurred prediction; it is blurred because its edges are uncertain."""
    result: np.ndarray = np.log(_normal(np.stack([gaussian_filter(one, NEAR) for one in start]) + FLOOR))
    return result


def _evidence(
    image: Float[np.ndarray, "c x y z"], outside: Float[np.ndarray, "x y z"], look: Look
) -> Float[np.ndarray, "k x y z"]:
    """Return the log-likelihood of each voxel's values for each class, up to a constant per voxel.

    The values of a structure are assumed Gaussian. Those of the background are assumed to follow the volume's own
    histogram, in which each voxel counts with ``outside``, its probability of background in the atlas. The differences
    between classes are scaled by :data:`SHARPNESS` and limited to :data:`FAR`.
    """
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


def _nearest(codec: LinearCodec, label: Float[np.ndarray, "k x y z"]) -> Float[np.ndarray, "k x y z"]:
    """Return the public shape that is nearest to a label, by encoding the label and decoding its code."""
    return _normal(codec.decode(codec.encode(label.astype(np.float32)), noise_std=0.0).astype(np.float64) + FLOOR)


def _moved(atlas: Float[np.ndarray, "k x y z"], label: Float[np.ndarray, "k x y z"]) -> Float[np.ndarray, "k x y z"]:
    """Return the atlas, shifted by 80 % of the distance between the centres of its structures and the label's.

    The label's voxels are weighted by the atlas's probability of a structure, so structures found where the atlas
    expects none have little influence.
    """
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
