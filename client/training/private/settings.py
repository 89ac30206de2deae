"""Defines the settings of a private training: (ε, δ), the relation, the sampling, and each strategy's recipe.

Settings that change the guarantee are planned into an event before training begins. The others (learning rate, clip,
chunk) are the strategy's recipe, chosen on public or synthetic data: tuning them on private data would spend privacy
that nothing here accounts for. The module refuses values out of range and unknown strategies.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from fractions import Fraction
from math import isfinite

from client.records.journal import TrainingPlan
from common.canonical import check_integer, member
from common.errors import InvalidInput
from common.privacy.figures import epsilon_text
from common.privacy.training import Neighbours, Sampling, TrainingEvent, plan_noise

MAX_EPSILON = 64.0
"""Largest ε of a training. A larger one protects nobody, and its accounting would need gigabytes of memory."""

MAX_SCANS = 64
"""Most scans averaged for one patient; a step's memory grows with them."""

LEAST_RATE = Fraction(1, 2**64)
"""Smallest sampling rate: patients are chosen by 64 random bits, so a smaller one would choose nobody."""

MAC_ONLY = ("mu", "mu_growth", "z_steps", "z_rate")
"""Settings that only dp-mac reads; the records of other strategies do not contain them."""

OF_SOME = ("per_layer", "temperature", "prior_std", *MAC_ONLY)
"""Options that only some strategies read."""


@dataclass(frozen=True, slots=True)
class StrategyTerms:
    """A private training strategy.

    Attributes:
        make: Function that makes it from a :class:`~client.training.private.teachers.Setup`, as ``module:function``. It
            is imported when it is first used.
        reads: Which of :data:`OF_SOME` it reads. A command that sets another of them is refused.
        clip: Default clipping norm.
    """

    make: str
    reads: tuple[str, ...] = ()
    clip: float = 0.1


STRATEGIES: dict[str, StrategyTerms] = {
    "dp-sgd": StrategyTerms("client.training.private.teachers:sgd", ("per_layer",)),
    "dp-bbb": StrategyTerms("client.training.private.teachers:bbb", ("per_layer", "temperature", "prior_std")),
    # Each block is clipped on its own, and one block's gradient is shorter than that of all weights.
    "dp-mac": StrategyTerms("client.training.private.teachers:mac", MAC_ONLY, clip=0.02),
}
"""Every private strategy by its name."""

LIMITS = {
    "learning_rate": (1e-12, 1),
    "clip": (1e-6, 1_000_000),
    "temperature": (1e-9, 1_000_000),
    "prior_std": (1e-6, 1_000),
    "initial_std": (1e-9, 1_000),
    "mu": (1e-6, 1_000_000),
    "mu_growth": (1, 1_000_000),
}
"""Smallest and largest value of each setting of a new training. Beyond them a training learns nothing, only adds noise,
diverges, or leaves float32. Version 0.2.0 had no such limits, so a training begun by it may continue outside them."""

_DEFAULT = "leave it out to use the strategy's default"


def option_of(name: str) -> str:
    """Return the option of `site train` that sets a value, as errors name it.

    Args:
        name: Name of the value in :class:`PrivateSettings`.

    Returns:
        The option; the name itself if no option sets the value.
    """
    return name if name in ("chunk", "initial_std") else f"--{name.replace('_', '-')}"


@dataclass(frozen=True, slots=True)
class PrivateSettings:
    """The settings of one private training.

    Attributes:
        strategy: Name of the strategy.
        epsilon: Largest ε that the training may cost a patient.
        delta: δ at which ε is computed.
        neighbours: Neighbouring relation.
        sampling: How a step's patients are chosen.
        rate: Sampling rate q.
        steps: Number of steps.
        learning_rate: First learning rate.
        clip: Norm bound of a patient's vector, or of each of its layers with ``per_layer``. dp-mac clips every block.
        scans: Scans or views of a patient averaged before its one clip.
        chunk: Patients differentiated at once.
        temperature: dp-bbb's temperature λ of the KL divergence.
        prior_std: dp-bbb's standard deviation of the prior.
        initial_std: dp-bbb's first standard deviation of the posterior.
        per_layer: True to clip each layer's gradient to ``clip`` instead of the whole gradient.
        mu: dp-mac's weight μ of the penalty at the first step.
        mu_growth: Factor by which that weight grows until the last step.
        z_steps: Number of dp-mac's descent steps over a patient's coordinates.
        z_rate: Size of these steps.
        noise_multiplier: Noise in units of the norm bound of a patient's whole vector; None for the least noise that
            keeps ``epsilon``. If it is given, a training that costs more than ``epsilon`` is refused.

    Raises:
        InvalidInput: If a value is out of range.
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
    temperature: float = 0.03
    prior_std: float = 0.2
    initial_std: float = 0.02
    per_layer: bool = False
    mu: float = 500.0
    mu_growth: float = 1.0
    z_steps: int = 2
    z_rate: float = 0.5
    noise_multiplier: Fraction | None = None

    def __post_init__(self) -> None:
        if self.strategy not in STRATEGIES:
            raise InvalidInput("private strategy", value=self.strategy, limit=", ".join(STRATEGIES))
        for name, kind in (("neighbours", Neighbours), ("sampling", Sampling)):
            object.__setattr__(self, name, member(kind, getattr(self, name), what=name))
        if not (isfinite(self.epsilon) and 0 < self.epsilon <= MAX_EPSILON):
            limit = f"above 0, at most {epsilon_text(MAX_EPSILON)}"
            remedy = "give another --epsilon or, with --noise-multiplier alone, more noise or fewer --steps"
            raise InvalidInput("epsilon of a training", value=self.epsilon, limit=limit, remedy=remedy)
        if not 0 < self.delta < 1:
            raise InvalidInput("delta of a training", value=self.delta, limit="above 0 and below 1")
        if not self.rate >= LEAST_RATE:
            raise InvalidInput(
                "sampling rate of a training",
                value=float(self.rate),
                limit="at least 2^-64",
                remedy="give a larger --rate, for example 1/4",
            )
        for name in LIMITS:
            if not (isfinite(value := getattr(self, name)) and value > 0):
                raise InvalidInput(option_of(name), value=value, limit="a finite number above 0", remedy=_DEFAULT)
        for name in ("chunk", "steps"):
            if (value := getattr(self, name)) < 1:
                raise InvalidInput(option_of(name), value=value, limit="1 or more", remedy=_DEFAULT)
        check_integer("--scans", self.scans, least=1, most=MAX_SCANS, limit=f"an integer from 1 to {MAX_SCANS}")

    def check_new(self) -> None:
        """Refuse values with which no new training may begin.

        Raises:
            InvalidInput: If a value is outside its limits in :data:`LIMITS`.
        """
        for name, (least, most) in LIMITS.items():
            if not least <= (value := getattr(self, name)) <= most:
                raise InvalidInput(option_of(name), value=value, limit=f"{least} to {most}", remedy=_DEFAULT)

    def facts(self) -> dict[str, object]:
        """Return the settings that shape this strategy's training, by name.

        The settings of :data:`MAC_ONLY` appear only for a strategy that reads them, and the noise multiplier only if it
        was given. The method of computing gradients has only one value now. It is kept so that earlier trainings keep
        their ids.

        Returns:
            Values by name.
        """
        left_out = {"noise_multiplier"} if self.noise_multiplier is None else set()
        left_out |= set(MAC_ONLY) - set(STRATEGIES[self.strategy].reads)
        return {name: value for name, value in asdict(self).items() if name not in left_out} | {"method": "vmap"}

    def plan(self, *, patients: int) -> TrainingPlan:
        """Plan the privacy event of a training on n patients' slots.

        Args:
            patients: Number n of the voter's slots for training.

        Returns:
            The event with the least noise that keeps (ε, δ), found by the accountant itself, or the one with the stated
            noise multiplier.

        Raises:
            InvalidInput: If no noise keeps (ε, δ), or the stated noise costs more.
        """
        if self.noise_multiplier is not None:
            event = TrainingEvent(self.sampling, self.rate, self.noise_multiplier, self.steps)
            return TrainingPlan(event, self.epsilon, self.delta, self.neighbours, patients)
        event = plan_noise(
            epsilon=self.epsilon,
            delta=self.delta,
            rate=self.rate,
            steps=self.steps,
            neighbours=self.neighbours,
            sampling=self.sampling,
        )
        return TrainingPlan(event, self.epsilon, self.delta, self.neighbours, patients)


def defaults(strategy: str, *, epsilon: float, delta: float, begun: bool = False) -> PrivateSettings:
    """Return a strategy's recipe at a given (ε, δ). Recipes were tuned on one split of public data.

    Args:
        strategy: Name of the strategy.
        epsilon: Largest ε that the training may cost a patient.
        delta: δ at which ε is computed.
        begun: True if training begins from a public start, which needs fewer and smaller steps.

    Returns:
        The settings.

    Raises:
        InvalidInput: For an unknown strategy, or ε or δ out of range.
    """
    plain = PrivateSettings(strategy, epsilon, delta)
    plain = replace(plain, clip=STRATEGIES[strategy].clip)
    if not begun:
        return plain
    return replace(plain, steps=40, learning_rate=1e-2, temperature=1e-3, initial_std=5e-3)
