"""Holds public pairs: public volumes that are published together with their label maps.

The joint query uses them: public start, student and controls all learn from them, and hospitals are not asked about
them. One control is trained on the pairs alone, so that their contribution is not mistaken for that of the hospitals'
answers.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from jaxtyping import Float, UInt8

from common.canonical import digest, sha256_bytes


@dataclass(frozen=True, slots=True, eq=False)
class Paired:
    """Public pairs (images with label maps) on the study's grid.

    Attributes:
        images: Float array [n, c, x, y, z] of n images with c channels.
        labels: Uint8 label maps [n, x, y, z].
        classes: Number of classes, the background included.
    """

    images: Float[np.ndarray, "n c x y z"]
    labels: UInt8[np.ndarray, "n x y z"]
    classes: int

    @property
    def targets(self) -> Float[np.ndarray, "n k x y z"]:
        """The label maps as float32 probabilities of 0 and 1, [n, k, x, y, z] for k classes."""
        same = self.labels[:, None] == np.arange(self.classes, dtype=np.uint8)[:, None, None, None]
        result: np.ndarray = same.astype(np.float32)
        return result

    @property
    def hash(self) -> str:
        """Digest of all voxels of images and label maps."""
        return digest("paired", [sha256_bytes(array.tobytes()) for array in (self.images, self.labels)])
