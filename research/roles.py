"""Decides which role each case plays in a utility benchmark.

A case is private, a public image, a public label map, a public image with its label map, or held out for evaluation.
The benchmarks use it. Cases are assigned as by `consilium data split`, with one fold of the patients held out for each
seed. No case plays two roles. The label of a public image and the image of a public label map are never used, except
that labels decoded for public images are scored at the end, for the table alone. It refuses a dataset too small for the
roles, and scans that cannot be read.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from jaxtyping import Float, UInt8

from client.data.layouts import AUTO, match_study, named_dataset, open_dataset
from common.config import DataConfig
from common.data.dataset import Case, Dataset
from common.data.grid import MOST_VOXELS, Triple, choose_both, choose_grid
from common.data.split import Split, SplitCounts, plan_split, with_sites
from common.data.volume import load_example
from common.errors import InvalidInput
from research.reports import DEVELOPMENT, part_of

HOSPITALS = 8
"""Number of hospitals if neither the data nor an option states it."""

ROTATIONS = 5


@dataclass(frozen=True, slots=True, eq=False)
class Cases:
    """Images and label maps of the same cases, row by row.

    Attributes:
        images: Float array [n, c, x, y, z].
        labels: Uint8 array [n, x, y, z].
        patients: Name of each case's patient; empty if every case is another patient's.
    """

    images: Float[np.ndarray, "n c x y z"]
    labels: UInt8[np.ndarray, "n x y z"]
    patients: tuple[str, ...] = ()

    def __getitem__(self, rows: np.ndarray) -> Cases:
        names = tuple(np.array(self.patients)[rows].tolist()) if self.patients else ()
        return Cases(self.images[rows], self.labels[rows], names)

    def __len__(self) -> int:
        return len(self.images)


@dataclass(frozen=True, slots=True, eq=False)
class CaseRoles:
    """The cases by role.

    Attributes:
        private: The cases of each hospital.
        public: Public cases of which only the images are used.
        maps: Public cases of which only the label maps are used.
        held_out: Cases that students are scored on.
        paired: Public cases of which images and label maps are both used; None if there are none.
        sites: Names of the hospitals.
        held_out_sites: The hospital of each held-out case, if the dataset names any.
    """

    private: tuple[Cases, ...]
    public: Cases
    maps: Cases
    held_out: Cases
    paired: Cases | None = None
    sites: tuple[str, ...] = ()
    held_out_sites: tuple[str, ...] = ()

    @property
    def parts(self) -> tuple[Cases, ...]:
        """The cases of every role, in a fixed order."""
        paired = () if self.paired is None else (self.paired,)
        return (*self.private, self.public, self.maps, self.held_out, *paired)

    @property
    def pooled(self) -> Cases:
        """The cases of all hospitals together, without patients' names."""
        images, labels = ([getattr(site, what) for site in self.private] for what in ("images", "labels"))
        return Cases(np.concatenate(images), np.concatenate(labels))


@dataclass(frozen=True, slots=True)
class BenchData:
    """A benchmark's dataset on disk, in any layout, and the number of cases in each role.

    Attributes:
        data: The dataset.
        counts: Number of cases in each role. With ``counts.label_maps`` 0 the public label maps are those of the public
            images, as in Fay et al. 2021; even then no image is used together with its own label map.
        layout: The dataset's layout; recognised by default.
        sites: Table that names the hospital of every case. Without it, cases are assigned to hospitals at random if
            ``counts`` has the number of hospitals; otherwise the dataset names each case's hospital.
        test: A second dataset to score on, in place of a fold.
        labels: Names of the labels, if the dataset has none or others are wanted.
        channels: Names of the channels, if the dataset has none or others are wanted.
        tested: Number of cases to score on, chosen at random for each seed, in place of a fold.
        paired_from: The hospital whose cases are the public pairs; its other cases are not used. If empty, the pairs
            come from all hospitals.
        scored: Part of the patients (:func:`~research.reports.part_of`) that students are scored on; the others may
            play any other role.
    """

    data: Path
    counts: SplitCounts
    layout: str = AUTO
    sites: Path | None = None
    test: Path | None = None
    labels: tuple[str, ...] = ()
    channels: tuple[str, ...] = ()
    tested: int = 0
    paired_from: str = ""
    scored: str = DEVELOPMENT

    def read(self) -> Dataset:
        """Return the dataset's index; no scan is opened."""
        dataset = named_dataset(self.data, layout=self.layout, labels=self.labels, channels=self.channels)
        if self.sites is not None:
            return with_sites(dataset, self.sites)
        if self.counts.hospitals is None:
            return dataset
        return replace(dataset, cases=tuple(replace(case, hospital=None) for case in dataset.cases))

    def split(self, dataset: Dataset, *, seed: int) -> Split:
        """Return the assignment of cases to roles for a seed, which also chooses the fold that is held out.

        Args:
            dataset: The result of :meth:`read`.
            seed: The seed.
        """
        counts = replace(self.counts, validation=0, test=self.tested)
        folds = None if self.test is not None or self.tested else ROTATIONS
        paired: tuple[Case, ...] = ()
        if self.paired_from:
            dataset, paired = self._one_publishes(dataset, seed=seed)
            counts = replace(counts, paired=0)
        split = plan_split(dataset, counts, seed=seed, folds=folds, tests=self._scores)
        split = replace(split, paired=paired or split.paired)
        return split if counts.label_maps else replace(split, label_maps=split.public_images)

    def names(self) -> Iterator[str]:
        """Yield the names of all patients that may be scored, during development or in a report."""
        where = self.read() if self.test is None else open_dataset(self.test, layout=self.layout)
        return (case.patient or case.id for case in where.labelled)

    def _one_publishes(self, dataset: Dataset, *, seed: int) -> tuple[Dataset, tuple[Case, ...]]:
        """Return the dataset without hospital ``paired_from``, and the pairs drawn from that hospital's cases."""
        own = [case for case in dataset.labelled if case.hospital == self.paired_from]
        if not self.counts.paired:
            raise InvalidInput(
                "--paired-from", value=self.paired_from, limit="only with --paired", remedy="give --paired N"
            )
        if len(own) < self.counts.paired:
            raise InvalidInput(
                f"labelled cases of {self.paired_from}",
                value=len(own),
                limit=f"at least {self.counts.paired}, the number of pairs",
                remedy="give a smaller --paired, or name a hospital with at least that many labelled cases",
            )
        drawn = np.random.default_rng([2, seed]).permutation(len(own))[: self.counts.paired]
        others = tuple(case for case in dataset.cases if case.hospital != self.paired_from)
        return replace(dataset, cases=others), tuple(own[row] for row in sorted(drawn))

    def _scores(self, name: str) -> bool:
        return part_of(name) == self.scored

    def study_data(
        self,
        *,
        grid: tuple[int, int, int] | None = None,
        spacing_mm: Triple | None = None,
    ) -> DataConfig:
        """Return the data configuration of a study about this dataset.

        Args:
            grid: Grid in voxels; default: from the first seed's public label maps.
            spacing_mm: Voxel spacing; default: from the same maps.
        """
        dataset = self.read()
        maps = [case.label for case in self.split(dataset, seed=0).label_maps if case.label is not None]
        if spacing_mm is None:
            spacing_mm = choose_both(maps, most=MOST_VOXELS if grid is None else math.inf)[0]
        return DataConfig(
            labels=dataset.labels,
            spacing_mm=spacing_mm,
            grid=grid or choose_grid(maps, spacing_mm=spacing_mm),
            channels=dataset.channels,
            regions=dataset.regions,
        )

    def hospitals(self) -> tuple[int, ...]:
        """Return the number of private cases of every site in the first seed's assignment."""
        return tuple(len(cases) for cases in self.split(self.read(), seed=0).sites.values())

    def roles(self, data: DataConfig, *, seed: int) -> CaseRoles:
        """Read the cases of a seed's assignment onto the study's grid, and return them by role.

        Args:
            data: The study's grid and labels.
            seed: The seed.
        """
        split = self.split(self.read(), seed=seed)
        tested: Sequence[Case] = split.test
        if self.test is not None:
            second = match_study(open_dataset(self.test, layout=self.layout), data).labelled
            tested = [case for case in second if self._scores(case.patient or case.id)]
        return CaseRoles(
            private=tuple(on_grid(cases, data) for cases in split.sites.values()),
            public=on_grid(split.public_images, data),
            maps=on_grid(split.label_maps, data),
            held_out=on_grid(tested, data),
            paired=on_grid(split.paired, data) if split.paired else None,
            sites=tuple(split.sites),
            held_out_sites=tuple(case.hospital or "" for case in tested),
        )


def load_cases(directory: Path, data: DataConfig) -> Cases:
    """Return every labelled case of a dataset, on the study's grid.

    Args:
        directory: The dataset.
        data: The study's grid and labels.
    """
    return on_grid(match_study(open_dataset(directory), data).labelled, data)


def on_grid(cases: Sequence[Case], data: DataConfig) -> Cases:
    """Return labelled cases of a dataset that was matched to the study, on its grid.

    Raises:
        InvalidInput: If there are none.
    """
    if not cases:
        raise InvalidInput("labelled cases", value=0, limit="at least one", remedy="give a dataset with label maps")
    examples = [load_example(case, data) for case in cases]
    return Cases(
        np.stack([example.volume.image for example in examples]),
        np.stack([example.label for example in examples]),
        tuple(case.patient or case.id for case in cases),
    )
