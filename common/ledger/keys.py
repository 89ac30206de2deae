"""Reads and writes key files: the Ed25519 key that signs a ledger's heads, and the X25519 key that decrypts codes.

Called by the server's and the sites' ledgers, by workers and by the commands that create keys. A private key is one
unencrypted PEM file (PKCS8) that only its owner may read. Refuses a file that group or others may access, a symbolic
link, and a key of the wrong kind. A new key never overwrites an existing file; :func:`replace_key` replaces a key and
keeps the old one in another file. Messages name the file and never its contents.
"""

from __future__ import annotations

import dataclasses
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import ClassVar, Self

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
    load_pem_private_key,
    load_pem_public_key,
)

from common.canonical import canonical_bytes
from common.document import Document
from common.errors import InvalidInput
from common.objects import write_atomically
from common.public_keys import check_agreement_key, check_identity_key
from common.reading import parsing
from common.system_errors import DISK

MAX_KEY_BYTES = 16_384


def create_signing_key(path: Path) -> Ed25519PrivateKey:
    """Create an Ed25519 key and write it durably with mode 0600.

    Args:
        path: A new file.

    Returns:
        The private key.

    Raises:
        InvalidInput: If the file exists or cannot be written.
    """
    key = Ed25519PrivateKey.generate()
    _write_private(path, key)
    return key


def create_sealing_key(path: Path) -> X25519PrivateKey:
    """Create an X25519 key and write it durably with mode 0600.

    Args:
        path: A new file.

    Returns:
        The private key.

    Raises:
        InvalidInput: If the file exists or cannot be written.
    """
    key = X25519PrivateKey.generate()
    _write_private(path, key)
    return key


def load_signing_key(path: Path) -> Ed25519PrivateKey:
    """Read an Ed25519 private key.

    Args:
        path: The key file.

    Returns:
        The private key.

    Raises:
        InvalidInput: If other users may read the file, if it is a symbolic link, or if it holds no such key.
    """
    key = _load_private(path)
    if not isinstance(key, Ed25519PrivateKey):
        raise InvalidInput("signing key", value=str(path), limit="an Ed25519 private key in PEM (PKCS8)")
    return key


def load_sealing_key(path: Path) -> X25519PrivateKey:
    """Read an X25519 private key.

    Args:
        path: The key file.

    Returns:
        The private key.

    Raises:
        InvalidInput: If other users may read the file, if it is a symbolic link, or if it holds no such key.
    """
    key = _load_private(path)
    if not isinstance(key, X25519PrivateKey):
        raise InvalidInput("sealing key", value=str(path), limit="an X25519 private key in PEM (PKCS8)")
    return key


def replace_key(path: Path, old: Ed25519PrivateKey | X25519PrivateKey, following: Path) -> None:
    """Replace a private key in its file. The old key is kept beside it, in a file named after its public key.

    The file keeps its owner, also if root runs the command. A call that was interrupted is completed by a second one.

    Args:
        path: File of the key.
        old: The key in this file.
        following: File of the new key; it is deleted at the end.
    """
    new = following.read_bytes()
    if path.read_bytes() != new:
        retired = path.with_name(f"{path.name}.retired-{public_hex(old)[:12]}")
        write_atomically(retired, path.read_bytes(), mode=0o600)
        write_atomically(path, new, mode=0o600)
    following.unlink()


def retired_keys(path: Path) -> list[Path]:
    """Return the files of the keys that :func:`replace_key` kept beside a key, sorted by name.

    Args:
        path: File of the key.

    Returns:
        The files.
    """
    return sorted(path.parent.glob(f"{path.name}.retired-*"))


def public_hex(key: Ed25519PublicKey | X25519PublicKey | Ed25519PrivateKey | X25519PrivateKey) -> str:
    """Return the 32 public bytes of a key in hex. Ledgers and offers name keys this way.

    Args:
        key: A public or private key.

    Returns:
        64 hex digits.
    """
    public = key.public_key() if isinstance(key, Ed25519PrivateKey | X25519PrivateKey) else key
    return public.public_bytes(Encoding.Raw, PublicFormat.Raw).hex()


def public_pem(key: Ed25519PrivateKey) -> bytes:
    """Return the public key of a private key in PEM, the format that openssl reads.

    Args:
        key: The private key.

    Returns:
        PEM bytes.
    """
    return key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)


def signing_public_key(text: str) -> Ed25519PublicKey:
    """Return the Ed25519 public key that 64 hex digits encode.

    Args:
        text: The digits, in lower case.

    Returns:
        The key.

    Raises:
        InvalidInput: If the text is not the canonical encoding of a key, or the key is of small order.
    """
    return Ed25519PublicKey.from_public_bytes(bytes.fromhex(check_identity_key(text)))


def sealing_public_key(text: str) -> X25519PublicKey:
    """Return the X25519 public key that 64 hex digits encode.

    Args:
        text: The digits, in lower case.

    Returns:
        The key.

    Raises:
        InvalidInput: If the encoding is not canonical.
    """
    return X25519PublicKey.from_public_bytes(bytes.fromhex(check_agreement_key(text)))


def hex_bytes(text: str) -> bytes:
    """Return the bytes of lower-case hex. Other spellings are refused, so that one value has one text.

    Args:
        text: Hex digits.

    Returns:
        The bytes.

    Raises:
        ValueError: If the text is anything else.
    """
    value = bytes.fromhex(text)
    if value.hex() != text:
        raise ValueError("not in lower-case hex")
    return value


def read_public_key(source: str) -> Ed25519PublicKey:
    """Read an Ed25519 public key that a person named on the command line.

    Args:
        source: 64 hex digits, or the path of a PEM file with the public or the private key.

    Returns:
        The Ed25519 public key.

    Raises:
        InvalidInput: If ``source`` is neither, or the key is of another type.
    """
    if len(source) == 64 and not set(source) - set("0123456789abcdef"):
        return signing_public_key(source)
    path = Path(source)
    try:
        data = path.read_bytes()[:MAX_KEY_BYTES]
    except OSError as error:
        raise InvalidInput("public key", value=source, limit="64 hex digits or a PEM file") from error
    if b"PRIVATE" in data:
        return load_signing_key(path).public_key()
    with parsing("public key file", value=source, limit="PEM"):
        key = load_pem_public_key(data)
    if not isinstance(key, Ed25519PublicKey):
        raise InvalidInput("public key file", value=source, limit="an Ed25519 key")
    return signing_public_key(public_hex(key))


class Signed(Document):
    """Base class of a record whose last field is an Ed25519 signature of all other fields. The signed bytes begin with
    a prefix (``DOMAIN``) that differs between the types of records, so a signature is valid for one type only.
    """

    __slots__ = ()

    DOMAIN: ClassVar[bytes]
    signature: str

    def signed(self, key: Ed25519PrivateKey) -> Self:
        """Return this record signed by a key. The same record always gets the same signature.

        Args:
            key: The private key.

        Returns:
            A new record.
        """
        return self.signed_by(key.sign)

    def signed_by(self, sign: Callable[[bytes], bytes]) -> Self:
        """Return this record signed by a function.

        Args:
            sign: Returns the Ed25519 signature of bytes.

        Returns:
            A new record.
        """
        return dataclasses.replace(self, signature=sign(self._message()).hex())  # type: ignore[type-var]

    def is_genuine(self, public_key: Ed25519PublicKey) -> bool:
        """Return whether a key signed exactly this record.

        Args:
            public_key: The key.

        Returns:
            True if the signature is valid.
        """
        try:
            public_key.verify(hex_bytes(self.signature), self._message())
        except (InvalidSignature, ValueError):
            return False
        return True

    def _message(self) -> bytes:
        unsigned = self.to_json()
        del unsigned["signature"]
        return self.DOMAIN + b"\0" + canonical_bytes(unsigned)


def _write_private(path: Path, key: Ed25519PrivateKey | X25519PrivateKey) -> None:
    try:
        write_atomically(
            path, key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()), mode=0o600, replace=False
        )
    except FileExistsError as error:
        raise InvalidInput(
            "key file exists", value=str(path), remedy="keep it; to start with a new key, move this file away first"
        ) from error
    except OSError as error:
        if error.errno in DISK:
            raise
        raise InvalidInput(
            "key file cannot be written",
            value=str(path),
            remedy="check that the folder exists and that this user may write to it",
        ) from error


def _load_private(path: Path) -> object:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
    except OSError as error:
        raise InvalidInput(
            "key file cannot be opened",
            value=str(path),
            limit="a readable file, not a link",
            remedy="put the key itself there, owned by this user; if it is lost, restore it from its offline copy",
        ) from error
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode):
        os.close(descriptor)
        raise InvalidInput("key file", value=str(path), limit="a regular file")
    with os.fdopen(descriptor, "rb") as stream:
        if status.st_mode & 0o077:
            raise InvalidInput(
                "key file is open to others",
                value=f"{path} mode {stat.S_IMODE(status.st_mode):04o}",
                limit="0600 or 0400",
                remedy=f"chmod 600 {path}, and rotate the key if someone may have read it",
            )
        data = stream.read(MAX_KEY_BYTES)
    try:
        return load_pem_private_key(data, password=None)
    except Exception:  # noqa: BLE001 - the library raises more types than it documents
        # Drop the parser's own message: nothing derived from key bytes may reach a log.
        raise InvalidInput("key file", value=str(path), limit="an unencrypted PEM (PKCS8) private key") from None
