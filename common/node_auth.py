"""Authenticates requests that are signed with a site's node key, against the list of admitted keys.

Flower's own SuperNodes sign a timestamp; a site's other requests (public objects) sign method, path and timestamp.
Refuses a key that is not on the list, a signature that does not hold, a clock more than five minutes off, and a
signature that was seen before: ECDSA signatures are randomised, so an honest sender never repeats one (what is
remembered is r, which a forger who turns s into n - s cannot change).
"""

from __future__ import annotations

import json
from base64 import b64decode, b64encode
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.utils import decode_dss_signature
from cryptography.hazmat.primitives.serialization import load_pem_public_key

from common.document import LATER, Document
from common.errors import InvalidInput, Refused
from common.objects import write_atomically
from common.pki import node_key_line, parse_node_key
from common.reading import parse_json

KEY, TIME, SIGNATURE = "consilium-key", "consilium-timestamp", "consilium-signature"
FLOWER_KEY, FLOWER_TIME, FLOWER_SIGNATURE = "flwr-public-key", "flwr-timestamp", "flwr-signature"

MAX_AGE_S = 300.0
MAX_LEAD_S = 60.0
"""How far a site's clock may run behind and ahead. Flower itself allows 305 s and 5 s."""

MAX_REMEMBERED = 20_000
"""Signatures of one key that are remembered at a time, over the six minutes that one may be used in."""


@dataclass(frozen=True, slots=True)
class AdmittedNode(Document):
    """A site, the public node key (``ecdsa-sha2-nistp384 BASE64``) the consortium approved for it, and the Flower node
    id that the key was given; 0 in a list that an earlier version wrote."""

    site: str
    key: str
    node_id: Annotated[int, LATER] = 0


def read_admitted(path: Path) -> tuple[AdmittedNode, ...]:
    """The list on disk; an absent file admits nobody."""
    try:
        text = path.read_bytes()
    except FileNotFoundError:
        return ()
    records = parse_json(text, what="list of admitted nodes", value=str(path))
    if not isinstance(records, list):
        raise InvalidInput("list of admitted nodes", value=str(path), limit="a list")
    return tuple(map(AdmittedNode.from_json, records))


def write_admitted(path: Path, nodes: tuple[AdmittedNode, ...]) -> None:
    """Replace the list; no site and no key may stand twice."""
    for name in ("site", "key"):
        values = [getattr(node, name) for node in nodes]
        if len(set(values)) != len(values):
            raise InvalidInput(
                f"two admitted nodes have the same {name}", value=sorted(values), limit="each value once"
            )
    records = [node.to_json() for node in nodes]
    write_atomically(path, (json.dumps(records, indent=1) + "\n").encode())


def signed_headers(key: ec.EllipticCurvePrivateKey, *, method: str, path: str, now: datetime) -> dict[str, str]:
    """Headers that prove to the gateway who asks for ``path`` (the path alone, without host or query)."""
    stamp = now.astimezone(UTC).isoformat()
    signature = key.sign(_statement(method, path, stamp), ec.ECDSA(hashes.SHA256()))
    return {KEY: node_key_line(key.public_key()), TIME: stamp, SIGNATURE: b64encode(signature).decode()}


class Gatekeeper:
    """Decides whose request passes. Reads the list anew whenever its file changes, so a revocation holds at once."""

    def __init__(self, nodes_file: Path) -> None:
        self._file = nodes_file
        self._version: tuple[int, int] | None = None
        self._sites: dict[str, str] = {}
        self._node_ids: dict[str, int] = {}
        self._memories: dict[str, _Memory] = {}

    def admit(self, headers: Mapping[str, str], *, method: str, path: str, now: datetime) -> str:
        """The site that signed this request; :class:`Refused` with a word for why not.

        Words: ``unsigned``, ``unknown-key``, ``signature``, ``clock``, ``replayed``, ``busy`` (more than
        :data:`MAX_REMEMBERED` requests with one key in six minutes).
        """
        flower = FLOWER_KEY in headers
        try:
            key = claimed_key(headers)
            stamp, signature = (headers[n] for n in ((FLOWER_TIME, FLOWER_SIGNATURE) if flower else (TIME, SIGNATURE)))
            raw = b64decode(signature, validate=True)
        except (KeyError, ValueError) as error:
            raise Refused("unsigned") from error
        site = self._known().get(key)
        if site is None:
            raise Refused("unknown-key")
        statement = stamp.encode() if flower else _statement(method, path, stamp)
        try:
            parse_node_key(key).verify(raw, statement, ec.ECDSA(hashes.SHA256()))
            age_s = (now - datetime.fromisoformat(stamp)).total_seconds()
        except (InvalidSignature, ValueError, TypeError) as error:
            raise Refused("signature") from error
        if not -MAX_LEAD_S <= age_s <= MAX_AGE_S:
            raise Refused("clock")
        self._once(key, decode_dss_signature(raw)[0], now.timestamp())
        return site

    def knows(self, key: str) -> bool:
        """Whether a key that a request names is on the list. It proves nothing: no signature is checked."""
        try:
            return key in self._known()
        except (InvalidInput, OSError):
            return False

    def node_id(self, site: str) -> int:
        """The Flower node id of a site that was just admitted; 0 where the list does not say."""
        return self._node_ids.get(site, 0)

    def _known(self) -> dict[str, str]:
        try:
            status = self._file.stat()
            version = (status.st_mtime_ns, status.st_ino)
        except FileNotFoundError:
            version = None
        if version is None or version != self._version:
            admitted = read_admitted(self._file)
            self._sites = {node.key: node.site for node in admitted}
            self._node_ids = {node.site: node.node_id for node in admitted}
            self._version = version
        return self._sites

    def _once(self, key: str, name: int, now_s: float) -> None:
        """Remember a signature by its r until it would be too late to send it."""
        memory = self._memories.setdefault(key, _Memory())
        memory.forget(before_s=now_s)
        if name in memory.names:
            raise Refused("replayed")
        if len(memory.names) >= MAX_REMEMBERED:  # forgetting one early would let it be sent again
            raise Refused("busy")
        memory.keep(name, until_s=now_s + MAX_AGE_S + MAX_LEAD_S)


@dataclass(slots=True)
class _Memory:
    """What one key signed lately, in the order in which it may be forgotten: a request costs the same however many."""

    names: set[int] = field(default_factory=set)
    order: deque[tuple[float, int]] = field(default_factory=deque)

    def keep(self, name: int, *, until_s: float) -> None:
        self.names.add(name)
        self.order.append((until_s, name))

    def forget(self, *, before_s: float) -> None:
        while self.order and self.order[0][0] <= before_s:
            self.names.discard(self.order.popleft()[1])


def _statement(method: str, path: str, stamp: str) -> bytes:
    return "\n".join(("consilium/request/v1", method, path, stamp)).encode()


def claimed_key(headers: Mapping[str, str]) -> str:
    """The key that a request says it is signed by, as the list of nodes writes it.

    Raises:
        KeyError: If the request names none.
        ValueError: If what it names is no key.
    """
    return _flower_key(headers[FLOWER_KEY]) if FLOWER_KEY in headers else headers[KEY]


def _flower_key(header: str) -> str:
    """Flower sends its key as base64 of PEM; here it is written as the site's ``node.pub`` is."""
    key = load_pem_public_key(b64decode(header, validate=True))
    if not isinstance(key, ec.EllipticCurvePublicKey):
        raise ValueError("not an elliptic curve key")
    return node_key_line(key)
