"""Writes and reads a ledger's head as a checkpoint in C2SP's form, signed by the ledger and countersigned by witnesses.

Called by witnesses at sites and server, and by verifiers. A checkpoint is a signed note: origin, number of rows, Merkle
root in base64, an empty line, signature lines (c2sp.org/tlog-checkpoint, c2sp.org/signed-note). A witness countersigns
by cosignature/v1 (c2sp.org/tlog-cosignature), which covers the time of the signature. Other software for these forms
can read and check the notes. As the form requires, signatures of keys that the caller does not name are ignored.
Refuses a note of any other form, and one that is too long.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import re
from dataclasses import dataclass, replace

from cryptography.exceptions import InvalidSignature

from common.envelope import Sign
from common.errors import InvalidInput
from common.ledger.keys import signing_public_key
from common.public_keys import check_identity_key

MAX_NOTE_BYTES = 1 << 19
MAX_SIGNATURES = 4096
MAX_SIZE = 1 << 53
MAX_TIME = 253_402_300_799
"""The last second of the year 9999. A cosignature with a later time does not count, because no date can express it."""
_LOG, _WITNESS = b"\1", b"\4"
_NAME = re.compile(r"[A-Za-z0-9._/-]{1,200}")
_LINE = re.compile(r"— ([^\s+]{1,200}) ([A-Za-z0-9+/]{4,200}={0,2})")


def origin_of(role: str, ledger_id: str) -> str:
    """Return the name of a ledger in the first line of its checkpoints.

    Args:
        role: ``server`` or ``site``.
        ledger_id: Id of the ledger.

    Returns:
        The name.

    >>> origin_of("server", "0a1b")
    'consilium/server-ledger/0a1b'
    """
    return f"consilium/{role}-ledger/{ledger_id}"


def witness_name(site: str) -> str:
    """Return the name under which a site countersigns.

    Args:
        site: Name of the site.

    Returns:
        The name.
    """
    return f"consilium/site/{site}"


@dataclass(frozen=True, slots=True)
class NoteSignature:
    """One signature line: a name, the key's hash, and a signature of 64 bytes, with 8 bytes of time before a
    cosignature.
    """

    name: str
    key_hash: bytes
    signature: bytes

    @property
    def line(self) -> str:
        """The line as text."""
        return f"— {self.name} {base64.b64encode(self.key_hash + self.signature).decode()}"


@dataclass(frozen=True, slots=True)
class CheckpointNote:
    """A ledger's head as a signed note: the number of rows, the Merkle root over them, and signatures.

    Attributes:
        origin: Name of the ledger.
        size: Number of rows.
        root: Merkle root over their hashes, 32 bytes.
        signatures: Signature lines.

    Raises:
        InvalidInput: If a value is outside its range.
    """

    origin: str
    size: int
    root: bytes
    signatures: tuple[NoteSignature, ...] = ()

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.origin) or not 0 < self.size <= MAX_SIZE or len(self.root) != 32:
            raise InvalidInput(
                "checkpoint",
                value=(self.origin[:80], self.size),
                limit="a valid origin, a size of at least 1, and a root of 32 bytes",
            )

    @property
    def body(self) -> str:
        """The text that the signatures cover, with its line end."""
        return f"{self.origin}\n{self.size}\n{base64.b64encode(self.root).decode()}\n"

    def render(self) -> str:
        """Return the note as text."""
        return self.body + "\n" + "".join(f"{one.line}\n" for one in self.signatures)

    @classmethod
    def parse(cls, text: str) -> CheckpointNote:
        """Read the text that :meth:`render` returned. No signature is checked.

        Args:
            text: The note.

        Returns:
            The checkpoint.

        Raises:
            InvalidInput: For anything else.
        """
        limit = "a checkpoint as c2sp.org/tlog-checkpoint writes it, without extension lines"
        if len(text) > MAX_NOTE_BYTES or text.count("\n") > MAX_SIGNATURES + 4:
            raise InvalidInput("checkpoint", value=f"{len(text)} characters", limit=f"at most {MAX_NOTE_BYTES} bytes")
        head, empty, tail = text.partition("\n\n")
        fields = head.split("\n")
        if not empty or len(fields) != 3 or (tail and not tail.endswith("\n")):
            raise InvalidInput("checkpoint", limit=limit)
        if not re.fullmatch(r"[1-9][0-9]{0,15}", fields[1]):
            raise InvalidInput("size of a checkpoint", value=fields[1][:40], limit="a number without leading zeros")
        signatures = tuple(parse_signature(one) for one in tail.splitlines())
        found = cls(fields[0], int(fields[1]), _decoded(fields[2]), signatures)
        if found.render() != text:
            raise InvalidInput("checkpoint", limit=limit)
        return found

    def signed(self, sign: Sign, *, key: str) -> CheckpointNote:
        """Return the note with the ledger's own signature and no other.

        Args:
            sign: Signs with the ledger's key.
            key: The ledger's public key in hex.

        Returns:
            A new note.
        """
        made = NoteSignature(self.origin, _key_hash(self.origin, _LOG, key), sign(self.body.encode()))
        return replace(self, signatures=(made,))

    def is_signed(self, key: str) -> bool:
        """Return whether the ledger's own key signed the note.

        Args:
            key: The public key in hex.

        Returns:
            True if a signature is valid.
        """
        wanted = _key_hash(self.origin, _LOG, key)
        return any(
            _verifies(key, one.signature, self.body.encode())
            for one in self.signatures
            if (one.name, one.key_hash) == (self.origin, wanted) and len(one.signature) == 64
        )

    def cosign(self, sign: Sign, *, name: str, key: str, time: int) -> NoteSignature:
        """Return a witness's countersignature of the note, in the form cosignature/v1.

        Args:
            sign: Signs with the witness's key.
            name: Name of the witness.
            key: Its public key in hex.
            time: Seconds since 1970.

        Returns:
            The signature line.
        """
        signature = sign(_cosigned(time, self.body))
        return NoteSignature(name, _key_hash(name, _WITNESS, key), time.to_bytes(8, "big") + signature)

    def cosigned_at(self, *, name: str, key: str) -> int | None:
        """Return the time at which a witness last countersigned the note.

        Args:
            name: Name of the witness.
            key: Its public key in hex.

        Returns:
            Seconds since 1970; None if it never did.
        """
        wanted, found = _key_hash(name, _WITNESS, key), []
        for one in self.signatures:
            if (one.name, one.key_hash) != (name, wanted) or len(one.signature) != 72:
                continue
            time = int.from_bytes(one.signature[:8], "big")
            if time <= MAX_TIME and _verifies(key, one.signature[8:], _cosigned(time, self.body)):
                found.append(time)
        return max(found, default=None)

    def with_signatures(self, more: tuple[NoteSignature, ...]) -> CheckpointNote:
        """Return the note with further signatures. Of several signatures by one name and key, only the last one
        remains.

        Args:
            more: Signature lines.

        Returns:
            A new note.
        """
        kept = {(one.name, one.key_hash): one for one in (*self.signatures, *more)}
        return replace(self, signatures=tuple(kept.values()))

    def same_head(self, other: CheckpointNote) -> bool:
        """Return whether another note is about the same rows.

        Args:
            other: The other note.

        Returns:
            True if origin, size and root agree.
        """
        return (self.origin, self.size, self.root) == (other.origin, other.size, other.root)


def note_in(data: bytes) -> CheckpointNote | None:
    """Return the checkpoint that some bytes contain. No signature is checked.

    Args:
        data: The bytes.

    Returns:
        The checkpoint; None if they contain none.
    """
    try:
        return CheckpointNote.parse(data.decode())
    except (InvalidInput, UnicodeDecodeError):
        return None


def parse_signature(line: str) -> NoteSignature:
    """Read one signature line.

    Args:
        line: The line.

    Returns:
        The signature.

    Raises:
        InvalidInput: For any other text.
    """
    found = _LINE.fullmatch(line)
    data = _decoded(found[2]) if found else b""
    if not found or not found[1].isprintable() or len(data) not in (68, 76):
        raise InvalidInput(
            "signature line of a checkpoint",
            limit="an em dash, a printable name, and the base64 text of 4 bytes of a key's hash and a signature, "
            "separated by single spaces",
            remedy="get the note again from the party that wrote it",
        )
    return NoteSignature(found[1], data[:4], data[4:])


def _cosigned(time: int, body: str) -> bytes:
    return f"cosignature/v1\ntime {time}\n{body}".encode()


def _key_hash(name: str, kind: bytes, key: str) -> bytes:
    return hashlib.sha256(name.encode() + b"\n" + kind + bytes.fromhex(check_identity_key(key))).digest()[:4]


def _verifies(key: str, signature: bytes, message: bytes) -> bool:
    try:
        signing_public_key(key).verify(signature, message)
    except (InvalidSignature, ValueError):
        return False
    return True


def _decoded(text: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise InvalidInput("base64 in a checkpoint", value=text[:80], limit="standard base64") from error
