"""Writes the report of a demo or a simulation: ``report.json`` for programs, ``report.html`` for people.

The page is one file: inline styles, pictures as data URIs, no script and no network request. Every ε has its
accountant, δ, unit and relation, and none is rounded down. A figure that is not finite becomes null.
"""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from common.case_pictures import OUTLINES
from common.config import Study
from common.intervals import known_interval
from common.measured_gain import Score
from common.objects import finite, write_atomically
from common.plain import RESEARCH_ONLY
from common.privacy.calibration import noise_multiplier
from common.privacy.figures import delta_text, epsilon_text, noise_text
from common.privacy.mechanism import AccountantName
from common.protocol_terms import protocol_name, terms_of
from common.study_mechanism import sealed_sentences, study_mechanism
from common.wording import duration
from consilium.reports.report_facts import CONTROLS, ReportFacts
from consilium.reports.report_pictures import draw_pictures
from server.study.consent_text import BatchRoster, sealed_facts

REPORT_SCHEMA = 1


def write_report(out: Path, facts: ReportFacts) -> None:
    """Write ``report.json`` and ``report.html``, each in one atomic write.

    Args:
        out: The folder.
        facts: The report's facts.
    """
    text = json.dumps(report_json(facts), indent=2, ensure_ascii=False, allow_nan=False) + "\n"
    write_atomically(out / "report.json", text.encode())
    write_atomically(out / "report.html", render_html(facts).encode())


def report_json(facts: ReportFacts) -> dict[str, Any]:
    """Return the report as plain values for JSON; figures that are not finite are None."""
    study = facts.study

    def dice(score: Score) -> dict[str, object]:
        per_class = dict(zip(facts.labels, score.per_class, strict=True))
        cases = {"cases": list(score.cases)} if score.cases else {}
        far = {"hd95_mm": dict(zip(facts.labels, score.hd95_mm, strict=True))} if score.hd95_mm else {}
        return {"mean": score.mean, "per_class": per_class, **cases, **far}

    mean_teacher = facts.mean_teacher
    document = {
        "schema": REPORT_SCHEMA,
        "version": facts.version,
        "finished": None if facts.finished is None else facts.finished.isoformat(timespec="seconds"),
        "study": {
            "id": study.id,
            "name": study.name,
            "labels": list(study.data.labels),
            "grid": list(study.data.grid),
            "codec": study.codec.name,
            "quorum": study.privacy.quorum,
            "voters_per_site": study.privacy.voters_per_site,
            **(
                {"sealed_sum": sealed_facts(study, sites=_most_sites(facts), spending=facts.spending)}
                if study.privacy.sealed
                else {}
            ),
        },
        **({"simulation": True} if facts.simulated else {}),
        "known": facts.known,
        "data": {"used": facts.cases_used, "left_out": [problem.to_json() for problem in facts.left_out]},
        "bought": facts.bought,
        "worth": None if facts.measured_gain is None else facts.measured_gain.to_json(),
        "student": {"dice": dice(facts.student), "ece": facts.student_ece},
        "test_cases": [
            {"case": one.name, "mean": one.mean, "per_class": dict(zip(facts.labels, one.per_class, strict=True))}
            for one in facts.worst_first
        ],
        "controls": {
            name: {"dice": None if (score := facts.controls[name]) is None else dice(score)} for name in CONTROLS
        },
        "teachers": [{"name": teacher.name, "dice": dice(teacher.score)} for teacher in facts.teachers],
        "mean_teacher": {"dice": None if mean_teacher is None else dice(mean_teacher)},
        "ensemble": {"dice": dice(facts.ensemble)},
        "mean_shape": {"dice": dice(facts.mean_shape)},
        "decoded_labels": {"dice": None if facts.decoded_labels is None else dice(facts.decoded_labels)},
        "privacy": _privacy(facts),
        "daemons": [asdict(daemon) for daemon in facts.daemons],
        "refused_node": facts.refused_node,
        "sites": [asdict(site) for site in facts.sites],
        "releases": [asdict(release) for release in facts.releases],
        "seconds": dict(facts.seconds),
        "run_seconds": dict(facts.run_seconds),
        "ledger": {"head": facts.ledger_head, "rows": facts.ledger_rows},
        "seeds": dict(facts.seeds),
        "spacing_mm": list(study.data.spacing_mm),
        "pictures": [
            {"title": picture.title, "kind": picture.kind, "outlines": list(picture.outlines)}
            for picture in facts.pictures
        ],
    }
    plain: dict[str, Any] = finite(document)
    return plain


def _privacy(facts: ReportFacts) -> dict[str, Any]:
    """Return the study's guarantee and terms, and what was spent and answered."""
    study, spending = facts.study, facts.spending
    terms = study.privacy
    paper = {"epsilon_paper": spending.spent.epsilon} if terms.accountant is AccountantName.PAPER else {}
    return {
        "epsilon_exact": spending.by(AccountantName.EXACT).epsilon,
        "epsilon_rdp": spending.by(AccountantName.RDP).epsilon,
        "delta": terms.delta,
        "unit": str(terms.unit),
        "relation": str(terms.relation),
        "accountant": str(terms.accountant),
        "planned_epsilon": terms.epsilon,
        "noise_multiplier": noise_multiplier(study_mechanism(study, dimension=1), terms.protection),
        "queries": facts.queries,
        "planned_queries": terms.planned_queries,
        "voters": facts.voters,
        "clipping_norm": study.codec.radius,
        **paper,
        "guaranteed_epsilon": spending.guaranteed.epsilon,
    }


def render_html(facts: ReportFacts) -> str:
    """Return the report as one HTML page; all texts in ``facts`` are escaped."""
    environment = Environment(
        loader=PackageLoader("consilium", "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "epsilon": epsilon_text,
        "delta": delta_text,
        "noise": noise_text,
        "dice": _format_dice,
        "mm": _format_mm,
        "duration": lambda seconds: duration(seconds) if math.isfinite(seconds) else "–",
        "number": lambda value: f"{value:,}".replace(",", "\u202f"),
    }
    terms, spending = facts.study.privacy, facts.spending
    images = [
        "data:image/png;base64," + base64.b64encode(image).decode("ascii")
        for image in draw_pictures(facts.pictures, facts.study.data.spacing_mm)
    ]
    return environment.get_template("report.html").render(
        facts=facts,
        privacy=_privacy(facts),
        groups=_dice_groups(facts),
        beside=_beside(facts),
        gain_bars=_gain_bars(facts),
        share_spent=_share_spent(spending.spent.epsilon, terms.epsilon),
        share_queries=round(min(100.0, 100 * facts.queries / terms.planned_queries), 2),
        attendance=_attendance(facts.releases),
        sealed=sealed_sentences(facts.study, sites=_most_sites(facts), spent=spending.mu_squared),
        in_words=spending.odds_sentence(colluders=terms.sealed_colluders),
        research_only=RESEARCH_ONLY,
        so_far=spending.odds_spent_sentence(sealed=terms.sealed),
        passed=spending.warning,
        pictures=list(zip(facts.pictures, images, strict=True)),
        outlines=OUTLINES,
    )


def _most_sites(facts: ReportFacts) -> int:
    """Return the number of hospitals in the report, or the size of the largest roster if that is larger."""
    return max(len(facts.sites), facts.spending.largest_roster)


CONTROLS_NOTE = (
    "Judge the student by its gain over these controls: they have its seed, volumes and steps, and lack only the "
    "hospitals' answers about each volume."
)


@dataclass(frozen=True, slots=True)
class DiceRow:
    name: str
    score: Score
    note: str = ""


@dataclass(frozen=True, slots=True)
class DiceGroup:
    title: str
    rows: tuple[DiceRow, ...]
    note: str = ""


def _dice_groups(facts: ReportFacts) -> tuple[DiceGroup, ...]:
    """Return the table of scores in four groups.

    The groups are the student, its controls, baselines without hospitals, and scores that only a demo can compute.
    """
    seen = [DiceRow("Ensemble of the teachers", facts.ensemble, "all teachers together, without noise")]
    if facts.decoded_labels is not None:
        seen.insert(0, DiceRow("Decoded labels", facts.decoded_labels, "the student's pseudo-labels"))
    if facts.mean_teacher is not None:
        seen.append(DiceRow("Mean teacher", facts.mean_teacher, f"average of {len(facts.teachers)}"))
    seen += [DiceRow(f"Teacher {teacher.name}", teacher.score) for teacher in facts.teachers]
    missing = Score((math.nan,) * len(facts.labels), math.nan)
    controls = []
    for name, (title, note) in _controls(facts.study).items():
        score = facts.controls[name]
        reason = "not trained: it needs two labelled volumes" if name == "shuffled_codes" else "not trained"
        controls.append(DiceRow(title, score or missing, note if score else reason))
    return (
        DiceGroup("What the study gives out", (DiceRow("Student", facts.student, "covered by the guarantee above"),)),
        DiceGroup("Controls: the same student without the teachers' information", tuple(controls), CONTROLS_NOTE),
        DiceGroup(
            "Baseline without any hospital",
            (DiceRow("Mean shape", facts.mean_shape, "the average public label map, the same for every patient"),),
        ),
        DiceGroup("Known only because a demo holds every party's data", tuple(seen)),
    )


def _controls(study: Study) -> Mapping[str, tuple[str, str]]:
    """Return each control's title and description, by name; two controls that are the same network are listed once."""
    if study.codec.paired:
        alone = "Public pairs alone", f"the public start, trained further on its {study.codec.paired} public pairs"
        return {**CONTROLS, "public_only": alone}
    if not terms_of(protocol_name(study.codec)).one_public:
        return CONTROLS
    both = f"{CONTROLS['zero_code'][0]}, {CONTROLS['public_only'][0].lower()}"
    note = "one network is both controls in this study: trained on the labels that a public network predicts"
    return {
        name: (both, note) if name == "zero_code" else said for name, said in CONTROLS.items() if name != "public_only"
    }


@dataclass(frozen=True, slots=True)
class GainBar:
    """One bar of the first chart: a mean Dice and half of its 95 % interval over cases (None without cases)."""

    name: str
    dice: float
    half: float | None
    main: bool = False


def _gain_bars(facts: ReportFacts) -> tuple[GainBar, ...]:
    """Return a bar for the student, each control, the teachers and the mean shape, if they were scored."""
    titles = {name: title for name, (title, _) in _controls(facts.study).items()}
    named = [("Student", facts.student), *((title, facts.controls[name]) for name, title in titles.items())]
    named += [("Mean teacher", facts.mean_teacher), ("Teachers together, without noise", facts.ensemble)]
    named += [("Mean shape", facts.mean_shape)]
    bars = []
    for name, one in named:
        if one is not None and math.isfinite(one.mean):
            _, half = known_interval(one.cases) or (0.0, None)
            bars.append(GainBar(name, one.mean, half, name == "Student"))
    return tuple(bars)


def _beside(facts: ReportFacts) -> str:
    """Return a sentence with the scores of the student, the mean shape and the mean teacher, without a verdict."""
    student, shape, teacher = facts.student.mean, facts.mean_shape.mean, facts.mean_teacher
    if not math.isfinite(student) or not math.isfinite(shape):
        return "The student could not be scored against the mean shape."
    text = f"The student has Dice {student:.3f}, the mean shape {shape:.3f}"
    if teacher is not None and math.isfinite(teacher.mean):
        text += f", the mean teacher {teacher.mean:.3f}"
    return text + "."


@dataclass(frozen=True, slots=True)
class AttendancePeriod:
    """Consecutive releases in which the same hospitals took part.

    Attributes:
        numbers: Numbers of the releases, such as ``2–4``.
        queries: Number of answers in them.
        roster: The hospitals.
    """

    numbers: str
    queries: int
    roster: tuple[str, ...]


def _attendance(releases: Sequence[BatchRoster]) -> tuple[AttendancePeriod, ...]:
    """Return the columns of the table that shows which hospitals took part in which releases."""
    columns = []
    for roster, group in groupby(enumerate(releases, start=1), key=lambda item: item[1].roster):
        items = list(group)
        first, last = items[0][0], items[-1][0]
        numbers = f"{first}–{last}" if last > first else str(first)
        columns.append(AttendancePeriod(numbers, sum(release.queries for _, release in items), roster))
    return tuple(columns)


def _share_spent(epsilon: float, budget: float) -> float:
    """Return the spent percentage of ε, rounded up to a tenth; it is above 100 if more than the budget was spent."""
    return math.ceil(1000 * epsilon / budget) / 10


def _format_mm(value: float) -> str:
    return f"{value:.1f}" if math.isfinite(value) else "–"


def _format_dice(value: float) -> str:
    return f"{value:.3f}" if math.isfinite(value) else "–"
