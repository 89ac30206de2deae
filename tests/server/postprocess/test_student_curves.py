"""Tests that the student is scored a few times during training on published cases, and that this does not change it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from common.canonical import sha256_file
from common.config import Study, TrainingConfig
from common.data.msd import read_dataset
from common.data.synthetic import study_data, write_phantoms
from common.data.volume import load_example
from common.events import EventLog, read_events
from common.models.fit import OnStep, one_hot
from common.models.unet import network_for
from common.objects import ObjectStore
from server.postprocess import networks, student_curves
from server.protocols.query_protocol import FitFiles, NetworkTraining
from server.protocols.student_fit import train_student
from server.public.material import PairedFiles
from tests.federation import make_study

STEPS, CASES = 130, 3


class World:
    """Holds validation cases, and a student that makes two passes over two other cases."""

    def __init__(self, root: Path) -> None:
        self.root, data = root, study_data(2)
        recipe = TrainingConfig(channels=(4, 8), steps=STEPS)
        self.study: Study = replace(make_study(), data=data, teacher=recipe, student=recipe)
        write_phantoms(root / "data", cases=CASES + 2, seed=3)
        cases, store = read_dataset(root / "data").labelled, ObjectStore(root / "objects")
        self.store, self.examples = store, [load_example(case, data) for case in cases]
        self.files = tuple(
            PairedFiles(store.put(case.image.read_bytes()), store.put(case.label.read_bytes()))
            for case in cases[:CASES]
            if case.label is not None
        )
        self.by_hand: dict[int, float] = {}

    def train(self, files: FitFiles | None, on_step: OnStep) -> torch.nn.Module:
        assert files is not None
        images = np.stack([one.volume.image for one in self.examples[CASES:]])
        labels = np.stack([one_hot(one.label, 3) for one in self.examples[CASES:]])
        half, model = replace(self.study.student, steps=STEPS // 2), None
        for number in (0, 1):
            path = files.checkpoint if number == 0 else files.checkpoint.with_name(f"{files.checkpoint.name}.1")

            def told(step: int, loss: float, number: int = number, path: Path = path) -> None:
                whole = step + number * half.steps
                if step % 50 == 0 or step == half.steps:
                    self.by_hand[whole] = self.dice(torch.load(path, weights_only=True)["model"])
                on_step(whole, loss)

            model, _ = train_student(images, labels, half, seed=number, start=model, checkpoint=path, on_step=told)
        assert model is not None
        return model

    def dice(self, weights: Any) -> float:
        """Return the mean of 2|A ∩ B|/(|A| + |B|) over structures and cases, computed by NumPy."""
        network = network_for(self.study.student, self.study.data)
        network.load_state_dict(weights)
        network.eval()
        each: list[list[float]] = []
        for one in self.examples[:CASES]:
            with torch.no_grad():
                found = network(torch.tensor(one.volume.image)[None])[0].argmax(0).numpy()
            each.append(
                [
                    2
                    * np.sum((found == label) & (one.label == label))
                    / (np.sum(found == label) + np.sum(one.label == label))
                    for label in (1, 2)
                ]
            )
        return float(np.mean(each))

    def fit(self, monkeypatch: pytest.MonkeyPatch, name: str, files: Sequence[PairedFiles]) -> tuple[str, list[Any]]:
        """Return the student's hash, and the log's entries about the validation cases."""
        training = NetworkTraining(name, self.train, steps=STEPS, passes=(STEPS // 2, STEPS))
        monkeypatch.setattr(
            networks, "protocol_of", lambda study: SimpleNamespace(finish=lambda student_data: training)
        )
        monkeypatch.setattr(networks, "student_data_of", lambda released: None)
        public = SimpleNamespace(study=self.study, objects=self.store)
        released = SimpleNamespace(public=public, student_dir=self.root / name, validation=tuple(files))
        events = EventLog(self.root / f"{name}.jsonl", study=self.study.id)
        networks.fit_student(released, events=events)  # type: ignore[arg-type]
        told = [one for one in read_events(self.root / f"{name}.jsonl") if one["event"] == "student-validated"]
        return sha256_file(FitFiles.at(self.root / name).weights), told


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return World(tmp_path_factory.mktemp("curve"))


@pytest.mark.slow
def test_the_same_seed_gives_the_same_student_with_and_without_validation_cases_and_dice_at_a_few_steps(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(1)
    plain, nothing = world.fit(monkeypatch, "plain", ())
    after = torch.get_rng_state()
    torch.manual_seed(1)
    seen, told = world.fit(monkeypatch, "seen", world.files)
    assert (seen, nothing) == (plain, [])
    assert torch.equal(torch.get_rng_state(), after)
    assert [one["step"] for one in told] == [50, 65 + 50]  # each checkpoint is logged once
    for one in told:
        assert one["cases"] == CASES
        assert one["dice"] == pytest.approx(world.by_hand[one["step"]], abs=1e-4)


def test_a_long_training_is_scored_a_few_times_on_a_few_cases(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(student_curves.StudentCurves, "_score", lambda self, checkpoint: 0.5)
    files = FitFiles.at(world.root / "long")
    files.checkpoint.parent.mkdir()
    public = SimpleNamespace(study=world.study, objects=world.store)
    released: Any = SimpleNamespace(public=public, validation=world.files * 20)
    events = EventLog(world.root / "long.jsonl", study=world.study.id)
    training = NetworkTraining("long", world.train, steps=4000)
    curves = student_curves.StudentCurves(released, training, files=files, events=events)
    for step in range(1, 4001):
        if step % 50 == 0:
            files.checkpoint.unlink(missing_ok=True)
            files.checkpoint.write_text(str(step))
        curves.after(step, 0.5)
    told = [one for one in read_events(world.root / "long.jsonl") if one["event"] == "student-validated"]
    assert 6 <= len(told) <= student_curves.POINTS
    assert {one["cases"] for one in told} == {student_curves.MOST_CASES}
    assert all(one["step"] % 50 == 0 for one in told)
