"""The Medical Segmentation Decathlon's dataset layout: read it, write it.

A dataset without a readable ``dataset.json`` is refused. One bad case never stops the rest: a missing file, an entry
that is not understood, a path that leaves the directory or a case listed twice becomes a :class:`Problem`, is left out
of ``cases`` and counted.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from common.config import DataConfig
from common.errors import InvalidInput

NIFTI_SUFFIXES = (".nii.gz", ".nii")


@dataclass(frozen=True, slots=True)
class Case:
    """One patient's scan: ``id`` is the file name without its suffix, ``label`` is None where nobody drew one.

    ``hospital`` is set only where the dataset says which hospital a case comes from (Consilium's own extra key).
    """

    id: str
    image: Path
    label: Path | None = None
    hospital: str | None = None


@dataclass(frozen=True, slots=True)
class Problem:
    """A case left out: its id and why. Fit for the site's own terminal, not to be sent anywhere."""

    case: str
    reason: str


@dataclass(frozen=True, slots=True)
class Dataset:
    """A dataset on disk. ``labels[i]`` names label value i; ``cases`` and ``problems`` share no id.

    ``listed`` holds every id named for training, good or bad, in the dataset's order: what slots are dealt over.
    """

    name: str
    labels: tuple[str, ...]
    channels: tuple[str, ...]
    cases: tuple[Case, ...]
    problems: tuple[Problem, ...] = ()
    listed: tuple[str, ...] = ()

    @property
    def labelled(self) -> tuple[Case, ...]:
        """The cases with a label map."""
        return tuple(case for case in self.cases if case.label is not None)


def case_id(file_name: str) -> str:
    """``imagesTr/patient_001.nii.gz`` → ``patient_001``; other suffixes are refused."""
    name = PurePosixPath(file_name).name
    for suffix in NIFTI_SUFFIXES:
        if name.endswith(suffix) and len(name) > len(suffix):
            return name.removesuffix(suffix)
    raise InvalidInput("volume file name", value=name, limit="a name ending in .nii.gz or .nii")


def read_dataset(directory: Path) -> Dataset:
    """Read ``dataset.json`` and check that the files it names exist; no volume is opened.

    Raises InvalidInput where the directory is no dataset at all: no ``dataset.json``, not JSON, no usable labels or
    channels, no case listed. Everything wrong with a single case is a Problem.
    """
    path = directory / "dataset.json"
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise InvalidInput(
            "no dataset.json in the data directory",
            value=str(directory),
            remedy="give the directory that holds dataset.json, imagesTr and labelsTr",
        ) from error
    except (OSError, ValueError, RecursionError) as error:
        raise InvalidInput("dataset.json cannot be read", value=str(path), limit="a JSON text in UTF-8") from error
    if not isinstance(document, dict):
        raise InvalidInput("dataset.json", value=type(document).__name__, limit="a JSON object")
    labels = _numbered(document.get("labels"), key="labels")
    if len(labels) < 2:
        raise InvalidInput("dataset.json: labels", value=labels, limit="background and at least one structure")
    channels = _numbered(document.get("modality", document.get("channel_names")), key="modality")
    training, test = document.get("training", []), document.get("test", [])
    if not isinstance(training, list) or not isinstance(test, list) or not training + test:
        raise InvalidInput("dataset.json: no cases", limit='a list under "training" or "test"')
    hospitals = document.get("hospitals", {})
    if not isinstance(hospitals, dict):
        raise InvalidInput("dataset.json: hospitals", value=type(hospitals).__name__, limit="an object")

    cases: dict[str, Case] = {}
    problems: dict[str, Problem] = {}
    for position, entry in enumerate([*training, *test]):
        name, outcome = _read_entry(directory, entry, position=position, hospitals=hospitals)
        if name in cases or name in problems:
            cases.pop(name, None)
            problems[name] = Problem(name, "listed twice, so it is not clear which scan is meant")
        elif isinstance(outcome, Case):
            cases[name] = outcome
        else:
            problems[name] = outcome
    listed = dict.fromkeys(_entry_name(entry, position) for position, entry in enumerate(training))
    return Dataset(
        name=str(document.get("name") or directory.name),
        labels=labels,
        channels=channels,
        cases=tuple(cases.values()),
        problems=tuple(problems.values()),
        listed=tuple(listed),
    )


def write_dataset(
    directory: Path, *, name: str, labels: Iterable[str], channels: Iterable[str], cases: Iterable[Case]
) -> Dataset:
    """Write an MSD dataset: copy each case's files to imagesTr and labelsTr (imagesTs without a label), then the index.

    A file that already lies in its place is left there, so a producer may write volumes first and the index last.
    Returns the dataset as :func:`read_dataset` reads it back. Raises InvalidInput for a missing file.
    """
    cases = sorted(cases, key=lambda case: case.id)
    training: list[dict[str, str]] = []
    test: list[str] = []
    for case in cases:
        if case.label is None:
            test.append(_place(case.image, directory, "imagesTs", case.id))
        else:
            image = _place(case.image, directory, "imagesTr", case.id)
            training.append({"image": image, "label": _place(case.label, directory, "labelsTr", case.id)})
    document: dict[str, object] = {
        "name": name,
        "tensorImageSize": "3D",
        "modality": {str(i): channel for i, channel in enumerate(channels)},
        "labels": {str(i): label for i, label in enumerate(labels)},
        "numTraining": len(training),
        "numTest": len(test),
        "training": training,
        "test": test,
    }
    hospitals = {case.id: case.hospital for case in cases if case.hospital is not None}
    if hospitals:
        document["hospitals"] = hospitals
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "dataset.json").write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    return read_dataset(directory)


def check_labels(dataset: Dataset, data: DataConfig) -> None:
    """Refuse a dataset whose label names or channels are not the study's, letter case aside."""
    if [label.casefold() for label in dataset.labels] != [label.casefold() for label in data.labels]:
        raise InvalidInput(
            "the dataset's labels are not the study's",
            value=dataset.labels,
            limit=", ".join(f"{value} = {label}" for value, label in enumerate(data.labels)),
            remedy="check `labels` in dataset.json against [data] in the study",
        )
    if len(dataset.channels) != len(data.channels):
        raise InvalidInput(
            "the dataset's channels are not the study's", value=dataset.channels, limit=", ".join(data.channels)
        )


def _numbered(table: object, *, key: str) -> tuple[str, ...]:
    """``{"0": "background", "1": "left"}`` → ``("background", "left")``; gaps and repeats are refused."""
    limit = 'an object that numbers names from 0 without a gap, such as {"0": "background", "1": "left"}'
    if not isinstance(table, dict) or not table or not all(isinstance(name, str) for name in table.values()):
        raise InvalidInput(f"dataset.json: {key}", value=table, limit=limit)
    if sorted(table) != sorted(str(i) for i in range(len(table))):
        raise InvalidInput(f"dataset.json: {key}", value=table, limit=limit)
    names = tuple(table[str(i)] for i in range(len(table)))
    if len(set(names)) != len(names):
        raise InvalidInput(f"dataset.json: {key}", value=names, limit="no name twice")
    return names


def _entry_name(entry: object, position: int) -> str:
    image = entry.get("image") if isinstance(entry, dict) else entry
    try:
        return case_id(image) if isinstance(image, str) else f"entry {position + 1}"
    except InvalidInput:
        return f"entry {position + 1}"


def _read_entry(
    directory: Path, entry: object, *, position: int, hospitals: Mapping[str, object]
) -> tuple[str, Case | Problem]:
    name = _entry_name(entry, position)
    image = entry.get("image") if isinstance(entry, dict) else entry
    label = entry.get("label") if isinstance(entry, dict) else None
    if not isinstance(image, str) or (isinstance(entry, dict) and not isinstance(label, str)):
        return name, Problem(name, "not understood: a training entry holds an image and a label, a test entry an image")
    paths: list[Path] = []
    for kind, text in (("image", image), ("label", label)):
        if text is None:
            continue
        relative = PurePosixPath(text)
        if relative.is_absolute() or ".." in relative.parts:
            return name, Problem(name, f"the {kind}'s path leaves the data directory")
        if not text.endswith(NIFTI_SUFFIXES):
            return name, Problem(name, f"the {kind} is not a .nii or .nii.gz file")
        if not (directory / relative).is_file():
            return name, Problem(name, f"the {kind} file is missing")
        paths.append(directory / relative)
    hospital = hospitals.get(name)
    return name, Case(
        id=name,
        image=paths[0],
        label=paths[1] if len(paths) > 1 else None,
        hospital=hospital if isinstance(hospital, str) else None,
    )


def _place(source: Path, directory: Path, folder: str, name: str) -> str:
    suffix = next((s for s in NIFTI_SUFFIXES if source.name.endswith(s)), None)
    if suffix is None or not source.is_file():
        raise InvalidInput("volume file is missing or no NIfTI file", value=str(source))
    target = directory / folder / f"{name}{suffix}"
    target.parent.mkdir(parents=True, exist_ok=True)
    if not target.exists() or not target.samefile(source):
        shutil.copyfile(source, target)
    return f"./{folder}/{target.name}"
