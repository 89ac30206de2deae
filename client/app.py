"""The only program at a site that takes Flower's messages: it hands each one's bytes to the teacher worker.

Flower sends code along with every run, and a stock SuperNode would run it. Here nothing of a run's bundle is unpacked,
imported or executed: the SuperNode runs in process isolation, hands tasks to whoever holds its secret, and that is this
program, from the site's own installation. A bundle that is not ours therefore reaches the worker's policy with its
bytes and nothing else of the site. It imports no torch and has neither data nor models, only the worker's Unix socket.
Every failure is answered with an empty body: an exception's text never leaves the site, and every call has a deadline.
"""

from __future__ import annotations

import argparse
import logging
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import httpx
from flwr.app import Context, Message
from flwr.clientapp import ClientApp

from common.engine import (
    ACQUIRE_TASK,
    AcquireTaskRequest,
    HeartbeatSender,
    RuntimeHttpClient,
    RuntimeTokenHttpInterceptor,
    RuntimeVersionHttpInterceptor,
    SubStatus,
    SuperExecAuthHttpInterceptor,
    TaskType,
    load_superexec_auth_secret,
    make_task_heartbeat_fn_http,
    pull_task_input,
    push_message,
    push_task_output,
)
from common.envelope import body_of
from common.errors import ConsiliumError, InvalidInput
from common.messages import CodesRequest, Several, decode
from common.plain import log_to_stderr
from common.wire import from_message, to_record
from common.worker_api import HANDLE, channel_options

OFFER_TIMEOUT_S = 60.0
POLL_S = 0.2
PULL_PATIENCE_S = 1.0

log = logging.getLogger(__name__)

app = ClientApp()
"""Named in the bundle because Flower takes none without; no site loads it."""


def answer(message: Message, *, socket: Path) -> Message:
    """The worker's reply to a message, or an empty one whatever goes wrong."""
    try:
        body = from_message(message)
        reply = call_worker(socket, body, timeout_s=_timeout_s(body))
    except (ConsiliumError, grpc.RpcError) as error:
        log.warning("event=no-answer cause=%s", type(error).__name__)
        reply = b""
    return Message(to_record(reply), reply_to=message)


def call_worker(socket: Path, body: bytes, *, timeout_s: float) -> bytes:
    """One call to the worker behind ``socket``, bounded by ``timeout_s`` seconds."""
    with grpc.insecure_channel(f"unix:{socket}", options=channel_options()) as channel:
        call = channel.unary_unary(HANDLE)
        return bytes(call(body, timeout=timeout_s, wait_for_ready=True))


def _timeout_s(body: bytes) -> float:
    try:
        message = decode(body_of(body))
    except InvalidInput:
        return OFFER_TIMEOUT_S
    parts = message.parts if isinstance(message, Several) else (message,)
    asked = [part.deadline_s for part in parts if isinstance(part, CodesRequest)]
    return max(asked) + 10.0 if asked else OFFER_TIMEOUT_S


class Abandoned(Exception):
    """The SuperNode gave a message up before it had all of it; nobody waits for an answer."""


class Launcher:
    """Takes the SuperNode's tasks at ``runtime`` (``host:port``) one by one and answers each from the worker's socket.

    A SuperNode handles one message at a time, so a newer task means that the one in hand was abandoned (its run ended
    while it was on its way). Such a task never gets its message: it is left at once, or it would block all later ones.
    """

    def __init__(self, *, runtime: str, secret: Path, socket: Path, stop: threading.Event) -> None:
        master = load_superexec_auth_secret(str(secret))
        if master is None:
            raise InvalidInput(
                "the SuperNode's secret cannot be read",
                value=str(secret),
                remedy="start the site with `consilium site up`",
            )
        self._runtime, self._socket, self._stop = runtime, socket, stop
        self._client = RuntimeHttpClient.from_server_address(
            runtime,
            True,
            None,
            [
                RuntimeVersionHttpInterceptor(component_name="SuperExec"),
                SuperExecAuthHttpInterceptor(master_secret=master, protected_methods={ACQUIRE_TASK}),
            ],
        )
        self._newer = ""

    def run(self) -> None:
        """Serve until ``stop`` is set. A SuperNode that is away is waited for; a failure ends its own task alone."""
        away = answered = False
        while not self._stop.is_set():
            try:
                token, self._newer = self._newer or self._acquire(), ""
                if away or not answered:
                    log.info("event=supernode-back" if answered else "event=ready")
                away, answered = False, True
                if token:
                    self._serve(token)
            except (httpx.HTTPError, RuntimeError, ValueError) as error:
                if not away:
                    log.warning("event=task-failed cause=%s", type(error).__name__)
                away = isinstance(error, httpx.TransportError)
                self._stop.wait(1.0)
            if not self._newer:
                self._stop.wait(POLL_S)
        self._client.close()

    def _acquire(self) -> str:
        # Tasks of any kind a message can become: one that nobody took would block the SuperNode for good.
        wanted = AcquireTaskRequest(supported_task_types=[TaskType.CLIENT_APP, TaskType.AGENT_APP])
        return str(self._client.AcquireTask(wanted).token)

    def _serve(self, token: str) -> None:
        interceptors = [
            RuntimeVersionHttpInterceptor(component_name="flwr-clientapp"),
            RuntimeTokenHttpInterceptor(token),
        ]
        with RuntimeHttpClient.from_server_address(self._runtime, True, None, interceptors) as client:
            heartbeat = HeartbeatSender(make_task_heartbeat_fn_http(client))
            heartbeat.start()
            try:
                message, context = self._input(client)
                push_message(client, answer(message, socket=self._socket), context)
                push_task_output(client, context, SubStatus.COMPLETED, "")
            except Abandoned:
                log.info("event=task-abandoned")
                push_task_output(client, None, SubStatus.FAILED, "abandoned")
            finally:
                if heartbeat.is_running:
                    heartbeat.stop()

    def _input(self, client: RuntimeHttpClient) -> tuple[Message, Context]:
        """The task's message, once the SuperNode has all of it; the bundle comes along and is dropped."""
        pulling = ThreadPoolExecutor(1)
        pulled = pulling.submit(pull_task_input, client)
        try:
            while True:
                try:
                    message, context, _, _ = pulled.result(timeout=PULL_PATIENCE_S)
                    return message, context
                except TimeoutError:
                    self._newer = self._acquire()
                    if self._newer:
                        raise Abandoned from None
                    if self._stop.is_set():  # the task's token expires, and the SuperNode answers for it
                        raise RuntimeError("stopped while waiting for a message") from None
        finally:
            pulling.shutdown(wait=False)  # a thread left behind ends with its client


def main() -> None:
    """``python -m client.app --runtime HOST:PORT --secret FILE --socket PATH``: run until SIGTERM or SIGINT."""
    parser = argparse.ArgumentParser(description="Hand Flower's messages to the teacher worker")
    parser.add_argument("--runtime", required=True, help="the SuperNode's runtime address")
    parser.add_argument("--secret", type=Path, required=True, help="the SuperNode's secret file")
    parser.add_argument("--socket", type=Path, required=True, help="the worker's Unix socket")
    arguments = parser.parse_args()
    log_to_stderr()
    logging.getLogger("httpx").setLevel(logging.WARNING)
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    Launcher(runtime=arguments.runtime, secret=arguments.secret, socket=arguments.socket, stop=stop).run()


if __name__ == "__main__":
    main()
