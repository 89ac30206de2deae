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

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from fractions import Fraction
from pathlib import Path
from typing import Protocol as StructuralType

import numpy as np
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from numpy.typing import NDArray

from common.canonical import check_hash, rational, sha256_bytes
from common.config import Study
from common.data.dataset import PatientIdentity
from common.errors import InvalidInput, LedgerCorrupt, Refused
from common.ledger.base_ledger import OpenLedger
from common.ledger.chain import Chain, Clock, format_time, utc_now
from common.ledger.keys import create_signing_key, load_signing_key
from common.ledger.receipts import Position, Receipt
from common.ledger.records import (
    DECISIONS,
    PoolDeclaration,
    PoolRecord,
    Spend,
    StudyTerms,
    TeachersRecord,
    check_name,
    parse_body,
)
from common.ledger.rollback_guard import Standing, kept_standing, standing_path
from common.ledger.site_state import SiteBooks
from common.privacy.accounting import Guarantee, guarantee, max_mu_squared
from common.privacy.mechanism import AccountantName, Budget, Protection, QuerySpec
from common.privacy.patient_guarantee import Training, Trainings
from common.privacy.quantise import within
from common.privacy.training import TrainingEvent

MAX_EVIDENCE_BYTES_A_DAY = 64 << 20
"""Of receipts that contradict the record: an honest server's whole line fits, a liar's does not fill the disk."""


class Caps(StructuralType):
    """A site's own limits, as its policy states them."""

    @property
    def budget(self) -> Budget: ...

    @property
    def accountant(self) -> AccountantName: ...

    @property
    def protection(self) -> Protection: ...

    @property
    def queries_per_day(self) -> int: ...


class SiteLedger(OpenLedger[SiteBooks]):
    """A site's ledger file, one for each patient pool. A context manager, closed by ``close``."""

    def __init__(self, chain: Chain) -> None:
        """Use :meth:`open` or :meth:`read`."""
        super().__init__(chain, SiteBooks())

    @classmethod
    def open(
        cls,
        path: Path,
        pool: str,
        *,
        caps: Caps,
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
        check_name(pool, what="pool name")
        key = signing_key or _own_key(path)
        if not path.exists():
            genesis: dict[str, object] = {"site": site or pool}
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
            if not restored and (problem := ledger.forgotten()) is not None:
                raise LedgerCorrupt(f"{problem}; to fix: `consilium site recover --own-ledger`")
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
                self._append("study", {"pool": self.pool, "study": text, "study_id": terms.id})
        return terms.id

    def decide(self, study_id: str, decision: str) -> None:
        """``pause``, ``resume`` or ``withdraw`` (for good) a study; no release already made is recalled by it."""
        if decision not in DECISIONS:
            raise InvalidInput("decision", value=decision, limit=", ".join(DECISIONS))
        with self._writing():
            if self._books.paused.get(study_id) == "withdraw":
                raise InvalidInput("decision", value=decision, limit="none: the site withdrew for good")
            if study_id not in self._books.studies:
                raise InvalidInput("study", value=study_id, limit="a study this site consented to")
            self._append("decision", {"decision": decision, "study": study_id})

    def withdraw_patient(self, *, slot: int, voter: int, subject: str, weights: str | None) -> None:
        """Put on record that the patient in ``slot`` left; ``weights`` (SHA-256) are those of the voter's teacher.

        ``subject`` is a keyed hash of the case's name: the ledger never holds the name. The same subject again adds no
        row. Every code stored before is deleted with it: it may hold the patient's vote. Releases already made stay
        made and charged: nothing can recall them.
        """
        with self._writing():
            if subject not in self._books.patients:
                self._append("patient", {"slot": slot, "subject": subject, "voter": voter, "weights": weights or ""})
                self._chain.drop_payloads(before=self._books.last_withdrawal)
        self._chain.settle()

    def _drop_withdrawn_codes(self) -> None:
        """Delete what a version that did not delete with the withdrawal left; no such code is given out anyway."""
        if self._chain.has_payload(before=self._books.last_withdrawal):
            with self._writing():
                self._chain.drop_payloads(before=self._books.last_withdrawal)
            self._chain.settle()

    def record_training(
        self, training_id: str, *, voter: int, deal: str, strategy: str, event: TrainingEvent | None
    ) -> bool:
        """Charge a voter's training before its first step; a training known by its id adds no row and gives False.

        ``event`` is all the training may spend, None for one without a guarantee of its own.
        """
        with self._writing():
            if training_id in self._books.trainings:
                return False
            events = [] if event is None else [event.to_json()]
            body: dict[str, object] = {"deal": deal, "events": events, "strategy": strategy}
            self._append("training", {**body, "training": training_id, "voter": voter})
        return True

    def record_trained(self, training_id: str, served: str) -> None:
        """Put on record that a training came to its end and made the teacher of this hash; known already: no row.

        InvalidInput for a training that was never recorded: what nobody put on record has no event to count.
        """
        check_hash(served)
        with self._writing():
            if training_id not in self._books.trainings:
                raise InvalidInput("training", value=training_id[:12], limit="one on record since it began")
            if (training_id, served) not in self._books.trained:
                _, training = self._books.trainings[training_id]
                self._append("trained", {"served": served, "training": training_id, "voter": training.voter})

    def state_teachers(self, served: Sequence[str]) -> str:
        """Put on record what a worker loaded: each voter's hash, empty for none; the digest that codes name it by.

        The training behind each is looked up here, by content. What the newest such row says already adds no row.
        """
        with self._writing():
            books = self._books
            voters = [[hash_, books.training_of(voter, hash_) if hash_ else ""] for voter, hash_ in enumerate(served)]
            record = TeachersRecord(tuple((hash_, training) for hash_, training in voters))
            if record != books.newest_teachers:
                self._append("teachers", {"voters": voters})
        return record.digest

    def teachers(self) -> TeachersRecord | None:
        """What the newest worker loaded, None before the first."""
        self._catch_up()
        return self._books.newest_teachers

    def take_sealing_key(self, sealing_key: str, *, replaces: str) -> None:
        """Put on record that codes of what was accepted for the key ``replaces`` may be sealed to this one from now on.

        The caller has checked the server's signature. Known already: no row.
        """
        with self._writing():
            if sealing_key not in self._books.sealing_keys.get(replaces, ()):
                self._append("sealing-key", {"replaces": replaces, "sealing_key": sealing_key})

    def state_identity(self, identity: PatientIdentity) -> None:
        """Put on record what counts as one patient from now on; what holds already adds no row."""
        with self._writing():
            known = self._books.identities
            if not known or known[-1][1].identity is not identity:
                self._append("identity", {"identity": str(identity)})

    def has_training(self, training_id: str) -> bool:
        """Whether this very training is charged."""
        self._catch_up()
        return training_id in self._books.trainings

    def trainings(self) -> Trainings:
        """Every training on record, whether a code was computed with its teacher, and whether that is known of all."""
        self._catch_up()
        served = self._books.served_trainings
        return Trainings(
            tuple(
                Training(
                    voter=record.voter,
                    deal=record.deal,
                    strategy=record.strategy,
                    event=record.event,
                    served=training_id in served,
                )
                for training_id, (_, record) in self._books.trainings.items()
            ),
            every_code_traced=bool(self._books.computed_with) and "" not in served,
        )

    def withdrawn_weights(self) -> frozenset[tuple[int, str]]:
        """(voter, SHA-256 of its weights) of every teacher that a withdrawn patient was in: they never vote again."""
        self._catch_up()
        return frozenset((record.voter, record.weights) for _, record in self._books.patients.values())

    def withdrawn_voters(self, *, after: int = 0) -> frozenset[int]:
        """The voters who lost a patient in a row past ``after``: models loaded before must not vote any more."""
        self._catch_up()
        return frozenset(record.voter for seq, record in self._books.patients.values() if seq > after)

    def stopped(self, study_id: str) -> str | None:
        """Why nothing may leave for this study now: ``unknown-study``, ``pause``, ``withdraw`` or ``alarm``; or None.

        Reads what other processes have decided since, so a veto holds for a worker that is running.
        """
        self._catch_up()
        if study_id not in self._books.studies:
            return "unknown-study"
        return self._books.paused.get(study_id) or ("alarm" if self._books.alarms else None)

    def study_named(self, name: str) -> StudyTerms:
        """The one study on record of this id, beginning of an id, or name; InvalidInput if there is none or several."""
        self._catch_up()
        studies = self._books.studies
        found = [studies[name]] if name in studies else [t for t in studies.values() if t.name == name]
        if not found and len(name) >= 6:
            found = [terms for terms in studies.values() if terms.id.startswith(name)]
        if len(found) != 1:
            known = ", ".join(f"{terms.name} ({terms.id[:12]})" for terms in studies.values()) or "none yet"
            raise InvalidInput("study", value=name, limit=f"one study consented to: {known}")
        return found[0]

    def note(self, text: str) -> None:
        """Put a remark on record. Not a place for patients' data."""
        with self._writing():
            self._append("note", {"text": text})

    # --- accepting and answering

    def reserve(self, study_id: str, queries: Sequence[QuerySpec], *, ledger: str = "", sealing_key: str = "") -> None:
        """Accept a batch as a whole: charge every query of it that was not accepted before, or none.

        ``ledger`` is the server ledger's id in the offer, ``sealing_key`` the server's key (hex) that the codes are to
        be sealed to: both go on record, and the codes to nobody else. Empty, they are not compared.

        Refused with a word fit to leave the site, after a refusal row: ``unknown-study`` (also for a query that was
        accepted for another study or server), ``paused`` (a veto, or an alarm, or a query that a receipt shows as
        released), ``wrong-mechanism`` (other voters than the study says), ``budget``, ``daily-cap``. What was
        accepted stays accepted, and costs nothing when it is offered again; but a released query is never asked for by
        a server that still has its ledger. After :meth:`recover` it is accepted and charged as a new one, since its
        answer will be drawn anew.
        """
        with self._writing():
            refusal = self._reserve(study_id, queries, ledger=ledger, sealing_key=sealing_key)
        if refusal is not None:  # raised outside: the refusal row is committed
            raise refusal

    def _reserve(self, study_id: str, queries: Sequence[QuerySpec], *, ledger: str, sealing_key: str) -> Refused | None:
        books = self._books
        study = books.studies.get(study_id)
        if study is None:
            return Refused("unknown-study", "this site has not consented to that study")
        new = {q.id: q for q in queries if q.id not in books.reservations or q.id in books.reopened}
        if study_id in books.paused:
            return self._refuse(study_id, new, "paused", word="paused")
        if books.alarms:
            return self._refuse(study_id, new, "alarm", word="paused")
        again = {q.id: q for q in queries if books.is_settled(q.id)}
        if again:
            return self._refuse(study_id, again, "released-before", word="paused")
        asker = {"study_id": study_id, "ledger": ledger, "sealing_key": sealing_key}
        known = [books.reservations[query.id] for query in queries if query.id in books.reservations]
        if not all(books.is_for(reservation, **asker) for reservation in known):
            return Refused("unknown-study", "a query of the batch was accepted for another study or server")
        mechanisms = [
            query.mechanism
            for query_id, query in new.items()
            if not books.is_prepaid(query_id, query.mechanism, study_id=study_id)
        ]
        if any(query.mechanism.voters_per_site != study.voters_per_site for query in new.values()):
            return Refused("wrong-mechanism", "a query asks for other voters than the study says")
        short = books.shortfall(mechanisms, study_id=study_id)
        if short is not None:
            amounts = rational(short.requested), rational(short.remaining)
            return self._refuse(study_id, new, short.reason, word="budget", amounts=amounts)
        if books.per_day.get(self._chain.today, 0) + len(mechanisms) > (books.declared.queries_per_day or 0):
            return self._refuse(study_id, new, "daily-cap", word="daily-cap")
        for query_id, query in new.items():
            body: dict[str, object] = {
                "ledger": ledger,
                "pool": self.pool,
                "query": query.to_json(),
                "query_id": query_id,
                "sealing_key": sealing_key,
                "study": study_id,
            }
            self._append("reservation", body)
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
        body: dict[str, object] = {
            "batch": "offer",
            "pool": self.pool,
            "query_ids": list(queries),
            "reason": reason,
            "remaining": amounts[1],
            "requested": amounts[0],
            "study": study_id,
        }
        books = self._books
        said = (study_id, reason, self._chain.today) in books.refusals  # once a day, whichever the queries
        again = reason == "released-before" and any(
            books.receipted[query] not in books.asked_again for query in queries
        )
        if again or not said:
            self._append("refusal", body)
        return Refused(word, f"the site's ledger declines {len(queries)} queries ({reason})")

    def reserved(self, query_id: str) -> QuerySpec | None:
        """The query accepted under this id, or None."""
        check_hash(query_id)
        self._catch_up()
        reservation = self._books.reservations.get(query_id)
        return None if reservation is None else reservation.query

    def accepted(self, query_id: str, *, study_id: str, ledger: str, sealing_key: str) -> QuerySpec:
        """The query accepted under this id, for whoever asks for its code now: a study, and the server by its ledger's
        id and its sealing key.

        Refused (``not-accepted``) unless it was accepted for just these, or for a sealing key that the server has
        announced this one in the place of; and (``released-before``) if receipts show every release that was paid for.
        An acceptance of before ledger and key were recorded is held to its study alone.
        """
        check_hash(query_id)
        self._catch_up()
        reservation = self._books.reservations.get(query_id)
        if reservation is None or not self._books.is_for(
            reservation, study_id=study_id, ledger=ledger, sealing_key=sealing_key
        ):
            raise Refused("not-accepted", f"query {query_id[:12]} was never accepted here for who asks")
        if not self._books.awaits_release(query_id):
            raise Refused("released-before", f"query {query_id[:12]} was released, as its receipt shows")
        return reservation.query

    def store_code(
        self,
        query_id: str,
        code: NDArray[np.int64],
        *,
        outcome: str = "stored",
        teachers: str = "",
        computed_at: int | None = None,
    ) -> bool:
        """Fix the code that answers an accepted query, before it leaves. # the code is sensitive until noised

        The same code again adds nothing; another one for the same query is refused unless a patient was withdrawn
        since, and so is a code that is not int64[l] within the norm m·R, or of a query never accepted. ``outcome`` is
        the site's own word for how it came about (a zero code's reason, say); it never leaves the site. ``teachers`` is
        what :meth:`state_teachers` gave; empty: nobody can say which they were.

        ``computed_at`` is the row count when its computation began. False, with nothing kept, if a patient was
        withdrawn after it: the code may hold that patient's vote.
        """
        check_hash(query_id)
        check_name(outcome, what="outcome")
        with self._writing():
            reservation = self._books.reservations.get(query_id)
            if reservation is None:
                raise Refused("not-accepted", f"query {query_id[:12]} was never accepted here")
            mechanism = reservation.query.mechanism
            if not isinstance(code, np.ndarray) or code.dtype != np.int64 or code.shape != (mechanism.dimension,):
                raise InvalidInput("code", value=type(code).__name__, limit=f"int64[{mechanism.dimension}]")
            if not within(code, bound_int=mechanism.site_radius_int):
                raise InvalidInput("norm of a code", limit=f"{mechanism.site_radius_int} grid steps, m·R")
            if computed_at is not None and self._books.last_withdrawal > computed_at:
                return False
            data = code.astype("<i8").tobytes()
            if self._books.code_stands(query_id):
                if self._books.codes[query_id][1].code_sha256 != sha256_bytes(data):
                    raise InvalidInput(f"code of query {query_id[:12]}", limit="the one already stored")
                return True
            body: dict[str, object] = {
                "code_sha256": sha256_bytes(data),
                "dimension": mechanism.dimension,
                "outcome": outcome,
                "query_id": query_id,
                "teachers": teachers,
            }
            self._append("code", body, payload=(query_id, data))
        return True

    def code(self, query_id: str) -> NDArray[np.int64] | None:
        """The stored code (read-only int64[l]) of a query; None if there is none of after the last withdrawal of a
        patient. # sensitive until noised"""
        check_hash(query_id)
        self._catch_up()
        if not self._books.code_stands(query_id):
            return None
        seq, record = self._books.codes[query_id]
        found = self._chain.payload(query_id)
        if found is None or found[0] != seq or sha256_bytes(found[1]) != record.code_sha256:
            raise LedgerCorrupt("the stored code is not the one on record", row=seq)
        code = np.frombuffer(found[1], dtype="<i8").astype(np.int64)
        code.flags.writeable = False
        return code

    # --- receipts

    def record_receipt(self, receipt: Receipt, *, public_key: Ed25519PublicKey) -> None:
        """Check a server's receipt against everything on record here, and keep it.

        InvalidInput if the server's key did not sign it (no row: anyone could send that). LedgerCorrupt if it is signed
        and contradicts the record: the receipt is kept as evidence, once, and nothing is accepted until
        :meth:`recover`; after it the same receipt is Refused (``receipt-superseded``). While an alarm stands, further
        evidence is kept up to :data:`MAX_EVIDENCE_BYTES_A_DAY`. Refused (``receipt-gap``) if receipts before it are
        missing. A receipt already recorded changes nothing.
        """
        if not receipt.is_genuine(public_key):
            raise InvalidInput("receipt", limit="signed by the server's key", remedy="ask the consortium for its key")
        problem: LedgerCorrupt | Refused | None = None
        with self._writing():
            books = self._books
            if books.heads.get((receipt.ledger_id, receipt.head.seq)) == receipt.head.hash:
                return
            known = books.alarm_heads.get((receipt.ledger_id, receipt.head.seq, receipt.head.hash))
            if known is not None and receipt.ledger_id in books.alarms:
                raise LedgerCorrupt(known)
            if known is not None:
                raise Refused("receipt-superseded", "a person has ended the alarm this receipt raised")
            try:
                books.check_receipt(receipt)
            except LedgerCorrupt as error:
                problem = error
                if not books.alarms or self._has_room_for_evidence(receipt):
                    self._append("alarm", {"problem": str(error), "receipt": receipt.to_json()})
            except Refused as error:
                if error.reason != "receipt-superseded":
                    raise
                problem = error
                if self._has_room_for_evidence(receipt):
                    self._append("superseded", {"receipt": receipt.to_json()})
            else:
                self._append("receipt", {"receipt": receipt.to_json()})
        if problem is not None:
            raise problem

    def _has_room_for_evidence(self, receipt: Receipt) -> bool:
        """Whether one more contradiction is kept today: whoever can sign could fill the disk with them."""
        kept, size = self._books.evidence.get(self._chain.today, 0), len(receipt.render())
        return kept + size <= MAX_EVIDENCE_BYTES_A_DAY

    def recover(self, ledger_id: str) -> None:
        """End an alarm: the server's ledger may go on from where it was restored, if it still owns every charge.

        Queries of that ledger that receipts show as released may be asked for again, and are charged again.
        """
        with self._writing():
            self._append("recovery", {"ledger_id": ledger_id})

    # --- restored from an older copy

    def forgotten(self) -> str | None:
        """What shows that this file is an older copy than the one that charged last on this machine; None if nothing.

        The standing beside the file tells. Where it was rolled back together with the file, the server's next receipt
        does: it charges queries that the copy never accepted, and is an alarm.
        """
        path = kept_standing(self._chain.path)
        if path is None:
            return None
        head = Standing.load(path).head
        self._catch_up()
        if head.ledger_id != self._books.key.ledger_id:
            return f"the standing kept beside it is of another ledger, {head.ledger_id}"
        found = self._chain.rows_between(head.seq - 1, head.seq)
        if found and found[0].hash == head.hash:
            return None
        return (
            f"this ledger ends at row {self._books.row_count} and had charged in row {head.seq} before: an older copy "
            "was put in its place"
        )

    def charge_lost(self, standing: Standing | None) -> Spend:
        """After an older copy was restored: charge what it forgot, pause every study, and return the sum.

        With the lost file's last standing that is exactly what it had spent beyond this copy. Without one nobody can
        know, and everything that the pool's cap and each study's budget have left counts as spent. Receipts that the
        server sends for lost acceptances are then taken as part of that sum, up to it; one beyond it is an alarm. A
        query the standing knows as accepted without a receipt is part of the sum too when it is offered again. The
        alarms standing are ended. InvalidInput for a standing of another ledger, one that names a study unknown here,
        and one that this ledger contains: then nothing was lost.
        """
        with self._writing():
            books = self._books
            studies = {}
            if standing is None:
                pool = Spend(max(books.limit - books.spent().mu_squared, Fraction(0)))
                for terms in books.studies.values():
                    allowed = max_mu_squared(terms.accountant, terms.budget)
                    studies[terms.id] = Spend(max(allowed - books.spent_in(terms.id).mu_squared, Fraction(0)))
                queries = books.declared.queries_per_day or 0
            else:
                self._check_standing(standing)
                pool = standing.pool.beyond(books.spent())
                studies = {study: spend.beyond(books.spent_in(study)) for study, spend in standing.studies.items()}
                same_day = standing.day == self._chain.today
                queries = max(standing.queries - books.per_day.get(standing.day, 0), 0) if same_day else 0
            pending = () if standing is None else standing.pending
            body: dict[str, object] = {
                "pending": [query for query in pending if query not in books.reservations],
                "kept_row": 0 if standing is None else standing.head.seq,
                "pool": pool.to_json(),
                "queries": queries,
                "studies": {study: spend.to_json() for study, spend in studies.items()},
            }
            self._append("restored", body)
        return pool

    def _check_standing(self, standing: Standing) -> None:
        head = standing.head
        if head.ledger_id != self._books.key.ledger_id:
            raise InvalidInput("standing", value=head.ledger_id, limit=f"of this ledger, {self._books.key.ledger_id}")
        found = self._chain.rows_between(head.seq - 1, head.seq)
        if found and found[0].hash == head.hash:
            raise InvalidInput("standing", value=f"row {head.seq}", limit="a row that this copy of the ledger lost")
        unknown = sorted(standing.studies.keys() - self._books.studies.keys())
        if unknown:
            raise InvalidInput(
                "studies of the standing", value=unknown, remedy="put the study's file in the site's directory first"
            )

    def _keep_standing(self) -> None:
        with self._chain.transaction():  # the writer's place, so that no earlier standing replaces a later one
            self._catch_up()
            books, day = self._books, self._chain.today
            Standing(
                head=self._chain.head(),
                pool=books.spent(),
                studies={study: books.spent_in(study) for study in books.studies},
                day=day,
                queries=books.per_day.get(day, 0),
                pending=tuple(query for query in books.reservations if query not in books.receipted),
            ).save(standing_path(self._chain.path))

    def alarms(self) -> tuple[str, ...]:
        """What contradicts the record, one line for each server ledger concerned; empty when all is well.

        A signed contradiction stops every answer. A released query that is asked for again is declined, and shows here
        too: a restored server looks like that before it has signed anything.
        """
        self._catch_up()
        contradicted = (alarm.problem for alarm in self._books.alarms.values())
        asked = (
            f"row {row}: queries were asked for again that ledger {ledger} released by its own receipts: it was rolled "
            "back, or an old message arrived late"
            for ledger, row in self._books.asked_again.items()
            if ledger not in self._books.alarms
        )
        forgotten = self.forgotten()
        return (*(() if forgotten is None else (forgotten,)), *contradicted, *asked)

    def alarmed_ledgers(self) -> tuple[str, ...]:
        """Ids of the server ledgers that :meth:`alarms` speaks of."""
        self._catch_up()
        return tuple({**self._books.alarms, **self._books.asked_again})

    def held(self, ledger_id: str) -> Position:
        """The newest head of a server's ledger this site holds a receipt for; (0, zeros) for none, and after a
        recovery, when the rows of the restored ledger mean nothing yet."""
        self._catch_up()
        known = self._books.known.get(ledger_id)
        return Position() if known is None or known.recovering else known.position

    def server_heads(self) -> dict[str, tuple[int, str]]:
        """By server ledger id: row and hash of the newest head this site holds a receipt for."""
        self._catch_up()
        known = self._books.known
        return {ledger_id: (known[ledger_id].position.seq, known[ledger_id].position.hash) for ledger_id in known}

    def receipts(self, *, evidence: bool = False) -> tuple[Receipt, ...]:
        """Every receipt on record, in order: what the server charged by its own hand.

        With ``evidence`` also those that contradicted the record: a recovery needs them, since they charge too.
        """
        self._catch_up()
        kinds = ("receipt", "alarm", "superseded") if evidence else ("receipt",)
        rows = (row for row in self._chain.all_rows() if row.kind in kinds)
        return tuple(Receipt.from_json(parse_body(row.body)["receipt"]) for row in rows)

    # --- reading

    @property
    def pool(self) -> str:
        """The pool this ledger belongs to, for life."""
        return self._books.declared.declaration.pool

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

    def summary(self) -> dict[str, object]:
        """Plain facts for a person or a machine; JSON-ready."""
        spent, books = self.spent(), self._books
        declared = books.declared.declaration
        today = format_time(self._chain.clock())[:10]
        return {
            "pool": self.pool,
            "spent": {name.value: g.to_json() for name, g in self.guarantees().items()},
            "cap": {"accountant": str(declared.accountant), **_budget(declared.budget)},
            "share_spent": float(spent.mu_squared / books.limit),
            "queries_accepted": len(books.reservations),
            "queries_today": books.per_day.get(today, 0),
            "queries_per_day": books.declared.queries_per_day or 0,
            "codes_stored": sum(books.code_stands(query_id) for query_id in books.codes),
            "receipted": len(books.receipted),
            "released_again": books.released_again,
            "patients_withdrawn": len(books.patients),
            "patient_identity": [
                {"row": seq, "identity": str(record.identity), "sentence": record.identity.sentence}
                for seq, record in books.identities
            ],
            "restored": len(books.restored_at),
            "trainings": {
                **self.trainings().to_json(delta=declared.budget.delta),
                "covers_every_release": self.trainings().covers_every_release,
            },
            "refusals": books.refused,
            "studies": [
                {"id": terms.id, "name": terms.name, "state": self._state(terms.id)} for terms in books.studies.values()
            ],
            "alarms": list(self.alarms()),
        }

    # --- helpers

    def _state(self, study_id: str) -> str:
        """``pause``, ``withdraw``, ``spent`` (no room for one more query like the last) or ``open``."""
        books = self._books
        if study_id in books.paused:
            return books.paused[study_id]
        newest = next((r.query for r in reversed(books.reservations.values()) if r.study_id == study_id), None)
        return "spent" if newest and books.shortfall([newest.mechanism], study_id=study_id) else "open"

    def _declare(self, pool: str, site: str, caps: Caps) -> None:
        declaration = PoolDeclaration(
            pool=pool, site=site, budget=caps.budget, accountant=caps.accountant, protection=caps.protection
        )
        record = PoolRecord(declaration=declaration, queries_per_day=caps.queries_per_day)
        if self._books.caps == record:
            return
        self._books.check_caps(record)
        with self._writing():
            body: dict[str, object] = {"declaration": declaration.to_json(), "queries_per_day": caps.queries_per_day}
            self._append("pool", body)

    def _append(self, kind: str, body: dict[str, object], *, payload: tuple[str, bytes] | None = None) -> None:
        self._books.enter(self._chain.append(kind, body, payload=payload))

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """One write transaction; on any exception nothing is kept and the totals are read from the file again.

        If it charged something, the standing follows it.
        """
        try:
            with self._chain.transaction():
                self._catch_up()
                before = self._books.spent(), len(self._books.restored_at)
                yield
        except BaseException:
            self._books = SiteBooks()
            self._chain.forget()
            self._catch_up()
            raise
        if (self._books.spent(), len(self._books.restored_at)) != before:
            self._keep_standing()


def _own_key(path: Path) -> Ed25519PrivateKey:
    key_path = path.with_suffix(".key")
    if key_path.exists() or path.exists():
        return load_signing_key(key_path)
    return create_signing_key(key_path)


def _budget(budget: Budget) -> dict[str, float]:
    return {"epsilon": budget.epsilon, "delta": budget.delta}
