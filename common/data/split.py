"""Deal a dataset's cases to hospitals, public volumes, public label maps, validation and test: by seed, on record.

Every case goes to exactly one place, and every patient with all scans. Public label maps are of other cases than public
images, so that no pair of the two is public. Cases of one hospital stay with that hospital's site where the dataset
says so; otherwise patients are dealt at random. Refuses counts the dataset cannot fill and a directory that already
holds something.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path

import numpy as np

from common.canonical import sha256_file
from common.data.msd import Case, Dataset, Problem, write_dataset
from common.errors import InvalidInput

SPLIT_SCHEMA = 1


@dataclass(frozen=True, slots=True)
class SplitCounts:
    """How many cases go where; the hospitals share the rest. ``hospitals`` None: as many as the dataset names."""

    hospitals: int | None = None
    public_images: int = 24
    label_maps: int = 12
    validation: int = 8
    test: int = 16

    def __post_init__(self) -> None:
        for name in ("public_images", "label_maps", "validation", "test"):
            if getattr(self, name) < 0:
                raise InvalidInput(name.replace("_", " "), value=getattr(self, name), limit="0 or more")
        if self.hospitals is not None and self.hospitals < 1:
            raise InvalidInput("hospitals", value=self.hospitals, limit="1 or more")

    @property
    def set_aside(self) -> int:
        return self.public_images + self.label_maps + self.validation + self.test


@dataclass(frozen=True, slots=True)
class Split:
    """Where each case went."""

    seed: int
    sites: dict[str, tuple[Case, ...]]
    public_images: tuple[Case, ...]
    label_maps: tuple[Case, ...]
    validation: tuple[Case, ...]
    test: tuple[Case, ...]
    problems: tuple[Problem, ...] = ()


def plan_split(dataset: Dataset, counts: SplitCounts, *, seed: int) -> Split:
    """Decide where every labelled case goes; opens each file only to hash it.

    A scan that is there twice under two names is used once and reported. What is set aside is taken from the hospitals
    in turn. All scans of a patient go to one place, so a part may hold a few more cases than asked for.
    Raises InvalidInput where the cases do not suffice or hospitals do not match.
    """
    cases, repeated = _distinct(sorted(dataset.labelled, key=lambda case: case.id))
    named = {case.hospital for case in cases}
    by_hospital = None not in named and bool(named)
    if by_hospital and counts.hospitals not in (None, len(named)):
        raise InvalidInput(
            "hospitals", value=counts.hospitals, limit=f"the {len(named)} the dataset names", remedy="leave it out"
        )
    if not by_hospital and counts.hospitals is None:
        raise InvalidInput("number of hospitals is missing", remedy="give --hospitals: this dataset names none")
    hospitals = len(named) if by_hospital else counts.hospitals or 0
    if len(cases) < counts.set_aside + hospitals:
        raise InvalidInput(
            "usable labelled cases",
            value=len(cases),
            limit=f"at least {counts.set_aside} to set aside + 1 for each of {hospitals} hospitals",
            remedy="lower the counts or add cases",
        )
    patients: dict[str, list[Case]] = {}
    for case in cases:
        patients.setdefault(case.patient or case.id, []).append(case)
    each = list(patients.values())
    order = [each[i] for i in np.random.default_rng(seed).permutation(len(each))]
    if by_hospital:
        if moved := [name for name, own in patients.items() if len({case.hospital for case in own}) > 1]:
            raise InvalidInput("patient at two hospitals", value=moved[0], remedy="give all scans one hospital")
        groups = [[own for own in order if own[0].hospital == name] for name in sorted(filter(None, named))]
        order = [own for row in zip_longest(*groups) for own in row if own is not None]
    parts = []
    for count in (counts.test, counts.validation, counts.label_maps, counts.public_images):
        part: list[Case] = []
        while len(part) < count and order:
            part += order.pop(0)
        parts.append(tuple(part))
    if by_hospital:
        sites = {
            str(name): tuple(case for own in order for case in own if case.hospital == name)
            for name in sorted(filter(None, named))
        }
    else:
        sites = {
            f"hospital-{i + 1:02d}": tuple(case for own in order[i::hospitals] for case in own)
            for i in range(hospitals)
        }
    empty = [name for name, own in sites.items() if not own]
    if empty:
        raise InvalidInput("hospital without a case left", value=empty[0], remedy="lower the counts or add cases")
    test, validation, label_maps, public_images = parts
    return Split(
        seed=seed,
        sites=sites,
        public_images=public_images,
        label_maps=label_maps,
        validation=validation,
        test=test,
        problems=(*dataset.problems, *repeated),
    )


def write_split(split: Split, dataset: Dataset, out: Path) -> dict[str, object]:
    """Copy every case to its place below ``out`` and record it in ``split.json``, written last; returns the record.

    ``sites/<name>/``, ``validation/`` and ``test/`` are MSD datasets; ``public/images`` holds images without labels,
    ``public/label-maps`` labels without images.
    """
    if out.exists() and any(out.iterdir()):
        raise InvalidInput("directory is not empty", value=str(out), remedy="choose a new one")
    for name, cases in [("validation", split.validation), ("test", split.test), *split.sites.items()]:
        directory = out / "sites" / name if name in split.sites else out / name
        if cases:
            write_dataset(
                directory,
                name=name,
                labels=dataset.labels,
                channels=dataset.channels,
                cases=cases,
                synthetic=dataset.synthetic,
            )
    _copy((case.image for case in split.public_images), out / "public" / "images")
    _copy((case.label for case in split.label_maps if case.label), out / "public" / "label-maps")
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
        "problems": [{"case": problem.case, "reason": problem.reason} for problem in split.problems],
    }
    (out / "split.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    return record


def private_label_hashes(record: Path) -> frozenset[str]:
    """SHA-256 of every label map that ``split.json`` gave to a site, validation or test: none may shape a codec."""
    try:
        document = json.loads(record.read_text(encoding="utf-8"))
        parts = [document["validation"], document["test"], *document["sites"].values()]
        return frozenset(case["label"] for part in parts for case in part)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InvalidInput(
            "record of a split", value=record.name, limit="split.json as `data split` writes it"
        ) from error


def _distinct(cases: list[Case]) -> tuple[list[Case], list[Problem]]:
    """Cases whose image no earlier case has: a scan under two names could be public and private at once."""
    seen: dict[str, str] = {}
    kept, repeated = [], []
    for case in cases:
        content = sha256_file(case.image)
        if content in seen:
            repeated.append(Problem(case.id, f"the same scan as {seen[content]}; to fix: take one of them out"))
        else:
            seen[content] = case.id
            kept.append(case)
    return kept, repeated


def _listed(cases: Iterable[Case]) -> list[dict[str, str]]:
    return [
        {"case": case.id, "image": sha256_file(case.image), "label": sha256_file(case.label)}
        for case in cases
        if case.label is not None
    ]


def _copy(files: Iterable[Path], directory: Path) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    for file in files:
        shutil.copyfile(file, directory / file.name)
