"""Takes Flower's messages at a site and hands their bytes to the teacher worker; no other program takes them.

Flower sends code with every run, and a standard SuperNode would run it. Here the SuperNode runs in process isolation:
it starts no code of a run and hands its tasks only to a program that knows its secret. That program is this module,
from the site's own installation. This module does not unpack, import or execute anything of a run's bundle. A
manipulated bundle therefore has no effect, and a manipulated message reaches only the worker's checks. The program has
no data, no models and no torch, only the worker's Unix socket. Every failure is answered with an empty body, because an
exception's text must not leave the site. Every call has a deadline.
"""

from __future__ import annotations

import argparse
import logging
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial
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
    clientapp_process,
    load_superexec_auth_secret,
    make_task_heartbeat_fn_http,
    pull_and_inflate_object_from_tree,
    pull_task_input,
    push_message,
    push_task_output,
)
from common.envelope import body_of
from common.errors import ConsiliumError, InvalidInput
from common.messages import CodesRequest, Several, decode
from common.plain import log_to_stderr
from common.process import stop_on_signals
from common.wire import from_message, to_record
from common.worker_api import HANDLE, channel_options

OFFER_TIMEOUT_S = 60.0
POLL_S = 0.2
"""Wait in seconds between two requests for a task. It is also the first wait for a part of a message that
the SuperNode has not stored yet; Flower waits 1 s for such a part.
"""
PULL_PATIENCE_S = 1.0

log = logging.getLogger(__name__)

app = ClientApp()
"""Flower requires a ClientApp in its bundle; sites never load this one."""


def answer(message: Message, *, socket: Path) -> Message:
    """Return the worker's reply to a message; on any failure, an empty reply.

    Args:
        message: Flower's message.
        socket: The worker's Unix socket.

    Returns:
        The reply.
    """
    try:
        body = from_message(message)
        reply = call_worker(socket, body, timeout_s=_timeout_s(body))
    except (ConsiliumError, grpc.RpcError) as error:
        log.warning("event=no-answer cause=%s", type(error).__name__)
        reply = b""
    return Message(to_record(reply), reply_to=message)


def call_worker(socket: Path, body: bytes, *, timeout_s: float) -> bytes:
    """Send one request to the worker and wait for its reply.

    Args:
        socket: The worker's Unix socket.
        body: The request.
        timeout_s: Longest wait in seconds, including the time until the socket appears.

    Returns:
        The reply.

    Raises:
        grpc.RpcError: If the worker fails or does not reply in time.
    """
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


class MessageAbandoned(Exception):
    """The SuperNode abandoned a message before it was complete, so no answer is needed."""


class Launcher:
    """Takes the SuperNode's tasks one at a time, and answers each from the worker.

    A SuperNode handles one message at a time. A newer task therefore means that the SuperNode abandoned the current
    one, because its run ended during delivery. The message of the abandoned task will never be complete, so the task is
    dropped; otherwise it would block all later tasks.

    Args:
        runtime: The SuperNode's address, ``host:port``.
        secret: File of the secret shared with the SuperNode.
        socket: The worker's Unix socket.
        stop: Event that another thread sets to stop the launcher.

    Raises:
        InvalidInput: If the secret cannot be read.
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
        """Serve the SuperNode's tasks until ``stop`` is set.

        A failed task does not end the loop. If the SuperNode does not answer, it is asked again every second.
        """
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
        # Take every kind of task a message can become: a task that nobody takes would block the SuperNode forever.
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
            except MessageAbandoned:
                log.info("event=task-abandoned")
                push_task_output(client, None, SubStatus.FAILED, "abandoned")
            finally:
                if heartbeat.is_running:
                    heartbeat.stop()

    def _input(self, client: RuntimeHttpClient) -> tuple[Message, Context]:
        """Return the task's message and context, and drop the code bundle that Flower sends with them.

        Raises Abandoned if the SuperNode offers a newer task before the message is complete.
        """
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
                        raise MessageAbandoned from None
                    if self._stop.is_set():  # the task's token expires, and the SuperNode reports the failure
                        raise RuntimeError("stopped while waiting for a message") from None
        finally:
            pulling.shutdown(wait=False)  # a thread still waiting ends when its client closes


def main() -> None:
    """Run until SIGTERM or SIGINT: ``python -m client.app --runtime HOST:PORT --secret FILE --socket PATH``."""
    parser = argparse.ArgumentParser(description="Hand Flower's messages to the teacher worker")
    parser.add_argument("--runtime", required=True, help="the SuperNode's runtime address")
    parser.add_argument("--secret", type=Path, required=True, help="the SuperNode's secret file")
    parser.add_argument("--socket", type=Path, required=True, help="the worker's Unix socket")
    arguments = parser.parse_args()
    log_to_stderr()
    logging.getLogger("httpx").setLevel(logging.WARNING)
    pull = partial(pull_and_inflate_object_from_tree, initial_backoff=POLL_S)
    clientapp_process.pull_and_inflate_object_from_tree = pull
    stop = stop_on_signals()
    Launcher(runtime=arguments.runtime, secret=arguments.secret, socket=arguments.socket, stop=stop).run()


if __name__ == "__main__":
    main()
