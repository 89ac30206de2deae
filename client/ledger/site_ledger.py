"""The hospital's own ledger: what it accepted, what it sent, what it refused, and the receipts it holds.

It trusts nothing the server says about what was spent: every query is charged here, from its own mechanism, in the
moment the site accepts it, and stays charged whether or not a release follows. A code is stored before it leaves and
the stored one answers every retry. Refuses acceptance past the pool's lifetime cap, the study's budget or the day's
cap, for a study that was not consented to, is paused or withdrawn, and after a receipt that contradicts the record.

The file holds codes, which are sensitive: it and its signing key are readable by their owner only. When a patient is
withdrawn every code stored before is deleted: asked for again it is computed anew, without that patient's voter. It
holds no patient's name, image or label. Threads must take turns by a lock of the caller's.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Protocol as StructuralType

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from client.ledger.site_codes import KeepsCodes
from client.ledger.site_disclosures import KeepsDisclosures
from client.ledger.site_peers import KeepsPeers
from client.ledger.site_receipts import KeepsReceipts
from client.ledger.site_teachers import KeepsTeachers
from common.canonical import check_hash, rational
from common.clock import Clock, utc_now
from common.config import Study
from common.errors import InvalidInput, LedgerCorrupt, Refused
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
from common.privacy.accounting import Guarantee, guarantee
from common.privacy.mechanism import AccountantName, Budget, QuerySpec


class CapsTerms(BudgetTerms, StructuralType):
    """A site's own limits, as its policy states them."""

    @property
    def queries_per_day(self) -> int: ...


class SiteLedger(KeepsCodes, KeepsDisclosures, KeepsPeers, KeepsReceipts, KeepsTeachers):
    """A site's ledger file, one for each patient pool. :meth:`open` or :meth:`read` it; a context manager."""

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
        """Open the ledger of a pool for writing, making it first if there is none; put changed caps on record.

        The signing key lies beside it (``site-ledger.sqlite`` → ``site-ledger.key``) unless one is given. ``site``
        names the site in the pool's declaration (default: the pool's name). InvalidInput if the file is another pool's
        or the pool's unit or relation changed; LedgerCorrupt if any row breaks the chain or a rule, or if the file is
        older than the standing kept beside it, unless ``restored`` says that :meth:`charge_lost` comes next.
        """
        check_ledger_name(pool, what="pool name")
        key = signing_key or _own_key(path)
        if not path.exists():
            genesis: dict[str, object] = {"site": site or pool, "standing": 1}
            if kept_standing(path) is not None:
                raise LedgerCorrupt(
                    f"the site ledger {path} is gone and its standing is still there; to fix: put the newest copy of "
                    "the ledger in its place, then `consilium site recover --own-ledger`"
                )
            chain = Chain.create(path, role="site", genesis=genesis, signing_key=key, clock=clock)
        else:
            chain = Chain.open(path, role="site", signing_key=key, clock=clock)
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
        """Open an existing ledger for reading only."""
        return cls(Chain.open(path, role="site", signing_key=None, clock=utc_now))

    # --- consent and veto

    def consent(self, study: Study) -> str:
        """Put a study this site consents to on record and return its id; a known study adds no row."""
        text = study.to_json()
        terms = StudyTerms.from_json(text)
        with self._writing():
            if terms.id not in self._books.studies:
                self._append(ConsentRecord(text, terms.id, self.pool))
        return terms.id

    def decide(self, study_id: str, decision: str) -> None:
        """``pause``, ``resume`` or ``withdraw`` (for good) a study; no release already made is recalled by it."""
        if decision not in DECISIONS:
            raise InvalidInput("decision", value=decision, limit=", ".join(DECISIONS))
        with self._writing():
            if self._books.paused.get(study_id) == "withdraw":
                raise InvalidInput(
                    "decision", value=decision, limit="no further decision, because the site withdrew for good"
                )
            if study_id not in self._books.studies:
                raise InvalidInput("study", value=study_id, limit="the id of a study this site consented to")
            self._append(DecisionRecord(study_id, decision))

    def take_sealing_key(self, sealing_key: str, *, replaces: str) -> None:
        """Put on record that codes of what was accepted for the key ``replaces`` may be sealed to this one from now on.

        The caller has checked the server's signature. Known already: no row.
        """
        with self._writing():
            if sealing_key not in self._books.sealing_keys.get(replaces, ()):
                self._append(SealingKeyRecord(sealing_key, replaces))

    def stopped(self, study_id: str) -> str | None:
        """Why nothing may leave for this study now: ``unknown-study``, ``pause``, ``withdraw`` or ``alarm``; or None.

        Reads what other processes have decided since, so a veto holds for a worker that is running.
        """
        self._catch_up()
        if study_id not in self._books.studies:
            return "unknown-study"
        return self._books.paused.get(study_id) or ("alarm" if self._books.alarms else None)

    def study_named(self, name: str) -> StudyTerms:
        """The one study on record of this id, beginning of an id, or name; of an empty name the only one.

        InvalidInput if there is none or several.
        """
        self._catch_up()
        studies = self._books.studies
        found = [studies[name]] if name in studies else [t for t in studies.values() if name in ("", t.name)]
        if not found and len(name) >= 6:
            found = [terms for terms in studies.values() if terms.id.startswith(name)]
        if len(found) != 1:
            known = ", ".join(f"{terms.name} ({terms.id[:12]})" for terms in studies.values()) or "none yet"
            raise InvalidInput("study", value=name, limit=f"one study consented to: {known}")
        return found[0]

    def note(self, text: str) -> None:
        """Put a remark on record. Not a place for patients' data."""
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
        """Accept a batch as a whole: charge every query of it that was not accepted before, or none.

        ``ledger`` is the server ledger's id in the offer, ``sealing_key`` the server's key (hex) that the codes are to
        be sealed to: both go on record, and the codes to nobody else. Empty, they are not compared.

        Refused with a word fit to leave the site, after a refusal row: ``unknown-study`` (also for a query that was
        accepted for another study or server), ``paused`` (a veto, or an alarm, or a query that a receipt shows as
        released), ``wrong-mechanism`` (other voters than the study says), ``budget``, ``daily-cap``. What was
        accepted stays accepted, and costs nothing when it is offered again; but a released query is never asked for by
        a server that still has its ledger. After :meth:`recover` it is accepted and charged as a new one, since its
        answer will be drawn anew.

        In a sealed sum a ``draw`` is accepted and charged: a later one of the same query again, an earlier one never
        (``old-draw``). Its receipt comes before its code leaves, so it does not close the query.
        """
        with self._writing():
            refusal = self._reserve(study_id, queries, ledger=ledger, sealing_key=sealing_key, draw=draw)
        if refusal is not None:  # raised outside: the refusal row is committed
            raise refusal

    def _reserve(
        self, study_id: str, queries: Sequence[QuerySpec], *, ledger: str, sealing_key: str, draw: int | None
    ) -> Refused | None:
        books = self._books
        study = books.studies.get(study_id)
        if study is None:
            return Refused("unknown-study", "this site has not consented to that study")
        new = {q.id: q for q in queries if books.is_new(q.id, draw)}
        if study_id in books.paused:
            return self._refuse(study_id, new, "paused", word="paused")
        if books.alarms:
            return self._refuse(study_id, new, "alarm", word="paused")
        known = [books.reservations[query.id] for query in queries if query.id in books.reservations]
        if draw is not None and any(draw <= (one.draw or 0) and not books.draw_stands(one, draw) for one in known):
            return Refused(
                "old-draw",
                "a later draw of this query was accepted, or this draw was accepted before the ledger was restored",
            )
        again = {q.id: q for q in queries if draw is None and books.is_settled(q.id)}
        if again:
            return self._refuse(study_id, again, "released-before", word="paused")
        asker = {"study_id": study_id, "ledger": ledger, "sealing_key": sealing_key}
        if not all(books.is_for(reservation, **asker) for reservation in known):
            return Refused("unknown-study", "a query of the batch was accepted for another study or server")
        mechanisms = [
            query.mechanism
            for query_id, query in new.items()
            if draw is not None or not books.is_prepaid(query_id, query.mechanism, study_id=study_id)
        ]
        if any(query.mechanism.voters_per_site != study.voters_per_site for query in new.values()):
            return Refused("wrong-mechanism", "a query asks for another number of voters than the study states")
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
        """Put on record that the site's policy declined an offer before its ledger was asked; once a day and reason."""
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
        said = (study_id, reason, self._chain.today) in books.refusals  # once a day, whichever the queries
        again = reason == "released-before" and any(
            books.reservations.receipted[query] not in books.asked_again for query in queries
        )
        if again or not said:
            self._append(RefusalRecord(study_id, "offer", tuple(queries), reason, self.pool, *amounts))
        return Refused(word, f"the site's ledger declines {len(queries)} queries ({reason})")

    def accepted(
        self, query_id: str, *, study_id: str, ledger: str, sealing_key: str, draw: int | None = None
    ) -> QuerySpec:
        """The query accepted under this id, for whoever asks for its code now: a study, and the server by its ledger's
        id and its sealing key.

        Refused (``not-accepted``) unless it was accepted for just these, or for a sealing key that the server has
        announced this one in the place of; and (``released-before``) if receipts show every release that was paid for.
        An acceptance of before ledger and key were recorded is held to its study alone. In a sealed sum the newest
        ``draw`` is asked for, and no other.
        """
        check_hash(query_id)
        self._catch_up()
        reservation = self._books.reservations.get(query_id)
        if reservation is None or not self._books.is_for(
            reservation, study_id=study_id, ledger=ledger, sealing_key=sealing_key
        ):
            raise Refused("not-accepted", f"query {query_id[:12]} was never accepted at this site for this server")
        if draw != reservation.draw or (draw is not None and not self._books.draw_stands(reservation, draw)):
            raise Refused("not-accepted", f"the draw asked for of query {query_id[:12]} is not the one accepted")
        if draw is None and not self._books.awaits_release(query_id):
            raise Refused("released-before", f"query {query_id[:12]} was released, as its receipt shows")
        return self._query(reservation)

    # --- reading

    def spent(self, study_id: str | None = None) -> Spend:
        """What the pool has spent in all by the site's own account, or in one study under the study's protection."""
        self._catch_up()
        return self._books.spent() if study_id is None else self._books.spent_in(study_id)

    def guarantees(self) -> dict[AccountantName, Guarantee]:
        """What every accepted query together costs the pool, by every gate accountant, at the pool's own δ."""
        spent, declared = self.spent(), self._books.declared.declaration
        return {
            name: guarantee(spent.mu_squared, declared.budget, declared.protection, name) for name in AccountantName
        }

    def account(self) -> dict[str, object]:
        """What was accepted and spent, ready for JSON. It does not depend on the site's patients.

        ``at_least`` is there only in doubt, and says why more may have been spent (:meth:`doubt`).
        """
        books, declared = self._books, self._books.declared.declaration
        return {
            "pool": self.pool,
            "spent": {name.value: g.to_json() for name, g in self.guarantees().items()},
            **({"at_least": doubt} if (doubt := self.doubt()) is not None else {}),
            "cap": {"accountant": str(declared.accountant), **_budget(declared.budget)},
            "queries_accepted": len(books.reservations),
            "receipted": len(books.reservations.receipted),
            "refusals": books.refused,
            "alarms": list(self.alarms()),
        }

    def summary(self, *, present: Iterable[Sequence[str]] = ()) -> dict[str, object]:
        """Plain facts for a person or a machine; JSON-ready. ``present``: as for :meth:`trainings`.

        They are handed over, so none says whether a patient was withdrawn. ``codes_stored`` are queries with a code.
        """
        spent, books = self.spent(), self._books
        declared = books.declared.declaration
        trainings = self.trainings(present=present)
        today = format_time(self._chain.clock())[:10]
        return {
            **self.account(),
            "share_spent": float(spent.mu_squared / books.limit),
            "queries_today": books.per_day.get(today, 0),
            "queries_per_day": books.declared.queries_per_day,
            "codes_stored": len(books.teachers.codes),  # whether they still stand would tell of a withdrawal
            "released_again": books.released_again,
            "patient_identity": [
                {"row": seq, "identity": str(record.identity), "sentence": record.identity.sentence}
                for seq, record in books.teachers.identities
            ],
            "restored": len(books.restored_at),
            "disclosures": [
                {"draw": one.masks, "auditor": one.auditor, "queries": one.queries, "mu_squared": float(one.mu_squared)}
                for one in books.sealed.disclosed
            ],
            "trainings": {
                **trainings.to_json(delta=declared.budget.delta),
                "covers_every_release": trainings.covers_every_release,
            },
            "studies": [
                {"id": terms.id, "name": terms.name, "state": self._state(terms.id)} for terms in books.studies.values()
            ],
        }

    # --- helpers

    def _query(self, reservation: Reservation) -> QuerySpec:
        """The query as the row says it that accepted it, or the receipt that showed it had been."""
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
            raise LedgerCorrupt("the row is not the one that accepted the query", row=reservation.seq) from None

    def _state(self, study_id: str) -> str:
        """``pause``, ``withdraw``, ``spent`` (no room for one more query like the last) or ``open``."""
        books = self._books
        if study_id in books.paused:
            return books.paused[study_id]
        newest = books.reservations.newest_in(study_id)
        return "spent" if newest and books.shortfall([newest], study_id=study_id) else "open"

    def _declare(self, pool: str, site: str, caps: CapsTerms) -> None:
        declaration = PoolDeclaration(
            pool=pool, site=site, budget=caps.budget, accountant=caps.accountant, protection=caps.protection
        )
        record = CapsRecord(declaration, caps.queries_per_day)
        if self._books.caps == record:
            return
        self._books.check_caps(record)
        with self._writing():
            self._append(record)


def _own_key(path: Path) -> Ed25519PrivateKey:
    key_path = path.with_suffix(".key")
    if key_path.exists() or path.exists():
        return load_signing_key(key_path)
    return create_signing_key(key_path)


def _budget(budget: Budget) -> dict[str, float]:
    return {"epsilon": budget.epsilon, "delta": budget.delta}
