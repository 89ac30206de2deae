"""Defines the ledger rows of sealed sums: the end of a draw (an attempt at a sum), and a site's peers, mask keys and
masked codes.

Like :mod:`common.ledger.records`, which registers these types, this module has one frozen type for each kind of row.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import Annotated

from common.document import Document, Key, OneOf, Sha256
from common.ledger.charges import HashOrEmpty, Number, SiteName, StudyId


@dataclass(frozen=True, slots=True)
class AnswerRecord(Document):
    """The noisy sum of a draw (an attempt at a sealed sum) that every site on its roster completed. It is not charged
    again, because the draw's own row was charged.
    """

    query_id: Sha256
    draw: Number
    answer_sha256: Sha256


@dataclass(frozen=True, slots=True)
class LostDrawRecord(Document):
    """A draw (an attempt at a sealed sum) that ended without an answer and stays charged.

    The ``reason`` is ``incomplete`` if a site did not complete the draw, or ``spoiled`` if its sum is one that honest
    sites cannot have produced.
    """

    query_ids: tuple[Sha256, ...]
    draw: Number
    reason: Annotated[str, OneOf("reason of a lost draw", ("incomplete", "spoiled"))]


@dataclass(frozen=True, slots=True)
class PeerRecord(Document):
    """A confirmation that a person at this site has compared another site's public key with the staff of that site.

    A later row for the same other site replaces this one. An empty ``key`` revokes the confirmation.
    """

    study_id: StudyId
    site: SiteName
    key: HashOrEmpty


@dataclass(frozen=True, slots=True)
class MaskKeyRecord(Document):
    """The nonce of the site's mask key for one draw (attempt) of a batch. The mask key is derived from this nonce and
    the ledger's key.
    """

    study_id: StudyId
    batch_id: Annotated[Sha256, Key("batch")]
    draw: Number
    nonce: Sha256


@dataclass(frozen=True, slots=True)
class MaskedRecord(Document):
    """A record that a code was masked for one roster and may be sent.

    A query has at most one such row for each draw. Masking a second code, or the code with other noise, by the same
    masks would reveal the difference of the two.

    Attributes:
        query_id: The query's id.
        draw: Number of the draw.
        masks: One id for the roster and its sites' mask keys together.
        share_std: Standard deviation of the site's share of the noise, in grid steps of 2⁻¹⁶.
        words_sha256: Hash of the masked code.
        batch: The batch, which with the draw identifies the mask key; None in rows of earlier versions.
    """

    query_id: Sha256
    draw: Number
    masks: Sha256
    share_std: Fraction
    words_sha256: Sha256
    batch: Sha256 | None = None
    """The batch, which with the draw identifies the mask key; None in rows of earlier versions."""


@dataclass(frozen=True, slots=True)
class DisclosureRecord(Document):
    """A record that a mask key was disclosed to an auditor. The key, which belongs to one draw (attempt) of a batch, is
    never used again.

    Attributes:
        study_id: The study's id.
        batch_id: The batch.
        draw: Number of the draw.
        masks: One id for the roster and its sites' mask keys together.
        auditor: The public key to which the mask key was encrypted.
        queries: Number of queries that were masked with it.
        mu_squared: Largest possible increase of the pool's Σμ² if the auditor published everything.
    """

    study_id: StudyId
    batch_id: Annotated[Sha256, Key("batch")]
    draw: Number
    masks: Sha256
    auditor: Sha256
    queries: Number
    mu_squared: Fraction
