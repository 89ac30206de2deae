"""Runs the whole federation of a demo inside a block, for tests whose hospitals have trained before."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from consilium.demo.federation import Federation, enrolled, joined, serving
from server.operations.supervisor import flower_server
from server.study.workspace import Workspace


@contextmanager
def running(workspace: Workspace, sites: dict[str, Path], *, pool_epsilon: float | None = None) -> Iterator[Federation]:
    """Start all daemons and register the sites' keys; finally stop all, which leaves no traceback in a log."""
    with serving(workspace) as group:
        enrolled(group, workspace, sites, pool_epsilon=pool_epsilon, on_step=lambda _text: None)
        with joined(group, workspace, sites, on_step=lambda _text: None) as federation:
            yield federation
    logs = flower_server(workspace).logs
    assert not [name for name in ("gateway", "fleet") if "KeyboardInterrupt" in (logs / f"{name}.log").read_text()]
