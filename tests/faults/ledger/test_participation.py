"""Tests that the server learns nothing from a failing teacher: healthy and failing sites reply alike."""

from __future__ import annotations

from pathlib import Path

import pytest

from common.messages import NO_HEAD, CodesReply, OfferReply, ReceiptsReply, Several, decode, encode
from tests.federation import Federation

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("failure", ["nan", "huge", MemoryError("no memory for Jane Doe")])
def test_a_failing_teacher_gives_the_roster_receipt_and_reply_of_a_healthy_one(tmp_path: Path, failure) -> None:
    (tmp_path / "healthy").mkdir()
    (tmp_path / "failing").mkdir()
    healthy, failing = Federation(tmp_path / "healthy"), Federation(tmp_path / "failing")
    failing.voters["site-1"].failure = failure
    told = []
    for fed in (healthy, failing):
        fed.set_collection(batch_size=3)
        fed.core().run(fed.transport)
        receipts = fed.site_ledgers["site-1"].receipts()
        told.append(
            {
                "rosters": [answer.roster for answer in fed.ledger.answers(fed.study.id)],
                "receipts": [
                    (
                        r.study_id,
                        r.query_ids,
                        r.releases[0].release.roster,
                        r.mechanisms,
                        r.before,
                        r.after,
                        r.head.seq,
                        len(r.links),
                    )
                    for r in receipts
                ],
                "receipt bytes": [len(receipt.render()) for receipt in receipts],
                "replies": [shape(reply) for node, reply in fed.transport.replies if node == 101],
                "rows at the site": [row.kind for row in fed.site_ledgers["site-1"].rows()],
                "spent": fed.ledger.spent("pool-1"),
            }
        )
        fed.close()
    assert told[0] == told[1]
    assert told[0]["receipts"]


def shape(reply: bytes) -> tuple[object, ...]:
    """Return everything about a reply except for the encrypted code itself."""
    message = decode(reply)
    match message:
        case Several():
            return tuple(shape(encode(part)) for part in message.parts)
        case CodesReply():
            return "codes", len(reply), message.batch, [(query, len(sealed)) for query, sealed in message.codes]
        case OfferReply():
            return "offer", message.batch, message.reason, message.ledger_row, message.ledger_head == NO_HEAD
        case ReceiptsReply():
            return "receipts", message.ledger_row, message.ledger_head == NO_HEAD
    raise AssertionError(message)
