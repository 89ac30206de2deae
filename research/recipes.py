"""Lists the cells of the papers' tables as data: what is trained, at which ε, by which recipe, and the papers' results.

``papers`` uses it. Everything is under add-remove at δ = 1e-5, with real Poisson sampling and accounting by privacy
loss distributions; the private PCA is part of the same ε. Noise is planned for the cell's exact ε, unless a printed
noise is requested. It refuses unknown methods and fields.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, TypeVar

from client.training.private.descent import Rate, cosine
from common.errors import InvalidInput
from common.privacy.training import Neighbours
from research.mlp_strategies import MacTerms

DELTA = 1e-5
RELATION = Neighbours.ADD_REMOVE


@dataclass(frozen=True, slots=True)
class Recipe:
    """Everything that determines a cell's result besides the seed; stored with the result, so a changed recipe runs
    again.

    Attributes:
        method: ``dp-sgd``, ``dp-mac`` or ``dp-bbb``.
        batch: Expected batch size.
        epochs: Number of epochs.
        rate: Learning rate.
        clip: Clipping norm.
        decay: Decay of the learning rate per epoch; None for a cosine schedule.
        z_rate: DP-MAC: learning rate of the coordinates.
        z_steps: DP-MAC: steps of the coordinates.
        pca_noise: Noise multiplier of the private PCA; None without PCA.
        whiten: Scale the PCA's coordinates to unit variance.
        output: Loss of the output layer.
        temperature: DP-BBB: temperature of the KL term.
        prior_std: DP-BBB: standard deviation of the prior.
        initial_std: DP-BBB: initial standard deviation of the posterior.
        noise_share: Share of the due noise that is added; below 1 only to repeat a published mistake.
        offset: Constant subtracted from every pixel; the authors subtract the data's own mean.
        initial: How initial weights are drawn.
        noise: Noise multiplier to use, as the paper prints it; None for the smallest that reaches the cell's ε.
        optimizer: ``adam`` or ``sgd``.
        activation: Hidden activation.
        per_layer: DP-SGD: clip every layer to ``clip``.
        order: DP-MAC: 1 to release the sum of the first derivatives ∂T of the layer objectives T alone, 2 to release
            that of ½∂²T too.
        curvature_clip: DP-MAC: bound of one example's ½∂²T.
        value_bound: DP-MAC: also release the sum of the Taylor constants, with this bound of one example's constant.
        norm_bound: DP-MAC: norm to which coordinates and inputs are projected so that the analytic sensitivities hold.
        w_steps: DP-MAC: steps of the weights on the noisy quadratic.
        hidden: Width of the MNIST classifier.

    Raises:
        InvalidInput: For another order, or ``value_bound`` at order 1.
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
    noise: str | None = None
    optimizer: str = "adam"
    activation: str = "relu"
    per_layer: bool = False
    order: int = 1
    curvature_clip: float = 0.1
    value_bound: float | None = None
    norm_bound: float | None = None
    w_steps: int = 1
    hidden: int = 300

    def __post_init__(self) -> None:
        if self.order not in (1, 2):
            raise InvalidInput("order", value=self.order, limit="1 or 2")
        if self.value_bound is not None and self.order == 1:
            raise InvalidInput("value_bound", value=self.value_bound, limit="none at order 1", remedy="--set order=2")

    def terms(self) -> MacTerms:
        """Return the terms of DP-MAC."""
        curvature = self.curvature_clip if self.order == 2 else None
        return MacTerms(
            self.clip, self.z_rate, self.z_steps, self.w_steps, curvature, self.value_bound, self.norm_bound
        )

    def schedule(self) -> Rate:
        """Return the learning rate as a function of the step."""
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
        """Its name, for instance ``mnist/dp-mac/8/0``."""
        epsilon = "inf" if self.epsilon is None else f"{self.epsilon:g}"
        return f"{self.data}/{self.name}/{epsilon}/{self.seed}"

    def to_json(self) -> dict[str, Any]:
        """Return the cell as plain JSON."""
        return dataclasses.asdict(self)


PUBLISHED: dict[tuple[str, str], dict[float | None, float]] = {
    ("mnist", "dp-mac"): {0.5: 0.90, 2: 0.95, 8: 0.97},
    ("mnist", "dp-sgd"): {0.5: 0.90, 2: 0.95, 8: 0.97},
    ("mnist", "dp-cdbn"): {0.5: 0.92, 2: 0.95},
    ("usps", "dp-mac"): {1: 12.7, 2: 10.9, 4: 9.6, 8: 8.4, None: 4.4},
    ("usps", "dp-sgd"): {None: 3.6},
    ("usps", "dp-sgd-half-noise"): {1: 11.8, 2: 9.6, 4: 7.9, 8: 6.4},
}
"""Results that the papers print: test accuracy on MNIST, ½Σ(error²) on USPS. The published DP-SGD on USPS added half of
the noise that its ε requires, so its results with noise are listed under ``dp-sgd-half-noise``.

DP-CDBN (Phan et al. 2017) is a convolutional network of another kind; its printed results are listed, and it is not
trained here."""

MNIST_NOISE = {0.5: "8", 2.0: "14/5", 8.0: "1"}
"""σ of the DP-MAC classifier as printed in Table 2, by ε."""

MNIST_PCA = {0.5: 16, 2.0: 8, 8.0: 4}
USPS_GREY = 0.25


def mnist_recipe(name: str, epsilon: float) -> Recipe:
    """Return the recipe of an MNIST cell.

    Args:
        name: Name of the method in the table.
        epsilon: 0.5, 2 or 8.

    Raises:
        InvalidInput: For an unknown name.
    """
    pca = MNIST_PCA[epsilon]
    late = epsilon < 1
    if name == "dp-mac-paper":  # as printed in Table 2, with its noise; Poisson sampling, charged at its true cost
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
            noise=MNIST_NOISE[epsilon],
        )
    if name == "dp-mac":  # learning rate and decay were chosen on 10,000 of the training images
        return Recipe(
            "dp-mac",
            batch=2000,
            epochs=30,
            rate=0.03,
            decay=0.92,
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
    raise InvalidInput("method of the MNIST table", value=name, limit="dp-mac, dp-mac-paper, dp-sgd, dp-bbb")


def usps_recipe(name: str, epsilon: float | None) -> Recipe:
    """Return the recipe of a USPS cell.

    Args:
        name: Name of the method in the table.
        epsilon: ε; None for no privacy.

    Raises:
        InvalidInput: For an unknown name.
    """
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
    if (
        name == "dp-sgd-paper"
    ):  # as in the authors' program (Table 2's last column is shifted by a row), but with all of the noise
        return Recipe(
            "dp-sgd",
            batch=250 if small else 500,
            epochs=100,
            rate=50.0 if small else 100.0,
            decay=0.99,
            clip=0.01,
            output="mse",
            offset=USPS_GREY,
            initial="glorot",
            optimizer="sgd",
        )
    raise InvalidInput("method of the USPS table", value=name, limit="dp-mac, dp-sgd, dp-sgd-half-noise, dp-sgd-paper")


def all_cells(seeds: int) -> list[Cell]:
    """Return every cell, seed by seed, the most informative ones first."""
    cells = []
    for seed in range(seeds):
        for name in ("dp-sgd", "dp-mac", "dp-bbb"):
            for epsilon in (8.0, 2.0, 0.5):
                if name == "dp-bbb" and epsilon < 1:
                    continue
                cells.append(Cell("mnist", name, epsilon, seed, mnist_recipe(name, epsilon)))
        for name in ("dp-mac", "dp-sgd", "dp-sgd-half-noise", "dp-sgd-paper"):
            levels: tuple[float | None, ...] = (8.0, 4.0, 2.0, 1.0, None)
            for level in levels if not name.endswith("half-noise") else levels[:-1]:
                cells.append(Cell("usps", name, level, seed, usps_recipe(name, level)))
        for epsilon in (8.0, 2.0, 0.5):
            cells.append(Cell("mnist", "dp-mac-paper", epsilon, seed, mnist_recipe("dp-mac-paper", epsilon)))
    return cells


def changed(cell: Cell, changes: Mapping[str, str]) -> Cell:
    """Return the cell with some fields of its recipe changed, under a name that states the changes.

    Raises:
        InvalidInput: For an unknown field or a wrong value.
    """
    recipe = with_fields(cell.recipe, changes)
    return dataclasses.replace(cell, name=f"{cell.name}{changes_text(changes)}", recipe=recipe)


def changes_text(changes: Mapping[str, str]) -> str:
    """Return the changes as they appear in a cell's name.

    >>> changes_text({"order": "2"})
    '[order=2]'
    """
    return f"[{','.join(f'{name}={value}' for name, value in sorted(changes.items()))}]" if changes else ""


T = TypeVar("T", bound=Any)


def with_fields(recipe: T, changes: Mapping[str, str]) -> T:
    """Return a dataclass of plain fields with some of them set from text.

    Args:
        recipe: The dataclass.
        changes: Text by field name.

    Raises:
        InvalidInput: For an unknown name or a wrong value.
    """
    kinds = {f.name: str(f.type).removesuffix(" | None") for f in dataclasses.fields(recipe)}
    given: dict[str, Any] = {}
    for name, text in changes.items():
        if name not in kinds or kinds[name] not in _READ:
            known = ", ".join(sorted(name for name, kind in kinds.items() if kind in _READ))
            raise InvalidInput("--set", value=name, limit=known)
        try:
            given[name] = _READ[kinds[name]](text)
        except (ValueError, KeyError, ZeroDivisionError) as error:
            raise InvalidInput(f"--set {name}", value=text, limit=kinds[name]) from error
    return dataclasses.replace(recipe, **given)


_READ: dict[str, Callable[[str], object]] = {
    "int": int,
    "float": float,
    "str": str,
    "bool": {"true": True, "false": False}.__getitem__,
    "Fraction": Fraction,
}


def exponential_decay(start: float, factor: float, *, passes: int) -> Rate:
    """Return the learning rate ``start``·``factor``^epoch as a function of the step and the total number of steps.

    The epoch is the number of epochs completed at that step.

    Args:
        start: Learning rate at the first step.
        factor: Factor per epoch.
        passes: Number of epochs in total.

    >>> exponential_decay(1.0, 0.5, passes=2)(5, 10)
    0.5
    """
    return lambda step, steps: start * factor ** int(step * passes / steps)
