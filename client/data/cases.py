"""Opens a site's dataset as ``site.toml`` describes it, and records on which cases its teachers were trained.

The record (``teachers/cases.json``, mode 0600) states the number of cases, and names those that were left out, with
reasons. It must not leave the site. The number of a hospital's patients, or of its unusable files, is a fact about its
data that no noise protects. The server's operator therefore gets only numbers (:func:`counts_for_server`), and only if
``[share] case_counts`` is true.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar

from client.data.layouts import indexed
from client.policy import SiteConfig, load_site
from common.config import DataConfig
from common.data.dataset import Dataset, DuplicateCases, PatientIdentity, Problem
from common.document import LATER, Document
from common.errors import InvalidInput, Refused
from common.objects import write_json
from common.privacy.consent import warn_about
from common.privacy.mechanism import Unit
from common.reading import parse_json
from common.stated_budget import StatedBudget


@dataclass(frozen=True, slots=True)
class CaseRecord(Document):
    """Which cases of a site's dataset were used for training, and why others were not.

    Attributes:
        listed: Number of all cases: those that the dataset's index lists for training, plus those that have files in
            the dataset's folders although the index does not list them.
        patients: Number of patients of the cases that the index lists.
        patient_identity: How the dataset tells which cases belong to one patient.
        problems: Cases left out, with reasons.
        doubled: Scans that occur under two patients.
        unlabelled: Names of cases without a label map, which are not counted above, because no training can use them.
    """

    SCHEMA: ClassVar = ("record of the cases", 1)

    listed: int
    patients: int
    patient_identity: PatientIdentity
    problems: tuple[Problem, ...]
    doubled: Annotated[tuple[DuplicateCases, ...], LATER] = ()
    unlabelled: Annotated[tuple[str, ...], LATER] = ()

    @property
    def left_out(self) -> int:
        """Number of cases left out."""
        return len(self.problems)


def check_index(config: SiteConfig, data: DataConfig) -> None:
    """Check that the index of the site's dataset fits the study and names a labelled case. No scan is opened.

    Args:
        config: The site's policy.
        data: The study's labels, channels and grid.

    Raises:
        InvalidInput: If the index does not fit the study, or :func:`check_labelled` refuses the dataset.
    """
    folder = config.path(config.data)
    check_labelled(indexed(folder, data, config.dataset), folder)


def check_labelled(dataset: Dataset, folder: Path) -> None:
    """Refuse a dataset whose index names no case with an image and a label map that exist.

    Args:
        dataset: The dataset.
        folder: Its folder.

    Raises:
        InvalidInput: If there is no such case, for instance because the disk with the images is not mounted.
    """
    if not dataset.labelled:
        first = dataset.problems[0].reason if dataset.problems else ""
        reason, _, remedy = first.partition("; to fix: ")
        raise InvalidInput(
            "the dataset has no labelled case",
            value=str(folder),
            limit=f"one or more; the first of {len(dataset.problems)} left out: {reason}" if reason else "one or more",
            remedy=remedy or "give the folder that contains images and labels, or describe its layout in site.toml",
        )


def record_cases(teachers: Path, dataset: Dataset, problems: Iterable[Problem]) -> CaseRecord:
    """Write the record of which cases a training used, and why others were left out.

    Args:
        teachers: The site's directory of teachers.
        dataset: The dataset.
        problems: Problems found when the scans were read.

    Returns:
        The record.
    """
    listed = {*dataset.listed, *dataset.unnamed}
    known = {problem.case: problem for problem in dataset.problems if problem.case in listed}
    left_out = {**known, **{problem.case: problem for problem in problems if problem.case in listed}}
    left_out |= {problem.case: problem for problem in dataset.unlisted}
    unlisted = {problem.case for problem in dataset.unlisted}
    record = CaseRecord(
        listed=len(listed) + len(dataset.unlisted),
        patients=len(dataset.patients_listed),
        patient_identity=dataset.patient_identity,
        problems=tuple(left_out[case] for case in sorted(left_out)),
        doubled=dataset.doubled,
        unlabelled=tuple(sorted({*dataset.unlabelled, *(one.case for one in dataset.problems)} - listed - unlisted)),
    )
    write_json(teachers / "cases.json", record.to_json(), mode=0o600)
    return record


def has_trained(site_dir: Path) -> bool:
    """Tell whether a record of a training's cases exists.

    Args:
        site_dir: The site's directory.

    Returns:
        True if it exists.
    """
    return (site_dir / "teachers" / "cases.json").exists()


def load_cases(site_dir: Path) -> CaseRecord:
    """Read the record of the last training's cases.

    Args:
        site_dir: The site's directory.

    Returns:
        The record.

    Raises:
        InvalidInput: If there is none, or it cannot be read.
    """
    try:
        text = (site_dir / "teachers" / "cases.json").read_bytes()
        return CaseRecord.from_json(parse_json(text, what="record of the cases"))
    except (OSError, ValueError, InvalidInput) as error:
        raise InvalidInput(
            "the record of the training cases cannot be read",
            value=str(site_dir),
            remedy="check the path and who may read it; `consilium site train` writes the record",
        ) from error


def delta_warning(stated: StatedBudget, *, patients: int) -> str | None:
    """Return a warning if δ is not small compared with 1 divided by the number of patients.

    With unit hospital there is no warning, because a site does not know the number of hospitals.

    Args:
        stated: The budget of a study, or of the site's caps.
        patients: The site's number of patients.

    Returns:
        A sentence; None without a warning.
    """
    if stated.unit is not Unit.PATIENT or patients < 1:
        return None
    return warn_about(stated.delta, unit=Unit.PATIENT, units=patients)


def counts_for_server(site_dir: Path) -> dict[str, object]:
    """Return the numbers of cases that the server's operator may be told.

    Args:
        site_dir: The site's directory.

    Returns:
        Cases listed, cases left out, patients, and what counts as a patient.

    Raises:
        Refused: ``not-shared`` unless the site's policy allows it.
        InvalidInput: If the record of the training cases cannot be read.
    """
    config = load_site(site_dir)
    if not config.share.case_counts:
        raise Refused(
            "not-shared",
            "this site does not share its number of cases; to fix: set case_counts = true in [share] of site.toml",
        )
    record = load_cases(site_dir)
    return {
        "site": config.site,
        "cases_listed": record.listed,
        "cases_left_out": record.left_out,
        "patients": record.patients,
        "patient_identity": str(record.patient_identity),
    }
