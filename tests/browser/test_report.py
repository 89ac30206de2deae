"""Tests a study's report in Chromium: a demo's pictures stand side by side, and the page stays short."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
from pypdf import PdfReader

from consilium.reports.study_report import render_html
from tests.report_facts import make_facts

pytestmark = pytest.mark.slow

PICTURES = 11
"""Number of pictures in a demo's report."""
MOST_PX = 4000
AXE = Path(__file__).parent / "vendor" / "axe.min.js"


@pytest.mark.parametrize(("width", "beside"), [(1440, 2), (390, 1)])
def test_pictures_stand_side_by_side_where_there_is_room(browser, tmp_path: Path, width: int, beside: int) -> None:
    file = tmp_path / "report.html"
    file.write_text(render_html(make_facts(pictures=PICTURES)), encoding="utf-8")
    page = browser.new_page(viewport={"width": width, "height": 900})
    page.goto(file.as_uri())
    tops = page.locator(".gallery figure").evaluate_all("all => all.map(one => one.getBoundingClientRect().top)")
    assert len(tops) == PICTURES
    assert len(set(tops)) == math.ceil(PICTURES / beside)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    if beside > 1:
        assert page.evaluate("document.documentElement.scrollHeight") <= MOST_PX
    page.close()


def test_no_column_of_a_table_is_cut_on_a_phone(browser, tmp_path: Path) -> None:
    file = tmp_path / "report.html"
    file.write_text(render_html(make_facts(pictures=0)), encoding="utf-8")
    page = browser.new_page(viewport={"width": 390, "height": 844})
    page.goto(file.as_uri())
    page.evaluate("document.querySelectorAll('details').forEach(one => { one.open = true; })")
    right = "all => all.map(one => one.getBoundingClientRect()).filter(box => box.width).map(box => box.right)"
    assert max(page.locator(".wide th, .wide td").evaluate_all(right)) <= 390
    lefts = "all => all.map(one => Math.round(one.getBoundingClientRect().left))"
    rows = page.locator("table").first.locator("tbody tr:not(.group)")
    places = {tuple(rows.nth(n).locator("td.n").evaluate_all(lefts)) for n in range(rows.count())}
    assert len(places) == 1  # figures stand in columns, below their names
    assert next(iter(places)) == tuple(page.locator("table").first.locator("thead th.n").evaluate_all(lefts))
    page.close()


@pytest.mark.parametrize("dark", [False, True], ids=["day", "night"])
@pytest.mark.parametrize("width", [375, 768, 1280])
def test_the_whole_report_fits_without_accessibility_findings(browser, tmp_path: Path, width: int, dark: bool) -> None:
    page = _opened(browser, tmp_path, width=width, dark=dark)
    page.evaluate("document.querySelectorAll('details').forEach(one => { one.open = true; })")
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    figure = page.locator(".gain-row .n").first
    figure.evaluate("one => { one.textContent = '0.681 ± 0.035'; }")
    assert figure.bounding_box()["height"] < 40  # on one line
    cut = "all => all.filter(one => one.scrollWidth > one.clientWidth).map(one => one.textContent)"
    assert page.locator("thead th").evaluate_all(cut) == []
    page.evaluate(AXE.read_text(encoding="utf-8"))
    found = page.evaluate("axe.run({ runOnly: ['wcag2a', 'wcag2aa', 'wcag21a', 'wcag21aa'] })")["violations"]
    assert [(one["id"], [node["html"][:120] for node in one["nodes"][:3]]) for one in found] == []
    page.close()


def test_tables_side_by_side_begin_at_one_height_and_text_keeps_off_a_table(browser, tmp_path: Path) -> None:
    page = _opened(browser, tmp_path, width=1280)
    page.evaluate("document.querySelectorAll('details').forEach(one => { one.open = true; })")
    tops = page.locator(".pair table").evaluate_all("all => all.map(one => one.getBoundingClientRect().top)")
    assert len(tops) == 2
    assert len(set(tops)) == 1
    gap = "one => one.getBoundingClientRect().top - one.previousElementSibling.getBoundingClientRect().bottom"
    gaps = page.locator(".wide + p").evaluate_all(f"all => all.map({gap})")
    assert gaps
    assert min(gaps) >= 8
    page.close()


def test_paper_shows_what_the_guarantee_does_not_cover_though_the_screen_folds_it(browser, tmp_path: Path) -> None:
    page = _opened(browser, tmp_path, width=1280, dark=True)
    assert not page.get_by_role("heading", name="What was not").is_visible()
    page.pdf(path=tmp_path / "report.pdf", format="A4")
    words = " ".join(" ".join(one.extract_text() for one in PdfReader(tmp_path / "report.pdf").pages).split())
    assert "Receipts prove accounting, not noise." in words
    assert "Ledger head" in words
    page.close()


def _opened(browser, folder: Path, *, width: int, dark: bool = False):
    file = folder / "report.html"
    facts = replace(make_facts(pictures=1), student_ece=0.245)
    file.write_text(render_html(facts), encoding="utf-8")
    page = browser.new_page(viewport={"width": width, "height": 900}, color_scheme="dark" if dark else "light")
    page.goto(file.as_uri())
    return page
