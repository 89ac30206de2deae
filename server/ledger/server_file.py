"""The server's ledger as a file: how it is written, the standing beside it, and its recovery from an older copy."""

from __future__ import annotations

import logging
import sqlite3
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

from common.canonical import canonical_text
from common.errors import ConsiliumError, InvalidInput, LedgerCorrupt
from common.ledger.base_ledger import OpenLedger
from common.ledger.chain import Chain
from common.ledger.charges import NOTHING, ReleaseRecord, Roster, RosterRecord, Spend
from common.ledger.checkpoint import CHARGING, CHECKPOINT_ROWS, Checkpoint, checkpoint_path
from common.ledger.keys import signing_public_key
from common.ledger.receipts import Receipt, check_arithmetic
from common.ledger.records import LostRecord, PoolRecord, RecoveredRecord, release_digest
from common.ledger.rollback_guard import ServerStanding, kept_standing, standing_path
from common.ledger.server_state import Books

log = logging.getLogger(__name__)


class ServerFile(OpenLedger[Books]):
    """Base of the server's ledger."""

    STANDING = ServerStanding

    def __init__(self, chain: Chain) -> None:
        self._standing_due, self._checkpointed = False, 0
        super().__init__(chain, Books())

    def close(self) -> None:
        try:
            if not self._chain.read_only and sys.exception() is None:
                self._keep_checkpoint()
        except (ConsiliumError, OSError, sqlite3.Error) as error:  # the next opening replays more rows, that is all
            log.warning("event=checkpoint-not-written cause=%s", type(error).__name__)
        finally:
            super().close()

    def _continue(self) -> None:
        """Go on from the checkpoint beside the file; one that does not hold is ignored, and removed by a writer."""
        path = checkpoint_path(self._chain.path)
        if not path.exists():
            return
        try:
            found = Checkpoint.load(path)
            last = self._chain.row(found.head.seq)
            self._books = found.books(self._chain.row)
        except (ConsiliumError, OSError, ArithmeticError, LookupError, sqlite3.Error, RecursionError) as error:
            log.warning("event=checkpoint-ignored cause=%s", type(error).__name__)
            if not self._chain.read_only:
                path.unlink(missing_ok=True)
            return
        self._checkpointed = last.seq
        self._chain.forget(after=last)

    def _keep_checkpoint(self) -> None:
        """Write a checkpoint, if the next opening would have to replay many rows without."""
        if self._books.row_count - self._checkpointed < CHECKPOINT_ROWS:
            return
        with self._chain.snapshot():
            self._catch_up()
            head, declared = self._chain.head(), tuple(self._chain.all_rows(but_for=CHARGING))
        found = Checkpoint.of(self._books, head, declared)
        if found is not None:
            found.signed(self._chain.signing_key).save(checkpoint_path(self._chain.path))
            self._checkpointed = head.seq

    def recover(self, receipts: Iterable[Receipt], *, standing: ServerStanding | None = None) -> int:
        """After an old copy was restored: enter as spent every receipted charge this ledger lost; how many there were.

        What ``standing`` (by default the one kept beside the file, if the file is older) shows beyond that is charged
        too, in one row: answers that were drawn, and perhaps used, before any receipt arrived.

        The answers are gone; asked again, such a query is a new release and a new charge. Charges are entered even
        where they pass a limit: what was released was released. A pool that was lost too is declared again as its own
        site's receipts, or the standing, state it. InvalidInput for a receipt this ledger's key did not sign, for
        receipts or a standing of another ledger or of a study that must be registered again first, for a pool nothing
        given here declares, and for a roster that neither the ledger nor a receipt given here has.
        """
        entered = 0
        receipts = tuple(receipts)
        if standing is None and self.forgotten() is not None:
            standing = ServerStanding.load(standing_path(self._chain.path))
        with self._writing():
            for receipt in receipts:
                self._check_origin(receipt)
                if receipt.declaration.pool not in self._books.pools:
                    self._append(PoolRecord(receipt.declaration))
            if standing is not None:
                self._check_standing(standing)
            shown = {roster: names for receipt in receipts for roster, names in receipt.shown.items()}
            for receipt in receipts:
                self._check_recoverable(receipt, shown)
                entered += sum(self._recover(item.release, shown, origin=receipt.site) for item in receipt.releases)
            if standing is not None:
                self._charge_lost(standing)
                self._standing_due = True  # also where nothing was missing but the rows' numbers
        return entered

    def _recover(self, release: ReleaseRecord, shown: Mapping[str, Roster], *, origin: str) -> bool:
        """Enter a receipted release as charged, unless its row is here or was entered before."""
        release_hash, row = release_digest(release), self._books.releases.row_of(release.query_id, release.draw)
        if release_hash in self._books.recovered or (row is not None and self._is_here(row, release)):
            return False
        if release.roster_sha256 is not None and release.roster_sha256 not in self._books.named:
            self._append(RosterRecord(shown[release.roster_sha256]))
        self._append(RecoveredRecord(release, origin, release_hash))
        return True

    def _check_standing(self, standing: ServerStanding) -> None:
        """That the standing is of this ledger; pools the copy does not know are declared again as it states them."""
        if standing.head.ledger_id != self.ledger_id:
            raise InvalidInput("standing", value=standing.head.ledger_id, limit=f"of this ledger, {self.ledger_id}")
        unknown = sorted(standing.studies.keys() - self._books.studies.keys())
        if unknown:
            raise InvalidInput("studies of the standing", value=unknown, remedy="register them again: --study FILE")
        for declaration in standing.declarations:
            if declaration.pool not in self._books.pools:
                self._append(PoolRecord(declaration))

    def _charge_lost(self, standing: ServerStanding) -> None:
        """Charge what the standing shows beyond the rows; nothing if they hold it all."""
        pools = {pool: spend.beyond(self._books.spent(pool)) for pool, spend in standing.pools.items()}
        studies = {
            study: {pool: spend.beyond(self._books.spent_in(study, pool)) for pool, spend in spends.items()}
            for study, spends in standing.studies.items()
        }
        if any(spend != NOTHING for spends in (pools, *studies.values()) for spend in spends.values()):
            self._append(LostRecord(pools, studies, standing.head.seq))

    def forgotten(self) -> str | None:
        """What shows that this file is an older copy than the one that charged last; None if nothing does.

        The standing beside the file tells. Where it was rolled back together with the file, sites do that hold a later
        receipt; where none had arrived yet, nothing can. LedgerCorrupt or InvalidInput where it cannot be read.
        """
        path = self._chain.path
        found = self._older_copy(this=f"the ledger {path}", beside=f"with {path}")
        return None if found is None else f"{found}; to fix: `consilium ledger recover`"

    def standing_problem(self) -> str | None:
        """:meth:`forgotten` for a page that says how things are: a standing that cannot be read is a problem too."""
        try:
            return self.forgotten()
        except (LedgerCorrupt, InvalidInput) as error:
            return str(error)

    def lost(self) -> dict[str, Spend]:
        """What was charged to each pool because an older copy had forgotten it and no receipt told of it."""
        self._catch_up()
        found: dict[str, Spend] = {}
        for record in self._books.lost.values():
            for pool, spend in record.pools.items():
                found[pool] = found.get(pool, NOTHING) + spend
        return found

    def _make_good_standing(self) -> None:
        """Write a standing that a crash, or a version before there were any, left out."""
        path = kept_standing(self._chain.path)
        known = 0 if path is None else ServerStanding.load(path).head.seq
        if known < self._books.last_charge:
            self._keep_standing()

    def _keep_standing(self) -> None:
        super()._keep_standing()
        self._standing_due = False

    def _standing(self) -> ServerStanding:
        return ServerStanding(
            head=self._chain.head(),
            pools=self._books.all_spent(),
            studies=self._books.all_spent_in(),
            declarations=tuple(self._books.pools.values()),
        )

    def _check_origin(self, receipt: Receipt) -> None:
        if receipt.ledger_id != self.ledger_id:
            raise InvalidInput("receipt", value=receipt.ledger_id, limit=f"of this ledger, {self.ledger_id}")
        if not any(receipt.is_genuine(signing_public_key(key)) for _, key in self._books.key.history):
            raise InvalidInput("receipt", limit="signed by this ledger's key")

    def _check_recoverable(self, receipt: Receipt, shown: Mapping[str, Roster]) -> None:
        study, rosters = self._books.studies.get(receipt.study_id), {**self._books.named, **shown}
        try:
            pools = {entry.pool for item in receipt.releases for entry in item.release.roster_in(rosters)}
        except KeyError as error:
            raise InvalidInput(
                "receipt is of a roster that is not known here",
                value=error.args[0],
                remedy="give a whole file of receipts of any site on it: its first one of this roster shows it",
            ) from None
        lost = sorted(pools - self._books.pools.keys())
        if study is None or lost:
            raise InvalidInput(
                "receipt names what this ledger does not know",
                value=lost or receipt.study_id,
                remedy="register the study again, and give the receipts of all sites at once",
            )
        check_arithmetic(receipt, study, known=rosters)

    def _is_here(self, row: int, release: ReleaseRecord) -> bool:
        return self._chain.row(row).body == canonical_text(release.to_json())

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """One write transaction: read what others wrote, let the block append, commit; on any exception undo it all.

        If it charged something, the standing follows it. Where that fails the charge is durable and the caller gets the
        error; the next write, or the next opening, makes the standing good.
        """
        try:
            with self._chain.transaction():
                self._catch_up()
                before = self._books.last_charge
                if self._chain.public_key != self._books.key.public_key:
                    raise InvalidInput(
                        "signing key", limit="the ledger's current key", remedy="it was rotated; open with the new key"
                    )
                self._books.begin()
                yield
        except BaseException:
            self._books.roll_back()
            raise
        self._books.settle()
        self._standing_due |= self._books.last_charge != before
        if self._standing_due:
            self._keep_standing()
