"""Defines one row of a utility benchmark: a recipe under a guarantee, its study, and the arms it is compared with.

The benchmarks use it. It refuses terms that the setting's protocol cannot run.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

from common.codecs.paper import codec_terms
from common.config import JOINT_ROUNDS, OPEN, SEALED_SUM, CodecConfig, DataConfig, PrivacyConfig, Study, TrainingConfig
from common.privacy.mechanism import AccountantName, Budget, Protection, Relation, Unit
from common.protocols.frame import FRAME, MAX_COORDINATES
from server.planning.recommend import recommend
from server.protocols.controls import CONTROLS
from server.protocols.joint.kernel import MAX_ROWS, MAX_WEIGHTS
from server.protocols.public_start import RESIDUAL, TEMPERATURE
from server.protocols.query_protocol import check_study

SHARED = "shuffled_offsets"
ARMS = ("student", *CONTROLS, "non_private", "mean_predictions", "true_labels")
CENTRAL = "central_dp_sgd"
CENTRAL_PAPER = "central_dp_sgd_clip_4"
SILOS, SILOS_MEAN = "silo_dp_sgd", "silo_dp_sgd_mean"
BOUNDS = (
    *("mean_teacher", "ensemble", "mean_teacher_m1", "ensemble_m1", "all_data"),
    *(CENTRAL, CENTRAL_PAPER, SILOS, SILOS_MEAN),
)
RECIPE = (FRAME, MAX_COORDINATES, RESIDUAL, TEMPERATURE, MAX_ROWS, MAX_WEIGHTS)
"""Constants of the joint recipe; they are part of the name of stored results."""


PER_VOLUME = {"pca": "pca", "paper-pca": "paper-pca", "paper-ae": "ball-ae"}
"""Recipes with one query per volume, and their codecs. ``paper-pca`` and ``paper-ae`` also have the noise of eq (15) of
Fay et al. 2021.
"""


@dataclass(frozen=True, slots=True)
class Setting:
    """One row of the table.

    Attributes:
        recipe: ``joint``, ``appearance`` or one of :data:`PER_VOLUME`.
        hospitals: Number of hospitals.
        voters: Voters of each hospital.
        epsilon: ε of the whole study.
        delta: δ of the whole study.
        unit: Unit of privacy.
        queries: Number of queries of a recipe with one query per volume.
        teacher: Training recipe of a teacher.
        student: Training recipe of the student.
        central: True to train with DP-SGD too, at the same (ε, δ) for one patient: on all patients in one place, and at
            each hospital (:mod:`research.silos`).
        rounds: Number of rounds of the recipes ``joint`` and ``appearance``.
        paired: Number of public cases with labels, in a joint query.
        colluders: Sites that may collude in a sealed sum, whose noise is drawn at the sites; None for an open study.
    """

    recipe: str
    hospitals: int
    voters: int
    epsilon: float
    delta: float
    unit: Unit
    queries: int
    teacher: TrainingConfig
    student: TrainingConfig
    central: bool = False
    rounds: int = JOINT_ROUNDS
    paired: int = 0
    colluders: int | None = None


def study_of(setting: Setting, data: DataConfig) -> Study:
    """Return the study of a setting. Every round is one release about all volumes.

    Args:
        setting: The row of the table.
        data: The study's grid and labels.

    Raises:
        InvalidInput: For terms that its protocol cannot run.
    """
    protocol = setting.recipe if setting.recipe == "appearance" else ""
    codec = PER_VOLUME.get(setting.recipe)
    study = Study(
        name="bench-utility",
        data=data,
        privacy=PrivacyConfig(
            epsilon=setting.epsilon,
            delta=setting.delta,
            planned_queries=setting.rounds if codec is None else setting.queries,
            accountant=AccountantName.PAPER if setting.recipe.startswith("paper-") else AccountantName.EXACT,
            quorum=setting.hospitals,
            unit=setting.unit,
            voters_per_site=setting.voters,
            aggregation=OPEN if setting.colluders is None else SEALED_SUM,
            colluders=1 if setting.colluders is None else setting.colluders,
        ),
        codec=CodecConfig(joint=setting.recipe == "joint", protocol=protocol, paired=setting.paired)
        if codec is None
        else codec_terms(codec, labels=len(data.labels), grid=data.grid),
        teacher=setting.teacher,
        student=setting.student,
    )
    check_study(study)
    return study


def mean_noise(setting: Setting) -> float:
    """Return the noise's standard deviation on each coordinate of the mean code if one release spends the whole budget.

    The unit is the clipping norm.
    """
    return recommend(
        budget=Budget(setting.epsilon, setting.delta),
        accountant=AccountantName.EXACT,
        protection=Protection(setting.unit, Relation.REPLACE_ONE),
        hospitals=setting.hospitals,
        voters=setting.voters,
        colluders=setting.colluders,
    ).noise


def settings_json(setting: Setting) -> dict[str, object]:
    """Return the setting as plain JSON."""
    return json.loads(json.dumps(asdict(setting), default=str))  # type: ignore[no-any-return]
