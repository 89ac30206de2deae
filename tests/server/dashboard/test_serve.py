"""Tests the dashboard's server against clients that occupy it: half requests, endless heads, slow bodies, streams."""

from __future__ import annotations

import os
import runpy
import socket
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import uvicorn

from common.errors import InvalidInput
from server.dashboard import jobs, live, security, serve
from server.dashboard.app import Options, create_app
from tests.server.dashboard.conftest import TestClient
from tests.small_servers import serving_app


@pytest.fixture
def address(collected, state, monkeypatch) -> Iterator[tuple[str, int]]:
    """Start the server with short time limits, and return its address."""
    monkeypatch.setattr(serve, "HEAD_S", 0.3)
    monkeypatch.setattr(security, "BODY_S", 0.5)
    app = create_app(Options(study=collected.workspace.root, state=state))
    config = uvicorn.Config(app, port=0, http=serve.Connection, ws="none", log_level="critical")
    with serving_app(config) as server:
        yield server.servers[0].sockets[0].getsockname()


def ended(connection: socket.socket) -> bytes:
    """Return everything that the server sends until it closes the connection."""
    connection.settimeout(5)
    found = b""
    try:
        while more := connection.recv(65536):
            found += more
    except ConnectionResetError:
        pass
    return found


def test_the_containers_health_check_finds_it_healthy_and_follows_it_nowhere(address):
    check = runpy.run_path(str(Path(__file__).parents[3] / "docker" / "health.py"))["check_dashboard"]
    (asked,) = check.__defaults__
    host, port = address[:2]
    here = f"http://{host}:{port}"
    check(here + urlsplit(asked).path)
    with pytest.raises(OSError, match="303"):
        check(here + "/")


@pytest.mark.parametrize("sent", [b"", b"GET / HT", b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nX: "])
@pytest.mark.slow
def test_a_connection_that_asks_for_nothing_is_closed(address, sent):
    with closing(socket.create_connection(address)) as silent:
        silent.sendall(sent)
        with closing(socket.create_connection(address)) as other:
            other.sendall(b"GET /login HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert other.recv(65536).startswith(b"HTTP/1.1 200")
        assert ended(silent) == b""


def test_a_head_without_end_is_not_held(address):
    with closing(socket.create_connection(address)) as endless:
        endless.settimeout(5)
        endless.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n")
        sent = 0
        try:
            while sent < 64 << 20:
                sent += endless.send(b"X: " + b"y" * 60_000 + b"\r\n")
        except (ConnectionError, TimeoutError):
            pass
        assert sent < 16 << 20  # what the machine's own buffers hold, and 64 KiB


@pytest.mark.slow
def test_a_body_that_trickles_is_answered_408(address):
    with closing(socket.create_connection(address)) as slow:
        head = b"POST /login HTTP/1.1\r\nHost: localhost\r\nContent-Length: 60000\r\n"
        slow.sendall(head + b"Content-Type: application/x-www-form-urlencoded\r\n\r\nname=")
        assert b" 408 " in ended(slow).split(b"\r\n")[0]


def test_a_user_with_many_streams_is_told_to_ask_instead(signed_in, monkeypatch):
    client: TestClient = signed_in("ada")
    client.app.state.live.open["ada"] = live.MOST_STREAMS
    assert client.get("/api/live/overview").status_code == 429
    assert client.get("/api/blocks/overview").status_code == 200


def test_a_hundred_labels_are_decided_in_one_form_or_none_of_them_is(signed_in):
    client: TestClient = signed_in("ada")
    token = client.get("/api/me").json()["csrf"]
    chosen = {f"{number:064x}": "1" for number in range(500)}
    answer = client.post("/labels/decisions", data={"csrf": token, "verdict": "reject", **chosen})
    assert answer.status_code == 404  # these labels do not exist; the form was read
    assert "SHA-256" in answer.text
    assert client.get("/api/decisions").json() == []


def test_the_ipv6_wildcard_serves_ipv4_callers_too(collected, state, monkeypatch):
    heard = {}
    monkeypatch.setattr(uvicorn, "run", lambda _app, **settings: heard.update(settings))
    serve.serve(Options(study=collected.workspace.root, state=state), serve.Listen(host="::", port=0))
    assert heard["host"] == ["0.0.0.0", "::"]


@pytest.mark.parametrize(("started_at", "runs_at"), [(0, jobs.NICE), (10, jobs.NICE), (15, 15), (19, 19)])
def test_slow_work_has_low_priority_and_no_lower_one_than_the_dashboard(started_at, runs_at, monkeypatch):
    """At the lowest priority, pictures of a dashboard that is already nice would wait for every other process."""
    priority = [started_at]

    def nice(by: int) -> int:
        priority[0] += by
        return priority[0]

    monkeypatch.setattr(os, "nice", nice)
    with pytest.raises(InvalidInput):
        jobs.main(["no-such-task"])
    assert priority == [runs_at]
