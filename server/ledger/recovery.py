"""What an operator does to a ledger and no study does: enter lost charges again, hand signing over to a new key."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from common.config import Study
from common.errors import InvalidInput
from common.ledger.charges import NOTHING
from common.ledger.keys import load_signing_key, public_hex, sync_directory
from common.ledger.receipts import read_receipts
from common.ledger.rollback_guard import ServerStanding
from common.privacy.accounting import Guarantee
from server.ledger.server_ledger import Ledger


@dataclass(frozen=True, slots=True)
class PoolAfter:
    """A pool once the lost charges stand: its releases, and what they cost by its gate."""

    pool: str
    releases: int
    spent: Guarantee


@dataclass(frozen=True, slots=True)
class Recovery:
    """How many charges were ``entered`` from how many ``receipts``; ``by_standing``: releases of a pool that no receipt
    tells of."""

    entered: int
    receipts: int
    by_standing: dict[str, int]
    pools: tuple[PoolAfter, ...]


def recover_charges(
    ledger: Path,
    *,
    signing_key: Ed25519PrivateKey,
    receipts: Sequence[Path],
    standing: Path | None,
    studies: Sequence[Study],
) -> Recovery:
    """Enter as spent, in a restored copy, every charge that receipts hold or the standing shows.

    InvalidInput where there is neither a receipt nor a standing.
    """
    held = [receipt for path in receipts for receipt in read_receipts(path)]
    with Ledger.open(ledger, signing_key=signing_key, restored=True) as opened:
        if not receipts and standing is None and opened.forgotten() is None:
            raise InvalidInput("receipts and standing", value="none", remedy="--receipts FILE for every site")
        before = opened.lost()
        for study in studies:
            opened.register_study(study)
        entered = opened.recover(held, standing=None if standing is None else ServerStanding.load(standing))
        if entered:
            opened.note(f"{entered} charges recovered from {len(held)} receipts")
        return Recovery(
            entered=entered,
            receipts=len(held),
            by_standing={
                name: spend.beyond(before.get(name, NOTHING)).releases
                for name, spend in opened.lost().items()
                if spend != before.get(name, NOTHING)
            },
            pools=tuple(
                PoolAfter(
                    pool.pool,
                    opened.spent(pool.pool).releases,
                    opened.pool_guarantees(pool.pool)[pool.accountant],
                )
                for pool in opened.pools()
            ),
        )


@dataclass(frozen=True, slots=True)
class KeyChange:
    """The public halves of the key that signed ``before`` and of the one that signs ``now``, as hex."""

    before: str
    now: str


def rotate_signing_key(ledger: Path, *, key: Path, new_key: Path) -> KeyChange:
    """Hand signing over to ``new_key``, inside the ledger; it then lies at ``key``, the old one aside it.

    Interrupted, it is finished by calling it again. InvalidInput where ``key`` is not the ledger's.
    """
    old, new = load_signing_key(key), load_signing_key(new_key)
    before, now = public_hex(old), public_hex(new)
    with Ledger.open(ledger) as opened:
        current = opened.public_key
    if current == before != now:
        with Ledger.open(ledger, signing_key=old) as opened:
            opened.rotate_key(new)
    elif current != now:
        raise InvalidInput("signing key", value=str(key), limit=f"the ledger's current key, {current}")
    if before != now:
        with contextlib.suppress(FileExistsError):  # kept aside by a call that was interrupted
            os.link(key, key.with_name(f"{key.name}.retired-{before[:12]}"))
    new_key.replace(key)
    sync_directory(key.parent)
    return KeyChange(before, now)
