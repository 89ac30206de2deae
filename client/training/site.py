"""Train a site's teachers: the patients dealt to voters, one training a voter, one report of all."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from pathlib import Path

from client.records.patient_deal import ANOTHER_DIRECTORY, Slots, load_or_deal
from client.records.voter_files import voter_directory
from client.training.private.settings import PrivateSettings
from client.training.private.teachers import check_network
from client.training.task import Crash, SiteReport, VoterOutcome, VoterTask
from client.training.voter import trainer_of
from common.config import DataConfig, TrainingConfig
from common.data.dataset import Dataset, check_labels
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
    """Deal the patients (or read how they were dealt) and say what each voter is trained on; opens no scan.

    ``start``: public weights to begin from, for every trainer, of ``paired`` public cases or not. ``seed`` decides the
    deal and the trainings, of synthetic data alone. ``slots_file``: where the pool keeps how its patients are dealt to
    this many voters, ``slots.json`` beside the teachers unless given; ``withdrawn``: patients who left the pool, whom
    no deal takes in any more. The caller holds the locks (:func:`client.records.lock.writing`) of both places.
    Raises InvalidInput for a dataset of other labels or channels, an unknown trainer, a network that the private
    strategy cannot train, a start that is not this network's weights, a seed for patients, nobody (for a private
    training, fewer patients than voters), and a scan that its table gives to another patient than before: all of it is
    decided by what a person wrote, none of it by what a scan holds.
    """
    _check_plan(dataset, data=data, recipe=recipe, trainer=trainer, start=start, seed=seed)
    if private is not None:
        check_network(recipe, private, channels=len(data.channels), classes=len(data.labels))
    scans = {patient: ids for patient, ids in scans_by_patient(dataset).items() if patient not in withdrawn}
    slots = load_or_deal(slots_file or teachers / "slots.json", scans, voters=voters, seed=seed)
    _refuse_regrouped(scans, slots)
    if private is not None and len(slots.order) < voters:
        raise InvalidInput("patients for private training", value=len(slots.order), limit=f"one for {voters} voters")
    tasks = []
    for voter in range(voters):
        patients = tuple((name, scans.get(name, (name,))) for name in slots.part(voter) if not slots.is_empty(name))
        own = {scan for _, ids in patients for scan in ids}
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
    return tuple(tasks)


def _check_plan(
    dataset: Dataset, *, data: DataConfig, recipe: TrainingConfig, trainer: str, start: Path | None, seed: int | None
) -> None:
    trainer_of(trainer)  # refuses a name that nobody registered
    check_labels(dataset, data)
    if seed is not None and not dataset.synthetic:
        raise InvalidInput(
            "seed",
            value=seed,
            limit="data that Consilium made itself: who knows the seed could tell one patient from another by the deal",
            remedy="leave it out; patients are dealt at random, once, and the deal is stored",
        )
    if start is not None:  # before a private training is charged: weights of another network could not be trained
        empty = network_for(recipe, data)
        load_weights(start, empty)


def _refuse_regrouped(scans: Mapping[str, tuple[str, ...]], slots: Slots) -> None:
    """InvalidInput where a scan that was dealt as a patient now belongs to another."""
    regrouped = sorted({scan for ids in scans.values() for scan in ids} & set(slots.order) - scans.keys())
    if regrouped:
        raise InvalidInput(
            "scans that were dealt as separate patients now belong to other patients",
            value=regrouped[:3],
            remedy=f"give each scan the patient it had; for a new grouping {ANOTHER_DIRECTORY}",
        )


def scans_by_patient(dataset: Dataset) -> dict[str, tuple[str, ...]]:
    """The ids of each patient's scans listed for training, good or bad; a patient is what the dataset says, or a scan.

    Decided by the index alone, before any file is looked at.
    """
    scans: dict[str, list[str]] = {}
    for scan in dataset.listed:
        scans.setdefault(dataset.patient_of(scan), []).append(scan)
    return {patient: tuple(sorted(ids)) for patient, ids in scans.items()}


def site_report(outcomes: Iterable[VoterOutcome | Crash]) -> SiteReport:
    """The outcomes as one report, whatever they are: a site without one usable case takes part like any other."""
    outcomes = tuple(outcomes)
    done = [outcome for outcome in outcomes if isinstance(outcome, VoterOutcome)]
    crashes = tuple(outcome for outcome in outcomes if isinstance(outcome, Crash))
    problems = tuple(problem for outcome in done for problem in outcome.problems)
    return SiteReport(voters=tuple(outcome.report for outcome in done), problems=problems, crashes=crashes)
