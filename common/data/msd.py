"""The Medical Segmentation Decathlon's dataset layout: read it, write it.

A dataset without a readable ``dataset.json`` is refused. One bad case never stops the rest: a missing file, an entry
that is not understood, a path that leaves the directory or a case listed twice becomes a :class:`Problem`, is left out
of ``cases`` and counted.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path, PurePosixPath

from common.data.dataset import Case, Dataset, Problem, check_labels
from common.data.patients import find_table, with_patients, write_patients
from common.errors import InvalidInput
from common.names import check_regions
from common.reading import MAX_JSON_BYTES, parse_json, read_text

__all__ = ["Case", "Dataset", "Problem", "case_id", "check_labels", "read_dataset", "write_dataset"]

NIFTI_SUFFIXES = (".nii.gz", ".nii")


def nifti_ending(name: str) -> str:
    """The ending of a NIfTI file's name as it is written there, in letters of either case; empty for any other name.

    >>> nifti_ending("SCAN_01.NII.GZ"), nifti_ending("scan.nii"), nifti_ending("scan.mha")
    ('.NII.GZ', '.nii', '')
    """
    suffix = next((suffix for suffix in NIFTI_SUFFIXES if name.lower().endswith(suffix)), "")
    return name[len(name) - len(suffix) :] if suffix else ""


def nifti_files(folder: Path, *, what: str) -> tuple[Path, ...]:
    """The NIfTI files of a folder by name; InvalidInput where there is no such folder, or none in it."""
    if not folder.is_dir():
        raise InvalidInput(what, value=str(folder), limit="a folder that is there")
    found = sorted(p for p in folder.iterdir() if nifti_ending(p.name) and not p.name.startswith("."))
    files = [p for p in found if not p.is_dir()]
    if not files:
        raise InvalidInput(what, value=str(folder), limit="a folder with .nii or .nii.gz files right in it")
    return tuple(files)


def other_files(folder: Path) -> tuple[Problem, ...]:
    """What else lies in a folder of NIfTI files and is left out, hidden files apart, each with why."""
    if not folder.is_dir():
        return ()
    others = (p for p in sorted(folder.iterdir()) if not p.name.startswith("."))
    return tuple(
        Problem(p.name, "a folder, which is not looked into" if p.is_dir() else "not a .nii or .nii.gz file")
        for p in others
        if p.is_dir() or not nifti_ending(p.name)
    )


def case_id(file_name: str) -> str:
    """``imagesTr/patient_001.nii.gz`` → ``patient_001``; other suffixes are refused."""
    name = PurePosixPath(file_name).name
    ending = nifti_ending(name)
    if ending and len(name) > len(ending):
        return name.removesuffix(ending)
    raise InvalidInput("volume file name", value=name, limit="a name ending in .nii.gz or .nii")


class MsdLayout:
    """The Decathlon's layout among the others (:mod:`client.data.layouts`)."""

    name = "msd"
    says = "dataset.json with the lists training and test, imagesTr, labelsTr"

    def matches(self, directory: Path) -> bool:
        return (directory / "dataset.json").is_file()

    def read(self, directory: Path) -> Dataset:
        return read_dataset(directory)


def is_file(path: Path) -> bool:
    """Whether there is such a file; one that cannot be looked for (its name is too long, its folder closed) is not."""
    try:
        return path.is_file()
    except OSError:
        return False


def read_index(directory: Path) -> dict[str, object]:
    """``dataset.json``; InvalidInput where it is missing or no JSON object."""
    path = directory / "dataset.json"
    if not is_file(path):
        raise InvalidInput(
            "no dataset.json in the data directory",
            value=str(directory),
            remedy="give the directory that holds dataset.json, imagesTr and labelsTr",
        )
    text = read_text(path, what="dataset.json", most_bytes=MAX_JSON_BYTES, remedy="save it as JSON in UTF-8")
    limit = "a JSON text in UTF-8"
    document = parse_json(text, what="dataset.json", value=str(path), limit=limit)
    if not isinstance(document, dict):
        raise InvalidInput("dataset.json", value=type(document).__name__, limit="a JSON object")
    return document


def read_dataset(directory: Path) -> Dataset:
    """Read ``dataset.json`` and check that the files it names exist; no volume is opened.

    Patients are those of ``patients.tsv`` or ``patients.csv`` beside it; without one every case is a patient.
    Raises InvalidInput where the directory is no dataset at all: no ``dataset.json``, not JSON, no usable labels or
    channels, no case listed. Everything wrong with a single case is a Problem.
    """
    document = read_index(directory)
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
            problems[name] = Problem(name, "listed twice, so it is not clear which scan is meant; to fix: list it once")
        elif isinstance(outcome, Case):
            cases[name] = outcome
        else:
            problems[name] = outcome
    listed = dict.fromkeys(_entry_name(entry, position) for position, entry in enumerate(training))
    dataset = Dataset(
        name=str(document.get("name") or directory.name),
        labels=labels,
        channels=channels,
        cases=tuple(cases.values()),
        problems=tuple(problems.values()),
        listed=tuple(listed),
        synthetic=document.get("synthetic") is True,
        regions=_regions(document.get("regions", []), labels),
    )
    table = find_table(directory)
    return dataset if table is None else with_patients(dataset, table)


def write_dataset(
    directory: Path,
    *,
    name: str,
    labels: Iterable[str],
    channels: Iterable[str],
    cases: Iterable[Case],
    synthetic: bool = False,
    regions: Iterable[str] = (),
) -> Dataset:
    """Write an MSD dataset: copy each case's files to imagesTr and labelsTr (imagesTs without a label), then the index.

    Where cases say whose scans they are, ``patients.tsv`` says so too. ``synthetic``: Consilium made the cases itself.
    ``regions``: as ``DataConfig.regions`` has them, under a key of Consilium's own.

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
    if synthetic:
        document["synthetic"] = True
    if own := list(regions):
        document["regions"] = own
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "dataset.json").write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    if any(case.patient is not None for case in cases):
        write_patients(directory, cases)
    return read_dataset(directory)


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


def _regions(found: object, labels: tuple[str, ...]) -> tuple[str, ...]:
    if not isinstance(found, list) or not all(isinstance(one, str) for one in found):
        raise InvalidInput("dataset.json: regions", value=found, limit='a list such as ["WT = core + edema"]')
    check_regions(tuple(found), labels)
    return tuple(found)


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
        return name, Problem(
            name, "not understood; to fix: a training entry has image and label, a test entry an image"
        )
    paths: list[Path] = []
    for kind, text in (("image", image), ("label", label)):
        if text is None:
            continue
        relative = PurePosixPath(text)
        if relative.is_absolute() or ".." in relative.parts:
            return name, Problem(name, f"the {kind}'s path leaves the data directory; to fix: put it there")
        if not nifti_ending(text):
            return name, Problem(name, f"the {kind} is not a .nii or .nii.gz file; to fix: convert it to NIfTI")
        if not is_file(directory / relative):
            return name, Problem(name, f"the {kind} file is missing; to fix: put it back, or take the case out")
        paths.append(directory / relative)
    hospital = hospitals.get(name)
    return name, Case(
        id=name,
        image=paths[0],
        label=paths[1] if len(paths) > 1 else None,
        hospital=hospital if isinstance(hospital, str) else None,
    )


def _place(source: Path, directory: Path, folder: str, name: str) -> str:
    suffix = nifti_ending(source.name).lower()
    if not suffix or not source.is_file():
        raise InvalidInput("volume file", value=str(source), limit="an existing .nii or .nii.gz file")
    target = directory / folder / f"{name}{suffix}"
    target.parent.mkdir(parents=True, exist_ok=True)
    if not target.exists() or not target.samefile(source):
        shutil.copyfile(source, target)
    return f"./{folder}/{target.name}"
