"""Scores the student and its controls on the validation set, case by case.

``bundle.export_student`` calls it. The validation cases are public and the networks are made from released answers, so
the scores cost no privacy budget. No network is selected by the scores. The export stores them in the study's
``report.json``, which the commands, the dashboard and the demo read.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import numpy as np

from common.calibration import NOTHING, reliability
from common.data.volume import example_from_bytes
from common.measured_gain import MeasuredGain, Score, case_mean, over_best
from common.metrics import dice_per_class, hd95_mm, score
from common.models.fit import predict
from common.objects import finite
from server.postprocess.networks import control_trained, load_control, load_student
from server.protocols.controls import STUDENT, controls_of
from server.public.public_files import read_record
from server.study.workspace import Workspace


def score_networks(
    workspace: Workspace, *, on_case: Callable[[int, int], None]
) -> tuple[dict[str, Score], dict[str, object]]:
    """Delete the stored scores, which may be an earlier student's, and score the student and every trained control.

    Args:
        workspace: The study.
        on_case: Called with the number of cases scored so far and the total, both over all networks.

    Returns:
        Scores by network name, and the record to store; both are empty without a validation set.
    """
    study, folder, files = workspace.study(), workspace.student_dir, workspace.validation()
    data = study.data.student
    workspace.scores_file.unlink(missing_ok=True)
    if not files:
        return {}, {}
    networks = {STUDENT: load_student(study, folder)}
    networks |= {
        name: load_control(study, folder, name) for name in controls_of(study) if control_trained(folder, name)
    }
    truths: list[np.ndarray] = []
    found: dict[str, list[np.ndarray]] = {name: [] for name in networks}
    sure = NOTHING
    for number, case in enumerate(files):
        example = example_from_bytes(workspace.objects.get(case.image), workspace.objects.get(case.label), data)
        truths.append(example.label)
        for index, (name, network) in enumerate(networks.items()):
            probabilities = predict(network, example.volume.image, patch=study.student.patch)
            found[name].append(probabilities.argmax(axis=0).astype(np.uint8))
            if name == STUDENT:
                sure += reliability(probabilities, example.label)
            on_case(number * len(networks) + index + 1, len(files) * len(networks))
    scores = {name: score(maps, truths, study.data.members) for name, maps in found.items()}
    dice = {name: {"dice": _dice(one, study.data.structures)} for name, one in scores.items()}
    pairs = list(zip(found[STUDENT], truths, strict=True))
    record = {
        "schema": 1,
        "study": {"id": study.id, "name": study.name},
        "cases": len(files),
        STUDENT: dice.pop(STUDENT),
        "student_cases": {
            "dice": [dice_per_class(*pair, data.members) for pair in pairs],
            "hd95_mm": [hd95_mm(*pair, data.members, spacing_mm=data.spacing_mm) for pair in pairs],
            "ece": sure.error,
        },
        "controls": {name: dice.get(name, {"dice": None}) for name in controls_of(study)},
    }
    stored: dict[str, object] = finite(record)
    return scores, stored


def kept_scores(workspace: Workspace) -> dict[str, Score]:
    """Return the scores that the newest export stored.

    Args:
        workspace: The study.

    Returns:
        Scores by network name; networks that were not scored are left out.

    Raises:
        InvalidInput: If no scores are stored.
    """
    kept = read_record(workspace.scores_file, remedy="run `consilium student export`, which scores the networks")
    dice = {STUDENT: kept[STUDENT]["dice"], **{name: one["dice"] for name, one in kept["controls"].items()}}
    return {
        name: Score(
            per_class=tuple(math.nan if value is None else value for value in one["per_class"].values()),
            mean=math.nan if one["mean"] is None else one["mean"],
            cases=tuple(one["cases"]),
        )
        for name, one in dice.items()
        if one is not None
    }


def _dice(one: Score, structures: tuple[str, ...]) -> dict[str, object]:
    per_class = dict(zip(structures, one.per_class, strict=True))
    return {"mean": one.mean, "per_class": per_class, "cases": one.cases}


def figures(scores: Mapping[str, Score]) -> dict[str, float]:
    """Return the figures that the model card of the student's bundle shows.

    Args:
        scores: Scores by network name, the student's included.

    Returns:
        The figures by their labels on the card: mean Dice of every network over the cases, number of cases, and the
        gain over the best control with its 95 % interval.
    """
    means = {n if n == STUDENT else f"control {n}": case_mean(one) for n, one in scores.items()}
    shown = {name.replace("_", " "): mean for name, mean in means.items() if not math.isnan(mean)}
    shown["cases"] = len(scores[STUDENT].cases)
    found = gain_of(scores)
    if found is None:
        return shown
    name = f"gain over {found.reference}"
    shown[name] = found.gain
    if found.interval is not None:
        low, high = found.interval
        shown |= {f"{name}, 95 per cent from": low, f"{name}, to": high}
    return shown


def gain_of(scores: Mapping[str, Score]) -> MeasuredGain | None:
    """Return the student's gain over its best control, paired case by case.

    Args:
        scores: Scores by network name, the student's included.

    Returns:
        The gain and its interval; None if no control was scored.
    """
    return over_best(scores[STUDENT], {name: one for name, one in scores.items() if name != STUDENT})
