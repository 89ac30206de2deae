"""Makes odd and broken files as hospitals have them, by named rules from one small case; none of them is
stored.

The verdict on every rule stands in verdicts.toml. A rule gives what a hospital's file server would have in place of one
clean case of 6 × 5 × 4 voxels.
"""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import struct
import tempfile
import zipfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import nibabel as nib
import numpy as np
from nibabel.orientations import axcodes2ornt, ornt_transform

from common.config import DataConfig
from common.data.dataset import Case
from common.data.volume import Volume, load_label

SHAPE = (6, 5, 4)
ONE = DataConfig(labels=("background", "core", "rim"), spacing_mm=(1, 1, 1), grid=(8, 8, 8))
TWO = replace(ONE, channels=("T1", "T2"))
NAME = "Jane-Doe-1970"


@dataclass(frozen=True)
class Files:
    """Holds a case's files and how to read them: name → bytes, None for a folder (or nothing, if ``missing``)."""

    images: dict[str, bytes | None]
    label: bytes | None
    data: DataConfig = ONE
    label_map: tuple[tuple[int, int], ...] = ()
    missing: bool = False

    def write(self, folder: Path) -> Case:
        paths = []
        for name, content in self.images.items():
            path = folder / f"{NAME}-{name}"
            paths.append(path)
            if content is not None:
                path.write_bytes(content)
            elif not self.missing:
                path.mkdir()
        label = folder / f"{NAME}-label.nii"
        if self.label is not None:
            label.write_bytes(self.label)
        own = tuple(zip(self.data.channels, paths, strict=False)) if len(paths) > 1 else ()
        return Case(id=NAME, image=paths[0], label=label, channel_files=own, label_map=self.label_map)


def label_of(content: bytes, data: DataConfig, *, volume: Volume | None = None) -> np.ndarray:
    """Return the label map in a file's bytes, on the study's grid."""
    with tempfile.NamedTemporaryFile() as file:
        file.write(content)
        file.flush()
        return load_label(Path(file.name), data, volume=volume)


Rule = Callable[[], Files]
RULES: dict[str, Rule] = {}


def rule(name: str) -> Callable[[Rule], Rule]:
    def register(function: Rule) -> Rule:
        assert name not in RULES
        RULES[name] = function
        return function

    return register


def scan(seed: int = 1, shape: tuple[int, ...] = SHAPE) -> np.ndarray:
    return np.random.default_rng(seed).integers(50, 200, shape).astype(np.int16)


def drawing(shape: tuple[int, ...] = SHAPE) -> np.ndarray:
    labels = np.zeros(shape, dtype=np.uint8)
    labels[1:3, 1:4, 1:3] = 1
    labels[3:5, 2:4, 1:3] = 2
    return labels


AFFINE = np.array([[1.0, 0, 0, -3], [0, 1, 0, 2], [0, 0, 1, 5], [0, 0, 0, 1]])


def packed(array: np.ndarray, affine: np.ndarray = AFFINE, *, sform: int = 1, qform: int = 1) -> bytes:
    """Return a plain single NIfTI-1 file as nibabel writes it, with these two codes."""
    image = nib.Nifti1Image(array, affine, dtype=array.dtype)
    image.set_sform(affine, code=sform)
    image.set_qform(affine, code=qform)
    return bytes(image.to_bytes())


def edited(content: bytes, **fields: object) -> bytes:
    """Return the file with raw header fields set, unchecked."""
    header = nib.Nifti1Header(binaryblock=content[:348], check=False)
    for name, value in fields.items():
        header.structarr[name] = value
    return bytes(header.structarr.tobytes()) + content[348:]


def poke(content: bytes, offset: int, what: str, *values: float) -> bytes:
    raw = struct.pack(what, *values)
    return content[:offset] + raw + content[offset + len(raw) :]


def image_is(content: bytes | None, name: str = "image.nii") -> Files:
    return Files({name: content}, packed(drawing()))


def array_is(array: np.ndarray) -> Files:
    return image_is(packed(array))


def label_is(content: bytes | None, **more: object) -> Files:
    return replace(Files({"image.nii": packed(scan())}, content), **more)  # type: ignore[arg-type]


def both(affine: np.ndarray, **codes: int) -> Files:
    return Files({"image.nii": packed(scan(), affine, **codes)}, packed(drawing(), affine, **codes))


def both_edited(content: Callable[[bytes], bytes]) -> Files:
    return Files({"image.nii": content(packed(scan()))}, content(packed(drawing())))


def header_is(**fields: object) -> Files:
    return both_edited(lambda content: edited(content, **fields))


def simple(name: str, make: Rule) -> None:
    rule(name)(make)


def turned(axis: str, degrees: float) -> np.ndarray:
    c, s = np.cos(np.radians(degrees)), np.sin(np.radians(degrees))
    spin = {"x": [[1, 0, 0], [0, c, -s], [0, s, c]], "z": [[c, -s, 0], [s, c, 0], [0, 0, 1]]}[axis]
    result = AFFINE.copy()
    result[:3, :3] = spin
    return result


def moved(*mm: float) -> np.ndarray:
    result = AFFINE.copy()
    result[:3, 3] += mm
    return result


def oriented(code: str) -> Files:
    turn = ornt_transform(axcodes2ornt("RAS"), axcodes2ornt(code))
    both_ = [bytes(nib.Nifti1Image(array, AFFINE).as_reoriented(turn).to_bytes()) for array in (scan(), drawing())]
    return Files({"image.nii": both_[0]}, both_[1])


def reoriented(array: np.ndarray, code: str) -> bytes:
    turn = ornt_transform(axcodes2ornt("RAS"), axcodes2ornt(code))
    return bytes(nib.Nifti1Image(array, AFFINE).as_reoriented(turn).to_bytes())


def sheared(cosine: float) -> np.ndarray:
    result = AFFINE.copy()
    result[:3, 1] = [cosine, np.sqrt(1 - cosine**2), 0]
    return result


# ---------------------------------------------------------------- good but odd
simple("oriented-lps", lambda: oriented("LPS"))
simple("oriented-pir", lambda: oriented("PIR"))
simple("oblique-by-20-degrees", lambda: both(turned("x", 20) @ np.diag([1.1, 0.9, 1.3, 1])))
simple("anisotropic-spacing", lambda: both(np.diag([0.5, 0.5, 3, 1])))
simple(
    "thin-slab-of-three-slices",
    lambda: Files({"image.nii": packed(scan(shape=(6, 5, 3)))}, packed(drawing()[:, :, :3])),
)
for _name in ("int8", "uint16", "int32", "uint32", "int64", "uint64", "float64"):
    simple(f"dtype-{_name}", lambda dtype=_name: array_is((scan() - 50).clip(0, 120).astype(dtype)))  # type: ignore[misc]


@rule("big-endian")
def _big_endian() -> Files:
    header = nib.Nifti1Header(endianness=">")
    header.set_data_dtype(">i2")
    image = nib.Nifti1Image(scan(), AFFINE, header)
    return image_is(bytes(image.to_bytes()))


@rule("nifti-2")
def _nifti_2() -> Files:
    return image_is(bytes(nib.Nifti2Image(scan(), AFFINE).to_bytes()))


simple("slope-and-intercept", lambda: image_is(edited(packed(scan()), scl_slope=2.5, scl_inter=-100)))
simple("slope-zero-means-none", lambda: image_is(edited(packed(scan()), scl_slope=0, scl_inter=7)))
simple("slope-nan-means-none", lambda: image_is(edited(packed(scan()), scl_slope=np.nan, scl_inter=np.nan)))
simple("slope-negative", lambda: image_is(edited(packed(scan()), scl_slope=-1, scl_inter=0)))
simple("trailing-axis-of-one", lambda: array_is(scan()[..., None]))
simple("six-dimensions-three-of-them-one", lambda: array_is(scan()[..., None, None, None]))
simple("qform-only", lambda: both(turned("z", 10), sform=0))
simple("sform-only", lambda: both(turned("z", 10), qform=0))
simple("sform-and-qform-differ-by-rounding", lambda: header_is(qoffset_x=-3 + 1e-5, quatern_d=1e-6))
simple("sform-moved-against-qform", lambda: header_is(qoffset_x=40, qoffset_y=-11))
simple("sform-turned-by-two-degrees-against-qform", lambda: header_is(quatern_d=np.sin(np.radians(1))))
simple(
    "sform-of-a-template-qform-of-the-scanner",
    lambda: header_is(sform_code=4, srow_x=[1.2, 0.1, 0, -90], srow_y=[-0.1, 1.25, 0, -126], srow_z=[0, 0, 1.3, -72]),
)
simple("pixdim-zero-beside-a-good-sform", lambda: header_is(pixdim=[1, 0, 0, 0, 0, 0, 0, 0]))
simple("pixdim-negative-beside-a-good-sform", lambda: header_is(pixdim=[1, -1, 1, 1, 0, 0, 0, 0]))
simple("qfac-zero-means-one", lambda: header_is(sform_code=0, pixdim=[0, 1, 1, 1, 0, 0, 0, 0]))


def in_units(code: int, factor: float) -> Files:
    affine = np.diag([factor, factor, factor, 1.0])
    return Files(
        {"image.nii": edited(packed(scan(), affine), xyzt_units=code)},
        edited(packed(drawing(), affine), xyzt_units=code),
    )


simple("units-metre", lambda: in_units(1, 0.001))
simple("units-micrometre", lambda: in_units(3, 1000))
simple("units-undefined", lambda: in_units(7, 1))
simple("shear-of-rounding", lambda: both(sheared(0.001), qform=0))
simple("shear-of-ten-degrees", lambda: both(sheared(float(np.sin(np.radians(10)))), qform=0))
simple("gzip-under-a-plain-name", lambda: image_is(gzip.compress(packed(scan())), "image.nii"))
simple("plain-under-a-gzip-name", lambda: image_is(packed(scan()), "image.nii.gz"))


@rule("gzip-of-two-members")
def _two_members() -> Files:
    content = packed(scan())
    return image_is(gzip.compress(content[:400]) + gzip.compress(content[400:]), "image.nii.gz")


simple("bytes-after-the-voxels", lambda: image_is(packed(scan()) + bytes(100)))


@rule("header-extension")
def _extension() -> Files:
    image = nib.Nifti1Image(scan(), AFFINE)
    image.header.extensions.append(nib.nifti1.Nifti1Extension("comment", f"{NAME}, ward 3".encode()))
    return image_is(bytes(image.to_bytes()))


simple("header-extension-announced-but-none", lambda: image_is(poke(packed(scan()), 348, "b", 1)))


@rule("voxels-start-in-a-header-extension")
def _in_an_extension() -> Files:
    image = nib.Nifti1Image(scan(), AFFINE)
    image.header.extensions.append(nib.nifti1.Nifti1Extension("comment", b"ward 3"))
    return image_is(edited(bytes(image.to_bytes()), vox_offset=352))


simple("voxels-start-at-a-fraction-of-a-byte", lambda: image_is(edited(packed(scan()), vox_offset=352.5)))


@rule("voxels-start-later")
def _later() -> Files:
    content = packed(scan())
    return image_is(edited(content, vox_offset=361)[:352] + bytes(9) + content[352:])


simple("bitpix-wrong", lambda: image_is(edited(packed(scan()), bitpix=8)))
simple("name-in-the-description", lambda: image_is(edited(packed(scan()), descrip=NAME.encode(), db_name=NAME[:17])))
simple("intensities-in-millions", lambda: array_is(scan().astype(np.float32) * 9000))
simple("intensities-tiny", lambda: array_is(scan().astype(np.float32) * 1e-30))
simple("intensities-up-to-1e12", lambda: array_is(scan().astype(np.float64) * 5e9))
simple("intensities-negative", lambda: array_is(scan() - 1000))


@rule("one-bright-voxel")
def _bright() -> Files:
    array = scan().astype(np.float32)
    array[2, 2, 2] = 1e6
    return array_is(array)


@rule("nine-tenths-padding")
def _padding() -> Files:
    array = np.zeros(SHAPE, dtype=np.int16)
    array[2:4, 2:4, 1:4] = scan()[2:4, 2:4, 1:4]
    return array_is(array)


simple("label-in-float", lambda: label_is(packed(drawing().astype(np.float64))))
simple("label-almost-integral", lambda: label_is(packed(drawing().astype(np.float32) * np.float32(1.0001))))
simple("label-empty", lambda: label_is(packed(drawing() * 0)))
simple("label-in-another-axis-order", lambda: label_is(reoriented(drawing(), "ASL")))


@rule("label-on-finer-voxels")
def _finer() -> Files:
    fine = drawing().repeat(2, 0).repeat(2, 1).repeat(2, 2)
    affine = AFFINE @ np.diag([0.5, 0.5, 0.5, 1])
    affine[:3, 3] -= 0.25
    return label_is(packed(fine, affine))


simple("label-placed-by-rounded-affine", lambda: label_is(packed(drawing(), AFFINE + 1e-3 * (AFFINE != 0))))
simple("label-with-a-trailing-axis", lambda: label_is(packed(drawing()[..., None])))
simple(
    "label-values-mapped",
    lambda: label_is(packed(np.array([0, 17, 53], dtype=np.int16)[drawing()]), label_map=((0, 0), (17, 1), (53, 2))),
)


@rule("structure-partly-outside-the-grid")
def _partly() -> Files:
    labels = np.zeros((14, 8, 8), dtype=np.uint8)
    labels[1:8, 2:6, 2:6] = 1
    return Files({"image.nii": packed(scan(shape=labels.shape))}, packed(labels))


def two(second: bytes, name: str = "t2.nii") -> Files:
    return Files({"t1.nii": packed(scan(1)), name: second}, packed(drawing()), data=TWO)


simple("two-channels-in-two-files", lambda: two(packed(scan(2))))
simple("channel-in-another-axis-order", lambda: two(reoriented(scan(2), "LSA")))
simple(
    "channels-on-the-fifth-axis",
    lambda: Files(
        {"both.nii": packed(np.stack([scan(1), scan(2)], axis=-1)[..., None, :])}, packed(drawing()), data=TWO
    ),
)

# ---------------------------------------------------------------- broken: the file
simple("file-missing", lambda: Files({"image.nii": None}, packed(drawing()), missing=True))
simple("file-empty", lambda: image_is(b""))
simple("text", lambda: image_is(f"{NAME} came in on Monday. ".encode() * 40))
simple("html-page", lambda: image_is(b"\n<!DOCTYPE html><html><title>Log in</title></html>"))
simple("git-lfs-pointer", lambda: image_is(b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n"))
simple("json", lambda: image_is(b'{"error": "not found"}'))
simple("dicom-file", lambda: image_is(bytes(128) + b"DICM" + bytes(400)))
simple("nrrd", lambda: image_is(b"NRRD0004\ntype: short\ndimension: 3\n" + bytes(400)))
simple("metaimage", lambda: image_is(b"ObjectType = Image\nNDims = 3\n" + bytes(400)))
simple("hdf5-or-minc", lambda: image_is(b"\x89HDF\r\n\x1a\n" + bytes(400)))
simple("png", lambda: image_is(b"\x89PNG\r\n\x1a\n" + bytes(400)))
simple("jpeg", lambda: image_is(b"\xff\xd8\xff\xe0" + bytes(400)))


@rule("zip")
def _zip() -> Files:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as archive:
        archive.writestr("image.nii", packed(scan()))
    return image_is(stream.getvalue())


simple("bzip2", lambda: image_is(bz2.compress(packed(scan()))))
simple("xz", lambda: image_is(lzma.compress(packed(scan()))))
simple("zstandard", lambda: image_is(b"\x28\xb5\x2f\xfd" + bytes(400)))
simple("apple-double", lambda: image_is(b"\x00\x05\x16\x07\x00\x02\x00\x00" + bytes(400), "._image.nii"))
simple("freesurfer-mgz", lambda: image_is(gzip.compress(struct.pack(">iiii", 1, 6, 5, 4) + bytes(600)), "image.nii.gz"))
simple("analyze-7.5", lambda: image_is(edited(packed(scan()), magic=b"")))
simple("nifti-in-two-files", lambda: image_is(edited(packed(scan()), magic=b"ni1")))
simple("folder-without-dicom", lambda: image_is(None, "series"))
simple("cut-in-the-header", lambda: image_is(packed(scan())[:200]))
simple("cut-in-the-voxels", lambda: image_is(packed(scan())[:-1]))
simple("gzip-twice", lambda: image_is(gzip.compress(gzip.compress(packed(scan()))), "image.nii.gz"))
simple("gzip-cut", lambda: image_is(gzip.compress(packed(scan()))[:-30], "image.nii.gz"))


@rule("gzip-checksum-wrong")
def _checksum() -> Files:
    content = bytearray(gzip.compress(packed(scan())))
    content[-6] ^= 0xFF
    return image_is(bytes(content), "image.nii.gz")


@rule("gzip-flipped-in-the-middle")
def _flipped() -> Files:
    content = bytearray(gzip.compress(packed(scan())))
    for at in range(len(content) // 2, len(content) // 2 + 8):
        content[at] ^= 0xA5
    return image_is(bytes(content), "image.nii.gz")


simple("gzip-of-nothing", lambda: image_is(gzip.compress(b""), "image.nii.gz"))
simple("gzip-bomb", lambda: image_is(gzip.compress(packed(scan()) + bytes(1 << 25), 1), "image.nii.gz"))
simple("gzip-with-garbage-after", lambda: image_is(gzip.compress(packed(scan())) + b"garbage", "image.nii.gz"))
simple("another-volume-after-the-voxels", lambda: image_is(packed(scan()) + bytes(3 << 20)))
simple("text-mode-transfer", lambda: image_is(packed(scan()).replace(b"n+1\x00", b"n+1\r")))


@rule("bytes-of-dim-swapped")
def _swapped() -> Files:
    content = packed(scan())
    dims = np.frombuffer(content[40:56], "<i2").byteswap().tobytes()
    return image_is(content[:40] + dims + content[56:])


# ---------------------------------------------------------------- broken: the header
simple("magic-wrong", lambda: header_is(magic=b"xyz"))
simple("dim-zero-axis", lambda: header_is(dim=[3, 6, 0, 4, 1, 1, 1, 1]))
simple("dim-negative", lambda: header_is(dim=[3, 6, -5, 4, 1, 1, 1, 1]))
simple("dim-count-zero", lambda: header_is(dim=[0, 6, 5, 4, 1, 1, 1, 1]))
simple("dim-count-nine", lambda: header_is(dim=[9, 6, 5, 4, 1, 1, 1, 1]))
simple("dims-larger-than-memory", lambda: header_is(dim=[3, 32767, 32767, 32767, 1, 1, 1, 1]))


@rule("dims-overflow-64-bits")
def _overflow() -> Files:
    content = bytes(nib.Nifti2Image(scan(), AFFINE).to_bytes())
    return image_is(poke(content, 16, "<8q", 3, 1 << 33, 1 << 31, 4, 1, 1, 1, 1))


simple("two-dimensional", lambda: image_is(packed(scan()[0])))
simple("single-slice", lambda: image_is(packed(scan()[:, :, :1])))
simple("time-series", lambda: array_is(np.stack([scan(i) for i in range(5)], axis=-1)))
simple(
    "channels-first",
    lambda: Files({"both.nii": packed(np.stack([scan(1), scan(2)]))}, packed(drawing()), data=TWO),
)
simple("vectors", lambda: array_is(np.stack([scan(i) for i in range(3)], axis=-1)[..., None, :]))
simple("dtype-complex", lambda: array_is(scan().astype(np.complex64)))
simple("dtype-rgb", lambda: image_is(edited(packed(scan()), datatype=128, bitpix=24) + bytes(400)))
simple("dtype-unknown", lambda: image_is(edited(packed(scan()), datatype=9999)))
simple("dtype-one-bit", lambda: image_is(edited(packed(scan()), datatype=1, bitpix=1)))
simple("voxels-start-at-nan", lambda: image_is(edited(packed(scan()), vox_offset=np.nan)))
simple("voxels-start-below-zero", lambda: image_is(edited(packed(scan()), vox_offset=-352)))
simple("voxels-start-in-the-header", lambda: image_is(edited(packed(scan()), vox_offset=100)))
simple("voxels-start-beyond-the-end", lambda: image_is(edited(packed(scan()), vox_offset=100000)))
simple("slope-infinite", lambda: image_is(edited(packed(scan()), scl_slope=np.inf)))
simple("intercept-nan", lambda: image_is(edited(packed(scan()), scl_slope=2, scl_inter=np.nan)))
simple("orientation-unknown", lambda: header_is(sform_code=0, qform_code=0))
simple("form-codes-unknown", lambda: header_is(sform_code=77, qform_code=-3))
simple("affine-nan", lambda: header_is(srow_y=[0, np.nan, 0, 0]))
simple("affine-infinite", lambda: header_is(qform_code=0, srow_z=[0, 0, np.inf, 0]))
simple("affine-singular", lambda: header_is(qform_code=0, srow_z=[1, 0, 0, 0]))
simple("affine-of-zeros", lambda: header_is(srow_x=[0] * 4, srow_y=[0] * 4, srow_z=[0] * 4))
simple("quaternion-impossible", lambda: header_is(sform_code=0, quatern_b=0.9, quatern_c=0.9, quatern_d=0.9))
simple("qform-only-pixdim-zero", lambda: header_is(sform_code=0, pixdim=[1, 1, 0, 1, 0, 0, 0, 0]))
simple("qform-only-pixdim-negative", lambda: header_is(sform_code=0, pixdim=[1, 1, -1, 1, 0, 0, 0, 0]))
simple("qform-only-qfac-odd", lambda: header_is(sform_code=0, pixdim=[0.5, 1, 1, 1, 0, 0, 0, 0]))
simple("sform-mirrors-qform", lambda: header_is(srow_x=[-1, 0, 0, 3]))
simple("sform-turned-against-qform", lambda: header_is(srow_x=[0, -1, 0, 0], srow_y=[1, 0, 0, 0]))
simple("sform-turned-by-40-degrees-against-qform", lambda: header_is(quatern_d=np.sin(np.radians(20))))
simple("sform-turned-by-ten-degrees-against-qform", lambda: header_is(quatern_b=np.sin(np.radians(5))))
simple(
    "sform-and-qform-of-two-templates",
    lambda: header_is(sform_code=4, qform_code=3, quatern_d=np.sin(np.radians(20))),
)
simple("sform-and-qform-of-other-sizes", lambda: header_is(pixdim=[1, 1, 1, 2, 0, 0, 0, 0]))
simple("pixdim-contradicts-sform", lambda: header_is(qform_code=0, pixdim=[1, 1, 1, 2, 0, 0, 0, 0]))
simple("spacing-below-a-hundredth-mm", lambda: both(np.diag([1e-3, 1e-3, 1e-3, 1])))
simple("spacing-of-half-a-metre", lambda: both(np.diag([500.0, 500, 500, 1])))
simple("slices-twenty-times-the-studys", lambda: both(np.diag([1.0, 1, 20, 1])))
simple("units-say-metre-numbers-say-mm", lambda: in_units(1, 1.0))
simple("origin-beyond-the-precision-of-floats", lambda: both(moved(1e18, 0, 0)))
simple("shear-of-forty-degrees", lambda: both(sheared(float(np.sin(np.radians(40)))), qform=0))


@rule("field-of-view-of-nearly-a-metre-each-way")
def _metre() -> Files:
    affine = np.diag([15.0, 15, 15, 1])
    return Files({"image.nii": packed(scan(shape=(60, 60, 60)), affine)}, packed(drawing((60, 60, 60)), affine))


# ---------------------------------------------------------------- broken: the image
def with_voxel(value: float) -> Files:
    array = scan().astype(np.float32)
    array[1, 2, 3] = value
    return array_is(array)


simple("voxel-nan", lambda: with_voxel(np.nan))
simple("voxel-infinite", lambda: with_voxel(np.inf))
simple("voxel-minus-infinite", lambda: with_voxel(-np.inf))
simple("every-voxel-nan", lambda: array_is(np.full(SHAPE, np.nan, dtype=np.float32)))
simple("constant", lambda: array_is(np.full(SHAPE, 42, dtype=np.int16)))
simple("all-zero", lambda: array_is(np.zeros(SHAPE, dtype=np.int16)))
simple("sentinel-of-3e38", lambda: with_voxel(-3.4e38))
simple("float64-beyond-float32", lambda: array_is(scan().astype(np.float64) * 1e300))
simple("slope-overflows", lambda: image_is(edited(packed(scan()), scl_slope=3e38)))
simple("image-is-a-label-map", lambda: array_is(drawing()))


# ---------------------------------------------------------------- broken: the label map
def with_label(value: float) -> Files:
    labels = drawing().astype(np.float32)
    labels[0, 0, 0] = value
    return label_is(packed(labels))


simple("label-value-unknown", lambda: with_label(3))
simple("label-value-255", lambda: label_is(packed(drawing() * 255)))
simple("label-negative", lambda: with_label(-1))
simple("label-fraction", lambda: with_label(0.5))
simple("label-nan", lambda: with_label(np.nan))
simple("label-scaled-to-one", lambda: label_is(edited(packed(drawing()), scl_slope=1 / 255)))
simple("label-is-the-image", lambda: label_is(packed(scan())))
simple(
    "label-value-not-in-the-map",
    lambda: label_is(packed(np.array([0, 17, 99], dtype=np.int16)[drawing()]), label_map=((0, 0), (17, 1), (53, 2))),
)
simple("label-cropped", lambda: label_is(packed(drawing()[1:])))
simple("label-moved-by-five-mm", lambda: label_is(packed(drawing(), moved(5, 0, 0))))
simple("label-mirrored", lambda: label_is(packed(drawing(), AFFINE * np.array([[-1], [1], [1], [1]]))))
simple("label-lost-its-affine", lambda: label_is(packed(drawing(), np.eye(4))))
simple("label-with-two-volumes", lambda: label_is(packed(np.stack([drawing()] * 2, axis=-1))))
simple("label-complex", lambda: label_is(packed(drawing().astype(np.complex64))))
simple("label-cut-short", lambda: label_is(packed(drawing())[:-7]))
simple("label-orientation-unknown", lambda: label_is(packed(drawing(), sform=0, qform=0)))
simple("label-missing", lambda: label_is(None))


@rule("structures-outside-the-grid")
def _outside() -> Files:
    labels = np.zeros((40, 8, 8), dtype=np.uint8)
    labels[1:4, 2:6, 2:6] = 1
    return Files({"image.nii": packed(scan(shape=labels.shape))}, packed(labels))


# ---------------------------------------------------------------- broken: the channels
simple("channel-of-another-shape", lambda: two(packed(scan(2, shape=(6, 5, 5)))))


@rule("channel-moved")
def _channel_moved() -> Files:
    return two(packed(scan(2), moved(0, 4, 0)))


simple("channels-identical", lambda: two(packed(scan(1))))
simple("channel-cut-short", lambda: two(packed(scan(2))[:-9]))
