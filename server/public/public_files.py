"""Stores small public files of a study by name, in its directory or in memory, and names its signed statements' files.

Query protocols store their public start here, which is a network trained on public data alone. They also store the
hashes of their frames; a frame is the centre, axes and weights relative to which a round's codes are computed. A record
that is missing or not JSON is refused. ``postprocess.bundle`` and `consilium provision` write the files of signed
statements, and ``objects_app`` serves them. A study id that is not 64 hexadecimal digits is refused.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

from common.canonical import check_hash
from common.errors import InvalidInput
from common.objects import MAX_OBJECT_BYTES, read_regular, write_atomically
from common.reading import parse_json

MAX_RECORD_BYTES = 1 << 26
STUDENTS, PEERS = "students", "peers"
"""Subjects of a study's two signed statements: its student, and its sites' keys."""


class PublicFiles(Protocol):
    """Storage for the small public files of a study, each with a name."""

    def read(self, name: str) -> bytes | None:
        """Return a file's content.

        Args:
            name: The file's name.

        Returns:
            Its bytes; None if there is no such file.
        """
        ...

    def write(self, name: str, content: bytes) -> None:
        """Write a file, completely or not at all.

        Args:
            name: The file's name.
            content: Its bytes.
        """
        ...

    def discard(self, name: str) -> None:
        """Delete a file if it exists.

        Args:
            name: The file's name.
        """
        ...

    def checkpoint(self, name: str) -> Path | None:
        """Return the file in which a training may store its checkpoint.

        Args:
            name: The file's name.

        Returns:
            Its path; None if nothing is stored on disk.
        """
        ...


class FilesInFolder:
    """Storage for a study's small public files (:class:`PublicFiles`) in a folder, such as the study's directory."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def read(self, name: str) -> bytes | None:
        try:
            return read_regular(self._folder / name, most_bytes=MAX_OBJECT_BYTES)
        except FileNotFoundError:
            return None

    def write(self, name: str, content: bytes) -> None:
        write_atomically(self._folder / name, content)

    def discard(self, name: str) -> None:
        (self._folder / name).unlink(missing_ok=True)

    def checkpoint(self, name: str) -> Path | None:
        return self._folder / name


class FilesInMemory:
    """The small public files of a study (:class:`PublicFiles`) in memory; they are lost when the process ends."""

    def __init__(self) -> None:
        self._files: dict[str, bytes] = {}

    def read(self, name: str) -> bytes | None:
        return self._files.get(name)

    def write(self, name: str, content: bytes) -> None:
        self._files[name] = content

    def discard(self, name: str) -> None:
        self._files.pop(name, None)

    def checkpoint(self, name: str) -> Path | None:
        return None


def read_record(path: Path, *, remedy: str) -> Any:
    """Read a small JSON file of a study's directory.

    Args:
        path: The file.
        remedy: Text for the error that says what to do if the file is missing or invalid.

    Returns:
        The parsed value.

    Raises:
        InvalidInput: With ``remedy``, if the file is missing or not JSON.
    """
    try:
        content = read_regular(path, most_bytes=MAX_RECORD_BYTES)
    except FileNotFoundError:
        content = None
    return parse_record(content, name=path.name, remedy=remedy)


def parse_record(content: bytes | None, *, name: str, remedy: str) -> Any:
    """Parse the content of a small JSON file of a study's directory.

    Args:
        content: The file's bytes; None if it is missing.
        name: The file's name, for the error.
        remedy: Text for the error that says what to do if the file is missing or invalid.

    Returns:
        The parsed value.

    Raises:
        InvalidInput: With ``remedy``, if the file is missing or not JSON.
    """
    if content is None:
        raise InvalidInput(f"{name} is missing from the study's directory", remedy=remedy)
    return parse_json(content, what=f"{name} is not valid JSON", limit="", remedy=remedy)


def said_file(objects: Path, what: str, study_id: str) -> Path:
    """Return the file of a statement about a study.

    Args:
        objects: Directory of the object store.
        what: Subject of the statement, :data:`STUDENTS` (the student) or :data:`PEERS` (the sites' keys).
        study_id: The study's id.

    Returns:
        The file's path; the file may not exist.

    Raises:
        InvalidInput: If the id is not 64 hexadecimal digits.
    """
    return objects / what / check_hash(study_id)
