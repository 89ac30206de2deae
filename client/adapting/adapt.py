"""Adapts the student to the hospital's own patients, at the hospital; nothing is sent and no budget is spent.

`consilium site adapt` calls it. The student's guarantee is not affected by what a hospital trains from it and keeps.
The result has no guarantee: its bundle states that it was trained on patients and must not leave. A *way* is one method
of making the network (:mod:`client.adapting.methods`). Steps:

1. Take the student that was fetched from the server, the hospital's patients without withdrawn ones, and the public
   volumes about which the study asked this site.
2. Score the student, the public models and the site's own teachers on the cases, and refuse cases that fit no model.
3. With enough patients, cross-validate: train every way on four fifths of them at a time and score it on the rest.
4. Take the usual way for this number of patients, unless the cross-validation proves another way better.
5. Train that way on all patients, and write the bundle and the report.

It refuses a student of another study's grid or labels, one that was trained on patients already, and a site without a
usable labelled case.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType

import numpy as np
import torch

from client.adapting.adapted import Adapted, Figures
from client.adapting.material import Material, Patient, SitePatients, material_of, own_patients, public_material
from client.adapting.methods import (
    TEACHERS,
    TRAININGS,
    Method,
    by_choice,
    choose,
    filled,
    fold_of,
    folds_for,
    needs_public,
    usual,
    ways_with,
)
from client.adapting.networks import Networks, Terms
from client.adapting.report import write_report
from client.adapting.seen_bundle import check_place, write_seen_bundle
from client.policy import SiteConfig, load_site
from client.records.adapted_folder import FOLDER, NAME, REPORT
from client.records.adapted_folder import TRAININGS as KEPT
from client.site.books import writing_teachers
from client.site.deals import patients_seen
from client.site.enrolment import study_start
from client.teachers.comparison import OWN_TEACHERS, Answer, codec_of, references
from client.teachers.evaluation_input import NOT_USED, load_bundle, parts_of
from client.teachers.fit_of_cases import FitScores, fit_of
from client.teachers.pulled_student import STUDENT_DIR
from client.training.voter import LabelledScan
from common.config import Study, TrainingConfig
from common.data.volume_cache import DEFAULT_BUDGET_BYTES, VolumeCache, read
from common.errors import InvalidInput
from common.intervals import known_interval
from common.metrics import dice_per_class, mean_present
from common.models.bundle import SEEN_WEIGHTS, Bundle
from common.models.fit import best_device, predict

STRENGTH = 1.0
"""Strength of the pull towards the student.

In each step, every weight moves towards the student's weight by learning rate × strength × their difference.
"""


@dataclass(frozen=True, slots=True)
class AdaptOptions:
    """The options of `site adapt`.

    Attributes:
        site_dir: The site's directory.
        student: The student's bundle; by default the pulled one.
        data: Folder of the cases; by default the site's dataset.
        way: The way of making the network; None to choose it by the scores.
        steps: Training steps; by default those of the study's recipe for its student.
        learning_rate: Learning rate; by default that of the study's recipe for its student.
        strength: Strength of the pull toward the student.
        out: Folder into which the bundle's folder is written.
        replace: Put the new network and report in the place of finished ones.
        even_if_unfit: Train even if the cases do not fit this site's models.
    """

    site_dir: Path
    student: Path | None = None
    data: Path | None = None
    way: Method | None = None
    steps: int | None = None
    learning_rate: float | None = None
    strength: float = STRENGTH
    out: Path | None = None
    replace: bool = False
    even_if_unfit: bool = False


Progress = Callable[[int], AbstractContextManager[Callable[[int, float], None]]]
"""Function that opens a progress display for a number of steps.

The display is a context manager that yields a function. This function is called with the number of steps since its last
call, and with the newest loss."""


Row = tuple[float, ...]
"""Dice of each structure; empty if the network was trained on the patient."""


@dataclass(frozen=True, slots=True)
class UntrainedScores:
    """The scores of the networks that need no training.

    Attributes:
        rows: The scores of the student and of the site's own teachers by patient and scan. The teachers are left out if
            they have no score.
        fit: Whether the cases fit this site's models.
        no_teachers: Why the own teachers have no score; empty if they have one.
    """

    rows: Mapping[str, Sequence[Sequence[Row]]]
    fit: FitScores
    no_teachers: str


@dataclass(slots=True)
class CrossValidation:
    """The result of a cross-validation; empty if there were too few patients for one.

    Attributes:
        of: Each patient's fold.
        dice: For each way of making the network, the Dice of every patient and structure. Each patient is scored by a
            network trained without that patient. The scores of the site's own teachers are included.
    """

    of: tuple[int, ...] = ()
    dice: dict[str, list[Row]] = field(default_factory=dict)

    def means(self) -> dict[str, list[float]]:
        """Return, for each network, every patient's Dice averaged over structures."""
        return {way: [mean_present(row) for row in rows] for way, rows in self.dice.items()}


def adapt(options: AdaptOptions, *, progress: Progress) -> Adapted:
    """Make the hospital's own network from the student, by the steps in the module's docstring.

    Args:
        options: The options of `site adapt`.
        progress: Opens the display of the training's progress.

    Returns:
        The chosen way with the reason, its figures, and the folders of the bundle and the report.

    Raises:
        InvalidInput: If the student does not fit the study, no case is usable, the cases do not fit this site's models,
            or the output folder holds something else. Also if it holds a finished network and ``options.replace`` is
            False.
        Refused: If another training or a withdrawal is writing at this site.
    """
    config = load_site(options.site_dir)
    study = config.load_study()
    folder = options.site_dir / FOLDER
    out = (options.out or folder) / f"{NAME}-{config.site}"
    check_place(out)
    report = (options.out or folder) / REPORT
    if not options.replace and (taken := [path for path in (out, report) if path.exists()]):
        raise InvalidInput(
            "there is a finished adapted network or its report already",
            value=str(taken[0]),
            remedy="choose another folder with --out to keep both, or give --replace to lose it",
        )
    bundle = student_of(options.student or options.site_dir / STUDENT_DIR / "bundle", study)
    recipe = _recipe_for(bundle, study, options)  # refuses wrong values before any case is read
    with writing_teachers({options.site_dir, config.books_dir}):
        found = own_patients(config, study, data=options.data)
        (folder / KEPT).mkdir(mode=0o700, parents=True, exist_ok=True)
        folder.chmod(0o700)
        with VolumeCache(folder / "cache", budget_bytes=DEFAULT_BUDGET_BYTES) as cache:
            material = material_of(found, study, folder=folder, cache=cache)
            before = _scored_before(options, config, study, bundle, found, material)
            before.fit.check_training()
            terms = Terms(
                study.data.student,
                recipe,
                bundle.network,
                start=study_start(options.site_dir, study) if study.data.finer == 1 else None,
                strength=options.strength,
                public=public_material(config, study, cache=cache)
                if needs_public(options.way, patients=len(material.patients))
                else {},
            )
            if options.way not in (None, *ways_with(public=bool(terms.public))):
                raise InvalidInput(
                    "--way that needs public volumes, but this site has none of the study's",
                    value=str(options.way),
                    limit=", ".join(ways_with(public=False)),
                    remedy="choose one of these, or adapt after this site has answered a query",
                )
            return _adapt(
                options,
                config,
                study=study,
                bundle=bundle,
                material=material,
                terms=terms,
                before=before,
                out=out,
                report=report,
                progress=progress,
            )


def _scored_before(
    options: AdaptOptions, config: SiteConfig, study: Study, bundle: Bundle, found: SitePatients, material: Material
) -> UntrainedScores:
    """Score the networks that need no training, each on every case once, and find out whether the cases fit them.

    The site's own teachers are scored if one of two conditions holds:

    * There are enough patients for a cross-validation. Its table then lists the teachers too.
    * The cases are from another folder than the site's dataset. The teachers' Dice on these cases is then compared with
      their Dice on the site's own cases.

    A teacher is not scored on a patient that it was trained on.

    Returns:
        The scores of the student and, if they are comparable, of the own teachers; and the check whether the cases fit.
    """
    folder = options.student or options.site_dir / STUDENT_DIR / "bundle"
    others, missing = references(options.site_dir, study, codec=codec_of(folder))
    parts, elsewhere = parts_of(options.site_dir, found.dataset), options.data is not None
    with_teachers = elsewhere or (parts and folds_for(len(material.patients)))
    compared = [one for one in others if one.public or with_teachers]
    student = partial(predict, bundle.network, patch=bundle.patch, amp=study.student.amp)
    rows: dict[str, list[list[Row]]] = {
        name: [[] for _ in material.patients] for name in (Method.STUDENT, *(one.name for one in compared))
    }
    for place, patient in enumerate(material.patients):
        for case, scan in zip(patient.cases, patient.scans, strict=True):
            image, truth = read(scan.image), read(scan.label)
            use = parts.get(case.id, NOT_USED)
            answers: dict[str, Answer | None] = {Method.STUDENT: student}
            answers |= {one.name: one.untrained(*use) for one in compared}
            for name, answer in answers.items():
                drawn = None if answer is None else answer(image).argmax(axis=0).astype(np.uint8)
                row = () if drawn is None else dice_per_class(drawn, truth, study.data.student.members)
                rows[name][place].append(tuple(row))
    dice = {name: [mean_present(row) for each in per_patient for row in each] for name, per_patient in rows.items()}
    scored_teachers = parts and not all(map(math.isnan, dice.get(OWN_TEACHERS, ())))
    teachers = {TEACHERS: rows[OWN_TEACHERS]} if scored_teachers else {}
    unseen = "each patient trained the only teacher that could answer for it"
    why = unseen if parts else "it is not known which patients trained them"
    why = next((one.reason for one in missing if one.name == OWN_TEACHERS), why)
    return UntrainedScores(
        {Method.STUDENT: rows[Method.STUDENT], **teachers},
        fit_of(options.site_dir, config, study, others, dice, elsewhere=elsewhere, accepted=options.even_if_unfit),
        no_teachers="" if teachers else why,
    )


def student_of(directory: Path, study: Study) -> Bundle:
    """Load a student network from its MONAI bundle.

    Args:
        directory: The bundle's folder.
        study: The study.

    Returns:
        The student.

    Raises:
        InvalidInput: If it does not fit the study, or was itself trained on patients.
    """
    if (directory / SEEN_WEIGHTS).exists():
        raise InvalidInput(
            "student to adapt",
            value=str(directory),
            limit="a student as it was released, not a network that was already adapted to patients",
        )
    bundle = load_bundle(directory, study.data.student)
    bundle.network.to(best_device())
    return bundle


def recipe_of(bundle: Bundle, study: Study) -> TrainingConfig:
    """Return the study's training recipe for its student, with the network architecture of the bundle.

    Args:
        bundle: The student.
        study: The study.

    Returns:
        The recipe.
    """
    return replace(study.student, channels=bundle.recipe.channels, network=bundle.recipe.network, patch=bundle.patch)


def _recipe_for(bundle: Bundle, study: Study, options: AdaptOptions) -> TrainingConfig:
    """Return the recipe of the bundle's student, with steps and learning rate from the options."""
    recipe = recipe_of(bundle, study)
    return replace(
        recipe,
        steps=recipe.steps if options.steps is None else options.steps,
        learning_rate=recipe.learning_rate if options.learning_rate is None else options.learning_rate,
    )


def _adapt(
    options: AdaptOptions,
    config: SiteConfig,
    *,
    study: Study,
    bundle: Bundle,
    material: Material,
    terms: Terms,
    before: UntrainedScores,
    out: Path,
    report: Path,
    progress: Progress,
) -> Adapted:
    patients = material.patients
    folds = folds_for(len(patients))
    default = usual(len(patients), public=bool(terms.public))
    trainings = {training for way in ways_with(public=bool(terms.public)) for training in TRAININGS[way]}
    most = len(TRAININGS[options.way]) if options.way is not None else max(map(len, TRAININGS.values()))
    with progress(terms.recipe.steps * (folds * len(trainings) + most)) as on_step:
        make = partial(Networks, terms, options.site_dir / FOLDER / KEPT, on_step=on_step)
        checked = cross_validated(patients, make, terms, before=before.rows)
        means = checked.means()
        way = options.way or chosen_way(checked, default=default)
        network = make(_scans(patients)).of(way)
    figures = tuple(_figures(way, checked.dice[way], study.data.structures) for way in checked.dice)
    result = Adapted(
        site=config.site,
        way=way,
        forced=options.way is not None,
        patients=len(patients),
        cases=sum(len(patient.scans) for patient in patients),
        public=len(terms.public),
        folds=folds,
        figures=figures,
        by_choice=known_interval(by_choice(means, checked.of, default=default))
        if folds and options.way is None
        else None,
        ahead={each: _ahead(means, way, each) for each in (Method.STUDENT, Method.OWN, TEACHERS) if each in means},
        student=bundle.weights,
        bundle=out,
        report=report,
        problems=material.problems,
        structures=study.data.structures,
        steps=terms.recipe.steps,
        recipe_steps=study.student.steps,
        unfit=before.fit.sentence,
        no_teachers=before.no_teachers if folds else "",
    )
    seen = patients_seen(config.books_dir, [patient.name for patient in patients])
    write_seen_bundle(out, network, result, study=study, bundle=bundle, recipe=terms.recipe, seen=seen)
    make = partial(Networks, terms, options.site_dir / FOLDER / KEPT, on_step=lambda steps, loss: None)

    def unseen(place: int) -> Bundle:
        if not folds:
            return replace(bundle, network=network)
        fold = checked.of[place]
        scans = _scans(patient for patient, own in zip(patients, checked.of, strict=True) if own != fold)
        return replace(bundle, network=make(scans).of(way))

    return write_report(result, patients, means.get(way, []), unseen=unseen)


def chosen_way(checked: CrossValidation, *, default: Method) -> Method:
    """Return the way of making the network that `site adapt` takes by itself.

    Args:
        checked: The cross-validation's scores; empty if there were too few patients for one.
        default: The way to prefer.

    Returns:
        The way.
    """
    return choose(checked.means(), default=default) if checked.of else default


def _scans(patients: Iterable[Patient]) -> list[LabelledScan]:
    return [scan for patient in patients for scan in patient.scans]


def cross_validated(
    patients: Sequence[Patient],
    make: Callable[..., Networks],
    terms: Terms,
    *,
    before: Mapping[str, Sequence[Sequence[Row]]] = MappingProxyType({}),
) -> CrossValidation:
    """Score every way of making the network by cross-validation over patients.

    Each patient is scored by networks that were trained without the patients of the same fold.

    Args:
        patients: The patients.
        make: Trains the networks of all ways on a sequence of scans.
        terms: The settings that all trainings have in common.
        before: Scores by network, patient and scan that are known already; these networks do not predict again.

    Returns:
        The scores; none if the patients are too few (:func:`~client.adapting.methods.folds_for`).
    """
    folds = folds_for(len(patients))
    if not folds:
        return CrossValidation()
    of = fold_of([patient.name for patient in patients], folds=folds)
    ways = ways_with(public=bool(terms.public))
    rows: dict[str, list[Row]] = {name: [()] * len(patients) for name in dict.fromkeys((*ways, *before))}
    for fold in range(folds):
        networks = make(_scans(patient for patient, own in zip(patients, of, strict=True) if own != fold))
        models = {way: networks.of(way) for way in ways if way not in before}
        for place, patient in enumerate(patients):
            if of[place] == fold:
                known = {name: scans[place] for name, scans in before.items()}
                for name, row in scored(patient, models, terms, known=known).items():
                    rows[name][place] = row
    return CrossValidation(of, rows)


def scored(
    patient: Patient,
    models: Mapping[Method, torch.nn.Module],
    terms: Terms,
    *,
    known: Mapping[str, Sequence[Row]] = MappingProxyType({}),
) -> dict[str, Row]:
    """Compute each network's Dice of each structure for one patient, averaged over the patient's scans.

    Args:
        patient: The patient.
        models: The network that each way made, by the way.
        terms: The settings that all networks have in common.
        known: For each further network, its scores of the patient's scans, in order.

    Returns:
        Dice of each structure, by network. The site's own teachers have nan in every structure if all of them were
        trained on the patient.
    """
    members = terms.data.members
    scans = []
    for number, scan in enumerate(patient.scans):
        image, truth = read(scan.image), read(scan.label)
        found: dict[str, Row] = {name: rows[number] for name, rows in known.items()}
        for way, model in models.items():
            drawn = predict(model, image, patch=terms.recipe.patch, amp=terms.recipe.amp).argmax(axis=0)
            found[way] = tuple(dice_per_class(drawn.astype(np.uint8), truth, members))
        teachers = found.pop(TEACHERS, None)
        rows = filled(found)
        if teachers is not None:  # the other methods' rows are filled without the teachers' scores
            unseen = filled(found | {TEACHERS: teachers})[TEACHERS] if teachers else (math.nan,) * len(members)
            rows[TEACHERS] = unseen
        scans.append(rows)
    by_network = {name: zip(*(row[name] for row in scans), strict=True) for name in scans[0]}
    return {name: tuple(map(mean_present, columns)) for name, columns in by_network.items()}


def _figures(name: str, rows: Sequence[Row], structures: Sequence[str]) -> Figures:
    columns, means = list(zip(*rows, strict=True)), [mean_present(row) for row in rows]
    return Figures(
        name,
        interval=known_interval(means),
        structures={each: known_interval(column) for each, column in zip(structures, columns, strict=True)},
        patients=sum(not math.isnan(mean) for mean in means),
    )


def _ahead(means: Mapping[str, Sequence[float]], way: Method, other: str) -> tuple[float, float | None] | None:
    """Return the mean paired difference in Dice over patients, with half of its 95 % interval.

    It is None if no patient has both values.
    """
    return known_interval(ours - theirs for ours, theirs in zip(means[way], means[other], strict=True))
