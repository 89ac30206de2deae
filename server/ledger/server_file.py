"""Writes the server's ledger file and the standing beside it, and recovers a ledger from an older copy.

Its class is the base of :class:`server.ledger.server_ledger.Ledger`. The *standing* is a small file that records the
ledger's newest row and all totals. If the ledger's file is replaced by an older copy, the comparison with the standing
shows the replacement. Receipts and standings of another ledger are refused.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from fractions import Fraction

from common.canonical import canonical_text
from common.errors import InvalidInput, LedgerCorrupt, ReceiptContradiction
from common.ledger.base_ledger import OpenLedger
from common.ledger.chain import Chain
from common.ledger.charges import NOTHING, ReleaseRecord, Roster, RosterRecord, Spend, charge_of
from common.ledger.keys import signing_public_key
from common.ledger.receipts import Receipt, check_arithmetic, row_hashes
from common.ledger.records import (
    ALL_CHARGED,
    BooksRecord,
    LostRecord,
    NoteRecord,
    PoolRecord,
    RecoveredRecord,
    kept_of,
    release_digest,
)
from common.ledger.rollback_guard import ServerStanding, kept_standing
from common.ledger.rows import START, Position
from common.ledger.server_state import ServerBooks


class ServerFile(OpenLedger[ServerBooks]):
    """Base class of the server's ledger. It runs transactions, writes the standing, and recovers an older copy."""

    STANDING = ServerStanding

    def __init__(self, chain: Chain) -> None:
        super().__init__(chain, ServerBooks())

    def recover(
        self, receipts: Iterable[Receipt], *, standing: ServerStanding | None = None, charge_all: bool = False
    ) -> int:
        """Enter as spent every charge that this restored copy has lost.

        1. Every charge that a receipt contains and this ledger lacks is entered. It is not charged again if an earlier
           recovery charged its row from a standing.
        2. For each standing (the one beside the file, and ``standing``), the last row that the standing shares with
           this ledger is found. The charges that the standing counts after that row, less those that receipts have
           entered, are charged in one row. They belong to answers whose noise was drawn, and which were perhaps used,
           before any receipt was sent.
        3. With ``charge_all``, all remaining budget of every pool and study is charged in one row. A note says so.
           Later recoveries charge all that is left again, and no pool can be added, because the lost ledger may have
           charged any.

        All of it is one transaction. The ledger can be written again only after it.

        Charges that this copy itself recorded after the shared row stay. Charges that an earlier recovery entered from
        a standing are not entered again. The lost answers cannot be restored: asking a lost query again is a new
        release with a new charge. Charges are entered even if they exceed a budget, because those releases have
        happened. If the copy lacks a pool, the pool is declared again with the terms in its site's receipts or in the
        standing.

        Args:
            receipts: Receipts of any sites.
            standing: A standing that was kept elsewhere. The one beside the file is always used, too.
            charge_all: Charge all remaining budget, because without a standing nobody can know what the lost ledger
                charged.

        Returns:
            Number of charges entered from receipts.

        Raises:
            InvalidInput: If a receipt or standing is of another ledger, or of a study that must be registered first. If
                a receipt is not signed by this ledger's key, or names a roster that neither this ledger nor a given
                receipt contains. If no receipt and no standing declares a pool. If no key of this ledger signed a
                standing; the argument ``standing`` may be signed by an unknown key if it names a row that this copy
                lacks, because a person vouches for it.
        """
        entered = 0
        receipts = tuple(receipts)
        beside = ServerStanding.load(path) if (path := kept_standing(self._chain.path)) is not None else None
        standings = {found.position: found for found in (beside, standing) if found is not None}
        for one in standings.values():
            self.check_signer(one, named=one == standing)
        with self._writing():
            for receipt in receipts:
                self._check_origin(receipt)
                if receipt.declaration.pool not in self._books.pools:
                    self._append(PoolRecord(receipt.declaration))
            lost = [one for one in standings.values() if not self.covers(one.position)]
            for one in lost:
                self._check_standing(one)
            shown = {roster: names for receipt in receipts for roster, names in receipt.shown.items()}
            for receipt in receipts:
                self._check_recoverable(receipt, shown)
            charged_by = {
                place: row
                for row, record in self._books.lost.items()
                for place in _before(set(kept_of(record)), receipts) | _positions(record.charged)
            }
            for receipt in receipts:
                by = charged_by.get(Position(receipt.head.seq, receipt.head.hash))
                new = [self._recover(receipt, item.release, shown, charged_by=by) for item in receipt.releases]
                entered += sum(new) if by is None else 0
            covered: set[Position] = set()
            for one in sorted(lost, key=lambda one: one.head.seq, reverse=True):
                if one.position not in covered:  # a later standing's totals include earlier ones of the same rows
                    self._charge_lost(one, receipts)
                covered |= set(one.positions())
            if charge_all or ALL_CHARGED in self._books.notes:
                self._append(self._all_that_is_left())
            if charge_all:
                self._append(NoteRecord(ALL_CHARGED))
        self._restoring = False
        self._keep_standing()
        return entered

    def charged_again_up_to(self) -> int:
        """Return the number of the newest lost row that may be charged again by a receipt entered later, or 0.

        A recovery entered these charges from a standing that named only its newest row, or an earlier version of this
        program entered them. The receipts' heads before that row are then unknown.
        """
        unnamed = (one.kept_row for one in self._books.lost.values() if one.kept_hash and one.marks is None)
        return max(unnamed, default=0)

    def _all_that_is_left(self) -> LostRecord:
        """Return a charge of all remaining budget of every pool and study."""
        books, last = self._books, self._chain.last
        assert last is not None
        pools = {
            pool: Spend(max(books.limit(pool) - books.spent(pool).mu_squared, Fraction(0))) for pool in books.pools
        }
        studies = {
            study: {
                pool: Spend(max(books.study_limit(study) - books.spent_in(study, pool).mu_squared, Fraction(0)))
                for pool in books.pools
            }
            for study in books.studies
        }
        return LostRecord(pools, studies, last.seq)

    def _recover(
        self, receipt: Receipt, release: ReleaseRecord, shown: Mapping[str, Roster], *, charged_by: int | None
    ) -> bool:
        """Enter a release as charged if a receipt proves it and the ledger lacks it; return whether it was entered.

        The ledger lacks the release unless it contains the release's row, or an earlier recovery entered the release.
        ``charged_by`` is the row of this ledger that charges the release already, if there is one.
        """
        release_hash, row = release_digest(release), self._books.releases.row_of(release.query_id, release.draw)
        if release_hash in self._books.recovered or (row is not None and self._is_here(row, release)):
            return False
        if release.roster_sha256 is not None and release.roster_sha256 not in self._books.named:
            self._append(RosterRecord(shown[release.roster_sha256]))
        head = Position(receipt.head.seq, receipt.head.hash)
        self._append(RecoveredRecord(release, receipt.site, release_hash, head, charged_by))
        return True

    def _check_standing(self, standing: ServerStanding) -> None:
        """Check the standing file of a lost ledger, and enter the pools, site ledgers and notes that this older copy
        lacks.

        If the copy declares a smaller budget for a pool than the standing does, the copy's declaration is kept.
        :meth:`recover` calls this method before it enters the lost charges.

        Raises:
            InvalidInput: If the standing counts a study that is not registered here.
        """
        unknown = sorted(standing.studies.keys() - self._books.studies.keys())
        if unknown:
            raise InvalidInput(
                "the standing file counts studies that this ledger does not know",
                value=unknown,
                remedy="register them again with --study FILE",
            )
        for declaration in standing.declarations:
            with suppress(InvalidInput):  # this ledger has a tighter declaration: keep it
                self._books.check_pool(declaration)
                if self._books.pools.get(declaration.pool) != declaration:
                    self._append(PoolRecord(declaration))
        for pool, ledger_id in standing.books.items():
            with suppress(InvalidInput):  # this ledger names another site ledger: keep it
                self._name_books(pool, ledger_id)
        for text in standing.notes or ():
            if text not in self._books.notes:
                self._append(NoteRecord(text))

    def _name_books(self, pool: str, ledger_id: str) -> None:
        """Record which site ledger keeps a pool's budget; refuse another one."""
        self._books.check_books(pool, ledger_id)
        if pool not in self._books.pool_books:
            self._append(BooksRecord(pool, ledger_id))

    def _charge_lost(self, standing: ServerStanding, receipts: Sequence[Receipt]) -> None:
        """Charge, in one row, the spending that only the standing counts.

        This is the spending after the last row that the standing shares with this ledger, less the charges that were
        entered from receipts.
        """
        fork = self._fork(standing)
        before, before_in = self._spent_at(fork)
        entered, entered_in = self._entered_of(standing, receipts, after=self._real(fork).seq)
        pools = {
            pool: spend.beyond(before.get(pool, NOTHING)).beyond(entered.get(pool, NOTHING))
            for pool, spend in standing.pools.items()
        }
        studies = {
            study: {
                pool: spend.beyond(before_in.get((study, pool), NOTHING)).beyond(entered_in.get((study, pool), NOTHING))
                for pool, spend in spends.items()
            }
            for study, spends in standing.studies.items()
        }
        of = standing.head.seq, standing.head.hash, fork, standing.marks_after(fork), standing.charged
        self._append(LostRecord(pools, studies, *of))

    def _spent_at(self, place: Position) -> tuple[dict[str, Spend], dict[tuple[str, str], Spend]]:
        """Return the spending up to a row, by pool and by study and pool.

        The row is either in this ledger, or it was lost and a recovery entered the charges of all lost rows here in one
        row. In the second case the result may be too small, never too large: it omits charges that receipts showed, and
        it counts none of the lost rows unless ``place`` is the newest of them.
        """
        if place in self._books.kept and not self.contains(place):
            record = self._books.kept[place]
            assert isinstance(record, LostRecord)
            pools, studies = self._spent_at(record.fork or START)
            if place.seq < record.kept_row:
                return pools, studies
            for pool, spend in record.pools.items():
                pools[pool] = pools.get(pool, NOTHING) + spend
            for study, spends in record.studies.items():
                for pool, spend in spends.items():
                    studies[study, pool] = studies.get((study, pool), NOTHING) + spend
            return pools, studies
        books = ServerBooks()
        for row in self._chain.rows_between(0, place.seq):
            books.enter(row)
        inside = books.all_spent_in()
        return books.all_spent(), {(study, pool): inside[study][pool] for study in inside for pool in inside[study]}

    def _real(self, place: Position) -> Position:
        """Return the given row if this ledger contains it, and otherwise the last row before the loss of that row."""
        while place in self._books.kept and not self.contains(place):
            record = self._books.kept[place]
            assert isinstance(record, LostRecord)
            place = record.fork or START
        return place

    def _entered_of(
        self, standing: ServerStanding, receipts: Sequence[Receipt], *, after: int
    ) -> tuple[dict[str, Spend], dict[tuple[str, str], Spend]]:
        """Return the spending that recoveries entered from receipts and that the standing's totals already include.

        The first result is by pool, the second by study and pool. Only rows after row ``after`` count.

        The totals include a receipt's charges if its head is a row of the standing's history, or a row that the
        standing names as charged in an earlier recovery.
        """
        known, heads = _before(set(standing.positions()), receipts), dict[str, Position]()
        known |= _positions(standing.charged)
        for receipt in receipts:
            head = Position(receipt.head.seq, receipt.head.hash)
            heads |= {release_digest(item.release): head for item in receipt.releases}
        pools: dict[str, Spend] = {}
        studies: dict[tuple[str, str], Spend] = {}
        for release_hash, (row, one) in self._books.recovered.items():
            if row <= after or not one.charged or heads.get(release_hash, one.head) not in known:
                continue
            study = self._books.studies[one.study_id].protection
            own, dimension = one.mechanism.mu_squared(study), one.mechanism.dimension
            for entry in one.roster:
                cost = charge_of(one.mechanism, self._books.pools[entry.pool].protection, study)
                pools[entry.pool] = pools.get(entry.pool, NOTHING).plus(cost, dimension)
                key = one.study_id, entry.pool
                studies[key] = studies.get(key, NOTHING).plus(own, dimension)
        return pools, studies

    def forgotten(self) -> str | None:
        """Return why this file may be an older copy of the ledger, judged by the standing beside it.

        If the standing was rolled back together with the file, only a site that holds a later receipt can notice it.

        Returns:
            The reason and the remedy as text: the standing shows a row that this file lacks, is missing, or is signed
            by another key. None if there is no sign of an older copy.

        Raises:
            LedgerCorrupt: If the standing is damaged.
            InvalidInput: If the standing cannot be read.
        """
        path = self._chain.path
        found = self._older_copy(this=f"the ledger {path}", beside=f"with {path}")
        return None if found is None else f"{found}; to fix: `consilium ledger recover`"

    def standing_problem(self) -> str | None:
        """Return why the ledger may be an older copy; None if there is no sign of it.

        The reason is the text that :meth:`forgotten` returns, or the error's text if the standing cannot be read.
        Reports and pages that show the ledger's state use it.
        """
        try:
            return self.forgotten()
        except (LedgerCorrupt, InvalidInput) as error:
            return str(error)

    def check_newest(self) -> None:
        """Raise an error if the ledger may be an older copy; callers check this before they store or publish its
        figures.

        Raises:
            LedgerCorrupt: If :meth:`standing_problem` finds a problem.
        """
        if (problem := self.standing_problem()) is not None:
            raise LedgerCorrupt(f"more may have been spent than the ledger shows: {problem}")

    def lost(self) -> dict[str, Spend]:
        """Return the spending that recoveries of the ledger charged although no receipt proves it.

        For charges without a receipt, a recovery charges what the standing file counts beyond the older copy. If there
        is no standing file, a recovery with ``charge_all`` charges the whole remaining budget.

        Returns:
            A mapping from each pool's name to this spending; empty if no recovery made such a charge.
        """
        found: dict[str, Spend] = {}
        for record in self.books.lost.values():
            for pool, spend in record.pools.items():
                found[pool] = found.get(pool, NOTHING) + spend
        return found

    def _has_charged(self) -> bool:
        return bool(self._books.all_spent() or self._books.all_spent_in())

    def _standing(self) -> ServerStanding:
        return ServerStanding(
            head=self._chain.head(),
            marks=self._chain.marks(),
            pools=self._books.all_spent(),
            studies=self._books.all_spent_in(),
            declarations=tuple(self._books.pools.values()),
            books=dict(self._books.pool_books),
            notes=tuple(self._books.notes) or None,
            charged=self._charged_again() or None,
        )

    def _charged_again(self) -> tuple[tuple[int, str], ...]:
        """Return number and hash of each known row that this ledger had lost and whose charges it contains."""
        books = self._books
        found = {one.head for _, one in books.recovered.values() if one.head is not None} | books.kept.keys()
        found = found.union(*(_positions(record.charged) for record in books.lost.values()))
        return tuple(sorted((place.seq, place.hash) for place in found))

    def _check_origin(self, receipt: Receipt) -> None:
        if receipt.ledger_id != self.ledger_id:
            raise InvalidInput(
                "ledger of the receipt",
                value=receipt.ledger_id,
                limit=f"this ledger, {self.ledger_id}",
                remedy="give only receipts that this ledger issued",
            )
        if not any(receipt.is_genuine(signing_public_key(key)) for key in self.public_keys):
            raise InvalidInput(
                "receipt with a wrong signature",
                limit="receipts signed by a key of this ledger",
                remedy="if the key was changed after the copy was made, give the newest key file, and put the retired "
                "key files into its folder; if the newest key is lost, leave out these receipts: the standing file or "
                "--charge-all covers their charges",
            )

    def _check_recoverable(self, receipt: Receipt, shown: Mapping[str, Roster]) -> None:
        study, rosters = self._books.studies.get(receipt.study_id), {**self._books.named, **shown}
        try:
            pools = {entry.pool for item in receipt.releases for entry in item.release.roster_in(rosters)}
        except KeyError as error:
            raise InvalidInput(
                "the receipt names a roster that this ledger does not know",
                value=error.args[0],
                remedy="give the complete receipts file of any site on that roster, which contains it",
            ) from None
        lost = sorted(pools - self._books.pools.keys())
        if study is None or lost:
            raise InvalidInput(
                "the receipt names a study or pools that this ledger does not know",
                value=lost or receipt.study_id,
                remedy="register the study again, and give the receipts of all sites at once",
            )
        try:
            check_arithmetic(receipt, study, known=rosters)
        except ReceiptContradiction as error:
            raise InvalidInput(
                f"receipt of site {receipt.site}: {error}",
                remedy="leave out this receipt: the standing file or --charge-all covers its charges",
            ) from None

    def _is_here(self, row: int, release: ReleaseRecord) -> bool:
        return self._chain.row(row).body == canonical_text(release.to_json())

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """Run the block in one write transaction, after reading the rows that other processes wrote.

        The transaction is committed at the end of the block. On any exception, everything is undone.

        The standing is written after the commit. If that fails, the rows are durable and the caller gets the error; the
        next write or opening brings the standing up to date. While an older copy is being recovered, the standing stays
        unchanged until everything that it counts is charged.
        """
        try:
            with self._chain.transaction():
                self._catch_up()
                if self._chain.public_key != self._books.key.public_key:
                    raise InvalidInput(
                        "signing key, which another command has replaced meanwhile",
                        limit="the ledger's current key",
                        remedy="run the same command again, which reads the new key",
                    )
                self._books.begin()
                yield
        except BaseException:
            self._books.roll_back()
            raise
        self._books.settle()
        if self._books.row_count != self._kept_at and not self._restoring:
            self._keep_standing()


def _positions(marks: tuple[tuple[int, str], ...] | None) -> set[Position]:
    return {Position(seq, hashed) for seq, hashed in marks or ()}


def _before(known: set[Position], receipts: Sequence[Receipt]) -> set[Position]:
    """Return the given rows of one history, and all earlier rows of it that receipts show.

    A receipt contains the hashes of all rows since the site's previous receipt. If one of them is a known row, the
    rows before it belong to the same history.
    """
    found = set(known)
    for receipt in sorted(receipts, key=lambda receipt: receipt.head.seq, reverse=True):
        rows = [Position(seq, hashed) for seq, hashed in row_hashes(receipt).items()]
        newest = max((number for number, row in enumerate(rows, start=1) if row in found), default=0)
        if newest:
            found |= {receipt.previous, *rows[:newest]}
    return found
