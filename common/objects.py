"""Stores public objects by content hash: volumes, codecs and students. They are immutable and verified at every read.

Called by every party. Only public data enters a store. The module also has the functions that read and write files
safely. Refuses bytes whose SHA-256 is not the name under which they were requested.
"""

from __future__ import annotations

import errno
import json
import os
import secrets
import shutil
import stat
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from math import isfinite
from pathlib import Path
from typing import Any, Protocol

from common.canonical import check_hash, sha256_bytes
from common.errors import InvalidInput
from common.system_errors import FULL

MAX_OBJECT_BYTES = 1 << 30
_ROOM_BYTES = 1 << 20
"""A disk without room for so many bytes counts as full."""


class PathInside:
    """Attribute that gives a path below a folder, which another attribute of the same object holds.

    Args:
        path: Path below the folder.
        of: Name of the other attribute.
    """

    def __init__(self, path: str, *, of: str = "root") -> None:
        self._path, self._of = path, of

    def __get__(self, owner: Any, _kind: type | None = None) -> Path:
        folder: Path = getattr(owner, self._of)
        return folder / self._path


_MISSING = (
    "restore the file from a backup, or publish it again: volumes with `consilium study publish`, the student with "
    "`consilium student export`"
)


class Objects(Protocol):
    """Interface of a store of public bytes by the SHA-256 of their content."""

    def put(self, data: bytes) -> str:
        """Store bytes.

        Args:
            data: Public bytes.

        Returns:
            Their hash.
        """
        ...

    def get(self, name: str) -> bytes:
        """Return stored bytes.

        Args:
            name: Their hash.

        Returns:
            The bytes.

        Raises:
            InvalidInput: If there are none.
        """
        ...


class ObjectsInMemory:
    """A store (:class:`Objects`) in memory, which is lost when the process ends."""

    def __init__(self) -> None:
        self._objects: dict[str, bytes] = {}

    def put(self, data: bytes) -> str:
        """Store bytes."""
        name = sha256_bytes(data)
        self._objects[name] = bytes(data)
        return name

    def get(self, name: str) -> bytes:
        """Return stored bytes.

        Raises:
            InvalidInput: If no bytes with this hash were stored.
        """
        if name not in self._objects:
            raise InvalidInput("no public object with this hash", value=name, remedy="publish it first")
        return self._objects[name]


class ObjectStore:
    """A directory of files named by the SHA-256 of their bytes.

    Args:
        directory: The directory; created if needed.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        directory.mkdir(parents=True, exist_ok=True)

    def put(self, data: bytes) -> str:
        """Store bytes durably. Storing them again changes nothing.

        Args:
            data: At most :data:`MAX_OBJECT_BYTES` public bytes.

        Raises:
            InvalidInput: If they are too large.
        """
        if len(data) > MAX_OBJECT_BYTES:
            raise InvalidInput("public object", value=f"{len(data)} bytes", limit=f"at most {MAX_OBJECT_BYTES} bytes")
        name = sha256_bytes(data)
        if name not in self:
            write_atomically(self._directory / name, data)
        return name

    def get(self, name: str) -> bytes:
        """Return stored bytes after verifying them."""
        try:
            data = (self._directory / check_hash(name)).read_bytes()
        except FileNotFoundError as error:
            raise InvalidInput("public object is not in the store", value=name, remedy=_MISSING) from error
        if sha256_bytes(data) != name:
            raise InvalidInput(
                "content of a public object's file, whose name is the SHA-256 of its content, was altered",
                value=name,
                remedy="delete the file; a site then fetches it again; at the server, restore it from a backup or "
                "publish it again",
            )
        return data

    def path(self, name: str) -> Path:
        """Return the file of an object without reading or verifying it, for callers that verify what they receive.

        Args:
            name: Its hash.

        Returns:
            The path.

        Raises:
            InvalidInput: If the object is missing.
        """
        path = self._directory / check_hash(name)
        if not path.is_file():
            raise InvalidInput("public object is not in the store", value=name, remedy=_MISSING)
        return path

    def __contains__(self, name: str) -> bool:
        return (self._directory / check_hash(name)).is_file()


def read_given(path: Path, *, most_bytes: int) -> bytes:
    """Return the contents of a file that a person named; it may be a pipe.

    Args:
        path: The file.
        most_bytes: Largest size. Not more than this is read.

    Returns:
        The bytes.

    Raises:
        InvalidInput: If it is too large.
        OSError: If it cannot be read.
    """
    with path.open("rb") as stream:
        stated = os.fstat(stream.fileno()).st_size  # 0 for a pipe
        content = b"" if stated > most_bytes else stream.read(most_bytes + 1)
    if max(stated, len(content)) > most_bytes:
        raise InvalidInput("size of the file", value=str(path), limit=f"at most {most_bytes} bytes")
    return content


def read_regular(path: Path, *, most_bytes: int, received: bool = False) -> bytes:
    """Return the contents of a regular file. Other files, such as a pipe, are refused without waiting for data.

    Args:
        path: The file.
        most_bytes: Largest size.
        received: True if another party made the file. A symbolic link is then refused, because it could lead to a file
            that only this user can read.

    Returns:
        The bytes.

    Raises:
        InvalidInput: If it is no regular file, is too large, or is a link that must not be followed.
        OSError: If it cannot be read.
    """
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


def write_atomically(
    path: Path, data: bytes, *, mode: int | None = 0o644, flush_name: bool = True, replace: bool = True
) -> None:
    """Replace a file. After a crash it has the old bytes or the new ones, never a part.

    If root runs the command, the file keeps its owner; a new file gets the owner of its folder. The user of a service
    can therefore still read its files.

    Args:
        path: The file.
        data: The new bytes.
        mode: Permissions; None for those that the process's umask leaves.
        flush_name: False to save one flush; after a power cut the file may then have the old bytes.
        replace: False to raise FileExistsError if the file exists, also if another process makes it meanwhile.

    Raises:
        InvalidInput: If :func:`check_replaceable` refuses the path.
        OSError: If it cannot be written; the error names the folder, because a file may have a patient's name.
    """
    check_replaceable(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    if mode is None:
        os.umask(mask := os.umask(0o077))
        mode = 0o666 & ~mask
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=".tmp-")
    try:
        with os.fdopen(handle, "wb") as stream:
            _give_owner(stream.fileno(), path)
            os.fchmod(stream.fileno(), mode)
            stream.write(data)
            stream.flush()
            os.fsync(stream.fileno())
        if replace:
            Path(temporary).replace(path)
        else:
            name_new(Path(temporary), path)
    except BaseException as error:
        Path(temporary).unlink(missing_ok=True)
        if isinstance(error, OSError) and error.filename is None:  # a full disk has no name of its own
            error.filename = str(path.parent)
        raise
    if flush_name:
        sync_directory(path.parent)


def check_replaceable(path: Path) -> None:
    """Refuse an output path that names a device, a pipe or a socket, or lies directly in /dev.

    Root could otherwise replace a device that all programs use, such as /dev/null.

    Args:
        path: The path of a file to write, which may be missing.

    Raises:
        InvalidInput: If it is such a path.
    """
    plain = not os.path.lexists(path) or path.is_symlink() or path.is_file() or path.is_dir()
    if not plain or path.absolute().parent == Path("/dev"):
        raise InvalidInput(
            "output file", value=str(path), limit="a new or a regular file", remedy="name a file in your own folder"
        )


def check_new(path: Path, *, option: str = "--out") -> None:
    """Refuse an output file that exists, because the user may have named it by mistake.

    Args:
        path: The path of a file to write.
        option: The option that names it.

    Raises:
        InvalidInput: If it exists.
    """
    if os.path.lexists(path):
        raise InvalidInput("the output file exists already", value=str(path), remedy=f"choose another with {option}")


def check_room(folder: Path) -> None:
    """Find out whether a disk is full, by writing a file and deleting it: the process that failed could not log this.

    Args:
        folder: A folder on the disk; it is created if it is missing.

    Raises:
        OSError: If the disk is full or failing; the error names the folder.
    """
    probe = folder / ".room"
    write_atomically(probe, bytes(_ROOM_BYTES))
    probe.unlink()


def append_line(path: Path, line: bytes, *, mode: int | None = None) -> None:
    """Append a line to a file.

    If a crash or a full disk cut off the file's last line, first add a line break, so that the new line is readable.

    Args:
        path: The file.
        line: The line, with its line break.
        mode: Permissions of a new file; None for those that the process's umask leaves.

    Raises:
        OSError: If it cannot be written.
    """
    last, new = b"\n", not path.exists()
    with suppress(OSError), path.open("rb") as stream:
        stream.seek(-1, os.SEEK_END)
        last = stream.read(1)
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, mode or 0o666), "ab") as stream:
        if new and mode is not None:  # the umask may have taken permissions away
            os.fchmod(stream.fileno(), mode)
        stream.write(line if last == b"\n" else b"\n" + line)


def name_new(draft: Path, path: Path) -> None:
    """Rename a finished draft to its final name, and never replace an existing file.

    On a file system without hard links, an empty file reserves the name first.

    Args:
        draft: The draft, in the same folder.
        path: The new name.

    Raises:
        FileExistsError: If a file has the name.
    """
    try:
        os.link(draft, path)
    except OSError as error:
        if error.errno not in (errno.EPERM, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK):
            raise
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
        try:
            draft.replace(path)
        except BaseException:
            path.unlink()
            raise
    else:
        draft.unlink()


def _give_owner(descriptor: int, path: Path) -> None:
    """Give an open file the owner of the file at ``path``, or of the folder if there is no file at ``path``.

    Only root does this, and not in a folder such as /tmp, where anybody may create files.
    """
    folder = path.parent.stat()
    if os.geteuid() != 0 or folder.st_mode & stat.S_ISVTX:  # in /tmp the file at ``path`` may be anybody's
        return
    owner = path.lstat() if os.path.lexists(path) else folder
    with suppress(OSError):  # a file system without owners
        os.fchown(descriptor, owner.st_uid, owner.st_gid)


def sync_directory(path: Path) -> None:
    """Make the creation or renaming of a file in a directory durable.

    Args:
        path: The directory.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno != errno.EINVAL:  # some file systems of network shares and virtual machines cannot
            raise
    finally:
        os.close(descriptor)


def json_bytes(value: object) -> bytes:
    r"""Return a value as an indented JSON text in UTF-8.

    Args:
        value: Plain JSON.

    Returns:
        The text with a line break at its end.

    >>> json_bytes({"dice": 0.5})
    b'{\n "dice": 0.5\n}\n'
    """
    return (json.dumps(value, indent=1) + "\n").encode()


def finite(value: Any) -> Any:
    """Return plain values in which each NaN and each infinity is replaced by None, because JSON cannot represent them.

    Args:
        value: Plain values, or floats that are not finite.

    Returns:
        Plain JSON.

    >>> finite({"dice": (0.5, float("nan"))})
    {'dice': [0.5, None]}
    """
    if isinstance(value, Mapping):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return None if isinstance(value, float) and not isfinite(value) else value


def write_json(path: Path, value: object, *, mode: int = 0o644) -> None:
    """Write a value as a JSON file, completely or not at all.

    Args:
        path: The file.
        value: Plain JSON.
        mode: The file's permissions.
    """
    write_atomically(path, json_bytes(value), mode=mode)


def shared(folder: Path) -> bool:
    """Return whether a folder is shared with a group on purpose, which its setgid bit shows.

    Args:
        folder: The folder.

    Returns:
        True if the folder has the setgid bit.
    """
    return folder.is_dir() and bool(folder.stat().st_mode & stat.S_ISGID)


@contextmanager
def naming_full_disk(folder: Path) -> Iterator[None]:
    """Make an error of a full disk name the folder that the block writes to.

    Such an error otherwise names no file, or the file that was being copied, which may lie on another disk and have a
    patient's name.

    Args:
        folder: The folder.

    Returns:
        A context.

    Raises:
        OSError: If the block raises it.
    """
    try:
        yield
    except OSError as error:
        if error.errno in FULL:
            raise OSError(error.errno, error.strerror, str(folder)) from error
        raise


@contextmanager
def drafting(path: Path) -> Iterator[Path]:
    """Let a with-block write a draft, which gets the file's name if the block succeeds and is removed if it fails.

    It is for libraries that write to a path; :func:`write_atomically` writes bytes.

    Args:
        path: The file.

    Returns:
        A context manager that gives the draft's path, with the same ending.

    Raises:
        OSError: If the block raises it; the error of a full disk names the folder.
    """
    draft = path.with_name(f".{secrets.token_hex(8)}{''.join(path.suffixes[-2:])}")
    try:
        with naming_full_disk(path.parent):
            yield draft
            draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)


@contextmanager
def all_or_nothing(directory: Path, *files: Path) -> Iterator[None]:
    """Remove the files and folders that a with-block created, if the block fails.

    It removes new entries of ``directory`` and those of ``files`` that did not exist before. If the block created
    ``directory`` or its parents, these are removed too.

    Args:
        directory: The directory.
        *files: Further files.

    Returns:
        A context. Files and folders that existed before are kept.
    """
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
            with suppress(OSError):  # the folder was not created, or is not empty
                folder.rmdir()
        raise


@contextmanager
def filling(folder: Path) -> Iterator[None]:
    """Fill a new or empty folder in a with-block. If the block fails, its files are removed, so it can run again.

    Args:
        folder: The folder.

    Returns:
        A context.

    Raises:
        InvalidInput: If the folder is not empty.
        OSError: If the block raises it; the error of a full disk names the folder.
    """
    if folder.exists() and any(folder.iterdir()):
        raise InvalidInput("directory is not empty", value=str(folder), remedy="choose a new one")
    with all_or_nothing(folder), naming_full_disk(folder):
        folder.mkdir(parents=True, exist_ok=True)
        yield
