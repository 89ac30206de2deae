"""Reads raw BraTS folders: one folder for each case, with one file for each contrast and ``seg`` for the label map.

Two versions of the layout are read. From 2018 to 2021 a file is named
``BraTS20_Training_001/BraTS20_Training_001_t1ce.nii.gz``, and the label of enhancing tumour is 4. From 2023 on a file
is named ``BraTS-GLI-00000-000/BraTS-GLI-00000-000-t1c.nii.gz``, and the label of enhancing tumour is 3. There the last
number of the folder's name is the visit, so folders that differ only in it belong to one patient. Labels have the
Medical Segmentation Decathlon's names. A case that lacks a contrast of the study is left out, unless the site states
that it has this contrast for none of its patients. It refuses a folder that mixes both versions.
"""

from __future__ import annotations

import re
from pathlib import Path

from common.data.access import absent, is_closed
from common.data.dataset import Case, Dataset, PatientIdentity, Problem
from common.data.msd import nifti_ending, other_ending
from common.errors import InvalidInput

LABELS = ("background", "non-enhancing tumor", "edema", "enhancing tumour")
"""Names of the values 0, 1, 2 and 4; from 2023 on 0, 1, 2 and 3."""

REGIONS = (
    "WT = non-enhancing tumor + edema + enhancing tumour",
    "TC = non-enhancing tumor + enhancing tumour",
    "ET = enhancing tumour",
)
CONTRASTS = {
    "t1": "T1",
    "t1n": "T1",
    "t1ce": "T1ce",
    "t1c": "T1ce",
    "t2": "T2",
    "t2w": "T2",
    "flair": "FLAIR",
    "t2f": "FLAIR",
}
_FILE = re.compile(rf"(.+)([_-])({'|'.join([*CONTRASTS, 'seg'])})", re.IGNORECASE)
_EMPTY = "its folder is empty; to fix: put the scan into it, or remove it"
_VISIT = re.compile(r"(BraTS-[A-Za-z]+-\d+)-\d+")


class BratsLayout:
    """The layout of raw BraTS folders."""

    name = "brats"
    says = "CASE/CASE_flair.nii.gz, _t1, _t1ce, _t2 and _seg, or CASE/CASE-t2f.nii.gz, -t1n, -t1c, -t2w and -seg"

    def matches(self, directory: Path) -> bool:
        """Tell whether a folder of the directory has two or more BraTS files."""
        return any(len(_files(folder)[0]) > 1 for folder in _folders(directory))

    def read(self, directory: Path) -> Dataset:
        """Read the dataset's index; no scan is opened.

        Raises:
            InvalidInput: If there is no case, or the folder mixes both versions of the layout.
        """
        outcomes, signs, empty = [], set(), []
        for folder in _folders(directory):
            files, doubled, others = _files(folder)
            if files or others or is_closed(folder):
                outcomes.append(_case(folder, {kind: path for kind, (_, path) in files.items()}, doubled, others))
                signs |= {sign for sign, _ in files.values()}
            elif not any(folder.iterdir()):
                empty.append(Problem(folder.name, _EMPTY))
        if not outcomes:
            raise InvalidInput("the dataset holds no case", value=str(directory), limit=self.says)
        if len(signs) > 1:
            raise InvalidInput(
                "the folder mixes two BraTS editions, which number enhancing tumour differently",
                value=str(directory),
                remedy="put each edition into a directory of its own",
            )
        cases = tuple(one for one in outcomes if isinstance(one, Case))
        problems = tuple(one for one in outcomes if isinstance(one, Problem))
        listed = (*(case.id for case in cases if case.label), *(problem.case for problem in problems))
        return Dataset(
            name=directory.name,
            labels=LABELS,
            label_values=(0, 1, 2, 4) if signs == {"_"} else (0, 1, 2, 3),
            channels=(),
            regions=REGIONS,
            cases=cases,
            problems=(*problems, *empty),
            listed=tuple(sorted(listed)),
            patients={name: _patient(name) for name in (*(case.id for case in cases), *(one.case for one in problems))},
            patient_identity=PatientIdentity.FOLDER,
        )


def _folders(directory: Path) -> list[Path]:
    return sorted(path for path in directory.iterdir() if path.is_dir() and not path.name.startswith("."))


def _patient(folder: str) -> str:
    visit = _VISIT.fullmatch(folder)
    return visit[1] if visit else folder


def _case(folder: Path, files: dict[str, Path], doubled: list[str], others: list[Path]) -> Case | Problem:
    """Return a folder's case, or the reason why it cannot be used."""
    images = tuple((CONTRASTS[kind], path) for kind, path in files.items() if kind != "seg")
    if is_closed(folder):
        return Problem(folder.name, absent(folder / "image", "case"))
    if doubled:
        return Problem(folder.name, f"two files for {doubled[0]}; to fix: keep only one of them in the folder")
    if "seg" not in files and any(other_ending(path.name) for path in others):
        return Problem(folder.name, "a file is not NIfTI; to fix: convert it to .nii.gz")
    if others and "seg" not in files:
        remedy = "name each file after its folder, followed by its contrast or by seg"
        return Problem(folder.name, f"a NIfTI file fits no role in its folder; to fix: {remedy}")
    if not images:
        return Problem(folder.name, "no image beside the label map; to fix: put the image back")
    patient = _patient(folder.name)
    return Case(folder.name, images[0][1], files.get("seg"), patient=patient, channel_files=images)


def _files(folder: Path) -> tuple[dict[str, tuple[str, Path]], list[str], list[Path]]:
    """Return a case's files by contrast (or ``seg``), each with the sign that separates its name (``_`` or ``-``).

    Return also the contrasts that have two files, and the other volume files.
    """
    found: dict[str, tuple[str, Path]] = {}
    doubled: list[str] = []
    others: list[Path] = []
    for path in () if is_closed(folder) else sorted(folder.iterdir()):
        ending = nifti_ending(path.name)
        match = _FILE.fullmatch(path.name.removesuffix(ending)) if ending else None
        if match and match[1] == folder.name:
            kind = match[3].casefold()
            doubled += [kind] * (kind in found)
            found[kind] = (match[2], path)
        elif (ending or other_ending(path.name)) and not path.name.startswith("."):
            others.append(path)
    return found, doubled, others
