"""Tests the comparison of networks at equal processor time: each is trained as teacher and as student, and stored."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from common.config import TrainingConfig
from common.models.fit import predict
from common.models.unet import definition
from common.privacy.mechanism import Unit
from research import networks
from research.bench import Bench
from research.networks import ROLES, WIDTHS, measure_networks, networks_markdown, networks_summary
from research.setting import Setting
from research.tests.patients import DATA, balls, deal

SMALL = TrainingConfig(channels=(4, 8), steps=4)
SETTING = Setting("pca", 2, 1, 8.0, 1e-3, Unit.HOSPITAL, 4, SMALL, replace(SMALL, learning_rate=5e-3))
SECONDS = 0.1


def test_every_network_is_trained_for_the_same_time_and_no_more_than_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    few = dict.fromkeys(("unet", "dynunet"), (2, 2, 2))
    monkeypatch.setattr(networks, "WIDTHS", few)
    bench = Bench(SETTING, deal(balls(42), hospitals=2), DATA, seed=0, cache=tmp_path)
    found = measure_networks(bench, SECONDS, lambda _stage: None)
    for role in ROLES:
        for name in few:
            assert 0 <= found[f"{name} {role}"] <= 1
            assert found[f"{name} {role}|cost|steps"] >= 1
            assert found[f"{name} {role}|cost|seconds"] < 40 * SECONDS  # a loaded machine times a few steps badly

    def never(*_: object, **__: object) -> None:
        raise AssertionError("trained again")

    monkeypatch.setattr(networks, "fit", never)
    assert measure_networks(bench, SECONDS, lambda _stage: None) == found
    summary = networks_summary(SETTING, DATA, SECONDS, [found, found])
    summary["networks"][1]["gaps"] = [0.1, 0.2]  # t of one degree of freedom is 12.706, the deviation 0.1 / √2
    text = networks_markdown(summary)
    assert "| +0.150 ± 0.635 |" in text
    assert text.count("| unet | 2, 2, 2 |") == len(ROLES)


def test_a_slower_network_has_fewer_steps_and_all_students_learn_one_teachers_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cost, clock = {2: 0.01, 3: 0.05}, [0.0]
    monkeypatch.setattr(networks, "WIDTHS", {"unet": (2, 2, 2), "dynunet": (3, 3, 3)})
    monkeypatch.setattr("time.process_time", lambda: clock[0])
    bench = Bench(SETTING, deal(balls(42), hospitals=2), DATA, seed=0, cache=tmp_path)
    taught: list[tuple[TrainingConfig, np.ndarray, np.ndarray]] = []

    def fit(
        _model: object,
        images: np.ndarray,
        targets: np.ndarray,
        recipe: TrainingConfig,
        *,
        seed: int,
        on_step: Any = None,
    ) -> None:
        taught.append((recipe, images, targets))
        for step in range(recipe.steps):
            clock[0] += cost.get(recipe.channels[0], 1.0)
            if on_step is not None:
                on_step(step, 0.0)

    monkeypatch.setattr(networks, "fit", fit)
    found = measure_networks(bench, SECONDS, lambda _stage: None)
    for role in ROLES:
        assert (found[f"unet {role}|cost|steps"], found[f"dynunet {role}|cost|steps"]) == (10, 2)
    teacher = bench.empty(SETTING.teacher, seed=0)
    answers = np.stack([predict(teacher, image) for image in bench.images])
    students = [(images, targets) for _, images, targets in taught if len(images) == len(bench.images)]
    assert len(students) == 4  # each timed, then trained
    for images, targets in students:
        assert np.array_equal(images, bench.images)
        np.testing.assert_array_equal(targets, answers)


def test_every_network_that_a_study_may_name_is_in_the_table() -> None:
    from common.config import NETWORKS

    assert set(WIDTHS) == set(NETWORKS)
    for name, widths in WIDTHS.items():
        assert definition(name, TrainingConfig(channels=widths, network=name).channels, in_channels=1, out_channels=2)
