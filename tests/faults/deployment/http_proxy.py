"""Runs a hospital's HTTP proxy: ``http_proxy.py PORT LOG [BYTES_PER_SECOND]`` forwards CONNECT, at this rate
if given.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path


async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, rate: int) -> None:
    while chunk := await reader.read(4096):
        writer.write(chunk)
        await writer.drain()
        if rate:
            await asyncio.sleep(len(chunk) / rate)
    writer.close()


async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, log: Path, rate: int) -> None:
    line = (await reader.readuntil(b"\r\n\r\n")).split(b"\r\n")[0].decode()
    method, target, _ = line.split()
    with log.open("a") as out:
        out.write(f"{method} {target}\n")
    host, _, port = target.rpartition(":")
    up_reader, up_writer = await asyncio.open_connection(host, int(port))
    writer.write(b"HTTP/1.1 200 Connection established\r\n\r\n")
    await asyncio.gather(pump(reader, up_writer, rate), pump(up_reader, writer, rate), return_exceptions=True)


async def main() -> None:
    port, log, rate = int(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]) if len(sys.argv) > 3 else 0
    server = await asyncio.start_server(lambda r, w: serve(r, w, log, rate), "127.0.0.1", port)
    await server.serve_forever()


asyncio.run(main())
