"""Trains voters in parallel: several processes with one thread each, one voter at a time in a process.

The processes are forked from a fork server of :mod:`multiprocessing`, which has imported what a training needs.

The number of processes does not change the weights, because a voter's training reads its own task only. Free memory
limits the size of a scan. It is measured once, before any process opens a scan, so that one voter's scans do not decide
which scans of another voter are used.

If a process dies, its voter is reported as crashed and a new process continues with the other voters. The memory for
volumes is divided among the processes. Any exception in the parent, such as Ctrl-C, ends every process at once;
finished voters and checkpoints stay, so the next call continues.
"""

from __future__ import annotations

import atexit
import contextlib
import multiprocessing
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import forkserver, resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerProcess

from client.training.task import Crash, OnProgress, VoterOutcome, VoterTask
from common.data.memory import assuming_free, free_memory_bytes
from common.data.volume_cache import DEFAULT_BUDGET_BYTES
from common.errors import ConsiliumError, InvalidInput
from common.system_errors import explain

THREAD_SETTINGS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
IMPORTED = ("client.training.voter", "torch._dynamo")
"""Modules that the fork server imports. A process would otherwise import the second with its first optimiser."""
STOP_S = 5.0
"""Seconds a process has to end after SIGTERM before it is killed."""

_CONTEXT = multiprocessing.get_context("forkserver")


def default_jobs(voters: int) -> int:
    """Return the number of processes used by default.

    Args:
        voters: Number of voters.

    Returns:
        The number of voters, but at most the number of CPU cores that this process may use; at least 1.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(voters, cores))


@dataclass(slots=True)
class _Process:
    """A training process and the position of the task it is working on."""

    process: ForkServerProcess
    connection: Connection
    place: int | None = None


def side_by_side(tasks: Sequence[VoterTask], on_progress: OnProgress, *, jobs: int) -> list[VoterOutcome | Crash]:
    """Train voters in parallel processes.

    Args:
        tasks: The voters' trainings.
        on_progress: Called after every step with the position of the voter's task.
        jobs: Largest number of processes at once.

    Returns:
        One outcome or crash for each task, in order.

    Raises:
        InvalidInput: If ``jobs`` is below 1.
    """
    if jobs < 1:
        raise InvalidInput("jobs", value=jobs, limit="1 or more")
    results: dict[int, VoterOutcome | Crash] = {}
    waiting = list(range(len(tasks)))[::-1]
    running: list[_Process] = []
    free = free_memory_bytes()
    try:
        while waiting or running:
            while waiting and len(running) < jobs:
                running.append(_start(cache_bytes=DEFAULT_BUDGET_BYTES // jobs, free_bytes=free))
                _give(running[-1], waiting, tasks)
            for connection in wait([one.connection for one in running]):
                one = next(one for one in running if one.connection is connection)
                assert one.place is not None
                voter = tasks[one.place].voter
                try:
                    message = one.connection.recv()
                except (EOFError, ConnectionError):
                    results[one.place] = Crash(voter, _obituary(one.process))
                    _end([one])
                    running.remove(one)
                    continue
                if isinstance(message, tuple):
                    on_progress(one.place, *message)
                    continue
                outcome = message if isinstance(message, VoterOutcome) else Crash(voter, str(message))
                results[one.place] = outcome
                if not _give(one, waiting, tasks):
                    _end([one])
                    running.remove(one)
    finally:
        _end(running)
    return [results[place] for place in range(len(tasks))]


def _give(one: _Process, waiting: list[int], tasks: Sequence[VoterTask]) -> bool:
    """Send the next task to a process; return False if no task is left."""
    one.place = waiting.pop() if waiting else None
    if one.place is None:
        return False
    with contextlib.suppress(ConnectionError):  # a dead process is noticed at the next read
        one.connection.send(tasks[one.place])
    return True


def import_libraries() -> None:
    """Make the fork server import the training libraries, so that later training processes start quickly.

    The function does not wait for the imports. Without this call, the first training process waits for them.
    """
    os.environ |= dict.fromkeys(THREAD_SETTINGS, "1")  # the fork server reads it when it imports the libraries
    _CONTEXT.set_forkserver_preload(list(IMPORTED))
    with _without_ctrl_c():
        forkserver.ensure_running()


def _start(*, cache_bytes: int, free_bytes: int | None) -> _Process:
    import_libraries()
    ours, theirs = _CONTEXT.Pipe()
    process = _CONTEXT.Process(target=_work, args=(theirs, cache_bytes, free_bytes), daemon=True)
    try:
        process.start()
    finally:
        theirs.close()
    return _Process(process, ours)


@atexit.register
def _end_fork_server() -> None:
    """End the fork server at once. By itself it notices only after its imports that this process is gone."""
    pid: int | None = getattr(forkserver._forkserver, "_forkserver_pid", None)
    if pid is not None:
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGKILL)


@contextmanager
def _without_ctrl_c() -> Iterator[None]:
    """Block SIGINT, which a new process inherits; Ctrl-C reaches every process of the group, and the parent handles
    it.
    """
    resource_tracker.ensure_running()  # it resets the signal mask when it starts, so it must not start below
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _end(processes: Sequence[_Process]) -> None:
    for one in processes:
        one.process.terminate()
    for one in processes:
        one.process.join(STOP_S)
        if one.process.is_alive():
            one.process.kill()
            one.process.join()
        one.process.close()
        one.connection.close()


def _obituary(process: ForkServerProcess) -> str:
    process.join(STOP_S)
    code = process.exitcode
    if code is not None and code < 0:
        name = signal.Signals(-code).name
        hint = "; was there too little memory?" if name == "SIGKILL" else ""
        return f"the training process was ended by {name}{hint}"
    return f"the training process ended with exit status {code}"


def _why(error: Exception) -> str:
    """Return why a training ended early. Errors of Consilium and of the system may add a remedy."""
    if isinstance(error, ConsiliumError):
        return str(error)
    if isinstance(error, OSError):
        return "; to fix: ".join(explain(error))
    return f"{type(error).__name__}: {error}"


def _work(connection: Connection, cache_bytes: int, free_bytes: int | None) -> None:
    """Run a training process: receive tasks, send progress and outcomes, until the parent closes the pipe."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # unwinds, so that no half-written file is left
    import torch

    from client.training.voter import train_voter

    torch.set_num_threads(1)
    report: Callable[[int, float], None] = lambda step, loss: connection.send((step, loss))  # noqa: E731
    while True:
        try:
            task: VoterTask = connection.recv()
        except EOFError:
            return
        try:
            with assuming_free(free_bytes):
                outcome: VoterOutcome | str = train_voter(task, on_step=report, cache_bytes=cache_bytes)
        except BrokenPipeError:  # the parent is gone
            return
        except Exception as error:  # noqa: BLE001  # any error concerns this voter only
            outcome = _why(error)
        connection.send(outcome)
