"""Tests that one process at a time writes a site's teachers: a second training, or a withdrawal, is told to wait."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from client.operations.staff_decisions import withdraw_patient
from client.records.lock import writing
from client.records.patient_deal import load_or_deal
from common.config import TrainingConfig
from common.data.msd import Dataset
from common.errors import Refused
from consilium.cli.train import app
from tests.trained_sites import train_site
from tests.worlds import DATA, STUDY, site_data, site_toml

RECIPE = TrainingConfig(channels=(4, 8), steps=4, batch_size=2)
HOLDER = """
import sys
from pathlib import Path
from client.records.lock import writing
with writing(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def dataset(tmp_path: Path) -> Dataset:
    return site_data(tmp_path, patients=2)


@pytest.fixture
def holder(tmp_path: Path) -> Iterator[subprocess.Popen]:
    """Start another process that holds the lock on this site's teachers."""
    command = [sys.executable, "-c", HOLDER, str(tmp_path / "site" / "teachers")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        yield process
        process.kill()


def test_a_second_training_is_refused_before_anybody_is_dealt_and_may_go_on_when_the_first_died(
    dataset: Dataset, tmp_path: Path, holder: subprocess.Popen
) -> None:
    teachers = tmp_path / "site" / "teachers"
    with pytest.raises(Refused, match="to fix: wait") as refusal:
        train_site(dataset, teachers=teachers, data=DATA, recipe=RECIPE, voters=2)
    assert refusal.value.exit_code == 6
    assert [path.name for path in teachers.iterdir()] == [".lock"]
    holder.kill()  # as a machine that loses power does
    holder.wait()
    report = train_site(dataset, teachers=teachers, data=DATA, recipe=RECIPE, voters=2)
    assert all(voter.weights for voter in report.voters)


def test_the_command_and_a_withdrawal_are_refused_as_well(
    dataset: Dataset, tmp_path: Path, holder: subprocess.Popen
) -> None:
    (tmp_path / "study.toml").write_text(STUDY)
    arguments = ["--data", str(tmp_path / "set"), "--study", str(tmp_path / "study.toml")]
    result = CliRunner().invoke(app, [*arguments, "--site-dir", str(tmp_path / "site")])
    assert isinstance(result.exception, Refused)
    (tmp_path / "site" / "site.toml").write_text(site_toml())
    load_or_deal(tmp_path / "site" / "teachers" / "slots.json", ["p0", "p1"], voters=1)
    with pytest.raises(Refused, match="wait"):
        withdraw_patient(tmp_path / "site", "p0")


def test_the_lock_is_free_again_after_a_training_and_is_its_owners_alone(dataset: Dataset, tmp_path: Path) -> None:
    teachers = tmp_path / "teachers"
    for _ in range(2):
        with writing(teachers):
            assert (teachers / ".lock").stat().st_mode & 0o077 == 0
