"""Tests a server that lies about what it charged, against the worker object that production uses.

Everything is real except for the transport and the teachers: workers, site ledgers, sealing, messages, the core and its
ledger. The lies are signed with the server's own key. The site detects each lie, and then sends no acceptance and no
code until a person has recovered it. No receipt can show that noise was added, and these tests do not claim it.
"""

from __future__ import annotations

import shutil
import sqlite3
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from client.operations import staff_decisions as control
from common.errors import LedgerCorrupt, QuorumNotReached, Refused
from common.ledger.charges import Spend
from common.ledger.receipts import Receipt
from common.messages import CodesRequest, Offer, OfferReply, Part, Receipts, Several, decode, encode
from common.privacy.accounting import max_mu_squared
from common.privacy.mechanism import AccountantName
from consilium.cli.ledger import app as ledger_app
from server.aggregation.aggregator import Aggregator
from server.aggregation.receipts import ReceiptDelivery
from server.ledger.server_ledger import Ledger
from server.ledger.verify import verify
from tests.backups import put_copy
from tests.commands import typed
from tests.federation import Federation, make_study, part
from tests.worlds import HURRIED, receipts_of

pytestmark = pytest.mark.slow

RUN = CliRunner()
Lie = Callable[[Receipt], Receipt]


@pytest.fixture
def fed(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Federation]:
    study = make_study(planned_queries=getattr(request, "param", 10), collection=HURRIED)
    federation = Federation(tmp_path, study=study)
    yield federation
    federation.ledger.close()
    for ledger in federation.site_ledgers.values():
        ledger.close()


@dataclass
class LiedTo:
    """Runs a worker that gets every receipt through the liar."""

    fed: Federation
    node: int
    lie: Lie

    def open_request(self, message: bytes) -> bytes:
        return self.fed.workers[self.node].open_request(message)

    def sign_reply(self, body: bytes, *, request: bytes) -> bytes:
        return self.fed.workers[self.node].sign_reply(body, request=request)

    def handle(self, body: bytes) -> bytes:
        message = decode(body)
        if isinstance(message, Several):
            body = encode(Several(tuple(self._told(part) for part in message.parts)))
        else:
            body = encode(self._told(message))
        return self.fed.workers[self.node].handle(body)

    def _told(self, part: Part) -> Part:
        if not isinstance(part, Receipts):
            return part
        told = [self.lie(Receipt.parse(text)).signed(self.fed.signing_key).render() for text in part.receipts]
        return Receipts(part.ledger, tuple(told))


def run_batches(fed: Federation, count: int) -> None:
    """Run ``count`` batches, and send the receipts of each."""
    fed.core().run(fed.transport, should_stop=iter([False] * count + [True]).__next__)


def lie_to_site_1(fed: Federation, lie: Lie) -> None:
    fed.transport.workers = {**fed.workers, 101: LiedTo(fed, 101, lie)}


def assert_nothing_leaves(fed: Federation, match: str, *, node: int = 101) -> None:
    """Check that an alarm is recorded, and that the paused site accepts no offer and sends no code."""
    ledger = fed.site_ledgers[f"site-{node - 100}"]
    assert len(ledger.alarms()) == 1
    assert match in ledger.alarms()[0]
    queries = tuple(answer.query for answer in fed.ledger.answers(fed.study.id))
    offer = Offer(study=fed.study.id, ledger=fed.ledger.ledger_id, batch="b" * 64, queries=queries[:1])
    reply = decode(fed.workers[node].handle(encode(offer)))
    assert isinstance(reply, OfferReply)
    assert reply.reason == "paused"
    stored = next(query.id for query in queries if ledger.code(query.id) is not None)
    request = CodesRequest(
        study=fed.study.id, ledger=fed.ledger.ledger_id, batch="b" * 64, attempt=1, deadline_s=1, queries=(stored,)
    )
    calls = fed.voters[f"site-{node - 100}"].calls
    with pytest.raises(Refused) as refused:
        fed.workers[node].handle(encode(request))
    assert refused.value.reason == "paused"
    assert fed.voters[f"site-{node - 100}"].calls == calls
    assert verify(fed.root / f"site-{node - 100}" / "site-ledger.sqlite").ok, "the alarm itself is a sound record"


def halve(spend: Spend) -> Spend:
    return Spend(spend.mu_squared / 2, spend.releases, spend.coordinates)


def test_a_server_that_charges_less_stops_the_site(fed: Federation) -> None:
    lie_to_site_1(fed, lambda receipt: replace(receipt, after=halve(receipt.after)))
    run_batches(fed, 1)
    assert_nothing_leaves(fed, "do not add up")


def test_a_server_that_leaves_a_query_out_of_the_receipt_stops_the_site(fed: Federation) -> None:
    def lie(receipt: Receipt) -> Receipt:
        first = receipt.releases[:1]
        return replace(receipt, releases=first, after=Spend(receipt.after.mu_squared / 2, 1, receipt.after.coordinates))

    lie_to_site_1(fed, lie)
    run_batches(fed, 1)
    assert_nothing_leaves(fed, "do not add up")


def test_a_server_that_forgets_what_it_charged_before_stops_the_site(fed: Federation) -> None:
    run_batches(fed, 1)

    def lie(receipt: Receipt) -> Receipt:
        return replace(
            receipt,
            before=Spend(),
            after=Spend(receipt.after.mu_squared - receipt.before.mu_squared, 2, receipt.after.coordinates // 2),
        )

    lie_to_site_1(fed, lie)
    run_batches(fed, 1)
    assert_nothing_leaves(fed, "totals before")


def snapshot(fed: Federation, name: str) -> Path:
    out = fed.root / name
    typed(ledger_app, "backup", fed.root / "ledger.sqlite", out)
    shutil.copy(fed.root / "ledger.standing", out.with_suffix(".standing"))
    return out


def restore(fed: Federation, copy: Path) -> None:
    """Stop the server, put the copy in place of the ledger and its standing, and start it, as an operator does."""
    fed.ledger.close()
    put_copy(copy, fed.root / "ledger.sqlite", standing=True)
    fed.ledger = Ledger.open(fed.root / "ledger.sqlite", signing_key=fed.signing_key)


def fork(fed: Federation, copy: Path) -> Ledger:
    """Continue with a copy of the ledger; return the original, which stays open."""
    first, other = fed.ledger, fed.root / "fork.sqlite"
    put_copy(copy, other, standing=True)
    fed.ledger = Ledger.open(other, signing_key=fed.signing_key)
    return first


def skip_lost(fed: Federation, monkeypatch: pytest.MonkeyPatch, lost: set[str]) -> None:
    """Let the liar ask only for queries that no site knows to be released, and ignore what the sites hold."""
    honest = Aggregator.open_queries
    monkeypatch.setattr(Ledger, "contains", lambda _ledger, _position: True)
    monkeypatch.setattr(Aggregator, "open_queries", lambda core: tuple(q for q in honest(core) if q.id not in lost))


def lose_a_batch(fed: Federation, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Run two batches; return a copy of the ledger from between them. Later runs do not repeat the second batch."""
    run_batches(fed, 1)
    copy = snapshot(fed, "copy.sqlite")
    kept = {answer.query.id for answer in fed.ledger.answers(fed.study.id)}
    run_batches(fed, 1)
    skip_lost(fed, monkeypatch, {answer.query.id for answer in fed.ledger.answers(fed.study.id)} - kept)
    return copy


def test_a_server_that_drops_its_last_rows_and_asks_again_gets_no_second_noise(fed: Federation) -> None:
    run_batches(fed, 1)
    copy = snapshot(fed, "copy.sqlite")
    run_batches(fed, 1)
    restore(fed, copy)
    rows, calls = fed.ledger.row_count, [voters.calls for voters in fed.voters.values()]
    with pytest.raises(LedgerCorrupt, match=r"site-0 \(row \d+\), site-1 .*older copy.*ledger recover"):
        fed.core().run(fed.transport)
    assert {event["reason"] for event in fed.events("offer-answered")[-3:]} == {"ledger-contradicted"}
    assert (fed.ledger.row_count, [voters.calls for voters in fed.voters.values()]) == (rows, calls)
    assert all("asked again for" in ledger.alarms()[0] for ledger in fed.site_ledgers.values())


def test_a_server_that_drops_its_last_rows_and_asks_for_others_stops_every_site(
    fed: Federation, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = lose_a_batch(fed, monkeypatch)
    restore(fed, copy)
    run_batches(fed, 2)
    for node in fed.workers:
        assert_nothing_leaves(fed, "rolled back or forked", node=node)
    assert fed.ledger.spent("pool-1").releases == 6
    assert fed.site_ledgers["site-1"].spent().releases == 8 + 2, "the true sum, and the batch it accepted ahead"


@pytest.mark.parametrize("others", [True, False])
def test_a_fork_at_exactly_the_row_a_site_holds_is_seen_at_the_next_offer(tmp_path: Path, others: bool) -> None:
    """Two branches of one ledger end at the same row number, so the number alone does not tell them apart."""
    fed = Federation(tmp_path, study=make_study(planned_queries=10, quorum=1))
    fed.set_collection(batch_size=2, offer_deadline_s=1.0)
    run_batches(fed, 1)
    copy = snapshot(fed, "copy.sqlite")
    fed.transport.offline = {100, 101}
    run_batches(fed, 1)
    held = fed.site_ledgers["site-2"].held(fed.ledger.ledger_id)
    restore(fed, copy)
    fed.transport.offline = {102}
    run_batches(fed, 1)
    assert fed.ledger.row_count == held.seq
    assert fed.ledger.head().hash != held.hash
    fed.transport.offline = set() if others else {100, 101}
    if not others:
        rows = fed.ledger.row_count
        with pytest.raises(LedgerCorrupt, match=rf"site-2 \(row {held.seq}\).*consilium ledger recover"):
            fed.core().run(fed.transport)
        assert fed.ledger.row_count == rows
    else:
        fed.core().run(fed.transport)
        newest = [answer for answer in fed.ledger.answers(fed.study.id) if answer.seq > held.seq]
        assert newest
        assert all({entry.site for entry in answer.roster} == {"site-0", "site-1"} for answer in newest)
    assert [(e["site"], e["ledger_row"]) for e in fed.events("ledger-contradicted")] == [("site-2", held.seq)]
    fed.close()


def test_a_server_that_forks_stops_the_site_that_saw_both_sides(
    fed: Federation, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = lose_a_batch(fed, monkeypatch)
    first = fork(fed, copy)
    fed.transport.offline = {102}  # site-2 stays on the first branch
    run_batches(fed, 2)
    first.close()
    assert_nothing_leaves(fed, "rolled back or forked")
    assert fed.site_ledgers["site-2"].alarms() == ()


def test_a_fork_no_single_site_can_see_is_found_by_comparing_heads(
    fed: Federation, monkeypatch: pytest.MonkeyPatch
) -> None:
    fed.write_site_files()
    copy = snapshot(fed, "copy.sqlite")
    fed.transport.offline = {102}
    run_batches(fed, 1)
    first = fork(fed, copy)
    theirs = fed.root / "theirs.jsonl"
    theirs.write_text("\n".join(control.receipt_lines(fed.root / "site-1")))
    skip_lost(fed, monkeypatch, {answer.query.id for answer in first.answers(fed.study.id)})
    # Only site-2 gets a receipt of the other branch. Site-0 is on its roster, but gets no receipt.
    fed.transport.offline = {101}
    lie = LiedTo(fed, 100, lambda receipt: receipt)
    handle = fed.workers[100].handle
    fed.transport.workers = {**fed.workers, 100: lie}
    lie.handle = lambda body: b"" if part(body, Receipts) else handle(body)  # type: ignore[method-assign]
    run_batches(fed, 1)
    first.close()
    assert all(ledger.alarms() == () for ledger in fed.site_ledgers.values()), "no site sees it alone"
    with pytest.raises(LedgerCorrupt, match="different ledgers") as forked:
        control.compare_heads(fed.root / "site-2", control_receipts(theirs))
    assert forked.value.row is not None


def control_receipts(path: Path) -> tuple[Receipt, ...]:
    return tuple(Receipt.parse(line) for line in path.read_text().splitlines())


def test_a_server_that_replays_an_old_receipt_for_a_new_batch_gains_nothing_and_is_seen(fed: Federation) -> None:
    run_batches(fed, 1)
    ledger = fed.site_ledgers["site-1"]
    old = ledger.receipts()[0]
    lie_to_site_1(fed, lambda _receipt: old)
    run_batches(fed, 1)
    assert len(ledger.receipts()) == 1
    accepted = 4 + 2  # one batch was accepted ahead
    assert ledger.spent().releases == accepted, "the site's own sum never came from receipts"
    assert {event["site"] for event in fed.events("receipts-missing")} == {"site-1"}
    # Presented as the next receipt, the old one contradicts the chain of hashes.
    head = ledger.server_heads()[fed.ledger.ledger_id]
    lie_to_site_1(fed, lambda receipt: replace(old, previous=receipt.previous, links=receipt.links, head=receipt.head))
    run_batches(fed, 1)
    assert_nothing_leaves(fed, "receipt")
    assert ledger.server_heads()[fed.ledger.ledger_id] == head


def test_a_server_that_edits_the_study_gets_no_answer_and_its_receipts_stop_the_site(
    fed: Federation, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_batches(fed, 1)
    consented = fed.study
    fed.study = replace(make_study(epsilon=7.9), collection=consented.collection)
    fed.ledger.register_study(fed.study)
    with pytest.raises(QuorumNotReached):
        fed.core().run(fed.transport)
    assert {e["reason"] for e in fed.events("offer-answered") if e["study"] == fed.study.id} == {"unknown-study"}
    # The server offers under the consented terms and books under the edited ones.
    release_batch = fed.ledger.release_batch

    def book_elsewhere(**booked):
        return release_batch(**{**booked, "study_id": fed.study.id})

    edited, fed.study = fed.study, consented
    monkeypatch.setattr(fed.ledger, "release_batch", book_elsewhere)
    monkeypatch.setattr(ReceiptDelivery, "missing", lambda core, site: (lambda: edited_receipt(fed, site.name),))
    fed.study, core = edited, fed.core()
    core._study = consented
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fed.ledger, "study_spending", lambda _id: Ledger.study_spending(fed.ledger, edited.id))
        core.run(fed.transport, should_stop=iter([False, True]).__next__)
    fed.study = consented
    assert_nothing_leaves(fed, "never consented")


def edited_receipt(fed: Federation, site: str) -> str:
    return receipts_of(fed.ledger, site)[-1].render()


# --- restored, recovered, ended


def test_an_old_backup_raises_the_alarm_is_recovered_from_and_the_study_ends_with_no_charge_forgotten(
    fed: Federation,
) -> None:
    """The commands are those that a person uses. Noise drawn twice is charged twice, at the server and at the sites."""
    fed.write_site_files()
    run_batches(fed, 1)
    copy = snapshot(fed, "monday.sqlite")
    run_batches(fed, 1)
    known = {answer.query.id: answer.noisy_sum.tobytes() for answer in fed.ledger.answers(fed.study.id)}
    restore(fed, copy)
    with pytest.raises(LedgerCorrupt, match="older copy"):
        fed.core().run(fed.transport)
    assert all(len(ledger.alarms()) == 1 for ledger in fed.site_ledgers.values())

    exported = []
    for site in fed.sites:
        exported.append(fed.root / f"{site.name}.jsonl")
        exported[-1].write_text("\n".join(control.receipt_lines(fed.root / site.name)))
    fed.ledger.close()
    key = fed.root / "ledger.key"
    write_key(fed, key)
    arguments = ["recover", str(fed.root / "ledger.sqlite"), "--key", str(key)]
    result = typed(ledger_app, *arguments, *(f"--receipts={path}" for path in exported))
    assert "2 lost charges entered" in result.stdout
    assert "0 lost charges" in RUN.invoke(ledger_app, [*arguments, *(f"--receipts={p}" for p in exported)]).stdout
    for site in fed.sites:
        assert control.end_alarm(fed.root / site.name) == (verify(fed.root / "ledger.sqlite").ledger_id,)

    fed.ledger = Ledger.open(fed.root / "ledger.sqlite", signing_key=fed.signing_key)
    budget = max_mu_squared(fed.study.privacy.accountant, fed.study.privacy.budget)
    fed.core().run(fed.transport)  # two answers were drawn twice, so the last two of ten do not fit any more
    assert len(fed.events("budget-refused")[-1]["queries"]) == 2
    answers = fed.ledger.answers(fed.study.id)
    assert len(answers) == 8, "all that the budget has room for"
    assert set(known) <= {answer.query.id for answer in answers}
    drawn = 2 + 2 + 6  # before the copy; lost after the copy; after the restore
    for site in fed.sites:
        server, own = fed.ledger.spent(site.pool), fed.site_ledgers[site.name].spent()
        assert server.releases == drawn, "every answer ever drawn is charged"
        assert own.mu_squared == server.mu_squared, "and the site's own account does not fall short of it"
        assert server.mu_squared <= budget
        assert fed.site_ledgers[site.name].alarms() == ()
    assert fed.ledger.study_spending(fed.study.id).readings()[AccountantName.EXACT].epsilon <= 8
    assert verify(fed.root / "ledger.sqlite", public_key=fed.signing_key.public_key()).ok
    for site in fed.sites:
        assert verify(fed.root / site.name / "site-ledger.sqlite", server_key=fed.signing_key.public_key()).ok


def test_an_alarm_raised_by_a_release_after_the_restore_is_recovered_from_too(
    fed: Federation, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This receipt was signed before the lost charges were entered, so it must not raise the alarm for ever."""
    test_a_server_that_drops_its_last_rows_and_asks_for_others_stops_every_site(fed, monkeypatch)
    fed.write_site_files()
    receipts = [receipt for ledger in fed.site_ledgers.values() for receipt in ledger.receipts(evidence=True)]
    assert fed.ledger.recover(receipts) == 2
    for site in fed.sites:
        control.end_alarm(fed.root / site.name)
    fed.core().run(fed.transport)
    for site in fed.sites:
        ledger = fed.site_ledgers[site.name]
        assert ledger.alarms() == ()
        assert ledger.spent() == fed.ledger.spent(site.pool)
        assert ledger.server_heads()[fed.ledger.ledger_id][1] == fed.ledger.head().hash


@pytest.mark.parametrize("fed", [12], indirect=True)  # room for what is accepted a second time
def test_a_server_that_recovered_less_than_the_sites_hold_is_stopped_again(
    fed: Federation, monkeypatch: pytest.MonkeyPatch
) -> None:
    fed.write_site_files()
    test_a_server_that_drops_its_last_rows_and_asks_for_others_stops_every_site(fed, monkeypatch)
    for site in fed.sites:
        control.end_alarm(fed.root / site.name)
    monkeypatch.undo()  # the server now asks again for the queries that it lost
    run_batches(fed, 1)
    assert_nothing_leaves(fed, "lacks charges")


def test_a_copy_made_while_the_ledger_is_written_is_whole_private_and_without_keys(fed: Federation) -> None:
    run_batches(fed, 1)
    key = fed.root / "ledger.key"
    write_key(fed, key)
    copy = snapshot(fed, "copy.sqlite")
    assert copy.stat().st_mode & 0o777 == 0o600
    assert sorted(path.name for path in fed.root.glob("*copy.sqlite*")) == ["copy.sqlite"]
    assert verify(copy, public_key=fed.signing_key.public_key()).rows == fed.ledger.row_count
    raw = fed.signing_key.private_bytes_raw()
    for path in (copy, fed.root / "ledger.sqlite", fed.root / "site-0" / "site-ledger.sqlite"):
        data = path.read_bytes()
        assert raw not in data
        assert raw.hex().encode() not in data
        assert b"PRIVATE" not in data
    site_copy = fed.root / "site-copy.sqlite"
    assert (
        RUN.invoke(ledger_app, ["backup", str(fed.root / "site-0/site-ledger.sqlite"), str(site_copy)]).exit_code == 0
    )
    assert verify(site_copy).rows == fed.site_ledgers["site-0"].row_count
    again = RUN.invoke(ledger_app, ["backup", str(fed.root / "ledger.sqlite"), str(copy)])
    assert again.exception is not None
    damaged = sqlite3.connect(copy, isolation_level=None)
    damaged.execute("DROP TRIGGER rows_no_update")
    damaged.close()
    result = RUN.invoke(ledger_app, ["backup", str(copy), str(fed.root / "third.sqlite")])
    assert isinstance(result.exception, LedgerCorrupt)
    assert not (fed.root / "third.sqlite").exists()


def test_the_signing_key_is_changed_by_two_commands_even_when_the_second_is_interrupted(fed: Federation) -> None:
    run_batches(fed, 1)
    fed.ledger.close()
    key, new = fed.root / "ledger.key", fed.root / "next.key"
    write_key(fed, key)
    old = key.read_bytes()
    printed = RUN.invoke(ledger_app, ["new-key", str(new)]).stdout.strip()
    text = new.read_bytes()
    rotate = ["rotate-key", str(fed.root / "ledger.sqlite"), "--key", str(key), "--new-key", str(new)]

    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("common.ledger.keys.write_atomically", interrupted)
        RUN.invoke(ledger_app, rotate)
    assert key.read_bytes() == old, "the ledger has changed hands and the files have not"
    typed(ledger_app, *rotate)
    assert key.read_bytes() == text
    assert key.stat().st_mode & 0o777 == 0o600
    (kept,) = fed.root.glob("ledger.key.retired-*")
    assert kept.read_bytes() == old
    report = verify(fed.root / "ledger.sqlite", public_key=fed.signing_key.public_key())
    assert report.ok
    fed.ledger = Ledger.open(fed.root / "ledger.sqlite")
    assert fed.ledger.public_key == printed


def write_key(fed: Federation, path: Path) -> None:
    from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

    path.write_bytes(fed.signing_key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    path.chmod(0o600)
