"""Defines the report's pictures and draws them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from jaxtyping import Float32, UInt8

from common.case_pictures import draw_planes

MAX_PICTURE_BYTES = 2_000_000
"""Largest size in bytes of all PNGs together. Larger pictures are drawn again with fewer pixels, so that the page stays
under 3 MB."""


@dataclass(frozen=True, slots=True, eq=False)
class Picture:
    """One volume on the study's grid (RAS+) with outlines.

    Attributes:
        title: Title.
        kind: ``public`` or ``test``.
        image: Float32 array [x, y, z].
        outlines: Label maps by a name of :data:`OUTLINES`.
    """

    title: str
    kind: Literal["public", "test"]
    image: Float32[np.ndarray, "x y z"]
    outlines: Mapping[str, UInt8[np.ndarray, "x y z"]]


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
