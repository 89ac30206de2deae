"""The demo's report: ``report.json`` for machines and ``report.html`` for a privacy officer and an ML lead.

The page is one file: styles inline, pictures as data URIs, no script and no request to anywhere. No ε is printed
without its accountant, δ, unit of privacy and neighbouring relation, and none is rounded down. Refuses scores whose
classes are not the study's and pictures whose outlines do not fit their volume; writes null where a figure is not a
finite number.
"""

from __future__ import annotations

import base64
import io
import json
import math
import os
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from itertools import groupby
from pathlib import Path
from statistics import NormalDist
from types import MappingProxyType
from typing import Any, Literal

import numpy as np
from jaxtyping import Float32, Shaped, UInt8
from jinja2 import Environment, PackageLoader, StrictUndefined
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patheffects import Stroke, withStroke
from PIL import Image

from common.config import Study
from common.errors import InvalidInput
from common.privacy.accounting import delta_exact
from common.privacy.consent import guess_sentence
from common.privacy.figures import delta_text, epsilon_text
from server.study.consent_text import BatchRoster, study_limit

REPORT_SCHEMA = 1

FALSE_ALARMS = 0.05
"""The share of false accusations at which the page says how often a true one can succeed."""

MAX_PICTURE_BYTES = 2_000_000
"""Bytes of all PNGs together; more pictures are drawn smaller, so that the page stays under 3 MB."""


@dataclass(frozen=True, slots=True)
class LineStyle:
    """How one kind of outline is drawn: a colour-blind-safe colour (Okabe & Ito 2008) and a dash pattern, so that
    either alone tells the kinds apart. ``dashes`` are in units of the line's width, empty for a solid line."""

    colour: str
    dashes: tuple[float, ...]


OUTLINES: Mapping[str, LineStyle] = MappingProxyType(
    {
        "truth": LineStyle("#f0e442", ()),
        "pseudo-label": LineStyle("#56b4e9", (4.0, 1.6)),
        "student": LineStyle("#ff7a2f", (1.1, 1.3)),
    }
)
"""The outlines a picture can carry, in drawing order."""


CONTROLS: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "zero_code": ("Zero code", "every label decoded from the zero code, as if no hospital had answered"),
        "shuffled_codes": ("Shuffled codes", "the same noisy answers, dealt to the wrong volumes"),
        "public_only": ("Public only", "self-training: every label the zero code's student's own prediction"),
    }
)
"""The controls by their name in ``report.json``: how the page calls them, and what their labels are."""


# ---- facts -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Score:
    """Dice on the test set: the mean, and one figure per structure in the order of the study's labels 1, 2, …

    A figure that could not be computed is NaN.
    """

    mean: float
    per_class: tuple[float, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "per_class", tuple(self.per_class))
        for value in (self.mean, *self.per_class):
            if not math.isnan(value) and not 0 <= value <= 1:
                raise InvalidInput("Dice", value=value, limit="0 to 1, or NaN where there is none")


@dataclass(frozen=True, slots=True)
class NamedScore:
    """The Dice of one named teacher."""

    name: str
    score: Score


@dataclass(frozen=True, slots=True, kw_only=True)
class PrivacyFacts:
    """What the study guarantees and what the run spent of it, read from the ledger.

    ``planned_epsilon`` is the budget, hence the guarantee; ``epsilon_exact`` and ``epsilon_rdp`` were spent at
    ``delta`` for ``unit`` under ``relation``; ``accountant`` is the one that gates; where that is the paper's,
    ``epsilon_paper`` is given. ``noise_multiplier`` is z = σ/Δ of one release, ``voters`` the teachers summed in a
    release over all sites, ``clipping_norm`` is C.
    """

    epsilon_exact: float
    epsilon_rdp: float
    delta: float
    unit: str
    relation: str
    accountant: str
    planned_epsilon: float
    noise_multiplier: float
    queries: int
    planned_queries: int
    voters: int
    clipping_norm: float
    epsilon_paper: float | None = None

    @property
    def epsilon_gate(self) -> float:
        """What was spent according to the accountant that gates the budget."""
        by = {"rdp": self.epsilon_rdp, "paper": self.epsilon_paper}
        return by.get(self.accountant) or self.epsilon_exact

    @property
    def epsilon_guaranteed(self) -> float:
        """What no unit loses more than: the budget, or what was spent, should that ever be more."""
        return max(self.planned_epsilon, self.epsilon_gate)

    @property
    def detection_power(self) -> float | None:
        """How often, at most, an attacker with :data:`FALSE_ALARMS` false accusations is right about one unit.

        Φ(Φ⁻¹(α) + μ) with μ² = queries/z², the trade-off curve of a Gaussian mechanism (Dong, Roth & Su 2022, eq 6).
        None when nothing was released, or when μ and (ε, δ) do not tell the same story within 1 % of δ.
        """
        if self.queries < 1 or not self.noise_multiplier > 0 or not math.isfinite(self.epsilon_exact):
            return None
        mu = math.sqrt(self.queries) / self.noise_multiplier
        try:
            if abs(delta_exact(mu, self.epsilon_exact) - self.delta) > 0.01 * self.delta:
                return None
        except InvalidInput:
            return None
        normal = NormalDist()
        return normal.cdf(normal.inv_cdf(FALSE_ALARMS) + mu)


@dataclass(frozen=True, slots=True)
class DaemonFact:
    """One process of the federation."""

    role: str
    pid: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SiteFact:
    """One hospital: ``epsilon_spent`` is its pool's, by the gate accountant at the study's δ, unit and relation.

    ``patient`` says in words what a patient risks where the site's teachers were trained with a guarantee.
    """

    name: str
    pool: str
    patients: int
    codes_sent: int
    epsilon_spent: float
    patient: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class Picture:
    """One volume on the study grid (RAS+) with outlines named in :data:`OUTLINES`. Arrays are copied, read-only."""

    title: str
    kind: Literal["public", "test"]
    image: Float32[np.ndarray, "x y z"]
    outlines: Mapping[str, UInt8[np.ndarray, "x y z"]]

    def __post_init__(self) -> None:
        if self.kind not in ("public", "test"):
            raise InvalidInput("kind of picture", value=self.kind, limit="public, test")
        if self.image.ndim != 3 or not np.isfinite(self.image).all():
            raise InvalidInput("picture", value=self.image.shape, limit="finite voxels on three axes")
        unknown = sorted(self.outlines.keys() - OUTLINES.keys())
        if unknown:
            raise InvalidInput("outline", value=unknown[0], limit=", ".join(OUTLINES))
        for name, mask in self.outlines.items():
            if mask.shape != self.image.shape:
                raise InvalidInput(f"shape of outline {name}", value=mask.shape, limit=str(self.image.shape))
        object.__setattr__(self, "image", _frozen(self.image))
        frozen = {name: _frozen(self.outlines[name]) for name in OUTLINES if name in self.outlines}
        object.__setattr__(self, "outlines", MappingProxyType(frozen))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ReportFacts:
    """Everything a report says. ``refused_node`` is the evidence that an unregistered node was turned away;
    ``decoded_labels`` scores the pseudo-labels against the demo's truth; ``controls`` has a score for every name in
    :data:`CONTROLS`, None for one that could not be trained; ``finished`` dates the page."""

    study: Study
    privacy: PrivacyFacts
    teachers: tuple[NamedScore, ...]
    ensemble: Score
    mean_shape: Score
    student: Score
    controls: Mapping[str, Score | None]
    decoded_labels: Score | None
    daemons: tuple[DaemonFact, ...]
    refused_node: str
    sites: tuple[SiteFact, ...]
    releases: tuple[BatchRoster, ...]
    seconds: Mapping[str, float]
    pictures: tuple[Picture, ...]
    ledger_head: str
    ledger_rows: int
    version: str
    seeds: Mapping[str, int]
    spacing_mm: tuple[float, float, float]
    finished: datetime | None = field(default=None)

    def __post_init__(self) -> None:
        for name in ("teachers", "daemons", "sites", "releases", "pictures", "spacing_mm"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
        if self.controls.keys() != CONTROLS.keys():
            raise InvalidInput("controls", value=sorted(self.controls), limit=", ".join(CONTROLS))
        for name in ("seconds", "seeds", "controls"):
            object.__setattr__(self, name, MappingProxyType(dict(getattr(self, name))))
        if len(self.spacing_mm) != 3 or not all(s > 0 for s in self.spacing_mm):
            raise InvalidInput("spacing_mm", value=self.spacing_mm, limit="three numbers above 0")
        for score in self._scores():
            if len(score.per_class) != len(self.labels):
                raise InvalidInput("classes of a score", value=len(score.per_class), limit=", ".join(self.labels))

    @property
    def labels(self) -> tuple[str, ...]:
        """Names of the structures: the study's labels without background."""
        return self.study.data.labels[1:]

    @property
    def mean_teacher(self) -> Score | None:
        """The teachers' figures averaged, NaN left out; None without teachers."""
        if not self.teachers:
            return None
        columns = zip(*(teacher.score.per_class for teacher in self.teachers), strict=True)
        return Score(_mean([teacher.score.mean for teacher in self.teachers]), tuple(map(_mean, columns)))

    @property
    def best_control(self) -> tuple[str, float] | None:
        """Name and mean Dice of the control that scores highest; None where none could be scored."""
        scored = {n: s.mean for n, s in self.controls.items() if s is not None and math.isfinite(s.mean)}
        return max(scored.items(), key=lambda item: item[1]) if scored else None

    def _scores(self) -> list[Score]:
        named = [teacher.score for teacher in self.teachers]
        optional = [score for score in (self.decoded_labels, *self.controls.values()) if score is not None]
        return [*named, self.ensemble, self.mean_shape, self.student, *optional]


# ---- outputs ---------------------------------------------------------------------------------------------------------


def write_report(out: Path, facts: ReportFacts) -> None:
    """Write ``out/report.json`` and ``out/report.html``; each appears whole or not at all, an old one is replaced."""
    out.mkdir(parents=True, exist_ok=True)
    text = json.dumps(report_json(facts), indent=2, ensure_ascii=False, allow_nan=False) + "\n"
    _replace(out / "report.json", text)
    _replace(out / "report.html", render_html(facts))


def report_json(facts: ReportFacts) -> dict[str, Any]:
    """The report as plain JSON values; figures that are not finite are None."""
    privacy, study = facts.privacy, facts.study

    def dice(score: Score) -> dict[str, object]:
        return {"mean": score.mean, "per_class": dict(zip(facts.labels, score.per_class, strict=True))}

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
        },
        "student": {"dice": dice(facts.student)},
        "controls": {
            name: {"dice": None if (score := facts.controls[name]) is None else dice(score)} for name in CONTROLS
        },
        "teachers": [{"name": teacher.name, "dice": dice(teacher.score)} for teacher in facts.teachers],
        "mean_teacher": {"dice": None if mean_teacher is None else dice(mean_teacher)},
        "ensemble": {"dice": dice(facts.ensemble)},
        "mean_shape": {"dice": dice(facts.mean_shape)},
        "decoded_labels": {"dice": None if facts.decoded_labels is None else dice(facts.decoded_labels)},
        "privacy": {
            "epsilon_exact": privacy.epsilon_exact,
            "epsilon_rdp": privacy.epsilon_rdp,
            "delta": privacy.delta,
            "unit": privacy.unit,
            "relation": privacy.relation,
            **({} if privacy.epsilon_paper is None else {"epsilon_paper": privacy.epsilon_paper}),
            "accountant": privacy.accountant,
            "planned_epsilon": privacy.planned_epsilon,
            "noise_multiplier": privacy.noise_multiplier,
            "queries": privacy.queries,
            "planned_queries": privacy.planned_queries,
            "voters": privacy.voters,
            "clipping_norm": privacy.clipping_norm,
        },
        "daemons": [{"role": daemon.role, "pid": daemon.pid} for daemon in facts.daemons],
        "refused_node": facts.refused_node,
        "sites": [
            {
                "name": site.name,
                "pool": site.pool,
                "patients": site.patients,
                "codes_sent": site.codes_sent,
                "epsilon_spent": site.epsilon_spent,
                "patient": list(site.patient),
            }
            for site in facts.sites
        ],
        "releases": [
            {"batch": release.batch, "queries": release.queries, "roster": list(release.roster)}
            for release in facts.releases
        ],
        "seconds": dict(facts.seconds),
        "ledger": {"head": facts.ledger_head, "rows": facts.ledger_rows},
        "seeds": dict(facts.seeds),
        "spacing_mm": list(facts.spacing_mm),
        "pictures": [
            {"title": picture.title, "kind": picture.kind, "outlines": list(picture.outlines)}
            for picture in facts.pictures
        ],
    }
    plain: dict[str, Any] = _finite(document)
    return plain


def render_html(facts: ReportFacts) -> str:
    """The page as one string; everything that comes from ``facts`` is escaped."""
    environment = Environment(
        loader=PackageLoader("consilium", "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "epsilon": _epsilon_or_unknown,
        "delta": delta_text,
        "dice": _format_dice,
        "duration": format_duration,
        "number": lambda value: f"{value:,}".replace(",", "\u202f"),
    }
    images = _png_budget(facts.pictures, facts.spacing_mm)
    power = facts.privacy.detection_power
    return environment.get_template("report.html").render(
        facts=facts,
        privacy=facts.privacy,
        groups=_dice_groups(facts),
        verdict=_verdict(facts),
        share_spent=_share(facts.privacy.epsilon_gate, facts.privacy.planned_epsilon),
        share_queries=_share(facts.privacy.queries, facts.privacy.planned_queries),
        attendance=_attendance(facts.releases),
        in_words=guess_sentence(facts.study.privacy.protection, study_limit(facts.study)),
        power=None if power is None else max(1, math.ceil(100 * power)),
        false_alarms=round(100 * FALSE_ALARMS),
        pictures=list(zip(facts.pictures, images, strict=True)),
        outlines=OUTLINES,
    )


def _epsilon_or_unknown(value: float) -> str:
    """ε rounded up; ``not known`` for NaN and infinity, which a report may hold and no guarantee is."""
    return epsilon_text(value) if math.isfinite(value) else "not known"


def format_duration(seconds: float) -> str:
    """``4.2 s``, ``3 min 07 s``, ``1 h 02 min``; an en dash for what is not finite."""
    if not math.isfinite(seconds):
        return "–"
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    return f"{minutes // 60} h {minutes % 60:02d} min"


# ---- pictures --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Plane:
    """How one plane of an RAS+ volume is shown, as radiologists read it: the patient's right on the left of an axial
    or coronal picture, anterior on the left of a sagittal one, superior (axial: anterior) on top."""

    fixed: int
    across: int
    up: int
    letters: tuple[str, str, str, str]  # left, right, top, bottom

    def cut(self, volume: Shaped[np.ndarray, "x y z"], index: int) -> Shaped[np.ndarray, "v u"]:
        """The slice as ``[row from the bottom, column from the left]``."""
        plane: np.ndarray[Any, Any] = np.take(volume, index, axis=self.fixed).T[:, ::-1]
        return plane


VIEWS: Mapping[str, Plane] = MappingProxyType(
    {
        "axial": Plane(fixed=2, across=0, up=1, letters=("R", "L", "A", "P")),
        "coronal": Plane(fixed=1, across=0, up=2, letters=("R", "L", "S", "I")),
        "sagittal": Plane(fixed=0, across=1, up=2, letters=("A", "P", "S", "I")),
    }
)

_BACKGROUND, _TEXT = "#0b0e11", "#e6e9ec"
_DRAWING = threading.Lock()  # matplotlib's font cache is shared


def centre_of(picture: Picture) -> tuple[int, int, int]:
    """The voxel the three planes go through: the centre of the first outline with any label, moved along each axis
    to the nearest slice that shows it; the middle of the grid where there is no label at all."""
    for mask in picture.outlines.values():
        found = np.nonzero(mask)
        if len(found[0]):
            centre = []
            for axis in found:
                slices = np.unique(axis)
                centre.append(int(slices[np.argmin(np.abs(slices - axis.mean()))]))
            return centre[0], centre[1], centre[2]
    x, y, z = picture.image.shape
    return x // 2, y // 2, z // 2


def draw_picture(picture: Picture, spacing_mm: Sequence[float], *, dpi: float = 110) -> bytes:
    """Three planes side by side at one scale as a PNG; dark as a reading room in either colour scheme."""
    size = [n * s for n, s in zip(picture.image.shape, spacing_mm, strict=True)]
    widths = [size[view.across] for view in VIEWS.values()]
    height = max(size[view.up] for view in VIEWS.values())
    gap = frame = 0.025 * sum(widths)
    footer = 0.06 * sum(widths)  # names of the planes and the scale bar
    total_width = sum(widths) + 2 * gap + 2 * frame
    total_height = height + frame + footer
    inches = 9.0
    figure = Figure(figsize=(inches, inches * total_height / total_width), dpi=dpi, facecolor=_BACKGROUND)
    canvas = FigureCanvasAgg(figure)
    low, high = (float(v) for v in np.percentile(picture.image, (1.0, 99.5)))
    centre = centre_of(picture)
    left = frame
    for (plane, view), width in zip(VIEWS.items(), widths, strict=True):
        tall = size[view.up]
        bottom = footer + (height - tall) / 2
        axes = figure.add_axes(
            (left / total_width, bottom / total_height, width / total_width, tall / total_height), facecolor=_BACKGROUND
        )
        axes.set_axis_off()
        axes.imshow(
            view.cut(picture.image, centre[view.fixed]),
            cmap="gray",
            vmin=low,
            vmax=max(high, low + 1e-6),
            origin="lower",
            extent=(0, width, 0, tall),
            interpolation="bilinear",
        )
        for name, mask in picture.outlines.items():
            _outline(axes, view.cut(mask, centre[view.fixed]), OUTLINES[name], width=width, height=tall)
        axes.set(xlim=(0, width), ylim=(0, tall))
        _letters(axes, view.letters)
        middle = footer / total_height / 2
        figure.text(left / total_width, middle, plane, color=_TEXT, fontsize=9, va="center")
        left += width + gap
    _scale_bar(figure, total_width, right=1 - frame / total_width, middle=footer / total_height / 2)
    stream = io.BytesIO()
    with _DRAWING:
        canvas.print_png(stream)
    # A palette of 200 colours is a third of the bytes and looks the same on a grey picture with three line colours.
    with Image.open(stream) as drawn:
        small = io.BytesIO()
        drawn.convert("RGB").quantize(200, dither=Image.Dither.NONE).save(small, "PNG", optimize=True)
    return small.getvalue()


def _outline(axes: Any, mask: UInt8[np.ndarray, "v u"], style: LineStyle, *, width: float, height: float) -> None:
    rows, columns = mask.shape
    u = (np.arange(-1, columns + 1) + 0.5) * width / columns
    v = (np.arange(-1, rows + 1) + 0.5) * height / rows
    for label in np.unique(mask[mask > 0]):
        inside = np.pad((mask == label).astype(np.float32), 1)  # so that an outline closes at the edge
        lines = axes.contour(u, v, inside, levels=[0.5], colors=[style.colour], linewidths=1.7)
        lines.set_linestyle((0, style.dashes) if style.dashes else "solid")
        lines.set_path_effects([withStroke(linewidth=2.8, foreground="#000000", alpha=0.55)])


def _letters(axes: Any, letters: tuple[str, str, str, str]) -> None:
    left, right, top, bottom = letters
    places = ((0.025, 0.5, left, "left", "center"), (0.975, 0.5, right, "right", "center"))
    places += ((0.5, 0.975, top, "center", "top"), (0.5, 0.025, bottom, "center", "bottom"))  # type: ignore[assignment]
    for x, y, letter, across, up in places:
        axes.text(
            x,
            y,
            letter,
            transform=axes.transAxes,
            ha=across,
            va=up,
            color=_TEXT,
            fontsize=10,
            fontweight="bold",
            path_effects=[Stroke(linewidth=2.5, foreground="#000000"), withStroke(linewidth=0, foreground="#000000")],
        )


def _scale_bar(figure: Any, total_width_mm: float, *, right: float, middle: float) -> None:
    length = next((mm for mm in (50, 20, 10, 5, 2, 1) if mm <= total_width_mm / 12), 1)
    left = right - length / total_width_mm
    axes = figure.add_axes((left, middle - 0.006, right - left, 0.012), facecolor=_TEXT)
    axes.set(xticks=[], yticks=[])
    for spine in axes.spines.values():
        spine.set_visible(False)
    figure.text(left - 0.006, middle, f"{length} mm", color=_TEXT, fontsize=9, ha="right", va="center")


def _png_budget(pictures: Sequence[Picture], spacing_mm: Sequence[float]) -> list[str]:
    images: list[bytes] = []
    for dpi in (110, 75, 50):
        images = [draw_picture(picture, spacing_mm, dpi=dpi) for picture in pictures]
        if sum(map(len, images)) <= MAX_PICTURE_BYTES:
            break
    return ["data:image/png;base64," + base64.b64encode(image).decode("ascii") for image in images]


# ---- helpers ---------------------------------------------------------------------------------------------------------


CONTROLS_NOTE = (
    "The student's gain over these is what counts: they have its seed, volumes and steps, and lack only what the "
    "hospitals' teachers said about each volume."
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
    """The Dice table: what the run gives out, its controls, what anybody has without it, what only a demo can know."""
    seen = [DiceRow("Ensemble of the teachers", facts.ensemble, "all teachers together, without noise")]
    if facts.decoded_labels is not None:
        seen.insert(0, DiceRow("Decoded labels", facts.decoded_labels, "the student's pseudo-labels"))
    if facts.mean_teacher is not None:
        seen.append(DiceRow("Mean teacher", facts.mean_teacher, f"average of {len(facts.teachers)}"))
    seen += [DiceRow(f"Teacher {teacher.name}", teacher.score) for teacher in facts.teachers]
    missing = Score(math.nan, (math.nan,) * len(facts.labels))
    controls = []
    for name, (title, note) in CONTROLS.items():
        score = facts.controls[name]
        reason = "not trained: it needs two labelled volumes" if name == "shuffled_codes" else "not trained"
        controls.append(DiceRow(title, score or missing, note if score else reason))
    return (
        DiceGroup("What the study gives out", (DiceRow("Student", facts.student, "covered by the guarantee above"),)),
        DiceGroup("Controls: the same student without the teachers' information", tuple(controls), CONTROLS_NOTE),
        DiceGroup(
            "What is had without any hospital",
            (DiceRow("Mean shape", facts.mean_shape, "the average public label map, the same for every patient"),),
        ),
        DiceGroup("Known only because a demo holds every party's data", tuple(seen)),
    )


def _verdict(facts: ReportFacts) -> str:
    """What the student's figure is worth over mean shape, mean teacher and the best control, favourable or not."""
    student, shape, teacher = facts.student.mean, facts.mean_shape.mean, facts.mean_teacher
    if not math.isfinite(student) or not math.isfinite(shape):
        return "The student could not be scored against the mean shape."
    gain = student - shape
    if abs(gain) < 0.005:
        text = "The student is as good as the mean shape"
    else:
        text = f"The student is {abs(gain):.3f} Dice {'better' if gain > 0 else 'worse'} than the mean shape"
    if teacher is not None and math.isfinite(teacher.mean):
        gap = teacher.mean - student
        text += f" and {abs(gap):.3f} {'below' if gap >= 0 else 'above'} the mean teacher"
    best = facts.best_control
    if best is not None:
        name, control = best
        side = "above" if student >= control else "below"
        text += f"; it is {abs(student - control):.3f} {side} the best of its controls, {CONTROLS[name][0].lower()}"
    if (gain if best is None else student - best[1]) < 0.005:
        return text + ". In this run the hospitals' answers taught it nothing that it would not know without them."
    if gain < 0.005:
        return text + ". In this run the hospitals' answers helped it, but the public label maps alone do as well."
    return text + "."


@dataclass(frozen=True, slots=True)
class Attendance:
    """Consecutive releases with one roster: ``numbers`` as a person counts them, and the answers in all of them."""

    numbers: str
    queries: int
    roster: tuple[str, ...]


def _attendance(releases: Sequence[BatchRoster]) -> tuple[Attendance, ...]:
    """The columns of the table of who took part in what."""
    columns = []
    for roster, group in groupby(enumerate(releases, start=1), key=lambda item: item[1].roster):
        items = list(group)
        first, last = items[0][0], items[-1][0]
        numbers = f"{first}–{last}" if last > first else str(first)
        columns.append(Attendance(numbers, sum(release.queries for _, release in items), roster))
    return tuple(columns)


def _share(part: float, whole: float) -> float:
    """A percentage from 0 to 100 for a bar."""
    if not (math.isfinite(part) and math.isfinite(whole)) or whole <= 0:
        return 0.0
    return round(100 * min(1.0, max(0.0, part / whole)), 2)


def _format_dice(value: float) -> str:
    return f"{value:.3f}" if math.isfinite(value) else "–"


def _mean(values: Sequence[float]) -> float:
    present = [value for value in values if math.isfinite(value)]
    return sum(present) / len(present) if present else math.nan


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value


def _frozen(array: Shaped[np.ndarray, "..."]) -> Shaped[np.ndarray, "..."]:
    copy: np.ndarray[Any, Any] = array.copy()
    copy.setflags(write=False)
    return copy


def _replace(path: Path, text: str) -> None:
    partial = path.with_name(path.name + ".partial")
    partial.write_text(text, encoding="utf-8")
    os.replace(partial, path)
