"""Defines the ledger rows of sealed sums: how a draw ended, and a site's peers, mask keys and masked codes.

As in :mod:`common.ledger.records`: one frozen type for each kind of body.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import Annotated

from common.document import Document, Key, OneOf, Sha256
from common.ledger.charges import HashOrEmpty, Number, SiteName, StudyId


@dataclass(frozen=True, slots=True)
class AnswerRecord(Document):
    """The noisy sum of a draw that every site of its roster completed; it was charged with the draw."""

    query_id: Sha256
    draw: Number
    answer_sha256: Sha256


@dataclass(frozen=True, slots=True)
class LostDrawRecord(Document):
    """A draw that ends without an answer, and stays charged: a site never completed it, or its sum was ``spoiled``."""

    query_ids: tuple[Sha256, ...]
    draw: Number
    reason: Annotated[str, OneOf("reason of a lost draw", ("incomplete", "spoiled"))]


@dataclass(frozen=True, slots=True)
class PeerRecord(Document):
    """A person at this site has compared the public key of another site of a study with that hospital itself.

    A later row for the same site takes the place of this one; an empty ``key`` takes the confirmation back.
    """

    study_id: StudyId
    site: SiteName
    key: HashOrEmpty


@dataclass(frozen=True, slots=True)
class MaskKeyRecord(Document):
    """The site's mask key for a batch's draw is made of its ledger's key and this ``nonce``, drawn for it alone."""

    study_id: StudyId
    batch_id: Annotated[Sha256, Key("batch")]
    draw: Number
    nonce: Sha256


@dataclass(frozen=True, slots=True)
class MaskedRecord(Document):
    """A code was masked for one roster (``masks`` is its id), with noise of ``share_std``, and may leave as it is.

    Once for a draw: the same masks over another code or other noise would show the difference.
    """

    query_id: Sha256
    draw: Number
    masks: Sha256
    share_std: Fraction
    words_sha256: Sha256
    batch: Sha256 | None = None
    """With the draw's number it names the mask key; None in rows of before it was recorded."""


@dataclass(frozen=True, slots=True)
class DisclosureRecord(Document):
    """The mask key of a batch's draw was disclosed to an auditor; nothing is masked with it any more.

    ``masks`` is the roster's id, ``auditor`` the key it was sealed to. If the auditor told all, the pool's Σμ² would
    grow by at most ``mu_squared``, over the ``queries`` that were masked with this key.
    """

    study_id: StudyId
    batch_id: Annotated[Sha256, Key("batch")]
    draw: Number
    masks: Sha256
    auditor: Sha256
    queries: Number
    mu_squared: Fraction
