"""Runs a real squid in front of a site: one that passes CONNECT, one that refuses, one that inspects TLS.
Needs root.
"""

from __future__ import annotations

import shutil
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from common.sockets import accepts, free_port
from tests.waiting import until

HELPER = Path("/usr/lib/squid/security_file_certgen")
CONF = """
http_port 127.0.0.1:{port} {bump}
{inspect}
tls_outgoing_options cafile={study_ca}
acl Open port {server}
http_access {allow} CONNECT Open
http_access allow localhost
visible_hostname proxy.hospital.example
cache deny all
access_log stdio:{folder}/access.log
cache_log {folder}/cache.log
pid_filename {folder}/squid.pid
coredump_dir {folder}
shutdown_lifetime 0 seconds
"""
BUMP = "ssl-bump cert={folder}/hospital.pem generate-host-certificates=on dynamic_cert_mem_cache_size=4MB"
INSPECT = """sslcrtd_program {helper} -s {folder}/db -M 4MB
acl step1 at_step SslBump1
ssl_bump peek step1
ssl_bump bump all"""


def readable_by_squid(folder: Path) -> None:
    """Let squid, which is another user, enter this folder and all above it."""
    for one in (folder, *folder.parents):
        if one.stat().st_mode & 0o005 != 0o005:
            one.chmod(one.stat().st_mode | 0o005)


@contextmanager
def squid(
    folder: Path, *, server: int, study_ca: Path, allow: str = "allow", inspects: bool = False, port: int = 0
) -> Iterator[int]:
    program = shutil.which("squid")
    if program is None or not HELPER.exists():
        pytest.skip("squid with TLS inspection is not installed: apt install squid-openssl")
    folder.mkdir()
    port, of = port or free_port(), {"folder": folder, "helper": HELPER}
    if inspects:
        key, certificate = folder / "hospital.key", folder / "hospital.crt"
        subprocess.run(
            [
                *("openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2"),
                *("-subj", "/CN=Hospital TLS inspection", "-keyout", str(key), "-out", str(certificate)),
                *("-addext", "keyUsage=critical,keyCertSign,cRLSign"),
            ],
            check=True,
            capture_output=True,
        )
        (folder / "hospital.pem").write_bytes(key.read_bytes() + certificate.read_bytes())
        subprocess.run([str(HELPER), "-c", "-s", str(folder / "db"), "-M", "4MB"], check=True, capture_output=True)
    bump, inspect = (BUMP.format(**of), INSPECT.format(**of)) if inspects else ("", "")
    more = {"port": port, "server": server, "study_ca": study_ca, "allow": allow, "bump": bump, "inspect": inspect}
    (folder / "squid.conf").write_text(CONF.format(**of, **more))
    subprocess.run(["chown", "-R", "proxy:proxy", str(folder)], check=True)
    with subprocess.Popen([program, "-N", "-f", str(folder / "squid.conf")]) as daemon:
        try:
            said = lambda: (folder / "cache.log").read_text()[-800:]  # noqa: E731
            until(lambda: accepts("127.0.0.1", port), said, timeout_s=60)
            yield port
        finally:
            daemon.send_signal(signal.SIGTERM)
