"""Runs the history of a site's ledger, in a real site folder; nothing happens to the server.

The truth is written down where it happens: which queries were accepted, for which of them a receipt arrived, who
vetoed, and who left. ``training_life.py`` has the life of trainings, deals and teachers.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from client.ledger.site_ledger import SiteLedger
from client.operations.staff_decisions import recover_own
from client.policy import load_site
from client.site.books import open_books, read_books, stated_books
from client.site.status import facts_of
from common.admission import write_request
from common.canonical import sha256_bytes
from common.config import render_study
from common.errors import ConsiliumError, LedgerCorrupt, Refused
from common.ledger.keys import public_hex
from common.ledger.receipts import Receipt
from common.pki import create_node_keys
from consilium.cli.site import status_text
from tests.common.ledger.ledger_world import World, ledger_study, make_mechanism, make_query
from tests.restores.harness import Case, Moment, Part, keep
from tests.restores.server_life import refused
from tests.worlds import receipts_of, site_toml

POOL = "aachen-mri"
MECHANISM = make_mechanism(room_for=12)
STUDY = ledger_study(planned_queries=12)
COST = MECHANISM.mu_squared(STUDY.privacy.protection)
CODE = np.array([1, -2, 3, -4], dtype=np.int64)
SUBJECT, WEIGHTS = sha256_bytes(b"keyed"), sha256_bytes(b"weights")

PARTS = (
    Part("ledger", ("site-ledger.sqlite", "site-ledger.sqlite-wal", "site-ledger.sqlite-shm")),
    Part("standing", ("site-ledger.standing",)),
    Part("site.toml", ("site.toml",)),
)
"""The ledger files of a site's folder. A site's codes are in its ledger."""

HARMLESS = (
    "witnesses/*",  # an older copy can at most sign a longer fork: docs/adr/0037-witnesses.md
    "study.toml", "request.json",  # the ledger has the consented text, and a worker compares them
    "site-ledger.key",  # docs/ledger.md, Keys: another one cannot open the ledger
)  # fmt: skip
"""Files whose restore can do no harm."""


@dataclass(frozen=True, slots=True)
class Facts:
    """States what is true at a point of the life.

    These are the accepted queries, in order; the receipts that the server made, and those that arrived; whether the
    site has paused or left the study; and whether the patient has left.
    """

    accepted: tuple[str, ...] = ()
    arrived: tuple[Receipt, ...] = ()
    made: tuple[Receipt, ...] = ()
    veto: str | None = None
    patient_left: bool = False


@dataclass
class Life:
    """Holds a site's folder and what happened there."""

    root: Path
    world: World
    accepted: list[str] = field(default_factory=list)
    arrived: list[Receipt] = field(default_factory=list)
    veto: str | None = None
    patient_left: bool = False

    @property
    def folder(self) -> Path:
        return self.root / "site"

    @contextmanager
    def ledger(self) -> Iterator[SiteLedger]:
        with open_books(load_site(self.folder)) as ledger:
            yield ledger

    def facts(self) -> Facts:
        made = tuple(receipts_of(self.world.ledger, "aachen"))
        return Facts(tuple(self.accepted), tuple(self.arrived), made, self.veto, self.patient_left)

    def accept(self, *numbers: int, receipt: bool, release: bool = True) -> None:
        queries = [make_query(number, MECHANISM) for number in numbers]
        with self.ledger() as ledger:
            ledger.reserve(STUDY.id, queries, ledger=self.world.ledger.ledger_id)
            for query in queries:
                ledger.store_code(query.id, CODE)
            self.accepted += [query.id for query in queries]
            if not release:
                return
            self.world.release(queries, batch=f"b{numbers[0]}", sites=("aachen", "bergen"))
            if receipt:
                for one in receipts_of(self.world.ledger, "aachen", after=ledger.held(self.world.ledger.ledger_id).seq):
                    ledger.record_receipt(Receipt.parse(one.render()), public_key=self.world.key.public_key())
                    self.arrived.append(one)


def live(folder: Path) -> tuple[World, list[Moment[Facts]]]:
    """Live the whole life; return the server's world, and a copy of the site's folder and the facts at every point."""
    (folder / "server").mkdir()
    world = World.create(folder / "server", study=STUDY)
    life, moments = Life(folder, world), list[Moment[Facts]]()
    life.folder.mkdir()
    signing = public_hex(world.key)
    text = site_toml(site="aachen", pool=POOL, signing_key=signing, more="queries_per_day = 100\n")
    (life.folder / "site.toml").write_text(text)
    (life.folder / "study.toml").write_text(render_study(STUDY))

    def point(name: str) -> None:
        moments.append(keep(life.folder, folder / f"point-{len(moments)}", name, life.facts()))

    with life.ledger() as ledger:
        ledger.consent(STUDY)
    node_key = create_node_keys(folder / "node").private
    books = stated_books(load_site(life.folder))
    write_request(
        life.folder / "request.json", study=STUDY.id, site="aachen", pool=POOL, node_key=node_key, books=books
    )
    point("joined, nothing accepted")
    life.accept(1, 2, receipt=True)
    point("two accepted, receipted")
    life.accept(3, receipt=False, release=False)
    point("a third, which the server never released")
    with life.ledger() as ledger:
        ledger.decide(STUDY.id, "pause")
    life.veto = "pause"
    point("paused")
    with life.ledger() as ledger:
        ledger.decide(STUDY.id, "resume")
        ledger.withdraw_patient(slot=3, voter=0, subject=SUBJECT, weights=WEIGHTS)
    life.veto, life.patient_left = None, True
    point("resumed, and a patient left")
    life.accept(4, receipt=False)
    point("a fourth, whose receipt has not arrived")
    life.accept(5, receipt=True)
    (life.folder / "site.toml").write_text(text.replace("queries_per_day = 100", "queries_per_day = 90"))
    point("a fifth, receipted, the fourth's receipt with it, and another cap")
    with life.ledger() as ledger:
        ledger.decide(STUDY.id, "withdraw")
    life.veto = "withdraw"
    point("left for good")
    return world, moments


def revived(folder: Path, world: World, facts: Facts) -> Life:
    """Return the life that continues in the restored folder ``folder / "site"``."""
    return Life(folder, world, list(facts.accepted), list(facts.arrived), facts.veto, facts.patient_left)


def known_of(case: Case, moments: list[Moment[Facts]]) -> Facts | None:
    """Return the facts up to which the site's own machine knows what happened; None if it knows nothing."""
    if not (case.older("ledger") and case.older("standing")):
        return moments[case.now].facts
    if "standing" in case.gone or ("standing" in case.parts and case.source is None):
        return moments[case.now].facts  # a missing ledger is noticed, and everything left counts as spent
    left = case.source if "ledger" in case.parts else None if "ledger" in case.gone else case.at
    return None if left is None else moments[left].facts


def look(root: Path, world: World, moments: list[Moment[Facts]], case: Case, folder: Path, facts: Facts) -> str:
    life, known = revived(root, world, facts), known_of(case, moments)
    assert folder == life.folder
    newest = moments[case.now].folder / "site.toml"
    outcome, recovered = "", False
    _status_is_no_less(life, known)
    try:
        stopped = _heeding(life, newest, lambda: hear(life, facts))
    except ConsiliumError as error:
        text = refused(error)
        outcome, stopped = "refused", False
        if "recover --own-ledger" not in text:
            return "refused for good"
        try:
            _heeding(life, newest, lambda: _recover(life))
        except ConsiliumError as error:
            refused(error)
            return "refused for good"
        recovered, stopped = True, _heeding(life, newest, lambda: hear(life, facts))
    kept = moments[case.now].folder / "site-ledger.standing"
    if stopped:
        outcome = f"{outcome}, then stopped by receipts".removeprefix(", ")
        _status_is_no_less(life, facts)
        recover_own(life.folder, standing=kept, charge_all=False)  # a copy of the standing was kept elsewhere
        recovered, known = True, facts
        assert not _heeding(life, newest, lambda: hear(life, facts)), "stopped again after all was charged"
    _status_is_no_less(life, known)
    receipted = {query for receipt in facts.made for query in receipt.query_ids}
    with life.ledger() as ledger:
        least = set() if known is None else set(known.accepted)
        least |= receipted & set(facts.accepted)
        assert ledger.spent().mu_squared >= len(least) * COST, "less is charged than was accepted"
        assert ledger.books.spent_in(STUDY.id).mu_squared >= len(least) * COST, "less is charged in the study"
        told = not (case.older("ledger") and case.older("standing"))  # otherwise a person must give the decision again
        if told and facts.patient_left:
            assert [one.weights for _, one in ledger.books.teachers.patients.values()] == [WEIGHTS], (
                "a patient came back"
            )
            assert all(ledger.code(make_query(n, MECHANISM).id) is None for n in (1, 2, 3)), "a code came back"
        if recovered:
            assert ledger.stopped(STUDY.id), "a recovered site answers before a person resumed"
        if told and facts.veto:
            assert ledger.stopped(STUDY.id), "a veto vanished"
            assert facts.veto == "pause" or ledger.stopped(STUDY.id) == "withdraw", "the end for good vanished"
        before, new = ledger.spent().mu_squared, 0
        if ledger.stopped(STUDY.id) is None:
            try:
                ledger.reserve(STUDY.id, [make_query(9, MECHANISM)], ledger=world.ledger.ledger_id)
                new = 1
            except Refused:
                outcome = outcome or "went on, to its budget"
        assert ledger.spent().mu_squared == before + new * COST, "a free acceptance"
    if known != facts and "refused" not in outcome:  # a whole machine was rolled back, and its site continued
        recover_own(life.folder, standing=kept, charge_all=False)
        if newest.exists():  # the copy may be from before the newest caps
            shutil.copy(newest, life.folder / "site.toml")
        with life.ledger() as ledger:
            everything = (len(facts.accepted) + new) * COST
            assert ledger.spent().mu_squared >= everything, "less is charged than was accepted, by a kept standing"
            assert ledger.spent().mu_squared == everything, "more is charged than was accepted, by a kept standing"
            assert bool(ledger.books.teachers.patients) == facts.patient_left, "a patient came back, by a kept standing"
            if facts.veto == "withdraw":
                assert ledger.stopped(STUDY.id) == "withdraw", "the end for good vanished, by a kept standing"
    return outcome or "went on"


def _heeding(life: Life, newest: Path, act: Callable[[], bool]) -> bool:
    """Do what a person does. If site.toml is refused as old, restore the newest site.toml and try again."""
    try:
        return act()
    except ConsiliumError as error:
        if "newest site.toml" not in refused(error):
            raise
        shutil.copy(newest, life.folder / "site.toml")
        return act()


def _status_is_no_less(life: Life, known: Facts | None) -> None:
    """Check that ``site status`` prints no less than was accepted, unless it says ``at least``."""
    try:
        facts = facts_of(life.folder)
    except ConsiliumError as error:
        refused(error)
        return
    if facts.doubt:
        assert "at least:" in status_text(facts)
        return
    with read_books(load_site(life.folder)) as ledger:
        limit = ledger._books.limit
    least = 0 if known is None else len(known.accepted)
    assert (facts.share or 0) >= float(least * COST / limit) * (1 - 1e-12), "site status prints less than was accepted"


def hear(life: Life, facts: Facts) -> bool:
    """Enter the receipts that the server sends before it asks for a code; return whether a receipt stops the site."""
    with life.ledger() as ledger:
        ledger.consent(STUDY)
        held = ledger.held(life.world.ledger.ledger_id).seq
        for receipt in facts.made:
            if receipt.head.seq <= held:
                continue
            try:
                ledger.record_receipt(Receipt.parse(receipt.render()), public_key=life.world.key.public_key())
            except LedgerCorrupt:
                return True
            except Refused:
                continue
    return False


def _recover(life: Life) -> bool:
    try:
        recover_own(life.folder, standing=None, charge_all=False)
    except ConsiliumError as error:
        if "--charge-all" not in refused(error):
            raise
        recover_own(life.folder, standing=None, charge_all=True)
    return True
