"""Runs a small history of a server's and a site's ledger that gives the same bytes each time."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from fractions import Fraction
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from client.ledger.site_ledger import SiteLedger
from client.policy import Caps
from common.data.dataset import PatientIdentity
from common.errors import LedgerCorrupt, Refused
from common.ledger.base_ledger import OpenLedger
from common.ledger.chain import Chain
from common.ledger.receipts import Receipt
from common.ledger.records import LostRecord, RecoveredRecord
from common.ledger.site_state import SiteBooks
from common.ledger.teacher_records import TrainingRecord
from common.privacy.training import Sampling, TrainingEvent
from server.ledger.server_ledger import Ledger
from tests.common.ledger.ledger_world import (
    SITES,
    Answers,
    Ticking,
    declare,
    ledger_study,
    make_mechanism,
    make_query,
    roster_of,
)
from tests.worlds import receipts_of

SERVER_KEY, NEXT_KEY, SITE_KEY = (Ed25519PrivateKey.from_private_bytes(bytes([n]) * 32) for n in (1, 2, 3))
A, B, C = "a" * 64, "b" * 64, "c" * 64
MECHANISM = make_mechanism(room_for=4)
EVENT = TrainingEvent(Sampling.POISSON, Fraction(1, 4), Fraction(3, 2), 40, (Fraction(5),))


@contextmanager
def as_until_0_2() -> Iterator[None]:
    """Read the clock and fill rows as releases up to 0.2 did, whose standing held charges only.

    Their first row did not state that a standing exists. They read the clock once more after each charge, for the
    standing. Rows of a recovery did not state the row from which the standing was charged.
    """
    begun, kept, created = OpenLedger.__init__, OpenLedger._keep_standing, Chain.create

    def create(path: Path, *, genesis: dict[str, object], **more: Any) -> Chain:
        return created(path, genesis={key: value for key, value in genesis.items() if key != "standing"}, **more)

    def charged(ledger: Any) -> object:
        books = ledger._books
        if isinstance(books, SiteBooks):
            return books.spent(), len(books.restored_at), len(books.sealed.masked)
        charges = books.releases._charges
        return charges[-1].seq if charges else 0, len(books.recovered), len(books.lost)

    def begin(self: Any, *args: Any) -> None:
        begun(self, *args)
        self.charged = charged(self)

    def keep(self: Any) -> None:
        if (now := charged(self)) != self.charged:
            self.charged = now
            self._chain.clock()
        kept(self)

    with (
        patch.object(Chain, "create", create),
        patch.object(OpenLedger, "__init__", begin),
        patch.object(OpenLedger, "_keep_standing", keep),
        patch("server.ledger.server_file.LostRecord", lambda *fields: LostRecord(*fields[:3])),
        patch("server.ledger.server_file.RecoveredRecord", lambda *fields: RecoveredRecord(*fields[:3])),
    ):
        yield


Lines = list[list[str]]
"""Kind, body and hash of every row."""


A, B = "a" * 64, "b" * 64
SINCE: dict[str, dict[str, dict[str, object]]] = {
    "server": {
        "answer": {"answer_sha256": A, "draw": 1, "query_id": B},
        "roster": {"roster": [["north", "north-mri"], ["south", "south-mri"]]},
        "lost-draw": {"draw": 1, "query_ids": [A, B], "reason": "incomplete"},
    },
    "site": {
        "deal": {"deal": A, "seats": [[0, B], [3, "c" * 64]], "voters": 2},
        "drawn": {"steps": 40, "training": A},
        "foreign": {"brought": "bundle", "served": A, "voter": 0},
        "peer": {"key": A, "site": "south", "study": B},
        "mask-key": {"batch": A, "draw": 1, "nonce": B, "study": A},
        "disclosure": {
            "auditor": B,
            "batch": A,
            "draw": 1,
            "masks": B,
            "mu_squared": "7/3",
            "queries": 2,
            "study": A,
        },
        "masked": {"draw": 1, "masks": A, "query_id": B, "share_std": "70000/3", "words_sha256": A},
    },
}
"""Kinds of row that no 0.1.0 ledger has."""


def live(folder: Path) -> dict[str, Lines | str]:
    """Run this history; return the rows of both ledgers and both standings as they are on disk."""
    with patch("secrets.token_hex", lambda size: "5" * (2 * size)), as_until_0_2():
        server = _server(folder)
        site = _site(folder, Ledger.open(folder / "ledger.sqlite", signing_key=NEXT_KEY, clock=Ticking()))
    return {
        "server": server,
        "site": site,
        "server standing": (folder / "ledger.standing").read_text(),
        "site standing": (folder / "site-ledger.standing").read_text(),
    }


def named(folder: Path) -> dict[str, Lines | list[str]]:
    """Return the rows of both ledgers and the site's receipts if a roster has a row of its own."""
    sites, queries = (
        (*SITES, *(f"site-{number:02}" for number in range(14))),
        [make_query(n, MECHANISM) for n in (1, 2)],
    )
    study, answers, caps = ledger_study(), Answers(), Caps(epsilon=8.0, delta=1e-3)
    with (
        patch("secrets.token_hex", lambda size: "5" * (2 * size)),
        as_until_0_2(),
        Ledger.create(folder / "ledger.sqlite", signing_key=SERVER_KEY, clock=Ticking()) as server,
        SiteLedger.open(
            folder / "site-ledger.sqlite", "aachen-mri", caps=caps, signing_key=SITE_KEY, clock=Ticking()
        ) as site,
    ):
        server.register_study(study)
        declare(server, sites=sites)
        site.consent(study)
        for query in queries:
            site.reserve(study.id, [query])
            server.release_batch(
                study_id=study.id, batch_id="b", roster=roster_of(sites), queries=[query], draw=answers.draw
            )
        receipts = [render() for render in server.receipts_due("aachen")]
        for text in receipts:
            site.record_receipt(Receipt.parse(text), public_key=SERVER_KEY.public_key())
        lines = [[[row.kind, row.body, row.hash] for row in ledger.rows()] for ledger in (server, site)]
    return {"server": lines[0], "site": lines[1], "receipts": receipts}


def _server(folder: Path) -> Lines:
    path, answers = folder / "ledger.sqlite", Answers()
    study, other = ledger_study(), ledger_study("second")
    queries = [make_query(number, MECHANISM) for number in range(1, 7)]

    def release(ledger: Ledger, study_id: str, batch: str, numbers: range) -> None:
        ledger.release_batch(
            study_id=study_id,
            batch_id=batch,
            roster=roster_of(),
            queries=[queries[number] for number in numbers],
            draw=answers.draw,
        )

    with Ledger.create(path, signing_key=SERVER_KEY, clock=Ticking()) as ledger:
        ledger.register_study(study)
        ledger.register_study(other)
        declare(ledger)
        ledger.declare_books("aachen-mri", "5" * 32)
        ledger.note("first light")
        release(ledger, study.id, "b1", range(1))
        release(ledger, other.id, "b2", range(1))
    shutil.copy(path, folder / "older.sqlite")
    with Ledger.open(path, signing_key=SERVER_KEY, clock=Ticking()) as ledger:
        release(ledger, study.id, "b3", range(1, 2))
        receipt = receipts_of(ledger, "aachen")[-1]
        release(ledger, study.id, "b3", range(2, 3))  # no receipt of this release arrives
    shutil.copy(folder / "older.sqlite", path)
    with Ledger.open(path, signing_key=SERVER_KEY, clock=Ticking(), restored=True) as ledger:
        ledger.recover([receipt])
        ledger.rotate_key(NEXT_KEY)
    with Ledger.open(path, signing_key=NEXT_KEY, clock=Ticking()) as ledger:
        release(ledger, study.id, "b4", range(3, 6))
        return [[row.kind, row.body, row.hash] for row in ledger.rows()]


def _site(folder: Path, server: Ledger) -> Lines:
    path, study = folder / "site-ledger.sqlite", ledger_study()
    queries = [make_query(number, MECHANISM) for number in range(1, 7)]
    caps = Caps(epsilon=8.0, delta=1e-3)
    with (
        server,
        SiteLedger.open(path, "aachen-mri", site="aachen", caps=caps, signing_key=SITE_KEY, clock=Ticking()) as site,
    ):
        site.consent(study)
        site.state_identity(PatientIdentity.SUBJECT)
        site.record_training(TrainingRecord(A, 0, B, "dp-sgd", (EVENT,)))
        site.record_training(TrainingRecord(B, 0, B, "standard", ()))
        site.record_trained(A, C)
        teachers = site.state_teachers([C, ""])
        site.reserve(study.id, queries[:1], ledger=server.ledger_id, sealing_key=A)
        site.store_code(queries[0].id, np.array([1, -2, 3, -4], dtype=np.int64), teachers=teachers)
        first, *later = receipts_of(server, "aachen")
        site.record_receipt(first, public_key=NEXT_KEY.public_key())
        site.take_sealing_key(B, replaces=A)
        site.withdraw_patient(slot=3, voter=0, subject=C, weights=C)
        site.decide(study.id, "pause")
        with suppress(Refused):
            site.reserve(study.id, queries[1:2])
        site.decide(study.id, "resume")
        site.note("a remark")
        for receipt in later:  # receipts of queries that this site never accepted
            with suppress(LedgerCorrupt):
                site.record_receipt(receipt, public_key=NEXT_KEY.public_key())
        site.recover(server.ledger_id)
        site.charge_lost(None)
        return [[row.kind, row.body, row.hash] for row in site.rows()]
