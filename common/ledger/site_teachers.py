"""Tracks a site's teachers from its rows: trainings, withdrawn patients, and the codes teachers computed.

Refuses a teacher or a code that names a training, a teacher or a query that no row before introduces, and a deal that
moves a patient.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from common.document import Document
from common.errors import InvalidInput
from common.ledger.base_state import once
from common.ledger.records import CodeRecord
from common.ledger.rows import START, Position, Row
from common.ledger.site_deals import DealBooks, seats_digest
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
from common.privacy.mechanism import Unit


@dataclass(frozen=True, slots=True)
class AskedQuery:
    """What a code answers: a query of this dimension, in a study of this unit."""

    query_id: str
    dimension: int
    unit: Unit


class TeacherBooks:
    """Part of a site's books. Rows are taken in order, each once; what breaks a rule changes nothing.

    ``codes``: the row of every query's code, which says the rest.
    """

    def __init__(self, codes: dict[str, Position]) -> None:
        self.codes = codes
        self.patients: dict[str, tuple[int, PatientRecord]] = {}
        self.last_withdrawal = 0
        self.trainings: dict[str, tuple[int, TrainingRecord]] = {}
        self.drawn: dict[str, int] = {}
        self.trained: dict[tuple[str, str], int] = {}
        self.dealt: set[tuple[str, str]] = set()
        self.deals = DealBooks(self.patients.keys())
        self.foreign: dict[tuple[int, str], int] = {}
        self.newest: TeachersRecord | None = None
        self.computed_with: set[str] = set()
        self.identities: list[tuple[int, IdentityRecord]] = []
        self._known: dict[str, TeachersRecord] = {}

    def code_stands(self, query_id: str) -> bool:
        """Whether a query has a code that was fixed after the last withdrawal of a patient."""
        return self.codes.get(query_id, START).seq > self.last_withdrawal

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

    def enter(self, row: Row, record: Document, *, asked: AskedQuery | None) -> bool:
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
            case DealRecord():
                self.deals.enter(record)
            case DrawnRecord():
                self._draw(record)
            case TrainedRecord():
                self._trained(row, record)
            case ForeignRecord():
                if self.brought(record.voter, record.served):
                    once((record.voter, record.served), self.foreign, "brought teacher")
                self.foreign[record.voter, record.served] = row.seq
            case TeachersRecord():
                self._loaded(record)
            case IdentityRecord():
                self.identities.append((row.seq, record))
            case _:
                return False
        return True

    def _code(self, row: Row, record: CodeRecord, asked: AskedQuery | None) -> None:
        if self.code_stands(record.query_id):
            raise InvalidInput(f"code of query {record.query_id}", limit="one code, until a patient is withdrawn")
        if asked is None or record.dimension != asked.dimension:
            raise InvalidInput("dimension of a code", value=record.dimension, limit="the query's")
        if record.teachers:
            by = {(voter, served) for voter, (served, _) in enumerate(self._known[record.teachers].voters)}
            if asked.unit is Unit.PATIENT and by & self.foreign.keys():
                raise InvalidInput(
                    "teacher of a code for unit patient",
                    value="brought",
                    limit="a teacher trained by `consilium site train` on dealt patients",
                )
        self.codes[asked.query_id] = Position(row.seq, row.hash)
        self.computed_with.add(record.teachers)

    def _trained(self, row: Row, record: TrainedRecord) -> None:
        if self.trainings[record.training_id][1].voter != record.voter:
            raise InvalidInput("voter of a finished training", value=record.voter, limit="the training's")
        made = record.training_id, record.served
        if not self.is_news(record):
            raise InvalidInput(
                f"teacher of training {record.training_id}", limit="one row, until a patient is withdrawn"
            )
        deal = self.trainings[record.training_id][1].deal
        if record.dealt is not None and record.dealt != self.dealt_now(deal):
            raise InvalidInput("deal of a finished training", value=record.dealt, limit="the one on record")
        self.trained[made] = row.seq
        if record.dealt is not None:
            self.dealt.add(made)

    def is_news(self, record: TrainedRecord) -> bool:
        """Whether a finished training's row says more than the rows before: a teacher that is new, that a patient's
        withdrawal made doubtful, or whose deal nobody had said."""
        made = record.training_id, record.served
        known = self.trained.get(made)
        return known is None or known < self.last_withdrawal or (record.dealt is not None and made not in self.dealt)

    def dealt_now(self, deal: str) -> str:
        """The digest of who sits where in a deal."""
        return seats_digest(deal, self.deals.taken(deal))

    def _draw(self, record: DrawnRecord) -> None:
        _, training = self.trainings[record.training_id]
        most = training.event.steps if training.event is not None else 0
        if not self.drawn.get(record.training_id, 0) < record.steps <= most:
            raise InvalidInput("steps drawn by a training", value=record.steps, limit=f"more than before, up to {most}")
        self.drawn[record.training_id] = record.steps

    def made(self, training_id: str) -> frozenset[str]:
        """The hashes of the teachers that a training made: more than one only if its steps were drawn again."""
        return frozenset(served for training, served in self.trained if training == training_id)

    def brought(self, voter: int, served: str) -> bool:
        """Whether the hospital brought this teacher for this voter, and no patient was withdrawn since: nobody knows
        whom such a teacher has seen, so after a withdrawal a person has to bring it anew."""
        return self.foreign.get((voter, served), 0) > self.last_withdrawal

    def may_vote(self, voter: int, served: str, *, deal: str) -> bool:
        """Whether no withdrawn patient is in this voter's teacher: it was made after the voter's last withdrawal.

        ``deal`` is the one that a teacher of no training on record is taken to be of; empty: any. A row of an earlier
        version does not say which deal the patient left, and counts for every one.
        """
        rows = {training: row for (training, hash_), row in self.trained.items() if hash_ == served}
        own = {training: row for training, row in rows.items() if self.trainings[training][1].voter == voter}
        deals: Collection[str | None] = {self.trainings[training][1].deal for training in own} or {deal}
        left = [
            row
            for row, patient in self.patients.values()
            if patient.voter == voter and (patient.deal is None or "" in deals or patient.deal in deals)
        ]
        return max(own.values(), default=0) > max(left, default=-1)

    def _loaded(self, record: TeachersRecord) -> None:
        for voter, (served, training) in enumerate(record.voters):
            if training:
                _ = self.trained[training, served]
            if training and self.trainings[training][1].voter != voter:
                raise InvalidInput("voter of a teacher", value=voter, limit="the voter it was trained as")
        self._known[record.digest] = self.newest = record
