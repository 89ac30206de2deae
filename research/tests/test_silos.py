"""Tests DP-SGD at each hospital: a pull towards the mean network costs no ε, and a failed training ends the others."""

from __future__ import annotations

from threading import BrokenBarrierError

import pytest
import torch

from client.records.journal import TrainingJournal
from client.training.private.engine import TrainingOutcome, run
from client.training.private.strategies_3d import VolumeSgd
from common.config import TrainingConfig
from common.privacy.mechanism import Unit
from research import silos
from research.bench import Bench
from research.setting import Setting
from research.tests.patients import DATA, balls, deal

pytestmark = pytest.mark.slow

SMALL = TrainingConfig(channels=(4, 8), steps=9, learning_rate=5e-3)


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    setting = Setting("joint", 2, 1, 8.0, 1e-3, Unit.PATIENT, 4, SMALL, SMALL)
    return Bench(setting, deal(balls(42), hospitals=2), DATA, seed=0, cache=tmp_path_factory.mktemp("cache"))


def weights(model: torch.nn.Module) -> torch.Tensor:
    return torch.cat([each.detach().flatten() for each in model.parameters()])


def test_the_stronger_the_pull_the_nearer_the_hospitals_and_each_spends_its_whole_plan(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    spent: list[TrainingOutcome] = []

    def noted(*given: object, **more: object) -> TrainingOutcome:
        spent.append(run(*given, **more))  # type: ignore[arg-type]
        return spent[-1]

    monkeypatch.setattr(silos, "run", noted)
    apart = []
    for strength in (0.0, 10.0, 1e6):
        (first, second), mean = silos.at_silos(bench, bench.start(), strength=strength)
        torch.testing.assert_close((weights(first) + weights(second)) / 2, weights(mean))
        apart.append(float((weights(first) - weights(second)).norm()))
    assert apart[0] > apart[1] > apart[2]
    assert apart[2] == pytest.approx(0, abs=1e-4)
    assert [each.applied for each in spent] == [each.event.steps for each in spent]
    assert len(spent) == 6


def test_a_hospital_whose_training_fails_ends_the_others(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[VolumeSgd] = []

    def failing(silo: VolumeSgd, journal: TrainingJournal, **more: object) -> TrainingOutcome:
        begun.append(silo)
        if len(begun) == 2:
            raise RuntimeError("no memory")
        return run(silo, journal, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(silos, "run", failing)
    with pytest.raises((RuntimeError, BrokenBarrierError)):
        silos.at_silos(bench, bench.start())
