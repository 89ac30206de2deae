"""Finds free TCP ports, creates Unix sockets for one user or group, and checks whether a server listens."""

from __future__ import annotations

import contextlib
import errno
import os
import random
import socket
from collections.abc import Iterator
from pathlib import Path

from common.objects import shared

PORTS = range(20_000, 32_768)
"""Ports that :func:`free_ports` may return. They are below the range from which Linux takes source ports of outgoing
connections."""

HOST_LIMIT = "a DNS name of letters, digits, hyphens and single dots, or an IP address"
"""Limit of a server's name, for errors."""

HOST_REMEDY = (
    "leave out https://, a port, brackets and a dot at the end; a name with an underscore fits no certificate, so use "
    "another name of the server"
)
"""Remedy for a text that is neither a DNS name nor an IP address."""


def free_ports(count: int, *, host: str = "127.0.0.1") -> tuple[int, ...]:
    """Return distinct TCP ports at which no program listens now, chosen at random from :data:`PORTS`.

    The system gives none of these ports to an outgoing connection. Another server could take one before the caller
    does, but this is unlikely.

    Args:
        count: Number of ports.
        host: Address on which they are free.

    Returns:
        Port numbers.

    Raises:
        OSError: If too few ports are free, or the host is no address of this machine.
    """
    with contextlib.ExitStack() as held:
        ports: list[int] = []
        for port in random.SystemRandom().sample(PORTS, len(PORTS)):
            if len(ports) == count:
                break
            listener = held.enter_context(socket.socket())
            try:
                listener.bind((host, port))
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    raise
                listener.close()
                continue
            ports.append(port)
        if len(ports) < count:
            raise OSError(errno.EADDRINUSE, f"fewer than {count} of the ports from {PORTS[0]} to {PORTS[-1]} are free")
        return tuple(ports)


def free_port() -> int:
    """Return one TCP port of :data:`PORTS` at which no program listens now."""
    return free_ports(1)[0]


@contextlib.contextmanager
def short(path: Path) -> Iterator[str]:
    """Provide an alternative name for a path that is short enough for a Unix socket (at most 107 bytes).

    The name uses an open descriptor of the folder, so it is valid only inside the with-block.

    Args:
        path: The path.

    Returns:
        A context with the short name.

    Raises:
        OSError: If the folder does not exist.
    """
    folder = os.open(path.parent, os.O_PATH | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{folder}/{path.name}"
    finally:
        os.close(folder)


def connect(path: Path, *, timeout_s: float | None = None) -> socket.socket:
    """Connect to a Unix socket; its path may be longer than the system's limit.

    Args:
        path: The socket.
        timeout_s: Longest wait in seconds; None to wait without a limit.

    Returns:
        The connection.

    Raises:
        OSError: If no program listens.
    """
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
    """Return whether a program listens at a Unix socket or a TCP port.

    Args:
        where: Path of the socket, or host.
        port: Port, if ``where`` is a host.

    Returns:
        True if a connection succeeds.
    """
    try:
        if isinstance(where, Path):
            connect(where, timeout_s=1.0).close()
        else:
            socket.create_connection((reachable(where), port), timeout=1.0).close()
    except OSError:
        return False
    return True


def answers_http(path: Path) -> bool:
    """Return whether an HTTP server answers at a Unix socket.

    Args:
        path: The socket.

    Returns:
        True if the reply is HTTP, with any status.
    """
    try:
        with connect(path, timeout_s=2.0) as client:
            client.sendall(b"GET / HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n")
            return client.recv(5) == b"HTTP/"
    except OSError:
        return False


def listen(path: Path) -> socket.socket:
    """Create a Unix socket for this user alone, or for the folder's group if the folder has the setgid bit.

    Args:
        path: The socket; an existing file is replaced.

    Returns:
        The listening socket.
    """
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
    """Return the address by which this machine reaches a server bound to ``bind``.

    Args:
        bind: The bound address.

    Returns:
        The loopback address for a wildcard, else ``bind``.

    >>> reachable("0.0.0.0"), reachable("10.0.0.7")
    ('127.0.0.1', '10.0.0.7')
    """
    return {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(bind, bind)
