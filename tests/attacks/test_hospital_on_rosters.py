"""Attack: an admitted hospital tries to keep others off rosters, by false statements or by silence.

| attack | defence |
|---|---|
| it states that it has not confirmed an honest site's key | such a statement excludes only the site that makes it |
| it accepts every offer and then sends nothing | a run waits for it once, and loses one draw at most |
| it declines each draw as already answered | the batch is offered once more, then the run ends and names the site |
| it states that its budget is spent | one site's statement does not end a run as finished |
| it sends only some of the requested codes | each missing code counts as the zero code at once |
| it answers at the last moment | an event names it, with the seconds, in each batch that waited for it alone |
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import count
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from common.config import CollectionConfig
from common.errors import LedgerCorrupt, QuorumNotReached
from common.event_kinds import EVENTS
from common.events import read_events
from common.messages import NO_HEAD, CodesReply, CodesRequest, Offer, OfferReply, Several, decode, encode
from consilium.in_process import Intercept, Wire
from server.aggregation.exchange import Reply
from server.ledger.verify import verify
from tests.dashboard_study import make_study_directory
from tests.federation import Federation, make_study, part
from tests.worlds import HURRIED

pytestmark = pytest.mark.slow

LIAR, HONEST = 100, "site-3"


@contextmanager
def of_four(root: Path, *, quorum: int, spare_draws: int, colluders: int = 1) -> Iterator[Federation]:
    terms = {"quorum": quorum, "spare_draws": spare_draws, "colluders": colluders}
    study = make_study(planned_queries=4, aggregation="sealed-sum", collection=HURRIED, **terms)
    with Federation(root, study=study, sites=4) as federation:
        yield federation


@pytest.fixture
def sealed(tmp_path: Path) -> Iterator[Federation]:
    with of_four(tmp_path, quorum=3, spare_draws=4) as federation:
        yield federation


@pytest.mark.parametrize("colluders", [0, 1])
@pytest.mark.parametrize("named", [(HONEST,), (HONEST, "site-2"), ("site-1", "site-2", HONEST)])
def test_a_dishonest_sites_claim_about_keys_excludes_no_honest_site_from_a_roster(
    tmp_path: Path, named: tuple[str, ...], colluders: int
) -> None:
    def lie(node: int, body: bytes, reply: bytes) -> bytes:
        message = decode(reply)
        if node != LIAR:
            return reply
        parts = message.parts if isinstance(message, Several) else (message,)
        told = [
            dataclasses.replace(each, unconfirmed=named) if isinstance(each, OfferReply) else each for each in parts
        ]
        return encode(Several(tuple(told)) if isinstance(message, Several) else told[0])

    with of_four(tmp_path, quorum=3, spare_draws=4, colluders=colluders) as sealed:
        sealed.transport.intercept = lie
        sealed.core().run(sealed.transport)
        answers = sealed.core().answers()
        assert len(answers) == 4
        assert {tuple(entry.site for entry in answer.roster) for answer in answers} == {("site-1", "site-2", HONEST)}
        assert {event["site"] for event in sealed.events("peers-unconfirmed")} == {"site-0"}


@pytest.fixture
def open_sum(tmp_path: Path) -> Iterator[Federation]:
    with Federation(tmp_path, study=make_study(collection=HURRIED), sites=3) as federation:
        yield federation


def sends_no_codes(how: str) -> Intercept:
    """Return the replies of a site that accepts every offer and does not answer requests for codes as asked."""

    def silent(node: int, body: bytes, reply: bytes) -> bytes | None:
        request = part(body, CodesRequest)
        if node != LIAR or request is None:
            return reply
        empty = encode(Several((CodesReply(batch=request.batch, attempt=request.attempt, codes=()),)))
        return {"no reply": None, "no codes": empty, "nonsense": b"nonsense"}[how]

    return silent


@pytest.mark.parametrize("how", ["no reply", "no codes", "nonsense"])
def test_a_site_that_accepts_and_sends_nothing_is_waited_for_once_a_run_and_named(
    open_sum: Federation, how: str
) -> None:
    open_sum.transport.intercept = sends_no_codes(how)
    open_sum.core().run(open_sum.transport)
    answers = open_sum.core().answers()
    assert len(answers) == 6
    assert [len(answer.roster) for answer in answers] == [3, 3, 2, 2, 2, 2]
    waited = [event for event in open_sum.events("reply-missing") if event["reason"] == "patience"]
    assert [event["site"] for event in waited] == ["site-0"]
    told = {event["reason"] for event in open_sum.events("reply-missing")} - {"patience"}
    assert told == {{"no reply": "deadline", "no codes": "unfinished", "nonsense": "malformed"}[how]}
    left = [event for event in open_sum.events("offer-answered") if event["reason"] == "left-out"]
    assert {event["site"] for event in left} == {"site-0"}


def test_a_site_that_sends_some_of_the_codes_is_not_asked_for_the_rest(open_sum: Federation) -> None:
    asked: list[int] = []

    def some(node: int, body: bytes, reply: bytes) -> bytes:
        request = part(body, CodesRequest)
        if node != LIAR or request is None:
            return reply
        asked.append(request.attempt)
        codes = part(reply, CodesReply)
        assert codes is not None
        return encode(Several((replace(codes, codes=codes.codes[:1]),)))

    open_sum.transport.intercept = some
    open_sum.core().run(open_sum.transport)
    assert asked == [1, 1, 1]
    assert {event["codes"] for event in open_sum.events("reply-received") if event["site"] == "site-0"} == {1}
    told = [(event["site"], event["reason"], event["codes"]) for event in open_sum.events("code-refused")]
    assert told == [("site-0", "missing", 1)] * 3, "it chose which queries to answer, and is named for it each time"


def test_a_silent_site_is_waited_for_once_in_a_run_of_several_rounds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.dashboard_study.CollectionConfig", partial(CollectionConfig, patience_s=1))
    joint = make_study_directory(tmp_path, rounds=3)
    joint.transport.intercept = lambda node, body, reply: (
        None if node == LIAR and part(body, CodesRequest) is not None else reply
    )
    joint.collect()
    events = list(read_events(joint.workspace.events_file))
    waited = [event for event in events if event["event"] == "reply-missing" and event["reason"] == "patience"]
    assert [event["site"] for event in waited] == ["north"]
    assert [len(event["roster"]) for event in events if event["event"] == "released"] == [4, 3, 3]
    joint.opened.close()


@pytest.fixture
def whole_roster(tmp_path: Path) -> Iterator[Federation]:
    """Yield a sealed study that needs all of its four sites."""
    with of_four(tmp_path, quorum=4, spare_draws=20) as federation:
        yield federation


def declining(liars: set[int], reason: str, *, after: int = 0):  # type: ignore[no-untyped-def]
    """Let these sites decline every offer after the first ``after`` for a reason, and state the draw just offered."""
    offers = 0

    def lie(node: int, body: bytes, reply: bytes) -> bytes:
        nonlocal offers
        offer, message = part(body, Offer), decode(reply)
        if node not in liars or offer is None:
            return reply
        offers += 1
        assert offers < 20, "an endless loop of offers"
        if offers <= after:
            return reply
        parts = message.parts if isinstance(message, Several) else (message,)
        told = [
            replace(each, reason=reason, mask=None, last_draw=offer.draw) if isinstance(each, OfferReply) else each
            for each in parts
        ]
        return encode(Several(tuple(told)) if isinstance(message, Several) else told[0])

    return lie


@pytest.mark.parametrize("liars", [{100}, {100, 101}], ids=["one", "two"])
def test_sites_that_claim_each_draw_as_answered_cost_the_others_one_more_draw(
    whole_roster: Federation, liars: set[int]
) -> None:
    """Each honest hospital charges itself for each offer, so a batch must not be offered without end."""
    whole_roster.transport.intercept = declining(liars, "old-draw")
    with pytest.raises(QuorumNotReached, match="site-0 states having answered a later draw") as missed:
        whole_roster.core().run(whole_roster.transport)
    charged = "the server charged nothing for this batch, but each site that accepted it has charged its own"
    assert charged in str(missed.value)
    assert str(missed.value).endswith(
        "go on without the site: bring back, or admit, other sites until they reach the quorum"
    )
    assert 0 < whole_roster.site_ledgers[HONEST].spent().releases <= 4  # two draws of a batch of two
    whole_roster.transport.intercept = lambda node, body, reply: reply
    whole_roster.core().run(whole_roster.transport)
    assert len(whole_roster.core().answers()) == 4


def test_one_site_restored_from_a_copy_is_still_served(whole_roster: Federation) -> None:
    """The site declines the draw that its lost rows had accepted. No other site declines it."""
    first = [True]

    def restored(node: int, body: bytes, reply: bytes) -> bytes:
        if node == LIAR and part(body, Offer) is not None and first[0]:
            first[0] = False
            return declining({LIAR}, "old-draw")(node, body, reply)
        return reply

    whole_roster.transport.intercept = restored
    whole_roster.core().run(whole_roster.transport)
    assert len(whole_roster.core().answers()) == 4


def test_a_site_that_claims_a_restore_in_every_run_costs_the_other_sites_three_draws_at_most(
    whole_roster: Federation,
) -> None:
    """Each time the site is believed, every honest site charges itself for another draw, which gives no answer."""
    whole_roster.transport.intercept = declining({LIAR}, "old-draw")
    spent = []
    for _ in range(6):
        with pytest.raises(QuorumNotReached, match="site-0 states having answered a later draw"):
            whole_roster.core().run(whole_roster.transport)
        spent.append(whole_roster.site_ledgers["site-1"].spent().releases)
    assert spent[2:] == [spent[2]] * 4
    whole_roster.transport.intercept = lambda _node, _body, reply: reply
    whole_roster.core().run(whole_roster.transport)
    assert len(whole_roster.core().answers()) == 4


@pytest.mark.parametrize("after", [0, 1])
def test_one_site_that_claims_a_spent_budget_does_not_end_the_run_as_finished(
    whole_roster: Federation, after: int
) -> None:
    whole_roster.transport.intercept = declining({LIAR}, "budget", after=after)
    with pytest.raises(QuorumNotReached, match="site-0 states lack of budget") as missed:
        whole_roster.core().run(whole_roster.transport)
    stored = len(whole_roster.core().answers())
    assert (f"or finish with the stored answers ({stored})" in str(missed.value)) is (stored > 0) is (after > 0)
    assert not whole_roster.events("budget-refused")


def test_no_run_ends_as_finished_without_an_answer(whole_roster: Federation) -> None:
    whole_roster.transport.intercept = declining({100, 101, 102}, "budget")
    with pytest.raises(QuorumNotReached, match="site-2 states lack of budget"):
        whole_roster.core().run(whole_roster.transport)


@pytest.mark.parametrize("batch", [2, 4])
def test_a_site_that_sends_nothing_in_the_last_draw_ends_no_run_as_finished(tmp_path: Path, batch: int) -> None:
    """No batch after the last one was offered to the silent site, so the run's next plan leaves the site out."""
    with of_four(tmp_path, quorum=4, spare_draws=20) as fed:
        fed.set_collection(batch_size=batch)
        asked = 0

        def silent(node: int, body: bytes, reply: bytes) -> bytes | None:
            nonlocal asked
            if node != LIAR or part(body, CodesRequest) is None:
                return reply
            asked += 1
            return reply if asked < 4 // batch else None

        fed.transport.intercept = silent
        with pytest.raises(QuorumNotReached, match=r"did not answer them in time: site-0;.*resume") as missed:
            fed.core().run(fed.transport)
        stored = len(fed.core().answers())
        assert stored == 4 - batch
        assert (f"or finish with the stored answers ({stored})" in str(missed.value)) is (stored > 0)
        assert fed.events("quorum-missed")[-1]["accepted"] == 3
        assert fed.events("offer-answered")[-1]["reason"] == "left-out"
        assert not fed.events("budget-refused")
        charged = fed.site_ledgers["site-1"].spent().releases
        fed.transport.intercept = lambda node, body, reply: reply
        fed.core().run(fed.transport)
        assert len(fed.core().answers()) == 4
        assert charged == 4


@pytest.mark.parametrize("how", ["no reply", "no codes"])
def test_a_silent_site_that_a_study_needs_costs_one_draw_however_often_the_study_is_resumed(
    whole_roster: Federation, how: str
) -> None:
    whole_roster.transport.intercept = sends_no_codes(how)
    for _ in range(3):
        with pytest.raises(QuorumNotReached, match="stays open, and asking for it again charges nothing"):
            whole_roster.core().run(whole_roster.transport)
        assert whole_roster.ledger.spent("pool-1").releases == 2
    waited = [event for event in whole_roster.events("reply-missing") if event["reason"] == "patience"]
    assert [event["site"] for event in waited] == ["site-0"] * 3
    whole_roster.transport.intercept = lambda node, body, reply: reply
    whole_roster.core().run(whole_roster.transport)
    assert len(whole_roster.core().answers()) == whole_roster.ledger.spent("pool-1").releases == 4
    assert not whole_roster.events("draw-lost")
    assert {ledger.spent().releases for ledger in whole_roster.site_ledgers.values()} == {4}
    assert not verify(whole_roster.root / "ledger.sqlite").problems


@pytest.mark.parametrize("aggregation", ["open", "sealed-sum"])
def test_a_server_whose_older_keys_open_no_code_charges_once_and_names_the_files(
    tmp_path: Path, aggregation: str
) -> None:
    spare = 4 * (aggregation != "open")
    study = make_study(quorum=3, planned_queries=2, aggregation=aggregation, spare_draws=spare, collection=HURRIED)
    fed = Federation(tmp_path, study=study, sites=3)
    newest, fed.sealing_key = fed.sealing_key, X25519PrivateKey.generate()
    charged = 0 if aggregation == "open" else 2
    for _ in range(2):
        with pytest.raises(QuorumNotReached, match=r"of site-0, site-1, site-2.*sealing\.key.*rotate-sealing-key"):
            fed.core().run(fed.transport)
        assert fed.ledger.spent("pool-0").releases == charged
    fed.sealing_key = newest
    fed.core().run(fed.transport)
    assert len(fed.core().answers()) == fed.ledger.spent("pool-0").releases == 2
    fed.close()


@pytest.mark.parametrize(("change", "reason"), [(bytes, "sealed-code"), (lambda sealed: sealed[:-8], "code-size")])
@pytest.mark.parametrize("aggregation", ["open", "sealed-sum"])
def test_codes_of_one_site_that_do_not_open_are_not_blamed_on_the_servers_keys_alone(
    tmp_path: Path, aggregation: str, change: Callable[[bytes], bytes], reason: str
) -> None:
    def spoil(node: int, body: bytes, reply: bytes) -> bytes:
        message = decode(reply)
        if node != LIAR or not isinstance(message, Several):
            return reply
        changed = [
            replace(each, codes=tuple((query, change(bytes(sealed[::-1]))) for query, sealed in each.codes))
            if isinstance(each, CodesReply)
            else each
            for each in message.parts
        ]
        return encode(Several(tuple(changed)))

    spare = 4 * (aggregation != "open")
    study = make_study(quorum=3, planned_queries=2, aggregation=aggregation, spare_draws=spare, collection=HURRIED)
    fed = Federation(tmp_path, study=study, sites=3)
    fed.transport.intercept = spoil
    with pytest.raises(QuorumNotReached) as caught:
        fed.core().run(fed.transport)
    said = str(caught.value)
    assert "site-0" in said.partition("; to fix: ")[2]
    assert "no sealing key of this study opens" not in said
    assert ("restored" in said) is (reason == "sealed-code")
    assert {event["reason"] for event in fed.events("code-refused")} == {reason}
    fed.transport.intercept = lambda node, body, reply: reply
    fed.core().run(fed.transport)
    assert len(fed.core().answers()) == 2
    fed.close()


def test_a_draw_that_a_needed_site_declines_to_answer_is_lost_and_drawn_anew(whole_roster: Federation) -> None:
    """The site cannot answer this draw, because a patient was withdrawn after its code was masked."""

    def declines(node: int, body: bytes, reply: bytes) -> bytes | None:
        return encode(Several(())) if node == LIAR and part(body, CodesRequest) is not None else reply

    whole_roster.transport.intercept = declines
    with pytest.raises(QuorumNotReached, match="accepted the batch"):
        whole_roster.core().run(whole_roster.transport)
    assert [lost["sites"] for lost in whole_roster.events("draw-lost")] == [["site-0"]]
    whole_roster.transport.intercept = lambda node, body, reply: reply
    whole_roster.core().run(whole_roster.transport)
    assert len(whole_roster.core().answers()) == 4


@pytest.mark.parametrize("then", ["is revoked", "is replaced"])
def test_a_draw_that_waits_for_a_site_is_lost_once_the_study_goes_on_without_it(tmp_path: Path, then: str) -> None:
    with of_four(tmp_path, quorum=3, spare_draws=20) as fed:
        *first, last = fed.sites
        fed.sites = tuple(first)

        def silent(node: int, body: bytes, reply: bytes) -> bytes | None:
            return None if node == LIAR and part(body, CodesRequest) is not None else reply

        fed.transport.intercept = silent
        with pytest.raises(QuorumNotReached, match="did not answer them in time: site-0"):
            fed.core().run(fed.transport)
        assert not fed.events("draw-lost")
        fed.sites = (*first[then == "is revoked" :], last)
        fed.core().run(fed.transport)
        assert [lost["sites"] for lost in fed.events("draw-lost")] == [["site-0"]]
        assert len(fed.core().answers()) == 4


def test_a_site_that_is_revoked_in_the_last_draw_ends_no_run_as_finished(tmp_path: Path) -> None:
    with of_four(tmp_path, quorum=4, spare_draws=20) as fed:

        def revoked(node: int, body: bytes, reply: bytes) -> bytes | None:
            if node != LIAR or part(body, CodesRequest) is None or not fed.core().answers():
                return reply
            fed.sites = tuple(site for site in fed.sites if site.node_id != LIAR)
            return None

        fed.transport.intercept = revoked
        with pytest.raises(QuorumNotReached, match="registered sites: 3"):
            fed.core().run(fed.transport)
        assert not fed.events("budget-refused")


def test_a_false_head_proves_nothing_against_the_servers_ledger(tmp_path: Path) -> None:
    with of_four(tmp_path, quorum=4, spare_draws=4) as fed:

        def lie(node: int, body: bytes, reply: bytes) -> bytes:
            told = decode(reply)
            false = node == LIAR and isinstance(told, OfferReply)
            return encode(replace(told, ledger_row=7, ledger_head="a" * 64)) if false else reply  # type: ignore[type-var]

        fed.transport.intercept = lie
        with pytest.raises(LedgerCorrupt, match=r"site-0 \(row 7\).*statement is false.*that has no receipt"):
            fed.core().run(fed.transport)
        (event,) = fed.events("ledger-contradicted")
        words = EVENTS["ledger-contradicted"].words
        assert words is not None
        assert "or the statement is false" in words(event)


def test_a_run_does_not_wait_for_a_site_that_is_revoked_in_mid_draw(tmp_path: Path) -> None:
    with of_four(tmp_path, quorum=3, spare_draws=4) as fed:
        fed.set_collection(patience_s=600)
        seconds = count()

        def revoked(node: int, body: bytes, reply: bytes) -> bytes | None:
            if node != LIAR or part(body, CodesRequest) is None:
                return reply
            fed.sites = tuple(site for site in fed.sites if site.node_id != LIAR)
            fed.transport.offline.add(LIAR)
            return None

        fed.transport.intercept = revoked
        fed.core(clock=lambda: float(next(seconds))).run(fed.transport)
        assert next(seconds) < 600
        assert [lost["sites"] for lost in fed.events("draw-lost")] == [["site-0"]]
        assert len(fed.core().answers()) == 4


class SlowWire(Wire):
    """Delivers each reply when its site sends it. Only deliveries and absences move the clock.

    Args:
        usual: By node, the seconds that an honest site takes for codes. It takes one second for an offer.
        late: The act that the dishonest site delays: ``codes``, ``offer`` or ``online``; empty for none.
    """

    def __init__(self, fed: Federation, usual: Mapping[int, float], late: str = "") -> None:
        super().__init__(fed.workers)
        self.fed, self.now, self._usual, self._late = fed, 0.0, usual, late
        self._looks: Counter[int] = Counter()

    def online(self) -> frozenset[int]:
        batch = len(self.fed.events("released"))
        self._looks[batch] += 1
        away = self._late == "online" and self._looks[batch] <= 2
        self.now += 80 if away else 0
        return frozenset(self.workers) - ({LIAR} if away else set())

    def exchange(self, bodies: Mapping[int, bytes], *, timeout_s: float) -> Iterator[Reply]:
        began, taken = self.now, {}
        replies = []
        for node, body in bodies.items():
            asked = part(self.workers[node].open_request(body), CodesRequest)
            delayed = node == LIAR and self._late == ("codes" if asked else "offer")
            taken[node] = 0.99 * timeout_s if delayed else self._usual[node] if asked else 1.0
            replies.append(self._handled(node, body))
        for reply in sorted(replies, key=lambda reply: taken[reply.node_id]):
            self.now = began + taken[reply.node_id]
            yield reply


def slowly(
    root: Path, aggregation: str, late: str = "", tell: Intercept | None = None, *, times: float = 1.0
) -> Federation:
    """Run a study whose sites take 10, 10, 20 and 30 seconds for a batch, or ``times`` as long; the first delays
    ``late``.
    """
    study = replace(
        make_study(planned_queries=6, aggregation=aggregation, quorum=3, spare_draws=2 * (aggregation != "open")),
        collection=CollectionConfig(batch_size=2, offer_deadline_s=180, deadline_s=600, patience_s=1200),
    )
    with Federation(root, study=study, sites=4) as fed:
        wire = SlowWire(fed, {100: 10 * times, 101: 10 * times, 102: 20 * times, 103: 30 * times}, late)
        wire.intercept = tell or wire.intercept
        fed.core(clock=lambda: wire.now).run(wire)
    return fed


@pytest.mark.parametrize("aggregation", ["open", "sealed-sum"])
def test_hospitals_of_which_one_takes_three_times_as_long_as_another_are_not_called_slow(
    tmp_path: Path, aggregation: str
) -> None:
    fed = slowly(tmp_path, aggregation, times=4.0)
    assert len(fed.events("released")) == 3
    assert fed.events("site-slow") == []


def unfinished(node: int, body: bytes, reply: bytes) -> bytes:
    """Let the dishonest site first reply that it still computes its codes, which an honest site may do, too."""
    asked, message = part(body, CodesRequest), decode(reply)
    if node != LIAR or asked is None or asked.attempt > 1:
        return reply
    parts = message.parts if isinstance(message, Several) else (message,)
    told = [dataclasses.replace(each, codes=()) if isinstance(each, CodesReply) else each for each in parts]
    return encode(Several(tuple(told)) if isinstance(message, Several) else told[0])


def busy(node: int, body: bytes, reply: bytes) -> bytes:
    """Let the dishonest site decline every offer."""
    offer = part(body, Offer)
    if node != LIAR or offer is None:
        return reply
    return encode(OfferReply(batch=offer.batch, reason="busy", ledger_row=0, ledger_head=NO_HEAD))


@pytest.mark.parametrize("aggregation", ["open", "sealed-sum"])
@pytest.mark.parametrize(("late", "tell"), [("offer", busy), ("online", busy)])
def test_a_hospital_that_delays_an_offer_which_then_misses_the_quorum_is_named_too(
    tmp_path: Path, aggregation: str, late: str, tell: Intercept
) -> None:
    """The slow site is named although the run ends before codes are requested."""
    study = replace(make_study(aggregation=aggregation, quorum=4), collection=CollectionConfig(offer_deadline_s=180))
    with Federation(tmp_path, study=study, sites=4) as fed:
        wire = SlowWire(fed, dict.fromkeys(fed.workers, 10.0), late)
        wire.intercept = tell
        with pytest.raises(QuorumNotReached):
            fed.core(clock=lambda: wire.now).run(wire)
    assert [event["site"] for event in fed.events("site-slow")] == ["site-0"]
    assert len(fed.events("quorum-missed")) == 1


@pytest.mark.parametrize("aggregation", ["open", "sealed-sum"])
@pytest.mark.parametrize(
    ("late", "tell", "batches", "least_s"),
    [
        ("codes", None, 3, 590),
        ("codes", unfinished, 3, 1100),
        ("offer", busy, 3, 170),
        ("online", None, 3, 150),
    ],
)
def test_a_hospital_that_delays_a_run_is_named_with_the_seconds_and_nobody_else_is(
    tmp_path: Path, aggregation: str, late: str, tell: Intercept | None, batches: int, least_s: float
) -> None:
    """One hospital can make a run take up to 47 times as long."""
    fed = slowly(tmp_path, aggregation, late, tell)
    assert len(fed.events("released")) == 3
    slow = fed.events("site-slow")
    assert {event["site"] for event in slow} == {"site-0"}
    assert len(slow) >= batches
    assert all(event["seconds"] >= least_s for event in slow)
    assert all(event["usual_seconds"] <= 25 for event in slow)
    taken = [event["seconds"] for event in fed.events("reply-received") if event["site"] == "site-0"]
    assert late != "codes" or min(taken) >= least_s, "counted from the first request, however often it was asked"
