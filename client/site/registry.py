"""Lists the patient pools with a ledger on this machine, so that no pool gets a second ledger.

`consilium site init` calls it. A second ledger for the same patients would start with nothing spent, and each ledger
would allow the whole budget. Commands that open a ledger for writing call it too, because a copy of a site's directory
beside the original would be a second ledger. The file only prevents mistakes: if it cannot be read or written, a
warning is logged and the set-up continues. The server has a check of its own.
"""

from __future__ import annotations

import logging
import os
import shlex
import sqlite3
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from client.ledger.site_ledger import SiteLedger
from client.policy import LEDGER_FILE, load_site
from common.clock import utc_now
from common.document import Document
from common.errors import ConsiliumError, InvalidInput
from common.ledger.chain import Chain
from common.ledger.records import parse_body
from common.ledger.rollback_guard import standing_path
from common.locks import exclusively
from common.objects import write_json
from common.reading import parse_json

log = logging.getLogger(__name__)

FORGET = "--forget-charges-of"
"""Option of `consilium site init` by which a person confirms that a lost ledger no longer counts."""

STATE_DIR = "CONSILIUM_STATE_DIR"
"""Environment variable that names the file's folder; by default ``consilium`` in the user's XDG state directory."""


@dataclass(frozen=True, slots=True)
class KeptPool(Document):
    """A pool with a ledger on this machine.

    Attributes:
        pool: Name of the pool.
        data: Folder of its dataset, absolute and resolved.
        directory: Directory of its ledger, absolute and resolved.
    """

    pool: str
    data: str
    directory: str


@dataclass(frozen=True, slots=True)
class Registry:
    """The pools listed in one file; ``file`` is None for a user without a home directory."""

    file: Path | None

    @classmethod
    def of_user(cls) -> Registry:
        """Return the registry of the user who runs this process.

        Returns:
            The registry.
        """
        given, state = os.environ.get(STATE_DIR), os.environ.get("XDG_STATE_HOME")
        try:
            folder = Path(given) if given else (Path(state) if state else Path.home() / ".local/state") / "consilium"
        except RuntimeError:
            return cls(None)
        return cls(folder / "pools.json")

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Wait until no other process of this user sets up a site; two at once could make two ledgers for one pool.

        Hold it from :meth:`check` until :meth:`remember` has returned.
        """
        with ExitStack() as held:
            if self.file is not None:
                with suppress(OSError):  # `remember` warns of a list that cannot be written
                    self.file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                    held.enter_context(exclusively(self.file.parent / "pools.lock"))
            yield

    def check(self, *, pool: str, data: Path, directory: Path, kit: Path, forget: Path | None = None) -> None:
        """Refuse a second ledger for the same pool, or for another pool whose data folder overlaps with this one.

        Two folders overlap if they are equal or one contains the other. The data folder of a listed pool is the one
        that its ``site.toml`` names now. The folder in the list counts too if that site has used any patient's data.

        Args:
            pool: Name of the pool.
            data: Folder of the dataset.
            directory: Directory that would keep the ledger.
            kit: Folder of the startup kit; the error names it in the command `site join`.
            forget: Directory of a lost ledger that does not count, because a person confirmed it.

        Raises:
            InvalidInput: If another directory is listed with such a ledger and is not forgotten. Also if the
                directory ``forget`` still contains a ledger or standing, or is not listed.
        """
        here, place = str(directory.resolve()), data.resolve()
        lost = None if forget is None else str(forget.resolve())
        listed = self._read()
        if lost is not None and lost not in {kept.directory for kept in listed}:
            raise InvalidInput(FORGET, value=lost, limit="the directory that the refusal of `site init` names")
        for kept in listed:
            if kept.directory == here:
                continue
            same_data = any(place.is_relative_to(one) or one.is_relative_to(place) for one in _data_folders(kept))
            gone = _gone(Path(kept.directory))
            if (kept.pool == pool or same_data) and not (gone and kept.directory == lost):
                raise InvalidInput(
                    "these patients already have a ledger on this machine",
                    value=pool if kept.pool == pool else str(place),
                    limit=f"one ledger for each pool: pool {kept.pool!r} with the data {kept.data} "
                    f"{'had' if gone else 'has'} its ledger in {kept.directory}",
                    remedy=self._remedy(kept, kit=kit, gone=gone),
                )

    def check_no_copy(self, ledger_id: str, *, pool: str, directory: Path) -> None:
        """Refuse a copy of a ledger whose original is in another directory of this machine.

        Each of the two would count only the queries accepted through it, and both would state too small an ε.

        Args:
            ledger_id: Id of the ledger in ``directory``.
            pool: Name of its pool.
            directory: Directory that keeps the ledger.

        Raises:
            InvalidInput: If the directory listed for the pool has a ledger of the same id.
        """
        for original in self._others(pool, directory):
            if _ledger_id(original) == ledger_id:
                raise InvalidInput(
                    "this directory is a copy of a site whose ledger is in use on this machine",
                    value=str(directory.resolve()),
                    limit=f"one ledger for each pool: {original} has it",
                    remedy=f"use {original}; for another study run `consilium site join --from "
                    f"{shlex.quote(str(original))}`; if this directory replaces {original}, delete {original}",
                )

    def check_one_path(self, *, pool: str, directory: Path) -> None:
        """Refuse a second path to a ledger file, by a bind mount or hard links, before the file is opened.

        Args:
            pool: Name of the ledger's pool.
            directory: Directory of the ledger.

        Raises:
            InvalidInput: If the directory listed for the pool has the same file.
        """
        for original in self._others(pool, directory):
            with suppress(FileNotFoundError):
                if (original / LEDGER_FILE).samefile(directory / LEDGER_FILE):
                    raise InvalidInput(
                        "one ledger under two paths",
                        value=str(directory.resolve()),
                        limit=f"{original}, the path in this machine's list of pools",
                        remedy=f"use {original}, and remove nothing: both paths lead to the same files",
                    )

    def _others(self, pool: str, directory: Path) -> Iterator[Path]:
        """Yield the other directories listed for a pool; none if the list cannot be read (the set-up has warned)."""
        with suppress(OSError, ValueError, InvalidInput):
            here = directory.resolve()
            yield from [
                Path(kept.directory) for kept in self._entries() if kept.pool == pool and Path(kept.directory) != here
            ]

    def _remedy(self, kept: KeptPool, *, kit: Path, gone: bool) -> str:
        join = f"run `{shlex.join(('consilium', 'site', 'join', '--from', kept.directory, '--kit', str(kit)))}`"
        if _same_file(Path(kept.directory) / "study.toml", kit / "study.toml"):
            join = "use that directory, which was set up for this study"
        again = f"run this command again with {FORGET} {kept.directory}"
        others = f"if these are other patients, remove its entry from {self.file}"
        if gone:
            return (
                f"put that directory back and {join}; if it was deleted on purpose, {again}: whatever it charged to "
                f"these patients is then counted no more; {others}"
            )
        policy = Path(kept.directory) / "site.toml"
        others = f"if that site names the wrong folder, correct data in {policy}; {others}"
        if _has_only(Path(kept.directory), _BEGUN):
            return f"{join}; if it is in the wrong place: it has charged nothing, so delete it and {again}; {others}"
        return f"{join}; {others}"

    def remember(self, kept: KeptPool, *, forget: Path | None = None) -> None:
        """Add a pool to the list, in place of the entry for the same directory. The caller holds :meth:`alone`.

        Args:
            kept: The pool.
            forget: Directory of a lost ledger, whose entry is removed.
        """
        if self.file is None:
            log.warning("event=registry-absent pool=%s", kept.pool)
            return
        try:
            self.file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            replaced = {kept.directory, *([] if forget is None else [str(forget.resolve())])}
            others = [one for one in self._entries() if one.directory not in replaced]
            write_json(self.file, [one.to_json() for one in (*others, kept)], mode=0o600)
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
        document = parse_json(self.file.read_bytes(), what="registry of pools")
        if not isinstance(document, list):
            raise InvalidInput(
                "registry of pools", value=str(self.file), limit="a JSON list", remedy="restore it from a backup"
            )
        return list(map(KeptPool.from_json, document))


_BEGUN = frozenset({"genesis", "study", "pool", "peer"})
"""The only kinds of rows in a ledger that has charged and recorded nothing about patients."""
_UNUSED = _BEGUN | {"note", "decision", "refusal", "sealing-key"}
"""The only kinds of rows in a ledger of a site that has used no patient's data."""


def _data_folders(kept: KeptPool) -> set[Path]:
    """Return the data folders of a listed pool.

    These are the folder that its ``site.toml`` names now, and the listed folder if its patients' data may have been
    used.
    """
    directory, listed = Path(kept.directory), Path(kept.data)
    try:
        config = load_site(directory)
    except (ConsiliumError, OSError):
        return {listed}
    now = config.path(config.data).resolve()
    return {now} if config.pool == kept.pool and _has_only(directory, _UNUSED) else {now, listed}


def _same_file(one: Path, other: Path) -> bool:
    """Return whether two files can be read and have the same bytes."""
    try:
        return one.read_bytes() == other.read_bytes()
    except OSError:
        return False


def _gone(directory: Path) -> bool:
    """Return whether a directory has neither a ledger nor the standing of one."""
    ledger = directory / LEDGER_FILE
    return not os.path.lexists(ledger) and not os.path.lexists(standing_path(ledger))


def _ledger_id(directory: Path) -> str | None:
    """Return the id of the ledger in a directory; None if there is no ledger that can be read."""
    try:
        with closing(Chain.open(directory / LEDGER_FILE, role="site", signing_key=None, clock=utc_now)) as chain:
            found = parse_body(chain.row(1).body)
    except (ConsiliumError, OSError, sqlite3.Error):
        return None
    return str(found["ledger_id"])


def _has_only(directory: Path, kinds: frozenset[str]) -> bool:
    """Return whether a directory's ledger can be read, is the newest copy, and has rows of no other kinds."""
    try:
        with SiteLedger.read(directory / LEDGER_FILE) as ledger:
            return ledger.doubt() is None and all(row.kind in kinds for row in ledger.rows())
    except (ConsiliumError, OSError, sqlite3.Error):
        return False
