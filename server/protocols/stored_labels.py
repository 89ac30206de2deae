"""Stores decoded labels: float16 probabilities of each volume, in files or in memory.

The post-processing modules and the protocols use it.
"""

from __future__ import annotations

import io
from abc import abstractmethod
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
from jaxtyping import Float

from common.canonical import sha256_bytes, sha256_file
from common.objects import write_atomically


def read_label(path: Path) -> Float[np.ndarray, "k x y z"]:
    """Return a stored label as a student is trained on it; see :func:`as_stored`.

    Args:
        path: The file (.npz).

    Returns:
        Float32 probabilities [k, x, y, z] of k classes that sum to 1 in every voxel.
    """
    with np.load(path, allow_pickle=False) as stored:
        return as_stored(stored["probabilities"])


def as_stored(probabilities: Float[np.ndarray, "k x y z"]) -> Float[np.ndarray, "k x y z"]:
    """Return probabilities as a student is trained on them: rounded to float16 as in their file, then renormalised.

    Args:
        probabilities: Float array [k, x, y, z] for k classes.

    Returns:
        Float32 array [k, x, y, z] that sums to 1 in every voxel.

    >>> as_stored(np.full((2, 1, 1, 1), 0.5)).ravel()
    array([0.5, 0.5], dtype=float32)
    """
    rounded = probabilities.astype(np.float16).astype(np.float32)
    result: np.ndarray = rounded / rounded.sum(axis=0, keepdims=True)
    return result


class Labels(Mapping[str, Float[np.ndarray, "k x y z"]]):
    """Decoded labels by volume hash, rounded to float16 and renormalised (:func:`as_stored`)."""

    @abstractmethod
    def hashes(self) -> list[str]:
        """Return a SHA-256 for each label, in order."""


class LabelsInMemory(Labels):
    """Decoded labels in memory, not stored in files."""

    def __init__(self, probabilities: Mapping[str, Float[np.ndarray, "k x y z"]]) -> None:
        self._labels = {volume: as_stored(label) for volume, label in probabilities.items()}

    def __getitem__(self, volume: str) -> Float[np.ndarray, "k x y z"]:
        return self._labels[volume]

    def __iter__(self) -> Iterator[str]:
        return iter(self._labels)

    def __len__(self) -> int:
        return len(self._labels)

    def hashes(self) -> list[str]:
        return [sha256_bytes(label.tobytes()) for label in self._labels.values()]


class StoredLabels(Labels):
    """Decoded labels in the files of a folder. They are read one at a time, because all of them may not fit in memory.

    Args:
        folder: The folder; ``store`` creates it.
        volumes: Hashes of the volumes, in the order of the labels.
        rejected: Pairs (volume's hash, SHA-256 of the label's file): these labels are left out.
    """

    def __init__(
        self, folder: Path, volumes: Sequence[str], *, rejected: Collection[tuple[str, str]] = frozenset()
    ) -> None:
        self._files = {volume: folder / f"{volume}.npz" for volume in volumes}
        self._rejected = frozenset(rejected)
        self._judged = {volume for volume, _ in rejected}

    def store(self, volume: str, probabilities: Float[np.ndarray, "k x y z"]) -> None:
        """Write a volume's label.

        Args:
            volume: The volume's hash.
            probabilities: Float array [k, x, y, z] for k classes; stored as float16.
        """
        stream = io.BytesIO()
        np.savez_compressed(stream, probabilities=probabilities.astype(np.float16))
        write_atomically(self._files[volume], stream.getvalue())

    def __getitem__(self, volume: str) -> Float[np.ndarray, "k x y z"]:
        if volume not in self:
            raise KeyError(volume)
        return read_label(self._files[volume])

    def __contains__(self, volume: object) -> bool:
        path = self._files.get(str(volume))
        if path is None or not path.exists():
            return False
        return volume not in self._judged or (str(volume), sha256_file(path)) not in self._rejected

    def __iter__(self) -> Iterator[str]:
        return (volume for volume in self._files if volume in self)

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def hashes(self) -> list[str]:
        """Return the SHA-256 of each file, in order."""
        return [sha256_file(self._files[volume]) for volume in self]
