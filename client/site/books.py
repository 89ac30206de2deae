"""Opens a patient pool's ledger, finds its assignments of patients to voters, and lists the sites that share them.

The worker and all commands of a site call it. Terms:

* A *deal* assigns the pool's patients to voters.
* The *standing* is a small file beside a ledger that shows if the ledger is an older copy.
* The *books* of a pool are its ledger, with key and standing, and its deals.

A site that takes part in several studies has a directory for each. One directory contains the books. The others use
these books and are listed beside them in ``joined.json``. The module refuses another ledger than the one that the join
request names, and a new ledger if the old one is missing, since a new one would start with nothing spent.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Collection, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from client.ledger.site_ledger import SiteLedger
from client.policy import SiteConfig, load_site
from client.records.lock import writing
from client.records.patient_deal import Slots, load_slots
from client.site.registry import Registry
from common.admission import JoinRequest, StatedBooks, read_request
from common.config import Study
from common.errors import InvalidInput
from common.ledger.rollback_guard import standing_path
from common.objects import write_json
from common.reading import parse_json, parsing

log = logging.getLogger(__name__)

JOINED = "joined.json"
"""File beside the ledger that lists the other directories that use it, as paths relative to the ledger's folder."""

STUDIES = "studies"
"""Folder beside the ledger where directories that use it are made by default."""


def open_books(config: SiteConfig, *, restored: bool = False) -> SiteLedger:
    """Open the pool's ledger for writing; create it for a new pool.

    Args:
        config: The site's policy.
        restored: True if the ledger is an older copy that the caller recovers next.

    Returns:
        The ledger.

    Raises:
        InvalidInput: If the ledger named in this site's join request is missing, if another one is in its place, or if
            this directory is a copy of another one on this machine.
        LedgerCorrupt: If the ledger is damaged, or if it is an older copy and ``restored`` is False.
    """
    path, stated = config.ledger_file, _stated_ledger(config)
    remedy = _BACK
    if not path.exists() and not standing_path(path).exists() and (config.joined or stated):
        raise InvalidInput("the site ledger of this patient pool is missing", value=str(path), remedy=remedy)
    Registry.of_user().check_one_path(pool=config.pool, directory=config.books_dir)
    ledger = SiteLedger.open(path, config.pool, caps=config.caps, site=config.holder, restored=restored)
    found = ledger.ledger_id
    if stated not in (None, found):
        ledger.close()
        raise InvalidInput(
            "ledger of the pool", value=found, limit=f"{stated}, which the join request names", remedy=remedy
        )
    try:
        check_no_copy(config, ledger)
        if config.joined:  # a restored list may lack this directory; a withdrawal must reach it
            note_joined(config.books_dir, config.root)
    except BaseException:
        ledger.close()
        raise
    return ledger


def check_no_copy(config: SiteConfig, ledger: SiteLedger) -> None:
    """Refuse a site whose ledger is a copy of one in another directory of this machine.

    Args:
        config: The site's policy.
        ledger: The site's ledger.

    Raises:
        InvalidInput: If the original is there.
    """
    Registry.of_user().check_no_copy(ledger.ledger_id, pool=config.pool, directory=config.books_dir)


_BACK = (
    "put back the ledger, its key and its standing (the file site-ledger.standing); if you have only an older copy, "
    "put it there and run `consilium site recover --own-ledger`"
)


def joined_study(config: SiteConfig) -> Study:
    """Read the study in this site's directory.

    Args:
        config: The site's policy.

    Returns:
        The study.

    Raises:
        InvalidInput: If it is not the study for which the site's join request was signed. Then ``study.toml`` was
            replaced later, and nobody at the site has consented to the new study.
    """
    study, request = config.load_study(), _request(config)
    if request is not None and request.study != study.id:
        raise InvalidInput(
            "study of this site",
            value=study.id[:16],
            limit=f"{request.study[:16]}, which its join request names",
            remedy="put the kit's study.toml back; to join the other study, read `consilium study show --for-site` "
            "and send a new request with `consilium site request`",
        )
    return study


def consent_missing(study: Study) -> InvalidInput:
    """Return the error for a study to which nobody at this site has consented.

    Args:
        study: The study.

    Returns:
        The error.
    """
    return InvalidInput(
        f"no consent to study {study.name} is on record",
        remedy="read and consent with `consilium site consent`; before that, this site trains and answers nothing",
    )


def _request(config: SiteConfig) -> JoinRequest | None:
    path = config.path("request.json")
    return read_request(path) if path.exists() else None


def _stated_ledger(config: SiteConfig) -> str | None:
    """Return the id of the ledger that this site's join request names; None if it names none."""
    request = _request(config)
    return None if request is None or request.books is None else request.books.ledger_id


def read_books(config: SiteConfig) -> SiteLedger:
    """Open the pool's ledger for reading.

    Args:
        config: The site's policy.

    Returns:
        The ledger.

    Raises:
        InvalidInput: If it is missing.
    """
    if not config.ledger_file.exists():
        raise InvalidInput(
            "the site ledger of this patient pool is missing", value=str(config.ledger_file), remedy=_BACK
        )
    return SiteLedger.read(config.ledger_file)


def stated_books(config: SiteConfig) -> StatedBooks:
    """Return what a join request states about the pool's ledger. If the pool is new, create the ledger.

    Args:
        config: The site's policy.

    Returns:
        The ledger's id and public key, the Σμ² that the pool has spent, and its unit of privacy with the relation.
    """
    with open_books(config) as ledger:
        head = ledger.head()
        return StatedBooks(head.ledger_id, head.public_key, ledger.spent().mu_squared, config.caps.protection)


def site_directories(books: Path, *, absent_ok: bool = False) -> tuple[Path, ...]:
    """Return every directory that shares this ledger, the one that keeps it first.

    Args:
        books: The directory that keeps the ledger.
        absent_ok: Leave out missing directories instead of raising, and include those whose ``site.toml`` cannot be
            read; for callers that only read.

    Returns:
        The directories.

    Raises:
        InvalidInput: If a directory is missing, because a change that concerns all of them could not be made there.
    """
    found = [books]
    for directory in _listed(books, unreadable_ok=absent_ok):
        if not (directory / "site.toml").exists():
            if absent_ok:
                continue
            raise InvalidInput(
                "a study's directory that shares this pool's site ledger is missing",
                value=str(directory),
                remedy=f"restore it; if it was deleted for good, remove its line from {books / JOINED}",
            )
        found.append(directory)
    return tuple(found)


def ids_elsewhere(config: SiteConfig, known: Collection[str]) -> frozenset[str]:
    """Return the pool's studies that are run by a server other than the one of this directory, and their ledgers.

    If ``site.toml`` or the study of another directory cannot be read, nobody knows who runs that study. Every study in
    ``known`` that no readable directory assigns to this server then counts as another server's.

    Args:
        config: The policy of the directory.
        known: Ids of the studies in the pool's ledger.

    Returns:
        Ids of the studies whose directories share no signing key of a server with this directory, and of the server
        ledgers that their ``site.toml`` names.

    Raises:
        InvalidInput: If ``site.toml`` or the study of this directory, or the list of directories, cannot be read.
    """
    keys, here, away, unread = set(config.server.signing_keys), {config.load_study().id}, set[str](), False
    for directory in site_directories(config.books_dir, absent_ok=True):
        try:
            other = load_site(directory)
            other_study = other.load_study().id
            if keys.isdisjoint(other.server.signing_keys):
                away |= {other_study, other.server.ledger} - {""}
            else:
                here.add(other_study)
        except InvalidInput as error:
            warn_unreadable(directory, error)
            unread = True
    return frozenset(away | set(known) - here if unread else away)


def warn_unreadable(directory: Path, error: InvalidInput) -> None:
    """Log that another study of the pool cannot be read, which does not stop this one.

    Args:
        directory: The other study's directory.
        error: The reason.
    """
    log.warning("event=unreadable-study directory=%s problem=%r", directory.name, str(error))


def _listed(books: Path, *, unreadable_ok: bool) -> tuple[Path, ...]:
    """Return the directories listed in :data:`JOINED`, then those below :data:`STUDIES` that share the ledger too.

    A list that was restored from a backup may lack the latter. If ``unreadable_ok``, a directory below :data:`STUDIES`
    whose ``site.toml`` cannot be read counts as one of them.
    """

    def shares(directory: Path) -> bool:
        try:
            return load_site(directory).books_dir.resolve() == books.resolve()
        except InvalidInput:
            if unreadable_ok:
                return True
            raise

    listed = tuple(books / name for name in _joined(books))
    known = {directory.resolve() for directory in listed}
    usual = (path.parent for path in sorted((books / STUDIES).glob("*/site.toml")))
    new = (directory for directory in usual if directory.resolve() not in known)
    return (*listed, *(one for one in new if shares(one)))


def note_joined(books: Path, directory: Path) -> None:
    """Add a directory to the list of those that share a ledger.

    Args:
        books: The directory that keeps the ledger.
        directory: The directory that joins.
    """
    name = os.path.relpath(directory.resolve(), books.resolve())
    known = _joined(books)
    if name not in known:
        write_json(books / JOINED, [*known, name], mode=0o600)


def forget_joined(books: Path, directory: Path) -> None:
    """Remove a directory from the list of those that share a ledger.

    It is called for a directory in which there is no site, for example after an interrupted set-up.

    Args:
        books: The directory that keeps the ledger.
        directory: The directory.
    """
    name = os.path.relpath(directory.resolve(), books.resolve())
    if name in (known := _joined(books)):
        rest = [other for other in known if other != name]
        write_json(books / JOINED, rest, mode=0o600)


def _joined(books: Path) -> tuple[str, ...]:
    path = books / JOINED
    if not path.exists():
        return ()
    what = "list of the sites that share the ledger cannot be read"
    with parsing(what, value=str(path), remedy="restore the file"):
        names = parse_json(path.read_bytes(), what=what, value=str(path), remedy="restore the file")
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise InvalidInput(
            "list of the sites that share the ledger",
            value=str(path),
            limit="a list of directories",
            remedy="restore the file",
        )
    return tuple(names)


@contextmanager
def writing_teachers(directories: Iterable[Path]) -> Iterator[None]:
    """Hold the locks of the ``teachers`` folders of several site directories.

    Patients are assigned to voters only under the lock of the directory whose file stores the assignment. Otherwise two
    studies that assign a new patient at the same time could put the patient into two voters.

    Args:
        directories: The sites' directories.

    Raises:
        Refused: ``busy`` if another process holds a lock.
    """
    with ExitStack() as locks:
        for teachers in sorted({(directory / "teachers").resolve() for directory in directories}):
            locks.enter_context(writing(teachers))
        yield


def slots_file(config: SiteConfig) -> Path:
    """Return the path of the slots file, which assigns the pool's patients to the voters of this site's study.

    There is one file for each number of voters m, shared by all studies. A patient is therefore in the same voter in
    all studies of that m, and a withdrawal empties the slot for all of them.

    Args:
        config: The site's policy.

    Returns:
        The path; the file need not exist.
    """
    first = config.books_dir / "teachers" / "slots.json"
    if not config.joined:
        return first
    keeper = load_site(config.books_dir)
    dealt = load_slots(first).voters if first.exists() else _voters(keeper)
    return first if _voters(config) == dealt else first.with_name(f"slots-{_voters(config)}.json")


def _voters(config: SiteConfig) -> int:
    return config.load_study().privacy.voters_per_site


def deals(books: Path) -> dict[Path, Slots]:
    """Load every slots file of the pool. Each assigns the pool's patients to voters, for one number of voters.

    Args:
        books: The directory that keeps the ledger.

    Returns:
        The assignment (slots) in each file, by the file's path.
    """
    return {path: load_slots(path) for path in sorted((books / "teachers").glob("slots*.json"))}
