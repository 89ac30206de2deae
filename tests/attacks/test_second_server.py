"""Attack: one of two servers whose studies share a hospital's pool, and so its ledger, speaks of the other's ledger.

All that it sends is signed with the key that its own kit gave the hospital.

| attack | defence |
|---|---|
| it learns from a reply how many rows the other server's ledger has | a reply states only the asking server's ledger |
| its receipt makes the other study look contradicted, or stops it | only receipts of its own ledger are read |
| its head under the other's name makes that ledger look forked, which stops the study | only its own heads are read |
| it names the other ledger before it is used, which keeps that server out | each kit names its server's ledger |
| the same, if both kits are of earlier versions | none: the hospital can leave |
| its kit claims the other ledger | the hospital joins no second study with the same ledger and another key |
| it contradicts itself, which stops every study of the pool | none: the alarm says so, and the hospital ends it |
| it shows two workers of the pool two histories at the same moment | one worker at a time countersigns |
"""

from __future__ import annotations

import re
import shutil
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from client.operations import staff_decisions
from client.operations.serve import open_worker
from client.policy import load_site
from client.site.books import forget_joined
from client.site.enrolment import create_site, join_site
from client.site.status import facts_of
from client.worker import Worker
from common.config import Study
from common.envelope import body_of, sign_request
from common.errors import ALARM_STOPS, ConsiliumError, InvalidInput
from common.ledger import chain
from common.ledger.charges import RosterEntry
from common.ledger.keys import load_signing_key, public_hex
from common.ledger.receipts import Receipt
from common.messages import NO_HEAD, Offer, OfferReply, Part, Receipts, ReceiptsReply, WitnessRequest, decode, encode
from common.peers import Peer
from common.privacy.mechanism import QuerySpec
from common.witness.memory import FOLDER, HeadMemory, KnownHead
from common.witness.messages import ConsistencyProof, WitnessReply
from common.witness.notes import CheckpointNote, origin_of
from consilium.cli.site import status_text
from server.ledger.server_ledger import Ledger
from server.study.create_study import open_ledger
from server.study.workspace import Site, Workspace
from tests.own_site import queries_of
from tests.studies import kit_of, served_study
from tests.worlds import make_study, pool_of, receipts_of

pytestmark = pytest.mark.slow

SITE, POOL = "north", "north/adults"
BATCH = "b" * 64


@dataclass
class Server:
    """Holds a server with its study and ledger, and the hospital's worker that reads its messages."""

    study: Study
    key: Ed25519PrivateKey
    ledger: Ledger
    worker: Worker
    directory: Path

    def says(self, message: Part) -> Part | None:
        """Send a message that this server signs; return the hospital's reply, or None if it refuses."""
        try:
            return decode(body_of(self.worker.answer(sign_request(encode(message), sign=self.key.sign, site=SITE))))
        except ConsiliumError:
            return None

    def offers(self, *queries: QuerySpec, ledger: str = "") -> OfferReply:
        reply = self.says(Offer(self.study.id, ledger or self.ledger.ledger_id, BATCH, queries))
        assert isinstance(reply, OfferReply)
        return reply

    def releases(self, *queries: QuerySpec) -> ReceiptsReply | None:
        """Have the hospital accept queries, release them, and send it the receipts that it lacks."""
        assert self.offers(*queries).reason == "accepted"
        return self.tells(self.ledger, *queries)

    def tells(self, ledger: Ledger, *queries: QuerySpec) -> ReceiptsReply | None:
        """Release queries in a ledger and send the hospital its newest receipt."""
        study = next(iter(ledger.books.studies))
        before = receipts_of(ledger, SITE)[-1:]
        roster = tuple(RosterEntry(name, pool) for name, pool in ((SITE, POOL), ("south", "south")))
        ledger.release_batch(
            study_id=study, batch_id=BATCH, roster=roster, queries=queries, draw=lambda _: np.zeros(4, dtype=np.int64)
        )
        new = receipts_of(ledger, SITE, after=before[0].head.seq if before else 0)
        reply = self.says(Receipts(ledger.ledger_id, tuple(one.render() for one in new)))
        return reply if isinstance(reply, ReceiptsReply) else None

    def gets(self) -> set[str]:
        """Return the ledgers of the receipts that the hospital writes for this server with ``consilium site heads
        --out``.
        """
        return {Receipt.parse(line).ledger_id for line in staff_decisions.receipt_lines(self.directory)}

    def shows(self, ledger_id: str, *, root: bytes, held_row: int = 0) -> WitnessReply | None:
        """Ask for a countersignature of a head of this ledger, with a root that this server invented."""
        note = CheckpointNote(origin_of("server", ledger_id), 5, root).signed(self.key.sign, key=public_hex(self.key))
        growth, text = ConsistencyProof(0, ()), note.render().encode()
        asked = WitnessRequest(self.study.id, ledger_id, text, growth, held_row, (), (), b"", ())
        reply = self.says(asked)
        return reply if isinstance(reply, WitnessReply) else None


@contextmanager
def hospital(
    root: Path, first: Workspace, second: Workspace, *, earlier: tuple[Workspace, ...] = ()
) -> Iterator[tuple[Server, Server]]:
    """Yield a worker and a server for each of two studies, in which one pool of a hospital takes part.

    The kits of the studies in ``earlier`` do not name the server's ledger, as those of earlier versions.
    """
    (root / "data").mkdir()
    create_site(root / SITE, pool=POOL, data=root / "data", kit=kit_of(first))
    joined, _ = join_site(None, kit=kit_of(second), existing=root / SITE)
    with ExitStack() as stack:
        made = []
        for workspace, directory in ((first, root / SITE), (second, joined)):
            if workspace in earlier:
                file = directory / "site.toml"
                file.write_text(re.sub('(?m)^ledger = ".{32}"\n', "", file.read_text(), count=1))
                assert load_site(directory).server.ledger == ""
            staff_decisions.consent(directory, by="A. Noether", sheet="the sheet")
            (directory / "teachers" / "voter-000").mkdir(parents=True)  # an empty folder, so this voter has no teacher
            worker = open_worker(directory, sleep=lambda _: None)
            stack.callback(worker._ledger.close)
            ledger = stack.enter_context(ledger_of(workspace))
            key = load_signing_key(workspace.signing_key_file)
            made.append(Server(workspace.study(), key, ledger, worker, directory))
        yield made[0], made[1]


def ledger_of(workspace: Workspace) -> Ledger:
    return with_pools(open_ledger(workspace), workspace.study())


def with_pools(ledger: Ledger, study: Study) -> Ledger:
    ledger.register_study(study)
    for site in (Site(SITE, POOL, node_id=1), Site("south", "south", node_id=2)):
        ledger.declare_pool(pool_of(site, study))
    return ledger


@pytest.fixture
def servers(tmp_path: Path) -> Iterator[tuple[Server, Server]]:
    """Yield the honest server, which has released an answer, and the other one."""
    first, second = (served_study(tmp_path / name, replace(make_study(), name=name)) for name in ("first", "second"))
    with hospital(tmp_path, first, second) as (honest, other):
        assert honest.releases(*queries_of(honest.study, 1)) is not None
        yield honest, other


def forged(honest: Server, other: Server, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Ledger:
    """Return a ledger with the honest server's id and study that the other server made and signed."""
    with monkeypatch.context() as patch:
        patch.setattr(chain.secrets, "token_hex", lambda _: honest.ledger.ledger_id)
        made = Ledger.create(folder / "forged.sqlite", signing_key=other.key)
    return with_pools(made, honest.study)


def assert_goes_on(honest: Server) -> None:
    """Check that the hospital raises no alarm about the honest server, and answers it."""
    assert honest.worker._ledger.alarms() == ()
    assert honest.worker._witness is not None
    assert honest.worker._witness.memory.conflicts() == ()
    reply = honest.releases(queries_of(honest.study, 4)[3])
    assert reply is not None
    assert reply.ledger_row == honest.ledger.head().seq


def test_a_server_learns_nothing_of_the_other_servers_ledger(servers: tuple[Server, Server]) -> None:
    honest, other = servers
    theirs = honest.ledger.ledger_id
    reply = other.offers(*queries_of(other.study, 9)[8:], ledger=theirs)
    assert (reply.ledger_row, reply.ledger_head) == (0, NO_HEAD)
    assert reply.reason != "accepted"
    assert other.says(Receipts(theirs, ())) is None
    assert_goes_on(honest)


def test_the_files_of_the_pools_other_studies_are_read_once_for_a_message_and_anew_for_the_next(
    servers: tuple[Server, Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    honest, _ = servers
    receipts = tuple(one.render() for one in receipts_of(honest.ledger, SITE))
    read = Mock(wraps=honest.worker._elsewhere)
    monkeypatch.setattr(honest.worker, "_elsewhere", read)
    for messages in (1, 2):
        assert isinstance(honest.says(Receipts(honest.ledger.ledger_id, receipts)), ReceiptsReply)
        assert read.call_count == messages


def test_a_server_learns_nothing_of_the_other_studys_draws(tmp_path: Path) -> None:
    study = make_study(quorum=3, aggregation="sealed-sum")
    first, second = (served_study(tmp_path / name, replace(study, name=name)) for name in ("first", "second"))
    with hospital(tmp_path, first, second) as (honest, other):
        queries = tuple(queries_of(study, 1))
        honest.worker._ledger.reserve(honest.study.id, queries, ledger=honest.ledger.ledger_id, draw=5)
        peers = (Peer("south", public_hex(other.key)),)
        reply = other.says(Offer(other.study.id, other.ledger.ledger_id, BATCH, queries, draw=1, peers=peers))
        assert isinstance(reply, OfferReply)
        assert reply.reason != "accepted"
        assert reply.last_draw is None


@pytest.mark.parametrize("asked", [True, False], ids=["of an accepted query", "of a query nobody asked"])
def test_a_receipt_of_the_other_servers_study_stops_nobody(
    servers: tuple[Server, Server], asked: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest, other = servers
    queries = queries_of(honest.study, 3)[1:]
    if asked:
        assert honest.offers(*queries).reason == "accepted"
    with forged(honest, other, tmp_path, monkeypatch) as ledger:
        assert other.tells(ledger, *queries) is None
    assert_goes_on(honest)
    if asked:
        assert honest.tells(honest.ledger, *queries) is not None


def test_a_head_under_the_other_ledgers_name_makes_nobody_look_forked(servers: tuple[Server, Server]) -> None:
    honest, other = servers
    held = honest.says(Receipts(honest.ledger.ledger_id, ()))
    assert isinstance(held, ReceiptsReply)
    assert other.shows(honest.ledger.ledger_id, root=b"f" * 32, held_row=held.ledger_row) is None
    assert_goes_on(honest)


@pytest.mark.parametrize("shows", ["a receipt", "a head"])
def test_a_server_that_contradicts_itself_pauses_the_other_study_and_the_hospital_reads_so(
    servers: tuple[Server, Server], shows: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest, other = servers
    if shows == "a receipt":
        *queries, last = queries_of(other.study, 9)[7:]
        assert other.releases(last) is not None
        assert other.offers(*queries).reason == "accepted"
        with forged(other, other, tmp_path, monkeypatch) as ledger:
            assert other.tells(ledger, *queries) is None
    else:
        for root in (b"1" * 32, b"2" * 32):
            other.shows(other.ledger.ledger_id, root=root)
    assert honest.offers(queries_of(honest.study, 2)[1]).reason == "paused"
    told = status_text(facts_of(honest.directory))
    assert ALARM_STOPS in told
    assert [told.count(f": {words}\n") for words in ("open", "stopped by an alarm")] == [0, 2]
    staff_decisions.end_alarm(honest.directory)
    told = status_text(facts_of(honest.directory))
    assert ALARM_STOPS not in told
    assert [told.count(f": {words}\n") for words in ("open", "stopped by an alarm")] == [2, 0]
    assert_goes_on(honest)


@pytest.mark.parametrize("consented", [True, False], ids=["consented", "joined"])
@pytest.mark.parametrize(
    "earlier", [(), ("first",), ("second",)], ids=["new kits", "honest kit earlier", "other kit earlier"]
)
def test_a_server_that_names_the_others_ledger_is_declined_if_either_kit_names_its_ledger(
    tmp_path: Path, earlier: tuple[str, ...], consented: bool
) -> None:
    first, second = (served_study(tmp_path / name, replace(make_study(), name=name)) for name in ("first", "second"))
    old = tuple(one for one in (first, second) if one.study().name in earlier)
    with hospital(tmp_path, first, second, earlier=old) as (honest, other):
        queries = queries_of(honest.study, 1)
        known = other.worker._ledger.books.studies
        if not consented:
            known.pop(honest.study.id)
        assert other.offers(*queries_of(other.study, 9)[8:], ledger=honest.ledger.ledger_id).reason == "unknown-study"
        known[honest.study.id] = honest.worker._ledger.books.studies[honest.study.id]
        assert honest.releases(*queries) is not None
        assert other.releases(*queries_of(other.study, 9)[7:8]) is not None


def test_a_hospital_joins_no_study_whose_kit_claims_the_ledger_of_another_server(tmp_path: Path) -> None:
    first, second = (served_study(tmp_path / name, replace(make_study(), name=name)) for name in ("first", "second"))
    (tmp_path / "data").mkdir()
    create_site(tmp_path / SITE, pool=POOL, data=tmp_path / "data", kit=kit_of(first))
    kit = kit_of(second)
    claiming = replace(kit, facts=replace(kit.facts, ledger=kit_of(first, "south").facts.ledger))
    with pytest.raises(InvalidInput, match=r"which the kit of .*north names for a server with another key"):
        join_site(None, kit=claiming, existing=tmp_path / SITE)
    assert join_site(None, kit=kit, existing=tmp_path / SITE)


def test_a_server_that_names_the_others_ledger_first_keeps_it_out_until_the_hospital_removes_its_study(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """If both kits are of earlier versions, the remedy in docs/ledger.md lets the honest server back in."""
    first, second = (served_study(tmp_path / name, replace(make_study(), name=name)) for name in ("first", "second"))
    with hospital(tmp_path, first, second, earlier=(first, second)) as (honest, other):
        queries = queries_of(honest.study, 1)
        assert other.offers(*queries_of(other.study, 9)[8:], ledger=honest.ledger.ledger_id).reason == "accepted"
        assert honest.offers(*queries).reason == "unknown-study"
        assert f"cause=another-server ledger={honest.ledger.ledger_id}" in caplog.text
        staff_decisions.decide(other.directory, other.study.id, "withdraw")
        shutil.rmtree(other.directory)
        forget_joined(tmp_path / SITE, other.directory)
        assert honest.releases(*queries) is not None


def test_a_second_study_of_one_server_brings_the_receipts_of_the_first(tmp_path: Path) -> None:
    first = served_study(tmp_path / "first", replace(make_study(), name="first"))
    second = served_study(tmp_path / "second", replace(make_study(), name="second"), ledger=first.root)
    with hospital(tmp_path, first, second) as (one, two):
        queries = queries_of(one.study, 2)
        assert one.offers(*queries).reason == "accepted"
        reply = two.tells(one.ledger, *queries)  # the first study's server has ended before it sent this receipt
        assert reply is not None
        assert reply.ledger_row == one.ledger.head().seq
        assert two.offers(queries_of(two.study, 3)[2]).reason == "accepted"
        assert one.gets() == two.gets() == {one.ledger.ledger_id}


def test_the_receipts_that_a_hospital_gives_away_are_of_one_servers_ledger(servers: tuple[Server, Server]) -> None:
    """`consilium ledger recover` refuses those of another ledger, and they name the other study's hospitals."""
    honest, other = servers
    assert other.releases(queries_of(other.study, 9)[8]) is not None
    assert (honest.gets(), other.gets()) == ({honest.ledger.ledger_id}, {other.ledger.ledger_id})


def test_an_unreadable_directory_of_another_study_stops_no_receipts_of_this_one_and_lets_no_server_in(
    servers: tuple[Server, Server], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest, other = servers
    assert other.releases(queries_of(other.study, 9)[8]) is not None
    (other.directory / "site.toml").write_text("site = ", encoding="utf-8")
    assert honest.gets() == {honest.ledger.ledger_id}
    assert honest.says(Receipts(other.ledger.ledger_id, ())) is None
    with forged(other, honest, tmp_path, monkeypatch) as ledger:
        assert honest.tells(ledger, queries_of(other.study, 9)[7]) is None
    assert_goes_on(honest)


def both_at_once(one: Server, other: Server, *ledgers: str) -> list[WitnessReply | None]:
    """Ask two workers to countersign different heads, the second while the first is about to store its own."""
    asked, answered, replies = threading.Event(), threading.Event(), dict[int, WitnessReply | None]()
    assert one.worker._witness is not None
    memory = one.worker._witness.memory
    save = memory._save

    def slow(known: dict[str, KnownHead]) -> None:
        asked.set()
        answered.wait(1.0)
        save(known)

    memory._save = slow  # type: ignore[method-assign]
    first = threading.Thread(target=lambda: replies.update({0: one.shows(ledgers[0], root=b"1" * 32)}))
    first.start()
    assert asked.wait(30.0)
    replies[1] = other.shows(ledgers[-1], root=b"2" * 32)
    answered.set()
    first.join()
    return [replies[0], replies[1]]


def test_two_workers_of_a_pool_never_countersign_two_histories_of_one_ledger(tmp_path: Path) -> None:
    first = served_study(tmp_path / "first", replace(make_study(), name="first"))
    second = served_study(tmp_path / "second", replace(make_study(), name="second"), ledger=first.root)
    with hospital(tmp_path, first, second) as (one, two):
        replies = both_at_once(one, two, one.ledger.ledger_id)
        assert sorted(reply.problem for reply in replies if reply is not None) == ["", "contradicts"]


def test_two_workers_of_a_pool_remember_both_heads_that_they_countersigned_at_once(tmp_path: Path) -> None:
    first, second = (served_study(tmp_path / name, replace(make_study(), name=name)) for name in ("first", "second"))
    with hospital(tmp_path, first, second) as (one, two):
        ids = one.ledger.ledger_id, two.ledger.ledger_id
        replies = both_at_once(one, two, *ids)
        assert [reply.problem for reply in replies if reply is not None] == ["", ""]
        assert HeadMemory(tmp_path / SITE / FOLDER).server_ledgers() == tuple(sorted(ids))
