"""Records a site's trainings with what each may spend, the teachers that workers loaded, and withdrawn patients.

Training, withdrawal and the worker call it. A *deal* assigns patients to voters; each patient has a slot in it. A
patient is recorded as a keyed hash, never by name. A training step is *drawn* when its random batch and noise are
drawn. Withdrawing a patient deletes every code stored before. The module refuses to record the end of a training whose
beginning is not on record, a patient in two slots, and two runs that draw the same steps.
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


class KeepsTeachers(SiteFile):
    """The part of a site's ledger that records trainings, teachers, and the patients who were withdrawn.

    From these records it follows which patients may have influenced a code.
    """

    def withdraw_patient(
        self, *, slot: int, voter: int, subject: str, weights: str | None, deal: str | None = None
    ) -> None:
        """Record that a patient was withdrawn, and delete all stored codes, which may contain the patient's vote.

        A patient withdrawn before adds no row. Earlier releases cannot be undone, and stay charged.

        Args:
            slot: The patient's slot.
            voter: The slot's voter.
            subject: Keyed hash of the case's name.
            weights: SHA-256 of the weights of the voter's teacher; None if it had none.
            deal: The ledger's name of the deal (assignment of patients to slots) in which the patient has this slot.
        """
        with self._writing():
            if subject not in self._books.teachers.patients:
                self._append(PatientRecord(slot, voter, subject, weights or "", deal))
                self._chain.drop_payloads(before=self._books.teachers.last_withdrawal)
        self._chain.settle()

    def _drop_withdrawn_codes(self) -> None:
        """Delete codes stored before the last withdrawal of a patient, which an earlier version did not delete.

        Such codes are never sent, deleted or not.
        """
        if self._chain.has_payload(before=self._books.teachers.last_withdrawal):
            with self._writing():
                self._chain.drop_payloads(before=self._books.teachers.last_withdrawal)
            self._chain.settle()

    def record_training(self, training: TrainingRecord) -> bool:
        """Charge a voter's training before its first step.

        Args:
            training: The training, with everything it may spend.

        Returns:
            False if the training is on record already; then no row is added.
        """
        with self._writing():
            if training.training_id in self._books.teachers.trainings:
                return False
            self._append(training)
        return True

    def record_drawn(self, training_id: str, steps: int, *, after: int) -> None:
        """Count a training's steps up to ``steps`` as drawn, before their random batches and noise are drawn.

        Args:
            training_id: Id of the training.
            steps: Number of steps that count as drawn from now on.
            after: Number of steps that the caller expects on record.

        Raises:
            Refused: ``training-busy`` if another number is on record: another run is drawing the same steps.
            InvalidInput: If the training is not on record.
        """
        with self._writing():
            if self._drawn(training_id) != after:
                raise Refused(
                    "training-busy",
                    "another run is working on the same training; to fix: wait until it ends, then run the command "
                    "again",
                )
            self._append(DrawnRecord(training_id, steps))

    def drawn(self, training_id: str) -> int:
        """Return how many steps of a private training count as drawn; this is never fewer than were really drawn.

        Once the training is finished, all planned steps count. All planned steps count as well if this ledger was
        restored after the training began, because rows about the training may be lost.

        Args:
            training_id: Id of the training.

        Returns:
            The number of steps.

        Raises:
            InvalidInput: If the training is not on record.
        """
        self._catch_up()
        return self._drawn(training_id)

    def _drawn(self, training_id: str) -> int:
        books = self._books.teachers
        if training_id not in books.trainings:
            raise InvalidInput("training", value=training_id[:12], limit="a training whose beginning is on record")
        _, training = books.trainings[training_id]
        if training.event is not None and (self.lost_rows_since(training_id) or books.made(training_id)):
            return training.event.steps
        return books.drawn.get(training_id, 0)

    def lost_rows_since(self, training_id: str) -> bool:
        """Tell whether this ledger was restored from an older copy after a training began.

        Args:
            training_id: Id of a training on record.

        Returns:
            True if rows about the training may be lost.
        """
        began, _ = self._books.teachers.trainings[training_id]
        return max(self._books.restored_at, default=0) > began

    def record_deal(self, deal: str, seats: Mapping[int, str], *, voters: int) -> None:
        """Record which patient is in each slot of a deal, before any training uses it.

        A deal assigns patients to slots, and so to voters. Slots on record already add no row.

        Args:
            deal: Name of the deal.
            seats: Keyed hash of the patient by slot.
            voters: Number of voters.

        Raises:
            InvalidInput: If a patient would change slots, or return after a withdrawal.
        """
        with self._writing():
            record = DealRecord(deal, voters, tuple(sorted(seats.items())))
            missing = self._books.teachers.deals.missing(record)
            if missing:
                self._append(DealRecord(deal, voters, missing))

    def record_trained(self, training_id: str, served: str, *, dealt: str | None = None) -> None:
        """Record that a training is finished and which teacher it made. If both are on record already, add no row.

        Args:
            training_id: Id of the training.
            served: Hash of the teacher (:func:`client.records.served.served_hash`).
            dealt: Digest of the deal (the assignment of patients to slots) on which the training was planned.

        Raises:
            InvalidInput: If the training is not on record, so that nothing is charged for it, or if ``dealt`` is not
                the deal on record.
        """
        check_hash(served)
        with self._writing():
            if training_id not in self._books.teachers.trainings:
                raise InvalidInput("training", value=training_id[:12], limit="a training whose beginning is on record")
            _, training = self._books.teachers.trainings[training_id]
            record = TrainedRecord(training_id, training.voter, served, dealt)
            if self._books.teachers.is_news(record):
                self._append(record)

    def record_foreign(self, voter: int, served: str, *, brought: str) -> None:
        """Record that the hospital added this voter's teacher from elsewhere; no row is added if it is on record.

        If a patient was withdrawn before, the new record means that a person states this teacher does not contain the
        patient.

        Args:
            voter: The voter.
            served: Hash of the teacher.
            brought: Kind of the teacher, as the person who added it declared it.
        """
        check_hash(served)
        with self._writing():
            if not self._books.teachers.brought(voter, served):
                self._append(ForeignRecord(voter, served, brought))

    def was_trained(self, voter: int, served: str, *, deal: str) -> bool:
        """Tell whether a training on record made this teacher, for this voter and with this deal.

        Two voters for which this is true share no patient, because a deal assigns each patient to one slot of one
        voter.

        Args:
            voter: The voter.
            served: Hash of the teacher.
            deal: Name of the deal in this ledger.

        Returns:
            True if such a training is on record.
        """
        known = self.books.teachers
        made = (known.trainings[training][1] for training, hash_ in known.dealt if hash_ == served)
        return any(training.voter == voter and training.deal == deal for training in made)

    def state_teachers(self, served: Sequence[str]) -> str:
        """Record the teachers that a worker loaded, each with the training that made it.

        The same teachers as in the newest record add no row.

        Args:
            served: Hash of each voter's teacher, in order; empty for a voter without one.

        Returns:
            The digest under which codes refer to these teachers.
        """
        with self._writing():
            known = self._books.teachers
            voters = ((hash_, known.training_of(voter, hash_) if hash_ else "") for voter, hash_ in enumerate(served))
            record = TeachersRecord(tuple(voters))
            if record != known.newest:
                self._append(record)
        return record.digest

    def state_identity(self, identity: PatientIdentity) -> None:
        """Record what counts as one patient from now on. The current definition adds no row.

        Args:
            identity: How patients are recognised in the dataset.
        """
        with self._writing():
            if self._books.teachers.identity is not identity:
                self._append(IdentityRecord(identity))

    def trainings(self, *, present: Iterable[Sequence[str]] = (), adapted_lost: bool = False) -> Trainings:
        """Return every training on record, which of them were used, and whether a teacher of unknown origin was used.

        A training counts as used if its teacher computed a code, was loaded by the newest worker, or is in one of the
        given directories. If rows may be lost, this is unknown. A private training counts once for each teacher it
        made, because a second teacher means that its steps were trained twice.

        Args:
            present: For each directory of the pool, the hash of every voter's present teacher
                (:func:`client.records.served.found_in`); empty for a voter without one.
            adapted_lost: True if this ledger lacks the training of a network that may leave the hospital.

        Returns:
            The trainings, for :mod:`common.privacy.patient_guarantee`.
        """
        books = self.books.teachers
        doubted = self.doubt() is not None
        lost = bool(self._books.restored_at) or doubted
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
                    finished=bool(books.made(training_id)),
                )
                for training_id, (_, record) in books.trainings.items()
                for _ in range(1 if record.event is None else max(1, len(books.made(training_id))))
            ),
            every_code_traced=bool(books.computed_with) and "" not in coded,
            untraced="" in coded | found,
            adapted_unknown=self._books.restored_blindly or doubted or adapted_lost,
        )

    def withdrawn_voters(self, *, after: int = 0) -> frozenset[int]:
        """Return the voters whose teachers may contain a patient who was withdrawn after a ledger row.

        A teacher that was loaded before that row must not vote for one of these voters.

        They are the voters from which a patient was withdrawn after the row. If there is one, the voters with a teacher
        that was added from elsewhere before the last withdrawal are included as well, because such a teacher may
        contain any patient.

        Args:
            after: Number of the ledger row.

        Returns:
            Numbers of the voters; empty if no patient was withdrawn after the row.
        """
        books = self.books.teachers
        own = frozenset(record.voter for seq, record in books.patients.values() if seq > after)
        if books.last_withdrawal <= after:
            return own
        return own | {voter for (voter, _), row in books.foreign.items() if row < books.last_withdrawal}
