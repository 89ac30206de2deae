"""Runs the history of a study at its server, in a real study folder; the sites' ledgers are on other
machines.

The truth is counted where it happens: every draw of noise, and every receipt that reached a site.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import numpy as np

from client.ledger.site_ledger import SiteLedger
from common.config import render_study
from common.errors import ConsiliumError, LedgerCorrupt, Refused
from common.ledger.keys import load_signing_key
from common.ledger.receipts import Receipt
from common.privacy.mechanism import Budget, QuerySpec
from server.ledger.recovery import recover_charges
from server.ledger.server_ledger import Ledger
from server.public.material import CodecRecord
from server.study.create_study import create_study, open_ledger
from server.study.workspace import Site, Workspace
from tests.common.ledger.ledger_world import Caps, ledger_study, make_mechanism, make_query, roster_of
from tests.restores.harness import Case, Moment, Part, keep
from tests.worlds import pool_of, receipts_of

SITES = ("aachen", "bergen")
MECHANISM = make_mechanism(room_for=12)
POOL = f"{SITES[0]}-mri"
LATE = 3
"""The query whose receipts reach nobody at first."""

PARTS = (
    Part("ledger", ("ledger.sqlite", "ledger.sqlite-wal", "ledger.sqlite-shm")),
    Part("standing", ("ledger.standing",)),
    Part("codec", ("codec.json",)),
    Part("frames", ("frames.json",)),
    Part("labels", ("labels/*",)),
)
"""The restorable files of a study's folder on which a figure or a draw can depend."""

HARMLESS = (
    "study.toml",  # another text would have another study id
    "public.json",
    "objects/*",  # public objects named by their hashes, which a query's id covers
    "sites.json",
    "sites.lock",
    "left.json",  # sites to leave out; each site decides by its own ledger
    "keys/*",
    "gateway/*",
    "tls/*",
    "dashboard-tls/*",
    "node-keys/*",
    "flower/*",  # keys: docs/ledger.md, Keys
    "events.jsonl",
    "logs/*",
    "run.json",
    "run.lock",
    "endpoint.json",
    "relay/*",  # messages, and the process that runs
    "site-reports/*",
    "witnesses/*",  # countersigned heads, requested anew at the end of each run
    "validation.json",
    "paired.json",
    "report.json",
    "decisions.jsonl",
    "decisions.lock",
    "student/*",
    "bundle/*",
    "start.pt",
    "pairs.checkpoint",  # computed from answers that are already charged
    "dashboard/*",
    "certificate*",
    "provision/*",
    "kits/*",
    "invitations/*",
    "requests/*",
)
"""Files whose restore can do no harm."""


@dataclass(frozen=True, slots=True)
class Facts:
    """States what is true at a point of the life.

    These are the queries for which noise was drawn, in order; those of them for which a site has a receipt; and the
    folder with the sites' ledgers.
    """

    drawn: tuple[str, ...]
    receipted: frozenset[str]
    sites: Path


@dataclass
class Life:
    """Holds a study and its sites, and what happened to them. ``draw`` counts the draws."""

    root: Path
    drawn: list[str] = field(default_factory=list)
    receipted: set[str] = field(default_factory=set)

    @property
    def workspace(self) -> Workspace:
        return Workspace(self.root / "study")

    @property
    def sites(self) -> Path:
        return self.root / "sites"

    @contextmanager
    def ledger(self) -> Iterator[Ledger]:
        workspace = self.workspace
        with open_ledger(workspace) as ledger:
            yield ledger

    @contextmanager
    def hospitals(self) -> Iterator[dict[str, SiteLedger]]:
        with ExitStack() as stack:
            yield {name: stack.enter_context(self.hospital(name)) for name in SITES}

    def hospital(self, name: str) -> SiteLedger:
        caps = Caps(budget=Budget(epsilon=50.0, delta=1e-3))  # wide caps, because these tests check the server's budget
        return SiteLedger.open(self.sites / name / "site-ledger.sqlite", f"{name}-mri", caps=caps, site=name)

    def begin(self) -> None:
        create_study(self.workspace, STUDY)
        volumes = [self.workspace.objects.put(f"volume {number}".encode()) for number in range(4)]
        self.workspace.save_volumes(tuple(volumes))
        self.workspace.save_codec(CodecRecord(self.workspace.objects.put(b"a codec"), 4))
        with self.ledger() as ledger:
            for name in SITES:
                (self.sites / name).mkdir(parents=True)
                (self.sites / name / "study.toml").write_text(render_study(STUDY))
                ledger.declare_pool(pool_of(Site(name, f"{name}-mri", node_id=1), STUDY))
        with self.hospitals() as sites:
            for site in sites.values():
                site.consent(STUDY)

    def ask(self, *numbers: int, receipts: bool = True) -> str:
        """Ask queries as a run does; return ``released``, or the reason why nothing was released.

        A run leaves out sites whose receipts the ledger does not know, asks the others, releases, and sends receipts.
        """
        queries = [make_query(number, MECHANISM) for number in numbers]
        with self.ledger() as ledger, self.hospitals() as sites:
            roster = [n for n, site in sites.items() if ledger.contains(site.held(ledger.ledger_id))]
            for name in tuple(roster):
                for receipt in receipts_of(ledger, name, after=sites[name].held(ledger.ledger_id).seq):
                    if not self._take(sites[name], receipt, ledger):
                        roster.remove(name)
                        break
            if len(roster) < STUDY.privacy.quorum:
                return "stopped by what sites hold"
            accepted = []
            for name in roster:
                try:
                    sites[name].reserve(STUDY.id, queries, ledger=ledger.ledger_id)
                    accepted.append(name)
                except Refused:
                    continue
            if len(accepted) < STUDY.privacy.quorum:
                return "declined by sites"
            made = ledger.release_batch(
                study_id=STUDY.id,
                batch_id=f"b{len(self.drawn)}",
                roster=roster_of(accepted),
                queries=queries,
                draw=self._draw,
            )
            if receipts:
                for name in accepted:
                    for receipt in receipts_of(ledger, name, after=sites[name].held(ledger.ledger_id).seq):
                        self._take(sites[name], receipt, ledger)
        return "released" if made.answers else "refused by the budget"

    def _take(self, site: SiteLedger, receipt: Receipt, ledger: Ledger) -> bool:
        try:
            site.record_receipt(Receipt.parse(receipt.render()), public_key=ledger._chain.signing_key.public_key())
        except (LedgerCorrupt, Refused):
            return False
        self.receipted |= set(receipt.query_ids)
        return True

    def _draw(self, query: QuerySpec) -> np.ndarray:
        self.drawn.append(query.id)
        return np.full(4, len(self.drawn), dtype=np.int64)

    def receipt_files(self) -> list[Path]:
        """Return the files that every site writes with ``consilium site heads --out``."""
        found = []
        with self.hospitals() as sites:
            for name, site in sites.items():
                path = self.root / f"{name}.jsonl"
                path.write_text("".join(f"{receipt.render()}\n" for receipt in site.receipts(evidence=True)))
                found.append(path)
        return found


STUDY = ledger_study(planned_queries=8)
PROTECTION = STUDY.privacy.protection
COST = MECHANISM.mu_squared(PROTECTION)


def live(folder: Path) -> list[Moment[Facts]]:
    """Live the whole life; return a copy of the study's folder and the facts at every point."""
    life, moments = Life(folder / "life"), list[Moment[Facts]]()

    def point(name: str) -> None:
        number = len(moments)
        sites = folder / f"sites-{number}"
        shutil.copytree(life.sites, sites)
        facts = Facts(tuple(life.drawn), frozenset(life.receipted), sites)
        moments.append(keep(life.workspace.root, folder / f"point-{number}", name, facts))

    life.begin()
    point("made, nothing asked")
    assert life.ask(1, 2) == "released"
    (life.workspace.root / "labels").mkdir()
    (life.workspace.root / "labels" / "1.npz").write_bytes(b"a label")
    point("two answers, receipted")
    assert life.ask(LATE, receipts=False) == "released"
    point("a third, of which no receipt left")
    with life.ledger() as ledger:
        ledger.declare_pool(replace(ledger.pools()[0], budget=Budget(epsilon=7.5, delta=1e-3)))
    (life.workspace.root / "labels" / "2.npz").write_bytes(b"another")
    life.workspace.save_codec(CodecRecord(life.workspace.objects.put(b"another codec"), 4))
    (life.workspace.root / "frames.json").write_text(json.dumps([]))
    point("a pool declared tighter, another codec")
    assert life.ask(4) == "released"
    point("a fourth, receipted, and the third's receipts with it")
    assert life.ask(5, receipts=False) == "released"
    point("a fifth, of which no receipt left")
    return moments


def revived(folder: Path, study: Path, facts: Facts) -> Life:
    """Return the life that continues from a restored study folder, with untouched machines of the sites."""
    sites = folder / "sites"
    shutil.rmtree(sites, ignore_errors=True)
    shutil.copytree(facts.sites, sites)
    return Life(folder, list(facts.drawn), set(facts.receipted))


def refused(error: ConsiliumError) -> str:
    """Return the message of a refusal; check that it names a remedy."""
    text = str(error)
    assert "to fix:" in text, f"no remedy: {text}"
    return text


def knowable(case: Case, moments: list[Moment[Facts]]) -> int:
    """Return the number of draws of which a row, a standing or a receipt exists somewhere."""
    facts = moments[case.now].facts
    if not (case.older("ledger") and case.older("standing")):
        return len(facts.drawn)
    if "standing" in case.gone or ("standing" in case.parts and case.source is None):
        return len(facts.drawn)  # a missing ledger is noticed, and everything left counts as spent
    left = case.source if "ledger" in case.parts else None if "ledger" in case.gone else case.at
    rows = () if left is None else moments[left].facts.drawn
    return len(rows) + sum(query in facts.receipted for query in facts.drawn[len(rows) :])


def look(root: Path, moments: list[Moment[Facts]], case: Case, study: Path, facts: Facts) -> str:
    life, least, outcome, all_charged = revived(root, study, facts), knowable(case, moments), "", False
    for _ in range(3):
        try:
            with life.ledger() as ledger:
                open_queries = [n for n in (1, 2, LATE, 6) if ledger.answer(make_query(n, MECHANISM).id) is None]
            said = life.ask(*open_queries)
        except ConsiliumError as error:
            said = refused(error)
        if said in ("released", "refused by the budget"):
            break
        outcome = outcome or ("refused" if "to fix" in said else said)
        try:
            all_charged |= _recover(life)
        except ConsiliumError as error:
            refused(error)
            return f"{outcome} for good"
        _check_charged(life, least)
        with life.ledger() as ledger, life.hospitals() as sites:
            for site in sites.values():
                site.recover(ledger.ledger_id)
    drawn = len(life.drawn) - len(facts.drawn)
    _check_charged(life, least + drawn)
    if case.older("ledger") and case.older("standing") and not all_charged:  # a standing was kept elsewhere
        _recover(life, moments[case.now].folder / "ledger.standing")
        _check_charged(life, len(life.drawn), exactly=True)
    return f"{outcome}, all charged" if all_charged else outcome or "went on"


def _check_charged(life: Life, draws: int, *, exactly: bool = False) -> None:
    with life.ledger() as ledger:
        for spent in (ledger.spent(POOL).mu_squared, ledger.books.spent_in(STUDY.id, POOL).mu_squared):
            assert spent >= draws * COST, f"{float(spent / COST):g} charged where {draws} draws are known of"
            assert spent == draws * COST or not exactly, f"{float(spent / COST):g} charged for {draws} draws"


def _recover(life: Life, standing: Path | None = None) -> bool:
    """Recover the ledger as the messages say; return whether all remaining budget had to be charged."""
    workspace = life.workspace
    recover = partial(
        recover_charges,
        workspace.ledger_file,
        signing_key=load_signing_key(workspace.signing_key_file),
        receipts=life.receipt_files(),
        standing=standing,
        studies=[STUDY],
    )
    try:
        recover()
    except ConsiliumError as error:
        if "--charge-all" not in refused(error):
            raise
        recover(charge_all=True)
        return True
    return False
