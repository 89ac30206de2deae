"""Remembers, for each ledger, the newest head that a party countersigned or saw countersigned, and contradicting heads.

Sites and the server use it. One folder holds ``heads.json`` with the sizes and Merkle roots of heads, and a note
(signed head) for each ledger. If two heads contradict each other, it holds the notes of both. A head is on disk before
its countersignature is sent. Refuses a memory that cannot be read.
"""

from __future__ import annotations

import hmac
import re
import secrets
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from common.canonical import check_hash
from common.document import Document
from common.errors import ALARM_STOPS, InvalidInput
from common.locks import exclusively
from common.objects import write_atomically, write_json
from common.reading import naming_file, parse_json
from common.witness.merkle import grew
from common.witness.messages import ConsistencyProof
from common.witness.notes import MAX_NOTE_BYTES, CheckpointNote, note_in, origin_of

FOLDER = "witnesses"
HEADS = "heads.json"
LOCK = "heads.lock"
MAX_CONFLICTS = 16
"""Largest number of contradicting heads that are stored for each ledger. Callers first remove all signatures but the
ledger's own, so each head takes less than 1 kB, and the heads of a ledger at most 16 kB."""


@dataclass(frozen=True, slots=True)
class KnownHead(Document):
    """The newest signed head of a ledger that this party countersigned: the number of rows, and their Merkle root in
    hex.
    """

    size: int
    root: str

    def check(self) -> None:
        """Refuse a root that is not 64 hex digits."""
        check_hash(self.root)


SHOWN = ("genesis", "study", "pool", "reservation", "receipt")
"""Kinds of rows in a site's ledger that its checkpoints count. The server knows of these rows anyway. The number of
rows of other kinds would reveal a training or a withdrawal. Changes of those rows are detected as well, because a row's
hash covers all earlier rows of every kind."""
_SALT = "blind.key"
_SALT_BYTES = 32


def blinded(hashes: Sequence[bytes], folder: Path, *, make: bool = False) -> list[bytes]:
    """Return the leaves of the Merkle tree of a site's ledger: HMAC-SHA256 of each row's hash under a secret of the
    site.

    Rows contain hashes of codes. Without the secret, somebody who guesses a code could confirm the guess by the tree's
    root.

    Args:
        hashes: Hashes of rows.
        folder: Folder of the secret.
        make: True to create the secret if there is none.

    Returns:
        Leaves of 32 bytes.

    Raises:
        InvalidInput: If there is no secret and ``make`` is False, or if it has another size than 32 bytes.
    """
    path = folder / _SALT
    if not path.exists():
        if not make:
            raise InvalidInput(
                "missing key that blinds the heads of this site's ledger",
                value=str(path),
                limit="the file that the worker wrote when it signed the site's first head",
                remedy="restore it from a backup of the site's directory",
            )
        write_atomically(path, secrets.token_bytes(_SALT_BYTES), mode=0o600)
    salt = path.read_bytes()
    if len(salt) != _SALT_BYTES:
        raise InvalidInput(
            "key that blinds the heads of this site's ledger",
            value=f"{len(salt)} bytes",
            limit=f"{_SALT_BYTES} bytes",
            remedy=f"restore {path} from a backup of the site's directory",
        )
    return [hmac.digest(salt, one, "sha256") for one in hashes]


class HeadMemory:
    """The heads of ledgers (signed hashes of their newest rows) that a party remembers, in one folder.

    Args:
        folder: The folder.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Let only one process at a time judge or record heads in this folder; wait until the lock is free.

        The workers of a pool's studies share the folder. Hold this lock from :meth:`judge` until :meth:`remember`
        returns. Otherwise two workers could countersign two histories of one ledger, or one could erase what the other
        recorded.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        with exclusively(self.folder / LOCK, mode=0o600):
            yield

    def known(self, origin: str) -> KnownHead | None:
        """Return the newest signed head of a ledger that this party countersigned.

        Args:
            origin: Name of the ledger.

        Returns:
            The head; None if there is none.
        """
        return self._all().get(origin)

    def server_ledgers(self) -> tuple[str, ...]:
        """Return the ids of the server ledgers of which this party countersigned a head.

        Returns:
            The ids, sorted.
        """
        prefix = origin_of("server", "")
        return tuple(sorted(origin.removeprefix(prefix) for origin in self._all() if origin.startswith(prefix)))

    def size(self, origin: str) -> int:
        """Return the number of rows up to the newest signed head of a ledger that this party countersigned.

        Args:
            origin: Name of the ledger.

        Returns:
            The number; 0 if there is none.
        """
        known = self.known(origin)
        return 0 if known is None else known.size

    def place(self, note: CheckpointNote, key: str, *, others: Iterable[str]) -> str:
        """Return the name under which to remember a ledger's head that ``key`` signed. It is usually the ledger's name.

        A dishonest party can give its ledger another ledger's name. If one of the keys of ``others`` signed the head
        that is stored under that name, the new head is stored separately, and the two are not compared.

        Args:
            note: The head.
            key: The key that signed it, in hex.
            others: Keys of the other known ledgers.

        Returns:
            The name.
        """
        kept = self.note(note.origin)
        if kept is None or kept.is_signed(key) or not any(kept.is_signed(other) for other in others):
            return note.origin
        return apart(note.origin, key)

    def judge(self, note: CheckpointNote, growths: tuple[ConsistencyProof, ...], *, name: str = "") -> str:
        """Decide whether a new head, signed by its ledger, continues the newest head of that ledger that this party
        countersigned.

        A contradicting head is stored as a conflict. Together with the known head it proves that one key signed two
        histories.

        Args:
            note: The new head.
            growths: Proofs that the new head contains all rows of earlier heads.
            name: Name under which the head is remembered; the ledger's name if empty.

        Returns:
            A word of :data:`~common.witness.messages.PROBLEMS`; empty if the new head continues the known one, or if
            none is known.
        """
        known = self.known(name or note.origin)
        if known is None or (known.size, known.root) == (note.size, note.root.hex()):
            return ""
        if note.size < known.size:
            return "stale"
        growth = next((one for one in growths if one.since == known.size), None)
        if growth is None and note.size != known.size:
            return "gap"
        proof = () if growth is None else growth.proof
        root = bytes.fromhex(known.root)
        if grew(proof, old=known.size, old_root=root, new=note.size, new_root=note.root):
            return ""
        self.keep_conflict(note, of=name)
        return "contradicts"

    def other_ledger(self, note: CheckpointNote, key: str, *, name: str = "") -> bool:
        """Return whether a key that signed the first head of a ledger also signed a head of another ledger before. If
        so, store the new head as a conflict of that other ledger.

        A key may sign for one ledger only. Otherwise a site could show every peer a ledger of another name, and the
        peers could not detect a contradiction. A ledger of which a head is known already is not checked again.

        Args:
            note: The new head.
            key: The key in hex.
            name: Name under which the head is remembered; the ledger's name if empty.

        Returns:
            True if the key signed for another ledger; always False if a head of this ledger is known already.
        """
        known = self._all()
        if (name or note.origin) in known:
            return False
        for origin in known:
            kept = self.note(origin)
            if kept is not None and kept.is_signed(key):
                self.keep_conflict(note, of=origin)
                return True
        return False

    def remember(self, note: CheckpointNote, *, name: str = "") -> None:
        """Record a signed head as the newest of its ledger that this party countersigned. It is durable when the call
        returns. The caller must hold :meth:`alone` if other processes use the folder.

        Args:
            note: The head.
            name: Name under which the head is remembered; the ledger's name if empty.
        """
        known, name = self._all(), name or note.origin
        if known.get(name) != (now := KnownHead(note.size, note.root.hex())):
            self._save({**known, name: now})

    def forget(self, origin: str) -> None:
        """Delete the known head of a ledger, its note and its conflicts, after a person has examined them.

        Args:
            origin: Name of the ledger.
        """
        with self.alone():
            known = self._all()
            if known.pop(origin, None) is not None:
                self._save(known)
        for path in (self.folder / f"{_file(origin)}.note", *self.folder.glob(f"{_file(origin)}.conflict-*")):
            path.unlink(missing_ok=True)

    def keep(self, note: CheckpointNote, *, name: str = "") -> None:
        """Store a note (a signed head with its countersignatures); it replaces the ledger's earlier note.

        Args:
            note: The note.
            name: Name under which the note is stored; the ledger's name if empty.
        """
        path = self.folder / f"{_file(name or note.origin)}.note"
        if (before := self.note(name or note.origin)) is None or before.render() != note.render():
            write_atomically(path, note.render().encode())

    def note(self, origin: str) -> CheckpointNote | None:
        """Return the stored note (signed head with countersignatures) of a ledger.

        Args:
            origin: Name of the ledger.

        Returns:
            The note; None if there is none or it cannot be read.
        """
        return read_note(self.folder / f"{_file(origin)}.note")

    def keep_conflict(self, note: CheckpointNote, *, of: str = "") -> None:
        """Store a signed head that contradicts the known head; at most :data:`MAX_CONFLICTS` for each ledger.

        Args:
            note: The head.
            of: Name under which the conflict is stored; by default the ledger's name in the head. Give the name from
                :meth:`place` if the ledger is remembered under it, or from :meth:`other_ledger` if the head's key
                signed heads of another ledger before.
        """
        for number in range(MAX_CONFLICTS):
            path = self.folder / f"{_file(of or note.origin)}.conflict-{number}"
            if not path.exists():
                write_atomically(path, note.render().encode())
                return
            if path.read_bytes() == note.render().encode():
                return

    def conflicting(self) -> tuple[str, ...]:
        """Return the names of the ledgers of which two histories were signed."""
        named = {_file(origin): origin for origin in self._all()}
        return tuple(
            named.get(path.name.removesuffix(".conflict-0"), note.origin)
            for path in sorted(self.folder.glob("*.conflict-0"))
            if (note := read_note(path))
        )

    @property
    def server_forked(self) -> bool:
        """True if a server signed two histories. A conflict of a peer's ledger does not stop other sites."""
        return any(map(_is_servers, self.conflicting()))

    def conflicts(self) -> tuple[str, ...]:
        """Return one line for each ledger of which two histories were signed."""
        return tuple(
            f"two histories of {origin} were signed: the ledger was rolled back or forked; both heads are in "
            f"{self.folder}{f'; {ALARM_STOPS}' if _is_servers(origin) else ''}"
            for origin in self.conflicting()
        )

    def _all(self) -> dict[str, KnownHead]:
        """Read all known heads from the folder. They are read each time, because another process may have changed
        them.
        """
        path = self.folder / HEADS
        if not path.exists():
            return {}
        found = path.read_bytes()
        remedy = "restore it from a backup; without one, move it away, and heads are countersigned anew"
        with naming_file(path, remedy=remedy):
            data = parse_json(found, what="heads that were countersigned")
            if not isinstance(data, dict):
                raise InvalidInput("heads that were countersigned", limit="an object with one head for each ledger")
            return {str(origin): KnownHead.from_json(item) for origin, item in data.items()}

    def _save(self, known: dict[str, KnownHead]) -> None:
        heads = {origin: one.to_json() for origin, one in sorted(known.items())}
        write_json(self.folder / HEADS, heads, mode=0o600)


def read_note(path: Path) -> CheckpointNote | None:
    """Return the checkpoint in a file.

    Args:
        path: The file.

    Returns:
        The checkpoint; None if there is no file or no checkpoint in it.
    """
    try:
        with path.open("rb") as stream:
            return note_in(stream.read(MAX_NOTE_BYTES + 1))
    except OSError:
        return None


def apart(origin: str, key: str) -> str:
    """Return the name under which to store a ledger that claims another ledger's name. No ledger can give itself the
    returned name.

    Args:
        origin: Name of the ledger.
        key: Its key in hex.

    Returns:
        The name.
    """
    return f"{origin}@{key[:16]}"


def _is_servers(origin: str) -> bool:
    return origin.startswith(origin_of("server", ""))


def _file(origin: str) -> str:
    return re.sub(r"[^A-Za-z0-9._@-]", "=", origin)
