"""Runs the processes that tests kill: the core with its ledger, and teacher workers with theirs.

``python -m tests.faults.ledger.crash_parts ROOT`` imports everything once. For every line that it reads (``core`` or a
site's name), it forks a process and prints its pid, so that a restart takes milliseconds. The core, worker object, gRPC
server and ledgers are the real ones. The transport, which connects straight to the workers' Unix sockets, and the
teachers are stubs. Torch is not imported.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc

from client.ledger.site_ledger import new_site_key
from client.operations.serve import serve
from client.policy import Consent
from common.config import Study
from common.errors import QuorumNotReached
from common.events import EventLog
from common.ledger.keys import create_sealing_key, create_signing_key, load_sealing_key, load_signing_key, public_hex
from common.objects import ObjectStore
from common.worker_api import HANDLE, HEALTH, channel_options
from consilium.in_process import Sites, site_config
from server.aggregation.aggregator import Aggregator
from server.aggregation.exchange import Reply
from server.ledger.server_ledger import Ledger
from server.protocols.per_volume import plan_queries
from server.public.material import CodecRecord
from server.study.create_study import ServerKeys
from server.study.workspace import Site
from tests.federation import StubVoters, make_codec, make_study
from tests.worlds import HURRIED, pool_of

SITES = tuple(Site(name=name, pool=f"{name}-mri", node_id=100 + n) for n, name in enumerate(("aachen", "bergen")))


def the_study(planned: int) -> Study:
    return make_study(planned_queries=planned, quorum=1, collection=replace(HURRIED, deadline_s=2.0))


def prepare(root: Path, *, planned: int) -> None:
    """Write all files that must exist before the first process starts."""
    study, objects = the_study(planned), ObjectStore(root / "objects")
    codec = make_codec(study)
    volumes = [objects.put(f"volume {n}".encode()) for n in range(planned)]
    facts = [str(planned), objects.put(codec.to_bytes()), str(codec.dimension), *volumes]
    (root / "facts").write_text("\n".join(facts))
    create_sealing_key(root / "sealing.key")
    for site in SITES:
        (root / site.name).mkdir()
        key = new_site_key(root / site.name / "site-ledger.sqlite")
        (root / site.name / "public").write_text(public_hex(key))
    with Ledger.create(root / "ledger.sqlite", signing_key=create_signing_key(root / "ledger.key")) as ledger:
        ledger.register_study(study)
        for site in SITES:
            ledger.declare_pool(pool_of(site, study))


class Outside(EventLog):
    """Writes down every answer at the moment when the core states that it is released."""

    def __init__(self, root: Path, ledger: Ledger, study: Study) -> None:
        super().__init__(root / "events.jsonl", study=study.id)
        self._ledger, self._seen = ledger, os.open(root / "outside", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

    def emit(self, event: str, **facts: Any) -> None:
        if event == "released":
            self.say(facts["queries"])
        super().emit(event, **facts)

    def say(self, queries: Iterable[str]) -> None:
        for query in queries:
            answer = self._ledger.answer(query)
            assert answer is not None
            os.write(self._seen, f"{query} {answer.noisy_sum.tobytes().hex()}\n".encode())


class Sockets:
    """Carries the core's messages straight to the workers' sockets, by node id."""

    def __init__(self, sockets: Mapping[int, Path]) -> None:
        self._sockets = sockets
        self._pool = ThreadPoolExecutor(max_workers=len(sockets))

    def online(self) -> frozenset[int]:
        return frozenset(node for node in self._sockets if self._call(node, HEALTH, b"", 0.5) == b"ok")

    def exchange(self, bodies: Mapping[int, bytes], *, timeout_s: float) -> Iterator[Reply]:
        calls = {node: self._pool.submit(self._call, node, HANDLE, body, timeout_s) for node, body in bodies.items()}
        for node, call in calls.items():
            body = call.result()
            yield Reply(node_id=node, body=body, problem="" if body is not None else "deadline")

    def _call(self, node: int, method: str, body: bytes, timeout_s: float) -> bytes | None:
        try:
            with grpc.insecure_channel(f"unix:{self._sockets[node]}", options=channel_options()) as channel:
                return bytes(channel.unary_unary(method)(body, timeout=timeout_s))
        except grpc.RpcError:
            return None


def signing_sites(root: Path) -> tuple[Site, ...]:
    """Return the sites with the keys of their ledgers, which sign their replies."""
    return tuple(replace(site, answer_key=(root / site.name / "public").read_text()) for site in SITES)


def run_core(root: Path) -> None:
    """Resume the study until every query is answered, and retry after a missing quorum, as a supervisor does."""
    planned, codec, dimension, *volumes = (root / "facts").read_text().split("\n")
    study = the_study(int(planned))
    record = CodecRecord(sha256=codec, dimension=int(dimension))
    with Ledger.open(root / "ledger.sqlite", signing_key=load_signing_key(root / "ledger.key")) as ledger:
        core = Aggregator(
            study=study,
            queries=plan_queries(study, codec=record, volumes=volumes),
            sites=lambda: signing_sites(root),
            ledger=ledger,
            sealing_key=load_sealing_key(root / "sealing.key"),
            events=(outside := Outside(root, ledger, study)),
            retry_pause_s=0.05,
        )
        transport = Sockets({site.node_id: root / f"{site.name}.sock" for site in SITES})
        while core.open_queries():
            try:
                core.run(transport)
            except QuorumNotReached:
                time.sleep(0.02)
        core.run(transport)  # sends the receipts that sites still lack
        # Decoding reads all stored answers, so publish them all.
        outside.say(answer.query.id for answer in core.answers())
    (root / "done").touch()


def run_site(root: Path, name: str) -> None:
    planned = int((root / "facts").read_text().split("\n")[0])
    study = the_study(planned)
    site = next(site for site in SITES if site.name == name)
    keys = load_sealing_key(root / "sealing.key"), load_signing_key(root / "ledger.key")
    server_keys = ServerKeys(public_hex(keys[0]), public_hex(keys[1]))
    opened = Sites(
        root,
        [site],
        study,
        config=lambda site: site_config(site, study, server_keys, queries_per_day=1_000_000),
        voters=lambda site: StubVoters(radius=1.5 + site.node_id % 3 / 4),
        fetch=ObjectStore(root / "objects").get,
    )
    worker = opened.workers[site.node_id]
    server = serve(worker, socket=root / f"{name}.sock")
    threading.Event().wait()
    server.stop(None)


def main() -> None:
    root = Path(sys.argv[1])
    planned = int((root / "facts").read_text().split("\n")[0])
    Consent.of(the_study(planned))  # calibrated once, inherited by every process
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    for line in sys.stdin:
        part = line.strip()
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                if part == "core":
                    run_core(root)
                    status = 0
                else:
                    run_site(root, part)
            finally:
                os._exit(status)
        print(pid, flush=True)


if __name__ == "__main__":
    main()
