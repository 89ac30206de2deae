"""Tests countersigned heads in C2SP's form, and proofs that a newer head keeps an older one, against external
oracles.
"""

from __future__ import annotations

import base64
import hashlib
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hypothesis import given
from hypothesis import strategies as st

from common.errors import InvalidInput
from common.ledger.keys import public_hex
from common.witness.memory import HEADS, HeadMemory, blinded
from common.witness.merkle import grew, has_leaf, prove_growth, prove_leaf, root
from common.witness.notes import CheckpointNote, origin_of, parse_signature, witness_name

LEAVES = [bytes.fromhex(one) for one in ("", "00", "10", "2021", "3031", "40414243", "5051525354555657")]
LEAVES += [bytes.fromhex("606162636465666768696a6b6c6d6e6f")]
ROOTS = [
    "6e340b9cffb37a989ca544e6bb780a2c78901d3fb33738768511a30617afa01d",
    "fac54203e7cc696cf0dfcb42c92a1d9dbaf70ad9e621f4bd8d98662f00e3c125",
    "aeb6bcfe274b70a14fb067a5e5578264db0fa9b51af5e0ba159158f329e06e77",
    "d37ee418976dd95753c1c73862b9398fa2a2cf9b4ff0fdfe8b30cd95209614b7",
    "4e3bbb1f7b478dcfe71fb631631519a3bca12c9aefca1612bfce4c13a86264d4",
    "76e67dadbcdf1e10e1b74ddc608abd2f98dfb16fbce75277b5232a127f2087ef",
    "ddb89be403809e325750d3d263cd78929c2942b7942a34b77e122c9594a74c8c",
    "5dc9da79a70659a9ad559cb701ded9a2ab9d823aad2f4960cfe370eff4604328",
]
"""Certificate Transparency's own test vectors (reference_implementation of RFC 6962)."""


def by_definition(leaves: list[bytes]) -> bytes:
    """Compute the tree's root by RFC 6962, section 2.1, word for word."""
    if len(leaves) == 1:
        return hashlib.sha256(b"\0" + leaves[0]).digest()
    k = 1
    while k * 2 < len(leaves):
        k *= 2
    return hashlib.sha256(b"\1" + by_definition(leaves[:k]) + by_definition(leaves[k:])).digest()


def test_roots_are_those_of_certificate_transparency_s_vectors() -> None:
    assert [root(LEAVES[:size]).hex() for size in range(1, 9)] == ROOTS


@given(st.integers(1, 70), st.data())
def test_a_head_that_grew_is_proven_and_one_changed_row_before_is_not(new: int, data: st.DataObject) -> None:
    leaves = [bytes([number]) * 32 for number in range(new)]
    old = data.draw(st.integers(1, new))
    assert root(leaves) == by_definition(leaves)
    proof = prove_growth(leaves, old)
    assert grew(proof, old=old, old_root=root(leaves[:old]), new=new, new_root=root(leaves))
    changed = data.draw(st.integers(0, old - 1))
    forked = [*leaves]
    forked[changed] = b"x" * 32
    for other in (proof, prove_growth(forked, old)):
        assert not grew(other, old=old, old_root=root(leaves[:old]), new=new, new_root=root(forked))
    if proof:
        assert not grew(proof[:-1], old=old, old_root=root(leaves[:old]), new=new, new_root=root(leaves))
        assert not grew([*proof, "0" * 64], old=old, old_root=root(leaves[:old]), new=new, new_root=root(leaves))


@given(st.integers(1, 70), st.data())
def test_a_row_is_proven_at_its_place_and_at_no_other(size: int, data: st.DataObject) -> None:
    leaves = [bytes([number]) * 32 for number in range(size)]
    index = data.draw(st.integers(0, size - 1))
    proof, of = prove_leaf(leaves, index), root(leaves)
    assert has_leaf(proof, leaf=leaves[index], index=index, size=size, of=of)
    for other in set(range(size)) - {index}:
        assert not has_leaf(proof, leaf=leaves[index], index=other, size=size, of=of)
        assert not has_leaf(proof, leaf=leaves[other], index=index, size=size, of=of)


ALGORITHM = "PeterNeumann+c74f20a3+ARpc2QcUPDhMQegwxbzhKqiBfsVkmqq/LDE4izWy10TW"
"""The key of the example of golang.org/x/mod/sumdb/note, where the form comes from."""


def test_a_key_s_hash_is_made_as_in_go_s_note() -> None:
    name, key_hash, key = ALGORITHM.split("+", 2)
    data = base64.b64decode(key)
    made = CheckpointNote(name, 1, b"x" * 32).signed(lambda _: b"s" * 64, key=data[1:].hex())
    assert made.signatures[0].key_hash.hex() == key_hash
    assert parse_signature(made.signatures[0].line) == made.signatures[0]


LOG, WITNESS = Ed25519PrivateKey.from_private_bytes(b"l" * 32), Ed25519PrivateKey.from_private_bytes(b"w" * 32)
NOTE = CheckpointNote(origin_of("server", "5" * 32), 7, root(LEAVES[:7])).signed(LOG.sign, key=public_hex(LOG))


def test_a_cosignature_is_over_the_bytes_that_the_specification_names() -> None:
    """By c2sp.org/tlog-cosignature the bytes are "cosignature/v1", "time …" and the whole note; the key hash
    uses 0x04.
    """
    line = NOTE.cosign(WITNESS.sign, name=witness_name("north"), key=public_hex(WITNESS), time=1_700_000_000)
    message = f"cosignature/v1\ntime 1700000000\n{NOTE.origin}\n7\n{base64.b64encode(NOTE.root).decode()}\n"
    assert line.signature[:8] == (1_700_000_000).to_bytes(8, "big")
    WITNESS.public_key().verify(line.signature[8:], message.encode())
    named = b"consilium/site/north\n\x04" + WITNESS.public_key().public_bytes_raw()
    assert line.key_hash == hashlib.sha256(named).digest()[:4]
    note = CheckpointNote.parse(NOTE.with_signatures((line,)).render())
    assert note.is_signed(public_hex(LOG))
    assert note.cosigned_at(name=witness_name("north"), key=public_hex(WITNESS)) == 1_700_000_000
    assert note.cosigned_at(name=witness_name("south"), key=public_hex(WITNESS)) is None
    assert note.cosigned_at(name=witness_name("north"), key=public_hex(LOG)) is None


def test_a_cosignature_holds_for_no_other_head() -> None:
    line = NOTE.cosign(WITNESS.sign, name="w", key=public_hex(WITNESS), time=1)
    for other in (
        CheckpointNote(NOTE.origin, 8, NOTE.root),
        CheckpointNote(NOTE.origin, 7, b"x" * 32),
        CheckpointNote("o", 7, NOTE.root),
    ):
        assert other.with_signatures((line,)).cosigned_at(name="w", key=public_hex(WITNESS)) is None


@pytest.mark.parametrize(
    "text",
    [
        "",
        NOTE.body,
        NOTE.render()[:-1],
        NOTE.render() + "more\n",
        NOTE.render().replace("\n7\n", "\n07\n"),
        NOTE.render().replace("\n7\n", "\n-7\n"),
        NOTE.render().replace("\n7\n", "\n0\n"),
        NOTE.render().replace("— ", "- "),
        NOTE.render().replace("\n\n", "\nextension\n\n"),
        "x\n7\nAAAA\n\n",
        NOTE.render() * 2,
    ],
)
def test_a_note_of_another_form_is_refused(text: str) -> None:
    with pytest.raises(InvalidInput):
        CheckpointNote.parse(text)


@pytest.mark.parametrize("size", [0, 31, 33])
def test_a_blinding_key_of_another_size_is_refused(tmp_path: Path, size: int) -> None:
    """With an empty key anybody could confirm a guessed code by the tree's root."""
    (tmp_path / "blind.key").write_bytes(bytes(size))
    with pytest.raises(InvalidInput, match="32 bytes"):
        blinded([bytes(32)], tmp_path, make=True)
    assert (tmp_path / "blind.key").stat().st_size == size


@pytest.mark.parametrize("text", [b'{"a": {"ro', b"", b"null", b'{"a": "b"}', b'{"a": {"root": "zz", "size": 1}}'])
def test_a_memory_of_heads_that_cannot_be_read_is_named_with_a_remedy(tmp_path: Path, text: bytes) -> None:
    path = tmp_path / HEADS
    path.write_bytes(text)
    with pytest.raises(InvalidInput) as refused:
        HeadMemory(tmp_path).conflicting()
    assert str(path) in str(refused.value)
    assert "to fix: restore it from a backup; without one, move it away" in str(refused.value)
