"""Records the value ranges of a student's public volumes and measures how far another volume lies outside them.

The export of a bundle records the ranges; predictions compare a new volume with them and warn. Intensities are taken as
the network sees them, z-scored on the study's grid: for each channel seven quantiles and the mean step between
neighbouring voxels. Size is the field of view of the file, or of the box that was cut out of it. The mean volume of
each structure over the released labels is recorded too. Only public volumes and released labels are read. A volume
within the ranges may still be segmented wrongly.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float, UInt8
from nibabel.orientations import io_orientation

from common.data.geometry import voxel_sizes
from common.data.volume import Volume
from common.errors import InvalidInput
from common.reading import parsing

QUANTILES = (0.01, 0.1, 0.25, 0.5, 0.75, 0.9, 0.99)
_NAMES = (*(f"{q:.0%} quantile of intensity" for q in QUANTILES), "step between neighbouring voxels")
_AXES = ("left to right", "back to front", "bottom to top")

LEAST_STEP, LEAST_MM = 0.05, 5.0
"""Least width of a range: of intensities (first number, in standard deviations) and of sizes (second number, in mm)."""

TINY = 0.01
"""A structure smaller than this fraction of its mean volume over the released labels is reported."""

Range = tuple[float, float]


@dataclass(frozen=True, slots=True)
class InputRanges:
    """Smallest and largest value of each measured quantity over the public volumes.

    Attributes:
        volumes: Number of volumes.
        intensity: For each channel, the range of each quantile and of the step.
        extent_mm: Range of the field of view in x, y and z, in mm.
        structures_mm3: Mean volume of each structure over the released labels; empty if unknown, as in bundles that
            were exported before it was recorded.

    Raises:
        InvalidInput: If a range is missing, not finite or reversed.
    """

    volumes: int
    intensity: tuple[tuple[Range, ...], ...]
    extent_mm: tuple[Range, ...]
    structures_mm3: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        ranges = [*(one for channel in self.intensity for one in channel), *self.extent_mm]
        shaped = len(self.extent_mm) == 3 and all(len(channel) == len(_NAMES) for channel in self.intensity)
        ranges += [(0.0, volume) for volume in self.structures_mm3]
        if not shaped or self.volumes < 1 or not all(-1e9 <= low <= high <= 1e9 for low, high in ranges):
            raise InvalidInput(
                "ranges of a bundle's inputs",
                limit="for every channel and axis, two finite numbers, the smaller one first",
            )

    def to_json(self) -> dict[str, object]:
        """Return the ranges as plain JSON."""
        sizes = {"structures_mm3": self.structures_mm3} if self.structures_mm3 else {}
        return {"volumes": self.volumes, "intensity": self.intensity, "extent_mm": self.extent_mm, **sizes}

    @classmethod
    def from_json(cls, record: object, *, channels: int) -> InputRanges:
        """Read the ranges that :meth:`to_json` wrote.

        Args:
            record: The parsed JSON.
            channels: Number of channels that it must have.

        Returns:
            The ranges.

        Raises:
            InvalidInput: If the record is anything else.
        """
        with parsing("ranges of a bundle's inputs", limit="as Consilium writes them"):
            volumes, intensity, extent = (record[name] for name in ("volumes", "intensity", "extent_mm"))  # type: ignore[index]
            sizes = tuple(float(size) for size in record.get("structures_mm3", ()))  # type: ignore[attr-defined]
            made = cls(int(volumes), tuple(map(_ranges, intensity)), _ranges(extent), sizes)
        if len(made.intensity) != channels:
            raise InvalidInput("channels of a bundle's inputs", value=len(made.intensity), limit=str(channels))
        return made

    def unlike(self, volume: Volume) -> str:
        """Describe the quantity of a volume that lies farthest outside the ranges.

        A quantity counts as outside if its distance from the range exceeds (1 + 4/n)·w. Here w is the width of the
        range, at least :data:`LEAST_STEP` or :data:`LEAST_MM`, and n is the number of volumes that the ranges were
        computed from. With few volumes the ranges say little about other volumes, so the limit is wider.

        Args:
            volume: The volume to compare.

        Returns:
            A description; empty if no quantity is that far outside.
        """
        found, sizes = _figures(volume)
        worst, said = 1 + 4 / self.volumes, ""
        for channel, (values, ranges) in enumerate(
            zip((*found, sizes), (*self.intensity, self.extent_mm), strict=True)
        ):
            size = channel == len(found)
            names = [f"field of view {axis} in mm" for axis in _AXES] if size else _NAMES
            for name, value, (low, high) in zip(names, values, ranges, strict=True):
                width = max(high - low, LEAST_MM if size else LEAST_STEP)
                if (beyond := max(low - value, value - high) / width) > worst:
                    of = f" of channel {channel}" if len(found) > 1 and not size else ""
                    worst, said = beyond, f"{name}{of} is {value:.3g}, in public volumes {low:.3g} to {high:.3g}"
        return said


def odd_sizes(
    label_map: UInt8[np.ndarray, "i j k"], volume: Volume, structures: Sequence[str], seen: InputRanges | None
) -> tuple[str, ...]:
    """Describe the structures that a label map lacks, or that are far smaller in it than in the training labels.

    Args:
        label_map: Label map on the file's own voxels.
        volume: The volume of that file.
        structures: Names of the labels from 1 on.
        seen: Ranges of the network's training volumes. If it is None, or its ``structures_mm3`` is empty, only missing
            structures are reported.

    Returns:
        One sentence for each such structure.
    """
    voxel_mm3 = float(np.prod(voxel_sizes(volume.native_affine)))
    usual = () if seen is None else seen.structures_mm3
    found = []
    for value, name in enumerate(structures, start=1):
        voxels = int((label_map == value).sum())
        mean = usual[value - 1] if value <= len(usual) else 0.0
        if not voxels:
            found.append(f"{name} was not found")
        elif voxels * voxel_mm3 < TINY * mean:
            size = f"{voxels} voxels ({voxels * voxel_mm3:.3g} mm³)"
            found.append(f"{name} has {size}, less than a hundredth of the {mean:.3g} mm³ of the training labels")
    return tuple(found)


def input_ranges(volumes: Iterable[Volume]) -> InputRanges:
    """Return the ranges over one or more volumes.

    Args:
        volumes: Public volumes on the study's grid.

    Returns:
        The ranges.

    Raises:
        InvalidInput: If there is no volume.
    """
    figures = [_figures(volume) for volume in volumes]
    if not figures:
        raise InvalidInput("volumes to take ranges of", value=0, limit="at least one")
    intensity, sizes = np.stack([found for found, _ in figures]), np.stack([size for _, size in figures])
    return InputRanges(len(figures), tuple(map(_over, np.moveaxis(intensity, 1, 0))), _over(sizes))


def _figures(volume: Volume) -> tuple[Float[np.ndarray, "c f"], Float[np.ndarray, "3"]]:
    found = []
    for channel in volume.image:
        step = np.mean([np.abs(np.diff(channel, axis=axis)).mean() for axis in range(3)])
        found.append([*np.quantile(channel, QUANTILES), step])
    extent = np.array(volume.seen_shape) * voxel_sizes(volume.native_affine)
    return np.array(found), extent[np.argsort(io_orientation(volume.native_affine)[:, 0])]  # x, y, z of the patient


def _over(values: Float[np.ndarray, "n f"]) -> tuple[Range, ...]:
    low, high = values.min(axis=0).round(4), values.max(axis=0).round(4)
    return tuple((float(a), float(b)) for a, b in zip(low, high, strict=True))


def _ranges(pairs: Iterable[Iterable[float]]) -> tuple[Range, ...]:
    return tuple((float(low), float(high)) for low, high in pairs)
