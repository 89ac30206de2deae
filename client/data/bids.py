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

from common.data.access import absent, closed_error, is_closed
from common.data.dataset import Case, Dataset, PatientIdentity, Problem
from common.data.msd import nifti_ending
from common.data.patients import read_table
from common.errors import InvalidInput

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
        sessions = _images(directory)
        if is_closed(directory / "derivatives"):
            raise closed_error(directory / "derivatives")
        drawn, tables = _label_maps(directory)
        closed = _closed(directory)
        if not sessions and not closed:
            raise InvalidInput("the dataset holds no case", limit=self.says)
        shared, own_tables = _of_whom(directory, tables)
        values, labels = _labels(directory, shared)
        cases: list[Case] = []
        problems = [Problem(case, absent(folder / "image", "case")) for case, folder in sorted(closed.items())]
        for case in sorted(sessions.keys() | drawn.keys()):
            if closed.keys() & {case, case.partition("_")[0]}:
                continue
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
                    problems.append(Problem(case, str(error)))
                    continue
                label = maps[0] if maps else None
                cases.append(Case(case, own[0][1], label, patient=_subject(case), channel_files=own, label_names=named))
        listed = tuple(case for case in sorted(sessions.keys() | drawn.keys()) if case in drawn)
        return Dataset(
            name=directory.name,
            labels=labels,
            label_values=values,
            channels=(),
            cases=tuple(cases),
            problems=tuple(problems),
            listed=listed,
            patients={case: _subject(case) for case in sessions.keys() | drawn.keys()},
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
    ending = nifti_ending(path.name)
    stem = path.name.removesuffix(ending) if ending else path.stem
    *pairs, suffix = stem.split("_")
    return dict(pair.split("-", 1) for pair in pairs if "-" in pair), suffix


def _case_of(path: Path) -> str | None:
    entities, _ = _entities(path)
    if "sub" not in entities:
        return None
    return "_".join(f"{key}-{entities[key]}" for key in ("sub", "ses") if key in entities)


def _images(directory: Path) -> dict[str, dict[str, list[Path]]]:
    """Return the image files by session and contrast."""
    found: dict[str, dict[str, list[Path]]] = defaultdict(lambda: defaultdict(list))
    for pattern in ("sub-*/anat/sub-*", "sub-*/ses-*/anat/sub-*"):
        for path in sorted(directory.glob(pattern)):
            entities, suffix = _entities(path)
            case = _case_of(path)
            if case is None or not nifti_ending(path.name) or suffix in _NO_CONTRAST:
                continue
            found[case][f"ce-{suffix}" if "ce" in entities else suffix].append(path)
    return found


def _closed(directory: Path) -> dict[str, Path]:
    """Return the folders of subjects and sessions that this user may not read, which ``glob`` leaves out."""
    patterns = ("sub-*", "sub-*/ses-*", "sub-*/anat", "sub-*/ses-*/anat")
    folders = (folder for pattern in patterns for folder in directory.glob(pattern) if is_closed(folder))
    return {"_".join(part for part in path.relative_to(directory).parts if part != "anat"): path for path in folders}


def _label_maps(directory: Path) -> tuple[dict[str, list[Path]], list[Path]]:
    """Return the label maps by session, below derivatives or in anat, and all label tables."""
    found: dict[str, list[Path]] = defaultdict(list)
    roots = [root for root in (directory / "derivatives", *directory.glob("sub-*")) if root.is_dir()]
    for root in roots:
        for path in sorted(root.rglob("*_dseg.*")):
            case = _case_of(path)
            if case is not None and nifti_ending(path.name):
                found[case].append(path)
    tables = [path for root in (directory, *roots) for path in sorted(root.glob("*dseg.tsv"))]
    tables += [path for root in roots for path in sorted(root.rglob("*/*dseg.tsv"))]
    return dict(found), list(dict.fromkeys(tables))


def _of_whom(directory: Path, tables: list[Path]) -> tuple[list[Path], dict[str, list[Path]]]:
    """Separate the dataset's own tables from those in subjects' folders.

    The latter are returned by session, or by subject if they apply to all its sessions.
    """
    shared: list[Path] = []
    own: dict[str, list[Path]] = defaultdict(list)
    for table in tables:
        folders = table.relative_to(directory).parts[:-1]
        subject = next((part for part in folders if part.startswith("sub-")), None)
        if subject is None:
            shared.append(table)
            continue
        session = next((part for part in folders if part.startswith("ses-")), None)
        own[subject if session is None else f"{subject}_{session}"].append(table)
    return shared, dict(own)


def _labels(directory: Path, tables: list[Path]) -> tuple[tuple[int, ...], tuple[str, ...]]:
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
                    remedy=f"use one name for it in the tables {directory.name}/…/dseg.tsv",
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
    for row in read_table(path):
        index, name = row.get("index", ""), row.get("name", "")
        if not re.fullmatch(r"\d{1,9}", index) or not name or names.setdefault(int(index), name) != name:
            raise InvalidInput(
                "label table", value=path.name, limit="columns index (a whole number, none twice) and name"
            )
    return names
