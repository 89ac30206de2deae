"""Restores every file that a backup can contain, alone and together, older, newer and missing, at each point of a life.

A :class:`Part` is a set of files that a backup may contain and that are restored together: a ledger with its
write-ahead log, the standing beside it, or the assignment of the patients. A life is a history of commands in a real
folder. At every point of the life, :func:`keep` copies the whole folder together with the facts that are then true.
:func:`cases` enumerates every set of parts and every two points. In a case, the folder is as it was at one point, and
the parts are as they were at the other point, or missing.

Every file of a real folder belongs to a part, or is named as a file that no restore can harm, with the reason
(:func:`unclassified`). A file that is added to the product later fails a test until somebody classifies it.

A suite of restores provides a life, its parts, and ``look``. ``look`` does what a person does after the restore. It
ends in a refusal with a remedy, or in figures that are compared with the facts. ``tests/restores/test_server.py`` is an
example.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from itertools import combinations, permutations
from pathlib import Path
from typing import Generic, TypeVar

F = TypeVar("F")


@dataclass(frozen=True, slots=True)
class Part:
    """Names files that are restored together by patterns below the folder. ``*`` matches any text, also slashes."""

    name: str
    patterns: tuple[str, ...]

    def holds(self, path: str) -> bool:
        return any(fnmatch(path, pattern) for pattern in self.patterns)


@dataclass(frozen=True, slots=True)
class Moment(Generic[F]):
    """Holds a point of a life: a copy of the folder, and the facts at that point."""

    name: str
    folder: Path
    facts: F


@dataclass(frozen=True, slots=True)
class Case:
    """Describes the folder of moment ``at``, in which ``parts`` are as at moment ``source``.

    If ``source`` is None, ``parts`` are missing. The parts in ``gone`` are missing too.
    """

    parts: tuple[str, ...]
    source: int | None
    at: int
    gone: tuple[str, ...] = ()

    @property
    def now(self) -> int:
        """Number of the latest moment in the folder. Everything up to this moment has happened."""
        return self.at if self.source is None else max(self.at, self.source)

    def older(self, part: str) -> bool:
        """Return whether this part is missing, or older than the latest moment in the folder."""
        if part in self.gone:
            return True
        return (self.source is None or self.source < self.now) if part in self.parts else self.at < self.now

    def __str__(self) -> str:
        what = "missing" if self.source is None else f"of point {self.source}"
        gone = f", {'+'.join(self.gone)} missing" if self.gone else ""
        return f"{'+'.join(self.parts)} {what}{gone} at point {self.at}"


def files(folder: Path) -> list[str]:
    """Return the paths of all files and links below a folder, relative to the folder."""
    found = (path for path in folder.rglob("*") if path.is_symlink() or not path.is_dir())
    return sorted(path.relative_to(folder).as_posix() for path in found)


def unclassified(folder: Path, parts: Sequence[Part], harmless: Sequence[str]) -> list[str]:
    """Return the files of a folder that belong to two parts, or to no part although they are not named as harmless."""
    found = []
    for path in files(folder):
        owners = [part.name for part in parts if part.holds(path)]
        if len(owners) > 1 or (not owners and not any(fnmatch(path, pattern) for pattern in harmless)):
            found.append(path)
    return found


def keep(folder: Path, into: Path, name: str, facts: F) -> Moment[F]:
    """Copy the whole folder, as a backup of the machine would."""
    shutil.copytree(folder, into, symlinks=True)
    return Moment(name, into, facts)


def cases(parts: Sequence[Part], moments: Sequence[object], *, most: int | None = None) -> Iterator[Case]:
    """Yield a case for every set of at most ``most`` parts, every moment, and every other moment or none."""
    names = [part.name for part in parts]
    for size in range(1, (most or len(names)) + 1):
        for chosen in combinations(names, size):
            for at in range(len(moments)):
                for source in (None, *range(len(moments))):
                    if source != at:
                        yield Case(chosen, source, at)


def mixed(parts: Sequence[Part], moments: Sequence[object]) -> Iterator[Case]:
    """Yield a case with one part of another moment and a second part missing, for every two parts and moments."""
    names = [part.name for part in parts]
    for name, gone in permutations(names, 2):
        for at, source in permutations(range(len(moments)), 2):
            yield Case((name,), source, at, (gone,))


def restored(case: Case, parts: Sequence[Part], moments: Sequence[Moment[F]], into: Path) -> Path:
    """Write the folder of a case to ``into``, which is emptied first."""
    shutil.rmtree(into, ignore_errors=True)
    shutil.copytree(moments[case.at].folder, into, symlinks=True)
    chosen = [part for part in parts if part.name in case.parts]
    for path in files(into):
        if any(part.holds(path) for part in chosen):
            (into / path).unlink()
    for path in files(into):
        if any(part.holds(path) for part in parts if part.name in case.gone):
            (into / path).unlink()
    if case.source is not None:
        source = moments[case.source].folder
        for path in files(source):
            if any(part.holds(path) for part in chosen):
                (into / path).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(source / path, into / path, follow_symlinks=False)
    return into


def look_at(
    chosen: Iterator[Case],
    parts: Sequence[Part],
    moments: Sequence[Moment[F]],
    into: Path,
    look: Callable[[Case, Path, F], str],
) -> dict[str, int]:
    """Restore and look at each case; return how often each outcome occurred.

    ``look`` returns a word for the outcome, and raises AssertionError for a broken promise. It is given the facts of
    the case's ``now``. At the end, an AssertionError names every case with a broken promise.
    """
    outcomes: dict[str, int] = {}
    broken: list[str] = []
    for case in chosen:
        folder = restored(case, parts, moments, into)
        try:
            outcome = look(case, folder, moments[case.now].facts)
        except AssertionError as error:
            broken.append(f"{case}: {str(error).splitlines()[0]}")
            continue
        outcomes[outcome] = outcomes.get(outcome, 0) + 1
    assert not broken, f"{len(broken)} of {len(broken) + sum(outcomes.values())} restores: " + "; ".join(broken[:12])
    return outcomes
