"""Defines a ledger row, its hash and the signed head: everything that others need to check a ledger.

The server's and the sites' ledgers, receipts and verifiers use it. A row's hash is computed from the hash of its body,
so the chain can be checked without the bodies. It is also computed from the hash of the row before, so it covers all
earlier rows. The ledger's role (``server`` or ``site``) is among the hashed bytes, so a row of a server's ledger is
invalid in a site's ledger, and the reverse. Refuses times in another form than the ledger writes.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Annotated, ClassVar

from cryptography.exceptions import InvalidSignature

from common.canonical import canonical_bytes, digest, sha256_bytes
from common.document import Document, Sha256
from common.errors import InvalidInput, LedgerCorrupt
from common.ledger.keys import hex_bytes, signing_public_key

NO_HASH = "0" * 64
ROLES = {"server": "answers", "site": "codes"}
"""Name of the table that stores the payloads, for each kind of ledger."""

_TIME = re.compile(r"[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9]{2}:[0-9]{2}:[0-9]{2}\.[0-9]{6}Z")


def check_time(text: object) -> str:
    """Return a row's time if it is written as ``YYYY-MM-DDTHH:MM:SS.ffffffZ``.

    Args:
        text: The time.

    Returns:
        The text.

    Raises:
        InvalidInput: For anything else.
    """
    if not isinstance(text, str) or not _TIME.fullmatch(text):
        raise InvalidInput("time", value=text, limit="YYYY-MM-DDTHH:MM:SS.ffffffZ")
    return text


Time = Annotated[str, check_time]


@dataclass(frozen=True, slots=True)
class Row:
    """One stored row. ``body`` is canonical JSON text; ``hash`` covers all other fields."""

    seq: int
    time_utc: str
    kind: str
    body: str
    prev_hash: str
    hash: str


@dataclass(frozen=True, slots=True)
class SignedHead(Document):
    """The signed number and hash of the newest row. Somebody who keeps a head can later detect that rows up to it were
    rewritten or cut off.
    """

    role: str
    ledger_id: str
    seq: int
    hash: Sha256
    public_key: str
    signature: str

    def is_genuine(self) -> bool:
        """Return whether ``public_key`` signed exactly these fields. The caller must know whose key it is."""
        try:
            message = head_message(self.role, ledger_id=self.ledger_id, seq=self.seq, row_hash=self.hash)
            signing_public_key(self.public_key).verify(hex_bytes(self.signature), message)
        except (InvalidSignature, ValueError, TypeError, InvalidInput):
            return False
        return True

    def check(self) -> None:
        """Refuse an unknown role and a row below 1."""
        if self.role not in ROLES or self.seq < 1:
            raise InvalidInput(
                "signed head", value=(self.role, self.seq), limit="a known role, and a row number of 1 or more"
            )


def body_digest(body: str) -> str:
    """Return the SHA-256 of a row's body, from which the row's hash is computed.

    Args:
        body: The body's text.

    Returns:
        The hash.
    """
    return sha256_bytes(body.encode())


def row_hash(role: str, *, seq: int, time_utc: str, kind: str, body_sha256: str, prev_hash: str) -> str:
    """Return the hash that identifies a row and everything before it.

    Args:
        role: ``server`` or ``site``.
        seq: Number of the row.
        time_utc: Its time.
        kind: Its kind.
        body_sha256: Digest of its body.
        prev_hash: Hash of the row before.

    Returns:
        The hash.
    """
    fields = {"body_sha256": body_sha256, "kind": kind, "prev_hash": prev_hash, "seq": seq, "time_utc": time_utc}
    return digest(f"{role}-ledger-row", fields)


def head_message(role: str, *, ledger_id: str, seq: int, row_hash: str) -> bytes:
    """Return the bytes that the signature in a ledger's head covers.

    Args:
        role: ``server`` or ``site``.
        ledger_id: Id of the ledger.
        seq: Number of the newest row.
        row_hash: Hash of the newest row.

    Returns:
        The bytes.
    """
    fields = {"hash": row_hash, "ledger_id": ledger_id, "seq": seq}
    return f"consilium/{role}-ledger-head/v1".encode() + b"\0" + canonical_bytes(fields)


def format_time(moment: datetime) -> str:
    """Return a time as the ledger writes it.

    Args:
        moment: A time with a time zone.

    Returns:
        The text in UTC.

    Raises:
        InvalidInput: If the time has no zone.
    """
    if moment.tzinfo is None:
        raise InvalidInput("clock", value=moment.isoformat(), limit="a time with a time zone")
    return moment.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ").rjust(27, "0")


@dataclass(frozen=True, slots=True)
class Position(Document):
    """A position in a ledger: row number and row hash. (0, zeros) is the position before the first row."""

    seq: int = 0
    hash: Sha256 = NO_HASH


START = Position()


@dataclass(frozen=True, slots=True)
class Link(Document):
    """The facts from which one row's hash is computed, without its body."""

    AS_LIST: ClassVar = True

    time_utc: Time
    kind: str
    body_sha256: Sha256


def linked_hashes(links: Iterable[Link], *, after: Position) -> Iterator[tuple[int, str]]:
    """Compute the hashes of consecutive rows of the server's ledger from their links (the facts about each row without
    its body).

    Args:
        links: Links of consecutive rows.
        after: The position before the first of them.

    Returns:
        An iterator of (row number, hash).
    """
    hashed = after.hash
    for seq, link in enumerate(links, start=after.seq + 1):
        hashed = row_hash(
            "server", seq=seq, time_utc=link.time_utc, kind=link.kind, body_sha256=link.body_sha256, prev_hash=hashed
        )
        yield seq, hashed


def possession_message(role: str, *, ledger_id: str, seq: int, row_hash: str) -> bytes:
    """Return the bytes that a new key signs to take over a ledger.

    Args:
        role: ``server`` or ``site``.
        ledger_id: Id of the ledger.
        seq: Number of the row before the key row.
        row_hash: Hash of that row.

    Returns:
        The bytes.
    """
    fields = {"hash": row_hash, "ledger_id": ledger_id, "seq": seq}
    return f"consilium/{role}-ledger-key/v1".encode() + b"\0" + canonical_bytes(fields)


def check_link(role: str, row: Row, previous: Row | None) -> None:
    """Check that a row directly follows another row, and that its stored hash matches its fields.

    Args:
        role: ``server`` or ``site``.
        row: The row.
        previous: The row before; None for the first.

    Raises:
        LedgerCorrupt: If the row does not follow the previous one, or its hash is wrong.
    """
    seq, prev = (previous.seq + 1, previous.hash) if previous else (1, NO_HASH)
    if row.seq != seq:
        raise LedgerCorrupt(f"rows are out of order or missing: the next stored row is {row.seq}", row=seq)
    for name in ("time_utc", "kind", "body", "prev_hash", "hash"):
        if not isinstance(getattr(row, name), str):
            raise LedgerCorrupt(f"{name} is not text", row=seq)
    if row.prev_hash != prev:
        raise LedgerCorrupt("the stored previous hash differs from the hash of the row before", row=seq)
    check_own_hash(role, row)


def check_own_hash(role: str, row: Row) -> None:
    """Check that a row's stored hash matches its fields.

    Args:
        role: ``server`` or ``site``.
        row: The row.

    Raises:
        LedgerCorrupt: If the hash is wrong or a value cannot be encoded.
    """
    seq = row.seq
    try:
        check_time(row.time_utc)
        expected = row_hash(
            role,
            seq=seq,
            time_utc=row.time_utc,
            kind=row.kind,
            body_sha256=body_digest(row.body),
            prev_hash=row.prev_hash,
        )
    except (InvalidInput, UnicodeEncodeError) as error:
        raise LedgerCorrupt(f"a stored value cannot be read ({error})", row=seq) from error
    if row.hash != expected:
        raise LedgerCorrupt("the hash does not match the row's contents", row=seq)
