"""Random lives of a server and three hospitals, whose ledgers are put back from copies of different moments.

What is true is counted beside the product: every draw of noise, every acceptance that a site charged to itself, and
which of both a ledger, a standing or a receipt shows (:class:`Shown`). A ledger's charge must not be below what is
shown to it. One life is one seed; two studies share the hospitals' pools.
"""

from __future__ import annotations

import random
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from client.ledger.site_ledger import SiteLedger
from common.errors import ConsiliumError, LedgerCorrupt, Refused
from common.ledger.receipts import Receipt
from common.ledger.rollback_guard import KeptStanding, ServerStanding, SiteLedgerStanding, kept_standing
from common.privacy.mechanism import Budget
from server.ledger.server_ledger import Candidate, Ledger
from tests.common.ledger.ledger_world import (
    SITES,
    Caps,
    Ticking,
    declare,
    ledger_study,
    make_mechanism,
    make_query,
    roster_of,
)
from tests.worlds import receipts_of

STUDIES = tuple(ledger_study(name, planned_queries=400) for name in ("one", "two"))
MECHANISM = make_mechanism(room_for=400)
COST = MECHANISM.mu_squared(STUDIES[0].privacy.protection)
QUERIES = [make_query(number, MECHANISM) for number in range(12)]
"""Those of even numbers belong to the first study, the others to the second."""
CAPS = Caps(budget=Budget(epsilon=50.0, delta=1e-3), queries_per_day=100_000)

Shown = frozenset[tuple[str, int]]
"""Draws and acceptances by number: ("draw", 3), ("accepted", 7)."""


@dataclass(frozen=True)
class Copy:
    """A copy of a ledger and its standing, and what each of them shows."""

    folder: Path
    ledger: Shown
    standing: Shown


@dataclass
class Machine:
    """The folder of a ledger with its standing; what both show, all copies, and the newest standing of each line that
    was lost, which somebody has kept."""

    folder: Path
    name: str
    ledger: Shown = frozenset()
    standing: Shown = frozenset()
    copies: list[Copy] = field(default_factory=list)
    kept: list[tuple[Path, Shown]] = field(default_factory=list)

    @property
    def file(self) -> Path:
        return self.folder / f"{self.name}.sqlite"

    def show(self, more: Shown = frozenset()) -> None:
        self.ledger = self.standing = self.ledger | more

    def copy(self, into: Path) -> None:
        into.mkdir()
        for path in self.folder.glob(f"{self.name}.s*"):
            shutil.copy(path, into)
        self.copies.append(Copy(into, self.ledger, self.standing))

    def put_back(self, ledger: Copy, standing: Copy | None, *, keep_as: Path) -> None:
        """Put a copy of the ledger in place, and one of the standing, perhaps of another moment."""
        for path in self.folder.glob(f"{self.name}.sqlite*"):
            path.unlink()
        for path in ledger.folder.glob(f"{self.name}.sqlite*"):
            shutil.copy(path, self.folder)
        self.ledger = ledger.ledger
        if standing is not None:
            shutil.copy(self.file.with_suffix(".standing"), keep_as)
            self.kept.append((keep_as, self.standing))
            shutil.copy(standing.folder / f"{self.name}.standing", self.folder)
            self.standing = standing.standing


class Life:
    """One life. Call :meth:`live`, which raises AssertionError at the first charge that is too low."""

    def __init__(self, root: Path, seed: int, *, standings: bool) -> None:
        self.root, self.random, self.standings = root, random.Random(seed), standings
        self.clock, self.key, self.copied = Ticking(), Ed25519PrivateKey.generate(), 0
        self.draws: list[tuple[int, tuple[str, ...]]] = []
        self.accepted: list[int] = []  # the query of each acceptance that a site charged to itself
        self.at_head: dict[str, Shown] = {}
        self.in_receipt: dict[str, Shown] = {}
        self.server = Machine(root / "server", "ledger")
        self.sites = {name: Machine(root / name, "site-ledger") for name in SITES}
        for machine in (self.server, *self.sites.values()):
            machine.folder.mkdir(parents=True)
        with Ledger.create(self.server.file, signing_key=self.key, clock=self.clock) as ledger:
            for study in STUDIES:
                ledger.register_study(study)
            declare(ledger)
            self.id = ledger.ledger_id
        for name in SITES:
            with self.site(name) as site:
                for study in STUDIES:
                    site.consent(study)

    def opened(self, *, restored: bool = False) -> Ledger:
        return Ledger.open(self.server.file, signing_key=self.key, clock=self.clock, restored=restored)

    @contextmanager
    def site(self, name: str, *, restored: bool = False) -> Iterator[SiteLedger]:
        of = {"caps": CAPS, "site": name, "clock": self.clock, "restored": restored}
        with SiteLedger.open(self.sites[name].file, f"{name}-mri", **of) as ledger:  # type: ignore[arg-type]
            yield ledger

    def live(self, events: int = 25) -> None:
        acts: list[Callable[[], None]] = [self.ask, self.copy, self.put_back, self.deliver_late, self.accept_only]
        for _ in range(events):
            self.random.choices(acts, (6, 2.5, 4, 1.5, 1))[0]()
            self.check()
        for kept in reversed(self.server.kept):
            self.recover_server(kept, self.receipts(SITES))
        for name, machine in self.sites.items():
            for kept in reversed(machine.kept):
                self.recover_site(name, kept)
        self.end_alarms(SITES)
        self.deliver_late(every=True)
        self.check()

    # --- what happens

    def copy(self) -> None:
        self.copied += 1
        self.random.choice([self.server, *self.sites.values()]).copy(self.root / f"copy-{self.copied}")

    def put_back(self) -> None:
        able = [machine for machine in (self.server, *self.sites.values()) if machine.copies]
        if not able:
            return
        machine, self.copied = self.random.choice(able), self.copied + 1
        ledger, other = self.random.choice(machine.copies), self.random.choice(machine.copies)
        standing = self.random.choice((None, ledger, other)) if self.standings else None
        machine.put_back(ledger, standing, keep_as=self.root / f"kept-{self.copied}")
        try:
            if machine is self.server:
                self.opened().close()
            else:
                with self.site(machine.folder.name):
                    pass
            machine.show()
        except ConsiliumError as error:
            assert "to fix: " in str(error)  # noqa: PT017
            some = [name for name in SITES if self.random.random() < 0.7]
            if machine is self.server:
                self.recover_server(None, self.receipts(some))
            else:
                self.recover_site(machine.folder.name, None)

    def accept_only(self) -> None:
        self.ask(release=False)

    def ask(self, *, release: bool = True) -> None:
        """Offer queries that have no answer, send the receipts that sites lack, release, and send some receipts."""
        number, contradicted = self.random.choice((0, 1)), False
        study = STUDIES[number].id
        with self.opened() as ledger:
            able = [one for one in range(number, len(QUERIES), 2) if ledger.answer(QUERIES[one].id) is None]
            chosen = self.random.sample(able, min(len(able), self.random.choice((1, 1, 2))))
            roster = []
            for name in [name for name in SITES if chosen and self.random.random() < 0.85]:
                with self.site(name) as site:
                    if not ledger.contains(site.held(self.id)):
                        contradicted = True
                    elif self.accepts(name, site, study, chosen) and self.deliver(name, ledger, site):
                        roster.append(name)
            if release and len(roster) >= 2:
                self.release(ledger, study, roster, chosen)
        if contradicted and self.random.random() < 0.6:
            self.end_alarms(SITES)
        self.act_on_alarms()

    def accepts(self, name: str, site: SiteLedger, study: str, chosen: Sequence[int]) -> bool:
        shown = set[tuple[str, int]]()
        try:
            for number in chosen:
                before = site.spent()
                site.reserve(study, [QUERIES[number]], ledger=self.id)
                if site.spent() != before:  # the query of a lost row, which its recovery charged, is not charged again
                    self.accepted.append(number)
                    shown.add(("accepted", len(self.accepted) - 1))
                site.accepted(QUERIES[number].id, study_id=study, ledger=self.id, sealing_key="")
        except Refused:
            return False
        finally:
            self.sites[name].show(frozenset(shown))
        return True

    def release(self, ledger: Ledger, study: str, roster: list[str], chosen: Sequence[int]) -> None:
        begun = len(self.draws)

        def drawn(number: int) -> Callable[[], np.ndarray]:
            def draw() -> np.ndarray:
                self.draws.append((number, tuple(roster)))
                return np.full(4, len(self.draws), dtype=np.int64)

            return draw

        candidates = [Candidate(QUERIES[number], drawn(number)) for number in chosen]
        ledger.release_batch(study_id=study, batch_id=f"b{begun}", roster=roster_of(roster), candidates=candidates)
        made = frozenset(("draw", number) for number in range(begun, len(self.draws)))
        self.server.show(made)
        head = ledger.head().hash
        self.in_receipt[head], self.at_head[head] = made, self.server.ledger
        for name in roster:
            if self.random.random() < 0.5:
                with self.site(name) as site:
                    self.deliver(name, ledger, site)

    def deliver(self, name: str, ledger: Ledger, site: SiteLedger) -> bool:
        """Send a site the receipts that it lacks; whether it raises no alarm."""
        held = site.held(self.id)
        for receipt in receipts_of(ledger, name, after=held.seq) if ledger.contains(held) else ():
            try:
                site.record_receipt(Receipt.parse(receipt.render()), public_key=self.key.public_key())
            except (Refused, LedgerCorrupt) as error:
                self.sites[name].show()
                if isinstance(error, LedgerCorrupt):
                    return False
                continue
            told = self.at_head[receipt.head.hash]
            self.sites[name].show(frozenset(one for one in told if name in self.draws[one[1]][1]))
        return not site.alarms()

    def deliver_late(self, *, every: bool = False) -> None:
        with self.opened() as ledger:
            for name in SITES:
                if every or self.random.random() < 0.6:
                    with self.site(name) as site:
                        self.deliver(name, ledger, site)
        self.act_on_alarms()

    # --- what people do

    def receipts(self, names: Sequence[str]) -> list[Receipt]:
        """What the sites write with ``consilium site heads --out``."""
        found: list[Receipt] = []
        for name in names:
            with SiteLedger.read(self.sites[name].file) as site:
                found += site.receipts(evidence=True)
        return found

    def recover_server(self, kept: tuple[Path, Shown] | None, receipts: Sequence[Receipt]) -> None:
        with self.opened(restored=True) as ledger:
            ledger.recover(receipts, standing=None if kept is None else ServerStanding.load(kept[0]))
        told = frozenset().union(*(self.in_receipt[receipt.head.hash] for receipt in receipts))
        self.server.show(told | self.server.standing | (frozenset() if kept is None else kept[1]))

    def recover_site(self, name: str, kept: tuple[Path, Shown] | None) -> None:
        """As `consilium site recover --own-ledger` does, and resume."""
        machine, found, shown = self.sites[name], list[KeptStanding](), frozenset[tuple[str, int]]()
        with self.site(name, restored=True) as site:
            for study in STUDIES:
                site.consent(study)
            if kept is not None and not site.covers((one := SiteLedgerStanding.load(kept[0])).position):
                found, shown = [one], kept[1]
            if kept_standing(machine.file) is not None and site.forgotten() is not None:
                found.append(SiteLedgerStanding.load(machine.file.with_suffix(".standing")))
                shown |= machine.standing
            if found:
                site.charge_lost(*found)  # type: ignore[arg-type]
                for study in STUDIES:
                    site.decide(study.id, "resume")
        machine.show(shown)

    def end_alarms(self, names: Sequence[str]) -> None:
        """The server's operator enters all receipts, and these sites run `consilium site recover`."""
        self.recover_server(None, self.receipts(SITES))
        for name in names:
            with self.site(name) as site:
                site.recover(self.id)
            self.sites[name].show()

    def act_on_alarms(self) -> None:
        for name in SITES:
            with self.site(name) as site:
                alarms = site.alarms()
            if not alarms or self.random.random() < 0.4:
                continue
            if "never accepted" in alarms[0] and self.sites[name].kept:  # it was this site that was put back
                self.recover_site(name, self.sites[name].kept[-1])
            else:
                self.end_alarms([name])

    # --- what must hold

    def check(self) -> None:
        """No pool is charged less, in any ledger, than the draws cost that this ledger is shown."""
        for part in (None, 0, 1):
            study = None if part is None else STUDIES[part].id
            with self.opened() as ledger:
                for name in SITES:
                    drawn = self.drawn_of(name, self.server.ledger, part)
                    pool = f"{name}-mri"
                    spent = ledger.spent(pool) if study is None else ledger.books.spent_in(study, pool)
                    charged = spent.mu_squared / COST
                    assert charged >= drawn.total(), f"server: {charged} charged to {name} for {drawn.total()} draws"
            for name, machine in self.sites.items():
                ever = self.drawn_of(name, frozenset(("draw", one) for one in range(len(self.draws))), part)
                drawn = self.drawn_of(name, machine.ledger, part)
                own = Counter(self.accepted[one] for kind, one in machine.ledger if kind == "accepted")
                least = sum(min(ever[number], max(drawn[number], own[number])) for number in ever)
                with self.site(name) as site:
                    spent = site.spent() if study is None else site.books.spent_in(study)
                charged = spent.mu_squared / COST
                assert charged >= least, f"{name}: {charged} charged for {least} draws"

    def drawn_of(self, name: str, shown: Shown, part: int | None) -> Counter[int]:
        """How often each query was drawn with a site, as far as it is shown."""
        drawn = (self.draws[one] for kind, one in shown if kind == "draw")
        return Counter(query for query, roster in drawn if name in roster and part in (None, query % 2))
