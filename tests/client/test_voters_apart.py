"""Tests that a failure in one voter's slot changes only that voter's vote; the sum of the others stays the same."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from client.operations.own_page import SitesOwnPage
from common.data import memory
from common.data.volume import room_for
from common.errors import InvalidInput
from common.privacy.mechanism import QuerySpec
from common.privacy.quantise import quantise
from consilium.cli.site import site_app
from tests.federation import Federation, ball, make_study
from tests.joint_federation import frame_of, joint_federation, keep

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
    """Stands in for three voters, each with its own answer."""

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
    total, _ = fed.worker(voters=Site(asks))._answer(query(fed))
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


def test_later_rounds_ask_no_voter_again_and_get_the_same_codes_as_a_new_worker(tmp_path: Path) -> None:
    asked: list[int] = []

    def counted(slot: int, ask: Callable[[], Any]) -> Callable[[], Any]:
        return lambda: asked.append(slot) or ask()

    with joint_federation(tmp_path, rounds=2) as fed:
        first, frame = query(fed), fed.frame
        fed.frame = keep(fed, replace(frame_of(fed), weights=frame_of(fed).weights[::-1].copy()))
        second = query(fed)
        assert frame != fed.frame
        for broken in (working()[0], FAILURES["out of memory"], FAILURES["no teacher"]):
            asks = [broken, working()[1]]
            worker = fed.worker(voters=Site([counted(slot, ask) for slot, ask in enumerate(asks)]))
            asked.clear()
            worker._answer(first)
            assert asked == [0, 1] * len(first.volumes)
            total, word = worker._answer(second)
            assert asked == [0, 1] * len(first.volumes), "a failed voter is not asked again: it would take longer"
            expected = fed.worker(voters=Site(asks))._answer(second)
            assert np.array_equal(total, expected[0])
            assert word == expected[1]


def test_the_hospital_sees_which_voter_failed_and_in_how_many_codes(tmp_path: Path) -> None:
    with joint_federation(tmp_path, rounds=2) as fed:
        fed.write_site_files()
        fed.workers[100]._voters = Site([working()[0], FAILURES["out of memory"]])
        fed.workers[101]._voters = Site([working()[0], FAILURES["no teacher"]])
        fed.core().run(fed.transport)
        said = "voter 1 failed in 1 of 1 code, and voted zero there"
        for site, warned in (("site-0", True), ("site-1", False), ("site-2", False)):
            directory = fed.root / site
            shown = CliRunner().invoke(site_app, ["status", "--site-dir", str(directory)])
            assert (said in shown.output) == warned, shown.output
            alarms = SitesOwnPage(directory, sheet=lambda *_: "").facts().alarms
            assert (said in [one.text for one in alarms if not one.stops]) == warned
            report = CliRunner().invoke(site_app, ["status", "--site-dir", str(directory), "--json"]).stdout
            assert report
            assert "failed" not in report, "it depends on data, and the report may leave the hospital"


def test_a_patient_withdrawn_between_rounds_has_no_vote_in_the_next(tmp_path: Path) -> None:
    with joint_federation(tmp_path, rounds=2) as fed:
        worker = fed.worker(voters=Site(working()[:2]))
        worker._answer(query(fed))
        fed.site_ledgers["site-0"].withdraw_patient(slot=0, voter=0, subject="a" * 64, weights="b" * 64)
        total, _ = worker._answer(query(fed))
        alone = fed.worker(voters=Site([FAILURES["no teacher"], working()[1]]))._answer(query(fed))[0]
        assert np.array_equal(total, alone)


def test_only_the_last_querys_codes_stay_in_memory(tmp_path: Path) -> None:
    volumes: list[bytes] = []

    class Noting(Site):
        def predict(self, volume: bytes) -> list[Callable[[], Any]]:
            volumes.append(volume)
            return super().predict(volume)

    with Federation(tmp_path, study=make_study(voters_per_site=VOTERS)) as fed:
        worker = fed.worker(voters=Noting(working()))
        for number in (0, 0, 1, 0):
            worker._answer(fed.planned()[number])
        assert volumes == [fed.objects.get(fed.volumes[number]) for number in (0, 1, 0)]


def test_a_volume_nobody_can_read_is_the_zero_code_of_all(fed: Federation) -> None:
    def lost(name: str) -> bytes:
        if name == fed.volumes[0]:
            raise OSError("away")
        return fed.objects.get(name)

    total, word = fed.worker(voters=Site(working()), fetch=lost)._answer(query(fed))
    assert not total.any()
    assert word == "zero-code"


def test_memory_that_a_training_takes_meanwhile_makes_no_public_volume_too_large(
    fed: Federation, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A training's memory depends on its patients' scans, and all voters would have voted zero."""
    room = room_for(fed.study.data).voxels
    free = {"MemTotal": 1 << 40, "MemAvailable": 1 << 20}
    monkeypatch.setattr(memory, "_machine", lambda _, what: free[what])
    monkeypatch.setattr(memory, "_container", lambda _: [])
    assert room_for(fed.study.data).voxels < room

    class Measuring(Site):
        def predict(self, volume: bytes) -> list[Callable[[], Any]]:
            if room_for(fed.study.data).voxels < room:
                raise InvalidInput("voxels of the volume", value=room, limit="less")
            return super().predict(volume)

    assert fed.worker(voters=Measuring(working()))._answer(query(fed))[1] == "stored"


def test_the_log_says_why_a_public_volume_made_all_voters_vote_zero(
    fed: Federation, caplog: pytest.LogCaptureFixture
) -> None:
    def small(_: str) -> bytes:
        raise InvalidInput("voxels of the volume", value=9, limit="at most 8", remedy="give the program more memory")

    assert fed.worker(voters=Site(working()), fetch=small)._answer(query(fed))[1] == "zero-code"
    assert "got 9; allowed: at most 8; to fix: give the program more memory" in caplog.text
