"""Tests a statement about a student after a restore of the server, against a site's receipts from before it."""

from __future__ import annotations

from pathlib import Path

import pytest

from client.teachers.pulled_student import check_statement
from common.errors import InvalidInput, LedgerCorrupt
from common.ledger.rows import Link, body_digest
from common.privacy.accounting import max_mu_squared
from common.student_statement import StudentStatement
from tests.common.ledger.ledger_world import (
    MECHANISM,
    Hospital,
    World,
    answered,
    deliver,
    make_query,
    open_restored,
    rolled_back,
    saved,
)


def statement_of(world: World) -> StudentStatement:
    """Return the statement that the server signs at an export. Its bundle does not exist."""
    ledger, head = world.ledger, world.ledger.head()
    links = [Link(time_utc=row.time_utc, kind=row.kind, body_sha256=body_digest(row.body)) for row in ledger.rows()]
    return StudentStatement(
        study_id=world.study.id,
        bundle="a" * 64,
        size=1,
        queries=len(ledger.answers(world.study.id)),
        mu_squared=ledger.study_spending(world.study.id).mu_squared,
        head=head,
        links=tuple(links[: head.seq]),
        created_utc=links[-1].time_utc,
    ).signed(world.key)


def test_the_student_of_a_restored_server_is_pulled_although_its_ledger_has_fewer_rows_than_before(
    tmp_path: Path,
) -> None:
    world = World.create(tmp_path / "server")
    site = Hospital(tmp_path / "site.sqlite", world.study)

    def receipts_checked() -> int:
        key = world.key.public_key()
        return check_statement(statement_of(world), study=world.study, keys=(key,), ledger=site.ledger)

    answered(world, site, "b1", 0)
    copy = saved(world, tmp_path / "copy")
    for number in (1, 2, 3):
        answered(world, site, f"b{number + 1}", number)
    rows = world.ledger.head().seq
    assert receipts_checked() == 4

    open_restored(world, copy / "ledger.sqlite")
    world.ledger.recover([])  # its standing shows the three lost charges, in one row
    site.ledger.recover(world.ledger.ledger_id)
    before = statement_of(world)
    deliver(world, site)
    answered(world, site, "b5", 4)
    assert world.ledger.head().seq < rows
    assert receipts_checked() == 5
    with pytest.raises(InvalidInput, match=f"got 'row {before.head.seq}'; allowed: row {world.ledger.head().seq}"):
        check_statement(before, study=world.study, keys=(world.key.public_key(),), ledger=site.ledger)
    site.ledger.close()
    world.ledger.close()


def test_a_student_whose_recovered_charges_exceed_the_budget_is_pulled_once_staff_know_of_the_recovery(
    tmp_path: Path,
) -> None:
    world = World.create(tmp_path / "server")
    site = Hospital(tmp_path / "site.sqlite", world.study)
    privacy, key = world.study.privacy, world.key.public_key()
    copy, numbers = saved(world, tmp_path / "copy"), range(8)
    receipts = [answered(world, site, f"b{number}", number) for number in numbers]
    late = Hospital(tmp_path / "late.sqlite", world.study)  # it has no receipt of what was lost
    rolled_back(world, copy)  # with its standing, so nothing tells the server that it lost eight answers
    for number in numbers:
        world.release([make_query(number + 8, MECHANISM)], batch=f"again{number}")
    open_restored(world, saved(world, tmp_path / "newest") / "ledger.sqlite")
    world.ledger.recover(receipts)
    statement = statement_of(world)
    assert statement.mu_squared > max_mu_squared(privacy.accountant, privacy.budget)
    for knows, said in ((site, "contradicts this site's receipts"), (late, "spends more than the study's budget")):
        with pytest.raises(LedgerCorrupt, match=f"{said}.*site recover --server-restored"):
            check_statement(statement, study=world.study, keys=(key,), ledger=knows.ledger)
    site.ledger.recover(world.ledger.ledger_id)
    assert check_statement(statement, study=world.study, keys=(key,), ledger=site.ledger) == 8
    shown = statement.guarantee(privacy.budget, privacy.protection, privacy.accountant)
    assert shown.epsilon > privacy.budget.epsilon
    site.ledger.close()
    world.ledger.close()
