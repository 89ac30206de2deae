"""A patient pool's books: the one ledger, the deals of its patients to voters, and the studies' sites that share them.

A site that takes part in several studies has a directory for each, and one of them keeps the books; the others joined
it and are listed there in ``joined.json``. Refuses books other than those the consortium was told of, and to begin new
ones where they are gone: they would start at nothing.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from client.ledger.site_ledger import SiteLedger
from client.policy import SiteConfig, load_site
from client.records.lock import writing
from client.records.patient_deal import Slots, load_slots
from common.admission import JoinRequest, StatedBooks, read_request
from common.config import Study, load_study
from common.errors import InvalidInput
from common.ledger.rollback_guard import standing_path
from common.objects import write_atomically
from common.reading import parse_json, parsing

JOINED = "joined.json"
"""Beside the books: the directories that joined them, relative to theirs."""


def open_books(config: SiteConfig, *, restored: bool = False) -> SiteLedger:
    """Open the pool's ledger for writing, under its one set of caps; it is made for a pool that has none yet.

    Raises what :meth:`SiteLedger.open` does, and InvalidInput where the ledger this site's join request named is gone,
    or another lies in its place.
    """
    path, stated = config.ledger_file, _stated_ledger(config)
    remedy = _BACK
    if not path.exists() and not standing_path(path).exists() and (config.joined or stated):
        raise InvalidInput("books of the pool are gone", value=str(path), remedy=remedy)
    ledger = SiteLedger.open(path, config.pool, caps=config.caps, site=config.holder, restored=restored)
    found = ledger.head().ledger_id
    if stated not in (None, found):
        ledger.close()
        raise InvalidInput(
            "books of the pool", value=found, limit=f"{stated}, as the consortium was told", remedy=remedy
        )
    return ledger


_BACK = "put the ledger, its key and its standing back; for an older copy `consilium site recover --own-ledger`"


def joined_study(config: SiteConfig) -> Study:
    """The study in this site's directory; InvalidInput where it is another than its join request was signed for.

    A study.toml that was exchanged later, for one whose server reads codes say, is a consent that nobody gave.
    """
    study, request = load_study(config.path(config.study)), _request(config)
    if request is not None and request.study != study.id:
        raise InvalidInput(
            "study of this site",
            value=study.id[:16],
            limit=f"{request.study[:16]}, which it asked to join",
            remedy="put the kit's study.toml back; to consent to the other, read `consilium study show --for-site` "
            "and send `consilium site request` anew",
        )
    return study


def consent_missing(study: Study) -> InvalidInput:
    """What is said where nobody at this site consented to the study yet."""
    return InvalidInput(
        f"consent to study {study.name}",
        limit="on record before this site answers anything",
        remedy="`consilium site consent`, which shows what is asked and who answers for it",
    )


def _request(config: SiteConfig) -> JoinRequest | None:
    path = config.path("request.json")
    return read_request(path) if path.exists() else None


def _stated_ledger(config: SiteConfig) -> str | None:
    """The id of the site ledger that this site's join request named; None where it named none, or lies elsewhere."""
    request = _request(config)
    return None if request is None or request.books is None else request.books.ledger_id


def read_books(config: SiteConfig) -> SiteLedger:
    """Open the pool's ledger for reading; InvalidInput where it is gone: a site has one from its join request on."""
    if not config.ledger_file.exists():
        raise InvalidInput("books of the pool are gone", value=str(config.ledger_file), remedy=_BACK)
    return SiteLedger.read(config.ledger_file)


def stated_books(config: SiteConfig) -> StatedBooks:
    """What a join request says of the pool's books, which are made here if the pool is new."""
    with open_books(config) as ledger:
        head = ledger.head()
        return StatedBooks(head.ledger_id, head.public_key, ledger.spent().mu_squared, config.caps.protection)


def site_directories(books: Path, *, absent_ok: bool = False) -> tuple[Path, ...]:
    """Every directory whose site shares these books, the one that keeps them first.

    InvalidInput where one that joined is not there: what must hold in all of them would not hold in it. With
    ``absent_ok`` it is left out, for whoever only reads.
    """
    found = [books]
    for name in _joined(books):
        directory = books / name
        if not (directory / "site.toml").exists():
            if absent_ok:
                continue
            raise InvalidInput(
                "a directory that shares these books is missing",
                value=str(directory),
                remedy=f"restore it; if it was deleted for good, remove its line from {books / JOINED}",
            )
        found.append(directory)
    return tuple(found)


def note_joined(books: Path, directory: Path) -> None:
    """Put a directory on the list of those that share the books."""
    name = os.path.relpath(directory.resolve(), books.resolve())
    known = _joined(books)
    if name not in known:
        write_atomically(books / JOINED, (json.dumps([*known, name], indent=1) + "\n").encode(), mode=0o600)


def forget_joined(books: Path, directory: Path) -> None:
    """Take a directory that holds no site from that list."""
    name = os.path.relpath(directory.resolve(), books.resolve())
    if name in (known := _joined(books)):
        rest = [other for other in known if other != name]
        write_atomically(books / JOINED, (json.dumps(rest, indent=1) + "\n").encode(), mode=0o600)


def _joined(books: Path) -> tuple[str, ...]:
    path = books / JOINED
    if not path.exists():
        return ()
    what = "list of joined sites cannot be read"
    with parsing(what, value=str(path), remedy="restore it"):
        names = parse_json(path.read_bytes(), what=what, value=str(path), remedy="restore it")
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise InvalidInput("list of joined sites", value=str(path), limit="a list of directories")
    return tuple(names)


@contextmanager
def writing_teachers(directories: Iterable[Path]) -> Iterator[None]:
    """Hold the locks of several directories' teachers; Refused if one is held by another.

    Whoever deals patients holds that of the books, where the deals lie: two studies that dealt a newcomer at once would
    put one patient into two voters.
    """
    with ExitStack() as locks:
        for teachers in sorted({(directory / "teachers").resolve() for directory in directories}):
            locks.enter_context(writing(teachers))
        yield


def empty_slots(config: SiteConfig) -> tuple[int, ...]:
    """The voters for which the worker that started last found no teacher to load."""
    with read_books(config) as ledger:
        loaded = ledger.teachers()
    return () if loaded is None else tuple(voter for voter, (served, _) in enumerate(loaded.voters) if not served)


def slots_file(config: SiteConfig) -> Path:
    """How the pool's patients are dealt to voters in this site's study: one file for each m, shared by every study.

    So a patient sits in the same voter in all studies of that m, and a withdrawal empties the slot for all of them.
    """
    first = config.books_dir / "teachers" / "slots.json"
    if not config.joined:
        return first
    keeper = load_site(config.books_dir)
    dealt = load_slots(first).voters if first.exists() else _voters(keeper)
    return first if _voters(config) == dealt else first.with_name(f"slots-{_voters(config)}.json")


def _voters(config: SiteConfig) -> int:
    return load_study(config.path(config.study)).privacy.voters_per_site


def deals(books: Path) -> dict[Path, Slots]:
    """Every deal of the pool's patients so far, by its file."""
    return {path: load_slots(path) for path in sorted((books / "teachers").glob("slots*.json"))}
