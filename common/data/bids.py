"""The BIDS layout: ``sub-*/[ses-*/]anat`` with one image a contrast, label maps as ``*_dseg`` among the derivatives.

A case is a session (or a subject without sessions), a patient is a subject. A contrast's name is the file's suffix
(``T1w``, ``T2w``, ``FLAIR``), with ``ce-`` before it where a contrast agent was given. Labels are named by the table
beside the label maps: ``*_dseg.tsv`` or ``dseg.tsv`` with the columns ``index`` and ``name``. A session with two images
of one contrast, or two label maps, is a :class:`Problem`: which of them is meant is not certain.
"""

from __future__ import annotations

import re
from collections import defaultdict
from pathlib import Path

from common.data.dataset import Case, Dataset, PatientIdentity, Problem
from common.data.msd import NIFTI_SUFFIXES
from common.data.patients import read_table
from common.errors import InvalidInput

_NO_CONTRAST = {"dseg", "mask", "probseg", "defacemask"}


class BidsLayout:
    """See the module."""

    name = "bids"
    says = "sub-*/[ses-*/]anat/*.nii.gz, derivatives/…/*_dseg.nii.gz with a table dseg.tsv"

    def matches(self, directory: Path) -> bool:
        return any(path.is_dir() for path in directory.glob("sub-*/anat")) or any(
            path.is_dir() for path in directory.glob("sub-*/ses-*/anat")
        )

    def read(self, directory: Path) -> Dataset:
        sessions = _images(directory)
        drawn, tables = _label_maps(directory)
        if not sessions:
            raise InvalidInput("dataset holds no case", limit=self.says)
        values, labels = _labels(directory, tables)
        cases: list[Case] = []
        problems: list[Problem] = []
        for case in sorted(sessions.keys() | drawn.keys()):
            images = sessions.get(case, {})
            doubled = sorted(contrast for contrast, files in images.items() if len(files) > 1)
            if not images:
                problems.append(Problem(case, "a label map without an image"))
            elif doubled:
                problems.append(
                    Problem(case, f"several {doubled[0]} images in one session; to fix: list the cases in a cases.csv")
                )
            elif len(drawn.get(case, ())) > 1:
                problems.append(
                    Problem(case, "several label maps for one session; to fix: list the cases in a cases.csv")
                )
            else:
                own = tuple((contrast, files[0]) for contrast, files in sorted(images.items()))
                label = drawn[case][0] if case in drawn else None
                cases.append(Case(id=case, image=own[0][1], label=label, patient=_subject(case), channel_files=own))
        listed = tuple(case for case in sorted(sessions.keys() | drawn.keys()) if case in drawn)
        channels = sorted({contrast for images in sessions.values() for contrast in images})
        return Dataset(
            name=directory.name,
            labels=labels,
            label_values=values,
            channels=tuple(channels),
            cases=tuple(cases),
            problems=tuple(problems),
            listed=listed,
            patients={case: _subject(case) for case in sessions.keys() | drawn.keys()},
            patient_identity=PatientIdentity.SUBJECT,
        )


def _subject(case: str) -> str:
    return case.split("_")[0]


def _entities(path: Path) -> tuple[dict[str, str], str]:
    """``sub-01_ses-2_ce-gd_T1w.nii.gz`` → its entities and its suffix."""
    stem = next((path.name.removesuffix(s) for s in NIFTI_SUFFIXES if path.name.endswith(s)), path.stem)
    *pairs, suffix = stem.split("_")
    return dict(pair.split("-", 1) for pair in pairs if "-" in pair), suffix


def _case_of(path: Path) -> str | None:
    entities, _ = _entities(path)
    if "sub" not in entities:
        return None
    return "_".join(f"{key}-{entities[key]}" for key in ("sub", "ses") if key in entities)


def _images(directory: Path) -> dict[str, dict[str, list[Path]]]:
    """Session → contrast → files."""
    found: dict[str, dict[str, list[Path]]] = defaultdict(lambda: defaultdict(list))
    for pattern in ("sub-*/anat/sub-*", "sub-*/ses-*/anat/sub-*"):
        for path in sorted(directory.glob(pattern)):
            entities, suffix = _entities(path)
            case = _case_of(path)
            if case is None or not path.name.endswith(NIFTI_SUFFIXES) or suffix in _NO_CONTRAST:
                continue
            found[case][f"ce-{suffix}" if "ce" in entities else suffix].append(path)
    return found


def _label_maps(directory: Path) -> tuple[dict[str, list[Path]], list[Path]]:
    """Session → label maps below derivatives (or in anat), and every table beside them."""
    found: dict[str, list[Path]] = defaultdict(list)
    roots = [root for root in (directory / "derivatives", *directory.glob("sub-*")) if root.is_dir()]
    for root in roots:
        for path in sorted(root.rglob("*_dseg.nii*")):
            case = _case_of(path)
            if case is not None and path.name.endswith(NIFTI_SUFFIXES):
                found[case].append(path)
    tables = [path for root in (directory, *roots) for path in sorted(root.glob("*dseg.tsv"))]
    tables += [path for root in roots for path in sorted(root.rglob("*/*dseg.tsv"))]
    return dict(found), list(dict.fromkeys(tables))


def _labels(directory: Path, tables: list[Path]) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """Values and names that every table agrees on; background is 0 whether a table says so or not."""
    names: dict[int, str] = {}
    for table in tables:
        for value, name in read_label_table(table).items():
            if names.setdefault(value, name) != name:
                raise InvalidInput(
                    f"label {value} has two names",
                    value=(names[value], name),
                    remedy=f"let the tables {directory.name}/…/dseg.tsv agree",
                )
    if not names:
        return (), ()
    names.setdefault(0, "background")
    return tuple(sorted(names)), tuple(names[value] for value in sorted(names))


def read_label_table(path: Path) -> dict[int, str]:
    """``index`` and ``name`` of a BIDS label table (TSV)."""
    names: dict[int, str] = {}
    for row in read_table(path):
        index, name = row.get("index", ""), row.get("name", "")
        if not re.fullmatch(r"\d{1,9}", index) or not name or names.setdefault(int(index), name) != name:
            raise InvalidInput(
                "label table", value=path.name, limit="columns index (a whole number, none twice) and name"
            )
    return names
