"""Tests the loading of teachers: one that cannot be loaded is an empty slot, and the site takes part all the same."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from client.records.voter_files import voter_directory
from client.teachers.teacher import Teachers, load_teacher, served_hash
from common.canonical import sha256_file
from common.errors import InvalidInput
from common.models.fit import predict
from tests.client.teachers.written import DATA, write_teacher

IMAGE = np.zeros((1, 8, 8, 8), dtype=np.float32)


@pytest.fixture
def teachers(tmp_path: Path) -> Path:
    for voter in range(2):
        write_teacher(voter_directory(tmp_path, voter), seed=voter)
    return tmp_path


def test_a_teacher_that_is_missing_changed_or_of_another_study_is_an_empty_slot_and_stops_nobody(
    teachers: Path,
) -> None:
    first = voter_directory(teachers, 0)

    def heard(problem: str, *, voters: int = 2) -> list[bool]:
        loaded = Teachers.load(teachers, data=DATA, voters=voters)
        assert problem in loaded.problems.get(0, ""), loaded.problems
        return [answer is not None for answer in loaded.predict(IMAGE)]

    assert heard("") == [True, True]
    assert heard("", voters=1) == [True], "the study says how many there are, not the disk"
    assert heard("", voters=3) == [True, True, False]
    record, weights = (first / "train.json").read_text(), (first / "weights.pt").read_bytes()
    other = json.loads(record)
    other["data"]["spacing_mm"] = [2, 2, 2]
    for text, problem in [
        (json.dumps(other), "other labels"),
        (record.replace('"weights": "', '"weights": "x'), "differs from the one on record"),
        (record[: len(record) // 2], "not finished"),
        ("[]", "not finished"),
        (json.dumps(json.loads(record) | {"schema": 99}), "schema"),
    ]:
        (first / "train.json").write_text(text)
        assert heard(problem) == [False, True]
    (first / "train.json").write_text(record)
    for damaged in (weights + b"x", weights[:100], b""):
        (first / "weights.pt").write_bytes(damaged)
        assert heard("SHA-256") == [False, True]
    (first / "weights.pt").write_bytes(weights)
    assert heard("") == [True, True]
    first.rename(voter_directory(teachers, 5))
    assert heard("not finished") == [False, True]


def test_only_the_voter_that_does_not_fit_into_memory_fails(teachers: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Path, *given: object, **more: object) -> str:
        if path.parent.name == "voter-000":
            raise MemoryError("Jane Doe")
        return load(path, *given, **more)  # type: ignore[arg-type]

    from client.teachers.teacher import load_weights as load

    monkeypatch.setattr("client.teachers.teacher.load_weights", full)
    loaded = Teachers.load(teachers, data=DATA, voters=2)
    assert [bool(served) for served in loaded.served] == [False, True]
    assert loaded.problems == {0: "MemoryError"}


def test_teachers_are_refused_only_where_no_training_was_ever_begun(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="site train"):
        Teachers.load(tmp_path / "t", data=DATA, voters=2)
    (tmp_path / "slots.json").write_text("{}")  # patients were dealt, and the first training crashed
    begun = Teachers.load(tmp_path, data=DATA, voters=2)
    assert begun.served == ("", "")
    assert list(begun.problems) == [0, 1]
    assert list(begun.predict(IMAGE)) == [None, None]
    with pytest.raises(InvalidInput, match="site doctor"):
        Teachers.load(tmp_path)


def test_an_empty_slot_is_answered_for_by_a_network_nobody_trained(
    teachers: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_teacher(voter_directory(teachers, 1), seed=1, posterior=True)
    asked: list[tuple[int, ...]] = []

    def counted(model: torch.nn.Module, image: np.ndarray, **given: object) -> np.ndarray:
        asked.append(tuple(parameter.numel() for parameter in model.parameters()))
        return predict(model, image, **given)  # type: ignore[arg-type]

    def network(model: torch.nn.Module | None) -> torch.Tensor:
        assert model is not None
        return torch.cat([parameter.flatten() for parameter in model.parameters()])

    monkeypatch.setattr("client.teachers.teacher.predict", counted)
    whole = Teachers.load(teachers, data=DATA, voters=2).without({0})
    first, second = whole.predict(IMAGE)
    assert first is None
    assert second is not None
    assert len(asked) == 11, "one network for the first, ten for the posterior"
    assert len(set(asked)) == 1
    assert whole.stand_in is not None
    trained = [network(model) for model in Teachers.load(teachers, data=DATA, voters=2).models]
    write_teacher(voter_directory(teachers, 0), seed=2, posterior=True)
    asked.clear()
    list(Teachers.load(teachers, data=DATA, voters=2).without({1}).predict(IMAGE))
    assert len(asked) == 20, "where teachers are posteriors, so is the stand-in"
    assert not any(torch.equal(network(whole.stand_in.model), one) for one in trained[1:])


def test_served_teachers_are_named_by_the_bytes_that_were_loaded(teachers: Path) -> None:
    first = voter_directory(teachers, 0)
    loaded = Teachers.load(teachers, data=DATA, voters=2)
    assert loaded.served == tuple(sha256_file(path) for path in sorted(teachers.glob("*/weights.pt")))
    write_teacher(first, seed=0, posterior=True)
    _, teacher = load_teacher(first)
    assert teacher is not None
    assert teacher.served == served_hash(loaded.served[0], sha256_file(first / "posterior.pt")) != loaded.served[0]
