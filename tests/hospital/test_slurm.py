"""Tests a hospital's batch cluster with a real Slurm of one node: a job trains teachers, and the folder
returns them.

Needs a Slurm that answers `sinfo`: tests/hospital/slurm.sh starts one of Debian's. Run by make test-hospital.
"""

from __future__ import annotations

import fcntl
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from client.ledger.site_ledger import SiteLedger
from client.operations.staff_decisions import consent
from common.data.msd import write_dataset
from tests import waiting
from tests.worlds import STUDY, site_toml, write_case

pytestmark = pytest.mark.hospital
JOB = Path(__file__).parents[2] / "docker" / "slurm" / "consilium-train.sbatch"
ENDED = {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY"}


@pytest.fixture
def site(tmp_path: Path) -> Path:
    if shutil.which("sinfo") is None or subprocess.run(["sinfo"], capture_output=True, check=False).returncode:
        pytest.skip("no Slurm answers: tests/hospital/slurm.sh starts one")
    cases = [write_case(tmp_path / "raw", f"case-{number:02d}", number) for number in range(8)]
    labels = ["background", "front", "back"]
    write_dataset(tmp_path / "set", name="n", labels=labels, channels=["MRI"], cases=cases)
    (tmp_path / "study.toml").write_text(STUDY.replace("steps = 3", "steps = 1500"))
    (tmp_path / "site.toml").write_text(site_toml())
    consent(tmp_path, by="Ada", sheet="")
    return tmp_path


def submit(site: Path, *words: str, requeue: bool = False) -> str:
    consilium = Path(sys.executable).with_name("consilium")
    settings = f"CONSILIUM_SITE={site},CONSILIUM={consilium},CONSILIUM_REQUEUE={int(requeue)}"
    done = subprocess.run(
        ["sbatch", "--parsable", "--mem=2G", f"--export=ALL,{settings}", "-o", str(site / "job.out"), str(JOB), *words],
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.strip()


def state(job: str) -> str:
    shown = subprocess.run(["scontrol", "show", "job", job], capture_output=True, text=True, check=True).stdout
    return shown.split("JobState=")[1].split()[0]


def until(job: str, wanted: set[str], *, timeout_s: float = 300.0) -> str:
    waiting.until(lambda: state(job) in wanted, lambda: f"job {job} is {state(job)}", timeout_s=timeout_s, pause_s=1)
    return state(job)


def trainings(site: Path) -> list[str]:
    with SiteLedger.read(site / "site-ledger.sqlite") as ledger:
        return [row.kind for row in ledger.rows() if row.kind in ("training", "trained")]


def test_teachers_are_trained_by_a_job_that_is_stopped_in_between_and_charged_once(site: Path) -> None:
    job = submit(site)
    until(job, {"RUNNING"})
    checkpoint = site / "teachers" / "voter-000" / "checkpoint.pt"
    output = (site / "job.out").read_text
    waiting.until(checkpoint.exists, output, timeout_s=240, pause_s=0.5, alive=lambda: state(job) == "RUNNING")
    subprocess.run(["scancel", "--batch", "--signal=USR1", job], check=True)
    assert until(job, ENDED) == "COMPLETED"
    assert re.search("interrupted .*checkpoint", (site / "job.out").read_text())
    assert trainings(site) == ["training"]
    again = submit(site)
    assert until(again, ENDED) == "COMPLETED", (site / "job.out").read_text()
    assert trainings(site) == ["training", "trained"]
    report = json.loads((site / "teachers" / "voter-000" / "train.json").read_text())["report"]
    assert report["trained_on"] + report["held_out"] == 8
    assert (site / "teachers" / "voter-000" / "weights.pt").exists()


def test_a_job_does_not_touch_a_site_whose_worker_runs(site: Path) -> None:
    (site / "logs").mkdir()
    with (site / "logs" / "daemons.lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # as the supervisor of the daemons does
        assert until(submit(site), ENDED) == "FAILED"
    assert "to fix: stop it" in (site / "job.out").read_text()
    assert trainings(site) == []  # the consent made the ledger, which records no training
