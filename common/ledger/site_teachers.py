"""Tracks a site's teachers from its rows: trainings, withdrawn patients, and the codes that teachers computed.

Part of a site's totals (:mod:`common.ledger.site_state`). A deal is one assignment of patients to voters. Refuses a
teacher or a code that names a training, a teacher or a query that no earlier row introduces, and a deal that assigns a
patient to another voter than before.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from common.data.dataset import PatientIdentity
from common.document import Document
from common.errors import InvalidInput
from common.ledger.base_state import refuse_second
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
    """The query that a code answers: its id, its dimension, and its study's unit of privacy."""

    query_id: str
    dimension: int
    unit: Unit


class TeacherBooks:
    """The part of a site's totals about teachers.

    Rows are entered in order, each once. A row that breaks a rule changes nothing.

    Args:
        codes: The position of the row of every query's code, by query id. This object fills it.
    """

    def __init__(self, codes: dict[str, Position]) -> None:
        self.codes = codes
        self.outcomes: dict[str, str] = {}
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

    @property
    def identity(self) -> PatientIdentity | None:
        """How the data set tells patients apart, by the newest row about it; None before the first such row."""
        return self.identities[-1][1].identity if self.identities else None

    def code_is_current(self, query_id: str) -> bool:
        """Return whether a query has a code that was computed after the last withdrawal of a patient.

        Args:
            query_id: The query's id.

        Returns:
            True if the code may be sent.
        """
        return self.codes.get(query_id, START).seq > self.last_withdrawal

    def training_of(self, voter: int, served: str) -> str:
        """Return the recorded training that made a voter's teacher. If several did, a training without a privacy
        guarantee takes precedence.

        Args:
            voter: Number of the voter.
            served: SHA-256 of the teacher's weights.

        Returns:
            Id of the training; empty if none made it.
        """
        made_it = [
            training
            for training, hash_ in self.trained
            if hash_ == served and self.trainings[training][1].voter == voter
        ]
        return min(made_it, key=lambda training: self.trainings[training][1].event is not None, default="")

    def served_trainings(self, *, rows_lost: bool) -> frozenset[str]:
        """Return the recorded trainings whose teachers computed a code.

        Args:
            rows_lost: True if rows were lost with an older copy.

        Returns:
            Ids of trainings. They include an empty id if a teacher came from no recorded training, a code does not name
            its teachers, or rows were lost.
        """
        known = (self._known[digest].voters for digest in self.computed_with if digest)
        served = {training for voters in known for made, training in voters if made}
        return frozenset(served | ({""} if rows_lost or "" in self.computed_with else set()))

    def enter(self, row: Row, record: Document, *, asked: AskedQuery | None) -> bool:
        """Enter a row.

        Args:
            row: The row.
            record: Its record.
            asked: For the row of a code, the query that the code answers; None for other rows.

        Returns:
            False if the row is not about teachers.

        Raises:
            InvalidInput: If the row breaks a rule.
            KeyError: If the row names something that no earlier row introduces.
        """
        match record:
            case CodeRecord():
                self._code(row, record, asked)
            case PatientRecord():
                refuse_second(record.subject, self.patients, "withdrawn patient")
                self.patients[record.subject] = (row.seq, record)
                self.last_withdrawal = row.seq
            case TrainingRecord():
                refuse_second(record.training_id, self.trainings, "training")
                self.trainings[record.training_id] = (row.seq, record)
            case DealRecord():
                self.deals.enter(record)
            case DrawnRecord():
                self._draw(record)
            case TrainedRecord():
                self._trained(row, record)
            case ForeignRecord():
                if self.brought(record.voter, record.served):
                    refuse_second((record.voter, record.served), self.foreign, "brought teacher")
                self.foreign[record.voter, record.served] = row.seq
            case TeachersRecord():
                self._loaded(record)
            case IdentityRecord():
                self.identities.append((row.seq, record))
            case _:
                return False
        return True

    def _code(self, row: Row, record: CodeRecord, asked: AskedQuery | None) -> None:
        if self.code_is_current(record.query_id):
            raise InvalidInput(
                f"code of query {record.query_id}",
                limit="one code for each query, and a new one only after a patient was withdrawn",
            )
        if asked is None or record.dimension != asked.dimension:
            raise InvalidInput("dimension of a code", value=record.dimension, limit="the dimension of the query")
        if record.teachers:
            by = {(voter, served) for voter, (served, _) in enumerate(self._known[record.teachers].voters)}
            if asked.unit is Unit.PATIENT and by & self.foreign.keys():
                raise InvalidInput(
                    "teacher of a code for unit patient",
                    value="brought",
                    limit="a teacher that `consilium site train` trained on its voter's own patients",
                )
        self.codes[asked.query_id] = Position(row.seq, row.hash)
        self.outcomes[asked.query_id] = record.outcome
        self.computed_with.add(record.teachers)

    def _trained(self, row: Row, record: TrainedRecord) -> None:
        if self.trainings[record.training_id][1].voter != record.voter:
            raise InvalidInput(
                "voter of a finished training", value=record.voter, limit="the voter that the training began for"
            )
        made = record.training_id, record.served
        if not self.is_news(record):
            raise InvalidInput(
                f"teacher of training {record.training_id}",
                limit="one row for each teacher, and a new one only after a patient was withdrawn",
            )
        deal = self.trainings[record.training_id][1].deal
        if record.dealt is not None and record.dealt != self.dealt_now(deal):
            raise InvalidInput(
                "deal of a finished training",
                value=record.dealt,
                limit="the digest of the patients now assigned to the voters",
            )
        self.trained[made] = row.seq
        if record.dealt is not None:
            self.dealt.add(made)

    def is_news(self, record: TrainedRecord) -> bool:
        """Return whether the row of a finished training contains anything new.

        The row is new if the teacher is new, if a patient was withdrawn since the teacher's last row, or if no earlier
        row states which patients the teacher's voter had.

        Args:
            record: The row.

        Returns:
            True if the row should be written.
        """
        made = record.training_id, record.served
        known = self.trained.get(made)
        return known is None or known < self.last_withdrawal or (record.dealt is not None and made not in self.dealt)

    def dealt_now(self, deal: str) -> str:
        """Return the digest of a deal's current assignment of patients to slots, without withdrawn patients.

        Args:
            deal: Id of the deal.

        Returns:
            The hash of :func:`common.ledger.site_deals.seats_digest`.
        """
        return seats_digest(deal, self.deals.taken(deal))

    def _draw(self, record: DrawnRecord) -> None:
        _, training = self.trainings[record.training_id]
        most = training.event.steps if training.event is not None else 0
        if not self.drawn.get(record.training_id, 0) < record.steps <= most:
            before = self.drawn.get(record.training_id, 0)
            raise InvalidInput(
                "steps drawn by a training", value=record.steps, limit=f"more than {before}, at most {most}"
            )
        self.drawn[record.training_id] = record.steps

    def made(self, training_id: str) -> frozenset[str]:
        """Return the hashes of the teachers that a training made. It made several only if its steps were repeated.

        Args:
            training_id: Id of the training.

        Returns:
            The hashes.
        """
        return frozenset(served for training, served in self.trained if training == training_id)

    def brought(self, voter: int, served: str) -> bool:
        """Return whether the hospital supplied this teacher, trained elsewhere, for this voter, and no patient was
        withdrawn since.

        It is unknown which patients such a teacher was trained on. After a withdrawal, a person must supply it again.

        Args:
            voter: Number of the voter.
            served: Hash of the teacher.

        Returns:
            True if it may vote.
        """
        return self.foreign.get((voter, served), 0) > self.last_withdrawal

    def may_vote(self, voter: int, served: str, *, deal: str) -> bool:
        """Return whether a voter's teacher was made after the voter's last withdrawal of a patient.

        Such a teacher was not trained on a withdrawn patient.

        Args:
            voter: Number of the voter.
            served: Hash of the teacher.
            deal: Deal whose withdrawals count for a teacher without a recorded training; empty if the withdrawals of
                every deal count. A withdrawal recorded by an earlier version names no deal and always counts.

        Returns:
            True if it may vote.
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
                raise InvalidInput("voter of a teacher", value=voter, limit="the voter that it was trained for")
        self._known[record.digest] = self.newest = record
