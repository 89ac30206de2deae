"""Authenticates requests that are signed with a site's node key, against the list of admitted keys.

The gateway calls it for every request. Flower's own SuperNodes sign a timestamp; a site's other requests (for public
objects) sign method, path and timestamp. Refuses a key that is not on the list, an invalid signature, a clock that is
too far off, and a signature that was used before. ECDSA signatures are randomised, so an honest sender never repeats
one. A signature is a pair of numbers (r, s), and is also valid as (r, n − s) for the curve's order n. Only the value r
of each signature is therefore remembered.

Used signatures are remembered in memory only. After a restart, a signature from before the start is therefore refused
too; the site's next try is signed anew. One gap remains: a site whose clock is ahead may sign a time
after the restart. Such a request, used before the restart, can be repeated once, for at most :data:`MAX_LEAD_S`.
"""

from __future__ import annotations

from base64 import b64decode, b64encode
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from heapq import heappop, heappush
from pathlib import Path
from typing import Annotated

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.utils import decode_dss_signature
from cryptography.hazmat.primitives.serialization import load_pem_public_key

from common.document import LATER, Document
from common.errors import InvalidInput, Refused
from common.objects import write_json
from common.pki import node_key_line, parse_node_key
from common.reading import parse_json

KEY, TIME, SIGNATURE = "consilium-key", "consilium-timestamp", "consilium-signature"
FLOWER_KEY, FLOWER_TIME, FLOWER_SIGNATURE = "flwr-public-key", "flwr-timestamp", "flwr-signature"

MAX_AGE_S = 300.0
MAX_LEAD_S = 60.0
"""Seconds by which a site's clock may be behind (``MAX_AGE_S``) or ahead (``MAX_LEAD_S``). Flower itself allows 305 s
and 5 s."""

MAX_REMEMBERED = 20_000
"""Largest number of remembered signatures of one key. Each is kept for the six minutes in which it is valid. It is kept
longer while there is room, because an expired signature is valid again if the clock is set back."""


@dataclass(frozen=True, slots=True)
class AdmittedNode(Document):
    """An admitted site.

    Attributes:
        site: Name of the site.
        key: Its public node key, ``ecdsa-sha2-nistp384 BASE64``, as the consortium approved it.
        node_id: Flower node id of the key; 0 in lists of earlier versions.
    """

    site: str
    key: str
    node_id: Annotated[int, LATER] = 0


def read_admitted(path: Path) -> tuple[AdmittedNode, ...]:
    """Return the list of admitted sites.

    Args:
        path: The file; a missing file admits nobody.

    Returns:
        The sites.

    Raises:
        InvalidInput: If the file is invalid.
    """
    try:
        text = path.read_bytes()
    except FileNotFoundError:
        return ()
    records = parse_json(text, what="list of admitted nodes", value=str(path))
    if not isinstance(records, list):
        raise InvalidInput("list of admitted nodes", value=str(path), limit="a JSON list of sites")
    return tuple(map(AdmittedNode.from_json, records))


def write_admitted(path: Path, nodes: tuple[AdmittedNode, ...]) -> None:
    """Replace the list of admitted sites.

    Args:
        path: The file.
        nodes: The sites.

    Raises:
        InvalidInput: If a site or a key occurs twice.
    """
    for name in ("site", "key"):
        values = [getattr(node, name) for node in nodes]
        if len(set(values)) != len(values):
            raise InvalidInput(
                f"two admitted sites have the same {name}", value=sorted(values), limit="each value once"
            )
    records = [node.to_json() for node in nodes]
    write_json(path, records)


def signed_headers(key: ec.EllipticCurvePrivateKey, *, method: str, path: str, now: datetime) -> dict[str, str]:
    """Return headers by which the gateway can verify which site sends a request.

    Args:
        key: The site's private node key.
        method: HTTP method.
        path: Path of the request, without host or query.
        now: Current time.

    Returns:
        Headers by name.
    """
    stamp = now.astimezone(UTC).isoformat()
    signature = key.sign(_statement(method, path, stamp), ec.ECDSA(hashes.SHA256()))
    return {KEY: node_key_line(key.public_key()), TIME: stamp, SIGNATURE: b64encode(signature).decode()}


class RequestAdmission:
    """Decides which requests are admitted. It reads the list again whenever the file changes, so a revocation takes
    effect at once.

    Args:
        nodes_file: The list of admitted sites.
        started: When this process began to remember signatures; None to admit signatures from before, too.
    """

    def __init__(self, nodes_file: Path, *, started: datetime | None = None) -> None:
        self._file, self._started = nodes_file, started
        self._version: tuple[int, int] | None = None
        self._sites: dict[str, str] = {}
        self._node_ids: dict[str, int] = {}
        self._memories: dict[str, _Memory] = {}

    def admit(self, headers: Mapping[str, str], *, method: str, path: str, now: datetime) -> str:
        """Return the site that signed a request.

        Args:
            headers: The request's headers in lower case.
            method: HTTP method.
            path: Path of the request.
            now: Current time.

        Returns:
            Name of the site.

        Raises:
            Refused: With code ``unsigned``, ``unknown-key``, ``signature``, ``clock``, ``starting`` (signed before the
                start), ``replayed``, or ``busy`` (more than :data:`MAX_REMEMBERED` requests with one key in six
                minutes).
        """
        flower = FLOWER_KEY in headers
        try:
            key = claimed_key(headers)
            stamp, signature = (headers[n] for n in ((FLOWER_TIME, FLOWER_SIGNATURE) if flower else (TIME, SIGNATURE)))
            raw = b64decode(signature, validate=True)
        except (KeyError, ValueError) as error:
            raise Refused(
                "unsigned",
                "unsigned: the request lacks a key, a time or a signature in its headers; to fix: let no proxy remove "
                "headers, and start the site with `consilium site up`",
            ) from error
        site = self._known().get(key)
        if site is None:
            raise Refused(
                "unknown-key",
                "unknown-key: the request is signed with a key that is not on the list of admitted sites; to fix: "
                "register the site with `consilium provision approve`, if it belongs to the study",
            )
        statement = stamp.encode() if flower else _statement(method, path, stamp)
        try:
            parse_node_key(key).verify(raw, statement, ec.ECDSA(hashes.SHA256()))
            signed_at = datetime.fromisoformat(stamp)
            age_s = (now - signed_at).total_seconds()
        except (InvalidSignature, ValueError, TypeError) as error:
            raise Refused(
                "signature",
                "signature: the request's signature or its time is not valid; to fix: let no proxy change the "
                "request's path or headers",
            ) from error
        if not -MAX_LEAD_S <= age_s <= MAX_AGE_S:
            raise Refused(
                "clock", "clock: the request's time is too far from the server's; to fix: set the site's clock"
            )
        if self._started is not None and 0 < (self._started - signed_at).total_seconds() <= MAX_AGE_S + MAX_LEAD_S:
            raise Refused(  # a larger difference means that this machine's clock was set back after the start
                "starting",
                "starting: the request was signed before the server's gateway started, by the site's clock; to fix: "
                "wait some minutes, or set the site's clock",
            )
        self._once(key, decode_dss_signature(raw)[0], now.timestamp())
        return site

    def knows(self, key: str) -> bool:
        """Return whether a key is on the list. This proves nothing about the sender, since no signature is checked.

        Args:
            key: Public node key.

        Returns:
            True if the key is on the list.
        """
        try:
            return key in self._known()
        except (InvalidInput, OSError):
            return False

    def node_id(self, site: str) -> int:
        """Return the Flower node id of a site, from the list that the last call of :meth:`admit` or :meth:`knows` used.

        Args:
            site: Name of the site.

        Returns:
            The id; 0 if the list does not state it.
        """
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
        """Refuse a signature that was used before. Remember others by their number r (ECDSA), at least while they are
        valid.
        """
        memory = self._memories.setdefault(key, _Memory())
        if name in memory.names:
            raise Refused("replayed", "replayed: this signature was used before; to fix: let no proxy repeat requests")
        if len(memory.names) >= MAX_REMEMBERED and not memory.forget_one(before_s=now_s):
            raise Refused("busy", "busy: too many requests with this key in six minutes; to fix: wait some minutes")
        memory.keep(name, until_s=now_s + MAX_AGE_S + MAX_LEAD_S)


@dataclass(slots=True)
class _Memory:
    """Recent signatures of one key, as a heap ordered by when they expire.

    A signature that came while this machine's clock was ahead expires late, but delays no other one.
    """

    names: set[int] = field(default_factory=set)
    order: list[tuple[float, int]] = field(default_factory=list)

    def keep(self, name: int, *, until_s: float) -> None:
        self.names.add(name)
        heappush(self.order, (until_s, name))

    def forget_one(self, *, before_s: float) -> bool:
        """Forget the signature that expired first; return False if all are valid, because these could be replayed."""
        if not self.order or self.order[0][0] > before_s:
            return False
        self.names.discard(heappop(self.order)[1])
        return True


def _statement(method: str, path: str, stamp: str) -> bytes:
    return "\n".join(("consilium/request/v1", method, path, stamp)).encode()


def claimed_key(headers: Mapping[str, str]) -> str:
    """Return the key that a request claims to be signed by, in the form of the list of admitted sites.

    Args:
        headers: The request's headers.

    Returns:
        The public node key.

    Raises:
        KeyError: If the request names no key.
        ValueError: If the text in its header is not a key.
    """
    return _flower_key(headers[FLOWER_KEY]) if FLOWER_KEY in headers else headers[KEY]


def _flower_key(header: str) -> str:
    """Convert a key that Flower sends (base64 of PEM) to the form of a site's ``node.pub``."""
    try:
        key = load_pem_public_key(b64decode(header, validate=True))
    except Exception as error:  # the library names unknown algorithms and curves by errors of its own
        raise ValueError("not a PEM key") from error
    if not isinstance(key, ec.EllipticCurvePublicKey):
        raise ValueError("not an elliptic curve key")
    return node_key_line(key)
