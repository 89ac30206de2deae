"""Tests the PATE paper's experiment: the table has the paper's numbers and the true ε, and a stopped run continues."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from client.records.journal import TrainingJournal, TrainingPlan
from client.training.contract import VoterData
from client.training.private.settings import PrivateSettings, defaults
from common.config import TrainingConfig
from common.privacy.mechanism import Unit
from common.privacy.training import Neighbours
from research import pate
from research.bench import Bench
from research.pate import ALGORITHMS, DP_SGD, costs_of, measure_pate, pate_markdown, pate_summary
from research.setting import Setting, study_of
from research.tests.patients import DATA, balls, deal

SMALL = TrainingConfig(channels=(4, 8), steps=8, learning_rate=5e-3)
SETTING = Setting("paper-ae", 2, 1, 8.0, 1e-3, Unit.HOSPITAL, 3, SMALL, SMALL)
HEADLINE = replace(SETTING, hospitals=8, queries=80)


def test_the_papers_noise_is_the_papers_and_the_exact_accountant_says_less() -> None:
    costs = costs_of(HEADLINE, DATA)
    assert costs["Algorithm 2"]["noise_on_the_mean"] == pytest.approx(1.282564, abs=1e-5)
    for cost in costs.values():
        assert cost["paper"] == pytest.approx(8, abs=1e-3)
        assert cost["exact"] == pytest.approx(6.34, abs=0.01)
        assert cost["exact"] < cost["rdp"] < cost["paper"]
        # μ²K²/8 nats with μ² = N(2/K)²/σ² at the headline's σ: N/(2σ²) nats, at any code length
        assert cost["ceiling_bits"] == pytest.approx(80 / (2 * 1.282564**2) / math.log(2), rel=1e-5)
    assert study_of(replace(HEADLINE, recipe="paper-pca"), DATA).codec.name == "paper-pca"


def test_the_printed_variance_is_charged_and_not_believed() -> None:
    bench = Bench(SETTING, deal(balls(42), hospitals=2), DATA, seed=0, cache=Path("unused"))
    settings = defaults("dp-sgd", epsilon=8.0, delta=1e-3)
    plan = pate.printed_plan(bench, settings, 8)
    layers = 3  # a network of two levels has three
    assert float(plan.event.noise_multiplier) == pytest.approx((6 / layers) ** 0.5, rel=1e-3)
    assert plan.epsilon == pytest.approx(
        pate.epsilon_of(plan.event, delta=1e-3, neighbours=Neighbours.ADD_REMOVE), rel=1e-6
    )


@pytest.mark.slow
@pytest.mark.parametrize(("arm", "planned"), [(DP_SGD[0], False), (DP_SGD[1], True)])
def test_dp_sgd_clips_every_layer_to_4_with_the_noise_that_its_name_says(
    monkeypatch: pytest.MonkeyPatch, arm: str, planned: bool
) -> None:
    given: list[tuple[PrivateSettings, TrainingPlan, int]] = []

    def train(
        part: VoterData, _recipe: object, settings: PrivateSettings, journal: TrainingJournal, **_: object
    ) -> SimpleNamespace:
        given.append((settings, journal.plan, len(part.images)))
        return SimpleNamespace(model=None)

    bench = Bench(SETTING, deal(balls(42), hospitals=2), DATA, seed=0, cache=Path("unused"))
    monkeypatch.setattr("research.bench.train_privately", train)
    monkeypatch.setattr(bench, "scored", lambda arm, _model: {arm: 0.5})
    found = pate.dp_sgd(bench, arm)
    (settings, plan, patients), private = given[0], sum(map(len, bench.roles.private))
    assert (settings.clip, settings.per_layer, settings.neighbours) == (4.0, True, Neighbours.REPLACE_ONE)
    assert (plan.patients, patients) == (private, private)
    assert plan.event.steps == SMALL.steps  # no more than a teacher has
    assert (float(plan.event.noise_multiplier) == pytest.approx(2**0.5, rel=1e-3)) != planned
    assert (0.95 < found[f"{arm}|ε|replace-one"] / SETTING.epsilon <= 1) == planned


@pytest.mark.slow
def test_a_seed_has_every_arm_resumes_and_is_listed_next_to_the_papers_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("common.codecs.ball_autoencoder.STEPS", 8)
    bench = Bench(SETTING, deal(balls(42), hospitals=2), DATA, seed=0, cache=tmp_path)
    found = measure_pate(bench, lambda _stage: None)
    arms = {key for key in found if "|" not in key and "@" not in key}
    for algorithm in ALGORITHMS:
        own = ("student", "zero_code", "public_only", "shuffled_codes", "non_private", "labels")
        assert {f"{algorithm}: {arm}" for arm in own} <= arms
    assert {*DP_SGD, "mean_teacher", "ensemble", "all_data"} <= arms

    def never(*_: object, **__: object) -> None:
        raise AssertionError("trained again")

    monkeypatch.setattr("research.bench.train_privately", never)
    monkeypatch.setattr("research.utility.fit_once", never)
    assert measure_pate(bench, lambda _stage: None) == found
    text = pate_markdown(pate_summary(SETTING, DATA, [found, found]))
    assert "| mean teacher | 0.547 |" in text
    assert "| Algorithm 2: student | 0.561 |" in text
    assert "| DP-SGD, printed noise | 0.53 |" in text
    assert re.search(r"at most \d+ bits", text)
