"""Sends security events to a rotated file of JSON lines, the local syslog or journald, or a syslog server.

The followers (:mod:`common.security_log.follow`) call it. A target is written as ``file:PATH``, ``syslog``
(``/dev/log``), ``journald``, ``udp://HOST:PORT``, ``tcp://HOST:PORT`` or ``tls://HOST:PORT``. Syslog servers receive
messages in the format of RFC 5424; over TCP and TLS each message is preceded by its length (RFC 6587, RFC 5425). Every
sink raises OSError if it cannot send a record; the follower then tries again later.
"""

from __future__ import annotations

import os
import select
import socket
import ssl
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import urlsplit

from common.errors import InvalidInput
from common.objects import append_line
from common.security_log.events import SEVERITIES, line_of

TARGETS = "file:PATH, syslog, journald, udp://HOST:PORT, tcp://HOST:PORT, tls://HOST:PORT"
DEV_LOG = "/dev/log"
JOURNAL = "/run/systemd/journal/socket"
MAX_BYTES, KEPT = 16 << 20, 8
AUTHPRIV = 10
"""Syslog's facility for private security messages."""
TIMEOUT_S = 10.0
IDENTIFIER = "consilium"


class Sink(Protocol):
    """A target that takes log records one by one."""

    def send(self, record: Mapping[str, Any]) -> None:
        """Send one record to the target.

        Args:
            record: The result of :func:`~common.security_log.events.log_record`.

        Raises:
            OSError: If the record could not be sent.
        """


def open_sink(target: str) -> Sink:
    """Return the sink of a target.

    Args:
        target: The target, in one of the forms of :data:`TARGETS`.

    Returns:
        The sink; no connection or file is opened yet.

    Raises:
        InvalidInput: If the text has none of these forms.
    """
    if target == "syslog":
        return LocalSyslog(DEV_LOG)
    if target == "journald":
        return Journal(JOURNAL)
    if target.startswith("file:") and target != "file:":
        return RotatedFile(Path(target.removeprefix("file:")))
    try:
        found = urlsplit(target)
        scheme, host, port = found.scheme, found.hostname, found.port
    except ValueError:
        scheme, host, port = "", None, None
    if scheme in ("udp", "tcp", "tls") and host and port and target == f"{scheme}://{_netloc(host)}:{port}":
        return RemoteSyslog(scheme, host, port)
    raise InvalidInput("target of the security log", value=target, limit=TARGETS)


def remedy_of(target: str) -> str:
    """Return what to do about a target that accepts no line.

    Args:
        target: The target, in one of the forms of :data:`TARGETS`.

    Returns:
        The remedy.
    """
    scheme, _, rest = target.partition(":")
    match scheme:
        case "syslog":
            return f"start the syslog daemon of this machine, which listens at {DEV_LOG}, or give another --log-to"
        case "journald":
            return "check that systemd-journald runs on this machine, or give another --log-to"
        case "file":
            return f"let user {os.getuid()} write {rest} on a disk with room, or give another --log-to"
        case _:
            return f"check that {rest.removeprefix('//')} accepts {scheme} connections from here, or correct --log-to"


def _netloc(host: str) -> str:
    return f"[{host}]" if ":" in host else host


class RotatedFile:
    """A rotated file of JSON lines. Its mode is always 0640: the owner writes it, and the group may read it.

    A file that would exceed ``max_bytes`` is renamed to ``PATH.1``; an earlier ``PATH.1`` becomes ``PATH.2``, and so on
    up to ``PATH.kept``.

    Args:
        path: The file.
        max_bytes: Largest size of a file, in bytes.
        kept: Number of older files to keep.
    """

    def __init__(self, path: Path, *, max_bytes: int = MAX_BYTES, kept: int = KEPT) -> None:
        self._path, self._max_bytes, self._kept = path, max_bytes, kept

    def send(self, record: Mapping[str, Any]) -> None:
        """Append one record as a line; rotate the file first if it would become too large."""
        line = line_of(record).encode() + b"\n"
        self._path.parent.mkdir(parents=True, exist_ok=True)
        if self._path.exists() and self._path.stat().st_size + len(line) > self._max_bytes:
            for number in range(self._kept - 1, 0, -1):
                older = Path(f"{self._path}.{number}")
                if older.exists():
                    older.replace(f"{self._path}.{number + 1}")
            self._path.replace(f"{self._path}.1")
        append_line(self._path, line, mode=0o640)


class LocalSyslog:
    """The syslog daemon of this machine, in the form of ``syslog(3)``."""

    def __init__(self, path: str) -> None:
        self._path = path

    def send(self, record: Mapping[str, Any]) -> None:
        """Send one record to the syslog daemon."""
        text = f"<{_priority(record)}>{IDENTIFIER}[{os.getpid()}]: {line_of(record)}"
        _datagram(self._path, text.encode())


class Journal:
    """systemd's journal, by its native protocol. The message is the log line; further fields allow searches."""

    def __init__(self, path: str) -> None:
        self._path = path

    def send(self, record: Mapping[str, Any]) -> None:
        """Send one record to the journal."""
        fields = {
            "MESSAGE": line_of(record),
            "PRIORITY": SEVERITIES[record["severity"]],
            "SYSLOG_FACILITY": AUTHPRIV,
            "SYSLOG_IDENTIFIER": IDENTIFIER,
            "CONSILIUM_EVENT": record["event"],
            "CONSILIUM_PARTY": record["party"],
            "CONSILIUM_NAME": record["name"],
        }
        _datagram(self._path, "".join(f"{name}={value}\n" for name, value in fields.items()).encode())


class RemoteSyslog:
    """A syslog server that receives RFC 5424 messages over UDP, TCP or TLS.

    With TLS, the server's certificate is checked against the system's certificate authorities. The connection is kept
    open, and opened again after a failure. Over UDP and TCP, lines may be lost unnoticed if the network fails; to avoid
    this, use TLS, or send to the syslog daemon of this machine and let it forward.
    """

    def __init__(self, scheme: str, host: str, port: int) -> None:
        self._scheme, self._host, self._port = scheme, host, port
        self._connection: socket.socket | None = None

    def send(self, record: Mapping[str, Any]) -> None:
        """Send one record; open the connection first if there is none.

        Raises:
            OSError: If the server cannot be reached or the connection breaks.
        """
        text = (
            f"<{_priority(record)}>1 {record['time']} {socket.gethostname()} {IDENTIFIER} {os.getpid()} "
            f"{record['event']} - {line_of(record)}"
        ).encode()
        try:
            if self._connection is not None and self._scheme != "udp" and _ended(self._connection):
                self.close()
            self._connection = self._connection or self._connect()
            if self._scheme == "udp":
                self._connection.send(text)
            else:
                self._connection.sendall(b"%d %s" % (len(text), text))
        except OSError:
            self.close()
            raise

    def close(self) -> None:
        """Close the connection if there is one; the next record opens a new one."""
        if self._connection is not None:
            self._connection.close()
        self._connection = None

    def _connect(self) -> socket.socket:
        kind = socket.SOCK_DGRAM if self._scheme == "udp" else socket.SOCK_STREAM
        family, kind, protocol, _, address = socket.getaddrinfo(self._host, self._port, type=kind)[0]
        connection = socket.socket(family, kind, protocol)
        connection.settimeout(TIMEOUT_S)
        try:
            connection.connect(address)
            if self._scheme == "tls":
                connection = ssl.create_default_context().wrap_socket(connection, server_hostname=self._host)
        except BaseException:
            connection.close()
            raise
        return connection


def _priority(record: Mapping[str, Any]) -> int:
    return AUTHPRIV * 8 + SEVERITIES[record["severity"]]


def _ended(connection: socket.socket) -> bool:
    """Return whether the server has closed the connection.

    A syslog server sends no data, so a readable connection is a closed one.
    """
    return bool(select.select([connection], [], [], 0)[0])


def _datagram(path: str, data: bytes) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as to:
        to.settimeout(TIMEOUT_S)
        to.connect(path)
        to.send(data)
