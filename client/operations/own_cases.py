"""Decides which cases a hospital's own page may show, and computes what each network predicts for them.

Whenever a case is requested, these rules apply in order:

1. Cases of withdrawn patients are not shown. Withdrawn patients are recognised by the keyed hashes in the pool's ledger
   and slots files, as before a training.
2. Cases that cannot be used are not shown: those that the dataset's reader left out and, in the site's own dataset,
   those that the last training left out.
3. A prediction in memory is used again only if the files of the case and of every network have not changed since, as
   their size, times and inode show. A new network or scan is therefore shown without a restart.
4. An adapted network is not used if a patient it was trained on was withdrawn since, or if that cannot be excluded.

If it cannot be known who was withdrawn, no case is shown. Nothing is written to disk. A new withdrawal deletes all
predictions in memory.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from threading import RLock
from typing import TYPE_CHECKING

import numpy as np

from client.data.cases import has_trained, load_cases
from client.data.layouts import indexed
from client.policy import SiteConfig
from client.records.adapted_folder import FOLDER, NAME, seen_by
from client.records.declared import DECLARED
from client.records.served import retired_voters
from client.site.books import read_books
from client.site.deals import all_still_in, read_withdrawn, silent_voters, trained_on
from client.teachers.pulled_student import STUDENT_DIR
from common.config import Study
from common.data.dataset import Case, Dataset
from common.errors import InvalidInput
from common.hospital_page import ShownCase
from common.ledger.rollback_guard import standing_path

if TYPE_CHECKING:
    from client.teachers.teacher import Teachers

MOST_CASES = 200
"""Largest number of labelled cases that the page offers: the first ones of the dataset."""

KEPT_CASES = 4
"""Number of cases, those shown last, whose predictions stay in memory. A large case takes tens of megabytes."""

STUDENT, OWN, ADAPTED = "student", "own", "adapted"
_TEACHER_FILES = ("train.json", "weights.pt", "posterior.pt", DECLARED)

Identity = tuple[tuple[str, int, int, int, int], ...]
"""Path, size, times of the last change of content and of the file's entry, and inode of each file."""


@dataclass(frozen=True, slots=True)
class CaseList:
    """Which of the dataset's labelled cases may be shown.

    Attributes:
        cases: The labelled cases by number from 0, at most :data:`MOST_CASES`.
        numbers: Numbers of those that may be shown.
        patients: Number of patients with a labelled case; None if the dataset cannot be read.
        withdrawn: Number of labelled cases of withdrawn patients.
        left_out: Number of cases that this site leaves out, beside those of withdrawn patients.
        problem: Why no case may be shown; empty if cases may be shown.
    """

    cases: tuple[Case, ...] = ()
    numbers: tuple[int, ...] = ()
    patients: int | None = None
    withdrawn: int = 0
    left_out: int = 0
    problem: str = ""


class OwnCases:
    """The cases of one site, and what the site's networks predict for the cases that were shown most recently.

    Args:
        directory: The site's directory.
        config: The site's policy.
        study: The study.
        data: Folder of the cases; None for the site's own dataset.
    """

    def __init__(self, directory: Path, config: SiteConfig, study: Study, *, data: Path | None = None) -> None:
        self._directory, self._config, self._study, self._data = directory, config, study, data
        self._lock = RLock()  # a page asks for many slices at once: predict for the first, wait with the others
        self._dataset: Dataset | None = None
        self._list, self._books = CaseList(), _identity(())
        self._gone: frozenset[str] = frozenset()
        self._withdrawals: frozenset[tuple[str | None, str]] = frozenset()
        self._kept: OrderedDict[tuple[object, ...], ShownCase] = OrderedDict()

    def listed(self) -> CaseList:
        """Read the dataset's index again and return its cases. Their numbers are valid until the next call.

        Returns:
            The cases.
        """
        with self._lock:
            try:
                data = self._data or self._config.path(self._config.data)
                self._dataset = indexed(data, self._study.data, self._config.dataset)
            except (InvalidInput, OSError):
                self._dataset = None
            return self._look()

    def networks(self) -> dict[str, Path]:
        """Return the folders of the networks whose predictions can be shown side by side.

        The result is empty if the site has neither the student nor an adapted network. An adapted network is left out
        if it may have been trained on a withdrawn patient; call :meth:`listed` or :meth:`shown` before, which read the
        withdrawals.

        Returns:
            Folders by name.
        """
        places = {
            STUDENT: self._directory / STUDENT_DIR / "bundle",
            OWN: self._directory / "teachers",
            ADAPTED: self._adapted,
        }
        there = {name: path for name, path in places.items() if path.is_dir()}
        if self.outdated() is not None:
            del there[ADAPTED]
        return there if {STUDENT, ADAPTED} & there.keys() else {}

    def outdated(self) -> Path | None:
        """Return the adapted network's folder if one of the patients it was trained on may have been withdrawn since.

        The adapted network is the student, trained further on this site's patients. Returns None if certainly none of
        its patients was withdrawn, or if the site has no adapted network.
        """
        if not self._adapted.is_dir() or all_still_in(seen_by(self._adapted), self._withdrawals):
            return None
        return self._adapted

    def adapted_on(self) -> int:
        """Return how many of the cases that may be shown are of patients on whom the adapted network was trained.

        If the network's bundle does not state these patients, every case of the pool's patients counts.
        """
        with self._lock:
            dataset, listed = self._dataset, self._list
        if dataset is None:
            return 0
        patients = [dataset.patient_of(listed.cases[number].id) for number in listed.numbers]
        found = trained_on(self._config.books_dir, set(patients), seen=seen_by(self._adapted))
        return sum(patient in found for patient in patients)

    @property
    def _adapted(self) -> Path:
        return self._directory / FOLDER / f"{NAME}-{self._config.site}"

    def shown(self, number: int) -> ShownCase:
        """Return a case with what every network predicts for it.

        Args:
            number: Number of the case in :meth:`listed`.

        Returns:
            The case on the study's grid.

        Raises:
            InvalidInput: If the case must not be shown, or a file of the case or of a network cannot be used.
        """
        with self._lock:
            found = self.listed() if self._dataset is None else self._again()
            if found.problem:
                raise InvalidInput(
                    f"no case of this site can be shown: {found.problem}",
                    limit="cases of a site whose records of withdrawals and of the last training can be read",
                )
            if number not in found.numbers:
                raise InvalidInput(
                    "case",
                    value=number + 1,
                    limit="the number of a case that this page offers",
                    remedy="choose one on the page; `consilium site doctor --data FOLDER` says which cases can be used",
                )
            case, networks = found.cases[number], self.networks()
            files = {name: _files(name, path) for name, path in networks.items()}
            key = (
                case,
                _identity((*case.images, *(() if case.label is None else (case.label,)))),
                *((name, _identity(paths)) for name, paths in files.items()),
            )
            if key not in self._kept:
                self._kept[key] = self._predicted(case, networks)
                while len(self._kept) > KEPT_CASES:
                    self._kept.popitem(last=False)
            self._kept.move_to_end(key)
            return self._kept[key]

    def _again(self) -> CaseList:
        """Return the list of cases, computed anew only if the files on withdrawals and trainings have changed."""
        return self._list if self._books == self._book_files() else self._look()

    def _look(self) -> CaseList:
        self._books = self._book_files()
        self._list = self._decided(self._dataset)
        return self._list

    def _book_files(self) -> Identity:
        ledger, books = self._config.ledger_file, self._config.books_dir
        own = self._directory / "teachers" / "cases.json"
        slots = sorted((books / "teachers").glob("slots*.json"))
        return _identity((ledger, Path(f"{ledger}-wal"), standing_path(ledger), own, *slots))

    def _decided(self, dataset: Dataset | None) -> CaseList:
        if dataset is None:
            self._forget(frozenset(), all_of_them=True)
            return CaseList()
        labelled = dataset.labelled
        patients = {dataset.patient_of(case.id) for case in labelled}
        cases = labelled[:MOST_CASES]
        try:
            gone, self._withdrawals = read_withdrawn(self._config, patients)
            left = {problem.case for problem in dataset.problems}
            if self._data is None and has_trained(self._directory):
                left |= {problem.case for problem in load_cases(self._directory).problems}
        except InvalidInput as error:
            self._forget(frozenset(), all_of_them=True)
            return CaseList(cases, patients=len(patients), problem=str(error))
        self._forget(gone)
        numbers = tuple(
            number
            for number, case in enumerate(cases)
            if dataset.patient_of(case.id) not in gone and case.id not in left
        )
        there = {case.id for case in labelled} | set(dataset.listed)
        return CaseList(
            cases,
            numbers,
            len(patients),
            withdrawn=sum(dataset.patient_of(case.id) in gone for case in labelled),
            left_out=sum(dataset.patient_of(case) not in gone for case in left & there),
        )

    def _forget(self, gone: frozenset[str], *, all_of_them: bool = False) -> None:
        if all_of_them or gone != self._gone:
            self._kept.clear()
        self._gone = gone

    def _predicted(self, case: Case, networks: dict[str, Path]) -> ShownCase:
        from common.data.volume import load_example  # torch
        from common.metrics import dice_per_class, mean_present
        from common.models.bundle import open_bundle
        from common.models.fit import predict

        data = self._study.data.student
        example = load_example(case, data)
        image = example.volume.image
        arrays = {"image": _grey(image[0]), "label": example.label}
        for name, path in networks.items():
            if name != OWN:
                bundle = open_bundle(path)
                arrays[name] = predict(bundle.network, image, patch=bundle.patch).argmax(axis=0).astype(np.uint8)
            elif self._study.data.finer == 1:  # teachers see the coarser grid else
                votes = [one for one in self._voting(path).predict(image) if one is not None]
                if votes:
                    arrays[name] = np.mean(votes, axis=0).argmax(axis=0).astype(np.uint8)
        found = {
            name: mean_present(dice_per_class(drawn, example.label, data.members))
            for name, drawn in arrays.items()
            if name in networks
        }
        dice = {name: None if np.isnan(value) else float(value) for name, value in found.items()}
        return ShownCase(arrays, data.labels, data.spacing_mm, dice)

    def _voting(self, path: Path) -> Teachers:
        """Return the site's teachers without those that may have seen a withdrawn patient, as a worker loads them."""
        from client.teachers.teacher import Teachers

        teachers, silent = Teachers.load(path, data=self._study.data), retired_voters(path)
        if self._config.ledger_file.exists():
            with read_books(self._config) as ledger:
                silent |= silent_voters(self._config, ledger, teachers.served)
        return teachers.without(silent)


def _files(name: str, folder: Path) -> tuple[Path, ...]:
    """Return the files on which a network's predictions depend."""
    if name != OWN:
        return (folder,)
    return tuple(voter / file for voter in sorted(folder.glob("voter-[0-9][0-9][0-9]")) for file in _TEACHER_FILES)


def _identity(paths: Iterable[Path]) -> Identity:
    """Return the identity of files and of all files in folders; missing and empty files are left out."""
    found = []
    for path in paths:
        for file in sorted(path.rglob("*")) if path.is_dir() else (path,):
            try:
                stat = file.stat()
            except OSError:
                continue
            if stat.st_size and not file.is_dir():
                found.append((str(file), stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino))
    return tuple(found)


def _grey(image: np.ndarray) -> np.ndarray:
    """Return a channel as bytes: its values between the 0.5 % and the 99.5 % quantile, scaled to 0 to 255."""
    low, high = np.percentile(image, (0.5, 99.5))
    scaled = np.clip((image - low) / max(high - low, 1e-6), 0, 1)
    result: np.ndarray = np.round(255 * scaled).astype(np.uint8)
    return result
