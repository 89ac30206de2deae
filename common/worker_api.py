"""Defines the gRPC calls between a site's ClientApp and its teacher worker, over a Unix socket."""

from __future__ import annotations

from pathlib import Path

SERVICE = "consilium.Worker"
HANDLE = f"/{SERVICE}/Handle"
"""Name of the call that takes one signed message (``common.envelope``) of ``common.messages`` and returns the reply."""
HEALTH = f"/{SERVICE}/Health"
"""Name of the call that takes nothing and returns ``b"ok"`` once models are loaded."""

_MAX_BYTES = 64 << 20


def channel_options() -> list[tuple[str, int]]:
    """Return the gRPC options that ClientApp and worker both use: the largest sizes of messages."""
    return [("grpc.max_receive_message_length", _MAX_BYTES), ("grpc.max_send_message_length", _MAX_BYTES)]


def healthy(socket: Path) -> bool:
    """Return whether the worker at a Unix socket has loaded its models.

    Args:
        socket: The socket.

    Returns:
        True if it has.
    """
    import grpc

    if not socket.is_socket():
        return False
    # A connection of its own: one shared with an earlier check that failed would wait before it tries again.
    options = [*channel_options(), ("grpc.use_local_subchannel_pool", 1)]
    with grpc.insecure_channel(f"unix:{socket}", options=options) as channel:
        try:
            return bytes(channel.unary_unary(HEALTH)(b"", timeout=2.0)) == b"ok"
        except grpc.RpcError:
            return False
