"""Defines the three planes of a volume in RAS+, as radiologists view them; used for reports and the dashboard."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from jaxtyping import Shaped

PlaneName = Literal["axial", "coronal", "sagittal"]


@dataclass(frozen=True, slots=True)
class Plane:
    """The orientation in which a plane is displayed.

    In axial and coronal pictures the patient's right is on the left; in sagittal pictures anterior is on the left.
    Superior (axial: anterior) is on top.

    Attributes:
        fixed: Axis of the volume along which slices are taken.
        across: Axis of the volume that is horizontal in the picture. Its indices increase from right to left.
        up: Axis of the volume that is vertical in the picture. Its indices increase from bottom to top.
        letters: Directions at the picture's left, right, top and bottom.
    """

    fixed: int
    across: int
    up: int
    letters: tuple[str, str, str, str]  # left, right, top, bottom

    def cut(self, volume: Shaped[np.ndarray, "x y z"], index: int) -> Shaped[np.ndarray, "v u"]:
        """Return a slice.

        Args:
            volume: Array of shape [x, y, z] in RAS+.
            index: Index of the slice along ``fixed``.

        Returns:
            Array [row from the bottom, column from the left].
        """
        plane: np.ndarray[Any, Any] = np.take(volume, index, axis=self.fixed).T[:, ::-1]
        return plane


PLANES: dict[PlaneName, Plane] = {
    "axial": Plane(2, 0, 1, ("R", "L", "A", "P")),
    "coronal": Plane(1, 0, 2, ("R", "L", "S", "I")),
    "sagittal": Plane(0, 1, 2, ("A", "P", "S", "I")),
}
