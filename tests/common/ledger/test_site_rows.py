"""Tests that rows of a site's ledger keep their bytes for ever, and that files without later fields still open."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from client.ledger.site_ledger import SiteLedger
from client.policy import Caps
from common.canonical import canonical_text, sha256_bytes
from common.document import Document
from common.errors import InvalidInput, LedgerCorrupt, Refused
from common.ledger.records import KINDS, CodeRecord, ReservationRecord, parse_record
from common.ledger.rows import Row
from common.ledger.server_state import ServerBooks
from common.ledger.site_state import SiteBooks
from common.ledger.teacher_records import TeachersRecord, TrainingRecord
from server.ledger.verify import verify
from tests.common.ledger.ledger_world import ledger_study, make_mechanism, make_query, write_raw

A, B, C = "a" * 64, "b" * 64, "c" * 64
GOLDEN = {
    "code": f'{{"code_sha256":"{A}","dimension":4,"outcome":"stored","query_id":"{B}","teachers":"{C}"}}',
    "trained": f'{{"served":"{A}","training":"{B}","voter":0}}',
    "teachers": f'{{"voters":[["{A}","{B}"],["{C}",""],["",""]]}}',
    "sealing-key": f'{{"replaces":"{A}","sealing_key":"{B}"}}',
}
CODE = np.array([1, -2, 3, -4], dtype=np.int64)
CAPS = Caps(epsilon=8.0, delta=1e-3)


@pytest.mark.parametrize("kind", GOLDEN)
def test_the_bytes_of_a_row_are_read_for_ever(kind: str) -> None:
    assert canonical_text(json.loads(GOLDEN[kind])) == GOLDEN[kind]
    parse_record("site", kind, GOLDEN[kind])
    with pytest.raises(InvalidInput):
        parse_record("server", kind, GOLDEN[kind])


def test_a_codes_teachers_are_named_by_this_hash() -> None:
    """H is the SHA-256 of the domain, a zero byte and the canonical bytes, as docs/ledger.md defines it."""
    record = parse_record("site", "teachers", GOLDEN["teachers"])
    assert isinstance(record, TeachersRecord)
    plain = f'[["{A}","{B}"],["{C}",""],["",""]]'
    assert record.digest == sha256_bytes(b"consilium/teachers/v1\0" + plain.encode())


def test_rows_without_the_later_fields_are_read_as_saying_nothing() -> None:
    old = GOLDEN["code"].replace(f',"teachers":"{C}"', "")
    record = parse_record("site", "code", old)
    assert isinstance(record, CodeRecord)
    assert (record.code_sha256, record.teachers) == (A, "")
    query = make_query(1, make_mechanism())
    body = {"pool": "north", "query": query.to_json(), "query_id": query.id, "study": A}
    reservation = parse_record("site", "reservation", canonical_text(body))
    assert isinstance(reservation, ReservationRecord)
    assert (reservation.ledger, reservation.sealing_key) == ("", "")
    for kind, text in (("code", old[:-1] + ',"more":""}'), ("reservation", canonical_text(body | {"more": ""}))):
        with pytest.raises(InvalidInput):
            parse_record("site", kind, text)


def write_old(path: Path) -> None:
    """Write a ledger as the previous version did: acceptances without a server, codes without teachers."""
    study, mechanism = ledger_study(), make_mechanism()
    with SiteLedger.open(path, "north", caps=CAPS) as ledger:
        ledger.consent(study)
        for number in (1, 2):
            query = make_query(number, mechanism)
            with ledger._writing():
                body = {"pool": "north", "query": query.to_json(), "query_id": query.id, "study": study.id}
                write_raw(ledger, "reservation", body)
        query = make_query(1, mechanism)
        facts = {"code_sha256": sha256_bytes(CODE.tobytes()), "dimension": 4, "outcome": "stored"}
        with ledger._writing():
            write_raw(ledger, "code", {**facts, "query_id": query.id}, payload=(query.id, CODE.tobytes()))
        with ledger._writing():  # a plain training beside private ones, as it was recorded then
            write_raw(ledger, "training", {"deal": A, "events": [], "strategy": "standard", "training": B, "voter": 0})


def test_a_file_of_the_version_before_opens_verifies_and_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "site-ledger.sqlite"
    write_old(path)
    assert verify(path).ok
    study, (first, second, third) = ledger_study(), (make_query(n, make_mechanism()) for n in (1, 2, 3))
    with SiteLedger.open(path, "north", caps=CAPS) as ledger:
        spent = ledger.spent()
        assert np.array_equal(ledger.code(first.id), CODE)  # type: ignore[arg-type]
        asked = {"study_id": study.id, "ledger": "e" * 32, "sealing_key": A}
        assert ledger.accepted(second.id, **asked) == second
        with pytest.raises(Refused):
            ledger.accepted(second.id, **asked | {"study_id": C})
        ledger.reserve(study.id, [first, second], ledger="e" * 32, sealing_key=A)
        assert ledger.spent() == spent
        ledger.reserve(study.id, [third], ledger="e" * 32, sealing_key=A)
        ledger.record_trained(B, C)
        digest = ledger.state_teachers([C, ""])
        for query in (second, third):
            assert ledger.store_code(query.id, CODE, teachers=digest)
        assert ledger.books.teachers.newest == TeachersRecord(((C, B), ("", "")))
        assert not ledger.trainings().covers_every_release
        ledger.withdraw_patient(slot=0, voter=0, subject=A, weights=C)
        assert ledger.code(first.id) is None
        assert ledger.store_code(first.id, CODE * 0, teachers=digest)
    report = verify(path)
    assert report.ok, report.problems
    assert (report.kinds["code"], report.payloads) == (4, 1)


def test_a_code_computed_before_a_withdrawal_is_not_stored_after_it(tmp_path: Path) -> None:
    with SiteLedger.open(tmp_path / "site-ledger.sqlite", "north", caps=CAPS) as ledger:
        ledger.consent(ledger_study())
        query = make_query(1, make_mechanism())
        ledger.reserve(ledger_study().id, [query])
        began = ledger.row_count
        ledger.withdraw_patient(slot=0, voter=0, subject=A, weights=None)
        assert not ledger.store_code(query.id, CODE, computed_at=began)
        assert ledger.code(query.id) is None
        assert ledger.store_code(query.id, CODE, computed_at=ledger.row_count)


def test_a_withdrawal_of_an_earlier_version_that_names_no_deal_silences_the_voter_of_every_deal(tmp_path: Path) -> None:
    with SiteLedger.open(tmp_path / "site-ledger.sqlite", "north", caps=CAPS) as ledger:
        ledger.record_training(TrainingRecord(A, 0, B, "standard", ()))
        ledger.record_trained(A, C)
        assert ledger.books.teachers.may_vote(0, C, deal=B)
        ledger.withdraw_patient(slot=0, voter=0, subject=B, weights=None, deal=None)
        assert not ledger.books.teachers.may_vote(0, C, deal=B)


def test_a_withdrawn_patient_is_seated_in_no_slot_of_any_deal(tmp_path: Path) -> None:
    with SiteLedger.open(tmp_path / "site-ledger.sqlite", "north", caps=CAPS) as ledger:
        ledger.record_deal(A, {0: B}, voters=2)
        ledger.withdraw_patient(slot=0, voter=0, subject=B, weights=None, deal=A)
        for deal, slot in ((A, 1), (C, 0)):
            with pytest.raises(InvalidInput, match=f"slot .*: got {slot}"):
                ledger.record_deal(deal, {slot: B}, voters=2)


@pytest.mark.parametrize(("books", "role", "strange"), [(SiteBooks, "site", "pool"), (ServerBooks, "server", "code")])
def test_a_row_of_a_strange_kind_is_refused_with_the_kinds_that_the_ledger_has(
    books: type[SiteBooks] | type[ServerBooks], role: str, strange: str
) -> None:
    row = Row(seq=2, time_utc="2026-01-01T00:00:00Z", kind=strange, body="{}", prev_hash=A, hash=B)
    with pytest.raises(LedgerCorrupt) as caught:
        books().enter(row, NoRecord())
    assert f"kind of row: got '{strange}'; allowed: {', '.join(KINDS[role])}" in str(caught.value)


class NoRecord(Document):
    """A record that no ledger has."""
