"""Registers the patient pools that this machine keeps ledgers for, so that no pool gets a second one.

A second ledger for the same patients would start at nothing, and each would let their whole budget be spent. The file
is a help against mistakes, not a lock: where it cannot be read or written a warning is logged and nothing stops. The
server's own check needs no file of a site's.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
from dataclasses import dataclass
from pathlib import Path

from common.document import Document
from common.errors import InvalidInput
from common.objects import write_atomically

log = logging.getLogger(__name__)

STATE_DIR = "CONSILIUM_STATE_DIR"
"""Environment variable: the folder of the file, in place of ``consilium`` in the user's XDG state directory."""


@dataclass(frozen=True, slots=True)
class KeptPool(Document):
    """A pool whose books lie in ``directory``, begun over the dataset at ``data``; both as absolute, resolved paths."""

    pool: str
    data: str
    directory: str


@dataclass(frozen=True, slots=True)
class Registry:
    """The pools in one file; none at all where ``file`` is None, because the user has no home."""

    file: Path | None

    @classmethod
    def of_user(cls) -> Registry:
        """The registry of whoever runs this process."""
        given, state = os.environ.get(STATE_DIR), os.environ.get("XDG_STATE_HOME")
        try:
            folder = Path(given) if given else (Path(state) if state else Path.home() / ".local/state") / "consilium"
        except RuntimeError:
            return cls(None)
        return cls(folder / "pools.json")

    def check(self, *, pool: str, data: Path, directory: Path) -> None:
        """InvalidInput if another directory keeps books for this pool, or for a pool over the same data."""
        here, place = str(directory.resolve()), data.resolve()
        for kept in self._read():
            if kept.directory == here:
                continue
            known = Path(kept.data)
            same_data = place == known or place.is_relative_to(known) or known.is_relative_to(place)
            if kept.pool == pool or same_data:
                raise InvalidInput(
                    "this patient pool already keeps a ledger elsewhere",
                    value=pool if kept.pool == pool else str(place),
                    limit=f"one ledger for each pool: {kept.pool!r}, over {kept.data}, keeps its own in "
                    f"{kept.directory}",
                    remedy=f"`consilium site join --from {kept.directory}`; if these are other patients, or those "
                    f"books are deleted and never charged anything, take that entry out of {self.file}",
                )

    def remember(self, kept: KeptPool) -> None:
        """Put a pool on the list, in place of what was known of that directory."""
        if self.file is None:
            log.warning("event=registry-absent pool=%s", kept.pool)
            return
        try:
            self.file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            with (self.file.parent / "pools.lock").open("a") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
                others = [one for one in self._entries() if one.directory != kept.directory]
                text = json.dumps([one.to_json() for one in (*others, kept)], indent=1)
                write_atomically(self.file, (text + "\n").encode(), mode=0o600)
        except (OSError, ValueError, InvalidInput):
            log.warning("event=registry-unwritable file=%s", self.file)

    def _read(self) -> list[KeptPool]:
        try:
            return self._entries()
        except (OSError, ValueError, InvalidInput):
            log.warning("event=registry-unreadable file=%s", self.file)
            return []

    def _entries(self) -> list[KeptPool]:
        if self.file is None or not self.file.exists():
            return []
        document = json.loads(self.file.read_text(encoding="utf-8"))
        if not isinstance(document, list):
            raise InvalidInput("registry of pools", limit="a list")
        return list(map(KeptPool.from_json, document))
