"""Reads the hospital's own patients and the public volumes for an adaptation.

The patients are all listed ones, without withdrawn ones. A scan that cannot be used is reported and left out, and so is
a patient without a usable scan. The public volumes are those about which the study asked this site, as far as they are
still in its cache. It refuses a site without any usable case.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import numpy as np

from client.data.layouts import open_for_training
from client.ledger.site_ledger import SiteLedger
from client.policy import SiteConfig
from client.records.scan_patients import check_scans
from client.site.books import slots_file
from client.site.deals import deal_for_training
from client.training.task import VoterTask
from client.training.voter import LabelledScan, load_scans
from common.config import Study
from common.data.dataset import Case, Dataset, Problem, check_labels
from common.data.patients import scans_by_patient
from common.data.volume import volume_from_bytes
from common.data.volume_cache import VolumeCache
from common.errors import InvalidInput
from common.ledger.records import ReservationRecord, parse_record
from common.objects import ObjectStore

MOST_PUBLIC = 64
"""Most public volumes that an adaptation reads."""


@dataclass(frozen=True, slots=True)
class Patient:
    """One patient's usable scans, and for each scan its entry in the dataset, in the same order."""

    name: str
    scans: tuple[LabelledScan, ...]
    cases: tuple[Case, ...]


@dataclass(frozen=True, slots=True)
class Material:
    """The patients of an adaptation, and the problems of scans that are left out."""

    patients: tuple[Patient, ...]
    problems: tuple[Problem, ...]


@dataclass(frozen=True, slots=True)
class SitePatients:
    """A site's dataset with the study's labels and channels, and the scan ids of each patient who was not withdrawn."""

    dataset: Dataset
    scans: dict[str, tuple[str, ...]]

    def task(self, study: Study, directory: Path) -> VoterTask:
        """Return a training task for all patients of :attr:`scans` together, on the student's grid.

        Args:
            study: The study.
            directory: Where files are written.

        Returns:
            The task.
        """
        listed = {scan for ids in self.scans.values() for scan in ids}
        return VoterTask(
            voter=0,
            patients=tuple(sorted(self.scans.items())),
            cases=tuple(case for case in self.dataset.labelled if case.id in listed),
            known=tuple(problem for problem in self.dataset.problems if problem.case in listed),
            directory=directory,
            seed=0,
            data=study.data.student,
            recipe=study.student,
            trainer="standard",
            deal="",
            absent=self.dataset.absent,
        )


def own_patients(config: SiteConfig, study: Study, *, data: Path | None = None) -> SitePatients:
    """Open the site's dataset without patients who were withdrawn from the pool.

    The caller holds the lock of the teachers.

    Args:
        config: The site's policy.
        study: The study.
        data: Folder of another dataset; None for the site's.

    Returns:
        The dataset and its patients.

    Raises:
        InvalidInput: If the dataset does not fit the study, or :func:`~client.site.deals.deal_for_training` or
            :func:`~client.records.scan_patients.check_scans` refuses its patients.
    """
    dataset = open_for_training(data or config.path(config.data), study.data.student, config.dataset)
    check_labels(dataset, study.data.student)
    scans = scans_by_patient(dataset)
    if data is None:
        check_scans(slots_file(config), scans, identity=dataset.patient_identity)
    left = deal_for_training(config, scans.keys(), identity=None if data else dataset.patient_identity)
    return SitePatients(dataset, {name: ids for name, ids in scans.items() if name not in left})


def material_of(own: SitePatients, study: Study, *, folder: Path, cache: VolumeCache) -> Material:
    """Read every scan of the site's patients.

    Args:
        own: The site's dataset and patients.
        study: The study.
        folder: Where files are written.
        cache: Where volumes beyond the memory limit are kept.

    Returns:
        The patients.

    Raises:
        InvalidInput: If no scan can be used.
    """
    usable, problems = load_scans(own.task(study, folder), cache)
    cases = {case.id: case for case in own.dataset.labelled}
    patients = []
    for name, ids in sorted(own.scans.items()):
        there = [scan for scan in ids if scan in usable]
        if there:
            patients.append(Patient(name, tuple(usable[scan] for scan in there), tuple(cases[scan] for scan in there)))
    if not patients:
        reason = f"{problems[0].case}: {problems[0].reason}" if problems else "the dataset lists none"
        raise InvalidInput(
            "no usable labelled case to adapt to",
            value=reason,
            remedy="run `consilium site doctor --data FOLDER`, which explains each case",
        )
    return Material(tuple(patients), problems)


def public_material(config: SiteConfig, study: Study, *, cache: VolumeCache) -> dict[str, np.ndarray | Path]:
    """Read the public volumes of the study's accepted queries from the site's cache.

    A volume that is not in the cache is left out, never downloaded.

    Args:
        config: The site's policy.
        study: The study.
        cache: Where volumes beyond the memory limit are kept.

    Returns:
        At most :data:`MOST_PUBLIC` volumes by their hash, each the image or its file in the cache; none if the study
        asked this site nothing.
    """
    store = ObjectStore(config.root / "cache")
    names = islice((volume for volume in _asked(config, study) if volume in store), MOST_PUBLIC)
    return {name: cache.keep(volume_from_bytes(store.get(name), study.data.student).image) for name in names}


def _asked(config: SiteConfig, study: Study) -> tuple[str, ...]:
    """Return the hashes of the public volumes of this study's accepted queries, each once."""
    if not config.ledger_file.exists():
        return ()
    with SiteLedger.read(config.ledger_file) as ledger:
        records = (parse_record("site", row.kind, row.body) for row in ledger.rows() if row.kind == "reservation")
        accepted = (each for each in records if isinstance(each, ReservationRecord) and each.study_id == study.id)
        return tuple(dict.fromkeys(volume for each in accepted for volume in each.query.volumes))
