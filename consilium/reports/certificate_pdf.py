"""The certificate's pages: A4, text and tables only, drawn with matplotlib, which is here already.

A layout program of its own (reportlab) would add a dependency for three pages of text; what is needed of one, wrapping,
tables and page breaks, is the hundred lines below. Refuses nothing and computes no privacy fact: every figure comes in.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.backends.backend_pdf import PdfPages
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties
from matplotlib.lines import Line2D
from matplotlib.patches import Rectangle
from matplotlib.textpath import text_to_path

from common.privacy.figures import delta_text, epsilon_text

_WIDTH, _HEIGHT = 595.3, 841.9  # A4 in points
_LEFT, _RIGHT, _TOP, _BOTTOM = 56.0, 56.0, 60.0, 64.0
_TEXT = _WIDTH - _LEFT - _RIGHT
_INK, _SOFT, _RULE, _ACCENT, _TINT = "#1d2733", "#5b6875", "#c9d1d9", "#1f4e79", "#eef3f8"
_REASONS = {
    "pool-budget": "the pool's lifetime budget",
    "study-budget": "the study's own budget",
    "coordinates": "the pool's noisy numbers for life",
}
_ROADS = {
    "ledger": "simulated studies in each world, through the ledger on disk",
    "memory": "simulated studies in each world, in memory",
    "service": "simulated studies through aggregator, workers and both ledgers",
}
_SANS, _MONO = "DejaVu Sans", "DejaVu Sans Mono"


@dataclass(frozen=True, slots=True)
class _Font:
    size: float = 9.0
    bold: bool = False
    mono: bool = False
    colour: str = _INK

    @property
    def properties(self) -> FontProperties:
        weight = "bold" if self.bold else "normal"
        return FontProperties(family=_MONO if self.mono else _SANS, size=self.size, weight=weight)

    def width(self, word: str) -> float:
        """Points a word takes; remembered, since measuring is what takes the time."""
        return _measured(self, word)


@lru_cache(maxsize=65_536)
def _measured(font: _Font, word: str) -> float:
    found: float = text_to_path.get_text_width_height_descent(word, font.properties, ismath=False)[0]
    return found


_BODY, _SMALL, _HEAD = _Font(), _Font(size=7.8), _Font(size=7.8, bold=True, colour=_SOFT)
_HASH = _Font(size=7.2, mono=True)


@dataclass(slots=True)
class _Pages:
    """Draws downwards; ``room`` starts a new page when a block does not fit."""

    figures: list[Figure] = field(default_factory=list)
    y: float = 0.0

    def new(self) -> None:
        self.figures.append(Figure(figsize=(_WIDTH / 72, _HEIGHT / 72), facecolor="white"))
        self.y = _TOP

    def room(self, height: float) -> None:
        if not self.figures or self.y + height > _HEIGHT - _BOTTOM:
            self.new()

    def put(self, x: float, y: float, text: str, font: _Font, *, align: str = "left") -> None:
        self.figures[-1].text(
            x / _WIDTH,
            1 - y / _HEIGHT,
            text,
            fontproperties=font.properties,
            color=font.colour,
            ha=align,
            va="baseline",
            parse_math=False,
        )

    def rule(self, y: float, *, colour: str = _RULE, width: float = 0.6) -> None:
        figure = self.figures[-1]
        where = [_LEFT / _WIDTH, 1 - _RIGHT / _WIDTH], [1 - y / _HEIGHT] * 2
        figure.add_artist(Line2D(*where, color=colour, linewidth=width, transform=figure.transFigure))

    def box(self, height: float) -> None:
        figure = self.figures[-1]
        corner = _LEFT / _WIDTH, 1 - (self.y + height) / _HEIGHT
        size = _TEXT / _WIDTH, height / _HEIGHT
        figure.add_artist(Rectangle(corner, *size, facecolor=_TINT, edgecolor="none", transform=figure.transFigure))
        bar = Rectangle(corner, 3 / _WIDTH, size[1], facecolor=_ACCENT, edgecolor="none", transform=figure.transFigure)
        figure.add_artist(bar)

    def heading(self, text: str, *, keep: float = 60.0) -> None:
        self.room(34 + keep)
        self.y += 26
        self.put(_LEFT, self.y, text, _Font(size=11.5, bold=True, colour=_ACCENT))
        self.y += 6

    def paragraph(self, text: str, font: _Font = _BODY, *, bullet: str = "", indent: float = 0.0) -> None:
        left = _LEFT + indent + (12 if bullet else 0)
        lines = _wrap(text, font, _WIDTH - _RIGHT - left)
        leading = font.size * 1.45
        self.room(min(len(lines), 2) * leading + 4)
        self.y += 4
        for number, line in enumerate(lines):
            self.room(leading)
            self.y += leading
            if bullet and number == 0:
                self.put(left - 12, self.y, bullet, font)
            self.put(left, self.y, line, font)

    def table(
        self, header: Sequence[str], rows: Sequence[Sequence[str]], widths: Sequence[float], *, mono: int = -1
    ) -> None:
        """Columns of ``widths`` (shares of the line); cells are wrapped, the header repeated after a page break."""
        columns = [_LEFT + _TEXT * sum(widths[:n]) for n in range(len(widths))]

        def head() -> None:
            self.y += 16
            for x, name in zip(columns, header, strict=True):
                self.put(x, self.y, name, _HEAD)
            self.y += 5
            self.rule(self.y, colour=_SOFT)

        if header:
            self.room(60)
            head()
        else:
            self.y += 5
        for row in rows:
            cells = []
            for n, cell in enumerate(row):
                font = _HASH if n == mono else (_HEAD if not header and n == 0 else _SMALL)
                cells.append((font, _wrap(cell, font, _TEXT * widths[n] - 8)))
            height = max(len(lines) for _, lines in cells) * 11 + 6
            if self.y + height > _HEIGHT - _BOTTOM:
                self.new()
                if header:
                    head()
            for x, (font, lines) in zip(columns, cells, strict=True):
                for number, line in enumerate(lines):
                    self.put(x, self.y + 12 + 11 * number, line, font)
            self.y += height
            self.rule(self.y)


def render(facts: dict[str, Any], path: Path) -> int:
    """Write the certificate as PDF; how many pages it has. ``facts`` are those of ``certificate_facts``."""
    pages = _Pages()
    pages.new()
    _title(pages, facts)
    _released(pages, facts)
    _pools(pages, facts)
    _checks(pages, facts)
    _limits(pages, facts)
    _identity(pages, facts)
    _sign(pages)
    _frame(pages, facts)
    with (
        mpl.rc_context({"pdf.fonttype": 42}),
        PdfPages(path, metadata={"Title": f"Privacy certificate, study {facts['study']['name']}"}) as pdf,
    ):
        for figure in pages.figures:
            pdf.savefig(figure)
    return len(pages.figures)


def _title(pages: _Pages, facts: dict[str, Any]) -> None:
    study, given = facts["study"], facts["guarantee"]
    pages.y += 14
    pages.put(_LEFT, pages.y, "Privacy certificate", _Font(size=22, bold=True, colour=_ACCENT))
    pages.y += 20
    pages.put(_LEFT, pages.y, f"Study {study['name']}", _Font(size=12, bold=True))
    pages.put(_WIDTH - _RIGHT, pages.y, f"issued {_time(facts['issued'])}", _Font(colour=_SOFT), align="right")
    pages.y += 14
    pages.box(82)
    line = f"Guaranteed:  ε = {epsilon_text(given['epsilon'])}  at  δ = {delta_text(given['delta'])}"
    pages.put(_LEFT + 16, pages.y + 28, line, _Font(size=16, bold=True))
    under = f"{given['accountant']} accountant · unit {given['unit']} · relation {given['relation']}"
    pages.put(_LEFT + 16, pages.y + 48, under, _SMALL)
    pages.put(_LEFT + 16, pages.y + 66, _spent_line(facts), _SMALL)
    pages.y += 82
    pages.heading("In plain words")
    for text in facts["in_words"]:
        pages.paragraph(text)
    others = ", ".join(f"{epsilon_text(g['epsilon'])} ({g['accountant']})" for g in facts["spent_by"])
    pages.paragraph(
        f"What was spent, by every accountant: ε = {others}; at δ = {delta_text(study['delta'])}, unit "
        f"{study['unit']}, relation {study['relation']}. The smallest sound figure is the exact one; the gate of this "
        f"study was {study['accountant']}.",
        _Font(size=7.8, colour=_SOFT),
    )


def _released(pages: _Pages, facts: dict[str, Any]) -> None:
    study = facts["study"]
    voters = study["voters_per_site"]
    sent = "its teacher's code," if voters == 1 else f"the sum of its {voters} teachers' codes, each"
    pages.heading("What was released, when and with whom")
    pages.paragraph(
        f"For each public volume the hospitals' teachers segmented {', '.join(study['structures'])}; each hospital "
        f"sent {sent} clipped to norm C = {study['clipping_norm']:g}. What was "
        f"released is the sum over at least {study['quorum']} hospitals plus noise. No image, label map, weight or "
        "gradient left a hospital."
    )
    for m in facts["mechanisms"]:
        pages.paragraph(
            f"{m['releases']} releases by {m['name']}: {m['coordinates']} numbers each, noise of standard deviation "
            f"{m['noise_std_on_sum']:.6g} on every number, {m['noise_multiplier']:.6g} times what one "
            f"{study['unit']} can change (noise multiplier z, relation {study['relation']}).",
            _SMALL,
            bullet="•",
        )
    rows = [
        [
            _time(batch["time_utc"]),
            str(len(batch["queries"])),
            _rows(batch),
            f"{len(batch['sites'])}: {', '.join(batch['sites'])}",
        ]
        for batch in facts["releases"]
    ]
    if rows:
        pages.table(("Time (UTC)", "Answers", "Ledger rows", "Hospitals on the roster"), rows, (0.24, 0.1, 0.16, 0.5))
    else:
        pages.paragraph("No answer was released in this study.")
    extra = []
    if facts["reused_answers"]:
        extra.append(f"{facts['reused_answers']} answers of other studies on the same pools were used again.")
    if facts["recovered_charges"]:
        extra.append(
            f"{facts['recovered_charges']} charges were entered again from the hospitals' receipts after a restored "
            "backup; their answers are lost, and they are counted."
        )
    for text in extra:
        pages.paragraph(text)
    pages.heading("Refusals", keep=30)
    if facts["refusals"]:
        listed = [
            [_time(r["time_utc"]), str(r["queries"]), _REASONS.get(r["reason"], r["reason"]), r["pool"] or "–"]
            for r in facts["refusals"]
        ]
        pages.table(("Time (UTC)", "Queries", "Limit that did not allow them", "Pool"), listed, (0.24, 0.1, 0.36, 0.3))
    else:
        pages.paragraph("The ledger refused no query of this study.")


def _pools(pages: _Pages, facts: dict[str, Any]) -> None:
    pages.heading("What each patient pool has spent", keep=80)
    pages.paragraph(
        "A budget belongs to a hospital's patient pool for life: all studies, editions and retrainings on it add up."
    )
    rows = []
    for pool in facts["pools"]:
        study, life = pool["study"], pool["lifetime"]
        rows.append(
            [
                f"{pool['site']} / {pool['pool']}",
                f"ε = {epsilon_text(study['epsilon'])} ({study['accountant']}), {pool['releases']} releases",
                f"ε = {epsilon_text(life['epsilon'])} of {epsilon_text(pool['cap_epsilon'])} ({life['accountant']})",
                f"δ = {delta_text(life['delta'])}, {life['unit']}, {life['relation']}",
            ]
        )
    pages.table(("Hospital / pool", "In this study", "In all studies, of cap", "At"), rows, (0.2, 0.27, 0.22, 0.31))


def _checks(pages: _Pages, facts: dict[str, Any]) -> None:
    pages.heading("Audit, and the hospitals' own figures", keep=40)
    if facts["audit"] is None:
        pages.paragraph("No audit of the release mechanism was filed with this study.")
    for road, report in (facts["audit"] or {}).items():
        pages.paragraph(
            f"{report['summary']} {report['runs']} {_ROADS.get(road, road)}, at confidence "
            f"{100 * report['confidence']:g} %. An audit finds faults; it proves no privacy.",
            bullet="•",
        )
    rows = []
    for site in facts["sites"]:
        spent = site["spent"][site["cap"]["accountant"]]
        shorter = [
            pool
            for pool in facts["pools"]
            if pool["pool"] == site["pool"]
            and (pool["lifetime"]["delta"], pool["lifetime"]["accountant"]) == (spent["delta"], spent["accountant"])
            and pool["lifetime"]["epsilon"] > spent["epsilon"]
        ]
        remarks = [*site["alarms"], *(["smaller than the server's figure"] if shorter else [])]
        rows.append(
            [
                f"{site['site']} / {site['pool']}",
                f"ε = {epsilon_text(spent['epsilon'])} of {epsilon_text(site['cap']['epsilon'])} "
                f"({spent['accountant']}), δ = {delta_text(spent['delta'])}, {spent['unit']}, {spent['relation']}",
                f"{site['queries_accepted']} / {site['receipted']}",
                "; ".join(remarks) or "none",
            ]
        )
    if rows:
        columns = ("Hospital / pool", "By its own ledger", "Accepted / receipted", "Alarms, remarks")
        pages.table(columns, rows, (0.2, 0.37, 0.2, 0.23))
        pages.paragraph(
            "As reported by the hospitals, in all studies. What was accepted and not receipted stays spent there, so a "
            "hospital's own figure may be larger than the server's. A smaller one is older, or contradicts it.",
            _Font(size=7.8, colour=_SOFT),
        )
        for site in facts["sites"]:
            for line in [*site["patient_is"], *site["patient"]]:
                pages.paragraph(f"One patient of {site['site']}: {line}.", bullet="•")
    else:
        pages.paragraph("No hospital's own report was filed; each has one: `consilium site status`.")


def _limits(pages: _Pages, facts: dict[str, Any]) -> None:
    pages.heading("What ledger and receipts prove", keep=40)
    for text in facts["proves"]:
        pages.paragraph(text, bullet="•")
    pages.heading("What they cannot prove", keep=40)
    for text in facts["cannot_prove"]:
        pages.paragraph(text, bullet="•")


def _identity(pages: _Pages, facts: dict[str, Any]) -> None:
    ledger, head = facts["ledger"], facts["ledger"]["head"]
    pages.heading("Ledger, signature, versions", keep=120)
    known = "checked against a key given from outside" if ledger["anchored"] else "consistent with the key named here"
    pages.paragraph(
        f"Verified before this was written: {ledger['rows']} rows, {ledger['signatures_checked']} signatures, "
        f"{ledger['answers_checked']} stored answers; {known}."
    )
    rows = [
        ["Ledger", ledger["id"]],
        [f"Head, row {head['seq']}", head["hash"]],
        ["Signature", head["signature"]],
        *([f"Key from row {key['row']}", key["public_key"]] for key in ledger["keys"]),
        *([name.capitalize(), value] for name, value in facts["hashes"].items()),
        ["Versions", ", ".join(f"{name} {value}" for name, value in facts["versions"].items())],
    ]
    pages.table((), rows, (0.2, 0.8), mono=1)
    pages.heading("How to check this certificate", keep=200)  # the signatures never stand on a page alone
    pages.paragraph(
        "With a copy of the ledger and the public key as the hospitals know it; it fails if anything up to the head "
        "above was changed since:"
    )
    key = ledger["keys"][-1]["public_key"]
    pages.paragraph("consilium verify ledger.sqlite --head certificate.json --public-key \\", _HASH, indent=8)
    pages.paragraph(key, _HASH, indent=24)
    pages.paragraph("Each hospital, against its own receipts, without the server's ledger:")
    pages.paragraph("consilium verify site-ledger.sqlite --server-key \\", _HASH, indent=8)
    pages.paragraph(key, _HASH, indent=24)


def _sign(pages: _Pages) -> None:
    pages.room(90)
    pages.y += 60
    half = (_TEXT - 24) / 2
    for n, text in enumerate(("Privacy officer, name and signature", "Place and date")):
        x = _LEFT + n * (half + 24)
        figure = pages.figures[-1]
        where = [x / _WIDTH, (x + half) / _WIDTH], [1 - pages.y / _HEIGHT] * 2
        figure.add_artist(Line2D(*where, color=_SOFT, linewidth=0.8, transform=figure.transFigure))
        pages.put(x, pages.y + 12, text, _HEAD)


def _frame(pages: _Pages, facts: dict[str, Any]) -> None:
    """Header rule and footer of every page, now that their number is known."""
    soft = _Font(size=7, colour=_SOFT)
    figures = pages.figures
    for number, figure in enumerate(figures, start=1):
        pages.figures = [figure]
        if number > 1:
            pages.put(_LEFT, 40, f"Privacy certificate · study {facts['study']['name']}", soft)
            pages.rule(46)
        pages.rule(_HEIGHT - 46)
        head = facts["ledger"]["head"]
        pages.put(
            _LEFT, _HEIGHT - 34, f"ledger head, row {head['seq']}: {head['hash']}", _Font(6.4, mono=True, colour=_SOFT)
        )
        pages.put(_WIDTH - _RIGHT, _HEIGHT - 34, f"page {number} of {len(figures)}", soft, align="right")
    pages.figures = figures


def _wrap(text: str, font: _Font, width: float) -> list[str]:
    """Lines no wider than ``width`` points; a word that is wider, a hash, is broken."""
    lines, used, space = [""], 0.0, font.width("a a") - 2 * font.width("a")
    for word in text.split(" "):
        if lines[-1] and used + space + font.width(word) <= width:
            lines[-1], used = f"{lines[-1]} {word}", used + space + font.width(word)
            continue
        if lines[-1]:
            lines.append("")
        while font.width(word) > width:
            cut = next(n for n in range(len(word) - 1, 0, -1) if n == 1 or font.width(word[:n]) <= width)
            lines[-1] = word[:cut]
            lines.append("")
            word = word[cut:]
        lines[-1], used = word, font.width(word)
    return lines


def _spent_line(facts: dict[str, Any]) -> str:
    if not facts["answers"] + facts["reused_answers"] + facts["recovered_charges"]:
        return "Nothing was released: nothing of it was spent"
    spent, planned = facts["spent"], facts["study"]["planned_queries"]
    return (
        f"Spent of it: ε = {epsilon_text(spent['epsilon'])} at δ = {delta_text(spent['delta'])}, same accountant, unit "
        f"and relation · {facts['answers']} of {planned} planned answers"
    )


def _time(text: str) -> str:
    return f"{text[:10]} {text[11:16]} UTC"


def _rows(batch: dict[str, Any]) -> str:
    first, last = batch["first_row"], batch["last_row"]
    return str(first) if first == last else f"{first}–{last}"
