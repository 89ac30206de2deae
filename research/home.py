"""Measures what each hospital can make of the released student at home, in every way that `consilium site adapt` knows.

`consilium bench utility --home` calls it. The networks are those of :mod:`client.adapting`, trained on all of a
hospital's patients and scored on the held-out cases. "Own" is the best network that a hospital makes alone: the
student's recipe and number of steps, begun from the public start if the study has one. Finished trainings are stored.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch

from client.adapting.adapt import STRENGTH, cross_validated
from client.adapting.material import Patient
from client.adapting.networks import Networks, Terms
from client.adapting.ways import FEW, Way, choose, folds_for
from client.training.voter import LabelledScan
from research.bench import Bench
from research.kept import Cell, array_hash
from research.roles import Cases
from research.scores import at_site

HOME, CHOSEN = "home", "home-chosen"
"""The optional parts: every way on all patients, and the way that `site adapt` chooses by cross-validation."""


def measure_home(
    bench: Bench, student: torch.nn.Module, part: str, cell: Cell, report: Callable[[str], None]
) -> dict[str, float]:
    """Return the Dice of every hospital's networks on the held-out cases.

    Args:
        bench: The setting and seed.
        student: The released student.
        part: :data:`HOME` or :data:`CHOSEN`.
        cell: Where results are stored.
        report: Called with each hospital's name.

    Returns:
        By name: number of patients and the Dice of each way of each hospital (``home own@site``); or the Dice of the
        chosen way (``home chosen@site``).
    """
    terms = Terms(
        bench.study.data.student,
        bench.setting.student,
        student.eval(),
        start=bench.start_file() if bench.begun else None,
        strength=STRENGTH,
    )
    folder = bench.kept.folder / "home"
    folder.mkdir(exist_ok=True)
    make = partial(Networks, terms, folder, on_step=lambda steps, loss: None)
    for site, cases in zip(bench.roles.sites, bench.roles.private, strict=True):
        report(f"{part}: {site}")
        patients = _patients(cases)
        networks = make([scan for patient in patients for scan in patient.scans])
        missing = [way for way in _wanted(part) if at_site(f"home {way or 'chosen'}", site) not in cell.values()]
        for way in missing:
            network = networks.of(way or _chosen(patients, make, terms))
            cell.add({at_site(f"home {way or 'chosen'}", site): bench.dice(network, bench.roles.held_out)})
        cell.add({at_site("home patients", site): float(len(patients))})
    return cell.values()


def _wanted(part: str) -> Sequence[Way | None]:
    return (None,) if part == CHOSEN else tuple(Way)


def _chosen(patients: Sequence[Patient], make: Callable[..., Networks], terms: Terms) -> Way:
    folds = folds_for(len(patients))
    return choose(cross_validated(patients, make, terms, folds=folds).means()) if folds else FEW


def _patients(cases: Cases) -> list[Patient]:
    """Return a hospital's cases as patients of one scan each."""
    pairs = zip(cases.images, cases.labels, strict=True)
    scans = [LabelledScan(image, label, (array_hash(image, label),)) for image, label in pairs]
    return [Patient(scan.hashes[0], (scan,), ()) for scan in scans]
