"""Verifies a ledger offline, from its file and, if the caller knows it, the ledger's public key.

`consilium verify`, the backup and the dashboard call it. It reads and recomputes everything that is stored, in these
steps; the code repeats their numbers:

1. File structure, schema and triggers.
2. The hash and link of every row.
3. Every signature.
4. Every rule and total: no budget was exceeded at any row.
5. Every answer against its charge.
6. The end of the file, against the standing beside it and the heads that others kept (``witnesses``). No file can show
   by itself that its end was cut off together with its signatures. A *head* is the signed hash of a ledger's newest
   row; the *standing* is a small file beside the ledger that records the newest head.

The report names the first bad row. Rows after it are not judged.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from common.canonical import parse_canonical, sha256_bytes
from common.errors import InvalidInput, LedgerCorrupt, StorageFailed
from common.ledger.keys import public_hex
from common.ledger.records import AlarmRecord, CodeRecord, KeyRecord, ReceiptRecord, SupersededRecord
from common.ledger.rollback_guard import ServerStanding, SiteLedgerStanding, kept_standing
from common.ledger.rows import ROLES, Position, Row, SignedHead, check_link
from common.ledger.sealed_records import MaskedRecord
from common.ledger.server_state import ServerBooks
from common.ledger.site_state import SiteBooks
from common.ledger.spending import Spending, of_pool
from common.ledger.sqlite_file import APPLICATION_ID, SCHEMA_VERSION, connect, ledger_error, schema_sql
from common.masking import DrawId, MaskedRoster
from common.privacy.accounting import Guarantee
from common.privacy.claim import shares_carry
from common.privacy.shares import share_std
from common.reading import as_path


@dataclass(frozen=True, slots=True)
class LedgerProblem:
    """One violation that was found in a ledger.

    Attributes:
        row: Number of the first row that the violation concerns; None if it concerns the file as a whole.
        what: The violation, as a sentence for people.
    """

    row: int | None
    what: str

    def __str__(self) -> str:
        return self.what if self.row is None else f"row {self.row}: {self.what}"


Standings = dict[str, SignedHead | LedgerProblem | None]
"""By role, the head in the standing beside a ledger: None if there is no standing, a problem if it is unreadable."""


@dataclass(frozen=True, slots=True)
class PoolTotal:
    """What a patient pool has spent according to this ledger.

    Attributes:
        pool: The pool's name.
        releases: Number of releases charged to it.
        share_spent: Fraction of the pool's budget that is spent, by the accountant that decides on this budget.
        guarantees: The guarantee by each of the accountants ``exact``, ``rdp`` and ``paper``.
    """

    pool: str
    releases: int
    share_spent: float
    guarantees: tuple[Guarantee, ...]


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """The result of verifying a ledger.

    Attributes:
        path: Path of the ledger's file.
        role: ``server`` or ``site``; empty if the file does not hold a ledger's tables.
        ledger_id: The ledger's id.
        rows: Number of rows.
        kinds: Number of rows of each kind.
        payloads: Number of stored values: answers, codes, and in a sealed sum also masked codes and rosters.
        draws: Number of charges of sealed sums for which the hospitals' noise was checked against the noise charged.
        signatures: Number of signatures checked.
        head: The newest signed head.
        anchored: True if the signatures were checked against a key that the caller knows. Otherwise they only show that
            the file is consistent with the key it names itself.
        witnesses: Number of the given heads (which others kept) that were found in the ledger.
        pools: Totals of every patient pool.
        problems: The violations found; empty if there are none.

    >>> c.verify(ledger).problems
    ()
    """

    path: str
    role: str
    ledger_id: str
    rows: int
    kinds: dict[str, int]
    payloads: int
    draws: int
    signatures: int
    head: SignedHead | None
    anchored: bool
    witnesses: int
    pools: tuple[PoolTotal, ...]
    problems: tuple[LedgerProblem, ...]

    @property
    def answers(self) -> int:
        """Number of answers of a server's ledger, each checked against its charge: open answers and sealed sums."""
        return self.kinds.get("release", 0) - self.draws + self.kinds.get("answer", 0)

    @property
    def ok(self) -> bool:
        """True if no problem was found."""
        return not self.problems

    @property
    def first_bad_row(self) -> int | None:
        """The lowest row number that a problem names; None if none does."""
        return min((problem.row for problem in self.problems if problem.row is not None), default=None)

    def raise_for_problems(self) -> None:
        """Raise LedgerCorrupt with the first problem, if there is one."""
        if self.problems:
            first = min(self.problems, key=lambda problem: (problem.row is None, problem.row or 0))
            raise LedgerCorrupt(first.what, row=first.row)

    def to_json(self) -> dict[str, object]:
        """Return the report as plain JSON; ε and shares are floats."""
        return {
            **asdict(self),
            "first_bad_row": self.first_bad_row,
            "head": None if self.head is None else self.head.to_json(),
            "ok": self.ok,
            "pools": [
                {
                    "pool": total.pool,
                    "releases": total.releases,
                    "share_spent": total.share_spent,
                    "spent": [item.to_json() for item in total.guarantees],
                }
                for total in self.pools
            ],
        }


def verify(
    path: Path | str,
    *,
    public_key: Ed25519PublicKey | None = None,
    server_key: Ed25519PublicKey | Sequence[Ed25519PublicKey] | None = None,
    witnesses: Sequence[SignedHead] = (),
) -> VerifyReport:
    """Verify a server's or a site's ledger. Nothing is written and no private key is needed.

    Args:
        path: The ledger's SQLite file.
        public_key: A public key that the caller knows to be the ledger's: the current key or an earlier one. By
            default, the file's signatures are only checked against the key that the file itself names.
        server_key: For a site's ledger, the server's public key, or several keys if the server changed its key;
            receipts are checked against them.
        witnesses: Signed heads of this ledger that somebody kept elsewhere; each must be found in it. The head in the
            standing beside the file, if there is one, must be found too.

    Returns:
        The report. Problems are reported in it, not raised.

    Raises:
        InvalidInput: If there is no such file.

    >>> report = c.verify(ledger)
    >>> report.ok, report.role
    (True, 'server')
    """
    path = as_path(path, what="ledger").absolute()
    standings = _standings(path)  # read before the rows, because a charge writes its row first
    # without a write-ahead log no process has the file open: open it immutably, which creates no file beside it
    connection = connect(path, read_only=True, as_it_lies=not Path(f"{path}-wal").exists())
    connection.text_factory = lambda data: data.decode("utf-8", "surrogateescape")
    try:
        keys = (server_key,) if isinstance(server_key, Ed25519PublicKey) else tuple(server_key or ())
        check = _Check(connection, public_key=public_key, server_keys=keys)
        try:
            connection.execute("BEGIN")
            check.run(witnesses, standings)
        except LedgerCorrupt as error:
            check.problem(error.row, _without_row(error))
        except (sqlite3.Error, UnicodeError, OverflowError) as error:  # SQLite's own messages may quote damaged bytes
            if isinstance(failed := ledger_error(error, "", path), StorageFailed):
                raise failed from error
            check.problem(None, f"the file cannot be read ({type(error).__name__}: {error})")
        return check.report(path)
    finally:
        connection.close()


class _Check:
    """One verification: runs the steps of this module over an open file and collects problems."""

    def __init__(
        self,
        connection: sqlite3.Connection,
        *,
        public_key: Ed25519PublicKey | None,
        server_keys: tuple[Ed25519PublicKey, ...],
    ) -> None:
        self._db = connection
        self._expected = None if public_key is None else public_hex(public_key)
        self._server_keys = server_keys
        self.problems: list[LedgerProblem] = []
        self.role = ""
        self.books: ServerBooks | SiteBooks = ServerBooks()
        self.kinds: dict[str, int] = {}
        self.payloads = self.draws = self.signatures = self.witnesses = 0
        self.head: SignedHead | None = None
        self._hashes: dict[int, str] = {}
        self._sent: dict[str, tuple[int, str, int | None]] = {}

    def problem(self, row: int | None, what: str) -> None:
        """Add a problem to the report."""
        self.problems.append(LedgerProblem(row, what))

    def run(self, witnesses: Sequence[SignedHead], standings: Standings) -> None:
        """Run all steps; stop after the first one if the file does not hold a ledger's tables."""
        self._structure()  # 1
        if not self.role:
            return
        self._schema()  # 1
        self._rows()  # 2, 3 and 4
        self._shares()  # 4
        self._payloads()  # 5
        self._rosters()  # 5
        self._witnesses(witnesses)  # 6
        self._check_standing(standings[self.role])  # 6
        known = [key for _, key in self.books.key.history]
        if self._expected is not None and self._expected not in known:
            # after another problem the key may be in rows that could not be read
            self.problem(None if self.problems else 1, f"no row read is signed by the expected key {self._expected}")

    def report(self, path: Path) -> VerifyReport:
        """Return the report of the steps that were run."""
        return VerifyReport(
            path=str(path),
            role=self.role,
            ledger_id=self.books.key.ledger_id,
            rows=self.books.row_count,
            kinds=dict(sorted(self.kinds.items())),
            payloads=self.payloads,
            draws=self.draws,
            signatures=self.signatures,
            head=self.head,
            anchored=self._expected is not None,
            witnesses=self.witnesses,
            pools=tuple(self._totals()),
            problems=tuple(self.problems),
        )

    def _structure(self) -> None:
        for name, expected in (("application_id", APPLICATION_ID), ("user_version", SCHEMA_VERSION)):
            found = self._db.execute(f"PRAGMA {name}").fetchone()[0]
            if found != expected:
                self.problem(None, f"{name} is {found}, not {expected}: another format, or a changed header")
        tables = {name for (name,) in self._db.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
        roles = [role for role, payloads in ROLES.items() if {"rows", "heads", payloads} <= tables]
        if len(roles) != 1:
            self.problem(None, "the file does not hold the tables of a ledger")
            return
        self.role = roles[0]
        self.books = ServerBooks() if self.role == "server" else SiteBooks()
        for (message,) in self._db.execute("PRAGMA integrity_check(5)"):
            if message != "ok":
                self.problem(None, f"the file's structure is damaged: {message}")

    def _schema(self) -> None:
        expected = schema_sql(self.role)
        found = dict(self._db.execute("SELECT name, sql FROM sqlite_master WHERE sql IS NOT NULL"))
        for name in sorted(expected.keys() | found.keys(), key=str):
            if name not in found:
                self.problem(None, f"table or trigger {name} is missing")
            elif name not in expected:
                self.problem(None, f"{name} does not belong in a ledger")
            elif found[name] != expected[name]:
                self.problem(None, f"table or trigger {name} was altered")

    def _rows(self) -> None:
        """Check every row and head until the first violation, after which no row can be judged."""
        heads = self._heads()
        head = next(heads, None)
        previous: Row | None = None
        for values in self._db.execute("SELECT seq, time_utc, kind, body, prev_hash, hash FROM rows ORDER BY seq"):
            row = Row(*values)
            try:
                check_link(self.role, row, previous)
                record = self.books.enter(row)
                if isinstance(record, CodeRecord):
                    self._sent[record.query_id] = row.seq, record.code_sha256, 8 * record.dimension
                elif isinstance(record, MaskedRecord):
                    self._sent[f"{record.query_id}/{record.draw}"] = row.seq, record.words_sha256, None
                elif isinstance(record, ReceiptRecord | AlarmRecord | SupersededRecord) and self._server_keys:
                    _check_receipt(record, self._server_keys, row.seq)
                while head is not None and head[0] <= row.seq:
                    self._check_head(head, row)
                    head = next(heads, None)
                if isinstance(record, KeyRecord) and (self.head is None or self.head.seq != row.seq):
                    raise LedgerCorrupt("the key before it did not sign this row, which introduces a key", row=row.seq)
            except LedgerCorrupt as error:
                self.problem(error.row or row.seq, _without_row(error))
                return
            self.kinds[row.kind] = self.kinds.get(row.kind, 0) + 1
            self._hashes[row.seq] = row.hash
            previous = row
        if previous is None:
            self.problem(1, "the ledger is empty")
        elif head is not None:
            self.problem(previous.seq + 1, f"rows up to {head[0]} were signed and are missing")
        elif self.head is None or self.head.seq != previous.seq:
            since = 1 if self.head is None else self.head.seq + 1
            self.problem(since, "rows after the last signed head were not written by the ledger")

    def _shares(self) -> None:
        """Check every charge of a sealed sum: the sites' shares of the noise must add up to at least the noise charged.

        The shares of the sites that may collude are not counted. The roster must reach the quorum, and the charge must
        assume as many colluders as the study.
        """
        if not isinstance(self.books, ServerBooks):
            return
        for seq, release in self.books.releases.by_row():
            study, mechanism, sites = self.books.studies[release.study_id], release.mechanism, len(release.roster)
            if mechanism.colluders != study.colluders:
                self.problem(
                    seq, f"charged for {mechanism.colluders} colluders, and the study assumes {study.colluders}"
                )
            elif mechanism.colluders is not None:
                self.draws += 1
                try:
                    share = share_std(mechanism, sites=sites)
                    sound = shares_carry(share, mechanism.noise_std, sites=sites, colluders=mechanism.colluders)
                except InvalidInput:
                    sound = False
                if not sound or sites < study.quorum:
                    self.problem(seq, f"the noise shares of {sites} sites add up to less noise than was charged")

    def _heads(self) -> Iterator[tuple[int, str, str, str]]:
        yield from self._db.execute("SELECT seq, hash, public_key, signature FROM heads ORDER BY seq")

    def _check_head(self, values: tuple[int, str, str, str], row: Row) -> None:
        head = SignedHead(self.role, self.books.key.ledger_id, *values)
        if head.seq != row.seq or head.hash != row.hash:
            raise LedgerCorrupt(
                "a head (a row's signed hash) has another number or hash than its row", row=min(head.seq, row.seq)
            )
        if head.public_key != self.books.key.at(row.seq):
            raise LedgerCorrupt(
                "the head (the row's signed hash) names another key than the ledger's key at this row", row=row.seq
            )
        if not head.is_genuine():
            raise LedgerCorrupt("the signature of the head of this row is wrong", row=row.seq)
        self.signatures += 1
        self.head = head

    def _payloads(self) -> None:
        expected = {seq: (query_id, sha256, size) for query_id, seq, sha256, size in self._charged()}
        dropped = self.books.teachers.last_withdrawal if isinstance(self.books, SiteBooks) else 0
        until = self.books.row_count
        table = ROLES[self.role]
        bad: list[LedgerProblem] = []
        for query_id, seq, data in self._db.execute(f"SELECT query_id, seq, data FROM {table} ORDER BY seq"):
            if not isinstance(seq, int):
                bad.append(LedgerProblem(None, f"a row number in {table} is not a number"))
                continue
            if seq > until and self.problems:
                continue  # rows after the first bad one are not judged
            if seq not in expected:
                bad.append(LedgerProblem(seq, f"{table} holds a value for a row that charged nothing"))
                continue
            charged_id, sha256, size = expected.pop(seq)
            if query_id != charged_id:
                bad.append(LedgerProblem(seq, f"the value in {table} is stored under another query than was charged"))
            elif not isinstance(data, bytes) or len(data) != (size or len(data)) or sha256_bytes(data) != sha256:
                bad.append(LedgerProblem(seq, f"the value in {table} is not the one that was charged"))
            self.payloads += 1
        # a withdrawal deletes the codes that were stored before it
        bad += [LedgerProblem(seq, f"the charge has no value in {table}") for seq in expected if seq > dropped]
        self.problems += sorted(bad, key=lambda problem: problem.row or 0)[:20]

    def _rosters(self) -> None:
        """Check for every draw that the sites with mask keys are exactly the sites that were charged."""
        if not isinstance(self.books, ServerBooks):
            return
        found: dict[str, MaskedRoster | None] = {}
        for seq, release in self.books.releases.by_row():
            if release.masks is None or release.masks not in self.books.rosters:
                continue
            if release.masks not in found:
                found[release.masks] = self._masked_roster(release.masks)
            roster, charged = found[release.masks], tuple(entry.site for entry in release.roster)
            draw = DrawId(release.study_id, self.books.key.ledger_id, release.batch_id, release.draw or 0)
            if roster is None or (roster.draw_id, roster.sites) != (draw, tuple(sorted(charged))):
                self.problem(seq, "the sum's masks belong to other sites, or to another draw, than were charged")

    def _masked_roster(self, masks: str) -> MaskedRoster | None:
        """Return the roster stored under this hash; None if it cannot be read."""
        row = self._db.execute(f"SELECT data FROM {ROLES[self.role]} WHERE query_id = ?", (masks,)).fetchone()
        try:
            roster = MaskedRoster.from_json(parse_canonical(row[0]))
            roster.check()
        except (InvalidInput, TypeError, ValueError):
            return None
        return roster

    def _charged(self) -> Iterator[tuple[str, int, str, int | None]]:
        """Yield the key, row, hash and size in bytes of every stored value; the size is None if it is not fixed."""
        if isinstance(self.books, ServerBooks):
            for release in self.books.releases.of_queries():
                if release.answer is not None:
                    yield release.query_id, release.answer.seq, release.answer.sha256, 8 * release.mechanism.dimension
            for masks, seq in self.books.rosters.items():
                yield masks, seq, masks, None
        else:
            yield from ((name, *found) for name, found in self._sent.items())

    def _witnesses(self, witnesses: Sequence[SignedHead]) -> None:
        self.witnesses = sum(self._contains_head(witness, "a kept head") for witness in witnesses)

    def _check_standing(self, found: SignedHead | LedgerProblem | None) -> None:
        if isinstance(found, LedgerProblem):
            self.problems.append(found)
        elif found is not None and Position(found.seq, found.hash) not in self.books.kept:
            self._contains_head(found, "the head in the standing beside the file")

    def _contains_head(self, head: SignedHead, name: str) -> bool:
        """Return whether this ledger contains a head; if not, add a problem that begins with ``name``."""
        if head.ledger_id != self.books.key.ledger_id:
            self.problem(None, f"{name} is of another ledger, {head.ledger_id}")
        elif not head.is_genuine():
            self.problem(None, f"{name}: the signature for row {head.seq} is wrong")
        elif head.seq not in self._hashes:
            lost = "no valid row of that number is left" if self.problems else "the ledger's tail was cut off"
            self.problem(self.books.row_count + 1, f"{name} is of row {head.seq}: {lost}")
        elif self._hashes[head.seq] != head.hash:
            self.problem(head.seq, f"{name} has another hash for this row: the ledger was rewritten or forked")
        elif head.public_key not in {key for _, key in self.books.key.history}:
            self.problem(head.seq, f"{name} is signed by a key that this ledger never had")
        else:
            return True
        return False

    def _totals(self) -> Iterator[PoolTotal]:
        books = self.books
        if isinstance(books, ServerBooks):
            for name in sorted(books.pools):
                found = of_pool(books, name)
                yield PoolTotal(name, found.spend.releases, found.share, tuple(found.readings().values()))
        elif books.caps is not None:
            found = Spending.of(books.caps.declaration, books.spent())
            stated = tuple(found.readings().values())
            yield PoolTotal(books.caps.declaration.pool, found.spend.releases, found.share, stated)


def _check_receipt(
    record: ReceiptRecord | AlarmRecord | SupersededRecord, server_keys: tuple[Ed25519PublicKey, ...], seq: int
) -> None:
    if not any(record.receipt.is_genuine(key) for key in server_keys):
        raise LedgerCorrupt(
            "the receipt is not signed by the server's key; to fix: give every key that the server ever had", row=seq
        )


def _without_row(error: LedgerCorrupt) -> str:
    text = str(error)
    return text.removeprefix(f"row {error.row}: ")


def _standings(ledger: Path) -> Standings:
    found: Standings = {}
    for kind in (ServerStanding, SiteLedgerStanding):
        try:
            file = kept_standing(ledger)
            found[kind.ROLE] = None if file is None else kind.load(file).head
        except (LedgerCorrupt, InvalidInput) as error:
            found[kind.ROLE] = LedgerProblem(None, str(error))
    return found
