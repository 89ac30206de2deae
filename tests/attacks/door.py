"""Runs the real gateway in its own process, before a stand-in for SuperLink that reads bodies and answers
``ok``.

Tests connect over TCP and TLS, and hold connections open, cut them or fill them.
"""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import ssl
import statistics
import sys
import time
from collections.abc import AsyncIterator, Coroutine, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric import ec

from common.node_auth import AdmittedNode, signed_headers, write_admitted
from common.objects import ObjectStore
from common.pki import (
    create_authority,
    create_node_keys,
    issue_server_certificate,
    load_node_key,
    read_node_public_key,
)
from common.process import Daemon, DaemonSpec, ProcessGroup, base_env
from common.sockets import accepts, free_ports

SUPERLINK = """
import sys
import uvicorn
async def app(scope, receive, send):
    size = 0
    while scope["type"] == "http":
        message = await receive()
        if message["type"] == "http.disconnect":
            return
        size += len(message.get("body", b""))
        if not message.get("more_body"):
            break
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
    await send({"type": "http.response.body", "body": b"ok"})
uvicorn.run(app, uds=sys.argv[1], log_level="critical", lifespan="off", ws="none")
"""
ROOT = Path(__file__).resolve().parents[2]
Reader, Writer = asyncio.StreamReader, asyncio.StreamWriter


@dataclass(frozen=True, kw_only=True)
class Door:
    """Holds a gateway on loopback that admitted the sites in ``keys``."""

    port: int
    gateway: Daemon
    keys: Mapping[str, ec.EllipticCurvePrivateKey]
    authority: Path
    store: ObjectStore

    def memory_mib(self) -> float:
        """Return the memory that the gateway's process uses now, in MiB."""
        for line in Path(f"/proc/{self.gateway.pid}/status").read_text().splitlines():
            if line.startswith("VmRSS:"):
                return int(line.split()[1]) / 1024
        raise AssertionError("the gateway is gone")

    @contextlib.asynccontextmanager
    async def connect(self) -> AsyncIterator[tuple[Reader, Writer]]:
        """Return a connection whose TLS handshake is done."""
        context = ssl.create_default_context(cafile=str(self.authority))
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port, ssl=context, server_hostname="localhost")
        try:
            yield reader, writer
        finally:
            writer.transport.abort()

    def head(self, site: str, method: str, path: str, *, length: int = 0, host: str = "localhost") -> bytes:
        """Return a request's head that ``site`` signed now."""
        headers = signed_headers(self.keys[site], method=method, path=path, now=datetime.now(UTC))
        lines = [f"{method} {path} HTTP/1.1", f"host: {host}", f"content-length: {length}"]
        return "\r\n".join((*lines, *(f"{name}: {value}" for name, value in headers.items()), "", "")).encode()

    async def ask(self, site: str, *, body: bytes = b"", path: str = "/v1/fleet/pull-messages") -> int:
        """Return the status of a site's request on a new connection; 0 if the connection was cut off."""
        try:
            async with asyncio.timeout(600), self.connect() as (reader, writer):
                writer.write(self.head(site, "POST", path, length=len(body)) + body)
                return await status(reader)
        except OSError:
            return 0


async def status(reader: Reader) -> int:
    """Return the status of the next answer; 0 if the connection was closed instead."""
    with contextlib.suppress(OSError):
        words = (await reader.readline()).split()
        return int(words[1]) if words else 0
    return 0


@contextlib.contextmanager
def door(root: Path, sites: tuple[str, ...] = ("north", "south")) -> Iterator[Door]:
    """Run a gateway over a stand-in for SuperLink; both end with the block."""
    identity = issue_server_certificate(create_authority(root / "ca"), root / "tls", names=["localhost", "127.0.0.1"])
    pairs = {site: create_node_keys(root / site) for site in sites}
    nodes = tuple(AdmittedNode(site=site, key=read_node_public_key(pair.public)) for site, pair in pairs.items())
    write_admitted(root / "nodes.json", nodes)
    (port,) = free_ports(1)
    store = ObjectStore(root / "objects")
    words = ("-P", "-m", "server.operations.gateway", "--port", str(port), "--fleet", "fleet.sock")
    files = {"objects": root / "objects", "nodes": root / "nodes.json"}
    files |= {"certificate": identity.certificate, "key": identity.key}
    argv = (sys.executable, *words, *(str(word) for name, path in files.items() for word in (f"--{name}", path)))
    daemons = (
        ("superlink", (sys.executable, "-c", SUPERLINK, "fleet.sock"), (root / "fleet.sock").is_socket),
        ("gateway", argv, lambda: accepts("127.0.0.1", port)),
    )
    with ProcessGroup() as group:
        started = [
            group.start(
                DaemonSpec(
                    role=role,
                    name="attacked",
                    argv=words,
                    env=base_env(PYTHONPATH=str(ROOT)),
                    cwd=root,
                    log=root / f"{role}.log",
                    ready=ready,
                )
            )
            for role, words, ready in daemons
        ]
        keys = {site: load_node_key(pair.private) for site, pair in pairs.items()}
        yield Door(port=port, gateway=started[1], keys=keys, authority=identity.authority, store=store)


async def answers(door: Door, site: str, count: int) -> tuple[list[int], float]:
    """Return statuses and median seconds of ``count`` requests of one site, in turn, each on a new connection.

    A request that is cut off is sent again up to twice, as a SuperNode does, and its seconds count from the first try.
    So a pause of a busy machine that is longer than the gateway's handshake limit does not fail a test.
    """
    statuses, seconds = [], []
    for _ in range(count):
        started = time.monotonic()
        for _ in range(3):
            if answer := await door.ask(site):
                break
        statuses.append(answer)
        seconds.append(time.monotonic() - started)
    return statuses, statistics.median(seconds)


@contextlib.contextmanager
def attacking(attack: Coroutine[None, None, None]) -> Iterator[None]:
    """Run an attack in its own process, so that its work delays no request of the other sites in this process."""
    process = multiprocessing.get_context("fork").Process(target=asyncio.run, args=(attack,), daemon=True)
    process.start()
    try:
        yield
        assert process.is_alive()  # it attacked until the end
    finally:
        process.kill()
        process.join()
        attack.close()
