"""Keeps the hospital's own ledger: what it accepted, sent and refused, and the receipts it holds.

The worker, the site's commands and the audits open it. Rules:

1. A query is charged here when the site accepts it. The charge is computed from the query's own mechanism, never taken
   from the server, and it stays even if no release follows.
2. A code is stored before it leaves, and every retry sends the stored code.
3. Acceptance is refused beyond the pool's lifetime cap, the study's budget or the daily cap; for a study not consented
   to, paused or withdrawn; and after a receipt that contradicts the record.

The file contains codes, which are sensitive, so only its owner can read the file and the signing key beside it. The
file contains no name, image or label of a patient. Withdrawing a patient deletes every code stored before; a code that
is requested again is computed without that patient's voter. An instance is not thread-safe: threads that share one need
a lock.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from fractions import Fraction
from math import inf
from pathlib import Path
from typing import Protocol as StructuralType

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from client.ledger.site_codes import KeepsCodes
from client.ledger.site_receipts import KeepsReceipts
from client.ledger.site_sealed import KeepsSealed
from client.ledger.site_teachers import KeepsTeachers
from common.canonical import check_hash, rational
from common.clock import Clock, utc_now
from common.config import Study
from common.errors import ASK_OPERATOR, InvalidInput, LedgerCorrupt, Refused
from common.ledger.chain import Chain
from common.ledger.charges import PoolDeclaration, Spend, StudyTerms, check_ledger_name
from common.ledger.keys import create_signing_key, load_signing_key
from common.ledger.records import (
    DECISIONS,
    CapsRecord,
    ConsentRecord,
    DecisionRecord,
    NoteRecord,
    ReceiptRecord,
    RefusalRecord,
    ReservationRecord,
    SealingKeyRecord,
    parse_record,
)
from common.ledger.reservations import Reservation
from common.ledger.rollback_guard import kept_standing
from common.ledger.rows import format_time
from common.ledger.spending import BudgetTerms
from common.privacy.accounting import MAX_EPSILON, max_mu_squared
from common.privacy.figures import delta_text, epsilon_text
from common.privacy.mechanism import QuerySpec
from common.site_facts import SiteFacts, site_facts
from common.wording import many


class CapsTerms(BudgetTerms, StructuralType):
    """A site's own limits, from its policy."""

    @property
    def queries_per_day(self) -> int: ...


class SiteLedger(KeepsCodes, KeepsReceipts, KeepsSealed, KeepsTeachers):
    """A site's ledger file, one for each patient pool.

    Use :meth:`open` to write and :meth:`read` to read. Instances are context managers.
    """

    @classmethod
    def open(
        cls,
        path: Path,
        pool: str,
        *,
        caps: CapsTerms,
        site: str | None = None,
        signing_key: Ed25519PrivateKey | None = None,
        clock: Clock = utc_now,
        restored: bool = False,
    ) -> SiteLedger:
        """Open a pool's ledger for writing. Create the ledger if it does not exist. Record the caps if they changed.

        Args:
            path: The ledger file.
            pool: Name of the patient pool.
            caps: The site's limits.
            site: The site's name in the pool's declaration; by default the pool's name.
            signing_key: The key that signs rows; by default the one beside the file (``site-ledger.key``), which
                is created with a new ledger.
            clock: Source of the rows' time stamps.
            restored: True to open the ledger although it is an older copy, which is refused otherwise. The caller must
                call :meth:`charge_lost` next.

        Returns:
            The open ledger.

        Raises:
            InvalidInput: If the file belongs to another pool; if the caps' budget is too small for any release, or too
                large to protect anybody; if the pool's unit of privacy or neighbouring relation
                changed; if ``caps`` are earlier caps, which tighter ones replaced since; or if ledger and standing are
                missing although the ledger's signing key exists.
            LedgerCorrupt: If a row breaks the hash chain or another rule for rows; if the file is missing although its
                standing (the small file beside it that records the newest row) exists; or if the file lacks rows that
                the standing records and ``restored`` is False.
        """
        check_ledger_name(pool, what="pool name")
        max_mu_squared(caps.accountant, caps.budget)  # refuse bad caps before they become a row for good
        if not path.exists():
            genesis: dict[str, object] = {"site": site or pool, "standing": 1}
            if kept_standing(path) is not None:
                raise LedgerCorrupt(
                    f"the site ledger {path} is missing, but its standing exists (the small file beside it); to fix: "
                    "put the newest copy of the ledger in its place, then `consilium site recover --own-ledger`"
                )
            key = signing_key or new_site_key(path)
            Chain.create(path, role="site", genesis=genesis, signing_key=key, clock=clock).close()
        chain = Chain.open(path, role="site", signing_key=signing_key or _own_key(path), clock=clock)
        ledger = cls(chain)
        try:
            ledger._restoring = restored
            if not restored:
                if (problem := ledger.forgotten()) is not None:
                    raise LedgerCorrupt(f"{problem}; to fix: `consilium site recover --own-ledger`")
                ledger._make_good_standing()
            ledger._declare(pool, site or pool, caps)
            ledger._drop_withdrawn_codes()
        except BaseException:
            ledger.close()
            raise
        return ledger

    @classmethod
    def read(cls, path: Path) -> SiteLedger:
        """Open an existing ledger for reading.

        Args:
            path: The ledger file.

        Returns:
            The ledger; it cannot write.

        Raises:
            LedgerCorrupt: If a row breaks the hash chain or a rule.
        """
        return cls(Chain.open(path, role="site", signing_key=None, clock=utc_now))

    # --- consent and veto

    def consent(self, study: Study) -> str:
        """Record the site's consent to a study. A study consented to before adds no row.

        Args:
            study: The study.

        Returns:
            The study's id.
        """
        with self._writing():
            if study.id not in self._books.studies:
                self._append(ConsentRecord(study.to_json(), study.id, self.pool))
        return study.id

    def has_consent(self, study_id: str) -> bool:
        """Return whether this hospital has consented to a study. A later pause or withdrawal changes nothing here.

        The consent is a ``note`` row that names a person. That the study is on record proves no consent, because a
        recovery also records studies. Release 0.2.0 wrote no note, so a study of which this site has accepted a query
        counts as consented too.

        Args:
            study_id: The study's id.

        Returns:
            True if the study is on record and the hospital consented to it.
        """
        if study_id not in self.books.studies:
            return False
        answered = self._books.reservations.newest_in(study_id) is not None
        return answered or any(study == study_id for study, _, _ in self._consents_by_name())

    def decide(self, study_id: str, decision: str) -> None:
        """Pause, resume or withdraw from a study. This does not undo releases that were made already.

        Args:
            study_id: Id of a study this site consented to.
            decision: ``pause``, ``resume``, or ``withdraw``, which is final.

        Raises:
            InvalidInput: For another decision, an unknown study, or a study that was withdrawn from.
        """
        if decision not in DECISIONS:
            raise InvalidInput("decision", value=decision, limit=", ".join(DECISIONS))
        with self._writing():
            if self._books.paused.get(study_id) == "withdraw":
                raise InvalidInput(
                    "decision about a study from which this site has withdrawn for good",
                    value=decision,
                    limit="none, because a withdrawal cannot be undone",
                    remedy="join another study with `consilium site join`",
                )
            if study_id not in self._books.studies:
                consented = ", ".join(sorted(self._books.studies)) or "none, because this site consented to no study"
                raise InvalidInput("study", value=study_id, limit=f"a study that this site consented to: {consented}")
            self._append(DecisionRecord(study_id, decision))

    def take_sealing_key(self, sealing_key: str, *, replaces: str) -> None:
        """Record that the server's new sealing key replaces an older one.

        Codes of queries accepted for the older key may be sealed to the new one from now on. The caller has checked the
        server's signature. No row is added if the key is on record.

        Args:
            sealing_key: The new key, hex.
            replaces: The older key, hex.
        """
        with self._writing():
            if sealing_key not in self._books.sealing_keys.get(replaces, ()):
                self._append(SealingKeyRecord(sealing_key, replaces))

    def check_sealing_key(self, sealing_key: str) -> None:
        """Refuse a sealing key that the server's signed notice has replaced.

        Somebody who has stolen the replaced key could decrypt every code that is sealed to it.

        Args:
            sealing_key: The key in ``site.toml``, hex.

        Raises:
            InvalidInput: If the key was replaced, so that ``site.toml`` is older than the notice.
        """
        self._catch_up()
        if newer := sorted(self._books.sealing_keys.get(sealing_key, ())):
            raise InvalidInput(
                "server.sealing_key in site.toml, which the server has replaced",
                value=sealing_key,
                limit=", ".join(newer),
                remedy="put the newest site.toml back, or run `consilium site take-sealing-key` with the server's "
                "notice again",
            )

    def stopped(self, study_id: str) -> str | None:
        """Return the reason why this site must not answer a study now.

        The file is read again at each call, so a pause by another process stops a running worker.

        Args:
            study_id: Id of the study.

        Returns:
            ``unknown-study``, ``pause``, ``withdraw`` or ``alarm``; None if the study may be answered.
        """
        if study_id not in self.books.studies:
            return "unknown-study"
        return self._books.paused.get(study_id) or ("alarm" if self._books.alarms else None)

    def study_named(self, name: str) -> StudyTerms:
        """Find one study on record.

        Args:
            name: The study's id, at least six digits of its beginning, or the study's name; empty for the only study.

        Returns:
            The study's terms.

        Raises:
            InvalidInput: If no study or several match.
        """
        studies = self.books.studies
        found = [studies[name]] if name in studies else [t for t in studies.values() if name in ("", t.name)]
        if not found and len(name) >= 6:
            found = [terms for terms in studies.values() if terms.id.startswith(name)]
        if len(found) != 1:
            known = ", ".join(f"{terms.name} ({terms.id[:12]})" for terms in studies.values()) or "none yet"
            raise InvalidInput("study", value=name, limit=f"the name of one study this site consented to: {known}")
        return found[0]

    def note(self, text: str) -> None:
        """Record a remark. It must not contain patient data.

        Args:
            text: The remark.
        """
        with self._writing():
            self._append(NoteRecord(text))

    # --- accepting and answering

    def reserve(
        self,
        study_id: str,
        queries: Sequence[QuerySpec],
        *,
        ledger: str = "",
        sealing_key: str = "",
        draw: int | None = None,
    ) -> None:
        """Accept a batch: charge every query in it that was not accepted before, or refuse the whole batch.

        A query accepted before is not charged again when it is offered again. A query that a receipt shows as released
        is refused, because a server with an intact ledger never asks for it again. After :meth:`recover` it is accepted
        and charged again, since the server will draw new noise for it.

        In a sealed sum each draw, that is each attempt at the sum, is charged. A later draw of the same query is
        accepted even after a receipt; an earlier draw is refused.

        Args:
            study_id: Id of the study.
            queries: The queries of the batch.
            ledger: Id of the server's ledger. Codes are sent for this ledger only; if empty, it is not compared.
            sealing_key: The server's key, in hex, to which the codes will be sealed; if empty, it is not compared.
            draw: Number of the draw in a sealed sum; None otherwise.

        Raises:
            Refused: With one of these reasons, which may leave the site. ``unknown-study``: no consent, or the query
                was accepted for another study or server. ``paused``: a pause, an alarm or a released query.
                ``withdrawn``: the site left the study for good. ``wrong-mechanism``: another number of voters than the
                study states. ``budget``, ``daily-cap``: a limit is reached. ``old-draw``: a later draw was accepted, or
                this draw was accepted before this ledger was restored from an older copy.
        """
        with self._writing():
            refusal = self._reserve(study_id, queries, ledger=ledger, sealing_key=sealing_key, draw=draw)
        if refusal is not None:  # raised outside the transaction, so that the row of the refusal is committed
            raise refusal

    def _reserve(
        self, study_id: str, queries: Sequence[QuerySpec], *, ledger: str, sealing_key: str, draw: int | None
    ) -> Refused | None:
        books = self._books
        study = books.studies.get(study_id)
        if study is None:
            return Refused(
                "unknown-study",
                "this site has not consented to that study; to fix: `consilium site consent`, if staff agree",
            )
        new = {q.id: q for q in queries if books.is_new(q.id, draw)}
        if study_id in books.paused:
            word = "withdrawn" if books.paused[study_id] == "withdraw" else "paused"
            return self._refuse(study_id, new, "paused", word=word)
        if books.alarms:
            return self._refuse(study_id, new, "alarm", word="paused")
        known = [books.reservations[query.id] for query in queries if query.id in books.reservations]
        if draw is not None and any(draw <= (one.draw or 0) and not books.draw_is_current(one, draw) for one in known):
            return Refused(
                "old-draw",
                "a later draw of this query was accepted, or this draw was accepted before the ledger was restored; to "
                "fix: the server begins a new draw with `consilium study resume`",
            )
        again = {q.id: q for q in queries if draw is None and books.is_settled(q.id)}
        if again:
            return self._refuse(study_id, again, "released-before", word="paused")
        asker = {"study_id": study_id, "ledger": ledger, "sealing_key": sealing_key}
        if not all(books.is_for(reservation, **asker) for reservation in known):
            return Refused(
                "unknown-study",
                f"a query of the batch was accepted for another study or server; to fix: {ASK_OPERATOR}",
            )
        mechanisms = [
            query.mechanism
            for query_id, query in new.items()
            if draw is not None or not books.is_prepaid(query_id, query.mechanism, study_id=study_id)
        ]
        if any(query.mechanism.voters_per_site != study.voters_per_site for query in new.values()):
            return Refused(
                "wrong-mechanism",
                f"a query asks for another number of voters than the study states; to fix: {ASK_OPERATOR}",
            )
        short = books.shortfall(mechanisms, study_id=study_id)
        if short is not None:
            amounts = rational(short.requested), rational(short.remaining)
            return self._refuse(study_id, new, short.reason, word="budget", amounts=amounts)
        if books.per_day.get(self._chain.today, 0) + len(mechanisms) > books.declared.queries_per_day:
            return self._refuse(study_id, new, "daily-cap", word="daily-cap")
        for query_id, query in new.items():
            self._append(ReservationRecord(study_id, query, query_id, self.pool, ledger, sealing_key, draw))
        return None

    def refuse(self, study_id: str, queries: Sequence[QuerySpec], reason: str) -> None:
        """Record that the site's policy declined an offer; at most one row for each day and reason.

        Args:
            study_id: Id of the study.
            queries: The declined queries.
            reason: The policy's reason.
        """
        with self._writing():
            self._refuse(study_id, {query.id: query for query in queries}, reason, word=reason)

    def _refuse(
        self,
        study_id: str,
        queries: dict[str, QuerySpec],
        reason: str,
        *,
        word: str,
        amounts: tuple[str, str] = ("", ""),
    ) -> Refused:
        books = self._books
        said = (study_id, reason, self._chain.today) in books.refusals  # one row for each day and reason suffices
        again = reason == "released-before" and any(
            books.reservations.receipted[query] not in books.asked_again for query in queries
        )
        if again or not said:
            self._append(RefusalRecord(study_id, "offer", tuple(queries), reason, self.pool, *amounts))
        return Refused(
            word,
            f"the site's ledger declines {many(len(queries), 'query', 'queries')}; reason: {reason}; to fix: see "
            "`consilium site status`",
        )

    def accepted(
        self, query_id: str, *, study_id: str, ledger: str, sealing_key: str, draw: int | None = None
    ) -> QuerySpec:
        """Return the accepted query for which a server now requests the code.

        Old acceptances, recorded without ledger id and sealing key, are compared by study only.

        Args:
            query_id: Id of the query.
            study_id: Id of the requesting study.
            ledger: Id of the server's ledger.
            sealing_key: The server's sealing key, hex. A key that the server announced as a replacement is accepted
                too.
            draw: Number of the draw in a sealed sum, where only the newest one is answered; None otherwise.

        Returns:
            The query as it was accepted.

        Raises:
            Refused: ``not-accepted`` if it was not accepted for this study, server and draw; ``released-before`` if
                receipts show that every charged release was made.
        """
        check_hash(query_id)
        reservation = self.books.reservations.get(query_id)
        if reservation is None or not self._books.is_for(
            reservation, study_id=study_id, ledger=ledger, sealing_key=sealing_key
        ):
            raise Refused(
                "not-accepted",
                f"query {query_id[:12]} was never accepted at this site for this server; to fix: {ASK_OPERATOR}",
            )
        if draw != reservation.draw or (draw is not None and not self._books.draw_is_current(reservation, draw)):
            raise Refused(
                "not-accepted",
                f"the server requests another draw of query {query_id[:12]} than this site has accepted; to fix: "
                f"{ASK_OPERATOR}",
            )
        if draw is None and not self._books.reservations.awaits_release(query_id):
            raise Refused(
                "released-before",
                f"a receipt shows that query {query_id[:12]} was released already; to fix: {ASK_OPERATOR}",
            )
        return self._query(reservation)

    # --- reading

    def spent(self) -> Spend:
        """Return what the pool has spent according to this ledger: Σμ² and the numbers of releases and coordinates."""
        return self.books.spent()

    def facts(
        self,
        site: str,
        *,
        present: Iterable[Sequence[str]] | None = None,
        adapted_lost: bool = False,
        conflicts: Sequence[str] = (),
        forked: bool = False,
    ) -> SiteFacts:
        """Return every figure of this ledger, for all reports about the site.

        Args:
            site: The site's name.
            present: The teachers present in each directory, as in :meth:`trainings`. None leaves out trainings and
                consents, which take longer to read.
            adapted_lost: As in :meth:`trainings`.
            conflicts: Contradictions with the ledgers of other parties; added to :meth:`alarms`.
            forked: True if one of them is with a server's ledger, which stops every study.

        Returns:
            The figures.
        """
        doubt = self.doubt()
        return site_facts(
            self.books,
            site=site,
            today=format_time(self._chain.clock())[:10],
            doubt=doubt,
            stopped=forked or doubt is not None,
            alarms=(*self.alarms(), *conflicts),
            trainings=None if present is None else self.trainings(present=present, adapted_lost=adapted_lost),
            consents={} if present is None else self._consents(),
        )

    # --- helpers

    def _query(self, reservation: Reservation) -> QuerySpec:
        """Return the query from the row that accepted it, or from the receipt that showed it as accepted."""
        row = self._chain.row(reservation.seq)
        record = parse_record("site", row.kind, row.body)
        if isinstance(record, ReservationRecord):
            found = [record.query]
        elif isinstance(record, ReceiptRecord):
            found = [item.release.query for item in record.receipt.releases]
        else:
            found = []
        try:
            return next(query for query in found if query.id == reservation.query_id)
        except StopIteration:
            raise LedgerCorrupt("this row does not contain the query that it accepted", row=reservation.seq) from None

    def _consents(self) -> dict[str, list[str]]:
        """Return who consented to each study and when, one sentence each."""
        found: dict[str, list[str]] = {}
        for study, when, by in self._consents_by_name():
            found.setdefault(study, []).append(f"{when}: {by}")
        return found

    def _consents_by_name(self) -> Iterator[tuple[str, str, str]]:
        """Yield study, time and person of each consent that a person gave by name."""
        for row in self.rows():
            record = parse_record("site", row.kind, row.body) if row.kind == "note" else None
            if isinstance(record, NoteRecord):
                by, consented, study = record.text.partition(" consented to study ")
                if consented:
                    yield study[:64], f"{row.time_utc[:16].replace('T', ' ')} UTC", by

    def _declare(self, pool: str, site: str, caps: CapsTerms) -> None:
        declaration = PoolDeclaration(
            pool=pool, site=site, budget=caps.budget, accountant=caps.accountant, protection=caps.protection
        )
        record = CapsRecord(declaration, caps.queries_per_day)
        if self._books.caps == record:
            return
        record.check_after(self._books.caps)
        if self._books.caps is not None and record in self._books.earlier_caps:
            _check_not_looser(record, self._books.caps)
        with self._writing():
            self._append(record)


def new_site_key(ledger: Path) -> Ed25519PrivateKey:
    """Return the signing key for a ledger that does not exist yet; create it if needed.

    The key's file is called ``site-ledger.key.new`` until the ledger exists, and is then renamed. A file
    ``site-ledger.key`` therefore shows that there was a ledger. After a crash before the renaming, the next call uses
    the key of ``site-ledger.key.new``.

    Args:
        ledger: File of the new ledger.

    Returns:
        The private key.

    Raises:
        InvalidInput: If ``site-ledger.key`` exists. A new ledger would start with nothing spent.
    """
    if (key := ledger.with_suffix(".key")).exists():
        raise InvalidInput(
            "the site ledger of this patient pool is missing, but its signing key is here",
            value=str(ledger),
            remedy="put back the ledger and its standing (the file site-ledger.standing); if you have only an older "
            "copy, put it there and run `consilium site recover --own-ledger`. Only if this site has never sent a join "
            f"request: delete {key}",
        )
    draft = _key_draft(ledger)
    return load_signing_key(draft) if draft.exists() else create_signing_key(draft)


def _own_key(ledger: Path) -> Ed25519PrivateKey:
    """Return the signing key of an existing ledger; rename its file if a crash left it as ``site-ledger.key.new``."""
    key = ledger.with_suffix(".key")
    if not key.exists():
        with suppress(FileNotFoundError):  # there is no draft, or another process has renamed it
            _key_draft(ledger).replace(key)
    return load_signing_key(key)


def _key_draft(ledger: Path) -> Path:
    return ledger.with_suffix(".key.new")


def _limit(pool: PoolDeclaration) -> Fraction | float:
    """Return the Σμ² that caps allow; infinite above :data:`MAX_EPSILON`, an ε that versions up to 0.2.0 accepted."""
    return inf if pool.budget.epsilon > MAX_EPSILON else max_mu_squared(pool.accountant, pool.budget)


def _check_not_looser(older: CapsRecord, newest: CapsRecord) -> None:
    """Refuse earlier caps that allow more than the newest caps.

    Such caps come from a backup of ``site.toml``. Using them would raise the pool's limits although nobody decided so.
    """
    (was, was_delta, was_per_day), (limit, delta, per_day) = (
        (_limit(caps.declaration), caps.declaration.budget.delta, caps.queries_per_day) for caps in (older, newest)
    )
    if was > limit or was_delta > delta or was_per_day > per_day:
        value, known = (
            f"ε = {epsilon_text(pool.budget.epsilon)}, δ = {delta_text(pool.budget.delta)}, {queries} queries a day"
            for pool, queries in ((caps.declaration, caps.queries_per_day) for caps in (older, newest))
        )
        raise InvalidInput(
            "older caps in site.toml, which this site has replaced by tighter ones",
            value=value,
            limit=f"{known}, the newest on record",
            remedy="put the newest site.toml back; to loosen the caps on purpose, change one value so that they differ "
            "from all earlier caps, for example by one query a day",
        )
