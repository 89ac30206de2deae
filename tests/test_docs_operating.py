"""Tests that the documents describe ended runs, busy machines and second studies as the program handles them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from common.errors import QuorumNotReached
from common.process import READY_TIMEOUT_S
from common.supervision import DaemonSpec
from server.study.run_state import DIED

DEPLOYMENT = (Path(__file__).parent.parent / "docs" / "deployment.md").read_text(encoding="utf-8")


def section(title: str) -> str:
    (found,) = re.findall(rf"^#+ {re.escape(title)}\n(.*?)(?=^#+ |\Z)", DEPLOYMENT, re.M | re.S)
    return str(found)


def row(beginning: str) -> str:
    (found,) = re.findall(rf"^\| {re.escape(beginning)}.*$", section("When something fails"), re.M)
    return str(found)


@pytest.mark.parametrize("beginning", ["the server's machine rebooted", "too few sites for a quorum"])
def test_the_failure_table_names_the_person_that_must_resume_a_run(beginning: str) -> None:
    assert "`study resume`" in row(beginning)
    assert "consilium study resume" in DIED
    assert "study goes on" not in row(beginning)


def test_a_missed_quorum_ends_with_the_exit_code_that_the_table_states() -> None:
    assert f"exit code {QuorumNotReached.exit_code}" in row("too few sites for a quorum")


def test_the_time_that_a_daemon_has_to_start_is_documented_with_its_remedy() -> None:
    (default,) = (
        field.default for field in DaemonSpec.__dataclass_fields__.values() if field.name == "ready_timeout_s"
    )
    assert default == READY_TIMEOUT_S
    found = row("a machine too busy to start a daemon")
    assert f"`not ready after {READY_TIMEOUT_S:g} s`" in found
    assert "to fix: " in found


def test_the_two_ways_to_serve_a_second_study_name_each_other() -> None:
    own_port, shared = section("At the consortium"), section("Several studies at one address")
    assert "--port 8444" in own_port
    assert "](#several-studies-at-one-address)" in own_port
    assert "--port 8444" in shared
    assert "](#at-the-consortium)" in shared
