"""Measures which networks each hospital can make of the released student, by every method of `consilium site adapt`.

A method is called a *way*. `consilium bench utility --home` calls this module. The networks are those of
:mod:`client.adapting`, trained on all of a hospital's private patients and scored on the benchmark's held-out cases.
"Own" is the network that a hospital makes alone: it has the student's recipe and number of steps, and begins from the
public start if the study has one. Finished trainings are stored, so that a stopped run continues.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from client.adapting.adapt import STRENGTH, chosen_way, cross_validated
from client.adapting.material import Patient
from client.adapting.methods import Method, usual
from client.adapting.networks import Networks, Terms
from client.training.voter import LabelledScan
from research.bench import Bench
from research.roles import Cases
from research.scores import at_site
from research.stored_results import NumbersFile, array_hash

HOME, CHOSEN = "home", "home-chosen"
"""Names of two optional parts. Both measure every way of adapting. The second one also measures the way that `site
adapt` chooses by cross-validation.
"""


def measure_home(
    bench: Bench, student: torch.nn.Module, part: str, cell: NumbersFile, report: Callable[[str], None]
) -> dict[str, float]:
    """Return the Dice of every hospital's networks on the held-out cases.

    Args:
        bench: The setting and seed.
        student: The released student.
        part: :data:`HOME` or :data:`CHOSEN`.
        cell: Where results are stored.
        report: Called with each hospital's name.

    Returns:
        For each hospital its number of patients and the Dice of each way, by a name like
        ``home own@site``. The part :data:`CHOSEN` also returns the Dice of the chosen way, ``home chosen@site``.
    """
    start = bench.start_file() if bench.begun else None
    recipe = bench.setting.student
    public = {array_hash(image): image for image in bench.roles.public.images}
    terms = Terms(bench.study.data.student, recipe, student, start=start, strength=STRENGTH, public=public)
    folder = bench.kept.folder / "home"
    folder.mkdir(exist_ok=True)
    make = partial(Networks, terms, folder, on_step=lambda steps, loss: None)
    for site, cases in zip(bench.roles.sites, bench.roles.private, strict=True):
        report(f"{part}: {site}")
        patients = patients_of(cases)
        networks, count = make([scan for patient in patients for scan in patient.scans]), at_site("home patients", site)
        for way in Method:
            if at_site(f"home {way}", site) not in cell.values():
                dice = bench.dice(networks.of(way), bench.roles.held_out)
                cell.add({at_site(f"home {way}", site): dice, count: float(len(patients))})
        if part == CHOSEN and at_site("home chosen", site) not in cell.values():
            checked = cross_validated(patients, make, terms)
            way = chosen_way(checked, default=usual(len(patients), public=True))
            cell.add({at_site("home chosen", site): cell.values()[at_site(f"home {way}", site)]})
    return cell.values()


def patients_of(cases: Cases) -> list[Patient]:
    """Return a hospital's patients, each with all of its scans, so that no patient is in two folds.

    A patient is named by the hash of its first scan, as in earlier results, in which every scan counted as a patient.

    Args:
        cases: The hospital's cases.
    """
    scans = [
        LabelledScan(image, label, (array_hash(image, label),))
        for image, label in zip(cases.images, cases.labels, strict=True)
    ]
    by_patient: dict[str, list[LabelledScan]] = {}
    for row, scan in enumerate(scans):
        by_patient.setdefault(cases.patients[row] if cases.patients else str(row), []).append(scan)
    return [Patient(own[0].hashes[0], tuple(own), ()) for own in by_patient.values()]
