"""Which case plays which part in a utility benchmark: private, public image, public label map, paired, evaluation.

The deal is that of ``consilium data split``, with one fold of the patients held out for every seed. Refuses a dataset
too small for the parts, and scans that cannot be read. Nobody plays two; a public image's label and a public map's
image are never used, except that labels decoded for public images are scored at the end, for the table alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from jaxtyping import Float, UInt8

from client.data.layouts import AUTO, match_study, named_dataset, open_dataset
from common.config import DataConfig
from common.data.dataset import Case, Dataset
from common.data.grid import Triple, choose_both, choose_grid, choose_spacing
from common.data.split import Split, SplitCounts, plan_split, with_sites
from common.data.volume import load_example
from common.errors import InvalidInput
from research.reports import DEVELOPMENT, part_of

HOSPITALS = 8
"""Where neither the data nor anybody says how many."""

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
    """``private[k]`` are the cases of hospital k, which is called ``sites[k]``; ``public`` lends its images, ``maps``
    its labels, ``paired`` both; students are scored on the cases ``held_out``, which are of the hospitals
    ``held_out_sites`` where the dataset names any."""

    private: tuple[Cases, ...]
    public: Cases
    maps: Cases
    held_out: Cases
    paired: Cases | None = None
    sites: tuple[str, ...] = ()
    held_out_sites: tuple[str, ...] = ()

    @property
    def parts(self) -> tuple[Cases, ...]:
        """Every case, part by part."""
        paired = () if self.paired is None else (self.paired,)
        return (*self.private, self.public, self.maps, self.held_out, *paired)


@dataclass(frozen=True, slots=True)
class Source:
    """A benchmark's dataset on disk, in any layout, and how many cases play which part.

    Hospitals are those of ``sites``, a table of every case's; without it as many as counted, dealt at random; else the
    dataset's own. ``test``: a second dataset to score on, in place of a fold; ``tested``: so many cases to score on,
    dealt at random in every seed, in place of a fold. ``labels`` and ``channels``: their names where the dataset has
    none, or others. With ``counts.label_maps`` 0 the public label maps are those of the public images, as in Fay et al.
    2021; no image is used together with its label map. ``scored``: the part of the patients
    (:func:`~research.reports.part_of`) that students are scored on; the others play any other part.
    """

    data: Path
    counts: SplitCounts
    layout: str = AUTO
    sites: Path | None = None
    test: Path | None = None
    labels: tuple[str, ...] = ()
    channels: tuple[str, ...] = ()
    tested: int = 0
    scored: str = DEVELOPMENT

    def read(self) -> Dataset:
        """The dataset's index in its own terms; no scan is opened."""
        dataset = named_dataset(self.data, layout=self.layout, labels=self.labels, channels=self.channels)
        if self.sites is not None:
            return with_sites(dataset, self.sites)
        if self.counts.hospitals is None:
            return dataset
        return replace(dataset, cases=tuple(replace(case, hospital=None) for case in dataset.cases))

    def split(self, dataset: Dataset, *, seed: int) -> Split:
        """The deal of this seed; ``seed`` is also the rotation."""
        counts = replace(self.counts, validation=0, test=self.tested)
        folds = None if self.test is not None or self.tested else ROTATIONS
        split = plan_split(dataset, counts, seed=seed, folds=folds, tests=self._scores)
        return split if counts.label_maps else replace(split, label_maps=split.public_images)

    def names(self) -> Iterator[str]:
        """The names of the patients that may be scored, of both parts."""
        where = self.read() if self.test is None else open_dataset(self.test, layout=self.layout)
        return (case.patient or case.id for case in where.labelled)

    def _scores(self, name: str) -> bool:
        return part_of(name) == self.scored

    def study_data(
        self,
        *,
        grid: tuple[int, int, int] | None = None,
        spacing_mm: Triple | None = None,
    ) -> DataConfig:
        """What a study about this dataset would take; what is left out is read from it, grid and spacing from the first
        seed's public label maps."""
        dataset = self.read()
        maps = [case.label for case in self.split(dataset, seed=0).label_maps if case.label is not None]
        if spacing_mm is None:
            spacing_mm = choose_both(maps)[0] if grid is None else choose_spacing(maps)
        return DataConfig(
            labels=dataset.labels,
            spacing_mm=spacing_mm,
            grid=grid or choose_grid(maps, spacing_mm=spacing_mm),
            channels=dataset.channels,
            regions=dataset.regions,
        )

    def hospitals(self) -> tuple[int, ...]:
        """Private cases of every site, as the first seed deals them."""
        return tuple(len(cases) for cases in self.split(self.read(), seed=0).sites.values())

    def roles(self, data: DataConfig, *, seed: int) -> Roles:
        """The deal's cases on the study's grid."""
        split = self.split(self.read(), seed=seed)
        tested: Sequence[Case] = split.test
        if self.test is not None:
            second = match_study(open_dataset(self.test, layout=self.layout), data).labelled
            tested = [case for case in second if self._scores(case.patient or case.id)]
        return Roles(
            private=tuple(on_grid(cases, data) for cases in split.sites.values()),
            public=on_grid(split.public_images, data),
            maps=on_grid(split.label_maps, data),
            held_out=on_grid(tested, data),
            paired=on_grid(split.paired, data) if split.paired else None,
            sites=tuple(split.sites),
            held_out_sites=tuple(case.hospital or "" for case in tested),
        )


def load_cases(directory: Path, data: DataConfig) -> Cases:
    """Every labelled case of a dataset, on the study's grid."""
    return on_grid(match_study(open_dataset(directory), data).labelled, data)


def on_grid(cases: Sequence[Case], data: DataConfig) -> Cases:
    """Labelled cases of a dataset that was matched to the study, on its grid."""
    if not cases:
        raise InvalidInput("labelled cases", value=0, limit="at least one", remedy="give a dataset with label maps")
    examples = [load_example(case, data) for case in cases]
    return Cases(
        np.stack([example.volume.image for example in examples]), np.stack([example.label for example in examples])
    )
