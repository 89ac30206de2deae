"""Explains an error of the operating system: what it refused, and what to do. Finds such an error among causes.

The command line and `site doctor` use it, so that both give the same remedy. It raises no errors.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator

from common.errors import StorageFailed
from common.plain import plain

FULL = (errno.ENOSPC, errno.EDQUOT)
"""Error numbers of a full disk."""

DISK = (*FULL, errno.EIO)
"""Error numbers of a full or failing disk."""

_DENIED = (errno.EACCES, errno.EPERM, errno.EROFS)


def explain(error: OSError) -> tuple[str, str]:
    """Explain an error of the operating system.

    Args:
        error: The error.

    Returns:
        The path with the reason, and what to do.
    """
    where = "" if error.filename is None else f"{plain(os.fsdecode(error.filename))}: "
    match error.errno:
        case errno.EROFS:
            remedy = (
                "use a folder on a file system that can be written; if this one became read-only by itself, its disk "
                "is failing: read the system's log"
            )
        case number if number in _DENIED:
            remedy = f"give user {os.getuid()}, who runs this command, access, or run the command as the owner"
        case errno.ENOENT | errno.ENOTDIR | errno.EISDIR | errno.EEXIST | errno.ELOOP | errno.ENAMETOOLONG:
            remedy = "check the path"
        case number if number in FULL:
            remedy = "make room on this disk: free space (`df`)"
        case errno.EIO:
            remedy = (
                "free space if the disk is full (`df`); if there is space, the disk is failing: read the system's log, "
                "then move this folder to another disk, and restore only what cannot be read from a backup"
            )
        case errno.ENOLCK:
            remedy = "use a folder on a file system with locks, such as a local disk or NFS 4"
        case _:
            remedy = "run the command again with --verbose to see which step failed"
    return f"{where}{error.strerror or type(error).__name__}", remedy


def system_cause(error: BaseException) -> StorageFailed | OSError | None:
    """Return the error about a full or failing disk, or about a missing permission, that an error is or was caused by.

    Args:
        error: The error.

    Returns:
        The first such error in the chain of causes; None if there is none.
    """
    for cause in _chain_of(error):
        if isinstance(cause, StorageFailed) or (isinstance(cause, OSError) and cause.errno in (*DISK, *_DENIED)):
            return cause
    return None


def lacks_memory(error: BaseException) -> bool:
    """Return whether an error is or was caused by a lack of memory.

    Args:
        error: The error.

    Returns:
        True for MemoryError, ENOMEM or PyTorch's failure to allocate CPU memory, in the error or one of its causes.
    """
    return any(
        isinstance(cause, MemoryError)
        or (isinstance(cause, OSError) and cause.errno == errno.ENOMEM)
        or (isinstance(cause, RuntimeError) and "allocate memory" in str(cause))
        for cause in _chain_of(error)
    )


def _chain_of(error: BaseException) -> Iterator[BaseException]:
    """Yield an error, its cause, the cause of this, and so on."""
    cause: BaseException | None = error
    while cause is not None:
        yield cause
        cause = cause.__cause__
