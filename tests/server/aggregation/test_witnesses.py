"""Tests that sites countersign the heads of the server and of each other, so that a fork is noticed automatically."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from client.operations import security_events
from client.witnessing import MAX_UNRECEIPTED, Witnessing
from common.errors import QuorumNotReached, Refused
from common.event_kinds import event_words
from common.events import EventLog
from common.ledger.keys import public_hex
from common.messages import WitnessReply, WitnessRequest, decode, encode
from common.security_log.follow import logged_event
from common.witness.memory import MAX_CONFLICTS, SHOWN, HeadMemory, blinded
from common.witness.merkle import root
from common.witness.messages import ConsistencyProof, PeerHead
from common.witness.notes import CheckpointNote, NoteSignature, Sign, origin_of, witness_name
from common.witness.verify import Countersigned, countersigned
from server.aggregation.exchange import Reply
from server.aggregation.witnessing import Witnesses
from server.ledger.backup import backup
from server.ledger.server_ledger import Ledger
from tests.dashboard_study import make_study_directory
from tests.federation import Federation, make_study
from tests.waiting import events_of, until

pytestmark = pytest.mark.slow

SITES = 3
NOW = 1_800_000_000.0


@pytest.fixture
def world(tmp_path: Path) -> Iterator[Federation]:
    study = make_study(quorum=3, planned_queries=3, aggregation="sealed-sum", spare_draws=2)
    with Federation(tmp_path, study=study, sites=SITES) as federation:
        for site in federation.sites:
            watch(federation, site.name)
        federation.asked = []
        federation.transport.intercept = lambda node, body, reply: federation.asked.append((node, body)) or reply
        yield federation


def watch(world: Federation, name: str) -> Witnessing:
    """Make a site a witness, as its worker's daemon does."""
    site = next(one for one in world.sites if one.name == name)
    worker = world.workers[site.node_id]
    worker._witness = Witnessing(
        world.root / name / "witnesses",
        site=name,
        ledger=world.site_ledgers[name],
        server_keys=worker._config.server.signing_public_keys,
        now=lambda: NOW,
    )
    return worker._witness


def countersign(world: Federation, ledger: Ledger | None = None) -> None:
    events = EventLog(world.events_file, study=world.study.id)
    found = Witnesses(world.root / "witnesses", study=world.study.id, ledger=ledger or world.ledger, events=events)
    found.ask(world.sites, world.transport)


def told(world: Federation, kind: str) -> list[tuple[str, int]]:
    return [(event["site"], event["size"]) for event in world.events(kind)]


def seen_by(world: Federation, site: str = "") -> Countersigned:
    """Return what `verify` reports of the server's ledger, or of a site's own ledger."""
    ledger = world.site_ledgers[site] if site else world.ledger
    keys = {one.name: one.answer_key for one in world.sites if one.name != site}
    folder = world.root / site if site else world.root
    signers = [ledger.public_key]
    leaves = blinded(ledger.row_hashes(kinds=SHOWN), folder / "witnesses") if site else ledger.row_hashes()
    return countersigned(folder, ledger.head(), leaves, signers=signers, witnesses=keys)


def test_every_site_countersigns_the_newest_head_and_everybody_can_check_it(world: Federation) -> None:
    world.core().run(world.transport)
    countersign(world)
    rows = world.ledger.row_count
    assert told(world, "witnessed") == [(f"site-{i}", rows) for i in range(SITES)]
    found = seen_by(world)
    assert (found.size, sorted(found.witnesses), found.problems) == (rows, ["site-0", "site-1", "site-2"], ())
    assert re.search(r"^witnesses: 3 of 3 .*newest row: site-0 \(2027-01-15\)", found.line)
    for site in world.sites:  # each site has the same head with all the others' signatures
        note = world.workers[site.node_id]._witness.memory.note(origin_of("server", world.ledger.ledger_id))
        assert note is not None
        assert note.root == root([bytes.fromhex(row.hash) for row in world.ledger.rows()])
        for other in world.sites:
            time = note.cosigned_at(name=witness_name(other.name), key=other.answer_key)
            assert (time == int(NOW)) or other == site, (site.name, other.name)


def test_sites_countersign_each_other_s_heads_through_the_relay(world: Federation) -> None:
    world.core().run(world.transport)
    countersign(world)
    for site in world.sites:
        found = seen_by(world, site.name)
        assert (len(found.witnesses), found.known, found.problems) == (2, 2, ())
        assert found.size == found.rows


def test_a_head_grows_and_is_countersigned_anew_with_a_proof(world: Federation) -> None:
    countersign(world)
    before = world.ledger.row_count
    world.core().run(world.transport)
    countersign(world)
    assert seen_by(world).size == world.ledger.row_count > before
    assert seen_by(world, "site-1").problems == ()
    assert world.events("witness-missing") == world.events("witness-disagrees") == []


def test_a_site_that_is_away_is_named_and_counted_as_missing(world: Federation) -> None:
    countersign(world)
    world.ledger.note("something more")
    world.transport.offline = {100}
    countersign(world)
    assert told(world, "witness-missing") == [("site-0", world.ledger.row_count)]
    (event,) = world.events("witness-missing")
    words = event_words(event)
    for said in ("site-0 has not confirmed the ledger up to its newest row", "it sent no reply", "asked again"):
        assert said in words
    assert sorted(seen_by(world).witnesses) == ["site-1", "site-2"]
    world.transport.offline = set()
    world.ledger.note("and more")
    countersign(world)  # it catches up over the head that it missed
    assert len(seen_by(world).witnesses) == 3


def test_a_site_warns_in_words_of_hospitals_that_stay_away_and_not_of_the_first_look_at_a_head(
    world: Federation, caplog: pytest.LogCaptureFixture
) -> None:
    countersign(world)
    world.core().run(world.transport)  # the server learns from a first refused proof which receipts a site holds
    countersign(world)
    assert "witness-missing" not in caplog.text, "nobody was away"
    world.ledger.note("and more")
    world.transport.offline = {100}
    countersign(world)
    said = {record.getMessage() for record in caplog.records if "witness-missing" in record.getMessage()}
    (line,) = said
    assert f"event=witness-missing ledger={world.ledger.ledger_id} peers=1 says='1 of " in line
    assert "`consilium site status`" in line
    event = logged_event(f"2026-11-24 09:00:00,000 WARNING client.witnessing {line}", security_events._LINES)
    assert event is not None
    assert event.facts == {"ledger": world.ledger.ledger_id, "peers": 1}


def test_a_proof_that_keeps_beginning_at_another_row_is_warned_of(
    world: Federation, caplog: pytest.LogCaptureFixture
) -> None:
    events = EventLog(world.events_file, study=world.study.id)
    asking = Witnesses(world.root / "witnesses", study=world.study.id, ledger=world.ledger, events=events)
    request = replace(asking._request(world.sites[0]), held_row=99)
    witness = world.workers[world.sites[0].node_id]._witness
    assert witness.answer(request).problem == "gap"
    assert "witness-missing" not in caplog.text, "the server may not know yet which receipts this site holds"
    assert witness.answer(request).problem == "gap"
    assert f"peers={SITES - 1} " in caplog.text


def fork(world: Federation, *, rows: int) -> Ledger:
    """Return a copy of the server's ledger with other rows appended, signed by the server's own key."""
    path = world.root / "forked.sqlite"
    shutil.copy(world.root / "copy.sqlite", path)
    forked = Ledger.open(path, signing_key=world.signing_key, restored=True)
    forked._restoring = False
    for number in range(rows):
        forked.note(f"another history {number}")
    return forked


def copy_now(world: Federation) -> None:
    world.ledger._chain._db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    shutil.copy(world.root / "ledger.sqlite", world.root / "copy.sqlite")


@pytest.mark.parametrize("more", [1, 3, 8])
def test_a_fork_that_is_as_long_or_longer_is_an_alarm_and_stops_every_answer(world: Federation, more: int) -> None:
    copy_now(world)
    world.ledger.note("the history that was countersigned")
    countersign(world)
    with fork(world, rows=more) as forked:
        countersign(world, forked)
        assert [site for site, _ in told(world, "witness-disagrees")] == [f"site-{i}" for i in range(SITES)]
        assert seen_by(world).problems == ()  # no site signed the fork
        head, leaves = forked.head(), forked.row_hashes()
    problem = countersigned(
        world.root / "site-0", head, leaves, signers=[public_hex(world.signing_key)], witnesses={}
    ).problems
    rows = world.ledger.row_count
    (what,) = problem
    assert re.search(rf"rows up to {rows} differ .*signed head", what)
    assert all(world.workers[site.node_id]._witness.memory.server_forked for site in world.sites)
    with pytest.raises(QuorumNotReached):
        world.core().run(world.transport)
    assert world.ledger.answers(world.study.id) == ()


def test_the_first_head_a_site_is_shown_must_have_the_row_of_its_receipt(world: Federation) -> None:
    """The site has countersigned nothing yet, and the ledger's key signed the head. Only the receipt shows the fork."""
    copy_now(world)
    world.core().run(world.transport)
    held = max(ledger.held(world.ledger.ledger_id).seq for ledger in world.site_ledgers.values())
    assert held > 0
    with fork(world, rows=held) as forked:
        countersign(world, forked)
        assert [site for site, _ in told(world, "witness-disagrees")] == [f"site-{i}" for i in range(SITES)]
    assert told(world, "witnessed") == []
    assert all(world.workers[site.node_id]._witness.memory.server_forked for site in world.sites)


def test_a_shorter_ledger_is_not_countersigned_and_is_reported(world: Federation) -> None:
    copy_now(world)
    for number in range(3):
        world.ledger.note(f"row {number}")
    countersign(world)
    with fork(world, rows=1) as forked:
        countersign(world, forked)
    assert {event["reason"] for event in world.events("witness-missing")} == {"stale"}
    assert seen_by(world).size == world.ledger.row_count


def test_a_server_that_shows_two_sites_two_ledgers_gets_neither_the_other_s_signature(world: Federation) -> None:
    copy_now(world)
    world.ledger.note("what one half is shown")
    with fork(world, rows=1) as forked:
        both = world.sites
        world.sites = both[:1]
        countersign(world)
        shutil.rmtree(world.root / "witnesses")
        world.sites = both[1:]
        countersign(world, forked)
        world.sites = both
        witness = world.workers[100]._witness
        assert witness is not None
        note = witness.memory.note(origin_of("server", world.ledger.ledger_id))
        assert note is not None
        assert [note.cosigned_at(name=witness_name(one.name), key=one.answer_key) for one in both[1:]] == [None, None]
        countersign(world, forked)  # the fork reaches the first site
    assert [site for site, _ in told(world, "witness-disagrees")] == ["site-0"]


def test_a_peers_signature_on_its_own_ledger_stops_nobody_else(world: Federation) -> None:
    world.core().run(world.transport)
    countersign(world)
    liar = world.workers[101]._witness
    assert liar is not None
    made = liar._own

    def other(request: WitnessRequest) -> object:
        note, growths = made(request)
        right = CheckpointNote.parse(note.decode())
        signed = CheckpointNote(right.origin, right.size, b"f" * 32).signed(
            world.site_ledgers["site-1"].sign, key=world.site_ledgers["site-1"].public_key
        )
        return signed.render().encode(), growths

    liar._own = other  # type: ignore[method-assign,assignment]
    countersign(world)
    assert {tuple(event["ledgers"]) for event in world.events("witness-disagrees")} == {("site-1",)}
    for node in (100, 102):
        witness = world.workers[node]._witness
        assert witness is not None
        assert not witness.memory.server_forked
        assert len(witness.memory.conflicts()) == 1


def test_a_site_that_shows_another_ledger_every_time_is_told_of_and_leaves_no_file_a_time(world: Federation) -> None:
    world.core().run(world.transport)
    countersign(world)
    liar, ledger = world.workers[101]._witness, world.site_ledgers["site-1"]
    assert liar is not None
    shown = iter(range(1_000))

    def other(request: WitnessRequest) -> object:
        note = CheckpointNote(origin_of("site", f"{next(shown):032x}"), 3, b"f" * 32)
        signed = note.signed(ledger.sign, key=ledger.public_key)
        junk = NoteSignature(note.origin, b"junk", bytes(64))  # stands before the site's own line
        return replace(signed, signatures=(*[junk] * 200, *signed.signatures)).render().encode(), ()

    liar._own = other  # type: ignore[method-assign,assignment]
    for node in (100, 102):  # a server that forwards everything, as an accomplice of the site would
        for number in range(40):
            witness = world.workers[node]._witness
            assert witness is not None
            head = other(None)[0]  # type: ignore[arg-type,index]
            (said,) = witness.answer(replace(request_of(world), heads=(PeerHead("site-1", head, ()),))).heads
            assert (said.line, said.problem) == (b"", "contradicts"), number
    before = files(world)
    for _ in range(5):
        countersign(world)
    assert {(event["site"], *event["ledgers"]) for event in world.events("witness-disagrees")} == {("site-1", "site-1")}
    assert files(world) == before
    for node in (100, 102):
        witness = world.workers[node]._witness
        assert witness is not None
        assert witness.memory.conflicting() == (origin_of("site", ledger.ledger_id),)
        assert not witness.memory.server_forked
        conflicts = list(witness.memory.folder.glob("*.conflict-*"))
        assert len(conflicts) == MAX_CONFLICTS
        assert max(path.stat().st_size for path in conflicts) < 1_000, "lines of anybody's are stored as evidence"
        witness.memory.forget(*witness.memory.conflicting())  # a person has looked into it
        assert witness.memory.conflicts() == ()


def test_a_recovered_site_is_countersigned_anew_once_the_other_hospitals_have_ended_the_alarm(
    world: Federation,
) -> None:
    """Until then the server must not send them the head from before the recovery."""
    path, copy = world.root / "site-0" / "site-ledger.sqlite", world.root / "monday.sqlite"
    world.core(world.planned()[:1]).run(world.transport)
    backup(path, copy)
    world.core(world.planned()[:2]).run(world.transport)
    countersign(world)
    ledger = world.put_back(copy)
    HeadMemory(path.parent / "witnesses").forget(origin_of("site", ledger.ledger_id))
    watch(world, "site-0")
    world.core().run(world.transport)
    countersign(world)
    assert {(event["site"], *event["ledgers"]) for event in world.events("witness-disagrees")} == {
        ("site-1", "site-0"),
        ("site-2", "site-0"),
    }
    memories = [world.workers[node]._witness.memory for node in (101, 102)]
    for memory in memories:  # as `consilium site recover` does
        memory.forget(*memory.conflicting())
    countersign(world)
    assert [memory.conflicts() for memory in memories] == [(), ()]
    assert len(world.events("witness-disagrees")) == 2, "nobody disagrees any more"
    assert sorted(seen_by(world, "site-0").witnesses) == ["site-1", "site-2"]


def files(world: Federation) -> list[str]:
    return sorted(str(path.relative_to(world.root)) for path in world.root.rglob("witnesses/*"))


@pytest.mark.parametrize("time", [1 << 63, (1 << 64) - 1, 253_402_300_800])
def test_a_countersignature_of_no_date_counts_for_nothing_and_ends_no_check(world: Federation, time: int) -> None:
    made = CheckpointNote.cosign

    def late(self: CheckpointNote, sign: Sign, *, name: str, key: str, time: int) -> NoteSignature:
        return made(self, sign, name=name, key=key, time=late_time if name == witness_name("site-1") else time)

    late_time = time
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(CheckpointNote, "cosign", late)
        countersign(world)
    assert sorted(seen_by(world).witnesses) == ["site-0", "site-2"]
    for site in ("site-0", "site-2"):
        assert seen_by(world, site).problems == ()


def test_a_site_s_own_head_says_the_same_whoever_was_withdrawn_and_whatever_it_trained(world: Federation) -> None:
    """A withdrawal or a training must change neither the size nor anything computable without the site's secret."""
    ledger, witness = world.site_ledgers["site-0"], world.workers[100]._witness
    assert witness is not None
    world.core().run(world.transport)
    countersign(world)
    before = CheckpointNote.parse(witness._own(request_of(world))[0].decode())
    ledger.withdraw_patient(slot=0, voter=0, subject="a" * 64, weights=None, deal="b" * 64)
    ledger.note("a training, a code computed anew")
    after = CheckpointNote.parse(witness._own(request_of(world))[0].decode())
    assert (after.size, after.root) == (before.size, before.root)
    hashes = ledger.row_hashes(kinds=SHOWN)
    assert root(hashes) != before.root  # blinded
    counted = len(ledger.receipts()) + world.study.privacy.planned_queries
    assert before.size == counted + 3  # its first row, the study, the pool


def request_of(world: Federation) -> WitnessRequest:
    (body,) = [body for node, body in world.asked if node == 100][-1:]
    message = decode(body)
    assert isinstance(message, WitnessRequest)
    return message


def test_a_forged_signature_line_counts_for_nobody(world: Federation) -> None:
    """The test forges one site's line under another's name, and a line about another head."""

    def forge(node: int, body: bytes, reply: bytes) -> bytes:
        said = decode(reply)
        if isinstance(said, WitnessReply) and node == 100 and said.line:
            return encode(replace(said, line=said.line.replace(b"site-0", b"site-1")))
        return reply

    world.transport.intercept = forge
    countersign(world)
    assert sorted(seen_by(world).witnesses) == ["site-1", "site-2"]
    memory = world.root / "witnesses"
    (memory / "planted.note").write_text(
        CheckpointNote(origin_of("server", world.ledger.ledger_id), 1, b"x" * 32).render()  # signed by nobody
    )
    assert seen_by(world).problems == ()


def test_sites_of_earlier_versions_are_no_alarm(world: Federation) -> None:
    for worker in world.workers.values():
        worker._witness = None
    countersign(world)
    assert world.events("witness-missing") == []
    assert seen_by(world).line.startswith("witnesses: 0 of 3 ")


def test_a_rolled_back_server_is_noticed_also_by_a_witness_that_holds_no_receipt(world: Federation) -> None:
    """A head covers every row, whereas a receipt covers only the rows up to its release."""
    world.core().run(world.transport)
    copy_now(world)
    world.ledger.note("after the last receipt")
    countersign(world)
    with fork(world, rows=2) as forked:
        countersign(world, forked)
    assert len(told(world, "witness-disagrees")) == SITES
    with Ledger.open(world.root / "forked.sqlite") as opened:
        head, leaves = opened.head(), opened.row_hashes()
    found = countersigned(world.root, head, leaves, signers=[head.public_key], witnesses={})
    assert found.problems


def invented(world: Federation, number: int) -> WitnessRequest:
    """Return a request about a ledger that the server has just invented."""
    origin = origin_of("server", f"{number:032x}")
    note = CheckpointNote(origin, 1, bytes([number % 256]) * 32).signed(world.ledger.sign, key=world.ledger.public_key)
    return WitnessRequest(
        study=world.study.id,
        ledger=f"{number:032x}",
        note=note.render().encode(),
        growth=ConsistencyProof(0, ()),
        held_row=0,
        held=(),
        heads=(),
        own=b"",
        own_since=(),
    )


def test_heads_of_invented_ledgers_do_not_fill_a_hospitals_disk(
    world: Federation, caplog: pytest.LogCaptureFixture
) -> None:
    witness = world.workers[100]._witness
    assert witness is not None
    for number in range(MAX_UNRECEIPTED):
        assert witness.answer(invented(world, number)).problem == ""
    before = sorted(witness.memory.folder.iterdir())
    for number in range(MAX_UNRECEIPTED, MAX_UNRECEIPTED + 4):
        with pytest.raises(Refused, match=f"{MAX_UNRECEIPTED} ledgers") as refused:
            witness.answer(invented(world, number))
        assert refused.value.reason == "too-many-ledgers"
    assert sorted(witness.memory.folder.iterdir()) == before
    assert "event=witness-refused reason=too-many-ledgers" in caplog.text
    assert witness.answer(invented(world, 3)).problem == "", "a known ledger is countersigned as before"
    world.core().run(world.transport)  # the ledger of the study sends receipts, so it is no invented one
    countersign(world)
    assert ("site-0", world.ledger.row_count) in told(world, "witnessed")


def test_a_site_that_does_not_countersign_delays_no_student(tmp_path: Path) -> None:
    """The server waits for a silent site for 30 s, up to three times, while it trains the student."""
    made = make_study_directory(tmp_path)
    file, exchange, late = made.workspace.events_file, made.transport.exchange, []

    def finished(stage: str) -> bool:
        return any(event["stage"] == stage for event in events_of(file, "stage-finished"))

    def silent(bodies: Mapping[int, bytes], *, timeout_s: float) -> Iterator[Reply]:
        if finished("collect"):
            late.append(sorted(bodies))
            until(lambda: finished("export"), "no student was exported meanwhile", timeout_s=120)
        return exchange(bodies, timeout_s=timeout_s)

    made.transport.exchange = silent
    made.run()
    assert late[0] == sorted(made.transport.workers)
    assert events_of(file, "run-finished")
