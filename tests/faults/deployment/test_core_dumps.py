"""Searches core dumps of the server in a study over real daemons for every code of every hospital in every
spelling.

The same search of an open study, whose server opens codes, finds them. Needs gcore, of the package gdb.
"""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from common.config import CollectionConfig
from server.operations.supervisor import start_run
from tests.e2e.daemons import running
from tests.e2e.road import PRIVACY, Road, build, files_now, found_in, known_codes, memory_with_one_reply

pytestmark = [
    pytest.mark.faults,
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("gcore") is None, reason="needs gcore, of the package gdb"),
]

NAMES = tuple(f"site-{number}" for number in range(3))
OPEN = replace(PRIVACY, quorum=3)
SEALED = replace(OPEN, aggregation="sealed-sum", spare_draws=2)
PAGE = 4096


def core_of(pid: int, folder: Path) -> bytes:
    """Return the memory of a process as gcore writes it, without pages that contain only zeros."""
    subprocess.run(["gcore", "-o", str(folder / "core"), str(pid)], check=True, capture_output=True)
    file = folder / f"core.{pid}"
    content = file.read_bytes()
    file.unlink()
    pages = np.frombuffer(content, dtype=np.uint8, count=len(content) // PAGE * PAGE).reshape(-1, PAGE)
    return pages[pages.any(axis=1)].tobytes()


def files_of(road: Road) -> bytes:
    """Return the content of all files of the server: ledger, SuperLink's database and its WAL, logs, and messages."""
    return b"".join(content for _, content in files_now([road.workspace.root]))


@pytest.mark.parametrize("privacy", [OPEN, SEALED], ids=lambda privacy: privacy.aggregation)
def test_a_dump_of_the_server_holds_codes_of_an_open_study_and_none_of_a_sealed_one(privacy, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    found: dict[str, bytes] = {}
    workspace, sites = build(tmp_path, NAMES, collection=CollectionConfig(), privacy=privacy)
    with running(workspace, sites) as federation:
        road = Road(root=tmp_path, workspace=workspace, sites=sites, federation=federation)
        start_run(workspace)
        found["core with one reply"] = memory_with_one_reply(road, lambda pid: core_of(pid, tmp_path))
        road.wait("released", timeout_s=600)
        found["core after the release"] = core_of(road.events("run-started")[-1]["pid"], tmp_path)
        found["files after the release"] = files_of(road)
        road.wait("run-finished", timeout_s=900)
        found["files after the run"] = files_of(road)
        for daemon in federation.group.daemons:
            if daemon.spec.name not in NAMES:
                dumps = [core_of(pid, tmp_path) for pid in sorted(daemon.members())]
                found[f"{daemon.spec.label} after the run"] = b"".join(dumps)
        codes = {name: known_codes([directory], road.answers()) for name, directory in sites.items()}
    assert all(codes.values())
    # The server may know the sum.
    assert any(answer in found["core after the release"] for answer in road.answers().values())
    held = {what: [name for name in NAMES if found_in(content, codes[name])] for what, content in found.items()}
    print({what: (f"{len(content) >> 20} MiB", held[what]) for what, content in found.items()})
    if privacy.sealed:
        assert not any(held.values()), held
    else:
        assert held["core with one reply"] == [NAMES[0]]
