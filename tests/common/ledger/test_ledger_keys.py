"""Tests the files of ledger keys."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, load_pem_private_key

from common.errors import InvalidInput
from common.ledger.keys import (
    create_sealing_key,
    create_signing_key,
    load_sealing_key,
    load_signing_key,
    public_hex,
    public_pem,
    read_public_key,
    sealing_public_key,
    signing_public_key,
)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "ledger.key"


def test_a_created_key_is_private_pem_and_reads_back(path: Path) -> None:
    before = os.umask(0)
    try:
        key = create_signing_key(path)
    finally:
        os.umask(before)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert path.read_bytes().startswith(b"-----BEGIN PRIVATE KEY-----")
    assert public_hex(load_signing_key(path)) == public_hex(key)
    again = load_pem_private_key(path.read_bytes(), password=None)
    assert isinstance(again, Ed25519PrivateKey)


def test_a_sealing_key_reads_back_and_is_not_a_signing_key(path: Path) -> None:
    key = create_sealing_key(path)
    assert public_hex(load_sealing_key(path)) == public_hex(key)
    assert public_hex(sealing_public_key(public_hex(key))) == public_hex(key)
    with pytest.raises(InvalidInput, match="Ed25519"):
        load_signing_key(path)


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660, 0o620, 0o601, 0o777])
def test_a_key_open_to_others_is_refused(path: Path, mode: int) -> None:
    create_signing_key(path)
    path.chmod(mode)
    with pytest.raises(InvalidInput, match="open to others"):
        load_signing_key(path)
    path.chmod(0o400)
    load_signing_key(path)


def test_an_existing_key_is_never_replaced(path: Path) -> None:
    key = create_signing_key(path)
    for create in (create_signing_key, create_sealing_key):
        with pytest.raises(InvalidInput, match="exists"):
            create(path)
    assert public_hex(load_signing_key(path)) == public_hex(key)


def test_links_folders_and_missing_files_are_refused(path: Path, tmp_path: Path) -> None:
    create_signing_key(path)
    link = tmp_path / "link.key"
    link.symlink_to(path)
    for wrong in (link, tmp_path, tmp_path / "missing.key"):
        with pytest.raises(InvalidInput, match="key file"):
            load_signing_key(wrong)
    with pytest.raises(InvalidInput):
        create_signing_key(link)


def test_a_message_never_holds_key_material(path: Path) -> None:
    secret = Ed25519PrivateKey.generate().private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()).decode()
    body = secret.splitlines()[1]
    for content in (secret[:-40], body, secret.replace("PRIVATE", "OTHER"), "", "A" * 100_000):
        path.write_text(content)
        path.chmod(0o600)
        with pytest.raises(InvalidInput) as caught:
            load_signing_key(path)
        assert body[:20] not in str(caught.value)
        assert caught.value.__cause__ is None


def test_public_keys_read_from_hex_and_files(path: Path, tmp_path: Path) -> None:
    key = create_signing_key(path)
    text = public_hex(key)
    (tmp_path / "ledger.pub").write_bytes(public_pem(key))
    for source in (text, str(path), str(tmp_path / "ledger.pub")):
        assert public_hex(read_public_key(source)) == text
    for bad in ("", text[:-1], text.upper() + "x", "g" * 64, str(tmp_path / "missing")):
        with pytest.raises(InvalidInput):
            read_public_key(bad)
    with pytest.raises(InvalidInput):
        signing_public_key(text.upper() if text.upper() != text else "G" * 64)
