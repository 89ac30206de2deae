"""Tests that one process holds a lock, and that others can check it at any time without blocking it."""

from __future__ import annotations

import fcntl
import threading
import time
from pathlib import Path

import pytest

from common.locks import held, take
from server.study.locks import StudyBusy, held_alone, is_held


def test_a_lock_has_one_holder_and_is_free_once_that_one_closes_it(tmp_path: Path) -> None:
    with (tmp_path / "lock").open("a") as first, (tmp_path / "lock").open("a") as second:
        assert not held(second)
        assert take(first)
        assert held(second)
        started = time.monotonic()
        assert not take(second)
        assert time.monotonic() - started < 15.0  # half of _LOOKS_S, because a held lock is refused at once
        first.close()
        assert take(second)


@pytest.mark.slow
def test_taking_a_lock_waits_until_a_slow_check_of_the_lock_has_ended(tmp_path: Path) -> None:
    """On a busy machine a process may be interrupted in the middle of its check."""
    with (tmp_path / "lock").open("a") as looks, (tmp_path / "lock").open("a") as stream:
        fcntl.flock(looks, fcntl.LOCK_SH)
        timer = threading.Timer(0.5, fcntl.flock, (looks, fcntl.LOCK_UN))
        timer.start()
        assert take(stream)
        timer.join()


@pytest.mark.parametrize("lookers", [1, 4])
def test_no_run_is_refused_because_somebody_looks_over_and_over(tmp_path: Path, lookers: int) -> None:
    lock, ended = tmp_path / "run.lock", threading.Event()
    lock.touch()

    def look() -> None:
        while not ended.is_set():
            is_held(lock)

    threads = [threading.Thread(target=look) for _ in range(lookers)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(50):
            with held_alone(lock, busy="a run goes on"):
                assert is_held(lock) is True
    finally:
        ended.set()
        for thread in threads:
            thread.join()
    with held_alone(lock, busy="a run goes on"), pytest.raises(StudyBusy), held_alone(lock, busy="a run goes on"):
        pass
