from __future__ import annotations

import base64
import hashlib
import json
from pathlib import Path

import pytest

from common.errors import InvalidInput
from common.peers import MAX_PEERS_BYTES, Peer, Peers, fingerprint, read_peers, write_peers
from common.public_keys import is_fingerprint

A, B, C = "a" * 64, "b" * 64, "c" * 64
STUDY = "5" * 64


def test_a_fingerprint_is_this_hash_for_ever() -> None:
    hashed = hashlib.sha256(b"consilium/peer/v1\0" + bytes.fromhex(A)).digest()
    assert fingerprint(A) == "SHA256:" + base64.b64encode(hashed).decode().rstrip("=")
    assert fingerprint(A) == "SHA256:e3Fzi6WCDvUdFju3vIFKKqq8DAWVW0CM22uyAaF4taY"


def test_a_fingerprint_is_compared_as_people_type_it_and_in_full() -> None:
    meant = fingerprint(A)
    assert is_fingerprint(meant, fingerprint(A))
    assert is_fingerprint(f"  {meant.removeprefix('SHA256:')}\n", fingerprint(A))
    for wrong in ("", "SHA256:", meant[:-1], meant + "=", meant.swapcase(), fingerprint(B), "\udc80", "ü"):
        assert not is_fingerprint(wrong, fingerprint(A))


@pytest.mark.parametrize("key", ["", "a" * 63, "A" * 64, "g" * 64, "a" * 65])
def test_a_key_has_one_spelling(key: str) -> None:
    with pytest.raises(InvalidInput):
        Peer("south", key)
    with pytest.raises(InvalidInput):
        fingerprint(key)


def test_a_list_comes_back_from_its_file_as_it_was_sorted_by_site(tmp_path: Path) -> None:
    listed = Peers.of(STUDY, [Peer("south", B), Peer("north", A)])
    write_peers(tmp_path / "peers.json", listed)
    assert read_peers(tmp_path / "peers.json") == listed
    assert [peer.site for peer in listed.peers] == ["north", "south"]


@pytest.mark.parametrize(
    "peers",
    [
        [{"site": "north", "key": A}, {"site": "south", "key": A}],
        [{"site": "north", "key": A}, {"site": "north", "key": B}],
        [{"site": "south", "key": A}, {"site": "north", "key": B}],
        [{"site": "north", "key": A.upper()}],
        [{"site": "north", "key": A, "confirmed": True}],
        [{"site": "north south", "key": A}],
        [{"site": "\x1b[2K", "key": A}],
        [{"site": "north"}],
        {"north": A},
    ],
)
def test_a_list_that_was_tampered_with_is_refused(peers: object, tmp_path: Path) -> None:
    path = tmp_path / "peers.json"
    path.write_text(json.dumps({"schema": 1, "study": STUDY, "peers": peers}))
    with pytest.raises(InvalidInput):
        read_peers(path)


@pytest.mark.parametrize(
    "data",
    [b"", b"{", b"[]", b"null", b"\xff", b"[" * 100_000, b" " * (MAX_PEERS_BYTES + 1), b'{"schema":2}'],
)
def test_a_file_that_is_no_list_is_refused(data: bytes, tmp_path: Path) -> None:
    (tmp_path / "peers.json").write_bytes(data)
    with pytest.raises(InvalidInput):
        read_peers(tmp_path / "peers.json")
    with pytest.raises(InvalidInput):
        read_peers(tmp_path / "absent.json")
