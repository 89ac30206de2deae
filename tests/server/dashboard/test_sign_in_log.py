"""Tests that the security log names users who sign in or try to, but stores no typed name that is not a user's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from common.security_log.follow import send_all
from server.dashboard.app import Options, create_app
from server.dashboard.sign_in import MAX_LOG_BYTES, SIGN_INS, dashboard_sources
from tests.security_log_reference import Kept
from tests.server.dashboard.conftest import PASSWORD, Clock, Recorded, TestClient


def logged(state: Path) -> list[dict[str, Any]]:
    sink = Kept()
    send_all(dashboard_sources(state), party="dashboard", name="n", sink=sink)
    return sink.records


def test_sign_ins_and_refused_ones_are_logged_and_a_password_in_the_wrong_field_is_not(
    collected: Recorded, state: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out.jsonl"
    options = Options(study=collected.workspace.root, state=state, clock=Clock(), log_to=(f"file:{out}",))
    with TestClient(create_app(options), base_url="http://localhost", follow_redirects=False) as client:
        client.post("/login", data={"name": PASSWORD, "password": ""})
        client.post("/login", data={"name": "ada", "password": "wrong"})
        client.post("/login", data={"name": "ada", "password": PASSWORD})
        csrf = client.app.state.gate.lookup(client.cookies[client.app.state.gate.cookie]).csrf
        assert client.post("/logout", data={"csrf": csrf}).status_code == 303
        for _ in range(6):
            client.post("/login", data={"name": "eve", "password": "wrong"})
    records = logged(state)
    study = collected.workspace.study().name
    sent = [json.loads(line) for line in out.read_text().splitlines()]
    assert sent == [record | {"name": study} for record in records]
    told = [(record["event"], record.get("user", "")) for record in records]
    assert told[:4] == [("sign-in-failed", ""), ("sign-in-failed", "ada"), ("sign-in", "ada"), ("sign-out", "ada")]
    assert told[4:] == [("sign-in-failed", "")] * 5 + [("sign-in-delayed", "")]
    assert {record["address"] for record in records} == {"testclient"}
    assert PASSWORD not in json.dumps(records) + (state / SIGN_INS).read_text()


def test_a_decision_about_a_label_is_logged_with_who_made_it_and_without_its_note(state: Path) -> None:
    from server.postprocess.decisions import DecisionStore, Verdict

    store = DecisionStore(state / "decisions.jsonl")
    store.decide(user="ada", study="s", volume="a" * 64, label="b" * 64, verdict=Verdict.REJECT, note="like Mrs Meier")
    (record,) = logged(state)
    assert (record["event"], record["user"], record["verdict"]) == ("label-decided", "ada", "reject")
    assert "Meier" not in json.dumps(record)


def test_guessing_fills_no_disk(state: Path, collected: Recorded) -> None:
    from common.clock import utc_now
    from server.dashboard.sign_in import SignInLog

    log, path = SignInLog(state, now=utc_now), state / SIGN_INS
    path.write_bytes(b"x" * MAX_LOG_BYTES + b"\n")
    log.write("sign-in-failed", address="192.0.2.7")
    assert path.stat().st_size < 1000
    assert sorted(one.name for one in state.glob("sign-ins*")) == [SIGN_INS, f"{SIGN_INS}.1"]
