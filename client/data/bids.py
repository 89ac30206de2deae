"""Reads the BIDS layout: ``sub-*/[ses-*/]anat`` with images, and label maps ``*_dseg`` there or among the derivatives.

* A case is a session, or a subject without sessions. A patient is a subject.
* A contrast is named by the file's suffix (``T1w``, ``T2w``, ``FLAIR``), with ``ce-`` before it if a contrast agent was
  given.
* Labels are named by a table ``*_dseg.tsv`` or ``dseg.tsv`` with columns ``index`` and ``name``. A table outside all
  subjects' folders holds for the dataset; one in a subject's folder holds for that subject only.
* If a session has several images of one contrast, or several label maps, the site's choice decides (:func:`chosen`). If
  several label maps remain, the session is a :class:`Problem` and left out. If several images of one contrast remain,
  the session is left out only if the study needs that contrast.

No subject's files change how another subject is read. The module refuses a directory without a case, and tables of the
whole dataset that contradict each other. A contradiction in a subject's own table is a problem of that subject only.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from common.data.access import absent, closed_error, files_below, is_closed
from common.data.dataset import Case, Dataset, PatientIdentity, Problem
from common.data.msd import nifti_ending, other_ending
from common.data.patients import read_rows
from common.errors import InvalidInput

_STRAY = "a file in the folder names another subject; to fix: rename the file, or move it to that subject's folder"
_NOT_NIFTI = "the {} is not NIfTI; to fix: convert it to .nii.gz"
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
        """Tell whether the directory has subjects' ``anat`` folders.

        Args:
            directory: The dataset's folder.

        Returns:
            True if it looks like BIDS.
        """
        return any(path.is_dir() for path in directory.glob("sub-*/anat")) or any(
            path.is_dir() for path in directory.glob("sub-*/ses-*/anat")
        )

    def read(self, directory: Path) -> Dataset:
        """Read the dataset's index; no scan is opened.

        Args:
            directory: The dataset's folder.

        Returns:
            The dataset.

        Raises:
            InvalidInput: If there is no case, or the dataset's label tables contradict each other.
        """
        sessions, strays, other_images = _images(directory)
        drawn, tables, hidden, stray_maps, other_maps = _label_maps(directory)
        shared_hidden = [folder for folder in hidden if _folder_case(directory, folder) is None]
        if shared_hidden and (not drawn or shared_hidden == [directory / "derivatives"]):
            raise closed_error(shared_hidden[0])
        closed = _closed(directory)
        unusable = dict.fromkeys(strays | stray_maps, _STRAY)
        unusable |= {case: absent(folder / "image", "case") for case, folder in closed.items()}
        unusable |= dict.fromkeys(other_images - sessions.keys() - unusable.keys(), _NOT_NIFTI.format("image"))
        unusable |= dict.fromkeys(other_maps - drawn.keys() - unusable.keys(), _NOT_NIFTI.format("label map"))
        unlabelled = other_images - sessions.keys() - drawn.keys() - other_maps - strays - stray_maps - closed.keys()
        known = sessions.keys() | drawn.keys()
        left_out = {
            case: reason
            for folder, reason in unusable.items()
            for case in [case for case in known if folder in (case, _subject(case))] or [folder]
        }
        for case in sessions.keys() - drawn.keys() - left_out.keys():
            for folder in hidden:
                if _folder_case(directory, folder) in (None, case, _subject(case)):
                    left_out[case] = absent(folder / "label", "label map")
        if not sessions and not closed:
            raise InvalidInput("the dataset holds no case", limit=self.says)
        shared, own_tables = _of_whom(directory, tables)
        values, labels = _labels(shared)
        cases: list[Case] = []
        problems = [Problem(case, reason) for case, reason in sorted(left_out.items())]
        for case in sorted(known - left_out.keys()):
            images = {
                contrast: files
                for contrast, found in sorted(sessions.get(case, {}).items())
                if (files := chosen(found, self.choice.get(contrast, {})))
            }
            maps = chosen(drawn.get(case, []), self.choice.get("dseg", {}))
            if not images:
                remedy = "put the image beside it, or correct [bids] in site.toml"
                problems.append(Problem(case, f"a label map without an image; to fix: {remedy}"))
            elif len(maps) > 1:
                problems.append(Problem(case, several("label maps", "dseg", maps)))
            elif case in drawn and not maps:
                problems.append(
                    Problem(case, "no label map matches [bids.dseg] in site.toml; to fix: correct [bids.dseg]")
                )
            else:
                own = tuple((contrast, file) for contrast, files in images.items() for file in files)
                try:
                    named = _own_names(_tables_of(case, own_tables), dict(zip(values, labels, strict=True)))
                except InvalidInput as error:
                    problems.append(Problem(case, error.without_value))
                    continue
                label = maps[0] if maps else None
                cases.append(Case(case, own[0][1], label, patient=_subject(case), channel_files=own, label_names=named))
        return Dataset(
            name=directory.name,
            labels=labels,
            label_values=values,
            channels=(),
            cases=tuple(cases),
            problems=tuple(problems),
            listed=tuple(sorted(drawn.keys() | (left_out.keys() - unlabelled))),
            patients={case: _subject(case) for case in known | left_out.keys()},
            patient_identity=PatientIdentity.SUBJECT,
        )


def chosen(files: Sequence[Path], wanted: Mapping[str, str]) -> list[Path]:
    """Select the files whose names contain the wanted BIDS entities, such as ``acq-mprage``.

    A file with another value of an entity is never selected. A file without the entity is selected only if no file has
    it. Numbers are compared as numbers: ``run-01`` is run 1.

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
    """Return the session, or the subject, whose folder a path is or lies in; None if it is outside all subjects'."""
    parts = path.relative_to(directory).parts
    subject = next((part for part in parts if part.startswith("sub-")), None)
    session = next((part for part in parts if part.startswith("ses-")), None)
    return subject if subject is None or session is None else f"{subject}_{session}"


def _is_stray(directory: Path, path: Path, case: str) -> bool:
    folder = _folder_case(directory, path.parent)
    return folder is not None and _subject(folder) != _subject(case)


def _images(directory: Path) -> tuple[dict[str, dict[str, list[Path]]], set[str], set[str]]:
    """Return the image files by session and contrast, the folders' cases that hold another subject's file, and the
    cases with an image in another format.
    """
    found: dict[str, dict[str, list[Path]]] = defaultdict(lambda: defaultdict(list))
    strays: set[str] = set()
    others: set[str] = set()
    for pattern in ("sub-*/anat/sub-*", "sub-*/ses-*/anat/sub-*"):
        for path in sorted(directory.glob(pattern)):
            entities, suffix = _entities(path)
            case = _case_of(path)
            if case is not None and other_ending(path.name) and suffix not in _NO_CONTRAST:
                others.add(case)
            if case is None or not nifti_ending(path.name) or suffix in _NO_CONTRAST:
                continue
            if _is_stray(directory, path, case):
                strays.add(str(_folder_case(directory, path.parent)))
                continue
            found[case][f"ce-{suffix}" if "ce" in entities else suffix].append(path)
    return found, strays, others


def _closed(directory: Path) -> dict[str, Path]:
    """Return the folders of subjects and sessions that this user may not read, which ``glob`` leaves out."""
    patterns = ("sub-*", "sub-*/ses-*", "sub-*/anat", "sub-*/ses-*/anat")
    folders = (folder for pattern in patterns for folder in directory.glob(pattern) if is_closed(folder))
    return {"_".join(part for part in path.relative_to(directory).parts if part != "anat"): path for path in folders}


def _label_maps(directory: Path) -> tuple[dict[str, list[Path]], list[Path], list[Path], set[str], set[str]]:
    """Return the label maps by session, below derivatives or in anat, all label tables, the closed folders, the
    folders' cases that hold another subject's label map, and the cases with a label map in another format.
    """
    found: dict[str, list[Path]] = defaultdict(list)
    strays: set[str] = set()
    others: set[str] = set()
    roots = [root for root in (directory / "derivatives", *directory.glob("sub-*")) if root.is_dir()]
    files, hidden = files_below(roots, seen=[directory])
    for path in files:
        case = _case_of(path)
        if case is None or "_dseg." not in path.name:
            continue
        if other_ending(path.name):
            others.add(case)
        if not nifti_ending(path.name):
            continue
        if _is_stray(directory, path, case):
            strays.add(str(_folder_case(directory, path.parent)))
        else:
            found[case].append(path)
    tables = [*sorted(directory.glob("*dseg.tsv")), *(path for path in files if path.name.endswith("dseg.tsv"))]
    return dict(found), tables, hidden, strays, others


def _of_whom(directory: Path, tables: list[Path]) -> tuple[list[Path], dict[str, list[Path]]]:
    """Separate the dataset's own tables from those in subjects' folders.

    The latter are returned by session, or by subject if they apply to all its sessions.
    """
    shared: list[Path] = []
    own: dict[str, list[Path]] = defaultdict(list)
    for table in tables:
        case = _folder_case(directory, table.parent)
        if case is None:
            shared.append(table)
        else:
            own[case].append(table)
    return shared, dict(own)


def _labels(tables: list[Path]) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """Return the label values and their names from all tables. If no table names value 0, it is background.

    Raises:
        InvalidInput: If two tables give one value different names.
    """
    names: dict[int, str] = {}
    for table in tables:
        for value, name in read_label_table(table).items():
            if names.setdefault(value, name) != name:
                raise InvalidInput(
                    f"label {value} has two names",
                    value=(names[value], name),
                    remedy="use one name for it in all tables dseg.tsv of the dataset",
                )
    if not names:
        return (), ()
    names.setdefault(0, "background")
    return tuple(sorted(names)), tuple(names[value] for value in sorted(names))


def _tables_of(case: str, tables: Mapping[str, list[Path]]) -> list[Path]:
    return [*tables.get(_subject(case), []), *(tables.get(case, []) if case != _subject(case) else [])]


def _own_names(tables: list[Path], shared: Mapping[int, str]) -> tuple[tuple[int, str], ...]:
    """Return value and name of each label in a subject's own tables.

    Empty if the subject has no table, or if the dataset's table names the labels.

    Raises InvalidInput if they contradict the dataset's table or each other.
    """
    names: dict[int, str] = {}
    for table in tables:
        for value, name in read_label_table(table).items():
            known = shared.get(value, name) if shared else name
            if names.setdefault(value, name) != name or known != name:
                raise InvalidInput(
                    f"the subject's own table and another table give label {value} different names",
                    value=name,
                    remedy="use one name in both, or remove the subject's table",
                )
    if not names or shared:
        return ()
    names.setdefault(0, "background")
    return tuple(sorted(names.items()))


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
