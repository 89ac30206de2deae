"""Determines where a volume's voxels lie in the patient from sform, qform, units and pixdim, or refuses the volume.

Called by the readers of NIfTI and DICOM, and wherever two volumes are compared in space. Four cases are resolved and
noted: a sform that only shifts the scanner's frame, a template's sform beside the scanner's qform, units other than mm,
and an unusable pixdim beside a good sform. Refuses volumes for which left and right or sizes would have to be guessed.
Coordinates are NIfTI's, RAS+ in mm.

Source: the NIfTI-1.1 header, "3D image orientation and location in space".
"""

from __future__ import annotations

import itertools

import nibabel as nib
import numpy as np
from jaxtyping import Float
from nibabel.orientations import apply_orientation, inv_ornt_aff, io_orientation, ornt_transform
from nibabel.spatialimages import HeaderDataError

from common.errors import InvalidInput

LEAST_SPACING_MM, MOST_SPACING_MM = 0.01, 100.0
MOST_ORIGIN_MM = 1e6  # a kilometre; from about 1e15 mm on, floats cannot tell one voxel's place from the next
SIZE_TOLERANCE = 0.01  # relative, between two statements of a voxel's size
SHEAR_OF_ROUNDING, MOST_SHEAR = 0.005, 0.5  # cosine between two voxel axes
MOST_TURN_DEGREES = 5.0  # between sform and qform
PLACE_TOLERANCE = 0.1  # of the smallest voxel edge, at the volume's corners
_KNOWN_CODES = range(1, 6)
_TEMPLATE_CODES = (3, 4, 5)
_MM = {0: 1.0, 1: 1000.0, 2: 1.0, 3: 0.001}
_UNIT_NAMES = {1: "metre", 3: "micrometre"}

Affine = Float[np.ndarray, "4 4"]

LPS_TO_RAS = np.diag([-1.0, -1.0, 1.0, 1.0])
"""Turns DICOM's coordinates (left, posterior, superior) into NIfTI's."""


def placement(header: nib.Nifti1Header) -> tuple[Affine, tuple[str, ...]]:
    """Return the affine voxel → mm in RAS+ of a header, and the corrections that were made.

    Args:
        header: A NIfTI-1 or NIfTI-2 header.

    Returns:
        The affine, and one note for each correction.

    Raises:
        InvalidInput: If the header gives no orientation, contradicts itself, or has an unusable affine.
    """
    notes: list[str] = []
    pixdim = np.asarray(header["pixdim"], dtype=np.float64)
    sform = _sform(header) if int(header["sform_code"]) in _KNOWN_CODES else None
    coded_q = int(header["qform_code"]) in _KNOWN_CODES
    if sform is None and not coded_q:
        raise InvalidInput(
            "volume gives no orientation: neither sform nor qform is set",
            remedy="export the scan again with its orientation",
        )
    qform = _qform(header, notes, needed=sform is None) if coded_q else None
    if sform is None:
        assert qform is not None
        affine = qform
    elif qform is None:
        affine = sform
        _check_pixdim(pixdim[1:4], sform, notes)
    else:
        scanner = int(header["qform_code"]) not in _TEMPLATE_CODES
        affine = _agree(sform, qform, notes, template=scanner and int(header["sform_code"]) in _TEMPLATE_CODES)
    unit = int(header["xyzt_units"]) & 7
    if unit in _UNIT_NAMES:
        affine = np.diag([_MM[unit]] * 3 + [1.0]) @ affine
        notes.append(f"lengths are in {_UNIT_NAMES[unit]}s: converted to mm")
    elif unit not in _MM:
        notes.append(f"unit of length {unit} is not defined: taken as mm")
    check_affine(affine)
    if shear(affine) > SHEAR_OF_ROUNDING:
        notes.append("shear removed by resampling")
    return affine, tuple(notes)


def check_affine(affine: Affine) -> None:
    """Refuse an affine that is singular, not finite, sheared beyond 30°, far away or of impossible voxel sizes.

    Args:
        affine: Voxel → mm, shape [4, 4].

    Raises:
        InvalidInput: If the affine is refused.
    """
    if not np.isfinite(affine).all() or (voxel_sizes(affine) == 0).any():
        raise _no_affine()
    sizes = voxel_sizes(affine)
    if not (sizes.min() >= LEAST_SPACING_MM and sizes.max() <= MOST_SPACING_MM):
        raise InvalidInput(
            "voxel spacing in mm",
            value=tuple(float(f"{size:.3g}") for size in sizes),
            limit=f"{LEAST_SPACING_MM} to {MOST_SPACING_MM:g}",
            remedy="export the scan again with its spacing in mm",
        )
    if (origin := float(np.abs(affine[:3, 3]).max())) > MOST_ORIGIN_MM:
        raise InvalidInput(
            "distance of the first voxel from the scanner's origin in mm",
            value=f"{origin:.3g}",
            limit=f"{MOST_ORIGIN_MM:g}",
            remedy="export the scan again with its position in mm",
        )
    if shear(affine) > MOST_SHEAR:
        raise InvalidInput(
            "volume's axes are sheared",
            value=round(shear(affine), 2),
            limit=f"cosine between axes up to {MOST_SHEAR}",
            remedy="resample the scan onto orthogonal axes",
        )
    if abs(np.linalg.det(affine[:3, :3])) < 1e-3 * float(np.prod(sizes)):
        raise _no_affine()


def voxel_sizes(affine: Affine) -> Float[np.ndarray, "3"]:
    """Return the edge lengths of a voxel in mm, axis by axis.

    Args:
        affine: Voxel → mm, shape [4, 4].

    Returns:
        Array of shape [3].

    >>> voxel_sizes(np.diag([1.0, 2.0, 3.0, 1.0]))
    array([1., 2., 3.])
    """
    sizes: np.ndarray = np.sqrt((affine[:3, :3] ** 2).sum(axis=0))
    return sizes


def shear(affine: Affine) -> float:
    """Return the largest |cosine| between two voxel axes; 0 if they are orthogonal.

    Args:
        affine: Voxel → mm, shape [4, 4].

    Returns:
        The cosine.
    """
    axes = affine[:3, :3] / voxel_sizes(affine)
    return float(np.abs(axes.T @ axes - np.eye(3)).max())


def same_place(one: Affine, other: Affine, shape: tuple[int, ...]) -> bool:
    """Return whether two affines place every voxel at the same position, up to a small tolerance.

    The tolerance is a tenth of the smallest voxel edge, but not less than 0.01 mm.

    Args:
        one: Voxel → mm, shape [4, 4].
        other: The other affine.
        shape: The volume's shape.

    Returns:
        True if they agree.
    """
    gap = (one - other) @ corners(shape)
    tolerance = max(0.01, PLACE_TOLERANCE * float(voxel_sizes(one).min()))
    return bool(np.sqrt((gap[:3] ** 2).sum(axis=0)).max() <= tolerance)


def corners(shape: tuple[int, ...], *, margin: float = 0.0) -> Float[np.ndarray, "4 8"]:
    """Return homogeneous voxel coordinates of a volume's corner voxels.

    Args:
        shape: Shape of the volume, [i, j, k].
        margin: Distance in voxels by which the corners are moved outwards; .5 gives the outer edges.

    Returns:
        Array of shape [4, 8].
    """
    ends = [(-margin, n - 1 + margin) for n in shape]
    return np.array([(*corner, 1.0) for corner in itertools.product(*ends)]).T


def to_axes_of(array: np.ndarray, affine: Affine, reference: Affine) -> tuple[np.ndarray, Affine]:
    """Permute and flip the axes of a volume so that they run as those of a reference. No value is interpolated.

    Args:
        array: Shape [c, i, j, k].
        affine: Its affine.
        reference: Affine whose axes are wanted.

    Returns:
        The array and its new affine.
    """
    turn = ornt_transform(io_orientation(affine), io_orientation(reference))
    turned = np.stack([apply_orientation(channel, turn) for channel in array])
    return turned, affine @ inv_ornt_aff(turn, array.shape[1:])


def same_box(affine: Affine, shape: tuple[int, ...], other: Affine, other_shape: tuple[int, ...]) -> bool:
    """Return whether two volumes with parallel axes fill the same box, up to half of the longest voxel edge of either.

    Args:
        affine: Affine of the first volume.
        shape: Shape of the first volume.
        other: Affine of the second volume.
        other_shape: Shape of the second volume.

    Returns:
        True if they do.
    """
    gap = affine @ corners(shape, margin=0.5) - other @ corners(other_shape, margin=0.5)
    coarser = max(float(voxel_sizes(affine).max()), float(voxel_sizes(other).max()))
    return bool(np.abs(gap[:3]).max() <= coarser / 2)


def _sform(header: nib.Nifti1Header) -> Affine:
    rows = [np.asarray(header[f"srow_{axis}"], dtype=np.float64) for axis in "xyz"]
    affine = np.stack([*rows, np.array([0.0, 0.0, 0.0, 1.0])])
    if not np.isfinite(affine).all() or _singular(affine):
        raise _no_affine()
    return affine


def _qform(header: nib.Nifti1Header, notes: list[str], *, needed: bool) -> Affine | None:
    """Return the qform; None if it is unusable and the sform replaces it."""
    fixed = header.copy()
    if float(fixed["pixdim"][0]) == 0:
        fixed["pixdim"][0] = 1
        notes.append("qfac 0 means 1")
    try:
        with np.errstate(all="ignore"):
            affine = np.asarray(fixed.get_qform(), dtype=np.float64)
        usable = bool(np.isfinite(affine).all()) and not _singular(affine)
    except (ValueError, HeaderDataError, FloatingPointError, np.linalg.LinAlgError):
        usable = False
    if usable:
        return affine
    if needed:
        raise _no_affine()
    notes.append("qform or pixdim is not usable: sform used")
    return None


def _check_pixdim(pixdim: Float[np.ndarray, "3"], sform: Affine, notes: list[str]) -> None:
    """Compare the voxel size in pixdim with that of the sform. Add a note if pixdim is unusable; refuse a header in
    which the two sizes differ.
    """
    if not (np.isfinite(pixdim).all() and (pixdim > 0).all()):
        notes.append("pixdim is not usable: sform used")
    elif not np.allclose(pixdim, voxel_sizes(sform), rtol=SIZE_TOLERANCE, atol=0):
        raise InvalidInput(
            "pixdim and sform contradict each other about the voxel's size",
            value=tuple(float(f"{size:.3g}") for size in pixdim),
            limit=str(tuple(float(f"{size:.3g}") for size in voxel_sizes(sform))),
            remedy="export the scan again, or correct the header's pixdim",
        )


def _agree(sform: Affine, qform: Affine, notes: list[str], *, template: bool) -> Affine:
    mirrored = np.linalg.det(sform[:3, :3]) * np.linalg.det(qform[:3, :3]) < 0
    if not mirrored and template and not np.allclose(sform, qform, rtol=1e-4, atol=1e-3):
        notes.append("sform places the volume in a template: the scanner's qform used")
        return qform
    turn = _turn(sform, qform)
    resized = not np.allclose(voxel_sizes(sform), voxel_sizes(qform), rtol=SIZE_TOLERANCE, atol=0)
    if mirrored or turn > MOST_TURN_DEGREES or resized:
        how = "mirrored" if mirrored else "of other voxel sizes" if resized else f"turned by {turn:.0f}°"
        raise InvalidInput(
            f"sform and qform contradict each other: one is {how}",
            remedy="find out in a viewer which is right and set the other's code to 0",
        )
    if not np.allclose(sform, qform, rtol=1e-3, atol=0.01 * float(voxel_sizes(sform).min())):
        notes.append("sform and qform place the volume differently: sform used")
    return sform


def _turn(one: Affine, other: Affine) -> float:
    """Return the angle in degrees between the orientations of two affines, without their voxel sizes and shears."""
    u, v = (np.linalg.svd(affine[:3, :3] / voxel_sizes(affine)) for affine in (one, other))
    cosine = (np.trace((u[0] @ u[2]) @ (v[0] @ v[2]).T) - 1) / 2
    return float(np.degrees(np.arccos(np.clip(cosine, -1, 1))))


def _singular(affine: Affine) -> bool:
    sizes = voxel_sizes(affine)
    return bool((sizes == 0).any()) or abs(float(np.linalg.det(affine[:3, :3]))) < 1e-6 * float(np.prod(sizes))


def _no_affine() -> InvalidInput:
    return InvalidInput("volume's affine is singular or not finite", remedy="export the scan again with its geometry")
