"""Packs Consilium's messages into one bytes field of a Flower record, so that Flower never interprets them.

Called by server and sites. In Flower a message consists of three objects, each named by its SHA-256: a ``Message`` that
names a ``RecordDict`` that names a ``ConfigRecord``. A ``Message`` that states an error has no further objects. The
objects are parsed here byte by byte (:func:`body_in`), because Flower's own parser accepts any tree and creates as many
Python objects as a sender wants. Refuses everything else.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from flwr.app import ConfigRecord, Message, RecordDict

from common.errors import SAME_VERSION, InvalidInput

RECORD = "consilium"
MESSAGE_TYPE = "query.consilium"
MAX_BODY_BYTES = 64 << 20

KINDS = ("Message", "RecordDict", "ConfigRecord")
"""Kinds of a message's three objects, in the order in which each names the next."""
MAX_OBJECT_BYTES = {"Message": 64 << 10, "RecordDict": 1 << 10, "ConfigRecord": MAX_BODY_BYTES + 256}

_HEAD = re.compile(rb"(Message|RecordDict|ConfigRecord) ([0-9a-f]{64}|) (0|[1-9][0-9]{0,8})\0")
_MAX_HEAD = 128
_FIELD = b"\x0a\x04body\x12"
"""Key of the only entry in a ConfigRecord, and the tag of its value."""


def to_record(body: bytes) -> RecordDict:
    """Return a Flower record that contains a message.

    Args:
        body: At most :data:`MAX_BODY_BYTES` bytes.

    Returns:
        The record.

    Raises:
        InvalidInput: If the body is too large.
    """
    if len(body) > MAX_BODY_BYTES:
        raise InvalidInput("message body", value=f"{len(body)} bytes", limit=f"at most {MAX_BODY_BYTES} bytes")
    return RecordDict({RECORD: ConfigRecord({"body": body})})


def from_message(message: Message) -> bytes:
    """Return the body of a Flower message.

    Args:
        message: The message.

    Returns:
        The body.

    Raises:
        InvalidInput: If it contains anything else.
    """
    content = message.content
    record = content[RECORD] if set(content) == {RECORD} else None
    if not isinstance(record, ConfigRecord) or set(record) != {"body"}:
        raise InvalidInput(
            "content of a Flower message",
            value=f"{len(content)} records",
            limit="exactly one record, which holds bytes under the name body",
            remedy=SAME_VERSION,
        )
    body = record["body"]
    if not isinstance(body, bytes) or len(body) > MAX_BODY_BYTES:
        raise InvalidInput("message body", limit=f"at most {MAX_BODY_BYTES} bytes")
    return body


def check_object(content: bytes, *, kind: str, child: str) -> bytes:
    """Return the bytes after an object's header, if the header states this kind and this child.

    Args:
        content: The object's bytes.
        kind: Expected kind.
        child: Expected name of its only child; empty if it must have none.

    Returns:
        The bytes after the header.

    Raises:
        InvalidInput: If kind or child differ, or the object is cut or larger than its kind may be.
    """
    head = _HEAD.match(content[:_MAX_HEAD])
    if head is None or len(content) > MAX_OBJECT_BYTES[kind]:
        raise InvalidInput("object of a Flower message", limit=f"a {kind} of at most {MAX_OBJECT_BYTES[kind]} bytes")
    said, named, size = head.groups()
    if (said.decode(), named.decode(), int(size)) != (kind, child, len(content) - head.end()):
        raise InvalidInput(
            "object of a Flower message", limit=f"a complete {kind} with the child object that was announced"
        )
    return content[head.end() :]


def body_in(objects: Sequence[bytes], ids: Sequence[str]) -> bytes:
    """Return the body in a message's three objects.

    Args:
        objects: Bytes of the ``Message``, the ``RecordDict`` and the ``ConfigRecord``, in this order.
        ids: Their names, SHA-256 in hex.

    Returns:
        The body.

    Raises:
        InvalidInput: If they are not these three objects, each naming the next, with one body of bytes.
    """
    children = (*ids[1:], "")
    parts = [
        check_object(content, kind=kind, child=child)
        for content, kind, child in zip(objects, KINDS, children, strict=True)
    ]
    if parts[1] != b'{"%s": "%s"}' % (RECORD.encode(), ids[2].encode()):
        raise InvalidInput("content of a Flower message", limit="exactly one record, with one body of bytes")
    entry, rest = _delimited(parts[2], b"\x0a")
    value, beyond = _delimited(entry.removeprefix(_FIELD), b"")
    body, after = _delimited(value, b"\x32")
    if rest or beyond or after or not entry.startswith(_FIELD):
        raise InvalidInput("content of a Flower message", limit="exactly one record, with one body of bytes")
    if len(body) > MAX_BODY_BYTES:
        raise InvalidInput("message body", limit=f"at most {MAX_BODY_BYTES} bytes")
    return body


def _delimited(data: bytes, tag: bytes) -> tuple[bytes, bytes]:
    """Split ``data``, which begins with a tag and a length, into that many bytes and the bytes that follow them."""
    size = shift = 0
    place = len(tag)
    for byte in data[place : place + 5]:
        size |= (byte & 0x7F) << shift
        shift, place = shift + 7, place + 1
        if byte < 0x80:
            break
    else:
        raise InvalidInput("content of a Flower message", limit="exactly one record, with one body of bytes")
    if not data.startswith(tag) or size > len(data) - place:
        raise InvalidInput("content of a Flower message", limit="exactly one record, with one body of bytes")
    return data[place : place + size], data[place + size :]
