import json
from dataclasses import replace
from pathlib import Path

import pytest

from client.app import OFFER_TIMEOUT_S, _timeout_s
from common.canonical import canonical_bytes
from common.envelope import SIGNATURE_BYTES
from common.errors import InvalidInput
from common.masking import MAX_DRAW, MAX_MEMBERS, MaskKey, Member
from common.messages import (
    MAX_ATTEMPT,
    MAX_COUNTER,
    MAX_DEADLINE_S,
    MAX_QUERIES,
    MAX_RECEIPTS,
    MAX_RECEIPTS_BYTES,
    MAX_VOLUMES,
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
from common.peers import Peer
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


OTHER = MaskKey("2" * 64, bytes(64))
MASK = MaskKey("1" * 64, bytes(64))
SEALED = (
    replace(ASKED, draw=1, members=(Member("north", MASK), Member("south", OTHER))),
    replace(PARTS[2], draw=1, peers=(Peer("north", A), Peer("south", B))),
    replace(PARTS[5], mask=MASK, unconfirmed=("south",), last_draw=3),
)


@pytest.mark.parametrize(
    "message", [*PARTS, *SEALED, Several(PARTS), Several(())], ids=lambda message: type(message).__name__
)
def test_a_message_is_read_back_as_it_was_written(message):
    assert decode(encode(message)) == message


LONG_CODES = CodesReply(batch=B, attempt=2, codes=((A, bytes(range(256)) * 300), (B, b"\n" * 9), ("c" * 64, b"")))
LONG_RECEIPTS = Receipts(ledger="ledger", receipts=("{}" * 40_000, "[]"))
FRAMED = (LONG_CODES, LONG_RECEIPTS, Several((PARTS[5], LONG_CODES)), Several((LONG_RECEIPTS, ASKED)))


@pytest.mark.parametrize("message", FRAMED, ids=["codes", "receipts", "with codes", "with receipts"])
def test_long_codes_and_receipts_follow_the_line_as_they_are(message):
    data = encode(message)
    line, _, rest = data.partition(b"\n")
    assert json.loads(line)["schema"] == 4
    assert len(line) < 2_000
    assert decode(data) == message
    for wrong in (
        data[:-1],
        data + b"x",
        line,
        line + b"\n",
        data.replace(b'"schema":4', b'"schema":3', 1),
        line + line,
    ):
        with pytest.raises(InvalidInput):
            decode(wrong)
    for length in (b"-1", b"true", b'"76800"', b"76801", b"99999999999", b"1.0", b"[]"):
        for known in (b"76800", b"80000"):
            if known in line:
                with pytest.raises(InvalidInput):
                    decode(line.replace(known, length, 1) + b"\n" + rest)


def test_long_codes_of_an_earlier_version_which_stand_in_the_line_are_read():
    for part, kind in ((LONG_CODES, "codes-reply"), (LONG_RECEIPTS, "receipts")):
        assert decode(canonical_bytes({**part.to_json(), "kind": kind, "schema": 3})) == part


def test_a_message_without_anything_long_cannot_be_followed_by_bytes():
    document = json.loads(encode(PARTS[5]))
    for more in (b"", b"bytes"):
        with pytest.raises(InvalidInput):
            decode(canonical_bytes({**document, "schema": 4}) + b"\n" + more)


def test_a_message_has_the_bytes_it_always_had():
    golden = json.loads(Path(__file__).with_name("golden_messages.json").read_text())
    messages = (*PARTS, Several(PARTS))
    assert [encode(message).decode() for message in messages] == golden
    assert tuple(decode(text.encode()) for text in golden) == messages


def test_messages_of_the_first_schema_are_refused_rather_than_half_understood():
    document = json.loads(encode(PARTS[5]))
    del document["ledger_head"]
    with pytest.raises(InvalidInput, match="schema"):
        decode(canonical_bytes({**document, "schema": 1}))


@pytest.mark.parametrize(
    ("message", "change"),
    [
        *((SEALED[number], {"draw": draw}) for number in (0, 1) for draw in (0, -1, MAX_DRAW + 1, 10**400, None)),
        (SEALED[0], {"members": None}),
        (SEALED[0], {"members": (Member("north", MASK),)}),
        (SEALED[0], {"members": (Member("north", MaskKey("zz", bytes(64))),) * 2}),
        (SEALED[0], {"members": (Member("north", MaskKey("1" * 64, bytes(63))),) * 2}),
        (SEALED[0], {"members": (Member("no rth", MASK),) * 2}),
        (SEALED[0], {"members": (Member("north", MASK),) * (MAX_MEMBERS + 1)}),
        (SEALED[1], {"peers": None}),
        (SEALED[1], {"peers": (Peer("north", A),) * (MAX_MEMBERS + 1)}),
        (SEALED[2], {"last_draw": 0}),
        (SEALED[2], {"unconfirmed": ("no rth",)}),
        (SEALED[2], {"unconfirmed": ("north",) * (MAX_MEMBERS + 1)}),
    ],
)
def test_a_message_of_a_sealed_sum_out_of_all_measure_is_refused(message, change):
    with pytest.raises(InvalidInput):
        decode(encode(replace(message, **change)))


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


def _query(**changes):
    return {**make_query(1, make_mechanism()).to_json(), **changes}


@pytest.mark.parametrize(
    "change",
    [
        {"queries": [_query(round=number) for number in range(1, MAX_QUERIES + 2)]},
        {"queries": [_query(volumes=[f"{number:064x}" for number in range(MAX_VOLUMES + 1)])]},
        {"queries": [_query(round=MAX_COUNTER + 1)]},
        {"queries": [_query(edition=MAX_COUNTER + 1)]},
        {"queries": [_query(volumes=[[A]])]},
        {"queries": [_query(volumes=[{}])]},
        {"queries": [_query(volumes=["\x00" * 64])]},
        {"queries": ["one"]},
    ],
    ids=["queries", "volumes", "round", "edition", "list", "mapping", "control characters", "text"],
)
def test_an_offer_out_of_all_measure_is_refused(change):
    document = json.loads(encode(PARTS[2]))
    with pytest.raises(InvalidInput):
        decode(canonical_bytes({**document, **change}))


def test_the_largest_batch_that_a_study_may_plan_is_read_and_so_are_its_codes():
    queries = tuple(make_query(number, make_mechanism()) for number in range(1, MAX_QUERIES + 1))
    offer = replace(PARTS[2], queries=queries)
    request = replace(ASKED, queries=tuple(query.id for query in queries))
    reply = CodesReply(batch=B, attempt=1, codes=tuple((query.id, bytes(1000)) for query in queries))
    message = Several((Receipts("ledger", ("x" * 1000,) * MAX_RECEIPTS), request, offer, reply))
    assert decode(encode(message)) == message


@pytest.mark.parametrize("kind", range(len(PARTS)))
def test_a_message_in_several_stands_once(kind):
    with pytest.raises(InvalidInput, match="parts of a message"):
        decode(encode(Several((PARTS[kind], PARTS[kind]))))


@pytest.mark.parametrize(
    "message",
    [
        replace(PARTS[0], receipts=("x",) * (MAX_RECEIPTS + 1)),
        replace(PARTS[0], receipts=("x" * (MAX_RECEIPTS_BYTES + 1),)),
        replace(PARTS[4], attempt=0),
        replace(PARTS[4], attempt=MAX_ATTEMPT + 1),
        replace(PARTS[4], codes=tuple((f"{number:064x}", b"") for number in range(MAX_QUERIES + 1))),
        replace(ASKED, queries=tuple(f"{number:064x}" for number in range(MAX_QUERIES + 1))),
        replace(ASKED, queries=()),
    ],
    ids=["receipts", "bytes of receipts", "attempt 0", "attempt", "codes", "queries", "no query"],
)
def test_a_message_with_too_many_parts_is_refused(message):
    with pytest.raises(InvalidInput):
        decode(encode(message))


def test_an_error_about_a_message_is_short_whatever_was_wrong():
    for value in ("x" * 10**6, [[]] * 10**5, deep_list(900), {"x" * 10**6: 1}, 10**4_000, b"x" * 10**6):
        assert len(str(InvalidInput("message", value=value))) < 2_000


def deep_list(levels):
    value = []
    for _ in range(levels):
        value = [value]
    return value
