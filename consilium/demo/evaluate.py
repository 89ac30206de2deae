"""Scores a demo's teachers, their ensemble and the pseudo-labels against true label maps, for the demo's report.

It reads every party's data, which no party of a real study can do. None of its results is used in the study.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

import numpy as np
import torch

from client.site.status import facts_of
from client.teachers.teacher import Teachers
from common import __version__
from common.calibration import NOTHING, reliability
from common.canonical import sha256_file
from common.config import Study
from common.data.dataset import Dataset
from common.data.grid import Triple
from common.data.msd import Case, case_id, nifti_files, read_dataset
from common.data.split import read_left_out
from common.data.volume import load_label, load_volume
from common.events import read_events
from common.measured_gain import Score
from common.metrics import Structures, dice_per_class, hd95_mm, mean_present, score
from common.models.fit import one_hot, predict
from common.privacy.accounting import Guarantee
from consilium.demo.federation import Federation
from consilium.demo.options import DemoFolders, DemoOptions, dataset_of
from consilium.reports.report_facts import CaseDice, DaemonFact, NamedScore, ReportFacts, SiteFact
from consilium.reports.report_pictures import Picture
from server.ledger.server_ledger import Ledger
from server.postprocess.labels import Released, read_released
from server.postprocess.networks import load_student
from server.postprocess.scores import kept_scores
from server.protocols.controls import CONTROLS, STUDENT
from server.protocols.query_protocol import protocol_of
from server.study.consent_text import rosters
from server.study.read_facts import facts_in
from server.study.workspace import Workspace

PICTURES = 2
"""Number of public volumes that are shown."""
STEPS = {
    "nobody asked": "before any query",
    "teachers": "all teachers, without noise",
    "pseudo-label": "label after the noise",
    "student": "the student",
}


@dataclass(frozen=True, slots=True)
class TestedReferences:
    """The demo's test cases, with the scores of each teacher, of all together and of the mean public label map.

    Attributes:
        cases: The test cases.
        images: Their images on the study's grid, float32 [channels, x, y, z].
        truths: Their true label maps on the study's grid, uint8 [x, y, z].
        teachers: One score for each teacher, by site and voter.
        ensemble: The score of all teachers together.
        mean_shape: The score of the mean of the public label maps.
    """

    cases: Sequence[Case]
    images: Sequence[np.ndarray]
    truths: Sequence[np.ndarray]
    teachers: Sequence[NamedScore]
    ensemble: Score
    mean_shape: Score


def score_teachers(places: DemoFolders, *, on_volume: Callable[[], None]) -> TestedReferences:
    """Score teachers and mean shape on the test cases. This needs no result of the study, so both can run at once.

    Args:
        places: The demo's folders.
        on_volume: Called before each prediction; an error that it raises ends the scoring.

    Returns:
        The test cases and the scores.
    """
    study = places.workspace.study()
    test = list(read_dataset(places.split / "test").labelled)
    images = [load_volume(case.image, study.data).image for case in test]
    truths = [_label(case, study) for case in test]
    teachers, sums = _teachers(places, study, images, truths, on_volume)
    scored = partial(_score, truths=truths, structures=study.data.members, spacing_mm=study.data.spacing_mm)
    ensemble, mean_shape = [_hard(total) for total in sums], _hard(_mean_shape(places, study))
    return TestedReferences(test, images, truths, teachers, scored(ensemble), scored([mean_shape] * len(truths)))


def report_facts(
    places: DemoFolders,
    tested: TestedReferences,
    *,
    on_volume: Callable[[], None],
    source: Path,
    options: DemoOptions,
    federation: Federation | None,
    seconds: Mapping[str, float],
    known: str,
) -> ReportFacts:
    """Score student and ensemble on the test cases, and collect the facts of the report.

    Args:
        places: The demo's folders.
        tested: The test cases and the teachers' scores.
        on_volume: Called before each prediction; an error that it raises ends the scoring.
        source: The dataset.
        options: The demo's options.
        federation: The daemons; None for a simulation.
        seconds: Duration of each stage.
        known: A sentence for the report: what the hospitals know that public data do not show.

    Returns:
        The facts.
    """
    workspace = places.workspace
    study = workspace.study()
    members = study.data.members
    test, images, truths = tested.cases, tested.images, tested.truths
    scores = kept_scores(workspace)
    student = load_student(study, workspace.student_dir)
    maps = []
    for image in images:
        on_volume()
        maps.append(predict(student, image))
    predictions = [_hard(one) for one in maps]
    cases = [
        CaseDice(case.id, mean_present(dice), dice)
        for case, one, truth in zip(test, predictions, truths, strict=True)
        for dice in (dice_per_class(one, truth, members),)
    ]
    sure = (reliability(one, truth) for one, truth in zip(maps, truths, strict=True))
    released = read_released(workspace)
    public = _public_truths(places, study, dataset_of(source, options))
    labels = released.labels
    told = [volume for volume in labels if volume in public]
    decoded = _score([_hard(labels[v]) for v in told], [public[v] for v in told], members) if told else None
    used, left_out = read_left_out(places.split / "split.json")
    with Ledger.open(workspace.ledger_file) as ledger:
        ledger.check_newest()
        found, answers = facts_in(ledger, workspace), ledger.answers(study.id)
        head, rows = ledger.head(), ledger.row_count
    spent = {site.name: found.pools[site.pool].for_life.spent for site in workspace.sites()}
    return ReportFacts(
        study=study,
        spending=found.spending,
        queries=found.answers,
        voters=max((answer.voters for answer in answers), default=0),
        teachers=tuple(tested.teachers),
        ensemble=tested.ensemble,
        mean_shape=tested.mean_shape,
        student=replace(
            scores[STUDENT], hd95_mm=_distances(predictions, truths, members, spacing_mm=study.data.spacing_mm)
        ),
        student_ece=sum(sure, NOTHING).error,
        controls={name: scores.get(name) for name in CONTROLS},
        decoded_labels=decoded,
        daemons=() if federation is None else tuple(DaemonFact(role, pid) for role, pid in federation.daemons),
        refused_node="" if federation is None else federation.refusal,
        sites=tuple(_site(places, name, released=spent[name]) for name in sorted(spent)),
        releases=rosters(answers),
        seconds=dict(seconds),
        run_seconds=_stage_seconds(workspace),
        pictures=(
            *_public_pictures(places, released, student, public),
            *_test_pictures(cases, images, truths, predictions),
        ),
        ledger_head=head.hash,
        ledger_rows=rows,
        version=__version__,
        seeds={"data, split and training": options.seed},
        finished=datetime.now(UTC),
        known=known,
        cases_used=used,
        left_out=left_out,
        test_cases=tuple(cases),
    )


def _teachers(
    places: DemoFolders,
    study: Study,
    images: Sequence[np.ndarray],
    truths: Sequence[np.ndarray],
    on_volume: Callable[[], None],
) -> tuple[list[NamedScore], list[np.ndarray]]:
    """Return every teacher's score, and for each image the sum of all teachers' probabilities."""
    classes = len(study.data.labels)
    sums = [np.zeros((classes, *study.data.grid), dtype=np.float64) for _ in images]
    teachers = []
    for name in sorted(folder.name for folder in places.sites.iterdir() if (folder / "teachers").is_dir()):
        site_teachers = Teachers.load(places.sites / name / "teachers")
        votes = []
        for image in images:
            on_volume()
            votes.append(list(site_teachers.predict(image)))
        for voter in range(len(site_teachers.models)):
            maps = [probabilities for vote in votes if (probabilities := vote[voter]) is not None]
            if not maps:  # no teacher for this voter
                continue
            for total, probabilities in zip(sums, maps, strict=True):
                total += probabilities
            label = name if len(site_teachers.models) == 1 else f"{name}, voter {voter}"
            teachers.append(NamedScore(label, _score([_hard(m) for m in maps], truths, study.data.members)))
    return teachers, sums


def _stage_seconds(workspace: Workspace) -> dict[str, float]:
    """Sum the duration of each of the study's stages over all resumptions."""
    total: dict[str, float] = {}
    for event in read_events(workspace.events_file):
        if event["event"] == "stage-finished":
            total[event["stage"]] = round(total.get(event["stage"], 0.0) + event["seconds"], 2)
    return total


def _site(places: DemoFolders, name: str, *, released: Guarantee) -> SiteFact:
    facts = facts_of(places.sites / name)
    return SiteFact(
        name=name,
        pool=facts.pool,
        patients=len(read_dataset(places.split / "sites" / name).listed),
        codes_sent=facts.codes or 0,
        epsilon_spent=released.epsilon,
        patient=facts.trainings.lines(released),
    )


def _score(
    predictions: Sequence[np.ndarray],
    truths: Sequence[np.ndarray],
    structures: Structures,
    *,
    spacing_mm: Triple | None = None,
) -> Score:
    """Return the Dice of predictions; if ``spacing_mm`` is given, their HD95 as well."""
    far = () if spacing_mm is None else _distances(predictions, truths, structures, spacing_mm=spacing_mm)
    return replace(score(predictions, truths, structures), hd95_mm=far)


def _distances(
    predictions: Sequence[np.ndarray], truths: Sequence[np.ndarray], structures: Structures, *, spacing_mm: Triple
) -> tuple[float, ...]:
    """Compute every structure's mean HD95 over the cases in which both maps contain it."""
    each = [hd95_mm(a, b, structures, spacing_mm=spacing_mm) for a, b in zip(predictions, truths, strict=True)]
    return tuple(mean_present(d for d in column if not math.isinf(d)) for column in zip(*each, strict=True))


def _hard(probabilities: np.ndarray) -> np.ndarray:
    result: np.ndarray = probabilities.argmax(axis=0).astype(np.uint8)
    return result


def _label(case: Case, study: Study) -> np.ndarray:
    assert case.label is not None
    return load_label(case.label, study.data, mapping=dict(case.label_map))


def _mean_shape(places: DemoFolders, study: Study) -> np.ndarray:
    maps = nifti_files(places.split / "public" / "label-maps", what="public label maps")
    classes = len(study.data.labels)
    total: np.ndarray = sum(
        (one_hot(load_label(path, study.data), classes) for path in maps),
        start=np.zeros((classes, *study.data.grid), dtype=np.float32),
    )
    return total


def _public_truths(places: DemoFolders, study: Study, dataset: Dataset) -> dict[str, np.ndarray]:
    """Return the true label maps of the public volumes by content hash. The study itself never reads them."""
    cases = {case.id: case for case in dataset.labelled}
    truths = {}
    for path in nifti_files(places.split / "public" / "images", what="public images"):
        case = cases.get(case_id(path.name).removesuffix("_0000"))
        if case is not None:
            truths[sha256_file(path)] = _label(case, study)
    return truths


def _public_pictures(
    places: DemoFolders, released: Released, student: torch.nn.Module, truths: Mapping[str, np.ndarray]
) -> Iterator[Picture]:
    """Yield four pictures of each of a few public volumes, each picture with another label map.

    The label maps are: the label before any answer; the mean prediction of all teachers, without noise; the
    pseudo-label that the noisy answers give; and the student's prediction.
    """
    from common.data.volume import volume_from_bytes

    study, labels = released.public.study, released.labels
    said = protocol_of(study).aggregate(released.public, released.answers)
    asked = {one.volume: one.centre for one in said.doubts(draws=1)}
    for volume in [each for each in labels if each in asked][:PICTURES]:
        image = volume_from_bytes(places.workspace.objects.get(volume), study.data).image
        steps = {
            "nobody asked": asked[volume],
            "teachers": _hard(_votes(places, image)),
            "pseudo-label": _hard(labels[volume]),
            "student": _hard(predict(student, image)),
        }
        known = {"truth": truths[volume]} if volume in truths else {}
        for name, found in steps.items():
            yield Picture(f"public volume {volume[:8]}: {STEPS[name]}", "public", image[0], {**known, name: found})


def _votes(places: DemoFolders, image: np.ndarray) -> np.ndarray:
    """Return the sum of all teachers' class probabilities for an image."""
    total: np.ndarray = np.zeros(1)
    for site in sorted(site.name for site in places.workspace.sites()):
        for found in Teachers.load(places.sites / site / "teachers").predict(image):
            total = total if found is None else total + found
    return total


def _test_pictures(
    cases: Sequence[CaseDice],
    images: Sequence[np.ndarray],
    truths: Sequence[np.ndarray],
    predictions: Sequence[np.ndarray],
) -> Iterator[Picture]:
    """Yield a picture of the test cases with the student's best, median and worst Dice."""
    for which, place in shown_cases([case.mean for case in cases]).items():
        title = f"{which} of {len(cases)} test cases, {cases[place].name}: Dice {cases[place].mean:.3f}"
        yield Picture(title, "test", images[place][0], {"truth": truths[place], "student": predictions[place]})


def shown_cases(dice: Sequence[float]) -> dict[str, int]:
    """Choose the cases to show.

    Args:
        dice: Dice of each case; NaN if it could not be computed.

    Returns:
        Index in ``dice`` of the cases with the best, the median and the worst Dice. NaN is ignored. With fewer than
        three cases there are fewer entries, because no case is chosen twice.

    >>> shown_cases([0.7, 0.2, 0.9, 0.8, float("nan")])
    {'best': 2, 'median': 0, 'worst': 1}
    """
    ranked = sorted((place for place, value in enumerate(dice) if not math.isnan(value)), key=lambda place: dice[place])
    if not ranked:
        return {}
    places = {ranked[(len(ranked) - 1) // 2]: "median", ranked[0]: "worst", ranked[-1]: "best"}
    return {name: place for place, name in sorted(places.items(), key=lambda one: one[1])}
