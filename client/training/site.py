"""Plans the trainings of all voters of a site, and joins their outcomes into one report.

``client.training.command`` calls it. What a person wrote (labels, channels, trainer, start, seed) is checked and
refused before any scan is opened.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from pathlib import Path

from client.records.patient_deal import Slots, load_or_deal
from client.records.scan_patients import check_scans, record_scans
from client.records.voter_files import voter_directory
from client.training.private.settings import PrivateSettings
from client.training.private.teachers import check_network
from client.training.task import Crash, SiteReport, VoterOutcome, VoterTask
from client.training.voter import trainer_of
from common.config import DataConfig, TrainingConfig
from common.data.dataset import Dataset, check_labels
from common.data.patients import scans_by_patient
from common.errors import InvalidInput
from common.models.unet import load_weights, network_for


def plan_site(
    dataset: Dataset,
    *,
    teachers: Path,
    data: DataConfig,
    recipe: TrainingConfig,
    voters: int,
    trainer: str = "standard",
    private: PrivateSettings | None = None,
    start: Path | None = None,
    paired: bool = False,
    seed: int | None = None,
    slots_file: Path | None = None,
    withdrawn: Collection[str] = (),
) -> tuple[VoterTask, ...]:
    """Assign the patients to voters, or read the stored assignment, and plan the training of each voter.

    No scan is opened, so every refusal depends on what a person wrote, never on the content of a scan. The caller holds
    the locks (:func:`client.records.lock.writing`) of the site's directory and of the one that stores the assignment.

    Args:
        dataset: The site's dataset.
        teachers: The site's directory of teachers.
        data: The study's labels, channels and grid.
        recipe: The study's recipe of a teacher.
        voters: Number of voters m.
        trainer: Name of the trainer.
        private: What a private training may spend; None for the standard trainer.
        start: Public weights from which every trainer begins; None for random ones.
        paired: Whether the public start was trained on public cases with labels.
        seed: Fixes the assignment and the trainings; for synthetic data only.
        slots_file: The pool's file of the assignment; by default ``slots.json`` beside the teachers.
        withdrawn: Patients who left the pool and are not assigned again.

    Returns:
        One task for each voter.

    Raises:
        InvalidInput: If labels or channels differ from the study's. If the trainer is unknown, the private strategy
            cannot train the network, or ``start`` is for another network. If a seed is given with real patients. If
            there is no patient, or a private training has fewer patients than voters or a plan that a voter cannot run.
            If :func:`~client.records.scan_patients.check_scans` refuses the patients of the scans.
    """
    trainer_of(trainer)  # refuses a name that nobody registered
    check_labels(dataset, data)
    if seed is not None and not dataset.synthetic:
        raise InvalidInput(
            "seed",
            value=seed,
            limit="only with data that Consilium made itself: with a known seed, exchanging one patient could move "
            "other patients to other voters, which the guarantee rules out",
            remedy="leave it out; patients are assigned to voters at random, once, and the assignment is stored",
        )
    if start is not None:  # before a private training is charged: weights of another network could not be trained
        load_weights(start, network_for(recipe, data))
    if private is not None:
        check_network(recipe, private, data)
    scans = {patient: ids for patient, ids in scans_by_patient(dataset).items() if patient not in withdrawn}
    slots = seated(dataset, scans, slots_file or teachers / "slots.json", voters=voters, seed=seed)
    if private is not None and len(slots.order) < voters:
        raise InvalidInput(
            "patients for private training", value=len(slots.order), limit=f"at least {voters}, one for each voter"
        )
    tasks = []
    for voter in range(voters):
        patients = scans_in_slots(slots, scans, voter=voter)
        own = {scan for patient, ids in patients for scan in ids if patient not in withdrawn}
        task = VoterTask(
            voter=voter,
            patients=patients,
            cases=tuple(case for case in dataset.labelled if case.id in own),
            known=tuple(problem for problem in dataset.problems if problem.case in own),
            directory=voter_directory(teachers, voter),
            seed=slots.voter_seed(voter),
            data=data,
            recipe=recipe,
            trainer=trainer,
            deal=slots.deal,
            private=private,
            start=start,
            paired=paired,
            absent=dataset.absent,
        )
        tasks.append(task)
    if private is not None:  # every voter's plan is tested before the first voter is charged
        for patients_of_one in sorted({task.training_slots for task in tasks}):
            private.plan(patients=patients_of_one)
    return tuple(tasks)


def seated(
    dataset: Dataset, scans: Mapping[str, tuple[str, ...]], slots_file: Path, *, voters: int, seed: int | None = None
) -> Slots:
    """Read or make the assignment of a dataset's patients to slots, and store it. No scan is opened.

    Args:
        dataset: The dataset.
        scans: The scans of each patient who was not withdrawn.
        slots_file: The file of the assignment; it need not exist.
        voters: Number of voters.
        seed: Fixes a new assignment; for synthetic data only.

    Returns:
        The assignment.

    Raises:
        InvalidInput: If :func:`~client.records.scan_patients.check_scans` or
            :func:`~client.records.patient_deal.load_or_deal` refuses the patients.
    """
    check_scans(slots_file, scans_by_patient(dataset), identity=dataset.patient_identity)
    slots = load_or_deal(slots_file, scans, voters=voters, seed=seed)
    record_scans(slots_file, slots, scans, identity=dataset.patient_identity)
    return slots


def scans_in_slots(
    slots: Slots, scans: Mapping[str, tuple[str, ...]], *, voter: int
) -> tuple[tuple[str, tuple[str, ...]], ...]:
    """Return name and scans of the patient in each of a voter's slots, in slot order.

    A patient who is no longer listed keeps the slot, which then has no usable scan.

    Args:
        slots: The assignment.
        scans: The scans of each listed patient.
        voter: The voter.

    Returns:
        The patients.
    """
    return tuple((name, scans.get(name, (name,))) for name in slots.part(voter) if not slots.is_empty(name))


def site_report(outcomes: Iterable[VoterOutcome | Crash]) -> SiteReport:
    """Join the voters' outcomes into one report. A site without a usable case gets a report like any other.

    Args:
        outcomes: Outcome or crash of each voter.

    Returns:
        The report.
    """
    outcomes = tuple(outcomes)
    done = [outcome for outcome in outcomes if isinstance(outcome, VoterOutcome)]
    crashes = tuple(outcome for outcome in outcomes if isinstance(outcome, Crash))
    problems = tuple(problem for outcome in done for problem in outcome.problems)
    return SiteReport(voters=tuple(outcome.report for outcome in done), problems=problems, crashes=crashes)
