"""What a benchmark keeps: files named by the hash of all that they depend on, made once, so a stopped run goes on."""

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
class Kept:
    """A folder of such files. ``data`` is the hash of the cases that everything in it depends on."""

    folder: Path
    data: str

    def file(self, kind: str, parts: Sequence[object], suffix: str) -> Path:
        """Where a thing that depends on the cases and ``parts`` is kept."""
        key = digest(f"bench-{kind}", [self.data, *(str(part) for part in parts)])[:32]
        return self.folder / f"{kind}-{key}{suffix}"

    def array(self, kind: str, parts: Sequence[object], make: Callable[[], np.ndarray]) -> np.ndarray:
        path = self.file(kind, parts, ".npy")
        if not path.exists():
            content = io.BytesIO()
            np.save(content, make())
            write_atomically(path, content.getvalue())
        array: np.ndarray = np.load(path)
        return array

    def number(self, kind: str, parts: Sequence[object], make: Callable[[], float]) -> float:
        path = self.file(kind, parts, ".json")
        if not path.exists():
            write_atomically(path, json.dumps(make()).encode())
        return float(json.loads(path.read_text()))

    def network(self, path: Path, empty: torch.nn.Module, train: Callable[[], torch.nn.Module]) -> torch.nn.Module:
        """The network whose weights are in ``path``, loaded into ``empty``; trained if there are none yet."""
        if not path.exists():
            save_weights(path, train())
        load_weights(path, empty)
        empty.eval()
        return empty


@dataclass(frozen=True, slots=True)
class Cell:
    """Values by name in one JSON file, each written as soon as it is known."""

    path: Path

    def values(self) -> dict[str, float]:
        found: dict[str, float] = json.loads(self.path.read_text()) if self.path.exists() else {}
        return found

    def add(self, values: dict[str, float]) -> None:
        write_atomically(self.path, (json.dumps(self.values() | values, indent=1) + "\n").encode())


def array_hash(*arrays: np.ndarray) -> str:
    """SHA-256 of arrays' bytes one after another."""
    return sha256_bytes(b"".join(np.ascontiguousarray(array).tobytes() for array in arrays))


def weights_hash(model: torch.nn.Module) -> str:
    return sha256_bytes(weights_to_bytes(model))
