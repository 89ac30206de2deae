"""Makes a demo's study from its options. The planner chooses what the options leave open.

The demo calls it before the study is created.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median_low

from common.codecs.paper import codec_terms
from common.config import (
    JOINT_ROUNDS,
    OPEN,
    SEALED_SUM,
    DataConfig,
    PrivacyConfig,
    Study,
    TrainingConfig,
    usual_aggregation,
)
from common.data.grid import choose_both
from common.data.msd import read_dataset
from common.data.synthetic import study_data
from common.errors import InvalidInput
from common.privacy.mechanism import HONEST_SITES
from common.protocol_terms import PLAIN, suited, terms_of
from consilium.demo.options import DemoFolders, DemoOptions
from consilium.reports.report_facts import SIMULATION
from server.planning.public_shapes import LEAST_MAPS, mean_shape_dice, read_maps
from server.planning.recommend import protocol_for, recommend, training_for

PATIENTS, VOLUMES = 24, 16  # phantoms of each hospital; public phantom images
PHANTOM_ROUNDS = 2  # the student gains as much as with four rounds, with half the messages
PHANTOM_DATA = replace(study_data(), spacing_mm=(1.9, 1.9, 1.9), grid=(24, 24, 24))
PHANTOM_RECIPE = (
    TrainingConfig(steps=40, batch_size=1),
    TrainingConfig(steps=200, batch_size=1, learning_rate=5e-3),
)
"""Recipes of teacher and student for phantoms. Teachers begin from a public start and need few steps."""
MOST_VOXELS = 1 << 16
"""Largest number of voxels of the grid in a demo without phantoms; with more of them the demo would take too long."""


def terms(options: DemoOptions, places: DemoFolders, maps: Sequence[Path], patients: Sequence[int]) -> Study:
    """Make the study from the options. The planner chooses the settings that the options leave open.

    Args:
        options: The demo's options.
        places: The demo's folders.
        maps: Public label maps.
        patients: Number of patients of each site.

    Returns:
        The study.

    Raises:
        InvalidInput: If a sealed sum has too few hospitals, or an option is out of range.
    """
    protocol, mean_shape = _protocol(options, maps)
    if not options.data:
        return _terms(options, protocol, PHANTOM_DATA, PHANTOM_RECIPE, patients)
    dataset, (spacing, grid) = read_dataset(places.split / "test"), choose_both(maps, most=MOST_VOXELS)
    data = DataConfig(dataset.labels, spacing, grid, dataset.channels, dataset.regions)
    return _terms(options, protocol, data, training_for(protocol, mean_shape=mean_shape), patients)


def check_terms(options: DemoOptions, hospitals: int) -> None:
    """Refuse terms that no study of this number of hospitals can have. Reads and writes nothing.

    Args:
        options: The demo's options.
        hospitals: Number of hospitals.

    Raises:
        InvalidInput: If a sealed sum has too few hospitals, or an option is out of range.
    """
    _terms(options, _protocol(options, ())[0], PHANTOM_DATA, PHANTOM_RECIPE, [PATIENTS] * hospitals)


def _terms(
    options: DemoOptions,
    protocol: str,
    data: DataConfig,
    recipes: tuple[TrainingConfig, TrainingConfig],
    patients: Sequence[int],
) -> Study:
    teacher, student = recipes
    rounds = terms_of(protocol).framed
    codec = codec_terms(options.codec, labels=len(data.labels), grid=data.grid, protocol=protocol)
    codec = replace(codec, paired=options.paired)
    queries = JOINT_ROUNDS if rounds else options.queries or VOLUMES
    if options.data is None and rounds:
        queries, codec = PHANTOM_ROUNDS, replace(codec, max_dimension=48, augmentations=120)
    aggregation = options.aggregation or usual_aggregation(len(patients))
    least = (
        options.colluders + HONEST_SITES if aggregation == SEALED_SUM else 1
    )  # with a smaller quorum no site would be hidden
    quorum = max(len(patients) // 2 + 1, least)
    if quorum > len(patients):
        raise InvalidInput(
            "hospitals of a sealed sum",
            value=len(patients),
            limit=f"at least {quorum} with --colluders {options.colluders}",
            remedy=f"give --hospitals {quorum} and data for them, or --aggregation {OPEN} without --colluders",
        )
    privacy = PrivacyConfig(
        epsilon=options.epsilon,
        delta=options.delta,
        planned_queries=queries,
        quorum=quorum,
        accountant=options.accountant,  # type: ignore[arg-type]  # PrivacyConfig parses it
        relation=options.relation,  # type: ignore[arg-type]
        unit=options.unit,  # type: ignore[arg-type]
        voters_per_site=options.voters or 1,
        aggregation=aggregation,
        colluders=options.colluders,
        spare_draws=options.spare_draws,
    )
    if options.voters is None:
        advised = recommend(
            budget=privacy.budget,
            accountant=privacy.accountant,
            protection=privacy.protection,
            hospitals=len(patients),
            patients=median_low(patients),
            colluders=privacy.sealed_colluders,
        )
        privacy = replace(privacy, voters_per_site=advised.voters)
    teacher, student = (
        replace(teacher, steps=options.teacher_steps or teacher.steps),
        replace(student, steps=options.student_steps or student.steps),
    )
    name = SIMULATION if options.simulated else "demo"
    return Study(name=name, data=data, privacy=privacy, codec=codec, teacher=teacher, student=student)


def _protocol(options: DemoOptions, maps: Sequence[Path]) -> tuple[str, float | None]:
    """Return the protocol that the options choose; otherwise, with a PCA codec, the planner's recommendation.

    Return also the Dice of the mean public shape if the recommendation is based on it, else None.
    """
    if options.rounds is False or (options.rounds is None and options.codec != "pca"):
        return PLAIN, None
    if not options.data or options.rounds or options.strategy != "standard" or len(maps) < LEAST_MAPS:
        return suited(placed=True), None
    found, labels = read_maps(maps[0].parent)
    mean_shape = mean_shape_dice(found, labels=labels)
    return protocol_for(mean_shape, paired=options.paired), mean_shape
