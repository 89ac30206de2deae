"""Defines a site's join request: site, patient pool, budget that the pool has spent so far, and public node key.

Sites write requests; the server's operator reads and admits them. The signature proves that the sender holds the key.
It does not prove who the sender is; for that, two people compare the request's fingerprint by telephone. The signature
covers everything that is requested, so nobody is admitted under another name, for another pool or into another study.
Refuses an altered request, a name that is not a single path segment, and a key that is not in OpenSSH's P-384 format.
"""

from __future__ import annotations

from base64 import b64decode, b64encode
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Annotated

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec

from common.canonical import canonical_bytes, check_hash, check_name, check_pool
from common.document import FLAT, LATER, Document
from common.envelope import Sign
from common.errors import InvalidInput
from common.ledger.keys import signing_public_key
from common.objects import write_json
from common.pki import load_node_key, node_key_line, parse_node_key
from common.privacy.mechanism import Protection
from common.public_keys import IdentityKey, fingerprint_of
from common.reading import naming_file, parse_json, read_text

MAX_REQUEST_BYTES = 1 << 16
_FINGERPRINT_DOMAIN = b"consilium/join/v1\0"
_POSSESSION_DOMAIN = b"consilium/join-books/v1\0"


@dataclass(frozen=True, slots=True)
class KitFacts(Document):
    """The facts in a startup kit's kit.json: the site's name, and the server's public keys, addresses and ledger.

    Kits of earlier versions do not state the id of the server's ledger.
    """

    objects_url: str
    sealing_key: str
    signing_key: str
    site: str
    superlink: str
    ledger: Annotated[str, LATER] = ""

    def check(self) -> None:
        """Refuse a site's name that is no single path segment."""
        check_name(self.site, what="site in the startup kit")


@dataclass(frozen=True, slots=True)
class StatedBooks(Document):
    """A site's own statement about the ledger of its patient pool, as part of its join request.

    Attributes:
        ledger_id: Id of the site's ledger.
        answer_key: Public key (Ed25519, hex) of that ledger. It signs all replies of the site.
        mu_squared: Σμ² of all releases that the ledger has charged so far, for the unit and relation of ``protection``
            (μ is the parameter of Gaussian differential privacy; μ² of several releases add up).
        protection: Privacy unit and neighbouring relation of ``mu_squared``.
    """

    ledger_id: str
    answer_key: IdentityKey
    mu_squared: Fraction
    protection: Annotated[Protection, FLAT]

    def check(self) -> None:
        """Refuse an id that is not 32 hex digits, and a negative Σμ²."""
        ledger_id = self.ledger_id
        if len(ledger_id) != 32 or set(ledger_id) - set("0123456789abcdef") or self.mu_squared < 0:
            raise InvalidInput(
                "ledger stated in a join request",
                value=ledger_id,
                limit="an id of 32 hex digits, and a spent Σμ² of at least 0",
                remedy="ask the site for a new request.json",
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinRequest(Document):
    """A site's request to join a study. It contains nothing secret.

    ``books`` is the site's statement about the ledger of its pool; None in requests of older versions.
    """

    study: str
    site: str
    pool: str
    node_key: str
    books: StatedBooks | None = None

    def __post_init__(self) -> None:
        check_hash(self.study)
        check_name(self.site, what="site in the join request")
        check_pool(self.pool, what="patient pool in the join request")
        if node_key_line(parse_node_key(self.node_key)) != self.node_key:
            raise InvalidInput(
                "node key in the join request", limit="ecdsa-sha2-nistp384 and base64, without a comment"
            )

    @property
    def fingerprint(self) -> str:
        """Return the request's fingerprint (``SHA256:…`` over study, site, pool and key), which people compare by
        telephone.
        """
        return fingerprint_of(_FINGERPRINT_DOMAIN + self.statement())

    def statement(self) -> bytes:
        """Return the bytes that the signature covers: the request and its version in canonical JSON."""
        return canonical_bytes({"join": 1, **self.to_json()})


@dataclass(frozen=True, slots=True)
class SignedRequest(Document):
    """A join request with its signatures, as stored in a file. :func:`read_request` checks them.

    ``possession`` is a second signature, in hex: by the key of the site's ledger, which ``request.books`` states. It
    proves that the site has this key. Requests of earlier versions lack it.
    """

    request: Annotated[JoinRequest, FLAT]
    signature: str
    possession: str | None = None


def write_request(
    path: Path,
    *,
    study: str,
    site: str,
    pool: str,
    node_key: Path,
    books: StatedBooks | None = None,
    sign: Sign | None = None,
) -> JoinRequest:
    """Make a join request, sign it with the site's node key and with its ledger's key, and write it.

    Args:
        path: The file to write.
        study: Id of the study.
        site: Name of the site.
        pool: Name of the patient pool.
        node_key: File of the site's private node key.
        books: The site's statement about the ledger of its pool; None to leave it out.
        sign: Signs with the key of that ledger.

    Returns:
        The request.

    Raises:
        InvalidInput: If a name or the key is invalid.
    """
    key = load_node_key(node_key)
    request = JoinRequest(study=study, site=site, pool=pool, node_key=node_key_line(key.public_key()), books=books)
    signature = b64encode(key.sign(request.statement(), ec.ECDSA(hashes.SHA384()))).decode()
    possession = None if sign is None else sign(_POSSESSION_DOMAIN + request.statement()).hex()
    record = SignedRequest(request, signature, possession).to_json()
    write_json(path, record)
    return request


def read_request(path: Path, *, to_admit: bool = False) -> JoinRequest:
    """Read a join request and check its signatures.

    Args:
        path: The file.
        to_admit: True if the site is to be admitted. The request must then prove that the site has the key which it
            states as that of its ledger. Otherwise a site could state another hospital's key, and that hospital could
            never be admitted with it.

    Returns:
        The request.

    Raises:
        InvalidInput: If the file is invalid, or was not signed with the keys that it names.
    """
    remedy = "ask the site for its request.json again"
    text = read_text(path, what="join request", most_bytes=MAX_REQUEST_BYTES, remedy=remedy)
    record = parse_json(text, what="join request", value=str(path), remedy=remedy)
    with naming_file(path, remedy=remedy):
        signed = SignedRequest.from_json(record)
    request = signed.request
    try:
        parse_node_key(request.node_key).verify(
            b64decode(signed.signature, validate=True), request.statement(), ec.ECDSA(hashes.SHA384())
        )
    except (InvalidSignature, ValueError) as error:
        raise InvalidInput(
            "signature of the join request", limit="made with the node key in the request", remedy=remedy
        ) from error
    if request.books is not None and (to_admit or signed.possession is not None):
        _check_possession(request, request.books.answer_key, signed.possession or "")
    return request


def _check_possession(request: JoinRequest, answer_key: str, possession: str) -> None:
    """Raise InvalidInput unless the key of the stated ledger signed the request."""
    try:
        signing_public_key(answer_key).verify(bytes.fromhex(possession), _POSSESSION_DOMAIN + request.statement())
    except (InvalidSignature, ValueError) as error:
        raise InvalidInput(
            "proof in the join request that the site has its ledger's key",
            value=possession[:16] or "no proof",
            limit="made with the key that the request states",
            remedy="have the site upgrade Consilium and write a new request with `consilium site request`",
        ) from error
