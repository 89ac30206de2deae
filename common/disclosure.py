"""Defines what a site discloses of one draw of a sealed sum, sealed to the auditor it chose.

It is the private half of the mask key that the site made for this draw alone. Its public half stands in the draw's
roster under the site's signature, so a false one is seen, and all the site's pair secrets of the draw follow from it,
whatever the other end says. With it and the site's words the auditor has the site's code with its share of the noise,
of every query of the draw; nothing else of the site follows from it. Refuses what was sealed to another auditor, or is
of another site or draw.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from common.canonical import canonical_bytes, parse_canonical
from common.document import Count, Filed, Sha256
from common.errors import InvalidInput
from common.fingerprints import fingerprint_of
from common.ledger.charges import SiteName
from common.ledger.keys import Signed, sealing_public_key
from common.ledger.rows import Time
from common.peers import MAX_PEERS, Peer
from common.sealing import open_bytes, seal_bytes

MAX_DISCLOSURE_BYTES = 4 << 20


def auditor_fingerprint(sealing_key: str) -> str:
    """``SHA256:…`` of an auditor's key, to be compared with the auditor by telephone."""
    return fingerprint_of(b"consilium/auditor/v1\0" + bytes.fromhex(sealing_key))


@dataclass(frozen=True, slots=True)
class Disclosure(Signed):
    """``key`` is the private mask key (X25519, hex) of ``site`` for the draw with this ``roster`` id; ``auditor`` the
    key it is sealed to; ``peers`` the identities that the site has confirmed in the study. # sensitive"""

    DOMAIN: ClassVar = b"consilium/disclosure/v1"
    SCHEMA: ClassVar = ("disclosure", 1)

    site: SiteName
    roster: Sha256
    auditor: Sha256
    key: Sha256
    peers: Annotated[tuple[Peer, ...], Count("peers of a disclosure", most=MAX_PEERS)]
    time_utc: Time
    signature: str = ""


@dataclass(frozen=True, slots=True)
class SealedDisclosure(Filed):
    """A disclosure as a file: its auditor, its draw, and a part sealed to that auditor's key."""

    SCHEMA: ClassVar = ("sealed disclosure", 1)
    FILE: ClassVar = ("disclosure", MAX_DISCLOSURE_BYTES)

    site: SiteName
    roster: Sha256
    auditor: Sha256
    sealed: bytes

    @classmethod
    def of(cls, disclosure: Disclosure) -> SealedDisclosure:
        """Seal a signed disclosure to the auditor it names."""
        made = cls(disclosure.site, disclosure.roster, disclosure.auditor, b"")
        key = sealing_public_key(disclosure.auditor)
        sealed = seal_bytes(canonical_bytes(disclosure.to_json()), public_key=key, info=made._info())
        return cls(disclosure.site, disclosure.roster, disclosure.auditor, sealed)

    def opened(self, private: X25519PrivateKey) -> Disclosure:
        """What is sealed; its signature is not checked here. InvalidInput where this key does not open it, or where it
        says another site, draw or auditor inside than outside."""
        what = f"disclosure of {self.site}"
        try:
            text = open_bytes(self.sealed, private_key=private, info=self._info())
        except (InvalidTag, ValueError) as error:
            raise InvalidInput(what, limit="one that was sealed to this auditor's key, unchanged") from error
        found = Disclosure.from_json(parse_canonical(text))
        if (found.site, found.roster, found.auditor) != (self.site, self.roster, self.auditor):
            raise InvalidInput(what, limit="the same site, draw and auditor inside as outside")
        return found

    def _info(self) -> bytes:
        fields = {"auditor": self.auditor, "roster": self.roster, "site": self.site}
        return b"consilium/sealed-disclosure/v1\0" + canonical_bytes(fields)
