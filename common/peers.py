"""Whom a site adds up its codes with: the other hospitals of a study, each by its name and the key of its own ledger.

A list of peers is what the consortium says, and proves nothing: a server that invents a hospital, or exchanges the key
of one, could tell a site's code from the sum. So a site masks only with peers whose key a person there has compared by
its fingerprint with the hospital itself. Refuses a list that names a site or a key twice.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Self

from common.canonical import check_hash
from common.document import Count, Document, Sha256
from common.errors import InvalidInput
from common.fingerprints import fingerprint_of, is_fingerprint
from common.ledger.charges import SiteName, check_ledger_name
from common.objects import write_atomically
from common.public_keys import IdentityKey, check_identity_key
from common.reading import parse_json

MAX_PEERS = 4096
MAX_PEERS_BYTES = 1 << 20
_DOMAIN = b"consilium/peer/v1\0"


def fingerprint(key: str) -> str:
    """``SHA256:…`` of a site's public key (Ed25519, 64 hex digits), to be read out by one hospital to another."""
    return fingerprint_of(_DOMAIN + bytes.fromhex(check_identity_key(key)))


def has_fingerprint(key: str, read_out: str) -> bool:
    """Whether ``read_out`` is the fingerprint of ``key``, with or without its ``SHA256:``."""
    return is_fingerprint(read_out, fingerprint(key))


@dataclass(frozen=True, slots=True)
class Peer(Document):
    """A site of a study, and the Ed25519 public key (hex) of its own ledger, which signs all that it says."""

    site: SiteName
    key: IdentityKey

    def __post_init__(self) -> None:
        check_ledger_name(self.site, what="site name")
        check_identity_key(self.key)


@dataclass(frozen=True, slots=True)
class Peers(Document):
    """The sites of one study, by name: one key each, and no key twice. What ``peers.json`` holds."""

    SCHEMA = ("peers.json", 1)

    study: Sha256
    peers: Annotated[tuple[Peer, ...], Count("peers of a study", most=MAX_PEERS)]

    def __post_init__(self) -> None:
        check_hash(self.study)
        for what in ("site", "key"):
            found = Counter(getattr(peer, what) for peer in self.peers)
            twice = sorted(value for value, count in found.items() if count > 1)
            if twice:
                raise InvalidInput(f"{what} in a list of peers", value=twice[:4], limit="each once")
        if [peer.site for peer in self.peers] != sorted(peer.site for peer in self.peers):
            raise InvalidInput("list of peers", limit="sorted by site")

    @classmethod
    def of(cls, study: str, peers: Iterable[Peer]) -> Self:
        """The list of these peers, sorted."""
        return cls(study, tuple(sorted(peers, key=lambda peer: peer.site)))

    def render(self) -> bytes:
        """The bytes of the file."""
        return (json.dumps(self.to_json(), indent=1) + "\n").encode()

    @classmethod
    def parse(cls, data: bytes, *, origin: str) -> Self:
        """Read what :meth:`render` gave; InvalidInput, naming where it came from, for anything else."""
        remedy = "ask the consortium for its peers.json again"
        if len(data) > MAX_PEERS_BYTES:
            raise InvalidInput("list of peers", value=origin, limit=f"{MAX_PEERS_BYTES} bytes", remedy=remedy)
        return cls.from_json(parse_json(data, what="list of peers", value=origin, remedy=remedy))


def read_peers(path: Path) -> Peers:
    """The list in a file; InvalidInput for one that cannot be read or that breaks a rule."""
    try:
        with path.open("rb") as stream:
            data = stream.read(MAX_PEERS_BYTES + 1)
    except OSError as error:
        raise InvalidInput("list of peers cannot be read", value=str(path), remedy="check the path") from error
    return Peers.parse(data, origin=str(path))


def write_peers(path: Path, peers: Peers) -> None:
    """Put a list into a file: the old one or the new one, never a part."""
    write_atomically(path, peers.render())
