"""What an audit puts in the place of a study's outside: voters that say what their world tells them to, and a wire.

Messages go straight to the workers' ``handle``, and are signed and checked as on any other wire.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
from jaxtyping import Float

from client.worker import Ask, Worker
from common.errors import ConsiliumError
from consilium.audit.subject import Subject
from server.aggregation.exchange import Reply

Intercept = Callable[[int, bytes, bytes], bytes]


@dataclass(frozen=True, slots=True)
class World:
    """Who says what: ``moved`` is what the audited unit's voters say (at the first site), ``others`` what everybody
    else does in turn. A word that is none of the subject's sayings is a voter that says nothing, or one that fails."""

    moved: str = "near+"
    others: tuple[str, ...] = ("inside", "aside")

    def sayings(self, subject: Subject, site: int) -> list[str]:
        """The word of each voter of a site."""
        privacy = subject.study.privacy
        voters = privacy.voters_per_site
        words = [self.others[(site + voter) % len(self.others)] for voter in range(voters)]
        unit = 0 if site else 1 if str(privacy.unit) == "patient" else voters
        return [self.moved] * unit + words[unit:]


FAILS, ABSENT = "fails", "absent"


@dataclass(frozen=True, slots=True)
class SiteVoters:
    """The voters of one site, as a worker asks them."""

    subject: Subject
    world: World
    site: int

    def predict(self, volume: bytes) -> Sequence[Ask]:
        return [partial(self._say, word) for word in self.world.sayings(self.subject, self.site)]

    def _say(self, word: str) -> Float[np.ndarray, "c x y z"] | None:
        if word == FAILS:
            raise RuntimeError("a voter that fails")
        return self.subject.sayings.get(word)


@dataclass(slots=True)
class Wire:
    """Messages go to workers by node id; ``intercept`` may exchange a reply before its site signs it."""

    workers: Mapping[int, Worker]
    intercept: Intercept = lambda _node, _body, reply: reply

    def online(self) -> frozenset[int]:
        return frozenset(self.workers)

    def exchange(self, bodies: Mapping[int, bytes], *, timeout_s: float) -> Iterator[Reply]:
        return iter([self._handled(node, body) for node, body in bodies.items()])

    def _handled(self, node: int, message: bytes) -> Reply:
        worker = self.workers[node]
        try:
            body = worker.asked(message)
            return Reply(node, worker.replied(self.intercept(node, body, worker.handle(body)), request=message))
        except ConsiliumError:
            return Reply(node, None, problem="deadline")
