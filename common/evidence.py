"""Defines the evidence about a sealed sum: the masked codes that sites sent, each signed for one roster and one query.

A roster lists the sites of one attempt at the sum. The server collects the evidence; the dispute command and auditors
check it. The signature is made with the key of the site's ledger, which other hospitals have confirmed by its
fingerprint. The roster's id covers study, ledger, batch, draw (the attempt at the sum) and every member's mask key. A
site can therefore not deny its masked codes, and those of one draw cannot pass as those of another. Masked codes are
uniformly distributed for anybody without the masks, so storing them reveals no more than receiving them. Refuses
evidence with an invalid roster, with masked codes of a site that is not on it or for another roster, and with a query
named twice.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, ClassVar

import numpy as np
from cryptography.exceptions import InvalidSignature
from numpy.typing import NDArray

from common.canonical import canonical_bytes, sha256_bytes
from common.document import Count, Document, Sha256, StoredDocument
from common.envelope import Sign
from common.errors import InvalidInput
from common.ledger.charges import SiteName
from common.ledger.keys import signing_public_key
from common.masking import MAX_MEMBERS, MaskedRoster
from common.privacy.mechanism import QuerySpec

MAX_QUERIES = 500
MAX_EVIDENCE_BYTES = 1 << 30


def _check_word_signature(signature: bytes) -> None:
    """Refuse a signature that does not have the 64 bytes of Ed25519."""
    if len(signature) != 64:
        raise InvalidInput("signature of a masked code", value=f"{len(signature)} bytes", limit="64 bytes")


WordSignature = Annotated[bytes, _check_word_signature]


def sign_word(words: NDArray[np.uint64], *, roster: str, query: str, site: str, sign: Sign) -> bytes:
    """Sign the masked code that a site sends for one query in one attempt at a sealed sum, which its roster identifies.

    Args:
        words: Masked code, uint64 [l].
        roster: Id of the roster.
        query: Id of the query.
        site: Name of the site.
        sign: Signs with the site's ledger key.

    Returns:
        The signature.
    """
    return sign(_statement(words, roster=roster, query=query, site=site))


def is_word_of(
    words: NDArray[np.uint64], signature: bytes, *, roster: str, query: str, site: str, identity: str
) -> bool:
    """Return whether a site signed this masked code for this query and for this roster (attempt at a sealed sum).

    Args:
        words: Masked code, uint64 [l].
        signature: The signature.
        roster: Id of the roster.
        query: Id of the query.
        site: Name of the site.
        identity: The site's ledger key (Ed25519, hex).

    Returns:
        True if the signature is valid.
    """
    try:
        key = signing_public_key(identity)
        key.verify(signature, _statement(words, roster=roster, query=query, site=site))
    except (InvalidSignature, InvalidInput):
        return False
    return True


@dataclass(frozen=True, slots=True)
class SignedCode(Document):
    """The masked code of one query as little-endian bytes, and the site's signature over its hash."""

    query: Sha256
    words: bytes
    signature: WordSignature

    @property
    def values(self) -> NDArray[np.uint64]:
        """The masked code as uint64 [l]; raises InvalidInput if the number of bytes is no multiple of 8."""
        if len(self.words) % 8:
            raise InvalidInput("masked code", value=f"{len(self.words)} bytes", limit="a multiple of 8 bytes")
        return np.frombuffer(self.words, dtype="<u8").astype(np.uint64)


@dataclass(frozen=True, slots=True)
class SiteCodes(StoredDocument):
    """All masked codes that one site sent for one roster (one attempt at a sealed sum)."""

    SCHEMA: ClassVar = ("words of a site", 1)

    site: SiteName
    roster: Sha256
    words: Annotated[tuple[SignedCode, ...], Count("queries of a draw", least=1, most=MAX_QUERIES)]

    @classmethod
    def of(
        cls, site: str, roster: str, words: Mapping[str, NDArray[np.uint64]], signatures: Mapping[str, bytes]
    ) -> SiteCodes:
        """Return a document with the masked codes that a site sent.

        Args:
            site: Name of the site.
            roster: Id of the roster.
            words: Masked codes by query id.
            signatures: Signatures by query id.

        Returns:
            The document.
        """
        found = (SignedCode(query, one.astype("<u8").tobytes(), signatures[query]) for query, one in words.items())
        return cls(site, roster, tuple(found))


@dataclass(frozen=True, slots=True)
class DrawEvidence(StoredDocument):
    """The evidence of one draw (attempt at a sealed sum) for an auditor: its sites, queries and signed masked codes."""

    SCHEMA: ClassVar = ("evidence of a draw", 1)
    FILE: ClassVar = ("evidence", MAX_EVIDENCE_BYTES)

    roster: MaskedRoster
    queries: Annotated[tuple[QuerySpec, ...], Count("queries of a draw", least=1, most=MAX_QUERIES)]
    sites: Annotated[tuple[SiteCodes, ...], Count("sites of a draw", most=MAX_MEMBERS)]

    def check(self) -> None:
        """Check that sites, queries and masked codes belong to this draw (attempt at a sealed sum).

        Refuses a site that is not on the roster or occurs twice, a query that occurs twice, queries with different
        mechanisms, and a site's masked codes that were sent for another roster.
        """
        self.roster.check()
        names = [words.site for words in self.sites]
        if len(set(names)) != len(names) or not set(names) <= set(self.roster.sites):
            raise InvalidInput(
                "sites of the evidence", value=names[:8], limit="sites on the roster of this evidence, each once"
            )
        if len({query.id for query in self.queries}) != len(self.queries):
            raise InvalidInput("queries of the evidence", limit="each query once")
        if len({query.mechanism for query in self.queries}) != 1:
            raise InvalidInput(
                "queries of the evidence",
                limit="queries with the same noise mechanism, as in every study",
            )
        if any(words.roster != self.roster.id for words in self.sites):
            raise InvalidInput("masked codes of the evidence", limit="masked codes sent for the evidence's own roster")

    @property
    def id(self) -> str:
        """SHA-256 of the evidence's canonical bytes."""
        return sha256_bytes(self.render())


def _statement(words: NDArray[np.uint64], *, roster: str, query: str, site: str) -> bytes:
    fields = {"query": query, "roster": roster, "site": site, "words": sha256_bytes(words.astype("<u8").tobytes())}
    return b"consilium/word/v1\0" + canonical_bytes(fields)
