"""Tests the worker's memory: for any number of voters, only a few probability maps exist at a time."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import client.teachers.teacher
from client.operations.serve import TeacherVoters
from client.teachers.teacher import SAMPLES, Posterior, Teacher, Teachers, averaged
from common.config import DataConfig
from common.models.unet import build_unet
from common.protocols.per_volume import PlainEncoder
from tests.federation import Federation, make_study

DATA = DataConfig(labels=("background", "core"), spacing_mm=(1, 1, 1), grid=(8, 8, 8))


def test_a_site_of_many_voters_holds_two_maps_at_most(tmp_path, monkeypatch) -> None:
    alive: list[weakref.ref[np.ndarray]] = []
    most = 0

    class Many:
        def ask(self, image: np.ndarray) -> list[Callable[[], np.ndarray]]:
            return [self.answer] * 9

        def answer(self) -> np.ndarray:
            nonlocal most
            made = np.full((2, 8, 8, 8), 0.5, dtype=np.float32)
            alive.append(weakref.ref(made))
            most = max(most, sum(ref() is not None for ref in alive))
            return made

    monkeypatch.setattr("client.operations.serve.volume_from_bytes", lambda *_: SimpleNamespace(image=None))
    fed = Federation(tmp_path, study=make_study(voters_per_site=9))
    worker = fed.worker(voters=TeacherVoters(Many(), DATA))  # type: ignore[arg-type]
    (codes,) = worker._encoded(PlainEncoder(fed.codec), fed.planned()[0])
    fed.close()
    assert len(codes) == len(alive) == 9
    assert most <= 2


def test_a_voter_is_asked_only_when_its_turn_comes(monkeypatch) -> None:
    asked = []
    monkeypatch.setattr(client.teachers.teacher, "predict", lambda model, image, **_: asked.append(model) or image)
    models = tuple(torch.nn.Identity() for _ in range(3))
    voters = (Teacher(models[0]), None, Teacher(models[2]))
    given = Teachers(DATA, voters).predict(np.zeros((1, 8, 8, 8), np.float32))
    assert asked == []
    next(given)
    assert asked == [models[0]]
    assert next(given) is None
    next(given)
    assert asked == [models[0], models[2]]


def test_a_posteriors_networks_are_drawn_one_by_one_and_alike_each_time() -> None:
    mean = build_unet((2, 4), in_channels=1, out_channels=2, seed=1)
    deviations = tuple(torch.full_like(parameter, 0.1) for parameter in mean.parameters())
    first, again = ([list(n.parameters()) for n in Posterior(deviations, 7).around(mean)] for _ in range(2))
    assert len(first) == SAMPLES
    for one, other in zip(first, again, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
    assert not torch.equal(first[0][0], first[1][0])
    spread = torch.stack([torch.cat([p.flatten() for p in network]) for network in first]).std(dim=0)
    assert spread.mean().item() == pytest.approx(0.1, rel=0.1)


def test_the_mean_of_samples_taken_one_by_one_is_that_of_all_at_once() -> None:
    samples = np.random.default_rng(1).dirichlet([0.4, 0.4, 0.4], size=(6, 5, 4, 3)).astype(np.float32)
    samples = np.moveaxis(samples, -1, 1)
    mean = samples.mean(axis=0)
    total = -(mean * np.log(mean)).sum(axis=0)
    inner = -(samples * np.log(np.maximum(samples, 1e-30))).sum(axis=1).mean(axis=0)
    unsure = (total - inner) / np.log(3)
    expected = (1 - unsure) * mean + unsure * mean.mean(axis=(1, 2, 3), keepdims=True)
    np.testing.assert_allclose(averaged(iter(samples)), expected, atol=2e-6)
