"""Sends signed messages to sites, and verifies each reply against the key of the site it comes from.

The aggregators, receipts and witnesses use it. If a reply is unsigned, unreadable or signed by another key, the caller
gets a one-word reason in place of its message.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

from common.canonical import sha256_bytes
from common.envelope import Sign, open_reply, sign_request
from common.errors import Refused
from common.ledger.keys import signing_public_key
from common.messages import AnyMessage, Part, Several, decode, encode
from server.study.workspace import Site

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Reply:
    """One node's answer to one message.

    Attributes:
        node_id: Flower's id of the node.
        body: The signed bytes, or None.
        problem: If there is no body, the reason as a word, such as ``deadline``.
    """

    node_id: int
    body: bytes | None
    problem: str = ""


class Transport(Protocol):
    """Carries messages to sites and their replies back.

    In production a ServerApp carries them; in tests they go directly to worker objects.
    """

    def online(self) -> frozenset[int]:
        """Return the ids of the nodes that are connected now."""

    def exchange(self, bodies: Mapping[int, bytes], *, timeout_s: float) -> Iterator[Reply]:
        """Send one body to each node, and yield exactly one reply for each node, in the order of arrival.

        Args:
            bodies: Signed bytes by node id.
            timeout_s: After this time in seconds, every missing reply is yielded without a body.

        Yields:
            One reply for each node.
        """


@dataclass(frozen=True, slots=True)
class VerifiedReply:
    """A site's verified reply.

    Attributes:
        site: The site that was asked.
        message: The site's message; None if the reply is missing, unreadable or not signed by the site.
        problem: A one-word reason why there is no message; empty if there is one.
    """

    site: Site
    message: AnyMessage | None
    problem: str = ""

    @property
    def parts(self) -> tuple[Part, ...]:
        """The single messages in a reply that combines several (``Several``); empty for any other reply."""
        return self.message.parts if isinstance(self.message, Several) else ()


Questions = Mapping[int, tuple[Site, Callable[[], AnyMessage]]]
"""For each node id, the site and a function that makes the site's message. The function is called when the message is
sent, so that only one message at a time is in memory.
"""


class _Signed(Mapping[int, bytes]):
    """The signed messages by node id. A message is made when the transport asks for it, and only its hash is kept."""

    def __init__(self, questions: Questions, sign: Sign) -> None:
        self._questions, self._sign = questions, sign
        self.sha256: dict[int, str] = {}

    def __getitem__(self, node: int) -> bytes:
        site, question = self._questions[node]
        message = sign_request(encode(question()), sign=self._sign, site=site.name)
        self.sha256[node] = sha256_bytes(message)
        return message

    def __iter__(self) -> Iterator[int]:
        return iter(self._questions)

    def __len__(self) -> int:
        return len(self._questions)


def exchange(transport: Transport, questions: Questions, *, sign: Sign, timeout_s: float) -> Iterator[VerifiedReply]:
    """Send each site its message, signed for that site alone, and yield the verified replies as they arrive.

    A fault in one site's bytes affects only that site: it is reported as a reply without a message.

    Args:
        transport: Carries the messages.
        questions: The messages by node id.
        sign: Signs with the server's key.
        timeout_s: Time in seconds after which a missing reply is reported with the reason ``deadline``.

    Yields:
        One reply for each node.
    """
    sent = _Signed(questions, sign)
    for reply in transport.exchange(sent, timeout_s=timeout_s):
        site = questions[reply.node_id][0]
        if not reply.body:  # the site's network process sends an empty body if its worker does not answer
            yield VerifiedReply(site, None, reply.problem or "unavailable")
            continue
        try:
            if not site.answer_key:
                raise Refused(
                    "unsigned",
                    "the site was registered without a public key that verifies its replies; to fix: register it again "
                    "with `consilium provision approve`",
                )
            key = signing_public_key(site.answer_key)
            body = open_reply(reply.body, key=key, site=site.name, request_sha256=sent.sha256[reply.node_id])
            yield VerifiedReply(site, decode(body))
        except Refused as error:
            yield VerifiedReply(site, None, error.reason)
        except Exception as error:  # noqa: BLE001
            log.warning("event=unreadable-reply site=%s cause=%s", site.name, type(error).__name__)
            yield VerifiedReply(site, None, "malformed")
