"""How a site asks to be admitted: its name, its patient pool and its public node key, signed by the private one.

The signature proves that the sender holds the key; who the sender is, two people settle by reading the key's
fingerprint to each other. Refuses a request that was altered or that belongs to another study.
"""

from __future__ import annotations

import json
from base64 import b64decode, b64encode
from dataclasses import dataclass
from pathlib import Path

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec

from common.canonical import canonical_bytes, checked_fields
from common.errors import InvalidInput
from common.objects import write_atomically
from common.pki import load_node_key, node_fingerprint, node_key_line, parse_node_key


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinRequest:
    """What a site sends to the consortium; everything in it is public."""

    study: str
    site: str
    pool: str
    node_key: str

    @property
    def fingerprint(self) -> str:
        """``SHA256:…`` of the node key, to be read out."""
        return node_fingerprint(self.node_key)

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
        record = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
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
