"""Tests a hospital's own page in Chromium: its states, two widths, two themes, accessibility, and its changes."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from client.operations import staff_decisions
from client.teachers.pulled_student import STUDENT_DIR
from common.data.msd import read_dataset
from common.hospital_page import OwnAlarm, OwnPeer
from common.models.student_bundle import WEIGHTS
from common.models.unet import build_unet, weights_to_bytes
from common.sockets import free_ports
from server.dashboard.screens import HERE
from tests.hospital_facts import Fixed, client_of, facts
from tests.own_site import STATES, make_own_site

pytestmark = pytest.mark.slow

AXE = Path(__file__).parent / "vendor" / "axe.min.js"
SIZES = ((1440, 900), (390, 844))


CHIPS = {
    "joined": "Nobody consented: nothing is answered",
    "consented": "Consented, nothing answered yet",
    "answering": "Answering",
    "paused": "Paused",
    "left": "Withdrawn for good",
    "spent": "Budget spent",
    "alarm": "Alarm: nothing is answered",
    "after-a-student": "Answering",
    "after-a-withdrawal": "Answering",
}


@contextmanager
def serving(site: Path) -> Iterator[str]:
    """Run ``consilium site dashboard`` until the block ends; yield the address that it printed."""
    (port,) = free_ports(1, host="127.0.0.1")
    program = "from consilium.cli.main import main; main()"
    words = [sys.executable, "-P", "-c", program, "site", "dashboard", "--site-dir", str(site), "--port", str(port)]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            found = re.search(r"http://localhost:\d+/\?key=\S+", process.stdout.readline())
            assert found is not None
            yield found[0]
        finally:
            process.terminate()


def look(page, address: str) -> None:
    """Open the printed address once the server listens there."""
    for _ in range(200):
        try:
            page.goto(address)
            return
        except Exception as error:
            if "ERR_CONNECTION_REFUSED" not in str(error):
                raise
            page.wait_for_timeout(100)
    raise AssertionError("the page does not come up")


@pytest.mark.parametrize("state", STATES)
def test_the_page_fits_and_is_clean_in_every_state(state: str, tmp_path: Path, open_page, pytestconfig) -> None:
    pictures = pytestconfig.rootpath / "build" / "hospital"
    pictures.mkdir(parents=True, exist_ok=True)
    with serving(make_own_site(tmp_path, state)) as address:
        origin = address.partition("/?")[0]
        for (width, height), dark in zip(SIZES, (False, True), strict=True):
            page = open_page(origin, width=width, height=height, dark=dark)
            look(page, address)
            assert page.locator(".status .tag").inner_text() == CHIPS[state]
            if state.startswith("after-"):
                page.get_by_label("Case").select_option("3")
                page.get_by_role("button", name="Show").click()
                page.wait_for_selector("#viewer.drawn")
                shown = {"after-a-student": 4, "after-a-withdrawal": 2}.get(state, 3)
                assert page.locator(".thumb img").count() == shown
                adapted = page.get_by_label("adapted", exact=True)
                if state == "after-a-withdrawal":
                    assert adapted.count() == 0  # the withdrawn patient has trained it
                else:
                    adapted.check()
            assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
            page.evaluate(AXE.read_text())
            run = "axe.run({ runOnly: ['wcag2a', 'wcag2aa', 'wcag21a', 'wcag21aa'] })"
            found = page.evaluate(run)["violations"]
            assert [(one["id"], [node["target"] for node in one["nodes"]]) for one in found] == []
            page.screenshot(path=pictures / f"{state}-{width}{'-dark' if dark else ''}.png", full_page=True)


def test_other_hospitals_names_and_keys_are_readable_on_a_phone(browser) -> None:
    key = "SHA256:" + "kKjxpVDYEL3ZIZh3if5LpDNgFS8" * 2
    peers = (OwnPeer("hospital-02", key, "NOT CONFIRMED", False),)
    text = client_of(Fixed(facts(peers=peers))).get("/").text
    page = browser.new_page(viewport={"width": 390, "height": 844})
    page.set_content(f"{text}<style>{(HERE / 'static' / 'dashboard.css').read_text()}</style>")
    cells = page.get_by_role("region", name="Other hospitals and their keys").locator("tbody tr > *")
    boxes = cells.evaluate_all("all => all.map(one => one.getBoundingClientRect().toJSON())")
    assert all(box["width"] >= 80 and box["right"] <= 390 for box in boxes)
    assert boxes[0]["height"] < 40  # one line
    page.close()


def test_an_alarm_with_a_long_path_fits_a_phone(browser) -> None:
    """A SuperNode's alarm names its log, whose path may be longer than a phone is wide."""
    alarm = OwnAlarm(f"supernode north: ended; log /srv/{'longfolder/' * 6}supernode.log", "`consilium site up`", True)
    site_dir = f"/srv/{'longfolder/' * 6}site"
    text = client_of(Fixed(facts(alarms=(alarm,), site_dir=site_dir))).get("/").text
    with browser.new_page(viewport={"width": 390, "height": 844}) as page:
        page.set_content(text)
        page.add_style_tag(path=HERE / "static" / "dashboard.css")
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")


def test_the_drawn_label_lies_over_the_students_in_white_and_black(tmp_path: Path, open_page) -> None:
    """With the student's layer shown, only pixels of the axial plane along the drawn outline may change."""
    shades = """() => {
        const canvas = document.querySelector("canvas");
        const pixels = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data;
        const of = { white: 0, black: 0 };
        for (let i = 0; i < pixels.length; i += 4) {
            const [r, g, b] = pixels.slice(i, i + 3);
            if (Math.min(r, g, b) > 245) of.white += 1;
            if (Math.max(r, g, b) < 4) of.black += 1;
        }
        return of;
    }"""
    with serving(make_own_site(tmp_path, "after-a-student")) as address:
        page = open_page(address.partition("/?")[0], allow=("willReadFrequently",))
        look(page, address)
        page.goto("/?case=1")
        page.wait_for_selector("#viewer.drawn")
        page.get_by_label("student", exact=True).check()
        page.wait_for_timeout(300)
        over = page.evaluate(shades)
        page.get_by_label("outline of the label drawn at this site").uncheck()
        page.wait_for_timeout(300)
        alone = page.evaluate(shades)
    assert over["white"] > alone["white"] + 100
    assert over["black"] > alone["black"] + 100


def test_a_new_student_and_a_withdrawal_show_on_the_next_page_of_a_running_server(tmp_path: Path, open_page) -> None:
    site = make_own_site(tmp_path, "after-a-student")

    def labels() -> list[str]:
        return page.get_by_label("Case").locator("option").all_inner_texts()

    def student() -> bytes:
        page.goto("/?case=1")
        page.wait_for_selector("#viewer.drawn")
        drawn = page.evaluate("fetch(document.querySelectorAll('.thumb img')[1].src).then(a => a.text())")
        assert isinstance(drawn, str)
        return drawn.encode()

    with serving(site) as address:
        page = open_page(address.partition("/?")[0], allow=("400 (Bad Request)",))
        look(page, address)
        names = [case.id for case in read_dataset(tmp_path / "data").labelled]
        assert labels() == names
        before = student()
        assert student() == before
        network = build_unet((4, 8), in_channels=1, out_channels=3, seed=77)
        (site / STUDENT_DIR / "bundle" / WEIGHTS).write_bytes(weights_to_bytes(network))
        assert student() != before
        staff_decisions.withdraw_patient(site, read_dataset(tmp_path / "data").labelled[1].id)
        page.goto("/?case=2")
        assert "case: got 2" in page.locator("main").inner_text()
        page.goto("/")
        assert labels() == [names[0], *names[2:]]
        assert "Not shown: 1 case of withdrawn" in page.locator("main").inner_text()
