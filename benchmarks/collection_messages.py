"""Measures the gain from sending receipts, a request for codes and the next offer in one message.

Core, workers, ledgers and sealing are the real ones, in one process. The transport waits as a SuperNode does that
handles one message at a time and needs a fixed time for each message and each query in it (up to a fifth more, by a
seeded draw). The same run compares it with a core that sends the three messages separately. Run it from the
repository's root:

    python -m benchmarks.collection_messages
"""

from __future__ import annotations

import queue
import random
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

from client.worker import Worker
from common.messages import CodesRequest
from common.privacy.mechanism import QuerySpec
from common.privacy.release import CodeSum
from server.aggregation.aggregator import Aggregator
from server.aggregation.batch import Batch
from server.aggregation.exchange import Reply
from server.study.workspace import Site
from tests.federation import Federation, make_study, part

QUERIES, BATCH, MESSAGE_S = 16, 4, 0.6


class SlowNodes:
    """Stands for nodes that need ``MESSAGE_S`` for a message and ``query_s`` for a query, all in parallel."""

    def __init__(self, workers: Mapping[int, Worker], *, query_s: float, seed: int) -> None:
        self._workers, self._query_s, self._rng = workers, query_s, random.Random(seed)
        self._pool = ThreadPoolExecutor(max_workers=len(workers))
        self.messages = 0

    def online(self) -> frozenset[int]:
        return frozenset(self._workers)

    def exchange(self, bodies: Mapping[int, bytes], *, timeout_s: float) -> Iterator[Reply]:
        replies: queue.Queue[Reply] = queue.Queue()

        def handle(node: int, message: bytes, slower: float) -> None:
            worker = self._workers[node]
            body = worker.open_request(message)
            request, reply = part(body, CodesRequest), worker.handle(body)
            time.sleep(slower * (MESSAGE_S + self._query_s * (len(request.queries) if request else 0)))
            replies.put(Reply(node_id=node, body=worker.sign_reply(reply, request=message)))

        self.messages += len(bodies)
        for node, body in bodies.items():
            self._pool.submit(handle, node, body, 1 + self._rng.uniform(0, 0.2))
        for _ in bodies:
            yield replies.get(timeout=timeout_s)


class OneByOne(Aggregator):
    """Sends offer, request and receipts in separate messages."""

    def _plan(
        self, queries: Sequence[QuerySpec], *, before: Batch | None = None, roster: Sequence[Site] = ()
    ) -> Batch | None:
        return None if before else super()._plan(queries)

    def _release(self, batch: Batch, roster: Sequence[Site], sums: Mapping[str, CodeSum]) -> int:
        released = super()._release(batch, roster, sums)
        self._send_receipts()
        return released


def measure(kind: type[Aggregator], *, query_s: float, seed: int = 1) -> tuple[float, float]:
    """Return the seconds of a run, and the messages for each site.

    Args:
        kind: Class of the aggregator.
        query_s: Seconds that a node needs for a query.
        seed: Seed of the waiting times.
    """
    with tempfile.TemporaryDirectory() as folder:
        federation = Federation(Path(folder), study=make_study(planned_queries=QUERIES))
        study = federation.study
        federation.study = replace(study, collection=replace(study.collection, batch_size=BATCH))
        core, nodes = federation.core(), SlowNodes(federation.workers, query_s=query_s, seed=seed)
        core.__class__ = kind
        started = time.perf_counter()
        core.run(nodes)
        seconds = time.perf_counter() - started
        assert len(federation.ledger.answers(federation.study.id)) == QUERIES
        federation.close()
        return seconds, nodes.messages / len(federation.sites)


def main() -> None:
    for query_s in (0.0, 0.05, 0.15, 0.6):
        apart, many = measure(OneByOne, query_s=query_s)
        together, few = measure(Aggregator, query_s=query_s)
        print(
            f"{MESSAGE_S} s a message, {query_s * BATCH:.1f} s of work a batch, {QUERIES // BATCH} batches: "
            f"{apart:.2f} s in {many:.0f} messages a site apart, {together:.2f} s in {few:.0f} together; "
            f"ratio {apart / together:.2f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
