"""Re-enters lost charges into a ledger, and replaces its signing key, for an operator.

`consilium ledger recover` and `consilium ledger rotate-key` call it. Lost charges are known from the sites' receipts,
and from the ledger's *standing*: a small file beside the ledger that counts every charge and is in no backup. Without
receipts and without a standing, a recovery is refused. A key change is refused if the given old key is not the ledger's
current key.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from common.config import Study
from common.errors import InvalidInput
from common.ledger.charges import NOTHING
from common.ledger.keys import load_signing_key, public_hex, replace_key
from common.ledger.receipts import read_receipts
from common.ledger.rollback_guard import ServerStanding, kept_standing
from common.privacy.accounting import Guarantee
from server.ledger.server_ledger import Ledger

RECOVERED = " charges recovered from "
"""Text that every note in the ledger about a recovery contains, even if the recovery entered no charge."""


@dataclass(frozen=True, slots=True)
class PoolAfter:
    """A patient pool after a recovery.

    Attributes:
        pool: The pool's name.
        releases: Number of releases charged to it.
        spent: The (ε, δ) that these releases have spent, by the accountant that decides on the pool's budget.
    """

    pool: str
    releases: int
    spent: Guarantee


@dataclass(frozen=True, slots=True)
class Recovery:
    """The result of a recovery.

    Attributes:
        entered: Number of charges entered from receipts.
        receipts: Number of receipts read.
        by_standing: By pool, the number of releases that this recovery charged from the ledger's standing (a small file
            beside the ledger that counts every charge), because no receipt contains them.
        pools: All pools after the recovery.
        charged_again: True if receipts of rows that a standing charged may charge them once more in a later recovery.
        standing_is_older: True if a receipt names a later row than every standing that was read. Charges of answers
            after the newest standing may then be missing, if the receipts for these answers reached no site.
    """

    entered: int
    receipts: int
    by_standing: dict[str, int]
    pools: tuple[PoolAfter, ...]
    charged_again: bool
    standing_is_older: bool


def recover_charges(
    ledger: Path,
    *,
    signing_key: Ed25519PrivateKey,
    receipts: Sequence[Path],
    standing: Path | None,
    studies: Sequence[Study],
    charge_all: bool = False,
    retired: Sequence[Path] = (),
) -> Recovery:
    """Enter into a restored copy of a ledger every charge that receipts contain or the standing shows.

    Args:
        ledger: The restored copy.
        signing_key: The ledger's signing key.
        receipts: The sites' files of receipts.
        standing: The lost ledger's standing file, if it is not beside the copy.
        studies: Studies to register again first.
        charge_all: Count everything that pools and studies have left as spent; only if the standing is lost. Receipts
            alone are not enough then, because they do not show answers whose receipts reached no site.
        retired: Files of signing keys that ``signing_key`` replaced. They are read if the copy was made before the key
            was changed: the copy's own key then signs the rows that introduce the later keys.

    Returns:
        What was entered, and every pool's state.

    Raises:
        InvalidInput: If the copy's signing key is not given. If nothing shows a loss: neither ``receipts`` nor
            ``standing`` is given, the copy has all ``studies`` and all rows that the standing beside it shows, and the
            copy's key is still the ledger's newest key. If the ledger's standing is missing, unless ``charge_all`` or a
            ``standing`` with a row that the copy lacks is given. If ``charge_all`` is given although there is a
            standing.
    """
    held = [receipt for path in receipts for receipt in read_receipts(path)]
    with Ledger.open(ledger) as copy:
        current = copy.public_key
    keys = [signing_key] if current == public_hex(signing_key) else [*map(load_signing_key, retired), signing_key]
    own_key = next((key for key in keys if public_hex(key) == current), signing_key)
    with Ledger.open(ledger, signing_key=own_key, restored=True) as opened:
        whole = all(study.id in opened.books.studies for study in studies)
        if whole and not receipts and standing is None and opened.forgotten() is None and own_key is signing_key:
            evidence = "give the receipts file of every site, each with --receipts FILE"
            if kept_standing(ledger) is None:
                raise InvalidInput(
                    "evidence of lost charges",
                    value="neither receipts nor a standing file",
                    remedy=evidence,
                )
            raise InvalidInput(
                "evidence of lost charges",
                value="none: the standing file beside this ledger names its newest row",
                remedy=f"go on without a recovery; if a site holds receipts that this ledger lacks, {evidence}",
            )
        kept = None if standing is None else ServerStanding.load(standing)
        shows_loss = kept is not None and not opened.covers(kept.position)
        beside = kept_standing(ledger)
        missing = not shows_loss and beside is None
        if missing and opened.forgotten() is not None and not charge_all:
            raise InvalidInput(
                "missing standing file (the small file beside the lost ledger that counts its charges)",
                value=str(ledger.with_suffix(".standing") if kept is None else standing),
                limit="a standing file that was written after this copy of the ledger, because receipts alone lack "
                "answers whose receipts reached no site"
                if kept is None
                else "a standing file that names a row which this copy of the ledger lacks",
                remedy="give it with --standing FILE; if it is lost, --charge-all counts all remaining budget as spent",
            )
        if charge_all and not missing:
            raise InvalidInput(
                "--charge-all",
                limit="only if the standing file is lost; here the standing file shows exactly what was spent",
                remedy="leave out --charge-all",
            )
        standings = (kept, None if beside is None else ServerStanding.load(beside))
        counted = max((one.head.seq for one in standings if one is not None), default=0)
        before = opened.lost()
        for key in keys:
            if public_hex(key) not in opened.public_keys:
                opened.rotate_key(key)
        for study in studies:
            opened.register_study(study, older=True)
        entered = opened.recover(held, standing=kept, charge_all=charge_all)
        opened.note(f"{entered}{RECOVERED}{len(held)} receipts")
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
                    opened.pool_spending(pool.pool).spent,
                )
                for pool in opened.pools()
            ),
            charged_again=opened.charged_again_up_to() > 0,
            standing_is_older=not charge_all and any(receipt.head.seq > counted for receipt in held),
        )


@dataclass(frozen=True, slots=True)
class KeyChange:
    """A change of a ledger's signing key.

    Attributes:
        before: Public key that belongs to the old signing key, in hexadecimal.
        now: Public key that belongs to the new signing key, in hexadecimal.
    """

    before: str
    now: str


def rotate_signing_key(ledger: Path, *, key: Path, new_key: Path) -> KeyChange:
    """Replace the ledger's signing key; the old key signs the row that introduces the new one.

    A call that was interrupted is completed by a second call with the same arguments.

    Args:
        ledger: The ledger's file.
        key: File of the current signing key. Afterwards this file holds the new key, and the old key is kept beside it.
        new_key: File of the new signing key; it is moved to ``key``.

    Returns:
        Both public keys.

    Raises:
        InvalidInput: If ``key`` is not the ledger's current key.
    """
    old, new = load_signing_key(key), load_signing_key(new_key)
    before, now = public_hex(old), public_hex(new)
    with Ledger.open(ledger) as opened:
        current = opened.public_key
    if current == before != now:
        with Ledger.open(ledger, signing_key=old) as opened:
            opened.rotate_key(new)
    elif current != now:
        raise InvalidInput(
            "signing key", value=str(key), limit=f"the file of the key that signs this ledger now, {current}"
        )
    replace_key(key, old, new_key)
    return KeyChange(before, now)
