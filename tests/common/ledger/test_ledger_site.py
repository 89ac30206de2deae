"""Tests what a hospital's own ledger promises, and which false statements of a real server it detects."""

from __future__ import annotations

import errno
import os
import sqlite3
import stat
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import timedelta
from fractions import Fraction
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from client.ledger.site_ledger import SiteLedger
from common.canonical import canonical_text, rational, sha256_bytes
from common.config import Study
from common.errors import ALARM_REMEDY, InvalidInput, LedgerCorrupt, ReceiptContradiction, Refused
from common.ledger import known_ledgers
from common.ledger.chain import Chain
from common.ledger.charges import NOTHING, ReleaseRecord, Spend, charge_of, event_json
from common.ledger.keys import load_signing_key, public_hex
from common.ledger.known_ledgers import KnownLedgers
from common.ledger.receipts import Receipt, ReceiptedRelease, check_same_ledger, first_fork
from common.ledger.records import AlarmRecord, SupersededRecord
from common.ledger.rollback_guard import SiteLedgerStanding, standing_path
from common.ledger.rows import Link, Position, SignedHead, body_digest, head_message, linked_hashes
from common.ledger.teacher_records import TrainingRecord
from common.privacy.accounting import max_mu_squared
from common.privacy.mechanism import AccountantName, Budget
from common.privacy.training import Neighbours, Sampling, TrainingEvent
from common.site_facts import SiteFacts
from consilium.cli.site import status_text
from server.ledger.backup import backup
from server.ledger.server_ledger import Ledger
from server.ledger.verify import verify
from tests.backups import copy_of, put_copy
from tests.common.ledger import ledger_world
from tests.common.ledger.ledger_world import (
    BUDGET,
    HOSPITAL,
    MECHANISM,
    PATIENT,
    Caps,
    Hospital,
    Ticking,
    World,
    answered,
    batch_receipts,
    both_recover,
    ledger_study,
    make_mechanism,
    open_restored,
    queries,
    receipt_for,
    run_batch,
    take,
)
from tests.worlds import receipts_of

CODE = np.array([3, -4, 0, 12], dtype=np.int64)


# --- acceptance


def test_acceptance_is_charged_at_once_and_stays_charged(site: Hospital) -> None:
    site.ledger.reserve(site.study.id, queries(1, 2, 3))
    site.reopen()
    spent = site.ledger.spent()
    assert spent.releases == 3
    assert spent.mu_squared == 3 * (Fraction(2 * MECHANISM.radius_int) / MECHANISM.noise_std) ** 2
    known, unknown = queries(2, 9)
    server = {"study_id": site.study.id, "ledger": "", "sealing_key": ""}
    assert site.ledger.accepted(known.id, **server) == known
    with pytest.raises(Refused, match="never accepted"):
        site.ledger.accepted(unknown.id, **server)


def test_an_offer_repeated_costs_nothing(site: Hospital) -> None:
    site.ledger.reserve(site.study.id, queries(1, 2))
    rows = site.ledger.row_count
    site.ledger.reserve(site.study.id, queries(2, 1))
    assert site.ledger.row_count == rows
    site.ledger.reserve(site.study.id, queries(2, 3))
    assert site.ledger.spent().releases == 3


def test_a_batch_is_accepted_whole_or_not_at_all(site: Hospital) -> None:
    with pytest.raises(Refused) as refused:
        site.ledger.reserve(site.study.id, queries(*range(11)))
    assert refused.value.reason == "budget"
    assert site.ledger.spent() == Spend()
    site.ledger.reserve(site.study.id, queries(*range(10)))
    assert site.ledger.facts("aachen").spent.epsilon <= BUDGET.epsilon


def test_a_refusal_is_on_record_once_a_day(site: Hospital) -> None:
    for _ in range(3):
        with pytest.raises(Refused):
            site.ledger.reserve(site.study.id, queries(*range(11)))
    assert [row.kind for row in site.ledger.rows()].count("refusal") == 1
    site.clock.now += timedelta(days=1)
    with pytest.raises(Refused):
        site.ledger.reserve(site.study.id, queries(*range(11)))
    assert [row.kind for row in site.ledger.rows()].count("refusal") == 2


def test_a_server_that_varies_what_it_asks_for_fills_no_disk_with_refusals(site: Hospital) -> None:
    for start in range(0, 2_200, 11):
        with pytest.raises(Refused):
            site.ledger.reserve(site.study.id, queries(*range(start, start + 11)))
    assert [row.kind for row in site.ledger.rows()].count("refusal") == 1


def test_the_cap_holds_over_studies_and_restarts(site: Hospital) -> None:
    site.ledger.reserve(site.study.id, queries(*range(6)))
    edited = ledger_study(planned_queries=81)
    site.ledger.consent(edited)
    site.reopen()
    with pytest.raises(Refused, match="pool-budget"):
        site.ledger.reserve(edited.id, queries(*range(20, 25)))
    site.ledger.reserve(edited.id, queries(*range(20, 24)))
    assert site.ledger.spent().releases == 10


def test_the_studys_budget_binds_at_the_site_too(tmp_path: Path) -> None:
    strict = ledger_study(epsilon=4.0)
    hospital = Hospital(tmp_path / "s.sqlite", strict)
    with hospital.ledger, pytest.raises(Refused, match="study-budget"):
        hospital.ledger.reserve(strict.id, queries(*range(9)))


def test_the_daily_cap_ends_with_the_day(tmp_path: Path) -> None:
    hospital = Hospital(tmp_path / "s.sqlite", ledger_study(), caps=Caps(queries_per_day=3))
    with hospital.ledger as ledger:
        ledger.reserve(hospital.study.id, queries(1, 2))
        with pytest.raises(Refused) as refused:
            ledger.reserve(hospital.study.id, queries(3, 4))
        assert refused.value.reason == "daily-cap"
        ledger.reserve(hospital.study.id, queries(3))
        hospital.clock.now += timedelta(days=1)
        ledger.reserve(hospital.study.id, queries(4, 5))


def test_studies_not_consented_to_paused_or_withdrawn_are_refused(site: Hospital) -> None:
    with pytest.raises(Refused) as refused:
        site.ledger.reserve(ledger_study("other").id, queries(1))
    assert refused.value.reason == "unknown-study"
    site.ledger.decide(site.study.id, "pause")
    site.reopen()
    with pytest.raises(Refused) as refused:
        site.ledger.reserve(site.study.id, queries(1))
    assert refused.value.reason == "paused"
    site.ledger.decide(site.study.id, "resume")
    site.ledger.reserve(site.study.id, queries(1))
    site.ledger.decide(site.study.id, "withdraw")
    with pytest.raises(InvalidInput, match="for good"):
        site.ledger.decide(site.study.id, "resume")
    with pytest.raises(Refused) as refused:
        site.ledger.reserve(site.study.id, queries(2))
    assert refused.value.reason == "withdrawn", "not a pause, which the staff may end"


def test_other_voters_than_the_study_says_are_refused(site: Hospital) -> None:
    with pytest.raises(Refused) as refused:
        site.ledger.reserve(site.study.id, queries(1, mechanism=make_mechanism(voters=2)))
    assert refused.value.reason == "wrong-mechanism"


def test_changed_caps_are_on_record_and_another_unit_or_pool_is_refused(site: Hospital) -> None:
    site.reopen(Caps(queries_per_day=5))
    site.reopen(Caps(queries_per_day=5))
    assert [row.kind for row in site.ledger.rows()].count("pool") == 2
    with pytest.raises(InvalidInput, match="protection"):
        SiteLedger.open(site.path, "aachen-mri", caps=Caps(protection=PATIENT))
    with pytest.raises(InvalidInput, match="pool"):
        SiteLedger.open(site.path, "bergen-mri", caps=Caps())


def test_looser_caps_that_were_replaced_do_not_come_back_with_an_older_site_toml(site: Hospital) -> None:
    """Caps that a hospital lowered stay low until a person raises them. A restored site.toml does not."""
    wide, tight = Caps(), Caps(budget=Budget(epsilon=2.0, delta=1e-3), queries_per_day=900)
    site.reopen(tight)
    for caps in (wide, replace(wide, queries_per_day=900)):
        if caps != wide:
            site.reopen(caps)  # these caps were never used before, so a person chose them
            site.reopen(tight)
        with pytest.raises(InvalidInput, match="replaced by tighter ones"):
            SiteLedger.open(site.path, "aachen-mri", caps=caps, clock=site.clock)
        with pytest.raises(InvalidInput, match=r"newest site\.toml"):
            SiteLedger.open(site.path, "aachen-mri", caps=caps, clock=site.clock, restored=True)
    site.reopen(replace(wide, queries_per_day=999))
    site.reopen(tight)  # tighter caps may come back
    assert verify(site.path).ok


@pytest.mark.parametrize("budget", [Budget(2001.0, 1e-3), Budget(1e308, 1e-3)])
def test_caps_under_which_no_query_could_ever_be_charged_are_not_put_on_record(
    site: Hospital, budget: Budget, tmp_path: Path
) -> None:
    """Otherwise every later command of the site would fail, and no row can be deleted."""
    site.ledger._declare("aachen-mri", "aachen", Caps(budget=budget))  # as an earlier version did
    site.reopen(Caps())
    before = site.ledger.row_count
    with pytest.raises(InvalidInput, match="budget"):
        SiteLedger.open(site.path, "aachen-mri", caps=Caps(budget=budget), clock=site.clock)
    site.reopen(Caps())
    assert site.ledger.row_count == before
    with pytest.raises(InvalidInput, match="budget"):
        SiteLedger.open(tmp_path / "new.sqlite", "bergen-mri", caps=Caps(budget=budget), clock=site.clock)
    assert not (tmp_path / "new.sqlite").exists()


# --- codes


def test_a_retry_gets_the_stored_code(site: Hospital) -> None:
    query = queries(1)[0]
    site.ledger.reserve(site.study.id, [query])
    assert site.ledger.code(query.id) is None
    site.ledger.store_code(query.id, CODE)
    site.reopen()
    stored = site.ledger.code(query.id)
    assert stored is not None
    assert stored.tobytes() == CODE.tobytes()
    with pytest.raises(ValueError, match="read-only"):
        stored[0] = 1
    site.ledger.store_code(query.id, CODE)
    with pytest.raises(InvalidInput, match="already stored"):
        site.ledger.store_code(query.id, CODE + 1)


@pytest.mark.parametrize(
    "bad",
    [
        np.array([np.nan, 0, 0, 0]),
        np.zeros(4),
        np.zeros(5, dtype=np.int64),
        np.array([1 << 17, 0, 0, 0], dtype=np.int64),
        np.array([np.iinfo(np.int64).min, 0, 0, 0], dtype=np.int64),
        np.ma.array([1 << 40, 0, 0, 0], mask=[True, False, False, False]),
    ],
    ids=["nan", "float", "long", "outside-the-ball", "overflow", "masked"],
)
def test_anything_but_an_integer_code_in_the_ball_is_refused(site: Hospital, bad: np.ndarray) -> None:
    query = queries(1)[0]
    site.ledger.reserve(site.study.id, [query])
    with pytest.raises(InvalidInput):
        site.ledger.store_code(query.id, bad)
    assert site.ledger.code(query.id) is None


def test_a_code_for_a_query_never_accepted_is_refused(site: Hospital) -> None:
    with pytest.raises(Refused) as refused:
        site.ledger.store_code(queries(1)[0].id, CODE)
    assert refused.value.reason == "not-accepted"


def test_the_file_and_its_key_are_for_their_owner_only(site: Hospital) -> None:
    site.ledger.reserve(site.study.id, queries(1))
    names = {path.name for path in site.path.parent.iterdir() if path.name.startswith("site-ledger")}
    assert {"site-ledger.sqlite", "site-ledger.key"} <= names
    for name in names:
        assert stat.S_IMODE((site.path.parent / name).stat().st_mode) == 0o600, name


def test_a_zero_code_leaves_the_same_rows_as_a_real_one(site: Hospital) -> None:
    first, second = queries(1, 2)
    site.ledger.reserve(site.study.id, [first, second])
    site.ledger.store_code(first.id, CODE)
    site.ledger.store_code(second.id, np.zeros(4, dtype=np.int64))
    kinds = [row.kind for row in site.ledger.rows()]
    assert kinds[-2:] == ["code", "code"]


# --- receipts


def test_receipts_are_checked_and_kept(world: World, site: Hospital) -> None:
    for number, batch in enumerate(("b1", "b2", "b3")):
        receipt = run_batch(world, site, batch, 2 * number, 2 * number + 1)
        take(world, site, receipt)
        assert receipt.after == world.ledger.spent("aachen-mri") == site.ledger.spent()
    release = receipt.releases[0].release
    assert [mechanism.radius_int for mechanism in receipt.mechanisms] == [1 << 16, 1 << 16]  # C = 1 on the grid
    assert release.event["noise_multiplier"] == rational(MECHANISM.noise_std / (2 * MECHANISM.radius_int))
    assert [entry.site for entry in release.roster] == ["aachen", "bergen", "cadiz"]
    site.reopen()
    assert len(site.ledger.receipts()) == 3
    head = world.ledger.head()
    assert site.ledger.server_heads() == {head.ledger_id: (head.seq, head.hash)}
    report = verify(site.path, server_key=world.key.public_key())
    assert report.ok, report.problems
    assert verify(world.path, witnesses=[item.head for item in site.ledger.receipts()]).witnesses == 3


def test_a_receipt_that_comes_again_changes_nothing(world: World, site: Hospital) -> None:
    receipt = run_batch(world, site, "b1", 1)
    for _ in range(2):
        take(world, site, receipt)
    assert len(site.ledger.receipts()) == 1
    assert site.ledger.alarms() == ()


def test_lost_receipts_are_asked_for_and_issued_again(world: World, site: Hospital) -> None:
    run_batch(world, site, "b1", 1)
    run_batch(world, site, "b2", 2)
    third = run_batch(world, site, "b3", 3)
    with pytest.raises(Refused) as refused:
        take(world, site, third)
    assert refused.value.reason == "receipt-gap"
    assert site.ledger.alarms() == ()
    world.reopen()
    for receipt in receipts_of(world.ledger, "aachen", after=0):
        take(world, site, receipt)
    assert len(site.ledger.receipts()) == 3


def test_a_site_that_missed_a_batch_follows_on(world: World, site: Hospital) -> None:
    answered(world, site, "b1", 1)
    world.release(queries(2), batch="b2", sites=("bergen", "cadiz"))
    receipt = answered(world, site, "b3", 3)
    assert receipt.after.releases == 2


def test_a_receipt_signed_by_someone_else_is_refused_without_an_alarm(world: World, site: Hospital) -> None:
    receipt = run_batch(world, site, "b1", 1)
    with pytest.raises(InvalidInput, match="signed"):
        site.ledger.record_receipt(receipt, public_key=Ed25519PrivateKey.generate().public_key())
    altered = replace(receipt, after=Spend(Fraction(1, 7), 1, 4))
    with pytest.raises(InvalidInput, match="signed"):
        take(world, site, altered)
    assert site.ledger.alarms() == ()


def assert_alarm(site: Hospital, world: World, receipt: Receipt, match: str) -> None:
    with pytest.raises(ReceiptContradiction, match=match):
        take(world, site, receipt)
    site.reopen()
    assert len(site.ledger.alarms()) == 1
    assert ALARM_REMEDY in status_text(site.ledger.facts("aachen"))
    with pytest.raises(Refused) as refused:
        site.ledger.reserve(site.study.id, queries(99))
    assert refused.value.reason == "paused"
    assert verify(site.path).ok, "the alarm itself is a sound record"


def test_a_server_that_charges_less_is_caught(world: World, site: Hospital) -> None:
    receipt = run_batch(world, site, "b1", 1)
    cheaper = Spend(receipt.after.mu_squared / 2, 1, 4)
    assert_alarm(site, world, replace(receipt, after=cheaper).signed(world.key), "do not add up")


def test_a_server_that_forgets_earlier_charges_is_caught(world: World, site: Hospital) -> None:
    answered(world, site, "b1", 1)
    receipt = run_batch(world, site, "b2", 2)
    single = replace(receipt, before=Spend(), after=Spend(receipt.after.mu_squared / 2, 1, 4))
    assert_alarm(site, world, single.signed(world.key), "totals before")


def test_a_server_that_states_a_cheaper_event_is_caught(world: World, site: Hospital) -> None:
    receipt = run_batch(world, site, "b1", 1)
    quieter = replace(MECHANISM, noise_std=MECHANISM.noise_std * 2)
    event = event_json(quieter, world.study.privacy.protection)
    stated = replace(receipt.releases[0].release, event=event)
    altered = replace(receipt, releases=(replace(receipt.releases[0], release=stated),))
    assert_alarm(site, world, altered.signed(world.key), "other than the one in the chain")


def test_a_server_that_dropped_its_last_rows_is_caught(world: World, site: Hospital, tmp_path: Path) -> None:
    answered(world, site, "b1", 1)
    old = ledger_world.saved(world, tmp_path / "old")
    answered(world, site, "b2", 2, 3)
    ledger_world.rolled_back(world, old)  # the whole machine was rolled back, so only the sites can notice
    assert world.ledger.spent("aachen-mri").releases == 1, "the restored server knows nothing of batch b2"
    receipt = run_batch(world, site, "b4", 4)
    assert_alarm(site, world, receipt, "rolled back or forked")


def test_a_server_that_forks_is_caught_by_the_site_and_between_two_sites(
    world: World, site: Hospital, tmp_path: Path
) -> None:
    answered(world, site, "b1", 1)
    fork = ledger_world.saved(world, tmp_path / "fork")
    answered(world, site, "b2", 2)
    with Ledger.open(fork / "ledger.sqlite", signing_key=world.key, clock=Ticking()) as ledger:
        other = World(fork / "ledger.sqlite", world.key, ledger, world.study)
        other.release(queries(2), batch="b2")
        theirs = receipts_of(ledger, "bergen")[-1]
        ours = site.ledger.receipts()[-1]
        assert theirs.head.seq == ours.head.seq
        assert theirs.head.hash != ours.head.hash, "two sites comparing heads see the fork"
        assert first_fork([ours], [theirs]) == (ledger.ledger_id, ours.previous.seq + 1)
        assert first_fork([ours], [ours]) is None
        other.release(queries(3), batch="b3")
        site.ledger.reserve(world.study.id, queries(3))
        assert_alarm(site, world, receipt_for(other, "b3"), "rolled back or forked")


def test_sites_that_know_a_server_before_and_after_its_restore_find_no_fork_unless_it_forked_again(
    world: World, site: Hospital, tmp_path: Path
) -> None:
    answered(world, site, "b1", 1)
    copy = ledger_world.saved(world, tmp_path / "copy")
    answered(world, site, "b2", 2)
    before = receipts_of(world.ledger, "bergen")
    open_restored(world, copy / "ledger.sqlite")
    both_recover(world, site, before)
    fork = ledger_world.saved(world, tmp_path / "fork")
    answered(world, site, "b3", 3)
    after = receipts_of(world.ledger, "bergen")
    ours = site.ledger.receipts()
    assert ours[1].head.hash != after[1].head.hash, "the two histories differ"
    for theirs in (before, after, [*before, *after]):
        assert first_fork(ours, theirs) is None
        assert first_fork(theirs, ours) is None
    with Ledger.open(fork / "ledger.sqlite", signing_key=world.key, clock=Ticking()) as ledger:
        World(fork / "ledger.sqlite", world.key, ledger, world.study).release(queries(4), batch="b4")
        forked = [*before, *receipts_of(ledger, "bergen")]
        assert first_fork(ours, forked) == first_fork(forked, ours) == (ledger.ledger_id, ours[-1].head.seq)


def test_two_sites_that_know_other_sides_of_a_restore_read_what_to_do_and_both_histories_are_charged(
    world: World, site: Hospital, tmp_path: Path
) -> None:
    answered(world, site, "b1", 1)
    copy = ledger_world.saved(world, tmp_path / "copy")
    answered(world, site, "b2", 2)  # the server loses this release, and only this site has its receipt
    ledger_world.rolled_back(world, copy)
    world.release(queries(3), batch="b3")
    theirs = receipts_of(world.ledger, "bergen")  # the other site knows only the rows after the restore
    with pytest.raises(LedgerCorrupt, match=r"restored an older copy, do the steps.*docs/ledger\.md.*afterwards"):
        check_same_ledger(site.ledger.receipts(), theirs)
    assert world.ledger.spent("aachen-mri").releases == 2
    both_recover(world, site, site.ledger.receipts())
    assert world.ledger.spent("aachen-mri").releases == 3, "b1, the lost b2, b3"
    answered(world, site, "b4", 4)
    with pytest.raises(LedgerCorrupt, match="this comparison may still name the row afterwards"):
        check_same_ledger(site.ledger.receipts(), receipts_of(world.ledger, "bergen"))


def test_a_server_that_replays_an_old_receipt_as_new_is_caught(world: World, site: Hospital) -> None:
    first = answered(world, site, "b1", 1)
    second = answered(world, site, "b2", 2)
    replayed = replace(first, batch_id="b9").signed(world.key)
    take(world, site, replayed)
    assert len(site.ledger.receipts()) == 2, "a head already known adds nothing and proves nothing"
    moved = replace(second, head=replace(second.head, seq=second.head.seq + 1)).signed(world.key)
    with pytest.raises(InvalidInput, match="signed"):
        take(world, site, moved)


def test_a_server_that_edited_the_study_is_caught(world: World, site: Hospital) -> None:
    edited = ledger_study(epsilon=7.9)
    world.ledger.register_study(edited)
    site.ledger.reserve(world.study.id, queries(1))
    world.release(queries(1), study=edited.id)
    receipt = next(item for item in batch_receipts(world.ledger, "b1") if item.site == "aachen")
    assert_alarm(site, world, receipt, "never consented")


def test_a_charge_for_a_query_never_accepted_is_caught(world: World, site: Hospital) -> None:
    world.release(queries(5))
    assert_alarm(site, world, receipt_for(world, "b1"), "never accepted")


def test_a_second_ledger_for_the_same_study_is_caught(world: World, site: Hospital, tmp_path: Path) -> None:
    answered(world, site, "b1", 1)
    fresh = World.create(tmp_path / "fresh")
    with fresh.ledger:
        receipt = run_batch(fresh, site, "b1", 2)
        with pytest.raises(LedgerCorrupt, match="another ledger"):
            site.ledger.record_receipt(receipt, public_key=fresh.key.public_key())


def test_reservations_without_a_receipt_stay_spent(world: World, site: Hospital) -> None:
    receipt = run_batch(world, site, "b1", 1, 2)
    site.ledger.reserve(world.study.id, queries(3, 4, 5))
    take(world, site, receipt)
    assert site.ledger.spent().releases == 5
    facts = site.ledger.facts("aachen")
    assert (facts.accepted, facts.receipted) == (5, 2)


def test_after_an_alarm_a_person_lets_the_site_go_on_but_not_for_less(
    world: World, site: Hospital, tmp_path: Path
) -> None:
    test_a_server_that_dropped_its_last_rows_is_caught(world, site, tmp_path)
    site.ledger.recover(world.ledger.ledger_id)
    assert site.ledger.alarms() == ()
    with pytest.raises(Refused, match="ended the alarm"):
        take(world, site, receipt_for(world, "b4"))
    receipt = run_batch(world, site, "b5", 5)
    with pytest.raises(LedgerCorrupt, match="lacks charges"):
        take(world, site, receipt)
    assert len(site.ledger.alarms()) == 1


def test_receipts_that_contradicted_are_handed_over_for_a_recovery(world: World, site: Hospital) -> None:
    """These receipts are charged too, because they show releases made before anybody noticed the rollback."""
    known = answered(world, site, "b1", 1)
    world.release(queries(9), batch="b2")
    contradicts = receipt_for(world, "b2")
    with pytest.raises(LedgerCorrupt, match="never accepted"):
        take(world, site, contradicts)
    assert site.ledger.receipts() == (known,)
    assert site.ledger.receipts(evidence=True) == (known, contradicts)


def test_what_was_released_between_a_rollback_and_its_discovery_stays_owed(
    world: World, site: Hospital, tmp_path: Path
) -> None:
    """A ledger recovered without this release has smaller totals than the site's receipts, and is refused."""
    old = ledger_world.saved(world, tmp_path / "old")
    answered(world, site, "b1", 1)
    ledger_world.rolled_back(world, old)
    with pytest.raises(LedgerCorrupt):
        answered(world, site, "b2", 2)
    ledger_world.rolled_back(world, old)  # the server forgets b2, too
    for receipts, batch, number in ((site.ledger.receipts(), "b3", 3), (site.ledger.receipts(evidence=True), "b4", 4)):
        both_recover(world, site, receipts)
        receipt = run_batch(world, site, batch, number)
        if batch == "b3":
            with pytest.raises(LedgerCorrupt):
                take(world, site, receipt)
        else:
            take(world, site, receipt)
    assert site.ledger.alarms() == ()
    assert world.ledger.spent("aachen-mri").releases == site.ledger.spent().releases == 4


@pytest.mark.parametrize("late", [False, True])
def test_a_query_that_only_contradicting_receipts_show_is_charged_again_when_it_is_asked_again(
    world: World, site: Hospital, tmp_path: Path, late: bool
) -> None:
    """With ``late``, the receipt arrives after the person's recovery, so it raises no alarm."""
    old = ledger_world.saved(world, tmp_path / "old")
    answered(world, site, "b1", 1)
    ledger_world.rolled_back(world, old)
    told = run_batch(world, site, "b2", 2)
    if late:
        site.ledger.recover(world.ledger.ledger_id)
    with pytest.raises(Refused if late else LedgerCorrupt):
        take(world, site, told)
    ledger_world.rolled_back(world, old)  # so the answer of query 2 is lost
    both_recover(world, site, site.ledger.receipts(evidence=True))
    answered(world, site, "b3", 2)
    assert world.answers.drawn.count(queries(2)[0].id) == 2
    assert world.ledger.spent("aachen-mri").releases == site.ledger.spent().releases == 3
    assert site.ledger.books.spent_in(world.study.id).releases == 3
    site.reopen()
    assert site.ledger.spent().releases == 3
    assert site.ledger.alarms() == ()


@pytest.mark.parametrize("late", [False, True])
def test_a_release_is_charged_though_its_receipt_comes_after_that_of_a_second_release_of_the_query(
    world: World, site: Hospital, tmp_path: Path, late: bool
) -> None:
    """With ``late``, the receipt arrives after a person's recovery, so it raises no alarm."""
    old = ledger_world.saved(world, tmp_path / "old")
    told = run_batch(world, site, "b1", 1)
    ledger_world.rolled_back(world, old)  # nobody notices, so the query is asked again
    answered(world, site, "b2", 1)
    if late:
        site.ledger.recover(world.ledger.ledger_id)
    with pytest.raises(Refused if late else LedgerCorrupt):
        take(world, site, told)
    both_recover(world, site, site.ledger.receipts(evidence=True))
    assert world.answers.drawn.count(queries(1)[0].id) == 2
    assert world.ledger.spent("aachen-mri").releases == site.ledger.spent().releases == 2
    answered(world, site, "b3", 2)
    assert world.ledger.spent("aachen-mri") == site.ledger.spent() == site.ledger.books.spent_in(world.study.id)
    site.reopen()
    assert site.ledger.spent().releases == 3
    assert site.ledger.alarms() == ()


def test_a_lost_release_is_charged_though_the_server_has_lost_one_more_that_a_contradicting_receipt_shows(
    world: World, site: Hospital, tmp_path: Path
) -> None:
    """The recovered ledger's totals are as large as the sum of the site's receipts, but cover other releases."""
    old = ledger_world.saved(world, tmp_path / "old")
    answered(world, site, "b0", 9)
    run_batch(world, site, "b1", 1)
    elsewhere = receipts_of(world.ledger, "bergen")
    ledger_world.rolled_back(world, old)
    told = run_batch(world, site, "b2", 2)
    with pytest.raises(LedgerCorrupt, match="rolled back"):
        take(world, site, told)
    ledger_world.rolled_back(world, old)
    both_recover(world, site, elsewhere)
    answered(world, site, "b3", 1)
    assert len(world.answers.drawn) == 4
    assert site.ledger.spent().releases == site.ledger.books.spent_in(world.study.id).releases == 4
    site.reopen()
    assert site.ledger.spent().releases == 4


def test_a_lost_release_is_charged_though_the_server_has_lost_another_one_that_the_site_had_a_receipt_of(
    world: World, site: Hospital, tmp_path: Path
) -> None:
    """The recovered ledger's totals are as large as those of the accepted receipt, but cover other releases."""
    old = ledger_world.saved(world, tmp_path / "old")
    run_batch(world, site, "b1", 1)
    elsewhere = receipts_of(world.ledger, "bergen")
    ledger_world.rolled_back(world, old)
    answered(world, site, "b2", 2)
    ledger_world.rolled_back(world, old)  # nobody notices that b2 is lost
    both_recover(world, site, elsewhere)
    answered(world, site, "b3", 1)
    assert len(world.answers.drawn) == 3
    assert site.ledger.spent().releases == site.ledger.books.spent_in(world.study.id).releases == 3
    site.reopen()
    assert site.ledger.spent().releases == 3
    assert site.ledger.alarms() == ()


def test_a_site_that_no_longer_holds_the_receipts_before_a_recovery_counts_no_release_too_few(
    world: World, site: Hospital, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(known_ledgers, "MAX_HELD", 1)
    answered(world, site, "b1", 1)
    old = ledger_world.saved(world, tmp_path / "old")
    answered(world, site, "b2", 2)
    open_restored(world, old / "ledger.sqlite")
    both_recover(world, site, site.ledger.receipts())
    answered(world, site, "b3", 3)
    assert site.ledger.spent().releases >= len(world.answers.drawn) == 3
    counted = site.ledger.spent()
    site.reopen()
    assert site.ledger.spent() == counted


@pytest.mark.parametrize("given", [True, False])
def test_a_receipt_whose_charge_only_a_row_lost_contains_counts_twice_and_once_if_the_server_was_given_it(
    world: World, site: Hospital, tmp_path: Path, given: bool
) -> None:
    """Without the receipt the site cannot tell this row ``lost`` from one that charges releases without a receipt."""
    old = ledger_world.saved(world, tmp_path / "old")
    answered(world, site, "b1", 1)
    open_restored(world, old / "ledger.sqlite")
    for receipts in ((), site.ledger.receipts() if given else ()):
        both_recover(world, site, receipts)
    for batch, number in (("b2", 2), ("b3", 3)):
        answered(world, site, batch, number)
    assert site.ledger.spent().releases == len(world.answers.drawn) + (0 if given else 1) == (3 if given else 4)
    assert site.ledger.alarms() == ()


def test_an_alarm_about_a_row_lost_that_may_charge_a_receipt_twice_ends_once_the_server_was_given_the_receipt(
    world: World, site: Hospital, tmp_path: Path
) -> None:
    old = ledger_world.saved(world, tmp_path / "old")
    answered(world, site, "b1", *range(6))
    open_restored(world, old / "ledger.sqlite")
    both_recover(world, site, ())
    with pytest.raises(LedgerCorrupt, match="enter this site's receipts"):
        answered(world, site, "b2", 6)
    both_recover(world, site, site.ledger.receipts(evidence=True))
    answered(world, site, "b3", 7)
    assert site.ledger.alarms() == ()
    assert site.ledger.spent().releases == len(world.answers.drawn) == 8


def test_a_full_ledger_is_still_read_though_an_earlier_version_counted_one_of_its_losses_too_little(
    world: World, site: Hospital, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = ledger_world.saved(world, tmp_path / "old")
    answered(world, site, "b1", 1)
    open_restored(world, old / "ledger.sqlite")
    both_recover(world, site, ())
    with monkeypatch.context() as older:
        older.setattr(KnownLedgers, "counted_in", lambda self, receipt, _rosters: self.of(receipt.ledger_id))
        answered(world, site, "b2", 2)
        site.ledger.reserve(world.study.id, queries(*range(3, 11)))
        assert site.ledger.spent().releases == 10  # the cap
    site.reopen()
    assert site.ledger.spent().releases == 11


def test_a_finished_training_has_drawn_all_its_steps_whatever_its_rows_count(site: Hospital) -> None:
    """Its teacher exists, so no further step may be drawn for its charge."""
    event = TrainingEvent(Sampling.FIXED_PARTITION, Fraction(1), Fraction(4), steps=4)
    site.ledger.record_training(TrainingRecord("a" * 64, 0, "d" * 64, "dp-sgd", (event,)))
    site.ledger.record_drawn("a" * 64, 2, after=0)
    assert site.ledger.drawn("a" * 64) == 2
    site.ledger.record_trained("a" * 64, "b" * 64)
    site.reopen()
    assert site.ledger.drawn("a" * 64) == 4
    with pytest.raises(Refused, match="another run"):
        site.ledger.record_drawn("a" * 64, 3, after=2)


def test_evidence_that_comes_again_is_kept_once(world: World, site: Hospital) -> None:
    world.release(queries(5))
    for _ in range(3):
        with pytest.raises(LedgerCorrupt, match="never accepted"):
            take(world, site, receipt_for(world, "b1"))
    assert [row.kind for row in site.ledger.rows()].count("alarm") == 1


def test_a_released_query_is_declined_when_it_is_asked_again_and_charged_again_after_a_recovery(
    world: World, site: Hospital
) -> None:
    answered(world, site, "b1", 1)
    for _ in range(2):
        with pytest.raises(Refused) as refused:
            site.ledger.reserve(world.study.id, queries(1, 2))
        assert refused.value.reason == "paused"
    assert "asked again for" in site.ledger.alarms()[0]
    assert site.ledger.stopped(world.study.id) is None, "an old message that arrives late stops nobody"
    site.ledger.reserve(world.study.id, queries(2))
    site.ledger.recover(world.ledger.ledger_id)
    site.reopen()
    assert site.ledger.alarms() == ()
    site.ledger.reserve(world.study.id, queries(1))
    site.ledger.reserve(world.study.id, queries(1))
    assert site.ledger.spent().releases == 3
    assert verify(site.path).ok


def test_a_site_pays_for_each_release_that_receipts_show_though_it_accepted_the_query_once(
    world: World, site: Hospital, tmp_path: Path
) -> None:
    """Two noises on one sum are two releases, even if the server did not ask the site again."""
    key, copy = world.key.public_key(), ledger_world.saved(world, tmp_path / "copy")
    answered(world, site, "b1", 1)
    ledger_world.rolled_back(world, copy)
    assert world.ledger.recover(site.ledger.receipts()) == 1
    site.ledger.recover(world.ledger.ledger_id)
    world.release(queries(1), batch="b2")
    assert len(world.answers.drawn) == 2
    take(world, site, receipt_for(world, "b2"))
    one = MECHANISM.mu_squared(site.caps.protection)
    for ledger in (site.ledger, SiteLedger.read(site.path)):
        assert ledger.spent() == ledger.books.spent_in(site.study.id) == Spend(2 * one, 2, 2 * MECHANISM.dimension)
    ledger.close()
    assert verify(site.path, server_key=key).ok


def continued(
    world: World,
    last: Receipt,
    releases: list[ReleaseRecord],
    *,
    kinds: Sequence[str] = ("note",),
    lost: Spend = NOTHING,
) -> Receipt:
    """Return a receipt that a dishonest server invents after its last one; only the invented rows differ."""
    time, first = last.links[-1].time_utc, last.head.seq + 1 + len(kinds)
    links = (
        *(Link(time, kind, "a" * 64) for kind in kinds),
        *(Link(time, "release", body_digest(canonical_text(one.to_json()))) for one in releases),
    )
    previous, before = Position(last.head.seq, last.head.hash), last.after + lost
    *_, (seq, hashed) = linked_hashes(links, after=previous)
    after = before
    for one in releases:
        mechanism = one.query.mechanism
        after = after.plus(charge_of(mechanism, last.declaration.protection, HOSPITAL), mechanism.dimension)
    signature = world.key.sign(head_message("server", ledger_id=last.ledger_id, seq=seq, row_hash=hashed)).hex()
    head = SignedHead("server", last.ledger_id, seq, hashed, last.head.public_key, signature)
    items = tuple(ReceiptedRelease(number, one) for number, one in enumerate(releases, start=first))
    of = {
        "batch_id": releases[0].batch_id,
        "releases": items,
        "links": links,
        "previous": previous,
        "before": before,
        "after": after,
        "head": head,
    }
    return replace(last, **of).signed(world.key)


def test_a_receipt_that_releases_a_query_again_is_an_alarm_and_charges_nothing(world: World, site: Hospital) -> None:
    key, first = world.key.public_key(), answered(world, site, "b1", 1)
    spent, released = site.ledger.spent(), first.releases[0].release
    again = continued(world, first, [released])
    assert_alarm(site, world, again, "releases query .* again")
    assert (len(site.ledger.receipts()), site.ledger.spent()) == (1, spent)
    assert verify(site.path, server_key=key).ok


def test_a_file_that_already_holds_a_receipt_of_a_further_release_is_still_read(
    world: World, site: Hospital, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Version 0.2.0 stored such receipts."""
    key, first = world.key.public_key(), answered(world, site, "b1", 1)
    with monkeypatch.context() as older:
        older.setattr("client.ledger.site_receipts._check_paid", lambda _receipt, _books: None)
        take(world, site, continued(world, first, [first.releases[0].release]))
    site.reopen()
    assert site.ledger.spent().releases == 2
    assert verify(site.path, server_key=key).ok


def test_a_receipt_that_releases_one_query_twice_is_an_alarm(world: World, site: Hospital) -> None:
    first = answered(world, site, "b1", 1)
    second = run_batch(world, site, "b2", 2).releases[0].release
    assert_alarm(site, world, continued(world, first, [second, second]), "releases query .* again")


def test_after_a_recovery_a_query_is_released_again_once(world: World, site: Hospital) -> None:
    """A recovered server may release a query again, because it lost the answer. An honest server does so once."""
    first = answered(world, site, "b1", 1)
    site.ledger.recover(world.ledger.ledger_id)
    again = continued(world, first, [first.releases[0].release])
    take(world, site, again)
    assert site.ledger.spent().releases == 2
    assert_alarm(site, world, continued(world, again, [first.releases[0].release]), "releases query .* again")


@pytest.mark.parametrize("losses", [3, 30])
def test_invented_losses_of_the_server_charge_a_site_at_most_one_loss_beyond_its_cap(
    world: World, site: Hospital, losses: int
) -> None:
    """A row ``lost`` may charge every accepted query without a receipt again; a server can invent many such rows."""
    first = answered(world, site, "b1", 1)
    second = run_batch(world, site, "b2", 2).releases[0].release
    site.ledger.reserve(world.study.id, queries(3, 4))  # three without a receipt; the cap has room for ten
    one = MECHANISM.mu_squared(HOSPITAL)
    lost = Spend(3 * losses * one, 3 * losses, 3 * losses * MECHANISM.dimension)
    receipt = continued(world, first, [second], kinds=["lost"] * losses, lost=lost)
    if losses == 3:
        take(world, site, receipt)
        assert site.ledger.spent().releases == 4 + 9
    else:
        assert_alarm(site, world, receipt, "lost more than")
        assert site.ledger.spent().releases == 4


def test_after_an_alarm_was_ended_invented_losses_are_bounded_as_before(world: World, site: Hospital) -> None:
    """A person who ends an alarm accepts the server's rollback, but only a bounded charge. A raised cap allows more."""
    first = answered(world, site, "b1", 1)
    site.ledger.recover(first.ledger_id)
    second = run_batch(world, site, "b2", 2).releases[0].release
    one = MECHANISM.mu_squared(HOSPITAL)
    invented = Spend(90 * one, 90, 90 * MECHANISM.dimension)
    receipt = continued(world, first, [second], kinds=["lost"], lost=invented)
    assert_alarm(site, world, receipt, r"raise caps\.epsilon")
    assert site.ledger.spent().releases == 2
    site.reopen(Caps(budget=Budget(epsilon=400.0, delta=1e-3)))
    site.ledger.recover(first.ledger_id)
    third = run_batch(world, site, "b3", 3).releases[0].release
    take(world, site, continued(world, receipt, [third]))
    assert site.ledger.spent().releases == 3 + 90


def test_receipts_that_are_paid_for_fill_the_disk_up_to_one_limit(
    world: World, site: Hospital, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A receipt has a link for each row of the server's ledger since the last one; a server can invent rows."""
    first = answered(world, site, "b1", 1)
    second = run_batch(world, site, "b2", 2).releases[0].release
    long = continued(world, first, [second], kinds=["note"] * 100)
    monkeypatch.setattr("client.ledger.site_receipts.MAX_PAID_BYTES", 2 * len(first.render()) + 500)
    rows = site.ledger.row_count
    with pytest.raises(Refused, match="are stored; to fix"):
        take(world, site, long)
    assert (site.ledger.row_count, site.ledger.alarms()) == (rows, ())
    site.reopen()
    take(world, site, continued(world, first, [second]))
    # A site that can store no more such receipts may still accept queries.
    site.ledger.reserve(world.study.id, queries(3))


def test_contradicting_receipts_of_many_days_are_stored_up_to_one_limit(
    world: World, site: Hospital, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = answered(world, site, "b1", 1)
    monkeypatch.setattr("client.ledger.site_receipts.MAX_EVIDENCE_BYTES", 3 * len(first.render()))
    for day in range(8):
        site.clock.now += timedelta(days=1)
        again = continued(world, first, [first.releases[0].release], kinds=[f"day-{day}"])
        with pytest.raises(LedgerCorrupt):
            take(world, site, again)
    alarms = [row for row in site.ledger.rows() if row.kind == "alarm"]
    assert len(alarms) in (2, 3)


def test_a_receipt_that_is_filled_up_with_long_names_of_kinds_is_refused_unstored(world: World, site: Hospital) -> None:
    first = answered(world, site, "b1", 1)
    second, rows = run_batch(world, site, "b2", 2).releases[0].release, site.ledger.row_count
    with pytest.raises(InvalidInput, match="kind"):
        take(world, site, continued(world, first, [second], kinds=["x" * 65]))
    assert site.ledger.row_count == rows
    take(world, site, continued(world, first, [second], kinds=["x" * 64]))


def test_an_old_backup_is_noticed_recovered_from_and_understates_nothing(
    world: World, site: Hospital, tmp_path: Path
) -> None:
    test_a_server_that_dropped_its_last_rows_is_caught(world, site, tmp_path)
    receipts = site.ledger.receipts()
    assert world.ledger.recover(receipts) == 2
    assert world.ledger.recover(receipts) == 0, "what is known is not entered twice"
    assert world.ledger.spent("aachen-mri").releases == 1 + 1 + 2
    world.reopen()
    assert world.ledger.spent("bergen-mri").releases == 4, "every pool of the lost releases is charged again"
    site.ledger.recover(world.ledger.ledger_id)
    answered(world, site, "b5", 5)
    assert world.ledger.spent("aachen-mri").mu_squared >= site.ledger.spent().mu_squared
    assert verify(world.path, public_key=world.key.public_key()).ok
    assert verify(site.path, server_key=world.key.public_key()).ok
    assert len(world.release(queries(2), batch="b6").answers) == 1, "a lost answer is asked for anew, and charged anew"
    assert world.ledger.spent("aachen-mri").releases == 6


def test_recovery_takes_only_this_ledgers_genuine_receipts(world: World, site: Hospital, tmp_path: Path) -> None:
    receipt = run_batch(world, site, "b1", 1)
    with pytest.raises(InvalidInput, match="signed"):
        world.ledger.recover([receipt.signed(Ed25519PrivateKey.generate())])
    with World.create(tmp_path / "other").ledger as other, pytest.raises(InvalidInput, match=r"^ledger of"):
        other.recover([receipt])
    assert world.ledger.recover([receipt]) == 0


def test_receipts_of_another_unit_are_caught(tmp_path: Path, world: World) -> None:
    per_patient = ledger_study(unit="patient")
    world.ledger.register_study(per_patient)
    hospital = Hospital(tmp_path / "s.sqlite", per_patient, caps=Caps(protection=PATIENT))
    with hospital.ledger as ledger:
        ledger.reserve(per_patient.id, queries(1))
        world.release(queries(1), study=per_patient.id)
        receipt = batch_receipts(world.ledger, "b1")[0]
        with pytest.raises(LedgerCorrupt, match="another unit"):
            ledger.record_receipt(receipt, public_key=world.key.public_key())


def test_a_receipt_is_read_back_exactly_and_nothing_else_is_read(world: World, site: Hospital) -> None:
    receipt = run_batch(world, site, "b1", 1)
    assert Receipt.parse(receipt.render()) == receipt
    text = receipt.render()
    for bad in (text[:-1], text.replace('"schema":1', '"schema":2'), text.replace('"after"', '"before2"'), "{}", "[]"):
        with pytest.raises(InvalidInput):
            Receipt.parse(bad)


# --- the file


def test_a_tampered_site_ledger_is_detected(world: World, site: Hospital) -> None:
    receipt = run_batch(world, site, "b1", 1)
    site.ledger.store_code(queries(1)[0].id, CODE)
    take(world, site, receipt)
    site.ledger.close()
    connection = sqlite3.connect(site.path, isolation_level=None)
    for name in ("codes_no_update", "rows_no_update"):
        connection.execute(f"DROP TRIGGER {name}")
    connection.execute("UPDATE codes SET data = zeroblob(32)")
    connection.close()
    report = verify(site.path)
    assert not report.ok
    assert report.first_bad_row == 5
    site.reopen()
    with pytest.raises(LedgerCorrupt, match="row 5"):
        site.ledger.code(queries(1)[0].id)


def test_a_receipt_by_another_key_in_a_site_ledger_is_named(world: World, site: Hospital) -> None:
    answered(world, site, "b1", 1)
    assert verify(site.path, server_key=world.key.public_key()).ok
    report = verify(site.path, server_key=Ed25519PrivateKey.generate().public_key())
    assert report.first_bad_row == site.ledger.row_count


@pytest.mark.parametrize("evidence", [lambda receipt: AlarmRecord(receipt, "rolled back"), SupersededRecord])
def test_evidence_that_the_server_did_not_sign_is_named(
    world: World, site: Hospital, evidence: Callable[[Receipt], AlarmRecord | SupersededRecord]
) -> None:
    """A reader who has a hospital's ledger and the server's key detects evidence that the hospital forged."""
    made_up = run_batch(world, site, "b1", 1).signed(Ed25519PrivateKey.generate())
    with site.ledger._writing():
        site.ledger._append(evidence(made_up))
    assert verify(site.path).ok
    assert verify(site.path, server_key=world.key.public_key()).first_bad_row == site.ledger.row_count


def test_a_site_ledger_is_not_a_server_ledger(site: Hospital, world: World) -> None:
    with pytest.raises(InvalidInput, match="server ledger"):
        Ledger.open(site.path)
    with pytest.raises(InvalidInput, match="site ledger"):
        SiteLedger.read(world.path)


def test_reading_needs_no_key(site: Hospital) -> None:
    site.ledger.reserve(site.study.id, queries(1))
    with SiteLedger.read(site.path) as reader:
        assert reader.spent().releases == 1
        with pytest.raises(InvalidInput, match="open for reading"):
            reader.reserve(site.study.id, queries(2))


# --- the site's own ledger, restored from an older copy


def put_back(site: Hospital, copy: Path, *, standing: bool = True) -> None:
    """Put a copy back as an operator does; without the standing, the whole machine was rolled back."""
    site.ledger.close()
    put_copy(copy, site.path)
    if not standing:
        standing_path(site.path).unlink()


def reopen_restored(site: Hospital, *, charge: bool = False) -> None:
    """Open the ledger as a recovery does; with ``charge``, charge what the standing beside the copy shows as lost."""
    site.ledger.close()
    site.ledger = SiteLedger.open(site.path, "aachen-mri", caps=site.caps, clock=site.clock, restored=True)
    if charge:
        site.ledger.charge_lost(SiteLedgerStanding.load(standing_path(site.path)))


def test_a_restored_copy_is_refused_until_what_it_forgot_is_charged(site: Hospital, tmp_path: Path) -> None:
    site.ledger.reserve(site.study.id, queries(1, 2))
    backup(site.path, tmp_path / "copy")
    site.ledger.reserve(site.study.id, queries(3, 4, 5))
    spent = site.ledger.spent()
    put_back(site, tmp_path / "copy")
    with pytest.raises(LedgerCorrupt, match="older copy"):
        SiteLedger.open(site.path, "aachen-mri", caps=site.caps, clock=site.clock)
    with SiteLedger.read(site.path) as reader:
        assert "older copy" in reader.alarms()[0]
    reopen_restored(site)
    kept = SiteLedgerStanding.load(standing_path(site.path))
    assert site.ledger.charge_lost(kept) == Spend(3 * spent.mu_squared / 5, 3, 3 * MECHANISM.dimension)
    assert site.ledger.spent() == spent
    assert site.ledger.alarms() == ()
    with pytest.raises(InvalidInput, match=r"^standing .*got 'row"):
        site.ledger.charge_lost(SiteLedgerStanding.load(standing_path(site.path)))
    site.reopen()
    assert site.ledger.spent() == spent
    assert site.ledger.facts("aachen").today == 5
    assert verify(site.path).ok


def test_verification_names_the_sites_own_remedy_for_a_damaged_standing(site: Hospital) -> None:
    site.ledger.reserve(site.study.id, queries(1))
    kept = standing_path(site.path)
    kept.write_bytes(kept.read_bytes()[:-20])
    (problem,) = verify(site.path).problems
    assert "consilium site recover --own-ledger" in problem.what


def test_a_standing_that_this_user_may_not_read_is_no_reason_to_charge_all(
    site: Hospital, monkeypatch: pytest.MonkeyPatch
) -> None:
    def locked(path: Path) -> bytes:
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(Path, "read_bytes", locked)
    with pytest.raises(InvalidInput, match=rf"give user {os.geteuid()} access") as refused:
        SiteLedgerStanding.load(standing_path(site.path))
    assert "recover" not in str(refused.value)


def test_tightened_caps_and_replaced_keys_that_an_older_copy_lacks_are_on_record_again(
    site: Hospital, tmp_path: Path
) -> None:
    """Ledger and site.toml come from one backup; the standing is newer."""
    wide, tight = site.caps, replace(site.caps, budget=Budget(epsilon=2.0, delta=1e-3))
    backup(site.path, tmp_path / "copy")
    site.ledger.take_sealing_key("b" * 64, replaces="a" * 64)
    site.reopen(tight)
    put_back(site, tmp_path / "copy")
    site.caps = wide
    reopen_restored(site, charge=True)
    with pytest.raises(InvalidInput, match="replaced"):
        site.ledger.check_sealing_key("a" * 64)
    site.ledger.check_sealing_key("b" * 64)
    site.ledger.close()
    with pytest.raises(InvalidInput, match="replaced by tighter ones"):
        SiteLedger.open(site.path, "aachen-mri", caps=wide, clock=site.clock)
    site.reopen(tight)
    assert verify(site.path).ok


@pytest.mark.parametrize("kept", [True, False])
def test_a_network_that_may_leave_stays_in_a_patients_epsilon_after_a_recovery(
    site: Hospital, tmp_path: Path, kept: bool
) -> None:
    """Without a standing nobody can say whether such a network was made since, so no figure is printed."""
    event = TrainingEvent(Sampling.FIXED_PARTITION, Fraction(1), Fraction(3), 4)

    def train(name: str, strategy: str) -> None:
        training = sha256_bytes(name.encode())
        site.ledger.record_training(TrainingRecord(training, 0, "d" * 64, strategy, (event,)))

    def lines() -> tuple[str, ...]:
        return site.ledger.facts("aachen", present=[]).patient_lines

    train("a teacher", "dp-sgd")
    train("leaves", "adapted-dp-sgd")
    backup(site.path, tmp_path / "copy")
    train("leaves too", "adapted-dp-mac")
    adapted = site.ledger.trainings().adapted(delta=1e-3, neighbours=Neighbours.REPLACE_ONE)
    assert adapted is not None
    put_back(site, tmp_path / "copy", standing=kept)
    with SiteLedger.read(site.path) as reader:
        assert not any("ε =" in line for line in reader.facts("aachen", present=[]).patient_lines), "in doubt"
    reopen_restored(site)
    site.ledger.charge_lost(SiteLedgerStanding.load(standing_path(site.path)) if kept else None)
    if kept:
        assert site.ledger.trainings().adapted(delta=1e-3, neighbours=Neighbours.REPLACE_ONE) == adapted
        assert site.ledger.drawn(sha256_bytes(b"leaves too")) == event.steps
        assert f"{adapted}" in " ".join(lines())
    else:
        assert lines()
        assert not any("ε =" in line for line in lines())
        printed = site.ledger.facts("aachen", present=[]).to_json()
        assert SiteFacts.from_json(printed).patient_lines == lines(), "whoever reads the report prints no figure either"
    assert verify(site.path).ok


def test_caps_that_a_person_states_for_a_recovery_stay(site: Hospital, tmp_path: Path) -> None:
    backup(site.path, tmp_path / "copy")
    site.reopen(replace(site.caps, queries_per_day=3))
    put_back(site, tmp_path / "copy")
    site.caps = replace(site.caps, queries_per_day=70)
    reopen_restored(site, charge=True)
    site.reopen()
    assert site.ledger.facts("aachen").per_day == 70


def test_a_veto_may_be_among_what_was_lost_so_every_study_waits(site: Hospital, tmp_path: Path) -> None:
    backup(site.path, tmp_path / "copy")
    site.ledger.reserve(site.study.id, queries(1))
    site.ledger.decide(site.study.id, "withdraw")
    put_back(site, tmp_path / "copy")
    reopen_restored(site, charge=True)
    assert site.ledger.stopped(site.study.id) == "withdraw", "the standing knows it"
    with pytest.raises(Refused, match="paused"):
        site.ledger.reserve(site.study.id, queries(2))
    with pytest.raises(InvalidInput, match="for good"):
        site.ledger.decide(site.study.id, "resume")


def test_without_a_standing_every_study_waits_for_a_person(site: Hospital, tmp_path: Path) -> None:
    backup(site.path, tmp_path / "copy")
    site.ledger.reserve(site.study.id, queries(1))
    put_back(site, tmp_path / "copy", standing=False)
    reopen_restored(site)
    site.ledger.charge_lost(None)
    assert site.ledger.stopped(site.study.id) == "pause"
    site.ledger.decide(site.study.id, "resume")
    assert site.ledger.stopped(site.study.id) is None


def test_a_query_that_a_contradicting_receipt_showed_is_charged_again_after_a_restore_of_both_ledgers(
    site: Hospital, world: World, tmp_path: Path
) -> None:
    """The site's copy lacks the acceptance and the alarm, and the server has forgotten the release unnoticed."""
    old = ledger_world.saved(world, tmp_path / "old")
    answered(world, site, "b0", 9)
    held = site.ledger.receipts()
    backup(site.path, tmp_path / "copy")
    ledger_world.rolled_back(world, old)
    told = run_batch(world, site, "b1", 1)
    with pytest.raises(LedgerCorrupt, match="rolled back"):
        take(world, site, told)
    site.ledger.recover(world.ledger.ledger_id)
    put_back(site, tmp_path / "copy")
    reopen_restored(site, charge=True)
    site.ledger.decide(site.study.id, "resume")
    ledger_world.rolled_back(world, old)
    both_recover(world, site, held)
    run_batch(world, site, "b2", 1)
    assert len(world.answers.drawn) == site.ledger.spent().releases == 3


def test_receipts_of_lost_acceptances_are_part_of_what_was_charged_and_no_more(
    site: Hospital, world: World, tmp_path: Path
) -> None:
    key = world.key.public_key()
    answered(world, site, "b1", 1, 2)
    backup(site.path, tmp_path / "copy")
    lost = [run_batch(world, site, "b2", 3), run_batch(world, site, "b3", 4)]
    spent = site.ledger.spent()
    put_back(site, tmp_path / "copy")
    reopen_restored(site)
    # The receipt contradicts the copy until the loss is charged.
    with pytest.raises(LedgerCorrupt, match="never accepted"):
        take(world, site, lost[0])
    site.ledger.charge_lost(SiteLedgerStanding.load(standing_path(site.path)))
    site.reopen()
    for receipt in lost:
        take(world, site, receipt)
    assert site.ledger.spent() == spent == world.ledger.spent("aachen-mri")
    assert site.ledger.facts("aachen").receipted == 4
    world.release(queries(9), batch="b4")  # the site never accepted this one, before the loss or after
    with pytest.raises(LedgerCorrupt, match="never accepted"):
        take(world, site, receipt_for(world, "b4"))
    assert verify(site.path, server_key=key).kinds["restored"] == 1


def test_an_older_copy_takes_no_receipt_whose_total_is_larger_than_all_that_it_charged(
    site: Hospital, world: World, tmp_path: Path
) -> None:
    """After a recovery of the server, a receipt may begin at any row. This receipt omits the row of the query lost
    here.
    """
    key = world.key.public_key()
    site.ledger.record_receipt(run_batch(world, site, "b1", 1), public_key=key)
    old = saved(site, tmp_path / "old")
    run_batch(world, site, "b2", 2)
    rolled_back(site, old)
    site.reopen()  # the standing is as old, so nothing here shows the loss
    site.ledger.recover(world.ledger.ledger_id)
    late = run_batch(world, site, "b3", 3)
    with pytest.raises(ReceiptContradiction, match="larger than all"):
        site.ledger.record_receipt(late, public_key=key)
    site.ledger.charge_lost(None)
    site.ledger.decide(site.study.id, "resume")
    site.ledger.record_receipt(late, public_key=key)
    assert site.ledger.alarms() == ()
    assert site.ledger.spent().mu_squared >= world.ledger.spent("aachen-mri").mu_squared


def test_a_draw_that_the_restored_server_and_the_restored_site_both_lost_is_charged_once(
    site: Hospital, world: World, tmp_path: Path
) -> None:
    key = world.key.public_key()
    answered(world, site, "b1", 1)
    backup(site.path, tmp_path / "site")
    backup(world.path, tmp_path / "server")
    answered(world, site, "b2", 2, 3)
    open_restored(world, tmp_path / "server")
    world.ledger.recover(())
    put_back(site, tmp_path / "site")
    reopen_restored(site, charge=True)
    site.ledger.decide(site.study.id, "resume")
    answered(world, site, "b3", 2, 3, 4)
    site.reopen()
    assert site.ledger.spent() == site.ledger.books.spent_in(site.study.id) == world.ledger.spent("aachen-mri")
    assert site.ledger.spent().releases == 6
    assert verify(site.path, server_key=key).ok


@pytest.mark.parametrize("restored", [False, True])
def test_a_draw_that_a_restored_server_lost_counts_in_its_study_whichever_study_hears_of_it(
    site: Hospital, world: World, tmp_path: Path, restored: bool
) -> None:
    key, other = world.key.public_key(), ledger_study("second")
    world.ledger.register_study(other)
    site.ledger.consent(other)
    backup(world.path, tmp_path / "server")
    backup(site.path, tmp_path / "site")

    def ask(study: Study, number: int) -> None:
        site.ledger.reserve(study.id, queries(number), ledger=world.ledger.ledger_id)
        world.release(queries(number), batch=f"b{world.ledger.row_count}", study=study.id)

    ask(other, 1)
    open_restored(world, tmp_path / "server")
    world.ledger.recover(())
    if restored:
        put_back(site, tmp_path / "site")
        reopen_restored(site, charge=True)
        for study in (other, world.study):
            site.ledger.decide(study.id, "resume")
    ask(world.study, 2)
    take(world, site, *receipts_of(world.ledger, "aachen"))
    ask(other, 1)
    take(world, site, receipts_of(world.ledger, "aachen")[-1])
    assert site.ledger.books.spent_in(other.id) == world.ledger.books.spent_in(other.id, "aachen-mri")
    assert site.ledger.books.spent_in(world.study.id).releases >= 1
    assert site.ledger.spent() == world.ledger.spent("aachen-mri")
    assert verify(site.path, server_key=key).ok


def test_a_lost_release_counts_in_its_study_though_a_receipt_shows_a_later_one_of_the_same_query(
    site: Hospital, world: World, tmp_path: Path
) -> None:
    other = ledger_study("second")
    world.ledger.register_study(other)
    site.ledger.consent(other)
    old = ledger_world.saved(world, tmp_path / "old")

    def ask(study: Study, number: int, batch: str, *, told: str = "aachen") -> Receipt:
        site.ledger.reserve(study.id, queries(number), ledger=world.ledger.ledger_id)
        world.release(queries(number), batch=batch, study=study.id)
        return receipt_for(world, batch, told)

    elsewhere = ask(other, 1, "b1", told="bergen")
    ledger_world.rolled_back(world, old)  # nobody notices, so the query is asked again
    take(world, site, ask(other, 1, "b2"))
    world.ledger.recover([elsewhere])
    take(world, site, ask(world.study, 2, "b3"))
    assert world.ledger.books.spent_in(other.id, "aachen-mri").releases == 2
    assert site.ledger.books.spent_in(other.id) == world.ledger.books.spent_in(other.id, "aachen-mri")
    assert site.ledger.spent() == world.ledger.spent("aachen-mri")


def test_without_a_standing_all_that_was_left_is_spent_and_a_new_cap_goes_on(
    site: Hospital, world: World, tmp_path: Path
) -> None:
    cap = max_mu_squared(AccountantName.EXACT, BUDGET)
    old = saved(site, tmp_path / "old")
    lost = run_batch(world, site, "b1", 1, 2)
    rolled_back(site, old)
    site.reopen()  # the standing is as old, so nothing here shows the loss
    with pytest.raises(LedgerCorrupt, match="never accepted"):
        take(world, site, lost)
    site.ledger.charge_lost(None)
    assert site.ledger.spent().mu_squared == cap
    take(world, site, lost)
    assert site.ledger.spent() == Spend(cap, 2, 2 * MECHANISM.dimension)
    assert site.ledger.alarms() == ()
    site.ledger.decide(site.study.id, "resume")
    with pytest.raises(Refused, match="budget"):
        site.ledger.reserve(site.study.id, queries(3))
    site.reopen(replace(site.caps, budget=Budget(epsilon=12.0, delta=1e-3)))
    other = ledger_study(name="another")
    site.ledger.consent(other)
    site.clock.now += timedelta(days=1)
    site.ledger.reserve(other.id, queries(4))


def test_a_ledger_that_is_gone_or_another_one_does_not_begin_anew(site: Hospital, tmp_path: Path) -> None:
    site.ledger.reserve(site.study.id, queries(1))
    site.ledger.close()
    site.path.rename(tmp_path / "aside")
    with pytest.raises(LedgerCorrupt, match="gone"):
        SiteLedger.open(site.path, "aachen-mri", caps=site.caps)
    fresh = tmp_path / "fresh.sqlite"
    SiteLedger.open(fresh, "aachen-mri", caps=site.caps).close()
    fresh.rename(site.path)
    fresh.with_suffix(".key").rename(site.path.with_suffix(".key"))
    with pytest.raises(LedgerCorrupt, match="another ledger"):
        SiteLedger.open(site.path, "aachen-mri", caps=site.caps)
    (tmp_path / "aside").rename(site.path.with_name("aside.sqlite"))


def test_a_key_restored_without_its_ledger_and_standing_begins_no_ledger_with_nothing_spent(site: Hospital) -> None:
    site.ledger.reserve(site.study.id, queries(1))
    site.ledger.close()
    key = site.path.with_suffix(".key").read_bytes()
    for path in (site.path, standing_path(site.path)):
        path.unlink()
    with pytest.raises(InvalidInput, match=r"patient pool is missing, but its signing key is here.*site recover"):
        SiteLedger.open(site.path, "aachen-mri", caps=site.caps)
    assert not site.path.exists()
    assert site.path.with_suffix(".key").read_bytes() == key, "the refusal leaves the key for the copy of its ledger"


@pytest.mark.parametrize("killed_at", ["Chain.create", "Path.replace"])
def test_a_kill_between_a_new_sites_key_and_its_ledger_is_no_loss(
    tmp_path: Path, killed_at: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After ``Chain.create`` a key exists without a ledger; after ``Path.replace`` the ledger's key is only a draft."""
    path = tmp_path / "site-ledger.sqlite"
    owner, name = {"Chain.create": (Chain, "create"), "Path.replace": (Path, "replace")}[killed_at]
    with monkeypatch.context() as patched:
        patched.setattr(owner, name, Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            SiteLedger.open(path, "aachen-mri", caps=Caps())
    assert path.exists() is (killed_at == "Path.replace")
    with SiteLedger.open(path, "aachen-mri", caps=Caps()) as ledger:
        assert ledger.public_key == public_hex(load_signing_key(path.with_suffix(".key")))
    assert not list(tmp_path.glob("*.new"))
    SiteLedger.open(path, "aachen-mri", caps=Caps()).close()


def test_a_kill_between_a_charge_and_its_standing_is_no_loss(site: Hospital) -> None:
    site.ledger.reserve(site.study.id, queries(1))
    before = standing_path(site.path).read_bytes()
    site.ledger.reserve(site.study.id, queries(2))
    site.ledger.close()
    standing_path(site.path).write_bytes(before)  # killed before the standing was replaced
    site.reopen()
    assert site.ledger.spent().releases == 2
    assert site.ledger.alarms() == ()


# --- a machine that was rolled back with its standing, and recovered with one kept elsewhere


def saved(site: Hospital, folder: Path) -> Path:
    folder.mkdir()
    copy_of(site.path, folder / site.path.name)
    return folder


def rolled_back(site: Hospital, folder: Path) -> None:
    site.ledger.close()
    put_copy(folder / site.path.name, site.path, standing=True)


def recovered(site: Hospital, *standings: Path) -> None:
    reopen_restored(site)
    site.ledger.charge_lost(*map(SiteLedgerStanding.load, standings))
    site.reopen()


@pytest.mark.parametrize("after", [1, 3, 5])
def test_what_a_kept_standing_accepted_since_the_fork_is_charged_beside_what_was_accepted_since(
    site: Hospital, tmp_path: Path, after: int
) -> None:
    site.ledger.reserve(site.study.id, queries(9))
    old = saved(site, tmp_path / "old")
    for number in range(3):
        site.ledger.reserve(site.study.id, queries(number))
    kept = saved(site, tmp_path / "new") / "site-ledger.standing"
    rolled_back(site, old)
    site.reopen()
    for number in range(10, 10 + after):
        site.ledger.reserve(site.study.id, queries(number))
    recovered(site, kept)
    one = MECHANISM.mu_squared(site.caps.protection)
    assert site.ledger.spent() == Spend((4 + after) * one, 4 + after, (4 + after) * MECHANISM.dimension)
    assert site.ledger.books.spent_in(site.study.id) == site.ledger.spent()
    assert site.ledger.facts("aachen").today == 4 + after
    with pytest.raises(InvalidInput, match=r"^standing .*got 'row"):
        recovered(site, kept)
    site.reopen()
    assert site.ledger.spent().releases == 4 + after, "the same standing is charged once"
    assert verify(site.path).ok


def test_two_lost_lines_of_a_site_that_look_alike_are_both_charged(site: Hospital, tmp_path: Path) -> None:
    old = saved(site, tmp_path / "old")
    for name in ("first", "second"):
        site.ledger.reserve(site.study.id, queries(1, 2))
        saved(site, tmp_path / name)
        rolled_back(site, old)
        site.reopen()
    recovered(site, *(tmp_path / name / "site-ledger.standing" for name in ("first", "second")))
    assert site.ledger.spent().releases == 4


def test_an_earlier_and_a_later_standing_of_the_same_lost_rows_are_charged_once(site: Hospital, tmp_path: Path) -> None:
    old = saved(site, tmp_path / "old")
    site.ledger.reserve(site.study.id, queries(1))
    first = saved(site, tmp_path / "first") / "site-ledger.standing"
    site.ledger.reserve(site.study.id, queries(2))
    second = saved(site, tmp_path / "second") / "site-ledger.standing"
    rolled_back(site, old)
    recovered(site, first, second)
    assert site.ledger.spent().releases == 2
    rolled_back(site, old)
    recovered(site, first)
    recovered(site, second)
    assert site.ledger.spent().releases == 2
    rolled_back(site, old)
    recovered(site, second)
    with pytest.raises(InvalidInput, match="shows no further loss"):
        recovered(site, first)
    site.reopen()
    assert site.ledger.spent().releases == 2


@pytest.mark.parametrize("lost", ["a veto", "the end for good", "a patient", "a remark"])
def test_a_copy_that_lost_what_charges_nothing_is_refused_all_the_same(
    site: Hospital, tmp_path: Path, lost: str
) -> None:
    site.ledger.reserve(site.study.id, queries(1))
    site.ledger.store_code(queries(1)[0].id, CODE)
    backup(site.path, tmp_path / "copy")
    match lost:
        case "a veto":
            site.ledger.decide(site.study.id, "pause")
        case "the end for good":
            site.ledger.decide(site.study.id, "withdraw")
        case "a patient":
            site.ledger.withdraw_patient(slot=3, voter=0, subject="c" * 64, weights="d" * 64)
        case _:
            site.ledger.note("a remark")
    put_back(site, tmp_path / "copy")
    with pytest.raises(LedgerCorrupt, match=r"older copy.*site recover --own-ledger"):
        SiteLedger.open(site.path, "aachen-mri", caps=site.caps, clock=site.clock)
    recovered(site, standing_path(site.path))
    assert site.ledger.spent().releases == 1
    assert site.ledger.stopped(site.study.id) == ("withdraw" if lost == "the end for good" else "pause")
    if lost == "a patient":
        assert site.ledger.withdrawn_voters() == {0}
        assert [(found.subject, found.weights) for _, found in site.ledger.books.teachers.patients.values()] == [
            ("c" * 64, "d" * 64)
        ]
        assert site.ledger.code(queries(1)[0].id) is None, "the code of before the withdrawal is deleted again"
    assert verify(site.path).ok


def test_a_sites_recovery_that_dies_before_its_standing_is_written_is_finished_by_the_next_opening(
    site: Hospital, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    backup(site.path, tmp_path / "copy")
    site.ledger.reserve(site.study.id, queries(1))
    put_back(site, tmp_path / "copy")
    kept = standing_path(site.path)
    reopen_restored(site)

    def die(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(site.ledger, "_keep_standing", die)
        with pytest.raises(KeyboardInterrupt):
            site.ledger.charge_lost(SiteLedgerStanding.load(kept))
    site.reopen()
    assert site.ledger.spent().releases == 1
    assert SiteLedgerStanding.load(kept).head == site.ledger.head()


def test_caps_changed_before_a_recovery_leave_the_standing_that_tells(site: Hospital, tmp_path: Path) -> None:
    """Opening a copy writes a row if site.toml has changed since; the standing must survive that."""
    backup(site.path, tmp_path / "copy")
    site.ledger.reserve(site.study.id, queries(1))
    put_back(site, tmp_path / "copy")
    caps = replace(site.caps, queries_per_day=7)
    SiteLedger.open(site.path, "aachen-mri", caps=caps, clock=site.clock, restored=True).close()
    with pytest.raises(LedgerCorrupt, match="older copy"):
        SiteLedger.open(site.path, "aachen-mri", caps=caps, clock=site.clock)
