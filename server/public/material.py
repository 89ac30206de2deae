"""Defines a study's public data as a value: terms, codec, volumes, and the stores of files and records.

The protocols and the post-processing modules receive this value, so they need no study directory.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from common.config import Study
from common.document import Document
from common.objects import Objects
from server.public.public_files import PublicFiles

if TYPE_CHECKING:  # commands' help must not wait for NumPy
    import numpy as np
    from jaxtyping import Float

    from server.public.paired import Paired

START_FILE = "start.pt"
"""Name of the file with the weights of the public start, the network trained on public data alone."""

PAIRS_FILE = "pairs.checkpoint"
"""Name of the checkpoint of the training on public pairs alone, which is made once for the student and the controls."""

OnStage: TypeAlias = Callable[[str, int, int], None]
"""Function called during long work with the current stage's name, the number of steps done and the total number."""


@dataclass(frozen=True, slots=True)
class CodecRecord(Document):
    """A study's codec, or the frame of one round.

    Attributes:
        sha256: Hash of its file.
        dimension: Length l of its codes.
    """

    sha256: str
    dimension: int


@dataclass(frozen=True, slots=True)
class PairedFiles(Document):
    """A public pair: a public volume that is published together with its label map.

    Attributes:
        image: Content hash of the volume's file.
        label: Content hash of the label map's file.
    """

    image: str
    label: str


@dataclass(frozen=True, slots=True)
class PublicMaterial:
    """The public data of a study.

    Attributes:
        study: The study's configuration.
        codec: The study's codec.
        volumes: Content hashes of the volumes about which hospitals are asked, in query order.
        objects: Store of the public files.
        kept: Store of the files that the protocol has computed from public data.
        paired: Public pairs (volumes with label maps), as files in ``objects`` or as arrays; no hospital is asked about
            them.
        images: The volumes as float arrays [c, x, y, z] by hash; None if they are files in ``objects``.
    """

    study: Study
    codec: CodecRecord
    volumes: tuple[str, ...]
    objects: Objects
    kept: PublicFiles
    paired: tuple[PairedFiles, ...] | Paired = ()
    images: Mapping[str, Float[np.ndarray, "c x y z"]] | None = None

    def given_start(self) -> bytes | None:
        """Return the weights of the initial network that the consortium supplied; None if there is none."""
        return self.objects.get(self.study.start.weights) if self.study.start.weights else None

    def image(self, volume: str, *, finer: bool = False) -> Float[np.ndarray, "c x y z"]:
        """Return a volume's image, float [c, x, y, z].

        Args:
            volume: The volume's hash.
            finer: True to resample the image to the student's grid, which may be finer than the study's.

        Returns:
            The image.
        """
        data = self.study.data.student if finer else self.study.data
        if self.images is not None:
            return self.images[volume]
        from common.data.volume import volume_from_bytes  # imports torch

        return volume_from_bytes(self.objects.get(volume), data).image

    def pairs(self) -> Paired | None:
        """Return the public pairs, resampled to the study's grid; None if the study has none."""
        if not isinstance(self.paired, tuple):
            return self.paired
        if not self.paired:
            return None
        import numpy as np

        from common.data.volume import example_from_bytes  # imports torch, which training needs anyway
        from server.public.paired import Paired

        data, read = self.study.data, self.objects.get
        cases = [example_from_bytes(read(files.image), read(files.label), data) for files in self.paired]
        images, labels = (np.stack(all_of) for all_of in zip(*((c.volume.image, c.label) for c in cases), strict=True))
        return Paired(images, labels, len(data.labels))
