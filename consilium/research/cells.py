"""The cells of the papers' tables: what is trained, at which ε, by which recipe; and one function that runs a cell.

Everything is add-remove, δ = 1e-5, sampled by Poisson for real, accounted by privacy loss distributions, the private
PCA charged to the same ε. Noise is planned for the cell's exact ε. The papers' numbers stand beside, as data.
"""

from __future__ import annotations

import dataclasses
import time
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float

from client.training.private.bbb import Prior
from client.training.private.clipped_sums import silent
from client.training.private.descent import Rate, cosine, exponential_decay
from client.training.private.engine import Strategy, run
from client.training.private.journal import Journal, TrainingPlan
from common.errors import InvalidInput
from common.privacy.gaussian import Sampler, rounded_gaussian
from common.privacy.training import MAX_MULTIPLIER, Neighbours, Sampling, TrainingEvent, epsilon_of, plan_noise
from consilium.research.mlp import Shape, forward, output_loss
from consilium.research.mlp_strategies import MacTerms, MlpBbb, MlpMac, MlpSgd
from consilium.research.private_pca import private_pca

DELTA = 1e-5
RELATION = Neighbours.ADD_REMOVE
SAMPLES = 20  # weight samples a DP-BBB prediction averages
BINS = 15  # of the expected calibration error


@dataclass(frozen=True, slots=True)
class Recipe:
    """Everything that shapes a cell's result besides the seed; stored with it, so a changed recipe runs again.

    ``offset`` is taken off every pixel: a constant of ours, where the authors take off the data's own mean.
    """

    method: str
    batch: int
    epochs: int
    rate: float
    clip: float
    decay: float | None = None
    z_rate: float = 0.003
    z_steps: int = 30
    pca_noise: int | None = None
    whiten: bool = True
    output: str = "softmax"
    temperature: float = 0.03
    prior_std: float = 0.2
    initial_std: float = 0.02
    noise_share: float = 1.0
    offset: float = 0.0
    initial: str = "he"

    def schedule(self) -> Rate:
        return cosine(self.rate) if self.decay is None else exponential_decay(self.rate, self.decay, passes=self.epochs)


@dataclass(frozen=True, slots=True)
class Cell:
    """One number of a table: a data set, a recipe under a name, ε (None: no privacy) and a seed."""

    data: str
    name: str
    epsilon: float | None
    seed: int
    recipe: Recipe

    @property
    def id(self) -> str:
        epsilon = "inf" if self.epsilon is None else f"{self.epsilon:g}"
        return f"{self.data}/{self.name}/{epsilon}/{self.seed}"

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


PUBLISHED: dict[tuple[str, str], dict[float | None, float]] = {
    ("mnist", "dp-mac"): {0.5: 0.90, 2: 0.95, 8: 0.97},
    ("mnist", "dp-sgd"): {0.5: 0.90, 2: 0.95, 8: 0.97},
    ("mnist", "dp-cdbn"): {0.5: 0.92, 2: 0.95},
    ("usps", "dp-mac"): {1: 12.7, 2: 10.9, 4: 9.6, 8: 8.4, None: 4.4},
    ("usps", "dp-sgd-half-noise"): {1: 11.8, 2: 9.6, 4: 7.9, 8: 6.4, None: 3.6},
}
"""Printed results: test accuracy on MNIST, ½Σ(error²) on USPS. The published USPS DP-SGD added half the noise due.

DP-CDBN (Phan et al. 2017) is a convolutional network of another kind and stands there as printed."""

MNIST_PCA = {0.5: 16, 2.0: 8, 8.0: 4}
USPS_GREY = 0.25


def mnist_recipe(name: str, epsilon: float) -> Recipe:
    pca = MNIST_PCA[epsilon]
    late = epsilon < 1
    if name == "dp-mac-paper":  # the published settings, sampled and charged honestly
        return Recipe(
            "dp-mac",
            batch=1000,
            epochs=10 if late else 30,
            rate=0.03 if late else 0.01,
            decay=0.7 if late else 0.95,
            clip=0.3,
            pca_noise=pca,
            whiten=False,
            output="bce",
        )
    if name == "dp-mac":
        return Recipe(
            "dp-mac",
            batch=2000,
            epochs=30,
            rate=0.01,
            decay=0.95,
            clip=0.3,
            pca_noise=pca,
            output="bce",
            z_steps=30,
            z_rate=0.003,
        )
    if name == "dp-sgd":
        return Recipe("dp-sgd", batch=2000, epochs=30, rate=1e-2, clip=1.0, pca_noise=pca)
    if name == "dp-bbb":
        return Recipe("dp-bbb", batch=1000, epochs=30, rate=1e-2, clip=1.0, pca_noise=pca)
    raise InvalidInput("method of the MNIST table", value=name)


def usps_recipe(name: str, epsilon: float | None) -> Recipe:
    small = epsilon is not None and epsilon <= 2
    if name == "dp-mac":
        return Recipe(
            "dp-mac",
            batch=250 if small else 500,
            epochs=50,
            rate=0.003,
            decay=0.97,
            z_rate=0.001,
            clip=0.001,
            output="mse",
            offset=USPS_GREY,
            initial="glorot",
        )
    if name in ("dp-sgd", "dp-sgd-half-noise"):
        return Recipe(
            "dp-sgd",
            batch=250 if small else 500,
            epochs=50,
            rate=0.003,
            clip=0.1,
            output="mse",
            noise_share=0.5 if name.endswith("half-noise") else 1.0,
            offset=USPS_GREY,
            initial="glorot",
        )
    raise InvalidInput("method of the USPS table", value=name)


def all_cells(seeds: int) -> list[Cell]:
    """Every cell, the ones that tell most first, seed by seed."""
    cells = []
    for seed in range(seeds):
        for name in ("dp-sgd", "dp-mac", "dp-bbb"):
            for epsilon in (8.0, 2.0, 0.5):
                if name == "dp-bbb" and epsilon < 1:
                    continue
                cells.append(Cell("mnist", name, epsilon, seed, mnist_recipe(name, epsilon)))
        for name in ("dp-mac", "dp-sgd", "dp-sgd-half-noise"):
            levels: tuple[float | None, ...] = (8.0, 4.0, 2.0, 1.0, None)
            for level in levels if not name.endswith("half-noise") else levels[:-1]:
                cells.append(Cell("usps", name, level, seed, usps_recipe(name, level)))
        for epsilon in (8.0, 2.0, 0.5):
            cells.append(Cell("mnist", "dp-mac-paper", epsilon, seed, mnist_recipe("dp-mac-paper", epsilon)))
    return cells


# ---- running ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Digits:
    """Inputs and targets of training and test; ``labels`` are empty for reconstruction."""

    x: Float[np.ndarray, "n d"]
    y: Float[np.ndarray, "n k"]
    x_test: Float[np.ndarray, "m d"]
    y_test: Float[np.ndarray, "m k"]


def load_digits(directory: Path, data: str) -> Digits:
    """MNIST (raw pixels) from ``mnist/mnist.npz``; USPS in [0, 1], 5,000 for training and 5,000 for testing."""
    return _load_digits(str(directory), data)


@lru_cache(maxsize=2)
def _load_digits(directory: str, data: str) -> Digits:
    try:
        if data == "mnist":
            with np.load(Path(directory) / "mnist" / "mnist.npz") as archive:
                x, y, xt, yt = (archive[key] for key in ("x_train", "y_train", "x_test", "y_test"))
            flat = [images.reshape(len(images), -1).astype(np.float64) for images in (x, xt)]
            return Digits(flat[0], np.eye(10)[y], flat[1], np.eye(10)[yt])
        from scipy.io import loadmat

        cube = loadmat(Path(directory) / "usps" / "usps_all.mat")["data"]  # [pixel, case, digit]
    except (OSError, KeyError, ValueError) as error:
        raise InvalidInput(
            f"data of {data}", value=str(directory), limit="mnist/mnist.npz and usps/usps_all.mat below it"
        ) from error
    rows = cube.transpose(1, 2, 0).reshape(-1, cube.shape[0]) / 255.0  # cases in turn over the ten digits
    return Digits(rows[:5000], rows[:5000], rows[5000:10000], rows[5000:10000])


def event_of(cell: Cell, *, examples: int) -> TrainingEvent:
    """The planned event: least noise for the cell's ε at its batch and epochs, the PCA's release paid from it."""
    recipe = cell.recipe
    rate, steps = Fraction(recipe.batch, examples), round(examples / recipe.batch * recipe.epochs)
    releases = () if recipe.pca_noise is None else (Fraction(recipe.pca_noise),)
    if cell.epsilon is None:
        return TrainingEvent(Sampling.POISSON, rate, MAX_MULTIPLIER, steps, releases)
    return plan_noise(epsilon=cell.epsilon, delta=DELTA, rate=rate, steps=steps, neighbours=RELATION, releases=releases)


def run_cell(cell: Cell, directory: Path) -> dict[str, Any]:
    """Train and test one cell; plain JSON. Curves are over epochs, on public data, and choose nothing."""
    started, digits, recipe = time.monotonic(), load_digits(directory, cell.data), cell.recipe
    event = event_of(cell, examples=len(digits.x))
    noise = _noise(cell)
    x, x_test = digits.x - recipe.offset, digits.x_test - recipe.offset
    y, y_test = (x, x_test) if recipe.output == "mse" else (digits.y, digits.y_test)
    if recipe.pca_noise is not None:
        projection = private_pca(
            x, components=60, noise_multiplier=Fraction(recipe.pca_noise), whiten=recipe.whiten, noise=noise
        )
        scale = 1.0 if recipe.whiten else 2.0  # unit rows spread over 60 components: a constant of ours, no statistic
        x, x_test = projection.apply(x) * scale, projection.apply(x_test) * scale
    tensors = [torch.tensor(array, dtype=torch.float32) for array in (x, y, x_test, y_test)]
    strategy = build(cell, tensors[0], tensors[1])
    plan = TrainingPlan(event, cell.epsilon or 8.0, DELTA, RELATION, len(digits.x))
    curve: list[dict[str, float]] = []
    per_epoch = max(1, round(event.steps / recipe.epochs))

    def watch(spent: int) -> None:
        if spent % per_epoch == 0 or spent == event.steps:
            sample = slice(0, 5000)
            curve.append(
                {
                    "epoch": spent / per_epoch,
                    "test": _score(strategy, tensors[2], tensors[3]),
                    "train": _score(strategy, tensors[0][sample], tensors[1][sample]),
                }
            )

    run(strategy, Journal(plan), on_step=watch, noise=noise)
    result: dict[str, Any] = {
        "cell": cell.to_json(),
        "id": cell.id,
        "noise_multiplier": float(event.noise_multiplier),
        "epsilon": None if cell.epsilon is None else _true_epsilon(event, recipe),
        "delta": DELTA,
        "relation": str(RELATION),
        "score": _score(strategy, tensors[2], tensors[3]),
        "curve": curve,
        "seconds": round(time.monotonic() - started, 1),
    }
    if isinstance(strategy, MlpBbb):
        result |= calibration(strategy, tensors[2], tensors[3], seed=cell.seed)
        result["score"] = result["sampled_accuracy"]
    if isinstance(strategy, MlpMac):
        result["gradient_ratios"] = strategy.gradient_ratios(tensors[0][:1000], tensors[1][:1000])
    return result


def build(cell: Cell, x: torch.Tensor, y: torch.Tensor) -> MlpSgd | MlpMac | MlpBbb:
    """The strategy of a cell on its data."""
    recipe, seed, rate = cell.recipe, cell.seed, cell.recipe.schedule()
    hidden = (300,) if cell.data == "mnist" else (300, 100, 20, 100, 300)
    shape = Shape((x.shape[1], *hidden, y.shape[1]), "relu", recipe.output, recipe.initial)
    if recipe.method == "dp-mac":
        terms = MacTerms(recipe.clip, z_rate=recipe.z_rate, z_steps=recipe.z_steps)
        return MlpMac(shape, x, y, terms, rate=rate, seed=seed)
    if recipe.method == "dp-bbb":
        return MlpBbb(
            shape,
            x,
            y,
            clip=recipe.clip,
            rate=rate,
            seed=seed,
            prior=Prior(recipe.temperature, recipe.prior_std, len(x)),
            initial_std=recipe.initial_std,
        )
    return MlpSgd(shape, x, y, clip=recipe.clip, rate=rate, seed=seed)


def calibration(strategy: MlpBbb, x: torch.Tensor, y: torch.Tensor, *, seed: int) -> dict[str, float]:
    """Accuracy, expected calibration error and NLL of sampled predictions beside the posterior's mean network's."""
    names = strategy.shape.names
    draws = strategy.posterior.samples(SAMPLES, seed=seed)
    sampled = torch.stack([_probabilities([draw[n].float() for n in names], x) for draw in draws]).mean(dim=0)
    mean = _probabilities([strategy.posterior.mean[n].detach().float() for n in names], x)
    labels = y.argmax(dim=1)
    result = {}
    for name, probabilities in (("sampled", sampled), ("mean", mean)):
        confidence, guess = probabilities.max(dim=1)
        right = (guess == labels).double()
        result[f"{name}_accuracy"] = float(right.mean())
        result[f"{name}_ece"] = expected_calibration_error(confidence.numpy(), right.numpy())
        chosen = probabilities[torch.arange(len(labels)), labels].clamp_min(1e-12)
        result[f"{name}_nll"] = float(-chosen.log().mean())
    return result


def expected_calibration_error(confidence: Float[np.ndarray, "n"], right: Float[np.ndarray, "n"]) -> float:
    """Σ over equal bins of confidence of share · |accuracy − mean confidence| (Guo et al. 2017)."""
    bins = np.minimum((confidence * BINS).astype(int), BINS - 1)
    gaps = [
        (bins == b).mean() * abs(right[bins == b].mean() - confidence[bins == b].mean())
        for b in range(BINS)
        if (bins == b).any()
    ]
    return float(np.sum(gaps))


def _noise(cell: Cell) -> Sampler:
    share = Fraction(cell.recipe.noise_share)
    if cell.epsilon is None:
        return silent
    if share == 1:
        return rounded_gaussian
    return lambda size, std: rounded_gaussian(size, std * share)


def _true_epsilon(event: TrainingEvent, recipe: Recipe) -> float:
    """What the noise that was really added gives: the planned ε, or far more where a share of it was left out."""
    share = Fraction(recipe.noise_share)
    real = dataclasses.replace(event, noise_multiplier=event.noise_multiplier * share)
    return epsilon_of(real, delta=DELTA, neighbours=RELATION)


def _weights(strategy: Strategy) -> list[torch.Tensor]:
    if isinstance(strategy, MlpBbb):
        return [strategy.posterior.mean[n].detach().float() for n in strategy.shape.names]
    assert isinstance(strategy, MlpSgd | MlpMac)
    return [w.detach() for w in strategy.weights]


def _score(strategy: MlpSgd | MlpMac | MlpBbb, x: torch.Tensor, y: torch.Tensor) -> float:
    """Accuracy, or ½Σ(error²) an image for a reconstruction."""
    _, preacts = forward(_weights(strategy), x, strategy.shape.activation)
    if strategy.shape.output == "mse":
        return float(output_loss(preacts[-1], y, "mse").mean() / 2)
    return float((preacts[-1].argmax(dim=1) == y.argmax(dim=1)).double().mean())


def _probabilities(weights: list[torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    _, preacts = forward(weights, x, "relu")
    return torch.softmax(preacts[-1], dim=1)
