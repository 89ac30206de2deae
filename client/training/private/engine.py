"""One private step, in the only order that is safe: draw the batch, charge the step, sum, add noise, apply, save.

Every strategy runs through :func:`run`. It supplies a clipped integer sum over the patients of a batch and takes the
private mean back; sampling, charging, noise, the constant denominator and resuming are here and nowhere else. The last
iterate is the result: choosing among iterates on private data would be one more release.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from jaxtyping import Float, Int64

from client.records.journal import TrainingJournal
from client.training.private.clipped_sums import Parts, noised
from client.training.private.sampling import Sampler, sampler_for
from common.models.checkpoint import load_checkpoint, save_checkpoint
from common.privacy.gaussian import Sampler as NoiseSampler
from common.privacy.gaussian import rounded_gaussian
from common.privacy.training import TrainingEvent

CHECKPOINT_SCHEMA = 1


class Strategy(Protocol):
    """The part of a private training that differs between strategies. All it keeps between steps is in its state."""

    @property
    def parts(self) -> Parts: ...

    def total(self, batch: Int64[np.ndarray, "b"]) -> Mapping[str, Int64[torch.Tensor, "..."]]:
        """The integer sum over these slots (:mod:`client.training.private.clipped_sums`); zeros for an empty batch."""
        ...

    def apply(self, mean: Mapping[str, Float[torch.Tensor, "..."]], *, step: int, steps: int) -> None:
        """Move the weights by the private mean, which is already safe: post-processing from here on."""
        ...

    def state(self) -> dict[str, Any]: ...

    def restore(self, state: dict[str, Any]) -> None: ...


OnSpent = Callable[[int], None]
"""Called after every step with the steps spent so far."""


@dataclass(frozen=True, slots=True)
class Spent:
    """What a run did: ``applied`` steps of the ``event``'s moved the weights, the others were lost to interruptions."""

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
) -> Spent:
    """Spend every step of the journal's plan that is left.

    Resumes from ``checkpoint`` (of the same journal) or, without one, from the strategy's start: the steps the journal
    has are spent either way. ``noise`` and ``sampler`` are for tests; production leaves both alone.
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
    return Spent(event=journal.event, applied=applied, seconds=time.monotonic() - started)


def _run(journal: TrainingJournal) -> dict[str, object]:
    return {"schema": CHECKPOINT_SCHEMA, "journal": journal.key.hex()}


def _resume(path: Path | None, journal: TrainingJournal, strategy: Strategy) -> int:
    """Load a checkpoint of this very journal; returns the steps that moved the weights.

    Steps that the checkpoint has and the journal, restored from an older copy, has not were drawn: they count first.
    """
    saved = load_checkpoint(path, run=_run(journal))
    if saved is None:
        return 0
    journal.catch_up(int(saved["spent"]))
    strategy.restore(saved["state"])
    return int(saved["applied"])
