"""Tests a site's records of sealed sums: one masked code a draw, under one roster, with a key never disclosed."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

import pytest

from common.errors import InvalidInput
from common.ledger.rows import Row
from common.ledger.sealed_records import DisclosureRecord, MaskedRecord
from common.ledger.site_sealed import SealedRecords

QUERY, ROSTER, OTHER, BATCH = "a" * 64, "b" * 64, "c" * 64, "d" * 64
SENT = MaskedRecord(QUERY, 1, ROSTER, Fraction(1000), "e" * 64, BATCH)


def enter(books: SealedRecords, record: MaskedRecord, *, seq: int = 2) -> None:
    books.enter_masked(Row(seq, "2026-11-25T00:00:00Z", "masked", "{}", "f" * 64, f"{seq:064x}"), record)


@pytest.mark.parametrize(
    "again",
    [SENT, replace(SENT, words_sha256="9" * 64), replace(SENT, share_std=Fraction(999)), replace(SENT, masks=OTHER)],
    ids=["the same", "other words", "other noise", "another roster"],
)
def test_a_draw_of_a_query_has_one_message_under_its_masks(again: MaskedRecord) -> None:
    books = SealedRecords()
    enter(books, SENT)
    with pytest.raises(InvalidInput, match="masked code"):
        enter(books, again, seq=3)
    assert books.masked[QUERY, 1].seq == 2
    assert books.masked_under(QUERY, 1) == ROSTER
    enter(books, replace(SENT, draw=2), seq=3)  # another draw has other masks, and is charged
    enter(books, replace(SENT, query_id=OTHER), seq=4)


def test_no_code_goes_under_another_roster_than_the_receipt_charges_its_draw_to() -> None:
    books = SealedRecords()
    books.enter_receipted(QUERY, 1, OTHER)
    with pytest.raises(InvalidInput, match=r"roster .*receipt"):
        enter(books, SENT)
    assert books.masked == {}
    enter(books, replace(SENT, masks=OTHER))


def test_no_code_goes_under_masks_of_a_key_that_was_disclosed() -> None:
    books = SealedRecords()
    books.enter_key(DisclosureRecord("1" * 64, BATCH, 1, ROSTER, "2" * 64, 1, Fraction(1)))
    with pytest.raises(InvalidInput, match="never disclosed"):
        enter(books, SENT)
    enter(books, replace(SENT, draw=2))
    enter(books, replace(SENT, batch=OTHER), seq=3)
