"""Evaluates the student on the site's own labelled cases; all results stay at the site.

`consilium site evaluate` calls it. Results are written below the site's directory, readable by their owner only; the
module opens no connection. Cases are read as for training and scored on the study's grid, or on each file's own voxels
as ``consilium predict`` does. Reference models (:mod:`client.teachers.comparison`) are scored on the same cases,
because a dishonest site can make the student worse than public data. A case that cannot be used is reported and
counted. Cases of patients on whom an adapted network was trained are not scored with it. If the cases do not fit this
site's models (:mod:`client.teachers.fit_of_cases`), there is no verdict. The module refuses a model with another grid
or other labels than the study's.
"""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from jinja2 import Environment, PackageLoader, StrictUndefined, select_autoescape

from client.data.layouts import open_for_training
from client.policy import load_site
from client.records.adapted_folder import seen_by
from client.site.deals import read_withdrawn, trained_on
from client.teachers.comparison import (
    ALL,
    OWN_TEACHERS,
    Answer,
    CaseComparison,
    MissedStructure,
    MissingComparison,
    Reference,
    codec_of,
    compare,
    missed_structures,
    references,
)
from client.teachers.evaluation_input import NOT_USED, PARTS, load_bundle, parts_of
from client.teachers.evaluation_pictures import case_picture, reliability_picture
from client.teachers.fit_of_cases import CHECK, FitScores, fit_of
from client.teachers.pulled_student import STUDENT_DIR
from common import site_verdict
from common.calibration import NOTHING, Reliability, reliability
from common.config import DataConfig
from common.data.msd import Case, Problem
from common.data.volume import load_example
from common.errors import InvalidInput
from common.measured_gain import GainVerdict
from common.metrics import dice_per_class, hd95_mm, mean_present
from common.models.bundle import Bundle
from common.models.fit import predict
from common.models.native import load_native, on_native
from common.objects import finite, write_atomically
from common.plain import RESEARCH_ONLY
from common.wording import many

EVALUATION_SCHEMA = 3

WORSE = 10
"""Exit code of ``--strict`` if the student is worse than public models, or misses a structure in most cases."""

STUDENT = "the student"

MOST_NAMED = 10
"""Largest number of cases that a list in the terminal names."""

LESS_SURE = 0.02
"""Calibration errors that differ by less than this count as equal."""

REMEDY = (
    "Possible causes are dishonest or faulty sites, and noise. Tell the consortium that this student is worse here; "
    "you need not send it the figures of your cases."
)

OWN_BETTER = (
    "This is expected where a hospital has many cases, because the student learns from public volumes and noisy "
    "labels only. For your own patients use a network from `consilium site adapt`. The verdict stays as it is: it "
    "compares with public data alone, because no other hospital has your teachers."
)

ADAPTED_REMEDY = (
    "Check the cases on which this network was trained, and read the report of `consilium site adapt`: it compares the "
    "network with the student."
)

ADAPTED_OWN_BETTER = (
    "Read the report of `consilium site adapt`: it states how long this network was trained, and compares it with a "
    "network trained on this hospital's patients alone."
)

OnCase = Callable[[int, int], None]
"""Function called with the number of cases done and the total."""


@dataclass(frozen=True, slots=True)
class CaseScore:
    """The scores of one case.

    Attributes:
        case: The case's id.
        part: How the site's teachers used the case (:data:`PARTS`).
        dice: Dice of each structure; nan if it is in neither map.
        hd95_mm: HD95 in mm of each structure; nan if it is in neither map, inf if it is in one only.
        sure: Calibration: how often the model is right at each level of confidence.
        patient: The case's patient.
        unlike: How the volume differs from all public volumes on which the student was trained; empty if it does not,
            or if the bundle does not describe these volumes.
    """

    case: str
    part: str
    dice: tuple[float, ...]
    hd95_mm: tuple[float, ...]
    sure: Reliability = NOTHING
    patient: str = ""
    unlike: str = ""

    @property
    def mean_dice(self) -> float:
        """Mean Dice over the structures that have one."""
        return mean_present(self.dice)


@dataclass(frozen=True, slots=True)
class Evaluation:
    """A student's scores at this site. Case ids and scores must not leave the site.

    Attributes:
        weights: SHA-256 of the student's weights.
        structures: Names of the structures.
        scores: Scores of the usable cases.
        problems: Cases that could not be used.
        withdrawn: Number of labelled cases of withdrawn patients; they are not read.
        native: True if scored on each file's own voxels instead of the study's grid.
        missed: Structures that the student misses in most cases.
        comparisons: Comparisons with references.
        missing: References that could not be compared.
        reliability: Calibration of the student and of each reference by name; a reference is counted on cases it was
            not trained on.
        fit: Whether the cases fit this site's own teachers and the public models.
        trained_on: Cases that are not scored, because the network was trained on their patients.
        adapted: True if the model is a network that a hospital adapted, not the student.
        elsewhere: True if the cases are not those of the site's own dataset.
    """

    weights: str
    structures: tuple[str, ...]
    scores: tuple[CaseScore, ...]
    problems: tuple[Problem, ...]
    withdrawn: int = 0
    native: bool = False
    missed: tuple[MissedStructure, ...] = ()
    comparisons: tuple[CaseComparison, ...] = ()
    missing: tuple[MissingComparison, ...] = ()
    reliability: Mapping[str, Reliability] = field(default_factory=dict)
    fit: FitScores = field(default_factory=FitScores)
    trained_on: tuple[str, ...] = ()
    adapted: bool = False
    elsewhere: bool = False

    @property
    def unlike(self) -> dict[str, str]:
        """The cases that differ from all public volumes on which the student was trained, with the difference."""
        return {score.case: score.unlike for score in self.scores if score.unlike}

    @property
    def who(self) -> str:
        """Name of the evaluated model in a sentence: ``student`` or ``adapted network``."""
        return "adapted network" if self.adapted else "student"

    @property
    def voxels(self) -> str:
        """The voxels on which cases were scored, in words."""
        return "each file's own voxels" if self.native else "the study's grid"

    @property
    def alarms(self) -> tuple[str, ...]:
        """The findings that make a verdict negative: structures that the student misses, then better public models."""
        worse = (comparison.sentence() for comparison in self.comparisons if comparison.alarming)
        return (*(structure.sentence() for structure in self.missed), *worse)

    @property
    def against(self) -> str:
        """How many findings speak against the scored model, in words without a full stop."""
        speak = "speaks" if len(self.alarms) == 1 else "speak"
        return f"{many(len(self.alarms), 'finding')} {speak} against using this {self.who} on these cases"

    @property
    def verdict(self) -> str | None:
        """The verdict, which compares the student with public models only (:mod:`common.site_verdict`).

        ``worse`` if there is an alarm, ``better`` if a gain over every public model is proven, else ``not-better``.
        None if the student was compared with no public model, or the cases do not fit (:attr:`fit`).
        """
        if self.fit.refused:
            return None
        compared = [one for one in self.comparisons if one.public and one.structure == ALL]
        if not compared:
            return None
        if self.alarms:
            return site_verdict.WORSE
        proven = all(one.measured.word is GainVerdict.PROVEN for one in compared)
        return site_verdict.BETTER if proven else site_verdict.NOT_BETTER

    @property
    def own_better(self) -> tuple[str, ...]:
        """Sentences, if this site's own teachers score proven better than the student or are clearly better calibrated.

        They advise this site which network to use. They do not change the verdict, because no other hospital has these
        teachers.
        """
        own = [one for one in self.comparisons if not one.public and one.measured.word is GainVerdict.WORSE]
        sure, theirs = (self.reliability.get(name, NOTHING).error for name in (f"the {self.who}", OWN_TEACHERS))
        less_sure = f"Less well calibrated than {OWN_TEACHERS}: calibration error {sure:.3f} against {theirs:.3f}."
        return (*(one.sentence() for one in own), *([less_sure] if sure > theirs + LESS_SURE else []))

    @property
    def headline(self) -> str:
        """The verdict with its meaning, and the public models that it compares with, in one line."""
        public = dict.fromkeys(one.measured.reference for one in self.comparisons if one.public)
        if self.fit.refused:
            return f"No verdict: {self.fit.sentence}"
        if self.verdict is None:
            return f"No verdict: there was no model from public data to compare the {self.who} with"
        return f"Verdict: {self.verdict} ({site_verdict.MEANINGS[self.verdict]}; compared with {', '.join(public)})"

    @property
    def remedy(self) -> str:
        """What to do after an alarm."""
        return ADAPTED_REMEDY if self.adapted else REMEDY

    @property
    def own_better_advice(self) -> str:
        """What to do if this site's own teachers are better."""
        return ADAPTED_OWN_BETTER if self.adapted else OWN_BETTER

    def sentence_on(self, comparison: CaseComparison) -> str:
        """Return a comparison as a sentence; if the cases do not fit (:attr:`fit`), with figures but without a verdict.

        Args:
            comparison: One of :attr:`comparisons`.

        Returns:
            The sentence.
        """
        return f"Without a finding: {comparison.figures}." if self.fit.refused else comparison.sentence()

    @property
    def speaks_for(self) -> bool:
        """True if the verdict is ``better`` and this site's own teachers are not better."""
        return self.verdict == site_verdict.BETTER and not self.own_better

    def mean(self, part: str | None = None) -> dict[str, Any]:
        """Average the scores.

        Args:
            part: Cases to average, of :data:`PARTS`; None for all.

        Returns:
            Number of cases, Dice of each structure and of all, and HD95 over the cases where it is finite.
        """
        scores = [score for score in self.scores if part in (None, score.part)]
        columns = list(zip(*(score.dice for score in scores), strict=True))
        distances = list(zip(*(score.hd95_mm for score in scores), strict=True))
        means = {
            "cases": len(scores),
            "dice": {n: mean_present(c) for n, c in zip(self.structures, columns, strict=False)},
            "mean_dice": mean_present(score.mean_dice for score in scores),
            "hd95_mm": {
                n: mean_present(d for d in c if math.isfinite(d))
                for n, c in zip(self.structures, distances, strict=False)
            },
        }
        return dict(finite(means))

    def to_json(self) -> dict[str, Any]:
        """Return the evaluation as plain values for JSON."""
        facts = {
            "schema": EVALUATION_SCHEMA,
            "weights": self.weights,
            "scored_on": self.voxels,
            "all": self.mean(),
            "parts": {part: self.mean(part) for part in PARTS if any(s.part == part for s in self.scores)},
            "cases": [
                {
                    "case": score.case,
                    "part": score.part,
                    "mean_dice": score.mean_dice,
                    "dice": score.dice,
                    "hd95_mm": score.hd95_mm,
                    **({"unlike": score.unlike} if score.unlike else {}),
                }
                for score in self.scores
            ],
            "comparisons": [{**one.to_json(), "sentence": self.sentence_on(one)} for one in self.comparisons],
            "calibration": {
                name: {"ece": one.error, "reliability": one.points} for name, one in self.reliability.items()
            },
            "not_compared": [{"with": missing.name, "reason": missing.reason} for missing in self.missing],
            "alarms": list(self.alarms),
            "fit": self.fit.to_json(),
            "unlike": self.unlike,
            "trained_on": list(self.trained_on),
            "adapted": self.adapted,
            "elsewhere": self.elsewhere,
            "statement": RESEARCH_ONLY,
            "verdict": self.verdict,
            "own_teachers_better": list(self.own_better),
            "headline": self.headline,
            "speaks_for": self.speaks_for,
            "problems": [problem.to_json() for problem in self.problems],
            "withdrawn": self.withdrawn,
        }
        return dict(finite(facts))

    def to_csv(self) -> str:
        """Return one line for each case as CSV."""
        stream = io.StringIO()
        table = csv.writer(stream, lineterminator="\n")
        names = self.structures
        table.writerow(["case", "part", *(f"dice {n}" for n in names), *(f"hd95_mm {n}" for n in names)])
        for score in self.scores:
            table.writerow([score.case, score.part, *map(_cell, score.dice), *map(_cell, score.hd95_mm)])
        return stream.getvalue()


def evaluate(
    site_dir: Path,
    *,
    now: datetime,
    data: Path | None = None,
    model: Path | None = None,
    native: bool = False,
    even_if_unfit: bool = False,
    on_case: OnCase = lambda done, total: None,
) -> tuple[Evaluation, Path]:
    """Score a student on labelled cases, and write results and pictures to a new folder below ``evaluation``.

    Args:
        site_dir: The site's directory.
        now: Time, for the folder's name.
        data: Folder of the cases; by default the site's own dataset.
        model: Folder of the bundle; by default the pulled student.
        native: Score on each file's own voxels. Structures outside the study's grid count as missed.
        even_if_unfit: Give a verdict even if the cases do not fit this site's models.
        on_case: Called after each case with the number of cases done and the total.

    Returns:
        The evaluation and the folder.

    Raises:
        InvalidInput: If the model or the dataset does not fit the study, no case is usable, or the network was trained
            on the patients of all cases.
    """
    config = load_site(site_dir)
    study = config.load_study()
    folder_of_model = model or site_dir / STUDENT_DIR / "bundle"
    bundle = load_bundle(folder_of_model, study.data.student)
    dataset = open_for_training(data or config.path(config.data), study.data.student, config.dataset)
    parts = parts_of(site_dir, dataset)
    patients = {dataset.patient_of(case.id) for case in dataset.labelled}
    gone_patients, _ = read_withdrawn(config, patients)
    there = tuple(case for case in dataset.labelled if dataset.patient_of(case.id) not in gone_patients)
    seen = trained_on(config.books_dir, patients, seen=seen_by(folder_of_model)) if bundle.adapted else frozenset[str]()
    cases = tuple(case for case in there if dataset.patient_of(case.id) not in seen)
    if there and not cases:
        raise InvalidInput(
            "the network was trained on the patients of all these cases, so their scores would be too high",
            value=f"{len(there)} cases",
            remedy="give other cases with --data, or read the cross-validated Dice in the report of `site adapt`",
        )
    found, missing = references(site_dir, study, codec=codec_of(folder_of_model))
    student_model = partial(predict, bundle.network, patch=bundle.patch)
    scores: dict[str, dict[str, CaseScore]] = {name: {} for name in (STUDENT, *(one.name for one in found))}
    problems = [one for one in dataset.problems if dataset.patient_of(one.case) not in gone_patients]
    for number, case in enumerate(cases, start=1):
        try:
            use = parts.get(case.id, NOT_USED)
            untrained = {one.name: answer for one in found if (answer := one.untrained(*use)) is not None}
            asked: dict[str, Answer] = {STUDENT: student_model} | untrained
            for name, score in _score(case, asked, bundle, study.data.student, part=use[0], native=native).items():
                scores[name][case.id] = replace(score, patient=dataset.patient_of(case.id))
        except InvalidInput as error:
            problems.append(Problem(case.id, str(error)))
        on_case(number, len(cases))
    student = tuple(scores[STUDENT].values())
    if not student:
        raise InvalidInput(
            "there is no usable labelled case",
            value=f"{len(problems)} cases with problems",
            remedy="run `consilium site doctor --data FOLDER`, which lists the problems",
        )
    structures = study.data.structures
    dice = {name: [one.mean_dice for one in each.values()] for name, each in scores.items()}
    comparisons, told_nothing = _compared(found, scores, structures, who=bundle.who)
    result = Evaluation(
        bundle.weights,
        structures,
        student,
        tuple(problems),
        native=native,
        missed=tuple(missed_structures(structures, [score.dice for score in student], who=bundle.who)),
        comparisons=tuple(comparisons),
        missing=(*missing, *told_nothing),
        withdrawn=len(dataset.labelled) - len(there),
        reliability={
            f"the {bundle.who}" if name == STUDENT else name: sum((one.sure for one in each.values()), NOTHING)
            for name, each in scores.items()
        },
        fit=fit_of(site_dir, config, study, found, dice, elsewhere=data is not None, accepted=even_if_unfit),
        trained_on=tuple(case.id for case in there if dataset.patient_of(case.id) in seen),
        adapted=bundle.adapted,
        elsewhere=data is not None,
    )
    folder = site_dir / "evaluation" / now.strftime("%Y%m%dT%H%M%S.%fZ")
    folder.mkdir(mode=0o700, parents=True)
    _write(folder, result, cases={case.id: case for case in cases}, bundle=bundle)
    return result, folder


def _compared(
    found: Sequence[Reference], scores: Mapping[str, Mapping[str, CaseScore]], structures: Sequence[str], *, who: str
) -> tuple[list[CaseComparison], list[MissingComparison]]:
    """Compare the student with each reference on cases that the reference was not trained on.

    References without such a case are returned as well, with the reason.
    """
    comparisons: list[CaseComparison] = []
    missing: list[MissingComparison] = []
    for reference in found:
        of = scores[reference.name]
        ours, theirs = [scores[STUDENT][case].dice for case in of], [score.dice for score in of.values()]
        comparisons += compare(reference, structures, ours, theirs, who=who)
        if not ours:
            missing.append(
                MissingComparison(
                    reference.name, "its only voter was trained on all these cases; give other cases with --data"
                )
            )
    return comparisons, missing


def _write(folder: Path, result: Evaluation, *, cases: Mapping[str, Case], bundle: Bundle) -> None:
    """Write the scores, the page, and pictures of the best and the worst case, readable by their owner only."""
    facts = result.to_json()
    write_atomically(
        folder / "evaluation.json", f"{json.dumps(facts, indent=1, allow_nan=False)}\n".encode(), mode=0o600
    )
    write_atomically(folder / "cases.csv", result.to_csv().encode(), mode=0o600)
    ranked = sorted((s for s in result.scores if not math.isnan(s.mean_dice)), key=lambda score: score.mean_dice)
    pictures = dict(zip(("worst", "best"), ranked[:1] + ranked[-1:], strict=False))
    for name, score in pictures.items():
        title = f"{score.case}: Dice {score.mean_dice:.3f}"
        picture = case_picture(cases[score.case], bundle, title=title, who=result.who)
        write_atomically(folder / f"{name}.png", picture, mode=0o600)
    write_atomically(folder / "reliability.png", reliability_picture(result.reliability), mode=0o600)
    write_atomically(folder / "evaluation.html", _page(result, list(pictures)).encode(), mode=0o600)


def _score(
    case: Case, answers: Mapping[str, Answer], bundle: Bundle, data: DataConfig, *, part: str, native: bool
) -> dict[str, CaseScore]:
    """Read one case once, and score every model's prediction of it."""
    if native:
        volume, drawn = load_native(case, data)
        unlike = "" if bundle.inputs is None else bundle.inputs.unlike(volume)
        done = {name: on_native(answer(volume.image), volume, drawn, data) for name, answer in answers.items()}
        return {
            name: CaseScore(case.id, part, one.dice, one.hd95_mm, one.sure, unlike=unlike) for name, one in done.items()
        }
    example = load_example(case, data)
    truth, members = example.label, data.members
    unlike = "" if bundle.inputs is None else bundle.inputs.unlike(example.volume)
    scores = {}
    for name, answer in answers.items():
        probabilities = answer(example.volume.image)
        found = probabilities.argmax(axis=0).astype(np.uint8)
        distances = hd95_mm(found, truth, members, spacing_mm=data.spacing_mm)
        dice, sure = dice_per_class(found, truth, members), reliability(probabilities, truth)
        scores[name] = CaseScore(case.id, part, dice, distances, sure, unlike=unlike)
    return scores


def _page(result: Evaluation, pictures: list[str]) -> str:
    """Return the evaluation as an HTML page that shows the pictures beside it."""
    page = Environment(loader=PackageLoader("client"), autoescape=select_autoescape(), undefined=StrictUndefined)
    facts = result.to_json()
    worst_first = sorted(facts["cases"], key=lambda case: (case["mean_dice"] is None, case["mean_dice"]))
    return page.get_template("evaluation.html").render(
        evaluation=facts,
        many=many,
        against=result.against,
        pictures=pictures,
        worst_first=worst_first,
        remedy=result.remedy,
        own_better=result.own_better_advice,
        check=CHECK,
        who=result.who,
    )


def _cell(value: float) -> str:
    return "" if math.isnan(value) else f"{value:.5g}"
