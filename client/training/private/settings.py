"""What a site asks of a private training: (ε, δ), the relation, the sampling, and the recipe of each strategy.

Settings that change the guarantee are planned into an event before anything is trained; the others (learning rate,
clip, chunk) are the strategy's recipe, chosen on public or synthetic data: choosing them on private data would spend
privacy that nothing here accounts for.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from fractions import Fraction
from math import isfinite

from client.training.private.journal import TrainingPlan
from common.errors import InvalidInput
from common.privacy.figures import epsilon_text
from common.privacy.training import Neighbours, Sampling, plan_noise

MAX_EPSILON = 64.0
"""A training with a larger ε protects nobody, and its accounting would take gigabytes."""

STRATEGIES: dict[str, str] = {
    "dp-sgd": "client.training.private.teachers:sgd",
    "dp-bbb": "client.training.private.teachers:bbb",
}
"""Every strategy by name: ``module:function`` that makes one of a :class:`~client.training.private.teachers.Setup`,
imported on use."""


@dataclass(frozen=True, slots=True)
class PrivateSettings:
    """One private training. ``rate`` is q; ``clip`` bounds a patient's vector, or with ``per_layer`` its every layer.

    ``scans`` is how many scans or views of a patient are averaged before its one clip. ``temperature``, ``prior_std``,
    ``initial_std``: dp-bbb's KL and posterior.
    """

    strategy: str
    epsilon: float
    delta: float
    neighbours: Neighbours = Neighbours.ADD_REMOVE
    sampling: Sampling = Sampling.POISSON
    rate: Fraction = Fraction(1, 2)
    steps: int = 100
    learning_rate: float = 3e-2
    clip: float = 0.1
    scans: int = 1
    chunk: int = 4
    method: str = "vmap"
    temperature: float = 0.03
    prior_std: float = 0.2
    initial_std: float = 0.02
    per_layer: bool = False

    def __post_init__(self) -> None:
        if self.strategy not in STRATEGIES:
            raise unknown_strategy(self.strategy)
        for name, kind in (("neighbours", Neighbours), ("sampling", Sampling)):
            try:
                object.__setattr__(self, name, kind(getattr(self, name)))
            except ValueError as error:
                raise InvalidInput(name, value=getattr(self, name), limit=", ".join(kind)) from error
        if not (isfinite(self.epsilon) and 0 < self.epsilon <= MAX_EPSILON):
            raise InvalidInput(
                "epsilon of a training", value=self.epsilon, limit=f"above 0, at most {epsilon_text(MAX_EPSILON)}"
            )
        if not 0 < self.delta < 1:
            raise InvalidInput("delta of a training", value=self.delta, limit="above 0 and below 1")
        for name in ("learning_rate", "clip", "temperature", "prior_std", "initial_std"):
            if not (isfinite(getattr(self, name)) and getattr(self, name) > 0):
                raise InvalidInput(name, value=getattr(self, name), limit="a finite number above 0")
        if self.scans < 1 or self.chunk < 1 or self.steps < 1:
            raise InvalidInput("scans, chunk and steps", value=(self.scans, self.chunk, self.steps), limit="1 or more")

    def plan(self, *, patients: int) -> TrainingPlan:
        """The plan for n patients' slots: the least noise that keeps (ε, δ), found by the accountant itself."""
        event = plan_noise(
            epsilon=self.epsilon,
            delta=self.delta,
            rate=self.rate,
            steps=self.steps,
            neighbours=self.neighbours,
            sampling=self.sampling,
        )
        return TrainingPlan(event, self.epsilon, self.delta, self.neighbours, patients)


def unknown_strategy(name: str) -> InvalidInput:
    """What is said to a name that is none of :data:`STRATEGIES`."""
    remedy = "what dp-mac was in 3D is --strategy dp-sgd --per-layer" if name == "dp-mac" else ""
    return InvalidInput("private strategy", value=name, limit=", ".join(STRATEGIES), remedy=remedy)


def defaults(strategy: str, *, epsilon: float, delta: float, begun: bool = False) -> PrivateSettings:
    """The strategy's own recipe at this (ε, δ); ``begun``: from a public start, which fewer and smaller steps improve.

    Tuned on one split of public data, not on a site's patients.
    """
    plain = PrivateSettings(strategy, epsilon, delta)
    if not begun:
        return plain
    return replace(plain, steps=40, learning_rate=1e-2, temperature=1e-3, initial_std=5e-3)
