"""Tests decisions of a hospital's staff: they hold at once for a running worker, are recorded, and name no patient."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from client.policy import AllowLists, ServerFacts, load_site
from client.records.patient_deal import load_or_deal, load_slots
from client.records.served import retired_voters
from common.errors import InvalidInput, LedgerCorrupt, QuorumNotReached, Refused
from common.ledger.keys import public_hex
from common.messages import CodesRequest, encode
from consilium.cli.site import site_app
from server.ledger.verify import verify
from tests.federation import Federation, make_study, part
from tests.worlds import HURRIED, receipts_of

pytestmark = pytest.mark.slow

RUN = CliRunner()


@pytest.fixture
def fed(tmp_path: Path):
    with Federation(tmp_path, study=make_study(collection=HURRIED)) as federation:
        federation.write_site_files()
        yield federation


def site(*arguments: object):
    return RUN.invoke(site_app, [str(argument) for argument in arguments])


# --- the veto


def test_a_pause_given_by_another_process_stops_a_running_worker_and_a_resume_lets_it_go_on(fed) -> None:
    fed.core().run(fed.transport, should_stop=iter([False, True]).__next__)
    program = "from consilium.cli.site import site_app; site_app()"
    veto = [sys.executable, "-c", program, "pause", "test", "--site-dir", str(fed.root / "site-1")]
    subprocess.run(veto, check=True, capture_output=True, cwd=Path(__file__).resolve().parents[2])
    fed.core().run(fed.transport)
    answers = fed.ledger.answers(fed.study.id)
    assert [len(answer.roster) for answer in answers] == [3, 3, 2, 2, 2, 2]
    assert {e["reason"] for e in fed.events("offer-answered") if e["site"] == "site-1"} == {"accepted", "paused"}
    assert site("resume", "test", "--site-dir", fed.root / "site-1").exit_code == 0
    assert fed.site_ledgers["site-1"].stopped(fed.study.id) is None


def test_a_veto_between_acceptance_and_answer_keeps_the_codes_in_with_the_roster_unchanged(fed) -> None:
    def veto(node, body, reply):
        if node == 100 and part(body, CodesRequest):
            fed.site_ledgers["site-1"].decide(fed.study.id, "pause")
        return reply

    fed.transport.intercept = veto
    fed.core().run(fed.transport, should_stop=iter([False, True]).__next__)
    assert all(len(answer.roster) == 3 for answer in fed.ledger.answers(fed.study.id))
    assert fed.voters["site-1"].calls == 0
    assert fed.site_ledgers["site-1"].spent().releases == 2, "accepted is charged"
    missing = [event["reason"] for event in fed.events("reply-missing") if event["site"] == "site-1"]
    assert {*missing} == {"refused", "patience"}, "its reply came and could be read"


def test_withdrawing_is_for_good_and_a_study_is_found_by_name_or_id(fed) -> None:
    directory = fed.root / "site-0"
    assert site("pause", fed.study.id[:8], "--site-dir", directory).exit_code == 0
    asked = site("withdraw", fed.study.id, "--site-dir", directory)
    assert "--yes" in asked.exception.remedy, "nobody at a terminal said yes"
    assert site("resume", "--site-dir", directory).exit_code == 0, "the one study needs no name"
    assert site("withdraw", fed.study.id, "--site-dir", directory, "--yes").exit_code == 0
    result = site("resume", "test", "--site-dir", directory)
    assert isinstance(result.exception, InvalidInput)
    assert "for good" in str(result.exception)
    with pytest.raises(InvalidInput, match=r"test \("):
        fed.site_ledgers["site-0"].study_named("other")
    assert verify(directory / "site-ledger.sqlite").kinds["decision"] == 3


def test_a_decision_about_a_site_that_never_ran_says_what_to_do(fed, tmp_path) -> None:
    (tmp_path / "new").mkdir()
    (tmp_path / "new" / "site.toml").write_text(fed.site_toml("new", "new"))
    assert "consilium site consent" in str(site("pause", "test", "--site-dir", tmp_path / "new").exception)


# --- allow-lists and keys


@pytest.mark.parametrize("name", ["studies", "codecs", "volumes"])
def test_an_allow_list_declines_what_it_does_not_name_and_puts_it_on_record_once(fed, name) -> None:
    for node in (101, 102):
        worker = fed.workers[node]
        worker._config = replace(worker._config, allow=AllowLists(**{name: ("a" * 64,)}))
    for _ in range(2):
        with pytest.raises(QuorumNotReached):
            fed.core().run(fed.transport)
    ledger = fed.site_ledgers["site-1"]
    assert [row.kind for row in ledger.rows()].count("refusal") == 1
    assert ledger.spent().releases == 0
    assert verify(fed.root / "site-1" / "site-ledger.sqlite").ok


def test_empty_lists_allow_what_the_consented_study_implies_and_full_ones_what_they_name(fed) -> None:
    worker = fed.workers[101]
    lists = AllowLists(studies=(fed.study.id,), codecs=(fed.codec_hash,), volumes=fed.volumes)
    worker._config = replace(worker._config, allow=lists)
    fed.core().run(fed.transport)
    assert all(len(answer.roster) == 3 for answer in fed.ledger.answers(fed.study.id))


def test_site_toml_reads_allow_lists_and_more_keys_and_refuses_what_is_no_hash(fed, tmp_path) -> None:
    text = fed.site_toml("north", "north", more=f'[allow]\ncodecs = ["{"c" * 64}"]\n')
    text = text.replace("[caps]", f'more_signing_keys = ["{"3" * 64}"]\n[caps]')
    (tmp_path / "site.toml").write_text(text)
    config = load_site(tmp_path)
    assert config.allow == AllowLists(codecs=("c" * 64,))
    assert len(config.server.signing_public_keys) == 2
    for old, new in (("c" * 64, "c" * 63), ("3" * 64, "x" * 64), ("codecs", "code")):
        (tmp_path / "site.toml").write_text(text.replace(old, new))
        with pytest.raises(InvalidInput):
            load_site(tmp_path)


# --- a patient


@pytest.fixture
def hospital(fed) -> Path:
    """Set up site 0 with six patients in two voters, both trained."""
    directory = fed.root / "site-0"
    load_or_deal(directory / "teachers" / "slots.json", [f"p{i}" for i in range(6)], voters=2, seed=3)
    for voter in range(2):
        folder = directory / "teachers" / f"voter-{voter:03d}"
        folder.mkdir()
        record = {"identity": f"{voter}" * 64, "report": {"weights": "a" * 64}}
        (folder / "train.json").write_text(json.dumps(record))
        (folder / "checkpoint.pt").write_bytes(b"half a training")
    return directory


def test_a_withdrawn_patient_leaves_an_empty_slot_a_silent_voter_and_no_name(fed, hospital) -> None:
    before = load_slots(hospital / "teachers" / "slots.json")
    place = before.place("p2")
    result = site("withdraw-patient", "p2", "--site-dir", hospital, "--yes")
    assert result.exit_code == 0, result.output
    assert f"slot {place.slot} of voter {place.voter}" in result.stdout
    assert "recalled" in result.stdout
    after = load_slots(hospital / "teachers" / "slots.json")
    other = 1 - place.voter
    assert "p2" not in after.order
    assert after.part(other) == before.part(other), "only that voter is trained again"
    assert len(after.order) == 6
    assert retired_voters(hospital / "teachers") == {place.voter}
    assert not (hospital / "teachers" / f"voter-{place.voter:03d}" / "checkpoint.pt").exists()
    assert fed.site_ledgers["site-0"].withdrawn_voters() == {place.voter}
    for path in [hospital / "teachers" / "slots.json", *hospital.glob("site-ledger.sqlite*")]:
        assert b"p2" not in path.read_bytes(), path.name
        assert after.key.encode() not in path.read_bytes() or path.name == "slots.json"
    assert verify(hospital / "site-ledger.sqlite").kinds["patient"] == 1


def test_a_patient_is_withdrawn_by_the_name_of_a_case_and_in_any_spelling(fed, hospital, tmp_path) -> None:
    path, data = hospital / "teachers" / "slots.json", load_site(hospital).path(load_site(hospital).data)
    load_or_deal(path, [f"p{i}" for i in range(6)] + ["M\u00fcller"], voters=2)
    data.mkdir(exist_ok=True)
    table = "image,label,patient_id\nscan0.nii,l0.nii,p2\nscan1.nii,l1.nii,p3\nP4.nii,l2.nii,p5\n"
    (data / "cases.csv").write_text(table)
    asked = site("withdraw-patient", "scan0", "--site-dir", hospital, "--yes")
    assert asked.exit_code == 0, asked.output
    assert "scan0 is of patient p2" in asked.stdout
    assert site("withdraw-patient", "Mu\u0308ller", "--site-dir", hospital, "--yes").exit_code == 0
    assert "P4 is of patient p5" in site("withdraw-patient", "P4", "--site-dir", hospital, "--yes").stdout
    assert {"p2", "p5", "M\u00fcller"}.isdisjoint(load_slots(path).order)
    assert {"p3", "p4"} <= set(load_slots(path).order)
    unknown = site("withdraw-patient", "scan9", "--site-dir", hospital, "--yes").exception
    assert "a patient who was assigned to a voter" in str(unknown)


def test_a_withdrawal_of_a_patient_says_what_it_will_do_and_asks_before_it_changes_anything(fed, hospital) -> None:
    before, rows = (hospital / "teachers" / "slots.json").read_text(), fed.site_ledgers["site-0"].row_count
    place = load_slots(hospital / "teachers" / "slots.json").place("p2")
    asked = site("withdraw-patient", "p2", "--site-dir", hospital)
    assert "--yes" in asked.exception.remedy, "nobody said yes"
    for words in (
        f"slot {place.slot} of voter {place.voter} becomes empty",
        "stored are deleted",
        "cannot be recalled",
        f"every study of the pool: {fed.study.name} (in {hospital})",
    ):
        assert words in asked.stdout
    assert (hospital / "teachers" / "slots.json").read_text() == before
    assert fed.site_ledgers["site-0"].row_count == rows


def test_a_withdrawn_patient_is_never_dealt_again_and_a_second_withdrawal_changes_nothing(fed, hospital) -> None:
    assert site("withdraw-patient", "p2", "--site-dir", hospital, "--yes").exit_code == 0
    text = (hospital / "teachers" / "slots.json").read_text()
    before = load_slots(hospital / "teachers" / "slots.json").order
    again = load_or_deal(hospital / "teachers" / "slots.json", [f"p{i}" for i in range(8)], voters=2)
    assert "p2" not in again.order
    replacement = next(name for name, old in zip(again.order, before, strict=False) if old.startswith("#withdrawn-"))
    assert again.order == tuple(replacement if name.startswith("#") else name for name in before) + again.order[6:]
    assert {replacement, *again.order[6:]} == {"p6", "p7"}
    (hospital / "teachers" / "slots.json").write_text(text)
    rows = fed.site_ledgers["site-0"].row_count
    assert "nothing changed" in site("withdraw-patient", "p2", "--site-dir", hospital, "--yes").stdout
    assert (hospital / "teachers" / "slots.json").read_text() == text
    assert fed.site_ledgers["site-0"].row_count == rows


def test_an_interrupted_withdrawal_is_finished_by_running_it_again(fed, hospital, monkeypatch) -> None:
    from client.operations import staff_decisions as control

    def killed(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(control, "write_json", killed)
        with pytest.raises(KeyboardInterrupt):
            control.withdraw_patient(hospital, "p2")
    done = control.withdraw_patient(hospital, "p2")
    assert not done.repeated
    assert retired_voters(hospital / "teachers") == {place.voter for place in done.places}
    assert [row.kind for row in fed.site_ledgers["site-0"].rows()].count("patient") == 1


def test_a_patient_who_never_had_a_slot_is_refused(hospital) -> None:
    assert isinstance(site("withdraw-patient", "p9", "--site-dir", hospital, "--yes").exception, InvalidInput)


def test_slots_of_the_first_schema_are_read_and_can_lose_a_patient(fed, hospital) -> None:
    path = hospital / "teachers" / "slots.json"
    path.write_text(json.dumps({"schema": 1, "seed": 3, "voters": 2, "order": ["p0", "p1"]}))
    assert site("withdraw-patient", "p1", "--site-dir", hospital, "--yes").exit_code == 0
    slots = load_slots(path)
    assert slots.order == ("p0", "#withdrawn-1")
    assert slots.place("p1").slot == 1


def test_a_loaded_teacher_falls_silent_when_its_patient_is_withdrawn(tmp_path) -> None:
    fed = Federation(tmp_path, study=make_study(voters_per_site=2))
    fed.voters["site-0"].voters = 2
    ledger, worker = fed.site_ledgers["site-0"], fed.workers[100]
    query = fed.planned()[0]
    before, _ = worker._answer(query)
    ledger.withdraw_patient(slot=3, voter=1, subject="a" * 64, weights="b" * 64)
    after, word = worker._answer(query)
    fed.close()
    assert before.any()
    assert np.array_equal(2 * after, before), "the other voter's vote alone"
    assert word == "zero-votes-1"


# --- heads


def test_two_sites_find_out_whether_they_were_shown_one_ledger(fed, tmp_path) -> None:
    fed.core().run(fed.transport)
    theirs = tmp_path / "theirs.jsonl"
    assert site("heads", "--site-dir", fed.root / "site-1", "--out", theirs).exit_code == 0
    result = site("heads", "--site-dir", fed.root / "site-0", "--compare", theirs)
    assert result.exit_code == 0, result.output
    assert "OK: no fork" in result.stdout
    facts = json.loads(site("heads", "--site-dir", fed.root / "site-0", "--json").stdout)
    assert facts["server"][0]["receipts"] == 3
    assert facts["server"][0]["ledger_id"] == fed.ledger.ledger_id


def test_a_receipt_signed_by_a_new_server_key_is_accepted_once_site_toml_lists_the_key(fed) -> None:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    fed.core().run(fed.transport, should_stop=iter([False, True]).__next__)
    new = Ed25519PrivateKey.generate()
    worker = fed.workers[100]
    facts = worker._config.server
    worker._config = replace(worker._config, server=replace(facts, more_signing_keys=(public_hex(new),)))
    fed.ledger.rotate_key(new)
    before = {name: len(ledger.receipts()) for name, ledger in fed.site_ledgers.items()}
    with pytest.raises(QuorumNotReached):  # a site reads no message of a key that it does not list
        fed.core().run(fed.transport)
    held = {name: len(ledger.receipts()) for name, ledger in fed.site_ledgers.items()}
    assert held == {**before, "site-0": held["site-0"]}, "a site that does not list the key refuses, without alarm"
    assert all(ledger.alarms() == () for ledger in fed.site_ledgers.values())
    fed.workers[101]._config = replace(fed.workers[101]._config, server=replace(facts, signing_key=public_hex(new)))
    fed.core().run(fed.transport)
    assert len(fed.site_ledgers["site-1"].receipts()) == 3, "receipts missed meanwhile are sent again"
    keys = [key.public_key() for key in (fed.signing_key, new)]
    assert verify(fed.root / "site-0" / "site-ledger.sqlite", server_key=keys).ok
    assert not verify(fed.root / "site-0" / "site-ledger.sqlite", server_key=keys[0]).ok


def test_server_facts_refuse_a_key_that_is_not_one() -> None:
    with pytest.raises(InvalidInput, match="more_signing_keys"):
        ServerFacts("1" * 64, "2" * 64, "https://x", "x", "ca.crt", more_signing_keys=("short",))


def test_a_receipt_nobody_signed_is_no_evidence_of_a_fork(fed, tmp_path) -> None:
    fed.core().run(fed.transport)
    theirs = tmp_path / "theirs.jsonl"
    theirs.write_text(receipts_of(fed.ledger, "site-1")[0].render().replace('"batch":"', '"batch":"0'))
    result = site("heads", "--site-dir", fed.root / "site-0", "--compare", theirs)
    assert isinstance(result.exception, LedgerCorrupt)


def test_codes_of_a_study_never_consented_to_do_not_leave(fed) -> None:
    request = CodesRequest(
        study="e" * 64, ledger="f" * 32, batch="b" * 64, attempt=1, deadline_s=1, queries=("a" * 64,)
    )
    with pytest.raises(Refused):
        fed.workers[100].handle(encode(request))
