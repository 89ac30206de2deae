"""Describes a dataset on disk in any layout: its cases, their patients, and what was left out and why.

A patient is what the dataset says a patient is. Where it says nothing, every case counts as a patient of its own; that
is a statement about the guarantee's unit, so :attr:`Dataset.patient_identity` carries it to wherever a guarantee is
printed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

from common.config import DataConfig
from common.document import Document
from common.errors import InvalidInput


class PatientIdentity(StrEnum):
    """How a dataset tells whose scan a case is: the layout's own patients, a table, or one patient a file."""

    FILE = "file"
    SUBJECT = "bids-subject"
    TABLE = "table"
    FOLDER = "folder"

    @property
    def sentence(self) -> str:
        """One line for a ledger, a certificate or a report."""
        match self:
            case PatientIdentity.SUBJECT:
                return "a patient is a BIDS subject: all scans below one sub- folder"
            case PatientIdentity.FOLDER:
                return "a patient is a BraTS folder, all visits of one number together"
            case PatientIdentity.TABLE:
                return "a patient is what the site's table of cases and patients says"
            case _:
                return "nothing says whose scan a file is: every file counts as a patient of its own"


@dataclass(frozen=True, slots=True)
class Case:
    """One scan: ``id`` names it in its dataset, ``label`` is None where nobody drew one.

    ``image`` is the file that holds it, with all channels, or the first of ``channel_files`` (name, file) where every
    channel has its own; until a study says which channels it needs, one name may have several files. ``patient`` is
    whose scan it is, None where the dataset does not say; ``hospital`` is set only where the dataset says which one a
    case comes from (Consilium's own extra key). ``channel_order`` says which of the file's channels to take, in which
    order, and ``label_map`` which value of the label file means which of the study (pairs); empty, as they are.
    ``absent``: channels of the study that the site has not, by place; they are read as 0.
    ``label_names``: (value, name) by a table that speaks for this case alone; empty, as the dataset says.
    """

    id: str
    image: Path
    label: Path | None = None
    hospital: str | None = None
    patient: str | None = None
    channel_files: tuple[tuple[str, Path], ...] = ()
    channel_order: tuple[int, ...] = ()
    label_map: tuple[tuple[int, int], ...] = ()
    label_names: tuple[tuple[int, str], ...] = ()
    absent: tuple[int, ...] = ()

    @property
    def images(self) -> tuple[Path, ...]:
        """Every file the image is read from, in the channels' order."""
        return tuple(path for _, path in self.channel_files) or (self.image,)


@dataclass(frozen=True, slots=True)
class Problem(Document):
    """A case left out: its id and why. Fit for the site's own terminal, not to be sent anywhere."""

    case: str
    reason: str


@dataclass(frozen=True, slots=True)
class Doubled(Document):
    """Two cases of two patients that hold one scan, by the content of their image files. For the site's own eyes."""

    case: str
    same_as: str

    @property
    def sentence(self) -> str:
        """What it means for a guarantee, with the remedy."""
        return (
            f"{self.case} holds the same scan as {self.same_as}, of another patient: somebody with two names sits in "
            "two slots and is protected as a group of two is (g = 2); to fix: take one out, or give both one patient"
        )


MOST_NAMED = 20
"""Cases left out that a terminal names one by one."""


def left_out_lines(used: int, problems: Sequence[Problem], *, of: str = "cases") -> list[str]:
    """How many cases are used and how many left out, then those one by one with why; one line where all are used."""
    if not problems:
        return [f"{of}: {used} used, none left out"]
    named = [f"left out {problem.case}: {problem.reason}" for problem in problems[:MOST_NAMED]]
    more = [f"and {len(problems) - MOST_NAMED} more"] if len(problems) > MOST_NAMED else []
    return [f"{of}: {used} used, {len(problems)} left out", *named, *more]


@dataclass(frozen=True, slots=True)
class Dataset:
    """A dataset on disk. ``labels[i]`` names label value i, or ``label_values[i]`` where these are given; no labels:
    the dataset does not name them. No ``channels``: every case names its own. ``cases`` and ``problems`` share no id.

    ``regions``: overlapping structures the index tells of, as ``DataConfig.regions`` has them. ``absent``: see
    :class:`Case`; of all cases.

    ``listed`` holds every id named for training, good or bad, in the dataset's order: what slots are dealt over.
    ``patients`` says whose scan each id is, good or bad, as far as the dataset knows (:meth:`patient_of`).

    ``doubled``: scans under two patients (:func:`common.data.patients.counted_once`). ``synthetic``: Consilium made the
    cases itself, so they are nobody's, and a seed may decide what must be random for patients. It is a mark in the
    index, which :func:`common.data.synthetic.write_phantoms` writes and copies keep: who writes it beside real scans
    lies to nobody but himself, and protects his patients less than he is told.
    """

    name: str
    labels: tuple[str, ...]
    channels: tuple[str, ...]
    cases: tuple[Case, ...]
    problems: tuple[Problem, ...] = ()
    listed: tuple[str, ...] = ()
    patients: Mapping[str, str] = field(default_factory=dict)
    patient_identity: PatientIdentity = PatientIdentity.FILE
    label_values: tuple[int, ...] = ()
    regions: tuple[str, ...] = ()
    absent: tuple[int, ...] = ()
    doubled: tuple[Doubled, ...] = ()
    synthetic: bool = False

    @property
    def labelled(self) -> tuple[Case, ...]:
        """The cases with a label map."""
        return tuple(case for case in self.cases if case.label is not None)

    def patient_of(self, case: str) -> str:
        """Whose scan the case of this id is, good or bad; the id itself where the dataset does not say."""
        return self.patients.get(case, case)


def check_labels(dataset: Dataset, data: DataConfig) -> None:
    """Refuse a dataset whose label names or channels are not the study's, letter case aside.

    :func:`client.data.layouts.match_study` makes one that passes, from names the site maps to the study's.
    """
    named = [label.casefold() for label in dataset.labels]
    if named != [label.casefold() for label in data.labels] or dataset.label_values not in (
        (),
        tuple(range(len(data.labels))),
    ):
        raise InvalidInput(
            "the dataset's labels are not the study's",
            value=dataset.labels,
            limit=", ".join(f"{value} = {label}" for value, label in enumerate(data.labels)),
            remedy="map them to the study's in [labels] of site.toml, or with --label-map",
        )
    if len(dataset.channels) != len(data.channels):
        raise InvalidInput(
            "the dataset's channels are not the study's",
            value=dataset.channels,
            limit=", ".join(data.channels),
            remedy="map them to the study's in [channels] of site.toml, or with --label-map",
        )
