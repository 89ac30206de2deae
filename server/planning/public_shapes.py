"""Measures how closely a codec and the mean shape reproduce a task's public label maps, as values of Dice.

The planner, `consilium plan` and the dashboard call it. A joint query (one query about all public volumes at once) can
only add to public data what the codec can express. If the codec loses the structures, or if public maps do not show
where the structures are, a budget buys little or does harm, even with little noise. The maps are split into halves.
Each half stands for patients whom the codec of the other half has not seen. Fewer than four maps are refused. Nothing
is charged.
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
from common.data.copies import check_no_copy
from common.data.msd import nifti_files
from common.data_config import MAX_LABELS
from common.errors import InvalidInput
from common.reading import as_path, naming_file

if TYPE_CHECKING:
    from common.codecs.pca import PcaCodec

R = TypeVar("R", np.ndarray, Sequence[np.ndarray])

LEAST_MAPS = 4
_DIFFERENT = "different maps, because each half is compared with the other"
CONFIG = CodecConfig(joint=True)
NOISE_STD = 0.1  # required, but without effect on the codec of a joint query
MOST_VOXELS = 1 << 16
"""Largest number of voxels of the grid on which maps are compared; finer grids give the same result more slowly."""


@dataclass(frozen=True, slots=True)
class PublicShapes:
    """How closely a codec and the mean shape reproduce the public label maps of a task, as two values of Dice.

    Each value is the mean over structures and maps.

    Attributes:
        held: Dice between a map and the same map after encoding and decoding by a codec fitted on the other half of
            the maps.
        mean_shape: Dice between a map and the mean shape of the other half.

    Raises:
        InvalidInput: If a value is not between 0 and 1.

    >>> round(c.PublicShapes(held=0.9, mean_shape=0.6).room, 2)
    0.3
    """

    held: float
    mean_shape: float

    def __post_init__(self) -> None:
        for value in (self.held, self.mean_shape):
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1:
                raise InvalidInput("Dice of public label maps", value=value, limit="a number from 0 to 1")

    @property
    def room(self) -> float:
        """``held`` minus ``mean_shape``, at least 0: the largest gain in Dice that codes can express."""
        return max(0.0, self.held - self.mean_shape)


def map_files(folder: Path) -> tuple[Path, ...]:
    """Return the label map files (.nii, .nii.gz) of a folder, sorted by name.

    Args:
        folder: The folder; hidden files are ignored.

    Returns:
        The files.

    Raises:
        InvalidInput: If the folder does not exist, or there are fewer than four files.
    """
    files = nifti_files(folder, what="folder of public label maps")
    if len(files) < LEAST_MAPS:
        raise InvalidInput(
            "public label maps", value=len(files), limit=f"at least {LEAST_MAPS} .nii or .nii.gz files in {folder}"
        )
    return files


def load_maps(files: Sequence[Path], data: DataConfig) -> list[UInt8[np.ndarray, "x y z"]]:
    """Read label maps onto a grid.

    Args:
        files: The files.
        data: Labels, spacing and grid.

    Returns:
        Uint8 maps [x, y, z].

    Raises:
        InvalidInput: If a file is no label map with these labels; the error names the file.
    """
    from common.data.volume import load_label

    maps = []
    for path in files:
        with naming_file(path, remedy="take it out of the folder"):
            maps.append(load_label(path, data))
    return maps


def read_maps(folder: Path) -> tuple[list[UInt8[np.ndarray, "x y z"]], int]:
    """Read the label maps of a folder on a grid chosen for them.

    Args:
        folder: Folder with at least four label maps (.nii or .nii.gz).

    Returns:
        Uint8 maps [x, y, z] of one shape, and the number of label values.

    Raises:
        InvalidInput: If there are fewer than four maps, one cannot be read, or one is given twice.
    """
    from common.data.grid import choose_both

    files = map_files(folder)
    spacing, grid = choose_both(files, most=MOST_VOXELS)
    names = ("background", *(f"structure {number}" for number in range(1, _most(files) + 1)))
    data = DataConfig(labels=names, spacing_mm=spacing, grid=grid)
    maps = load_maps(files, data)
    check_no_copy(maps, "public label map", limit=_DIFFERENT, names=[path.name for path in files])
    return maps, len(names)


def read_shapes(folder: Path | str) -> PublicShapes:
    """Measure how closely a codec, and the mean shape of other patients, reproduce the label maps in a folder.

    Args:
        folder: Folder with at least four label maps (.nii or .nii.gz).

    Returns:
        Two mean values of Dice: of each map with its decoded code, and of each map with the mean shape of other maps.

    Raises:
        InvalidInput: If there are fewer than four maps, one cannot be read, or one is given twice.

    >>> from tempfile import TemporaryDirectory
    >>> with TemporaryDirectory() as folder:
    ...     c.read_shapes(Path(folder))
    Traceback (most recent call last):
    ...
    common.errors.InvalidInput: folder of public label maps: got ...; allowed: a folder that directly contains ...
    """
    maps, labels = read_maps(as_path(folder, what="folder of label maps"))
    return public_shapes(maps, labels=labels)


def public_shapes(label_maps: Sequence[UInt8[np.ndarray, "x y z"]], *, labels: int) -> PublicShapes:
    """Measure how closely a codec, and the mean shape of other patients, reproduce label maps.

    Each half of the maps is encoded and decoded by a codec fitted on the other half. Each map is also compared with the
    mean shape of the other half.

    Args:
        label_maps: uint8 arrays [x, y, z] of one shape, at least four.
        labels: Number of label values, the background included.

    Returns:
        Two mean values of Dice: of each map with its decoded code, and of each map with the mean shape.

    Raises:
        InvalidInput: If there are fewer than four maps, or one is given twice.
    """
    from common.data.label_maps import one_hot
    from common.metrics import score

    mean_shape = mean_shape_dice(label_maps, labels=labels)
    held: list[float] = []
    for own, others in halves(label_maps):
        codec = codec_of(own, labels=labels)
        codes = (codec.encode(one_hot(each, labels)) for each in others)
        drawn = [codec.decode(code, noise_std=0.0).argmax(axis=0).astype(np.uint8) for code in codes]
        held.append(score(drawn, others, labels).mean)
    return PublicShapes(held=float(np.mean(held)), mean_shape=mean_shape)


def codec_of(label_maps: Sequence[UInt8[np.ndarray, "x y z"]], *, labels: int) -> PcaCodec:
    """Fit the PCA codec that a joint query would use on these maps.

    Args:
        label_maps: Uint8 arrays [x, y, z] of one shape.
        labels: Number of label values, the background included.

    Returns:
        The fitted codec.
    """
    from common.codecs.codec import Provenance
    from common.codecs.pca import PcaCodec

    made = Provenance(tuple(sha256_bytes(each.tobytes()) for each in label_maps), CONFIG.augmentations, 0, NOISE_STD)
    return PcaCodec.fit(label_maps, labels=labels, config=CONFIG, provenance=made)


def mean_shape_dice(label_maps: Sequence[UInt8[np.ndarray, "x y z"]], *, labels: int) -> float:
    """Return the mean Dice between each half of the maps and the mean shape of the other half.

    Args:
        label_maps: Uint8 arrays [x, y, z] of one shape, at least four.
        labels: Number of label values, the background included.

    Returns:
        The mean Dice over both halves.

    Raises:
        InvalidInput: If there are fewer than four maps, or one is given twice.
    """
    from common.codecs import shapes
    from common.codecs.pca import centre_and_metric
    from common.data.label_maps import one_hot
    from common.metrics import score

    if len(label_maps) < LEAST_MAPS:
        raise InvalidInput("public label maps", value=len(label_maps), limit=f"at least {LEAST_MAPS}")
    check_no_copy(label_maps, "public label map", limit=_DIFFERENT)
    factor = shapes.pooling_factor(label_maps[0].shape, labels=labels)
    found = []
    for own, others in halves(label_maps):
        exact = [shapes.pool(one_hot(each, labels).astype(np.float64), factor=factor) for each in own]
        centre, _ = centre_and_metric(exact, factor=1)
        drawn = shapes.to_probabilities(centre, factor=factor).argmax(axis=0).astype(np.uint8)
        found.append(score([drawn] * len(others), others, labels).mean)
    return float(np.mean(found))


def halves(rows: R) -> tuple[tuple[R, R], tuple[R, R]]:
    """Split rows into those of even and of odd index, and return the halves in both orders.

    Args:
        rows: An array, split along its first axis, or another sequence.

    Returns:
        (even rows, odd rows) and (odd rows, even rows).

    >>> halves([1, 2, 3])
    (([1, 3], [2]), ([2], [1, 3]))
    """
    return (rows[::2], rows[1::2]), (rows[1::2], rows[::2])


def _most(files: Sequence[Path]) -> int:
    """Return the largest label value of the files, at least 1; refuse one that is larger than a study may have."""
    from common.data.nifti import read_nifti_file

    found = 1
    for path in files:
        largest = float(read_nifti_file(path, channels=1).array.max())
        if not largest < MAX_LABELS:  # NaN too
            raise InvalidInput(
                f"{path}: largest value of a label map",
                value=largest,
                limit=f"at most {MAX_LABELS - 1}",
                remedy="export it again as a map of labels, not of intensities",
            )
        found = max(found, int(largest))
    return found
