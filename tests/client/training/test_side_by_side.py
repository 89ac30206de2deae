"""Tests training in parallel processes: the weights do not depend on their number, and one that dies stops no other."""

from __future__ import annotations

import multiprocessing
import os
import secrets
import signal
import subprocess
import sys
from fractions import Fraction
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from unittest.mock import Mock

import nibabel as nib
import numpy as np
import pytest

from client.records.voter_files import voter_directory
from client.training import side_by_side as module
from client.training.side_by_side import default_jobs, side_by_side
from client.training.task import SiteReport
from common.config import TrainingConfig
from common.data.msd import Dataset, read_dataset
from common.data.volume import SMALL_VOXELS
from common.errors import InvalidInput
from common.privacy.gaussian import rounded_gaussian
from consilium.cli.train import app
from tests.commands import typed
from tests.trained_sites import train_site
from tests.waiting import until
from tests.worlds import DATA, STUDY, site_data

RECIPE = TrainingConfig(channels=(4, 8), steps=6, batch_size=2)


@pytest.fixture
def dataset(tmp_path: Path) -> Dataset:
    return site_data(tmp_path)


def run(data: Dataset, teachers: Path, *, jobs: int, on_progress=lambda voter, step, loss: None) -> SiteReport:
    return train_site(
        data,
        teachers=teachers,
        data=DATA,
        recipe=RECIPE,
        voters=3,
        seed=3,
        run=partial(side_by_side, jobs=jobs),
        on_progress=on_progress,
    )


def weights(teachers: Path) -> list[bytes]:
    return [(voter_directory(teachers, voter) / "weights.pt").read_bytes() for voter in range(3)]


def children(of: int = os.getpid()) -> set[int]:
    """Return the training processes that this process's fork server started, and no helpers of other tests."""
    found = set(map(int, Path(f"/proc/{of}/task/{of}/children").read_text().split()))
    if of != os.getpid():
        return found
    servers = (pid for pid in found if b"forkserver" in Path(f"/proc/{pid}/cmdline").read_bytes())
    return {pid for server in servers for pid in children(server)}


def alive_in_group(group: int) -> list[str]:
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, of_group = stat.read_text().rpartition(")")[2].split()[:3]
        except OSError:
            continue
        if int(of_group) == group and state != "Z":  # a zombie waits for a machine's init, and runs no more
            found.append(stat.parent.name)
    return found


@pytest.mark.slow
def test_weights_do_not_depend_on_how_many_voters_are_trained_at_once(dataset: Dataset, tmp_path: Path) -> None:
    steps: dict[int, list[int]] = {0: [], 1: [], 2: []}
    one = run(dataset, tmp_path / "one", jobs=1)
    three = run(dataset, tmp_path / "three", jobs=3, on_progress=lambda voter, step, loss: steps[voter].append(step))
    here = train_site(dataset, teachers=tmp_path / "here", data=DATA, recipe=RECIPE, voters=3, seed=3)
    assert weights(tmp_path / "one") == weights(tmp_path / "three") == weights(tmp_path / "here")
    assert len(set(weights(tmp_path / "one"))) == 3
    assert [voter.weights for voter in one.voters] == [voter.weights for voter in here.voters]
    assert [voter.voter for voter in three.voters] == [0, 1, 2]
    assert steps == {voter: [1, 2, 3, 4, 5, 6] for voter in range(3)}
    assert children() == set()


@pytest.mark.slow
@pytest.mark.parametrize(("free", "left_out"), [(1, 1), (1 << 50, 0)])
def test_no_voters_scans_decide_which_scans_of_another_voter_are_used(
    dataset: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, free: int, left_out: int
) -> None:
    """Free memory limits a scan's size, and scans that other voters have opened take memory."""
    measure = Mock(return_value=free)
    monkeypatch.setattr(module, "free_memory_bytes", measure)
    large = np.zeros((170, 170, 170), np.uint8)
    large[60:110, 60:110, 60:110] = np.arange(50) + 10
    nib.save(nib.Nifti1Image(large, np.diag([0.1, 0.1, 0.1, 1])), dataset.cases[0].image)
    assert large.size > SMALL_VOXELS
    assert dataset.cases[0].label is not None
    nib.save(nib.Nifti1Image((large > 0).astype(np.uint8), np.diag([0.1, 0.1, 0.1, 1])), dataset.cases[0].label)
    report = run(dataset, tmp_path / "t", jobs=2)
    assert [problem.case for problem in report.problems] == [dataset.cases[0].id] * left_out
    assert all("voxels in a volume" in problem.reason for problem in report.problems)
    measure.assert_called_once()


@pytest.mark.slow
def test_a_voter_whose_process_is_killed_is_reported_and_the_others_go_on(dataset: Dataset, tmp_path: Path) -> None:
    def kill(voter: int, step: int, loss: float) -> None:
        if (voter, step) == (1, 2):
            (pid,) = children()
            os.kill(pid, signal.SIGKILL)

    report = run(dataset, tmp_path / "t", jobs=1, on_progress=kill)
    assert [voter.voter for voter in report.voters] == [0, 2]
    (crash,) = report.crashes
    assert (crash.voter, "SIGKILL" in crash.reason) == (1, True)
    again = train_site(dataset, teachers=tmp_path / "t", data=DATA, recipe=RECIPE, voters=3)
    assert [voter.reused for voter in again.voters] == [True, False, True]
    assert again.crashes == ()


@pytest.mark.slow
def test_an_error_here_ends_every_process(dataset: Dataset, tmp_path: Path) -> None:
    def stop(voter: int, step: int, loss: float) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(dataset, tmp_path / "t", jobs=2, on_progress=stop)
    assert children() == set()


@pytest.mark.slow
def test_ctrl_c_leaves_no_process_and_the_next_call_finishes(dataset: Dataset, tmp_path: Path) -> None:
    (tmp_path / "study.toml").write_text(STUDY.replace("steps = 3", "steps = 400") + "\n")
    study = tmp_path / "study.toml"
    study.write_text(study.read_text().replace("quorum = 2", 'quorum = 2\nunit = "patient"\nvoters_per_site = 2'))
    arguments = ["--data", str(tmp_path / "set"), "--study", str(study), "--site-dir", str(tmp_path / "site")]
    command = [sys.executable, "-c", "from consilium.cli.train import app; app()", *arguments, "--jobs", "2"]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    until(lambda: process.poll() is not None or list((tmp_path / "site").rglob("checkpoint.pt")))
    assert process.poll() is None
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does: to the whole group
    _, stderr = process.communicate(timeout=600)
    assert process.returncode == 130
    assert "same command again" in stderr
    assert "Traceback" not in stderr
    # Python's own resource tracker ends when it notices that its owner is gone
    until(lambda: not alive_in_group(process.pid), lambda: alive_in_group(process.pid))
    assert not list((tmp_path / "site").rglob(".tmp-*"))
    study.write_text(study.read_text().replace("steps = 400", "steps = 3"))
    typed(app, *arguments, "--jobs", "2")
    assert len(read_dataset(tmp_path / "set").cases) == 6


def test_ctrl_c_while_the_fork_server_imports_leaves_no_process(tmp_path: Path) -> None:
    """Formerly the fork server imported torch for seconds after its command had ended."""
    (tmp_path / "slow.py").write_text("import time\ntime.sleep(120)\n")
    started = (
        "import time; from client.training import side_by_side; side_by_side.IMPORTED = ('slow',)\n"
        "side_by_side.import_libraries(); print('imports', flush=True); time.sleep(120)"
    )
    path = os.pathsep.join((str(tmp_path), *sys.path))
    process = subprocess.Popen(
        [sys.executable, "-c", started],
        env={**os.environ, "PYTHONPATH": path},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == b"imports\n"
    assert len(alive_in_group(process.pid)) == 3, "the command, the resource tracker and the fork server"
    os.killpg(process.pid, signal.SIGINT)
    process.wait(timeout=60)
    process.stdout.close()
    until(lambda: not alive_in_group(process.pid), lambda: alive_in_group(process.pid), timeout_s=30.0)


def test_processes_forked_from_one_draw_other_noise_and_other_seeds() -> None:
    def draw(connection: Connection) -> None:
        connection.send((rounded_gaussian(4, Fraction(10**6)), os.urandom(8), secrets.randbelow(2**60)))

    context = multiprocessing.get_context("fork")
    pipes = [context.Pipe() for _ in range(2)]
    for _, theirs in pipes:
        context.Process(target=draw, args=(theirs,)).start()
    (noise, seed, number), (other_noise, other_seed, other_number) = (ours.recv() for ours, _ in pipes)
    assert (noise != other_noise).all()
    assert seed != other_seed
    assert number != other_number


def test_the_number_of_processes_is_bounded_by_voters_and_cores() -> None:
    assert default_jobs(1) == 1
    assert 1 <= default_jobs(10_000) <= (os.cpu_count() or 1)
    with pytest.raises(InvalidInput, match="jobs"):
        side_by_side((), lambda *_: None, jobs=0)
