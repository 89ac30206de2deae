"""Attack: somebody sends a small file that becomes a large one (a public volume, a teacher's answer, a zip file).

| attack | defence |
|---|---|
| half a megabyte of .nii.gz unpacks to gigabytes | its header limits its voxels and its compression ratio |
| few voxels with a large spacing become many at the study's spacing | voxels after resampling are limited, too |
| a scan that a large machine can read is too large for a small container | little free memory lowers the limit |
| members of an archive share their bytes | the archive is refused if its members' sizes add up to more than its own |
| a DICOM slice unpacks without end, or crashes the library that reads it | its header is checked first |
| a table, a JSON or a TOML text consists of separators only | its values are counted before it is parsed |
"""

from __future__ import annotations

import gzip
import io
import os
import struct
import subprocess
import sys
import time
import zipfile
import zlib
from pathlib import Path

import nibabel as nib
import numpy as np
import pytest

from client.foreign import bring
from common.bundle_archive import from_archive
from common.config import DataConfig
from common.data import dicom, volume
from common.data.dicom import read_series
from common.data.nifti import GZIP_RATIO, VolumeLimits, read_nifti
from common.data.patients import read_table
from common.data.volume import example_from_bytes, load_volume, volume_from_bytes
from common.errors import InvalidInput
from common.reading import parse_json, parse_toml
from tests.attacks.bombs import bomb, codestream, dicom_slice, element, picture, run_lengths
from tests.attacks.costs import peak_bytes
from tests.common.data.corpus import ONE, packed, scan

SECONDS, MEMORY = 1.0, 32 << 20


def refused_cheaply(read: object, match: str) -> None:
    """Check that the call raises InvalidInput within little time and memory."""
    started = time.process_time()

    def run() -> None:
        with pytest.raises(InvalidInput, match=match):
            read()  # type: ignore[operator]

    assert peak_bytes(run) < MEMORY
    assert time.process_time() - started < SECONDS


@pytest.mark.parametrize(
    ("shape", "dtype", "spacing", "match"),
    [
        ((512, 512, 136), "uint8", 1.0, "voxels"),
        ((512, 512, 144), "int16", 1.0, "voxels"),
        ((260, 260, 260), "uint8", 1.0, "compression ratio"),
        ((240, 240, 240), "int16", 1.0, "compression ratio"),
        ((128, 128, 128), "uint8", 4.0, "field of view"),
        ((64, 64, 64), "float64", 8.0, "field of view"),
    ],
)
def test_a_volume_that_unpacks_or_grows_beyond_its_study_is_refused_by_its_header(
    shape: tuple[int, ...], dtype: str, spacing: float, match: str
) -> None:
    content = bomb(shape, dtype, spacing=spacing)
    assert len(content) < 1 << 20
    refused_cheaply(lambda: volume_from_bytes(content, ONE), match)


def test_a_label_map_is_no_larger_than_its_image(tmp_path: Path) -> None:
    content = bomb((256, 256, 256), "uint8", label=True)
    refused_cheaply(lambda: example_from_bytes(packed(scan()), content, ONE), "voxels")


def test_a_header_that_promises_more_than_gzip_packs_is_not_unpacked() -> None:
    whole = gzip.decompress(bomb((64, 64, 64), "uint8"))
    header = bytearray(whole[:352])
    header[40:56] = struct.pack("<8h", 3, 256, 256, 256, 1, 1, 1, 1)
    content = gzip.compress(bytes(header) + whole[352:], 9)
    assert GZIP_RATIO * len(content) < 256**3
    refused_cheaply(lambda: read_nifti(content, channels=1, room=VolumeLimits()), "compression ratio")


def test_a_worker_with_little_memory_refuses_what_a_large_machine_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    large = DataConfig(labels=("background", "a"), spacing_mm=(1, 1, 1), grid=(128, 128, 128))
    monkeypatch.setattr(volume, "free_memory_bytes", lambda: None)
    assert volume.room_for(large).voxels == 1 << 27
    monkeypatch.setattr(volume, "free_memory_bytes", lambda: 512 << 20)
    assert volume.room_for(large).voxels * volume.BYTES_A_VOXEL <= 512 << 20
    content = bomb((256, 256, 256), "uint8")
    refused_cheaply(lambda: volume_from_bytes(content, large), "to fix: give the program more memory")


READ = """
import resource, sys
from common.data.volume import volume_from_bytes
from tests.common.data.corpus import ONE, packed, scan
volume_from_bytes(packed(scan()), ONE)
volume_from_bytes(sys.stdin.buffer.read(), ONE)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10)
"""


@pytest.mark.slow
def test_the_largest_volume_that_is_read_fits_a_worker_of_three_gibibytes() -> None:
    """The volume is incompressible noise, as large as a small study allows. The smallest compose file gives a worker 3
    GiB.
    """
    edge = int(volume.RESAMPLED_VOXELS ** (1 / 3)) - 4
    noise = np.random.default_rng(1).integers(0, 255, (edge, edge, edge), dtype=np.uint8)
    image = nib.Nifti1Image(noise, np.diag([1.004, 1.004, 1.004, 1.0]))
    image.header.set_xyzt_units("mm")
    done = subprocess.run([sys.executable, "-c", READ], input=image.to_bytes(), capture_output=True, check=False)
    assert done.returncode == 0, done.stderr[-500:]
    assert int(done.stdout) < 3 << 10  # MiB


def test_members_of_a_bundle_that_share_their_bytes_are_refused_before_they_are_read() -> None:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as archive:
        archive.writestr("a", bytes(1 << 20))
        entry = archive.infolist()[0]
        for number in range(900):
            twin = zipfile.ZipInfo(f"b{number}")
            twin.CRC, twin.compress_size, twin.file_size = entry.CRC, entry.compress_size, entry.file_size
            twin.header_offset, twin.external_attr, twin.create_system = 0, 0o100644 << 16, 3
            archive.filelist.append(twin)
    refused_cheaply(lambda: from_archive(stream.getvalue()), "at most the size of the archive")


def test_a_teachers_zip_file_fills_no_disk(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "many.zip", "w") as archive:
        archive.writestr("configs/inference.json", "{}")
        for number in range(bring.MAX_BUNDLE_FILES):
            archive.writestr(f"configs/{number}", "")
    with pytest.raises(InvalidInput, match="10000 files"):
        bring._copied(tmp_path / "many.zip", tmp_path / "copied")
    assert not (tmp_path / "copied").exists()


def test_texts_of_nothing_but_separators_are_counted_and_not_read(tmp_path: Path) -> None:
    table = tmp_path / "patients.csv"
    table.write_bytes(b"case_id,patient_id\n" + b"," * (2 << 20))
    refused_cheaply(lambda: read_table(table), "cells of a table")
    many = "[" + "[]," * (1 << 20) + "[]]"
    refused_cheaply(lambda: parse_json(many, what="list"), "values in list")
    refused_cheaply(lambda: parse_toml("a." * (100 << 10) + "a=1", what="names"), "dots in a name")
    refused_cheaply(lambda: parse_toml("x = " + "[" * 9_000 + "]" * 9_000, what="lists"), "lists is not TOML")
    refused_cheaply(lambda: parse_toml("x = 1\n" * (1 << 20), what="lines"), "size of lines")
    refused_cheaply(lambda: parse_json("[" * 500 + "]" * 500, what="list"), "depth of list")


@pytest.mark.parametrize("offset", [1 << 25, 2_000_000_000])
def test_voxels_that_start_gigabytes_behind_the_header_are_not_unpacked(offset: int) -> None:
    """A reader unpacks everything before the voxels: 2 MB of .nii.gz would take 1.9 GB and eight seconds."""
    header = bytearray(gzip.decompress(bomb((8, 8, 8), "int16"))[:352])
    header[108:112] = struct.pack("<f", offset)
    content = gzip.compress(bytes(header) + bytes(1 << 25), 9)
    content += bytes(max(0, offset // GZIP_RATIO - len(content) + 1_000))
    refused_cheaply(lambda: read_nifti(content, channels=1, room=VolumeLimits()), "start of the voxels")


@pytest.mark.parametrize("place", ["link", "pipe"])
def test_a_volume_without_an_end_is_no_file(tmp_path: Path, place: str) -> None:
    path = tmp_path / "scan.nii.gz"
    if place == "link":
        path.symlink_to("/dev/zero")
    else:
        os.mkfifo(path)
    refused_cheaply(lambda: load_volume(path, ONE), "volume is not a regular file")
    refused_cheaply(lambda: read_series(tmp_path), "something other than files")


@pytest.mark.parametrize("padding", [0, 5_000, 1 << 20], ids=["plain", "padded", "far"])
def test_a_deflated_dicom_file_is_refused_unread(tmp_path: Path, padding: int) -> None:
    """A long element may precede the element that names the compression. Unpacked, a file of 1 MB would take 1.1 GB."""
    packer = zlib.compressobj(9, zlib.DEFLATED, -15)
    syntax = b"1.2.840.10008.1.2.1.99"
    version = struct.pack("<HH2sHI", 2, 1, b"OB", 0, padding) + bytes(padding)
    meta = version + struct.pack("<HH2sH", 2, 0x10, b"UI", len(syntax)) + syntax
    group = struct.pack("<HH2sHI", 2, 0, b"UL", 4, len(meta))
    (tmp_path / "a.dcm").write_bytes(
        bytes(128) + b"DICM" + group + meta + packer.compress(bytes(64 << 20)) + packer.flush()
    )
    refused_cheaply(lambda: read_series(tmp_path), "deflated" if padding < 1 << 16 else "header of a DICOM file")


RUN_LENGTH, JPEG, JPEG_2000 = b"1.2.840.10008.1.2.5", b"1.2.840.10008.1.2.4.50", b"1.2.840.10008.1.2.4.90"
DEEP_SEQUENCE = struct.pack("<HH2s2xIHHI", 0x0022, 0x0001, b"SQ", 0xFFFFFFFF, 0xFFFE, 0xE000, 0xFFFFFFFF)
SMALL = {"rows": 64, "columns": 64}
DICOM_BOMBS = {
    "a slice of 3.6 billion pixels": (
        {"rows": 60_000, "columns": 60_000, "pieces": [run_lengths(b"\x81\0" * 4_000)]},
        "voxels",
    ),
    "a slice longer than its pixels": (SMALL | {"pieces": [run_lengths(b"\x81\0" * (1 << 19))]}, "compressed pixels"),
    "thousands of empty pieces": (SMALL | {"pieces": [b""] * 13_000}, "pieces"),
    "a frame of no planes": (SMALL | {"pieces": [run_lengths(b"", planes=0)]}, "cannot be read"),
    "planes outside the frame": (SMALL | {"pieces": [run_lengths(b"\0")[:64]]}, "cannot be read"),
    "a frame without a header": (SMALL | {"pieces": [b"\0\0"]}, "cannot be read"),
    "a large picture in a small slice": (
        SMALL | {"syntax": JPEG_2000, "pieces": [codestream(60_000, 60_000)]},
        "another size",
    ),
    "a large JPEG in a small slice": (SMALL | {"syntax": JPEG, "pieces": [picture(65_500, 65_500)]}, "another size"),
    "sequences without end": (SMALL | {"pieces": [], "more": DEEP_SEQUENCE * 10_000}, "depth"),
    "elements without end": (
        SMALL | {"pieces": [], "more": element(0x00220001, b"US", b"") * 20_000},
        "elements",
    ),
    "two sizes": (
        SMALL | {"pieces": [run_lengths(b"\0")], "more": element(0x00280010, b"US", b"\xff\xff")},
        "size exactly once",
    ),
}


@pytest.mark.parametrize("kind", DICOM_BOMBS)
def test_a_dicom_slice_is_refused_by_its_header_before_a_library_reads_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """Unchecked, 28 MB of run lengths take over 150 s, and a frame of 2 KB without a header crashes the process."""
    monkeypatch.setattr(dicom, "_simpleitk", lambda: pytest.fail("SimpleITK has seen the file"))
    made, match = DICOM_BOMBS[kind]
    for number in (1, 2):
        (tmp_path / f"{number}.dcm").write_bytes(dicom_slice(**({"syntax": RUN_LENGTH, "number": number} | made)))
    with pytest.raises(InvalidInput, match=match):
        read_series(tmp_path)
