"""Where our messages sit in Flower's: one bytes field of one record, so Flower never interprets them."""

from __future__ import annotations

from flwr.app import ConfigRecord, Message, RecordDict

from common.errors import InvalidInput

RECORD = "consilium"
MESSAGE_TYPE = "query.consilium"
MAX_BODY_BYTES = 64 << 20


def to_record(body: bytes) -> RecordDict:
    """A Flower record that carries ``body``."""
    if len(body) > MAX_BODY_BYTES:
        raise InvalidInput("message body", value=f"{len(body)} bytes", limit=f"{MAX_BODY_BYTES} bytes")
    return RecordDict({RECORD: ConfigRecord({"body": body})})


def from_message(message: Message) -> bytes:
    """The body of a Flower message; :class:`InvalidInput` when it carries anything else."""
    content = message.content
    if set(content) != {RECORD}:
        raise InvalidInput("Flower message", limit="one record with one body")
    record = content[RECORD]
    if not isinstance(record, ConfigRecord) or set(record) != {"body"}:
        raise InvalidInput("Flower message", limit="one record with one body")
    body = record["body"]
    if not isinstance(body, bytes) or len(body) > MAX_BODY_BYTES:
        raise InvalidInput("message body", limit=f"at most {MAX_BODY_BYTES} bytes")
    return body
