"""The whole federation of a demo as one block, for tests whose hospitals have trained before."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from consilium.demo.federation import Federation, enrolled, joined, serving
from server.study.workspace import Workspace


@contextmanager
def running(workspace: Workspace, sites: dict[str, Path], *, pool_epsilon: float | None = None) -> Iterator[Federation]:
    """Start all daemons, register the sites' keys, show that an unregistered node is refused; finally stop all."""
    with serving(workspace) as group:
        refusal = enrolled(group, workspace, sites, pool_epsilon=pool_epsilon, on_step=lambda _text: None)
        with joined(group, workspace, sites, refusal=refusal, on_step=lambda _text: None) as federation:
            yield federation
