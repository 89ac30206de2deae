"""Provides a recorded study, its dashboard in a separate process, and Debian's Chromium to look at it."""

from __future__ import annotations

import json
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from benchmarks.run import process_cpu_s
from common.sockets import free_ports
from server.dashboard.auth import Role, UserFile
from tests.dashboard_study import Recorded, make_study_directory

CHROMIUM = Path("/usr/bin/chromium")
ARGUMENTS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
PASSWORD = "a long enough secret"


@dataclass(frozen=True)
class Dashboard:
    """Holds a running dashboard: its address, its process, its state directory."""

    url: str
    process: subprocess.Popen
    state: Path

    @property
    def cpu_s(self) -> float:
        """Return the process's user and system time so far, from /proc."""
        return process_cpu_s(self.process.pid)

    def health(self) -> dict:
        with urllib.request.urlopen(f"{self.url}/healthz", timeout=600) as answer:
            return json.load(answer)


@pytest.fixture(scope="session")
def users_text(tmp_path_factory) -> bytes:
    """Return the users file with an operator, ada, and a privacy officer, paul."""
    path = tmp_path_factory.mktemp("users") / "users.json"
    UserFile(path).add("ada", Role.OPERATOR, PASSWORD)
    UserFile(path).add("paul", Role.PRIVACY_OFFICER, PASSWORD)
    return path.read_bytes()


@contextmanager
def serving(
    study: Path,
    state: Path,
    *extra: str,
    timeout_s: float = 600.0,
    command: tuple[str, ...] = (sys.executable,),
    port: int = 0,
    readable: bool = True,
) -> Iterator[Dashboard]:
    """Run ``consilium dashboard`` over a study's directory until the block ends; wait until it has read the study.

    ``readable`` states whether the ledger is expected to verify.
    """
    port = port or free_ports(1, host="127.0.0.1")[0]
    program = "from consilium.cli.main import main; main()"
    arguments = ["-P", "-c", program, "dashboard", "--study", str(study), "--state", str(state), "--port", str(port)]
    # A file, because an unread pipe would fill and block the process.
    with (said := state / "stderr.log").open("wb") as log:
        process = subprocess.Popen([*command, *arguments, *extra], stdout=subprocess.DEVNULL, stderr=log)
    dashboard = Dashboard(f"http://127.0.0.1:{port}", process, state)
    try:
        until = time.monotonic() + timeout_s
        while True:
            try:
                if dashboard.health()["up_to_date"]:
                    break
            except urllib.error.HTTPError as error:
                if not readable and not json.load(error)["ledger_readable"]:
                    break
            except (urllib.error.URLError, ConnectionError):
                pass
            if process.poll() is not None or time.monotonic() > until:
                process.kill()
                raise AssertionError(f"the dashboard did not come up: {said.read_text()}")
            time.sleep(0.1)
        yield dashboard
    finally:
        process.terminate()
        try:
            process.wait(timeout=600)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


@pytest.fixture(scope="session")
def recorded(tmp_path_factory) -> Recorded:
    """Return a study that was run to its bundle."""
    study = make_study_directory(tmp_path_factory.mktemp("recorded"))
    study.run()
    return study


@pytest.fixture(scope="session")
def dashboard(recorded: Recorded, users_text: bytes, tmp_path_factory) -> Iterator[Dashboard]:
    """Yield the dashboard of the recorded study."""
    state = tmp_path_factory.mktemp("dashboard-state")
    (state / "users.json").write_bytes(users_text)
    with serving(recorded.workspace.root, state) as running:
        yield running


@pytest.fixture(scope="module")
def browser():
    """Yield Chromium without a window; its event loop ends with these tests, since other tests run their own."""
    if not CHROMIUM.exists():
        pytest.skip(f"no {CHROMIUM}: install Debian's chromium package to run the browser tests")
    playwright = pytest.importorskip("playwright.sync_api")
    with playwright.sync_playwright() as run:
        chromium = run.chromium.launch(executable_path=str(CHROMIUM), args=ARGUMENTS)
        yield chromium
        chromium.close()


@dataclass
class Watched:
    """Collects a page's console messages and requests during a test."""

    console: list[str]
    requests: list[str]
    failed: list[str]


@pytest.fixture
def open_page(browser) -> Iterator[Callable]:
    """Yield a function that opens pages; at the end no page may have logged an error or requested another host."""
    opened: list[tuple] = []

    def make(url: str, *, width: int = 1280, height: int = 800, dark: bool = False, allow: tuple[str, ...] = ()):
        context = browser.new_context(
            viewport={"width": width, "height": height}, color_scheme="dark" if dark else "light", base_url=url
        )
        context.set_default_timeout(120_000)  # the machine may be slow
        page = context.new_page()
        watched = Watched([], [], [])
        page.on(
            "console", lambda message: message.type in ("error", "warning") and watched.console.append(message.text)
        )
        page.on("pageerror", lambda error: watched.console.append(str(error)))
        page.on("request", lambda request: watched.requests.append(request.url))
        opened.append((context, watched, url, allow))
        return page

    yield make
    for context, watched, url, allow in opened:
        context.close()
        said = [text for text in watched.console if not any(word in text for word in allow)]
        assert said == []
        assert [asked for asked in watched.requests if not asked.startswith((url, "data:", "blob:"))] == []


def sign_in(page, name: str = "ada", *, password: str = PASSWORD, target: str = "/login") -> None:
    """Fill in and send the sign-in form."""
    page.goto(target)
    page.get_by_label("Name").fill(name)
    page.get_by_label("Password").fill(password)
    page.get_by_role("button", name="Sign in").click()
    page.wait_for_load_state()
