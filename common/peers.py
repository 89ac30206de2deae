"""Defines the peers of a site in a sealed study: the other hospitals, each by its name and its ledger's key.

The consortium distributes the list; sites confirm each key. The list alone proves nothing: a server that invents a
hospital, or replaces a hospital's key, could remove the masks from a site's code. A site therefore masks only with
peers whose key a person at the site has confirmed by comparing fingerprints with that hospital. Refuses a list that
names a site or a key twice.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Self

from common.canonical import check_hash
from common.document import Count, Document, Sha256
from common.errors import InvalidInput
from common.ledger.charges import SiteName, check_ledger_name
from common.objects import json_bytes, write_atomically
from common.public_keys import IdentityKey, check_identity_key, fingerprint_of
from common.reading import naming_file, parse_json, read_text

MAX_PEERS = 4096
MAX_PEERS_BYTES = 1 << 20
_DOMAIN = b"consilium/peer/v1\0"


def fingerprint(key: str) -> str:
    """Return the fingerprint of a site's public key, which hospitals read to each other.

    Args:
        key: Ed25519 public key, 64 hex digits.

    Returns:
        ``SHA256:…``.

    Raises:
        InvalidInput: If the key is invalid.
    """
    return fingerprint_of(_DOMAIN + bytes.fromhex(check_identity_key(key)))


@dataclass(frozen=True, slots=True)
class Peer(Document):
    """A site of a study, and the Ed25519 public key (hex) of its ledger, which signs everything that the site sends."""

    site: SiteName
    key: IdentityKey

    def __post_init__(self) -> None:
        check_ledger_name(self.site, what="site name")
        check_identity_key(self.key)


@dataclass(frozen=True, slots=True)
class Peers(Document):
    """The sites of one study sorted by name, each with one key, and no key twice; the content of ``peers.json``."""

    SCHEMA = ("peers.json", 1)

    study: Sha256
    peers: Annotated[tuple[Peer, ...], Count("peers of a study", most=MAX_PEERS)]

    def __post_init__(self) -> None:
        check_hash(self.study)
        for what in ("site", "key"):
            found = Counter(getattr(peer, what) for peer in self.peers)
            twice = sorted(value for value, count in found.items() if count > 1)
            if twice:
                raise InvalidInput(
                    f"{what} that occurs twice in a list of peers", value=twice[:4], limit="each only once"
                )
        if [peer.site for peer in self.peers] != sorted(peer.site for peer in self.peers):
            raise InvalidInput("order of a list of peers", limit="sorted by the sites' names")

    @classmethod
    def of(cls, study: str, peers: Iterable[Peer]) -> Self:
        """Return a sorted list of peers.

        Args:
            study: Id of the study.
            peers: The peers.

        Returns:
            The list.

        Raises:
            InvalidInput: If a site or a key occurs twice.
        """
        return cls(study, tuple(sorted(peers, key=lambda peer: peer.site)))

    def render(self) -> bytes:
        """Return the bytes of the file ``peers.json``."""
        return json_bytes(self.to_json())

    @classmethod
    def parse(cls, data: bytes, *, origin: str) -> Self:
        """Read the bytes that :meth:`render` returned.

        Args:
            data: The bytes.
            origin: Where the bytes come from, in the words of an error.

        Returns:
            The list.

        Raises:
            InvalidInput: For anything else.
        """
        remedy = "ask the consortium for its peers.json again"
        if len(data) > MAX_PEERS_BYTES:
            raise InvalidInput(
                "list of peers", value=origin, limit=f"a file of at most {MAX_PEERS_BYTES} bytes", remedy=remedy
            )
        return cls.from_json(parse_json(data, what="list of peers", value=origin, remedy=remedy))


def read_peers(path: Path) -> Peers:
    """Read a list of peers.

    Args:
        path: The file.

    Returns:
        The list.

    Raises:
        InvalidInput: If the file is unreadable or breaks a rule.
    """
    remedy = "ask the consortium for its peers.json again"
    text = read_text(path, what="list of peers", most_bytes=MAX_PEERS_BYTES, remedy=remedy)
    with naming_file(path, remedy=remedy):
        return Peers.parse(text.encode(), origin=str(path))


def write_peers(path: Path, peers: Peers) -> None:
    """Write a list of peers. A crash leaves either the old file or the new one.

    Args:
        path: The file.
        peers: The list.
    """
    write_atomically(path, peers.render())
