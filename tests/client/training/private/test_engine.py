"""Tests that a step is charged on disk before its noise is drawn, and that no step runs beyond the plan."""

from __future__ import annotations

import json
import resource
from collections.abc import Mapping
from fractions import Fraction
from multiprocessing import get_context
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from client.records.journal import TrainingJournal, TrainingPlan
from client.training.private.clipped_sums import ClippingPlan, one_part
from client.training.private.engine import run
from common.errors import InvalidInput, Refused
from common.privacy.training import Neighbours, Sampling, TrainingEvent, epsilon_of

EVENT = TrainingEvent(Sampling.POISSON, Fraction(1, 2), Fraction(20), 6)
PLAN = TrainingPlan(EVENT, epsilon=8.0, delta=1e-3, neighbours=Neighbours.ADD_REMOVE, patients=4)


class Counting:
    """Stands in for a strategy; it counts its calls and can die in the middle of a step."""

    parts: ClippingPlan = one_part(("w",), 1.0)

    def __init__(self, *, dies_at: int | None = None, dies_in: str = "total") -> None:
        self.weights, self.calls, self.dies_at, self.dies_in = torch.zeros(3), 0, dies_at, dies_in
        self.batches: list[list[int]] = []

    def total(self, batch: np.ndarray) -> Mapping[str, torch.Tensor]:
        self._maybe_die("total")
        self.batches.append(batch.tolist())
        return {"w": torch.zeros(3, dtype=torch.int64)}

    def apply(self, mean: Mapping[str, torch.Tensor], *, step: int, steps: int) -> None:
        self._maybe_die("apply")
        self.calls += 1
        self.weights = self.weights + mean["w"].float()

    def _maybe_die(self, where: str) -> None:
        if self.dies_at is not None and self.calls == self.dies_at and where == self.dies_in:
            raise KeyboardInterrupt

    def state(self) -> dict[str, Any]:
        return {"weights": self.weights, "calls": self.calls}

    def restore(self, state: dict[str, Any]) -> None:
        self.weights, self.calls = state["weights"], state["calls"]


@pytest.mark.parametrize("where", ["total", "apply"])
def test_a_step_that_died_is_spent_and_the_run_never_takes_more_than_planned(tmp_path: Path, where: str) -> None:
    path, checkpoint = tmp_path / "journal", tmp_path / "checkpoint.pt"
    with pytest.raises(KeyboardInterrupt):
        run(Counting(dies_at=2, dies_in=where), TrainingJournal.open(path, PLAN, identity="a"), checkpoint=checkpoint)
    again = TrainingJournal.open(path, PLAN, identity="a")
    assert again.spent == 3  # two finished, one died after it was charged
    strategy = Counting()
    spent = run(strategy, again, checkpoint=checkpoint)
    assert strategy.calls == spent.applied == 5
    assert spent.event == EVENT
    with pytest.raises(Refused):
        again.spend()


def test_a_lost_checkpoint_gives_no_step_back(tmp_path: Path) -> None:
    path, checkpoint = tmp_path / "journal", tmp_path / "checkpoint.pt"
    with pytest.raises(KeyboardInterrupt):
        run(Counting(dies_at=4), TrainingJournal.open(path, PLAN, identity="a"), checkpoint=checkpoint)
    checkpoint.unlink()
    strategy = Counting()
    assert run(strategy, TrainingJournal.open(path, PLAN, identity="a"), checkpoint=checkpoint).applied == 1
    assert strategy.calls == 1


def test_a_torn_line_counts_as_a_step_and_the_next_one_still_adds(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    TrainingJournal.open(path, PLAN, identity="a").spend()
    path.write_bytes(path.read_bytes() + b"1")
    journal = TrainingJournal.open(path, PLAN, identity="a")
    assert journal.spent == 2
    journal.spend()
    assert TrainingJournal.open(path, PLAN, identity="a").spent == 3


def test_no_step_is_drawn_whose_line_fitted_on_the_disk_only_in_part(tmp_path: Path) -> None:
    """On a nearly full disk, the system writes only a part of the line and reports no error."""
    path, strategy = tmp_path / "journal", Counting()
    journal = TrainingJournal.open(path, PLAN, identity="a")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 1, before[1]))
    try:
        with pytest.raises(OSError, match="large"):
            run(strategy, journal)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert not strategy.batches
    assert TrainingJournal.open(path, PLAN, identity="a").spent == 1


@pytest.mark.parametrize("change", ["plan", "identity", "header"])
def test_another_plan_or_other_data_is_refused_and_what_was_spent_stays(tmp_path: Path, change: str) -> None:
    path = tmp_path / "journal"
    TrainingJournal.open(path, PLAN, identity="a").spend()
    before = path.read_bytes()
    plan, identity = PLAN, "a"
    if change == "plan":
        plan = TrainingPlan(
            TrainingEvent(Sampling.POISSON, Fraction(1, 2), Fraction(30), 6), 8.0, 1e-3, PLAN.neighbours, 4
        )
    elif change == "identity":
        identity = "b"
    else:
        path.write_bytes(before := b"{" + before)
    with pytest.raises(InvalidInput, match=r"journal|started here"):
        TrainingJournal.open(path, plan, identity=identity)
    assert path.read_bytes() == before


def test_steps_that_a_restored_journal_forgot_are_counted_where_a_checkpoint_proves_them(tmp_path: Path) -> None:
    checkpoint, path = tmp_path / "checkpoint.pt", tmp_path / "journal"
    run(Counting(), TrainingJournal.open(path, PLAN, identity="a"), checkpoint=checkpoint)
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[:3]))  # an older copy, of two steps; the checkpoint is of six
    strategy = Counting()
    run(strategy, TrainingJournal.open(path, PLAN, identity="a"), checkpoint=checkpoint)
    assert strategy.batches == []
    assert TrainingJournal.open(path, PLAN, identity="a").left == 0


def test_a_checkpoint_of_another_journal_is_not_used(tmp_path: Path) -> None:
    checkpoint = tmp_path / "checkpoint.pt"
    run(Counting(), TrainingJournal.open(tmp_path / "one", PLAN, identity="a"), checkpoint=checkpoint)
    strategy = Counting()
    run(strategy, TrainingJournal.open(tmp_path / "two", PLAN, identity="a"), checkpoint=checkpoint)
    assert strategy.calls == len(strategy.batches) == 6


@pytest.mark.parametrize("error", [RuntimeError, KeyError, ValueError])
def test_a_checkpoint_of_another_network_ends_no_training_and_gives_no_step_back(
    tmp_path: Path, error: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The weights have other shapes, as after a change of the study's labels."""
    path, checkpoint = tmp_path / "journal", tmp_path / "checkpoint.pt"
    with pytest.raises(KeyboardInterrupt):
        run(Counting(dies_at=2), TrainingJournal.open(path, PLAN, identity="a"), checkpoint=checkpoint)
    other = Counting()

    def restore(_state: dict[str, Any]) -> None:
        raise error("shape")

    monkeypatch.setattr(other, "restore", restore)
    spent = run(other, TrainingJournal.open(path, PLAN, identity="a"), checkpoint=checkpoint)
    assert (spent.event, spent.applied, other.calls) == (EVENT, 3, 3), "three of six steps were spent before"


def test_the_charge_is_on_disk_before_the_batch_is_looked_at(tmp_path: Path) -> None:
    path = tmp_path / "journal"

    class Looking(Counting):
        def total(self, batch: np.ndarray) -> Mapping[str, torch.Tensor]:
            assert path.read_text().count("\n") == 2 + self.calls
            return super().total(batch)

    run(Looking(), TrainingJournal.open(path, PLAN, identity="a"))


def test_empty_batches_are_noised_and_charged() -> None:
    plan = TrainingPlan(
        TrainingEvent(Sampling.POISSON, Fraction(1, 1000), Fraction(20), 5), 8.0, 1e-3, PLAN.neighbours, 3
    )
    strategy, journal = Counting(), TrainingJournal(plan)
    run(strategy, journal)
    assert [] in strategy.batches
    assert journal.spent == 5
    assert float(strategy.weights.abs().min()) > 0


def test_every_step_of_a_run_has_fresh_noise_of_the_size_that_is_charged() -> None:
    class Wide(Counting):
        def __init__(self) -> None:
            super().__init__()
            self.weights, self.means = torch.zeros(20_000), []

        def total(self, batch: np.ndarray) -> Mapping[str, torch.Tensor]:
            return {"w": torch.zeros(20_000, dtype=torch.int64)}

        def apply(self, mean: Mapping[str, torch.Tensor], *, step: int, steps: int) -> None:
            self.means.append(mean["w"])

    strategy = Wide()
    run(strategy, TrainingJournal(PLAN))
    means = torch.stack(strategy.means)
    qn = EVENT.rate * PLAN.patients
    assert means.std(dim=1).tolist() == pytest.approx([float(EVENT.noise_multiplier / qn)] * EVENT.steps, rel=0.03)
    assert float(torch.corrcoef(means).fill_diagonal_(0).abs().max()) < 0.05


def test_a_plan_above_its_epsilon_cannot_be_made() -> None:
    spent = epsilon_of(EVENT, delta=1e-3, neighbours=Neighbours.ADD_REMOVE)
    with pytest.raises(InvalidInput, match="epsilon"):
        TrainingPlan(EVENT, epsilon=spent - 0.01, delta=1e-3, neighbours=Neighbours.ADD_REMOVE, patients=4)


def spend_all(path: Path, together: Barrier, drawn: Connection) -> None:
    """Spend steps until the plan is spent; send the number of steps that this process was granted."""
    journal, count = TrainingJournal.open(path, PLAN, identity="a"), 0
    together.wait()
    while journal.left:
        try:
            journal.spend()
        except Refused:
            journal = TrainingJournal.open(path, PLAN, identity="a")
        else:
            count += 1
    drawn.send(count)


@pytest.mark.parametrize("attempt", range(5))
def test_processes_never_spend_more_than_the_plan_together(tmp_path: Path, attempt: int) -> None:
    """Processes of one training may be forked, and each then starts from a journal without any step."""
    context = get_context("fork")
    together, (ours, theirs) = context.Barrier(3), context.Pipe(duplex=False)
    path = tmp_path / "journal"
    processes = [context.Process(target=spend_all, args=(path, together, theirs)) for _ in range(3)]
    for process in processes:
        process.start()
    drawn = [ours.recv() for _ in processes if ours.poll(60)]
    for process in processes:
        process.join()
    assert len(drawn) == 3
    assert sum(drawn) == EVENT.steps
    assert path.read_text().count("\n") == 1 + EVENT.steps


def test_a_run_beside_which_another_one_spends_stops_before_it_draws(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    first, second = (TrainingJournal.open(path, PLAN, identity="a") for _ in range(2))
    assert first.key == second.key
    second.spend()
    strategy = Counting()
    with pytest.raises(Refused, match="another run"):
        run(strategy, first)
    assert strategy.batches == []


@pytest.mark.parametrize("torn", [b"", b'{"identity": "a", "ke'])
def test_a_journal_whose_header_never_came_to_the_disk_was_never_spent(tmp_path: Path, torn: bytes) -> None:
    path = tmp_path / "journal"
    path.write_bytes(torn)
    if torn:
        with pytest.raises(InvalidInput, match="site join --from"):
            TrainingJournal.open(path, PLAN, identity="a")
    else:
        assert TrainingJournal.open(path, PLAN, identity="a").left == EVENT.steps
        assert TrainingJournal.open(path, PLAN, identity="a").left == EVENT.steps


def test_the_journal_says_nothing_but_facts_of_the_plan(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    TrainingJournal.open(path, PLAN, identity="a")
    assert path.stat().st_mode & 0o077 == 0
    assert set(json.loads(path.read_text())) == {"identity", "key", "plan", "schema"}
