"""Makes synthetic brain tumours in BraTS' layout: one raw folder per case, four contrasts, three nested regions.

Called by `consilium data synth`. A whole tumour contains a core with an enhancing rim and a necrotic centre. Each
region shows best in another contrast: oedema in FLAIR and T2, the rim only in T1ce. One case in six has no enhancing
tumour, one in four a second lesion. Voxels outside the brain are 0, as after skull stripping. A case depends only on
the seed and its number. Refuses a directory that already holds something.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import nibabel as nib
import numpy as np
from jaxtyping import Float, UInt8
from scipy.ndimage import gaussian_filter

from common.objects import filling

SHAPE = (32, 32, 32)
SPACING_MM = 4.0
DEAD, OEDEMA, ENHANCING = 1, 2, 3
BRIGHTNESS = {
    "t1n": (1.0, 0.55, 0.8, 0.9),
    "t1c": (1.0, 0.6, 0.85, 2.0),
    "t2w": (1.0, 2.0, 1.6, 1.3),
    "t2f": (1.0, 1.2, 1.9, 1.5),
}
"""Brightness of brain, necrotic core, oedema and enhancing tumour in each contrast."""


def tumour(number: int, *, seed: int) -> tuple[dict[str, Float[np.ndarray, "x y z"]], UInt8[np.ndarray, "x y z"]]:
    """Make one random case with a tumour.

    Args:
        number: Number of the case.
        seed: Seed of the collection.

    Returns:
        Images by BraTS' names of the contrasts, and the label map.
    """
    rng = np.random.default_rng([seed, number])
    place = np.stack(np.meshgrid(*map(np.arange, SHAPE), indexing="ij"))
    middle = np.array(SHAPE)[:, None, None, None] / 2
    wobble = 1.2 * np.stack([_smooth(rng) for _ in range(3)])
    brain = np.linalg.norm((place - middle + wobble) / np.array([14, 15, 13])[:, None, None, None], axis=0) < 1
    labels = np.zeros(SHAPE, np.uint8)
    for _ in range(1 + (number % 4 == 3)):
        centre = middle + rng.uniform(-6, 6, 3)[:, None, None, None]
        far = np.linalg.norm((place - centre + 2 * wobble) * rng.uniform(0.8, 1.25, 3)[:, None, None, None], axis=0)
        outer, inner = rng.uniform(5, 8), rng.uniform(0.45, 0.65)
        labels[far < outer] = OEDEMA
        labels[far < outer * inner] = DEAD if number % 6 == 5 else ENHANCING
        labels[far < outer * inner * 0.6] = DEAD
    labels[~brain] = 0
    contrasts = {}
    for name, levels in BRIGHTNESS.items():
        tissue = np.array(levels)[labels] * (1 + 0.1 * _smooth(rng))
        blurred = gaussian_filter(np.where(brain, tissue, 0), 0.6)
        contrasts[name] = np.where(brain, 500 * np.maximum(blurred + rng.normal(0, 0.12, SHAPE), 0.01), 0)
    return contrasts, labels


def write_tumours(
    out: Path, *, cases: int, seed: int, on_case: Callable[[int], None] = lambda _done: None
) -> tuple[Path, ...]:
    """Write raw BraTS folders of synthetic cases.

    Args:
        out: A new or empty directory.
        cases: Number of cases.
        seed: Seed of the collection.
        on_case: Called with the number of cases written so far.

    Returns:
        The folders.

    Raises:
        InvalidInput: If the directory is not empty.
    """
    with filling(out):
        folders = []
        for number in range(cases):
            folder = out / f"BraTS-GLI-{number:05d}-000"
            folder.mkdir(parents=True)
            contrasts, labels = tumour(number, seed=seed)
            for name, array in {**contrasts, "seg": labels}.items():
                kind = np.uint8 if name == "seg" else np.int16
                image = nib.Nifti1Image(array.astype(kind), np.diag([SPACING_MM] * 3 + [1.0]))
                nib.save(image, folder / f"{folder.name}-{name}.nii.gz")
            folders.append(folder)
            on_case(number + 1)
        return tuple(folders)


def _smooth(rng: np.random.Generator) -> Float[np.ndarray, "x y z"]:
    """Return a smooth random field of mean 0 and standard deviation 1."""
    field = gaussian_filter(rng.normal(size=SHAPE), 4)
    result: np.ndarray = (field - field.mean()) / field.std()
    return result
