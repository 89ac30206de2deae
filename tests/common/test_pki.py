"""Tests certificates and node keys with OpenSSL, ssh-keygen and real TLS handshakes."""

from __future__ import annotations

import shutil
import socket
import ssl
import stat
import subprocess
import threading
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric import ed25519
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

from common.errors import InvalidInput
from common.pki import (
    ServerIdentity,
    create_authority,
    create_node_keys,
    expires,
    issue_server_certificate,
    load_node_key,
    node_fingerprint,
    read_node_public_key,
)

openssl = pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl")
ssh_keygen = pytest.mark.skipif(shutil.which("ssh-keygen") is None, reason="needs ssh-keygen")


def say(*command: str | Path) -> str:
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, timeout=600, check=False)
    return done.stdout + done.stderr


def handshake(identity: ServerIdentity, *, trusting: Path, name: str) -> None:
    """Make one TLS handshake over loopback; raise OpenSSL's error if it fails."""
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(identity.certificate, identity.key)
    client = ssl.create_default_context(cafile=str(trusting))
    near, far = socket.socketpair()

    def serve() -> None:
        try:
            server.wrap_socket(far, server_side=True).close()
        except OSError:
            far.close()

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        near.settimeout(10)
        client.wrap_socket(near, server_hostname=name).close()
    finally:
        near.close()
        thread.join()


@pytest.fixture
def identity(tmp_path: Path) -> ServerIdentity:
    authority = create_authority(tmp_path / "ca")
    return issue_server_certificate(authority, tmp_path / "tls", names=["localhost", "aggregator.example", "127.0.0.1"])


@pytest.mark.parametrize("name", ["localhost", "aggregator.example", "127.0.0.1"])
def test_a_client_that_trusts_the_authority_connects_under_every_name(identity: ServerIdentity, name: str) -> None:
    handshake(identity, trusting=identity.authority, name=name)


@pytest.mark.parametrize("name", ["elsewhere.example", "127.0.0.2"])
def test_another_name_is_refused(identity: ServerIdentity, name: str) -> None:
    with pytest.raises(ssl.SSLCertVerificationError, match=r"mismatch|not valid for"):
        handshake(identity, trusting=identity.authority, name=name)


def test_another_authority_is_refused(identity: ServerIdentity, tmp_path: Path) -> None:
    stranger = create_authority(tmp_path / "stranger")
    with pytest.raises(ssl.SSLCertVerificationError):
        handshake(identity, trusting=stranger.certificate, name="localhost")


def test_an_expired_certificate_is_refused_and_then_renewed_with_its_key(tmp_path: Path) -> None:
    authority = create_authority(tmp_path / "ca", now=datetime.now(UTC) - timedelta(days=30))
    past = datetime.now(UTC) - timedelta(days=20)
    old = issue_server_certificate(authority, tmp_path / "tls", names=["localhost"], valid_days=10, now=past)
    with pytest.raises(ssl.SSLCertVerificationError, match="expired"):
        handshake(old, trusting=old.authority, name="localhost")
    key = old.key.read_bytes()
    new = issue_server_certificate(authority, tmp_path / "tls", names=["localhost"])
    handshake(new, trusting=new.authority, name="localhost")
    assert new.key.read_bytes() == key


def test_a_second_call_changes_nothing(identity: ServerIdentity, tmp_path: Path) -> None:
    def everything() -> dict[str, bytes]:
        return {str(path): path.read_bytes() for path in sorted(tmp_path.rglob("*")) if path.is_file()}

    keys = create_node_keys(tmp_path / "keys", comment="site A")
    before = everything()
    authority = create_authority(tmp_path / "ca")
    assert issue_server_certificate(authority, tmp_path / "tls", names=["localhost"]) == identity
    assert create_node_keys(tmp_path / "keys", comment="site A") == keys
    assert everything() == before


def test_a_new_name_gets_a_new_certificate(identity: ServerIdentity, tmp_path: Path) -> None:
    authority = create_authority(tmp_path / "ca")
    again = issue_server_certificate(authority, tmp_path / "tls", names=["localhost", "second.example"])
    handshake(again, trusting=again.authority, name="second.example")


def test_private_files_are_private(identity: ServerIdentity, tmp_path: Path) -> None:
    keys = create_node_keys(tmp_path / "keys")
    for secret in (identity.key, keys.private, tmp_path / "ca/ca.key"):
        assert stat.S_IMODE(secret.stat().st_mode) == 0o600
    for public in (identity.certificate, identity.authority, keys.public):
        assert stat.S_IMODE(public.stat().st_mode) == 0o644
    assert not (tmp_path / "tls/ca.key").exists()


def test_a_server_certificate_cannot_sign_and_never_outlives_its_authority(tmp_path: Path) -> None:
    authority = create_authority(tmp_path / "ca", valid_days=30)
    identity = issue_server_certificate(authority, tmp_path / "tls", names=["localhost"], valid_days=365)
    assert expires(identity.certificate) == expires(authority.certificate)


@openssl
def test_openssl_accepts_the_chain(identity: ServerIdentity) -> None:
    verdict = say(
        "openssl",
        "verify",
        "-x509_strict",
        "-purpose",
        "sslserver",
        "-CAfile",
        identity.authority,
        identity.certificate,
    )
    assert verdict.strip().endswith("OK"), verdict
    text = say("openssl", "x509", "-in", identity.certificate, "-noout", "-text")
    assert "DNS:localhost, DNS:aggregator.example, IP Address:127.0.0.1" in text
    assert "CA:FALSE" in text
    assert "P-384" in text


@ssh_keygen
def test_ssh_keygen_reads_the_node_key(tmp_path: Path) -> None:
    keys = create_node_keys(tmp_path)
    assert say("ssh-keygen", "-y", "-f", keys.private).split()[:2] == read_node_public_key(keys.public).split()
    assert node_fingerprint(read_node_public_key(keys.public)) in say("ssh-keygen", "-l", "-f", keys.public)
    assert say("ssh-keygen", "-l", "-f", keys.public).startswith("384 ")


@ssh_keygen
def test_a_key_made_by_ssh_keygen_is_kept(tmp_path: Path) -> None:
    say("ssh-keygen", "-q", "-t", "ecdsa", "-b", "384", "-N", "", "-C", "it@hospital", "-f", tmp_path / "node")
    before = (tmp_path / "node").read_bytes()
    keys = create_node_keys(tmp_path)
    assert keys.private.read_bytes() == before
    assert read_node_public_key(keys.public).startswith("ecdsa-sha2-nistp384 ")


def test_a_lost_public_half_comes_back(tmp_path: Path) -> None:
    keys = create_node_keys(tmp_path)
    line = read_node_public_key(keys.public)
    keys.public.unlink()
    assert read_node_public_key(create_node_keys(tmp_path).public) == line


def test_damaged_or_foreign_material_is_refused_by_name(tmp_path: Path) -> None:
    keys = create_node_keys(tmp_path / "a")
    other = create_node_keys(tmp_path / "b")
    keys.public.write_bytes(other.public.read_bytes())
    with pytest.raises(InvalidInput, match="does not belong"):
        create_node_keys(tmp_path / "a")
    other.private.unlink()
    with pytest.raises(InvalidInput, match="no private key"):
        create_node_keys(tmp_path / "b")
    keys.private.write_text("garbage")
    with pytest.raises(InvalidInput, match="OpenSSH private key"):
        create_node_keys(tmp_path / "a")
    foreign = ed25519.Ed25519PrivateKey.generate()
    keys.private.write_bytes(foreign.private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption()))
    with pytest.raises(InvalidInput, match="P-384"):
        create_node_keys(tmp_path / "a")
    with pytest.raises(InvalidInput, match="OpenSSH public key"):
        read_node_public_key(keys.private)


def test_a_key_others_may_read_is_refused(identity: ServerIdentity, tmp_path: Path) -> None:
    authority = create_authority(tmp_path / "ca")
    authority.key.chmod(0o644)
    with pytest.raises(InvalidInput, match="chmod 600"):
        issue_server_certificate(authority, tmp_path / "tls", names=["localhost"])


def test_a_node_key_may_be_read_by_the_group_its_folder_was_given_to_and_by_nobody_else(tmp_path: Path) -> None:
    """Under systemd worker and node are two users; the folder's setgid bit shows that the group was chosen on
    purpose.
    """
    keys = create_node_keys(tmp_path / "keys")
    keys.private.chmod(0o640)
    with pytest.raises(InvalidInput, match="others may read"):
        load_node_key(keys.private)
    keys.private.parent.chmod(0o2750)
    load_node_key(keys.private)
    for wider in (0o644, 0o660, 0o641):
        keys.private.chmod(wider)
        with pytest.raises(InvalidInput, match="others may read"):
            load_node_key(keys.private)


def test_half_an_authority_is_refused(tmp_path: Path) -> None:
    authority = create_authority(tmp_path)
    authority.certificate.unlink()
    with pytest.raises(InvalidInput, match="missing"):
        create_authority(tmp_path)


def test_an_expired_authority_is_refused(tmp_path: Path) -> None:
    create_authority(tmp_path, valid_days=1, now=datetime.now(UTC) - timedelta(days=2))
    with pytest.raises(InvalidInput, match="not valid now"):
        create_authority(tmp_path)


@pytest.mark.parametrize("names", [[], ["-x"], ["a..b"], ["with space"], ["x" * 64], ["https://host"], ["a,DNS:b"]])
def test_bad_names_are_refused(tmp_path: Path, names: list[str]) -> None:
    with pytest.raises(InvalidInput, match="name"):
        issue_server_certificate(create_authority(tmp_path), tmp_path / "tls", names=names)


@pytest.mark.parametrize("days", [0, -1, 40_000])
def test_bad_lifetimes_are_refused(tmp_path: Path, days: int) -> None:
    with pytest.raises(InvalidInput, match="days"):
        create_authority(tmp_path, valid_days=days)
