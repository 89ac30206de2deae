"""Tests a sealed study over real daemons in which two of four hospitals are dishonest.

One hospital spoils the sum. The other pushes by 8 m·R against its own vote. Checked are the operator's messages, the
dispute, and the gate. The dispute names both hospitals although one of them discloses nothing. The gate holds back the
student, because the hospital that pushes was kept.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from client.ledger.site_ledger import SiteLedger
from common.config import CollectionConfig, GateConfig
from consilium.demo import federation as daemons
from tests.commands import run_here
from tests.e2e.daemons import running
from tests.e2e.dishonest import SPOILS, pushes, serving
from tests.e2e.road import PRIVACY, Road, build

pytestmark = pytest.mark.slow

NAMES = tuple(f"site-{k}" for k in range(4))
SPOILER, PUSHER = "site-1", "site-2"
HONEST = tuple(name for name in NAMES if name not in (SPOILER, PUSHER))
SEALED = replace(PRIVACY, quorum=3, planned_queries=4, aggregation="sealed-sum", spare_draws=4)

SAYS = {SPOILER: SPOILS, PUSHER: pushes(8)}
"""Functions that replace a site's code and noise. Nothing else of the daemons is changed."""


@pytest.fixture(scope="module")
def road(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Road]:
    root = tmp_path_factory.mktemp("dispute")
    workspace, sites = build(root, NAMES, collection=CollectionConfig(batch_size=4), privacy=SEALED, gate=GateConfig(2))
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(daemons, "worker", serving(SAYS))
        with running(workspace, sites) as federation:
            yield Road(root=root, workspace=workspace, sites=sites, federation=federation)


@pytest.fixture(scope="module")
def stopped(road: Road) -> str:
    """Return the message with which `study run` stops after its first draw was spoiled."""
    done = run_here("study", "run", str(road.workspace.root))
    assert done.returncode == 6, done.stdout + done.stderr
    return done.stderr


@pytest.fixture(scope="module")
def judged(road: Road, stopped: str) -> dict:  # type: ignore[type-arg]
    """Return the auditor's judgement of the spoiled draw. Three hospitals disclose it, and the spoiler does not."""
    study, auditor, evidence = str(road.workspace.root), road.root / "auditor", road.root / "evidence.json"
    made = run_here("dispute", "keys", str(auditor))
    assert made.returncode == 0, made.stderr
    (listed,) = run_here("dispute", "evidence", study).stdout.splitlines()
    draw = listed.split()[0]
    assert "spoiled" in listed
    done = run_here("dispute", "evidence", study, draw, "--out", str(evidence))
    assert done.returncode == 0, done.stderr
    files = [road.disclosed(name, draw, auditor) for name in NAMES if name != SPOILER]
    out = road.root / "judged.json"
    done = run_here(
        *("dispute", "judge", str(evidence), *files, "--keys", str(auditor), "--peers", str(road.peers_file)),
        *("--out", str(out), "--json"),
    )
    assert done.returncode == 11, done.stdout + done.stderr
    shown = run_here("dispute", "show", str(out), "--auditor", str(auditor / "auditor.json"))
    assert shown.returncode == 11
    assert f"against: {SPOILER}, {PUSHER}" in shown.stdout
    found: dict = json.loads(done.stdout)  # type: ignore[type-arg]
    return found


def test_the_first_spoiled_draw_stops_the_run_with_a_question_and_the_budgets_state(road: Road, stopped: str) -> None:
    assert "the study has 0 of 4 answers and 4 of 8 charges left" in stopped
    assert "--despite-spoiled" in stopped
    status = json.loads(run_here("study", "status", str(road.workspace.root), "--json").stdout)
    assert {name: (site["charged"], site["spoiled"]) for name, site in status["sites"].items()} == dict.fromkeys(
        NAMES, (4, 4)
    )
    again = run_here("study", "resume", str(road.workspace.root))
    assert again.returncode == 6
    with road.ledger() as ledger:
        assert ledger.spent(f"{NAMES[0]}/patients").releases == 4  # asking again costs nothing


def test_the_dispute_names_both_and_neither_of_the_honest(judged: dict) -> None:  # type: ignore[type-arg]
    found = {finding["site"]: (finding["disclosure"], finding["part"]) for finding in judged["findings"]}
    assert found == dict.fromkeys(HONEST, ("true", "within")) | {
        SPOILER: ("none", "outside"),
        PUSHER: ("true", "outside"),
    }
    assert judged["spoiled"]
    assert judged["doubts"] == []


def test_every_disclosure_is_in_its_own_sites_ledger(road: Road, judged: dict) -> None:  # type: ignore[type-arg]
    for name, directory in road.sites.items():
        with SiteLedger.read(directory / "site-ledger.sqlite") as ledger:
            records = [(record.masks, record.auditor, record.queries) for record in ledger.books.sealed.disclosed]
        assert records == ([] if name == SPOILER else [(judged["roster"], judged["auditor"], 4)])


def test_the_rest_goes_on_knowingly_and_the_gate_holds_the_student(road: Road, judged: dict) -> None:  # type: ignore[type-arg]
    study = str(road.workspace.root)
    assert run_here("provision", "revoke", study, SPOILER).returncode == 0
    heard = len(road.events("offer-answered"))
    done = run_here("study", "resume", study, "--despite-spoiled")
    assert done.returncode == 0, done.stdout + done.stderr  # the push alone is within what noise hides
    assert {event["site"] for event in road.events("offer-answered")[heard:]} == set(NAMES) - {SPOILER}
    assert len(road.answers()) == 4
    with road.ledger() as ledger:
        assert {ledger.spent(f"{name}/patients").releases for name in NAMES} == {4, 8}
    refused = run_here("student", "publish", study, "--out", str(road.root / "published"))
    assert refused.returncode == 6
    assert "NOT RELEASED" in refused.stderr
    verdicts, words = [], []
    for name in HONEST:
        site = ("--site-dir", str(road.sites[name]))
        pulled = run_here("site", "student", "pull", *site)
        assert pulled.returncode == 6
        assert "--to-evaluate" in pulled.stderr
        assert run_here("site", "student", "pull", "--to-evaluate", *site).returncode == 0
        verdicts.append(str(road.root / f"{name}.verdict"))
        done = run_here("site", "evaluate", "--verdict", verdicts[-1], *site)
        assert done.returncode == 0, done.stderr
        words.append(json.loads(Path(verdicts[-1]).read_text())["word"])
    taken = run_here("student", "verdict", study, *verdicts)
    assert taken.returncode == 0, taken.stderr
    assert "2 verdicts of hospitals" in taken.stdout
    released = words.count("better") == 2
    assert released != ("NOT RELEASED" in taken.stdout)
    pulled = run_here("site", "student", "pull", "--site-dir", str(road.sites[PUSHER]))
    assert pulled.returncode == (0 if released else 6)
    assert "2 verdicts of hospitals" in pulled.stdout + pulled.stderr
