"""Stores a benchmark's results in files named by the hash of everything they depend on, so that a stopped run
continues.
"""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from common.canonical import digest, sha256_bytes
from common.models.unet import load_weights, save_weights, weights_to_bytes
from common.objects import write_atomically


@dataclass(frozen=True, slots=True)
class ResultFolder:
    """A folder of stored results.

    Attributes:
        folder: The folder.
        data: Hash of the cases that all results depend on.
    """

    folder: Path
    data: str

    def file(self, kind: str, parts: Sequence[object], suffix: str) -> Path:
        """Return the file of a result.

        Args:
            kind: Kind of result, which begins the file's name.
            parts: Everything the result depends on besides the cases.
            suffix: End of the file's name.
        """
        key = digest(f"bench-{kind}", [self.data, *(str(part) for part in parts)])[:32]
        return self.folder / f"{kind}-{key}{suffix}"

    def array(self, kind: str, parts: Sequence[object], make: Callable[[], np.ndarray]) -> np.ndarray:
        """Return a stored array, or compute it and store it.

        Args:
            kind: Kind of result, which begins the file's name.
            parts: Everything the result depends on besides the cases.
            make: Computes it.
        """
        path = self.file(kind, parts, ".npy")
        if not path.exists():
            content = io.BytesIO()
            np.save(content, make())
            write_atomically(path, content.getvalue())
        array: np.ndarray = np.load(path)
        return array

    def number(self, kind: str, parts: Sequence[object], make: Callable[[], float]) -> float:
        """Return a stored number, or compute it and store it; see :meth:`array`."""
        path = self.file(kind, parts, ".json")
        if not path.exists():
            write_atomically(path, json.dumps(make()).encode())
        return float(json.loads(path.read_text()))

    def network(self, path: Path, empty: torch.nn.Module, train: Callable[[], torch.nn.Module]) -> torch.nn.Module:
        """Return a network; it is trained and stored first if there are no weights.

        Args:
            path: File of its weights.
            empty: Network of the same shape that the weights are loaded into.
            train: Trains it.
        """
        if not path.exists():
            save_weights(path, train())
        load_weights(path, empty)
        empty.eval()
        return empty


@dataclass(frozen=True, slots=True)
class NumbersFile:
    """Numbers by name in one JSON file, each written as soon as it is known."""

    path: Path

    def values(self) -> dict[str, float]:
        """Return the numbers stored so far."""
        found: dict[str, float] = json.loads(self.path.read_text()) if self.path.exists() else {}
        return found

    def add(self, values: dict[str, float]) -> None:
        """Store further numbers."""
        write_atomically(self.path, (json.dumps(self.values() | values, indent=1) + "\n").encode())


def array_hash(*arrays: np.ndarray) -> str:
    """Return the SHA-256 of the arrays' bytes in sequence; shapes and types are not included."""
    return sha256_bytes(b"".join(np.ascontiguousarray(array).tobytes() for array in arrays))


def weights_hash(model: torch.nn.Module) -> str:
    """Return the SHA-256 of a network's weights."""
    return sha256_bytes(weights_to_bytes(model))
