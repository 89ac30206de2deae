"""Reads and writes datasets in the layout of the Medical Segmentation Decathlon (MSD).

Called by the readers of layouts, by the split, and for synthetic data. Refuses a dataset without a readable
``dataset.json``. One bad case does not stop the rest: a missing file, an invalid entry, a path outside the directory,
or a case listed twice becomes a :class:`Problem`, and the case is left out of ``cases``.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path, PurePosixPath

from common.data.access import absent, check_opens, entries
from common.data.dataset import Case, Dataset, Problem, check_labels
from common.data.patients import PATIENT_TABLES, find_table, with_patients
from common.errors import InvalidInput
from common.names import check_regions
from common.plain import plain
from common.reading import MAX_JSON_BYTES, parse_json, read_text

__all__ = ["Case", "Dataset", "Problem", "case_id", "check_labels", "read_dataset", "write_dataset"]

NIFTI_SUFFIXES = (".nii.gz", ".nii")
_CHANNEL = re.compile(r"(.+)_\d{4}")
"""Name of a channel's file without its ending, in nnU-Net's datasets: the case's name, and the channel's number."""
OTHER_SUFFIXES = (
    *(".nrrd", ".nhdr", ".mha", ".mhd", ".mgz", ".mgh", ".img.gz", ".hdr.gz", ".img", ".hdr"),
    *(".nii.bz2", ".nii.xz", ".nii.zst", ".nii.zip"),
)


def nifti_ending(name: str) -> str:
    """Return the ending of a NIfTI file's name as it is written, in upper or lower case; empty for any other name.

    Args:
        name: A file name.

    Returns:
        ``.nii.gz`` or ``.nii`` in the name's own letters, or an empty string.

    >>> nifti_ending("SCAN_01.NII.GZ"), nifti_ending("scan.nii"), nifti_ending("scan.mha")
    ('.NII.GZ', '.nii', '')
    """
    suffix = next((suffix for suffix in NIFTI_SUFFIXES if name.lower().endswith(suffix)), "")
    return name[len(name) - len(suffix) :] if suffix else ""


def other_ending(name: str) -> str:
    """Return the ending of a volume file in another format than NIfTI, or packed in another way, as it is written.

    Args:
        name: A file name.

    Returns:
        The ending in the name's own letters; empty for any other name.

    >>> other_ending("scan.NRRD"), other_ending("scan.nii.bz2"), other_ending("scan.nii.gz"), other_ending("scan.json")
    ('.NRRD', '.nii.bz2', '', '')
    """
    suffix = next((suffix for suffix in OTHER_SUFFIXES if name.lower().endswith(suffix)), "")
    return name[len(name) - len(suffix) :] if suffix else ""


def nifti_files(folder: Path, *, what: str) -> tuple[Path, ...]:
    """Return the NIfTI files of a folder, sorted by name.

    Args:
        folder: The folder.
        what: Name of the folder in the error.

    Returns:
        At least one file.

    Raises:
        InvalidInput: If the folder does not exist or holds no NIfTI file.
    """
    if not folder.is_dir():
        raise InvalidInput(what, value=str(folder), limit="an existing folder")
    found = sorted(p for p in folder.iterdir() if nifti_ending(p.name) and not p.name.startswith("."))
    files = [p for p in found if not p.is_dir()]
    if not files:
        raise InvalidInput(what, value=str(folder), limit="a folder that directly contains .nii or .nii.gz files")
    return tuple(files)


def other_files(folder: Path) -> tuple[Problem, ...]:
    """Return a problem for everything in a folder that is not a NIfTI file, except hidden files.

    Args:
        folder: The folder.

    Returns:
        One problem for each file or folder; empty if the folder does not exist.
    """
    if not folder.is_dir():
        return ()
    others = (p for p in sorted(folder.iterdir()) if not p.name.startswith("."))
    return tuple(
        Problem(p.name, "a folder; folders are not searched" if p.is_dir() else "not a .nii or .nii.gz file")
        for p in others
        if p.is_dir() or not nifti_ending(p.name)
    )


def case_id(file_name: str) -> str:
    """Return the id of a case from the name of its file.

    Args:
        file_name: Path or name that ends in ``.nii.gz`` or ``.nii``.

    Returns:
        The name without ending and folders.

    Raises:
        InvalidInput: For another ending.

    >>> case_id("imagesTr/patient_001.nii.gz")
    'patient_001'
    """
    name = PurePosixPath(file_name).name
    ending = nifti_ending(name)
    if ending and len(name) > len(ending):
        return name.removesuffix(ending)
    raise InvalidInput("volume file name", value=name, limit="a name ending in .nii.gz or .nii")


class MsdLayout:
    """The Decathlon's layout as an entry of :mod:`client.data.layouts`."""

    name = "msd"
    says = "dataset.json with the lists training and test, imagesTr, labelsTr"

    def matches(self, directory: Path) -> bool:
        """Return whether a directory has this layout.

        Returns:
            True if it holds a ``dataset.json``.
        """
        return (directory / "dataset.json").is_file()

    def read(self, directory: Path) -> Dataset:
        """Read the dataset (:func:`read_dataset`).

        Raises:
            InvalidInput: If ``dataset.json`` is missing or unusable.
        """
        return read_dataset(directory)


def is_file(path: Path) -> bool:
    """Return whether a path is a file; False if the file system refuses the look-up, such as for a name that is too
    long.

    Args:
        path: The path.

    Returns:
        True if it is a file.
    """
    try:
        return path.is_file()
    except OSError:
        return False


def read_index(directory: Path) -> dict[str, object]:
    """Return the contents of ``dataset.json``.

    Args:
        directory: The dataset's directory.

    Returns:
        The parsed JSON object.

    Raises:
        InvalidInput: If the file is missing, too large, or no JSON object.
    """
    path = directory / "dataset.json"
    if not is_file(path):
        raise InvalidInput(
            "no dataset.json in the data directory",
            value=str(directory),
            remedy="give the directory that holds dataset.json, imagesTr and labelsTr",
        )
    text = read_text(path, what="dataset.json", most_bytes=MAX_JSON_BYTES, remedy="save it as JSON in UTF-8")
    limit = "a JSON text in UTF-8"
    remedy = "correct the text at that place; look for a missing or an extra comma"
    document = parse_json(text.lstrip("\ufeff"), what="dataset.json", value=str(path), limit=limit, remedy=remedy)
    if not isinstance(document, dict):
        raise InvalidInput("dataset.json", value=type(document).__name__, limit="a JSON object")
    return document


def read_dataset(directory: Path) -> Dataset:
    """Read ``dataset.json`` and check that the files it names exist. No volume is opened.

    Patients are those of ``patients.tsv`` or ``patients.csv`` beside it. Without such a table every case is a patient.

    Args:
        directory: The dataset's directory.

    Returns:
        The dataset. A fault of a single case is listed in its ``problems``.

    Raises:
        InvalidInput: If there is no ``dataset.json``, it is no JSON object, has no usable labels or channels, or lists
            no case; or if a folder of all its cases cannot be read.
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
        name, outcome = _read_entry(directory, entry, position=position, hospitals=hospitals, channels=channels)
        if name in cases or name in problems:
            cases.pop(name, None)
            problems[name] = Problem(name, "listed twice, so it is not clear which scan is meant; to fix: list it once")
        elif isinstance(outcome, Case):
            cases[name] = outcome
        else:
            problems[name] = outcome
    if not any(case.label for case in cases.values()):
        own = [[one[key] for key in ("image", "label") if key in one] for one in training if isinstance(one, dict)]
        check_opens([directory / text for text in texts if isinstance(text, str)] for texts in own)
    listed = dict.fromkeys(_entry_name(entry, position) for position, entry in enumerate(training))
    dataset = Dataset(
        name=str(document.get("name") or directory.name),
        labels=labels,
        channels=channels,
        cases=tuple(cases.values()),
        problems=tuple(problems.values()),
        listed=tuple(listed),
        unlisted=_unlisted(directory, [*training, *test]),
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
    """Write an MSD dataset: copy each case's files, then write the index.

    Labelled cases go to imagesTr and labelsTr, the others to imagesTs. If cases name patients, ``patients.tsv`` is
    written too. A file that already lies at its destination is kept, so a caller may write volumes first and call this
    last.

    Args:
        directory: Where to write; created if needed.
        name: Name of the dataset.
        labels: Names of the label values, the background first.
        channels: Names of the channels.
        cases: The cases to copy.
        synthetic: True if Consilium made the cases.
        regions: Overlapping structures as in ``DataConfig.regions``, written under a key of Consilium's own.

    Returns:
        The dataset as :func:`read_dataset` reads it back.

    Raises:
        InvalidInput: If a case's file is missing or no NIfTI file.
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
        lines = ["case_id\tpatient_id", *(f"{case.id}\t{case.patient or case.id}" for case in cases)]
        (directory / PATIENT_TABLES[0]).write_text("\n".join(lines) + "\n", encoding="utf-8")
    return read_dataset(directory)


def _unlisted(directory: Path, listed: Iterable[object]) -> tuple[Problem, ...]:
    """Return a problem for each case in imagesTr or labelsTr that no entry names. Hidden files do not count, nor do the
    channels' files (``CASE_0000.nii.gz``) of a listed image.
    """
    texts = [text for entry in listed for text in (entry.values() if isinstance(entry, dict) else (entry,))]
    named = {PurePosixPath(text.replace("\\", "/")).name for text in texts if isinstance(text, str)}
    images, maps = (_stems(directory / folder) for folder in ("imagesTr", "labelsTr"))
    known = {name.removesuffix(nifti_ending(name)) for name in named}
    channels = {name for name in images if (part := _CHANNEL.fullmatch(name)) and part[1] in known - images}
    cases = (images | maps) - known - channels
    reason = "its files are there, but dataset.json does not list it; to fix: list it, or take the files out"
    return tuple(Problem(plain(case), reason) for case in sorted(cases))


def _stems(folder: Path) -> set[str]:
    """Return the names of a folder's NIfTI files without their endings; hidden files and folders are left out."""
    files = [path for path in entries(folder) if not path.name.startswith(".") and not path.is_dir()]
    return {path.name.removesuffix(ending) for path in files if (ending := nifti_ending(path.name))}


def _numbered(table: object, *, key: str) -> tuple[str, ...]:
    """Return the names of a table such as ``{"0": "background", "1": "left"}``, or ``{"background": 0, "left": 1}`` as
    nnU-Net v2 states labels, in the order of their numbers; refuse gaps and repeats.
    """
    limit = (
        'an object that numbers names from 0 without a gap, such as {"0": "background", "1": "left"} or '
        '{"background": 0, "left": 1}'
    )
    if isinstance(table, dict) and all(type(number) is int for number in table.values()):
        pairs = {str(number): name for name, number in table.items()}
        table = pairs if len(pairs) == len(table) else table
    if not isinstance(table, dict) or not table or not all(isinstance(name, str) for name in table.values()):
        raise InvalidInput(f"dataset.json: {key}", value=table, limit=limit)
    if sorted(table) != sorted(str(i) for i in range(len(table))):
        raise InvalidInput(f"dataset.json: {key}", value=table, limit=limit)
    names = tuple(table[str(i)] for i in range(len(table)))
    if len(set(names)) != len(names):
        raise InvalidInput(f"dataset.json: {key}", value=names, limit="each name only once")
    return names


def _regions(found: object, labels: tuple[str, ...]) -> tuple[str, ...]:
    if not isinstance(found, list) or not all(isinstance(one, str) for one in found):
        raise InvalidInput("dataset.json: regions", value=found, limit='a list such as ["WT = core + edema"]')
    check_regions(tuple(found), labels)
    return tuple(found)


def _entry_name(entry: object, position: int) -> str:
    image = entry.get("image") if isinstance(entry, dict) else entry
    try:
        return case_id(image.replace("\\", "/")) if isinstance(image, str) else f"entry {position + 1}"
    except InvalidInput:
        return f"entry {position + 1}"


def _read_entry(
    directory: Path, entry: object, *, position: int, hospitals: Mapping[str, object], channels: tuple[str, ...]
) -> tuple[str, Case | Problem]:
    name = _entry_name(entry, position)
    image = entry.get("image") if isinstance(entry, dict) else entry
    label = entry.get("label") if isinstance(entry, dict) else None
    if not isinstance(image, str) or (isinstance(entry, dict) and not isinstance(label, str)):
        return name, Problem(
            name, "its entry is invalid; to fix: a training entry has image and label, a test entry an image"
        )
    paths: list[Path] = []
    numbered: dict[int, Path] = {}
    for kind, text in (("image", image), ("label", label)):
        if text is None:
            continue
        relative = PurePosixPath(text.replace("\\", "/"))
        if relative.is_absolute() or ".." in relative.parts:
            return name, Problem(name, f"the {kind}'s path leaves the data directory; to fix: put the file there")
        if not nifti_ending(text):
            return name, Problem(name, f"the {kind} is not a .nii or .nii.gz file; to fix: convert it to NIfTI")
        path = directory / relative
        if not is_file(path):
            numbered = _channel_files(path, most=len(channels) + 1) if kind == "image" else {}
            if not numbered:
                return name, Problem(name, absent(path, kind))
        paths.append(path)
    hospital = hospitals.get(name)
    case = Case(
        id=name,
        image=paths[0],
        label=paths[1] if len(paths) > 1 else None,
        hospital=hospital if isinstance(hospital, str) else None,
    )
    return name, case_of_channels(case, numbered, channels) if numbered else case


def _channel_files(image: Path, *, most: int) -> dict[int, Path]:
    """Return the channels' files of an image by channel number, named ``CASE_0000.nii.gz`` as nnU-Net v1 names them."""
    ending = nifti_ending(image.name)
    stem = image.name.removesuffix(ending)
    files = {number: image.with_name(f"{stem}_{number:04d}{ending}") for number in range(most)}
    return {number: file for number, file in files.items() if is_file(file)}


def case_of_channels(case: Case, files: Mapping[int, Path], channels: tuple[str, ...]) -> Case | Problem:
    """Return a case whose channels are separate files.

    Args:
        case: The case; its image is ignored.
        files: The channels' files by channel number.
        channels: Names of the dataset's channels.

    Returns:
        The case with its files in the channels' order; a problem if a channel has no file, or a file no channel.
    """
    missing = [channel for number, channel in enumerate(channels) if number not in files]
    if missing:
        return Problem(case.id, f"the image of channel {missing[0]} is missing; to fix: put it beside the others")
    if len(files) > len(channels):
        return Problem(
            case.id,
            f"more channel files than the {len(channels)} that dataset.json names; to fix: name all channels there",
        )
    own = tuple((channel, files[number]) for number, channel in enumerate(channels))
    return replace(case, image=own[0][1], channel_files=own if len(own) > 1 else ())


def _place(source: Path, directory: Path, folder: str, name: str) -> str:
    suffix = nifti_ending(source.name).lower()
    if not suffix or not source.is_file():
        raise InvalidInput("volume file", value=str(source), limit="an existing .nii or .nii.gz file")
    target = directory / folder / f"{name}{suffix}"
    target.parent.mkdir(parents=True, exist_ok=True)
    if not target.exists() or not target.samefile(source):
        shutil.copyfile(source, target)
    return f"./{folder}/{target.name}"
