"""Splits a dataset's cases into hospitals, public parts, validation and test, by a seed, and records the split.

Called by `consilium data split` and by the demo. Every case goes to exactly one part, with all scans of its patient.
Public label maps come from other cases than public images. Paired cases are the exception: their image and their label
map both become public. If the dataset or a table of sites names hospitals, each case goes to its hospital; otherwise
patients are assigned at random. Refuses counts that the dataset cannot fill, and a directory that is not empty.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import nibabel as nib
import numpy as np

from common.canonical import check_hash, digest, sha256_file
from common.data.copies import voxel_hash
from common.data.msd import Case, Dataset, Problem, read_dataset, write_dataset
from common.data.nifti import read_nifti_file
from common.data.patients import content_hash, read_column
from common.errors import InvalidInput
from common.objects import filling
from common.reading import parse_json, parsing

SPLIT_SCHEMA = 1
_APART = ("public_images", "label_maps", "validation", "test", "paired")
SITES = "sites.csv"
"""Name of the table in a dataset's folder that assigns its cases to real hospitals."""


@dataclass(frozen=True, slots=True)
class SplitCounts:
    """Number of cases of each part of a split. All other cases go to the hospitals.

    Attributes:
        hospitals: Number of hospitals; None for the hospitals that the dataset names.
        public_images: Cases whose image becomes public.
        label_maps: Cases whose label map becomes public.
        validation: Cases for validation.
        test: Cases for testing.
        paired: Cases whose image and label map both become public.

    Raises:
        InvalidInput: If a number is negative, or ``hospitals`` is 0.
    """

    hospitals: int | None = None
    public_images: int = 24
    label_maps: int = 12
    validation: int = 8
    test: int = 16
    paired: int = 0

    def __post_init__(self) -> None:
        for name in _APART:
            if getattr(self, name) < 0:
                raise InvalidInput(name.replace("_", " "), value=getattr(self, name), limit="0 or more")
        if self.hospitals is not None and self.hospitals < 1:
            raise InvalidInput("hospitals", value=self.hospitals, limit="1 or more")

    @property
    def set_aside(self) -> int:
        """Number of cases that go to no hospital."""
        return self.public_images + self.label_maps + self.paired + self.validation + self.test


@dataclass(frozen=True, slots=True)
class Split:
    """The result of a split: the cases of each part."""

    seed: int
    sites: dict[str, tuple[Case, ...]]
    public_images: tuple[Case, ...]
    label_maps: tuple[Case, ...]
    validation: tuple[Case, ...]
    test: tuple[Case, ...]
    paired: tuple[Case, ...] = ()
    problems: tuple[Problem, ...] = ()

    @property
    def cases(self) -> tuple[Case, ...]:
        """Every case of all parts."""
        apart = (getattr(self, part) for part in _APART)
        return tuple(case for part in (*self.sites.values(), *apart) for case in part)


def with_sites(dataset: Dataset, table: Path) -> Dataset:
    """Return the dataset with the hospital of each case, from a table with the columns ``case_id`` and ``site``.

    Args:
        dataset: The dataset.
        table: The table.

    Returns:
        A new dataset.

    Raises:
        InvalidInput: If there is no such table, or a case has no site or two.
    """
    if not table.exists():
        raise InvalidInput(
            "table of sites",
            value=str(table),
            limit="a file with the columns case_id and site",
            remedy="check the path; to state a number of hospitals use --hospitals",
        )
    cases = [case.id for case in dataset.cases]
    sites = read_column(table, "site", cases, what="site", remedy="add a row for every case")
    return replace(dataset, cases=tuple(replace(case, hospital=sites[case.id]) for case in dataset.cases))


def with_own_sites(dataset: Dataset, directory: Path) -> Dataset:
    """Return the dataset with the hospital of each case, from ``sites.csv`` in the dataset's folder.

    Args:
        dataset: The dataset.
        directory: Its folder.

    Returns:
        A new dataset; ``dataset`` itself if the folder has no such table.

    Raises:
        InvalidInput: If a case has no site or two.
    """
    return with_sites(dataset, table) if (table := directory / SITES).exists() else dataset


def plan_split(
    dataset: Dataset,
    counts: SplitCounts,
    *,
    seed: int,
    folds: int | None = None,
    tests: Callable[[str], bool] = lambda name: True,
) -> Split:
    """Decide which part every labelled case goes to.

    A case whose files cannot be read is left out and reported. A scan that occurs under two names is used once and
    reported. The public, validation and test cases are taken from
    every hospital in proportion to its patients; each hospital keeps at least one patient. All scans of a patient go to
    one part, so a part may hold a few more cases than requested.

    Args:
        dataset: The dataset.
        counts: How many cases each part gets.
        seed: Seed of the random order.
        folds: If given, the patients that may be tested, without one patient of each named hospital, are divided into
            this many equal folds, and ``seed`` modulo ``folds`` is the number of the fold to test. Patients left over
            by the division are not tested. ``counts.test`` is ignored.
        tests: Called with a patient's name (or the case's, if it names no patient); returns whether the patient may be
            tested.

    Returns:
        The split.

    Raises:
        InvalidInput: If there are too few cases, a patient is at two hospitals, or the number of hospitals differs from
            those that the dataset names.
    """
    counts = counts if folds is None else replace(counts, test=0)
    cases, left_out = _usable(sorted(dataset.labelled, key=lambda case: case.id))
    named = _named_hospitals(cases, asked=counts.hospitals)
    if not named:
        cases = [replace(case, hospital=None) for case in cases]
    hospitals = len(named) or counts.hospitals or 0
    patients = rest = _patients(cases, by_hospital=bool(named))
    test: list[list[Case]] = []
    if folds is not None:
        order, kept = _in_turn(rest, np.random.default_rng(0))
        tested_on = [own for own in order if tests(_name(own))]
        size = len(tested_on) // folds
        test = tested_on[seed % folds * size :][:size]
        rest = [*(own for own in order if own not in test), *kept]
    fold = sum(map(len, test))
    if len(cases) - fold < counts.set_aside + hospitals:
        raise InvalidInput(
            "usable labelled cases",
            value=len(cases),
            limit=f"at least {counts.set_aside + fold + hospitals}: {counts.set_aside + fold} for the public parts, "
            f"validation and test, and one for each of {hospitals} hospitals",
            remedy="ask for fewer cases in these parts, or add cases",
        )
    order, kept = _in_turn(rest, np.random.default_rng(seed if folds is None else [1, seed]))
    asked = (counts.test, counts.validation, counts.label_maps, counts.public_images, counts.paired)
    tested_on = [own for own in order if tests(_name(own))]
    tested = _taken(tested_on, counts.test)
    order = [own for own in order if own in tested_on or not tests(_name(own))]
    parts = [tested, *(_taken(order, count) for count in asked[1:])]
    if any(len(part) < count for part, count in zip(parts, asked, strict=True)):
        raise InvalidInput(
            "patients for the public parts, validation and test",
            value=len(patients) - hospitals,
            limit=f"enough for {counts.set_aside + fold} cases, while each hospital keeps one patient",
            remedy="ask for fewer cases in these parts, or add cases",
        )
    _, validation, label_maps, public_images, paired = parts
    return Split(
        seed=seed,
        sites=_dealt([*order, *kept], hospitals=named or hospitals),
        public_images=public_images,
        label_maps=label_maps,
        validation=validation,
        test=tested if folds is None else tuple(case for own in test for case in own),
        paired=paired,
        problems=(*dataset.problems, *left_out),
    )


def _named_hospitals(cases: Sequence[Case], *, asked: int | None) -> list[str]:
    """Return the names of the hospitals that the cases name.

    The result is empty if a case names no hospital. It is empty, too, if all cases name the same hospital and ``asked``
    is above 1, because one name cannot divide the cases.

    Refuse another number of named hospitals than ``asked`` (None allows any number). If ``asked`` is None, refuse cases
    that do not all name a hospital.
    """
    named = sorted({case.hospital for case in cases if case.hospital is not None})
    if not all(case.hospital is not None for case in cases) or not named:
        if asked is None:
            raise InvalidInput(
                "number of hospitals is missing",
                remedy=f"give --hospitals, or put a table {SITES} into the dataset's folder",
            )
        return []
    if len(named) == 1 and (asked or 1) > 1:
        return []
    if asked not in (None, len(named)):
        raise InvalidInput(
            "hospitals",
            value=asked,
            limit=f"{len(named)}, which the dataset names: {', '.join(named)}",
            remedy=f"leave out --hospitals; to divide the patients at random, remove {SITES} and the key hospitals of "
            "dataset.json",
        )
    return named


def _patients(cases: Iterable[Case], *, by_hospital: bool) -> list[list[Case]]:
    """Group the cases by patient; refuse a patient at two hospitals."""
    patients: dict[str, list[Case]] = {}
    for case in cases:
        patients.setdefault(case.patient or case.id, []).append(case)
    moved = [name for name, own in patients.items() if len({case.hospital for case in own}) > 1]
    if by_hospital and moved:
        raise InvalidInput(
            "patient at two hospitals", value=moved[0], remedy="assign all scans of the patient to one hospital"
        )
    return list(patients.values())


def _name(own: Sequence[Case]) -> str:
    """Return the name of the patient whose cases these are."""
    return own[0].patient or own[0].id


def _taken(order: list[list[Case]], count: int) -> tuple[Case, ...]:
    """Take the first patients' cases from ``order``, until there are ``count`` cases or no patients left."""
    part: list[Case] = []
    while len(part) < count and order:
        part += order.pop(0)
    return tuple(part)


def _dealt(order: Sequence[list[Case]], *, hospitals: Sequence[str] | int) -> dict[str, tuple[Case, ...]]:
    """Return the cases by site: each patient's named hospital, or numbered hospitals in turn."""
    dealt = (
        {f"hospital-{i + 1:02d}": order[i::hospitals] for i in range(hospitals)}
        if isinstance(hospitals, int)
        else {name: [own for own in order if own[0].hospital == name] for name in hospitals}
    )
    sites = {name: tuple(case for own in each for case in own) for name, each in dealt.items()}
    empty = [name for name, own in sites.items() if not own]
    if empty:
        raise InvalidInput(
            "a hospital would have no case left",
            value=empty[0],
            remedy="ask for fewer cases in these parts, or add cases",
        )
    return sites


def _in_turn(patients: Sequence[list[Case]], draws: np.random.Generator) -> tuple[list[list[Case]], list[list[Case]]]:
    """Return two lists of patients.

    1. The patients in the order in which they are set aside for public data, validation and test. The order is random.
       If the cases name hospitals, the first n patients come from the hospitals in proportion to their sizes, as
       closely as possible for every n.
    2. One patient of each named hospital, who is never set aside.
    """
    drawn = [patients[i] for i in draws.permutation(len(patients))]
    groups: dict[str | None, list[list[Case]]] = {}
    for own in drawn:
        groups.setdefault(own[0].hospital, []).append(own)
    if None in groups:
        return drawn, []
    places = [
        ((place + 0.5) / len(own), str(name), patient)
        for name, own in groups.items()
        for place, patient in enumerate(own[:-1])
    ]
    return [patient for _, _, patient in sorted(places, key=lambda each: each[:2])], [
        own[-1] for own in groups.values()
    ]


def write_split(split: Split, dataset: Dataset, out: Path) -> dict[str, object]:
    """Copy every case to its part below ``out`` and record the split in ``split.json``, which is written last.

    A case with a file for each channel, or with other label numbers, is written as one file with the dataset's numbers.
    ``sites/<name>/``, ``validation/`` and ``test/`` are MSD datasets. So is ``public/paired``, which exists if the
    image and label map of some cases are both public. ``public/images`` holds images without labels,
    ``public/label-maps`` label maps without images.

    Args:
        split: The split.
        dataset: The dataset that was split.
        out: A new or empty directory.

    Returns:
        The record that ``split.json`` holds.

    Raises:
        InvalidInput: If ``out`` is not empty, or a case cannot be written.
    """
    with filling(out), TemporaryDirectory(dir=out, prefix=".") as folder:
        files = Path(folder)
        sites = {name: _all_as_files(cases, files) for name, cases in split.sites.items()}
        apart: dict[str, Any] = {part: _all_as_files(getattr(split, part), files) for part in _APART}
        return _write(replace(split, sites=sites, **apart), dataset, out)


def _write(split: Split, dataset: Dataset, out: Path) -> dict[str, object]:
    places = {f"sites/{name}": cases for name, cases in split.sites.items()}
    places |= {"validation": split.validation, "test": split.test, "public/paired": split.paired}
    for place, cases in places.items():
        directory = out / place
        if cases:
            write_dataset(
                directory,
                name=directory.name,
                labels=dataset.labels,
                channels=dataset.channels,
                cases=cases,
                synthetic=dataset.synthetic,
                regions=dataset.regions,
            )
    _copy({case.id: case.image for case in split.public_images}, out / "public" / "images")
    _copy({case.id: case.label for case in split.label_maps if case.label}, out / "public" / "label-maps")
    record: dict[str, object] = {
        "schema": SPLIT_SCHEMA,
        "dataset": dataset.name,
        "seed": split.seed,
        "counts": {
            "sites": {name: len(cases) for name, cases in split.sites.items()},
            "public_images": len(split.public_images),
            "label_maps": len(split.label_maps),
            "validation": len(split.validation),
            "test": len(split.test),
            "problems": len(split.problems),
        },
        "sites": {name: _listed(cases) for name, cases in split.sites.items()},
        "public_images": [{"case": case.id, "image": sha256_file(case.image)} for case in split.public_images],
        "label_maps": [
            {"case": case.id, "label": sha256_file(case.label)} for case in split.label_maps if case.label is not None
        ],
        "validation": _listed(split.validation),
        "test": _listed(split.test),
        "problems": [problem.to_json() for problem in split.problems],
    }
    if split.paired:
        record["paired"] = _listed(split.paired)
    (out / "split.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    return record


def _all_as_files(cases: Sequence[Case], folder: Path) -> tuple[Case, ...]:
    return tuple(_as_files(case, folder) for case in cases)


def _as_files(case: Case, folder: Path) -> Case:
    """Return the case as one image file and one label map in the dataset's numbers, converting it if needed."""
    if not case.image.is_file():
        raise InvalidInput(
            f"image of {case.id}", value=case.image.name, limit="a NIfTI file", remedy="convert the series"
        )
    remedy = "remove the case, or copy its files again"
    with parsing(f"files of {case.id} cannot be read", limit="NIfTI files of one shape", remedy=remedy):
        return _converted(case, folder)


def _converted(case: Case, folder: Path) -> Case:
    image, label = case.image, case.label
    if len(case.images) > 1 or case.channel_order:
        scans = [nib.load(path) for path in case.images]
        array = np.stack([np.asanyarray(scan.dataobj) for scan in scans], axis=-1)
        if case.channel_order:
            array = array[..., 0][..., list(case.channel_order)]
        image = _saved(array, scans[0].affine, folder / f"{case.id}-image.nii.gz")
    if label is not None and case.label_map:
        drawn = nib.load(label)
        found, numbers = np.asanyarray(drawn.dataobj), dict(case.label_map)
        if strange := sorted(set(np.unique(found).tolist()) - numbers.keys()):
            raise InvalidInput(f"label values of {case.id}", value=strange[:3], limit=str(sorted(numbers)))
        own = np.zeros(found.shape, dtype=np.uint8)
        for value, number in numbers.items():
            own[found == value] = number
        label = _saved(own, drawn.affine, folder / f"{case.id}-label.nii.gz")
    return replace(case, image=image, label=label, channel_files=(), channel_order=(), label_map=())


def without_channel(directory: Path, channel: str) -> Dataset:
    """Remove a channel from every image of an MSD dataset, to imitate a hospital that does not record it.

    Args:
        directory: A dataset that :func:`write_split` wrote; its files are changed.
        channel: Name of the channel.

    Returns:
        The changed dataset.

    Raises:
        InvalidInput: If the channel is unknown or the only one.
    """
    dataset = read_dataset(directory)
    if channel not in dataset.channels or len(dataset.channels) == 1:
        raise InvalidInput(
            "channel to leave out",
            value=channel,
            limit=f"one of {', '.join(dataset.channels)}; the dataset must have at least two channels",
        )
    kept = [place for place, name in enumerate(dataset.channels) if name != channel]
    for case in dataset.cases:
        scan = nib.load(case.image)
        array = np.asanyarray(scan.dataobj)[..., kept]
        _saved(array[..., 0] if len(kept) == 1 else array, scan.affine, case.image)
    return write_dataset(
        directory,
        name=dataset.name,
        labels=dataset.labels,
        channels=[dataset.channels[place] for place in kept],
        cases=dataset.cases,
        synthetic=dataset.synthetic,
        regions=dataset.regions,
    )


def _saved(array: np.ndarray, affine: np.ndarray, path: Path) -> Path:
    nib.save(nib.Nifti1Image(array, affine), path)
    return path


def read_left_out(record: Path) -> tuple[int, tuple[Problem, ...]]:
    """Read from ``split.json`` how many cases the split used, and which it left out.

    Args:
        record: Path of ``split.json``.

    Returns:
        Number of used cases, and one problem for each case left out.

    Raises:
        InvalidInput: If the file is no record of a split.
    """
    with parsing("record of a split", value=record.name, limit="split.json as `data split` writes it"):
        document = parse_json(record.read_bytes(), what="record of a split")
        dealt = [*document["sites"].values(), *(document.get(part, ()) for part in _APART)]
        problems = tuple(Problem(str(one["case"]), str(one["reason"])) for one in document["problems"])
        return sum(map(len, dealt)), problems


def private_label_hashes(record: Path) -> frozenset[str]:
    """Return the hashes of all label maps that a split gave to sites, validation or test. No codec may be fitted on
    these.

    Args:
        record: Path of ``split.json``.

    Returns:
        SHA-256 hashes.

    Raises:
        InvalidInput: If the file is no record of a split.
    """
    with parsing("record of a split", value=record.name, limit="split.json as `data split` writes it"):
        document = parse_json(record.read_bytes(), what="record of a split")
        parts = [document["validation"], document["test"], *document["sites"].values()]
        return frozenset(check_hash(case["label"]) for part in parts for case in part)


def _usable(cases: list[Case]) -> tuple[list[Case], list[Problem]]:
    """Return the readable cases, each scan once, and a problem for every other case.

    A repeated scan could otherwise be public and private at once. Scans are compared by their voxels, because the same
    voxels can be compressed differently.
    """
    seen: dict[str, str] = {}
    kept, problems = [], []
    for case in cases:
        try:
            content = _content(case)
        except InvalidInput as error:
            problems.append(Problem(case.id, str(error)))
            continue
        if content in seen:
            problems.append(Problem(case.id, f"the same scan as {seen[content]}; to fix: remove one of them"))
        else:
            seen[content] = case.id
            kept.append(case)
    return kept, problems


def _content(case: Case) -> str:
    """Return a hash of a case's voxels; refuse a case with a file that cannot be read."""
    if case.label is not None:
        read_nifti_file(case.label, channels=1)
    if case.image.is_dir():
        return content_hash(case.image)
    return digest("scan", [voxel_hash(read_nifti_file(path, channels=None).array) for path in case.images])


def _listed(cases: Iterable[Case]) -> list[dict[str, str]]:
    return [
        {"case": case.id, "image": sha256_file(case.image), "label": sha256_file(case.label)}
        for case in cases
        if case.label is not None
    ]


def _copy(files: Mapping[str, Path], directory: Path) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    for case, file in files.items():
        shutil.copyfile(file, directory / f"{case}{'.nii.gz' if file.name.lower().endswith('.gz') else '.nii'}")
