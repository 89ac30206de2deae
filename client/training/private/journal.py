"""A training's own memory of what it has spent: a step is on disk before anything it draws is used.

One text file: a header with the planned event, then a line a step, each flushed to disk. A run that died in the middle
of a step finds the step written and counts it as spent, and never runs more steps than planned. Refuses to go on under
another plan or on other data: what was spent stays spent, so a new training needs its own directory and its own charge.
"""

from __future__ import annotations

import json
import os
import secrets
from dataclasses import dataclass, field
from pathlib import Path

from common.canonical import checked_fields
from common.errors import InvalidInput, Refused
from common.privacy.training import Neighbours, TrainingEvent, epsilon_of

JOURNAL_SCHEMA = 1


@dataclass(frozen=True, slots=True)
class Plan:
    """What a training may spend: (ε, δ) under a relation, the event that fits it, and n, the patients' slots."""

    event: TrainingEvent
    epsilon: float
    delta: float
    neighbours: Neighbours
    patients: int

    def __post_init__(self) -> None:
        if self.patients < 1:
            raise InvalidInput("patients of a private training", value=self.patients, limit="at least 1")
        spent = epsilon_of(self.event, delta=self.delta, neighbours=self.neighbours)
        if not spent <= self.epsilon:
            raise InvalidInput(
                "epsilon of the planned training", value=round(spent, 4), limit=f"at most {self.epsilon}"
            )

    def to_json(self) -> dict[str, object]:
        return {
            "delta": self.delta.hex(),
            "epsilon": float(self.epsilon).hex(),
            "event": self.event.to_json(),
            "patients": self.patients,
            "relation": str(self.neighbours),
        }


@dataclass(slots=True)
class Journal:
    """Steps spent under a plan; ``path`` None keeps them in memory (benchmarks on public data)."""

    plan: Plan
    path: Path | None = None
    identity: str = ""
    spent: int = 0
    key: bytes = field(default_factory=lambda: secrets.token_bytes(32), repr=False)

    @classmethod
    def open(cls, path: Path, plan: Plan, *, identity: str) -> Journal:
        """Start a journal, or continue the one at ``path``: same plan and same ``identity`` (data, recipe, trainer)."""
        if not path.exists():
            journal = cls(plan, path, identity)
            header = {
                "identity": identity,
                "key": journal.key.hex(),
                "plan": plan.to_json(),
                "schema": JOURNAL_SCHEMA,
            }
            path.parent.mkdir(parents=True, exist_ok=True)
            _append(path, json.dumps(header, sort_keys=True) + "\n")
            _sync_directory(path.parent)
            return journal
        first, _, steps = path.read_text(encoding="utf-8").partition("\n")
        remedy = "train into another directory; what this training spent stays charged"
        try:
            header = checked_fields(json.loads(first), {"identity": str, "key": str, "plan": dict, "schema": int})
            key = bytes.fromhex(str(header["key"]))
        except (ValueError, InvalidInput) as error:
            raise InvalidInput("training journal cannot be read", value=path.name, remedy=remedy) from error
        if header["schema"] != JOURNAL_SCHEMA or header["plan"] != plan.to_json() or header["identity"] != identity:
            raise InvalidInput(
                "a private training under another plan, or on other data, was started here",
                value=path.name,
                remedy=remedy,
            )
        if steps and not steps.endswith("\n"):  # a torn line is a step that may have been drawn: it counts
            _append(path, "\n")
            steps += "\n"
        return cls(plan, path, identity, spent=steps.count("\n"), key=key)

    @property
    def left(self) -> int:
        return self.plan.event.steps - self.spent

    def spend(self) -> int:
        """Charge one step, on disk before this returns; gives the step's number. Refused past the plan."""
        if self.left <= 0:
            raise Refused(
                "training-plan-spent", f"all {self.plan.event.steps} planned steps of this training are spent"
            )
        if self.path is not None:
            _append(self.path, f"{self.spent}\n")
        self.spent += 1
        return self.spent - 1

    @property
    def event(self) -> TrainingEvent:
        """What was spent so far: the plan's event with the steps drawn; releases are charged from the start."""
        plan = self.plan.event
        return TrainingEvent(plan.sampling, plan.rate, plan.noise_multiplier, self.spent, plan.releases)


def _append(path: Path, text: str) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    try:
        os.write(descriptor, text.encode())
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _sync_directory(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
