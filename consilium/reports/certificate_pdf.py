"""The certificate's pages: A4, text and tables only, tagged for those who hear them, the same bytes for the same facts.

Refuses nothing and computes no privacy fact: every figure comes in. The fonts are DejaVu from matplotlib's own files,
embedded, for they have ε, δ, σ and μ.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import matplotlib as mpl
from fpdf import FontFace

from common.privacy.figures import delta_text, epsilon_text
from consilium.reports.tagged_pages import TaggedPages

_SIDE, _TOP, _BOTTOM = 56.0, 60.0, 64.0  # points
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
_SANS, _MONO = "DejaVuSans", "DejaVuSansMono"
_FOLDER = Path(mpl.get_data_path(), "fonts", "ttf")
FONTS = (
    (_SANS, "", _FOLDER / f"{_SANS}.ttf"),
    (_SANS, "B", _FOLDER / f"{_SANS}-Bold.ttf"),
    (_MONO, "", _FOLDER / f"{_MONO}.ttf"),
)
"""Family, style and file of every font in use."""


@dataclass(frozen=True, slots=True)
class _Font:
    size: float = 9.0
    bold: bool = False
    mono: bool = False
    colour: str = _INK


_BODY, _SMALL, _NOTE, _HEAD = _Font(), _Font(7.8), _Font(7.8, colour=_SOFT), _Font(7.8, bold=True, colour=_SOFT)
_HASH = _Font(7.2, mono=True)


class _Pages(TaggedPages):
    """A4 in points, with the study's name above every page but the first and the ledger's head below each.

    What stands on every page, bullets and rules are artifacts.
    """

    def __init__(self, facts: dict[str, Any]) -> None:
        super().__init__(unit="pt", format="A4")
        self._study, self._head = facts["study"]["name"], facts["ledger"]["head"]
        self.set_margins(_SIDE, _TOP, _SIDE)
        self.set_auto_page_break(True, _BOTTOM)
        self.c_margin = 0
        for font in FONTS:
            self.add_font(*font)
        self.set_title(f"Privacy certificate, study {self._study}")
        self.set_creation_date(datetime.fromisoformat(facts["issued"]))
        self.add_page()

    def header(self) -> None:
        if self.page_no() > 1:
            with self.read_as(""):
                self.put(_SIDE, 40, f"Privacy certificate · study {self._study}", _Font(7, colour=_SOFT))
            self.rule(46)

    def footer(self) -> None:
        self.rule(self.h - 46)
        with self.read_as(""):
            self._foot()

    def _foot(self) -> None:
        line = f"ledger head, row {self._head['seq']}: {self._head['hash']}"
        self.put(_SIDE, self.h - 34, line, _Font(6.4, mono=True, colour=_SOFT))
        self.use(_Font(7, colour=_SOFT))
        self.set_xy(_SIDE, self.h - 42)
        self.cell(self.epw, 10, f"page {self.page_no()} of {{nb}}", align="R")

    def use(self, font: _Font) -> None:
        self.set_font(_MONO if font.mono else _SANS, "B" if font.bold else "", font.size)
        self.set_text_color(font.colour)

    def put(self, x: float, y: float, text: str, font: _Font) -> None:
        """One line whose baseline is at ``y``."""
        self.use(font)
        self.text(x, y, text)

    def line_of_text(self, x: float, y: float, text: str, font: _Font) -> None:
        """The same, read by itself."""
        with self.read_as("P"):
            self.put(x, y, text, font)

    def rule(self, y: float) -> None:
        self.set_draw_color(_RULE)
        self.set_line_width(0.6)
        self.line(_SIDE, y, self.w - _SIDE, y)

    def keep(self, height: float) -> None:
        """Start a new page unless so much fits on this one."""
        if self.will_page_break(height):
            self.add_page()

    def heading(self, text: str, *, keep: float = 60.0) -> None:
        self.keep(34 + keep)
        with self.read_as("H2"):
            self.put(_SIDE, self.y + 26, text, _Font(11.5, bold=True, colour=_ACCENT))
        self.y += 32

    def paragraph(self, text: str, font: _Font = _BODY, *, bullet: str = "", indent: float = 0.0) -> None:
        leading, left = font.size * 1.45, _SIDE + indent + (12 if bullet else 0)
        self.keep(2 * leading + 4)
        self.y += 4
        if bullet:
            self.put(left - 12, self.y + leading - font.size * 0.3, bullet, font)
        self.use(font)
        self.set_x(left)
        self.multi_cell(self.w - _SIDE - left, leading, text, align="L", new_x="LMARGIN")

    def rows(
        self, header: Sequence[str], rows: Sequence[Sequence[str]], widths: Sequence[float], *, mono: int = -1
    ) -> None:
        """Columns of ``widths`` (shares of the line); cells are wrapped, the header repeated after a page break."""
        self.keep(60)
        self.y += 5
        self.use(_SMALL)
        self.set_draw_color(_RULE)
        self.set_line_width(0.6)
        self.set_fill_color("#ffffff")
        head = FontFace(emphasis="BOLD", color=_SOFT)
        with self.table(
            [header] if header else [],
            col_widths=tuple(widths),
            first_row_as_headings=bool(header),
            headings_style=head,
            borders_layout="HORIZONTAL_LINES",
            line_height=11,
            padding=(3, 8, 3, 0),
            text_align="LEFT",
            v_align="TOP",
        ) as table:
            for cells in rows:
                row = table.row()
                for n, text in enumerate(cells):
                    named = head if not header and n == 0 else None
                    row.cell(text, style=FontFace(family=_MONO, size_pt=_HASH.size) if n == mono else named)


def render(facts: dict[str, Any], path: Path, *, document_sha256: str) -> int:
    """Write the certificate as PDF; how many pages it has. ``facts`` are those of ``certificate_facts``, and
    ``document_sha256`` is of the JSON document that states them."""
    pages = _Pages(facts)
    _title(pages, facts)
    _released(pages, facts)
    _refused(pages, facts)
    _pools(pages, facts)
    _audited(pages, facts)
    _reported(pages, facts)
    _limits(pages, facts)
    _identity(pages, facts, document_sha256)
    _sign(pages)
    pages.output(path)
    return pages.pages_count


def _title(pages: _Pages, facts: dict[str, Any]) -> None:
    study, given = facts["study"], facts["guarantee"]
    with pages.read_as("H1"):
        pages.put(_SIDE, 74, "Privacy certificate", _Font(22, bold=True, colour=_ACCENT))
        pages.put(_SIDE, 94, f"Study {study['name']}", _Font(12, bold=True))
    issued = f"issued {_time(facts['issued'])}"
    pages.use(_Font(colour=_SOFT))
    pages.line_of_text(pages.w - _SIDE - pages.get_string_width(issued), 94, issued, _Font(colour=_SOFT))
    pages.set_fill_color(_TINT)
    pages.rect(_SIDE, 108, pages.epw, 82, style="F")
    pages.set_fill_color(_ACCENT)
    pages.rect(_SIDE, 108, 3, 82, style="F")
    line = f"Guaranteed:  ε = {epsilon_text(given['epsilon'])}  at  δ = {delta_text(given['delta'])}"
    pages.line_of_text(_SIDE + 16, 136, line, _Font(16, bold=True))
    under = f"{given['accountant']} accountant · unit {given['unit']} · relation {given['relation']}"
    pages.line_of_text(_SIDE + 16, 156, under, _SMALL)
    pages.line_of_text(_SIDE + 16, 174, _spent_line(facts), _SMALL)
    pages.set_y(194)
    pages.paragraph(
        "For the files of the hospitals and their privacy officers: what the study released, and what its ledger "
        f"proves of it. Issued from ledger {facts['ledger']['id']} by whoever holds its signing key, named below.",
        _NOTE,
    )
    pages.heading("In plain words")
    for text in facts["in_words"]:
        pages.paragraph(text)
    others = ", ".join(f"{epsilon_text(g['epsilon'])} ({g['accountant']})" for g in facts["spent_by"])
    pages.paragraph(
        f"What was spent, by every accountant: ε = {others}; at δ = {delta_text(study['delta'])}, unit "
        f"{study['unit']}, relation {study['relation']}. The smallest sound figure is the exact one; the gate of this "
        f"study was {study['accountant']}.",
        _NOTE,
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
            f"{study['unit']} can change (noise multiplier z, relation {study['relation']}){_left(m)}.",
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
        pages.rows(("Time (UTC)", "Answers", "Ledger rows", "Hospitals on the roster"), rows, (0.24, 0.1, 0.16, 0.5))
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


def _left(mechanism: dict[str, Any]) -> str:
    if "colluders" not in mechanism:
        return ""
    return f", drawn at the hospitals so that as much is left beside any {mechanism['colluders']} of them"


def _refused(pages: _Pages, facts: dict[str, Any]) -> None:
    pages.heading("Refusals", keep=30)
    if facts["refusals"]:
        listed = [
            [_time(r["time_utc"]), str(r["queries"]), _REASONS.get(r["reason"], r["reason"]), r["pool"] or "–"]
            for r in facts["refusals"]
        ]
        pages.rows(("Time (UTC)", "Queries", "Limit that did not allow them", "Pool"), listed, (0.24, 0.1, 0.36, 0.3))
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
    pages.rows(("Hospital / pool", "In this study", "In all studies, of cap", "At"), rows, (0.2, 0.27, 0.22, 0.31))


def _audited(pages: _Pages, facts: dict[str, Any]) -> None:
    pages.heading("Audit, and the hospitals' own figures", keep=40)
    if facts["audit"] is None:
        pages.paragraph("No audit of the release mechanism was filed with this study.")
    for road, report in (facts["audit"] or {}).items():
        pages.paragraph(
            f"{report['summary']} {report['runs']} {_ROADS.get(road, road)}, at confidence "
            f"{100 * report['confidence']:g} %. An audit finds faults; it proves no privacy.",
            bullet="•",
        )


def _reported(pages: _Pages, facts: dict[str, Any]) -> None:
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
        signed = f"signed {_time(site['signed'])}" if site["signed"] else "not signed"
        remarks = [signed, *site["alarms"], *(["smaller than the server's figure"] if shorter else [])]
        rows.append(
            [
                f"{site['site']} / {site['pool']}",
                f"ε = {epsilon_text(spent['epsilon'])} of {epsilon_text(site['cap']['epsilon'])} "
                f"({spent['accountant']}), δ = {delta_text(spent['delta'])}, {spent['unit']}, {spent['relation']}",
                f"{site['queries_accepted']} / {site['receipted']}",
                "; ".join(remarks),
            ]
        )
    if rows:
        columns = ("Hospital / pool", "By its own ledger", "Accepted / receipted", "Signed, alarms")
        pages.rows(columns, rows, (0.2, 0.37, 0.2, 0.23))
        pages.paragraph(
            "As reported by the hospitals, in all studies. What was accepted and not receipted stays spent there, so a "
            "hospital's own figure may be larger than the server's. A smaller one is older, or contradicts it. What is "
            "signed bears the signature of the key that the hospital was admitted with; what is not is the word of "
            "whoever filed it.",
            _NOTE,
        )
        for site in facts["sites"]:
            for line in [*site["patient_is"], *site["patient"]]:
                pages.paragraph(f"One patient of {site['site']}: {line}.", bullet="•")
    else:
        pages.paragraph("No hospital's own report was filed; each has one: consilium site status.")
    if aside := facts.get("reports_set_aside"):
        pages.paragraph(
            f"Set aside, for they are no reports of the sites they are named after: {', '.join(aside)}.", _NOTE
        )


def _limits(pages: _Pages, facts: dict[str, Any]) -> None:
    pages.heading("What ledger and receipts prove", keep=40)
    for text in facts["proves"]:
        pages.paragraph(text, bullet="•")
    pages.heading("What they cannot prove", keep=40)
    for text in facts["cannot_prove"]:
        pages.paragraph(text, bullet="•")


def _identity(pages: _Pages, facts: dict[str, Any], document_sha256: str) -> None:
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
        ["certificate.json", document_sha256],
        ["Versions", ", ".join(f"{name} {value}" for name, value in facts["versions"].items())],
    ]
    pages.rows((), rows, (0.2, 0.8), mono=1)
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
    pages.keep(90)
    half, y = (pages.epw - 24) / 2, pages.y + 60
    pages.set_draw_color(_SOFT)
    pages.set_line_width(0.8)
    for n, text in enumerate(("Privacy officer, name and signature", "Place and date")):
        x = _SIDE + n * (half + 24)
        pages.line(x, y, x + half, y)
        pages.line_of_text(x, y + 12, text, _HEAD)


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
