"""Stores training volumes with bounded memory: in memory up to a budget, then in files on the site's disk.

Called by the trainers. The files hold patients' voxels, so only their owner can read them, and they are deleted with
their directory. Refuses arrays of different shapes.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np

from common.errors import InvalidInput

DEFAULT_BUDGET_BYTES = 2 << 30


class StoredVolumes:
    """A sequence of arrays of one shape, read one at a time. ``volumes[i]`` is [c, x, y, z]; ``shape`` is [n, c, x, y,
    z].
    """

    def __init__(self, parts: Sequence[np.ndarray | Path]) -> None:
        self._parts = tuple(parts)
        shapes = {np.shape(part) if isinstance(part, np.ndarray) else _shape(part) for part in self._parts}
        if len(shapes) != 1:
            raise InvalidInput("stored volumes", value=sorted(shapes), limit="one shape")
        self.shape: tuple[int, ...] = (len(self._parts), *shapes.pop())

    @property
    def ndim(self) -> int:
        """Number of axes of ``shape``."""
        return len(self.shape)

    def __len__(self) -> int:
        return len(self._parts)

    def __iter__(self) -> Iterator[np.ndarray]:
        return (self[i] for i in range(len(self)))

    def __getitem__(self, index: int) -> np.ndarray:
        return read(self._parts[index])


class VolumeCache:
    """Stores arrays in memory up to ``budget_bytes``, and further ones in files below ``directory``.

    Leaving the context deletes the directory. A directory that a crashed run left is deleted at the start.

    Args:
        directory: Directory for the files. It is deleted with its contents, and created when the first file is written.
        budget_bytes: Memory for arrays.
    """

    def __init__(self, directory: Path, *, budget_bytes: int = DEFAULT_BUDGET_BYTES) -> None:
        self._directory, self._left, self._count = directory, budget_bytes, 0
        shutil.rmtree(directory, ignore_errors=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        shutil.rmtree(self._directory, ignore_errors=True)

    def keep(self, array: np.ndarray) -> np.ndarray | Path:
        """Store an array.

        Args:
            array: The array.

        Returns:
            The array itself if the memory for arrays suffices; otherwise the file that it was written to.
        """
        if array.nbytes <= self._left:
            self._left -= array.nbytes
            return array
        self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        path = self._directory / f"{self._count:05d}.npy"
        self._count += 1
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as stream:
            np.save(stream, array, allow_pickle=False)
        return path


def together(parts: Sequence[np.ndarray | Path]) -> Any:
    """Join stored volumes to one array if all are in memory and small enough to copy, else to :class:`StoredVolumes`.

    Args:
        parts: Results of :meth:`VolumeCache.keep`.

    Returns:
        An array [n, c, x, y, z] or a StoredVolumes of that shape.
    """
    arrays = [part for part in parts if isinstance(part, np.ndarray)]
    if len(arrays) == len(parts) and sum(array.nbytes for array in arrays) <= DEFAULT_BUDGET_BYTES // 4:
        return np.stack(arrays)
    return StoredVolumes(parts)


def read(part: np.ndarray | Path) -> np.ndarray:
    """Return the array of a volume that :meth:`VolumeCache.keep` stored.

    Args:
        part: A result of :meth:`VolumeCache.keep`.

    Returns:
        The array, read from its file if needed.
    """
    return part if isinstance(part, np.ndarray) else np.load(part, allow_pickle=False)


def _shape(path: Path) -> tuple[int, ...]:
    return tuple(np.load(path, mmap_mode="r", allow_pickle=False).shape)
