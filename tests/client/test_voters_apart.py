"""Whatever happens in one voter's slot moves that voter's vote alone: the others' sum stays what it was, bit by bit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from common.privacy.mechanism import QuerySpec
from common.privacy.quantise import quantise
from tests.federation import Federation, ball, make_study
from tests.joint_federation import frame_of, keep

VOTERS = 3
RADII = (1.5, 2.0, 2.5)


def prediction(slot: int) -> np.ndarray:
    body = ball((4, 4, 4), RADII[slot]).astype(np.float32)
    return np.stack([1 - body, body])


def raising(error: BaseException) -> Callable[[], Any]:
    def ask() -> Any:
        raise error

    return ask


FAILURES: dict[str, Callable[[], Any]] = {
    "no teacher": lambda: None,
    "out of memory": raising(MemoryError("Jane Doe")),
    "a broken graph": raising(RuntimeError("CUDA error")),
    "an end of iteration": raising(StopIteration()),
    "not a number": lambda: np.full_like(prediction(0), np.nan),
    "infinite": lambda: np.full_like(prediction(0), np.inf),
    "enormous": lambda: prediction(0) * np.float32(1e30),
    "negative": lambda: -prediction(0),
    "another shape": lambda: prediction(0)[:, :-1],
    "one class": lambda: prediction(0)[:1],
    "a scalar": lambda: np.float32(1),
    "text": lambda: "probabilities",
    "nothing at all": lambda: np.zeros((0,)),
}


@dataclass
class Site:
    """Three voters, each with an answer of its own."""

    asks: list[Callable[[], Any]]

    def predict(self, volume: bytes) -> list[Callable[[], Any]]:
        return self.asks


@pytest.fixture(scope="module", params=["single", "joint"])
def fed(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Federation]:
    study = make_study(voters_per_site=VOTERS, unit="patient", planned_queries=1)
    joint = request.param == "joint"
    study = replace(study, codec=replace(study.codec, joint=joint))
    with Federation(tmp_path_factory.mktemp(request.param), study=study, volumes=3) as made:
        if joint:
            made.frame = keep(made, frame_of(made, volumes=3))
        yield made


def answered(fed: Federation, asks: list[Callable[[], Any]]) -> np.ndarray:
    worker = fed.workers[100]
    worker._voters = Site(asks)
    total, _ = worker._answer(query(fed))
    return total


def query(fed: Federation) -> QuerySpec:
    return fed.planned()[0]


def working() -> list[Callable[[], Any]]:
    return [lambda slot=slot: prediction(slot) for slot in range(VOTERS)]


@pytest.mark.parametrize("slot", range(VOTERS))
@pytest.mark.parametrize("name", FAILURES)
def test_one_voters_failure_is_that_voters_zero_code_and_nobody_elses(fed: Federation, name: str, slot: int) -> None:
    mechanism = query(fed).mechanism
    alone = [answered(fed, [ask if i == slot else FAILURES["no teacher"] for i, ask in enumerate(working())])]
    whole = answered(fed, working())
    failing = working()
    failing[slot] = FAILURES[name]
    found = answered(fed, failing)
    moved = whole - found
    assert np.array_equal(moved, alone[0]), "exactly this voter's own vote is gone"
    assert int(np.dot(moved, moved)) <= mechanism.radius_int**2, "R for one voter, never m·R"
    assert found.any()


def test_the_sum_is_that_of_the_codes_by_definition(tmp_path: Path) -> None:
    fed = Federation(tmp_path, study=make_study(voters_per_site=VOTERS))
    radius = query(fed).mechanism.radius_int
    votes = [quantise(fed.codec.encode(prediction(slot)), radius_int=radius) for slot in range(VOTERS)]
    assert np.array_equal(answered(fed, working()), sum(votes))
    fed.close()


def test_there_are_m_voters_whatever_is_found(fed: Federation) -> None:
    whole = answered(fed, working())
    assert np.array_equal(answered(fed, [*working(), lambda: prediction(0), raising(MemoryError())]), whole)
    silent = FAILURES["no teacher"]
    for kept in range(VOTERS):
        padded = [*working()[:kept], *[silent] * (VOTERS - kept)]
        assert np.array_equal(answered(fed, working()[:kept]), answered(fed, padded))


def test_all_slots_are_asked_in_turn_and_an_empty_one_is_coded_like_the_others(fed: Federation, monkeypatch) -> None:
    coded: list[int] = []
    codec = fed.workers[100]._codec(query(fed))
    encode = codec.encode
    monkeypatch.setattr(type(codec), "encode", lambda self, maps: coded.append(maps.size) or encode(maps))
    answered(fed, [working()[0], FAILURES["no teacher"]])
    assert len(coded) == VOTERS * len(query(fed).volumes)
    assert len(set(coded)) == 1


def test_a_volume_nobody_can_read_is_the_zero_code_of_all(fed: Federation) -> None:
    worker = fed.workers[100]
    worker._voters = Site(working())
    fetch = worker._fetch

    def lost(name: str) -> bytes:
        if name == fed.volumes[0]:
            raise OSError("away")
        return fetch(name)

    worker._fetch = lost
    total, word = worker._answer(query(fed))
    worker._fetch = fetch
    assert not total.any()
    assert word == "zero-code"
