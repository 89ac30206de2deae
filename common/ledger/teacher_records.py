"""Defines the ledger rows about a site's teachers: trainings, withdrawn patients, and teachers that answered.

Like :mod:`common.ledger.records`, which registers these types, this module has one frozen type for each kind of row.
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
    """The withdrawal of a patient. The voter to which the patient's slot belongs does not vote until it has a new
    teacher.

    Attributes:
        slot: Slot of the patient.
        voter: Voter to which the slot belongs.
        subject: Keyed hash of the case's name; the key is not in the ledger.
        weights: Hash of the voter's teacher at that moment; empty if it had none.
        deal: Deal (assignment of patients to voters) in which the slot belongs to the voter; None in rows of earlier
            versions.
    """

    slot: Number
    voter: Number
    subject: Sha256
    weights: HashOrEmpty
    deal: Sha256 | None = None


@dataclass(frozen=True, slots=True)
class DealRecord(Document):
    """The assignment of patients to slots (a deal), recorded before any training on these patients. A patient keeps a
    slot forever.

    A slots file that contradicts a recorded assignment is therefore an older copy.

    Attributes:
        deal: Id of the deal: a hash of the key with which patients' names are hashed.
        voters: Number of voters; slot i belongs to voter i mod ``voters``.
        seats: (slot, subject) of each patient. The subject is a keyed hash of the patient's name.
    """

    deal: Sha256
    voters: Annotated[int, Between("voters of a deal", 1)]
    seats: tuple[tuple[Number, Sha256], ...]


@dataclass(frozen=True, slots=True)
class DrawnRecord(Document):
    """The number of steps of a private training that count as spent.

    A step is *drawn* when a random batch is chosen and noise is added to the sum of its gradients. This row is written
    before the steps that it adds are drawn. If the training's files are then restored from a backup, the ledger still
    shows that these steps are spent.

    Attributes:
        training_id: Id of the training.
        steps: Number of spent steps, counted from the first step of the training.
    """

    training_id: Annotated[Sha256, Key("training")]
    steps: Number


@dataclass(frozen=True, slots=True)
class TrainingRecord(Document):
    """The start of a voter's training. It is charged in full before the first step and never refunded.

    Attributes:
        training_id: Id of the training.
        voter: Number of the voter.
        deal: Id of the assignment of patients to voters. Two voters of one deal share no patient.
        strategy: Name of the training strategy.
        events: At most one privacy event, an upper bound on what the training costs any of its patients; empty for a
            training without a guarantee.
    """

    training_id: Annotated[Sha256, Key("training")]
    voter: Number
    deal: Sha256
    strategy: Annotated[str, partial(check_ledger_name, what="training strategy")]
    events: Annotated[tuple[TrainingEvent, ...], Count("events of a training", most=1)]

    @property
    def event(self) -> TrainingEvent | None:
        """Upper bound on what the training costs any of its patients; None for a training without a guarantee."""
        return self.events[0] if self.events else None


@dataclass(frozen=True, slots=True)
class TrainedRecord(Document):
    """The end of a recorded training.

    Attributes:
        training_id: Id of the training.
        voter: Number of the voter.
        served: SHA-256 of the teacher that the training made.
        dealt: Digest of the assignment of patients to slots from which the training took its patients
            (:func:`common.ledger.site_deals.seats_digest`); None in rows of earlier versions.
    """

    training_id: Annotated[Sha256, Key("training")]
    voter: Number
    served: Sha256
    dealt: Sha256 | None = None


@dataclass(frozen=True, slots=True)
class ForeignRecord(Document):
    """A teacher that the hospital trained outside Consilium and supplied for one of its voters.

    The ledger does not know on which patients the teacher was trained. The teacher therefore computes no code for a
    study whose unit of privacy is the patient.

    Attributes:
        voter: Number of the voter.
        served: Hash of the teacher.
        brought: Kind of the teacher: ``bundle``, ``torchscript`` or ``command``.
    """

    voter: Number
    served: Sha256
    brought: Annotated[str, partial(check_ledger_name, what="kind of a teacher")]


@dataclass(frozen=True, slots=True)
class TeachersRecord(Document):
    """The teachers that the site's worker loaded: for every voter, the teacher's SHA-256 and the training that made it.

    Both are empty for a voter without a teacher. The training is empty if no recorded training made this teacher.
    """

    voters: tuple[tuple[HashOrEmpty, HashOrEmpty], ...]

    @property
    def digest(self) -> str:
        """The digest by which a code's row refers to these teachers."""
        return digest("teachers", [list(voter) for voter in self.voters])


@dataclass(frozen=True, slots=True)
class IdentityRecord(Document):
    """The rule by which the site's data set tells patients apart, valid from this row on."""

    identity: PatientIdentity
