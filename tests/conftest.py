"""Sets up every test: one thread for each process, and real MRI if it is present."""

from __future__ import annotations

import gc
import itertools
import os
import signal
import sys
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

# Without a deadline, because a busy machine may make any example slow. Hypothesis's own "ci" has none either.
settings.register_profile("consilium", deadline=None)
settings.load_profile("ci" if "CI" in os.environ else "consilium")  # "ci" is Hypothesis's own profile

# Before anything imports numpy or torch: several test processes share few cores, and results must not depend on them.
for _name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
    os.environ[_name] = "1"

# A ledger waits for the disk at every row. No test cuts the power, so temporary files are put into memory, unless a
# variable names another place, memory is short, or programs in it cannot be started. The calls stay the same, and a
# killed writer loses no more.
MEMORY = Path("/dev/shm")
LEAST_MEMORY_BYTES = 4 << 30
if not {"PYTEST_DEBUG_TEMPROOT", "TMPDIR"} & os.environ.keys() and os.access(MEMORY, os.W_OK):
    _found = os.statvfs(MEMORY)
    if _found.f_bavail * _found.f_frsize >= LEAST_MEMORY_BYTES and not _found.f_flag & os.ST_NOEXEC:
        os.environ["PYTEST_DEBUG_TEMPROOT"] = str(MEMORY)

# Without cached bytecode every started process compiles all modules anew, which takes 2.5 s.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# Test collection makes objects that stay. Searching them for garbage repeatedly took a third of its time.
gc.disable()

# A shell that starts the tests in the background lets them and their processes ignore these signals.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)

_numbers = itertools.count()
_failed_setups: list[tuple[BaseException, str]] = []
ROOT = Path(__file__).resolve().parent.parent


LONGEST = (
    "tests/test_privacy_mutants.py",
    "tests/e2e/test_demo.py",
    "tests/test_papers_table.py",
    "tests/e2e/test_readme_road.py",
    "tests/consilium/audit/test_mutations.py",
    "tests/e2e/test_papers_studies.py",
    "tests/sensitivity/test_sensitivity.py",
    "tests/e2e/test_dispute.py",
    "research/tests/test_utility.py",
    "tests/e2e/test_flower_daemons.py",
    "tests/consilium/audit/test_audit_run.py",
    "tests/e2e/test_sealed_sum.py",
    "tests/browser/test_dashboard.py",
    "tests/common/privacy/test_noise_audit.py",
    "tests/browser/test_process.py",
    "tests/e2e/test_tutorial.py",
    "tests/client/training/test_side_by_side.py",
    "tests/browser/test_hospital.py",
    "tests/e2e/test_wheel_dp_mac.py",
)
"""Files that occupy a process for minutes; files that compute and files that wait for daemons alternate.

They start first, because otherwise one process would still work on such a file after the others have finished."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the tests of the longest files first; the order is otherwise kept."""
    turn = {str(ROOT / name): number for number, name in enumerate(LONGEST)}
    items.sort(key=lambda item: turn.get(str(item.path), len(turn)))


def pytest_collection_finish() -> None:
    """Collect garbage rarely from now on, and only among objects that tests make, not among imported ones."""
    gc.freeze()
    gc.set_threshold(100_000, 20, 20)
    gc.enable()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Generator[None, Any, Any]:
    """Print the error of a shared fixture once: pytest raises the same exception for every test that asks for it."""
    report = yield
    if call.when == "setup" and report.failed and call.excinfo is not None:
        first = next((name for error, name in _failed_setups if error is call.excinfo.value), None)
        if first is None:
            _failed_setups.append((call.excinfo.value, item.nodeid))
        else:
            report.longrepr = f"the same error as in {first}"
    return report


@pytest.fixture(autouse=True)
def _own_directory() -> Iterator[None]:
    """Restore the current directory after a test that changes it, such as one that runs a bundle in this process."""
    here = Path.cwd()
    yield
    os.chdir(here)


@pytest.fixture(scope="session", autouse=True)
def _pools_of_the_session(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Register sites of session fixtures in a list of their own; in the user's list, the next run would be refused."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CONSILIUM_STATE_DIR", str(tmp_path_factory.mktemp("state")))
        yield


@pytest.fixture(scope="module", autouse=True)
def _pools_of_the_module(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Register sites of a module's fixtures for that module only, never in the user's own list."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CONSILIUM_STATE_DIR", str(tmp_path_factory.mktemp("state")))
        yield


@pytest.fixture(autouse=True)
def _pools_of_the_test(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Register sites of a test for that test only."""
    folder = tmp_path_factory.getbasetemp() / "states" / str(next(_numbers))  # few tests write to it, and they make it
    monkeypatch.setenv("CONSILIUM_STATE_DIR", str(folder))


@pytest.fixture(scope="session")
def real_data() -> Path:
    """Return the folder that holds real data sets: ``CONSILIUM_DATA``, or ``shared/data`` beside the repository."""
    given = os.environ.get("CONSILIUM_DATA")
    path = Path(given) if given else ROOT.parent / "shared" / "data"
    if not path.is_dir():
        if given:
            pytest.fail(f"CONSILIUM_DATA is set but is not a folder: {path}")
        pytest.skip("no real data: set CONSILIUM_DATA to a folder that holds Task04_Hippocampus")
    return path


@pytest.fixture(scope="session")
def hippocampus(real_data: Path) -> Path:
    """Return the Medical Segmentation Decathlon's hippocampus task, in its own layout."""
    path = real_data / "Task04_Hippocampus"
    if not (path / "dataset.json").is_file():
        pytest.skip(f"no Task04_Hippocampus with a dataset.json in {real_data.name}")
    return path
