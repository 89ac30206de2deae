"""Tests that the printed remedy works after a restore if a site's ledger states a later draw than the server's.

Workers, ledgers and core of the sealed study are real. Transport and teachers are stubs. The study needs all its sites.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

from common.errors import ConsiliumError, LedgerCorrupt, QuorumNotReached
from common.messages import CodesRequest, encode
from common.peers import Peer
from consilium.cli.ledger import app
from consilium.cli.site import site_app
from server.aggregation.sealed_sums import MOST_AHEAD, MOST_BELIEVED
from server.ledger.backup import backup
from server.ledger.server_ledger import Ledger
from server.ledger.verify import verify
from tests.backups import put_copy
from tests.commands import typed
from tests.federation import Federation, make_study, part
from tests.worlds import HURRIED, receipts_of

pytestmark = pytest.mark.slow

RESTORED, AWAY = 100, 103


@pytest.fixture
def world(tmp_path: Path) -> Iterator[Federation]:
    study = make_study(quorum=4, planned_queries=4, aggregation="sealed-sum", spare_draws=20, collection=HURRIED)
    with Federation(tmp_path / "world", study=study, sites=4) as federation:
        yield federation


def away(node: int, body: bytes, reply: bytes) -> bytes | None:
    """Drop the last site's reply. Then no draw is charged, but the sites that accepted have charged themselves."""
    return None if node == AWAY else reply


def missed(world: Federation, error: type[ConsiliumError] = QuorumNotReached) -> str:
    """Run the study, which must end with an error; return the error's message."""
    with pytest.raises(error) as raised:
        world.core().run(world.transport)
    return str(raised.value)


def restore_site(world: Federation, copy: Path | None = None) -> None:
    """Restore the first site's ledger to one row ago, or to ``copy``, and do what the site's staff are told to do."""
    ledger, path = world.site_ledgers["site-0"], world.root / "site-0" / "site-ledger.sqlite"
    if copy is None:
        copy = world.root / "copy.sqlite"
        copy.unlink(missing_ok=True)
        backup(path, copy)
        ledger.note("a row that the copy lacks")
    world.put_back(copy)


def recover_server(world: Federation) -> str:
    """Write the first site's receipts as `consilium site heads --out` does, and enter them at the server."""
    receipts, key = world.root / "site-0.jsonl", world.root / "ledger.key"
    held = world.site_ledgers["site-0"].receipts(evidence=True)
    receipts.write_text("".join(f"{receipt.render()}\n" for receipt in held))
    pem = world.signing_key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    key.touch(mode=0o600)
    key.write_bytes(pem)
    world.ledger.close()
    words = ["recover", str(world.root / "ledger.sqlite"), "--key", str(key), "--receipts", str(receipts)]
    done = typed(app, *words)
    world.ledger = Ledger.open(world.root / "ledger.sqlite", signing_key=world.signing_key)
    return done.output


def finishes(world: Federation) -> None:
    world.core().run(world.transport)
    assert len(world.core().answers()) == 4
    assert not verify(world.root / "ledger.sqlite").problems
    for name in world.site_ledgers:
        pool = name.replace("site", "pool")
        assert world.site_ledgers[name].spent().mu_squared >= world.ledger.spent(pool).mu_squared


def test_a_site_restored_more_often_than_a_study_believes_it_goes_on_after_the_printed_remedy(
    world: Federation,
) -> None:
    world.transport.intercept = away
    for _ in range(MOST_BELIEVED + 1):
        missed(world)
        restore_site(world)
    world.transport.intercept = lambda _node, _body, reply: reply
    said = missed(world)
    assert "site-0 states having answered a later draw" in said
    assert "enter that site's receipts with `consilium ledger recover`, also if this ledger lacks none of them" in said
    recover_server(world)
    finishes(world)


@pytest.mark.parametrize("copied", ["before any draw", "after the first draw was accepted"])
def test_a_restored_site_counts_two_draws_of_a_query_once_each_when_their_receipts_come_again(
    tmp_path: Path, copied: str
) -> None:
    """The last site does not answer the first draw, which is lost. All sites answer the second draw."""
    study = make_study(quorum=3, planned_queries=2, aggregation="sealed-sum", spare_draws=20, collection=HURRIED)
    world = Federation(tmp_path / "world", study=study, sites=4)
    path, copy = world.root / "site-0" / "site-ledger.sqlite", world.root / "monday.sqlite"

    def silent(node: int, body: bytes, reply: bytes) -> bytes | None:
        if node != AWAY or part(body, CodesRequest) is None:
            return reply
        if not copy.exists():
            backup(path, copy)
        return None

    if copied == "before any draw":
        backup(path, copy)
    world.transport.intercept = silent
    world.core().run(world.transport)
    assert world.site_ledgers["site-0"].spent().releases == 4
    restore_site(world, copy)
    restored = world.hospitals.ledgers["site-0"]
    for receipt in receipts_of(world.ledger, "site-0"):
        restored.record_receipt(receipt, public_key=world.signing_key.public_key())
    assert restored.spent() == world.ledger.spent("pool-0")
    assert restored.spent().releases == restored.books.spent_in(world.study.id).releases == 4
    assert restored.alarms() == ()
    assert verify(path).ok
    world.close()


def test_a_site_that_is_draws_ahead_of_a_restored_server_goes_on(world: Federation) -> None:
    """No other site accepted a later draw. No receipt shows one, because no later draw was charged."""
    queries = world.planned()[:2]
    peers = tuple(Peer(site.name, site.answer_key) for site in world.sites)
    for draw in (1, 4):
        world.workers[RESTORED].handle(encode(world.offer(queries, draw=draw, peers=peers)))
    assert world.site_ledgers["site-0"].last_draw(queries, study_id=world.study.id) == 4
    finishes(world)
    assert {release.draw for _, release in world.ledger._books.releases.by_row()} == {1, 5}


def test_a_server_restored_to_before_every_receipt_goes_on_after_the_printed_remedy(world: Federation) -> None:
    """It has no receipt to send, so no site raises an alarm that a person could end."""
    path = world.root / "ledger.sqlite"
    backup(path, world.root / "monday.sqlite")
    world.core().run(world.transport)
    world.ledger.close()
    put_copy(world.root / "monday.sqlite", path)
    recover_server(world)
    said = missed(world, LedgerCorrupt)
    assert "`consilium site recover --server-restored`" in said
    world.write_site_files("queries_per_day = 1000\n")
    for site in world.sites:
        typed(site_app, "recover", "--server-restored", "--site-dir", world.root / site.name)
    finishes(world)
    assert world.ledger.spent("pool-1").releases == 8, "the draws that were lost, and those that were made again"


def test_the_page_says_how_far_a_restored_site_is_believed() -> None:
    page = " ".join((Path(__file__).parents[2] / "docs" / "ledger.md").read_text(encoding="utf-8").split())
    times = {3: "three"}[MOST_BELIEVED]
    assert f"a later draw {times} times, at most {MOST_AHEAD:,} draws ahead" in page
