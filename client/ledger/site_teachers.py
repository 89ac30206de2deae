"""A site's teachers on record: what each training may spend, which teachers a worker loaded, and patients who left.

No patient's name is written: a patient is a keyed hash. When one is withdrawn every code stored before is deleted.
"""

from __future__ import annotations

from collections.abc import Sequence

from client.ledger.site_file import SiteFile
from common.canonical import check_hash
from common.data.dataset import PatientIdentity
from common.errors import InvalidInput
from common.ledger.teacher_records import (
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

    def withdraw_patient(self, *, slot: int, voter: int, subject: str, weights: str | None) -> None:
        """Put on record that the patient in ``slot`` left; ``weights`` (SHA-256) are those of the voter's teacher.

        ``subject`` is a keyed hash of the case's name: the ledger never holds the name. The same subject again adds no
        row. Every code stored before is deleted with it: it may hold the patient's vote. Releases already made stay
        made and charged: nothing can recall them.
        """
        with self._writing():
            if subject not in self._books.teachers.patients:
                self._append(PatientRecord(slot, voter, subject, weights or ""))
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

    def record_trained(self, training_id: str, served: str) -> None:
        """Put on record that a training came to its end and made the teacher of this hash; known already: no row.

        InvalidInput for a training that was never recorded: what nobody put on record has no event to count.
        """
        check_hash(served)
        with self._writing():
            if training_id not in self._books.teachers.trainings:
                raise InvalidInput("training", value=training_id[:12], limit="one on record since it began")
            if (training_id, served) not in self._books.teachers.trained:
                _, training = self._books.teachers.trainings[training_id]
                self._append(TrainedRecord(training_id, training.voter, served))

    def record_foreign(self, voter: int, served: str, *, brought: str) -> None:
        """Put on record that the hospital brought this voter's teacher; known already: no row."""
        check_hash(served)
        with self._writing():
            if (voter, served) not in self._books.teachers.foreign:
                self._append(ForeignRecord(voter, served, brought))

    def is_foreign(self, voter: int, served: str) -> bool:
        """Whether this very teacher of this voter is on record as brought."""
        self._catch_up()
        return (voter, served) in self._books.teachers.foreign

    def was_trained(self, voter: int, served: str, *, deal: str) -> bool:
        """Whether a training on record, of this voter under this deal of patients, made this very teacher."""
        self._catch_up()
        known = self._books.teachers
        made = (known.trainings[training][1] for training, hash_ in known.trained if hash_ == served)
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

    def trainings(self) -> Trainings:
        """Every training on record, whether a code was computed with its teacher, and whether that is known of all."""
        self._catch_up()
        served = self._books.teachers.served_trainings(rows_lost=bool(self._books.restored_at))
        return Trainings(
            tuple(
                Training(
                    voter=record.voter,
                    deal=record.deal,
                    strategy=record.strategy,
                    event=record.event,
                    served=training_id in served,
                )
                for training_id, (_, record) in self._books.teachers.trainings.items()
            ),
            every_code_traced=bool(self._books.teachers.computed_with) and "" not in served,
        )

    def withdrawn_weights(self) -> frozenset[tuple[int, str]]:
        """(voter, SHA-256 of its weights) of every teacher that a withdrawn patient was in: they never vote again."""
        self._catch_up()
        return frozenset((record.voter, record.weights) for _, record in self._books.teachers.patients.values())

    def withdrawn_voters(self, *, after: int = 0) -> frozenset[int]:
        """The voters who lost a patient in a row past ``after``: models loaded before must not vote any more."""
        self._catch_up()
        return frozenset(record.voter for seq, record in self._books.teachers.patients.values() if seq > after)
