"""The report of a study in Chromium: a demo's ten pictures stand side by side, and the page stays short."""

from __future__ import annotations

from pathlib import Path

import pytest

from consilium.reports.study_report import render_html
from tests.report_facts import make_facts

pytestmark = pytest.mark.slow

PICTURES = 10
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
    assert len(set(tops)) == PICTURES // beside
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    if beside > 1:
        assert page.evaluate("document.documentElement.scrollHeight") <= MOST_PX
    page.close()
