"""Runs private training steps in the only safe order, for every strategy.

1. Draw the batch.
2. Charge the step, on disk.
3. Sum the clipped vectors of the batch.
4. Add noise.
5. Apply the private mean to the weights.
6. Save a checkpoint.

A strategy supplies the clipped integer sum (3) and takes the private mean (5). Sampling, charging, noise, the constant
denominator and resuming happen only here. The result is the last iterate, because choosing among iterates on private
data would be another release. ``client.training.private.teachers`` calls :func:`run`.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from jaxtyping import Float, Int64

from client.records.journal import TrainingJournal
from client.training.private.clipped_sums import ClippingPlan, noised
from client.training.private.sampling import Sampler, sampler_for
from common.models.checkpoint import load_checkpoint, save_checkpoint
from common.privacy.gaussian import Sampler as NoiseSampler
from common.privacy.gaussian import rounded_gaussian
from common.privacy.training import TrainingEvent

log = logging.getLogger(__name__)

CHECKPOINT_SCHEMA = 1


class Strategy(Protocol):
    """The interface of a strategy: the part of a private training that differs between DP-SGD, DP-BBB and DP-MAC."""

    @property
    def parts(self) -> ClippingPlan: ...

    def total(self, batch: Int64[np.ndarray, "b"]) -> Mapping[str, Int64[torch.Tensor, "..."]]:
        """Return the clipped integer sum of the gradients of the patients in these slots. # sensitive until noised

        :mod:`client.training.private.clipped_sums` defines the sum.

        Args:
            batch: Slots of the step, int64 [b].

        Returns:
            int64 sums by parameter name; zeros for an empty batch.
        """
        ...

    def apply(self, mean: Mapping[str, Float[torch.Tensor, "..."]], *, step: int, steps: int) -> None:
        """Move the weights by the private mean; this is post-processing.

        Args:
            mean: Private mean by parameter name.
            step: Number of the step, from 0.
            steps: Number of planned steps.
        """
        ...

    def state(self) -> dict[str, Any]:
        """Return everything that the strategy keeps between steps, so that a checkpoint can resume it."""
        ...

    def restore(self, state: dict[str, Any]) -> None:
        """Restore a saved state.

        Args:
            state: What :meth:`state` returned.
        """
        ...


OnSpent = Callable[[int], None]
"""Function called after every step with the number of steps spent so far."""


@dataclass(frozen=True, slots=True)
class TrainingOutcome:
    """The result of :func:`run`: what was spent, and how many steps took effect.

    Attributes:
        event: The privacy event of all steps spent so far.
        applied: Number of steps that moved the weights; the other spent steps were lost to interruptions.
        seconds: Duration.
    """

    event: TrainingEvent
    applied: int
    seconds: float


def run(
    strategy: Strategy,
    journal: TrainingJournal,
    *,
    checkpoint: Path | None = None,
    checkpoint_every: int = 1,
    on_step: OnSpent | None = None,
    noise: NoiseSampler = rounded_gaussian,
    sampler: Sampler | None = None,
) -> TrainingOutcome:
    """Run all steps of the journal's plan that are not spent yet.

    The run resumes from the checkpoint, or begins with the strategy's initial weights if there is none; steps in the
    journal stay spent in both cases.

    Args:
        strategy: The strategy, which holds the weights.
        journal: The journal that charges the steps.
        checkpoint: Checkpoint file of the same journal; None to store none.
        checkpoint_every: Number of steps between checkpoints.
        on_step: Called after each step with the number of steps spent.
        noise: The noise sampler; tests inject another one.
        sampler: The patient sampler; tests inject another one.

    Returns:
        What was spent, and how many steps took effect.

    Raises:
        Refused: If another run works on the same journal.
    """
    started = time.monotonic()
    plan = journal.plan
    chosen = sampler or sampler_for(plan.event, patients=plan.patients, key=journal.key)
    applied = _resume(checkpoint, journal, strategy)
    while journal.left:
        batch = chosen.batch(journal.spent)
        step = journal.spend()  # on disk before anything is computed from the batch
        total = strategy.total(batch)  # sensitive until noised
        mean = noised(
            total,
            strategy.parts,
            noise_multiplier=plan.event.noise_multiplier,
            expected=chosen.expected,
            noise=noise,
        )
        strategy.apply(mean, step=step, steps=plan.event.steps)
        applied += 1
        if checkpoint is not None and (journal.spent % checkpoint_every == 0 or not journal.left):
            state = {"spent": journal.spent, "applied": applied, "state": strategy.state()}
            save_checkpoint(checkpoint, state, run=_run(journal))
        if on_step is not None:
            on_step(journal.spent)
    return TrainingOutcome(event=journal.event, applied=applied, seconds=time.monotonic() - started)


def _run(journal: TrainingJournal) -> dict[str, object]:
    return {"schema": CHECKPOINT_SCHEMA, "journal": journal.key.hex()}


def _resume(path: Path | None, journal: TrainingJournal, strategy: Strategy) -> int:
    """Load a checkpoint of this journal, and return the number of steps that moved the weights.

    A journal restored from an older copy may lack steps that the checkpoint contains. They were drawn, so they are
    counted first. A checkpoint that does not fit the strategy's network is not used, as one that cannot be read.
    """
    saved = load_checkpoint(path, run=_run(journal))
    if saved is None:
        return 0
    journal.catch_up(int(saved["spent"]))
    try:
        strategy.restore(saved["state"])
    except (KeyError, RuntimeError, ValueError):  # the study's data settings changed, so the weights have other shapes
        log.warning("checkpoint=of_another_network starting_from=0")
        return 0
    return int(saved["applied"])
