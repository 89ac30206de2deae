"""How a site asks to be admitted: its name, its patient pool and its public node key, signed by the private one.

The signature proves that the sender holds the key; who the sender is, two people settle by reading the request's
fingerprint to each other. It covers all that is asked, so that nobody is admitted under another name, for another pool
or into another study than was read out. Refuses a request that was altered, a name that is more than one segment of a
path, and a key that is spelled in another way than ours.
"""

from __future__ import annotations

import hashlib
import hmac
import json
from base64 import b64decode, b64encode
from dataclasses import dataclass
from pathlib import Path

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec

from common.canonical import canonical_bytes, check_hash, check_name, check_pool, checked_fields
from common.errors import InvalidInput
from common.objects import write_atomically
from common.pki import load_node_key, node_key_line, parse_node_key

MAX_REQUEST_BYTES = 1 << 16
_PREFIX = "SHA256:"
_FINGERPRINT_DOMAIN = b"consilium/join/v1\0"


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinRequest:
    """What a site sends to the consortium; everything in it is public."""

    study: str
    site: str
    pool: str
    node_key: str

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
        """``SHA256:…`` of all that is signed (study, site, pool, key), to be read out."""
        hashed = hashlib.sha256(_FINGERPRINT_DOMAIN + self.statement()).digest()
        return _PREFIX + b64encode(hashed).decode().rstrip("=")

    def has_fingerprint(self, read_out: str) -> bool:
        """Whether ``read_out`` is this request's fingerprint, with or without its ``SHA256:``."""
        given = _PREFIX + read_out.strip().removeprefix(_PREFIX)
        return hmac.compare_digest(given.encode(), self.fingerprint.encode())

    def statement(self) -> bytes:
        """What is signed."""
        return canonical_bytes(
            {"join": 1, "node_key": self.node_key, "pool": self.pool, "site": self.site, "study": self.study}
        )


def write_request(path: Path, *, study: str, site: str, pool: str, node_key: Path) -> JoinRequest:
    """Make and sign a request with the private key in ``node_key``."""
    key = load_node_key(node_key)
    request = JoinRequest(study=study, site=site, pool=pool, node_key=node_key_line(key.public_key()))
    signature = b64encode(key.sign(request.statement(), ec.ECDSA(hashes.SHA384()))).decode()
    record = {"study": study, "site": site, "pool": pool, "node_key": request.node_key, "signature": signature}
    write_atomically(path, (json.dumps(record, indent=1) + "\n").encode())
    return request


def read_request(path: Path) -> JoinRequest:
    """A request whose signature holds; :class:`InvalidInput` for any other."""
    remedy = "ask the site for its request.json again"
    try:
        with path.open("rb") as stream:
            data = stream.read(MAX_REQUEST_BYTES + 1)
        if len(data) > MAX_REQUEST_BYTES:
            raise InvalidInput("join request", value=str(path), limit=f"{MAX_REQUEST_BYTES} bytes", remedy=remedy)
        record = json.loads(data)
    except (OSError, ValueError, RecursionError) as error:
        raise InvalidInput("join request cannot be read", value=str(path), remedy=remedy) from error
    fields = checked_fields(record, dict.fromkeys(("study", "site", "pool", "node_key", "signature"), str))
    signature = fields.pop("signature")
    request = JoinRequest(**fields)
    try:
        parse_node_key(request.node_key).verify(
            b64decode(signature, validate=True), request.statement(), ec.ECDSA(hashes.SHA384())
        )
    except (InvalidSignature, ValueError) as error:
        raise InvalidInput("signature of the join request", limit="the node key's own", remedy=remedy) from error
    return request
