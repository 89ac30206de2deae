from dataclasses import replace

import numpy as np
import pytest

from common.errors import QuorumNotReached
from common.ledger.store import PoolDeclaration
from common.messages import CodesReply, CodesRequest, Receipts, decode, encode
from common.privacy.mechanism import AccountantName, Budget
from common.privacy.quantise import quantise
from common.sealing import SealContext, seal
from server.query import Aggregator
from tests.federation import Federation, make_study


@pytest.fixture
def federation(tmp_path):
    made = []

    def make(**options):
        made.append(Federation(tmp_path, **options))
        return made[-1]

    yield make
    for one in made:
        one.close()


def silent(size, noise_std):
    return np.zeros(size, dtype=np.int64)


def test_all_planned_queries_are_answered_within_a_tenth_of_a_percent_of_the_budget(federation):
    fed = federation()
    fed.core().run(fed.transport)
    assert len(fed.ledger.answers(fed.study.id)) == 6
    exact = fed.ledger.study_guarantees(fed.study.id)[AccountantName.EXACT].epsilon
    assert 8 * 0.999 <= exact <= 8
    assert fed.ledger.study_guarantees(fed.study.id)[AccountantName.RDP].epsilon > exact


def test_the_released_sum_is_the_sum_of_the_sites_clipped_codes_plus_noise(federation):
    fed = federation(sampler=silent)
    fed.core().run(fed.transport)
    answer = fed.ledger.answers(fed.study.id)[0]
    expected = sum(
        quantise(fed.codec.encode(fed.voters[site.name].predict(b"")[0]), radius_int=answer.query.mechanism.radius_int)
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
    fed.study = replace(fed.study, collection=replace(fed.study.collection, batch_size=2))
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
    fed.study = replace(fed.study, collection=replace(fed.study.collection, offer_deadline_s=1.0))
    fed.transport.offline = {100, 101}
    rows = fed.ledger.row_count
    with pytest.raises(QuorumNotReached, match="1 of 3"):
        fed.core().run(fed.transport)
    assert fed.ledger.row_count == rows
    assert all(v.calls == 0 for v in fed.voters.values())
    assert fed.events("batch-dispatched") == []


def test_a_site_that_is_away_is_not_on_the_roster(federation):
    fed = federation()
    fed.study = replace(fed.study, collection=replace(fed.study.collection, offer_deadline_s=1.0))
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
    fed.study = replace(fed.study, collection=replace(fed.study.collection, patience_s=1.0))

    def drop(node, body, reply):
        return None if node == 101 and isinstance(decode(body), CodesRequest) else reply

    fed.transport.intercept = drop
    fed.core().run(fed.transport)
    assert len(fed.events("batch-dispatched")) > 2
    assert all(a.voters == 3 for a in fed.ledger.answers(fed.study.id))
    assert {e["site"] for e in fed.events("reply-missing")} == {"site-1"}
    assert fed.ledger.spent("pool-1").releases == 6


def test_when_the_sites_vanish_after_accepting_nothing_is_released_or_charged(federation):
    fed = federation()
    fed.study = replace(fed.study, collection=replace(fed.study.collection, patience_s=1.0))
    rows = fed.ledger.row_count
    fed.transport.intercept = lambda node, body, reply: None if isinstance(decode(body), CodesRequest) else reply
    with pytest.raises(QuorumNotReached, match="0 of the 3"):
        fed.core().run(fed.transport)
    assert fed.ledger.row_count == rows
    fed.transport.intercept = lambda node, body, reply: reply
    fed.core().run(fed.transport)
    answer = fed.ledger.answers(fed.study.id)[0]
    assert all(fed.site_ledgers[entry.site].code(answer.query.id).any() for entry in answer.roster)


def test_an_outage_of_every_node_costs_time_and_no_answer(federation):
    fed = federation(sampler=silent)
    fed.study = replace(fed.study, collection=replace(fed.study.collection, patience_s=20.0))
    silent_rounds = iter(range(9))

    def outage(node, body, reply):
        return None if isinstance(decode(body), CodesRequest) and next(silent_rounds, None) is not None else reply

    fed.transport.intercept = outage
    fed.core().run(fed.transport)
    answer = fed.ledger.answers(fed.study.id)[0]
    assert np.array_equal(answer.noisy_sum, sum(ledger.code(answer.query.id) for ledger in fed.site_ledgers.values()))


def test_a_retry_gets_the_stored_code_and_computes_nothing_twice(federation):
    fed = federation(sampler=silent)
    seen = []

    def drop_first(node, body, reply):
        message = decode(body)
        if node == 101 and isinstance(message, CodesRequest):
            seen.append(message.attempt)
            return None if message.attempt == 1 else reply
        return reply

    fed.transport.intercept = drop_first
    fed.core().run(fed.transport)
    assert seen == [1, 2]
    assert fed.voters["site-1"].calls == 6
    answer = fed.ledger.answers(fed.study.id)[0]
    assert np.array_equal(answer.noisy_sum, sum(ledger.code(answer.query.id) for ledger in fed.site_ledgers.values()))


@pytest.mark.parametrize("lie", ["norm", "length", "attempt", "unknown", "garbage"])
def test_a_reply_the_server_cannot_trust_counts_as_zero(federation, lie):
    fed = federation(sampler=silent)

    def forge(node, body, reply):
        message = decode(body)
        if node != 101 or not isinstance(message, CodesRequest):
            return reply
        if lie == "garbage":
            return b"\x00garbage"
        query, attempt = message.queries[0], message.attempt
        code = np.zeros(fed.codec.dimension, dtype=np.int64)
        code[0] = 2**16 + 1 if lie == "norm" else 5
        if lie == "length":
            code = np.append(code, 0)
        context = SealContext(
            study=fed.study.id, query=query, site="site-1", attempt=attempt + 1 if lie == "attempt" else attempt
        )
        sealed = seal(code, public_key=fed.sealing_key.public_key(), context=context)
        name = "f" * 64 if lie == "unknown" else query
        return encode(CodesReply(batch=message.batch, attempt=attempt, codes=((name, sealed),)))

    fed.study = replace(fed.study, collection=replace(fed.study.collection, patience_s=1.0))
    fed.transport.intercept = forge
    fed.core().run(fed.transport)
    answer = fed.ledger.answers(fed.study.id)[0]
    honest = [fed.site_ledgers[s].code(answer.query.id) for s in ("site-0", "site-2")]
    assert np.array_equal(answer.noisy_sum, sum(honest))
    assert fed.events("code-refused" if lie != "garbage" else "reply-missing")


def test_a_code_cannot_be_passed_off_as_another_sites(federation):
    fed = federation(sampler=silent)
    stolen = {}

    def replay(node, body, reply):
        if not isinstance(decode(body), CodesRequest):
            return reply
        if node == 100:
            stolen["reply"] = reply
        return stolen["reply"] if node == 101 else reply

    fed.study = replace(fed.study, collection=replace(fed.study.collection, patience_s=1.0))
    fed.transport.intercept = replay
    fed.core().run(fed.transport)
    assert {e["reason"] for e in fed.events("code-refused")} == {"sealed-code"}


def test_no_code_stands_in_the_messages_or_the_event_log(federation):
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
    assert fed.ledger.study_guarantees(fed.study.id)[AccountantName.EXACT].epsilon <= 8


def test_every_site_holds_a_receipt_for_what_was_released(federation):
    fed = federation()
    fed.study = replace(fed.study, collection=replace(fed.study.collection, batch_size=4))
    fed.core().run(fed.transport)
    for ledger in fed.site_ledgers.values():
        held = {query for receipt in ledger.receipts() for query in receipt.query_ids}
        assert held == {a.query.id for a in fed.ledger.answers(fed.study.id)}
        assert ledger.alarms() == ()


def test_a_receipt_lost_on_the_way_is_sent_again_with_the_next(federation):
    fed = federation()
    fed.study = replace(fed.study, collection=replace(fed.study.collection, batch_size=3))
    lost = []

    handle = fed.workers[101].handle

    class Deaf:
        def handle(self, body):
            message = decode(body)
            if isinstance(message, Receipts) and message.receipts and not lost:
                lost.append(101)
                return b""
            return handle(body)

    fed.transport.workers = {**fed.workers, 101: Deaf()}
    fed.core().run(fed.transport)
    assert lost
    assert len(fed.site_ledgers["site-1"].receipts()) == 2


def test_receipts_lost_in_a_crash_are_delivered_by_the_next_run(federation, monkeypatch):
    fed = federation()
    monkeypatch.setattr(Aggregator, "_send_receipts", lambda *_: None)
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
