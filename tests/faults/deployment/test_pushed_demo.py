"""Tests a demo in which two of four hospitals are dishonest, over real daemons, to its end.

One hospital spoils the first sum. The other pushes against its own vote. The run stops with a question, and the dispute
over the spoiled draw names both. The spoiler is revoked, and the pusher is kept. From then on, the pusher pushes no
further than the noise hides, and every sum is accepted. The student is worse than public data, two hospitals say so in
signed verdicts, and the gate stays shut. A dispute over an accepted draw names the pusher. docs/dishonest-hospital.md
shows what each party sees.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from client.ledger.site_ledger import SiteLedger
from common.config import GateConfig
from common.student_statement import StudentStatement
from consilium.demo import federation as daemons
from consilium.demo import run as demo
from consilium.demo.options import DemoOptions
from server.dashboard.app import Options
from server.dashboard.auth import Role, users_file
from server.public.public_files import STUDENTS, said_file
from tests.e2e.daemons import running
from tests.e2e.dishonest import SPOILS, pushes_then, serving
from tests.e2e.road import Road
from tests.server.dashboard.conftest import PASSWORD, looked_at

pytestmark = [pytest.mark.faults, pytest.mark.slow]

HONEST, SPOILER, PUSHER = ("hospital-01", "hospital-04"), "hospital-02", "hospital-03"
FIRST, LATER = 8, 4.5
"""In m·R: what the pusher adds to the spoiled draw, and what it adds once three hospitals are left."""
OPTIONS = DemoOptions(hospitals=4, spare_draws=4, seed=0)
PATIENCE_S = 1_500.0


@pytest.fixture(scope="module")
def road(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Road]:
    """Start a demo's daemons, with its data, study and teachers, and a gate that needs two verdicts."""
    out = tmp_path_factory.mktemp("pushed") / "out"
    silent = demo.DemoProgress(*([lambda *_: None] * 5))
    with pytest.MonkeyPatch.context() as patched:
        terms = demo.terms
        patched.setattr(demo, "terms", lambda *given: replace(terms(*given), gate=GateConfig(2)))
        patched.setattr(daemons, "worker", serving({SPOILER: SPOILS, PUSHER: pushes_then(FIRST, LATER, sites=4)}))
        seconds = demo.Stopwatch(out / "seconds.json", silent)
        study = demo.create_demo_study(out, OPTIONS, watch=silent, stopwatch=seconds)
        sites = study.publish()
        study.train(sites)
        with running(study.places.workspace, sites) as federation:
            yield Road(root=out, workspace=study.places.workspace, sites=sites, federation=federation)


def typed(road: Road, *words: str, code: int = 0) -> str:
    """Run a command, check its exit code, and return its output. `pytest -s` shows all of it."""
    done = road.consilium(*words, timeout_s=PATIENCE_S)
    print(f"$ consilium {' '.join(words)}\n{done.stdout}{done.stderr}(exit code {done.returncode})\n")
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


def judged(road: Road, draw: str, *, disclosing: tuple[str, ...], folder: Path) -> dict[str, str]:
    """Return the auditor's judgement of every hospital of a draw, if only the hospitals in ``disclosing`` disclose."""
    folder.mkdir()
    auditor, evidence, study = folder / "auditor", str(folder / "evidence.json"), str(road.workspace.root)
    typed(road, "dispute", "keys", str(auditor))
    typed(road, "dispute", "evidence", study, draw, "--out", evidence)
    files = [str(folder / f"{name}.disclosure") for name in disclosing]
    for name, file in zip(disclosing, files, strict=True):
        to = ("--to", str(auditor / "auditor.json"), "--yes", "--site-dir", str(road.sites[name]), "--out", file)
        typed(road, "site", "disclose", draw, *to)
    with_keys = ("--keys", str(auditor), "--peers", str(road.peers_file), "--out", str(folder / "judged.json"))
    typed(road, "dispute", "judge", evidence, *files, *with_keys, code=11)
    said = json.loads((folder / "judged.json").read_text())
    typed(road, "dispute", "show", str(folder / "judged.json"), "--auditor", str(auditor / "auditor.json"), code=11)
    return {finding["site"]: finding["part"] for finding in said["findings"]}


def dashboard(road: Road, state: Path) -> str:
    """Return the dashboard's page about the student, as an operator who is signed in sees it."""
    state.mkdir()
    users_file(state).add("ada", Role.OPERATOR, PASSWORD)
    with looked_at(Options(study=road.workspace.root, state=state)) as client:
        return client.get("/student").text


def test_the_spoiler_stops_the_run_and_the_pushers_student_never_passes_the_gate(road: Road) -> None:
    study = str(road.workspace.root)

    # 1. The first draw is spoiled: what the operator sees.
    said = typed(road, "study", "run", study, code=6)
    assert "no honest site" in said
    assert "0 of 2 answers" in said
    status = json.loads(typed(road, "study", "status", study, "--json"))
    assert {name: site["spoiled"] for name, site in status["sites"].items()} == dict.fromkeys(road.sites, 1)

    # 2. The dispute over it names both, though the spoiler discloses nothing.
    (listed,) = typed(road, "dispute", "evidence", study).splitlines()[:1]
    found = judged(road, listed.split()[0], disclosing=(*HONEST, PUSHER), folder=road.root / "first")
    assert found == dict.fromkeys(HONEST, "within") | {SPOILER: "outside", PUSHER: "outside"}

    # 3. The spoiler is revoked, the pusher kept: every sum is accepted.
    typed(road, "provision", "revoke", study, SPOILER)
    typed(road, "study", "resume", study, "--despite-spoiled")
    assert len(road.answers()) == 2
    with road.ledger() as ledger:
        rosters = {tuple(entry.site for entry in one.roster) for one in ledger.answers(road.workspace.study().id)}
    assert rosters == {(HONEST[0], PUSHER, HONEST[1])}
    report = json.loads((road.workspace.root / "report.json").read_text())
    student = report["student"]["dice"]["mean"]
    control = max(one["dice"]["mean"] for one in report["controls"].values())
    print(f"student {student:.3f}, best control {control:.3f}, answers-weighed {road.events('answers-weighed')[-1]}")
    assert student < control - 0.05

    # 4. Two hospitals look, and say so; the gate stays shut.
    typed(road, "student", "publish", study, "--out", str(road.root / "published"), code=6)
    verdicts = []
    for name in HONEST:
        site = ("--site-dir", str(road.sites[name]))
        assert "--to-evaluate" in typed(road, "site", "student", "pull", *site, code=6)
        typed(road, "site", "student", "pull", "--to-evaluate", *site)
        verdicts.append(str(road.root / f"{name}.verdict"))
        typed(road, "site", "evaluate", "--strict", "--verdict", verdicts[-1], *site, code=10)
        assert json.loads(Path(verdicts[-1]).read_text())["word"] == "worse"
    words = "2 verdicts of hospitals (2 worse), 2 must find it better: NOT RELEASED, for evaluation only"
    assert words in typed(road, "student", "verdict", study, *verdicts)
    statement = StudentStatement.parse(
        said_file(road.workspace.objects_dir, STUDENTS, road.workspace.study().id).read_bytes()
    )
    assert [(one.site, one.word) for one in statement.verdicts or ()] == [(name, "worse") for name in HONEST]
    assert words in typed(road, "student", "publish", study, "--out", str(road.root / "published"), code=6)
    assert not (road.root / "published").exists()
    for name in (HONEST[0], PUSHER):
        assert words in typed(road, "site", "student", "pull", "--site-dir", str(road.sites[name]), code=6)
    assert words in dashboard(road, road.root / "state")

    # 5. The dispute over an accepted draw names who did it, though it discloses nothing.
    answered = [line for line in typed(road, "dispute", "evidence", study).splitlines() if "spoiled" not in line]
    found = judged(road, answered[0].split()[0], disclosing=HONEST, folder=road.root / "second")
    assert found == dict.fromkeys(HONEST, "within") | {PUSHER: "outside"}
    with SiteLedger.read(road.sites[HONEST[0]] / "site-ledger.sqlite") as ledger:
        assert len(ledger.books.sealed.disclosed) == 2
