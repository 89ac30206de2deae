import json
from dataclasses import replace

import pytest

from client.app import OFFER_TIMEOUT_S, _timeout_s
from common.canonical import canonical_bytes
from common.envelope import SIGNATURE_BYTES
from common.errors import InvalidInput
from common.messages import (
    MAX_ATTEMPT,
    MAX_DEADLINE_S,
    MESSAGE_SCHEMA,
    NO_HEAD,
    CodesReply,
    CodesRequest,
    Offer,
    OfferReply,
    Receipts,
    ReceiptsReply,
    Several,
    decode,
    encode,
)
from tests.common.ledger.ledger_world import make_mechanism, make_query

A, B = "a" * 64, "b" * 64
ASKED = CodesRequest(study=A, ledger="ledger", batch=B, attempt=2, deadline_s=30, queries=(A, B))
PARTS = (
    Receipts(ledger="ledger", receipts=("one", "two")),
    ASKED,
    Offer(study=A, ledger="ledger", batch=B, queries=(make_query(1, make_mechanism()),)),
    ReceiptsReply(ledger_row=7, ledger_head=A),
    CodesReply(batch=B, attempt=2, codes=((A, b"sealed"), (B, b""))),
    OfferReply(batch=B, reason="accepted", ledger_row=0, ledger_head=NO_HEAD),
)


@pytest.mark.parametrize("message", [*PARTS, Several(PARTS), Several(())], ids=lambda message: type(message).__name__)
def test_a_message_is_read_back_as_it_was_written(message):
    assert decode(encode(message)) == message


def test_messages_of_the_first_schema_are_refused_rather_than_half_understood():
    document = json.loads(encode(PARTS[5]))
    del document["ledger_head"]
    with pytest.raises(InvalidInput, match="schema"):
        decode(canonical_bytes({**document, "schema": 1}))


@pytest.mark.parametrize(
    ("row", "head"), [(0, A), (3, NO_HEAD), (-1, A), (3, "zz")], ids=["no row", "no hash", "below 0", "not a hash"]
)
def test_a_head_is_a_row_with_its_hash_or_nothing_at_all(row, head):
    for message in (
        replace(PARTS[3], ledger_row=row, ledger_head=head),
        replace(PARTS[5], ledger_row=row, ledger_head=head),
    ):
        with pytest.raises(InvalidInput):
            decode(encode(message))


@pytest.mark.parametrize(
    "change",
    [
        {"parts": [{"kind": "several", "parts": []}]},
        {"parts": ["offer"]},
        {"parts": [{"kind": "receipts-reply", "ledger_row": 1, "ledger_head": A, "note": "x"}]},
        {"parts": [], "note": "x"},
        {"parts": {}},
    ],
)
def test_several_messages_hold_whole_known_messages_and_nothing_else(change):
    with pytest.raises(InvalidInput):
        decode(canonical_bytes({"kind": "several", "schema": MESSAGE_SCHEMA, **change}))


@pytest.mark.parametrize(
    "change",
    [
        {"attempt": 0},
        {"attempt": -1},
        {"attempt": MAX_ATTEMPT + 1},
        {"attempt": 10**400},
        {"deadline_s": 0},
        {"deadline_s": MAX_DEADLINE_S + 1},
        {"queries": (A, A)},
        {"ledger": ""},
        {"ledger": "a/../b"},
        {"ledger": "a" * 129},
    ],
    ids=str,
)
def test_a_codes_request_out_of_all_measure_is_refused(change):
    with pytest.raises(InvalidInput):
        decode(encode(replace(ASKED, **change)))


def test_a_codes_request_gets_its_own_deadline_however_it_travels():
    signed = [bytes(SIGNATURE_BYTES) + encode(message) for message in (ASKED, Several(PARTS[:3]))]
    assert [_timeout_s(message) for message in signed] == [30 + 10, 30 + 10]
    assert _timeout_s(bytes(SIGNATURE_BYTES) + encode(Several((PARTS[0], PARTS[2])))) == OFFER_TIMEOUT_S
