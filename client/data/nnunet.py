"""Reads the nnU-Net v2 layout: ``dataset.json``, ``imagesTr/CASE_0000.nii.gz``, ``labelsTr/CASE.nii.gz``.

Each channel is a separate file. Overlapping labels (``"whole tumor": [1, 2, 3]``) are read as regions of exclusive
labels. A case without its label or one of its channels, or with a file that is not NIfTI, is a :class:`Problem` and
left out. A dataset whose ``file_ending`` is not that of NIfTI is refused.
"""

from __future__ import annotations

import re
from collections import defaultdict
from pathlib import Path
from typing import Any

from common.data.access import entries
from common.data.dataset import Case, Dataset, Problem
from common.data.msd import NIFTI_SUFFIXES, case_of_channels, nifti_ending, other_ending, read_index
from common.errors import InvalidInput

_NUMBERED = "CASE_0000.nii.gz, CASE_0001.nii.gz, …,"
_IMAGE, _MAP = re.compile(r"(.+)_(\d{4})"), re.compile(r"(.+)()")


class NnunetLayout:
    """The nnU-Net v2 layout."""

    name = "nnunet"
    says = "dataset.json with channel_names, imagesTr/CASE_0000.nii.gz, labelsTr/CASE.nii.gz"

    def matches(self, directory: Path) -> bool:
        """Tell whether the directory has an nnU-Net ``dataset.json``.

        Returns:
            True if it looks like nnU-Net.
        """
        return (
            (directory / "dataset.json").is_file()
            and "training" not in (index := read_index(directory))
            and ("channel_names" in index or "file_ending" in index)
        )

    def read(self, directory: Path) -> Dataset:
        """Read the dataset's index; no scan is opened.

        Raises:
            InvalidInput: If ``dataset.json`` is not nnU-Net's, or there is no case.
        """
        index = read_index(directory)
        ending = str(index.get("file_ending", ".nii.gz")).lower()
        if ending not in NIFTI_SUFFIXES:
            raise InvalidInput(
                "dataset.json: file_ending",
                value=ending,
                limit=", ".join(NIFTI_SUFFIXES),
                remedy="write .nii.gz there, and convert files of another format",
            )
        values, labels, regions = _labels(index.get("labels"))
        channels = _channels(index.get("channel_names"))
        training, unfit = _found(directory / "imagesTr", ending, _IMAGE)
        drawn, unfit_maps = _found(directory / "labelsTr", ending, _MAP)
        test, unfit_tests = _found(directory / "imagesTs", ending, _IMAGE)
        listed = tuple(sorted(training.keys() | drawn.keys()))
        unnamed = unfit.keys() - training.keys() - drawn.keys()
        outcomes: dict[str, Case | Problem] = {case: unfit[case] for case in sorted(unnamed)}
        for case in listed:
            label = drawn.get(case, {}).get(0)
            missing = Problem(case, "the label file is missing; to fix: put it back, or take the case out")
            known = unfit.get(case) or unfit_maps.get(case)
            read = known or case_of_channels(Case(case, directory, label), training.get(case, {}), channels)
            outcomes[case] = missing if isinstance(read, Case) and label is None else read
        for case in sorted(test.keys() | unfit_tests.keys()):
            twice = "listed twice, so it is not clear which scan is meant; to fix: give one another name"
            known = Problem(case, twice) if case in outcomes else unfit_tests.get(case)
            outcomes[case] = known or case_of_channels(Case(case, directory), test[case], channels)
        if not outcomes:
            raise InvalidInput(
                "the dataset holds no case", value=str(directory), limit=self.says, remedy="put images into imagesTr"
            )
        return Dataset(
            name=str(index.get("name") or directory.name),
            labels=labels,
            label_values=values,
            channels=channels,
            regions=regions,
            cases=tuple(one for one in outcomes.values() if isinstance(one, Case)),
            problems=tuple(one for one in outcomes.values() if isinstance(one, Problem)),
            listed=listed,
        )


def _found(folder: Path, ending: str, name: re.Pattern[str]) -> tuple[dict[str, dict[int, Path]], dict[str, Problem]]:
    """Return a folder's NIfTI files by case and channel number. A label map counts as channel 0.

    Return also a Problem for each case with two files for one number, or a volume file of another ending, and for each
    image whose name has no channel number.
    """
    found: dict[str, dict[int, Path]] = defaultdict(dict)
    unfit: dict[str, Problem] = {}
    for path in entries(folder):
        own = nifti_ending(path.name) or other_ending(path.name)
        if not own or path.name.startswith("."):
            continue
        stem = path.name.removesuffix(own)
        if (match := name.fullmatch(stem)) is None:
            reason = "an image's name lacks its channel's number"
            unfit.setdefault(stem, Problem(stem, f"{reason}; to fix: name it {_NUMBERED} as dataset.json numbers it"))
            continue
        case, number = match[1], int(match[2] or 0)
        if number in found[case] and nifti_ending(path.name):
            what = f"channel number {number}" if name is _IMAGE else "the label map"
            unfit[case] = Problem(case, f"two files for {what}; to fix: keep only one of them")
        elif own.lower() != ending:
            reason = f"a file ends in {own.lower()}, but file_ending in dataset.json is {ending}"
            unfit[case] = Problem(case, f"{reason}; to fix: convert the file, or take it out")
        found[case][number] = path
    return dict(found), unfit


def _labels(table: object) -> tuple[tuple[int, ...], tuple[str, ...], tuple[str, ...]]:
    """Return the label values, their names, and the regions in nnU-Net's table of labels.

    A value that occurs only in regions is named after the smallest region that contains it, such as "core without
    enhancing".
    """
    limit = 'an object that gives every name its number, or the numbers of a region: {"background": 0, "whole": [1, 2]}'
    if not isinstance(table, dict) or len(table) < 2:
        raise InvalidInput("dataset.json: labels", value=table, limit=limit)
    named = {str(name): _values(value) for name, value in table.items()}
    if not all(named.values()) or named.get("background", [0]) != [0] or [0] not in named.values():
        raise InvalidInput("dataset.json: labels", value=table, limit=f"{limit}; background is 0")
    pairs = {values[0]: name for name, values in named.items() if len(values) == 1}
    if len(pairs) != sum(len(values) == 1 for values in named.values()):
        raise InvalidInput("dataset.json: labels", value=table, limit=f"{limit}; no number twice")
    regions = {name: values for name, values in named.items() if values != [0]}
    for value in sorted({value for values in regions.values() for value in values} - pairs.keys()):
        name, smallest = min(((n, v) for n, v in regions.items() if value in v), key=lambda one: len(one[1]))
        inner = [n for n, v in regions.items() if set(v) < set(smallest)]
        pairs[value] = f"{name} without {' and '.join(inner)}" if inner else f"{name} {value}"
    values = tuple(sorted(pairs))
    labels = tuple(pairs[value] for value in values)
    if all(len(own) == 1 for own in regions.values()):
        return values, labels, ()
    return values, labels, tuple(f"{n} = {' + '.join(pairs[value] for value in v)}" for n, v in regions.items())


def _values(entry: object) -> list[int]:
    """Return the numbers of a table entry; empty for an entry that is not a list of distinct numbers."""
    listed: list[Any] = entry if isinstance(entry, list) else [entry]
    whole = all(isinstance(value, int) and not isinstance(value, bool) and value >= 0 for value in listed)
    return sorted(listed) if whole and len(set(listed)) == len(listed) else []


def _channels(table: object) -> tuple[str, ...]:
    if not isinstance(table, dict) or sorted(table) != sorted(str(i) for i in range(len(table))) or not table:
        raise InvalidInput("dataset.json: channel_names", value=table, limit='an object such as {"0": "T1", "1": "T2"}')
    names = tuple(str(table[str(i)]) for i in range(len(table)))
    if len(set(names)) != len(names):
        raise InvalidInput("dataset.json: channel_names", value=names, limit="no name twice")
    return names
