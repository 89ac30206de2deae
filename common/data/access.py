"""Tells the readers of datasets whether a file is missing, or lies in a folder that this user may not enter.

``Path.glob`` and a failed look-up do not distinguish these two cases. Refuses a dataset if one of its folders cannot be
listed, or if one closed folder holds a file of every case.
"""

from __future__ import annotations

import errno
import os
import sys
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from common.errors import InvalidInput


def absent(path: Path, kind: str) -> str:
    """Say why a file of a case is not found: it is missing or not a file, its folder is closed, or the disk fails.

    Args:
        path: The file.
        kind: What the file is, such as ``image``.

    Returns:
        The reason with a remedy, without the name of a file or folder.
    """
    if closed_folder(path) is None:
        return _not_there(path, kind)
    user = os.getuid()
    return (
        f"the folder of the {kind} cannot be read by user {user}, who runs this command (Permission denied); to fix: "
        "let this user read and enter the folder"
    )


def why_unread(error: Exception) -> str:
    """Say why a case is left out after an error while its files were read. Other cases are still used, even if the
    error is a fault of Consilium.

    Args:
        error: The error.

    Returns:
        The reason with a remedy; without the name of a file or folder, unless an InvalidInput names it.
    """
    if isinstance(error, InvalidInput):
        return str(error)
    if isinstance(error, OSError):
        return f"cannot be read ({error.strerror}); to fix: look at its permissions and the disk"
    return f"cannot be read ({type(error).__name__}, a fault of this software); to fix: report it"


def _not_there(path: Path, kind: str) -> str:
    take_out = "or take the case out"
    try:
        os.stat(path)
    except OSError as error:
        if error.errno == errno.ELOOP:
            return f"the {kind}'s symbolic links form a loop; to fix: replace the links by the file, {take_out}"
        if error.errno not in (errno.ENOENT, errno.ENOTDIR, errno.ENAMETOOLONG):
            return f"the {kind} file cannot be read ({error.strerror}); to fix: check the disk or the network drive"
        if os.path.islink(path):
            return f"the {kind} is a link to a file that is missing; to fix: put that file back, {take_out}"
        return f"the {kind} file is missing; to fix: put it back, {take_out}"
    except ValueError:
        fix = "set LC_ALL=C.UTF-8 for all commands of this site and where you start its daemons, or correct the name"
        return f"this locale ({sys.getfilesystemencoding()}) cannot express the name of the {kind} file; to fix: {fix}"
    return f"the {kind} is not a regular file; to fix: put a NIfTI file in its place, {take_out}"


def closed_folder(path: Path) -> Path | None:
    """Return the outermost folder on the way to a path that this user may not enter.

    Args:
        path: The path.

    Returns:
        The folder; None if every folder can be entered, or one is missing.
    """
    for folder in reversed(path.parents):
        try:
            os.stat(f"{folder}/.")
        except PermissionError:
            return folder
        except (OSError, ValueError):  # a ValueError if no file can have this name in this locale
            return None
    return None


def is_closed(folder: Path) -> bool:
    """Tell whether this user may not list or enter an existing folder.

    Args:
        folder: The folder.

    Returns:
        True if it is closed.
    """
    try:
        os.stat(f"{folder}/.")
        os.scandir(folder).close()
    except PermissionError:
        return True
    except OSError:
        return False
    return False


def files_below(roots: Iterable[Path], *, seen: Iterable[Path] = ()) -> tuple[list[Path], list[Path]]:
    """Return the files below some folders. Links to folders are followed, after all other folders.

    Args:
        roots: The folders.
        seen: Folders that are not entered. No folder is entered twice, so a loop of links ends.

    Returns:
        The files, and the folders that this user may not read, each sorted.
    """
    known = {os.path.realpath(folder) for folder in seen}
    files: list[Path] = []
    closed: list[Path] = []
    waiting = sorted(roots, key=lambda folder: (folder.is_symlink(), folder), reverse=True)
    links: list[Path] = []
    while waiting or links:
        folder = waiting.pop() if waiting else links.pop(0)
        real = os.path.realpath(folder)
        if real in known:
            continue
        known.add(real)
        if is_closed(folder):
            closed.append(folder)
            continue
        for entry in os.scandir(folder):
            path = folder / entry.name
            if not os.path.isdir(path):
                files.append(path)
            else:
                (links if entry.is_symlink() else waiting).append(path)
        links.sort()
    return sorted(files), sorted(closed)


def check_still_there(cases: Iterable[Iterable[Path]]) -> None:
    """Refuse to go on if a folder with files of two or more cases can no longer be entered.

    A folder with files of a single case concerns that case only, and its name may be a patient's.

    Args:
        cases: For each case, its files.

    Raises:
        InvalidInput: If a folder was moved, closed or unmounted since the dataset was opened.
    """
    shared = Counter(folder for files in cases for folder in {parent for path in files for parent in path.parents})
    for folder in sorted(folder for folder, count in shared.items() if count > 1):  # the outermost first
        try:
            os.stat(f"{folder}/.")
        except OSError as error:
            raise InvalidInput(
                f"folder of the dataset is gone or closed since it was opened ({error.strerror})",
                value=str(folder),
                limit=f"a folder that user {os.getuid()}, who runs this command, can enter",
                remedy="put it back, mount it again or let this user enter it; then run the same command again",
            ) from error


def check_opens(cases: Iterable[Iterable[Path]]) -> None:
    """Refuse a dataset if one closed folder holds a file of every case: one error instead of one for each case.

    A dataset with a single case is not refused here, because the folder's name may be a patient's.

    Args:
        cases: For each case, its files.

    Raises:
        InvalidInput: If there is such a folder, and there are two or more cases.
    """
    closed = [{closed_folder(path) for path in files} - {None} for files in cases]
    common = set.intersection(*closed) if len(closed) > 1 else set()
    for folder in common:
        if folder is not None:
            raise closed_error(folder)


def closed_error(folder: Path) -> InvalidInput:
    """Return the error for a folder of a dataset that this user may not read.

    Args:
        folder: The folder, which must not be a single case's.

    Returns:
        The error.
    """
    return InvalidInput(
        "folder of the dataset cannot be read (Permission denied)",
        value=str(folder),
        limit=f"a folder that user {os.getuid()}, who runs this command, can read",
        remedy="let this user read and enter the folder",
    )


def entries(folder: Path) -> list[Path]:
    """Return what a folder of the dataset contains.

    Args:
        folder: The folder, which must not be a single case's.

    Returns:
        The paths, sorted; none if the folder does not exist.

    Raises:
        InvalidInput: If this user may not read the folder.
    """
    try:
        return sorted(folder.iterdir()) if folder.is_dir() else []
    except PermissionError:
        raise closed_error(folder) from None
