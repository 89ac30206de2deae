"""Defines the report's pictures and draws them.

Refuses pictures whose outlines do not fit their volume.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal

import numpy as np
from jaxtyping import Float32, Shaped, UInt8

from common.case_pictures import OUTLINES, draw_planes
from common.errors import InvalidInput

MAX_PICTURE_BYTES = 2_000_000
"""Largest size in bytes of all PNGs together. Larger pictures are drawn again with fewer pixels, so that the page stays
under 3 MB."""


@dataclass(frozen=True, slots=True, eq=False)
class Picture:
    """One volume on the study's grid (RAS+) with outlines. Arrays are copied and read-only.

    Attributes:
        title: Title.
        kind: ``public`` or ``test``.
        image: Float32 array [x, y, z].
        outlines: Label maps by a name of :data:`OUTLINES`.

    Raises:
        InvalidInput: If shapes or names do not match.
    """

    title: str
    kind: Literal["public", "test"]
    image: Float32[np.ndarray, "x y z"]
    outlines: Mapping[str, UInt8[np.ndarray, "x y z"]]

    def __post_init__(self) -> None:
        if self.kind not in ("public", "test"):
            raise InvalidInput("kind of picture", value=self.kind, limit="public or test")
        if self.image.ndim != 3 or not np.isfinite(self.image).all():
            raise InvalidInput("picture", value=self.image.shape, limit="finite voxels on three axes")
        unknown = sorted(self.outlines.keys() - OUTLINES.keys())
        if unknown:
            raise InvalidInput("outline", value=unknown[0], limit=", ".join(OUTLINES))
        for name, mask in self.outlines.items():
            if mask.shape != self.image.shape:
                raise InvalidInput(f"shape of outline {name}", value=mask.shape, limit=str(self.image.shape))
        object.__setattr__(self, "image", _frozen(self.image))
        frozen = {name: _frozen(self.outlines[name]) for name in OUTLINES if name in self.outlines}
        object.__setattr__(self, "outlines", MappingProxyType(frozen))


def draw_pictures(pictures: Sequence[Picture], spacing_mm: Sequence[float]) -> list[bytes]:
    """Draw every picture, smaller if all together exceed :data:`MAX_PICTURE_BYTES`.

    Args:
        pictures: The pictures.
        spacing_mm: Voxel spacing in mm.

    Returns:
        PNGs.
    """
    images: list[bytes] = []
    for dpi in (110, 75, 50):
        images = [draw_planes(one.image, one.outlines, spacing_mm, dpi=dpi) for one in pictures]
        if sum(map(len, images)) <= MAX_PICTURE_BYTES:
            break
    return images


def _frozen(array: Shaped[np.ndarray, "..."]) -> Shaped[np.ndarray, "..."]:
    copy: np.ndarray[Any, Any] = array.copy()
    copy.setflags(write=False)
    return copy
