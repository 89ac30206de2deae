"""Tests long rosters that rows name by id: rows and receipts still prove who took part."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

from common.canonical import canonical_bytes, canonical_text, sha256_bytes
from common.errors import InvalidInput, LedgerCorrupt, Refused
from common.ledger import charges
from common.ledger.charges import MAX_REPEATED_ROSTER, ReleaseRecord, RosterRecord, StudyTerms
from common.ledger.receipts import Receipt, ReceiptedRelease, check_arithmetic
from common.ledger.records import ReceiptRecord
from common.ledger.rows import SignedHead, body_digest, row_hash
from common.privacy.mechanism import QuerySpec
from server.ledger.server_ledger import Ledger
from server.ledger.verify import verify
from tests.backups import copy_of, put_copy
from tests.common.ledger.ledger_world import (
    MECHANISM,
    SITES,
    Hospital,
    Ticking,
    World,
    check,
    declare,
    queries,
    roster_of,
    take,
    tampered,
)
from tests.worlds import receipts_of

NAMES = (*SITES, *(f"site-{number:02}" for number in range(MAX_REPEATED_ROSTER + 1 - len(SITES))))
"""One site more than the largest roster that a row repeats in full."""


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    world = World.create(tmp_path)
    declare(world.ledger, sites=NAMES[len(SITES) :])
    yield world
    world.ledger.close()


def texts(world: World, site: str = "aachen") -> list[str]:
    return [render() for render in world.ledger.receipts_due(site)]


def bodies(world: World, kind: str) -> list[dict[str, Any]]:
    return [json.loads(row.body) for row in world.ledger.rows() if row.kind == kind]


def batches(world: World, site: Hospital, count: int) -> list[Receipt]:
    """Release ``count`` batches of two queries with all sites on the roster; return this site's receipts."""
    for number in range(count):
        asked = queries(2 * number, 2 * number + 1)
        site.ledger.reserve(world.study.id, asked)
        world.release(asked, batch=f"b{number}", sites=NAMES)
    return [Receipt.parse(text) for text in texts(world)]


# --- named once


def test_a_long_roster_has_one_row_and_a_short_one_stands_in_every_release_as_0_1_0_wrote_it(world: World) -> None:
    for number, sites in enumerate((NAMES, NAMES, NAMES[:-1], NAMES)):
        world.release(queries(2 * number, 2 * number + 1), batch=f"b{number}", sites=sites)
    (named,) = [row for row in world.ledger.rows() if row.kind == "roster"]
    assert json.loads(named.body) == {"roster": [[name, f"{name}-mri"] for name in sorted(NAMES)]}
    for number, body in enumerate(bodies(world, "release")):
        if number in (4, 5):
            assert [name for name, _ in body["roster"]] == sorted(NAMES[:-1])
            assert "roster_sha256" not in body
        else:
            assert body["roster_sha256"] == sha256_bytes(named.body.encode())
            assert "roster" not in body
        assert body["voters"] == (len(NAMES) - 1 if number in (4, 5) else len(NAMES))
    for name in NAMES:
        assert world.ledger.spent(f"{name}-mri").releases == (6 if name == NAMES[-1] else 8)
    assert [len(answer.roster) for answer in world.ledger.answers(world.study.id)] == [17, 17, 17, 17, 16, 16, 17, 17]
    assert check(world).ok


def test_what_rows_of_a_named_roster_charged_is_known_after_reopening(world: World) -> None:
    first = world.release(queries(0, 1), sites=NAMES)
    spent = {name: world.ledger.spent(f"{name}-mri") for name in NAMES}
    world.reopen()
    assert {name: world.ledger.spent(f"{name}-mri") for name in NAMES} == spent
    again = world.release(queries(0, 1), sites=NAMES)
    assert [answer.roster for answer in again.answers] == [answer.roster for answer in first.answers]
    world.release(queries(2), batch="b2", sites=NAMES)
    assert len(bodies(world, "roster")) == 1


def test_a_release_that_was_not_committed_leaves_no_roster_behind(world: World) -> None:
    for failing in queries(0, 1):

        def draw(query: QuerySpec, failing: QuerySpec = failing) -> Any:
            if query == failing:
                raise RuntimeError("the sampler stopped")
            return world.answers.draw(query)

        with pytest.raises(RuntimeError):
            world.ledger.release_batch(
                study_id=world.study.id, batch_id="b1", roster=roster_of(NAMES), queries=queries(0, 1), draw=draw
            )
        assert bodies(world, "roster") == bodies(world, "release") == []
    world.release(queries(0, 1), sites=NAMES)
    assert len(bodies(world, "roster")) == 1
    assert check(world).ok


def test_a_long_roster_that_stands_in_every_row_is_read_as_before_and_named_from_then_on(
    world: World, site: Hospital, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as before:
        before.setattr(charges, "MAX_REPEATED_ROSTER", len(NAMES))
        batches(world, site, 1)
    assert bodies(world, "roster") == []
    world.reopen()
    later = queries(2, 3)
    site.ledger.reserve(world.study.id, later)
    world.release(later, batch="later", sites=NAMES)
    assert [len(body.get("roster", ())) for body in bodies(world, "release")] == [17, 17, 0, 0]
    receipts = [Receipt.parse(text) for text in texts(world)]
    assert [receipt.schema for receipt in receipts] == [1, 3]
    for receipt in receipts:
        take(world, site, receipt)
    assert site.ledger.spent() == world.ledger.spent("aachen-mri")
    assert check(world).ok


# --- receipts


def test_a_site_is_shown_a_roster_once_and_checks_every_receipt_against_it(world: World, site: Hospital) -> None:
    first, *later = batches(world, site, 3)
    assert (first.schema, len(first.rosters or ())) == (3, 1)
    assert all((receipt.schema, receipt.rosters) == (3, None) for receipt in later)
    for text, receipt in zip(texts(world), (first, *later), strict=True):
        assert receipt.render() == text
        assert text.count('"site-03-mri"') == (1 if receipt is first else 0)
        assert receipt.is_genuine(world.key.public_key())
        assert ReceiptRecord.from_json(ReceiptRecord(receipt).to_json()).receipt == receipt
    for receipt in (first, *later):
        take(world, site, receipt)
        site.reopen()
    assert later[-1].after == world.ledger.spent("aachen-mri") == site.ledger.spent()
    assert verify(site.path, server_key=world.key.public_key()).ok
    assert site.ledger.receipts() == (first, *later)


def test_the_signature_is_over_a_short_text_and_over_all_that_the_receipt_says(world: World, site: Hospital) -> None:
    (receipt,) = batches(world, site, 1)
    assert len(receipt._message()) < 1_000 < len(receipt.render()) / 5
    changes: dict[str, object] = {
        "study_id": "a" * 64,
        "batch_id": "b2",
        "site": "bergen",
        "declaration": replace(receipt.declaration, site="bergen"),
        "releases": receipt.releases[:1],
        "before": receipt.after,
        "after": receipt.before,
        "previous": replace(receipt.previous, seq=1),
        "links": receipt.links[:-1],
        "head": replace(receipt.head, seq=1),
        "schema": 1,
    }
    assert changes.keys() | {"rosters", "signature"} == {field.name for field in fields(Receipt)}
    for name, value in changes.items():
        assert not replace(receipt, **{name: value}).is_genuine(world.key.public_key()), name  # type: ignore[arg-type]


def test_a_receipt_that_overtakes_the_one_that_shows_its_roster_waits_without_an_alarm(
    world: World, site: Hospital
) -> None:
    first, second = batches(world, site, 2)
    with pytest.raises(Refused) as refused:
        take(world, site, second)
    assert refused.value.reason == "receipt-gap"
    assert site.ledger.alarms() == ()
    take(world, site, first)
    take(world, site, second)
    assert site.ledger.spent() == second.after


def test_a_roster_taken_from_a_receipt_or_changed_on_the_way_is_refused_without_an_alarm(
    world: World, site: Hospital
) -> None:
    (receipt,) = batches(world, site, 1)
    shown = receipt.rosters or ()
    others = (*shown[0].roster[:-1], replace(shown[0].roster[-1], site="zagreb"))
    for rosters in (None, (RosterRecord(shown[0].roster[:-1]),), (RosterRecord(others),)):
        with pytest.raises(InvalidInput, match="with every roster"):
            take(world, site, replace(receipt, rosters=rosters))
    assert site.ledger.alarms() == ()
    assert [row.kind for row in site.ledger.rows()].count("receipt") == 0
    # Rosters that the server has no row for are ignored.
    take(world, site, replace(receipt, rosters=(RosterRecord(others), *shown)))
    assert site.ledger._books.rosters.keys() == {shown[0].id}


def forged(world: World, receipt: Receipt, change: Callable[[dict[str, Any]], object], *, shown: bool) -> Receipt:
    """Return a receipt for a changed roster that the server itself signed, with consistent rows and head.

    ``change`` alters the roster's row; ``shown`` states whether that row belongs to this receipt.
    """
    body: dict[str, Any] = json.loads(canonical_bytes(RosterRecord(charges.check_roster(roster_of(NAMES))).to_json()))
    change(body)
    named = body_digest(canonical_text(body))
    releases = tuple(
        ReceiptedRelease(
            item.seq,
            replace(item.release, roster_sha256=named, voters=len(body["roster"]) * MECHANISM.voters_per_site),
        )
        for item in receipt.releases
    )
    digests = {item.seq: body_digest(canonical_text(item.release.to_json())) for item in releases}
    links, hashed = [], receipt.previous.hash
    for seq, link in enumerate(receipt.links, start=receipt.previous.seq + 1):
        digest = named if link.kind == "roster" and shown else digests.get(seq, link.body_sha256)
        links.append(replace(link, body_sha256=digest))
        hashed = row_hash(
            "server", seq=seq, time_utc=link.time_utc, kind=link.kind, body_sha256=digest, prev_hash=hashed
        )
    unsigned = receipt.to_json() | {
        "releases": [item.to_json() for item in releases],
        "links": [link.to_json() for link in links],
        "rosters": [body],
    }
    if not shown:
        del unsigned["rosters"]
    made = Receipt.from_json(unsigned)
    message = {"hash": hashed, "ledger_id": receipt.ledger_id, "seq": receipt.head.seq}
    signature = world.key.sign(b"consilium/server-ledger-head/v1\0" + canonical_bytes(message)).hex()
    head = SignedHead("server", receipt.ledger_id, receipt.head.seq, hashed, receipt.head.public_key, signature)
    return replace(made, head=head).signed(world.key)


def test_the_forger_of_these_tests_makes_receipts_that_pass(world: World, site: Hospital) -> None:
    (receipt,) = batches(world, site, 1)
    take(world, site, forged(world, receipt, lambda body: body["roster"].pop(), shown=True))
    assert site.ledger.alarms() == ()


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda body: body["roster"].pop(0), "the site"),
        (lambda body: body["roster"][0].__setitem__(1, "bergen-x"), "the site"),
        (lambda body: body.update(roster=body["roster"][:1]), "fewer sites"),
    ],
    ids=["without the site", "with another pool of it", "below the quorum"],
)
def test_a_server_that_names_another_roster_than_the_site_was_on_stops_the_site(
    world: World, site: Hospital, change: Callable[[dict[str, Any]], object], match: str
) -> None:
    (receipt,) = batches(world, site, 1)
    with pytest.raises(LedgerCorrupt, match=match):
        take(world, site, forged(world, receipt, change, shown=True))
    assert len(site.ledger.alarms()) == 1


@pytest.mark.parametrize(
    "change",
    [
        lambda body: body["roster"].reverse(),
        lambda body: body["roster"].insert(1, body["roster"][0]),
        lambda body: body["roster"][0].__setitem__(1, body["roster"][1][1]),
    ],
    ids=["reordered", "a site twice", "a pool twice"],
)
def test_an_invalid_roster_is_not_read(
    world: World, site: Hospital, change: Callable[[dict[str, Any]], object]
) -> None:
    (receipt,) = batches(world, site, 1)
    with pytest.raises(InvalidInput, match="roster"):
        forged(world, receipt, change, shown=True)


def test_a_server_that_names_a_roster_it_never_showed_stops_the_site(world: World, site: Hospital) -> None:
    first, second = batches(world, site, 2)
    take(world, site, first)
    with pytest.raises(LedgerCorrupt, match=r"roster .*no receipt"):
        take(world, site, forged(world, second, lambda body: body["roster"].pop(), shown=False))
    assert len(site.ledger.alarms()) == 1
    assert verify(site.path, server_key=world.key.public_key()).ok


def test_a_server_that_counts_other_voters_than_its_roster_has_stops_the_site(world: World, site: Hospital) -> None:
    first, second = batches(world, site, 2)
    take(world, site, first)
    few = forged(world, second, lambda body: body["roster"].pop(), shown=False)
    back = {item.seq: item.release.roster_sha256 for item in second.releases}
    releases = [replace(item, release=replace(item.release, roster_sha256=back[item.seq])) for item in few.releases]
    with pytest.raises(LedgerCorrupt, match="voters"):
        check_arithmetic(_relinked(few, tuple(releases)), StudyTerms.of(world.study), known=first.shown)


def _relinked(receipt: Receipt, releases: tuple[ReceiptedRelease, ...]) -> Receipt:
    digests = {item.seq: body_digest(canonical_text(item.release.to_json())) for item in releases}
    links, hashed = [], receipt.previous.hash
    for seq, link in enumerate(receipt.links, start=receipt.previous.seq + 1):
        links.append(replace(link, body_sha256=digests.get(seq, link.body_sha256)))
        fields = {"time_utc": link.time_utc, "kind": link.kind, "body_sha256": links[-1].body_sha256}
        hashed = row_hash("server", seq=seq, prev_hash=hashed, **fields)
    return replace(receipt, releases=releases, links=tuple(links), head=replace(receipt.head, hash=hashed))


@pytest.mark.parametrize(
    "change",
    [
        lambda data: data.update(schema=1),
        lambda data: data.update(schema=2),
        lambda data: data.update(schema=4),
        lambda data: data.update(rosters=[]),
        lambda data: data["releases"][0]["body"].pop("roster_sha256"),
        lambda data: data["releases"][0]["body"].update(roster=[["aachen", "aachen-mri"]]),
    ],
)
def test_a_receipt_of_the_third_schema_is_read_whole_or_refused(
    world: World, site: Hospital, change: Callable[[Any], object]
) -> None:
    (receipt,) = batches(world, site, 1)
    data = receipt.to_json()
    change(data)
    with pytest.raises(InvalidInput):
        Receipt.from_json(data)


# --- verify


def lie(world: World, *rows: tuple[str, dict[str, Any]]) -> int:
    """Append rows past all rules, with valid hashes, key and answers; return the number of the last row."""
    chain, seq = world.ledger._chain, 0
    with chain.transaction():
        for _ in chain.new_rows():
            raise AssertionError
        for kind, body in rows:
            payload = (body["query_id"], bytes(8 * MECHANISM.dimension)) if kind == "release" else None
            seq = chain.append(kind, body, payload=payload).seq
    return seq


def named_row(*names: str) -> tuple[str, dict[str, Any]]:
    return "roster", {"roster": [[name, f"{name}-mri"] for name in names or sorted(NAMES)]}


def release_row(world: World, body: dict[str, Any], number: int = 9, **changes: Any) -> tuple[str, dict[str, Any]]:
    """Return a release of query ``number`` whose roster has this row."""
    (query,) = queries(number)
    entries, sha256 = roster_of([name for name, _ in body["roster"]]), sha256_bytes(bytes(8 * MECHANISM.dimension))
    terms = StudyTerms.of(world.study)
    record = ReleaseRecord.of(terms, "lie", query, query.id, entries, sha256, named=sha256_bytes(canonical_bytes(body)))
    return "release", record.to_json() | changes


def test_valid_rows_appended_by_the_helper_of_these_tests_verify(world: World) -> None:
    kind, body = named_row()
    lie(world, (kind, body), release_row(world, body))
    assert check(world).ok


@pytest.mark.parametrize(
    ("rows", "what"),
    [
        (lambda world: [release_row(world, named_row()[1])], "no earlier row"),
        (lambda world: [release_row(world, named_row()[1]), named_row()], "no earlier row"),
        (lambda world: [named_row(), named_row()], "whole ledger"),
        (lambda world: [named_row(*sorted(NAMES, reverse=True))], "sorted by site"),
        (lambda world: [named_row(*sorted((*NAMES, "aachen")))], "site is named twice"),
        (
            lambda world: [("roster", {"roster": [[name, "aachen-mri"] for name in sorted(NAMES)]})],
            "pool is named twice",
        ),
        (lambda world: [named_row(), release_row(world, named_row()[1], voters=16)], "voters"),
        (lambda world: _of(world, named_row("aachen")), "quorum"),
        (lambda world: _of(world, named_row("aachen", "zagreb")), "a declared pool"),
        (
            lambda world: [
                named_row(),
                release_row(world, named_row()[1], roster=[["aachen", "aachen-mri"], ["bergen", "bergen-mri"]]),
            ],
            "id of the row",
        ),
    ],
    ids=[
        "a hash that points nowhere",
        "a roster after its use",
        "a roster twice",
        "names in another order",
        "a site twice",
        "a pool twice",
        "number of voters",
        "below the quorum",
        "a pool that was never declared",
        "a roster beside the hash",
    ],
)
def test_rows_that_name_a_roster_wrongly_are_found(
    world: World, rows: Callable[[World], list[tuple[str, dict[str, Any]]]], what: str
) -> None:
    world.release(queries(0))
    last = lie(world, *rows(world))
    report = check(world)
    assert report.problems
    assert what in report.problems[0].what
    assert report.first_bad_row is not None
    assert report.first_bad_row <= last
    world.ledger.close()
    with pytest.raises(LedgerCorrupt, match=what):
        Ledger.open(world.path)
    world.ledger = Ledger.create(world.path.with_name("other.sqlite"), signing_key=world.key)


def _of(world: World, row: tuple[str, dict[str, Any]]) -> list[tuple[str, dict[str, Any]]]:
    return [row, release_row(world, row[1])]


@pytest.mark.parametrize(
    "statement",
    [
        "DELETE FROM rows WHERE kind = 'roster'",
        "UPDATE rows SET body = replace(body, 'site-05', 'site-99') WHERE kind = 'roster'",
        "UPDATE rows SET kind = 'note' WHERE kind = 'roster'",
        "UPDATE rows SET body = replace(body, 'roster_sha256\":\"', 'roster_sha256\":\"0') WHERE kind = 'release'",
    ],
)
def test_a_roster_changed_in_the_file_is_found(world: World, statement: str) -> None:
    world.release(queries(0, 1), sites=NAMES)
    world.ledger.close()
    (row,) = [row[0] for row in sqlite3.connect(world.path).execute("SELECT seq FROM rows WHERE kind = 'roster'")]
    found = check(world, tampered(world, statement)).first_bad_row
    assert found is not None
    assert found in (row, row + 1)


# --- recovery


def restored(world: World, copy: Path) -> None:
    world.ledger.close()
    put_copy(copy, world.path, standing=True)
    world.ledger = Ledger.open(world.path, signing_key=world.key, clock=Ticking())


def backed_up(world: World) -> Path:
    return copy_of(world.path, world.path.with_name("copy.sqlite"))


def test_every_pool_of_a_lost_roster_is_charged_again_from_one_sites_receipts(world: World, site: Hospital) -> None:
    copy = backed_up(world)
    receipts = batches(world, site, 2)
    spent = {name: world.ledger.spent(f"{name}-mri") for name in NAMES}
    restored(world, copy)
    with pytest.raises(InvalidInput, match=r"roster .*does not know.*complete receipts"):
        world.ledger.recover(receipts[1:])
    assert world.ledger.spent("cadiz-mri").releases == 0
    with pytest.raises(InvalidInput, match=r"every roster|does not know"):
        world.ledger.recover([replace(receipts[0], rosters=None)])
    assert world.ledger.recover(receipts) == 4
    assert world.ledger.recover(receipts) == 0
    assert {name: world.ledger.spent(f"{name}-mri") for name in NAMES} == spent
    world.reopen()
    assert {name: world.ledger.spent(f"{name}-mri") for name in NAMES} == spent
    assert len(bodies(world, "roster")) == 1
    assert check(world).ok


def test_a_site_that_missed_the_lost_receipts_is_shown_a_recovered_roster(world: World, site: Hospital) -> None:
    copy = backed_up(world)
    site.ledger.reserve(world.study.id, queries(0, 1))
    world.release(queries(0, 1), sites=NAMES)
    theirs = receipts_of(world.ledger, "bergen")
    restored(world, copy)
    assert world.ledger.recover(theirs) == 2
    world.release(queries(2), batch="b2", sites=NAMES[:5])
    site.ledger.reserve(world.study.id, queries(2))
    world.release(queries(3), batch="b3", sites=NAMES)
    site.ledger.reserve(world.study.id, queries(3))
    receipts = receipts_of(world.ledger, "aachen")
    assert [len(receipt.rosters or ()) for receipt in receipts] == [1, 0]
    assert [len(receipt.releases[0].release.roster or ()) for receipt in receipts] == [5, 0]
    site.ledger.recover(world.ledger.ledger_id)
    for receipt in receipts:
        take(world, site, Receipt.parse(receipt.render()))
    assert verify(site.path, server_key=world.key.public_key()).ok
    lost = 2  # the site cannot know whether the server drew these again
    assert world.ledger.spent("aachen-mri").releases == 4
    assert site.ledger.spent().releases == 4 + lost
