"""Finds free TCP ports, makes Unix sockets for one user or group, and checks whether a port or socket answers."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator
from pathlib import Path

from common.objects import shared


def free_ports(count: int, *, host: str = "127.0.0.1") -> tuple[int, ...]:
    """``count`` distinct TCP ports nobody listens on right now. Another program may still take one before its use."""
    with contextlib.ExitStack() as held:
        ports = []
        for _ in range(count):
            listener = held.enter_context(socket.socket())
            listener.bind((host, 0))
            ports.append(int(listener.getsockname()[1]))
        return tuple(ports)


def free_port() -> int:
    """One TCP port nobody listens on right now."""
    return free_ports(1)[0]


@contextlib.contextmanager
def short(path: Path) -> Iterator[str]:
    """A name of ``path`` that is short enough for a Unix socket, which takes at most 107 bytes.

    The name is valid inside the block: it goes through a descriptor of the folder. The folder must exist, else OSError.
    """
    folder = os.open(path.parent, os.O_PATH | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{folder}/{path.name}"
    finally:
        os.close(folder)


def connect(path: Path, *, timeout_s: float | None = None) -> socket.socket:
    """A connection to the Unix socket at ``path``, however long the path is; OSError where nobody listens."""
    client = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    client.settimeout(timeout_s)
    try:
        with short(path) as name:
            client.connect(name)
    except OSError:
        client.close()
        raise
    return client


def accepts(where: Path | str, port: int = 0) -> bool:
    """Whether somebody listens: at a Unix socket's path, or on ``port`` of the host ``where``."""
    try:
        if isinstance(where, Path):
            connect(where, timeout_s=1.0).close()
        else:
            socket.create_connection((reachable(where), port), timeout=1.0).close()
    except OSError:
        return False
    return True


def answers_http(path: Path) -> bool:
    """Whether an HTTP server answers at a Unix socket's path, whatever it says."""
    try:
        with connect(path, timeout_s=2.0) as client:
            client.sendall(b"GET / HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n")
            return client.recv(5) == b"HTTP/"
    except OSError:
        return False


def listen(path: Path) -> socket.socket:
    """A Unix socket at ``path``, which this user alone can connect to or, in a folder that was given to a group, that
    group; what lay there before is replaced."""
    path.unlink(missing_ok=True)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    before = os.umask(0o117 if shared(path.parent) else 0o177)
    try:
        with short(path) as name:
            listener.bind(name)
    finally:
        os.umask(before)
    listener.listen(2048)
    return listener


def reachable(bind: str) -> str:
    """The address by which this machine reaches what is bound to ``bind``."""
    return {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(bind, bind)
