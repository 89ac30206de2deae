"""The Flower ClientApp: hands a message's bytes to the site's teacher worker and its reply back.

It imports no torch and has neither data nor models: only the worker's Unix socket. It enforces a deadline of its own,
and answers every failure with an empty body and one allow-listed word in nothing but the reply's absence: an
exception's text never leaves the site.
"""

from __future__ import annotations

import grpc
from flwr.app import Context, Message
from flwr.clientapp import ClientApp

from common.errors import InvalidInput
from common.messages import CodesRequest, decode
from common.wire import pack, unpack
from common.worker_api import HANDLE, channel_options

OFFER_TIMEOUT_S = 60.0

app = ClientApp()


@app.query("consilium")
def consilium(message: Message, context: Context) -> Message:
    """Pass the body to the worker; on any failure reply with an empty body."""
    try:
        body = unpack(message)
        reply = call_worker(str(context.node_config["socket"]), body, timeout_s=_timeout_s(body))
    except Exception:  # noqa: BLE001  an exception would travel to the server as text
        reply = b""
    return Message(pack(reply), reply_to=message)


def call_worker(socket: str, body: bytes, *, timeout_s: float) -> bytes:
    """One call to the worker behind ``socket``, bounded by ``timeout_s`` seconds."""
    with grpc.insecure_channel(f"unix:{socket}", options=channel_options()) as channel:
        call = channel.unary_unary(HANDLE)
        return bytes(call(body, timeout=timeout_s, wait_for_ready=True))


def _timeout_s(body: bytes) -> float:
    try:
        message = decode(body)
    except InvalidInput:
        return OFFER_TIMEOUT_S
    return message.deadline_s + 10.0 if isinstance(message, CodesRequest) else OFFER_TIMEOUT_S
