"""Tests the documents' site as a reader uses it: opened from disk in Chromium, searched, and followed from
its front.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from urllib.parse import unquote

import pytest

from tests.documents import WALKS, walk

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
SEARCHED = {
    "epsilon": "concepts/guarantee.html",
    "expired": "start/hospital.html#questions",
    "fingerprint": "start/hospital.html#how-do-i-take-part",
    "proxy": "hospital-systems.html#a-proxy-and-one-that-inspects-tls",
    "quorum-missed": "runbook.html#alarms-of-the-dashboard",
    "daily-cap": "runbook.html#why-a-site-declines",
    "wrong-codec": "runbook.html#why-a-site-declines",
    "--behind-proxy": "dashboard.html#in-a-container-behind-a-proxy",
    "answers-weighed": "events.html#kinds",
    "modality_dropout": "configuration.html#student",
    "DICOM": "data.html#layouts",
    "backup": "deployment.html#backup-moving-upgrading",
    "leave": "start/hospital.html#questions",
    "accuracy": "start/scientist.html#what-does-it-cost-in-accuracy",
    "GPU": "start/hospital.html#what-you-need",
    "colluders": "concepts/sealed-sum.html",
}
"""A reader's search → a page that must be among the first three results."""
HITS = """[...document.querySelectorAll('.md-search-result__item')].slice(0, 3)
    .flatMap(item => [...item.querySelectorAll('a')].map(a => a.href))"""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    words = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--site-dir", str(folder)]
    subprocess.run(words, cwd=ROOT, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"}, check=True, timeout=600)
    return folder


@pytest.fixture(scope="module")
def page(browser, site):
    opened = browser.new_page(viewport={"width": 390, "height": 844})
    yield opened
    opened.close()


@pytest.mark.parametrize("word", SEARCHED)
def test_one_of_the_first_three_pages_that_the_search_finds_has_the_answer(page, site, word):
    page.goto(f"{(site / 'index.html').as_uri()}?q={word}")
    page.wait_for_selector(".md-search-result__item", state="attached")
    found = [unquote(re.sub(r"\?h=[^#]*", "", href.removeprefix(f"{site.as_uri()}/"))) for href in page.evaluate(HITS)]
    assert SEARCHED[word] in found


@pytest.mark.parametrize("question", WALKS)
def test_the_links_to_an_answer_can_be_clicked_on_a_phone_and_lead_to_it(page, site, question):
    page.goto((site / "index.html").as_uri())
    for stop in walk(site, "index.html", WALKS[question])[1:]:
        hrefs = page.evaluate("[...document.querySelectorAll('article a')].map(a => decodeURI(a.href))")
        page.locator("article a").nth(hrefs.index(f"{site.as_uri()}/{stop}")).click()
        page.wait_for_url(lambda url, stop=stop: unquote(url).endswith(stop))
