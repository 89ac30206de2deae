"""Tests the demo's daemons with stand-ins for the processes and SuperLink.

What an earlier, killed demo left at SuperLink does not stop the next one.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from consilium.demo import federation
from server.operations import supervisor
from server.study.workspace import Endpoint
from tests.studies import made_study


class Processes:
    """Replaces the process group. It records the daemons to start and starts none."""

    def __init__(self, happened: list[str]) -> None:
        self.happened, self.daemons = happened, ()

    def begin(self, spec: str) -> Any:
        self.happened.append(spec)
        return SimpleNamespace(wait_ready=lambda: None)

    def start_all(self, specs: list[str]) -> tuple[Any, ...]:
        return tuple(map(self.begin, specs))

    def stop(self, *_daemons: Any) -> None:
        self.happened.append("stop")


@pytest.fixture
def happened(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    happened: list[str] = []
    for role in ("worker", "supernode", "launcher", "superexec"):
        monkeypatch.setattr(federation, role, lambda *_args, role=role, **_kwargs: role)
    monkeypatch.setattr(federation, "flower_server", lambda _workspace: None)
    monkeypatch.setattr(federation, "stop_open_runs", lambda _workspace: happened.append("runs stopped"))
    monkeypatch.setattr(federation, "site_node", lambda node, **_kwargs: SimpleNamespace(socket="", log=node / "log"))
    return happened


def run(happened: list[str], folder: Path) -> None:
    workspace: Any = SimpleNamespace(relay_dir=folder)
    group: Any = Processes(happened)
    with federation.joined(group, workspace, {"north": folder}, on_step=lambda _step: None):
        pass


def nodes_say(monkeypatch: pytest.MonkeyPatch, happened: list[str], *states: str) -> None:
    """Let SuperLink report these states of the node one after another, and the last one from then on."""
    left = list(states)

    def nodes(_server: object) -> list[Any]:
        state = left.pop(0) if len(left) > 1 else left[0]
        happened.append(state)
        return [SimpleNamespace(status=state)]

    now = [0.0]
    clock = SimpleNamespace(monotonic=lambda: now[0], sleep=lambda seconds: now.append(now.pop() + seconds))
    monkeypatch.setattr(federation, "list_nodes", nodes)
    monkeypatch.setattr(federation, "time", clock)


def test_a_demo_resumed_after_a_kill_starts_its_nodes_once_superlink_has_let_the_killed_ones_go(
    monkeypatch: pytest.MonkeyPatch, happened: list[str], tmp_path: Path
) -> None:
    (tmp_path / "node").mkdir()
    (tmp_path / "node" / "log").touch()
    nodes_say(monkeypatch, happened, "online", "online", "offline")
    run(happened, tmp_path)
    assert happened.index("supernode") > happened.index("offline")
    assert happened.count("online") == 2


def test_a_demo_waits_for_killed_nodes_no_longer_than_superlink_counts_them(
    monkeypatch: pytest.MonkeyPatch, happened: list[str], tmp_path: Path
) -> None:
    (tmp_path / "node").mkdir()
    (tmp_path / "node" / "log").touch()
    nodes_say(monkeypatch, happened, "online")
    run(happened, tmp_path)
    assert 60 < happened.count("online") <= federation.KILLED_NODES_S + 1
    assert "supernode" in happened


def test_a_first_demo_waits_for_no_node(monkeypatch: pytest.MonkeyPatch, happened: list[str], tmp_path: Path) -> None:
    nodes_say(monkeypatch, happened, "registered")
    run(happened, tmp_path)
    assert "registered" not in happened
    assert "supernode" in happened


def test_a_run_that_a_killed_demo_left_is_stopped_before_superexec_could_begin_it(
    monkeypatch: pytest.MonkeyPatch, happened: list[str], tmp_path: Path
) -> None:
    """Otherwise the new demo's run would be refused, because a run is already active."""
    nodes_say(monkeypatch, happened, "registered")
    run(happened, tmp_path)
    assert happened.index("runs stopped") < happened.index("superexec")


def test_the_run_of_an_earlier_demo_is_stopped_if_it_has_reported_no_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    workspace = made_study(tmp_path / "study")
    workspace.save_endpoint(Endpoint("localhost", 8443, 8000))
    workspace.save_run_id(7)
    stopped: list[int] = []
    monkeypatch.setattr(supervisor, "stop_run", lambda _server, run_id: stopped.append(run_id))
    supervisor.stop_open_runs(workspace)
    assert stopped == [7]
