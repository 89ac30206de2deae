"""Tests ``consilium audit`` as a user runs it: its table, its JSON, its exit codes, and a real study's directory."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from pathlib import Path

import pytest

from common.codecs.pca import PcaCodec
from common.config import Study
from common.errors import InvalidInput
from common.ledger.charges import PoolDeclaration
from common.privacy.gaussian import rounded_gaussian
from common.privacy.mechanism import AccountantName, Budget
from common.protocols.frame import Frame
from consilium.audit.subject import from_workspace
from consilium.cli.audit import audit_app
from server.aggregation.aggregator import Aggregator
from server.protocols.rounds import keep_frame
from server.public.material import CodecRecord
from server.study import create_study as setup
from server.study.workspace import Site, Workspace
from tests.commands import ended
from tests.federation import make_codec, make_study
from tests.joint_federation import frame_of, joint_federation
from tests.studies import made_study

pytestmark = pytest.mark.slow

QUICK = ("--hospitals", "2", "--rounds", "2", "--dimension", "8", "--draws", "1")


def call(*arguments: str) -> tuple[int, str]:
    result = ended(audit_app, *arguments)
    return result.exit_code, result.stdout


def test_both_parts_are_reported_and_production_as_it_is_ends_with_zero() -> None:
    code, text = call(*QUICK, "--runs", "100", "--json")
    data = json.loads(text)
    assert code == 0
    assert {name: report["exceeded"] for name, report in data.items()} == {"service": False, "memory": False}
    service = data["service"]
    assert (service["hospitals"], service["queries"], service["dimension"], service["joint"]) == (2, 2, 8, True)
    assert service["claimed_mu"] == pytest.approx(2.0832736, rel=1e-7)  # μ of (8, 1e-3), as in published tables
    assert {"summary", "runs", "confidence"} <= service.keys()
    assert logging.getLogger("client").getEffectiveLevel() == logging.WARNING, "warnings are heard again after an audit"


def test_a_broken_claim_ends_with_exit_code_one_and_says_which_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    tenth = lambda size, std: rounded_gaussian(size, std / 10)  # noqa: E731
    monkeypatch.setitem(Aggregator.__init__.__kwdefaults__, "sampler", tenth)
    code, text = call(*QUICK, "--runs", "0")
    assert code == 1
    assert "ALARM" in text
    assert "BROKEN" in text
    assert "variance" in text


@pytest.mark.slow
def test_single_queries_take_the_place_of_rounds() -> None:
    small = ("--hospitals", "2", "--dimension", "8", "--draws", "1", "--runs", "0", "--json")
    _, text = call("--queries", "3", *small)
    report = json.loads(text)["service"]
    assert (report["queries"], report["joint"]) == (3, False)
    with pytest.raises(InvalidInput, match="--rounds with --queries"):
        call("--queries", "3", "--rounds", "3")


@pytest.mark.parametrize("value", ["-1", "1", "19"])
def test_too_few_runs_are_refused_before_any_work(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("consilium.audit.run.audit_service", lambda *_, **__: pytest.fail("worked"))
    with pytest.raises(InvalidInput, match="runs"):
        call("--runs", value)


# --- a study's directory


def directory(root: Path, study: Study, *, sites: int) -> Workspace:
    made = made_study(root / "study", study)
    codec = make_codec(study)
    made.save_codec(CodecRecord(sha256=made.objects.put(codec.to_bytes()), dimension=codec.dimension))
    made.save_volumes(tuple(made.objects.put(f"volume {i}".encode()) for i in range(8)))
    for number in range(sites):
        setup.add_site(made, Site(name=f"hospital-{number}", pool=f"pool-{number}", node_id=number + 1))
    return made


def tighten(workspace: Workspace, pool: str, site: str, epsilon: float) -> None:
    privacy = workspace.study().privacy
    with setup.open_ledger(workspace) as ledger:
        budget = Budget(epsilon=epsilon, delta=privacy.delta)
        ledger.declare_pool(PoolDeclaration(pool, site, budget, AccountantName.EXACT, privacy.protection))


@pytest.mark.slow
def test_a_studys_directory_is_audited_with_its_own_roster_codec_and_budgets(tmp_path: Path) -> None:
    workspace = directory(tmp_path, make_study(planned_queries=3), sites=3)
    tighten(workspace, "pool-1", "hospital-1", 5.0)
    rows = workspace.ledger_file.read_bytes()
    subject = from_workspace(workspace)
    assert [limit.epsilon for limit in subject.limits] == [8.0, 5.0, 8.0]
    assert isinstance(subject.codec, PcaCodec)
    assert subject.dimension == workspace.codec().dimension
    code, text = call("--study", str(workspace.root), "--draws", "1", "--runs", "0", "--json")
    report = json.loads(text)["service"]
    assert (code, report["summary"].split(":")[0].split(" against")[0]) == (0, "No fault found")
    assert (report["hospitals"], report["queries"]) == (3, 3)
    assert workspace.ledger_file.read_bytes() == rows, "an audit asks nothing of the study itself"


@pytest.mark.slow
def test_a_joint_studys_own_frame_is_audited(tmp_path: Path) -> None:
    fed = joint_federation(tmp_path / "fed", rounds=2)
    fed.close()
    study = replace(fed.study, privacy=replace(fed.study.privacy, voters_per_site=1))
    workspace = directory(tmp_path, study, sites=2)
    workspace.save_volumes(workspace.volumes()[:5])
    frame = frame_of(fed, codec=workspace.codec().sha256)
    keep_frame(workspace.public(), frame, after=())
    subject = from_workspace(workspace)
    assert isinstance(subject.frame, Frame)
    assert subject.frame.to_bytes() == frame.to_bytes()
    code, text = call("--study", str(workspace.root), "--draws", "1", "--runs", "0", "--json")
    assert (code, json.loads(text)["service"]["dimension"]) == (0, frame.dimension)


def test_a_directory_is_audited_as_it_is_or_not_at_all(tmp_path: Path) -> None:
    workspace = directory(tmp_path, make_study(), sites=2)
    with pytest.raises(InvalidInput, match="directory of a study"):
        call("--study", str(workspace.root), "--epsilon", "4")
    (workspace.root / "sites.json").unlink()
    with pytest.raises(InvalidInput, match=r"sites\.json"):
        call("--study", str(workspace.root))
