"""Describes a dataset on disk in any layout: its cases, their patients, and the cases left out with the reason.

Readers of layouts return a :class:`Dataset`; training, splitting and the site's checks use it. The dataset says which
cases belong to one patient. If it does not, every case counts as a patient. The guarantee protects one patient, so its
meaning depends on this. :attr:`Dataset.patient_identity` is therefore printed with every guarantee.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

from common.config import DataConfig
from common.document import Document
from common.errors import InvalidInput
from common.names import comparable


class PatientIdentity(StrEnum):
    """The means by which a dataset states which cases belong to one patient: BIDS subject, BraTS folder, a table, or
    one patient per file.
    """

    FILE = "file"
    SUBJECT = "bids-subject"
    TABLE = "table"
    FOLDER = "folder"

    @property
    def sentence(self) -> str:
        """One sentence that defines a patient, for a ledger, a certificate or a report."""
        match self:
            case PatientIdentity.SUBJECT:
                return "a patient is a BIDS subject: all scans below one sub- folder"
            case PatientIdentity.FOLDER:
                return "a patient is a BraTS folder, all visits of one number together"
            case PatientIdentity.TABLE:
                return "a patient is the one that the site's table names for a case"
            case _:
                return "no table says which patient a file belongs to, so every file counts as a patient of its own"


@dataclass(frozen=True, slots=True)
class Case:
    """One scan of a dataset.

    Attributes:
        id: Name of the case in its dataset.
        image: File with all channels, or the first of ``channel_files``.
        label: File of the label map; None if there is none.
        hospital: Hospital of the case, if the dataset states one under a key that Consilium defines; else None.
        patient: Patient whose scan it is; None if the dataset does not say.
        channel_files: (channel name, file) if every channel has its own file. One name may have several files until a
            study determines which channels it needs.
        channel_order: Indices of the file's channels to take, in this order; empty for all in their order.
        label_map: Pairs (value in the file, label of the study); empty if they are equal.
        label_names: Pairs (value, name) from a table for this case alone; empty to use the dataset's names.
        absent: Indices of the study's channels that the site does not have. They are read as 0.
        structures: Pairs (name, label of the study) for a label that is a DICOM file: the names of an RT Structure
            Set's structures, as :func:`common.names.comparable` returns them.
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
    structures: tuple[tuple[str, int], ...] = ()

    @property
    def images(self) -> tuple[Path, ...]:
        """Every file that holds a part of the image, in the channels' order."""
        return tuple(path for _, path in self.channel_files) or (self.image,)


@dataclass(frozen=True, slots=True)
class Problem(Document):
    """A case that was left out: its id and the reason. Shown at the site only, never sent."""

    case: str
    reason: str


@dataclass(frozen=True, slots=True)
class DuplicateCases(Document):
    """Two cases of two patients with equal image files or one shared label map. Shown at the site only, never sent."""

    case: str
    same_as: str

    @property
    def sentence(self) -> str:
        """A sentence on how the repeated file weakens the guarantee, and on how to fix it."""
        return (
            f"{self.case} has the same scan or label map as {self.same_as}, of another patient: one person may be "
            "registered as two patients and be protected only as a group of two (g = 2); to fix: remove one, give each "
            "its own file, or give both one patient"
        )


MOST_NAMED = 20
"""Largest number of cases that a terminal lists by name."""


def left_out_lines(used: int, problems: Sequence[Problem], *, of: str = "cases") -> list[str]:
    """Return lines for a terminal that say how many cases are used and which are left out for which reason.

    Args:
        used: Number of cases that are used.
        problems: Cases that are left out.
        of: What the lines call the cases, such as ``files``.

    Returns:
        One line if all are used; else a summary, at most :data:`MOST_NAMED` cases, and the number of further ones.
    """
    if not problems:
        return [f"{of}: {used} used, none left out"]
    named = [f"left out {problem.case}: {problem.reason}" for problem in problems[:MOST_NAMED]]
    more = [f"and {len(problems) - MOST_NAMED} more"] if len(problems) > MOST_NAMED else []
    return [f"{of}: {used} used, {len(problems)} left out", *named, *more]


def case_names(cases: Sequence[str]) -> str:
    """Return the names of at most :data:`MOST_NAMED` cases, and the number of further ones.

    Args:
        cases: The cases' names.

    Returns:
        The text.
    """
    more = [f"and {len(cases) - MOST_NAMED} more"] if len(cases) > MOST_NAMED else []
    return ", ".join([*cases[:MOST_NAMED], *more])


def unlabelled_lines(cases: Sequence[str]) -> list[str]:
    """Return a line for a terminal that names the cases without a label map.

    Args:
        cases: The cases' names.

    Returns:
        The line; none if there are no such cases.
    """
    return [f"not used, because they have no label map: {case_names(cases)}"] if cases else []


@dataclass(frozen=True, slots=True)
class Dataset:
    """A dataset on disk.

    Attributes:
        name: Name of the dataset.
        labels: Names of label values; empty if the dataset does not name them. ``labels[i]`` names value i, or
            ``label_values[i]`` if these are given.
        channels: Names of the channels; empty if every case names its own.
        cases: Usable cases. They share no id with ``problems``.
        problems: Cases that are left out.
        listed: Every id listed for training, usable or not, in the dataset's order. These ids are divided among the
            voters.
        patients: Patient of each id, usable or not, as far as the dataset knows; see :meth:`patient_of`.
        patient_identity: How patients are identified.
        label_values: Label values if they are not 0, 1, 2, …
        regions: Overlapping structures that the index defines, as in ``DataConfig.regions``.
        absent: Indices of the study's channels that the site does not have, for all cases. They are read as 0.
        doubled: Scans and label maps that occur under two patients (:func:`common.data.patients.counted_once`).
        unnamed: Patients of the cases listed for training whose name, or whose patient's name, is not valid UTF-8. The
            keys are the cases' names with escaped characters. Such a case is counted as left out, and belongs to no
            voter. It is not in ``listed``.
        unlisted: Cases whose files lie in the dataset's folders although its index does not list them. They are counted
            as left out, and belong to no voter. They share no id with ``listed``.
        synthetic: True if Consilium made the cases, so that they belong to no patient and a seed may replace secret
            randomness. The mark is read from the index and not verified; a site that sets it for real scans weakens
            the protection of its own patients.
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
    doubled: tuple[DuplicateCases, ...] = ()
    unnamed: Mapping[str, str] = field(default_factory=dict)
    unlisted: tuple[Problem, ...] = ()
    synthetic: bool = False

    @property
    def labelled(self) -> tuple[Case, ...]:
        """The cases with a label map."""
        return tuple(case for case in self.cases if case.label is not None)

    @property
    def unlabelled(self) -> tuple[str, ...]:
        """Names of the cases without a label map."""
        return tuple(case.id for case in self.cases if case.label is None)

    @property
    def patients_listed(self) -> frozenset[str]:
        """The patients of all cases listed for training, usable or not."""
        return frozenset(map(self.patient_of, self.listed)) | frozenset(self.unnamed.values())

    def patient_of(self, case: str) -> str:
        """Return the patient of a case, usable or not.

        Args:
            case: Id of the case.

        Returns:
            The patient; the case's id if the dataset does not say.
        """
        return self.patients.get(case, case)


def check_labels(dataset: Dataset, data: DataConfig) -> None:
    """Refuse a dataset whose label names or number of channels differ from the study's.

    Names are compared by :func:`~common.names.comparable`. :func:`client.data.layouts.match_study` maps a site's names
    to the study's, so that this check passes.

    Args:
        dataset: The dataset.
        data: The study's data settings.

    Raises:
        InvalidInput: If labels or channels differ.
    """
    named = [comparable(label) for label in dataset.labels]
    if named != [comparable(label) for label in data.labels] or dataset.label_values not in (
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
