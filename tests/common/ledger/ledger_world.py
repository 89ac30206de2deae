"""Makes a small world for ledger tests: a study, pools, queries, and answers that count their draws."""

from __future__ import annotations

import shutil
import sqlite3
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from numpy.typing import NDArray

from client.ledger.site_ledger import SiteLedger
from common.canonical import sha256_bytes
from common.config import CodecConfig, Study
from common.ledger.charges import PoolDeclaration, RosterEntry
from common.ledger.receipts import Receipt
from common.ledger.sqlite_file import schema_sql
from common.privacy.accounting import max_mu_squared
from common.privacy.mechanism import AccountantName, Budget, Mechanism, Protection, QuerySpec, Relation, Unit
from server.ledger.server_draws import BatchResult
from server.ledger.server_ledger import Ledger
from server.ledger.verify import VerifyReport, verify
from tests import worlds
from tests.backups import copy_of, delete_ledger, put_copy
from tests.worlds import receipts_of

HOSPITAL = Protection(unit=Unit.HOSPITAL, relation=Relation.REPLACE_ONE)
PATIENT = Protection(unit=Unit.PATIENT, relation=Relation.REPLACE_ONE)
RADIUS = 1 << 16
BUDGET = Budget(epsilon=8.0, delta=1e-3)
SITES = ("aachen", "bergen", "cadiz")


def ledger_study(name: str = "trial", *, planned_queries: int = 80, **terms: Any) -> Study:
    """Return a study with one structure and room for 80 queries; no code is made, so any codec serves."""
    asked = {"planned_queries": planned_queries, "codec": CodecConfig()}
    return worlds.make_study("lesion", name=name, grid=(16, 16, 16), **asked, **terms)


def make_mechanism(*, room_for: int = 10, dimension: int = 4, voters: int = 1, budget: Budget = BUDGET) -> Mechanism:
    """Return a mechanism of which exactly ``room_for`` releases fit into a budget of unit hospital."""
    limit = max_mu_squared(AccountantName.EXACT, budget)
    moved = 2 * voters * RADIUS
    # σ a little above Δ·√(N / limit), far below what one more release would need
    wanted = Fraction(moved**2 * room_for) / limit
    noise_std = Fraction(int(float(wanted) ** 0.5 * 2**20) + 4, 2**20)
    assert room_for * Fraction(moved**2) / noise_std**2 <= limit < (room_for + 1) * Fraction(moved**2) / noise_std**2
    return Mechanism(dimension=dimension, radius_int=RADIUS, voters_per_site=voters, noise_std=noise_std)


def make_query(number: int, mechanism: Mechanism, *, edition: int = 1) -> QuerySpec:
    return QuerySpec(
        edition=edition,
        codec=sha256_bytes(b"codec"),
        volumes=(sha256_bytes(b"volume %d" % number),),
        round=1,
        centre="zero",
        weights="codec",
        mechanism=mechanism,
    )


def roster_of(sites: Sequence[str] = SITES) -> tuple[RosterEntry, ...]:
    return tuple(RosterEntry(site=site, pool=f"{site}-mri") for site in sites)


def declare(ledger: Ledger, *, sites: Sequence[str] = SITES, budget: Budget = BUDGET, **changes: object) -> None:
    for site in sites:
        fields: dict[str, object] = {"accountant": AccountantName.EXACT, "protection": HOSPITAL, **changes}
        ledger.declare_pool(PoolDeclaration(pool=f"{site}-mri", site=site, budget=budget, **fields))  # type: ignore[arg-type]


class Ticking:
    """Stands in for a clock that moves one second each time it is read."""

    def __init__(self) -> None:
        self.now = datetime(2025, 3, 1, 9, 0, tzinfo=UTC)

    def __call__(self) -> datetime:
        self.now += timedelta(seconds=1)
        return self.now


@dataclass
class Answers:
    """Makes candidates whose answers are fresh numbers each time they are drawn, and remembers every draw."""

    drawn: list[str] = field(default_factory=list)
    seed: int = 0

    def draw(self, query: QuerySpec) -> NDArray[np.int64]:
        self.drawn.append(query.id)
        rng = np.random.default_rng((self.seed, len(self.drawn)))
        return rng.integers(-(2**40), 2**40, size=query.mechanism.dimension, dtype=np.int64)


@dataclass
class World:
    """Holds a ledger with one registered study and three declared pools."""

    path: Path
    key: Ed25519PrivateKey
    ledger: Ledger
    study: Study
    answers: Answers = field(default_factory=Answers)

    @classmethod
    def create(
        cls,
        folder: Path,
        *,
        study: Study | None = None,
        key: Ed25519PrivateKey | None = None,
        standing: Path | None = None,
        pools: bool = True,
    ) -> World:
        folder.mkdir(exist_ok=True)
        key = key or Ed25519PrivateKey.generate()
        ledger = Ledger.create(folder / "ledger.sqlite", signing_key=key, clock=Ticking(), standing=standing)
        study = study or ledger_study()
        ledger.register_study(study)
        if pools:
            declare(ledger)
        return cls(folder / "ledger.sqlite", key, ledger, study)

    def release(
        self, queries: Sequence[QuerySpec], *, batch: str = "b1", study: str = "", sites: Sequence[str] = SITES
    ) -> BatchResult:
        return self.ledger.release_batch(
            study_id=study or self.study.id,
            batch_id=batch,
            roster=roster_of(sites),
            queries=queries,
            draw=self.answers.draw,
        )

    def reopen(self) -> None:
        self.ledger.close()
        self.ledger = Ledger.open(self.path, signing_key=self.key, clock=Ticking())


def rolled_back(world: World, folder: Path) -> None:
    """Restore ledger and standing together from the copies in ``folder``."""
    world.ledger.close()
    put_copy(folder / "ledger.sqlite", world.path, standing=True)
    world.reopen()


def saved(world: World, folder: Path) -> Path:
    """Copy ledger and standing at one moment; return the folder."""
    folder.mkdir()
    copy_of(world.path, folder / "ledger.sqlite")
    return folder


def deleted(world: World) -> None:
    """Delete the ledger's file and keep its standing."""
    world.ledger.close()
    delete_ledger(world.path)


def put_back(world: World, copy: Path) -> None:
    """Stop the server and put the copy where the ledger was, as an operator does."""
    world.ledger.close()
    put_copy(copy, world.path)


def open_restored(world: World, copy: Path) -> None:
    """Put the copy back and open it for a recovery."""
    put_back(world, copy)
    world.ledger = Ledger.open(world.path, signing_key=world.key, clock=Ticking(), restored=True)


def check(world: World, path: Path | None = None) -> VerifyReport:
    return verify(path or world.path, public_key=world.key.public_key())


def tampered(world: World, *statements: str | Callable[[sqlite3.Connection], None]) -> Path:
    """Return a copy changed by somebody who can write the file: triggers removed, change made, triggers restored."""
    path = world.path.with_name("tampered.sqlite")
    shutil.copy(world.path, path)
    connection = sqlite3.connect(path, isolation_level=None)
    try:
        connection.execute("PRAGMA synchronous = OFF")
        triggers = {name: sql for name, sql in schema_sql("server").items() if sql.startswith("CREATE TRIGGER")}
        for name in triggers:
            connection.execute(f"DROP TRIGGER {name}")
        for statement in statements:
            if isinstance(statement, str):
                connection.execute(statement)
            else:
                statement(connection)
        for sql in triggers.values():
            connection.execute(sql)
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    finally:
        connection.close()
    return path


def batch_receipts(ledger: Ledger, batch: str) -> list[Receipt]:
    """Return every site's receipts of a batch, in order of their heads."""
    found = [receipt for site in SITES for receipt in receipts_of(ledger, site) if receipt.batch_id == batch]
    return sorted(found, key=lambda receipt: receipt.head.seq)


def write_raw(ledger: Any, kind: str, body: dict[str, object], *, payload: tuple[str, bytes] | None = None) -> None:
    """Append a row with exactly this body, inside ``ledger._writing()``, even one that the ledger would not write."""
    ledger._books.enter(ledger._chain.append(kind, body, payload=payload))


MECHANISM = make_mechanism(room_for=10)


@dataclass(frozen=True)
class Caps:
    budget: Budget = BUDGET
    accountant: AccountantName = AccountantName.EXACT
    protection: Protection = HOSPITAL
    queries_per_day: int = 100


@dataclass
class Hospital:
    """Holds one site of the server's world, with its own ledger."""

    path: Path
    study: Study
    clock: Ticking = field(default_factory=Ticking)
    caps: Caps = Caps()

    def __post_init__(self) -> None:
        self.ledger = SiteLedger.open(self.path, "aachen-mri", caps=self.caps, clock=self.clock)
        self.ledger.consent(self.study)

    def reopen(self, caps: Caps | None = None) -> None:
        self.ledger.close()
        self.ledger = SiteLedger.open(self.path, "aachen-mri", caps=caps or self.caps, clock=self.clock)


def queries(*numbers: int, mechanism: Mechanism = MECHANISM) -> list[QuerySpec]:
    return [make_query(number, mechanism) for number in numbers]


def receipt_for(world: World, batch: str, site: str = "aachen") -> Receipt:
    found = [item for item in batch_receipts(world.ledger, batch) if item.site == site]
    assert len(found) == 1
    return Receipt.parse(found[0].render())


def run_batch(world: World, site: Hospital, batch: str, *numbers: int) -> Receipt:
    site.ledger.reserve(world.study.id, queries(*numbers))
    world.release(queries(*numbers), batch=batch)
    return receipt_for(world, batch)


def take(world: World, site: Hospital, receipt: Receipt) -> None:
    """Let the site store a receipt."""
    site.ledger.record_receipt(receipt, public_key=world.key.public_key())


def answered(world: World, site: Hospital, batch: str, *numbers: int) -> Receipt:
    """Release a batch, let the site store its receipt, and return the receipt."""
    receipt = run_batch(world, site, batch, *numbers)
    take(world, site, receipt)
    return receipt


def both_recover(world: World, site: Hospital, receipts: Iterable[Receipt]) -> None:
    """Let the restored server enter lost charges from receipts, and a person at the site end its alarm."""
    world.ledger.recover(receipts)
    site.ledger.recover(world.ledger.ledger_id)


def deliver(world: World, site: Hospital, *, in_spite_of: tuple[type[Exception], ...] = ()) -> None:
    """Deliver to the site each receipt that it lacks; continue after an error in ``in_spite_of``."""
    for receipt in receipts_of(world.ledger, "aachen", after=site.ledger.held(world.ledger.ledger_id).seq):
        with suppress(*in_spite_of):
            take(world, site, receipt)
