"""Trains and tests one cell of the papers' tables: its data, its training event, its strategy and its scores.

``papers.papers`` calls it. A stopped cell continues from its last complete epoch. It refuses a data set that is
missing.
"""

from __future__ import annotations

import dataclasses
import json
import time
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float

from client.records.journal import TrainingJournal, TrainingPlan
from client.training.private.bbb import Prior
from client.training.private.clipped_sums import silent
from client.training.private.engine import Strategy, run
from common.calibration import binned
from common.errors import InvalidInput
from common.models.checkpoint import load_checkpoint, save_checkpoint
from common.privacy.gaussian import Sampler, rounded_gaussian
from common.privacy.training import MAX_MULTIPLIER, Sampling, TrainingEvent, epsilon_of, plan_noise
from research.mlp import NetworkShape, forward, output_loss
from research.mlp_strategies import MlpBbb, MlpMac, MlpSgd
from research.private_pca import Projection, private_pca
from research.recipes import DELTA, RELATION, Cell, Recipe

SAMPLES = 20  # number of weight samples that a DP-BBB prediction averages


@dataclass(frozen=True, slots=True)
class Digits:
    """Inputs and targets for training and testing; for an autoencoder the targets are the inputs."""

    x: Float[np.ndarray, "n d"]
    y: Float[np.ndarray, "n k"]
    x_test: Float[np.ndarray, "m d"]
    y_test: Float[np.ndarray, "m k"]


def load_digits(directory: Path, data: str) -> Digits:
    """Load MNIST (raw pixels) or USPS (in [0, 1], 5,000 cases for training and 5,000 for testing).

    Args:
        directory: Folder with ``mnist/mnist.npz`` and ``usps/usps_all.mat``.
        data: ``mnist``, or anything else for USPS.

    Raises:
        InvalidInput: If the file is missing or unreadable.
    """
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
    rows = cube.transpose(1, 2, 0).reshape(-1, cube.shape[0]) / 255.0  # consecutive cases cycle through the digits
    return Digits(rows[:5000], rows[:5000], rows[5000:10000], rows[5000:10000])


def event_of(cell: Cell, *, examples: int) -> TrainingEvent:
    """Return the training event of a cell (one setting of a published table).

    The noise is the one that the table's paper prints, or the smallest that reaches the cell's ε at its batch size and
    epochs. The ε includes the release of the private PCA. For a cell without ε the event's noise multiplier is a
    placeholder, because no noise is added.

    Args:
        cell: The cell.
        examples: Number of training examples.
    """
    recipe = cell.recipe
    rate, steps = Fraction(recipe.batch, examples), round(examples / recipe.batch * recipe.epochs)
    releases = () if recipe.pca_noise is None else (Fraction(recipe.pca_noise),)
    if cell.epsilon is None or recipe.noise is not None:
        noise = MAX_MULTIPLIER if recipe.noise is None else Fraction(recipe.noise)
        return TrainingEvent(Sampling.POISSON, rate, noise, steps, releases)
    return plan_noise(epsilon=cell.epsilon, delta=DELTA, rate=rate, steps=steps, neighbours=RELATION, releases=releases)


def run_cell(cell: Cell, directory: Path, checkpoint: Path | None = None) -> dict[str, Any]:
    """Train and test one cell. The curves over epochs are drawn on public data; no setting is chosen by them.

    Args:
        cell: The cell.
        directory: Folder of the data sets.
        checkpoint: File in which the state is stored once an epoch, and from which an interrupted cell continues.

    Returns:
        The result as plain JSON.
    """
    started, digits, recipe = time.monotonic(), load_digits(directory, cell.data), cell.recipe
    event = event_of(cell, examples=len(digits.x))
    noise = _noise(cell)
    x, x_test = digits.x - recipe.offset, digits.x_test - recipe.offset
    y, y_test = (x, x_test) if recipe.output == "mse" else (digits.y, digits.y_test)
    curve: list[dict[str, float]] = []
    held = None if checkpoint is None else _Held(checkpoint, cell, event, curve)
    projection = None if held is None else held.projection
    if recipe.pca_noise is not None:
        projection = projection or private_pca(  # charged once, so drawn once, even if the cell is interrupted
            x, components=60, noise_multiplier=Fraction(recipe.pca_noise), whiten=recipe.whiten, noise=noise
        )
        scale = 1.0 if recipe.whiten else 2.0  # a fixed constant for unit rows over 60 components, not a data statistic
        x, x_test = projection.apply(x) * scale, projection.apply(x_test) * scale
    tensors = [torch.tensor(array, dtype=torch.float32) for array in (x, y, x_test, y_test)]
    strategy = build(cell, tensors[0], tensors[1])
    budget = cell.epsilon or 8.0
    if recipe.noise is not None:  # state the true cost of the printed noise
        budget = epsilon_of(event, delta=DELTA, neighbours=RELATION)
    plan = TrainingPlan(event, budget, DELTA, RELATION, len(digits.x))
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

    journal = TrainingJournal(plan) if held is None else held.begin(strategy, plan)

    def after(spent: int) -> None:
        watch(spent)
        if held is not None and spent % per_epoch == 0:
            held.keep(strategy, spent, projection)

    run(strategy, journal, on_step=after, noise=noise)
    result: dict[str, Any] = {
        "cell": cell.to_json(),
        "id": cell.id,
        "noise_multiplier": float(event.noise_multiplier),
        "epsilon": None if cell.epsilon is None else _true_epsilon(event, recipe),
        "epsilon_fixed_batches": None if recipe.noise is None else _in_fixed_batches(event),
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
    """Return the strategy of a cell.

    Args:
        cell: The cell.
        x: Training inputs [n, d].
        y: Training targets [n, k].
    """
    recipe, seed, rate = cell.recipe, cell.seed, cell.recipe.schedule()
    hidden = (recipe.hidden,) if cell.data == "mnist" else (300, 100, 20, 100, 300)
    shape = NetworkShape((x.shape[1], *hidden, y.shape[1]), recipe.activation, recipe.output, recipe.initial)
    if recipe.method == "dp-mac":
        return MlpMac(shape, x, y, recipe.terms(), rate=rate, seed=seed)
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
    sgd = partial(MlpSgd, per_layer=recipe.per_layer, optimizer=recipe.optimizer)
    return sgd(shape, x, y, clip=recipe.clip, rate=rate, seed=seed)


def calibration(strategy: MlpBbb, x: torch.Tensor, y: torch.Tensor, *, seed: int) -> dict[str, float]:
    """Return accuracy, expected calibration error and NLL of sampled predictions and of the mean network.

    Args:
        strategy: A trained DP-BBB strategy.
        x: Test inputs.
        y: Test targets.
        seed: Seed of the weight samples.
    """
    names = strategy.shape.names
    draws = strategy.posterior.samples(SAMPLES, seed=seed)
    activation = strategy.shape.activation
    each = [_probabilities([draw[n].float() for n in names], x, activation) for draw in draws]
    sampled = torch.stack(each).mean(dim=0)
    mean = _probabilities([strategy.posterior.mean[n].detach().float() for n in names], x, activation)
    labels = y.argmax(dim=1)
    result = {}
    for name, probabilities in (("sampled", sampled), ("mean", mean)):
        confidence, guess = probabilities.max(dim=1)
        right = guess == labels
        result[f"{name}_accuracy"] = float(right.double().mean())
        result[f"{name}_ece"] = binned(confidence.numpy(), right.numpy()).error
        chosen = probabilities[torch.arange(len(labels)), labels].clamp_min(1e-12)
        result[f"{name}_nll"] = float(-chosen.log().mean())
    return result


class _Held:
    """A cell's state on disk, from which a stopped cell continues at its last complete epoch.

    The private projection of its inputs is stored too, since the weights fit only that projection. The data are public,
    so the noise of an interrupted epoch may be drawn again.
    """

    def __init__(self, path: Path, cell: Cell, event: TrainingEvent, curve: list[dict[str, float]]) -> None:
        self.path, self.curve = path, curve
        self.run: dict[str, object] = {
            "cell": json.dumps(cell.to_json()),
            "event": json.dumps(event.to_json()),
            "schema": 2,  # 1 kept no projection
        }
        self.saved = load_checkpoint(path, run=self.run)

    @property
    def projection(self) -> Projection | None:
        """The projection of the interrupted run; None if there is none."""
        if self.saved is None or self.saved["projection"] is None:
            return None
        return Projection(*(tensor.numpy() for tensor in self.saved["projection"]))

    def begin(self, strategy: Strategy, plan: TrainingPlan) -> TrainingJournal:
        if self.saved is None:
            return TrainingJournal(plan)
        strategy.restore(self.saved["state"])
        self.curve += self.saved["curve"]
        return TrainingJournal(plan, spent=int(self.saved["spent"]))

    def keep(self, strategy: Strategy, spent: int, projection: Projection | None) -> None:
        kept = None if projection is None else [torch.tensor(projection.components), torch.tensor(projection.scale)]
        state = {"state": strategy.state(), "curve": list(self.curve), "spent": spent, "projection": kept}
        save_checkpoint(self.path, state, run=self.run)


def _in_fixed_batches(event: TrainingEvent) -> float:
    """Return the ε for fixed batches, as in the authors' program: each pass over the data is then one release."""
    fixed = dataclasses.replace(event, sampling=Sampling.FIXED_PARTITION)
    return epsilon_of(fixed, delta=DELTA, neighbours=RELATION)


def _noise(cell: Cell) -> Sampler:
    share = Fraction(cell.recipe.noise_share)
    if cell.epsilon is None:
        return silent
    if share == 1:
        return rounded_gaussian
    return lambda size, std: rounded_gaussian(size, std * share)


def _true_epsilon(event: TrainingEvent, recipe: Recipe) -> float:
    """Return the ε of the noise that was added: the planned ε, or a larger one if only a share of the noise was
    added.
    """
    share = Fraction(recipe.noise_share)
    real = dataclasses.replace(event, noise_multiplier=event.noise_multiplier * share)
    return epsilon_of(real, delta=DELTA, neighbours=RELATION)


def _weights(strategy: Strategy) -> list[torch.Tensor]:
    if isinstance(strategy, MlpBbb):
        return [strategy.posterior.mean[n].detach().float() for n in strategy.shape.names]
    assert isinstance(strategy, MlpSgd | MlpMac)
    return [w.detach() for w in strategy.weights]


def _score(strategy: MlpSgd | MlpMac | MlpBbb, x: torch.Tensor, y: torch.Tensor) -> float:
    """Return the accuracy, or ½Σ(error²) per image for a reconstruction."""
    _, preacts = forward(_weights(strategy), x, strategy.shape.activation)
    if strategy.shape.output == "mse":
        return float(output_loss(preacts[-1], y, "mse").mean() / 2)
    return float((preacts[-1].argmax(dim=1) == y.argmax(dim=1)).double().mean())


def _probabilities(weights: list[torch.Tensor], x: torch.Tensor, activation: str) -> torch.Tensor:
    _, preacts = forward(weights, x, activation)
    return torch.softmax(preacts[-1], dim=1)
