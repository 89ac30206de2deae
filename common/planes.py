"""The three planes of a volume in RAS+, as radiologists read them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from jaxtyping import Shaped

PlaneName = Literal["axial", "coronal", "sagittal"]


@dataclass(frozen=True, slots=True)
class Plane:
    """How a plane is shown: the patient's right on the left of an axial or coronal picture, anterior on the left of a
    sagittal one; superior (axial: anterior) on top. ``fixed``, ``across`` and ``up`` are axes of the volume."""

    fixed: int
    across: int
    up: int
    letters: tuple[str, str, str, str]  # left, right, top, bottom

    def cut(self, volume: Shaped[np.ndarray, "x y z"], index: int) -> Shaped[np.ndarray, "v u"]:
        """The slice as [row from the bottom, column from the left]."""
        plane: np.ndarray[Any, Any] = np.take(volume, index, axis=self.fixed).T[:, ::-1]
        return plane


PLANES: dict[PlaneName, Plane] = {
    "axial": Plane(2, 0, 1, ("R", "L", "A", "P")),
    "coronal": Plane(1, 0, 2, ("R", "L", "S", "I")),
    "sagittal": Plane(0, 1, 2, ("A", "P", "S", "I")),
}
