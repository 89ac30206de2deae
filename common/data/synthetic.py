"""Makes 3D phantoms from a seed, which replace patients, and writes them as an MSD dataset.

Called by `consilium data synth`, the demo and tests. A bent ellipsoid is cut into two neighbouring structures
(anterior and posterior, like a hippocampus); a third structure lies beside it if requested. Pose, size, bend, cut and a
smooth deformation vary between patients, so that the mean shape is a poor segmentation. Tissue texture, other bodies of
the same brightness, partial volume, a bias field and Rician noise make brightness alone a poor segmentation too.

Each hospital has its own scanner: contrast, noise, voxel spacing and axis order. A case depends only on the seed and
its number. A :class:`PhantomImaging` sets how cluttered the images are and where annotators draw the border between
the two structures. Each set of phantoms (a collection) has one, so two collections may differ in clutter and in border.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import nibabel as nib
import numpy as np
from jaxtyping import Float, Int16, UInt8
from nibabel.orientations import axcodes2ornt, ornt_transform
from scipy.interpolate import CubicSpline
from scipy.spatial.transform import Rotation

from common.config import DataConfig
from common.data.msd import Case, Dataset, write_dataset
from common.errors import InvalidInput
from common.objects import filling

STRUCTURES = ("anterior", "posterior", "lateral")
FIELD_OF_VIEW_MM = (44.0, 48.0, 44.0)
HALF_AXES_MM = (8.0, 16.0, 8.0)
CSF, GREY, WHITE = 0.1, 0.35, 1.0
ORIENTATIONS = ("RAS", "LPS", "LAS", "ASR", "PIR")
_SCANNER, _CASE = 1, 2  # parts of the seeds, so that scanners and cases get different random numbers


@dataclass(frozen=True, slots=True)
class Scanner:
    """The properties that all images of a hospital share. ``gain`` is the stored value of white matter; ``noise_std``
    is relative to it.
    """

    spacing_mm: tuple[float, float, float]
    orientation: str
    contrast: float
    gain: float
    noise_std: float
    bias: float


@dataclass(frozen=True, slots=True)
class PhantomImaging:
    """Settings by which a collection's phantoms are imaged and annotated, apart from scanners and anatomy.

    Attributes:
        border_mm: Distance from the annotated border between anterior and posterior to the visible change of
            brightness behind it, in mm for a body of size 1.
        cut_mm: Mean and standard deviation over patients of the position of that change along the body, also in mm for
            a body of size 1.
        clutter: Strength of tissue texture and of other bodies.
        noise: Factor of the scanners' noise.
        size: Size of the body, relative to :data:`HALF_AXES_MM`.
        shift_mm: Largest distance of the body from the scan's centre, on each axis.
    """

    border_mm: float = 0.0
    cut_mm: tuple[float, float] = (1.0, 2.0)
    clutter: float = 1.0
    noise: float = 1.0
    size: float = 1.0
    shift_mm: float = 3.5


PLAIN = PhantomImaging()


def study_data(structures: int = 2) -> DataConfig:
    """Return labels, spacing and grid that suit the phantoms.

    Args:
        structures: Number of structures, 2 or 3.

    Returns:
        The data settings of a study.
    """
    return DataConfig(labels=("background", *STRUCTURES[:structures]), spacing_mm=(1.4, 1.4, 1.4), grid=(32, 32, 32))


def scanner_of(hospital: int, *, seed: int) -> Scanner:
    """Return the scanner of one hospital. It does not depend on the number of cases.

    Args:
        hospital: Number of the hospital.
        seed: Seed of the collection.

    Returns:
        The scanner.
    """
    rng = np.random.default_rng([_SCANNER, seed, hospital])
    in_plane, slices = rng.uniform(1.0, 1.3), rng.uniform(1.0, 1.6)
    return Scanner(
        spacing_mm=(round(in_plane, 2), round(in_plane, 2), round(slices, 2)),
        orientation=ORIENTATIONS[hospital % len(ORIENTATIONS)],
        contrast=float(rng.uniform(0.9, 1.12)),
        gain=float(rng.uniform(300, 3000)),
        noise_std=float(rng.uniform(0.04, 0.07)),
        bias=float(rng.uniform(0.1, 0.22)),
    )


def phantom(
    rng: np.random.Generator, scanner: Scanner, *, structures: int = 2, drawing: PhantomImaging = PLAIN
) -> tuple[Int16[np.ndarray, "x y z"], UInt8[np.ndarray, "x y z"], Float[np.ndarray, "4 4"]]:
    """Make one random phantom and the image that the scanner would record of it.

    Args:
        rng: Source of all draws.
        scanner: The hospital's scanner.
        structures: Number of structures, 2 or 3.
        drawing: The collection's imaging and annotation.

    Returns:
        Image int16 [x, y, z], label map (0 background, then STRUCTURES) and affine, in RAS+ axes.
    """
    shape = tuple(round(extent / step) for extent, step in zip(FIELD_OF_VIEW_MM, scanner.spacing_mm, strict=True))
    affine = np.diag([*scanner.spacing_mm, 1.0])
    affine[:3, 3] = [-step * (n - 1) / 2 for step, n in zip(scanner.spacing_mm, shape, strict=True)]
    axes = [affine[i, 3] + scanner.spacing_mm[i] * np.arange(shape[i]) for i in range(3)]
    points = np.stack(np.meshgrid(*axes, indexing="ij"))  # mm

    anatomy = _anatomy(_into_patient(points, rng, drawing), rng, structures=structures, cut_mm=drawing.cut_mm)
    labels = np.zeros(shape, dtype=np.uint8)
    for value, depth in enumerate(anatomy.depths(drawing.border_mm), start=1):
        labels[depth > 0] = value
    signal = _paint(points, anatomy.depths(), rng, clutter=drawing.clutter)
    bias = np.exp(scanner.bias * _smooth(rng, shape, knots=3))
    bright = np.clip(signal, 0, None) ** scanner.contrast * bias
    noise = rng.normal(0, scanner.noise_std * drawing.noise, (2, *shape))
    measured = np.hypot(bright + noise[0], noise[1])  # Rician: the magnitude of a complex signal
    return np.rint(np.clip(measured * scanner.gain, 0, 32767)).astype(np.int16), labels, affine


def write_phantoms(
    out: Path,
    *,
    cases: int,
    seed: int,
    hospitals: int = 1,
    structures: int = 2,
    drawing: PhantomImaging = PLAIN,
    first: int = 0,
    on_case: Callable[[int], None] | None = None,
) -> Dataset:
    """Write an MSD dataset of phantoms, with case i at hospital i mod ``hospitals``, and read it back.

    Args:
        out: A new or empty directory.
        cases: Number of cases, at most 100,000.
        seed: Seed of scanners and cases.
        hospitals: Number of hospitals, at most ``cases``.
        structures: Number of structures, 2 or 3.
        drawing: The collection's imaging and annotation.
        first: Number of the first case, if cases of the same seed were written elsewhere.
        on_case: Called with the number of cases written so far.

    Returns:
        The dataset.

    Raises:
        InvalidInput: If a number is outside its range, or the directory is not empty.
    """
    if not 2 <= structures <= len(STRUCTURES):
        raise InvalidInput("structures", value=structures, limit=f"2 to {len(STRUCTURES)}")
    if not 1 <= hospitals <= cases <= 100_000:
        raise InvalidInput("cases and hospitals", value=(cases, hospitals), limit="1 ≤ hospitals ≤ cases ≤ 100000")
    with filling(out):
        for folder in ("imagesTr", "labelsTr"):
            (out / folder).mkdir(parents=True, exist_ok=True)
        made = []
        for number in range(first, first + cases):
            hospital = (number - first) % hospitals
            scanner = scanner_of(hospital, seed=seed)
            rng = np.random.default_rng([_CASE, seed, number])
            image, labels, affine = phantom(rng, scanner, structures=structures, drawing=drawing)
            name = f"phantom_{number:04d}.nii.gz"
            for folder, array in (("imagesTr", image), ("labelsTr", labels)):
                nib.save(_stored(array, affine, scanner.orientation), out / folder / name)
            made.append(
                Case(
                    id=name.removesuffix(".nii.gz"),
                    image=out / "imagesTr" / name,
                    label=out / "labelsTr" / name,
                    hospital=f"hospital-{hospital + 1:02d}",
                )
            )
            if on_case is not None:
                on_case(number - first + 1)
        labels_of = study_data(structures).labels
        return write_dataset(
            out, name=f"phantoms-{seed}", labels=labels_of, channels=("MRI",), cases=made, synthetic=True
        )


def _into_patient(
    points: Float[np.ndarray, "3 x y z"], rng: np.random.Generator, drawing: PhantomImaging
) -> Float[np.ndarray, "3 x y z"]:
    """Transform scanner coordinates to the patient's own, both in mm: a smooth deformation, then pose and size."""
    shape = points.shape[1:]
    warp = 1.2 * np.stack([_smooth(rng, shape, knots=4) for _ in range(3)])
    turn = Rotation.from_euler("xyz", rng.normal(0, 10, 3), degrees=True).as_matrix()
    shift = rng.uniform(-drawing.shift_mm, drawing.shift_mm, 3)
    size = drawing.size * np.exp(rng.normal(0, 0.11, 3))
    moved = (points + warp).reshape(3, -1) - shift[:, None]
    inside: np.ndarray = (turn @ moved / size[:, None]).reshape(points.shape)
    return inside


@dataclass(frozen=True, slots=True, eq=False)
class _Anatomy:
    """Approximate depth in mm (negative outside) of each voxel.

    Attributes:
        body: Depth in the whole body.
        cut: Signed distance from the plane at which the brightness changes. The plane cuts the body in two.
        beside: Depth in each further body beside it.
    """

    body: Float[np.ndarray, "x y z"]
    cut: Float[np.ndarray, "x y z"]
    beside: tuple[Float[np.ndarray, "x y z"], ...]

    def depths(self, border_mm: float = 0.0) -> list[Float[np.ndarray, "x y z"]]:
        """Return the depth in each structure after shifting the border by ``border_mm``; at most one depth is
        positive.
        """
        cut = self.cut - border_mm
        return [np.minimum(self.body, cut), np.minimum(self.body, -cut), *self.beside]


def _anatomy(
    points: Float[np.ndarray, "3 x y z"], rng: np.random.Generator, *, structures: int, cut_mm: tuple[float, float]
) -> _Anatomy:
    x, y, z = points
    bend, tilt, taper = rng.normal(0.0, 2.0), rng.normal(0, 0.25), rng.uniform(-0.3, 0.3)
    a, b, c = HALF_AXES_MM
    width = 1 + taper * np.clip(y / b, -1, 1)
    radius = np.sqrt(((x - bend * (y / b) ** 2) / (a * width)) ** 2 + (y / b) ** 2 + (z / (c * width)) ** 2)
    body = (1 - radius) * a
    cut = y - rng.normal(*cut_mm) - tilt * z
    if structures == 2:
        return _Anatomy(body, cut, ())
    centre = np.array([12.0, -2.0, 4.0]) + rng.normal(0, 1, 3)
    lateral = 5.5 - np.linalg.norm(points - centre[:, None, None, None], axis=0)
    return _Anatomy(body, cut, (np.minimum(lateral, -body - 0.5),))


def _paint(
    points: Float[np.ndarray, "3 x y z"],
    depths: list[Float[np.ndarray, "x y z"]],
    rng: np.random.Generator,
    *,
    clutter: float,
) -> Float[np.ndarray, "x y z"]:
    """Return the brightness of each voxel, before the scanner's bias field and noise are added.

    Folded tissue is painted first, then decoy bodies, then the structures. The decoys are about as bright as the
    structures and lie outside them.

    Args:
        points: Scanner coordinates of each voxel, in mm.
        depths: For each structure, the approximate depth of each voxel in it, in mm; negative outside.
        rng: Source of all draws.
        clutter: Strength of tissue and decoys: 0 leaves uniform tissue, 1 is full contrast.
    """
    shape = points.shape[1:]
    folds, pools = _smooth(rng, shape, knots=7), _smooth(rng, shape, knots=5)
    signal = GREY + (WHITE - GREY) * clutter * _share(folds - 1.1, 0.35)
    signal += (CSF - signal) * clutter * _share(pools - 1.0, 0.25)
    outside = -np.max(depths, axis=0)
    for _ in range(2):
        centre = np.array([rng.uniform(-0.45, 0.45) * extent for extent in FIELD_OF_VIEW_MM])
        distance = np.linalg.norm(
            (points - centre[:, None, None, None]) / rng.uniform(0.7, 1.4, 3)[:, None, None, None], axis=0
        )
        decoy = np.minimum(rng.uniform(3, 5) - distance, outside - 1.5)
        signal += (rng.uniform(0.62, 0.82) - signal) * clutter * _share(decoy, 0.5)
    for depth, level in zip(depths, rng.normal((0.84, 0.64, 0.74)[: len(depths)], 0.02), strict=True):
        signal += (level - signal) * _share(depth, 0.5)
    return signal


def _share(depth: Float[np.ndarray, "x y z"], width: float) -> Float[np.ndarray, "x y z"]:
    """Return how much of each voxel lies inside a body (0 to 1), from the voxel's depth in it. This imitates the
    partial volume effect.
    """
    share: np.ndarray = 0.5 * (1 + np.tanh(depth / width))
    return share


def _smooth(rng: np.random.Generator, shape: tuple[int, ...], *, knots: int) -> Float[np.ndarray, "x y z"]:
    """Return a smooth random field of mean 0 and variance 1: ``knots`` random values on each axis, joined by cubic
    splines.
    """
    field = rng.normal(size=(knots + 2,) * 3)
    for axis, count in enumerate(shape):
        field = np.moveaxis(np.tensordot(_spline(knots, count), field, axes=(1, axis)), 0, axis)
    smooth: np.ndarray = (field - field.mean()) / field.std()
    return smooth


@cache
def _spline(knots: int, count: int) -> Float[np.ndarray, "count values"]:
    """Return the matrix that joins ``knots + 2`` values by a cubic spline and evaluates it at ``count`` points."""
    matrix: np.ndarray = CubicSpline(np.arange(knots + 2), np.eye(knots + 2))(np.linspace(0.5, knots + 0.5, count))
    return matrix


def _stored(
    array: Int16[np.ndarray, "x y z"] | UInt8[np.ndarray, "x y z"], affine: Float[np.ndarray, "4 4"], orientation: str
) -> nib.Nifti1Image:
    image = nib.Nifti1Image(array, affine)
    return image.as_reoriented(ornt_transform(axcodes2ornt("RAS"), axcodes2ornt(orientation)))
