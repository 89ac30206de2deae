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
from typing import ClassVar

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from common.document import Sha256
from common.errors import InvalidInput
from common.ledger.keys import Signed, create_sealing_key, load_sealing_key, public_hex, sync_directory
from common.public_keys import AgreementKey
from common.reading import parse_json


@dataclass(frozen=True, slots=True)
class SealingNotice(Signed):
    """Codes are to be sealed to ``sealing_key`` in place of any key in ``replaces`` (public keys in hex)."""

    DOMAIN: ClassVar = b"consilium/sealing-key/v1"

    sealing_key: AgreementKey
    replaces: tuple[Sha256, ...]
    signature: str = ""

    def render(self) -> str:
        """The notice as JSON text; it holds public keys only."""
        return json.dumps(self.to_json(), indent=1, sort_keys=True) + "\n"

    @classmethod
    def load(cls, path: Path) -> SealingNotice:
        """Read what :meth:`render` wrote; the signature is not checked here."""
        try:
            return cls.from_json(parse_json(path.read_bytes(), what="notice of a sealing key"))
        except (OSError, ValueError, InvalidInput) as error:
            raise InvalidInput("notice of a sealing key", value=str(path), limit="as the server wrote it") from error


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
