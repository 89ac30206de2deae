"""What runs between a site's ClientApp and its teacher worker: gRPC over a Unix socket, bytes in, bytes out."""

from __future__ import annotations

SERVICE = "consilium.Worker"
HANDLE = f"/{SERVICE}/Handle"
"""Takes one signed message (``common.envelope``) of ``common.messages`` and returns its signed reply."""
HEALTH = f"/{SERVICE}/Health"
"""Takes nothing and returns ``b"ok"`` once models are loaded."""

_MAX_BYTES = 64 << 20


def channel_options() -> list[tuple[str, int]]:
    """gRPC options that both ends share."""
    return [("grpc.max_receive_message_length", _MAX_BYTES), ("grpc.max_send_message_length", _MAX_BYTES)]
