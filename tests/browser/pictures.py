"""Takes pictures of every dashboard page in nine states, two widths and two themes, and lists axe's findings.

``python -m tests.browser.pictures OUT`` makes one study, brings copies of it into each state, and takes all pictures;
``--only STATE`` takes those of one state. The sign-in page offers a provider in the state ``finished``, whose ledger
holds a second study and whose certificate is issued and left as ``certificate.pdf``. ``--study DIR`` takes the pages of
an existing study instead, for instance a demo's.
"""

from __future__ import annotations

import argparse
import io
import json
import shutil
import sqlite3
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

from PIL import Image
from playwright.sync_api import Browser, Page, sync_playwright

from common.events import EventLog
from server.aggregation.pipeline import collect
from server.dashboard.auth import Role, UserFile
from server.study import create_study as setup
from server.study.workspace import Workspace
from tests.browser.conftest import ARGUMENTS, CHROMIUM, PASSWORD, Dashboard, serving, sign_in
from tests.dashboard_study import QUERIES, SITES, Recorded, make_study_directory
from tests.federation import make_study
from tests.server.dashboard.hostile.files import REPORT

WIDTHS = {1440: 900, 390: 844}
PAGES = ("overview", "study", "sites", "ledger", "row", "labels", "label", "student", "studies", "planner", "login")
SELECTED = (
    *("none-overview-390", "before-overview-1440", "running-overview-1440", "alarm-overview-1440"),
    *("alarm-overview-390-dark", "broken-overview-1440-dark", "broken-ledger-1440", "gone-overview-1440"),
    *("finished-overview-1440", "finished-overview-390", "finished-study-1440", "finished-sites-1440"),
    *("finished-ledger-390", "finished-labels-1440", "finished-label-1440", "finished-label-1440-dark"),
    *("finished-student-1440-dark", "finished-studies-1440", "finished-planner-1440", "finished-planner-390-dark"),
)
"""The pictures that docs/dashboard.md shows."""

AXE = Path(__file__).parent / "vendor" / "axe.min.js"
STATES = ("none", "before", "running", "alarm", "broken", "gone", "finished", "not-proven", "worse")
GIVEN = "given"
"""The state of an existing study that was given by ``--study``."""


def make_states(root: Path) -> Mapping[str, Workspace]:
    """Make a directory for each state from one study that is run to its end; no site's code is computed twice."""
    made = make_study_directory(root / "made", steps=60)
    study = made.workspace

    def copied(name: str) -> Workspace:
        return Workspace(shutil.copytree(study.root, place(root, name).root))

    second, joint = Workspace(root / "finished" / "second"), make_study(epsilon=2.0)
    joint = replace(joint, codec=replace(joint.codec, joint=True), name="hippocampus-joint")
    setup.create_study(second, joint, ledger=study.root)  # before the first spends what the pools have
    states = {"none": place(root, "none"), "before": copied("before")}
    setup.create_study(states["none"], study.study())
    half = _Half(study.events_file, study=study.study().id)
    half.emit("run-started", run="1", pid=1, resumed=False)
    with suppress(StopIteration):
        collect(study, made.transport, events=half)
    states["alarm"] = copied("alarm")
    _raise_alarms(states["alarm"])
    made.run("2")
    lost = [0.051, 0.062, 0.038, 0.047, 0.071, 0.042, 0.055, 0.049]
    _write_report(study, gains=lost)
    for site in SITES[:3]:
        _hand_over(made, site)
    states |= {name: copied(name) for name in ("running", "gone", "finished", "broken", "not-proven", "worse")}
    _write_report(states["not-proven"], gains=[gain * (-1) ** case for case, gain in enumerate(lost)])
    _write_report(states["worse"], gains=[-gain for gain in lost])
    _cut_in_training(states["running"])
    second.share_ledger(states["finished"].books_dir)
    with closing(sqlite3.connect(states["broken"].ledger_file)) as db:
        db.execute("DROP TRIGGER rows_no_update")
        db.execute("UPDATE rows SET body = replace(body, 'north', 'nroth') WHERE seq = 9")
        db.commit()
    return states


def place(root: Path, state: str) -> Workspace:
    """Return the folder of a state's study. Each state has its own folder, or their studies would count as one."""
    return Workspace(root / state / "study")


class _Half(EventLog):
    """Ends the run when the first batch is released."""

    def emit(self, event: str, **facts: Any) -> None:
        super().emit(event, **facts)
        if event == "released":
            raise StopIteration


def _raise_alarms(study: Workspace) -> None:
    log = EventLog(study.events_file, study=study.study().id)
    for site, reason in (("north", "paused"), ("east", "offline"), ("south", "accepted"), ("west", "unknown-study")):
        log.emit("offer-answered", batch="b", site=site, accepted=reason == "accepted", reason=reason)
    log.emit("quorum-missed", batch="b", accepted=1, needed=3)
    log.emit("receipts-missing", site="east", reason="not connected")
    log.emit("run-failed", run="1", reason="quorum missed: 1 of 3 sites")


def _cut_in_training(study: Workspace) -> None:
    """Cut the study back to the middle of its student's training."""
    lines = study.events_file.read_text().splitlines(keepends=True)
    steps = [number for number, line in enumerate(lines) if '"student-step"' in line]
    kept = lines[: steps[len(steps) // 2]]
    study.events_file.write_text("".join(kept))
    shutil.rmtree(study.student_dir)
    shutil.rmtree(study.bundle_dir)
    (study.root / "report.json").unlink()


def _happens_now(study: Workspace) -> None:
    """Move the times of the log, so that its newest line is of this moment."""
    kept = study.events_file.read_text().splitlines()
    late = datetime.now(UTC) - datetime.fromisoformat(json.loads(kept[-1])["time"])
    moved = []
    for line in kept:
        event = json.loads(line)
        event["time"] = (datetime.fromisoformat(event["time"]) + late).isoformat(timespec="milliseconds")
        moved.append(json.dumps(event) + "\n")
    study.events_file.write_text("".join(moved))


def _hand_over(made: Recorded, site: str) -> None:
    folder = made.workspace.root / "site-reports"
    folder.mkdir(exist_ok=True)
    spent = {name: {**one, "epsilon": 7.9999} for name, one in REPORT["spent"].items()}
    account = {"site": site, "spent": spent, "queries_accepted": QUERIES, "receipted": QUERIES, "version": "0.2.0"}
    (folder / f"{site}.json").write_text(json.dumps(REPORT | account))


def _write_report(study: Workspace, *, gains: list[float]) -> None:
    """Leave the report of a student that is so much better than its best control, case by case."""
    cases = [0.62, 0.71, 0.66, 0.58, 0.69, 0.73, 0.61, 0.65]
    below = [a - b for a, b in zip(cases, gains, strict=True)]
    scores = {name: {"dice": {"mean": sum(dice) / 8, "cases": dice}} for name, dice in (("s", cases), ("c", below))}
    controls = {"zero_code": {"dice": {"mean": 0.45, "cases": [0.45] * 8}}, "public_only": scores["c"]}
    report = {"study": {"id": study.study().id}, "student": scores["s"], "controls": controls}
    (study.root / "report.json").write_text(json.dumps(report))


def paths(study: Workspace) -> Mapping[str, str]:
    """Return the address of every page of a study."""
    volumes = study.volumes() if (study.root / "public.json").exists() else ()
    found = {name: f"/{'' if name == 'overview' else name}" for name in PAGES}
    return found | {"row": "/ledger/3", "label": f"/labels/{volumes[0] if volumes else '0' * 64}"}


@contextmanager
def signed_in(
    browser: Browser, url: str, *, width: int, dark: bool, live: bool = True, stranger: bool = False
) -> Iterator[Callable[[], Page]]:
    """Yield a function that makes pages of one session, or without a session for a stranger."""
    context = browser.new_context(
        base_url=url,
        viewport={"width": width, "height": WIDTHS[width]},
        color_scheme="dark" if dark else "light",
    )
    if not live:
        context.route("**/api/live/*", lambda route: route.abort())
    if not stranger:
        page = context.new_page()
        sign_in(page)
        page.close()
    yield context.new_page
    context.close()


def settle(page: Page) -> None:
    """Wait until pictures, charts and fonts are drawn, and the page is live."""
    page.wait_for_load_state("load")
    page.evaluate("for (const image of document.images) image.loading = 'eager'")
    page.wait_for_timeout(400)


def take(
    browser: Browser, dashboard: Dashboard, study: Workspace, out: Path, state: str, pages: Collection[str]
) -> list[str]:
    """Take every page of one state, and return axe's findings; for ``gone`` the server ends under the open pages."""
    opened: list[tuple[Page, Path]] = []
    findings: list[str] = []
    with ExitStack() as sessions:
        for width in WIDTHS:
            for dark in (False, True):
                live = state != "gone"  # a browser opens at most six streams, and more of these pages stay open
                look = partial(signed_in, browser, dashboard.url, width=width, dark=dark, live=live)
                make = sessions.enter_context(look())
                make_login = sessions.enter_context(look(stranger=True))
                for name, path in ((name, path) for name, path in paths(study).items() if name in pages):
                    page = make_login() if name == "login" else make()
                    page.goto(path)
                    settle(page)
                    findings += axe(page, f"{state} {name} {width}{' dark' if dark else ''}")
                    file = out / f"{state}-{name}-{width}{'-dark' if dark else ''}.png"
                    if state == "gone":
                        opened.append((page, file))
                    else:
                        page.screenshot(path=file, full_page=True)
                        page.close()
        if state == "gone":
            dashboard.process.kill()
            time.sleep(12)
            for page, file in opened:
                findings += axe(page, f"{state} {file.stem}, server gone")
                page.screenshot(path=file, full_page=True)
    return findings


def keep(taken: Path, folder: Path) -> None:
    """Store the pictures selected for the documents: few colours without loss, or with loss where scans are shown."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in SELECTED:
        if (taken / f"{name}.png").exists():
            with Image.open(taken / f"{name}.png") as picture:
                flat = picture.convert("RGB").quantize(128, dither=Image.Dither.NONE).convert("RGB")
                ways = ((flat, {"lossless": True}), (picture.convert("RGB"), {"quality": 72}))
                tried = [io.BytesIO() for _ in ways]
                for (image, how), file in zip(ways, tried, strict=True):
                    image.save(file, "webp", method=6, **how)
                (folder / f"{name}.webp").write_bytes(min((file.getvalue() for file in tried), key=len))


def axe(page: Page, where: str) -> list[str]:
    """Return axe-core's findings by WCAG 2.1 A and AA, of any impact."""
    page.evaluate(AXE.read_text(encoding="utf-8"))
    found = page.evaluate("axe.run({ runOnly: ['wcag2a', 'wcag2aa', 'wcag21a', 'wcag21aa'] })")["violations"]
    return [f"{where}: {one['id']} ({one['impact']}): {one['nodes'][0]['html'][:160]}" for one in found]


def main() -> None:
    words = argparse.ArgumentParser(description=__doc__)
    words.add_argument("out", type=Path)
    words.add_argument("--only", action="append", choices=STATES)
    words.add_argument("--study", type=Path, help="Directory of a study that exists: take its pages only.")
    words.add_argument("--page", action="append", choices=PAGES)
    words.add_argument("--docs", type=Path, help="Folder for the pictures of docs/dashboard.md, as WebP.")
    words.add_argument("--made", type=Path, help="Directory of the states' studies; made where it is not there.")
    given = words.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as run:
        root = given.made or Path(folder)
        if given.study:
            states: Mapping[str, Workspace] = {GIVEN: Workspace(given.study)}
        else:
            made = (root / "none").exists()
            states = {name: place(root, name) for name in STATES} if made else make_states(root)
        browser = run.chromium.launch(executable_path=str(CHROMIUM), args=ARGUMENTS)
        findings: list[str] = []
        for name in given.only or states:
            state = Path(folder) / f"state-{name}"
            users = UserFile(state / "users.json")
            users.add("ada", Role.OPERATOR, PASSWORD)
            extra = ("--oidc", str(_provider(state))) if name == "finished" else ()
            if name == "running":
                _happens_now(states[name])
            with ExitStack() as held, serving(states[name].root, state, *extra, readable=name != "broken") as dashboard:
                if name == "running":
                    held.enter_context(states[name].locked())  # a live run holds this lock
                _prepare(browser, dashboard, states[name])
                if name == "finished":
                    _issue(browser, dashboard, given.out / "certificate.pdf")
                findings += take(browser, dashboard, states[name], given.out, name, given.page or PAGES)
        browser.close()
    if given.docs:
        keep(given.out, given.docs)
    print("\n".join(findings) or "axe finds nothing")
    sys.exit(bool(findings))


def _prepare(browser: Browser, dashboard: Dashboard, study: Workspace) -> None:
    """Wait for the labels' pictures, if there are labels."""
    with signed_in(browser, dashboard.url, width=1440, dark=False) as make:
        page = make()
        page.goto("/labels")
        while study.labels_dir.exists() and page.locator(".thumb img").count() < len(study.volumes()):
            page.wait_for_timeout(300)


def _provider(folder: Path) -> Path:
    """Write settings of a provider that is never asked; the page shows its host."""
    (folder / "secret").write_text("no secret")
    file = folder / "oidc.toml"
    file.write_text(
        'issuer = "https://login.example.org/realms/hospital"\nclient_id = "consilium"\nrole_claim = "groups"\n'
        'client_secret_file = "secret"\n[roles]\noperator = ["consilium-operators"]\n'
    )
    return file


def _issue(browser: Browser, dashboard: Dashboard, file: Path) -> None:
    with signed_in(browser, dashboard.url, width=1440, dark=False) as make:
        page = make()
        page.goto("/ledger")
        page.get_by_role("button", name="Issue now").click()
        while not page.get_by_role("link", name="PDF").count():
            page.wait_for_timeout(500)
        file.write_bytes(page.request.get("/api/certificate.pdf").body())


if __name__ == "__main__":
    main()
