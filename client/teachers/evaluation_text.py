"""Formats an evaluation of a network on a site's own cases as text for a terminal.

`consilium site evaluate` calls it. It computes no figure.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from client.teachers.evaluation import MOST_NAMED, Evaluation
from client.teachers.evaluation_input import PARTS
from client.teachers.fit_of_cases import CHECK
from common.plain import RESEARCH_ONLY, joined
from common.wording import many


def comparison_lines(result: Evaluation) -> list[str]:
    """Return the verdict and the comparisons as lines of text, with the reasons for missing ones.

    Args:
        result: The evaluation.

    Returns:
        The lines.
    """
    lines = [f"{result.headline}."]
    if result.fit.sentence:
        lines += [CHECK] if result.fit.refused else [f"warning: {result.fit.sentence}. {CHECK}"]
    if result.unlike:
        lines.append(f"{len(result.unlike)} of {len(result.scores)} cases differ from every public volume:")
        lines += [f"  {case}: {how}" for case, how in list(result.unlike.items())[:MOST_NAMED]]
        lines += ["  the others are in evaluation.json"] if len(result.unlike) > MOST_NAMED else []
    lines += [structure.sentence() for structure in result.missed]
    lines += [result.sentence_on(comparison) for comparison in result.comparisons]
    if not any(comparison.public for comparison in result.comparisons):
        lines.append(f"the {result.who} cannot be compared with what public data alone gives:")
    lines += [f"not compared with {missing.name}: {missing.reason}" for missing in result.missing]
    if result.alarms and not result.fit.refused:
        lines.append(f"{result.against}.{'' if result.fit.sentence else f' {result.remedy}'}")
    if result.own_better and not result.fit.sentence:
        lines += ["at this site:", *(f"  {finding}" for finding in result.own_better), f"  {result.own_better_advice}"]
    return lines


def table(result: Evaluation) -> str:
    """Return the means as a table for a person: all cases first, then by use in training.

    Args:
        result: The evaluation.

    Returns:
        The text.
    """
    names: Sequence[str] = result.structures
    width = max(12, *(len(name) + 2 for name in names))
    lines = ["".ljust(22) + "".join(name.rjust(width) for name in [*names, "mean", "cases"])]
    present = [part for part in PARTS if any(score.part == part for score in result.scores)]
    for part in [None, *present] if len(present) > 1 else [None]:
        mean = result.mean(part)
        cells = [*mean["dice"].values(), mean["mean_dice"]]
        dice = "".join(("-" if cell is None else f"{cell:.3f}").rjust(width) for cell in cells)
        lines.append(f"Dice, {part or 'all'}".ljust(22) + dice + str(mean["cases"]).rjust(width))
    far = result.mean()["hd95_mm"].values()
    lines.append("HD95 in mm, all".ljust(22) + "".join(("-" if d is None else f"{d:.2f}").rjust(width) for d in far))
    sure = result.reliability[f"the {result.who}"].error
    if not math.isnan(sure):
        lines.append("expected calibration error, voxels of structures".ljust(54) + f"{sure:.3f}")
    lines.append(f"scored on {result.voxels}")
    missed = sum(math.isinf(distance) for score in result.scores for distance in score.hd95_mm)
    if missed:
        lines.append(
            f"structures that only the label map or only the prediction contains: {missed}; their Dice is 0, without "
            "an HD95"
        )
    if result.withdrawn:
        lines.append(f"not scored: {many(result.withdrawn, 'case')} of withdrawn patients")
    if result.problems:
        lines.append(f"{many(len(result.problems), 'case')} left out:")
        lines += [f"  {problem.case}: {problem.reason}" for problem in result.problems]
    if result.trained_on:
        lines.append(
            f"not scored: {many(len(result.trained_on), 'case')} of patients on whom this network was trained; "
            "evaluation.json names them"
        )
    return joined([*lines, *comparison_lines(result), RESEARCH_ONLY])
