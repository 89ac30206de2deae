"""Packs a student's MONAI bundle into one file whose bytes depend only on its files' names and contents, and unpacks
it.

Called by exports and by sites that receive a student. The archive is a ZIP without compression, dates or owners, so the
same student has the same SHA-256 wherever it is packed. Refuses to read what :func:`to_archive` never writes: absolute
paths, paths with ``..``, hidden files, links, folders, a repeated name, compression, encryption, and additional bytes.
"""

from __future__ import annotations

import io
import re
import zipfile
from collections.abc import Mapping

from common.errors import InvalidInput
from common.reading import parsing

MAX_FILES = 1000
_EPOCH = (1980, 1, 1, 0, 0, 0)
_PATH = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*(/[A-Za-z0-9_][A-Za-z0-9_.-]*){0,7}")
_REGULAR_FILE = 0o100644 << 16


def to_archive(files: Mapping[str, bytes]) -> bytes:
    """Return the archive of files. Equal files give equal bytes.

    Args:
        files: File contents by relative path.

    Returns:
        Bytes of a ZIP file.

    Raises:
        InvalidInput: If there are no files or too many, or a path is not allowed.
    """
    if not files or len(files) > MAX_FILES:
        raise InvalidInput("files of a bundle", value=len(files), limit=f"1 to {MAX_FILES}")
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", zipfile.ZIP_STORED) as archive:
        for name in sorted(files):
            entry = zipfile.ZipInfo(_checked(name), date_time=_EPOCH)
            entry.create_system, entry.external_attr = 3, _REGULAR_FILE
            archive.writestr(entry, files[name])
    return stream.getvalue()


def from_archive(data: bytes) -> dict[str, bytes]:
    """Return the files of an archive.

    Args:
        data: Bytes of the archive.

    Returns:
        File contents by relative path.

    Raises:
        InvalidInput: For anything that :func:`to_archive` would not have written.
    """
    files: dict[str, bytes] = {}
    with parsing("a bundle's archive cannot be read", remedy="fetch it again"):
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            entries = archive.infolist()
            if sum(entry.file_size for entry in entries) > len(data):
                raise InvalidInput(
                    "sizes of the files in a bundle's archive", limit="together at most the size of the archive"
                )
            if not entries or len(entries) > MAX_FILES:
                raise InvalidInput("files of a bundle", value=len(entries), limit=f"1 to {MAX_FILES}")
            for entry in entries:
                plain = entry.compress_type == zipfile.ZIP_STORED and entry.compress_size == entry.file_size
                if not plain or entry.flag_bits & 0x1 or entry.external_attr != _REGULAR_FILE:
                    raise InvalidInput(
                        "entry of a bundle's archive",
                        value=entry.filename,
                        limit="a regular file without compression or encryption",
                    )
                if _checked(entry.filename) in files:
                    raise InvalidInput(
                        "a bundle's archive contains a file twice", value=entry.filename, limit="each file once"
                    )
                files[entry.filename] = archive.read(entry)
        same = to_archive(files) == data
    if not same:
        raise InvalidInput(
            "a bundle's archive holds bytes besides its files",
            limit="exactly the bytes that an export writes",
            remedy="fetch it again",
        )
    return files


def _checked(name: str) -> str:
    if not _PATH.fullmatch(name):
        raise InvalidInput("path in a bundle", value=name, limit="relative, of letters, digits, '.', '-', '_', '/'")
    return name
