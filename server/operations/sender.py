"""Checks that a SuperNode's request, and each message in it, names as sender the node whose key signed the request.

SuperLink compares the node named in a request with the signing key, but it trusts the messages inside the request. The
gateway therefore calls this module before it passes a request on. It reads the few fields of Flower's protobuf messages
that state the sender. A node must push one message at a time, and the message must be a reply from this node to the
server. Flower splits a message into objects, which form a tree. Only two trees are accepted. A reply is a Message that
contains a RecordDict, which contains a ConfigRecord. A reply that reports an error is a Message alone. In both cases
the root object must have the message's id as its name.

Every encoding that two protobuf parsers could read differently is refused: a repeated field, a field of another wire
type, an incomplete field, or a number in a longer encoding than needed.

Source: the protobuf encoding (protobuf.dev/programming-guides/encoding); fleet.proto, message.proto, node.proto of
Flower 1.41.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from common.errors import Refused

SERVER_NODE_ID = 1
"""Flower's node id of the server; every reply goes to it."""

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
"""By route, the protobuf field numbers that lead to a request's node id: ``node_id``, or ``node_id`` within ``node``.

``activate-node`` is absent because it names a key in place of a node id. ``push-object`` is absent because its body may
be long; there only SuperLink checks the node.
"""

MAX_FIELDS = 1_000
"""Largest number of fields in one message. Flower writes about a dozen, and each field costs the gateway time."""

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_MESSAGES, _METADATA, _ID, _SRC, _DST, _REPLY_TO = 2, 1, 2, 3, 4, 5
_TREES, _OBJECT, _CHILD = 3, 1, 2
_DEPTHS = (1, 3)
"""Allowed numbers of objects in a reply: 1 for an error; 3 for Message, RecordDict and ConfigRecord."""
_OWN_KEY = "give every site a node key of its own; if no site of yours sent the request, nothing needs to be done"
_SUPERNODE = "start the site's node with `consilium site up` of the server's version, and let no proxy change requests"
_NAME = re.compile(rb"[0-9a-f]{64}")

Field = int | bytes


def check_sender(route: str, body: bytes, *, node_id: int) -> None:
    """Refuse a request unless it, and any message that it pushes, names the node whose key signed the request.

    A request that names no node passes this check if it pushes no message; SuperLink refuses it later.

    Args:
        route: Last segment of the request's path. Requests of routes that are not in :data:`NODE_OF` are not checked.
        body: The request's body, a protobuf message.
        node_id: Flower's id of the node whose key signed the request; 0 if the gateway does not know it, in which case
            only SuperLink compares it.

    Raises:
        Refused: With the reason ``sender`` if another node is named, ``shape`` if a push does not consist of one
            message with its tree of objects, or ``body`` if the encoding is ambiguous.
    """
    if route not in NODE_OF:
        return
    sender = _number(body, *NODE_OF[route])
    if sender and node_id not in (0, sender):
        raise Refused("sender", f"the request names another node than the one whose key signed it; to fix: {_OWN_KEY}")
    if route != PUSH:
        return
    if sender == 0:
        raise Refused(
            "sender",
            "the request pushes a message but does not name its sender (Flower's own SuperNode names it); "
            f"to fix: {_SUPERNODE}",
        )
    pushed = list(_fields(body))
    messages = [_bytes(value) for number, value in pushed if number == _MESSAGES]
    for message in messages:
        metadata = _bytes(_only(message, _METADATA))
        if _number(metadata, _SRC) != sender or _number(metadata, _DST) != SERVER_NODE_ID:
            raise Refused(
                "sender", f"the pushed message is not from the signing node to the server; to fix: {_OWN_KEY}"
            )
        if not _bytes(_only(metadata, _REPLY_TO)):
            raise Refused("sender", f"the pushed message is not a reply; to fix: {_SUPERNODE}")
    trees = [_bytes(value) for number, value in pushed if number == _TREES]
    if len(messages) != 1 or len(trees) != 1:
        raise Refused(
            "shape", f"the request does not push exactly one message with one tree of objects; to fix: {_SUPERNODE}"
        )
    names = _row(trees[0])
    if len(names) not in _DEPTHS or names[0] != _bytes(_only(_bytes(_only(messages[0], _METADATA)), _ID)):
        raise Refused(
            "shape",
            "the objects of the pushed message are not one or three, the first named as the message; to fix: "
            f"{_SUPERNODE}",
        )


def _row(tree: bytes) -> list[bytes]:
    """Return the names of the objects in a tree without branches, from the root to the innermost object.

    Raises:
        Refused: If an object has more than one child, if a name is repeated or invalid, or if the tree is too deep.
    """
    names: list[bytes] = []
    while len(names) < max(_DEPTHS):
        names.append(_bytes(_only(tree, _OBJECT)))
        children = [_bytes(value) for number, value in _fields(tree) if number == _CHILD]
        if not children:
            break
        tree = children[0]
        if len(children) > 1 or len(names) == max(_DEPTHS):
            raise Refused(
                "shape",
                f"an object of the pushed message has several children, or its tree is too deep; to fix: {_SUPERNODE}",
            )
    if len(set(names)) != len(names) or not all(map(_NAME.fullmatch, names)):
        raise Refused(
            "shape", f"a name of an object is repeated or is not a SHA-256 in hexadecimal; to fix: {_SUPERNODE}"
        )
    return names


def _number(data: bytes, *path: int) -> int:
    """Return an integer field of a protobuf message; 0 if it is absent, which is protobuf's default.

    ``path`` has the field numbers of the nested messages, from the outermost on, and then that of the integer.
    """
    *above, last = path
    for number in above:
        data = _bytes(_only(data, number))
    found = _only(data, last, default=0)
    if not isinstance(found, int):
        raise Refused("body", f"a protobuf field has another type than expected; to fix: {_SUPERNODE}")
    return found


def _bytes(field: Field) -> bytes:
    if not isinstance(field, bytes):
        raise Refused("body", f"a protobuf field has another type than expected; to fix: {_SUPERNODE}")
    return field


def _only(data: bytes, number: int, *, default: Field = b"") -> Field:
    """Return the value of the field with this number, or ``default`` if there is none; refuse a repeated field."""
    found = [value for each, value in _fields(data) if each == number]
    if len(found) > 1:
        raise Refused("body", f"a protobuf field is repeated; to fix: {_SUPERNODE}")
    return found[0] if found else default


def _fields(data: bytes) -> Iterator[tuple[int, Field]]:
    """Yield the number and the value of each field of a protobuf message; a value is an integer or bytes."""
    place = fields = 0
    while place < len(data):
        if (fields := fields + 1) > MAX_FIELDS:
            raise Refused("body", f"a protobuf message has too many fields; to fix: {_SUPERNODE}")
        tag, place = _varint(data, place)
        number, kind = tag >> 3, tag & 7
        if not 1 <= number < 1 << 29:
            raise Refused("body", f"a protobuf field number is outside its range; to fix: {_SUPERNODE}")
        if kind == _VARINT:
            value, place = _varint(data, place)
            yield number, value
            continue
        if kind == _BYTES:
            size, place = _varint(data, place)
        elif kind in (_FIXED64, _FIXED32):
            size = 8 if kind == _FIXED64 else 4
        else:  # a group, which Flower never writes
            raise Refused("body", f"a protobuf field has an unknown wire type; to fix: {_SUPERNODE}")
        if size > len(data) - place:
            raise Refused("body", f"a protobuf field is cut off; to fix: {_SUPERNODE}")
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
            if value >= 1 << 64 or (index and not byte):  # a needlessly long number: readers differ on such a tag
                break
            return value, place + index + 1
    raise Refused("body", f"a protobuf number is cut off, too large or needlessly long; to fix: {_SUPERNODE}")
