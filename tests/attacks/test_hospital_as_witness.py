"""Attack: an admitted hospital lies as a witness, about the heads of its own and of other ledgers.

| attack | defence |
|---|---|
| it gives its ledger an honest hospital's name, so that that ledger looks forked | heads are stored by their signer |
| it does so before the honest head arrives | heads are stored by their signer, in any order |
| it claims to know more rows than a ledger has | proofs are made for existing rows only |
| it sends two megabytes of proofs, to be passed on to all hospitals | only requested proofs are passed on |
| it sends a signature line in another's name, to replace the true signature | each line is verified by itself |
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from client.witnessing import Witnessing
from common.errors import InvalidInput
from common.events import EventLog
from common.messages import WitnessReply, WitnessRequest, decode, encode
from common.witness.memory import SHOWN, HeadMemory, blinded
from common.witness.merkle import MAX_PROOF
from common.witness.messages import MAX_WITNESSES, ConsistencyProof, PeerHead
from common.witness.notes import _LOG, MAX_SIZE, CheckpointNote, NoteSignature, _key_hash, origin_of, parse_signature
from common.witness.verify import Countersigned, countersigned
from server.aggregation.witnessing import Witnesses
from tests.federation import Federation, make_study

pytestmark = pytest.mark.slow

HONEST, LIAR, THIRD = "site-0", "site-1", "site-2"


class Watched(Federation):
    """Holds three hospitals that are witnesses; a test may make :data:`LIAR` lie."""

    def __init__(self, root: Path) -> None:
        study = make_study(quorum=3, planned_queries=3, aggregation="sealed-sum", spare_draws=2)
        super().__init__(root, study=study, sites=3)
        self.witnesses: dict[str, Witnessing] = {}
        for site in self.sites:
            worker = self.workers[site.node_id]
            self.witnesses[site.name] = worker._witness = Witnessing(
                self.root / site.name / "witnesses",
                site=site.name,
                ledger=self.site_ledgers[site.name],
                server_keys=worker._config.server.signing_public_keys,
                now=lambda: 1_800_000_000.0,
            )
        self.requests: dict[str, WitnessRequest] = {}
        self.transport.intercept = self.heard
        self.lie = lambda reply: reply

    def heard(self, node: int, body: bytes, reply: bytes) -> bytes:
        name = next(site.name for site in self.sites if site.node_id == node)
        if isinstance(asked := decode(body), WitnessRequest):
            self.requests[name] = asked
            if name == LIAR and isinstance(said := decode(reply), WitnessReply):
                self.said = self.lie(said)
                return encode(self.said)
        return reply

    def countersign(self) -> None:
        events = EventLog(self.events_file, study=self.study.id)
        made = Witnesses(self.root / "witnesses", study=self.study.id, ledger=self.ledger, events=events)
        made.ask(self.sites, self.transport)

    def verified(self, name: str) -> Countersigned:
        """Return what `consilium verify` says of a hospital's own ledger, with the other hospitals' keys."""
        ledger, folder = self.site_ledgers[name], self.root / name
        keys = {one.name: one.answer_key for one in self.sites if one.name != name}
        leaves = blinded(ledger.row_hashes(kinds=SHOWN), folder / "witnesses")
        return countersigned(folder, ledger.head(), leaves, signers=[ledger.public_key], witnesses=keys)

    def false_head(self, *, longer: bool = True) -> bytes:
        """Return a false head of the honest ledger, signed by the liar; by default with the true number of rows."""
        ledger, honest = self.site_ledgers[LIAR], self.site_ledgers[HONEST]
        size = 1 << 40 if longer else len(honest.row_hashes(kinds=SHOWN))
        note = CheckpointNote(origin_of("site", honest.ledger_id), size, b"f" * 32)
        return note.signed(ledger.sign, key=ledger.public_key).render().encode()

    def told_of(self) -> set[tuple[str, ...]]:
        return {(event["site"], *event["ledgers"]) for event in self.events("witness-disagrees")}


@pytest.fixture
def world(tmp_path: Path) -> Iterator[Watched]:
    federation = Watched(tmp_path)
    yield federation
    federation.close()


def assert_honest_ledger_is_whole(world: Watched) -> None:
    """Check that both other hospitals countersigned the honest ledger's newest head and stored no conflict about it."""
    found = world.verified(HONEST)
    assert (found.problems, found.size) == ((), found.rows)
    assert THIRD in found.witnesses
    origin = origin_of("site", world.site_ledgers[HONEST].ledger_id)
    for name in (HONEST, THIRD):
        assert origin not in world.witnesses[name].memory.conflicting()
        assert not world.witnesses[name].memory.server_forked


@pytest.mark.parametrize("longer", [True, False], ids=["longer", "as long"])
@pytest.mark.parametrize("knew", [True, False], ids=["after it was seen", "before anybody saw it"])
def test_a_ledger_under_an_honest_ledgers_name_does_not_make_the_honest_one_look_forked(
    world: Watched, knew: bool, longer: bool
) -> None:
    """Otherwise `site status` of its peers would report that two histories of the honest ledger were signed."""
    world.lie = lambda reply: replace(reply, own=b"" if knew else world.false_head(longer=longer), own_growths=())
    world.countersign()
    world.lie = lambda reply: replace(reply, own=world.false_head(longer=longer), own_growths=())
    world.countersign()
    world.core().run(world.transport)
    world.countersign()
    assert_honest_ledger_is_whole(world)
    assert any(LIAR in ledgers for _, *ledgers in world.told_of())


@pytest.mark.parametrize("first", [True, False], ids=["first", "second"])
def test_a_server_that_carries_only_the_false_head_does_not_make_the_honest_ledger_look_forked(
    world: Watched, first: bool
) -> None:
    """Otherwise a site that sees the false head first would countersign no head of the honest hospital."""
    false = PeerHead(LIAR, world.false_head(), ())
    world.lie = lambda reply: replace(reply, own=b"", own_growths=())
    everybody = world.sites
    if first:  # only the third site countersigns, so no other has seen the honest hospital's head
        world.sites = tuple(site for site in everybody if site.name == THIRD)
    world.countersign()
    world.sites = everybody
    for name in world.requests:
        if name != LIAR:
            world.witnesses[name].answer(replace(world.requests[name], heads=(false,)))
    world.core().run(world.transport)
    world.countersign()
    assert_honest_ledger_is_whole(world)


@pytest.mark.parametrize("rows", [MAX_SIZE, 1 << 40])
def test_a_claim_of_rows_that_do_not_exist_ends_no_run(world: Watched, rows: int) -> None:
    world.lie = lambda reply: replace(
        reply, size=rows, held_row=rows, heads=tuple(replace(one, size=rows) for one in reply.heads)
    )
    world.countersign()
    world.core().run(world.transport)
    world.countersign()
    assert_honest_ledger_is_whole(world)


def test_proofs_that_nobody_requested_are_not_passed_on(world: Watched) -> None:
    many = tuple(ConsistencyProof(since, ("a" * 64,) * MAX_PROOF) for since in range(1, MAX_WITNESSES + 1))
    world.lie = lambda reply: replace(reply, own_growths=many)
    world.countersign()
    world.core().run(world.transport)
    world.countersign()
    assert len(encode(world.requests[THIRD])) < 64 << 10 < len(encode(world.said))
    assert_honest_ledger_is_whole(world)


def forged_line(origin: str, key: str) -> bytes:
    """Return a signature line in a ledger's name, with the hash of its key and a signature of zeros."""
    return NoteSignature(origin, _key_hash(origin, _LOG, key), bytes(64)).line.encode()


def test_a_line_in_the_name_of_another_ledger_replaces_no_signature(world: Watched) -> None:
    """The liar sends a second line after its own valid one. It must not remove the honest signature from the note."""
    world.countersign()
    origin = origin_of("site", world.site_ledgers[HONEST].ledger_id)
    forged = forged_line(origin, world.site_ledgers[HONEST].public_key)

    def lie(reply: WitnessReply) -> WitnessReply:
        mine = tuple(one for one in reply.heads if one.site == HONEST)
        return replace(reply, heads=reply.heads + tuple(replace(one, line=forged, problem="") for one in mine))

    world.lie = lie
    world.core().run(world.transport)
    world.countersign()
    world.lie = lambda reply: replace(lie(reply), heads=lie(reply).heads[-1:])
    world.countersign()
    assert_honest_ledger_is_whole(world)


def test_a_line_in_the_name_of_the_servers_ledger_replaces_no_signature(world: Watched) -> None:
    origin = origin_of("server", world.ledger.ledger_id)
    world.core().run(world.transport)
    world.countersign()
    forged = forged_line(origin, world.ledger.public_key)
    world.lie = lambda reply: replace(reply, line=forged, problem="")
    world.countersign()
    assert not world.events("witness-missing")
    note = HeadMemory(world.root / "witnesses").note(origin)
    assert note is not None
    assert note.is_signed(world.ledger.public_key)


def test_a_note_on_the_servers_disk_that_was_damaged_by_such_a_line_is_repaired(world: Watched) -> None:
    origin = origin_of("server", world.ledger.ledger_id)
    world.core().run(world.transport)
    world.countersign()
    memory = HeadMemory(world.root / "witnesses")
    note = memory.note(origin)
    assert note is not None
    damaged = NoteSignature(origin, _key_hash(origin, _LOG, world.ledger.public_key), bytes(64))
    memory.keep(note.with_signatures((damaged,)))
    world.countersign()
    note = memory.note(origin)
    assert note is not None
    assert note.is_signed(world.ledger.public_key)


@pytest.mark.parametrize("name", ["a\x1b[31m", "a\u202eb", "a\x07"])
def test_the_name_of_a_signature_is_printable(name: str) -> None:
    with pytest.raises(InvalidInput, match="printable name"):
        parse_signature(NoteSignature(name, bytes(4), bytes(64)).line)
