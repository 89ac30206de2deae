"""Reads the BIDS layout: ``sub-*/[ses-*/]anat`` with images, and label maps ``*_dseg`` there or among the derivatives.

* A case is a session, or a subject without sessions. A patient is a subject.
* A contrast is named by the file's suffix (``T1w``, ``T2w``, ``FLAIR``), with ``ce-`` before it if a contrast agent was
  given.
* Labels are named by a table ``*_dseg.tsv`` or ``dseg.tsv`` with columns ``index`` and ``name``. A table in a subject's
  folder, or whose name states a subject, holds for that subject only. Any other table holds for the dataset.
* If a session has several images of one contrast, or several label maps, the site's choice decides (:func:`chosen`). If
  several label maps remain, the session is a :class:`Problem` and left out. If several images of one contrast remain,
  the session is left out only if the study needs that contrast.

No subject's files change how another subject is read. The module refuses a directory without a case, and tables of the
whole dataset that contradict each other. A contradiction in a subject's own table is a problem of that subject only.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

from common.data.access import absent, closed_error, files_below
from common.data.dataset import Case, Dataset, PatientIdentity, Problem
from common.data.msd import nifti_ending, other_ending
from common.data.patients import read_rows
from common.errors import InvalidInput

_STRAY = "a file in the folder names another subject; to fix: rename the file, or move it to that subject's folder"
_EMPTY = "no image in an anat folder; to fix: put the scan there, or remove the subject's folder"
_OTHER_SCANS = {"dwi", "fmap", "func", "mrs", "perf", "pet"}
_NO_CONTRAST = {"dseg", "mask", "probseg", "defacemask"}


Choice = Mapping[str, Mapping[str, str]]
"""Which of several files to use: contrast (or ``dseg``) → entity → value, as in ``[bids.T1w] acq = "mprage"``."""


@dataclass(frozen=True, slots=True)
class BidsLayout:
    """The BIDS layout, with the site's choice among several files of one contrast."""

    choice: Choice = field(default_factory=dict)
    name: str = "bids"
    says: str = "sub-*/[ses-*/]anat/*.nii.gz, derivatives/…/*_dseg.nii.gz with a table dseg.tsv"

    def matches(self, directory: Path) -> bool:
        """Tell whether the directory has subjects' ``anat`` folders."""
        return any(path.is_dir() for path in directory.glob("sub-*/anat")) or any(
            path.is_dir() for path in directory.glob("sub-*/ses-*/anat")
        )

    def read(self, directory: Path) -> Dataset:
        """Read the dataset's index; no scan is opened.

        Raises:
            InvalidInput: If there is no case, or the dataset's label tables contradict each other.
        """
        found = _files(directory)
        shared_closed = [folder for folder in found.closed if _folder_case(directory, folder) is None]
        if shared_closed and (not found.maps or shared_closed == [directory / "derivatives"]):
            raise closed_error(shared_closed[0])
        left_out = _left_out(directory, found)
        if not found.images and not any(_holds_raw(directory, folder) for folder in found.closed):
            raise InvalidInput("the dataset holds no case", value=str(directory), limit=self.says)
        names = _names(found.tables.get(None, ()))
        known = found.images.keys() | found.maps.keys()
        unlabelled = {case for case, reason in left_out.items() if reason.no_image}
        unlabelled -= found.maps.keys() | found.other_maps
        outcomes = [_case(case, found, self.choice, names) for case in sorted(known - left_out.keys())]
        problems = [Problem(case, reason.text) for case, reason in sorted(left_out.items())]
        return Dataset(
            name=directory.name,
            labels=tuple(names.values()),
            label_values=tuple(names),
            channels=(),
            cases=tuple(one for one in outcomes if isinstance(one, Case)),
            problems=(*problems, *(one for one in outcomes if isinstance(one, Problem))),
            listed=tuple(sorted(found.maps.keys() | left_out.keys() - unlabelled)),
            patients={case: _subject(case) for case in known | left_out.keys()},
            patient_identity=PatientIdentity.SUBJECT,
        )


@dataclass(frozen=True, slots=True)
class _Files:
    """The dataset's files.

    Attributes:
        images: Images by session and contrast.
        maps: Label maps by session.
        tables: Label tables by the session or subject in whose folder they are. A table outside these folders stands
            under the session or subject in its file name, or under None if the name contains neither.
        strays: Sessions or subjects whose folder holds another subject's image or label map.
        closed: Folders that this user may not read.
        other_images: Sessions with an image in another format.
        other_maps: Sessions with a label map in another format.
        empty: Subjects without a functional, diffusion or other non-anatomical scan. If they have no case either, their
            folder is empty.
    """

    images: dict[str, dict[str, list[Path]]]
    maps: dict[str, list[Path]]
    tables: dict[str | None, list[Path]]
    strays: set[str]
    closed: list[Path]
    other_images: set[str]
    other_maps: set[str]
    empty: set[str]


class _Reason(NamedTuple):
    """Why a case is left out, and whether the only reason is that it has no NIfTI image."""

    text: str
    no_image: bool = False


def _files(directory: Path) -> _Files:
    """Find images in the subjects' ``anat`` folders, and label maps and tables there and below ``derivatives``."""
    roots = [root for root in (directory / "derivatives", *directory.glob("sub-*")) if root.is_dir()]
    files, closed = files_below(roots, seen=[directory])
    images: dict[str, dict[str, list[Path]]] = defaultdict(lambda: defaultdict(list))
    maps: dict[str, list[Path]] = defaultdict(list)
    tables: dict[str | None, list[Path]] = defaultdict(list)
    strays, other_images, other_maps = set[str](), set[str](), set[str]()
    empty = {path.name for path in directory.glob("sub-*") if path.is_dir()}
    for path in (*sorted(directory.glob("*dseg.tsv")), *files):
        if path.name.startswith("."):  # such as ._sub-01_T1w.nii.gz, which macOS writes beside a copied file
            continue
        folder = _folder_case(directory, path.parent)
        if path.name.endswith("dseg.tsv"):
            tables[_case_of(path) if folder is None else folder].append(path)
            continue
        if path.parent.name in _OTHER_SCANS and nifti_ending(path.name):
            empty.discard(path.relative_to(directory).parts[0])
        (entities, suffix), case = _entities(path), _case_of(path)
        is_map = "_dseg." in path.name
        is_image = path.parent.name == "anat" and _holds_raw(directory, path.parent) and suffix not in _NO_CONTRAST
        if case is None or not (is_map or is_image):
            continue
        if other_ending(path.name):
            (other_maps if is_map else other_images).add(case)
        if not nifti_ending(path.name):
            continue
        if folder is not None and _subject(folder) != _subject(case):
            strays.add(folder)
        elif is_map:
            maps[case].append(path)
        else:
            images[case][f"ce-{suffix}" if "ce" in entities else suffix].append(path)
    return _Files(images, maps, tables, strays, closed, other_images, other_maps, empty)


def _holds_raw(directory: Path, folder: Path) -> bool:
    """Return whether a folder may hold raw images: a subject's or session's folder, or its ``anat``."""
    return bool(re.fullmatch(r"sub-[^/]*(/ses-[^/]*)?(/anat)?", folder.relative_to(directory).as_posix()))


def _left_out(directory: Path, found: _Files) -> dict[str, _Reason]:
    """Return the cases that cannot be used because of their folders' contents, with the reasons.

    A case cannot be used if its folder contains a file of another subject, if a folder that may contain its images or
    its label map cannot be read, or if its images or its label map exist only in another format than NIfTI. A folder
    without a known case, and a subject's folder without any scan, are reported under the folder's name.
    """
    reasons = dict.fromkeys(found.strays, _Reason(_STRAY))
    for folder in found.closed:
        if _holds_raw(directory, folder) and (case := _folder_case(directory, folder)):
            reasons[case] = _Reason(absent(folder / "image", "case"))
    for kind, others, nifti in (
        ("image", found.other_images, found.images),
        ("label map", found.other_maps, found.maps),
    ):
        reason = _Reason(f"the {kind} is not NIfTI; to fix: convert it to .nii.gz", no_image=kind == "image")
        reasons |= dict.fromkeys(others - nifti.keys() - reasons.keys(), reason)
    left: dict[str, _Reason] = {}
    known = found.images.keys() | found.maps.keys()
    for where, reason in reasons.items():
        left |= dict.fromkeys([case for case in known if where in (case, _subject(case))] or [where], reason)
    for folder in found.closed:
        where_closed = _folder_case(directory, folder)
        for case in found.images.keys() - found.maps.keys() - left.keys():
            if where_closed in (None, case, _subject(case)):
                left[case] = _Reason(absent(folder / "label", "label map"))
    empty = found.empty - {_subject(case) for case in known | left.keys()}
    return left | dict.fromkeys(empty, _Reason(_EMPTY, no_image=True))


def _case(case: str, found: _Files, choice: Choice, shared: Mapping[int, str]) -> Case | Problem:
    """Return a session's case with the files that the site's choice selects, or the reason why it cannot be used."""
    images = tuple(
        (contrast, file)
        for contrast, files in sorted(found.images.get(case, {}).items())
        for file in chosen(files, choice.get(contrast, {}))
    )
    maps = chosen(found.maps.get(case, []), choice.get("dseg", {}))
    if not images:
        remedy = "put the image beside it, or correct [bids] in site.toml"
        return Problem(case, f"a label map without an image; to fix: {remedy}")
    if len(maps) > 1:
        return Problem(case, several("label maps", "dseg", maps))
    if case in found.maps and not maps:
        return Problem(case, "no label map matches [bids.dseg] in site.toml; to fix: correct [bids.dseg]")
    try:
        own = _names([table for where in {_subject(case), case} for table in found.tables.get(where, ())], shared)
    except InvalidInput as error:
        return Problem(case, error.without_value)
    return Case(
        case,
        images[0][1],
        maps[0] if maps else None,
        patient=_subject(case),
        channel_files=images,
        label_names=() if shared else tuple(own.items()),
    )


def chosen(files: Sequence[Path], wanted: Mapping[str, str]) -> list[Path]:
    """Select the files whose names contain the wanted BIDS entities, such as ``acq-mprage``.

    A file with another value of a wanted entity is never selected. A file that lacks a wanted entity is selected only
    if no file has the wanted value of every entity. Numbers are compared as numbers: ``run-01`` is run 1.

    Args:
        files: Files of one contrast.
        wanted: The wanted value of each entity.

    Returns:
        The selected files.
    """
    known = [(path, _entities(path)[0]) for path in files]
    fit = [(path, own) for path, own in known if all(_value(own.get(k, v)) == _value(v) for k, v in wanted.items())]
    exact = [path for path, own in fit if wanted.keys() <= own.keys()]
    return exact or [path for path, _ in fit]


def several(what: str, contrast: str, files: Sequence[Path]) -> str:
    """Describe why a session with several files of one kind is left out, and how the site can choose one of them.

    Args:
        what: The plural noun for these files, such as ``label maps``.
        contrast: The contrast, or ``dseg``.
        files: The files.

    Returns:
        Reason and remedy.
    """
    found = [_entities(path)[0] for path in files]
    keys = sorted({key for one in found for key in one if any(other.get(key) != one[key] for other in found)})
    remedy = (
        f"name the one to use by its {' or '.join(keys)} in [bids.{contrast}] of site.toml"
        if keys
        else "keep only one of them in the folder, or list the cases in a cases.csv"
    )
    return f"several {what} in one session; to fix: {remedy}"


def _value(text: str) -> str:
    return str(int(text)) if re.fullmatch(r"[0-9]{1,9}", text) else text


def _subject(case: str) -> str:
    return case.split("_")[0]


def _entities(path: Path) -> tuple[dict[str, str], str]:
    """Split a file name such as ``sub-01_ses-2_ce-gd_T1w.nii.gz`` into its entities and its suffix."""
    ending = nifti_ending(path.name) or other_ending(path.name)
    stem = path.name.removesuffix(ending) if ending else path.stem
    *pairs, suffix = stem.split("_")
    return dict(pair.split("-", 1) for pair in pairs if "-" in pair), suffix


def _case_of(path: Path) -> str | None:
    entities, _ = _entities(path)
    if "sub" not in entities:
        return None
    return "_".join(f"{key}-{entities[key]}" for key in ("sub", "ses") if key in entities)


def _folder_case(directory: Path, path: Path) -> str | None:
    """Return the subject and session whose folder contains a path, or is the path itself.

    Return ``sub-X_ses-Y``, or ``sub-X`` if the path is in no session's folder; None if it is in no subject's folder.
    """
    parts = path.relative_to(directory).parts
    subject = next((part for part in parts if part.startswith("sub-")), None)
    session = next((part for part in parts if part.startswith("ses-")), None)
    return subject if subject is None or session is None else f"{subject}_{session}"


def _names(tables: Iterable[Path], shared: Mapping[int, str] = MappingProxyType({})) -> dict[int, str]:
    """Return the name of each label value in some tables, sorted by value; empty if they name none.

    If no table names value 0, it is background.

    Args:
        tables: The tables.
        shared: Names of values in the dataset's tables, which these tables must not contradict.

    Raises:
        InvalidInput: If one value has two names.
    """
    names = dict(shared)
    for table in tables:
        for value, name in read_label_table(table).items():
            if names.setdefault(value, name) != name:
                raise InvalidInput(
                    f"label {value} has two names",
                    value=(names[value], name),
                    remedy="use the same name in every dseg.tsv that names this label",
                )
    return dict(sorted(({0: "background"} | names).items())) if names else {}


def read_label_table(path: Path) -> dict[int, str]:
    """Read a BIDS label table (TSV).

    Args:
        path: The table, with columns ``index`` and ``name``.

    Returns:
        Name by value.

    Raises:
        InvalidInput: If an index is not a whole number or occurs twice, or a name is missing.
    """
    names: dict[int, str] = {}
    for line, row in read_rows(path):
        index, name = re.fullmatch(r"(\d{1,9})(\.0+)?", row.get("index", "")), row.get("name", "")
        if index is None or not name or names.setdefault(int(index[1]), name) != name:
            raise InvalidInput(
                f"label table, line {line}",
                value=[path.name, row.get("index", "")],
                limit="columns index (a whole number, none twice) and name",
                remedy="correct the row",
            )
    return names
