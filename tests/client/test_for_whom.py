"""Tests that a code is sent only to the study and the server for which it was accepted."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from client.ledger.site_ledger import SiteLedger
from client.operations import staff_decisions as control
from client.policy import Consent, load_site
from client.worker import Worker
from common.config import Study
from common.errors import InvalidInput, LedgerCorrupt, Refused
from common.ledger.keys import public_hex
from common.messages import CodesRequest, OfferReply, decode, encode
from common.sealing_rotation import SealingNotice
from common.wording import declined_words
from server.ledger.verify import verify
from tests.common.ledger.ledger_world import write_raw
from tests.federation import Federation

OTHER_LEDGER = "e" * 32


@pytest.fixture
def fed(tmp_path: Path) -> Iterator[Federation]:
    with Federation(tmp_path, sites=2) as made:
        yield made


def ledger_of(fed: Federation) -> SiteLedger:
    return fed.site_ledgers["site-0"]


def accept(fed: Federation) -> None:
    reply = decode(fed.workers[100].handle(encode(fed.offer(fed.planned()[:2]))))
    assert isinstance(reply, OfferReply)
    assert reply.reason == "accepted"


def other_study(fed: Federation) -> Study:
    """Return another study with the same queries. A query's id does not depend on the study's name."""
    return replace(fed.study, name="another")


def worker_for(fed: Federation, study: Study, **server: str) -> Worker:
    """Return a worker of the same site whose site.toml names another study or server."""
    config = fed.workers[100]._config
    config = replace(config, server=replace(config.server, **server))
    ledger_of(fed).consent(study)
    return fed.worker(config=config, consent=Consent.of(study))


def assert_refused(fed: Federation, worker: Worker, request: CodesRequest, *, reason: str = "not-accepted") -> None:
    calls, rows = fed.voters["site-0"].calls, ledger_of(fed).row_count
    with pytest.raises(Refused) as refused:
        worker.handle(encode(request))
    assert refused.value.reason == reason
    assert (fed.voters["site-0"].calls, ledger_of(fed).row_count) == (calls, rows), "before inference, nothing stored"


@pytest.mark.parametrize("stored", [False, True])
@pytest.mark.parametrize("vetoed", [False, True])
def test_a_code_accepted_for_one_study_is_not_given_to_anothers_server(
    fed: Federation, stored: bool, vetoed: bool
) -> None:
    accept(fed)
    queries = fed.planned()[:2]
    if stored:
        fed.workers[100].handle(encode(fed.request(queries)))
    if vetoed:
        ledger_of(fed).decide(fed.study.id, "pause")
    study = other_study(fed)
    theirs = worker_for(fed, study, sealing_key=public_hex(X25519PrivateKey.generate()))
    for ledger in (OTHER_LEDGER, fed.ledger.ledger_id):
        assert_refused(fed, theirs, fed.request(queries, study=study.id, ledger=ledger))
    assert_refused(fed, theirs, fed.request(queries, ledger=OTHER_LEDGER), reason="unknown-study")


def test_another_studys_offer_of_the_same_query_is_declined_and_costs_nothing(fed: Federation) -> None:
    accept(fed)
    spent, study = ledger_of(fed).spent(), other_study(fed)
    theirs = worker_for(fed, study)
    reply = decode(theirs.handle(encode(fed.offer(fed.planned()[:1], study=study.id, ledger=OTHER_LEDGER))))
    assert isinstance(reply, OfferReply)
    assert reply.reason == "unknown-study"
    assert ledger_of(fed).spent() == spent


def test_a_second_server_of_the_same_study_gets_neither_acceptance_nor_code(
    fed: Federation, caplog: pytest.LogCaptureFixture
) -> None:
    """The site's log and the operator's page state the reason, because the site did consent to the study."""
    caplog.set_level("INFO")
    accept(fed)
    queries = fed.planned()[:2]
    assert_refused(fed, fed.workers[100], fed.request(queries, ledger=OTHER_LEDGER))
    reply = decode(fed.workers[100].handle(encode(fed.offer(queries, ledger=OTHER_LEDGER))))
    assert isinstance(reply, OfferReply)
    assert reply.reason == "unknown-study"
    assert "was accepted for another study or server; to fix: tell the consortium's operator this line" in caplog.text
    assert "for another ledger of the server" in declined_words(reply.reason)


def test_after_site_toml_was_changed_to_another_servers_key_what_was_accepted_before_stays(fed: Federation) -> None:
    accept(fed)
    queries = fed.planned()[:2]
    thief = worker_for(fed, fed.study, sealing_key=public_hex(X25519PrivateKey.generate()))
    assert_refused(fed, thief, fed.request(queries))
    fed.workers[100].handle(encode(fed.request(queries)))
    assert_refused(fed, thief, fed.request(queries))


def test_one_query_of_another_study_keeps_all_of_a_request_in(fed: Federation) -> None:
    accept(fed)
    ours, study = fed.planned()[:2], other_study(fed)
    theirs = worker_for(fed, study)
    new = fed.planned()[2:3]
    theirs.handle(encode(fed.offer(new, study=study.id, ledger=OTHER_LEDGER)))
    for mixed in ((*new, ours[0]), (ours[0], *new)):
        with pytest.raises(Refused):
            theirs.handle(encode(fed.request(mixed, study=study.id, ledger=OTHER_LEDGER)))
    reply = theirs.handle(encode(fed.request(new, study=study.id, ledger=OTHER_LEDGER)))
    assert len(decode(reply).codes) == 1


def test_the_same_batch_under_another_name_or_attempt_is_answered(fed: Federation) -> None:
    accept(fed)
    queries = fed.planned()[:2]
    first = fed.opened(fed.workers[100].handle(encode(fed.request(queries))), queries)
    again = fed.request(queries[::-1], batch="c" * 64, attempt=7)
    second = fed.opened(fed.workers[100].handle(encode(again)), queries[::-1])
    assert [code.tolist() for code in first] == [code.tolist() for code in second[::-1]]


def test_a_query_whose_release_is_receipted_is_never_answered_again(fed: Federation) -> None:
    fed.core(fed.planned()[:2]).run(fed.transport)
    released = [answer.query for answer in fed.ledger.answers(fed.study.id)]
    assert_refused(fed, fed.workers[100], fed.request(released), reason="released-before")
    ledger_of(fed).recover(fed.ledger.ledger_id)
    assert_refused(fed, fed.workers[100], fed.request(released), reason="released-before")
    fed.workers[100].handle(encode(fed.offer(released)))  # after a recovery: accepted anew, and charged anew
    assert len(decode(fed.workers[100].handle(encode(fed.request(released)))).codes) == len(released)


# --- a rotated sealing key


@pytest.fixture
def directory(fed: Federation) -> Path:
    path = fed.root / "site-0"
    (path / "site.toml").write_text(fed.site_toml("site-0", "pool-0"))
    return path


def rotated(fed: Federation, old: str) -> SealingNotice:
    fed.sealing_key = X25519PrivateKey.generate()
    return SealingNotice(public_hex(fed.sealing_key), (old,)).signed(fed.signing_key)


def reopened(fed: Federation, directory: Path) -> Worker:
    return worker_for(fed, fed.study, sealing_key=load_site(directory).server.sealing_key)


def test_codes_accepted_before_a_rotation_are_sealed_to_the_key_of_the_signed_notice(
    fed: Federation, directory: Path
) -> None:
    accept(fed)
    queries = fed.planned()[:2]
    for _ in range(2):  # the second key follows the first
        notice = rotated(fed, load_site(directory).server.sealing_key)
        assert control.take_sealing_key(directory, notice)
    worker = reopened(fed, directory)
    assert len(fed.opened(worker.handle(encode(fed.request(queries))), queries)) == 2
    assert [row.kind for row in ledger_of(fed).rows()].count("sealing-key") == 2
    assert verify(directory / "site-ledger.sqlite").ok
    with SiteLedger.read(directory / "site-ledger.sqlite") as again:
        key = load_site(directory).server.sealing_key
        again.accepted(queries[0].id, study_id=fed.study.id, ledger=fed.ledger.ledger_id, sealing_key=key)


def test_a_retired_key_does_not_come_back_with_an_older_site_toml(fed: Federation, directory: Path) -> None:
    older = (directory / "site.toml").read_text()
    notice = rotated(fed, load_site(directory).server.sealing_key)
    assert control.take_sealing_key(directory, notice)
    reopened(fed, directory)
    (directory / "site.toml").write_text(older)
    with pytest.raises(InvalidInput, match="replaced") as refused:
        reopened(fed, directory)
    assert "take-sealing-key" in (refused.value.remedy or "")
    assert control.take_sealing_key(directory, notice)
    reopened(fed, directory)


def test_a_notice_nobody_signed_opens_no_way_to_another_key(fed: Federation, directory: Path) -> None:
    accept(fed)
    old = load_site(directory).server.sealing_key
    forged = replace(rotated(fed, old), signature=Ed25519PrivateKey.generate().sign(b"").hex())
    with pytest.raises(InvalidInput):
        control.take_sealing_key(directory, forged)
    theirs = worker_for(fed, fed.study, sealing_key=forged.sealing_key)
    assert_refused(fed, theirs, fed.request(fed.planned()[:2]))


# --- rows from before ledger and key were recorded


def write_old_reservation(fed: Federation) -> None:
    query, ledger = fed.planned()[0], ledger_of(fed)
    with ledger._writing():
        write_raw(
            ledger,
            "reservation",
            {"pool": "pool-0", "query": query.to_json(), "query_id": query.id, "study": fed.study.id},
        )


def test_an_old_acceptance_is_answered_for_its_own_study_alone(fed: Federation) -> None:
    write_old_reservation(fed)
    query = fed.planned()[:1]
    assert verify(fed.root / "site-0" / "site-ledger.sqlite").ok
    study = other_study(fed)
    theirs = worker_for(fed, study)
    assert_refused(fed, theirs, fed.request(query, study=study.id, ledger=OTHER_LEDGER))
    assert len(fed.opened(fed.workers[100].handle(encode(fed.request(query))), query)) == 1


def test_an_old_acceptance_of_a_study_with_receipts_is_not_for_another_ledger(fed: Federation) -> None:
    fed.core(fed.planned()[1:3]).run(fed.transport)
    write_old_reservation(fed)
    assert_refused(fed, fed.workers[100], fed.request(fed.planned()[:1], ledger=OTHER_LEDGER))


def test_a_reservation_row_with_half_of_the_new_fields_or_nonsense_is_no_row(fed: Federation) -> None:
    query, ledger = fed.planned()[0], ledger_of(fed)
    body = {"pool": "pool-0", "query": query.to_json(), "query_id": query.id, "study": fed.study.id}
    for more in ({"ledger": "a/../b c"}, {"sealing_key": "zz"}, {"ledger": 1}, {"server": "x"}):
        with pytest.raises((InvalidInput, LedgerCorrupt)), ledger._writing():
            write_raw(ledger, "reservation", body | more)
    assert query.id not in ledger._books.reservations
