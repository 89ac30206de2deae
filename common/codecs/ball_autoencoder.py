"""The autoencoder codec ``ball-ae``: 3D convolutions on either side of a bottleneck whose codes lie in the ball.

The bottleneck is the activation φ of :mod:`common.codecs.ball`; it has l + 1 inputs for a code of length l. The codec
follows Fay et al. 2021, Algorithm 2: convolutions, ReLU and max-pooling, a fully connected layer, φ, noise on the code
while fitting, transposed convolutions, softmax, cross-entropy. It departs from the paper in four points, which make
fitting fast and reliable:

1. It starts as the linear codec. A linear map beside the convolutions is initialised from the water-filled principal
   components of the public shapes, and the last layer of the convolutions is zero. No coordinate is unused at the
   start, and the convolutions learn a correction.
2. The last l inputs of φ are a vector v, and the first is o₀ = (l/√(8/π))·ln‖v‖ + a, with a learned offset a. For a =
   0, φ(o₀, v) = v / (1 + ‖v‖^l)^(1/l): the components themselves, softly clipped to the ball.
3. The decoder computes log-odds = m + Δ(z) − Δ(0) from a code z, where m is the log-odds of the public mean shape and Δ
   the output of its layers. The zero code is therefore the mean shape.
4. Before the decoder, each coordinate of a noisy code is multiplied by p/(p + σ²), where p is its variance and σ² that
   of its noise. The linear codec does the same. While fitting, the noise is varied around the planned noise, so that
   the decoder also suits an answer of fewer sites, which has more noise.

The module imports torch, so it is registered by name and loaded on first use. Weights are plain float32 arrays in the
codec's npz. Fitting is deterministic on one machine. Arrays whose shapes do not fit the header are refused.
:mod:`common.codecs.codec` explains the letters of the arrays' shapes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from jaxtyping import Float, UInt8
from torch.nn import functional as F

from common.codecs import shapes
from common.codecs.ball import SLOPE, ball_activation
from common.codecs.codec import (
    Provenance,
    check_code,
    check_noise_std,
    check_probabilities,
    frozen,
    is_pooled,
    read_header,
    write_codec,
)
from common.codecs.pca import FILL, centre_and_metric, coordinate_powers, principal_components
from common.config import CodecConfig
from common.data.label_maps import one_hot
from common.errors import InvalidInput

STEPS, BATCH = 300, 8
MAX_VOXELS = 1 << 22  # largest grid, since every copy of every map is held in memory at full resolution
MAX_FEATURES = 1 << 18  # numbers of a pooled map; on the paper's grid it pools by 4, the linear codec by 8
LEARNING_RATE = 3e-3
LINEAR_LEARNING_RATE = 1e-4
"""Learning rate of the linear maps. It is smaller than that of the other weights, because the linear maps start near
their optimum."""

WARM_UP = 20  # steps
NOISE_RANGE = (math.log(0.2), math.log(1.5))
"""Range of ln(noise / planned noise), from which the noise of a fitting step is drawn uniformly."""

SOFTEST = 0.75
"""While fitting, each label map's log-ratios are multiplied by a random factor from this value to 1. Smaller log-ratios
imitate teachers, whose predictions are less certain than label maps."""

WIDE, NARROW = 16, 8  # feature maps
_SMALLEST_NORM = 1e-12


@dataclass(frozen=True, slots=True, eq=False)
class BallAutoencoder:
    """The fitted autoencoder codec; see :class:`~common.codecs.codec.Codec`.

    Attributes:
        centre: Log-ratios of the public mean shape, float64 [s, u, v, w], as in the linear codec.
        metric: Weight of each coarse voxel, float64 [u, v, w], above 0, as in the linear codec.
        powers: Variances p_i of the code's coordinates at the linear start, in units of C². Decoding shrinks
            coordinate i by p_i / (p_i + σ²), where σ² is the variance of the noise on it.
        weights: The network's weights by name, float32, of the shapes of :func:`weight_shapes`.
        radius: Clipping norm C.
        grid: Shape of a volume in voxels.
        provenance: Which public label maps it was fitted on.

    Raises:
        InvalidInput: If shapes do not match, or a value is not finite or not above 0 where it must be.
    """

    centre: Float[np.ndarray, "s u v w"]
    metric: Float[np.ndarray, "u v w"]
    powers: Float[np.ndarray, "l"]
    weights: Mapping[str, np.ndarray]
    radius: float
    grid: tuple[int, int, int]
    provenance: Provenance
    name: ClassVar[str] = "ball-ae"

    def __post_init__(self) -> None:
        object.__setattr__(self, "grid", tuple(self.grid))
        for field in ("centre", "metric", "powers"):
            object.__setattr__(self, field, frozen(getattr(self, field), np.float64))
        object.__setattr__(self, "weights", {k: frozen(v, np.float32) for k, v in sorted(self.weights.items())})
        coarse = self.metric.shape
        fits = (
            self.centre.ndim == 4
            and self.metric.ndim == 3
            and self.powers.ndim == 1
            and len(self.powers) >= 1
            and self.centre.shape[1:] == coarse
            and is_pooled(self.grid, coarse)
        )
        arrays = (self.centre, self.metric, self.powers, *self.weights.values())
        if not fits or not all(np.isfinite(array).all() for array in arrays):
            raise InvalidInput("arrays of a ball-ae codec", limit="arrays of finite numbers whose shapes match")
        expected = weight_shapes(coarse, structures=len(self.centre), dimension=len(self.powers))
        if {name: array.shape for name, array in self.weights.items()} != expected:
            raise InvalidInput("ball-ae codec: weights", value=sorted(self.weights), limit=str(expected))
        if min(self.metric.min(), self.powers.min()) <= 0 or not self.radius > 0:
            raise InvalidInput("a ball-ae codec's metric, powers or radius", limit="numbers above 0")

    @property
    def dimension(self) -> int:
        """Length l of a code."""
        return len(self.powers)

    @property
    def linear(self) -> None:
        """None, because the codec is not linear."""
        return None

    @property
    def labels(self) -> int:
        """Number of classes, the background included."""
        return len(self.centre) + 1

    @property
    def _factor(self) -> int:
        return self.grid[0] // int(self.metric.shape[0])

    def encode(self, probabilities: Float[np.ndarray, "k x y z"]) -> Float[np.ndarray, "l"]:
        """Encode class probabilities (:meth:`Codec.encode`).

        Returns:
            Float64 array [l]. The activation φ guarantees ‖code‖₂ ≤ C.

        Raises:
            InvalidInput: If the array has another shape or holds no probabilities.
        """
        values = check_probabilities(probabilities, labels=self.labels, grid=self.grid)
        offset = (shapes.to_log_ratios(values, factor=self._factor) - self.centre) * self.metric
        with torch.no_grad():
            inputs = before_activation(_tensors(self.weights), torch.tensor(offset, dtype=torch.float32)[None])
        code: np.ndarray = self.radius * ball_activation(inputs[0].numpy().astype(np.float64))
        return code

    def decode(self, mean_code: Float[np.ndarray, "l"], *, noise_std: float) -> Float[np.ndarray, "k x y z"]:
        """Decode a mean code (:meth:`Codec.decode`).

        The log-ratios are those of the public mean shape, plus the decoder's change for this code (shrunk for the
        noise), minus its change for the code 0.
        """
        code = check_code(mean_code, dimension=self.dimension) / self.radius
        noise = check_noise_std(noise_std) / self.radius
        shrunk = torch.tensor(code * self.powers / (self.powers + noise**2), dtype=torch.float32)[None]
        weights = _tensors(self.weights)
        with torch.no_grad():
            change = (
                log_ratio_change(weights, shrunk, coarse=self.metric.shape)
                - log_ratio_change(weights, torch.zeros_like(shrunk), coarse=self.metric.shape)
            ).numpy()[0]
        return shapes.to_probabilities(self.centre + change, factor=self._factor)

    def to_bytes(self) -> bytes:
        """Return the codec as bytes (:meth:`Codec.to_bytes`)."""
        arrays = {"centre": self.centre, "metric": self.metric, "powers": self.powers, **dict(self.weights)}
        return write_codec(self, arrays, grid=True)

    @classmethod
    def from_parts(cls, header: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> BallAutoencoder:
        """Rebuild the codec (:meth:`Codec.from_parts`).

        Args:
            header: The header of the codec's bytes.
            arrays: The arrays by name: ``centre``, ``metric``, ``powers`` and the network's weights.
        """
        public = ("centre", "metric", "powers")
        dtypes = dict.fromkeys(arrays, np.float32) | dict.fromkeys(public, np.float64)
        fields = read_header(header, grid=True, arrays=arrays, dtypes=dtypes)
        return cls(weights={name: fields.pop(name) for name in arrays if name not in public}, **fields)

    @classmethod
    def fit(
        cls,
        label_maps: Sequence[UInt8[np.ndarray, "x y z"]],
        *,
        labels: int,
        config: CodecConfig,
        provenance: Provenance,
    ) -> BallAutoencoder:
        """Fit by :data:`STEPS` steps of Adam on the cross-entropy, starting from the linear codec of the same maps.

        The dimension is the linear codec's: ``config.dimension`` if it is set, else the number that water-filling
        chooses for the planned noise, at most ``max_dimension``. On grids pooled by 4 or 8, copies are deformed and
        decoded maps are compared at twice the pooled resolution. This needs at most an eighth of the memory and time
        that the full resolution would need.

        Raises:
            InvalidInput: If the grid has more than :data:`MAX_VOXELS` voxels, the maps are all alike, or fitting
                diverges.
        """
        grid = label_maps[0].shape
        if math.prod(grid) > MAX_VOXELS:
            raise InvalidInput(
                "voxels of the grid",
                value=math.prod(grid),
                limit=f"at most {MAX_VOXELS} for ball-ae",
                remedy="choose a smaller grid and a larger spacing, or the codec pca",
            )
        factor = shapes.pooling_factor(grid, labels=labels, most=MAX_FEATURES)
        coarse = factor // 2 if factor > 2 else 1  # on large grids, maps are deformed and compared at half that size
        exact = [shapes.pool(one_hot(m, labels), factor=coarse) for m in label_maps]
        centre, metric = centre_and_metric(exact, factor=factor // coarse)
        copies = shapes.augmented(
            label_maps, labels=labels, copies=config.augmentations, seed=provenance.seed, coarse=coarse
        )
        ratios, truths = [], []
        for soft in (*exact, *copies):  # a copy is deformed by linear interpolation, so it is soft at its borders
            ratios.append(shapes.to_log_ratios(soft.astype(np.float64), factor=factor // coarse))
            truths.append(soft.argmax(axis=0).astype(np.uint8))
        noise = provenance.noise_std / config.radius
        samples = ((np.stack(ratios) - centre) * metric).reshape(len(ratios), -1)
        basis, variances = principal_components(samples, most=config.max_dimension)
        powers = coordinate_powers(variances, config=config, noise_std=noise, power=FILL**2)
        kept = powers > 0
        basis, variances, powers = basis[kept], variances[kept], powers[kept]
        weights = initial_weights(
            basis * np.sqrt(powers / variances)[:, None],
            (basis * np.sqrt(variances / powers)[:, None]).reshape(-1, *centre.shape) / metric,
            rng=np.random.default_rng([provenance.seed, 0]),
        )
        public = {"centre": centre, "metric": metric, "powers": powers}
        rng = np.random.default_rng([provenance.seed, 1])
        fitted = _train(weights, ratios=np.stack(ratios), truths=np.stack(truths), **public, noise_std=noise, rng=rng)
        return cls(**public, weights=fitted, radius=float(config.radius), grid=tuple(grid), provenance=provenance)


# ---- the network, as functions of its weights ------------------------------------------------------------------------


def activation(inputs: Float[torch.Tensor, "*batch inputs"]) -> Float[torch.Tensor, "*batch l"]:
    """Apply the activation φ to a tensor with gradients, by the same two stable formulas as
    :func:`common.codecs.ball.ball_activation`.

    The results agree to the dtype's rounding. Codes that leave a site are computed by the numpy function, whose norm is
    proven.

    Args:
        inputs: Tensor of shape [*batch, l + 1].

    Returns:
        Tensor of shape [*batch, l]. A vanishing direction gives the zero code, with a finite gradient.
    """
    direction = inputs[..., 1:]
    peak = direction.abs().amax(dim=-1, keepdim=True)
    scaled = direction / torch.where(peak > 0, peak, torch.ones_like(peak))
    square = scaled.square().sum(dim=-1, keepdim=True)
    norm = torch.where(square > 0, square, torch.ones_like(square)).sqrt()
    return scaled / norm * torch.exp(F.logsigmoid(SLOPE * inputs[..., :1]) / direction.shape[-1])


def before_activation(
    weights: Mapping[str, torch.Tensor], offsets: Float[torch.Tensor, "n s u v w"]
) -> Float[torch.Tensor, "n inputs"]:
    """Compute the encoder up to the activation φ.

    Args:
        weights: The weights by name.
        offsets: Weighted offsets from the mean shape's log-ratios, shape [n, s, u, v, w].

    Returns:
        The inputs o₀, o₁ … o_l of φ, shape [n, l + 1].
    """
    strides = pooling_strides(offsets.shape[2:])
    features = offsets
    for layer, stride in enumerate(strides, start=1):
        features = F.conv3d(features, weights[f"encoder_conv{layer}"], weights[f"encoder_bias{layer}"], padding=1)
        features = F.max_pool3d(F.relu(features), stride)
    learned = F.linear(features.flatten(1), weights["encoder_dense"], weights["encoder_dense_bias"])
    direction = F.linear(offsets.flatten(1), weights["encoder_linear"]) + learned[:, 1:]
    length = direction.shape[1]
    norm = (direction.square().sum(dim=1, keepdim=True) + _SMALLEST_NORM**2).sqrt()
    return torch.cat([length / SLOPE * torch.log(norm) + learned[:, :1], direction], dim=1)


def log_ratio_change(
    weights: Mapping[str, torch.Tensor], codes: Float[torch.Tensor, "n l"], *, coarse: tuple[int, ...]
) -> Float[torch.Tensor, "n s u v w"]:
    """Compute the decoder's output on the coarse grid, a change Δ(z) of the log-ratios of class probabilities.

    The caller subtracts Δ(0), so that the code 0 changes nothing.

    Args:
        weights: The weights by name.
        codes: Codes z, already shrunk toward 0 according to their noise; shape [n, l].
        coarse: The coarse grid [u, v, w].

    Returns:
        Changes of the log-ratios, shape [n, s, u, v, w].
    """
    strides = pooling_strides(coarse)
    smallest = [n // math.prod(strides) for n in coarse]
    features = F.linear(codes, weights["decoder_dense"], weights["decoder_dense_bias"])
    features = F.relu(features.reshape(len(codes), WIDE, *smallest))
    for layer, stride in enumerate(reversed(strides), start=1):
        features = F.relu(
            F.conv3d(features, weights[f"decoder_conv{layer}"], weights[f"decoder_bias{layer}"], padding=1)
        )
        features = F.relu(F.conv_transpose3d(features, weights[f"decoder_up{layer}"], stride=stride))
    learned = F.conv3d(features, weights["decoder_out"], weights["decoder_out_bias"], padding=1)
    linear = torch.einsum("nl,lsuvw->nsuvw", codes, weights["decoder_linear"])
    return linear + learned


def pooling_strides(coarse: Sequence[int]) -> tuple[int, int]:
    """Return the strides of the two max-poolings: 2 as long as every side can be halved, else 1."""
    first = 2 if all(n % 2 == 0 for n in coarse) else 1
    second = 2 if all(n % 4 == 0 for n in coarse) else 1
    return first, second


def weight_shapes(coarse: Sequence[int], *, structures: int, dimension: int) -> dict[str, tuple[int, ...]]:
    """Return the shape of every weight of an autoencoder, by the weight's name.

    Args:
        coarse: The coarse grid [u, v, w].
        structures: Number s of structures.
        dimension: Length l of a code.
    """
    u, v, w = coarse
    first, second = pooling_strides(coarse)
    bottom = math.prod(n // (first * second) for n in coarse)
    return {
        "decoder_bias1": (WIDE,),
        "decoder_bias2": (NARROW,),
        "decoder_conv1": (WIDE, WIDE, 3, 3, 3),
        "decoder_conv2": (NARROW, NARROW, 3, 3, 3),
        "decoder_dense": (WIDE * bottom, dimension),
        "decoder_dense_bias": (WIDE * bottom,),
        "decoder_linear": (dimension, structures, u, v, w),
        "decoder_out": (structures, NARROW, 3, 3, 3),
        "decoder_out_bias": (structures,),
        "decoder_up1": (WIDE, NARROW, second, second, second),
        "decoder_up2": (NARROW, NARROW, first, first, first),
        "encoder_bias1": (NARROW,),
        "encoder_bias2": (WIDE,),
        "encoder_conv1": (NARROW, structures, 3, 3, 3),
        "encoder_conv2": (WIDE, NARROW, 3, 3, 3),
        "encoder_dense": (dimension + 1, WIDE * bottom),
        "encoder_dense_bias": (dimension + 1,),
        "encoder_linear": (dimension, structures * u * v * w),
    }


def initial_weights(
    encoder: Float[np.ndarray, "l d"], decoder: Float[np.ndarray, "l s u v w"], *, rng: np.random.Generator
) -> dict[str, np.ndarray]:
    """Return weights with which the autoencoder equals the linear codec.

    The autoencoder's linear maps are those of the linear codec. Beside them, the last layer of the encoder and that of
    the decoder are zero, and the weights of the earlier layers are drawn uniformly.

    Args:
        encoder: The linear codec's encoder, shape [l, d] with d = s·u·v·w.
        decoder: The linear codec's decoder, shape [l, s, u, v, w].
        rng: Source of the draws.

    Returns:
        Float32 arrays by name.
    """
    dimension, structures, *coarse = decoder.shape
    result = {}
    for name, shape in weight_shapes(coarse, structures=structures, dimension=dimension).items():
        bound = 0.0
        if len(shape) > 1 and name not in ("encoder_dense", "decoder_out"):
            incoming = shape[0] if "_up" in name else math.prod(shape[1:])
            bound = math.sqrt(6 / incoming)  # He et al. 2015: keeps the variance through a ReLU
        result[name] = rng.uniform(-bound, bound, shape).astype(np.float32)
    return {**result, "encoder_linear": encoder.astype(np.float32), "decoder_linear": decoder.astype(np.float32)}


def _train(
    initial: Mapping[str, np.ndarray],
    *,
    ratios: Float[np.ndarray, "n s u v w"],
    truths: UInt8[np.ndarray, "n x y z"],
    centre: Float[np.ndarray, "s u v w"],
    metric: Float[np.ndarray, "u v w"],
    powers: Float[np.ndarray, "l"],
    noise_std: float,
    rng: np.random.Generator,
) -> dict[str, np.ndarray]:
    """Train the weights: minimise the voxel-wise cross-entropy between label maps and the maps decoded from their noisy
    codes. Return the trained weights.
    """
    coarse = metric.shape
    with _one_deterministic_thread():
        weights = {name: torch.tensor(array, requires_grad=True) for name, array in initial.items()}
        linear = [weights[name] for name in ("encoder_linear", "decoder_linear")]
        learned = [tensor for name, tensor in weights.items() if name not in ("encoder_linear", "decoder_linear")]
        optimizer = torch.optim.Adam(
            [{"params": learned, "lr": LEARNING_RATE}, {"params": linear, "lr": LINEAR_LEARNING_RATE}]
        )
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, _learning_rate)
        inputs, mean, weight, power = (torch.tensor(a, dtype=torch.float32) for a in (ratios, centre, metric, powers))
        nothing = torch.zeros(1, len(powers))
        for step in range(STEPS):
            picks = rng.integers(len(ratios), size=BATCH)
            certainty = torch.tensor(rng.uniform(SOFTEST, 1, (BATCH, 1, 1, 1, 1)), dtype=torch.float32)
            offsets = (certainty * inputs[picks] - mean) * weight
            noise = noise_std * np.exp(rng.uniform(*NOISE_RANGE, (BATCH, 1)))
            drawn = torch.tensor(noise * rng.standard_normal((BATCH, len(powers))), dtype=torch.float32)
            codes = activation(before_activation(weights, offsets)) + drawn
            codes = codes * power / (power + torch.tensor(noise**2, dtype=torch.float32))
            change = log_ratio_change(weights, codes, coarse=coarse) - log_ratio_change(weights, nothing, coarse=coarse)
            full = F.interpolate(mean + change, size=truths.shape[1:], mode="trilinear")
            logits = torch.cat([torch.zeros_like(full[:, :1]), full], dim=1)
            loss = F.cross_entropy(logits, torch.tensor(truths[picks], dtype=torch.long))
            if not math.isfinite(float(loss.detach())):
                raise InvalidInput(
                    "step at which fitting the codec ball-ae diverged",
                    value=step,
                    limit="a finite cross-entropy at every step",
                    remedy="use the codec pca",
                )
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
    return {name: tensor.detach().numpy() for name, tensor in weights.items()}


def _learning_rate(step: int) -> float:
    """Return the factor of the learning rate at a step: a linear warm-up times a cosine that falls to zero."""
    return min(1.0, (step + 1) / WARM_UP) * 0.5 * (1 + math.cos(math.pi * step / STEPS))


@contextmanager
def _one_deterministic_thread() -> Iterator[None]:
    """Use one thread and deterministic algorithms, and restore the process's settings afterwards."""
    threads, deterministic = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(deterministic)
        torch.set_num_threads(threads)


def _tensors(weights: Mapping[str, np.ndarray]) -> dict[str, torch.Tensor]:
    return {name: torch.tensor(array) for name, array in weights.items()}
