"""Tests thousands of damaged files: each is refused or gives finite numbers, and none takes much time or
memory.

The tests do not state which of the two happens, because a flipped bit in an intensity leaves a valid file. They forbid
a crash, a hang, a volume that is not finite, and a label that the study does not have.
"""

from __future__ import annotations

import gzip
import os
import time

import nibabel as nib
import numpy as np
import pytest

from common.data.volume import Volume, volume_from_bytes
from common.errors import InvalidInput
from tests.common.data.corpus import AFFINE, ONE, drawing, label_of, packed, scan

SLOWEST_S = 2.0  # of processor time
HEADER_FIELDS = {40: 16, 70: 4, 76: 32, 108: 12, 123: 1, 252: 4, 256: 24, 280: 48, 344: 4}
"""dim, datatype and bitpix, pixdim, vox_offset and scaling, units, form codes, quaternion and offset, srow, magic."""
VALUES = (0, 1, 2, 7, 127, 128, 255)


def originals() -> list[bytes]:
    nifti_2 = bytes(nib.Nifti2Image(scan(), AFFINE).to_bytes())
    big_endian = nib.Nifti1Header(endianness=">")
    floats = packed(scan().astype(np.float32))
    doubles = packed(scan().astype(np.float64) * 1e-3)
    turned = bytes(nib.Nifti1Image(scan(), AFFINE, big_endian).to_bytes())
    return [packed(scan()), floats, doubles, nifti_2, turned]


def mutated(content: bytes, rng: np.random.Generator) -> bytes:
    """Damage the content in one random way: header, voxels, a cut, a gap, a repeat, or bits of a packed file."""
    raw = bytearray(content)
    match int(rng.integers(7)):
        case 0:
            start = int(rng.choice(list(HEADER_FIELDS)))
            for _ in range(int(rng.integers(1, 5))):
                raw[start + int(rng.integers(HEADER_FIELDS[start]))] = int(rng.choice(VALUES))
        case 1:
            for _ in range(int(rng.integers(1, 9))):
                raw[int(rng.integers(348))] = int(rng.integers(256))
        case 2:
            for _ in range(int(rng.integers(1, 9))):
                raw[int(rng.integers(352, len(raw)))] = int(rng.integers(256))
        case 3:
            del raw[int(rng.integers(len(raw))) :]
        case 4:
            at = int(rng.integers(len(raw)))
            del raw[at : at + int(rng.integers(1, 40))]
        case 5:
            at = int(rng.integers(len(raw)))
            raw[at:at] = raw[at : at + int(rng.integers(1, 40))]
        case _:
            raw = bytearray(gzip.compress(bytes(raw), 1))
            for _ in range(int(rng.integers(1, 5))):
                raw[int(rng.integers(len(raw)))] ^= 1 << int(rng.integers(8))
            if rng.random() < 0.3:
                del raw[int(rng.integers(len(raw))) :]
    return bytes(raw)


def survives(seed: int, count: int) -> tuple[int, int]:
    """Return how many of ``count`` damaged images and of as many label maps were accepted."""
    rng = np.random.default_rng(seed)
    images, drawn = originals(), packed(drawing())
    accepted = [0, 0]
    for number in range(count):
        started = time.process_time()
        content = mutated(images[number % len(images)], rng)
        try:
            volume: Volume = volume_from_bytes(content, ONE)
        except InvalidInput:
            pass
        else:
            accepted[0] += 1
            assert np.isfinite(volume.image).all()
            assert np.isfinite(volume.affine).all()
            assert volume.image.shape == (1, 8, 8, 8)
            assert abs(volume.image).max() > 0
        if number % 4 == 0:
            try:
                label = label_of(mutated(drawn, rng), ONE)
            except InvalidInput:
                pass
            else:
                accepted[1] += 1
                assert label.max() < len(ONE.labels)
        assert time.process_time() - started < SLOWEST_S, f"seed {seed}, file {number}"
    return accepted[0], accepted[1]


@pytest.mark.slow
def test_damaged_files_neither_crash_nor_hang_nor_give_nonsense() -> None:
    images, labels = survives(seed=1, count=400)
    assert 40 < images < 360  # damage of every degree, and files that still read
    assert 10 < labels < 90


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1, 11 if "CONSILIUM_FUZZ" in os.environ else 3))
def test_thousands_of_damaged_files_neither_crash_nor_hang_nor_give_nonsense(seed: int) -> None:
    images, labels = survives(seed, count=2000)
    assert 200 < images < 1800
    assert 50 < labels < 450
