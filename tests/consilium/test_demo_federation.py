"""Tests that a demo does not fail because of a run that an earlier, killed demo left at SuperLink."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from common.process import DaemonSpec, ProcessGroup
from consilium.demo.federation import joined
from server.operations import supervisor
from server.operations.daemons import FlowerServer
from server.study.workspace import Endpoint
from tests.studies import made_study


def test_a_run_that_an_earlier_demo_submitted_is_stopped_before_superexec_could_begin_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The new demo's own run was refused, because a run was already active."""
    workspace = made_study(tmp_path / "study")
    workspace.save_endpoint(Endpoint("localhost", 8443, 8000))
    workspace.save_run_id(7)  # submitted, and the demo ended before the run began
    done: list[str] = []

    def stop(_server: FlowerServer, run_id: int) -> None:
        done.append(f"stop {run_id}")

    def start(specs: Sequence[DaemonSpec]) -> tuple[()]:
        done.extend(spec.role for spec in specs)
        return ()

    monkeypatch.setattr(supervisor, "stop_run", stop)
    with ProcessGroup() as group:
        monkeypatch.setattr(group, "start_all", start)
        monkeypatch.setattr(group, "stop", lambda *_: None)
        with joined(group, workspace, {}, on_step=lambda _step: None):
            pass
    assert done == ["stop 7", "superexec"]
