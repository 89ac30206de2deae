"""Defines what is public of a study as values: terms, codec, volumes, and where objects and records are."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from common.config import Study
from common.document import Document
from common.objects import Objects
from server.public.kept import Kept

if TYPE_CHECKING:  # commands' help must not wait for NumPy
    import numpy as np
    from jaxtyping import Float

START_FILE = "start.pt"
"""Weights of the public start."""

PAIRS_FILE = "pairs.checkpoint"
"""Of the training from paired public cases alone; done, it is where student and controls find their network."""

OnStage: TypeAlias = Callable[[str, int, int], None]
"""Called as work goes on: the name of what it is at, how much of that is done, of how much."""


@dataclass(frozen=True, slots=True)
class CodecRecord(Document):
    """The study's codec: content hash, dimension l, and the planned noise it was fitted for."""

    sha256: str
    dimension: int


@dataclass(frozen=True, slots=True)
class PairedFiles(Document):
    """A public volume that is published with its label map: the content hashes of both files."""

    image: str
    label: str


@dataclass(frozen=True, slots=True)
class Public:
    """What is public of a study: its terms, its codec and its volumes by content hash in query order, where public
    objects are, what a protocol has ``kept`` that it made of them, and the volumes that are ``paired`` with their label
    maps, which nobody is asked about. ``images``: the volumes as arrays; None where they are files among the objects.
    """

    study: Study
    codec: CodecRecord
    volumes: tuple[str, ...]
    objects: Objects
    kept: Kept
    paired: tuple[PairedFiles, ...] = ()
    images: Mapping[str, Float[np.ndarray, "c x y z"]] | None = None

    def image(self, volume: str, *, finer: bool = False) -> Float[np.ndarray, "c x y z"]:
        """A volume's image on the study's grid, or on the student's where that is ``finer``."""
        data = self.study.data.student if finer else self.study.data
        if self.images is not None:
            return self.images[volume]
        from common.data.volume import volume_from_bytes  # torch

        return volume_from_bytes(self.objects.get(volume), data).image
