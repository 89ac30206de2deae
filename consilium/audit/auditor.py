"""Manages an auditor's two keys: one decrypts disclosures, the other signs judgements.

The file ``auditor.json`` contains the two public keys. `consilium dispute keys` and the other dispute commands call
this module. It refuses an ``auditor.json`` that the signing key in the file did not sign.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from common.document import Sha256
from common.errors import InvalidInput
from common.ledger.keys import (
    Signed,
    create_sealing_key,
    create_signing_key,
    load_sealing_key,
    load_signing_key,
    public_hex,
    signing_public_key,
)
from common.objects import write_json
from common.reading import naming_file, parse_json, read_text

PUBLIC = "auditor.json"
MAX_BYTES = 16_384


@dataclass(frozen=True, slots=True)
class Auditor(Signed):
    """An auditor's public keys, signed with its signing key.

    Attributes:
        sealing_key: X25519 public key in hex.
        signing_key: Ed25519 public key in hex.
        signature: Signature over both keys.
    """

    DOMAIN: ClassVar = b"consilium/auditor/v1"
    SCHEMA: ClassVar = ("auditor", 1)

    sealing_key: Sha256
    signing_key: Sha256
    signature: str = ""


def create_auditor(folder: Path) -> Auditor:
    """Create an auditor's keys and the public file ``auditor.json``.

    Args:
        folder: Folder of the keys; it is created if missing.

    Returns:
        The public keys.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    signing, sealing = create_signing_key(folder / "signing.key"), create_sealing_key(folder / "sealing.key")
    made = Auditor(public_hex(sealing), public_hex(signing)).signed(signing)
    write_json(folder / PUBLIC, made.to_json())
    return made


def load_auditor(folder: Path) -> tuple[Ed25519PrivateKey, X25519PrivateKey]:
    """Load an auditor's private keys.

    Args:
        folder: Folder of the keys.

    Returns:
        The signing key, and the key that decrypts disclosures.
    """
    return load_signing_key(folder / "signing.key"), load_sealing_key(folder / "sealing.key")


def read_auditor(path: Path) -> Auditor:
    """Read an ``auditor.json``.

    Args:
        path: The file.

    Returns:
        The public keys.

    Raises:
        InvalidInput: If the file cannot be read or its signature is not valid.
    """
    remedy = "ask the auditor for the file again"
    text = read_text(path, what="auditor's keys", most_bytes=MAX_BYTES, remedy=remedy)
    with naming_file(path, remedy=remedy):
        found = Auditor.from_json(parse_json(text, what="auditor's keys"))
    if not found.is_genuine(signing_public_key(found.signing_key)):
        raise InvalidInput(
            "auditor's keys", value=str(path), limit="a file signed by the auditor itself", remedy=remedy
        )
    return found
