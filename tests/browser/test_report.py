"""The report of a study in Chromium: a demo's pictures stand side by side, and the page stays short."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from consilium.reports.study_report import render_html
from tests.report_facts import make_facts

pytestmark = pytest.mark.slow

PICTURES = 11
"""As many as a demo shows."""
MOST_PX = 4000


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
