"""Shows a plan to people: a table for the terminal, and a chart. It computes no privacy fact of its own."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Any

from rich.table import Table

from common.errors import InvalidInput
from common.privacy.accounting import max_mu_squared
from common.privacy.coalitions import against_whom, coalition_sentences, spare_sentence, trade_sentences
from common.privacy.consent import warn_about
from common.privacy.figures import noise_text
from common.privacy.mechanism import Unit
from common.privacy.shares import push_unseen
from server.planning.planner import INFORMATIVE_FROM, PRIOR_BELOW, Plan, capacity_bits, explained_at_most

CHART_ENDINGS = (".png", ".svg", ".pdf")
_INK, _GRID, _MARK, _NOISE = "#1f2933", "#d9dee4", "#2563a8", "#b4552d"


def delta_warning(plan: Plan, *, patients: int | None) -> str | None:
    """Return a warning if δ is not small compared with one over the number of protected units.

    Args:
        plan: The plan.
        patients: Patients of one hospital; None if unknown.

    Returns:
        A sentence; None if δ is small enough or the number is unknown.
    """
    unit = plan.protection.unit
    units = plan.hospitals if unit is Unit.HOSPITAL else None if patients is None else plan.hospitals * patients
    return None if units is None else warn_about(plan.budget.delta, unit=unit, units=units)


class PlannedStudy(StrEnum):
    """The study that a plan is about.

    A row of the plan's table is about this study, unless the row names another study.

    Attributes:
        RECOMMENDED: The study that is recommended for the budget.
        FRAMED: A given study in which one query covers all volumes, so figures of separate queries do not apply.
        SEPARATE: A given study with a separate query about each volume.
    """

    RECOMMENDED = "the recommended study"
    FRAMED = "the given study"
    SEPARATE = "separate queries about each volume"


def plan_table(
    plan: Plan, *, recommended: str, about: PlannedStudy, patients: int | None = None, study: str = ""
) -> Table:
    """Return the plan as a table with two columns. Every ε has accountant, δ, unit and relation.

    Args:
        plan: The plan.
        recommended: The recommendation as a sentence.
        about: The study that the plan is about.
        patients: Patients of one hospital, to judge δ; None if unknown.
        study: The prediction for the given study as it is, as a sentence; empty if there is none.

    Returns:
        The table.
    """
    table = Table(title="Privacy plan", show_header=False, title_justify="left")
    table.add_column(no_wrap=True)
    table.add_column()
    other = "another study than the one above: " if about is PlannedStudy.SEPARATE else ""
    rows: list[tuple[str, str]] = [("plan of", about), ("guarantee", str(plan.guarantees[0]))]
    rows += [("", str(other)) for other in plan.guarantees[1:]]
    if plan.known_twice is not None:
        rows += [("known at 2 hospitals", f"{plan.known_twice} (the lines above: at one hospital only)")]
    rows += [("in plain words", plan.in_words)]
    rows += [("", warning)] if (warning := delta_warning(plan, patients=patients)) else []
    voters = f"{plan.hospitals} hospitals × {plan.mechanism.voters_per_site} voters = K′ {plan.voters}"
    rows += [
        ("queries N", f"{plan.queries} planned, {plan.queries_left} left in the budget"),
        ("voters", voters),
        ("noise σ on the sum", f"{noise_text(plan.noise_std)} grid steps (exactly {plan.noise_std})"),
        ("noise multiplier z", noise_text(plan.noise_multiplier)),
        *_sealed_rows(plan),
        *_trade_rows(plan),
        *(_separate_rows(plan) if about is PlannedStudy.SEPARATE else []),
        *([("this study", study)] if study else []),
        ("verdict" if about is PlannedStudy.RECOMMENDED else "recommended", f"{other}{recommended}"),
        ("accountants", plan.accountant_note),
    ]
    for name, value in rows:
        table.add_row(name, value)
    return table


def _separate_rows(plan: Plan) -> list[tuple[str, str]]:
    """Return table rows for a study with a separate query about each volume: noise, information, errors and verdict."""
    rows = [
        (
            "noise on the mean",
            f"{noise_text(plan.noise_per_coordinate)} a coordinate, about {noise_text(plan.noise_norm, 4)} in norm",
        ),
        ("code norm C", f"{plan.code_norm:.6g} at most, over {plan.mechanism.dimension} coordinates"),
        (
            "information ceiling",
            f"{plan.bits_per_query:.3g} bits an answer; for codes of any length {plan.ceiling_bits:.1f} bits in all",
        ),
    ]
    if plan.errors is not None:
        total = plan.errors.total
        rows += [
            ("expected error", "of the mean code, as a share of answering with the public mean"),
            (
                "  eq (7) of the PATE paper",
                f"{plan.errors.hard_threshold / total:.3f}, keeping {plan.errors.kept} coordinates",
            ),
            ("  Wiener", f"{plan.errors.wiener / total:.3f}"),
            ("  water-filled", f"{plan.errors.water_filled / total:.3f}"),
        ]
    rows += [("verdict", plan.summary)]
    return [*rows, *(("would help" if i == 0 else "", line) for i, line in enumerate(plan.advice))]


def _sealed_rows(plan: Plan) -> list[tuple[str, str]]:
    colluders = plan.mechanism.colluders
    if colluders is None:
        return []
    found = against_whom(
        (plan.queries + plan.spare_draws) * plan.mechanism.mu_squared(plan.protection),
        *(plan.budget, plan.protection, plan.accountant),
        least=plan.hospitals,
        most=plan.hospitals,
        colluders=colluders,
    )
    sentences = coalition_sentences(found, least=plan.hospitals, most=plan.hospitals, colluders=colluders)
    return [
        (
            "noise in the sum",
            f"{noise_text(plan.noise_overhead, 5)} σ, in {plan.hospitals} shares drawn at the hospitals",
        ),
        ("smallest roster", f"{plan.smallest_roster} hospitals: {colluders} that may collude, and two others"),
        ("sealed sum", sentences[1]),
        ("", spare_sentence(answers=plan.queries, spare=plan.spare_draws)),
    ]


def _trade_rows(plan: Plan) -> list[tuple[str, str]]:
    """Return table rows on how far one dishonest hospital can push an answer, in an open and in a sealed study."""
    chosen, other = trade_sentences(sealed=plan.mechanism.colluders is not None)
    push = push_unseen(plan.mechanism, sites=plan.hospitals)
    far = "as far as an honest one" if plan.mechanism.colluders is None else f"{push:.1f} times as far as an honest one"
    return [
        ("one dishonest site", f"can push an answer {far}, and no test of the answer shows it"),
        ("", chosen),
        ("", other),
    ]


def _plan_figure(plan: Plan) -> Any:
    """Draw the largest share of a code's variance that an answer can explain, over hospitals and over queries.

    The plan is marked in both panels; dashed lines are the thresholds of the verdicts.
    """
    from matplotlib.figure import Figure  # imported here, because a table needs no plotting library
    from matplotlib.ticker import NullLocator

    shape = plan.spectrum
    limit = float(max_mu_squared(plan.accountant, plan.budget))
    colluders, spare = plan.mechanism.colluders or 0, plan.spare_draws
    power = (plan.queries + spare) * plan.power_ratio  # K(K − t)·(m·R/Δ)²·Σμ²: does not depend on N

    def pairs(hospitals: int) -> int:
        return hospitals * (hospitals - colluders)

    def ceiling(hospitals: int, queries: int) -> float:
        ratio = power * (pairs(hospitals) / pairs(plan.hospitals)) / (queries + spare)
        return explained_at_most(capacity_bits(ratio, len(shape)), shape)

    figure = Figure(figsize=(9, 3.6), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    least = plan.smallest_roster or 1
    hospitals = sorted({k for i in range(4, 33) if (k := round(2 ** (i / 4))) >= least} | {plan.hospitals})
    queries = sorted({*(round(10 ** (i / 8)) for i in range(33)), plan.queries})
    left.plot(hospitals, [ceiling(k, plan.queries) for k in hospitals], color=_MARK)
    left.plot([plan.hospitals], [ceiling(plan.hospitals, plan.queries)], "o", color=_NOISE)
    left.set_xlabel(f"hospitals (plan: {plan.hospitals})")
    right.plot(queries, [ceiling(plan.hospitals, n) for n in queries], color=_MARK)
    right.plot([plan.queries], [ceiling(plan.hospitals, plan.queries)], "o", color=_NOISE)
    right.set_xlabel(f"queries (plan: {plan.queries})")
    left.set_ylabel("variance an answer can explain, at most")
    steps = {left: ([2**i for i in range(14)], hospitals), right: ([10**i for i in range(7)], queries)}
    for axes, (ticks, values) in steps.items():
        axes.set_xscale("log")
        axes.set_xticks(ticks, [f"{tick:,}" for tick in ticks])
        axes.xaxis.set_minor_locator(NullLocator())
        axes.set_xlim(values[0] / 1.15, values[-1] * 1.15)
        axes.set_ylim(-0.02, 1)
        axes.grid(color=_GRID, linewidth=0.6)
        axes.tick_params(colors=_INK)
        for height in (PRIOR_BELOW, INFORMATIVE_FROM):
            axes.axhline(height, color=_INK, linewidth=0.8, linestyle="--")
    for height, name in ((0.04, "mostly the public prior"), (PRIOR_BELOW, "weak"), (INFORMATIVE_FROM, "informative")):
        left.text(left.get_xlim()[0], height + 0.02, f"  {name}", color=_INK, fontsize=8)
    figure.suptitle(f"{plan.guarantees[0]}   (Σμ² ≤ {limit:.4g})", fontsize=10, color=_INK)
    return figure


def check_chart(path: Path) -> None:
    """Refuse a chart file that has an unknown ending or whose folder does not exist, before anything is computed.

    Args:
        path: The file.

    Raises:
        InvalidInput: If the ending is unknown or the folder does not exist.
    """
    if path.suffix.lower() not in CHART_ENDINGS:
        raise InvalidInput("chart file", value=str(path), limit=f"a name ending in {', '.join(CHART_ENDINGS)}")
    if not path.parent.is_dir() or path.is_dir():
        raise InvalidInput("chart file", value=str(path), limit="a file in an existing folder")


def write_chart(plan: Plan, path: Path) -> None:
    """Draw the plan's chart (:func:`_plan_figure`) as PNG, SVG or PDF.

    Args:
        plan: The plan.
        path: The file; its ending gives the format.

    Raises:
        InvalidInput: For another ending, or a file that cannot be written.
    """
    check_chart(path)
    try:
        _plan_figure(plan).savefig(path, dpi=150)
    except OSError as error:
        raise InvalidInput(
            "chart file", value=str(path), limit=f"a file that can be written; the system says: {error.strerror}"
        ) from error
