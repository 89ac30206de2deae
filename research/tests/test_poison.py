"""Tests the poisoning benchmark: clipping bounds an attacker, only the poison differs, a stopped run continues."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

import research.bench as shared
import research.poison as poison
from common.config import TrainingConfig
from common.errors import InvalidInput
from common.privacy.mechanism import Unit
from research.bench import Bench
from research.poison import (
    ATTACKS,
    against,
    ask,
    attack_by,
    erased_codes,
    measure,
    poison_summary,
    render_poison,
)
from research.setting import Setting
from research.tests.patients import DATA, balls, deal
from server.protocols.decode import labels_of
from server.protocols.public_start import TEMPERATURE, codes_of

SMALL = TrainingConfig(channels=(4, 8), steps=9, learning_rate=5e-3)
SETTING = Setting("joint", 4, 1, 8.0, 1e-3, Unit.HOSPITAL, 4, SMALL, SMALL, rounds=2)


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    roles = deal(balls(42), hospitals=4)
    return Bench(SETTING, roles, DATA, seed=0, cache=tmp_path_factory.mktemp("cache"))


def test_an_opposing_vote_has_the_radius_and_the_opposite_direction() -> None:
    vote = np.array([0.3, -0.4])
    assert against(vote, radius=1.0) == pytest.approx([-0.6, 0.8])
    assert against(np.zeros(2), radius=1.0).tolist() == [0.0, 0.0]
    with pytest.raises(InvalidInput, match="attack"):
        attack_by("shout", codes=np.zeros((1, 1, 1)), erased=np.zeros((0, 1, 1)), radius=1.0)


@pytest.mark.slow
def test_a_poisoned_vote_moves_the_release_by_no_more_than_its_share_of_the_ball(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However large its vector is, one of K hospitals changes the mean code by at most 2C/K (one round, no noise)."""
    silent = bench.at(replace(SETTING, rounds=1))
    monkeypatch.setattr(poison, "_noise", lambda bench, number, draw, size, noise_std: np.zeros(size, dtype=np.int64))
    start = silent.start()
    frame, codes = silent.frame(start), silent.codes(silent.teachers(start))
    radius = silent.study.codec.radius
    honest = ask(silent, start, frame, attack_by("erase", codes=codes, erased=codes[:0], radius=radius), draw=0)
    asked = frame.weights > 0

    def moved(found: np.ndarray) -> float:
        shrink = frame.variances[asked] / (frame.variances[asked] + (silent.noise_std / frame.weights[asked]) ** 2)
        offset = (frame.along(found) - frame.along(honest.codes)) * frame.weights[asked] / shrink
        return float(np.linalg.norm(offset))

    for attack in ATTACKS:
        vote = attack_by(attack, codes=codes, erased=codes[:1] + 1e6, radius=radius)
        assert moved(ask(silent, start, frame, vote, draw=0).codes) <= 2 * radius / 4 + 1e-3
    assert moved(ask(silent, start, frame, lambda frame, voter: 1e9 * frame.encode(codes[voter]), draw=0).codes) > 0


@pytest.mark.slow
def test_an_erasing_teacher_says_that_the_structure_is_nowhere(bench: Bench) -> None:
    model = bench.teachers(bench.start())[0]
    found = labels_of(bench.codec, erased_codes(model, bench, structure=1)).argmax(axis=1)
    plain = labels_of(bench.codec, codes_of(model, bench.images, bench.codec, temperature=TEMPERATURE)).argmax(axis=1)
    assert (found == 1).sum() < 0.1 * (plain == 1).sum()


@pytest.mark.slow
def test_every_arm_is_there_and_a_second_run_trains_nothing(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    stages: list[str] = []
    first = measure(bench, stages.append)
    arms = ["public", "honest", *(f"{attack}-{sites}" for sites in (1, 2) for attack in ATTACKS)]
    assert first.keys() == {f"{arm}-{what}" for arm in arms for what in ("labels", "student", "warned")}
    assert all(0 <= value <= 1 for value in first.values())

    def never(*_: object, **__: object) -> None:
        raise AssertionError("trained again")

    for name in ("fit", "refine", "public_start"):
        monkeypatch.setattr(shared, name, never)
    monkeypatch.setattr(poison, "rounded_gaussian", never)
    assert measure(bench, stages.append) == first
    document = poison_summary(SETTING, [first, first])
    assert document["arms"]["honest"]["student"]["lost"] == {"mean": 0.0, "half_width": 0.0}
    text = io.StringIO()
    render_poison(document, Console(file=text, width=160))
    for fact in ("ε = 8", "δ = 0.001", "unit hospital", "relation replace-one", "2 seeds"):
        assert fact in text.getvalue()
    assert "2 of 4, last structure erased" in text.getvalue()


def test_a_recipe_without_rounds_and_a_federation_of_poison_are_refused(bench: Bench, tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="joint"):
        measure(bench.at(replace(SETTING, recipe="pca")), print)
    with pytest.raises(InvalidInput, match="more than 2"):
        measure(bench.at(replace(SETTING, hospitals=2)), print)
