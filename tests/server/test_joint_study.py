"""Tests a joint study in its directory from its first round to the bundle, with a stop between two rounds."""

from __future__ import annotations

import json
import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from common.canonical import sha256_file
from common.codecs import load_codec
from common.errors import InvalidInput
from common.events import EventLog
from common.metrics import score
from common.privacy.mechanism import AccountantName
from consilium.cli.study import study_app
from server.aggregation.aggregator import Aggregator
from server.dashboard.event_fold import EventFold
from server.ledger.server_ledger import Ledger
from server.postprocess.decisions import DecisionStore, Verdict
from server.postprocess.labels import read_released
from server.postprocess.networks import fit_controls, fit_student, load_control, load_student
from server.protocols.controls import CONTROLS
from server.protocols.decode import labels_of
from server.protocols.joint import protocol as joint
from server.protocols.joint.belief import estimated_codes
from server.protocols.rounds import answered_rounds
from server.protocols.stored_labels import StoredLabels
from tests.dashboard_study import Recorded, make_study_directory
from tests.waiting import events_of

pytestmark = pytest.mark.slow

ROUNDS = 3


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Recorded:
    torch.set_num_threads(1)
    return make_study_directory(tmp_path_factory.mktemp("joint"), steps=8, rounds=ROUNDS)


def test_a_stage_that_was_stopped_does_not_stand_there_as_done(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The dashboard must show no tick beside `2 of 8 planned answers released`."""
    made = make_study_directory(tmp_path, batch_size=2)
    emit = EventLog.emit

    def stop_after_one(log: EventLog, event: str, **facts: object) -> None:
        emit(log, event, **facts)
        if event == "released":
            made.workspace.stop_file.touch()

    monkeypatch.setattr(EventLog, "emit", stop_after_one)
    made.run()
    fold = EventFold(made.workspace.events_file)
    while fold.step(threading.RLock()):
        pass
    assert fold.run is not None
    assert fold.run.state.name == "stopped"
    assert not fold.stages["collect"].finished
    assert 0 < fold.stages["collect"].done < fold.stages["collect"].total == 8


def test_a_study_stopped_after_a_round_ends_with_all_of_them_and_a_student(recorded: Recorded) -> None:
    workspace = recorded.workspace

    def released() -> int:
        return len(events_of(workspace.events_file, "released"))

    with pytest.MonkeyPatch.context() as patched:
        ask = Aggregator.run

        def once(*args: object, **named: object) -> None:
            ask(*args, **named)  # type: ignore[arg-type]
            workspace.stop_file.touch()

        patched.setattr(Aggregator, "run", once)
        recorded.run("1")
    assert released() == 1
    assert not (workspace.student_dir / "weights.pt").exists()

    recorded.run("2")
    assert released() == ROUNDS
    with Ledger.open(workspace.ledger_file) as ledger:
        answers = answered_rounds(workspace.public(), ledger.answer)
        spent = ledger.study_spending(workspace.study().id).readings()[AccountantName.EXACT].epsilon
    assert [answer.query.round for answer in answers] == [1, 2, 3]
    assert spent == pytest.approx(workspace.study().privacy.epsilon, abs=0.01)

    labels = read_released(workspace).labels
    assert tuple(labels) == workspace.volumes()
    assert sorted(path.stem for path in (workspace.student_dir / "controls").glob("*.pt")) == sorted(CONTROLS)
    study, folder = workspace.study(), workspace.student_dir
    trained = load_student(study, folder), load_control(study, folder, "zero_code")
    student, zero = (model.state_dict() for model in trained)
    assert any(not torch.equal(student[name], zero[name]) for name in student)
    facts = json.loads((workspace.bundle_dir / "configs" / "privacy.json").read_text())
    assert facts["queries"] == ROUNDS

    before = {path: path.stat().st_mtime_ns for path in workspace.student_dir.rglob("*.pt")}
    recorded.run("3")
    assert released() == ROUNDS
    assert {path: path.stat().st_mtime_ns for path in workspace.student_dir.rglob("*.pt")} == before


def test_labels_after_all_rounds_are_nearer_to_the_teachers_than_the_public_start(recorded: Recorded) -> None:
    """The study's teachers know the truth up to a shift; at ε = 8 and four sites they move the labels towards it."""
    workspace = recorded.workspace
    if not (workspace.student_dir / "weights.pt").exists():
        recorded.run()
    truths = list(next(iter(recorded.teachers.values())).truths.values())
    classes = len(workspace.study().data.labels)

    def dice(maps: object) -> float:
        return score((np.asarray(each).argmax(axis=0).astype(np.uint8) for each in maps), truths, classes).mean  # type: ignore[attr-defined]

    codec = load_codec(workspace.objects.get(workspace.codec().sha256))
    with Ledger.open(workspace.ledger_file) as ledger:
        public = workspace.public()
        start, after = estimated_codes(public, answered_rounds(public, ledger.answer))
    assert dice(read_released(workspace).labels.values()) > dice(labels_of(codec, start)) + 0.02
    assert not np.allclose(start, after)


def test_the_operator_sees_how_the_answers_weigh_and_what_speaks_against_them(recorded: Recorded) -> None:
    """The test counts volumes in the stored labels. A warning reaches the status, its JSON and the
    dashboard's alarms.
    """
    workspace = recorded.workspace
    if not (workspace.student_dir / "weights.pt").exists():
        recorded.run()
    weighed = events_of(workspace.events_file, "answers-weighed")[-1]
    with Ledger.open(workspace.ledger_file) as ledger:
        answers = answered_rounds(workspace.public(), ledger.answer)
    codec = load_codec(workspace.objects.get(workspace.codec().sha256))
    ours = np.stack([label.argmax(axis=0) for label in read_released(workspace).labels.values()])
    mean = labels_of(codec, np.zeros((1, codec.dimension)))[0]
    for value, (text, name) in enumerate(zip(weighed["volumes"], workspace.study().data.labels[1:], strict=True), 1):
        assert text.rsplit(" ", 1)[0] == name
        assert float(text.rsplit(" ", 1)[1]) == pytest.approx(
            (ours == value).sum() / (len(ours) * mean[value].sum()), rel=0.01
        )
    assert weighed["expected"] == sum(answer.query.mechanism.dimension for answer in answers)

    said = ["a structure is gone", "Ask sites."]
    study = workspace.study().id
    EventLog(workspace.events_file, study=study).emit(
        "answers-weighed", surprise=1.0, expected=9, chance=0.001, volumes=[], warnings=said
    )
    printed = CliRunner().invoke(study_app, ["status", str(workspace.root)])
    assert "warning: a structure is gone" in printed.stdout
    facts = json.loads(CliRunner().invoke(study_app, ["status", str(workspace.root), "--json"]).stdout)
    assert facts["answers_weighed"]["warnings"] == said
    fold = EventFold(workspace.events_file)
    while fold.step(threading.RLock()):
        pass
    assert fold.implausible == tuple(said)


def test_a_rejected_label_leaves_its_volume_out_of_the_student_and_of_every_control(
    recorded: Recorded, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rejected label's code must not influence any weights. Once it is accepted again, the former weights return."""
    workspace = recorded.workspace
    if not (workspace.student_dir / "weights.pt").exists():
        recorded.run()
    events = EventLog(workspace.events_file, study=workspace.study().id)
    believed_of, names = joint.estimated_codes, ["student", *CONTROLS]
    volume = workspace.volumes()[1]
    label = sha256_file(workspace.labels_dir / f"{volume}.npz")
    decisions = DecisionStore(workspace.decisions_file)

    def decide(verdict: Verdict) -> None:
        decisions.decide(user="ada", study=workspace.study().id, volume=volume, label=label, verdict=verdict)

    def weights() -> list[str]:
        released = read_released(workspace)
        fit_student(released, events=events)
        fit_controls(released, events=events)
        folder = workspace.student_dir
        return [sha256_file(folder / f) for f in ("weights.pt", *(f"controls/{name}.pt" for name in CONTROLS))]

    def with_another_code(*arguments: object) -> tuple[np.ndarray, np.ndarray]:
        begun, codes = (np.array(each) for each in believed_of(*arguments))  # type: ignore[arg-type]
        begun[1], codes[1] = 0.5, -0.5
        return begun, codes

    used = weights()
    decide(Verdict.REJECT)
    left_out = weights()
    assert all(one != other for one, other in zip(used, left_out, strict=True)), names
    monkeypatch.setattr(joint, "estimated_codes", with_another_code)
    for path in workspace.student_dir.rglob("*inputs"):
        path.unlink()
    assert weights() == left_out
    decide(Verdict.ACCEPT)
    assert weights() != used
    monkeypatch.setattr(joint, "estimated_codes", believed_of)
    for path in workspace.student_dir.rglob("*inputs"):
        path.unlink()
    assert weights() == used


def test_with_every_label_rejected_there_is_nothing_to_train_on(recorded: Recorded) -> None:
    workspace = recorded.workspace
    released = read_released(workspace)
    everything = frozenset(zip(released.labels, released.labels.hashes(), strict=True))
    none = StoredLabels(workspace.labels_dir, workspace.volumes(), rejected=everything)
    with pytest.raises(InvalidInput, match="pseudo-labels"):
        fit_student(replace(released, labels=none), events=EventLog(workspace.events_file, study="s"))
