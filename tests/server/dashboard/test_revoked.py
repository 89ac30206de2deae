"""Tests that a revoked site is named as revoked and counts in no figure of remaining answers or of a quorum."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from common.config import SEALED_SUM, render_study
from common.node_auth import AdmittedNode, write_admitted
from consilium.cli.study import study_app
from server.dashboard.app import Options
from server.dashboard.read_model import Follower
from server.dashboard.views.overview import overview
from server.ledger.server_ledger import Ledger
from server.operations import provision
from server.operations.leaving import forget
from server.study import create_study as setup
from server.study.status import study_status
from server.study.workspace import Site, Workspace
from tests.commands import typed
from tests.dashboard_study import make_large_study
from tests.federation import make_study
from tests.server.dashboard.conftest import looked_at
from tests.studies import made_study
from tests.worlds import pool_of

PLANNED = 20


def revoke(workspace: Workspace, name: str) -> None:
    if not workspace.nodes_file.exists():
        workspace.gateway_dir.mkdir()
        write_admitted(
            workspace.nodes_file, tuple(AdmittedNode(one.name, f"key {one.name}", 7) for one in workspace.sites())
        )
    provision.revoke(workspace, name, unregister=lambda node: None)


@pytest.fixture
def workspace(tmp_path: Path) -> Workspace:
    """Return a study of four sites with a quorum of two; site-0 is revoked after 14 of 20 answers."""
    (tmp_path / "study").mkdir()
    made = make_large_study(tmp_path / "study", rows=PLANNED)
    revoke(made, "site-0")
    return made


def followed(workspace: Workspace) -> Follower:
    follower = Follower(workspace)
    follower.poll()
    return follower


def test_status_shows_a_revoked_site_as_revoked_and_counts_it_out(workspace: Workspace) -> None:
    done = typed(study_app, "status", workspace.root)
    states = {line.split()[0]: line.split()[1] for line in done.stdout.splitlines() if line.startswith("site-")}
    assert states == {"site-0": "revoked", "site-1": "open", "site-2": "open", "site-3": "open"}
    status = study_status(workspace)
    assert status.admitted == status.to_json()["sites_admitted"] == 3
    assert status.sites["site-0"].to_json()["state"] == "revoked"
    assert not status.facts.pools["pool-0"].can_answer
    assert status.facts.pools["pool-0"].answers_left == 0


def test_a_quorum_is_made_of_admitted_sites(workspace: Workspace) -> None:
    for name in ("site-1", "site-2"):
        revoke(workspace, name)
    status = study_status(workspace)
    assert status.admitted == 1
    assert any(re.search(r"^sites admitted: 1\b.* 2 ", line) for line in status.lines())
    follower = followed(workspace)
    shown = overview(follower, now=datetime.now(UTC))
    (risk,) = (alarm for alarm in shown.alarms if alarm.name == "quorum-at-risk")
    assert risk.level == "critical"
    assert re.search("1 of 1 .* 2 .*revoked: site-0, site-1, site-2", risk.title)
    assert "Bring" not in risk.remedy


def test_a_forgotten_site_counts_in_no_figure_of_remaining_answers(workspace: Workspace) -> None:
    for name in ("site-1", "site-2"):
        revoke(workspace, name)
    follower = followed(workspace)
    forget(workspace, "site-0")
    follower.poll()
    for facts in (follower.facts(), study_status(workspace).facts):  # too few sites are admitted for the quorum
        assert facts.pools["pool-0"].revoked
        assert (facts.pools["pool-0"].can_answer, facts.pools["pool-0"].answers_left) == (False, 0)
    assert study_status(workspace).sites["site-0"].state == "revoked"


def test_pages_show_a_revoked_site_and_no_quorum_with_it(workspace: Workspace, state: Path) -> None:
    shown = overview(followed(workspace), now=datetime.now(UTC))
    (site,) = (one for one in shown.sites if one.name == "site-0")
    assert (site.state, site.can_answer, site.budget.answers_left) == ("revoked", False, 0)
    assert "revoked" in site.budget.words
    with looked_at(Options(study=workspace.root, state=state)) as client:
        for path in ("/", "/sites"):
            text = client.get(path).text
            assert "quorum 2 of 3, 1 revoked" in text
            assert '<span class="chip revoked">revoked</span>' in text
        (row,) = (one for one in client.get("/api/sites").json() if one["standing"]["name"] == "site-0")
        assert (row["standing"]["state"], row["standing"]["budget"]["answers_left"]) == ("revoked", 0)


def test_the_dashboard_knows_a_revoked_site_where_it_may_not_read_the_admitted_nodes(workspace: Workspace) -> None:
    """In a container the dashboard sees the folder `gateway` as empty."""
    workspace.nodes_file.unlink()
    assert [site.name for site in followed(workspace).admitted] == ["site-1", "site-2", "site-3"]


def test_a_revocation_leaves_sites_json_as_earlier_versions_read_it(workspace: Workspace) -> None:
    entries = json.loads((workspace.root / "sites.json").read_text())
    assert all(set(entry) == {"name", "pool", "node_id", "answer_key"} for entry in entries)
    assert json.loads(workspace.revoked_file.read_text()) == ["site-0"]


@pytest.mark.parametrize("forgotten", [False, True])
def test_a_new_study_of_the_ledger_names_the_revoked_site(tmp_path: Path, *, forgotten: bool) -> None:
    first = made_study(tmp_path / "first")
    for number, name in enumerate(("north", "south"), start=1):
        setup.add_site(first, Site(name, pool=f"{name}-mri", node_id=number))
    revoke(first, "north")
    if forgotten:
        forget(first, "north")
    asked = ("--labels", "none,lesion", "--grid", "16,16,16", "--joint", "--queries", "2", "--quorum", "2")
    second = tmp_path / "second"
    done = typed(study_app, "init", second, "--name", "second", *asked, "--ledger", first.root)
    (north,) = (line for line in done.stdout.splitlines() if "pool north-mri" in line)
    assert "revoked" in north
    (south,) = (line for line in done.stdout.splitlines() if "pool south-mri" in line)
    assert "revoked" not in south


def test_answers_left_are_one_number_in_a_study_with_spare_draws(tmp_path: Path) -> None:
    """A pool also pays for the spare draw of a sealed study, but a spare draw is not an additional answer."""
    study = make_study(planned_queries=4)
    study = replace(study, privacy=replace(study.privacy, aggregation=SEALED_SUM, quorum=3, spare_draws=2))
    workspace = Workspace(tmp_path)
    workspace.study_file.write_text(render_study(study), encoding="utf-8")
    sites = tuple(Site(name=f"site-{number}", pool=f"pool-{number}", node_id=number) for number in range(3))
    workspace.save_sites(sites)
    with Ledger.create(workspace.ledger_file, signing_key=Ed25519PrivateKey.generate()) as ledger:
        ledger.register_study(study)
        for site in sites:
            ledger.declare_pool(pool_of(site, study))
    status = study_status(workspace)
    assert status.facts.answers_left == 4
    assert [status.facts.pools[site.pool].room for site in sites] == [6, 6, 6]
    shown = overview(followed(workspace), now=datetime.now(UTC))
    assert shown.budget.answers_left == 4
    assert [site.budget.answers_left for site in shown.sites] == [4, 4, 4]
    assert all("4 more answers fit" in site.budget.words for site in shown.sites)
