"""Tests that a site's own status reaches the operator if site.toml shares it, and only under the site's own name."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from typer.testing import CliRunner

from client.policy import SharingPolicy
from client.worker import shared_status
from common.errors import InvalidInput
from common.messages import MAX_STATUS, NO_HEAD, ReceiptsReply, decode, encode
from common.supervision import FACTS, json_report, keeping
from consilium.cli.site import site_app
from server.aggregation.pipeline import keep_status
from server.dashboard.reports import read_reports
from tests.federation import Federation, part


@pytest.fixture
def fed(tmp_path: Path):
    (tmp_path / "fed").mkdir()
    with Federation(tmp_path / "fed") as federation:
        yield federation


def ran(fed: Federation, folder: Path) -> dict:
    """Run the study and return the reports that exist afterwards."""
    core = fed.core()
    core._receipts._keep_status = partial(keep_status, folder)
    core.run(fed.transport)
    return read_reports(folder)


def share(fed: Federation, node: int) -> None:
    worker = fed.workers[node]
    worker._config = replace(worker._config, share=SharingPolicy(status=True))


def test_a_site_that_shares_its_status_is_read_and_the_others_say_nothing(fed, tmp_path):
    share(fed, fed.sites[1].node_id)
    reports = ran(fed, tmp_path / "reports")
    assert set(reports) == {"site-1"}
    found = reports["site-1"]
    assert found.problem == ""
    assert found.queries_accepted == fed.study.privacy.planned_queries
    assert found.version
    assert found.spent_epsilon == pytest.approx(fed.site_ledgers["site-1"].facts("site-1").spent.epsilon)
    said = [part(reply, ReceiptsReply) for node, reply in fed.transport.replies if node != fed.sites[1].node_id]
    assert all(one.status is None for one in said if one is not None)


def test_a_status_for_another_site_is_filed_under_its_senders_name_and_set_aside(fed, tmp_path):
    node = fed.sites[0].node_id
    share(fed, node)

    def liar(at: int, body: bytes, reply: bytes) -> bytes:
        return reply.replace(b'site\\": \\"site-0', b'site\\": \\"site-2') if at == node else reply

    fed.transport.intercept = liar
    reports = ran(fed, tmp_path / "reports")
    assert set(reports) == {"site-0"}
    assert "set aside" in reports["site-0"].problem


def test_a_message_takes_no_status_beyond_its_bound():
    reply = ReceiptsReply(ledger_row=0, ledger_head=NO_HEAD, status="x" * MAX_STATUS)
    assert decode(encode(reply)) == reply
    with pytest.raises(InvalidInput, match=f"status.*: got {MAX_STATUS + 1}"):
        decode(encode(reply).replace(b"xx", b"xxx", 1))
    with pytest.raises(InvalidInput):  # a status that could not be written to a file
        decode(encode(reply).replace(b"x" * MAX_STATUS, b"\\ud800"))


def test_however_much_a_site_has_to_say_its_receipts_are_answered(fed, monkeypatch):
    ledger = fed.site_ledgers["site-0"]
    monkeypatch.setattr(type(ledger), "alarms", lambda self: ("\U0001f6a8" * 5000,) * 500)
    status = shared_status("site-0", ledger)
    reply = ReceiptsReply(ledger_row=0, ledger_head=NO_HEAD, status=status)
    assert decode(encode(reply)) == reply
    assert json.loads(status)["alarms"]


def test_a_shared_status_says_the_same_whoever_the_patients_are(fed, tmp_path):
    """The shared status has no field about trainings, and a withdrawal does not change it."""
    ledger = fed.site_ledgers["site-0"]
    before = shared_status("site-0", ledger)
    ledger.withdraw_patient(slot=0, voter=0, subject="a" * 64, weights=None)
    assert shared_status("site-0", ledger) == before
    assert set(json.loads(before)) == {
        *("site", "version", "pool", "spent", "cap", "queries_accepted", "receipted", "refusals", "alarms")
    }


def test_a_status_report_says_the_same_whether_a_patient_was_withdrawn(fed, tmp_path):
    """Sites hand over the output of `consilium site status --json`; the number of withdrawals must stay private."""
    fed.core().run(fed.transport)
    ledger = fed.site_ledgers["site-0"]
    before = ledger.facts("site-0", present=()).to_json()
    assert before["codes_stored"] > 0
    ledger.withdraw_patient(slot=0, voter=0, subject="a" * 64, weights=None)
    assert ledger.facts("site-0", present=()).to_json() == before


def test_a_printed_status_names_a_daemon_by_one_word_and_says_the_same_whoever_was_withdrawn(fed):
    fed.core().run(fed.transport)
    site, ledger = fed.root / "site-0", fed.site_ledgers["site-0"]
    fed.write_site_files()

    def printed() -> dict:
        done = CliRunner().invoke(site_app, ["status", "--json", "--site-dir", str(site)], catch_exceptions=False)
        assert "doe-017" not in done.stdout
        return {name: value for name, value in json.loads(done.stdout).items() if name not in ("time", "signature")}

    with keeping(site / "logs"):
        report = json_report(site / "logs" / FACTS)
        report("daemon-offline", daemon="supernode site-0", pid=1, why="no heartbeat since doe-017")
        report("daemon-ended", daemon="worker site-0", why="status 5", said="error: doe-017", log="/x", again_in_s=1.0)
        before = printed()
        ledger.withdraw_patient(slot=0, voter=0, subject="a" * 64, weights=None)
        assert printed() == before
    assert before["daemons"] == {"supernode site-0": "offline", "worker site-0": "ended"}
    assert set(before) - set(ledger.facts("site-0", present=()).to_json()) == {"daemons", "shared"}
