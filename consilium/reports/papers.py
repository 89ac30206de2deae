"""Renders a document in three forms from one source: Markdown, JSON, and a tagged, archivable PDF.

A document (:class:`Paper`) consists of headings, paragraphs, lists and tables of plain text. A :class:`Blank` is a
place that only the reader can fill in; it is highlighted in every form. The PDF is PDF/A-2a and PDF/UA-1, made by
Typst. Text is passed as data and never as markup, so nothing in a study's name is executed. Characters that act on a
reader or that the PDF's fonts lack are written as their numbers, because Typst makes no archivable PDF with the latter.
"""

from __future__ import annotations

import json
import re
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from common.plain import plain


@dataclass(frozen=True, slots=True)
class Blank:
    """A place that the reader must fill in.

    Attributes:
        what: Description of the missing text.
    """

    what: str

    def __str__(self) -> str:
        return f"[TO FILL IN: {self.what}]"


Text = str | Blank
Row = tuple[Text, ...]


@dataclass(frozen=True, slots=True)
class PaperSection:
    """A section: a heading, then paragraphs, a list, a table, notes and code.

    Attributes:
        heading: The heading.
        paragraphs: Paragraphs.
        points: Items of a list.
        rows: Rows of a table; the first row is its head.
        notes: Paragraphs after the table.
        widths: Relative widths of the columns; equal by default.
        code: Lines to type.
    """

    heading: str
    paragraphs: Sequence[Text] = ()
    points: Sequence[Text] = ()
    rows: Sequence[Row] = ()
    notes: Sequence[Text] = ()
    widths: Sequence[float] = ()
    code: Sequence[str] = ()

    @property
    def texts(self) -> tuple[Text, ...]:
        """All texts of the section, in order."""
        cells = (cell for row in self.rows for cell in row)
        return (*self.paragraphs, *self.points, *cells, *self.notes, *self.code)


@dataclass(frozen=True, slots=True)
class Paper:
    """One document.

    Attributes:
        name: Name of its files.
        title: The title.
        made: Time at which it was made, UTC.
        sections: The sections.
        facts: Values that are added to the document's JSON.
        lead: Lines in a box below the title; the first one is large.
        foot: Text below every page.
        sign: Names of the signature lines at the end.
        made_by: Command that made the document.
    """

    name: str
    title: str
    made: datetime
    sections: Sequence[PaperSection]
    facts: dict[str, Any] = field(default_factory=dict)
    lead: Sequence[str] = ()
    foot: str = ""
    sign: Sequence[str] = ()
    made_by: str = "consilium governance"

    @property
    def blanks(self) -> tuple[str, ...]:
        """Descriptions of all places that the reader must fill in, in order."""
        return tuple(text.what for section in self.sections for text in section.texts if isinstance(text, Blank))

    def markdown(self) -> str:
        """Return the document as Markdown."""
        lines = [f"# {_escaped(self.title)}", "", f"Made {self.made:%Y-%m-%d %H:%M} UTC by `{self.made_by}`.", ""]
        lines += [f"> {_escaped(text)}" for text in self.lead]
        for section in self.sections:
            lines += [f"## {_escaped(section.heading)}", ""]
            for text in section.paragraphs:
                lines += [_marked(text), ""]
            lines += [f"- {_marked(text)}" for text in section.points]
            lines += [""] if section.points else []
            if section.rows:
                head, *rows = section.rows
                lines += [_line(head), "|" + "---|" * len(head), *map(_line, rows), ""]
            for text in section.notes:
                lines += [_marked(text), ""]
            lines += [f"    {line}" for line in section.code]
        return "\n".join(lines)

    def to_json(self) -> dict[str, Any]:
        """Return the document's facts, its texts and the fields to fill in, as plain values for JSON."""
        return {
            "schema": 1,
            "paper": self.name,
            "title": self.title,
            "made": self.made.isoformat(timespec="seconds"),
            "facts": self.facts,
            "sections": [_section_json(section) for section in self.sections],
            "to_fill_in": list(self.blanks),
        }

    def pdf(self) -> bytes:
        """Return the document as PDF/A-2a and PDF/UA-1."""
        import typst

        made_at = f"Made {self.made:%Y-%m-%d %H:%M} UTC by {self.made_by}."
        sections = [_section_json(section) | {"widths": list(section.widths)} for section in self.sections]
        data = {"title": self.title, "made": made_at, "sections": sections}
        data |= {"lead": list(self.lead), "foot": self.foot, "sign": list(self.sign)}
        made = typst.compile(
            _TEMPLATE.encode(),
            format="pdf",
            sys_inputs={"data": json.dumps(_printable(data))},
            pdf_standards=["a-2a", "ua-1"],
            ignore_system_fonts=True,
            timestamp=self.made,
        )
        return bytes(made)


def _section_json(section: PaperSection) -> dict[str, Any]:
    return {
        "heading": section.heading,
        "paragraphs": [_cell(text) for text in section.paragraphs],
        "points": [_cell(text) for text in section.points],
        "rows": [[_cell(cell) for cell in row] for row in section.rows],
        **({"notes": [_cell(text) for text in section.notes]} if section.notes else {}),
        **({"code": list(section.code)} if section.code else {}),
    }


def _cell(text: Text) -> dict[str, str]:
    return {"to_fill_in": text.what} if isinstance(text, Blank) else {"text": text}


def _line(row: Row) -> str:
    return "| " + " | ".join(_marked(cell).replace("|", "\\|") for cell in row) + " |"


def _marked(text: Text) -> str:
    return f"**{_escaped(str(text))}**" if isinstance(text, Blank) else _escaped(text)


_PRINTED = re.compile(r"[ -\u04ff\u1e00-\u1eff\u2010-\u2040\u2070-\u20bf\u2190-\u22ff]")
"""Characters that the PDF's fonts have: Latin, Greek and Cyrillic letters, punctuation, arrows, mathematics."""


def _printable(value: Any) -> Any:
    """Return values for the PDF with each text in one line, and with characters that cannot be printed as numbers."""
    if isinstance(value, dict):
        return {key: _printable(one) for key, one in value.items()}
    if isinstance(value, list):
        return [_printable(one) for one in value]
    if not isinstance(value, str):
        return value
    return "".join(
        one if _PRINTED.fullmatch(one) and unicodedata.category(one) != "Cn" else f"\\u{ord(one):04x}"
        for one in plain(" ".join(value.splitlines()))
    )


def _escaped(text: str) -> str:
    """Escape a text for Markdown, so that it contains no heading, link, HTML or line break."""
    return re.sub(r"([\\`*_\[\]<>#])", r"\\\1", plain(" ".join(text.split())))


_TEMPLATE = """
#let data = json(bytes(sys.inputs.data))
#set document(title: data.title, author: "Consilium")
#set page(paper: "a4", margin: (x: 22mm, y: 24mm), numbering: "1 of 1", footer: context {
  set text(size: 7pt, fill: luma(90))
  text(font: "DejaVu Sans Mono", size: 5.6pt, data.foot)
  h(1fr)
  counter(page).display("1 of 1", both: true)
})
#set text(lang: "en", size: 10pt)
#set par(justify: false)
#show heading.where(level: 1): set text(size: 13pt)
#show table.cell.where(y: 0): strong
#let mono(body) = text(font: "DejaVu Sans Mono", size: 7pt, body)
#let hash = regex("[0-9a-f]{64}[0-9a-f]*")
#let shown(cell) = if "text" in cell {
  if cell.text.match(hash) == none or cell.text.match(regex("[^ -~]")) != none { cell.text } else {
    let parts = range(0, cell.text.len(), step: 64).map(n => cell.text.slice(n, calc.min(n + 64, cell.text.len())))
    mono(parts.join("\\n"))
  }
} else {
  text(fill: rgb("#a40000"), weight: "bold", "[TO FILL IN: " + cell.to_fill_in + "]")
}
#let prose(one) = if "text" in one and one.text.match(regex("^[0-9a-f]{64,}$")) == none { one.text } else { shown(one) }
#title()
#data.made
#if data.lead.len() > 0 {
  block(width: 100%, fill: rgb("#eef3f8"), stroke: (left: 3pt + rgb("#1f4e79")), inset: 12pt, {
    par(text(size: 15pt, weight: "bold", data.lead.first()))
    for line in data.lead.slice(1) { par(line) }
  })
}
#let set-section(section) = {
  heading(level: 1, section.heading)
  for one in section.paragraphs { par(prose(one)) }
  if section.points.len() > 0 { list(..section.points.map(prose)) }
  if section.rows.len() > 0 {
    let (head, ..rows) = section.rows
    let shares = if section.widths.len() > 0 { section.widths.map(one => one * 1fr) } else { (1fr,) * head.len() }
    table(
      columns: shares,
      stroke: 0.5pt + luma(160),
      table.header(..head.map(shown)),
      ..rows.flatten().map(shown),
    )
  }
  for one in section.at("notes", default: ()) { par(prose(one)) }
  if "code" in section { block(mono(section.code.join("\\n"))) }
}
#let lines = grid(
  columns: (1fr,) * calc.max(1, data.sign.len()),
  column-gutter: 24pt,
  ..data.sign.map(one => block(width: 100%, above: 0pt, stroke: (top: 0.8pt + luma(90)), inset: (top: 6pt), one)),
)
#if data.sign.len() == 0 { for section in data.sections { set-section(section) } } else {
  for section in data.sections.slice(0, -1) { set-section(section) }
  block(breakable: false, {
    set-section(data.sections.last())
    v(40pt)
    lines
  })
}
"""
