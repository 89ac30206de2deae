"""Tests that time and size of a reply reveal as little of a site's data as possible."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from client.operations.serve import REPLY_TICK_S
from client.worker import Worker
from common.errors import InvalidInput, Refused
from common.messages import CodesReply, OfferReply, Several, decode, encode
from tests.federation import Federation, StubVoters

pytestmark = pytest.mark.slow


class Time:
    """Stands in for a clock that moves only when somebody sleeps or computes."""

    def __init__(self) -> None:
        self.now, self.slept = 1000.25, list[float]()
        self.meanwhile: Callable[[], None] = lambda: None

    def clock(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.meanwhile()
        self.now += seconds


class Slow(StubVoters):
    """Stands in for voters that take ``seconds`` for each volume."""

    time: Time
    seconds: float = 0.0

    def answer(self) -> np.ndarray | None:
        self.time.now += self.seconds
        return super().answer()


@pytest.fixture
def fed(tmp_path: Path) -> Iterator[Federation]:
    with Federation(tmp_path, sites=2) as made:
        yield made


@pytest.fixture
def time() -> Time:
    return Time()


@pytest.fixture
def worker(fed: Federation, time: Time) -> Worker:
    slow = Slow()
    slow.time = time
    worker = fed.worker(voters=slow, tick_s=1.0, clock=time.clock, sleep=time.sleep)
    fed.voters["site-0"], fed.workers[100] = slow, worker
    worker.handle(encode(fed.offer(fed.planned())))
    assert time.slept == [], "an offer is answered at once"
    return worker


def codes(reply: bytes) -> int:
    message = decode(reply)
    assert isinstance(message, CodesReply)
    return len(message.codes)


@pytest.mark.parametrize(("seconds", "ticks"), [(0.0, 1), (0.01, 1), (0.3, 1), (0.4, 2), (0.9, 3), (2.0, 6)])
def test_a_reply_leaves_at_the_end_of_a_tick_from_the_requests_arrival(
    fed: Federation, worker: Worker, time: Time, seconds: float, ticks: int
) -> None:
    fed.voters["site-0"].seconds = seconds
    arrived = time.now
    assert codes(worker.handle(encode(fed.request(fed.planned()[:3])))) == 3
    assert time.now - arrived == pytest.approx(ticks * 1.0)


def test_failing_empty_and_stored_codes_leave_at_the_same_tick(fed: Federation, worker: Worker, time: Time) -> None:
    took = []
    voters = fed.voters["site-0"]
    for number, failure in enumerate([None, MemoryError(), RuntimeError(), "nan", "huge", None]):
        voters.failure, voters.voters = failure, int(number < 5)
        voters.seconds = 0.9 if failure is None else 0.1
        arrived = time.now
        worker.handle(encode(fed.request(fed.planned()[number : number + 1])))
        took.append(time.now - arrived)
    arrived = time.now
    worker.handle(encode(fed.request(fed.planned()[:6], attempt=2)))
    took.append(time.now - arrived)
    assert took == pytest.approx([1.0] * 7)


def test_a_refusal_leaves_at_the_end_of_a_tick_too(fed: Federation, worker: Worker, time: Time) -> None:
    request = fed.request(fed.planned()[:1])
    for spoilt in ({"study": "a" * 64}, {"ledger": "b" * 32}, {"queries": ("c" * 64,)}):
        arrived = time.now
        with pytest.raises(Refused):
            worker.handle(encode(replace(request, **spoilt)))
        assert time.now - arrived == pytest.approx(1.0), spoilt
    fed.site_ledgers["site-0"].decide(fed.study.id, "pause")
    arrived = time.now
    with pytest.raises(Refused):
        worker.handle(encode(fed.request(fed.planned()[:1])))
    assert time.now - arrived == pytest.approx(1.0)


def test_an_error_nobody_foresaw_leaves_at_the_end_of_a_tick_too(
    fed: Federation, worker: Worker, time: Time, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object, **__: object) -> None:
        raise OSError("disk")

    monkeypatch.setattr(worker._ledger, "store_code", broken)
    arrived = time.now
    with pytest.raises(OSError, match="disk"):
        worker.handle(encode(fed.request(fed.planned()[:1])))
    assert time.now - arrived == pytest.approx(1.0)


def test_a_reply_holds_all_codes_asked_for_or_none_and_the_next_attempt_goes_on(
    fed: Federation, worker: Worker, time: Time
) -> None:
    fed.voters["site-0"].seconds = 2.5
    request = fed.request(fed.planned(), deadline_s=6)
    assert codes(worker.handle(encode(request))) == 0
    done = fed.voters["site-0"].calls
    assert 0 < done < 6
    assert codes(worker.handle(encode(fed.request(fed.planned(), deadline_s=20, attempt=2)))) == 6
    assert fed.voters["site-0"].calls == 6, "nothing is computed twice"


def test_a_veto_given_while_a_reply_waits_for_its_tick_holds(fed: Federation, worker: Worker, time: Time) -> None:
    time.meanwhile = lambda: fed.site_ledgers["site-0"].decide(fed.study.id, "pause")
    with pytest.raises(Refused, match="pause"):
        worker.handle(encode(fed.request(fed.planned()[:1])))


def test_other_messages_are_handled_while_a_reply_waits(fed: Federation, worker: Worker, time: Time) -> None:
    heard: list[OfferReply] = []

    def other() -> None:
        def offer() -> None:
            reply = decode(worker.handle(encode(fed.offer(fed.planned()[:1]))))
            assert isinstance(reply, OfferReply)
            heard.append(reply)

        thread = threading.Thread(target=offer, daemon=True)
        thread.start()
        thread.join(timeout=600)

    time.meanwhile = other
    message = Several((fed.request(fed.planned()[:1]), fed.offer(fed.planned()[:2])))
    reply = decode(worker.handle(encode(message)))
    assert isinstance(reply, Several)
    assert [type(part) for part in reply.parts] == [CodesReply, OfferReply]
    assert [one.reason for one in heard] == ["accepted"]
    assert len(time.slept) == 1


def test_a_worker_that_is_stopped_leaves_no_reply_before_its_tick(fed: Federation, worker: Worker) -> None:
    stop = threading.Event()
    stop.set()
    worker._sleep = stop.wait  # as run_worker gives it
    with pytest.raises(Refused, match="stopped"):
        worker.handle(encode(fed.request(fed.planned()[:1])))


def test_a_tick_that_is_none_is_refused(fed: Federation) -> None:
    for bad in (-1.0, float("nan"), float("inf")):
        with pytest.raises(InvalidInput):
            fed.worker(tick_s=bad)
    assert REPLY_TICK_S == 1.0
