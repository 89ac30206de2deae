"""Public objects by content hash: volumes, codecs and students, immutable and verified at every read.

Refuses bytes whose SHA-256 is not the name they are asked for by. Only public data ever enters a store.
"""

from __future__ import annotations

import errno
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Protocol

from common.canonical import check_hash, sha256_bytes
from common.errors import InvalidInput

MAX_OBJECT_BYTES = 1 << 30


class Objects(Protocol):
    """Public bytes by the SHA-256 of their content."""

    def put(self, data: bytes) -> str:
        """Keep ``data`` and return its hash."""
        ...

    def get(self, name: str) -> bytes:
        """The bytes kept under ``name``; InvalidInput where there are none."""
        ...


class ObjectsInMemory:
    """:class:`Objects` that end with the process."""

    def __init__(self) -> None:
        self._objects: dict[str, bytes] = {}

    def put(self, data: bytes) -> str:
        name = sha256_bytes(data)
        self._objects[name] = bytes(data)
        return name

    def get(self, name: str) -> bytes:
        if name not in self._objects:
            raise InvalidInput("no public object has this hash here", value=name, remedy="publish it first")
        return self._objects[name]


class ObjectStore:
    """A directory of files named by the SHA-256 of their bytes."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        directory.mkdir(parents=True, exist_ok=True)

    def put(self, data: bytes) -> str:
        """Store ``data`` durably and return its hash; storing it again changes nothing."""
        if len(data) > MAX_OBJECT_BYTES:
            raise InvalidInput("public object", value=f"{len(data)} bytes", limit=f"{MAX_OBJECT_BYTES} bytes")
        name = sha256_bytes(data)
        if name not in self:
            write_atomically(self._directory / name, data)
        return name

    def get(self, name: str) -> bytes:
        """The bytes stored under ``name``; missing or altered objects raise :class:`InvalidInput`."""
        try:
            data = (self._directory / check_hash(name)).read_bytes()
        except FileNotFoundError as error:
            raise InvalidInput("public object is not in the store", value=name, remedy="publish it again") from error
        if sha256_bytes(data) != name:
            raise InvalidInput(
                "public object was altered on disk", value=name, remedy="delete the file and fetch again"
            )
        return data

    def path(self, name: str) -> Path:
        """Where the object lies, unread and unverified; for those who verify what they receive."""
        path = self._directory / check_hash(name)
        if not path.is_file():
            raise InvalidInput("public object is not in the store", value=name, remedy="publish it again")
        return path

    def __contains__(self, name: str) -> bool:
        return (self._directory / check_hash(name)).is_file()


def read_regular(path: Path, *, most_bytes: int, received: bool = False) -> bytes:
    """What a regular file of at most ``most_bytes`` holds. Never waits: a pipe, a device, a directory and a larger file
    are InvalidInput; so is a link where the file was ``received`` from somebody else, who may have it lead to a file
    that only this user can read. OSError where it cannot be read."""
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | (os.O_NOFOLLOW if received else 0))
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise InvalidInput("file", value=path.name, limit="a regular file, not a symbolic link") from error
        raise
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise InvalidInput("file", value=path.name, limit="a regular file, not a folder, pipe or device")
    with open(handle, "rb") as stream:
        content = stream.read(most_bytes + 1)
    if len(content) > most_bytes:
        raise InvalidInput("size of the file", value=path.name, limit=f"at most {most_bytes} bytes")
    return content


def write_atomically(path: Path, data: bytes, *, mode: int = 0o644, flush_name: bool = True) -> None:
    """Replace ``path`` with ``data``: after a crash the file holds the old bytes or the new ones, never a part.

    Without ``flush_name`` one flush is saved, and after a power cut it may be the old ones though this had returned.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=".tmp-")
    try:
        with os.fdopen(handle, "wb") as stream:
            os.fchmod(stream.fileno(), mode)
            stream.write(data)
            stream.flush()
            os.fsync(stream.fileno())
        Path(temporary).replace(path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
    if not flush_name:
        return
    directory = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


def shared(folder: Path) -> bool:
    """True if a folder was given to a group on purpose: it has the setgid bit, which what is made in it inherits."""
    return folder.is_dir() and bool(folder.stat().st_mode & stat.S_ISGID)


@contextmanager
def all_or_nothing(directory: Path, *files: Path) -> Iterator[None]:
    """Take away again what was made in ``directory``, above it or as one of ``files`` if the block fails; what lay
    there before stays."""
    folders = [folder for folder in (directory, *directory.parents) if not folder.exists()]  # innermost first
    before = set(directory.iterdir()) if directory.exists() else set()
    files = tuple(file for file in files if not os.path.lexists(file))
    try:
        yield
    except BaseException:
        for path in set(directory.iterdir()) - before if directory.exists() else ():
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        for file in files:
            file.unlink(missing_ok=True)
        for folder in folders:
            with suppress(OSError):  # never made, or something else lies in it by now
                folder.rmdir()
        raise
