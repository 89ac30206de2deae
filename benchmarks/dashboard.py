"""Measures the dashboard with 100,000 releases to 64 sites, beside a small study, and a slice change at 128³ voxels.

The dashboard runs in a process of its own; the browser is Debian's Chromium. Each release names all 64 sites. The small
study has 30 releases to four sites. The volumes are random arrays put in place of the server's answer, so the slice
change measures only the viewer.
"""

from __future__ import annotations

import html
import json
import re
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from playwright.sync_api import Browser, BrowserContext, Page, Route, sync_playwright
from playwright.sync_api import Error as PlaywrightError

from benchmarks.run import Figure, figure, memory_mib
from server.dashboard.auth import Role, UserFile
from server.postprocess.decisions import read_decisions
from server.postprocess.labels import read_released, write_labels
from tests.browser.conftest import ARGUMENTS, CHROMIUM, PASSWORD, Dashboard, serving, sign_in
from tests.dashboard_study import make_large_study, make_study_directory

SITES = 64
ROWS = 100_000 + SITES + 2  # besides the releases: a row for each pool, for the study, and the ledger's first
PAGES = (
    *("/", "/study", "/sites", "/studies", "/ledger", "/ledger/7", "/ledger?text=nowhere", "/ledger?kind=refusal"),
    *("/labels", "/student", "/planner"),
)
REQUESTS = 500
LOADS = 7
SIDE = 128
CHANGES = 60
REVIEWED = 30
LAYERS = ("image", "label", "centre", "doubt", "student")


def figures() -> Iterator[Figure]:
    """Yield everything that this part measures."""
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as run:
        root = Path(folder)
        browser = run.chromium.launch(executable_path=str(CHROMIUM), args=ARGUMENTS)
        large = make_large_study(_made(root / "large"), rows=ROWS, sites=SITES, roster=SITES)
        small = make_study_directory(_made(root / "small"), volumes=REVIEWED, batch_size=REVIEWED)
        small.collect()
        write_labels(read_released(small.workspace), events=small.log())
        with serving(small.workspace.root, state(root / "small-state")) as dashboard:
            yield from costs(browser, dashboard, of="the small study")
            yield from _slices(browser, dashboard)
            yield _review(browser, dashboard)
        with serving(large.root, state(root / "large-state"), timeout_s=1800.0) as dashboard:
            yield from costs(browser, dashboard, of=f"{ROWS:,} rows")
        browser.close()


def costs(browser: Browser, dashboard: Dashboard, *, of: str) -> Iterator[Figure]:
    """Yield start-up time, first contentful paint and server processor time of each page, and memory.

    Args:
        browser: The browser.
        dashboard: The running dashboard.
        of: Name of the study in the figures.
    """
    yield Figure(f"{of}: started and read", round(dashboard.cpu_s, 1), "s of processor")
    with _opened(browser, dashboard) as context:
        page = context.new_page()
        for path in PAGES:
            paints, before = [], dashboard.cpu_s
            for _ in range(LOADS):
                page.goto(path)
                while (found := page.evaluate(_PAINT)) is None:
                    page.wait_for_timeout(20)
                paints.append(float(found))
            yield figure(f"{of}: first contentful paint of {path}", paints, "ms", aim="below 1000")
            yield Figure(f"{of}: server's processor for {path}", round(1e3 * (dashboard.cpu_s - before) / LOADS), "ms")
        page.goto("/study")
        page.wait_for_selector("#chart-epsilon canvas")
        heap = page.evaluate("() => performance.memory?.usedJSHeapSize ?? 0") / 1e6
        yield Figure(f"{of}: script memory of /study", round(heap, 1), "MB")
        before = memory_mib(pid=dashboard.process.pid)
        yield Figure(f"{of}: resident memory", round(before), "MB")
        for number in range(REQUESTS):
            context.request.get(PAGES[number % len(PAGES)])
        growth = memory_mib(pid=dashboard.process.pid) - before
        yield Figure(f"{of}: growth over {REQUESTS} more pages", round(growth, 1), "MB")


_PAINT = "() => performance.getEntriesByName('first-contentful-paint')[0]?.startTime ?? null"


def _slices(browser: Browser, dashboard: Dashboard) -> Iterator[Figure]:
    """Yield the time of slice changes at 128³ voxels with all three planes drawn: script time, and time to the next
    frame.
    """
    with _opened(browser, dashboard) as context:
        page = context.new_page()
        page.goto("/labels")
        while page.locator(".thumb img").count() < REVIEWED:
            page.wait_for_timeout(300)
        path = str(page.locator(".thumb a").first.get_attribute("href"))
        page.route(f"**{path}", _enlarged)
        page.route("**/voxels*", _random_voxels)
        page.goto(path)
        while page.evaluate("() => document.getElementById('viewer').dataset.ms === undefined"):
            page.wait_for_timeout(100)
        for layer in ("label", "doubt"):
            page.locator(f"input[name=layer][value={layer}]").check()
            page.locator(".plane canvas").first.focus()
            spent, waited = zip(*(_change(page, number) for number in range(CHANGES)), strict=True)
            yield figure(f"slice change at {SIDE}³, layer {layer}: script", spent, "ms", aim="below 16")
            yield figure(f"slice change at {SIDE}³, layer {layer}: to the next frame", waited, "ms")
        heap = page.evaluate("() => performance.memory?.usedJSHeapSize ?? 0") / 1e6
        yield Figure(f"script memory of the page at {SIDE}³, arrays apart", round(heap, 1), "MB")


def _change(page: Page, number: int) -> tuple[float, float]:
    key = "ArrowUp" if number % 40 < 20 else "ArrowDown"
    return tuple(
        page.evaluate(
            """key => new Promise(done => {
                const viewer = document.getElementById('viewer'), started = performance.now();
                document.activeElement.dispatchEvent(new KeyboardEvent('keydown', { key, bubbles: true }));
                requestAnimationFrame(() => requestAnimationFrame(
                    () => done([Number(viewer.dataset.ms), performance.now() - started])));
            })""",
            key,
        )
    )


def _review(browser: Browser, dashboard: Dashboard) -> Figure:
    """Return the time of a decision in a review of all labels by keyboard: from one label drawn to the next one
    drawn.
    """
    with _opened(browser, dashboard) as context:
        page = context.new_page()
        page.goto("/labels")
        page.keyboard.press("Tab")
        while page.evaluate("() => document.activeElement.textContent") != "Review, worst first":
            page.keyboard.press("Tab")
        page.keyboard.press("Enter")
        taken = []
        for number in range(REVIEWED):
            here = page.url
            while not _drawn(page):
                page.wait_for_timeout(5)
            started = time.monotonic()
            page.keyboard.press("r" if number % 3 == 1 else "a")
            while page.url == here or not _drawn(page):
                page.wait_for_timeout(5)
            taken.append(time.monotonic() - started)
        decided = read_decisions(dashboard.state / "decisions.jsonl")
        assert len({one.volume for one in decided}) == REVIEWED
    return figure(f"a decision in a review of {REVIEWED} labels by keyboard", taken, "s")


def _drawn(page: Page) -> bool:
    """Return whether a label's planes are drawn; False while the page changes to the next label."""
    try:
        return bool(page.evaluate("() => document.getElementById('viewer')?.dataset.ms !== undefined"))
    except PlaywrightError:
        return False


def _enlarged(route: Route) -> None:
    """Answer with the page, altered to state that its volume has 128³ voxels."""
    answer = route.fetch()

    def larger(found: re.Match[str]) -> str:
        facts: dict[str, Any] = json.loads(html.unescape(found[1]))
        facts |= {"grid": [SIDE] * 3, "centre": [SIDE // 2] * 3}
        return f'data-facts="{html.escape(json.dumps(facts))}"'

    route.fulfill(response=answer, body=re.sub(r'data-facts="([^"]*)"', larger, answer.text()))


def _random_voxels(route: Route) -> None:
    rng = np.random.default_rng(0)
    arrays = [rng.integers(0, 256 if name in ("image", "doubt") else 3, SIDE**3, dtype=np.uint8) for name in LAYERS]
    body = b"".join(array.tobytes() for array in arrays)
    route.fulfill(status=200, body=body, headers={"x-arrays": ",".join(LAYERS)})


def _opened(browser: Browser, dashboard: Dashboard) -> BrowserContext:
    context = browser.new_context(base_url=dashboard.url, viewport={"width": 1280, "height": 800})
    sign_in(context.new_page())
    return context


def _made(folder: Path) -> Path:
    folder.mkdir()
    return folder


def state(folder: Path) -> Path:
    """Create a dashboard's state folder with one user, and return it."""
    UserFile(folder / "users.json").add("ada", Role.OPERATOR, PASSWORD)
    return folder
