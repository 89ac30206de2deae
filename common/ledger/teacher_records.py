"""Defines the ledger rows about a site's teachers: trainings, withdrawn patients, and teachers that answered.

As in :mod:`common.ledger.records`: one frozen type for each kind of body.
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
    """A patient was withdrawn, and the voter in whose ``slot`` the patient sat is silent until it is retrained.

    ``subject`` is a keyed hash of the case's name whose key is not in the ledger; ``weights`` are those of the voter's
    teacher at that moment, or empty if it had none. ``deal`` names the dealing of patients that slot and voter belong
    to; None in rows of earlier versions.
    """

    slot: Number
    voter: Number
    subject: Sha256
    weights: HashOrEmpty
    deal: Sha256 | None = None


@dataclass(frozen=True, slots=True)
class DealRecord(Document):
    """Patients were given slots, before any training on them: ``seats`` holds (slot, subject) of each.

    A patient keeps a slot for life, so a slots file that says otherwise is an older copy. Slot i belongs to voter
    i mod ``voters``; ``deal`` names the key under which subjects are hashed.
    """

    deal: Sha256
    voters: Annotated[int, Between("voters of a deal", 1)]
    seats: tuple[tuple[Number, Sha256], ...]


@dataclass(frozen=True, slots=True)
class DrawnRecord(Document):
    """A private training may have drawn its first ``steps`` steps; they are not drawn again after a restore."""

    training_id: Annotated[Sha256, Key("training")]
    steps: Number


@dataclass(frozen=True, slots=True)
class TrainingRecord(Document):
    """A voter's training began; ``events`` holds all it may spend on each of its patients, nothing for no guarantee.

    Charged in full before the first step and never given back. ``deal`` names how patients were dealt to voters: under
    one deal two voters share no patient.
    """

    training_id: Annotated[Sha256, Key("training")]
    voter: Number
    deal: Sha256
    strategy: Annotated[str, partial(check_ledger_name, what="training strategy")]
    events: Annotated[tuple[TrainingEvent, ...], Count("events of a training", most=1)]

    @property
    def event(self) -> TrainingEvent | None:
        """All it may spend, None for one without a guarantee."""
        return self.events[0] if self.events else None


@dataclass(frozen=True, slots=True)
class TrainedRecord(Document):
    """A training on record came to its end, and ``served`` is the SHA-256 of the teacher it made.

    ``dealt`` is the digest of the deal that its patients were taken from, as the rows before have it
    (:func:`common.ledger.site_deals.seats_digest`); None in rows of earlier versions, where nobody can say.
    """

    training_id: Annotated[Sha256, Key("training")]
    voter: Number
    served: Sha256
    dealt: Sha256 | None = None


@dataclass(frozen=True, slots=True)
class ForeignRecord(Document):
    """The hospital brought a teacher of its own for this voter: ``served`` is its hash, ``brought`` what it is.

    Which patients it has seen nobody can say, so no code for a study of unit patient is computed with it.
    """

    voter: Number
    served: Sha256
    brought: Annotated[str, partial(check_ledger_name, what="kind of a teacher")]


@dataclass(frozen=True, slots=True)
class TeachersRecord(Document):
    """What the site's worker loaded: for every voter the SHA-256 of its teacher and the training that made it.

    Both are empty for a voter without a teacher; the training is empty where none on record made these bytes.
    """

    voters: tuple[tuple[HashOrEmpty, HashOrEmpty], ...]

    @property
    def digest(self) -> str:
        """What a code's row names these teachers by."""
        return digest("teachers", [list(voter) for voter in self.voters])


@dataclass(frozen=True, slots=True)
class IdentityRecord(Document):
    """What counts as one patient of the site's pool from this row on, as its dataset says it."""

    identity: PatientIdentity
