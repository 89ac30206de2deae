"""Tests the dashboard as its users see it: in Chromium, over HTTP, with a recorded study and a live run.

No page may log an error or ask for anything outside its own host: the ``open_page`` fixture checks that for each test.
"""

from __future__ import annotations

import contextlib
import gzip
import io
import json
import os
import re
import shutil
import threading
import time
import zipfile
from pathlib import Path

import nibabel as nib
import pytest

from common.canonical import sha256_file
from common.events import EventLog
from server.dashboard.screens import NAVIGATION
from server.ledger.verify import verify
from server.postprocess.decisions import read_decisions
from server.postprocess.labels import read_released
from server.protocols import student_fit
from server.protocols.student_fit import train_student
from server.study.workspace import Workspace
from tests.browser.conftest import serving, sign_in
from tests.dashboard_study import QUERIES, SITES, make_study_directory

pytestmark = pytest.mark.slow

PAGES = (*(path[1:] for path, _, _ in NAVIGATION), "ledger/7")
SLOW = (os.cpu_count() or 1) < 4
"""True on a machine with so few cores that it draws no frame in time."""

AXE = Path(__file__).parent / "vendor" / "axe.min.js"


def until(page, condition: str, argument: object = None, *, timeout_s: float = 600.0) -> None:
    """Wait for a condition in the page; Playwright's own waiting compiles text there, which the policy forbids."""
    end = time.monotonic() + timeout_s
    while not page.evaluate(condition, argument):
        assert time.monotonic() < end, condition
        page.wait_for_timeout(100)


def volume_paths(page) -> list[str]:
    """Return the addresses of the labels' own pages after their pictures are made."""
    page.goto("/labels")
    until(page, "n => document.querySelectorAll('.thumb img').length === n", QUERIES, timeout_s=600)
    return [link.get_attribute("href") for link in page.locator(".thumb a").all()]


def loaded(page, selector: str) -> None:
    """Wait until every picture of a selector is drawn."""
    until(
        page,
        "s => { const all = [...document.querySelectorAll(s)];"
        " return all.length > 0 && all.every(i => i.complete && i.naturalWidth > 0) }",
        selector,
    )


def test_a_stranger_is_led_to_the_sign_in_and_back(dashboard, open_page):
    page = open_page(dashboard.url)
    page.goto("/study")
    assert "/login" in page.url
    page.get_by_label("Name").fill("ada")
    page.get_by_label("Password").fill("a long enough secret")
    page.keyboard.press("Enter")
    page.wait_for_url("**/study")
    assert page.get_by_role("heading", level=1).inner_text() == "Study hippocampus-demo"
    page.get_by_role("button", name="Sign out").click()
    page.wait_for_url("**/login")
    page.goto("/")
    assert "/login" in page.url


@pytest.mark.parametrize(("page_name", "requested"), [("", "**/api/live/**"), ("study", "**/api/study")])
def test_a_page_that_signs_out_asks_for_nothing_more(dashboard, open_page, page_name, requested):
    page = open_page(dashboard.url)  # fails on a 401 in the console
    asked, signing_out = [], []
    page.route(requested, lambda route: asked.append(route))  # the request stays unanswered
    page.route("**/logout", lambda route: signing_out.append(route))
    sign_in(page, target=f"/login?next=/{page_name}")
    while not asked:
        page.wait_for_timeout(50)
    page.get_by_role("button", name="Sign out").click(no_wait_after=True)
    while not signing_out:
        page.wait_for_timeout(50)
    signed_out = signing_out[0].fetch(max_redirects=0)  # the session has ended, and the page is still there
    with contextlib.suppress(Exception):  # the page may have cancelled this request
        asked[-1].continue_()
    page.wait_for_timeout(1000)
    signing_out[0].fulfill(response=signed_out)
    page.wait_for_url("**/login*")
    assert "ended" not in page.url


def test_a_wrong_password_says_so_and_keeps_the_name(dashboard, open_page):
    page = open_page(dashboard.url, allow=("401",))
    sign_in(page, password="not the password")
    assert re.search("password .*wrong", page.get_by_role("alert").inner_text())
    assert page.get_by_label("Name").input_value() == "ada"
    assert page.get_by_label("Password").input_value() == ""


def test_a_session_that_ends_under_an_open_page_leads_to_the_sign_in(recorded, users_text, open_page, tmp_path):
    (tmp_path / "users.json").write_bytes(users_text)
    with serving(recorded.workspace.root, tmp_path, "--session-hours", "0.003") as short:  # 11 s
        page = open_page(short.url, allow=("401",))
        sign_in(page)
        assert "ε" in page.locator("#live-budget").inner_text()
        page.wait_for_url("**/login?ended=1*", timeout=600_000)
        assert "session has ended" in page.get_by_role("alert").inner_text()
        sign_in(page)
        page.goto("/sites")
        page.get_by_label("printed at a site").fill("what somebody typed")
        page.wait_for_selector("#not-live:not([hidden])", timeout=600_000)
        assert "session has ended" in page.locator("#not-live").inner_text()
        assert page.get_by_label("printed at a site").input_value() == "what somebody typed"


def test_a_privacy_officer_reads_everything_and_decides_nothing(dashboard, open_page):
    page = open_page(dashboard.url)
    sign_in(page, "paul")
    assert "privacy officer" in page.locator("header.top").inner_text()
    page.goto(volume_paths(page)[0])
    assert page.get_by_role("button", name="Reject").count() == 0
    assert "Only an operator" in page.locator("#decision").inner_text()
    page.goto("/ledger")
    assert page.get_by_role("button", name="Verify now").is_enabled()


def test_the_first_screen_answers_what_is_spent_what_is_left_and_who_is_up(dashboard, open_page):
    from playwright.sync_api import expect  # the fixture skips where Playwright is absent

    page = open_page(dashboard.url)
    sign_in(page)
    text = page.inner_text("main")
    assert re.search(r"ε\s8\s+of 8 spent", text)
    assert f"{QUERIES} of {QUERIES} planned answers released" in text
    for fact in ("exact accountant", "δ = 0.001", "unit hospital", "relation replace-one"):
        assert fact in text.lower()
    for site in SITES:
        row = page.get_by_role("row").filter(has_text=site)
        assert "spent" in row.inner_text()
        assert "ago" in row.inner_text()
        # `expect` repeats the check, because the live table may be replaced at any moment.
        expect(row.get_by_role("img")).to_be_in_viewport(ratio=1, timeout=60_000)


@pytest.mark.parametrize("width", [1440, 1000, 390])
def test_the_page_of_a_failed_run_fits_and_leaves_the_sign_out_in_reach(
    recorded, users_text, open_page, tmp_path, width
):
    study = tmp_path / "study"
    shutil.copytree(recorded.workspace.root, study)
    events = EventLog(Workspace(study).events_file, study=recorded.workspace.study().id)
    events.emit("run-started", run="9", pid=1, resumed=True)
    reason = "3 of 4 sites declined: `consilium site status` there says why, " * 8
    events.emit("run-failed", run="9", reason=reason)
    (tmp_path / "users.json").write_bytes(users_text)
    with serving(study, tmp_path) as running:
        page = open_page(running.url, width=width)
        sign_in(page)
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
        assert "`" not in page.locator("body").inner_text()
        assert page.locator(".alarm.critical").count() == 1
        page.get_by_role("button", name="Sign out").click()
        page.wait_for_url("**/login*")


def test_keyboard_alone_reaches_the_content_and_every_page(dashboard, open_page):
    page = open_page(dashboard.url)
    sign_in(page)
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.getAttribute('href')") == "#main"
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.id") == "main"
    page.goto("/")
    for _ in range(5):
        page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.textContent").strip() == "Study"
    assert page.evaluate("getComputedStyle(document.activeElement).outlineStyle") != "none"
    page.keyboard.press("Enter")
    page.wait_for_url("**/study")


def test_charts_draw_the_ledgers_figures(dashboard, open_page):
    page = open_page(dashboard.url)
    sign_in(page)
    page.goto("/study")
    page.wait_for_selector("#chart-epsilon canvas")
    page.wait_for_selector("#chart-noise canvas")
    assert "Rényi DP keeps only moments" in page.inner_text("main")
    page.goto("/student")
    page.wait_for_selector("#chart-loss canvas")


def drawn(page) -> None:
    """Wait until the viewer has drawn its planes."""
    until(page, "() => document.getElementById('viewer')?.dataset.ms !== undefined")


def pixels(page, plane: int = 0) -> str:
    page.wait_for_timeout(150)
    return page.evaluate("n => document.querySelectorAll('.plane canvas')[n].toDataURL()", plane)


def until_redrawn(page, before: str, plane: int = 0) -> None:
    """Wait until a plane of the viewer shows another picture than ``before``."""
    other = "([n, before]) => document.querySelectorAll('.plane canvas')[n].toDataURL() !== before"
    until(page, other, [plane, before])


def test_the_viewer_links_three_planes_and_lays_every_layer_over(dashboard, open_page):
    page = open_page(dashboard.url)
    sign_in(page)
    page.goto(volume_paths(page)[1])
    drawn(page)
    before = [pixels(page, plane) for plane in range(3)]
    page.locator("#at-axial").focus()
    page.keyboard.press("ArrowRight")
    until_redrawn(page, before[0])
    until_redrawn(page, before[1], 1)  # the crosshair moved there too
    assert page.locator("#out-axial").inner_text() == f"{int(page.locator('#at-axial').input_value()) + 1} of 32"
    seen = set()
    for layer in ("public start", "uncertain because of the noise", "student", "label against student", "image alone"):
        page.get_by_label(layer, exact=True).check()
        seen.add(pixels(page))
    assert len(seen) >= 4
    alone = pixels(page)
    page.get_by_label("where the label is unsure", exact=True).check()
    assert pixels(page) != alone
    page.get_by_label("image alone", exact=True).check()
    page.locator("[data-view=level]").fill("40")
    until_redrawn(page, alone)
    page.locator(".plane canvas").first.focus()
    for key in ("+", "+"):
        page.keyboard.press(key)
    page.keyboard.press("x")
    assert page.evaluate("document.activeElement.getAttribute('aria-label')").startswith("sagittal slice")
    zoomed = pixels(page)
    page.get_by_role("button", name="Reset").click()
    until_redrawn(page, zoomed)
    assert float(page.locator("#viewer").get_attribute("data-ms")) < 16 or SLOW
    with page.expect_download() as waiting:
        page.get_by_role("link", name="pseudo-label", exact=True).click()
    before = page.locator("#voxel").inner_text()
    page.locator(".plane canvas").nth(1).click(position={"x": 40, "y": 50})
    until(page, "before => document.getElementById('voxel').innerText !== before", before)
    said = page.locator("#voxel").inner_text()
    for words in ("label:", "public start:", "uncertain by noise:", "student:"):
        assert words in said
    image = nib.Nifti1Image.from_bytes(gzip.decompress(Path(waiting.value.path()).read_bytes()))
    assert image.shape == (32, 32, 32)
    assert nib.aff2axcodes(image.affine) == ("R", "A", "S")


def test_keys_of_one_character_are_turned_off_for_this_and_the_next_volume(dashboard, open_page):
    """WCAG 2.1.4: otherwise words that speech input types would reject labels."""
    page = open_page(dashboard.url)
    sign_in(page)
    path, other = volume_paths(page)[:2]
    page.goto(path)
    drawn(page)
    page.get_by_label("Use these keys").uncheck()
    page.goto(other)
    drawn(page)
    page.locator(".plane canvas").first.focus()
    before = pixels(page)
    for key in ("a", "r", "n", "p", "o", "l", "x", "+"):
        page.keyboard.press(key)
    assert pixels(page) == before
    assert page.url.endswith(other)
    page.keyboard.press("ArrowUp")
    until_redrawn(page, before)
    page.get_by_label("Use these keys").check()
    page.locator(".plane canvas").first.focus()
    page.keyboard.press("x")
    assert page.evaluate("document.activeElement.getAttribute('aria-label')").startswith("sagittal slice")


def test_without_the_arrays_the_viewer_shows_the_servers_pictures(dashboard, open_page):
    page = open_page(dashboard.url, allow=("Failed to load", "ERR_FAILED"))
    page.route("**/voxels*", lambda route: route.abort())
    sign_in(page)
    page.goto(volume_paths(page)[0])
    loaded(page, ".plane img")
    image = page.locator("img[data-plane=axial]")
    before = image.get_attribute("src")
    page.locator("#at-axial").focus()
    page.keyboard.press("ArrowRight")
    assert image.get_attribute("src") != before
    page.get_by_label("public start", exact=True).check()
    loaded(page, ".plane img")


def test_a_whole_review_takes_no_mouse_and_goes_from_the_most_to_the_least_suspicious(
    recorded, users_text, open_page, tmp_path, record_property
):
    """One key decides each volume, and the next volume follows by itself."""
    (tmp_path / "users.json").write_bytes(users_text)
    with serving(recorded.workspace.root, tmp_path) as own:
        page = open_page(own.url, allow=("ERR_INCOMPLETE", "ERR_CONNECTION", "ERR_EMPTY"))
        sign_in(page)
        volume_paths(page)
        queue = page.evaluate("() => fetch('/api/labels').then(answer => answer.json())")["queue"]
        page.goto(f"/labels/{queue[0]}")
        started = time.monotonic()
        for number, volume in enumerate(queue):
            drawn(page)
            page.keyboard.press("r" if number % 3 == 1 else "a")
            if number + 1 < len(queue):
                page.wait_for_url(lambda url, gone=volume: gone not in url)
            else:
                page.wait_for_url("**#decision")
        each = (time.monotonic() - started) / len(queue)
        record_property("seconds_a_decision", each)
        print(f"{each:.2f} s a decision, {len(queue)} volumes")
        taken = read_decisions(tmp_path / "decisions.jsonl")
        assert sorted(one.volume for one in taken) == sorted(queue)
        assert taken[0].volume == queue[0]
        assert sum(one.verdict == "reject" for one in taken) == len(queue[1::3])


def test_chosen_labels_are_decided_together(recorded, users_text, open_page, tmp_path):
    (tmp_path / "users.json").write_bytes(users_text)
    with serving(recorded.workspace.root, tmp_path) as own:
        page = open_page(own.url, allow=("ERR_INCOMPLETE", "ERR_CONNECTION", "ERR_EMPTY"))
        sign_in(page)
        volume_paths(page)
        page.goto("/labels")
        for box in page.locator(".choose input").all()[:3]:
            box.check()
        page.locator("#bulk").get_by_role("button", name="Reject", exact=True).click()
        page.wait_for_load_state()
        assert len(read_decisions(tmp_path / "decisions.jsonl")) == 3
        assert "3 rejected" in page.inner_text("main")


def test_a_page_says_that_it_is_not_live_greys_out_and_comes_back(recorded, users_text, open_page, tmp_path):
    (tmp_path / "users.json").write_bytes(users_text)
    allow = ("ERR_CONNECTION", "ERR_INCOMPLETE", "ERR_EMPTY", "Failed to load", "401")
    with serving(recorded.workspace.root, tmp_path) as first:
        page = open_page(first.url, allow=allow)
        sign_in(page)
        until(page, "() => document.body.dataset.connection === 'live'")
        assert page.locator("#not-live").is_hidden()
    until(page, "() => document.body.dataset.connection === 'lost'")
    assert re.match(r"Not live since \d\d:\d\d", page.locator("#not-live").inner_text())
    assert page.evaluate("getComputedStyle(document.querySelector('main')).filter") == "grayscale(1)"
    assert page.evaluate("getComputedStyle(document.querySelector('#live-status')).filter") == "grayscale(1)"
    port = int(first.url.rsplit(":", 1)[1])
    with serving(recorded.workspace.root, tmp_path, port=port):
        page.wait_for_url("**/login?ended=1*", timeout=600_000)  # the restarted dashboard asks to sign in


def test_what_was_typed_stays_and_the_page_says_why_when_the_dashboard_comes_back(
    recorded, users_text, open_page, tmp_path
):
    (tmp_path / "users.json").write_bytes(users_text)
    allow = ("ERR_CONNECTION", "ERR_INCOMPLETE", "ERR_EMPTY", "Failed to load", "401")
    with serving(recorded.workspace.root, tmp_path) as first:
        page = open_page(first.url, allow=allow)
        sign_in(page, target="/login?next=/sites")
        page.get_by_label("printed at a site").fill("what somebody typed")
        until(page, "() => document.body.dataset.connection === 'live'")
    until(page, "() => document.body.dataset.connection === 'lost'")
    with serving(recorded.workspace.root, tmp_path, port=int(first.url.rsplit(":", 1)[1])):
        until(page, "() => document.getElementById('not-live').innerText.includes('session has ended')")
        assert page.get_by_label("printed at a site").input_value() == "what somebody typed"


def test_a_page_that_lost_its_connection_yesterday_names_the_day(dashboard, open_page):
    page = open_page(dashboard.url, allow=("ERR_FAILED", "Failed to load", "EventSource"))
    page.clock.install()
    sign_in(page)
    page.route("**/api/**", lambda route: route.abort())
    page.clock.run_for("02:00")
    until(page, "() => document.body.dataset.connection === 'lost'")
    assert re.match(r"Not live since \d\d:\d\d", page.locator("#not-live").inner_text())
    page.clock.fast_forward("24:00:00")
    until(page, "() => /since.*[A-Z][a-z]{2}.*:.*: the dash/.test(document.getElementById('not-live').innerText)")


def test_a_live_update_leaves_the_focus_where_it_was(recorded, users_text, open_page, tmp_path):
    (tmp_path / "users.json").write_bytes(users_text)
    with serving(recorded.workspace.root, tmp_path) as own:
        page = open_page(own.url, allow=("ERR_INCOMPLETE", "ERR_CONNECTION", "ERR_EMPTY"))
        sign_in(page)
        first = volume_paths(page)[0]
        page.locator(".choose input").nth(2).focus()
        name = page.evaluate("document.activeElement.name")
        token = page.evaluate("document.body.dataset.csrf")
        page.request.post(f"{first}/decision", form={"csrf": token, "verdict": "reject"}, headers={"origin": own.url})
        until(page, "() => document.querySelector('main').innerText.includes('1 rejected')")
        assert page.evaluate("document.activeElement.name") == name


def test_a_job_is_watched_through_a_lost_connection(dashboard, open_page):
    page = open_page(dashboard.url, allow=("ERR_FAILED", "Failed to load"))
    sign_in(page)
    asked = []

    def running(route):
        if asked:
            return route.continue_()
        answer = route.fetch()
        return route.fulfill(response=answer, body=answer.text().replace("Checks the whole", "since 12:00. Checks the"))

    def lose_the_first(route):
        asked.append(route)
        return route.abort() if len(asked) == 1 else route.continue_()

    page.route("**/ledger", running)
    page.route("**/api/ledger/verify", lose_the_first)
    page.goto("/ledger")
    page.locator("#verify-state", has_not_text="since").wait_for(timeout=600_000)  # also while the page is loaded again
    assert len(asked) == 2


def test_the_planner_says_that_nobody_answers_and_asks_again(dashboard, open_page):
    page = open_page(dashboard.url, allow=("ERR_FAILED", "Failed to load"))
    sign_in(page)
    page.goto("/planner")
    page.route("**/api/plan?*", lambda route: route.abort())
    page.locator("#p-hospitals").fill("64")
    page.wait_for_selector("#r-problem:not([hidden])")
    assert "does not answer" in page.locator("#r-problem").inner_text()
    page.unroute("**/api/plan?*")
    until(page, "() => document.getElementById('r-problem').hidden")


def test_the_student_page_follows_its_training_and_a_labels_page_comes_by_itself(users_text, open_page, tmp_path):
    study = make_study_directory(tmp_path, steps=40)
    study.collect()
    state = tmp_path / "state"
    state.mkdir()
    (state / "users.json").write_bytes(users_text)
    with serving(study.workspace.root, state) as live:
        page = open_page(live.url, allow=("ERR_INCOMPLETE", "ERR_CONNECTION", "ERR_EMPTY"))
        sign_in(page)
        page.goto("/student")
        assert "No training yet" in page.inner_text("main")
        label = page.context.new_page()
        label.goto(f"/labels/{study.workspace.volumes()[0]}")
        assert "no picture" in label.inner_text("main")
        run = threading.Thread(target=study.run, args=("2",))
        run.start()
        page.wait_for_selector("#chart-loss canvas", timeout=600_000)
        run.join(600)
        label.wait_for_selector("#viewer", timeout=600_000)
        until(page, "() => document.querySelectorAll('#live-examples img').length > 0", timeout_s=600)


def test_a_rejected_label_is_dropped_from_training_and_the_answer_stays(dashboard, recorded, open_page):
    page = open_page(dashboard.url)
    sign_in(page)
    path = volume_paths(page)[2]
    volume = path.rsplit("/", 1)[1]
    ledger = sha256_file(recorded.workspace.ledger_file)
    page.goto(path)
    page.get_by_label("Why").fill("the tail is missing")
    page.get_by_role("button", name="Reject", exact=True).click()
    page.wait_for_load_state()
    assert "ada rejected" in page.locator("#decision").inner_text()
    assert page.get_by_role("button", name="Reject", exact=True).is_disabled()
    page.goto("/labels")
    assert "1 rejected" in page.inner_text("main")
    assert f"--decisions {dashboard.state}/decisions.jsonl" in page.inner_text("main")
    decisions = read_decisions(dashboard.state / "decisions.jsonl")
    assert [(one.user, one.verdict, one.volume) for one in decisions] == [("ada", "reject", volume)]
    target = recorded.workspace.decisions_file
    target.write_bytes((dashboard.state / "decisions.jsonl").read_bytes())
    try:
        assert set(recorded.workspace.volumes()) - set(read_released(recorded.workspace).labels) == {volume}
    finally:
        target.unlink()
    page.goto(path)
    page.get_by_role("button", name="Accept", exact=True).click()
    page.wait_for_load_state()
    assert len(read_decisions(dashboard.state / "decisions.jsonl")) == 2
    assert sha256_file(recorded.workspace.ledger_file) == ledger


def test_the_planner_answers_while_a_slider_moves(dashboard, open_page):
    page = open_page(dashboard.url, allow=("400",))
    sign_in(page)
    page.goto("/planner")
    assert page.locator("#r-verdict").inner_text().startswith("Weak")
    slider = page.locator("[data-for=p-hospitals]")
    slider.evaluate("s => { s.value = 64; s.dispatchEvent(new Event('input', { bubbles: true })) }")
    until(page, "() => document.getElementById('r-verdict').classList.contains('informative')")
    assert page.locator("#p-hospitals").input_value() == "64"
    page.locator("#p-aggregation").select_option("sealed-sum")
    shown = [one.inner_text() for one in page.locator("#planner p").all() if one.is_visible()]
    assert [text[:24] for text in shown if "other choice" in text] == ["The other choice. Open: "]
    page.locator("#p-aggregation").select_option("open")
    page.locator("#p-hospitals").fill("300")
    assert slider.input_value() == "300"  # the slider reaches the advised value
    page.locator("#p-unit").select_option("patient")
    page.locator("#p-relation").select_option("zero-out")
    page.wait_for_selector("#r-problem:not([hidden])")
    assert "zero-out" in page.locator("#r-problem").inner_text()


def test_ledger_rows_are_filtered_opened_and_verified_on_the_spot(dashboard, open_page):
    page = open_page(dashboard.url)
    sign_in(page)
    page.goto("/ledger")
    page.get_by_label("Kind").select_option("release")
    page.get_by_role("button", name="Filter").click()
    page.wait_for_load_state()
    assert page.locator("tbody tr", has_text="answer to query").count() == QUERIES
    page.locator("tbody a").first.click()
    page.wait_for_load_state()
    assert "answer_sha256" in page.locator("pre").inner_text()
    page.goto("/ledger")
    page.get_by_role("button", name="Verify now").click()
    page.wait_for_selector("#verify-state .good", timeout=600_000)
    assert "Everything holds" in page.locator("#verify-state").inner_text()


def test_downloads_are_whole(dashboard, recorded, open_page):
    page = open_page(dashboard.url)
    sign_in(page)
    page.goto("/student")
    with page.expect_download() as waiting:
        page.get_by_role("link", name="Download bundle").click()
    archive = zipfile.ZipFile(io.BytesIO(Path(waiting.value.path()).read_bytes()))
    model = next(name for name in archive.namelist() if name.endswith("models/model.pt"))
    assert archive.read(model) == (recorded.workspace.bundle_dir / "models" / "model.pt").read_bytes()
    page.goto("/ledger")
    with page.expect_download() as waiting:
        page.get_by_role("link", name="CSV").click()
    assert len(Path(waiting.value.path()).read_text().splitlines()) > QUERIES
    page.get_by_role("button", name="Issue now").click()
    link = page.get_by_role("link", name="PDF")
    link.wait_for(timeout=600_000)
    with page.expect_download() as waiting:
        link.click()
    assert Path(waiting.value.path()).read_bytes().startswith(b"%PDF")
    facts = json.loads((dashboard.state / "certificate" / "certificate.json").read_text())
    assert facts["answers"] == QUERIES


def test_a_page_follows_a_run_without_being_loaded_again_and_dies_without_disturbing_it(
    users_text, open_page, tmp_path, monkeypatch
):
    shown = threading.Event()

    def train_once_it_was_shown(*arguments, **options):
        shown.wait(600)
        return train_student(*arguments, **options)

    monkeypatch.setattr(student_fit, "train_student", train_once_it_was_shown)
    study = make_study_directory(tmp_path, batch_size=1, steps=40)
    turns = threading.Semaphore(1)  # the first site answers a volume only after the page showed the previous one
    for teacher in [*study.teachers.values()][:1]:
        teacher.before = turns.acquire
    state = tmp_path / "state"
    state.mkdir()
    (state / "users.json").write_bytes(users_text)
    with serving(study.workspace.root, state) as live:
        page = open_page(live.url, allow=("ERR_CONNECTION", "ERR_INCOMPLETE", "ERR_EMPTY", "Failed to load"))
        sign_in(page)
        assert "No run yet" in page.inner_text("#live-run")
        page.evaluate("window.kept = true")
        run = threading.Thread(target=study.run)
        run.start()
        seen = set()
        end = time.monotonic() + 600
        while run.is_alive() and time.monotonic() < end and len(seen) < 3:
            found = re.search(r"(\d+) of 8 planned", page.inner_text("#live-budget"))
            if found and int(found[1]) and int(found[1]) not in seen:
                seen.add(int(found[1]))
                turns.release()
            page.wait_for_timeout(150)
        turns.release(QUERIES)
        assert len(seen) >= 3, seen
        assert "Running" in page.inner_text("#live-status")
        until(page, "() => document.querySelector('#live-status').textContent.includes('train the student')")
        shown.set()
        live.process.kill()
        page.wait_for_timeout(1500)
        assert page.evaluate("window.kept") is True
    run.join(timeout=600)
    assert not run.is_alive()
    report = verify(study.workspace.ledger_file)
    assert report.ok
    assert report.payloads == QUERIES
    assert (study.workspace.bundle_dir / "models" / "model.pt").exists()


def test_where_event_streams_do_not_get_through_the_page_asks_instead(dashboard, open_page):
    page = open_page(dashboard.url, allow=("ERR_FAILED", "Failed to load", "EventSource"))
    page.route("**/api/live/*", lambda route: route.abort())
    sign_in(page)
    until(page, "() => document.body.dataset.connection === 'polling'")


@pytest.mark.parametrize(
    ("width", "dark"), [(1280, False), (820, True), (390, False), (390, True)], ids=["wide", "tablet", "phone", "night"]
)
def test_every_page_fits_follows_the_systems_theme_and_has_no_accessibility_finding(dashboard, open_page, width, dark):
    """axe-core applies all rules of WCAG 2.1 A and AA, contrast included; ``tests.browser.pictures`` checks every
    state.
    """
    page = open_page(dashboard.url, width=width, height={1280: 800, 820: 1180, 390: 844}[width], dark=dark)
    sign_in(page)
    first = volume_paths(page)[0]
    source = AXE.read_text(encoding="utf-8")
    found = {}
    for path in (*PAGES, first):
        page.goto(f"/{path.lstrip('/')}")
        if page.locator("img").count():
            loaded(page, "main img")
        colour = page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert (sum(map(int, re.findall(r"\d+", colour)[:3])) < 200) is dark
        overflow = page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")
        assert overflow <= 0, (path, overflow)
        hidden = "() => [...document.querySelectorAll('div.scroll')].filter(e => e.scrollWidth > e.clientWidth).length"
        assert width > 390 or page.evaluate(hidden) == 0, (path, "a table hides columns")
        for tab in page.locator(".nav a").all():
            box = tab.bounding_box()
            assert 0 <= box["x"] <= width - box["width"], path
        page.evaluate(source)
        result = page.evaluate("axe.run({ runOnly: ['wcag2a', 'wcag2aa', 'wcag21a', 'wcag21aa'] })")
        if result["violations"]:
            found[path] = [
                (one["id"], [node["html"][:120] for node in one["nodes"][:3]]) for one in result["violations"]
            ]
    assert found == {}
