"""Tests a site behind a real squid that passes CONNECT, refuses it, or inspects TLS.

Needs root and Debian's squid-openssl. Run by make test-hospital.
"""

from __future__ import annotations

import ssl
from collections.abc import Iterator
from datetime import UTC, datetime
from email.utils import format_datetime
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import pytest

from client.operations.findings import CheckResult, State
from client.operations.readiness import check_site
from client.policy import load_site
from client.site.fetch import PublicObjects
from common.canonical import sha256_bytes
from common.errors import InvalidInput
from tests.client.operations.answering import answering
from tests.hospital.squid import readable_by_squid, squid

pytestmark = pytest.mark.hospital
OBJECT = b"a public volume"


class Server(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        found = self.path.endswith(sha256_bytes(OBJECT))
        self.send_response_only(200 if found else 404)
        self.send_header("date", format_datetime(datetime.now(UTC)))
        self.send_header("content-length", str(len(OBJECT) if found else 0))
        self.end_headers()
        self.wfile.write(OBJECT if found else b"")

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Path, int, Path]]:
    """Yield the site's directory, the server's port, and a folder for a proxy's files."""
    readable_by_squid(tmp_path)
    with answering(tmp_path, Server) as (site, workspace, _context):
        yield site, workspace.endpoint().port, tmp_path


def found(site: Path, name: str) -> CheckResult:
    return next(one for one in check_site(site) if one.check == name)


def fetched(site: Path) -> bytes:
    return PublicObjects(load_site(site)).get(sha256_bytes(OBJECT))


def test_a_proxy_that_passes_connect_is_named_and_public_objects_come_through(
    world: tuple[Path, int, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    site, server, root = world
    with squid(root / "squid", server=server, study_ca=site / "node" / "ca.crt") as port:
        monkeypatch.setenv("https_proxy", f"http://ward:secret@127.0.0.1:{port}")
        network = found(site, "network")
        assert network.ok
        assert network.text.endswith(f"through the proxy 127.0.0.1:{port}")
        assert fetched(site) == OBJECT
    assert f"CONNECT localhost:{server}" in (root / "squid" / "access.log").read_text()


def test_a_proxy_that_refuses_or_is_down_is_named_with_what_to_do(
    world: tuple[Path, int, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    site, server, root = world
    with squid(root / "squid", server=server, study_ca=site / "node" / "ca.crt", allow="deny") as port:
        monkeypatch.setenv("https_proxy", f"http://ward:secret@127.0.0.1:{port}")
        refused = found(site, "network")
    down = found(site, "network")
    for network in (refused, down):
        assert network.state is State.FAIL
        assert f"127.0.0.1:{port}" in network.text
        assert "secret" not in network.text + network.remedy
    for word in ("CONNECT", f"127.0.0.1:{port}"):
        assert word in refused.remedy
    for word in (f"127.0.0.1:{port}", "HTTPS_PROXY"):
        assert word in down.remedy


def test_a_proxy_that_inspects_tls_is_refused_until_the_hospital_s_authority_is_trusted(
    world: tuple[Path, int, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    site, server, root = world
    trusted = site / "node" / "ca.crt"
    study_ca = root / "study-ca.crt"
    study_ca.write_bytes(trusted.read_bytes())
    study_ca.chmod(0o644)
    with squid(root / "squid", server=server, study_ca=study_ca, inspects=True) as port:
        monkeypatch.setenv("https_proxy", f"http://127.0.0.1:{port}")
        before = next(one for one in check_site(site) if one.check in ("certificate", "network") and not one.ok)
        assert f"through the proxy 127.0.0.1:{port}" in before.text
        assert "node/ca.crt" in before.remedy
        with pytest.raises((InvalidInput, OSError, ssl.SSLError)):
            fetched(site)
        with trusted.open("ab") as stream:
            stream.write((root / "squid" / "hospital.crt").read_bytes())
        after = found(site, "network")
        assert after.ok, after
        assert found(site, "admission").ok
        assert fetched(site) == OBJECT
