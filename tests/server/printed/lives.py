"""Makes random histories of a ledger that two studies share: releases, reuse, lost draws, restores, recoveries,
refusals.

A life is drawn from a seed alone. Its last act may leave the ledger older than its standing: then it is in doubt.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from common.config import Study
from common.errors import InvalidInput, LedgerCorrupt
from common.ledger.charges import PoolDeclaration, RosterEntry
from common.ledger.keys import load_signing_key
from common.ledger.receipts import Receipt
from common.masking import MaskedRoster, MaskKey, Member
from common.privacy.mechanism import AccountantName, Protection, QuerySpec, Relation, Unit
from common.study_mechanism import study_mechanism
from server.ledger.server_ledger import Ledger
from server.study import create_study as setup
from server.study.workspace import Site, Workspace
from tests.backups import copy_of, put_copy
from tests.worlds import make_study, receipts_of

SITES = ("aachen", "bergen", "cadiz", "delft")
DIMENSION = 3
ACTS = ("release", "release", "release", "reuse", "reuse", "back up", "restore", "restore", "tighten", "refuse")


@dataclass
class Life:
    """Holds two studies' directories on one ledger, and the acts done to the ledger."""

    seed: int
    first: Workspace
    second: Workspace
    random: random.Random
    sealed: bool
    acts: list[str] = field(default_factory=list)
    printed: list[str] = field(default_factory=list)
    asked: dict[str, list[QuerySpec]] = field(default_factory=dict)
    receipts: list[Receipt] = field(default_factory=list)
    copies: list[Path] = field(default_factory=list)
    doubt: bool = False
    drawn: int = 0

    @property
    def studies(self) -> tuple[Workspace, Workspace]:
        return self.first, self.second

    @property
    def path(self) -> Path:
        return self.first.ledger_file

    @contextmanager
    def ledger(self, *, restored: bool = False) -> Iterator[Ledger]:
        key = load_signing_key(self.first.signing_key_file)
        with Ledger.open(self.path, signing_key=key, restored=restored) as opened:
            yield opened


def live(seed: int, folder: Path, *, acts: int = 9) -> Life:
    """Return a life after ``acts`` random acts drawn from this seed."""
    life = begin(seed, folder)
    take_copy(life)
    for _ in range(acts):
        act(life, life.random.choice(ACTS))
    if life.random.random() < 0.15 and life.copies:
        last_copy(life)
    return life


def begin(seed: int, folder: Path) -> Life:
    rng = random.Random(seed)
    sealed, unit = rng.random() < 0.35, rng.choice(("hospital", "hospital", "patient"))
    voters = rng.choice((1, 2, 3))
    relation = rng.choice(("replace-one", "zero-out")) if unit == "hospital" else "replace-one"

    def study(name: str, number: int) -> Study:
        more = {"aggregation": "sealed-sum", "colluders": 1, "spare_draws": 2} if sealed else {}
        return make_study(
            name=name,
            epsilon=rng.choice((1.0, 2.0, 8.0)) if number else rng.choice((4.0, 8.0)),
            delta=rng.choice((1e-3, 1e-5)),
            planned_queries=rng.choice((3, 6)),
            quorum=3 if sealed else 2,
            accountant=AccountantName(rng.choice(("exact", "exact", "rdp", "paper"))),
            unit=Unit(unit if number == 0 or rng.random() < 0.7 or voters > 1 else "hospital"),
            relation=Relation(relation),
            voters_per_site=voters,
            **more,
        )

    first, second = Workspace(folder / "first"), Workspace(folder / "second")
    setup.create_study(first, study("first", 0))
    setup.create_study(second, study("second", 1), ledger=first.root)
    life = Life(seed, first, second, rng, sealed)
    privacy = first.study().privacy
    with life.ledger() as ledger:
        for name in SITES:
            protection = privacy.protection
            if rng.random() < 0.2:
                protection = Protection(unit=Unit.PATIENT, relation=Relation.REPLACE_ONE)
            budget = replace(privacy.budget, epsilon=rng.choice((8.0, 12.0)))
            ledger.declare_pool(PoolDeclaration(f"{name}-mri", name, budget, privacy.accountant, protection))
    sites = tuple(Site(name, f"{name}-mri", number + 1) for number, name in enumerate(SITES[:3]))
    for workspace in life.studies:
        workspace.save_sites(sites)
        life.asked[workspace.study().id] = []
    return life


def act(life: Life, what: str) -> None:
    """Do one act; an act that the ledger refuses by its rules changes nothing."""
    life.acts.append(what)
    match what:
        case "release":
            ask(life, life.random.choice(life.studies), life.random.randint(1, 3))
        case "refuse":
            ask(life, life.random.choice(life.studies), 30)
        case "reuse":
            reuse(life)
        case "back up":
            take_copy(life)
        case "restore":
            restore(life)
        case "tighten":
            tighten(life)


def queries(life: Life, workspace: Workspace, count: int) -> list[QuerySpec]:
    study = workspace.study()
    mechanism = study_mechanism(study, dimension=DIMENSION)
    number = len(life.asked[study.id])
    return [
        QuerySpec(1, "c" * 64, (f"{life.random.getrandbits(200):064x}",), number + n + 1, "zero", "codec", mechanism)
        for n in range(count)
    ]


def roster(life: Life) -> tuple[RosterEntry, ...]:
    count = life.random.randint(3, len(SITES))
    return tuple(RosterEntry(name, f"{name}-mri") for name in sorted(life.random.sample(SITES, count)))


def ask(life: Life, workspace: Workspace, count: int) -> None:
    """Ask new queries of a study and repeat some earlier ones; on a restored ledger, draw a few of them again."""
    study = workspace.study()
    known = life.asked[study.id]
    again = life.random.sample(known, min(len(known), life.random.randint(0, 2)))
    asked = [*again, *queries(life, workspace, count)]
    with life.ledger() as ledger:
        if life.sealed:
            answered = draw(life, ledger, study, asked)
        else:
            result = ledger.release_batch(
                study_id=study.id,
                batch_id=f"batch-{len(life.acts)}",
                roster=roster(life),
                queries=asked,
                draw=lambda _: np.zeros(DIMENSION, dtype=np.int64),
            )
            answered = [answer.query for answer in result.answers]
        life.receipts += [receipt for site in SITES for receipt in receipts_of(ledger, site)]
    known += [query for query in answered if query not in known]


def draw(life: Life, ledger: Ledger, study: Study, asked: list[QuerySpec]) -> list[QuerySpec]:
    """Make a draw of a sealed sum: answered, lost, spoiled, or left open by a process that died."""
    sites, batch = roster(life), f"{life.random.getrandbits(250):064x}"
    life.drawn += 1
    members = tuple(Member(one.site, MaskKey(mask_key(life), bytes(64))) for one in sites)
    masks = MaskedRoster(study.id, ledger.ledger_id, batch, life.drawn, members)
    open_now = {query.id for one in ledger.open_draws(study.id) for query in one.queries}
    fresh = [query for query in asked if query.id not in open_now and ledger.answer(query.id) is None]
    made = ledger.charge_draw(study_id=study.id, roster=sites, masks=masks, queries=fresh).draw if fresh else None
    if made is None:
        return []
    ends = life.random.choice(("answered", "answered", "incomplete", "spoiled", "open"))
    if ends in ("incomplete", "spoiled"):
        ledger.lose_draw(made, ends)
    if ends != "answered":
        return []
    for query in made.queries:
        ledger.store_answer(query.id, life.drawn, np.zeros(DIMENSION, dtype=np.int64))
    return list(made.queries)


def mask_key(life: Life) -> str:
    private = X25519PrivateKey.from_private_bytes(life.random.randbytes(32))
    return private.public_key().public_bytes_raw().hex()


def reuse(life: Life) -> None:
    """Let a study reuse answers that the other study has."""
    mine, other = life.random.sample(life.studies, 2)
    with life.ledger() as ledger:
        there = [query for query in life.asked[other.study().id] if ledger.answer(query.id) is not None]
        chosen = life.random.sample(there, min(len(there), 4))
        if not chosen:
            return
        try:
            ledger.release_batch(
                study_id=mine.study().id,
                batch_id=f"batch-{len(life.acts)}",
                roster=roster(life),
                queries=chosen,
                draw=lambda _: np.zeros(DIMENSION, dtype=np.int64),
            )
        except InvalidInput:  # a query of other terms than this study's
            return
        life.receipts += [receipt for site in SITES for receipt in receipts_of(ledger, site)]


def take_copy(life: Life) -> None:
    """Copy the ledger and its present standing, as an operator does who copies the whole directory."""
    life.copies.append(copy_of(life.path, life.path.parent / f"copy-{len(life.acts)}.sqlite"))


def put_back(life: Life, *, standing: bool) -> None:
    """Restore an older copy of the ledger, alone or with its ``standing``."""
    put_copy(life.random.choice(life.copies), life.path, standing=standing)


def restore(life: Life) -> None:
    """Restore an older copy and charge what it lacks: by receipts, by the standing, or by both."""
    if not life.copies:
        return
    alone = life.random.random() < 0.5  # without the standing, only the sites can show it
    put_back(life, standing=alone)
    if alone and life.random.random() < 0.7:
        ask(life, life.random.choice(life.studies), life.random.randint(1, 4))
    recover(life, by_receipts=alone or life.random.random() < 0.5)


def recover(life: Life, *, by_receipts: bool) -> None:
    from typer.testing import CliRunner

    from consilium.cli.ledger import app

    told = life.path.parent / "receipts.jsonl"
    told.write_text("\n".join(receipt.render() for receipt in life.receipts if by_receipts) + "\n", encoding="utf-8")
    arguments = ["recover", str(life.path), "--key", str(life.first.signing_key_file), "--receipts", str(told)]
    done = CliRunner().invoke(app, arguments)
    if done.exception is not None:
        assert isinstance(done.exception, InvalidInput | LedgerCorrupt), done.exception
        raise done.exception
    life.printed = [done.stdout]


def tighten(life: Life) -> None:
    """Lower a pool's budget, perhaps below the spent amount."""
    with life.ledger() as ledger:
        pool = life.random.choice(ledger.pools())
        budget = replace(pool.budget, epsilon=pool.budget.epsilon * life.random.choice((0.5, 0.9)))
        ledger.declare_pool(replace(pool, budget=budget))


def last_copy(life: Life) -> None:
    """Restore an older copy of the ledger without a recovery."""
    life.acts.append("put back and left")
    put_back(life, standing=False)
    with Ledger.open(life.path) as ledger:
        life.doubt = ledger.standing_problem() is not None
