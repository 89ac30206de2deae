"""Tests an open study over real daemons in which one of four hospitals sends codes of 8 m·R against its own
vote.

Every code is tested: the site is named and counts as the zero code, and the study ends with the others' answers. What
such a site does to a sealed study is in ``test_dispute.py``.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from common.config import CollectionConfig
from consilium.demo import federation as daemons
from tests.commands import run_here
from tests.e2e.daemons import running
from tests.e2e.dishonest import OPEN, pushes, serving
from tests.e2e.road import PRIVACY, Road, build

pytestmark = pytest.mark.faults

NAMES = tuple(f"site-{k}" for k in range(4))
OPENLY, PUSHER = replace(PRIVACY, quorum=3, planned_queries=4), "site-2"


def test_in_an_open_study_every_such_code_is_refused_and_its_site_named_and_the_study_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    workspace, sites = build(tmp_path, NAMES, collection=CollectionConfig(batch_size=2), privacy=OPENLY)
    monkeypatch.setattr(daemons, "worker", serving({PUSHER: pushes(8)}, program=OPEN))
    with running(workspace, sites) as federation:
        road = Road(root=tmp_path, workspace=workspace, sites=sites, federation=federation)
        done = run_here("study", "run", str(workspace.root))
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(road.answers()) == 4
    refused = road.events("code-refused")
    assert {(event["site"], event["reason"]) for event in refused} == {(PUSHER, "code-norm")}
    assert sum(event["codes"] for event in refused) == 4  # each of them, in every batch
    status = json.loads(run_here("study", "status", str(workspace.root), "--json").stdout)
    assert {name: site.get("refused", 0) for name, site in status["sites"].items()} == dict.fromkeys(NAMES, 0) | {
        PUSHER: 4
    }
