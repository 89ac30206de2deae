"""Changes the key to which sites encrypt (seal) codes. Both keys decrypt codes until the old one is deleted.

1. The server makes a new key and keeps the old one beside it, in a file named after its public key.
2. A notice signed with the ledger's key announces the new key to every site.
3. A site accepts the notice only from a signing key that it knows, and only as a replacement of a key that the notice
   names. An old notice therefore cannot bring a retired key back.
4. Until a site has accepted the notice, the server decrypts its codes with the old key.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from common.document import Sha256
from common.errors import InvalidInput
from common.ledger.keys import Signed, create_sealing_key, load_sealing_key, public_hex, replace_key, retired_keys
from common.public_keys import AgreementKey
from common.reading import parse_json


@dataclass(frozen=True, slots=True)
class SealingNotice(Signed):
    """Tells sites to seal codes to ``sealing_key`` instead of any key in ``replaces`` (public keys in hex)."""

    DOMAIN: ClassVar = b"consilium/sealing-key/v1"

    sealing_key: AgreementKey
    replaces: tuple[Sha256, ...]
    signature: str = ""

    def render(self) -> str:
        """Return the notice as JSON text. It contains public keys only."""
        return json.dumps(self.to_json(), indent=1, sort_keys=True) + "\n"

    @classmethod
    def load(cls, path: Path) -> SealingNotice:
        """Read the text that :meth:`render` returned. The signature is not checked.

        Args:
            path: The file.

        Returns:
            The notice.

        Raises:
            InvalidInput: For anything else.
        """
        try:
            return cls.from_json(parse_json(path.read_bytes(), what="notice of a sealing key"))
        except (OSError, ValueError, InvalidInput) as error:
            raise InvalidInput(
                "notice of a sealing key",
                value=str(path),
                limit="the unchanged file that `consilium ledger rotate-sealing-key` wrote",
                remedy="ask the consortium for it again",
            ) from error


def load_sealing_keys(path: Path) -> tuple[X25519PrivateKey, ...]:
    """Return the current sealing key, then every retired one that is still beside it.

    Args:
        path: File of the current key.

    Returns:
        Private keys.

    Raises:
        InvalidInput: If a key file is invalid.
    """
    return (load_sealing_key(path), *(load_sealing_key(old) for old in retired_keys(path)))


def rotate_sealing_key(path: Path) -> None:
    """Replace the sealing key by a new one and keep the old one beside it. After an interruption, call it again to
    finish.

    Args:
        path: File of the current key.

    Raises:
        InvalidInput: If a key file is invalid.
    """
    old, following = load_sealing_key(path), path.with_name(f"{path.name}.next")
    if not following.exists():
        create_sealing_key(following)
    _ = load_sealing_key(following)
    replace_key(path, old, following)


def sealing_notice(path: Path, *, signing_key: Ed25519PrivateKey, lost: tuple[str, ...] = ()) -> SealingNotice:
    """Return the signed notice about the current sealing key, which replaces every retired key and the lost ones.

    Args:
        path: File of the current key.
        signing_key: The ledger's key.
        lost: Public keys whose private keys are lost.

    Returns:
        The notice.
    """
    current, *retired = (public_hex(key) for key in load_sealing_keys(path))
    return SealingNotice(sealing_key=current, replaces=tuple(sorted({*retired, *lost}))).signed(signing_key)
