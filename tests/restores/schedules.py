"""Runs random histories of a server and three hospitals whose ledgers are restored from copies of different
moments.

The truth is counted outside the product: every draw of noise, and every acceptance that a site charged to itself.
:class:`Shown` contains the draws and acceptances that a ledger, a standing or a receipt shows. A ledger must not
charge less than what is shown to it. A seed determines one life. Two studies share the hospitals' pools, and have one
server's ledger or two.
"""

from __future__ import annotations

import random
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path

import numpy as np
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from client.ledger.site_ledger import SiteLedger
from common.errors import ConsiliumError, LedgerCorrupt, Refused
from common.ledger.receipts import Receipt
from common.ledger.rollback_guard import KeptStanding, ServerStanding, SiteLedgerStanding, kept_standing
from common.privacy.mechanism import Budget, QuerySpec
from server.ledger.server_ledger import Ledger
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
"""Queries; even numbers belong to the first study, odd ones to the second."""
CAPS = Caps(budget=Budget(epsilon=50.0, delta=1e-3), queries_per_day=100_000)

Shown = frozenset[tuple[str, int]]
"""Draws and acceptances by number: ("draw", 3), ("accepted", 7)."""


@dataclass(frozen=True)
class Copy:
    """Holds a copy of a ledger and its standing, and which draws and acceptances each of the two shows."""

    folder: Path
    ledger: Shown
    standing: Shown


@dataclass
class Machine:
    """Holds the folder of a ledger with its standing, and all copies of them.

    It also has what ledger and standing show, and the newest standing of each lost branch, which somebody has kept.
    """

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

    def copy(self, into: Path) -> Copy:
        into.mkdir()
        for path in self.folder.glob(f"{self.name}.s*"):
            shutil.copy(path, into)
        self.copies.append(Copy(into, self.ledger, self.standing))
        return self.copies[-1]

    def put_back(self, ledger: Copy, standing: Copy | None, *, keep_as: Path) -> None:
        """Restore a copy of the ledger, and perhaps a copy of the standing from another moment."""
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


@dataclass
class Server:
    """Holds a server's machine, with the key and the id of its ledger."""

    machine: Machine
    key: Ed25519PrivateKey = field(default_factory=Ed25519PrivateKey.generate)
    id: str = ""


class Life:
    """Runs one life. Call :meth:`live`, which raises AssertionError at the first charge that is too low."""

    def __init__(self, root: Path, seed: int, *, standings: bool, servers: int = 1) -> None:
        self.root, self.random, self.standings = root, random.Random(seed), standings
        self.clock, self.copied = Ticking(), 0
        self.draws: list[tuple[int, tuple[str, ...]]] = []
        self.accepted: list[int] = []  # the query of each acceptance that a site charged to itself
        self.on_their_way: dict[str, list[Receipt]] = {name: [] for name in SITES}
        self.at_head: dict[str, Shown] = {}
        self.in_receipt: dict[str, Shown] = {}
        self.servers = [Server(Machine(root / f"server-{number}", "ledger")) for number in range(servers)]
        self.machines = [server.machine for server in self.servers]
        self.sites = {name: Machine(root / name, "site-ledger") for name in SITES}
        for machine in (*self.machines, *self.sites.values()):
            machine.folder.mkdir(parents=True)
        for server in self.servers:
            with Ledger.create(server.machine.file, signing_key=server.key, clock=self.clock) as ledger:
                for number in self.studies_of(server):
                    ledger.register_study(STUDIES[number])
                declare(ledger)
                server.id = ledger.ledger_id
        for name in SITES:
            with self.site(name) as site:
                for study in STUDIES:
                    site.consent(study)

    def studies_of(self, server: Server) -> list[int]:
        return [number for number in range(len(STUDIES)) if self.server_of(number) is server]

    def server_of(self, number: int) -> Server:
        """Return the server of a query or a study."""
        return self.servers[number % len(self.servers)]

    def opened(self, server: Server, *, restored: bool = False) -> Ledger:
        return Ledger.open(server.machine.file, signing_key=server.key, clock=self.clock, restored=restored)

    @contextmanager
    def site(self, name: str, *, restored: bool = False) -> Iterator[SiteLedger]:
        of = {"caps": CAPS, "site": name, "clock": self.clock, "restored": restored}
        with SiteLedger.open(self.sites[name].file, f"{name}-mri", **of) as ledger:  # type: ignore[arg-type]
            yield ledger

    def live(self, events: int = 25) -> None:
        acts: list[Callable[[], None]] = [self.ask, self.copy, self.put_back, self.deliver_late, self.accept_only]
        acts += [self.arrive, self.forget]
        for number in range(events):
            self.random.choices(acts, (6, 2.5, 4, 1.5, 1, 1.5, 2 if self.standings else 0))[0]()
            if number % 3 == 0:  # because checks take most of the time
                self.check()
        for server in self.servers:
            for kept in reversed(server.machine.kept):
                self.recover_server(server, kept, SITES)
        for name, machine in self.sites.items():
            for kept in reversed(machine.kept):
                self.recover_site(name, kept)
        self.end_alarms(SITES)
        self.deliver_late(every=True)
        self.check()

    # --- what happens

    def copy(self) -> None:
        self.copied += 1
        self.random.choice([*self.machines, *self.sites.values()]).copy(self.root / f"copy-{self.copied}")

    def put_back(self) -> None:
        able = [machine for machine in (*self.machines, *self.sites.values()) if machine.copies]
        if not able:
            return
        self.copied += 1
        machine = self.random.choice([*able, *(2 * [one for one in self.machines if one in able])])
        server = next((one for one in self.servers if one.machine is machine), None)
        ledger, other = self.random.choice(machine.copies), self.random.choice(machine.copies)
        standing = self.random.choice((None, ledger, ledger, other)) if self.standings else None
        machine.put_back(ledger, standing, keep_as=self.root / f"kept-{self.copied}")
        try:
            if server is not None:
                self.opened(server).close()
            else:
                with self.site(machine.folder.name):
                    pass
            machine.show()
        except ConsiliumError as error:
            assert "to fix: " in str(error)  # noqa: PT017
            some = [name for name in SITES if self.random.random() < 0.7]
            if server is not None:
                self.recover_server(server, None, some)
            else:
                self.recover_site(machine.folder.name, None)

    def forget(self) -> None:
        """Let a server ask queries, and then restore its machine to the moment before, so that nobody notices."""
        self.copied += 2
        server = self.random.choice(self.servers) if len(self.servers) > 1 else self.servers[0]
        before = server.machine.copy(self.root / f"copy-{self.copied}")
        self.ask()
        server.machine.put_back(before, before, keep_as=self.root / f"kept-{self.copied}")
        self.opened(server).close()
        server.machine.show()

    def accept_only(self) -> None:
        self.ask(release=False)

    def ask(self, *, release: bool = True) -> None:
        """Offer unanswered queries in some order, send the missing receipts, release, and send some receipts."""
        number, contradicted = self.random.choice((0, 1)), False
        study, server = STUDIES[number].id, self.server_of(number)
        with self.opened(server) as ledger:
            able = [one for one in range(number, len(QUERIES), 2) if ledger.answer(QUERIES[one].id) is None]
            chosen = self.random.choice((able, self.random.sample(able, len(able))))[: self.random.choice((1, 1, 2))]
            roster = []
            for name in [name for name in SITES if chosen and self.random.random() < 0.85]:
                with self.site(name) as site:
                    if not ledger.contains(site.held(server.id)):
                        contradicted = True
                    elif self.accepts(name, site, study, chosen) and self.deliver(name, ledger, site):
                        roster.append(name)
            if release and len(roster) >= 2:
                self.release(server, ledger, study, roster, chosen)
        if contradicted and self.random.random() < 0.6:
            self.end_alarms(SITES, server)
        self.act_on_alarms()

    def accepts(self, name: str, site: SiteLedger, study: str, chosen: Sequence[int]) -> bool:
        shown = set[tuple[str, int]]()
        try:
            for number in chosen:
                before = site.spent()
                ledger = self.server_of(number).id
                site.reserve(study, [QUERIES[number]], ledger=ledger)
                if site.spent() != before:  # the query of a lost row, which its recovery charged, is not charged again
                    self.accepted.append(number)
                    shown.add(("accepted", len(self.accepted) - 1))
                site.accepted(QUERIES[number].id, study_id=study, ledger=ledger, sealing_key="")
        except Refused:
            return False
        finally:
            self.sites[name].show(frozenset(shown))
        return True

    def release(self, server: Server, ledger: Ledger, study: str, roster: list[str], chosen: Sequence[int]) -> None:
        begun = len(self.draws)

        def draw(query: QuerySpec) -> np.ndarray:
            self.draws.append((QUERIES.index(query), tuple(roster)))
            return np.full(4, len(self.draws), dtype=np.int64)

        queries = [QUERIES[number] for number in chosen]
        ledger.release_batch(study_id=study, batch_id=f"b{begun}", roster=roster_of(roster), queries=queries, draw=draw)
        made = frozenset(("draw", number) for number in range(begun, len(self.draws)))
        server.machine.show(made)
        head = ledger.head().hash
        self.in_receipt[head], self.at_head[head] = made, server.machine.ledger
        for name in roster:
            if self.random.random() < 0.5:
                with self.site(name) as site:
                    self.deliver(name, ledger, site)
            elif self.random.random() < 0.5:
                self.on_their_way[name] += receipts_of(ledger, name)[-1:]

    def deliver(self, name: str, ledger: Ledger, site: SiteLedger) -> bool:
        """Send a site the receipts that it lacks; return False if it raises an alarm."""
        held = site.held(ledger.ledger_id)
        return self.file(name, site, receipts_of(ledger, name, after=held.seq) if ledger.contains(held) else ())

    def file(self, name: str, site: SiteLedger, receipts: Sequence[Receipt]) -> bool:
        for receipt in receipts:
            try:
                key = next(server.key for server in self.servers if server.id == receipt.ledger_id)
                site.record_receipt(Receipt.parse(receipt.render()), public_key=key.public_key())
            except (Refused, LedgerCorrupt) as error:
                self.sites[name].show(self.evidence(name, receipt, error))
                if isinstance(error, LedgerCorrupt):
                    return False
                continue
            told = self.at_head[receipt.head.hash]
            self.sites[name].show(frozenset(one for one in told if name in self.draws[one[1]][1]))
        return not site.alarms()

    def evidence(self, name: str, receipt: Receipt, error: Refused | LedgerCorrupt) -> Shown:
        """Return what a site learns about queries that it had accepted, from a receipt that it did not accept.

        If the receipt contradicts the site's ledger, a person says later whether the server was restored.
        """
        kind = "contradicted" if isinstance(error, LedgerCorrupt) else "draw"
        if isinstance(error, Refused) and error.reason != "receipt-superseded":
            return frozenset()
        held = {self.accepted[one] for what, one in self.sites[name].ledger if what == "accepted"}
        made = (one for _, one in self.in_receipt[receipt.head.hash] if name in self.draws[one][1])
        return frozenset((kind, one) for one in made if self.draws[one][0] in held)

    def arrive(self) -> None:
        """Deliver receipts that are still on their way, even if the server's ledger was replaced after it sent them."""
        for name, receipts in self.on_their_way.items():
            with self.site(name) as site:
                self.file(name, site, receipts)
            receipts.clear()
        self.act_on_alarms()

    def deliver_late(self, *, every: bool = False) -> None:
        for server in self.servers:
            with self.opened(server) as ledger:
                for name in SITES:
                    if every or self.random.random() < 0.6:
                        with self.site(name) as site:
                            self.deliver(name, ledger, site)
        self.act_on_alarms()

    # --- what people do

    def receipts(self, names: Sequence[str]) -> list[Receipt]:
        """Return the receipts that the sites write with ``consilium site heads --out``."""
        found: list[Receipt] = []
        for name in names:
            with SiteLedger.read(self.sites[name].file) as site:
                found += site.receipts(evidence=True)
        return found

    def recover_server(self, server: Server, kept: tuple[Path, Shown] | None, names: Sequence[str]) -> None:
        """Recover a server's ledger with the receipts of these sites."""
        receipts = [receipt for receipt in self.receipts(names) if receipt.ledger_id == server.id]
        with self.opened(server, restored=True) as ledger:
            ledger.recover(receipts, standing=None if kept is None else ServerStanding.load(kept[0]))
        told = frozenset().union(*(self.in_receipt[receipt.head.hash] for receipt in receipts))
        server.machine.show(told | server.machine.standing | (frozenset() if kept is None else kept[1]))

    def recover_site(self, name: str, kept: tuple[Path, Shown] | None) -> None:
        """Recover a site's ledger as `consilium site recover --own-ledger` does, and resume its studies."""
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
                # This is the ledger that was put back.
                machine.ledger -= {one for one in machine.ledger if one[0] == "contradicted"}
        machine.show(shown)

    def end_alarms(self, names: Sequence[str], restored: Server | None = None) -> None:
        """Enter all receipts at the servers, and run `consilium site recover` at these sites.

        A site of the ``restored`` server runs it with the option for a restored server.
        """
        for server in self.servers:
            self.recover_server(server, None, SITES)
        for name in names:
            machine = self.sites[name]
            with self.site(name) as site:
                own = machine.kept and any("never accepted" in alarm for alarm in site.alarms())
                looked_at = [server.id for server in self.servers if len(names) > 1 and restored in (None, server)]
                ended = {*site.alarmed_ledgers(), *looked_at}
                for ledger_id in () if own else ended:
                    site.recover(ledger_id)
            if own:  # it was this site that was put back
                self.recover_site(name, machine.kept[-1])
                continue
            told = (one for kind, one in machine.ledger if kind == "contradicted")
            machine.show(frozenset(("draw", one) for one in told if self.server_of(self.draws[one][0]).id in ended))

    def act_on_alarms(self) -> None:
        for name in SITES:
            with self.site(name) as site:
                alarms = site.alarms()
            if alarms and self.random.random() < 0.6:
                self.end_alarms([name])

    # --- what must hold

    def check(self) -> None:
        """Check that no ledger charges a pool less than the cost of the draws that are shown to this ledger."""
        parts = (None, 0, 1)
        for server in self.servers:
            with self.opened(server) as ledger:
                for part, name in product((None, *self.studies_of(server)), SITES):
                    drawn = self.drawn_of(name, server.machine.ledger, part)
                    pool = f"{name}-mri"
                    spent = ledger.spent(pool) if part is None else ledger.books.spent_in(STUDIES[part].id, pool)
                    charged = spent.mu_squared / COST
                    assert charged >= drawn.total(), f"server: {charged} charged to {name} for {drawn.total()} draws"
        for name, machine in self.sites.items():
            with self.site(name) as site:
                for part in parts[:1] if machine.kept else parts:
                    ever = self.drawn_of(name, frozenset(("draw", one) for one in range(len(self.draws))), part)
                    drawn = self.drawn_of(name, machine.ledger, part)
                    own = Counter(self.accepted[one] for kind, one in machine.ledger if kind == "accepted")
                    known = drawn | own  # union of multisets: the larger number of each query
                    if machine.kept:  # what an unnoticed older copy lacks may count as part of a later loss
                        known = max(drawn, own, key=lambda one: (one & ever).total())
                    least = (known & ever).total()
                    spent = site.spent() if part is None else site.books.spent_in(STUDIES[part].id)
                    charged = spent.mu_squared / COST
                    assert charged >= least, f"{name}: {charged} charged for {least} draws"

    def drawn_of(self, name: str, shown: Shown, part: int | None) -> Counter[int]:
        """Return for each query the number of its draws with a site that are shown."""
        drawn = (self.draws[one] for kind, one in shown if kind == "draw")
        return Counter(query for query, roster in drawn if name in roster and part in (None, query % 2))
