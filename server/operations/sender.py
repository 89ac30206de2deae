"""For whom a fleet request speaks: the few fields of Flower's protobuf messages that say so, read strictly.

SuperLink checks that the node a request names is the one whose key signed it, and believes what stands in the messages
the request brings. So here a node pushes one message at a time, which must come from that very node, be a reply, and go
to the server, with one tree of objects: Message, RecordDict and ConfigRecord in a row from the message's own name on,
or a Message alone, which says an error. Refuses whatever two readers could read differently: a field that stands twice,
of another wire type, cut, or a number written longer than it need be.
Source: the protobuf encoding (protobuf.dev/programming-guides/encoding); fleet.proto, message.proto, node.proto of
Flower 1.41.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from common.errors import Refused

SERVER_NODE_ID = 1
"""Flower's node id of the server, which every reply goes to."""

PUSH = "push-messages"
NODE_OF = {
    "deactivate-node": (1,),
    "send-node-heartbeat": (1, 1),
    "pull-messages": (1, 1),
    PUSH: (1, 1),
    "get-run": (1, 1),
    "get-fab": (1, 1),
    "pull-object": (1, 1),
    "confirm-message-received": (1, 1),
}
"""Where a request names its node: ``node_id`` itself, or ``node`` and in it ``node_id``. ``activate-node`` names a key,
and of ``push-object``, which may be long, SuperLink alone reads the node."""

MAX_FIELDS = 1_000
"""Of one message: Flower writes a dozen, and every one costs the gateway time."""

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_MESSAGES, _METADATA, _ID, _SRC, _DST, _REPLY_TO = 2, 1, 2, 3, 4, 5
_TREES, _OBJECT, _CHILD = 3, 1, 2
_DEPTHS = (1, 3)
"""Objects of a message: an error alone, or the message, its record dictionary and its record."""
_NAME = re.compile(rb"[0-9a-f]{64}")

Field = int | bytes


def check_sender(route: str, body: bytes, *, node_id: int) -> None:
    """That a request to ``route`` names the node of the key that signed it, ``node_id``, and so does what it pushes.

    One that names no node is SuperLink's to refuse, unless it pushes; so is another node where ``node_id`` is 0, not
    known here. Refused (``sender``) for any other, (``shape``) for a push of anything but one message with its tree,
    (``body``) for what is not read without doubt.
    """
    if route not in NODE_OF:
        return
    sender = _number(body, *NODE_OF[route])
    if sender and node_id not in (0, sender):
        raise Refused("sender")
    if route != PUSH:
        return
    if sender == 0:
        raise Refused("sender")
    pushed = list(_fields(body))
    messages = [_bytes(value) for number, value in pushed if number == _MESSAGES]
    for message in messages:
        metadata = _bytes(_only(message, _METADATA))
        if _number(metadata, _SRC) != sender or _number(metadata, _DST) != SERVER_NODE_ID:
            raise Refused("sender")
        if not _bytes(_only(metadata, _REPLY_TO)):
            raise Refused("sender")
    trees = [_bytes(value) for number, value in pushed if number == _TREES]
    if len(messages) != 1 or len(trees) != 1:
        raise Refused("shape")
    names = _row(trees[0])
    if len(names) not in _DEPTHS or names[0] != _bytes(_only(_bytes(_only(messages[0], _METADATA)), _ID)):
        raise Refused("shape")


def _row(tree: bytes) -> list[bytes]:
    """The names in a tree of which each object has one child, from the root on; Refused for any other."""
    names: list[bytes] = []
    while len(names) < max(_DEPTHS):
        names.append(_bytes(_only(tree, _OBJECT)))
        children = [_bytes(value) for number, value in _fields(tree) if number == _CHILD]
        if not children:
            break
        tree = children[0]
        if len(children) > 1 or len(names) == max(_DEPTHS):
            raise Refused("shape")
    if len(set(names)) != len(names) or not all(map(_NAME.fullmatch, names)):
        raise Refused("shape")
    return names


def _number(data: bytes, *path: int) -> int:
    """The integer at ``path``, field by field; 0 where it is left out, as protobuf has it."""
    *above, last = path
    for number in above:
        data = _bytes(_only(data, number))
    found = _only(data, last, default=0)
    if not isinstance(found, int):
        raise Refused("body")
    return found


def _bytes(field: Field) -> bytes:
    if not isinstance(field, bytes):
        raise Refused("body")
    return field


def _only(data: bytes, number: int, *, default: Field = b"") -> Field:
    """The field of this number, which may stand once."""
    found = [value for each, value in _fields(data) if each == number]
    if len(found) > 1:
        raise Refused("body")
    return found[0] if found else default


def _fields(data: bytes) -> Iterator[tuple[int, Field]]:
    """Every field's number with its integer, or its bytes."""
    place = fields = 0
    while place < len(data):
        if (fields := fields + 1) > MAX_FIELDS:
            raise Refused("body")
        tag, place = _varint(data, place)
        number, kind = tag >> 3, tag & 7
        if not 1 <= number < 1 << 29:
            raise Refused("body")
        if kind == _VARINT:
            value, place = _varint(data, place)
            yield number, value
            continue
        if kind == _BYTES:
            size, place = _varint(data, place)
        elif kind in (_FIXED64, _FIXED32):
            size = 8 if kind == _FIXED64 else 4
        else:  # groups, which Flower never writes
            raise Refused("body")
        if size > len(data) - place:
            raise Refused("body")
        yield number, data[place : place + size]
        place += size


def _varint(data: bytes, place: int) -> tuple[int, int]:
    value = 0
    for index in range(10):
        if place + index >= len(data):
            break
        byte = data[place + index]
        value |= (byte & 0x7F) << (7 * index)
        if byte < 0x80:
            if value >= 1 << 64 or (index and not byte):  # longer than it need be: readers differ on such a tag
                break
            return value, place + index + 1
    raise Refused("body")
