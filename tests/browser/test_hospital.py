"""A hospital's own page in Chromium: five states, two widths, two themes, nothing that axe finds."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from common.sockets import free_ports
from tests.own_site import STATES, make_own_site

pytestmark = pytest.mark.slow

AXE = Path(__file__).parent / "vendor" / "axe.min.js"
SIZES = ((1440, 900), (390, 844))


@contextmanager
def serving(site: Path) -> Iterator[str]:
    """``consilium site dashboard`` until the block ends; the address that it printed."""
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
    """Open the printed address, as soon as the server that printed it listens."""
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
        for width, height in SIZES:
            for dark in (False, True):
                page = open_page(origin, width=width, height=height, dark=dark)
                look(page, address)
                if state == "after-a-student":
                    page.goto("/?case=1")
                    page.wait_for_selector("#viewer.drawn")
                    assert page.locator(".thumb img").count() == 4
                    page.get_by_label("adapted", exact=True).check()
                assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
                page.evaluate(AXE.read_text())
                run = "axe.run({ runOnly: ['wcag2a', 'wcag2aa', 'wcag21a', 'wcag21aa'] })"
                found = page.evaluate(run)["violations"]
                assert [(one["id"], [node["target"] for node in one["nodes"]]) for one in found] == []
                page.screenshot(path=pictures / f"{state}-{width}{'-dark' if dark else ''}.png", full_page=True)
