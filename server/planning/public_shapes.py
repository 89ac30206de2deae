"""What public label maps alone tell of a task: how much of a shape the codec holds, and how much the mean shape knows.

A joint query says of a volume what the codec can say, relative to what public data says already. So where the codec
loses the structures, or public maps do not say where they are, a budget buys little or harm, whatever its noise.
Refuses fewer than four maps: half of them stand for patients that the codec of the other half has not seen. Charges
nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import numpy as np
from jaxtyping import UInt8

from common.canonical import sha256_bytes
from common.config import CodecConfig, DataConfig
from common.errors import InvalidInput

if TYPE_CHECKING:
    from common.codecs.pca import PcaCodec

R = TypeVar("R", np.ndarray, Sequence[np.ndarray])

LEAST_MAPS = 4
CONFIG = CodecConfig(joint=True)
NOISE_STD = 0.1  # of no effect on the codec of a joint query
MOST_VOXELS = 1 << 16
"""Of a grid that is chosen to look at maps: finer ones take minutes and tell the same."""


@dataclass(frozen=True, slots=True)
class PublicShapes:
    """Mean Dice over structures and maps. ``held``: of maps through a codec of the others; ``mean_shape``: of the
    others' mean shape."""

    held: float
    mean_shape: float

    def __post_init__(self) -> None:
        for value in (self.held, self.mean_shape):
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1:
                raise InvalidInput("Dice of public label maps", value=value, limit="a number from 0 to 1")

    @property
    def room(self) -> float:
        """What a code can say beyond the mean shape."""
        return max(0.0, self.held - self.mean_shape)


def map_files(folder: Path) -> list[Path]:
    """The files (.nii, .nii.gz) of the label maps in a folder, by name; InvalidInput for fewer than four."""
    files = sorted(path for path in folder.glob("*.nii*") if path.is_file())
    if len(files) < LEAST_MAPS:
        raise InvalidInput("public label maps", value=len(files), limit=f"at least {LEAST_MAPS} in {folder}")
    return files


def read_maps(folder: Path) -> tuple[list[UInt8[np.ndarray, "x y z"]], int]:
    """The label maps in a folder, on a grid that suits them, and how many labels they have."""
    from common.data.grid import choose_both
    from common.data.volume import load_label

    files = map_files(folder)
    spacing, grid = choose_both(files, most=MOST_VOXELS)
    names = ("background", *(f"structure {number}" for number in range(1, _most(files) + 1)))
    data = DataConfig(labels=names, spacing_mm=spacing, grid=grid)
    return [load_label(path, data) for path in files], len(names)


def read_shapes(folder: Path) -> PublicShapes:
    """:func:`public_shapes` of the label maps in a folder."""
    maps, labels = read_maps(folder)
    return public_shapes(maps, labels=labels)


def public_shapes(label_maps: Sequence[UInt8[np.ndarray, "x y z"]], *, labels: int) -> PublicShapes:
    """Both halves of the maps in turn through the codec, and the mean shape, of the other half."""
    from common.codecs import shapes
    from server.protocols.student import score

    mean_shape = mean_shape_dice(label_maps, labels=labels)
    held: list[float] = []
    for own, others in halves(label_maps):
        codec = codec_of(own, labels=labels)
        codes = (codec.encode(shapes.one_hot(each, labels=labels)) for each in others)
        drawn = [codec.decode(code, noise_std=0.0).argmax(axis=0).astype(np.uint8) for code in codes]
        held.append(score(drawn, others, labels).mean)
    return PublicShapes(held=float(np.mean(held)), mean_shape=mean_shape)


def codec_of(label_maps: Sequence[UInt8[np.ndarray, "x y z"]], *, labels: int) -> PcaCodec:
    """The codec that a joint query has of these maps."""
    from common.codecs.base import Provenance
    from common.codecs.pca import PcaCodec

    made = Provenance(tuple(sha256_bytes(each.tobytes()) for each in label_maps), CONFIG.augmentations, 0, NOISE_STD)
    return PcaCodec.fit(label_maps, labels=labels, config=CONFIG, provenance=made)


def mean_shape_dice(label_maps: Sequence[UInt8[np.ndarray, "x y z"]], *, labels: int) -> float:
    """Mean Dice, over structures and maps, of the mean shape of either half of the maps with the other half."""
    from common.codecs import shapes
    from common.codecs.pca import centre_and_metric
    from server.protocols.student import score

    if len(label_maps) < LEAST_MAPS:
        raise InvalidInput("public label maps", value=len(label_maps), limit=f"at least {LEAST_MAPS}")
    factor = shapes.pooling_factor(label_maps[0].shape, labels=labels)
    found = []
    for own, others in halves(label_maps):
        exact = [shapes.pool(shapes.one_hot(each, labels=labels).astype(np.float64), factor=factor) for each in own]
        centre, _ = centre_and_metric(exact, factor=1)
        drawn = shapes.to_probabilities(centre, factor=factor).argmax(axis=0).astype(np.uint8)
        found.append(score([drawn] * len(others), others, labels).mean)
    return float(np.mean(found))


def halves(rows: R) -> tuple[tuple[R, R], tuple[R, R]]:
    """Every second row beside the others, and the other way round."""
    return (rows[::2], rows[1::2]), (rows[1::2], rows[::2])


def _most(files: Sequence[Path]) -> int:
    import nibabel as nib

    return max(1, *(int(np.asanyarray(nib.load(path).dataobj).max()) for path in files))
