"""Runs `consilium site train`: plans, charges, trains and records the site's teachers.

1. Read the site's policy and the study; refuse if nobody consented to the study. Read the dataset.
2. Plan each voter's training (:func:`~client.training.site.plan_site`).
3. Record the trainings, and charge private ones, in the site's ledger.
4. Train the voters in parallel processes.
5. Record the teachers that were made.

If 1, 2 or 3 ends with an error, no training step is spent.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, fields, replace
from enum import StrEnum
from fractions import Fraction
from pathlib import Path
from typing import Any

from client.data.cases import CaseRecord, check_labelled, delta_warning, record_cases
from client.data.layouts import DatasetSettings, open_for_training
from client.operations.staff_decisions import check_consent
from client.policy import LEDGER_FILE, SiteConfig, load_site
from client.records.declared import has_foreign
from client.records.patient_deal import LOOK_ALIKE_REMEDY, look_alike_names, look_alike_text, look_alikes
from client.site.books import slots_file, writing_teachers
from client.site.deals import deal_for_training
from client.site.enrolment import start_warning, study_start
from client.training.private.charge import record_trained, record_trainings
from client.training.private.settings import MAX_EPSILON, OF_SOME, STRATEGIES, PrivateSettings, defaults, option_of
from client.training.side_by_side import default_jobs, side_by_side
from client.training.site import plan_site, site_report
from client.training.task import OnProgress, SiteReport, VoterTask
from common.config import Study, load_study
from common.data.dataset import Dataset
from common.data.patients import scans_by_patient
from common.errors import DaemonFailed, InvalidInput
from common.privacy.consent import warn_about
from common.privacy.mechanism import Unit
from common.privacy.training import Neighbours, Sampling, TrainingEvent, epsilon_of


@dataclass(frozen=True, slots=True)
class PrivateOptions:
    """The options of a private training as typed. An option that is None takes the strategy's default.

    See :class:`~client.training.private.settings.PrivateSettings` for their meaning.
    """

    strategy: str = "standard"
    epsilon: float | None = None
    delta: float = 1e-5
    relation: str = "add-remove"
    sampling: str = "poisson"
    rate: str | None = None
    steps: int | None = None
    learning_rate: float | None = None
    clip: float | None = None
    per_layer: bool | None = None
    scans: int | None = None
    temperature: float | None = None
    prior_std: float | None = None
    mu: float | None = None
    mu_growth: float | None = None
    z_steps: int | None = None
    z_rate: float | None = None
    noise_multiplier: str | None = None

    def settings(self, *, begun: bool) -> PrivateSettings | None:
        """Combine the given options with the strategy's defaults.

        Args:
            begun: True if the training begins from a public start.

        Returns:
            The settings; None for a training without a guarantee.

        Raises:
            InvalidInput: If an option has an invalid value, is not read by the strategy, or is given without a private
                strategy.
        """
        given = [one for one in fields(self) if one.name != "strategy" and getattr(self, one.name) != one.default]
        if self.strategy not in STRATEGIES:
            if given:
                option = option_of(given[0].name)
                raise InvalidInput(
                    f"strategy with the option {option}",
                    value=self.strategy,
                    limit=", ".join(STRATEGIES),
                    remedy=f"give one of these as --strategy, or leave {option} out",
                )
            return None
        asked: dict[str, Any] = {one.name: getattr(self, one.name) for one in given if one.default is None}
        for name in asked:
            if name in OF_SOME and name not in STRATEGIES[self.strategy].reads:
                raise InvalidInput(
                    f"{option_of(name)} with strategy {self.strategy}",
                    value=asked[name],
                    limit="only options that this strategy uses",
                    remedy=f"leave out {option_of(name)}",
                )
        if self.epsilon is None and self.noise_multiplier is None:
            raise InvalidInput(
                f"strategy {self.strategy} without an epsilon",
                remedy="give its budget, such as --epsilon 8, or its noise, such as --noise-multiplier 2.45",
            )
        neighbours = _choice(Neighbours, "relation", self.relation)
        sampling = _choice(Sampling, "sampling", self.sampling)
        asked |= {name: _rational(name, asked[name]) for name in ("rate", "noise_multiplier") if name in asked}
        recipe = defaults(self.strategy, epsilon=self.epsilon or MAX_EPSILON, delta=self.delta, begun=begun)
        made = replace(recipe, neighbours=neighbours, sampling=sampling, **asked)
        if self.epsilon is not None or made.noise_multiplier is None:
            return made
        event = TrainingEvent(
            made.sampling, made.rate, made.noise_multiplier, made.steps
        )  # ε is computed from the noise
        return replace(made, epsilon=epsilon_of(event, delta=made.delta, neighbours=made.neighbours))


def _choice(of: type[StrEnum], name: str, text: str) -> Any:
    """Return the member of an enumeration that was typed; refuse any other text."""
    try:
        return of(text)
    except ValueError as error:
        raise InvalidInput(option_of(name), value=text, limit=" or ".join(of)) from error


def _rational(name: str, text: str) -> Fraction:
    """Return a typed number; refuse one whose digits or power of ten would fill the memory."""
    try:
        if len(text) > 100 or re.search(r"[eE][+-]?\d{3}|[^ -~]|_", text):
            raise ValueError
        return Fraction(text)
    except (ValueError, ZeroDivisionError) as error:
        limit = "a number such as 1/4 or 2.45, with at most 100 characters and an exponent of at most two digits"
        raise InvalidInput(option_of(name), value=text, limit=limit) from error


@dataclass(frozen=True, slots=True)
class TrainOptions:
    """The options of `consilium site train`. An option ``data``, ``study`` or ``layout`` that is None is read from
    ``site.toml``.

    Attributes:
        site_dir: The site's directory.
        data: The dataset's folder.
        study: The study's file.
        layout: Layout of the dataset.
        label_map: File that maps the dataset's labels to the study's; None to take the names in ``site.toml``.
        seed: Fixes the assignment of patients to voters and the trainings; for synthetic data only.
        jobs: Number of processes at once; None to choose it by the number of voters.
        private: Options of a private training.
        again: True to train and charge again patients who were already charged for a private training.
    """

    site_dir: Path
    data: Path | None = None
    study: Path | None = None
    layout: str | None = None
    label_map: Path | None = None
    seed: int | None = None
    jobs: int | None = None
    private: PrivateOptions = PrivateOptions()
    again: bool = False


@dataclass(frozen=True, slots=True)
class TrainResult:
    """The result of `consilium site train`.

    Attributes:
        report: The report on all voters.
        cases: Which cases were used, and why others were not.
        structures: Names of the structures that are scored.
    """

    report: SiteReport
    cases: CaseRecord
    structures: tuple[str, ...]

    def check_finished(self) -> None:
        """Refuse a result in which a voter's training did not finish, or no voter has a teacher.

        Raises:
            DaemonFailed: If a voter crashed; the same command continues it.
            InvalidInput: If no voter has a usable case to train on. The report was written as for any other result.
        """
        if self.report.crashes:
            voters = len(self.report.voters) + len(self.report.crashes)
            raise DaemonFailed(
                f"{len(self.report.crashes)} of {voters} teachers did not finish training; "
                "to fix: run the same command again"
            )
        if not any(voter.weights for voter in self.report.voters):
            held_out = sum(voter.held_out for voter in self.report.voters)
            raise InvalidInput(
                "no teacher has a usable case to train on, so this site would answer every query with a code of zeros",
                value=f"{self.cases.left_out} of {self.cases.listed} cases left out, "
                f"{held_out} usable kept for scoring",
                limit="at least one usable case besides those kept for scoring",
                remedy="correct the cases listed above (`consilium site cases` lists them again), then run the same "
                "command again",
            )

    def to_json(self) -> dict[str, object]:
        """Return plain values for JSON. They contain case ids and must not leave the site."""
        return {
            **self.report.to_json(),
            "patients": self.cases.patients,
            "patient_identity": str(self.cases.patient_identity),
            "doubled": [asdict(pair) for pair in self.cases.doubled],
            "unlabelled": list(self.cases.unlabelled),
        }


Progress = Callable[[int, int], AbstractContextManager[OnProgress]]
"""Function that opens a progress display, from the number of voters and the number of steps of each."""


def train(options: TrainOptions, *, progress: Progress, on_warning: Callable[[str], None]) -> TrainResult:
    """Train the site's teachers; record each training before its first step and its teacher at the end.

    Other commands that change the teachers are locked out meanwhile. An interrupted call continues when repeated.

    Args:
        options: The command's options.
        progress: Opens the progress display.
        on_warning: Called with each warning.

    Returns:
        The report.

    Raises:
        InvalidInput: If no consent to the study is on record, a voter's teacher was added by the hospital, no case has
            an image and a label map, or the plan or the ledger refuses the training.
        Refused: If another command is changing the teachers.
    """
    config, study, settings, data = _terms(options)
    if config is not None:
        check_consent(options.site_dir)
    brought = [v for v in range(study.privacy.voters_per_site) if has_foreign(options.site_dir / "teachers", v)]
    if brought:
        raise InvalidInput(
            "the teachers of these voters were added by the hospital and cannot be trained",
            value=brought,
            remedy="remove them first: `consilium site teacher remove`",
        )
    private = options.private.settings(begun=study_start(options.site_dir, study) is not None)
    dataset = open_for_training(data, study.data, settings)
    check_labelled(dataset, data)
    with writing_teachers({options.site_dir} if config is None else {options.site_dir, config.books_dir}):
        tasks = site_tasks(
            options.site_dir,
            config,
            study,
            dataset,
            trainer=options.private.strategy,
            private=private,
            seed=options.seed,
        )
        for warning in _warnings(options.site_dir, config, study, dataset, tasks, private):
            on_warning(warning)
        record_trainings(options.site_dir, tasks, again=options.again, identity=dataset.patient_identity)
        with progress(len(tasks), tasks[0].steps) as on_progress:
            report = site_report(side_by_side(tasks, on_progress, jobs=options.jobs or default_jobs(len(tasks))))
        record_trained(options.site_dir, tasks, report)
        cases = record_cases(options.site_dir / "teachers", dataset, report.problems)
    for pair in cases.doubled:
        on_warning(f"warning: {pair.sentence}")
    return TrainResult(report, cases, study.data.structures)


def _terms(options: TrainOptions) -> tuple[SiteConfig | None, Study, DatasetSettings, Path]:
    """Return the site's policy (None if not needed), the study, how the data are read, and the data's folder."""
    config, data, study, settings = None, options.data, options.study, DatasetSettings()
    parts = ("site.toml", "request.json", LEDGER_FILE)
    is_site = any((options.site_dir / name).exists() for name in parts)
    if data is None or study is None or is_site:
        config = load_site(options.site_dir)
        data, study = data or config.path(config.data), study or config.path(config.study)
        settings = config.dataset
    settings = settings.overridden(layout=options.layout, label_map=options.label_map)
    return config, load_study(study), settings, data


def site_tasks(
    directory: Path,
    config: SiteConfig | None,
    study: Study,
    dataset: Dataset,
    *,
    trainer: str,
    private: PrivateSettings | None,
    seed: int | None,
) -> tuple[VoterTask, ...]:
    """Plan the training of each voter of a site.

    The plan uses the stored assignment of patients to voters, without patients who were withdrawn, and the study's
    public start (a network trained on public data alone) if there is one.

    Args:
        directory: The site's directory.
        config: The site's policy; None without ``site.toml``.
        study: The study.
        dataset: The dataset.
        trainer: Name of the trainer.
        private: What a private training may spend; None for the standard trainer.
        seed: Fixes the assignment of patients to voters and the trainings; for synthetic data only.

    Returns:
        One task for each voter.

    Raises:
        InvalidInput: If :func:`~client.training.site.plan_site` refuses the plan, or the public start is wrong.
    """
    left: Collection[str] = ()
    if config is not None:
        left = deal_for_training(config, scans_by_patient(dataset), identity=dataset.patient_identity)
    tasks = plan_site(
        dataset,
        teachers=directory / "teachers",
        data=study.data,
        recipe=study.teacher,
        voters=study.privacy.voters_per_site,
        trainer=trainer,
        private=private,
        start=study_start(directory, study),
        paired=study.codec.paired > 0,
        seed=seed,
        slots_file=None if config is None else slots_file(config),
        withdrawn=left,
    )
    return tuple(replace(task, site=None if config is None else directory) for task in tasks)


def _warnings(
    directory: Path,
    config: SiteConfig | None,
    study: Study,
    dataset: Dataset,
    tasks: tuple[VoterTask, ...],
    private: PrivateSettings | None,
) -> list[str]:
    """Return the warnings before a training.

    There are up to four: the study's δ is not small compared with 1 / patients, a private training's δ is not, the
    teachers begin from a public start that the study does not name, or names of patients look alike.
    """
    patients = len(dataset.patients_listed)
    found = {
        "public start": start_warning(directory, study),
        "releases": delta_warning(study.privacy, patients=patients),
    }
    if private is not None:
        fewest = min(task.training_slots for task in tasks)
        found["training"] = warn_about(private.delta, unit=Unit.PATIENT, units=fewest)
    slots = directory / "teachers" / "slots.json" if config is None else slots_file(config)
    if alike := look_alikes(slots, scans_by_patient(dataset)):
        found["patients"] = f"{look_alike_text(alike)}: {look_alike_names(alike)}; to fix: {LOOK_ALIKE_REMEDY}"
    return [f"warning, {what}: {warning}" for what, warning in found.items() if warning is not None]
