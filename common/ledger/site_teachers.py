"""What a site's rows say of its teachers: their trainings, the patients who left, the codes they computed.

Refuses a teacher or a code that names a training, a teacher or a query that no row before introduces.
"""

from __future__ import annotations

from dataclasses import dataclass

from common.document import Document
from common.errors import InvalidInput
from common.ledger.base_state import once
from common.ledger.packed import Rows
from common.ledger.records import CodeRecord
from common.ledger.rows import Row
from common.ledger.teacher_records import (
    ForeignRecord,
    IdentityRecord,
    PatientRecord,
    TeachersRecord,
    TrainedRecord,
    TrainingRecord,
)
from common.privacy.mechanism import Unit


@dataclass(frozen=True, slots=True)
class Asked:
    """What a code answers: a query of this dimension, in a study of this unit."""

    query_id: str
    dimension: int
    unit: Unit


class TeacherBooks:
    """Part of a site's books. Rows are taken in order, each once; what breaks a rule changes nothing.

    ``codes``: the row of every query's code, which says the rest.
    """

    def __init__(self, codes: Rows) -> None:
        self.codes = codes
        self.patients: dict[str, tuple[int, PatientRecord]] = {}
        self.last_withdrawal = 0
        self.trainings: dict[str, tuple[int, TrainingRecord]] = {}
        self.trained: dict[tuple[str, str], int] = {}
        self.foreign: dict[tuple[int, str], int] = {}
        self.newest: TeachersRecord | None = None
        self.computed_with: set[str] = set()
        self.identities: list[tuple[int, IdentityRecord]] = []
        self._known: dict[str, TeachersRecord] = {}

    def code_stands(self, query_id: str) -> bool:
        """Whether a query has a code that was fixed after the last withdrawal of a patient."""
        return self.codes.get(query_id, 0) > self.last_withdrawal

    def training_of(self, voter: int, served: str) -> str:
        """The training on record that made a voter's teacher, one without a guarantee first; empty if none did."""
        made_it = [
            training
            for training, hash_ in self.trained
            if hash_ == served and self.trainings[training][1].voter == voter
        ]
        return min(made_it, key=lambda training: self.trainings[training][1].event is not None, default="")

    def served_trainings(self, *, rows_lost: bool) -> frozenset[str]:
        """The trainings on record whose teachers computed a code; empty text among them for a teacher of none of them,
        for a code that does not say, and for rows that were lost with an older copy."""
        known = (self._known[digest].voters for digest in self.computed_with if digest)
        served = {training for voters in known for made, training in voters if made}
        return frozenset(served | ({""} if rows_lost or "" in self.computed_with else set()))

    def enter(self, row: Row, record: Document, *, asked: Asked | None) -> bool:
        """Take a row in; False for a kind that is not of teachers. ``asked`` is what a code's row answers."""
        match record:
            case CodeRecord():
                self._code(row, record, asked)
            case PatientRecord():
                once(record.subject, self.patients, "withdrawn patient")
                self.patients[record.subject] = (row.seq, record)
                self.last_withdrawal = row.seq
            case TrainingRecord():
                once(record.training_id, self.trainings, "training")
                self.trainings[record.training_id] = (row.seq, record)
            case TrainedRecord():
                self._trained(row, record)
            case ForeignRecord():
                once((record.voter, record.served), self.foreign, "brought teacher")
                self.foreign[record.voter, record.served] = row.seq
            case TeachersRecord():
                self._loaded(record)
            case IdentityRecord():
                self.identities.append((row.seq, record))
            case _:
                return False
        return True

    def _code(self, row: Row, record: CodeRecord, asked: Asked | None) -> None:
        if self.code_stands(record.query_id):
            raise InvalidInput(f"code of query {record.query_id}", limit="one, until a patient is withdrawn")
        if asked is None or record.dimension != asked.dimension:
            raise InvalidInput("dimension of a code", value=record.dimension, limit="the query's")
        if record.teachers:
            by = {(voter, served) for voter, (served, _) in enumerate(self._known[record.teachers].voters)}
            if asked.unit is Unit.PATIENT and by & self.foreign.keys():
                raise InvalidInput("teacher of a code for unit patient", value="brought", limit="trained by slots")
        self.codes.enter(asked.query_id, row)
        self.computed_with.add(record.teachers)

    def _trained(self, row: Row, record: TrainedRecord) -> None:
        if self.trainings[record.training_id][1].voter != record.voter:
            raise InvalidInput("voter of a finished training", value=record.voter, limit="the training's")
        if (record.training_id, record.served) in self.trained:
            raise InvalidInput(f"teacher of training {record.training_id}", limit="one row in the whole ledger")
        self.trained[record.training_id, record.served] = row.seq

    def _loaded(self, record: TeachersRecord) -> None:
        for voter, (served, training) in enumerate(record.voters):
            if training:
                _ = self.trained[training, served]
            if training and self.trainings[training][1].voter != voter:
                raise InvalidInput("voter of a teacher", value=voter, limit="the one it was trained as")
        self._known[record.digest] = self.newest = record
