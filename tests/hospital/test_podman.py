"""Tests a cluster's job in a container that no root started: Slurm, rootless Podman and the site's image.

Needs the user of ``CONSILIUM_PODMAN_USER``, who ran tests/hospital/podman.sh, and a Slurm that answers. Run by make
test-hospital.
"""

from __future__ import annotations

import json
import os
import pwd
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from client.ledger.site_ledger import SiteLedger
from client.operations.staff_decisions import consent
from common.data.msd import write_dataset
from tests.waiting import until
from tests.worlds import STUDY, site_toml, write_case

pytestmark = pytest.mark.hospital
JOB = Path(__file__).parents[2] / "docker" / "slurm" / "consilium-train.sbatch"
IMAGE = "consilium-site:local"
ENDED = {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY"}


class User:
    """Acts as a user at the hospital without root's rights, with container images in the home directory."""

    def __init__(self, name: str) -> None:
        entry = pwd.getpwnam(name)
        self.name, self.home = name, Path(entry.pw_dir)
        self.ids = f"{entry.pw_uid}:{entry.pw_gid}"
        self.runtime = Path(f"/tmp/podman-{name}")
        self.runtime.mkdir(mode=0o700, exist_ok=True)
        os.chown(self.runtime, entry.pw_uid, entry.pw_gid)

    def run(self, *words: str, check: bool = True) -> str:
        done = subprocess.run(
            ["runuser", "-u", self.name, "--", *words],
            cwd=self.home,
            env={"HOME": str(self.home), "PATH": os.environ["PATH"], "XDG_RUNTIME_DIR": str(self.runtime)},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0 or not check, done.stdout + done.stderr
        return done.stdout.strip()


@pytest.fixture
def user() -> User:
    name = os.environ.get("CONSILIUM_PODMAN_USER", "")
    if not name or shutil.which("podman") is None:
        pytest.skip("no user in CONSILIUM_PODMAN_USER, or no podman: see tests/hospital/podman.sh")
    found = User(name)
    if not found.run("podman", "image", "ls", "--quiet", IMAGE, check=False):
        pytest.skip(f"{name} has no image {IMAGE}: tests/hospital/podman.sh builds it")
    if shutil.which("sinfo") is None or subprocess.run(["sinfo"], capture_output=True, check=False).returncode:
        pytest.skip("no Slurm answers: tests/hospital/slurm.sh starts one")
    return found


def test_a_job_in_rootless_podman_trains_teachers_is_stopped_and_is_charged_once(user: User, tmp_path: Path) -> None:
    """The container has no network, sees the site's folder alone, and writes it as the user who submitted the job."""
    site = user.home / f"site-{tmp_path.parent.name}-{tmp_path.name}"
    cases = [write_case(site / "raw", f"case-{number:02d}", number) for number in range(8)]
    write_dataset(site / "set", name="n", labels=["background", "front", "back"], channels=["MRI"], cases=cases)
    (site / "study.toml").write_text(STUDY.replace("steps = 3", "steps = 1500"))
    (site / "site.toml").write_text(site_toml())
    consent(site, by="Ada", sheet="")
    job_script = shutil.copy(JOB, site / "consilium-train.sbatch")
    subprocess.run(["chown", "-R", user.name, str(site)], check=True)
    try:
        container = f"--rm --name=consilium-train --network=none --userns=keep-id --user={user.ids}"
        podman = f"podman run {container} --volume={site}:{site} --workdir={site} {IMAGE}"
        settings = f"CONSILIUM_SITE={site},CONSILIUM_REQUEUE=0"

        def submit() -> str:
            words = ["sbatch", "--parsable", "--mem=2G", f"--export=ALL,{settings}", "-o", str(site / "job.out")]
            stop = "CONSILIUM_STOP=podman kill --signal=INT consilium-train"
            return user.run("env", f"CONSILIUM={podman}", stop, *words, str(job_script))

        def state(job: str) -> str:
            return user.run("scontrol", "show", "job", job).split("JobState=")[1].split()[0]

        def until_ended(job: str) -> str:
            until(lambda: state(job) in ENDED, (site / "job.out").read_text, pause_s=1)
            return state(job)

        job = submit()
        checkpoint = site / "teachers" / "voter-000" / "checkpoint.pt"
        until(checkpoint.exists, (site / "job.out").read_text, pause_s=0.5, alive=lambda: state(job) not in ENDED)
        user.run("scancel", "--batch", "--signal=USR1", job)
        assert until_ended(job) == "COMPLETED"
        assert re.search("interrupted .*checkpoint", (site / "job.out").read_text())
        assert until_ended(submit()) == "COMPLETED", (site / "job.out").read_text()
        with SiteLedger.read(site / "site-ledger.sqlite") as ledger:
            kinds = [row.kind for row in ledger.rows()]
        assert [kind for kind in kinds if kind in ("training", "trained")] == ["training", "trained"]
        report = json.loads((site / "teachers" / "voter-000" / "train.json").read_text())["report"]
        assert report["trained_on"] + report["held_out"] == 8
        weights = site / "teachers" / "voter-000" / "weights.pt"
        assert weights.owner() == user.name
    finally:
        shutil.rmtree(site)
