"""Defines a site's disclosure about one draw of a sealed sum, encrypted to an auditor that the site chose.

A draw is one attempt at a sealed sum. Sites write disclosures; the dispute command opens them. A disclosure contains
the private mask key that the site made for this draw alone. The public key is in the draw's roster under the site's
signature, so a false private key is detected. The auditor derives all pairwise masks of the site in this draw from the
key, without help of the other sites. With the masked code that the site sent, the auditor gets the site's code plus its
noise share for every query of the draw, and nothing else about the site. Refuses a disclosure that was encrypted to
another auditor, or belongs to another site or draw.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from common.canonical import canonical_bytes, parse_canonical
from common.document import Count, Sha256, StoredDocument
from common.errors import InvalidInput
from common.ledger.charges import SiteName
from common.ledger.keys import Signed, sealing_public_key
from common.ledger.rows import Time
from common.peers import MAX_PEERS, Peer
from common.public_keys import fingerprint_of
from common.sealing import SUITE

MAX_DISCLOSURE_BYTES = 4 << 20


def auditor_fingerprint(sealing_key: str) -> str:
    """Return the fingerprint of an auditor's key, which people compare by telephone.

    Args:
        sealing_key: X25519 public key in hex.

    Returns:
        ``SHA256:…``.
    """
    return fingerprint_of(b"consilium/auditor/v1\0" + bytes.fromhex(sealing_key))


@dataclass(frozen=True, slots=True)
class Disclosure(Signed):
    """A site's private mask key for one draw (one attempt at a sealed sum), signed by the site. # sensitive

    Attributes:
        site: Name of the site.
        roster: Id of the draw's roster.
        auditor: Public key of the auditor.
        key: The private mask key (X25519, hex).
        peers: Names and public keys of the other sites, as this site has confirmed them for the study.
        time_utc: When it was made.
        signature: Signature by the site's ledger key.
    """

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
class SealedDisclosure(StoredDocument):
    """A disclosure as a file: site, draw (attempt at a sealed sum) and auditor in plain text, the rest encrypted to the
    auditor's key.
    """

    SCHEMA: ClassVar = ("sealed disclosure", 1)
    FILE: ClassVar = ("disclosure", MAX_DISCLOSURE_BYTES)

    site: SiteName
    roster: Sha256
    auditor: Sha256
    sealed: bytes

    @classmethod
    def of(cls, disclosure: Disclosure) -> SealedDisclosure:
        """Encrypt a signed disclosure to the auditor that it names.

        Args:
            disclosure: The disclosure.

        Returns:
            The encrypted disclosure.
        """
        made = cls(disclosure.site, disclosure.roster, disclosure.auditor, b"")
        key = sealing_public_key(disclosure.auditor)
        sealed = SUITE.encrypt(canonical_bytes(disclosure.to_json()), key, info=made._info())
        return cls(disclosure.site, disclosure.roster, disclosure.auditor, sealed)

    def opened(self, private: X25519PrivateKey) -> Disclosure:
        """Decrypt the disclosure. Its signature is not checked.

        Args:
            private: The auditor's private key.

        Returns:
            The disclosure.

        Raises:
            InvalidInput: If the key does not decrypt it, or the encrypted part names another site, draw or auditor than
                the plain part.
        """
        what = f"disclosure of {self.site}"
        try:
            text = SUITE.decrypt(self.sealed, private, info=self._info())
        except (InvalidTag, ValueError) as error:
            raise InvalidInput(what, limit="an unchanged file that was encrypted to this auditor's key") from error
        found = Disclosure.from_json(parse_canonical(text))
        if (found.site, found.roster, found.auditor) != (self.site, self.roster, self.auditor):
            raise InvalidInput(
                what, limit="the same site, draw and auditor in the encrypted part and in the plain part"
            )
        return found

    def _info(self) -> bytes:
        fields = {"auditor": self.auditor, "roster": self.roster, "site": self.site}
        return b"consilium/sealed-disclosure/v1\0" + canonical_bytes(fields)
