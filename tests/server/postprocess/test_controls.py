"""Tests controls: only their labels differ from the student's, each is trained once, and no volume gets its
own answer.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from common.canonical import sha256_file
from common.codecs import load_codec
from common.config import TrainingConfig
from common.data.volume import volume_from_bytes
from common.errors import InvalidInput
from common.events import EventLog, read_events
from common.models.fit import predict
from server.postprocess import networks
from server.postprocess.decisions import DecisionStore, Verdict
from server.postprocess.labels import read_released, write_labels
from server.postprocess.networks import control_trained, student_data_of
from server.protocols import per_volume
from server.protocols.controls import CONTROLS, derangement
from server.protocols.stored_labels import as_stored
from server.protocols.student_fit import train_student
from tests.federation import Federation, make_study

torch.set_num_threads(1)
RECIPE = TrainingConfig(channels=(2, 4), steps=3, batch_size=2)


def run_federation(root, *, queries=6):
    """Return a study whose queries are answered and decoded, on small volumes that can be read."""
    fed = Federation(root, study=make_study(planned_queries=queries, student=RECIPE))
    fed.take_images()
    fed.core().run(fed.transport)
    fed.close()
    workspace = fed.workspace()
    write_labels(read_released(workspace), events=EventLog(workspace.events_file, study=fed.study.id))
    return workspace


def load_labels(workspace):
    return read_released(workspace).labels


def control_labels(workspace, name):
    student_data = student_data_of(read_released(workspace))
    student_data = replace(student_data, trained=lambda other: load_control(workspace, other))
    return per_volume.control_labels(student_data, name)


def fit_controls(workspace, *, events):
    networks.fit_controls(read_released(workspace), events=events)


def load_control(workspace, name):
    return networks.load_control(workspace.study(), workspace.student_dir, name)


def log(workspace):
    return EventLog(workspace.events_file, study=workspace.study().id)


def trained(workspace):
    return [event["name"] for event in read_events(workspace.events_file) if event["event"] == "control-trained"]


@pytest.fixture(scope="module")
def workspace(tmp_path_factory):
    made = run_federation(tmp_path_factory.mktemp("controls"))
    networks.fit_student(read_released(made), events=log(made))
    fit_controls(made, events=log(made))
    return made


@pytest.mark.parametrize("count", [2, 3, 4, 7, 16, 100])
def test_a_derangement_moves_everything_and_loses_nothing(count):
    for seed in range(20):
        order = derangement(count, seed=seed)
        assert sorted(order) == list(range(count))
        assert all(place != other for place, other in enumerate(order))
    assert derangement(count, seed=3) == derangement(count, seed=3)


@pytest.mark.parametrize("count", [0, 1])
def test_one_answer_cannot_be_dealt_to_a_wrong_volume(count):
    with pytest.raises(InvalidInput, match="at least 2"):
        derangement(count, seed=0)


def test_a_controls_labels_have_the_students_volumes_order_and_shapes(workspace):
    own = load_labels(workspace)
    for labels in (control_labels(workspace, name) for name in CONTROLS):
        assert list(labels) == list(own)
        for volume, label in labels.items():
            assert (label.shape, label.dtype) == (own[volume].shape, own[volume].dtype)
            assert label.min() >= 0
            np.testing.assert_allclose(label.sum(axis=0), 1, atol=1e-6)


def test_zero_code_is_the_codecs_mean_shape_for_every_volume(workspace):
    codec = load_codec(workspace.objects.get(workspace.codec().sha256))
    for label in control_labels(workspace, "zero_code").values():
        np.testing.assert_array_equal(label, as_stored(codec.decode(np.zeros(codec.dimension), noise_std=1.0)))


def test_shuffled_codes_are_the_students_own_labels_each_on_another_volume(workspace):
    own, shuffled = load_labels(workspace), control_labels(workspace, "shuffled_codes")
    assert sorted(x.tobytes() for x in own.values()) == sorted(x.tobytes() for x in shuffled.values())
    assert all((shuffled[volume] != own[volume]).any() for volume in own)


def test_public_only_is_self_training_of_a_student_that_saw_nothing_but_the_mean_shape(workspace):
    own, study = load_labels(workspace), workspace.study()
    codec = load_codec(workspace.objects.get(workspace.codec().sha256))
    mean_shape = as_stored(codec.decode(np.zeros(codec.dimension), noise_std=0.0))
    images = np.stack([volume_from_bytes(workspace.objects.get(volume), study.data).image for volume in own])
    first, _ = train_student(images, np.stack([mean_shape] * len(own)), study.student, seed=0)
    labels = control_labels(workspace, "public_only")
    for image, label in zip(images, labels.values(), strict=True):
        np.testing.assert_array_equal(label, as_stored(predict(first, image)))
    assert len({label.tobytes() for label in labels.values()}) == len(own)  # each volume's own, not one mean for all


def test_public_only_needs_its_first_student(tmp_path):
    workspace = run_federation(tmp_path, queries=2)
    with pytest.raises(InvalidInput, match=r"'zero_code'.*study resume"):
        control_labels(workspace, "public_only")
    with pytest.raises(InvalidInput, match="zero_code, shuffled_codes, public_only"):
        control_labels(workspace, "telepathy")


def test_a_control_is_what_the_students_recipe_makes_of_its_labels(workspace):
    own, study = load_labels(workspace), workspace.study()
    images = np.stack([volume_from_bytes(workspace.objects.get(volume), study.data).image for volume in own])
    for name in CONTROLS:
        labels = control_labels(workspace, name)
        model, _ = train_student(images, np.stack(list(labels.values())), study.student, seed=0)
        control = load_control(workspace, name)
        np.testing.assert_array_equal(predict(control, images[0]), predict(model, images[0]))


def test_a_trained_control_is_not_trained_again_and_only_a_missing_one_is(workspace):
    folder = workspace.student_dir / "controls"
    assert trained(workspace) == list(CONTROLS)
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert sorted(before) == sorted(f"{name}.{end}" for name in CONTROLS for end in ("pt", "inputs"))
    fit_controls(workspace, events=log(workspace))
    assert trained(workspace) == list(CONTROLS)
    (folder / "shuffled_codes.pt").unlink()
    fit_controls(workspace, events=log(workspace))
    assert trained(workspace) == [*CONTROLS, "shuffled_codes"]
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


def test_other_answers_train_only_the_control_made_of_them_anew(tmp_path):
    workspace = run_federation(tmp_path, queries=2)
    fit_controls(workspace, events=log(workspace))
    own = load_labels(workspace)
    for volume, label in own.items():  # as if the labels had been decoded otherwise
        np.savez_compressed(workspace.labels_dir / f"{volume}.npz", probabilities=label[::-1].astype(np.float16))
    fit_controls(workspace, events=log(workspace))
    assert trained(workspace) == [*CONTROLS, "shuffled_codes"]


def test_one_labelled_volume_has_no_shuffled_control(tmp_path):
    workspace = run_federation(tmp_path, queries=1)
    fit_controls(workspace, events=log(workspace))
    assert trained(workspace) == ["zero_code", "public_only"]
    assert not control_trained(workspace.student_dir, "shuffled_codes")
    with pytest.raises(InvalidInput, match=r"'shuffled_codes'.*study resume"):
        load_control(workspace, "shuffled_codes")


def test_a_rejected_label_is_in_no_control_and_one_that_needs_it_is_gone(tmp_path):
    workspace = run_federation(tmp_path, queries=2)
    fit_controls(workspace, events=log(workspace))
    assert control_trained(workspace.student_dir, "shuffled_codes")
    first, second = workspace.volumes()
    label = sha256_file(workspace.labels_dir / f"{second}.npz")
    DecisionStore(workspace.decisions_file).decide(
        user="ada", study=workspace.study().id, volume=second, label=label, verdict=Verdict.REJECT
    )
    for name in ("zero_code", "public_only"):
        assert list(control_labels(workspace, name)) == [first]
    fit_controls(workspace, events=log(workspace))
    assert not control_trained(workspace.student_dir, "shuffled_codes")


def test_without_a_label_there_is_nothing_to_control(tmp_path):
    workspace = run_federation(tmp_path, queries=1)
    for path in workspace.labels_dir.iterdir():
        path.unlink()
    with pytest.raises(InvalidInput, match="pseudo-labels"):
        fit_controls(workspace, events=log(workspace))


def test_progress_is_told_and_ends_at_the_total(workspace):
    progress = [e for e in read_events(workspace.events_file) if e["event"] == "stage-progress"]
    done = [event["done"] for event in progress if event["stage"] == "controls"]
    assert done[:3] == [RECIPE.steps, 2 * RECIPE.steps, 3 * RECIPE.steps]
    assert {event["total"] for event in progress if event["stage"] == "controls"} == {3 * RECIPE.steps}
