"""Attack: a malicious server, or somebody in between, redirects requests to another address.

| attack | defence |
|---|---|
| it redirects a site's worker, with its signature, into the hospital's network | no request follows a redirection |
| it redirects to plain HTTP, to a file, or to data in the address | only https is opened |
| another part of the program makes requests in another way | all use one opener; a test finds any other |
"""

from __future__ import annotations

import ast
import ssl
import urllib.error
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from client.operations.readiness import _server
from client.policy import load_site
from client.site import fetch
from client.site.fetch import PublicObjects
from common.errors import InvalidInput
from common.https import opener
from server.dashboard.notify import Webhook
from server.dashboard.oidc import Provider, Roles, Settings
from server.dashboard.views.alarms import Alarm
from tests.client.operations.answering import answering
from tests.small_servers import http_server, serving

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
Heard = list[tuple[str, dict[str, str]]]


@contextmanager
def inner() -> Iterator[tuple[int, Heard]]:
    """Yield a server in the hospital's own network, and the requests that reach it over plain HTTP."""
    heard: Heard = []

    class Inner(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            heard.append((self.path, dict(self.headers)))
            self.send_response(200)
            self.send_header("content-length", "6")
            self.end_headers()
            self.wfile.write(b"secret")

        do_POST = do_GET  # noqa: N815

    with serving(http_server(Inner)) as server:
        yield server.server_port, heard


def redirecting(status: int, target: str, asked: list[str]) -> type[BaseHTTPRequestHandler]:
    class Redirect(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            self.send_response(status)
            self.send_header("location", target)
            self.send_header("content-length", "0")
            self.end_headers()

        do_POST = do_GET  # noqa: N815

    return Redirect


def redirected(status: int, port: int, asked: list[str]) -> AbstractContextManager[ThreadingHTTPServer]:
    return serving(http_server(redirecting(status, f"http://127.0.0.1:{port}/admin", asked)))


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetch.time, "sleep", lambda _seconds: None)
    for name in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY", "no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
def test_a_redirected_worker_sends_no_request_to_the_other_address(tmp_path: Path, status: int) -> None:
    asked: list[str] = []
    with (
        inner() as (port, heard),
        answering(tmp_path, redirecting(status, f"http://127.0.0.1:{port}/admin", asked)) as (site, _, _),
    ):
        objects, study = PublicObjects(load_site(site)), "a" * 64
        for ask in (lambda: objects.get("a" * 64), lambda: objects.statement(study), lambda: objects.peers(study)):
            with pytest.raises(InvalidInput, match="cannot be fetched"):
                ask()
        findings = _server(load_site(site), datetime.now(UTC))  # what `site doctor` asks
    assert heard == []
    assert len(asked) == 4  # each is asked once, because a second answer would be the same
    assert [finding.state.name for finding in findings if finding.check == "admission"] == ["FAIL"]


def test_a_webhook_that_redirects_counts_as_failed(tmp_path: Path) -> None:
    asked: list[str] = []
    with inner() as (port, heard), redirected(307, port, asked) as server:
        hook = Webhook(f"http://127.0.0.1:{server.server_port}/", study="s", clock=lambda: 1e9)
        hook.tell([Alarm("quorum", "critical", "title", "text")])
    assert (heard, asked, hook.failing) == ([], ["/"], True)


@pytest.mark.parametrize(
    "url", ["file:///etc/hostname", "data:text/plain,secret", "ftp://127.0.0.1/x", "http://127.0.0.1:1/"]
)
def test_nothing_but_https_is_opened(url: str) -> None:
    with pytest.raises(urllib.error.URLError, match="unknown url type"):
        opener(ssl.create_default_context()).open(url, timeout=2)


ALLOWED = {"common/https.py", "docker/health.py"}
"""Files that may make requests: the opener, and the containers' checks, which follow no redirection."""


def test_all_other_requests_use_this_opener() -> None:
    """No other file uses urllib's openers, requests, or httpx with redirections."""
    wrong = {"urlopen", "build_opener", "install_opener", "URLopener", "HTTPRedirectHandler", "urlretrieve"}
    found = []
    for path in (
        path for name in ("common", "client", "server", "consilium", "docker") for path in (ROOT / name).rglob("*.py")
    ):
        name = path.relative_to(ROOT).as_posix()
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Attribute) and node.attr in wrong and name not in ALLOWED:
                found.append((name, node.attr))
            if isinstance(node, ast.keyword) and node.arg in ("follow_redirects", "allow_redirects"):
                assert isinstance(node.value, ast.Constant), name
                assert node.value.value is False, name
            if isinstance(node, ast.Import) and any(alias.name in ("requests", "aiohttp") for alias in node.names):
                found.append((name, "import"))
    assert found == []


def test_a_provider_that_redirects_the_dashboard_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("authlib")
    asked: list[str] = []
    (tmp_path / "secret").write_text("s")
    with inner() as (port, heard), redirected(302, port, asked) as server:
        settings = Settings(
            issuer=f"http://127.0.0.1:{server.server_port}",
            client_id="c",
            client_secret_file="secret",
            role_claim="roles",
            roles=Roles(operator=("op",)),
            root=tmp_path,
        )
        with pytest.raises(InvalidInput, match="does not answer"):
            Provider(settings, clock=lambda: 1.0).begin(redirect="http://localhost/login/oidc/back", target="/")
    assert (heard, len(asked)) == ([], 1)
