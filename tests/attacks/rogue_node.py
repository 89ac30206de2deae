"""Replaces a hospital's SuperNode by a program that has the hospital's node key and attacks with its replies.

Only requests for codes are attacked. Its honest worker answers the offers, so the hospital accepts them.
"""

from __future__ import annotations

import argparse
import os
import secrets
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
from flwr.app import Message, RecordDict
from flwr.app.message import make_message
from flwr.common.serde import metadata_from_proto
from flwr.proto import message_pb2
from flwr.supercore.inflatable.inflatable_utils import ObjectPushError, ObjectUnavailableError
from flwr.supercore.run import RunNotRunningException
from flwr.supernode.fleet_http_connection import http_request_response

from client.app import call_worker
from common.envelope import body_of
from common.messages import CodesRequest, Several, decode
from common.pki import load_node_key
from common.wire import body_in
from tests.attacks.link import chain, flower_object, named, reply_objects

FLOOD, FLOOD_BYTES = 4, 60 << 20


class Rogue:
    """Holds the connection, and several malicious ways to answer a message."""

    def __init__(self, connection: Any, *, send: Any) -> None:
        _, _, _, _, _, self.pull_object, self.push_object, self.confirm = connection
        self.send = send
        self.stored = 0

    def pull(self, run: int, name: str) -> bytes:
        while True:
            try:
                return bytes(self.pull_object(run, name))
            except ObjectUnavailableError:
                time.sleep(0.1)

    def announce(self, message: Message, objects: list[bytes]) -> str:
        """Announce the objects, the root first and each the child of the one before; return the session for pushing
        them.
        """
        metadata = reply_metadata(message)
        metadata.message_id = named(objects[0])
        told = make_message(metadata_from_proto(metadata), RecordDict())
        _, session = self.send(told, chain(*map(named, objects)), 1.0)
        return str(session)

    def push(self, message: Message, objects: list[bytes], *, session: str) -> None:
        for content in objects:
            try:
                self.push_object(message.metadata.run_id, session, named(content), content)
                self.stored += len(content)
            except ObjectPushError:
                pass

    def answer(self, message: Message, objects: list[bytes], *, keep_back: int = 0) -> None:
        """Announce the objects and push all but the last ``keep_back``."""
        session = self.announce(message, objects)
        self.push(message, objects[: len(objects) - keep_back], session=session)

    def honest(self, message: Message, body: bytes) -> None:
        self.answer(message, reply_objects(reply_metadata(message), body))

    def missing_child(self, message: Message, body: bytes) -> None:
        self.answer(message, reply_objects(reply_metadata(message), body)[:1])

    def never_comes(self, message: Message, body: bytes) -> None:
        self.answer(message, reply_objects(reply_metadata(message), body), keep_back=1)

    def flood(self, message: Message, body: bytes) -> None:
        """Announce four objects of 60 MiB below one reply, then as four replies to one message, then 13,000 names."""
        large = [flower_object("ConfigRecord", [], secrets.token_bytes(FLOOD_BYTES)) for _ in range(FLOOD)]
        wide = flower_object("Message", [named(one) for one in large], secrets.token_bytes(9))
        metadata = reply_metadata(message)
        metadata.message_id = named(wide)
        tree = message_pb2.ObjectTree(object_id=named(wide))
        tree.children.extend(message_pb2.ObjectTree(object_id=named(one)) for one in large)
        try:
            _, session = self.send(make_message(metadata_from_proto(metadata), RecordDict()), tree, 1.0)
            self.push(message, large, session=session)
        except RunNotRunningException:  # what Flower's client makes of the gateway's 403
            print("refused the wide tree", flush=True)
        junk = [reply_objects(reply_metadata(message), secrets.token_bytes(FLOOD_BYTES)) for _ in range(FLOOD)]
        sessions = [self.announce(message, objects) for objects in junk]
        for place in (2, 1, 0):
            for objects, session in zip(junk, sessions, strict=True):
                self.push(message, [objects[place]], session=session)
        root = flower_object("Message", [], secrets.token_bytes(9))
        metadata = reply_metadata(message)
        metadata.message_id = named(root)
        tree = message_pb2.ObjectTree(object_id=named(root))
        tree.children.extend(message_pb2.ObjectTree(object_id=secrets.token_hex(32)) for _ in range(13_000))
        self.send(make_message(metadata_from_proto(metadata), RecordDict()), tree, 1.0)


def reply_metadata(message: Message) -> message_pb2.Metadata:
    asked = message.metadata
    return message_pb2.Metadata(
        run_id=asked.run_id,
        src_node_id=asked.dst_node_id,
        dst_node_id=1,
        reply_to_message_id=asked.message_id,
        ttl=max(1.0, asked.created_at + asked.ttl - time.time() - 1.0),
        message_type=asked.message_type,
        created_at=time.time(),
    )


def names(tree: message_pb2.ObjectTree) -> list[str]:
    found = [tree.object_id]
    while tree.children:
        (tree,) = tree.children
        found.append(tree.object_id)
    return found


def asks_for_codes(body: bytes) -> bool:
    message = decode(body_of(body))
    parts = message.parts if isinstance(message, Several) else (message,)
    return any(isinstance(part, CodesRequest) for part in parts)


def main() -> None:
    parser = argparse.ArgumentParser()
    for name in ("--superlink", "--attack", "--said"):
        parser.add_argument(name, required=True)
    for name in ("--authority", "--key", "--socket"):
        parser.add_argument(name, type=Path, required=True)
    given = parser.parse_args()
    key = load_node_key(given.key)
    with http_request_response(
        given.superlink, False, given.authority.read_bytes(), (key, key.public_key())
    ) as connection:
        rogue = Rogue(connection, send=connection[2])
        attack: Callable[[Message, bytes], None] = getattr(rogue, given.attack)
        while True:
            received = connection[1]()
            if received is None:
                time.sleep(0.3)
                continue
            message, tree = received
            ids = names(tree)
            body = body_in([rogue.pull(message.metadata.run_id, name) for name in ids], ids)
            rogue.confirm(message.metadata.run_id, ids[0])
            reply = call_worker(given.socket, body, timeout_s=600)
            try:
                (attack if asks_for_codes(body) else rogue.honest)(message, reply)
            except httpx.HTTPStatusError as error:
                print(f"refused {error.response.status_code} {error.response.text.strip()}", flush=True)
            Path(given.said).write_text(str(rogue.stored))


if __name__ == "__main__":
    os.environ["FLWR_TELEMETRY_ENABLED"] = "0"
    main()
