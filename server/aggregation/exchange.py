"""Questions to sites and what they say: each signed for one site, each reply held against the site's own key."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

from common.canonical import sha256_bytes
from common.envelope import Sign, asked, open_answered
from common.errors import Refused
from common.ledger.keys import signing_public_key
from common.messages import AnyMessage, Part, Several, decode, encode
from server.study.workspace import Site

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Reply:
    """One node's answer to one message: its body, or an allow-listed word for why there is none."""

    node_id: int
    body: bytes | None
    problem: str = ""


class Transport(Protocol):
    """How bodies reach sites and come back; Flower's Grid in production, worker objects in tests."""

    def online(self) -> frozenset[int]:
        """Node ids that are connected now."""

    def exchange(self, bodies: Mapping[int, bytes], *, timeout_s: float) -> Iterator[Reply]:
        """Send one body to each node; yield exactly one reply a node, as they come, all within ``timeout_s``."""


@dataclass(frozen=True, slots=True)
class Heard:
    """What a site said, None for nothing that could be read or that it signed, and then the word why."""

    site: Site
    message: AnyMessage | None
    problem: str = ""

    @property
    def parts(self) -> tuple[Part, ...]:
        return self.message.parts if isinstance(self.message, Several) else ()


Questions = Mapping[int, tuple[Site, Callable[[], AnyMessage]]]
"""By node: whom it is put to, and what makes it, since it may be long."""


class _Signed(Mapping[int, bytes]):
    """Questions as they are sent: each is made when the transport takes it and not kept, but for its hash."""

    def __init__(self, questions: Questions, sign: Sign) -> None:
        self._questions, self._sign = questions, sign
        self.sha256: dict[int, str] = {}

    def __getitem__(self, node: int) -> bytes:
        site, question = self._questions[node]
        message = asked(encode(question()), sign=self._sign, site=site.name)
        self.sha256[node] = sha256_bytes(message)
        return message

    def __iter__(self) -> Iterator[int]:
        return iter(self._questions)

    def __len__(self) -> int:
        return len(self._questions)


def exchange(transport: Transport, questions: Questions, *, sign: Sign, timeout_s: float) -> Iterator[Heard]:
    """Put each site its question, signed for it alone, and yield what each said, if it signed that as its reply.

    Whatever is wrong with one site's bytes is that site's matter: it is heard to have said nothing, and why.
    """
    sent = _Signed(questions, sign)
    for reply in transport.exchange(sent, timeout_s=timeout_s):
        site = questions[reply.node_id][0]
        if not reply.body:  # a site's network side has nothing else to say where the worker says nothing
            yield Heard(site, None, reply.problem)
            continue
        try:
            if not site.answer_key:
                raise Refused("unsigned", "a site that was registered without a key for its replies")
            key = signing_public_key(site.answer_key)
            body = open_answered(reply.body, key=key, site=site.name, request_sha256=sent.sha256[reply.node_id])
            yield Heard(site, decode(body))
        except Refused as error:
            yield Heard(site, None, error.reason)
        except Exception as error:  # noqa: BLE001
            log.warning("event=unreadable-reply site=%s cause=%s", site.name, type(error).__name__)
            yield Heard(site, None, "malformed")
