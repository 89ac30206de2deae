"""Tests which requests the server refuses, and what of the server can be reached at all, from a site's own network."""

from __future__ import annotations

import json
import re
import signal
import sys
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from common.pki import create_authority
from server.operations import provision
from tests.faults.deployment.parts import HOST, INTERNAL_PORT, PORT, STARTED_S, Federation, federation

pytestmark = [pytest.mark.faults, pytest.mark.slow]


@pytest.fixture(scope="module")
def up(made: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Federation]:
    """Start the server and site-1. Site-2 is admitted but not started, and tests act in the network of site-3."""
    with federation(made, tmp_path_factory.mktemp("refused")) as parties:
        parties.start("server")
        parties.recorded("server", "all-ready", count=1, timeout_s=STARTED_S)
        parties.admit("site-1")
        parties.admit("site-2")
        parties.start("site-1")
        parties.recorded("site-1", "all-ready", count=1, timeout_s=STARTED_S)
        yield parties


def node(up: Federation, site: str, *, more: str = "", **replaced: object) -> tuple[int, str]:
    """Run a SuperNode in site-3's network with some of ``site``'s settings replaced; return its exit code and log."""
    home, identity = up.root / "site-3" / "node", up.root / site / "node"
    others = ", ".join(f"{name}={value}" for name, value in replaced.items())
    program = f"""
import os, sys, time
from dataclasses import replace
from pathlib import Path
from client.operations.daemons import site_node, supernode
from common.pki import NodeKeys
from common.process import ProcessGroup
folder = Path({str(home)!r})
node = replace(site_node(Path({str(identity)!r}), socket=folder / "none"), folder=folder, {others})
spec = supernode(node, max_retries=2)
{more}
with ProcessGroup() as group:
    start = node.log.stat().st_size if node.log.exists() else 0
    daemon = group.begin(spec)
    status = daemon.wait(45)
    print(status, flush=True)
    print(node.log.read_text()[start:])
"""
    done = up.inside("site-3", sys.executable, "-c", program)
    assert done.stdout, done.stderr
    status, _, log = done.stdout.partition("\n")
    return (int(status) if status != "None" else -1), log


def gateway_log(up: Federation) -> str:
    return (up.workspace.flower_dir / "logs" / "gateway.log").read_text()


def test_a_node_that_nobody_admitted_is_refused_and_both_sides_can_read_why(up: Federation) -> None:
    status, log = node(up, "site-3")
    assert status not in (0, -1)
    assert "[code: 2004] refused: unknown-key" in log
    assert re.search(r"refused reason=unknown-key path=/v1/fleet/activate-node peer=10\.77\.0\.13", gateway_log(up))


def test_a_node_without_a_key_is_refused(up: Federation) -> None:
    """Flower makes a key for such a node and asks for its registration. Our server has no such route."""
    keyless = (
        "argv = list(spec.argv); i = argv.index('--auth-supernode-private-key'); del argv[i:i + 2]\n"
        "spec = replace(spec, argv=tuple(argv))"
    )
    status, log = node(up, "site-2", more=keyless)
    assert "SuperNode ID:" not in log
    assert "reason=unknown-key path=/v1/fleet/register-node" in gateway_log(up)
    assert status != -1


def test_a_server_that_another_authority_vouches_for_is_not_trusted(up: Federation, tmp_path: Path) -> None:
    other = create_authority(tmp_path).certificate
    _, log = node(up, "site-2", root_certificates=f"Path({str(other)!r})")
    assert "certificate verify failed" in log
    assert "SuperNode ID:" not in log


def test_plain_http_gets_no_answer(up: Federation) -> None:
    insecure = (
        "argv = list(spec.argv)\n"
        "for flag in ('--auth-supernode-private-key', '--root-certificates'):\n"
        "    i = argv.index(flag); del argv[i:i + 2]\n"
        "spec = replace(spec, argv=(*argv, '--insecure'))"
    )
    _, log = node(up, "site-2", more=insecure)
    assert "SuperNode ID:" not in log
    done = up.inside("site-3", sys.executable, "-c", asked(f"http://{HOST}:{PORT}/public/" + "0" * 64))
    assert not done.stdout.strip().isdigit(), done.stdout


def asked(url: str, *, body: str = "None", headers: str = "{}") -> str:
    return f"""
import ssl, urllib.request, urllib.error
context = ssl.create_default_context(); context.check_hostname = False; context.verify_mode = ssl.CERT_NONE
request = urllib.request.Request({url!r}, data={body}, headers={headers})
try:
    print(urllib.request.urlopen(request, timeout=10, context=context).status)
except urllib.error.HTTPError as error:
    print(error.code)
except OSError as error:
    print(type(error).__name__)
"""


@pytest.mark.parametrize(
    "path", ["/v1/control/start-run", "/v1/control/list-nodes", "/v1/runtime/acquire-task", "/docs", "/health", "/"]
)
def test_control_runtime_and_documents_cannot_be_reached_from_a_site(up: Federation, path: str) -> None:
    done = up.inside("site-1", sys.executable, "-c", asked(f"https://{HOST}:{PORT}{path}", body="b''"))
    assert done.stdout.strip() == "401"
    # A request with the site's own signature finds no such route either.
    signed = f"""
from datetime import UTC, datetime
from pathlib import Path
from common.node_auth import signed_headers
from common.pki import load_node_key
key = load_node_key(Path({str(up.root / "site-1" / "node" / "keys" / "node")!r}))
headers = signed_headers(key, method="POST", path={path!r}, now=datetime.now(UTC))
""" + asked(f"https://{HOST}:{PORT}{path}", body="b''", headers="headers")
    assert up.inside("site-1", sys.executable, "-c", signed).stdout.strip() in ("404", "405")


def signed(up: Federation, path: str, *, more: str = "{}", sent: int = 1) -> list[str]:
    """Send a request signed by site-1, with ``more`` headers, ``sent`` times; return the statuses of the answers."""
    program = f"""
from datetime import UTC, datetime
from pathlib import Path
from common.node_auth import signed_headers
from common.pki import load_node_key
key = load_node_key(Path({str(up.root / "site-1" / "node" / "keys" / "node")!r}))
headers = signed_headers(key, method="POST", path={path!r}, now=datetime.now(UTC)) | {more}
"""
    request = asked(f"https://{HOST}:{PORT}{path}", body="b'x'", headers="headers")
    return up.inside("site-1", sys.executable, "-c", program + sent * request).stdout.split()


def test_a_message_that_was_overheard_and_is_sent_again_is_refused(up: Federation) -> None:
    first, again = signed(up, "/v1/fleet/pull-messages", sent=2)
    assert first != "401"
    assert again == "401"
    assert "reason=replayed path=/v1/fleet/pull-messages peer=10.77.0.11" in gateway_log(up)


def test_a_message_that_is_too_large_is_refused(up: Federation) -> None:
    assert signed(up, "/v1/fleet/pull-messages", more="{'content-length': str(2 << 20)}") == ["413"]
    assert "reason=too-large path=/v1/fleet/pull-messages" in gateway_log(up)


SCAN = """
import socket
found = []
for port in range(1, 65536):
    with socket.socket() as one:
        one.settimeout(2)
        if one.connect_ex(("%s", port)) == 0:
            found.append(port)
print(found)
"""


def test_one_port_is_open_to_a_site_and_none_at_a_site_to_the_server(up: Federation) -> None:
    assert json.loads(up.inside("site-1", sys.executable, "-c", SCAN % HOST).stdout) == [PORT]
    assert json.loads(up.inside("server", sys.executable, "-c", SCAN % "10.77.0.11").stdout) == []
    inside = json.loads(up.inside("server", sys.executable, "-c", SCAN % "127.0.0.1").stdout)
    assert INTERNAL_PORT in inside  # the scan finds what there is


def test_a_clock_that_is_ten_minutes_off_is_named_to_both_sides(up: Federation) -> None:
    found = sorted(Path("/usr/lib").glob("*/faketime/libfaketime.so.1"))
    if not found:
        pytest.skip("needs libfaketime")
    for offset in ("-10m", "+10m"):
        wrong = f"spec = replace(spec, env={{**spec.env, 'LD_PRELOAD': {str(found[0])!r}, 'FAKETIME': {offset!r}}})"
        _, log = node(up, "site-2", more=wrong)
        assert "refused: clock" in log
    assert "reason=clock path=/v1/fleet/activate-node peer=10.77.0.13" in gateway_log(up)


def test_a_certificate_that_ran_out_is_renewed_and_nothing_is_started_again(up: Federation) -> None:
    gateway = up.parties["server"].pid("gateway")
    past = datetime.now(UTC) - timedelta(days=40)
    provision.renew(up.workspace, valid_days=30, now=past)
    time.sleep(2.0)
    _, log = node(up, "site-2")
    assert "certificate has expired" in log
    done = up.command("provision", "renew", str(up.workspace.root))
    assert done.returncode == 0, done.stderr
    time.sleep(2.0)
    status, log = node(up, "site-2")
    assert "SuperNode ID:" in log  # the site's old kit still fits the renewed certificate
    assert status == -1  # the node ran until the test ended it
    assert up.parties["server"].pid("gateway") == gateway
    assert up.parties["site-1"].count("daemon-ended") == 0  # the connected site noticed nothing


def test_a_site_behind_an_http_proxy_connects_and_fetches(up: Federation) -> None:
    """The site's environment names only the proxy, and the test counts the requests that pass through it."""
    proxy = Path(__file__).with_name("http_proxy.py")
    counted = up.root / "proxy.log"
    program = f"""
import os, subprocess, sys, time
proxy = subprocess.Popen([sys.executable, {str(proxy)!r}, "3128", {str(counted)!r}])
time.sleep(1.5)
os.environ["HTTPS_PROXY"] = "http://127.0.0.1:3128"
try:
    from pathlib import Path
    from dataclasses import replace
    from client.operations.daemons import site_node, supernode
    from client.site.fetch import PublicObjects
    from client.policy import load_site
    from common.process import ProcessGroup
    from server.study.workspace import Workspace
    folder = Path({str(up.root / "site-2")!r})
    volume = Workspace(Path({str(up.workspace.root)!r})).volumes()[0]
    print(len(PublicObjects(load_site(folder)).get(volume)))
    with ProcessGroup() as group:
        group.start(supernode(site_node(folder / "node", socket=folder / "none")))
        time.sleep(4)
finally:
    proxy.terminate()
    proxy.wait()
"""
    done = up.inside("site-2", sys.executable, "-c", program)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout.split()[0]) > 1000
    lines = counted.read_text().splitlines()
    assert len(lines) >= 2
    assert set(lines) == {f"CONNECT {HOST}:{PORT}"}


def test_a_revoked_site_is_out_within_a_minute_and_stays_out(up: Federation) -> None:
    party = up.parties["site-1"]
    done = up.command("provision", "revoke", str(up.workspace.root), "site-1")
    assert done.returncode == 0, done.stderr
    assert "refuses its key" in done.stdout
    up.recorded("site-1", "daemon-ended", "supernode", count=1, timeout_s=60)
    up.recorded("site-1", "daemon-ended", "supernode", count=2, timeout_s=60)
    assert party.count("daemon-ready", "supernode") == 1
    assert "refused: unknown-key" in (up.root / "site-1" / "node" / "logs" / "supernode.log").read_text()
    listed = json.loads(up.command("provision", "list", str(up.workspace.root), "--json").stdout)
    assert [site["admitted"] for site in listed["sites"]] == [False, True]
    up.stop("site-1", signal.SIGTERM)
