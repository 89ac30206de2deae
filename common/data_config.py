"""Defines the ``[data]`` section of a study: labels, spacing, grid and channels of every volume.

Read as part of a study (:mod:`common.config`). Refuses names that are used twice, impossible sizes, and grids with too
many voxels.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import ClassVar

from common.errors import InvalidInput
from common.names import check_distinct, check_regions, check_text, comparable, contrast, region_members, region_names
from common.sections import TomlSection, check_types

MAX_GRID_VOXELS = 1 << 24
MAX_LABELS = 256
"""Largest number of labels, the background included: label maps are stored as uint8."""
NORMALISATIONS = ("volume", "nonzero")


@dataclass(frozen=True, slots=True, repr=False)
class DataConfig(TomlSection):
    """The format to which every volume is converted: RAS+ orientation, one spacing and one grid.

    Attributes:
        labels: Names of the label values; the first is the background, value 0.
        spacing_mm: Size of a voxel on three axes.
        grid: Voxels on three axes; volumes are cropped or padded around their centre.
        channels: Names of an image's channels.
        regions: Overlapping structures for scoring, as in BraTS, each ``name = label + label``. Labels themselves stay
            exclusive, because a code is made of probabilities that sum to 1.
        normalisation: ``volume`` for z-scores over all voxels. ``nonzero``, for skull-stripped brains, for z-scores
            over the non-zero voxels; all other voxels stay 0.
        finer: The student is trained and scored on a grid with this many times the queries' voxels on each axis.
    """

    LATER: ClassVar = ("regions", "normalisation", "finer")

    labels: tuple[str, ...]
    spacing_mm: tuple[float, float, float]
    grid: tuple[int, int, int]
    channels: tuple[str, ...] = ("MRI",)
    regions: tuple[str, ...] = ()
    normalisation: str = "volume"
    finer: int = 1

    def __post_init__(self) -> None:
        check_types(self, where="data")
        if len(self.labels) < 2 or len(set(self.labels)) != len(self.labels) or not all(self.labels):
            raise InvalidInput(
                "data.labels",
                value=self.labels,
                limit="the background and at least one structure, each name only once and none empty",
            )
        if len(self.labels) > MAX_LABELS:
            raise InvalidInput("number of data.labels", value=len(self.labels), limit=f"at most {MAX_LABELS}")
        if not self.channels or len(set(self.channels)) != len(self.channels):
            raise InvalidInput("data.channels", value=self.channels, limit="at least one channel, each name only once")
        if len(self.spacing_mm) != 3 or not all(0.05 <= s <= 20 for s in self.spacing_mm):
            raise InvalidInput("data.spacing_mm", value=self.spacing_mm, limit="three numbers from 0.05 to 20 mm")
        if len(self.grid) != 3 or not all(8 <= n <= 512 and n % 8 == 0 for n in self.grid):
            raise InvalidInput("data.grid", value=self.grid, limit="three multiples of 8 from 8 to 512 voxels")
        for name in ("labels", "channels"):
            for text in getattr(self, name):
                check_text(text, what=f"name in data.{name}")
        if self.grid[0] * self.grid[1] * self.grid[2] > MAX_GRID_VOXELS:
            raise InvalidInput("data.grid", value=self.grid, limit=f"at most {MAX_GRID_VOXELS} voxels in all")
        if self.normalisation not in NORMALISATIONS:
            raise InvalidInput("data.normalisation", value=self.normalisation, limit=", ".join(NORMALISATIONS))
        check_regions(self.regions, self.labels)
        if self.finer not in (1, 2, 4):
            raise InvalidInput("data.finer", value=self.finer, limit="1, 2 or 4")
        _ = self.student  # raises InvalidInput if the student's grid is too large

    @property
    def student(self) -> DataConfig:
        """The data settings of the student: the same field of view with ``finer`` times as many voxels on each axis."""
        (x, y, z), (u, v, w), n = self.grid, self.spacing_mm, self.finer
        finer = {"grid": (n * x, n * y, n * z), "spacing_mm": (u / n, v / n, w / n), "finer": 1}
        return self if n == 1 else dataclasses.replace(self, **finer)  # type: ignore[arg-type]

    @property
    def structures(self) -> tuple[str, ...]:
        """Names of the structures that are scored: the regions, or every label but the background."""
        return region_names(self.regions) or self.labels[1:]

    @property
    def members(self) -> tuple[tuple[int, ...], ...]:
        """For each of :attr:`structures`, the label values that belong to it."""
        alone = tuple((value,) for value in range(1, len(self.labels)))
        return region_members(self.regions, self.labels) or alone

    def check_new(self) -> None:
        """Refuse names that hospitals cannot tell apart.

        The ledger calls it only when it registers a new study, so that older studies with such names can still be read.

        Raises:
            InvalidInput: If the names of two labels, channels or regions are equal in the form in which they are
                compared.
        """
        check_distinct(self.labels, what="data.labels", form=comparable)
        check_distinct(self.channels, what="data.channels", form=contrast)
        check_distinct(region_names(self.regions), what="data.regions", form=comparable)
