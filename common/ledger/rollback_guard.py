"""Keeps a standing file beside each ledger, which shows if the ledger was replaced by an older copy.

The server's and a site's ledger use it. An older copy of a ledger is valid in itself; only data outside the file can
reveal that it is old. The standing file contains the newest head, the totals at that head, and the ends of earlier
transactions (``marks``). It is written after every transaction, so it is never newer than the ledger. A ledger that
continued from an older copy contains one of the marks. The standing file therefore shows what the replaced ledger
charged after that mark, even if the older copy has charged something itself since.

The standing file may be on another disk, behind a symbolic link. It contains no code, no answer and no name. Refuses a
link whose target does not exist, and a plain file in the place of a link, because a backup that follows links stores a
copy of the standing file beside the copy of the ledger.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, ClassVar, Self

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from common.canonical import canonical_bytes, canonical_text
from common.data.dataset import PatientIdentity
from common.document import LATER, Document, Sha256
from common.errors import InvalidInput, LedgerCorrupt
from common.ledger.charges import Number, PoolDeclaration, PoolName, Spend, Spends
from common.ledger.keys import hex_bytes, public_hex, signing_public_key
from common.ledger.records import CapsRecord
from common.ledger.rows import Position, SignedHead
from common.ledger.teacher_records import PatientRecord, TrainingRecord
from common.objects import write_atomically
from common.reading import parse_json


@dataclass(frozen=True, slots=True)
class KeptStanding(Document):
    """Base class of the contents of a standing file, for the server's and the sites' ledgers.

    Attributes:
        head: The ledger's newest signed head.
        marks: Number and hash of the last rows of earlier transactions, newest first. A standing file of an early
            version has no marks; the last row that it shares with an older copy of the ledger is then unknown.
        elsewhere: Path of the standing file if a symbolic link beside the ledger points to it; otherwise None.
        signature: Signature of all other fields by the key of ``head``; None in files of earlier versions.
    """

    ROLE: ClassVar[str]
    WHAT: ClassVar[str]
    REMEDY: ClassVar[str]

    head: SignedHead
    marks: Annotated[tuple[tuple[Number, Sha256], ...], LATER] = field(default=(), kw_only=True)
    elsewhere: str | None = field(default=None, kw_only=True)
    signature: str | None = field(default=None, kw_only=True)

    def check(self) -> None:
        """Refuse the head of another kind of ledger, and a head whose signature is invalid."""
        if self.head.role != self.ROLE or not self.head.is_genuine():
            raise InvalidInput("head in a standing file", limit=f"the head of a {self.ROLE} ledger, signed by its key")

    @property
    def position(self) -> Position:
        """The ledger's newest row at the time when the standing file was written."""
        return Position(self.head.seq, self.head.hash)

    def positions(self) -> Iterator[Position]:
        """Return every row that the standing file names, newest first."""
        yield self.position
        for seq, hashed in self.marks:
            if seq < self.head.seq:
                yield Position(seq, hashed)

    def marks_after(self, fork: Position) -> tuple[tuple[int, str], ...] | None:
        """Return number and hash of each row that the standing file names between a row and its newest row.

        Args:
            fork: The row.

        Returns:
            The rows, newest first; None if the standing file names only its newest row.
        """
        return tuple(mark for mark in self.marks if fork.seq < mark[0] < self.head.seq) if self.marks else None

    def save(self, ledger: Path, *, key: Ed25519PrivateKey) -> None:
        """Write the ledger's standing file with mode 0600, in place of an earlier one. After a power cut the earlier
        file may remain, which is older but valid.

        The file is signed, unless the ledger's key was changed after the head was signed.

        Args:
            ledger: The ledger's file.
            key: The ledger's signing key.
        """
        path = standing_path(ledger)
        placed = replace(self, elsewhere=place_elsewhere(ledger))
        if public_hex(key) == self.head.public_key:
            placed = replace(placed, signature=key.sign(_signed_bytes(placed.to_json())).hex())
        text = canonical_text(placed.to_json()) + "\n"
        write_atomically(path, text.encode(), mode=0o600, flush_name=False)

    def against(
        self, *, ledger_id: str, rows: int, covers: Callable[[Position], bool], this: str, beside: str
    ) -> str | None:
        """Return a message if this standing file shows that a ledger file is an older copy, or is of another ledger.

        Args:
            ledger_id: Id of the ledger in the ledger file.
            rows: Number of the ledger file's rows.
            covers: Returns whether all charges up to a row are in the ledger.
            this: How the message names the ledger's file.
            beside: How the message states where the standing file is.

        Returns:
            The message; None if all charges of the standing file are in the ledger.
        """
        if self.head.ledger_id != ledger_id:
            return f"the standing file kept {beside} is of another ledger, {self.head.ledger_id}"
        if covers(self.position):
            return None
        return (
            f"{this} ends at row {rows} and lacks row {self.head.seq}, which the standing file kept {beside} names: an "
            "older copy was put in its place"
        )

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read the file that :meth:`save` wrote.

        Args:
            path: The standing file.

        Returns:
            The contents of the standing file.

        Raises:
            InvalidInput: If the file cannot be read, has other contents, or has a wrong signature.
        """
        try:
            found = parse_json(path.read_bytes(), what=f"standing of {cls.WHAT}")
            standing = cls.from_json(found)
            if standing.signature is not None:
                key = signing_public_key(standing.head.public_key)
                key.verify(hex_bytes(standing.signature), _signed_bytes(found))
            return standing
        except PermissionError as error:
            raise InvalidInput(
                f"standing of {cls.WHAT} cannot be read (permission denied)",
                value=str(path),
                remedy=f"give user {os.geteuid()} access, for example with `sudo chown {os.geteuid()} "
                f"{shlex.quote(str(path))}`",
            ) from error
        except (OSError, ValueError, InvalidInput, InvalidSignature) as error:
            raise InvalidInput(
                f"standing of {cls.WHAT}",
                value=str(path),
                limit="the file that the ledger wrote, unchanged",
                remedy=cls.REMEDY,
            ) from error


@dataclass(frozen=True, slots=True)
class SiteLedgerStanding(KeptStanding):
    """The contents of the standing file beside a site's ledger, which shows whether the ledger is an older copy.

    Attributes:
        pool: Total spent, under the pool's protection.
        studies: Total by study, under the study's protection.
        day: UTC date on which the newest queries were accepted.
        queries: Number of queries accepted on that day.
        pending: Ids of accepted queries that no receipt shows as released, also none that raised an alarm.
        patients: The recorded withdrawals of patients, who are named by keyed hashes.
        left: Ids of studies from which the site withdrew for good.
        sealing_keys: The keys that replaced each sealing key of a server, by the replaced key.
        caps: The newest caps.
        adapted: Trainings of networks that may leave the hospital.
        identity: How the data set tells patients apart; None before the first training.
    """

    ROLE = "site"
    WHAT = "a site ledger"
    REMEDY = (
        "restore it; if it is lost, remove the file and run `consilium site recover --own-ledger --charge-all`, which "
        "counts all remaining budget as spent"
    )

    pool: Spend
    studies: dict[Sha256, Spend]
    day: str
    queries: int
    pending: tuple[Sha256, ...]
    patients: Annotated[tuple[PatientRecord, ...], LATER] = ()
    left: Annotated[tuple[Sha256, ...], LATER] = ()
    sealing_keys: Annotated[dict[Sha256, tuple[Sha256, ...]], LATER] = field(default_factory=dict)
    caps: CapsRecord | None = None
    adapted: Annotated[tuple[TrainingRecord, ...], LATER] = ()
    identity: PatientIdentity | None = None


@dataclass(frozen=True, slots=True)
class ServerStanding(KeptStanding):
    """The contents of the standing file beside the server's ledger, which shows whether the ledger is an older copy.

    Attributes:
        pools: Total spent of every pool.
        studies: Total by study and pool.
        declarations: The pools' declarations, because an older copy may lack them too.
        books: Id of the site ledger in which the hospital counts a pool's charges, by pool.
        notes: Texts of the notes that must not be lost: revocations of sites, and a recovery without a standing.
        charged: The rows that this ledger lost and that an earlier recovery charged, each by its row number and hash. A
            later recovery charges no receipt of these rows again.
    """

    ROLE = "server"
    WHAT = "the server's ledger"
    REMEDY = (
        "restore it; if it is lost, remove the file and run `consilium ledger recover` with every site's receipts and "
        "--charge-all"
    )

    pools: Spends
    studies: dict[Sha256, Spends]
    declarations: tuple[PoolDeclaration, ...]
    books: Annotated[dict[PoolName, str], LATER] = field(default_factory=dict)
    notes: tuple[str, ...] | None = None
    charged: tuple[tuple[Number, Sha256], ...] | None = None


def _signed_bytes(standing: dict[str, Any]) -> bytes:
    """Return the bytes that a standing file's signature covers: all fields but the signature."""
    fields = {name: value for name, value in standing.items() if name != "signature"}
    return b"consilium/standing/v1\0" + canonical_bytes(fields)


def standing_path(ledger: Path) -> Path:
    """Return the path of a ledger's standing file: beside the ledger, or the target of a symbolic link there.

    Args:
        ledger: The ledger's file.

    Returns:
        The path. The file does not have to exist.
    """
    path = ledger.with_suffix(".standing")
    return Path(os.path.realpath(path)) if path.is_symlink() else path


def place_elsewhere(ledger: Path) -> str | None:
    """Return where a ledger's standing file is if a symbolic link beside the ledger points to it.

    Args:
        ledger: The ledger's file.

    Returns:
        The path of the link's target; None if there is no link.
    """
    return str(standing_path(ledger)) if ledger.with_suffix(".standing").is_symlink() else None


def lies_with_its_key(ledger: Path) -> bool:
    """Return whether a signing key is beside the ledger or in a folder ``keys`` beside it.

    A ledger with a key is in use on this machine. One without is a read-only copy.

    Args:
        ledger: The ledger's file.

    Returns:
        True if there is a key.
    """
    key = ledger.with_suffix(".key")
    return key.exists() or (key.parent / "keys" / key.name).exists()


def kept_standing(ledger: Path) -> Path | None:
    """Return the path of a ledger's standing file if the file exists.

    Args:
        ledger: The ledger's file.

    Returns:
        The path; None if there is none.

    Raises:
        LedgerCorrupt: If the symbolic link to the standing file has no target, or if a copy of the standing file has
            replaced the link. A rollback could then not be detected.
    """
    path = standing_path(ledger)
    if path.exists():
        if place_elsewhere(ledger) is None and (place := _written_for(path)) is not None:
            raise LedgerCorrupt(
                f"{path} is a copy of the standing file, which is kept at {place}: a backup that follows links put it "
                f"there; to fix: `ln -sf {shlex.quote(place)} {shlex.quote(str(path))}`; if {place} is lost, delete "
                "the copy: the ledger then counts as an older copy without a standing file"
            )
        return path
    link = ledger.with_suffix(".standing")
    if link.is_symlink():
        raise LedgerCorrupt(
            f"the standing file of {ledger} is not at {path}; to fix: mount that disk, or restore the file; if it is "
            f"lost, `rm {shlex.quote(str(link))}`, then run `consilium ledger recover` at the server, or `consilium "
            "site recover --own-ledger` at a site, with --charge-all, or with --standing FILE if a file newer than the "
            "ledger was kept elsewhere"
        )
    return None


def _written_for(path: Path) -> str | None:
    """Return the path of the standing file that a file states as its own; None if it states none or is unreadable."""
    try:
        found = parse_json(path.read_bytes(), what="standing file")
    except (OSError, InvalidInput):
        return None  # the reader of the file reports this
    place = found.get("elsewhere") if isinstance(found, dict) else None
    return place if isinstance(place, str) else None
