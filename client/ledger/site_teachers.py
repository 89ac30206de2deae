"""A site's teachers on record: what each training may spend, which teachers a worker loaded, and patients who left.

No patient's name is written: a patient is a keyed hash. When one is withdrawn every code stored before is deleted.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from client.ledger.site_file import SiteFile
from common.canonical import check_hash
from common.data.dataset import PatientIdentity
from common.errors import InvalidInput, Refused
from common.ledger.teacher_records import (
    DealRecord,
    DrawnRecord,
    ForeignRecord,
    IdentityRecord,
    PatientRecord,
    TeachersRecord,
    TrainedRecord,
    TrainingRecord,
)
from common.privacy.patient_guarantee import Training, Trainings
from common.privacy.training import TrainingEvent


class KeepsTeachers(SiteFile):
    """The part of a site's ledger that knows whose votes a code holds."""

    def withdraw_patient(
        self, *, slot: int, voter: int, subject: str, weights: str | None, deal: str | None = None
    ) -> None:
        """Put on record that the patient in ``slot`` left; ``weights`` (SHA-256) are those of the voter's teacher.

        ``subject`` is a keyed hash of the case's name: the ledger never holds the name. The same subject again adds no
        row. Every code stored before is deleted with it: it may hold the patient's vote. Releases already made stay
        made and charged: nothing can recall them.
        """
        with self._writing():
            if subject not in self._books.teachers.patients:
                self._append(PatientRecord(slot, voter, subject, weights or "", deal))
                self._chain.drop_payloads(before=self._books.teachers.last_withdrawal)
        self._chain.settle()

    def _drop_withdrawn_codes(self) -> None:
        """Delete what a version that did not delete with the withdrawal left; no such code is given out anyway."""
        if self._chain.has_payload(before=self._books.teachers.last_withdrawal):
            with self._writing():
                self._chain.drop_payloads(before=self._books.teachers.last_withdrawal)
            self._chain.settle()

    def record_training(
        self, training_id: str, *, voter: int, deal: str, strategy: str, event: TrainingEvent | None
    ) -> bool:
        """Charge a voter's training before its first step; a training known by its id adds no row and gives False.

        ``event`` is all the training may spend, None for one without a guarantee of its own.
        """
        with self._writing():
            if training_id in self._books.teachers.trainings:
                return False
            self._append(TrainingRecord(training_id, voter, deal, strategy, () if event is None else (event,)))
        return True

    def record_drawn(self, training_id: str, steps: int, *, after: int) -> None:
        """Put on record, before they are drawn, that a training's steps up to ``steps`` count as drawn.

        ``after`` is what the caller takes for the newest such row. Refused (``training-busy``) where it is not: another
        run draws the same steps.
        """
        with self._writing():
            if self._drawn(training_id) != after:
                raise Refused(
                    "training-busy",
                    "another run is spending the steps of this training; to fix: wait for it, then run the command "
                    "again",
                )
            self._append(DrawnRecord(training_id, steps))

    def drawn(self, training_id: str) -> int:
        """How many steps of a private training count as drawn: never fewer than were.

        All of them once it is finished, and where this ledger was restored after the training began: then rows may be
        lost, and nobody can say how far it got.
        """
        self._catch_up()
        return self._drawn(training_id)

    def _drawn(self, training_id: str) -> int:
        books = self._books.teachers
        if training_id not in books.trainings:
            raise InvalidInput("training", value=training_id[:12], limit="one on record since it began")
        _, training = books.trainings[training_id]
        if training.event is not None and (self.lost_rows_since(training_id) or books.made(training_id)):
            return training.event.steps
        return books.drawn.get(training_id, 0)

    def lost_rows_since(self, training_id: str) -> bool:
        """Whether this ledger was restored from an older copy after a training began."""
        began, _ = self._books.teachers.trainings[training_id]
        return max(self._books.restored_at, default=0) > began

    def made(self, training_id: str) -> frozenset[str]:
        """The hashes of the teachers that a training on record made; empty until it is finished."""
        self._catch_up()
        return self._books.teachers.made(training_id)

    def record_deal(self, deal: str, seats: Mapping[int, str], *, voters: int) -> None:
        """Put on record who sits in which slot, before any training on them; what is known already adds no row.

        InvalidInput where a patient would sit in another slot than before, or come back after a withdrawal.
        """
        with self._writing():
            record = DealRecord(deal, voters, tuple(sorted(seats.items())))
            missing = self._books.teachers.deals.missing(record)
            if missing:
                self._append(DealRecord(deal, voters, missing))

    def deals_of_trainings(self, *, before: int) -> frozenset[str]:
        """The deals that trainings on record before a row were of."""
        self._catch_up()
        return frozenset(one.deal for row, one in self._books.teachers.trainings.values() if row < before)

    def seats(self, deal: str) -> Mapping[int, str]:
        """The newest subject in each slot of a deal, by its rows; empty for a deal without one."""
        self._catch_up()
        return dict(self._books.teachers.deals.seats(deal))

    def withdrawn_patients(self) -> tuple[tuple[int, PatientRecord], ...]:
        """The row of every patient who left, with its number."""
        self._catch_up()
        return tuple(self._books.teachers.patients.values())

    def record_trained(self, training_id: str, served: str, *, dealt: str | None = None) -> None:
        """Put on record that a training came to its end and made the teacher of this hash; known already: no row.

        ``dealt`` is the digest of the deal it was planned on. InvalidInput for a training that was never recorded: what
        nobody put on record has no event to count; and for another deal than is on record.
        """
        check_hash(served)
        with self._writing():
            if training_id not in self._books.teachers.trainings:
                raise InvalidInput("training", value=training_id[:12], limit="one on record since it began")
            _, training = self._books.teachers.trainings[training_id]
            record = TrainedRecord(training_id, training.voter, served, dealt)
            if self._books.teachers.is_news(record):
                self._append(record)

    def record_foreign(self, voter: int, served: str, *, brought: str) -> None:
        """Put on record that the hospital brought this voter's teacher; no row if it stands there already.

        After a patient's withdrawal it is a person's word that the patient is not in this teacher.
        """
        check_hash(served)
        with self._writing():
            if not self._books.teachers.brought(voter, served):
                self._append(ForeignRecord(voter, served, brought))

    def is_foreign(self, voter: int, served: str) -> bool:
        """Whether this very teacher of this voter is on record as brought, before or after a withdrawal."""
        self._catch_up()
        return (voter, served) in self._books.teachers.foreign

    def brought_votes(self, voter: int, served: str) -> bool:
        """Whether it was brought after the last withdrawal of a patient: before, it may hold that patient."""
        self._catch_up()
        return self._books.teachers.brought(voter, served)

    def was_trained(self, voter: int, served: str, *, deal: str) -> bool:
        """Whether a training on record, of this voter and on this very deal of patients, made this very teacher.

        So patients of two voters of whom this holds are not the same: a deal's rows seat each of them once.
        """
        self._catch_up()
        known = self._books.teachers
        made = (known.trainings[training][1] for training, hash_ in known.dealt if hash_ == served)
        return any(training.voter == voter and training.deal == deal for training in made)

    def state_teachers(self, served: Sequence[str]) -> str:
        """Put on record what a worker loaded: each voter's hash, empty for none; the digest that codes name it by.

        The training behind each is looked up here, by content. What the newest such row says already adds no row.
        """
        with self._writing():
            known = self._books.teachers
            voters = ((hash_, known.training_of(voter, hash_) if hash_ else "") for voter, hash_ in enumerate(served))
            record = TeachersRecord(tuple(voters))
            if record != known.newest:
                self._append(record)
        return record.digest

    def teachers(self) -> TeachersRecord | None:
        """What the newest worker loaded, None before the first."""
        self._catch_up()
        return self._books.teachers.newest

    def state_identity(self, identity: PatientIdentity) -> None:
        """Put on record what counts as one patient from now on; what holds already adds no row."""
        with self._writing():
            known = self._books.teachers.identities
            if not known or known[-1][1].identity is not identity:
                self._append(IdentityRecord(identity))

    def has_training(self, training_id: str) -> bool:
        """Whether this very training is charged."""
        self._catch_up()
        return training_id in self._books.teachers.trainings

    def trainings(self, *, present: Iterable[Sequence[str]] = ()) -> Trainings:
        """Every training on record, what was served of it, and whether anything was served that is of none.

        ``present``: for each directory of the pool the hash of what every voter would answer with when its worker is
        started now, empty for none (:func:`client.records.served.found_in`). Served is what computed a code, what the
        newest worker loaded, and what is present; unknown where this file is an older copy, or was. A private training
        counts once for every teacher it made: a second one is made of steps that were drawn again.
        """
        self._catch_up()
        books = self._books.teachers
        lost = bool(self._books.restored_at) or self.doubt() is not None
        coded = books.served_trainings(rows_lost=lost)
        loaded = () if books.newest is None else books.newest.voters
        found = {training for hash_, training in loaded if hash_}
        for directory in present:
            found |= {books.training_of(voter, hash_) for voter, hash_ in enumerate(directory) if hash_}
        return Trainings(
            tuple(
                Training(
                    voter=record.voter,
                    deal=record.deal,
                    strategy=record.strategy,
                    event=record.event,
                    served=training_id in coded | found,
                )
                for training_id, (_, record) in books.trainings.items()
                for _ in range(1 if record.event is None else max(1, len(books.made(training_id))))
            ),
            every_code_traced=bool(books.computed_with) and "" not in coded,
            untraced="" in coded | found,
        )

    def may_vote(self, voter: int, served: str, *, deal: str) -> bool:
        """Whether no withdrawn patient is in this voter's trained teacher (:meth:`TeacherBooks.may_vote`)."""
        self._catch_up()
        return self._books.teachers.may_vote(voter, served, deal=deal)

    def withdrawn_voters(self, *, after: int = 0) -> frozenset[int]:
        """The voters who lost a patient in a row past ``after``: models loaded before must not vote any more.

        Those with a teacher that was brought before are among them, whichever voter the patient sat in.
        """
        self._catch_up()
        books = self._books.teachers
        own = frozenset(record.voter for seq, record in books.patients.values() if seq > after)
        if books.last_withdrawal <= after:
            return own
        return own | {voter for (voter, _), row in books.foreign.items() if row < books.last_withdrawal}
