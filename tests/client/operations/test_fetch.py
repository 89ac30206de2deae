"""Tests downloads of public objects over broken connections: they resume, and only the requested object is accepted."""

from __future__ import annotations

import re
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import pytest

from client.policy import load_site
from client.site import fetch
from client.site.fetch import PublicObjects
from common.canonical import sha256_bytes
from common.errors import InvalidInput
from tests.client.operations.answering import answering

pytestmark = pytest.mark.slow

OBJECT = bytes(range(256)) * 400
NAME = sha256_bytes(OBJECT)


@dataclass
class Line:
    """Serves one object over a connection that breaks ``breaks`` times, each time after ``after`` bytes."""

    breaks: int = 0
    after: int = 30_000
    content: bytes = OBJECT
    status: int = 0
    word: str = "refused"
    date: str = ""
    drips: bool = False
    asked: list[str] = field(default_factory=list)


@pytest.fixture
def line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Line, PublicObjects]]:
    monkeypatch.setattr(fetch.time, "sleep", lambda _seconds: None)
    line = Line()

    class Answer(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            assert re.fullmatch("[A-Za-z0-9+/=]+", self.headers["consilium-signature"])
            line.asked.append(self.headers.get("range", ""))
            first = int(self.headers["range"][6:-1]) if "range" in self.headers else 0
            status = line.status or (416 if first >= len(line.content) > 0 else 206 if first else 200)
            self.send_response_only(status)
            rest = line.content[first:] if status in (200, 206) else f"{line.word}\n".encode()
            self.send_header("content-length", str(len(rest)))
            if line.date:
                self.send_header("date", line.date)
            self.end_headers()
            if line.breaks:
                line.breaks -= 1
                rest = rest[: line.after]
            for at in range(100 if line.drips else 0):
                self.wfile.write(rest[at : at + 1])
                threading.Event().wait(0.1)  # time.sleep is replaced
            self.wfile.write(rest)
            self.close_connection = True

    with answering(tmp_path, Answer) as (site, _, _):
        yield line, PublicObjects(load_site(site))


def test_a_download_that_breaks_goes_on_where_it_stopped(line: tuple[Line, PublicObjects]) -> None:
    server, objects = line
    server.breaks = 3
    assert objects.get(NAME) == OBJECT
    assert server.asked == ["", "bytes=30000-", "bytes=60000-", "bytes=90000-"]
    assert objects.get(NAME) == OBJECT
    assert len(server.asked) == 4  # from the cache


def test_objects_fetched_before_a_restart_are_not_fetched_again(line: tuple[Line, PublicObjects]) -> None:
    server, objects = line
    server.breaks = fetch.TRIES
    server.after = 1000
    with pytest.raises(InvalidInput, match="cannot be fetched"):
        objects.get(NAME)
    server.asked.clear()
    assert objects.get(NAME) == OBJECT
    assert server.asked == [f"bytes={1000 * fetch.TRIES}-"]


def test_an_object_with_another_hash_is_refused_and_not_kept(line: tuple[Line, PublicObjects]) -> None:
    server, objects = line
    server.content = OBJECT[:-1] + b"x"
    with pytest.raises(InvalidInput, match=f"hash.*{NAME}"):
        objects.get(NAME)
    server.content = OBJECT
    assert objects.get(NAME) == OBJECT


def test_a_beginning_of_something_else_is_thrown_away(line: tuple[Line, PublicObjects], tmp_path: Path) -> None:
    _, objects = line
    (tmp_path / "site" / "cache" / f".part-{NAME}").write_bytes(b"x" * (len(OBJECT) + 5))
    assert objects.get(NAME) == OBJECT


@pytest.mark.parametrize(
    ("status", "word", "said"),
    [
        (401, "unknown-key", r"localhost:\d+ refused to send .*not admitted yet.*to fix: .*send it request.json"),
        (401, "signature", r"refused to send .*proxy changed the request.*to fix: let no proxy"),
        (
            401,
            "log in first",
            r"refused to send .*another service answers.*'HTTP 401'.*to fix: .*site doctor",
        ),
        (404, "refused", "operator"),
    ],
)
def test_a_refusal_is_final_and_says_who_refused_why_and_whom_to_ask(
    line: tuple[Line, PublicObjects], status: int, word: str, said: str
) -> None:
    server, objects = line
    server.status, server.word = status, word
    with pytest.raises(InvalidInput, match=said):
        objects.get(NAME)
    assert len(server.asked) == 1


@pytest.mark.parametrize(
    ("ahead", "said"),
    [(timedelta(minutes=10), "s ahead of"), (timedelta(days=-400), "s behind"), (None, "UTC'; allowed")],
)
def test_a_refusal_for_the_clock_names_the_clock_and_how_far_it_is_off(
    line: tuple[Line, PublicObjects], ahead: timedelta | None, said: str
) -> None:
    server, objects = line
    server.status, server.word = 401, "clock"
    server.date = "" if ahead is None else format_datetime(datetime.now(UTC) - ahead)
    with pytest.raises(InvalidInput, match="this machine's clock") as refused:
        objects.get(NAME)
    assert said in str(refused.value)
    assert "`consilium site doctor`" in str(refused.value)
    assert "Unauthorized" not in str(refused.value)
    assert len(server.asked) == 1


def test_more_than_an_object_may_have_is_never_read(
    line: tuple[Line, PublicObjects], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetch, "MAX_OBJECT_BYTES", 50_000)
    monkeypatch.setattr(fetch, "CHUNK_BYTES", 10_000)
    with pytest.raises(InvalidInput, match=r"allowed: .*50000 bytes"):
        line[1].get(NAME)


def test_a_server_that_has_volumes_fetched_without_end_fills_no_disk(
    line: tuple[Line, PublicObjects], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each volume is genuine, the site uses one of them in between, and some downloads are left unfinished."""
    server, objects = line
    budget = 10 * len(OBJECT)
    monkeypatch.setattr(fetch, "MAX_OBJECT_BYTES", len(OBJECT))
    monkeypatch.setattr(fetch, "MAX_CACHE_BYTES", budget)
    cache = tmp_path / "site" / "cache"
    used = [objects.get(NAME)]
    for number in range(40):
        server.content = number.to_bytes(2) + OBJECT[2:]
        server.breaks = fetch.TRIES if number % 7 == 3 else 0
        name = sha256_bytes(server.content)
        if server.breaks:
            server.after = 5_000
            with pytest.raises(InvalidInput, match="cannot be fetched"):
                objects.get(name)
        else:
            assert objects.get(name) == server.content
        assert sum(path.stat().st_size for path in cache.iterdir()) <= budget
        before = len(server.asked)
        used.append(objects.get(NAME))
        assert len(server.asked) == before  # still here: it was used last
    assert set(used) == {OBJECT}
    server.content, server.breaks = (0).to_bytes(2) + OBJECT[2:], 0
    assert objects.get(sha256_bytes(server.content)) == server.content  # deleted, and fetched again


def test_a_study_without_a_student_yet_is_told_apart_from_a_server_that_misses_something(
    line: tuple[Line, PublicObjects],
) -> None:
    server, objects = line
    server.status = 404
    with pytest.raises(InvalidInput, match="no student"):
        objects.statement(NAME)


def test_a_silent_server_is_named_while_one_waits_and_given_up_in_time(
    line: tuple[Line, PublicObjects], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stopped server's machine still accepts connections, but nothing answers on them."""
    server, objects = line
    server.breaks, server.after = fetch.TRIES, 1000
    with pytest.raises(InvalidInput, match="cannot be fetched"):
        objects.get(NAME)
    part = tmp_path / "site" / "cache" / f".part-{NAME}"
    kept = part.read_bytes()
    monkeypatch.setattr(fetch, "TIMEOUT_S", 0.5)
    said: list[str] = []
    with socket.create_server(("127.0.0.1", 0)) as frozen:
        config = load_site(tmp_path / "site")
        where = f"localhost:{frozen.getsockname()[1]}"
        there = replace(config, server=replace(config.server, objects_url=f"https://{where}"))
        began = time.monotonic()
        with pytest.raises(InvalidInput, match=rf"timed out.*{where} in \d+ s, tries: {fetch.TRIES}.*to fix: .*doctor"):
            PublicObjects(there, on_wait=said.append).get(NAME)
    assert time.monotonic() - began < 60
    assert len(said) == fetch.TRIES
    assert all(where in one for one in said)
    assert part.read_bytes() == kept
    assert objects.get(NAME) == OBJECT  # the server is back


def test_a_server_that_sends_a_byte_now_and_then_is_given_up_too(
    line: tuple[Line, PublicObjects], monkeypatch: pytest.MonkeyPatch
) -> None:
    server, objects = line
    monkeypatch.setattr(fetch, "TIMEOUT_S", 1.0)
    monkeypatch.setattr(fetch, "TRIES", 2)
    server.drips = True
    with pytest.raises(InvalidInput, match=r"fewer than 64 KiB"):
        objects.get(NAME)
