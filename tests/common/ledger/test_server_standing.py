"""Tests that a server ledger restored from an older copy is noticed before its next release, and lost charges
stay.

The oracle is how often noise was drawn: every draw of a query is one release that its patients pay for.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from itertools import permutations
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from typer.testing import CliRunner

from client.ledger import site_receipts
from common.document import Document
from common.errors import InvalidInput, LedgerCorrupt, Refused, StorageFailed
from common.events import EventLog
from common.ledger.keys import create_signing_key, load_signing_key, public_hex
from common.ledger.receipts import Receipt
from common.ledger.records import LostRecord
from common.ledger.rollback_guard import ServerStanding, standing_path
from common.ledger.rows import SignedHead, head_message
from common.ledger.server_state import ServerBooks
from common.messages import OfferReply
from common.privacy.mechanism import Budget
from consilium.cli.ledger import app
from server.aggregation.receipts import ReceiptDelivery
from server.ledger.backup import backup
from server.ledger.recovery import recover_charges, rotate_signing_key
from server.ledger.server_ledger import Ledger
from server.ledger.verify import verify
from server.study.workspace import Site
from tests.backups import anothers_standing
from tests.commands import refusal_of, typed
from tests.common.ledger.ledger_world import (
    SITES,
    Hospital,
    World,
    declare,
    deleted,
    deliver,
    ledger_study,
    make_mechanism,
    make_query,
    put_back,
    queries,
    rolled_back,
    run_batch,
    saved,
)
from tests.worlds import receipts_of

MECHANISM = make_mechanism(room_for=10)
POOL = "aachen-mri"


def test_an_older_server_ledger_releases_nothing_until_what_it_lost_is_charged(world: World, tmp_path: Path) -> None:
    world.release([make_query(1, MECHANISM)], batch="b1")
    backup(world.path, tmp_path / "monday.sqlite")
    world.release([make_query(2, MECHANISM), make_query(3, MECHANISM)], batch="b2")  # no receipt has left yet
    put_back(world, tmp_path / "monday.sqlite")
    with pytest.raises(LedgerCorrupt, match="consilium ledger recover"):
        Ledger.open(world.path, signing_key=world.key)
    with Ledger.open(world.path) as readable:
        assert "older copy" in (readable.forgotten() or "")
    found = verify(world.path)
    (problem,) = map(str, found.problems)
    assert re.search(rf"^row {found.rows + 1}: .*\brow {found.rows + 2}: .*cut off", problem)

    recovered(world)
    assert world.ledger.lost()[POOL].releases == 2
    world.release([make_query(2, MECHANISM)], batch="b3")
    assert len(world.answers.drawn) == 4
    for pool in ("aachen-mri", "bergen-mri", "cadiz-mri"):
        assert world.ledger.spent(pool).releases == 4, "every draw is charged"
        assert world.ledger.spent(pool).mu_squared == 4 * MECHANISM.mu_squared(world.ledger.pools()[0].protection)
        assert world.ledger.books.spent_in(world.study.id, pool).releases == 4
    assert verify(world.path, public_key=world.key.public_key()).ok


def test_the_budget_holds_over_draws_that_a_restored_server_lost(world: World, tmp_path: Path) -> None:
    backup(world.path, tmp_path / "monday.sqlite")
    world.release([make_query(n, MECHANISM) for n in range(9)], batch="b1")
    put_back(world, tmp_path / "monday.sqlite")
    recovered(world)
    result = world.release([make_query(n, MECHANISM) for n in range(9)], batch="b2")
    assert len(result.answers) == 1, "ten draws fit the budget, and nine were made"


def test_a_site_counts_the_draw_that_a_restored_server_lost_before_its_receipt(
    world: World, site: Hospital, tmp_path: Path
) -> None:
    backup(world.path, tmp_path / "monday.sqlite")
    run_batch(world, site, "b1", 1)
    put_back(world, tmp_path / "monday.sqlite")
    recovered(world)
    run_batch(world, site, "b2", 1)
    deliver(world, site)
    assert len(world.answers.drawn) == 2
    assert_both_count(world, site, 2)


def assert_both_count(world: World, site: Hospital, releases: int) -> None:
    assert site.ledger.alarms() == ()
    assert site.ledger.spent().releases == releases
    assert site.ledger.spent().mu_squared == world.ledger.spent(POOL).mu_squared
    assert verify(site.path, server_key=world.key.public_key()).ok


def test_a_server_cannot_charge_a_site_for_more_losses_than_it_accepted(
    world: World, site: Hospital, tmp_path: Path
) -> None:
    backup(world.path, tmp_path / "monday.sqlite")
    world.release([make_query(n, MECHANISM) for n in range(2, 6)], batch="b1")  # this site never accepted these
    put_back(world, tmp_path / "monday.sqlite")
    recovered(world)
    run_batch(world, site, "b2", 1)
    with pytest.raises(LedgerCorrupt, match="charges as lost more"):
        deliver(world, site)
    assert site.ledger.spent().releases == 1
    assert len(site.ledger.alarms()) == 1


@pytest.mark.parametrize("known", [False, True], ids=["no receipt", "its receipt"])
def test_a_site_counts_the_draw_that_only_another_sites_receipt_recovered(
    world: World, site: Hospital, tmp_path: Path, known: bool
) -> None:
    """The machine is rolled back with its standing and recovered with receipts, so the row's kind is ``recovered``."""
    monday = saved(world, tmp_path / "monday")
    run_batch(world, site, "b1", 1)
    if known:
        deliver(world, site)
    receipts = receipts_of(world.ledger, "bergen")
    rolled_back(world, monday)
    recovered(world, receipts=receipts)
    if known:
        site.ledger.recover(world.ledger.ledger_id)
    run_batch(world, site, "b2", 1)
    deliver(world, site)
    assert len(world.answers.drawn) == 2
    assert_both_count(world, site, 2)


@pytest.mark.parametrize("by_receipt", [True, False])
def test_a_receipt_that_comes_after_its_release_was_charged_as_lost_stops_nobody_for_good(
    world: World, site: Hospital, tmp_path: Path, by_receipt: bool
) -> None:
    """The server's row ``recovered`` shows this site which release it charges; a row ``lost`` does not."""
    key, monday = world.key.public_key(), saved(world, tmp_path / "monday")
    late = run_batch(world, site, "b1", 1)
    if by_receipt:
        receipts = receipts_of(world.ledger, "bergen")
        rolled_back(world, monday)
        recovered(world, receipts=receipts)
    else:
        put_back(world, monday / "ledger.sqlite")
        recovered(world)
    run_batch(world, site, "b2", 1)
    deliver(world, site)
    for _ in range(2):
        with suppress(Refused, LedgerCorrupt):
            site.ledger.record_receipt(late, public_key=key)
    assert len(site.ledger.alarms()) == (not by_receipt)
    if not by_receipt:
        site.ledger.recover(world.ledger.ledger_id)
    for number in (3, 4):
        run_batch(world, site, f"b{number}", number)
        deliver(world, site, in_spite_of=(Refused,))
        site.reopen()
    counted_again = not by_receipt  # nothing shows this site that the late receipt and the row are of one release
    assert len(world.answers.drawn) == world.ledger.spent(POOL).releases == 4
    assert site.ledger.spent().releases == site.ledger.books.spent_in(world.study.id).releases == 4 + counted_again
    assert site.ledger.alarms() == ()
    assert verify(site.path, server_key=key).ok


def test_a_row_that_names_a_lost_release_without_charging_it_makes_no_late_receipt_free(
    world: World, site: Hospital, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    key, monday = world.key.public_key(), saved(world, tmp_path / "monday")
    late = run_batch(world, site, "b1", 1)
    receipts = receipts_of(world.ledger, "bergen")
    rolled_back(world, monday)
    monkeypatch.setattr(ServerBooks, "_recovered", lambda *_: None)
    recovered(world, receipts=receipts)
    run_batch(world, site, "b2", 1)
    deliver(world, site)
    assert "recovered" in {link.kind for receipt in site.ledger.receipts() for link in receipt.links}
    assert site.ledger.spent().releases == 1
    with pytest.raises(LedgerCorrupt, match="rolled back"):
        site.ledger.record_receipt(late, public_key=key)
    site.ledger.recover(world.ledger.ledger_id)
    assert site.ledger.spent().releases == 2
    run_batch(world, site, "b3", 2)
    with pytest.raises(LedgerCorrupt, match="lacks charges"):
        deliver(world, site, in_spite_of=(Refused,))


def test_a_ledger_of_a_version_that_counted_less_opens_and_accepts_no_more(
    world: World, site: Hospital, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Up to the version before, a site counted the rows of kind ``lost`` only, and could accept one query too many."""
    monday = saved(world, tmp_path / "monday")
    with monkeypatch.context() as before:
        before.setattr(Receipt, "losses", property(lambda self: sum(link.kind == "lost" for link in self.links)))
        before.setattr(site_receipts, "_check_paid", lambda receipt, books: None)
        run_batch(world, site, "b1", 1)
        receipts = receipts_of(world.ledger, "bergen")
        rolled_back(world, monday)
        recovered(world, receipts=receipts)
        run_batch(world, site, "b2", 1)
        deliver(world, site, in_spite_of=(LedgerCorrupt, Refused))
        assert site.ledger.alarms()
        site.ledger.recover(world.ledger.ledger_id)
        run_batch(world, site, "b3", 2)
        deliver(world, site, in_spite_of=(LedgerCorrupt, Refused))
        counted = site.ledger.spent().releases
        for number in range(3, 13 - counted):
            site.ledger.reserve(world.study.id, queries(number))
    site.reopen()
    assert site.ledger.spent().releases > 10
    with pytest.raises(Refused, match="budget"):
        site.ledger.reserve(world.study.id, queries(30))


def test_losses_that_raised_an_alarm_count_at_the_site_once_a_person_has_ended_it(
    world: World, site: Hospital, tmp_path: Path
) -> None:
    """A standing without marks, as versions before 0.3.0 wrote it, charges more than was lost, so the site stops."""
    run_batch(world, site, "b1", 1)
    deliver(world, site)
    backup(world.path, tmp_path / "monday.sqlite")
    run_batch(world, site, "b2", 2)
    text = json.loads(standing_path(world.path).read_text())
    for name in ("marks", "signature"):
        del text[name]
    put_back(world, tmp_path / "monday.sqlite")
    standing_path(world.path).write_text(json.dumps(text))
    recovered(world, standing_path(world.path))
    run_batch(world, site, "b3", 2)
    with pytest.raises(LedgerCorrupt, match="charges as lost more"):
        deliver(world, site, in_spite_of=(Refused,))
    site.ledger.recover(world.ledger.ledger_id)
    run_batch(world, site, "b4", 3)
    deliver(world, site, in_spite_of=(Refused,))
    assert len(world.answers.drawn) == 4
    assert site.ledger.spent().releases >= 4, "a draw is charged at no site"
    assert_both_count(world, site, site.ledger.spent().releases)


def test_recovery_charges_a_draw_once_whether_a_receipt_or_the_standing_tells_of_it(
    world: World, tmp_path: Path
) -> None:
    backup(world.path, tmp_path / "monday.sqlite")
    world.release([make_query(1, MECHANISM)], batch="b1")
    receipts = receipts_of(world.ledger, "aachen")
    world.release([make_query(2, MECHANISM)], batch="b2")
    put_back(world, tmp_path / "monday.sqlite")
    world.ledger = Ledger.open(world.path, signing_key=world.key, restored=True)
    assert world.ledger.recover(receipts) == 1
    assert world.ledger.spent(POOL).releases == 2
    assert world.ledger.books.spent_in(world.study.id, POOL).releases == 2, "in the study's own sum, too"
    assert world.ledger.lost()[POOL].releases == 1
    world.reopen()
    assert world.ledger.recover(receipts) == 0
    assert world.ledger.spent(POOL).releases == 2


def test_the_command_recovers_from_a_standing_alone_and_restores_pools_declared_since(tmp_path: Path) -> None:
    key = create_signing_key(tmp_path / "ledger.key")
    world = World.create(tmp_path, key=key, pools=False)
    backup(world.path, tmp_path / "monday.sqlite")
    declare(world.ledger)
    world.release([make_query(1, MECHANISM)])
    put_back(world, tmp_path / "monday.sqlite")
    kept = tmp_path / "kept.standing"
    shutil.move(world.path.with_suffix(".standing"), kept)  # it was kept on another disk
    done = typed(app, "recover", world.path, "--key", tmp_path / "ledger.key", "--standing", kept)
    assert f"pool {POOL}: 1 " in done.stdout
    with Ledger.open(world.path, signing_key=key) as ledger:
        assert {pool.pool for pool in ledger.pools()} == {"aachen-mri", "bergen-mri", "cadiz-mri"}
        assert ledger.spent(POOL).releases == 1


def test_recovery_without_receipts_and_standing_is_refused(tmp_path: Path) -> None:
    key = create_signing_key(tmp_path / "ledger.key")
    Ledger.create(tmp_path / "ledger.sqlite", signing_key=key).close()
    refusal_of(app, "recover", tmp_path / "ledger.sqlite", "--key", tmp_path / "ledger.key")


def test_recovery_of_the_newest_copy_says_that_nothing_is_missing(world: World, tmp_path: Path) -> None:
    world.release([make_query(1, MECHANISM)])
    backup(world.path, tmp_path / "tuesday.sqlite")
    put_back(world, tmp_path / "tuesday.sqlite")
    with pytest.raises(InvalidInput, match=r"names its newest row.*go on without a recovery") as refused:
        recover_charges(world.path, signing_key=world.key, receipts=(), standing=None, studies=())
    assert "neither" not in str(refused.value)
    Ledger.open(world.path, signing_key=world.key).close()


def test_no_new_ledger_is_created_where_a_standing_shows_a_missing_one(world: World) -> None:
    world.release([make_query(1, MECHANISM)])
    deleted(world)
    with pytest.raises(LedgerCorrupt, match="standing exists"):
        Ledger.create(world.path, signing_key=world.key)


def test_a_ledger_of_another_id_does_not_pass_for_the_one_whose_standing_lies_there(
    world: World, tmp_path: Path
) -> None:
    world.release([make_query(1, MECHANISM)])
    other = World.create(tmp_path / "other")
    other.ledger.close()
    put_back(world, other.path)
    with pytest.raises(LedgerCorrupt, match="another ledger"):
        Ledger.open(world.path, signing_key=other.key)


@pytest.mark.parametrize("lost", [False, True])
def test_the_error_about_another_ledgers_standing_says_how_to_replace_it(
    world: World, tmp_path: Path, lost: bool
) -> None:
    world.release([make_query(1, MECHANISM)])
    other = World.create(tmp_path / "other")
    for one in (world, other):
        one.ledger.close()
    beside = standing_path(world.path)
    shutil.copy(beside, tmp_path / "own")
    shutil.copy(standing_path(other.path), beside)
    recover = partial(recover_charges, world.path, signing_key=world.key, receipts=(), standing=None, studies=())
    with pytest.raises(InvalidInput) as refused:
        recover()
    assert f"replace {beside} by the standing file of this ledger" in str(refused.value)
    assert f"delete {beside}, and --charge-all" in str(refused.value)
    if lost:
        beside.unlink()
        recover(charge_all=True)
    else:
        shutil.copy(tmp_path / "own", beside)
    with Ledger.open(world.path, signing_key=world.key) as opened:
        assert (opened.remaining(POOL) == 0) is lost


def test_the_standing_is_durable_before_an_answer_is_returned_and_a_failed_one_is_made_good(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError("no space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("common.ledger.rollback_guard.write_atomically", full)
        with pytest.raises(OSError, match="no space"):
            world.release([make_query(1, MECHANISM)])
    assert POOL not in ServerStanding.load(standing_path(world.path)).pools
    world.ledger.note("anything at all is written")
    standing = ServerStanding.load(standing_path(world.path))
    assert standing.pools[POOL] == world.ledger.spent(POOL)
    assert len(world.answers.drawn) == 1


def test_a_standing_left_behind_by_a_crash_is_made_good_at_the_next_opening(world: World) -> None:
    kept = standing_path(world.path).read_bytes()
    world.release([make_query(1, MECHANISM)])
    standing_path(world.path).write_bytes(kept)
    world.reopen()
    assert ServerStanding.load(standing_path(world.path)).pools[POOL].releases == 1


def test_a_ledger_that_charged_does_not_go_on_without_its_standing(world: World) -> None:
    """A backup has no standing. Restored where the standing is lost, it cannot show whether it is the newest copy."""
    world.release([make_query(1, MECHANISM)])
    receipts = receipts_of(world.ledger, "aachen")
    standing_path(world.path).unlink()
    with pytest.raises(LedgerCorrupt, match=r"standing .*missing.*consilium ledger recover"):
        world.reopen()
    with Ledger.open(world.path) as copy:
        assert copy.study_spending(world.study.id).doubt is None, "a copy in no study's folder has no standing"
        (world.path.parent / "keys").mkdir()
        (world.path.parent / "keys" / "ledger.key").touch()
        assert "missing" in (copy.study_spending(world.study.id).doubt or "")
    with Ledger.open(world.path, signing_key=world.key, restored=True) as ledger:
        assert ledger.recover(receipts) == 0
    world.reopen()
    assert world.ledger.spent(POOL).releases == 1


def test_a_standing_on_another_disk_is_followed_and_missed_when_it_is_not_mounted(tmp_path: Path) -> None:
    elsewhere = tmp_path / "disk" / "trial.standing"
    elsewhere.parent.mkdir()
    world = World.create(tmp_path, standing=elsewhere)
    world.release([make_query(1, MECHANISM)])
    assert ServerStanding.load(elsewhere).pools[POOL].releases == 1
    assert (tmp_path / "ledger.standing").is_symlink()
    world.ledger.close()
    (tmp_path / "disk").rename(tmp_path / "unmounted")
    with pytest.raises(LedgerCorrupt, match="mount that disk"):
        Ledger.open(world.path, signing_key=world.key)


def test_a_backup_that_follows_links_does_not_pass_its_own_copy_for_the_standing_on_another_disk(
    tmp_path: Path,
) -> None:
    """zip, `cp -L` and `rsync -L` store a copy of the linked standing, as old as the ledger in the backup."""
    elsewhere, beside = tmp_path / "disk" / "trial.standing", tmp_path / "ledger.standing"
    elsewhere.parent.mkdir()
    world = World.create(tmp_path, standing=elsewhere)
    world.release([make_query(1, MECHANISM)])
    saved(world, tmp_path / "backup")
    world.release([make_query(2, MECHANISM)])
    put_back(world, tmp_path / "backup" / "ledger.sqlite")
    beside.unlink()
    shutil.copy(tmp_path / "backup" / "ledger.standing", beside)
    for restored in (False, True):
        with pytest.raises(LedgerCorrupt, match="ln -sf"):
            Ledger.open(world.path, signing_key=world.key, restored=restored).recover([])
    assert not verify(world.path).ok
    beside.unlink()
    with pytest.raises(LedgerCorrupt, match=r"standing .*missing"):
        Ledger.open(world.path, signing_key=world.key)
    beside.symlink_to(elsewhere)
    with pytest.raises(LedgerCorrupt, match="consilium ledger recover"):
        Ledger.open(world.path, signing_key=world.key)
    recovered(world)
    assert world.ledger.spent(POOL).releases == len(world.answers.drawn) == 2


def test_a_standing_that_was_moved_to_another_disk_by_hand_is_guarded_from_the_next_opening(world: World) -> None:
    beside, elsewhere = standing_path(world.path), world.path.with_name("moved.standing")
    beside.rename(elsewhere)
    beside.symlink_to(elsewhere)
    world.reopen()
    beside.unlink()
    shutil.copy(elsewhere, beside)
    with pytest.raises(LedgerCorrupt, match=str(elsewhere)):
        world.reopen()


def test_a_backup_holds_no_standing(world: World, tmp_path: Path) -> None:
    world.release([make_query(1, MECHANISM)])
    (tmp_path / "copies").mkdir()
    backup(world.path, tmp_path / "copies" / "monday.sqlite")
    assert [path.name for path in (tmp_path / "copies").iterdir()] == ["monday.sqlite"]


def test_pools_have_one_book_and_books_one_pool(world: World) -> None:
    world.ledger.declare_books(POOL, "a" * 32)
    rows = world.ledger.row_count
    world.ledger.declare_books(POOL, "a" * 32)
    assert world.ledger.row_count == rows
    with pytest.raises(InvalidInput, match="as first declared"):
        world.ledger.declare_books(POOL, "b" * 32)
    with pytest.raises(InvalidInput, match=f"bergen-mri.*got '{'a' * 32}'"):
        world.ledger.declare_books("bergen-mri", "a" * 32)
    world.reopen()
    assert world.ledger.books.pool_books[POOL] == "a" * 32
    assert verify(world.path).ok


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        ("another ledger's", "another ledger"),
        ("cut short", "`consilium ledger recover`"),
        ("a link that leads nowhere", "mount that disk"),
    ],
)
def test_verification_trusts_no_ledger_whose_standing_it_cannot_use(
    world: World, tmp_path: Path, damage: str, says: str
) -> None:
    world.release([make_query(1, MECHANISM)], batch="b1")
    kept = world.path.with_suffix(".standing")
    assert verify(world.path).ok
    match damage:
        case "cut short":
            kept.write_bytes(kept.read_bytes()[:-20])
        case "another ledger's":
            anothers_standing(tmp_path, kept)
        case _:
            kept.unlink()
            kept.symlink_to(tmp_path / "gone")
    (problem,) = verify(world.path).problems
    assert "standing" in problem.what
    assert says in problem.what


def recovered(world: World, *standings: Path, receipts: Sequence[Receipt] = ()) -> None:
    world.ledger.close()
    for standing in standings or (None,):
        with Ledger.open(world.path, signing_key=world.key, restored=True) as ledger:
            ledger.recover(receipts, standing=None if standing is None else ServerStanding.load(standing))
    world.reopen()


@pytest.mark.parametrize("after", [1, 3, 5])
def test_what_a_kept_standing_charged_since_the_fork_is_charged_beside_what_was_drawn_since(
    world: World, tmp_path: Path, after: int
) -> None:
    """After a rollback with its standing the server draws again; then it is recovered with a standing kept
    elsewhere.
    """
    world.release([make_query(9, MECHANISM)], batch="b0")
    old = saved(world, tmp_path / "old")
    for number in range(3):
        world.release([make_query(number, MECHANISM)], batch=f"b{number + 1}")
    new = saved(world, tmp_path / "new")
    rolled_back(world, old)
    for number in range(after):
        world.release([make_query(number, MECHANISM)], batch=f"c{number}")
    kept = new / "ledger.standing"
    recovered(world, kept)
    assert len(world.answers.drawn) == 4 + after
    assert world.ledger.spent(POOL).releases == 4 + after
    cost = MECHANISM.mu_squared(world.ledger.pools()[0].protection)
    assert world.ledger.spent(POOL).mu_squared == (4 + after) * cost
    assert world.ledger.books.spent_in(world.study.id, POOL).mu_squared == (4 + after) * cost
    recovered(world, kept)
    assert world.ledger.spent(POOL).releases == 4 + after, "the same standing is charged once"
    assert verify(world.path, public_key=world.key.public_key()).ok


def test_receipts_first_and_the_standing_later_charge_a_draw_once(world: World, tmp_path: Path) -> None:
    old = saved(world, tmp_path / "old")
    world.release([make_query(1, MECHANISM)], batch="b1")
    receipts = receipts_of(world.ledger, "aachen")
    world.release([make_query(2, MECHANISM)], batch="b2")
    new = saved(world, tmp_path / "new")
    rolled_back(world, old)
    recovered(world, receipts=receipts)
    assert world.ledger.spent(POOL).releases == 1
    recovered(world, new / "ledger.standing")
    assert world.ledger.spent(POOL).releases == len(world.answers.drawn) == 2


def test_receipts_given_after_the_standing_charge_only_the_rows_that_it_does_not_count(
    world: World, tmp_path: Path
) -> None:
    """Each step is a recovery of its own: a standing, every site's receipts, a later standing, the receipts again."""
    old = saved(world, tmp_path / "old")
    for number in (1, 2, 3):
        world.release([make_query(number, MECHANISM)], batch=f"b{number}", sites=SITES if number == 1 else SITES[:2])
    first = saved(world, tmp_path / "first") / "ledger.standing"
    world.release([make_query(4, MECHANISM)], batch="b4")
    receipts = [receipt for site in SITES for receipt in receipts_of(world.ledger, site)]
    world.release([make_query(5, MECHANISM)], batch="b5")
    second = saved(world, tmp_path / "second") / "ledger.standing"
    rolled_back(world, old)
    charged = []
    for standing, given in ((first, ()), (None, receipts), (second, ()), (None, receipts)):
        recovered(world, *(() if standing is None else (standing,)), receipts=given)
        charged.append(world.ledger.spent(POOL).releases)
    assert charged == [3, 4, 5, 5]
    assert world.ledger.spent("cadiz-mri").releases == 3
    assert verify(world.path, public_key=world.key.public_key()).ok


def test_an_earlier_standing_of_rows_that_are_charged_already_charges_nothing(world: World, tmp_path: Path) -> None:
    old = saved(world, tmp_path / "old")
    standings = []
    for number in range(2):
        world.release([make_query(number, MECHANISM)], batch=f"b{number}")
        standings.append(saved(world, tmp_path / str(number)) / "ledger.standing")
    rolled_back(world, old)
    for standing in reversed(standings):
        recovered(world, standing)
        assert world.ledger.spent(POOL).releases == 2


def test_a_restored_server_that_was_recovered_by_its_standing_charges_a_draw_once_by_the_printed_remedy(
    world: World, tmp_path: Path
) -> None:
    node = Site("aachen", POOL, 1)
    backup(world.path, tmp_path / "monday.sqlite")
    world.release([make_query(1, MECHANISM)], batch="b1")
    head, receipts = world.ledger.head(), receipts_of(world.ledger, "aachen")
    put_back(world, tmp_path / "monday.sqlite")
    recovered(world)
    delivery = ReceiptDelivery(world.ledger, EventLog(tmp_path / "events.jsonl", study=world.study.id))
    told = OfferReply("d" * 64, "ledger-contradicted", ledger_row=head.seq, ledger_head=head.hash)
    assert not delivery.record_head(node, told)
    assert "enter the lost charges with `consilium ledger recover`" in delivery.contradiction()
    recovered(world, receipts=receipts)
    assert world.ledger.spent(POOL).releases == len(world.answers.drawn) == 1


def test_a_later_standing_of_rows_charged_in_part_charges_the_rest(world: World, tmp_path: Path) -> None:
    old = saved(world, tmp_path / "old")
    world.release([make_query(1, MECHANISM)], batch="b1")
    first = saved(world, tmp_path / "first") / "ledger.standing"
    world.release([make_query(2, MECHANISM)], batch="b2")
    second = saved(world, tmp_path / "second") / "ledger.standing"
    rolled_back(world, old)
    recovered(world, first)
    assert world.ledger.spent(POOL).releases == 1
    recovered(world, second)
    assert world.ledger.spent(POOL).releases == 2


@pytest.mark.parametrize("with_the_standing", [True, False])
def test_a_copy_that_is_put_back_again_and_recovered_with_the_same_receipts_charges_a_draw_once(
    world: World, tmp_path: Path, with_the_standing: bool
) -> None:
    """The second standing counts what the first recovery entered; some draws appear only in a later receipt."""
    backup(world.path, tmp_path / "monday.sqlite")
    world.release([make_query(1, MECHANISM)], batch="b1")
    world.release([make_query(2, MECHANISM)], batch="b2", sites=SITES[1:])
    receipts = {site: receipts_of(world.ledger, site) for site in SITES}
    for number in (3, 4, 5):
        put_back(world, tmp_path / "monday.sqlite")
        if with_the_standing:
            recovered(world, receipts=receipts["aachen"] if number == 3 else [*receipts["aachen"], *receipts["cadiz"]])
        else:
            recovered(world)
            recovered(world, receipts=receipts["cadiz"])
        world.release([make_query(number, MECHANISM)], batch=f"b{number}")
    assert [world.ledger.spent(f"{site}-mri").releases for site in SITES] == [4, 5, 5]
    backup(world.path, tmp_path / "tuesday.sqlite")
    world.release([make_query(6, MECHANISM)], batch="b6")
    put_back(world, tmp_path / "tuesday.sqlite")
    recovered(world)
    assert [world.ledger.spent(f"{site}-mri").releases for site in SITES] == [5, 6, 6]
    cost = MECHANISM.mu_squared(world.ledger.pools()[0].protection)
    assert world.ledger.books.spent_in(world.study.id, "cadiz-mri").mu_squared == 6 * cost
    assert verify(world.path, public_key=world.key.public_key()).ok


def test_a_standing_older_than_a_receipt_is_named_until_a_newer_one_is_given(world: World, tmp_path: Path) -> None:
    old = saved(world, tmp_path / "old")
    world.release([make_query(1, MECHANISM)], batch="b1")
    first = saved(world, tmp_path / "first") / "ledger.standing"
    world.release([make_query(2, MECHANISM)], batch="b2")
    receipts = tmp_path / "aachen.jsonl"
    receipts.write_text("".join(f"{receipt.render()}\n" for receipt in receipts_of(world.ledger, "aachen")))
    world.release([make_query(3, MECHANISM)], batch="b3")
    newest = saved(world, tmp_path / "newest") / "ledger.standing"
    rolled_back(world, old)
    world.ledger.close()
    recover = partial(recover_charges, world.path, signing_key=world.key, receipts=[receipts], studies=())
    assert recover(standing=first).standing_is_older
    assert not recover(standing=newest).standing_is_older
    world.reopen()
    assert world.ledger.spent(POOL).releases == len(world.answers.drawn) == 3


def test_two_lost_lines_that_look_alike_are_both_charged(world: World, tmp_path: Path) -> None:
    """Both lost histories have equal numbers of draws, rows and sums after one fork; only their rows' hashes differ."""
    old = saved(world, tmp_path / "old")
    for name in ("first", "second"):
        world.release([make_query(n, MECHANISM) for n in range(3)], batch="b1")
        saved(world, tmp_path / name)
        rolled_back(world, old)
    recovered(world, tmp_path / "first" / "ledger.standing", tmp_path / "second" / "ledger.standing")
    assert world.ledger.spent(POOL).releases == len(world.answers.drawn) == 6


def test_the_standing_beside_a_copy_and_one_of_another_line_are_both_charged(world: World, tmp_path: Path) -> None:
    old = saved(world, tmp_path / "old")
    for name, number in (("first", 1), ("second", 2)):
        rolled_back(world, old)
        world.release([make_query(number, MECHANISM)], batch=name)
        saved(world, tmp_path / name)
    put_back(world, old / "ledger.sqlite")  # the second's standing still lies beside it
    recovered(world, tmp_path / "first" / "ledger.standing")
    assert len(world.answers.drawn) == 2
    assert world.ledger.spent(POOL).releases == world.ledger.books.spent_in(world.study.id, POOL).releases == 2


def test_a_standing_without_marks_is_charged_whole(world: World, tmp_path: Path) -> None:
    """Versions before 0.3.0 wrote such a standing, so nobody can know where it left the ledger's history."""
    world.release([make_query(9, MECHANISM)], batch="b0")
    old = saved(world, tmp_path / "old")
    world.release([make_query(1, MECHANISM)], batch="b1")
    text = json.loads(standing_path(world.path).read_text())
    for name in ("marks", "books", "signature"):
        del text[name]
    (tmp_path / "kept").write_text(json.dumps(text, indent=1))
    rolled_back(world, old)
    recovered(world, tmp_path / "kept")
    assert world.ledger.spent(POOL).releases == 3 > len(world.answers.drawn)


@pytest.mark.slow
def test_long_after_the_fork_the_charge_is_a_sixteenth_too_large_at_most(world: World, tmp_path: Path) -> None:
    chain = world.ledger._chain
    for number in range(1_500):
        world.ledger.note(f"remark {number}")
    marks, ends = chain.marks(), [row.seq for row in world.ledger.rows()]
    named = [seq for seq, _ in marks]
    assert named == sorted(named, reverse=True)
    assert named[:256] == ends[:-257:-1]
    assert named[-1] == 1
    assert len(named) < 320
    for fork in ends:
        found = next(seq for seq in named if seq <= fork)
        assert ends[-1] - found <= (ends[-1] - fork) * 17 / 16 + 1


def test_a_copy_that_lost_rows_without_a_charge_is_refused_and_the_error_names_the_command_that_recovers_it(
    world: World, tmp_path: Path
) -> None:
    world.release([make_query(1, MECHANISM)], batch="b1")
    backup(world.path, tmp_path / "monday.sqlite")
    world.ledger.declare_books(POOL, "a" * 32)
    declare(world.ledger, sites=("bergen",), budget=Budget(epsilon=4.0, delta=1e-3))
    put_back(world, tmp_path / "monday.sqlite")
    with pytest.raises(LedgerCorrupt, match=r"older copy.*to fix: .*`consilium ledger recover`"):
        Ledger.open(world.path, signing_key=world.key)
    recovered(world)
    assert world.ledger.books.pool_books[POOL] == "a" * 32
    assert [pool.budget.epsilon for pool in world.ledger.pools()] == [8.0, 4.0, 8.0]
    assert world.ledger.spent(POOL).releases == 1


def test_a_recovery_that_dies_before_its_standing_is_written_is_finished_by_the_next_opening(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    backup(world.path, tmp_path / "monday.sqlite")
    world.release([make_query(1, MECHANISM)], batch="b1")
    put_back(world, tmp_path / "monday.sqlite")

    def die(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, Ledger.open(world.path, signing_key=world.key, restored=True) as ledger:
        patch.setattr(ledger, "_keep_standing", die)
        with pytest.raises(KeyboardInterrupt):
            ledger.recover([])
    assert verify(world.path).ok
    world.reopen()
    assert world.ledger.spent(POOL).releases == 1
    assert ServerStanding.load(standing_path(world.path)).head == world.ledger.head()


def test_a_command_that_dies_before_the_charge_leaves_the_standing_that_tells(world: World, tmp_path: Path) -> None:
    backup(world.path, tmp_path / "monday.sqlite")
    world.release([make_query(1, MECHANISM)], batch="b1")
    put_back(world, tmp_path / "monday.sqlite")
    with Ledger.open(world.path, signing_key=world.key, restored=True) as ledger:
        ledger.register_study(ledger_study("another"))  # as `recover --study` does first
    with pytest.raises(LedgerCorrupt, match="older copy"):
        Ledger.open(world.path, signing_key=world.key)
    recovered(world)
    assert world.ledger.spent(POOL).releases == 1


def test_a_ledger_file_with_a_log_of_another_moment_opens_with_all_charges_or_is_refused(
    world: World, tmp_path: Path
) -> None:
    """A copy was put back in part: SQLite applies any log to any file. The standing is from either moment."""
    mechanism, points = make_mechanism(room_for=100), []
    for number in range(6):
        if number in (2, 4):
            world.ledger._chain.settle()
        world.release([make_query(100 * number + place, mechanism) for place in range(1 if number % 2 else 12)])
        folder = shutil.copytree(
            world.path.parent, tmp_path / f"point-{number}", ignore=shutil.ignore_patterns("point-*")
        )
        points.append((folder, world.ledger.spent(POOL).releases))
    outcomes = {"refused": 0, "whole": 0}
    for (main, in_main), (log, in_log) in permutations(points, 2):
        for beside, known in ((main, in_main), (log, in_log)):
            folder = tmp_path / "mixed"
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
            shutil.copy(main / world.path.name, folder)
            shutil.copy(log / f"{world.path.name}-wal", folder)
            shutil.copy(standing_path(beside / world.path.name), folder)
            try:
                with Ledger.open(folder / world.path.name, signing_key=world.key) as ledger:
                    assert ledger.spent(POOL).releases >= known, "a charge that is known of is forgotten"
                    assert ledger.spent(POOL).releases in dict(map(reversed, points)), "no moment was so"
                outcomes["whole"] += 1
            except LedgerCorrupt:
                outcomes["refused"] += 1
    assert outcomes["refused"] > outcomes["whole"] > 0


def without_standing(world: World, copy: Path) -> None:
    """Put the copy back on a machine that has lost the standing, too."""
    put_back(world, copy)
    standing_path(world.path).unlink()


def test_charge_all_killed_half_way_forgets_no_loss(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    backup(world.path, tmp_path / "monday.sqlite")
    world.release([make_query(1, MECHANISM)], batch="b1")
    without_standing(world, tmp_path / "monday.sqlite")
    append = Ledger._append

    def die(ledger: Ledger, record: Document) -> None:
        if isinstance(record, LostRecord):
            raise KeyboardInterrupt
        append(ledger, record)

    blindly = partial(
        recover_charges, world.path, signing_key=world.key, receipts=(), standing=None, studies=(), charge_all=True
    )
    with monkeypatch.context() as patch:
        patch.setattr(Ledger, "_append", die)
        with pytest.raises(KeyboardInterrupt):
            blindly()
    with pytest.raises(LedgerCorrupt, match="consilium ledger recover"):
        Ledger.open(world.path, signing_key=world.key)
    blindly()
    world.reopen()
    assert world.release([make_query(1, MECHANISM)], batch="b2").answers == ()


def test_a_standing_that_shows_no_loss_replaces_none_that_is_lost(world: World, tmp_path: Path) -> None:
    world.release([make_query(1, MECHANISM)], batch="b1")
    monday = saved(world, tmp_path / "monday")
    world.release([make_query(2, MECHANISM)], batch="b2")
    tuesday = shutil.copy(standing_path(world.path), tmp_path / "tuesday.standing")
    without_standing(world, monday / "ledger.sqlite")
    recover = partial(recover_charges, world.path, signing_key=world.key, receipts=(), studies=())
    with pytest.raises(InvalidInput, match=r"a row which this copy of the ledger lacks.*--charge-all"):
        recover(standing=monday / "ledger.standing")
    with pytest.raises(LedgerCorrupt, match="missing"):
        Ledger.open(world.path, signing_key=world.key)
    assert recover(standing=tuesday).by_standing[POOL] == 1
    world.reopen()
    assert world.ledger.spent(POOL).releases == 2


def test_a_pool_that_a_blind_recovery_did_not_know_is_refused_with_the_way_that_remains(tmp_path: Path) -> None:
    world = World.create(tmp_path, pools=False)
    path = world.path
    backup(path, tmp_path / "monday.sqlite")
    declare(world.ledger)
    world.release([make_query(1, MECHANISM)])
    without_standing(world, tmp_path / "monday.sqlite")
    recover = partial(recover_charges, path, signing_key=world.key, receipts=(), standing=None, studies=())
    assert recover(charge_all=True).pools == ()
    for copy in (None, tmp_path / "monday.sqlite"):  # the second time, the standing shows that everything was charged
        if copy is not None:
            put_back(world, copy)
            recover()
        world.reopen()
        with pytest.raises(InvalidInput, match=r"new study.*without --ledger"):
            declare(world.ledger)
        assert world.ledger.pools() == ()
    assert verify(path).ok


def test_a_standing_with_one_flipped_bit_is_not_believed(world: World, tmp_path: Path) -> None:
    backup(world.path, tmp_path / "monday.sqlite")
    world.release([make_query(1, MECHANISM)])
    put_back(world, tmp_path / "monday.sqlite")
    path = standing_path(world.path)
    kept = path.read_text()
    place = kept.index('"mu_squared":"') + len('"mu_squared":"')
    path.write_text(kept[:place] + chr(ord(kept[place]) ^ 1) + kept[place + 1 :])
    with pytest.raises(InvalidInput, match="unchanged"):
        recovered(world)
    path.write_text(json.dumps({name: value for name, value in json.loads(kept).items() if name != "signature"}))
    with pytest.raises(InvalidInput, match="not signed"):
        recovered(world)
    recovered(world, path)  # an earlier version signed no standing
    assert world.ledger.spent(POOL).releases == 1


def forged(world: World, *, seq: int, hashed: str) -> None:
    """Write a standing without the ledger's key that names a row and states no spending beyond the copy's."""
    own, path = Ed25519PrivateKey.generate(), standing_path(world.path)
    with Ledger.open(world.path) as copy:
        signed = own.sign(head_message("server", ledger_id=copy.ledger_id, seq=seq, row_hash=hashed)).hex()
        head = SignedHead("server", copy.ledger_id, seq, hashed, public_hex(own), signed)
        of = copy._books
        ServerStanding(
            head, of.all_spent(), of.all_spent_in(), tuple(of.pools.values()), marks=copy._chain.marks()
        ).save(world.path, key=own)
    assert ServerStanding.load(path).head.public_key != world.ledger.public_key


@pytest.mark.parametrize("ahead", [0, 1])
def test_who_restores_an_old_copy_undoes_no_charge_by_a_standing_of_another_key(
    world: World, tmp_path: Path, ahead: int
) -> None:
    """The forged standing states the copy's newest row, so that no row seems lost, or a later row without a charge."""
    backup(world.path, tmp_path / "monday.sqlite")
    world.release([make_query(1, MECHANISM)], batch="b1")
    put_back(world, tmp_path / "monday.sqlite")
    with Ledger.open(world.path) as copy:
        forged(world, seq=copy.row_count + ahead, hashed="f" * 64 if ahead else copy.head().hash)
        assert "standing" in (copy.forgotten() or "")
    with pytest.raises(LedgerCorrupt, match="consilium ledger recover"):
        world.reopen()
    recover = partial(recover_charges, world.path, signing_key=world.key, receipts=(), standing=None, studies=())
    with pytest.raises(InvalidInput, match="another key") as refused:
        recover()
    with pytest.raises(LedgerCorrupt, match="consilium ledger recover"):
        world.reopen()
    assert "--charge-all" in str(refused.value)
    standing_path(world.path).unlink()  # as the message says
    recover(charge_all=True)
    world.reopen()
    assert world.ledger.remaining(POOL) == 0


def test_a_standing_of_a_lost_key_is_taken_once_a_person_names_it(world: World, tmp_path: Path) -> None:
    backup(world.path, tmp_path / "monday.sqlite")
    world.ledger.rotate_key(Ed25519PrivateKey.generate())
    world.release([make_query(1, MECHANISM)], batch="b1")
    put_back(world, tmp_path / "monday.sqlite")
    recover = partial(recover_charges, world.path, signing_key=world.key, receipts=(), studies=())
    with pytest.raises(InvalidInput, match=f"--standing {standing_path(world.path)}"):
        recover(standing=None)
    recover(standing=standing_path(world.path))
    world.reopen()
    assert world.ledger.spent(POOL).releases == 1


def test_a_standing_written_after_a_change_of_the_key_is_signed_by_the_new_key(world: World) -> None:
    new = Ed25519PrivateKey.generate()
    world.ledger.rotate_key(new)
    world.ledger.note("a row that the new key signs")
    world.key = new
    world.reopen()
    assert ServerStanding.load(standing_path(world.path)).head.public_key == public_hex(new)


def test_a_standing_whose_disk_is_lost_for_good_is_replaced_by_what_the_message_says(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    key, path = create_signing_key(tmp_path / "ledger.key"), tmp_path / "ledger.sqlite"
    world = World.create(tmp_path, key=key, standing=tmp_path / "disk" / "trial.standing")
    world.release([make_query(1, MECHANISM)])
    world.ledger.close()
    shutil.rmtree(tmp_path / "disk")
    recover = ["recover", str(path), "--key", str(tmp_path / "ledger.key"), "--charge-all"]
    said = str(CliRunner().invoke(app, recover).exception)
    removal = re.search(r"`rm (\S+)`", said)
    assert removal is not None
    assert "--charge-all" in said
    Path(removal[1]).unlink()
    assert CliRunner().invoke(app, recover).exit_code == 0
    with Ledger.open(path, signing_key=key) as opened:
        assert opened.remaining(POOL) == 0


def test_an_error_of_the_disk_while_a_ledger_is_opened_is_reported_as_such(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SQLite then ends the transaction itself, so none is left to commit."""

    def fail(ledger: Ledger) -> None:
        ledger._chain._db.execute("ROLLBACK")
        raise StorageFailed("disk I/O error")

    monkeypatch.setattr(Ledger, "_enter_new_rows", fail)
    with pytest.raises(StorageFailed, match="disk I/O error"):
        Ledger.open(world.path)


def test_a_copy_from_before_changes_of_the_key_is_recovered_with_the_newest_key(tmp_path: Path) -> None:
    key, path = tmp_path / "ledger.key", tmp_path / "ledger.sqlite"
    first = create_signing_key(key)
    world = World.create(tmp_path, key=first)
    backup(path, tmp_path / "monday.sqlite")
    for number in (1, 2):
        create_signing_key(tmp_path / "next.key")
        world.ledger.close()
        rotate_signing_key(path, key=key, new_key=tmp_path / "next.key")
        world.ledger = Ledger.open(path, signing_key=load_signing_key(key))
        world.release([make_query(number, MECHANISM)], batch=f"b{number}")
    receipts = receipts_of(world.ledger, "aachen")
    (tmp_path / "aachen.jsonl").write_text("".join(receipt.render() + "\n" for receipt in receipts))
    world.release([make_query(3, MECHANISM)], batch="b3")
    put_back(world, tmp_path / "monday.sqlite")
    lost = standing_path(path).read_bytes()
    retired = next(tmp_path.glob(f"ledger.key.retired-{public_hex(first)[:12]}"))
    kept = standing_path(path)  # the newer keys are not given, so a person has to vouch for the standing
    recover_charges(path, signing_key=load_signing_key(retired), receipts=(), standing=kept, studies=())
    command = ["recover", str(path), "--key", str(key)]
    assert CliRunner().invoke(app, command).exit_code == 0, "only the key was missing"
    with Ledger.open(path, signing_key=load_signing_key(key)) as ledger:
        assert ledger.spent(POOL).releases == 3
    put_back(world, tmp_path / "monday.sqlite")
    standing_path(path).write_bytes(lost)
    with pytest.raises(InvalidInput, match=rf"ledger recover.*retired-{public_hex(first)[:12]}"):
        Ledger.open(path, signing_key=load_signing_key(key))
    done = typed(app, *command, "--receipts", tmp_path / "aachen.jsonl")
    assert "2 lost charges" in done.stdout
    with Ledger.open(path, signing_key=load_signing_key(key)) as ledger:
        assert ledger.spent(POOL).releases == 3
        assert len(ledger.public_keys) == 3
    assert verify(path, public_key=first.public_key()).ok
