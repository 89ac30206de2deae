"""Re-enters lost charges into a ledger and rotates its signing key, for an operator."""

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
from common.ledger.rollback_guard import ServerStanding, kept_standing
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
    charge_all: bool = False,
) -> Recovery:
    """Enter as spent, in a restored copy, every charge that receipts hold or the standing shows.

    ``charge_all``: where there is no standing, everything that pools and studies have left counts as spent beside what
    receipts hold, since no receipt tells of an answer that was drawn and reached no site. InvalidInput where there is
    neither a receipt nor a standing; where the ledger's own is missing and neither ``standing`` nor ``charge_all`` is
    given; and for ``charge_all`` where a standing tells.
    """
    held = [receipt for path in receipts for receipt in read_receipts(path)]
    with Ledger.open(ledger, signing_key=signing_key, restored=True) as opened:
        if not receipts and standing is None and opened.forgotten() is None:
            raise InvalidInput("receipts and standing", value="none", remedy="--receipts FILE for every site")
        missing = standing is None and kept_standing(ledger) is None
        if missing and opened.forgotten() is not None and not charge_all:
            raise InvalidInput(
                "standing of the lost ledger",
                value=str(ledger.with_suffix(".standing")),
                limit="the file that lay beside it, since receipts do not tell of answers that reached no site",
                remedy="give it with --standing; if it is lost, --charge-all counts as spent all that pools have left",
            )
        if charge_all and not missing:
            raise InvalidInput("--charge-all", limit="only without a standing, which tells the sum")
        before = opened.lost()
        for study in studies:
            opened.register_study(study)
        entered = opened.recover(held, standing=None if standing is None else ServerStanding.load(standing))
        if charge_all:
            opened.charge_all()
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
