"""Pages of a PDF that are tagged for those who hear them (ISO 32000-1, 14.8): fpdf2 tags pictures only.

Headings, paragraphs and cells are elements of the document in the order they are written; whatever is written outside
of an element is an artifact, which nobody is read.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from fpdf import FPDF
from fpdf.structure_tree import StructElem


class TaggedPages(FPDF):
    """fpdf2's pages; what :meth:`multi_cell` writes is a paragraph, other lines what :meth:`read_as` says."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._role, self._marks = "", dict[int, int]()
        self._element: StructElem | None = None
        self.set_lang("en")

    @contextmanager
    def read_as(self, role: str) -> Iterator[None]:
        """What is written inside is one element of the document; with no role, an artifact."""
        before, self._role, self._element = (self._role, self._element), role, None
        yield
        self._role, self._element = before

    @contextmanager
    def _marked(self) -> Iterator[None]:
        if "_out" in vars(self):  # fpdf2 only measures
            yield
            return
        self._out(self._mark())
        yield
        self._out("EMC")

    def _mark(self) -> str:
        if not self._role:
            return "/Artifact BMC"
        number = self._marks.get(self.page, 0)
        self._marks[self.page] = number + 1
        element, builder = self._element, self.struct_builder
        if element is None or element.page_number() != self.page:
            self._element = self._add_marked_content(struct_type=f"/{self._role}", mcid=number)
        else:
            element.k.append(number)
            builder.struct_tree_root.parent_tree.nums[builder.spid_per_page_number[self.page]].append(element)
        return f"/{self._role} <</MCID {number}>> BDC"

    def _render_styled_text_line(self, text_line: Any, h: float | None = None, *args: Any, **kwargs: Any) -> bool:
        broke = h is not None and self._perform_page_break_if_need_be(h)  # before the mark, which ends on its page
        with self._marked():
            return super()._render_styled_text_line(text_line, h, *args, **kwargs) or broke

    def text(self, *args: Any, **kwargs: Any) -> None:
        with self._marked():
            super().text(*args, **kwargs)

    def multi_cell(self, *args: Any, **kwargs: Any) -> Any:
        with self.read_as("P"):
            return super().multi_cell(*args, **kwargs)
