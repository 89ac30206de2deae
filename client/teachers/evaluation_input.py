"""Reads what an evaluation needs beside the cases: the network's bundle, and how the teachers used each scan.

Evaluation and adaptation call it. It refuses a bundle of another grid, spacing or labels than the study's.
"""

from __future__ import annotations

from pathlib import Path

from client.policy import load_site
from client.records.patient_deal import load_slots
from client.site.books import read_books, slots_file
from client.site.deals import as_on_record
from client.training.task import held_out_count
from common.config import DataConfig
from common.data.msd import Dataset
from common.data.patients import scans_by_patient
from common.errors import InvalidInput
from common.models.bundle import Bundle, open_bundle

PARTS = ("trained on", "held out", "not used")
"""How this site's teachers used a case: for training, held out by its voter, or not at all."""

NOT_USED = PARTS[2], -1
"""Use and voter of a case that :func:`parts_of` does not list."""


def load_bundle(bundle: Path, data: DataConfig) -> Bundle:
    """Open a bundle that fits the study.

    Args:
        bundle: The bundle's folder.
        data: The study's labels, channels and grid.

    Returns:
        The bundle.

    Raises:
        InvalidInput: If its grid, spacing, labels or number of channels differ.
    """
    opened = open_bundle(bundle)
    found = opened.data
    if (found.grid, found.spacing_mm, found.labels, len(found.channels)) != (
        data.grid,
        data.spacing_mm,
        data.labels,
        len(data.channels),
    ):
        raise InvalidInput(
            "the bundle's grid, spacing or labels differ from the study's",
            value=found.labels,
            remedy="give a bundle of this study",
        )
    return opened


def parts_of(site_dir: Path, dataset: Dataset) -> dict[str, tuple[str, int]]:
    """Return how the site's teachers used each scan of a dataset.

    Args:
        site_dir: The site's directory.
        dataset: The dataset.

    Returns:
        For each scan its use (one of :data:`PARTS`) and its voter; empty if patients were not assigned to voters yet.
    """
    config = load_site(site_dir)
    path = slots_file(config)
    if not path.exists():
        return {}
    scans = scans_by_patient(dataset)
    slots = load_slots(path)
    if config.ledger_file.exists():
        with read_books(config) as ledger:
            slots = as_on_record(slots, ledger, names=scans)
    parts: dict[str, tuple[str, int]] = {}
    for voter in range(slots.voters):
        patients = [name for name in slots.part(voter) if not slots.is_empty(name)]
        first_held_out = len(patients) - held_out_count(len(patients))
        for place, patient in enumerate(patients):
            parts |= dict.fromkeys(scans.get(patient, ()), (PARTS[place >= first_held_out], voter))
    return parts
