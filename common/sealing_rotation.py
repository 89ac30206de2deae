"""Changing the key that codes are sealed to, with overlap: both keys open codes until the old one is deleted.

The server makes a new key and keeps the old one beside it under its public name. A notice signed by the ledger's
signing key tells every site; a site takes it only from a signing key it knows and only in place of a key the notice
names, so an old notice cannot bring a retired key back. Until it has taken it, its codes are opened with the old key.
"""

from __future__ import annotations

import contextlib
import json
import os
from dataclasses import dataclass
from pathlib import Path

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from common.canonical import canonical_bytes
from common.document import Document, Sha256
from common.errors import InvalidInput
from common.ledger.keys import create_sealing_key, hex_bytes, load_sealing_key, public_hex, sync_directory


@dataclass(frozen=True, slots=True)
class SealingNotice(Document):
    """Codes are to be sealed to ``sealing_key`` in place of any key in ``replaces`` (public keys in hex)."""

    sealing_key: Sha256
    replaces: tuple[Sha256, ...]
    signature: str = ""

    def signed(self, key: Ed25519PrivateKey) -> SealingNotice:
        """This notice with a signature by the ledger's signing key."""
        return SealingNotice(self.sealing_key, self.replaces, key.sign(self._message()).hex())

    def is_genuine(self, key: Ed25519PublicKey) -> bool:
        """Whether ``key`` signed this very notice."""
        try:
            key.verify(hex_bytes(self.signature), self._message())
        except (InvalidSignature, ValueError):
            return False
        return True

    def render(self) -> str:
        """The notice as JSON text; it holds public keys only."""
        return json.dumps(self.to_json(), indent=1, sort_keys=True) + "\n"

    @classmethod
    def load(cls, path: Path) -> SealingNotice:
        """Read what :meth:`render` wrote; the signature is not checked here."""
        try:
            return cls.from_json(json.loads(path.read_text(encoding="utf-8")))
        except (OSError, ValueError, InvalidInput) as error:
            raise InvalidInput("notice of a sealing key", value=str(path), limit="as the server wrote it") from error

    def _message(self) -> bytes:
        unsigned = self.to_json()
        del unsigned["signature"]
        return b"consilium/sealing-key/v1\0" + canonical_bytes(unsigned)


def load_sealing_keys(path: Path) -> tuple[X25519PrivateKey, ...]:
    """The current sealing key at ``path``, then every retired one that still lies beside it."""
    return (load_sealing_key(path), *(load_sealing_key(old) for old in _retired(path)))


def rotate_sealing_key(path: Path) -> None:
    """Put a new sealing key at ``path`` and keep the old one beside it; interrupted, run it again to finish."""
    old, following = load_sealing_key(path), path.with_name(f"{path.name}.next")
    if not following.exists():
        create_sealing_key(following)
    _ = load_sealing_key(following)
    with contextlib.suppress(FileExistsError):  # kept aside by a run that was interrupted
        os.link(path, path.with_name(f"{path.name}.retired-{public_hex(old)[:12]}"))
    following.replace(path)
    sync_directory(path.parent)


def sealing_notice(path: Path, *, signing_key: Ed25519PrivateKey, lost: tuple[str, ...] = ()) -> SealingNotice:
    """What sites are to be told of the key at ``path``: it takes the place of every retired and every ``lost`` key."""
    current, *retired = (public_hex(key) for key in load_sealing_keys(path))
    return SealingNotice(sealing_key=current, replaces=tuple(sorted({*retired, *lost}))).signed(signing_key)


def _retired(path: Path) -> list[Path]:
    return sorted(path.parent.glob(f"{path.name}.retired-*"))
