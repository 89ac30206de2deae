"""Defines the ledger rows about a site's teachers: trainings, withdrawn patients, and teachers that answered.

Like :mod:`common.ledger.records`, which registers these types, it has one frozen type for each kind of body.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Annotated

from common.canonical import digest
from common.data.dataset import PatientIdentity
from common.document import Between, Count, Document, Key, Sha256
from common.ledger.charges import HashOrEmpty, Number, check_ledger_name
from common.privacy.training import TrainingEvent


@dataclass(frozen=True, slots=True)
class PatientRecord(Document):
    """A patient was withdrawn. The voter with the patient's slot does not vote until it is retrained.

    Attributes:
        slot: Slot of the patient.
        voter: Voter to which the slot belongs.
        subject: Keyed hash of the case's name; the key is not in the ledger.
        weights: Hash of the voter's teacher at that moment; empty if it had none.
        deal: The deal of slot and voter; None in rows of earlier versions.
    """

    slot: Number
    voter: Number
    subject: Sha256
    weights: HashOrEmpty
    deal: Sha256 | None = None


@dataclass(frozen=True, slots=True)
class DealRecord(Document):
    """Patients were given slots, before any training on them. A patient keeps a slot for life.

    A slots file that states otherwise is therefore an older copy.

    Attributes:
        deal: Id of the key with which subjects are hashed.
        voters: Number of voters; slot i belongs to voter i mod ``voters``.
        seats: (slot, subject) of each patient.
    """

    deal: Sha256
    voters: Annotated[int, Between("voters of a deal", 1)]
    seats: tuple[tuple[Number, Sha256], ...]


@dataclass(frozen=True, slots=True)
class DrawnRecord(Document):
    """A private training may have drawn its first ``steps`` steps. They are not drawn again after a restore."""

    training_id: Annotated[Sha256, Key("training")]
    steps: Number


@dataclass(frozen=True, slots=True)
class TrainingRecord(Document):
    """A voter's training began. It is charged in full before the first step and never refunded.

    Attributes:
        training_id: Id of the training.
        voter: Number of the voter.
        deal: How patients were dealt to voters. Under one deal, two voters share no patient.
        strategy: Name of the training strategy.
        events: The most it may spend on each of its patients; empty for a training without a guarantee.
    """

    training_id: Annotated[Sha256, Key("training")]
    voter: Number
    deal: Sha256
    strategy: Annotated[str, partial(check_ledger_name, what="training strategy")]
    events: Annotated[tuple[TrainingEvent, ...], Count("events of a training", most=1)]

    @property
    def event(self) -> TrainingEvent | None:
        """The most the training may spend on each patient; None without a guarantee."""
        return self.events[0] if self.events else None


@dataclass(frozen=True, slots=True)
class TrainedRecord(Document):
    """A training on record finished.

    Attributes:
        training_id: Id of the training.
        voter: Number of the voter.
        served: SHA-256 of the teacher that it made.
        dealt: Digest of the seats from which its patients were taken (:func:`common.ledger.site_deals.seats_digest`);
            None in rows of earlier versions.
    """

    training_id: Annotated[Sha256, Key("training")]
    voter: Number
    served: Sha256
    dealt: Sha256 | None = None


@dataclass(frozen=True, slots=True)
class ForeignRecord(Document):
    """The hospital brought its own teacher for a voter: ``served`` is its hash, ``brought`` its kind.

    Nobody can tell which patients it has seen, so it computes no code for a study of unit patient.
    """

    voter: Number
    served: Sha256
    brought: Annotated[str, partial(check_ledger_name, what="kind of a teacher")]


@dataclass(frozen=True, slots=True)
class TeachersRecord(Document):
    """The teachers that the site's worker loaded: for every voter, the teacher's SHA-256 and the training that made it.

    Both are empty for a voter without a teacher. The training is empty if none on record made this teacher.
    """

    voters: tuple[tuple[HashOrEmpty, HashOrEmpty], ...]

    @property
    def digest(self) -> str:
        """The digest by which a code's row refers to these teachers."""
        return digest("teachers", [list(voter) for voter in self.voters])


@dataclass(frozen=True, slots=True)
class IdentityRecord(Document):
    """How patients of the site's pool are identified from this row on, according to its dataset."""

    identity: PatientIdentity
