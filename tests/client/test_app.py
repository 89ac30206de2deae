"""Tests the launcher's answers: the worker's bytes or nothing, and never the text of an exception."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import grpc
import pytest
from flwr.app import ConfigRecord, Message, RecordDict
from flwr.supercore.task_identity import TaskIdentity

from client import app
from common.envelope import SIGNATURE_BYTES
from common.messages import CodesRequest, encode
from common.wire import from_message, to_record
from common.worker_api import HANDLE, SERVICE


@pytest.fixture(autouse=True)
def task(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_task_id", "_run_id", "_node_id"):
        monkeypatch.setattr(TaskIdentity, name, 1)


@contextmanager
def worker(path: Path, handle: Callable[[bytes], bytes]) -> Iterator[None]:
    server = grpc.server(ThreadPoolExecutor(1))
    method = grpc.unary_unary_rpc_method_handler(lambda body, _context: handle(body))
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler(SERVICE, {HANDLE.rsplit("/", 1)[1]: method}),)
    )
    server.add_insecure_port(f"unix:{path}")
    server.start()
    yield
    server.stop(None).wait()


def message(content: RecordDict, kind: str = "query.consilium") -> Message:
    return Message(content=content, dst_node_id=7, message_type=kind)


@pytest.mark.parametrize("kind", ["query.consilium", "train", "query.other"])
def test_the_worker_s_bytes_go_back_whatever_the_message_is_called(tmp_path: Path, kind: str) -> None:
    with worker(tmp_path / "w", lambda body: b"reply to " + body):
        reply = app.answer(message(to_record(b"body"), kind), socket=tmp_path / "w")
    assert from_message(reply) == b"reply to body"


def test_an_exception_s_words_never_leave_the_site(tmp_path: Path) -> None:
    def fail(_body: bytes) -> bytes:
        raise RuntimeError("patient 017 has no label")

    with worker(tmp_path / "w", fail):
        reply = app.answer(message(to_record(b"body")), socket=tmp_path / "w")
    assert from_message(reply) == b""
    assert "017" not in str(reply.content)


def test_a_foreign_message_gets_an_empty_body_and_reaches_no_worker(tmp_path: Path) -> None:
    asked = []
    with worker(tmp_path / "w", lambda body: asked.append(body) or b""):  # type: ignore[func-returns-value]
        for content in (RecordDict(), RecordDict({"weights": ConfigRecord({"body": b"x"})})):
            assert from_message(app.answer(message(content), socket=tmp_path / "w")) == b""
    assert asked == []


def test_a_worker_that_is_away_costs_its_deadline_and_no_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app, "OFFER_TIMEOUT_S", 0.2)
    assert from_message(app.answer(message(to_record(b"body")), socket=tmp_path / "none")) == b""


def test_codes_are_given_the_time_the_request_allows() -> None:
    request = CodesRequest(
        study="a" * 64, ledger="f" * 32, batch="b" * 64, attempt=1, queries=("c" * 64,), deadline_s=123
    )
    assert app._timeout_s(bytes(SIGNATURE_BYTES) + encode(request)) == 133.0
    assert app._timeout_s(b"nonsense") == app.OFFER_TIMEOUT_S


class Node:
    """Stands in for a SuperNode's runtime: it hands out tasks by token, and the first never gets its message."""

    def __init__(self) -> None:
        self.tasks, self.finished = ["stale", "good"], []

    def acquire(self) -> str:
        return self.tasks.pop(0) if self.tasks else ""


def test_a_task_the_node_gave_up_does_not_block_the_next_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run leaves such a task behind if it ends while its message is on the way."""
    node, stop = Node(), threading.Event()
    (tmp_path / "secret").write_bytes(b"s" * 32)

    class Client:
        token = ""

        def __init__(self, *_: object) -> None:
            self.closed = threading.Event()

        @classmethod
        def from_server_address(cls, _address: str, _insecure: bool, _roots: None, interceptors: list) -> Client:
            made = cls()
            made.token = getattr(interceptors[-1], "_token", "")
            return made

        def __enter__(self) -> Client:
            return self

        def __exit__(self, *_: object) -> None:
            self.closed.set()

        close = __exit__

    def pull(client: Client) -> tuple[Message, None, None, None]:
        if client.token == "stale":
            client.closed.wait(30)  # its objects never come
            raise RuntimeError("closed")
        return message(to_record(b"body")), None, None, None

    def pushed(client: Client, reply: Message, _context: None) -> None:
        node.finished.append((client.token, from_message(reply)))
        stop.set()

    monkeypatch.setattr(app, "RuntimeHttpClient", Client)
    monkeypatch.setattr(app, "HeartbeatSender", lambda _call: SimpleNamespace(start=int, stop=int, is_running=False))
    monkeypatch.setattr(app, "make_task_heartbeat_fn_http", lambda _client: None)
    monkeypatch.setattr(app, "pull_task_input", pull)
    monkeypatch.setattr(app, "push_message", pushed)
    monkeypatch.setattr(
        app, "push_task_output", lambda client, _c, status, _d: node.finished.append((client.token, status))
    )
    monkeypatch.setattr(app, "PULL_PATIENCE_S", 0.05)
    monkeypatch.setattr(app.Launcher, "_acquire", lambda _self: node.acquire())
    with worker(tmp_path / "w", lambda body: b"reply to " + body):
        launcher = app.Launcher(runtime="127.0.0.1:1", secret=tmp_path / "secret", socket=tmp_path / "w", stop=stop)
        launcher.run()
    assert node.finished == [("stale", "failed"), ("good", b"reply to body"), ("good", "completed")]


def test_the_launcher_waits_a_fifth_of_a_second_for_an_object_that_is_not_stored_yet(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(app, "Launcher", lambda **_given: SimpleNamespace(run=lambda: None))
    monkeypatch.setattr(app, "stop_on_signals", threading.Event)
    monkeypatch.setattr("sys.argv", ["app", "--runtime", "127.0.0.1:1", "--secret", "secret", "--socket", "socket"])
    name = "pull_and_inflate_object_from_tree"
    monkeypatch.setattr(app.clientapp_process, name, getattr(app.clientapp_process, name))  # put back at the end
    app.main()
    pull = getattr(app.clientapp_process, name)
    assert pull.keywords == {"initial_backoff": app.POLL_S} == {"initial_backoff": 0.2}
    assert app.pull_task_input.__globals__[name] is pull
