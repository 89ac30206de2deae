"""Which case plays which part in a utility benchmark: private, public image, public label map, evaluation.

Refuses a dataset too small for the parts. Nobody plays two; a public image's label and a public map's image are never
used, except that labels decoded for public images are scored at the end, for the table alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from jaxtyping import Float, UInt8

from common.config import DataConfig
from common.data.msd import read_dataset
from common.data.volume import load_label, load_volume
from common.errors import InvalidInput

PUBLIC_IMAGES = 30
PUBLIC_MAPS = 10
ROTATIONS = 5


@dataclass(frozen=True, slots=True, eq=False)
class Cases:
    """Images [n, c, x, y, z] and label maps [n, x, y, z], row by row of the same patients."""

    images: Float[np.ndarray, "n c x y z"]
    labels: UInt8[np.ndarray, "n x y z"]

    def __getitem__(self, rows: np.ndarray) -> Cases:
        return Cases(self.images[rows], self.labels[rows])

    def __len__(self) -> int:
        return len(self.images)


@dataclass(frozen=True, slots=True, eq=False)
class Roles:
    """``private[k]`` are the cases of hospital k; ``public`` lends its images, ``maps`` its labels, ``held_out`` the
    cases students are scored on."""

    private: tuple[Cases, ...]
    public: Cases
    maps: Cases
    held_out: Cases


def load_cases(directory: Path, data: DataConfig) -> Cases:
    """Every labelled case of an MSD dataset, on the study's grid."""
    listed = [case for case in read_dataset(directory).labelled if case.label is not None]
    if not listed:
        raise InvalidInput("labelled cases", value=0, limit="at least one", remedy="give a directory with labelsTr")
    images = np.stack([load_volume(case.image, data).image for case in listed])
    return Cases(images, np.stack([load_label(case.label, data) for case in listed if case.label is not None]))


def patients_a_site(cases: int, *, hospitals: int, held_out: bool) -> int:
    """Private cases of the smallest site; ``held_out``: a fifth is kept for validation. Refuses to leave one empty."""
    private = cases - (cases // ROTATIONS if held_out else 0) - PUBLIC_IMAGES - PUBLIC_MAPS
    if private < hospitals:
        raise InvalidInput(
            "cases for the benchmark",
            value=cases,
            limit=f"{PUBLIC_IMAGES} public images, {PUBLIC_MAPS} public maps and at least one case a hospital",
        )
    return private // hospitals


def deal_roles(cases: Cases, *, hospitals: int, seed: int, test: Cases | None = None) -> Roles:
    """Deal the cases by a seeded permutation; ``seed`` is also the rotation.

    Without ``test`` a fifth is held out for validation, another fifth for each of five seeds; with it, all cases but
    the public ones are private and ``test`` is what students are scored on.
    """
    count = len(cases)
    order = np.random.default_rng(0).permutation(count)
    fifth = 0 if test is not None else count // ROTATIONS
    first = (seed % ROTATIONS) * fifth
    held_out, rest = order[first : first + fifth], np.concatenate([order[:first], order[first + fifth :]])
    rest = np.random.default_rng([1, seed]).permutation(rest)
    patients_a_site(count, hospitals=hospitals, held_out=test is None)
    private = len(rest) - PUBLIC_IMAGES - PUBLIC_MAPS
    parts = np.split(rest, [private, private + PUBLIC_IMAGES])
    return Roles(
        private=tuple(cases[part] for part in np.array_split(parts[0], hospitals)),
        public=cases[parts[1]],
        maps=cases[parts[2]],
        held_out=cases[held_out] if test is None else test,
    )
