"""Tests an appearance query with a public start, which exists only if public shapes have a common place."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from common.codecs import load_codec
from server.postprocess.labels import read_released
from server.postprocess.networks import student_data_of
from server.protocols.appearance import protocol as appearance
from server.protocols.appearance.labels import placed
from server.protocols.appearance.protocol import Appearance
from server.protocols.query_protocol import FitFiles
from server.protocols.student_fit import read_start
from tests.dashboard_study import Recorded, make_study_directory

pytestmark = pytest.mark.slow


def unasked(_name: str) -> torch.nn.Module:
    raise AssertionError("no other control was to be trained")


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Recorded:
    torch.set_num_threads(1)
    made = make_study_directory(tmp_path_factory.mktemp("looks"), steps=8, queries=2, protocol="appearance")
    made.run()
    return made


def test_where_public_shapes_share_a_place_the_start_is_kept_and_published(recorded: Recorded) -> None:
    workspace = recorded.workspace
    public = workspace.public()
    assert placed(load_codec(public.objects.get(public.codec.sha256)))
    assert public.objects.get(public.objects.put(workspace.start_file.read_bytes()))


def test_the_student_begins_from_the_start_and_is_named_by_it(recorded: Recorded, tmp_path) -> None:
    student_data = student_data_of(read_released(recorded.workspace))
    terms = replace(student_data.public.study.student, steps=1, learning_rate=1e-9)
    student_data = replace(
        student_data, public=replace(student_data.public, study=replace(student_data.public.study, student=terms))
    )
    begun = Appearance().finish(student_data)
    student = begun.train(FitFiles.at(tmp_path), lambda _step, _loss: None).state_dict()
    start = read_start(recorded.workspace.start_file.read_bytes(), student_data.public.study).state_dict()
    assert all(torch.allclose(student[name], start[name], atol=1e-6) for name in start if "running" not in name)
    aside = recorded.workspace.start_file.rename(tmp_path / "aside")
    try:
        assert Appearance().finish(student_data).inputs != begun.inputs
    finally:
        aside.rename(recorded.workspace.start_file)


def test_public_only_learns_from_the_starts_own_predictions_and_from_no_answer(recorded: Recorded, tmp_path) -> None:
    student_data = student_data_of(read_released(recorded.workspace))
    found = Appearance().control(replace(student_data, trained=unasked), "public_only")
    assert found is not None
    weights = found.train(FitFiles.at(tmp_path), lambda _step, _loss: None).state_dict()
    silent = replace(student_data, answers=[replace_sum(answer) for answer in student_data.answers])
    other = Appearance().control(replace(silent, trained=unasked), "public_only")
    assert other is not None
    again = other.train(FitFiles.at(tmp_path / "again"), lambda _step, _loss: None).state_dict()
    assert all(torch.equal(weights[name], again[name]) for name in weights)


def replace_sum(answer):
    return replace(answer, noisy_sum=np.zeros_like(answer.noisy_sum))


def test_the_start_of_an_earlier_codec_is_deleted_where_shapes_share_no_place(
    recorded: Recorded, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = recorded.workspace.start_file.read_bytes()
    monkeypatch.setattr(appearance, "placed", lambda _codec: False)
    frames = (recorded.workspace.root / "frames.json").read_bytes()
    try:
        Appearance().prepare(recorded.workspace.public, sites=4, on_stage=lambda *_: None)
        assert not recorded.workspace.start_file.exists()
        labels = [label.probabilities for label in Appearance().aggregate(*released(recorded)).labels()]
    finally:
        recorded.workspace.start_file.write_bytes(weights)
        (recorded.workspace.root / "frames.json").write_bytes(frames)
    beside = [label.probabilities for label in Appearance().aggregate(*released(recorded)).labels()]
    assert not np.allclose(labels, beside)


def released(recorded: Recorded):
    found = read_released(recorded.workspace)
    return found.public, found.answers
