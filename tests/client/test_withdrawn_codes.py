"""Tests that no code with a withdrawn patient's vote is sent again, and that no other vote changes."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from client.ledger.site_ledger import SiteLedger
from common.errors import LedgerCorrupt, Refused
from common.ledger.records import parse_body
from common.messages import encode
from common.privacy.mechanism import QuerySpec
from common.privacy.quantise import quantise
from server.ledger.verify import verify
from tests.common.ledger.ledger_world import write_raw
from tests.federation import Federation, ball, make_study

VOTERS = 2


class TwoVoters:
    """Stands in for two voters with different answers; ``before`` is called before each of them answers."""

    def __init__(self) -> None:
        self.before: Callable[[int], None] = lambda slot: None
        self.asked: list[int] = []

    def predict(self, volume: bytes) -> list[Callable[[], np.ndarray]]:
        return [lambda slot=slot: self.answer(slot) for slot in range(VOTERS)]

    def answer(self, slot: int) -> np.ndarray:
        self.before(slot)
        self.asked.append(slot)
        return prediction(slot)


def prediction(slot: int) -> np.ndarray:
    body = ball((4, 4, 4), 1.5 + slot).astype(np.float32)
    return np.stack([1 - body, body])


@pytest.fixture
def fed(tmp_path: Path) -> Iterator[Federation]:
    with Federation(tmp_path, sites=2, study=make_study(voters_per_site=VOTERS)) as made:
        made.workers[100]._voters = TwoVoters()
        made.workers[100].handle(encode(made.offer(made.planned()[:3])))
        yield made


def ledger_of(fed: Federation) -> SiteLedger:
    return fed.site_ledgers["site-0"]


def voters_of(fed: Federation) -> TwoVoters:
    voters = fed.workers[100]._voters
    assert isinstance(voters, TwoVoters)
    return voters


def withdraw(fed: Federation, voter: int, subject: str = "a") -> None:
    ledger_of(fed).withdraw_patient(slot=voter, voter=voter, subject=subject * 64, weights="b" * 64)


def ask(fed: Federation, queries: tuple[QuerySpec, ...], **changes: int) -> list[np.ndarray]:
    return fed.opened(fed.workers[100].handle(encode(fed.request(queries, **changes))), queries)


def vote(fed: Federation, slot: int) -> np.ndarray:
    """Return one voter's vote by the definition, computed without the worker."""
    return quantise(fed.codec.encode(prediction(slot)), radius_int=fed.planned()[0].mechanism.radius_int)


def files(fed: Federation) -> bytes:
    return b"".join(path.read_bytes() for path in sorted((fed.root / "site-0").glob("site-ledger.sqlite*")))


def test_a_withdrawn_patients_stored_code_never_leaves(fed: Federation) -> None:
    queries = fed.planned()[:3]
    before = ask(fed, queries)
    assert all(np.array_equal(code, vote(fed, 0) + vote(fed, 1)) for code in before)
    withdraw(fed, 1)
    after = ask(fed, queries, attempt=2)
    assert all(np.array_equal(code, vote(fed, 0)) for code in after), "the other voter's vote, neither more nor less"
    assert [np.array_equal(*pair) for pair in zip(ask(fed, queries, attempt=3), after, strict=True)] == [True] * 3
    kinds = [row.kind for row in ledger_of(fed).rows()]
    assert (kinds.count("code"), kinds.count("patient")) == (6, 1)
    assert verify(fed.root / "site-0" / "site-ledger.sqlite").ok


def test_a_withdrawn_patients_stored_codes_are_gone_from_the_file(fed: Federation) -> None:
    stored = [code.astype("<i8").tobytes() for code in ask(fed, fed.planned()[:3])]
    assert all(code in files(fed) for code in stored)
    withdraw(fed, 1)
    assert not any(code in files(fed) for code in stored), "not in the pages, not in the log"
    report = verify(fed.root / "site-0" / "site-ledger.sqlite")
    assert report.ok, report.problems
    with SiteLedger.read(fed.root / "site-0" / "site-ledger.sqlite") as reader:
        assert all(reader.code(query.id) is None for query in fed.planned()[:3])


def test_codes_that_an_older_version_left_behind_never_leave_and_go_at_the_next_opening(fed: Federation) -> None:
    ledger, path = ledger_of(fed), fed.root / "site-0" / "site-ledger.sqlite"
    (stored,) = ask(fed, fed.planned()[:1])
    with ledger._writing():  # as written by a version that deleted nothing
        write_raw(ledger, "patient", {"slot": 1, "subject": "a" * 64, "voter": 1, "weights": ""})
    assert ledger.code(fed.planned()[0].id) is None
    assert verify(path).ok
    caps = fed.workers[100]._config.caps
    ledger.close()
    assert stored.tobytes() in files(fed)
    reopened = SiteLedger.open(path, "pool-0", caps=caps, site="site-0")
    fed.site_ledgers["site-0"] = reopened
    assert stored.tobytes() not in files(fed)
    assert verify(path).ok


def test_a_withdrawal_while_a_code_is_computed_keeps_that_vote_out(fed: Federation) -> None:
    for late in range(VOTERS):  # before the voter of the patient is asked, and after it

        def now(slot: int, late: int = late) -> None:
            if slot == late:
                withdraw(fed, 0, subject="ab"[late])  # again: no further row

        voters_of(fed).before = now
        (code,) = ask(fed, fed.planned()[late : late + 1])
        assert np.array_equal(code, vote(fed, 1))
    assert verify(fed.root / "site-0" / "site-ledger.sqlite").ok


def test_a_withdrawal_in_the_middle_of_a_batch_holds_for_the_codes_before_it_too(fed: Federation) -> None:
    voters, queries = voters_of(fed), fed.planned()[:3]
    voters.before = lambda slot: withdraw(fed, 1) if len(voters.asked) == 5 else None
    assert ask(fed, queries) == [], "one of them has no code any more: none leaves"
    after = ask(fed, queries, attempt=2)
    assert all(np.array_equal(code, vote(fed, 0)) for code in after)


def test_a_withdrawal_between_the_last_code_and_the_reply_keeps_them_all_in(fed: Federation) -> None:
    worker, queries = fed.workers[100], fed.planned()[:3]
    worker._tick_s, worker._sleep = 1.0, lambda seconds: withdraw(fed, 1)
    assert ask(fed, queries) == []
    worker._sleep = lambda seconds: None
    assert all(np.array_equal(code, vote(fed, 0)) for code in ask(fed, queries, attempt=2))


def test_two_withdrawn_voters_leave_the_zero_code_and_a_voter_beyond_m_moves_nobody(fed: Federation) -> None:
    queries = fed.planned()[:1]
    (whole,) = ask(fed, queries)
    withdraw(fed, VOTERS + 3, subject="c")  # a voter of another study of this pool
    (same,) = ask(fed, queries, attempt=2)
    assert np.array_equal(whole, same)
    withdraw(fed, 0, subject="a")
    (one,) = ask(fed, queries, attempt=3)
    assert np.array_equal(one, vote(fed, 1))
    withdraw(fed, 1, subject="b")
    (none,) = ask(fed, queries, attempt=4)
    assert not none.any()
    withdraw(fed, 1, subject="b")
    assert [row.kind for row in ledger_of(fed).rows()].count("patient") == 3


def test_what_was_released_already_is_not_answered_a_second_time_with_another_code(fed: Federation) -> None:
    queries = fed.planned()[:2]
    fed.core(queries).run(fed.transport)
    assert len(ledger_of(fed).receipts()) == 1
    withdraw(fed, 1)
    with pytest.raises(Refused, match="released"):
        ask(fed, queries)
    assert [row.kind for row in ledger_of(fed).rows()].count("code") == 2


def test_a_withdrawal_costs_nothing_and_changes_no_acceptance(fed: Federation) -> None:
    queries = fed.planned()[:3]
    ask(fed, queries)
    spent = ledger_of(fed).spent()
    withdraw(fed, 1)
    ask(fed, queries, attempt=2)
    assert ledger_of(fed).spent() == spent


def test_a_silent_voter_is_asked_like_the_others(fed: Federation) -> None:
    withdraw(fed, 1)
    ask(fed, fed.planned()[:1])
    assert voters_of(fed).asked == [0, 1]


def test_a_second_code_without_a_withdrawal_in_between_is_no_ledger(fed: Federation) -> None:
    queries, ledger = fed.planned()[:1], ledger_of(fed)
    ask(fed, queries)
    body = next(row.body for row in ledger.rows() if row.kind == "code")
    with pytest.raises(LedgerCorrupt, match="code of query"), ledger._writing():
        write_raw(ledger, "code", parse_body(body))
    withdraw(fed, 1)
    with pytest.raises(LedgerCorrupt, match="d" * 64), ledger._writing():
        write_raw(ledger, "code", parse_body(body) | {"teachers": "d" * 64})


def test_nothing_but_a_withdrawal_deletes_a_code(fed: Federation) -> None:
    ask(fed, fed.planned()[:3])
    withdraw(fed, 1)
    ask(fed, fed.planned()[:3], attempt=2)
    with sqlite3.connect(fed.root / "site-0" / "site-ledger.sqlite") as db, pytest.raises(sqlite3.IntegrityError):
        db.execute("DELETE FROM codes")
    db.close()
    assert verify(fed.root / "site-0" / "site-ledger.sqlite").payloads == 3
