"""Words of a sealed sum as evidence: each site signs what it sent, for one roster and one query.

The signature is the site's identity key's, which other hospitals have confirmed by its fingerprint; the roster's id
covers study, ledger, batch, draw and every member's mask key. So a site cannot deny a word, and a word of one draw is
none of another. Words are uniform to whoever lacks the masks, so keeping them shows no more than having received them.
Refuses evidence whose roster no member list can have, words of another length, and a query named twice.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, ClassVar

import numpy as np
from cryptography.exceptions import InvalidSignature
from numpy.typing import NDArray

from common.canonical import canonical_bytes, sha256_bytes
from common.document import Count, Document, Filed, Sha256
from common.envelope import Sign
from common.errors import InvalidInput
from common.ledger.charges import SiteName
from common.ledger.keys import signing_public_key
from common.masking import MAX_MEMBERS, MaskedRoster
from common.privacy.mechanism import QuerySpec

MAX_QUERIES = 500
MAX_EVIDENCE_BYTES = 1 << 30


def check_word_signature(signature: bytes) -> None:
    """InvalidInput unless it has the 64 bytes of an Ed25519 signature."""
    if len(signature) != 64:
        raise InvalidInput("signature of a word", value=f"{len(signature)} bytes", limit="64 bytes")


WordSignature = Annotated[bytes, check_word_signature]


def sign_word(words: NDArray[np.uint64], *, roster: str, query: str, site: str, sign: Sign) -> bytes:
    """A site's signature over the words uint64[l] it sends for one query under one roster (its id)."""
    return sign(_statement(words, roster=roster, query=query, site=site))


def is_word_of(
    words: NDArray[np.uint64], signature: bytes, *, roster: str, query: str, site: str, identity: str
) -> bool:
    """Whether the ledger key ``identity`` (Ed25519, hex) of ``site`` signed these words for this query and roster."""
    try:
        key = signing_public_key(identity)
        key.verify(signature, _statement(words, roster=roster, query=query, site=site))
    except (InvalidSignature, InvalidInput):
        return False
    return True


@dataclass(frozen=True, slots=True)
class Word(Document):
    """The words of one query, as little-endian bytes, and the site's signature over their hash."""

    query: Sha256
    words: bytes
    signature: WordSignature

    @property
    def values(self) -> NDArray[np.uint64]:
        """uint64[l]."""
        if len(self.words) % 8:
            raise InvalidInput("words", value=f"{len(self.words)} bytes", limit="8 bytes a word")
        return np.frombuffer(self.words, dtype="<u8").astype(np.uint64)


@dataclass(frozen=True, slots=True)
class SiteWords(Filed):
    """All that one site sent for one roster."""

    SCHEMA: ClassVar = ("words of a site", 1)

    site: SiteName
    roster: Sha256
    words: Annotated[tuple[Word, ...], Count("queries of a draw", least=1, most=MAX_QUERIES)]

    @classmethod
    def of(
        cls, site: str, roster: str, words: Mapping[str, NDArray[np.uint64]], signatures: Mapping[str, bytes]
    ) -> SiteWords:
        """What a site sent, by query id."""
        found = (Word(query, one.astype("<u8").tobytes(), signatures[query]) for query, one in words.items())
        return cls(site, roster, tuple(found))


@dataclass(frozen=True, slots=True)
class DrawEvidence(Filed):
    """One draw as an auditor gets it: its roster, the queries it was to answer, and every site's signed words."""

    SCHEMA: ClassVar = ("evidence of a draw", 1)
    FILE: ClassVar = ("evidence", MAX_EVIDENCE_BYTES)

    roster: MaskedRoster
    queries: Annotated[tuple[QuerySpec, ...], Count("queries of a draw", least=1, most=MAX_QUERIES)]
    sites: Annotated[tuple[SiteWords, ...], Count("sites of a draw", most=MAX_MEMBERS)]

    def check(self) -> None:
        self.roster.check()
        names = [words.site for words in self.sites]
        if len(set(names)) != len(names) or not set(names) <= set(self.roster.sites):
            raise InvalidInput("sites of the evidence", value=names[:8], limit="members of its roster, each once")
        if len({query.id for query in self.queries}) != len(self.queries):
            raise InvalidInput("queries of the evidence", limit="each once")
        if len({query.mechanism for query in self.queries}) != 1:
            raise InvalidInput("queries of the evidence", limit="of one mechanism, as one study's are")
        if any(words.roster != self.roster.id for words in self.sites):
            raise InvalidInput("words of the evidence", limit="of its own roster")

    @property
    def id(self) -> str:
        """SHA-256 of its canonical bytes."""
        return sha256_bytes(self.render())


def _statement(words: NDArray[np.uint64], *, roster: str, query: str, site: str) -> bytes:
    fields = {"query": query, "roster": roster, "site": site, "words": sha256_bytes(words.astype("<u8").tobytes())}
    return b"consilium/word/v1\0" + canonical_bytes(fields)
