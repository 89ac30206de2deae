"""Tests that a SuperNode that lost the server ends or tries again, although Flower's own command does neither."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import httpx
import pytest
from flwr.supercore.retry import make_simple_http_retry_invoker

from client.operations.daemons import OFFLINE_S, contact_watch, explain_supernode
from client.operations.supernode import (
    BUSY_S,
    BUSY_WAIT_S,
    FIRST_WAIT_S,
    LOCAL_WAIT_S,
    LOST,
    ShorterWaits,
    noting,
    repeating,
)

pytestmark = pytest.mark.slow

HANDSHAKE = httpx.ConnectTimeout("_ssl.c:989: The handshake operation timed out")
"""The error that httpx raises when a gateway accepts a connection and then does nothing."""

PROGRAM = """
import sys, threading, time
from pathlib import Path
from client.operations import supernode
from common import engine

def returns():
    threading.Thread(target=time.sleep, args=(600,)).start()  # Flower's local API

def loses_its_heartbeats():
    def heartbeats():
        raise RuntimeError("the SuperLink does not recognize this SuperNode")
    threading.Thread(target=heartbeats, daemon=True).start()
    threading.Thread(target=time.sleep, args=(600,), daemon=True).start()
    time.sleep(600)

def waits_for_an_object():
    missing = [engine.pull_objects.__globals__["ObjectUnavailableError"]("not stored yet")]

    def pull(name):
        if missing:
            raise missing.pop()
        return b"content"

    started = time.monotonic()
    assert engine.supernode_loop.pull_objects(["name"], pull) == {"name": b"content"}
    print("waited", time.monotonic() - started)

engine.FleetHttpClient, engine.fleet_http_connection, engine.supernode_loop  # loaded: only the command is replaced
engine.flower_supernode = globals()[sys.argv.pop(1)]
supernode.main()
"""


@pytest.mark.parametrize(
    ("way", "said"),
    [("returns", "connection"), ("loses_its_heartbeats", "heartbeats")],
)
def test_a_supernode_that_lost_the_server_ends(way: str, said: str, tmp_path: Path) -> None:
    contact = tmp_path / "contact"
    contact.touch()  # of an earlier start
    words = [sys.executable, "-c", PROGRAM, way, str(contact), "--superlink", "nowhere:1"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120, check=False)
    assert way != "returns" or done.returncode == LOST  # otherwise Flower decides the exit status
    assert said in explain_supernode(done.stderr)
    assert not contact.exists()


def test_a_supernode_waits_a_fifth_of_a_second_for_an_object_that_is_not_stored_yet(tmp_path: Path) -> None:
    words = [
        sys.executable,
        "-c",
        PROGRAM,
        "waits_for_an_object",
        str(tmp_path / "contact"),
        "--superlink",
        "nowhere:1",
    ]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120, check=False)
    (waited,) = re.findall(r"waited (\S+)", done.stdout)
    assert 0.8 * FIRST_WAIT_S <= float(waited) < 0.8, "Flower waits .8 to 1.2 s"


def test_a_handshake_that_timed_out_is_tried_again_and_a_wrong_certificate_is_not() -> None:
    assert make_simple_http_retry_invoker().should_giveup(HANDSHAKE)  # Flower's own rule takes it for a TLS error
    gives_up = repeating(make_simple_http_retry_invoker)().should_giveup
    assert not gives_up(HANDSHAKE)
    assert not gives_up(httpx.ConnectError("[SSL: UNEXPECTED_EOF_WHILE_READING] EOF occurred"))
    assert gives_up(httpx.ConnectError("[SSL: CERTIFICATE_VERIFY_FAILED] certificate verify failed"))
    refused = httpx.Response(404, request=httpx.Request("POST", "https://superlink"))
    assert gives_up(httpx.HTTPStatusError("refused", request=refused.request, response=refused))


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        ("clock\n", "its clock is wrong; to fix: set the clock"),
        ("unknown-key\n", "does not know this site's key"),
        ("clock\x1b[2J the network is down\n", "the server answered"),
    ],
)
def test_a_connected_node_that_the_server_refuses_says_why_it_ends(
    answer: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Flower ends the process without a word, so the server's reason must be in the log."""
    gives_up = repeating(lambda: SimpleNamespace(should_giveup=lambda _: True))().should_giveup
    refused = httpx.Response(401, text=answer, request=httpx.Request("POST", "https://superlink"))
    assert gives_up(httpx.HTTPStatusError("refused", request=refused.request, response=refused))
    log = capsys.readouterr().err
    assert "\x1b" not in log
    assert said in explain_supernode(f"{log}INFO :      SuperNode terminated gracefully.\n")


@pytest.mark.parametrize("clock_set_by_s", [0, 86_400, -3_600])
def test_a_node_is_offline_when_no_heartbeat_was_accepted_for_a_while_whatever_its_clock_says(
    clock_set_by_s: int, tmp_path: Path
) -> None:
    contact, now = tmp_path / "contact", [0.0]
    offline = contact_watch(contact, clock=lambda: now[0])
    answers = iter([True, False, True])
    heartbeat = noting(lambda: SimpleNamespace(success=next(answers)), contact)
    now[0] += 2 * OFFLINE_S
    assert offline() == ""  # it has not been let in yet
    heartbeat()
    assert offline() == ""
    then = time.time() - clock_set_by_s  # as if the clock was set after the heartbeat
    os.utime(contact, (then, then))
    assert offline() == ""
    now[0] += OFFLINE_S + 1
    heartbeat()  # the server does not accept this one
    said = offline()
    assert "no heartbeat" in said
    assert "if the consortium has ended the study" in said, "nothing is wrong then, and nobody can mend it"
    heartbeat()
    assert offline() == ""


def test_a_supernode_asks_more_often_for_a_while_after_its_start_and_after_it_answered() -> None:
    now, waited = [0.0], list[float]()
    waits = ShorterWaits(clock=lambda: now[0], sleep=waited.append)
    waits.sleep(3)
    assert waited.pop() == FIRST_WAIT_S
    now[0] = BUSY_S
    waits.sleep(3)
    assert waits.busy_after(lambda: "sent")() == "sent"
    for _ in range(5):
        waits.sleep(3)
    assert waited == [3, FIRST_WAIT_S, 2 * FIRST_WAIT_S, 4 * FIRST_WAIT_S, BUSY_WAIT_S, BUSY_WAIT_S]
    waits.busy_after(lambda: None)()
    waits.sleep(3)
    now[0] = 2 * BUSY_S
    waits.sleep(3)
    assert waited[-2:] == [FIRST_WAIT_S, 3]
    assert waits.time is time.time


def test_a_supernode_waits_shortly_for_the_worker_on_its_own_machine() -> None:
    waited: list[float] = []
    waits = ShorterWaits(clock=lambda: 0.0, sleep=waited.append)
    waits.sleep(0.5)
    waits.sleep(LOCAL_WAIT_S / 2)
    assert waited == [LOCAL_WAIT_S, LOCAL_WAIT_S / 2]
