import re
from dataclasses import replace
from itertools import count
from pathlib import Path
from time import perf_counter

import numpy as np
import pytest
from typer.testing import CliRunner

from common.config import CollectionConfig, render_study
from common.envelope import body_of, sign_reply
from common.errors import QuorumNotReached
from common.event_kinds import event_words
from common.events import read_events
from common.ledger.charges import PoolDeclaration
from common.ledger.receipts import Receipt
from common.messages import NO_HEAD, CodesReply, CodesRequest, Offer, Receipts, ReceiptsReply, Several, decode, encode
from common.privacy.mechanism import AccountantName, Budget, Protection, Relation, Unit
from common.privacy.quantise import quantise
from common.sealing import SealContext, seal
from consilium.cli.main import app as main_app
from consilium.cli.study import study_app
from consilium.in_process import Wire
from server.aggregation.batch import Answering, Decrypted
from server.aggregation.exchange import Reply
from server.aggregation.receipts import ReceiptDelivery
from server.study.status import study_status
from server.study.workspace import Workspace
from tests.commands import typed
from tests.common.ledger.ledger_world import make_mechanism, make_query
from tests.dashboard_study import make_study_directory
from tests.federation import Federation, make_study, part
from tests.worlds import pool_of, receipts_of, silent

pytestmark = pytest.mark.slow


@pytest.fixture
def federation(tmp_path):
    made = []

    def make(**options):
        made.append(Federation(tmp_path, **options))
        return made[-1]

    yield make
    for one in made:
        one.close()


def test_all_planned_queries_are_answered_within_a_tenth_of_a_percent_of_the_budget(federation):
    fed = federation()
    fed.core().run(fed.transport)
    assert len(fed.ledger.answers(fed.study.id)) == 6
    exact = fed.ledger.study_spending(fed.study.id).readings()[AccountantName.EXACT].epsilon
    assert 8 * 0.999 <= exact <= 8
    assert fed.ledger.study_spending(fed.study.id).readings()[AccountantName.RDP].epsilon > exact


def test_the_released_sum_is_the_sum_of_the_sites_clipped_codes_plus_noise(federation):
    fed = federation(sampler=silent)
    fed.core().run(fed.transport)
    answer = fed.ledger.answers(fed.study.id)[0]
    expected = sum(
        quantise(fed.codec.encode(fed.voters[site.name].answer()), radius_int=answer.query.mechanism.radius_int)
        for site in fed.sites
    )
    assert np.array_equal(answer.noisy_sum, expected)
    assert expected.any()


def test_a_second_run_answers_nothing_again_and_charges_nothing_again(federation):
    fed = federation()
    fed.core().run(fed.transport)
    before = [(a.query.id, a.noisy_sum.tobytes(), a.row_hash) for a in fed.ledger.answers(fed.study.id)]
    rows, calls = fed.ledger.row_count, [v.calls for v in fed.voters.values()]
    fed.core().run(fed.transport)
    assert [(a.query.id, a.noisy_sum.tobytes(), a.row_hash) for a in fed.ledger.answers(fed.study.id)] == before
    assert (fed.ledger.row_count, [v.calls for v in fed.voters.values()]) == (rows, calls)


def test_a_stop_between_batches_loses_nothing_and_the_next_run_finishes(federation):
    fed = federation()
    fed.set_collection(batch_size=2)
    answered = iter([False, False, True])
    fed.core().run(fed.transport, should_stop=lambda: next(answered))
    stored = {a.query.id: a.noisy_sum.tobytes() for a in fed.ledger.answers(fed.study.id)}
    assert len(stored) == 4
    fed.core().run(fed.transport)
    final = {a.query.id: a.noisy_sum.tobytes() for a in fed.ledger.answers(fed.study.id)}
    assert len(final) == 6
    assert stored.items() <= final.items()


def test_below_quorum_nothing_is_computed_dispatched_or_charged(federation):
    fed = federation()
    fed.set_collection(offer_deadline_s=1.0)
    fed.transport.offline = {100, 101}
    rows = fed.ledger.row_count
    with pytest.raises(QuorumNotReached, match="1 of 3"):
        fed.core().run(fed.transport)
    assert fed.ledger.row_count == rows
    assert all(v.calls == 0 for v in fed.voters.values())
    assert fed.events("batch-dispatched") == []


def test_a_site_that_is_away_is_not_on_the_roster(federation):
    fed = federation()
    fed.set_collection(offer_deadline_s=1.0)
    fed.transport.offline = {101}
    fed.core().run(fed.transport)
    assert {entry.site for a in fed.ledger.answers(fed.study.id) for entry in a.roster} == {"site-0", "site-2"}
    assert fed.ledger.spent("pool-1").releases == 0


@pytest.mark.parametrize("failure", ["nan", "huge", RuntimeError("patient Jane Doe: out of memory"), MemoryError()])
def test_a_failure_after_acceptance_is_the_zero_code_with_the_roster_unchanged(federation, failure, caplog):
    fed = federation(sampler=silent)
    fed.voters["site-1"].failure = failure
    fed.core().run(fed.transport)
    answers = fed.ledger.answers(fed.study.id)
    assert all(len(a.roster) == 3 and a.voters == 3 for a in answers)
    healthy = [fed.site_ledgers[s].code(answers[0].query.id) for s in ("site-0", "site-2")]
    assert np.array_equal(answers[0].noisy_sum, sum(healthy))
    sizes = {len(reply) for node, reply in fed.transport.replies}
    by_node = {node: [len(r) for n, r in fed.transport.replies if n == node] for node in fed.workers}
    assert by_node[101] == by_node[100] == by_node[102], sizes
    assert "Jane" not in caplog.text
    assert "Jane" not in fed.events_file.read_text()


def test_a_site_that_falls_silent_after_accepting_counts_as_zero_once_patience_is_over(federation):
    fed = federation(sampler=silent)
    fed.set_collection(patience_s=1.0)

    def drop(node, body, reply):
        return None if node == 101 and part(body, CodesRequest) else reply

    fed.transport.intercept = drop
    core, looks = fed.core(), count()
    core._clock = lambda: 0.05 * next(looks)  # time passes by readings, so that a busy machine changes nothing
    core.run(fed.transport)
    assert len(fed.events("batch-dispatched")) > 2
    assert all(a.voters == 3 for a in fed.ledger.answers(fed.study.id))
    assert {e["site"] for e in fed.events("reply-missing")} == {"site-1"}
    assert fed.ledger.spent("pool-1").releases == 6


def test_when_the_sites_vanish_after_accepting_nothing_is_released_or_charged(federation):
    fed = federation()
    fed.set_collection(patience_s=1.0)
    rows = fed.ledger.row_count
    fed.transport.intercept = lambda node, body, reply: None if part(body, CodesRequest) else reply
    with pytest.raises(QuorumNotReached, match="0 of the 3"):
        fed.core().run(fed.transport)
    assert fed.ledger.row_count == rows
    fed.transport.intercept = lambda node, body, reply: reply
    fed.core().run(fed.transport)
    answer = fed.ledger.answers(fed.study.id)[0]
    assert all(fed.site_ledgers[entry.site].code(answer.query.id).any() for entry in answer.roster)


@pytest.mark.parametrize("aggregation", ["open", "sealed-sum"])
def test_sites_are_asked_once_at_least_however_long_the_core_was_held_up(federation, aggregation):
    """Formerly a core on a suspended or busy machine asked no site, and in a sealed study it also lost the draw."""
    fed = federation(study=make_study(quorum=3, aggregation=aggregation))
    core, hours = fed.core(), count()
    core._clock = lambda: 3600.0 * next(hours)
    core.run(fed.transport)
    assert len(fed.ledger.answers(fed.study.id)) == 6
    assert fed.ledger.spent("pool-0").releases == 6


def test_an_outage_of_every_node_costs_time_and_no_answer(federation):
    fed = federation(sampler=silent)
    fed.set_collection(patience_s=20.0)
    silent_rounds = iter(range(9))

    def outage(node, body, reply):
        return None if part(body, CodesRequest) and next(silent_rounds, None) is not None else reply

    fed.transport.intercept = outage
    fed.core().run(fed.transport)
    answer = fed.ledger.answers(fed.study.id)[0]
    assert np.array_equal(answer.noisy_sum, sum(ledger.code(answer.query.id) for ledger in fed.site_ledgers.values()))


def test_a_retry_gets_the_stored_code_and_computes_nothing_twice(federation):
    fed = federation(sampler=silent)
    seen = []

    def drop_first(node, body, reply):
        message = part(body, CodesRequest)
        if node == 101 and message:
            seen.append(message.attempt)
            return None if message.attempt == 1 else reply
        return reply

    fed.transport.intercept = drop_first
    fed.core().run(fed.transport)
    assert seen == [1, 2]
    assert fed.voters["site-1"].calls == 6
    answer = fed.ledger.answers(fed.study.id)[0]
    assert np.array_equal(answer.noisy_sum, sum(ledger.code(answer.query.id) for ledger in fed.site_ledgers.values()))


@pytest.mark.parametrize("lie", ["norm", "length", "attempt", "unknown", "garbage", "nan", "wraps"])
def test_a_reply_the_server_cannot_trust_counts_as_zero(federation, lie):
    fed = federation(sampler=silent)

    def forge(node, body, reply):
        message = part(body, CodesRequest)
        if node != 101 or not message:
            return reply
        if lie == "garbage":
            return b"\x00garbage"
        query, attempt = message.queries[0], message.attempt
        code = np.zeros(fed.codec.dimension, dtype=np.int64)
        code[0] = 2**16 + 1 if lie == "norm" else 5
        if lie == "nan":
            code = np.full(fed.codec.dimension, np.nan).view(np.int64)
        if lie == "wraps":  # its square is 0 modulo 2⁶⁴
            code[0] = 2**62
        if lie == "length":
            code = np.append(code, 0)
        context = SealContext(
            study=fed.study.id, query=query, site="site-1", attempt=attempt + 1 if lie == "attempt" else attempt
        )
        sealed = seal(code, public_key=fed.sealing_key.public_key(), context=context)
        name = "f" * 64 if lie == "unknown" else query
        return encode(Several((CodesReply(batch=message.batch, attempt=attempt, codes=((name, sealed),)),)))

    fed.set_collection(patience_s=1.0)
    fed.transport.intercept = forge
    fed.core().run(fed.transport)
    answer = fed.ledger.answers(fed.study.id)[0]
    honest = [fed.site_ledgers[s].code(answer.query.id) for s in ("site-0", "site-2")]
    assert np.array_equal(answer.noisy_sum, sum(honest))
    assert fed.events("reply-missing" if lie in ("garbage", "unknown") else "code-refused")


def test_a_refused_code_is_final_and_reported_once_for_each_reply(federation):
    fed = federation(sampler=silent)
    fed.set_collection(patience_s=600.0)
    asked = []

    def forge(node, body, reply):
        if node != 101 or not (request := part(body, CodesRequest)):
            return reply
        asked.append(request.attempt)
        codes = tuple((query, b"nothing a key opens") for query in request.queries)
        return encode(Several((CodesReply(batch=request.batch, attempt=request.attempt, codes=codes),)))

    fed.transport.intercept = forge
    fed.core().run(fed.transport)
    assert asked == [1]  # the batch is asked once, and the run does not wait 600 s for replies that came
    assert [event["codes"] for event in fed.events("code-refused")] == [6]
    answer = fed.ledger.answers(fed.study.id)[0]
    honest = [fed.site_ledgers[s].code(answer.query.id) for s in ("site-0", "site-2")]
    assert np.array_equal(answer.noisy_sum, sum(honest))


@pytest.mark.parametrize("number", [2**63, -(2**63) - 1, 10**400])
def test_a_number_no_column_holds_ends_no_run(federation, number):
    fed = federation(sampler=silent)

    def forge(node, body, reply):
        return reply.replace(b'"ledger_row":0', b'"ledger_row":%d' % number) if node == 101 else reply

    fed.transport.intercept = forge
    fed.core().run(fed.transport)
    assert {len(answer.roster) for answer in fed.ledger.answers(fed.study.id)} == {2}
    assert {e["reason"] for e in fed.events("offer-answered") if e["site"] == "site-1"} == {"unreadable"}
    said = {event_words(e) for e in fed.events("offer-answered") if e["site"] == "site-1"}
    assert said == {"site-1 did not accept: its reply did not arrive completely, or the server could not use it"}


def test_a_code_cannot_be_passed_off_as_another_sites(federation):
    fed = federation(sampler=silent)
    stolen = {}

    def replay(node, body, reply):
        if not part(body, CodesRequest):
            return reply
        if node == 100:
            stolen["reply"] = reply
        return stolen["reply"] if node == 101 else reply

    fed.set_collection(patience_s=1.0)
    fed.transport.intercept = replay
    fed.core().run(fed.transport)
    assert {e["reason"] for e in fed.events("code-refused")} == {"sealed-code"}


def test_no_code_is_in_the_messages_or_the_event_log(federation):
    fed = federation()
    fed.core().run(fed.transport)
    answer = fed.ledger.answers(fed.study.id)[0]
    code = fed.site_ledgers["site-0"].code(answer.query.id)
    assert code.any()
    traffic = b"".join(reply for _, reply in fed.transport.replies) + fed.events_file.read_bytes()
    for spelling in (code.astype("<i8").tobytes(), code.astype("<i4").tobytes(), str(code.tolist()).encode()):
        assert spelling not in traffic


def test_a_study_edited_at_the_server_is_declined_by_every_site(federation):
    fed = federation()
    fed.study = make_study(epsilon=9.0)
    fed.ledger.register_study(fed.study)
    with pytest.raises(QuorumNotReached):
        fed.core().run(fed.transport)
    assert {e["reason"] for e in fed.events("offer-answered")} == {"unknown-study"}


def test_patient_unit_with_several_voters_bounds_a_sites_sum(federation):
    fed = federation(study=make_study(unit="patient", voters_per_site=3), sampler=silent)
    for stub in fed.voters.values():
        stub.voters = 3
    fed.core().run(fed.transport)
    answers = fed.ledger.answers(fed.study.id)
    assert all(a.voters == 9 for a in answers)
    assert fed.ledger.study_spending(fed.study.id).readings()[AccountantName.EXACT].epsilon <= 8


def test_every_site_holds_a_receipt_for_what_was_released(federation):
    fed = federation()
    fed.set_collection(batch_size=4)
    fed.core().run(fed.transport)
    for ledger in fed.site_ledgers.values():
        held = {query for receipt in ledger.receipts() for query in receipt.query_ids}
        assert held == {a.query.id for a in fed.ledger.answers(fed.study.id)}
        assert ledger.alarms() == ()


def test_a_receipt_lost_on_the_way_is_sent_again_with_the_next(federation):
    fed = federation()
    fed.set_collection(batch_size=3)
    lost = []

    handle = fed.workers[101].handle

    def deaf(body):
        message = part(body, Receipts)
        if message and message.receipts and not lost:
            lost.append(101)
            return b""
        return handle(body)

    fed.workers[101].handle = deaf
    fed.core().run(fed.transport)
    assert lost
    assert len(fed.site_ledgers["site-1"].receipts()) == 2


def test_a_reply_about_receipts_that_arrives_twice_counts_once_and_does_not_end_the_run(federation):
    fed = federation()

    class Twice(Wire):
        def exchange(self, bodies, *, timeout_s):
            for reply in super().exchange(bodies, timeout_s=timeout_s):
                yield from (reply, reply)

    fed.core().run(Twice(fed.workers))
    assert len(fed.ledger.answers(fed.study.id)) == fed.study.privacy.planned_queries
    assert len(fed.events("receipts-held")) == len(fed.sites)


def test_receipts_lost_in_a_crash_are_delivered_by_the_next_run(federation, monkeypatch):
    fed = federation()
    monkeypatch.setattr(ReceiptDelivery, "send", lambda *_, **__: None)
    fed.core().run(fed.transport)
    monkeypatch.undo()
    assert all(ledger.receipts() == () for ledger in fed.site_ledgers.values())
    rows = fed.ledger.row_count
    fed.core().run(fed.transport)
    assert all(len(ledger.receipts()) == 1 for ledger in fed.site_ledgers.values())
    assert fed.ledger.row_count == rows
    assert len(fed.events("receipts-held")) == 3


def test_an_exhausted_budget_ends_the_run_with_what_was_answered(federation):
    fed = federation()
    fed.core().run(fed.transport)
    more = tuple(fed.objects.put(f"more {i}".encode()) for i in range(3))
    fed.volumes = (*more, *fed.volumes)
    offers = len(fed.events("offer-answered"))
    core = fed.core()
    core._queries = tuple(replace(core._queries[0], volumes=(name,)) for name in more)
    core.run(fed.transport)
    assert len(fed.ledger.answers(fed.study.id)) == 6
    assert len(fed.events("offer-answered")) == offers
    assert len(fed.events("budget-refused")[-1]["queries"]) == 3


def test_a_site_whose_pool_is_spent_is_left_out_before_anything_is_offered(federation):
    fed = federation()
    privacy = fed.study.privacy
    fed.ledger.declare_pool(
        PoolDeclaration(
            pool="pool-1",
            site="site-1",
            budget=Budget(epsilon=2.0, delta=privacy.delta),
            accountant=privacy.accountant,
            protection=privacy.protection,
        )
    )
    fed.core().run(fed.transport)
    answers = fed.ledger.answers(fed.study.id)
    assert len(answers) == 6
    with_site_1 = [a for a in answers if "site-1" in {entry.site for entry in a.roster}]
    assert 0 <= len(with_site_1) < 6
    assert fed.ledger.remaining("pool-1") >= 0
    assert "budget" in {event["reason"] for event in fed.events("offer-answered") if event["site"] == "site-1"}


def test_a_pool_that_asks_for_another_unit_is_left_out_when_it_is_spent_and_the_study_goes_on(federation, monkeypatch):
    """Units: a pool per patient pays for all of a site's m = 3 voters in a study of unit hospital."""
    apart = Protection(unit=Unit.PATIENT, relation=Relation.REPLACE_ONE)
    monkeypatch.setattr(
        "tests.federation.pool_of",
        lambda site, study: (
            replace(pool_of(site, study), protection=apart) if site.name == "site-3" else pool_of(site, study)
        ),
    )
    fed = federation(study=make_study(planned_queries=9, relation="zero-out", voters_per_site=3, quorum=3), sites=4)
    monkeypatch.setattr(fed.site_ledgers["site-3"], "record_receipt", lambda receipt, public_key: None)
    fed.set_collection(batch_size=1)
    fed.core().run(fed.transport)
    answers = fed.ledger.answers(fed.study.id)
    rosters = [{entry.site for entry in answer.roster} for answer in answers]
    assert len(answers) == 9
    assert 0 < sum("site-3" in roster for roster in rosters) < 9
    assert not fed.events("budget-refused")
    told = [event["reason"] for event in fed.events("offer-answered") if event["site"] == "site-3"]
    assert told[-1] == "budget"
    assert fed.ledger.remaining("pool-3") >= 0


def test_a_person_finishes_with_fewer_answers_once_a_quorum_is_missing_for_good(tmp_path):
    """The error names the commands, and these commands work."""
    study = make_study_directory(tmp_path, steps=2, batch_size=2)

    def gone(_node, _body, reply):
        if any(event["event"] == "released" for event in read_events(study.workspace.events_file)):
            study.transport.offline = {100, 101}
        return reply

    study.transport.intercept = gone
    with pytest.raises(QuorumNotReached, match=r"or finish with the stored answers \([246]\)") as missed:
        study.run()
    for command in re.findall(r"`consilium (student \w+)`", str(missed.value)):
        typed(main_app, *command.split(), study.workspace.root)
    study.opened.close()
    assert study.workspace.bundle_dir.is_dir()
    assert 0 < study_status(study.workspace).facts.answers < 8


def test_a_study_whose_sites_were_revoked_below_the_quorum_names_the_way_to_its_student(federation):
    fed = federation()
    fed.core().run(fed.transport)
    fed.sites = fed.sites[:1]
    with pytest.raises(QuorumNotReached, match=r"provision approve`; or finish with the stored answers \(6\)"):
        fed.core()


def test_in_a_long_run_a_batch_costs_a_site_one_message(federation):
    """Offer, codes and receipts share one message. Only the first and the last batch need an additional one."""
    fed = federation(study=make_study(planned_queries=10))
    fed.set_collection(batch_size=2)
    fed.core().run(fed.transport)
    assert len(fed.ledger.answers(fed.study.id)) == 10
    received = [node for node, _ in fed.transport.replies]
    assert {node: received.count(node) for node in fed.workers} == dict.fromkeys(fed.workers, 5 + 2)
    assert all(len(ledger.receipts()) == 5 and ledger.alarms() == () for ledger in fed.site_ledgers.values())


def test_the_receipts_of_a_batch_travel_with_the_next_one(federation):
    """Therefore a site can compare its charges with the server's while the study runs."""
    fed = federation(study=make_study(planned_queries=6))
    fed.set_collection(batch_size=2)
    handle, brought = fed.workers[101].handle, []

    def watched(body):
        found = part(body, Receipts)
        brought.append(len(found.receipts) if found else 0)
        return handle(body)

    fed.workers[101].handle = watched
    fed.core().run(fed.transport)
    assert [count for count in brought if count] == [1, 1, 1]


def test_a_batch_offered_ahead_leaves_room_for_the_one_in_hand(federation):
    """Sites and pools reserve at most what the budget has room for, including batches under way."""
    fed = federation(study=make_study(planned_queries=5))
    fed.set_collection(batch_size=2)
    more = tuple(fed.objects.put(f"more {i}".encode()) for i in range(3))
    core = fed.core()
    first = core._queries[0]
    core._queries = (*core._queries, *(replace(first, volumes=(name,)) for name in more))
    core.run(fed.transport)
    assert len(fed.ledger.answers(fed.study.id)) == 5
    assert [len(event["queries"]) for event in fed.events("released")] == [2, 2, 1]
    assert len(fed.events("budget-refused")[-1]["queries"]) == 3
    for site in fed.sites:
        assert fed.site_ledgers[site.name].spent().releases == 5, "nothing was accepted that was never released"
    assert {event["reason"] for event in fed.events("offer-answered")} == {"accepted"}


def test_a_site_that_registers_in_the_middle_of_a_run_is_on_the_next_roster_and_on_no_older_one(federation):
    fed = federation(study=make_study(planned_queries=8))
    fed.set_collection(batch_size=2)
    everybody, fed.sites = fed.sites, fed.sites[:2]
    core = fed.core()

    def register(node, body, reply):
        if len(fed.events("released")) == 1:
            fed.sites = everybody
        return reply

    fed.transport.intercept = register
    core.run(fed.transport)
    rosters = [event["roster"] for event in fed.events("released")]
    assert rosters[:2] == [["site-0", "site-1"]] * 2
    assert rosters[2:] == [["site-0", "site-1", "site-2"]] * 2
    stored = [[entry.site for entry in answer.roster] for answer in fed.ledger.answers(fed.study.id)]
    assert stored == [roster for roster in rosters for _ in range(2)]


def test_a_site_that_is_registered_but_not_yet_in_the_ledger_is_passed_over(federation):
    fed = federation()
    stranger = replace(fed.sites[0], name="stranger", pool="stranger", node_id=999)
    fed.sites = (*fed.sites, stranger)
    fed.core().run(fed.transport)
    assert {entry.site for a in fed.ledger.answers(fed.study.id) for entry in a.roster} == {
        "site-0",
        "site-1",
        "site-2",
    }


def test_a_site_that_was_away_for_a_run_is_on_the_rosters_of_the_next(federation):
    fed = federation(study=make_study(planned_queries=8))
    fed.set_collection(batch_size=2, offer_deadline_s=1.0)
    fed.transport.offline = {102}
    fed.core().run(fed.transport, should_stop=iter([False, False, True]).__next__)
    before = {a.query.id: a.roster for a in fed.ledger.answers(fed.study.id)}
    fed.transport.offline = set()
    fed.core().run(fed.transport)
    answers = fed.ledger.answers(fed.study.id)
    assert [len(a.roster) for a in answers] == [2] * 4 + [3] * 4
    assert {a.query.id: a.roster for a in answers[:4]} == before, "the roster of a release never changes"
    assert fed.ledger.spent("pool-2").releases == fed.site_ledgers["site-2"].spent().releases == 4


def test_a_site_that_comes_back_in_the_middle_of_a_run_is_asked_and_is_waited_for_only_once(federation):
    fed = federation(study=make_study(planned_queries=8))
    fed.set_collection(batch_size=2, offer_deadline_s=1.0)
    fed.transport.offline = {102}
    waits = []

    def back(node, body, reply):
        if len(fed.events("released")) == 2:
            fed.transport.offline = set()
        return reply

    fed.transport.intercept = back
    core = fed.core()
    there, honest = core._presence, core._presence.await_sites
    there.await_sites = lambda *args: waits.append(perf_counter()) or [honest(*args), waits.append(perf_counter())][0]
    core.run(fed.transport)
    assert [len(event["roster"]) for event in fed.events("released")] == [2, 2, 2, 3]
    seconds = [after - before for before, after in zip(waits[::2], waits[1::2], strict=True)]
    assert seconds[0] >= 1.0
    assert max(seconds[1:]) < seconds[0] / 2


@pytest.mark.parametrize("aggregation", ["open", "sealed-sum"])
@pytest.mark.parametrize("node", [100, 103], ids=["replies first", "replies last"])
def test_a_site_that_answers_no_offer_is_waited_for_once_charged_once_and_back_when_it_answers(
    federation, aggregation, node
):
    """At first its answers arrive too late, so its own ledger charges what it accepts although no release uses it."""
    fed = federation(study=make_study(quorum=3, aggregation=aggregation, planned_queries=8), sites=4)
    fed.set_collection(batch_size=2)
    number, offers = node - 100, []

    def late(to, body, reply):
        if to != node:
            return reply
        offers.append(part(body, Offer) is not None)
        return None if len(fed.events("released")) < 2 else reply

    fed.transport.intercept = late
    fed.core().run(fed.transport)
    assert [len(event["roster"]) for event in fed.events("released")] == [3, 3, 4, 4]
    assert offers[:4] == [True, False, False, True], "one offer, then a question that costs nothing before every batch"
    said = [event["reason"] for event in fed.events("offer-answered") if event["site"] == f"site-{number}"]
    assert said == ["deadline", "deadline", "accepted", "accepted"]
    assert fed.ledger.spent(f"pool-{number}").releases == 4
    assert fed.site_ledgers[f"site-{number}"].spent().releases == 6


def test_a_site_that_answered_no_offer_is_asked_again_when_the_others_do_not_reach_the_quorum(federation):
    fed = federation(study=make_study(quorum=3, planned_queries=4), sites=4)
    fed.set_collection(batch_size=2, offer_deadline_s=1.0)

    def drop(node, body, reply):
        if node == 101 and part(body, CodesRequest):
            fed.transport.offline = {101}
        return None if node == 100 and not fed.events("released") else reply

    fed.transport.intercept = drop
    fed.core().run(fed.transport)
    assert [event["roster"] for event in fed.events("released")] == [
        ["site-1", "site-2", "site-3"],
        ["site-0", "site-2", "site-3"],
    ]


class WorkerAway(Wire):
    """Runs site-1's network process without its worker from the first request for codes on."""

    def _handled(self, node, message):
        if node == 101 and part(body_of(message), CodesRequest):
            self.workers = {name: worker for name, worker in self.workers.items() if name != node}
        return super()._handled(node, message) if node in self.workers else Reply(node, b"")

    def online(self):
        return super().online() | {101}


def test_a_site_whose_worker_is_away_is_named_unavailable_and_not_one_of_another_version(federation):
    fed = federation(study=make_study(planned_queries=4))
    fed.set_collection(batch_size=2, patience_s=1.0)
    fed.transport = WorkerAway(fed.workers)
    core, looks = fed.core(), count()
    core._clock = lambda: 0.05 * next(looks)
    core.run(fed.transport)
    said = {
        e["reason"] for kind in ("offer-answered", "reply-missing") for e in fed.events(kind) if not e.get("accepted")
    }
    assert said == {"unavailable", "patience", "left-out"}


def test_a_site_that_goes_down_after_accepting_ahead_is_not_on_that_roster(federation):
    fed = federation(study=make_study(planned_queries=6))
    fed.set_collection(batch_size=2, offer_deadline_s=1.0)

    def leave(node, body, reply):
        if node == 102 and part(body, CodesRequest):
            fed.transport.offline = {102}
        return reply

    fed.transport.intercept = leave
    fed.core().run(fed.transport)
    assert [len(event["roster"]) for event in fed.events("released")] == [3, 2, 2]
    assert fed.ledger.spent("pool-2").releases == 2


def test_a_veto_given_while_a_batch_is_computed_keeps_the_site_off_the_next_roster(federation):
    fed = federation(study=make_study(planned_queries=6))
    fed.set_collection(batch_size=2, patience_s=1.0)
    predict = fed.voters["site-2"].predict

    def paused_meanwhile(volume):
        if fed.voters["site-2"].calls == 1:
            fed.site_ledgers["site-2"].decide(fed.study.id, "pause")
        return predict(volume)

    fed.voters["site-2"].predict = paused_meanwhile
    fed.core().run(fed.transport)
    assert [len(event["roster"]) for event in fed.events("released")] == [3, 2, 2]
    assert "paused" in {event["reason"] for event in fed.events("offer-answered") if event["site"] == "site-2"}


def test_the_status_tells_who_took_part_in_what_and_who_is_spent(federation, tmp_path):
    fed = federation(study=make_study(planned_queries=6))
    fed.set_collection(batch_size=2, offer_deadline_s=1.0)
    fed.transport.offline = {102}
    fed.core().run(fed.transport, should_stop=iter([False, True]).__next__)
    workspace = Workspace(tmp_path)
    workspace.study_file.write_text(render_study(fed.study))
    workspace.save_sites(fed.sites)
    half = study_status(workspace).to_json()
    assert (half["state"], half["sites"]["site-2"]["state"]) == ("not running", "offline")
    assert (half["answers"], half["answers_left"]) == (2, 4)
    fed.transport.offline = set()
    fed.core().run(fed.transport)
    whole = study_status(workspace).to_json()
    assert whole["state"] == "answered, no student"
    took = {name: (site["state"], site["batches"], site["answers"]) for name, site in whole["sites"].items()}
    assert took == {"site-0": ("spent", 3, 6), "site-1": ("spent", 3, 6), "site-2": ("open", 2, 4)}
    assert [(batch["queries"], len(batch["roster"])) for batch in whole["batches"]] == [(2, 2), (2, 3), (2, 3)]
    states = {name: ledger.facts(name).studies[0].state for name, ledger in fed.site_ledgers.items()}
    assert states == {"site-0": "spent", "site-1": "spent", "site-2": "open"}, "site-2 has two queries left by its own"
    shown = CliRunner().invoke(study_app, ["status", str(tmp_path)])
    assert f"study test: {whole['state']}" in shown.stdout
    (row,) = [line for line in shown.stdout.splitlines() if line.startswith("site-2")]
    assert row.split()[:8] == ["site-2", "open", "2", "of", "3", "4", "of", "6"]
    assert re.search(r"release 1 \(2 answers\) .* site-2$", shown.stdout, re.M)


def test_below_quorum_in_the_middle_of_a_run_neither_pools_nor_rows_move(federation):
    """One site is offline, one is killed during the batch, one misses its deadline. Earlier answers stay, and nothing
    more is charged.
    """
    fed = federation(study=make_study(planned_queries=6), sites=4)
    fed.set_collection(batch_size=2, offer_deadline_s=1.0, patience_s=1.0)
    fed.transport.offline = {103}
    at_batch = []

    def trouble(node, body, reply):
        asked = part(body, CodesRequest)
        if asked and len(fed.events("released")) == 1:
            at_batch.append((fed.ledger.row_count, [fed.ledger.spent(site.pool) for site in fed.sites]))
            if node == 101:
                fed.transport.offline.add(101)
            return reply if node == 100 else None
        return reply

    fed.transport.intercept = trouble
    with pytest.raises(QuorumNotReached, match="1 of the 3 sites"):
        fed.core().run(fed.transport)
    assert (fed.ledger.row_count, [fed.ledger.spent(site.pool) for site in fed.sites]) == at_batch[0]
    assert [event["roster"] for event in fed.events("released")] == [["site-0", "site-1", "site-2"]]
    assert len(fed.ledger.answers(fed.study.id)) == 2
    fed.transport.intercept, fed.transport.offline = lambda node, body, reply: reply, set()
    fed.core().run(fed.transport)
    assert [len(a.roster) for a in fed.ledger.answers(fed.study.id)] == [3, 3, 4, 4, 4, 4]


def test_receipts_that_one_message_does_not_take_follow_in_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("server.aggregation.receipts.MAX_RECEIPTS", 2)
    fed = Federation(tmp_path, study=make_study(collection=CollectionConfig(batch_size=1)))
    fed.core().run(fed.transport)
    held = {site.node_id: (0, NO_HEAD) for site in fed.sites}
    messages: list[int] = []

    class Forgetful(Wire):
        """Stands in for sites that no longer hold receipts and accept what they are sent."""

        def exchange(self, bodies, *, timeout_s):
            for node, message in bodies.items():
                site = next(site.name for site in fed.sites if site.node_id == node)
                asked = decode(body_of(message))
                messages.append(len(asked.receipts))
                for text in asked.receipts:
                    receipt = Receipt.parse(text)
                    assert receipt.previous.seq == held[node][0]
                    held[node] = (receipt.head.seq, receipt.head.hash)
                reply = encode(ReceiptsReply(*held[node]))
                yield Reply(node, sign_reply(reply, sign=fed.site_ledgers[site].sign, site=site, request=message))

    fed.core().run(Forgetful(fed.workers))
    assert max(messages) == 2
    assert {row for row, _ in held.values()} == {receipts_of(fed.ledger, "site-0", after=0)[-1].head.seq}
    assert sum(messages) == 6 * len(fed.sites)
    assert fed.events("receipts-missing") == []
    fed.close()


def test_a_site_that_replies_twice_is_counted_once_with_its_first_reply(federation):
    fed = federation(sampler=silent)

    class Stutters(Wire):
        def exchange(self, bodies, *, timeout_s):
            replies = list(super().exchange(bodies, timeout_s=timeout_s))
            yield replies[0]
            yield from replies

    fed.core().run(Stutters(fed.workers))
    for answer in fed.ledger.answers(fed.study.id):
        codes = [fed.codec.encode(fed.voters[site.name].answer()) for site in fed.sites]
        expected = sum(quantise(code, radius_int=answer.query.mechanism.radius_int) for code in codes)
        assert np.array_equal(answer.noisy_sum, expected)


def test_the_first_reply_to_a_query_counts_and_later_ones_do_not():
    query = make_query(0, make_mechanism(room_for=4))
    one, other = (np.full(query.mechanism.dimension, n, dtype=np.int64) for n in (1, 2))
    answering = Answering([query], ["north", "south"])
    answering.take("north", Decrypted({query.id: one}, {}))
    answering.take("north", Decrypted({query.id: other}, {}))
    assert (answering.missing("north"), answering.missing("south")) == ((), (query.id,))
    answering.take("south", Decrypted({}, {query.id: "code-norm"}))
    answering.take("south", Decrypted({query.id: other}, {}))
    answering.take("elsewhere", Decrypted({query.id: other}, {}))
    assert not answering.missing("south")
    assert answering.heard == {"north"}
    assert np.array_equal(answering.sums[query.id].released(sites=2, sampler=silent), one)
