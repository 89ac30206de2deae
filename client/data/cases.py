"""A site's dataset as its site.toml describes it, and the record of which cases its teachers were trained on.

The record (``teachers/cases.json``, mode 0600) is for the site's own eyes: it names the cases left out and says why.
What the server's operator may be told is :func:`counts_for_server`, numbers alone, and only where ``[share]
case_counts`` is true: how many patients a hospital has, or how many of its files are bad, is a fact about its data that
no noise covers.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar

from client.data.layouts import indexed, open_for_training
from client.policy import SiteConfig, load_site
from common.config import DataConfig
from common.data.dataset import Dataset, Doubled, PatientIdentity, Problem
from common.document import LATER, Document
from common.errors import InvalidInput, Refused
from common.objects import write_atomically
from common.privacy.consent import warn_about
from common.privacy.mechanism import Unit
from common.reading import parse_json
from common.stated_budget import StatedBudget


@dataclass(frozen=True, slots=True)
class CaseRecord(Document):
    """What came of the cases listed for training. ``problems`` are those left out, with reasons; ``doubled`` the scans
    that two patients have."""

    SCHEMA: ClassVar = ("record of the cases", 1)

    listed: int
    patients: int
    patient_identity: PatientIdentity
    problems: tuple[Problem, ...]
    doubled: Annotated[tuple[Doubled, ...], LATER] = ()

    @property
    def left_out(self) -> int:
        return len(self.problems)


def site_dataset(config: SiteConfig, data: DataConfig) -> Dataset:
    """The site's dataset in the study's terms, as ``[dataset]``, ``[labels]`` and ``[channels]`` of site.toml say."""
    return open_for_training(config.path(config.data), data, config.dataset)


def check_index(config: SiteConfig, data: DataConfig) -> None:
    """InvalidInput unless the index of the site's dataset names labelled cases in the study's terms; opens no scan."""
    found = indexed(config.path(config.data), data, config.dataset)
    if not found.labelled:
        raise InvalidInput(
            "the dataset has no labelled case",
            value=str(config.path(config.data)),
            remedy="give the folder that has images and labels, or say in site.toml how they are laid out",
        )


def record_cases(teachers: Path, dataset: Dataset, problems: Iterable[Problem]) -> CaseRecord:
    """Write what came of a training's cases; ``problems`` are those that reading the scans brought up."""
    listed = set(dataset.listed)
    known = {problem.case: problem for problem in dataset.problems if problem.case in listed}
    left_out = {**known, **{problem.case: problem for problem in problems if problem.case in listed}}
    record = CaseRecord(
        listed=len(listed),
        patients=len({dataset.patient_of(case) for case in listed}),
        patient_identity=dataset.patient_identity,
        problems=tuple(left_out[case] for case in sorted(left_out)),
        doubled=dataset.doubled,
    )
    text = json.dumps(record.to_json(), indent=1, ensure_ascii=False)
    write_atomically(teachers / "cases.json", (text + "\n").encode(), mode=0o600)
    return record


def has_trained(site_dir: Path) -> bool:
    """Whether there is a record of a training's cases."""
    return (site_dir / "teachers" / "cases.json").exists()


def load_cases(site_dir: Path) -> CaseRecord:
    """The record of the last training; InvalidInput where there is none."""
    try:
        text = (site_dir / "teachers" / "cases.json").read_bytes()
        return CaseRecord.from_json(parse_json(text, what="record of the cases"))
    except (OSError, ValueError, InvalidInput) as error:
        raise InvalidInput(
            "the record of the training cases cannot be read", value=str(site_dir), remedy="run `consilium site train`"
        ) from error


def delta_warning(stated: StatedBudget, *, patients: int) -> str | None:
    """A sentence if the δ of a study or of the site's caps is not small against its own ``patients``; else None.

    At unit hospital always None: how many hospitals take part is the consortium's to know, and to warn about.
    """
    if stated.unit is not Unit.PATIENT or patients < 1:
        return None
    return warn_about(stated.delta, unit=Unit.PATIENT, units=patients)


def counts_for_server(site_dir: Path) -> dict[str, object]:
    """Numbers of cases for the server's operator: listed, left out, patients, and what a patient is.

    Raises Refused unless the site's policy shares them.
    """
    config = load_site(site_dir)
    if not config.share.case_counts:
        raise Refused(
            "not-shared", "this site does not share how many cases it has; to fix: case_counts = true in [share]"
        )
    record = load_cases(site_dir)
    return {
        "site": config.site,
        "cases_listed": record.listed,
        "cases_left_out": record.left_out,
        "patients": record.patients,
        "patient_identity": str(record.patient_identity),
    }
