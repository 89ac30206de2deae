"""Measures two to thirty-two real SuperNodes on one machine: time of a round, processor by daemon, memory of a node.

Every node has its own kit, keys, ledger, SuperNode and launcher, and connects over TLS and the gateway. The workers are
the real ones too, but all in this process and with teachers that predict the same for every voxel; with torch in each,
32 of them would need more memory than a desktop has. A daemon's processor time is counted between two releases. Linux
only.
"""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import grpc
import numpy as np

from benchmarks.round import cpu_s, releases, run_for, until
from benchmarks.run import Figure, figure, memory_mib
from client.operations.daemons import launcher, site_node, supernode
from client.operations.serve import REPLY_TICK_S, serve
from client.policy import Consent, load_site
from client.site.books import open_books
from client.site.node_link import write_link
from client.worker import Worker
from common.config import CodecConfig, CollectionConfig, DataConfig
from common.data.synthetic import study_data, write_phantoms
from common.process import Daemon, DaemonSpec, ProcessGroup
from common.sockets import free_ports
from consilium.demo.federation import HOST, admit, write_server, write_sites
from server.operations.daemons import superexec, superlink
from server.operations.supervisor import (
    core_daemon,
    fleet_daemon,
    flower_server,
    gateway_daemon,
    prepare_network,
)
from server.study import create_study as setup
from server.study.workspace import Workspace
from tests.worlds import make_study

COUNTS, ROUNDS = (2, 4, 8, 16, 32), 3
AT_ONCE, READY_S = 4, 600.0


@dataclass(frozen=True, slots=True)
class SameForAll:
    """Predicts equal probabilities everywhere."""

    data: DataConfig

    def predict(self, volume: bytes) -> Sequence[Callable[[], np.ndarray]]:
        shape = (len(self.data.labels), *self.data.grid)
        return [partial(np.full, shape, 1 / len(self.data.labels), dtype=np.float32)]


def figures() -> Iterator[Figure]:
    """Yield the figures for each number of nodes."""
    with ExitStack() as stack:
        root = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="nodes-")))
        sockets = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="consilium-")))
        workspace = _study(root)
        prepare_network(workspace)
        group = stack.enter_context(ProcessGroup())
        group.start_all(
            [
                core_daemon(workspace),
                superlink(flower_server(workspace)),
                fleet_daemon(workspace),
                gateway_daemon(workspace, bind=HOST),
            ]
        )
        group.start(superexec(flower_server(workspace), relay=workspace.relay_dir))
        known = 0
        for count in COUNTS:
            names = [f"site-{number:02}" for number in range(known, count)]
            for _first in range(0, len(names), AT_ONCE):
                _join(stack, group, workspace, root, names[_first : _first + AT_ONCE], sockets)
            known = count
            yield from _measured(group, workspace, count)


def _study(root: Path) -> Workspace:
    """Create a study with enough volumes for every number of nodes."""
    volumes = len(COUNTS) * (ROUNDS + 3)
    cases = write_phantoms(root / "all", cases=volumes + 8, seed=1).cases
    study = make_study(
        data=study_data(2),
        planned_queries=volumes,
        quorum=COUNTS[0],
        codec=CodecConfig(augmentations=20, max_dimension=8),
        collection=CollectionConfig(batch_size=1),
    )
    workspace = Workspace(root / "server")
    setup.create_study(workspace, study)
    setup.publish_volumes(workspace, [case.image for case in cases[:volumes]])
    setup.fit_study_codec(workspace, [case.label for case in cases[volumes:] if case.label], sites=COUNTS[0])
    write_server(workspace)
    return workspace


def _join(
    stack: ExitStack, group: ProcessGroup, workspace: Workspace, root: Path, names: Sequence[str], sockets: Path
) -> None:
    """Admit hospitals and start their daemons."""
    study = workspace.study()
    for name in names:
        (root / "data" / name).mkdir(parents=True)
    nodes = []
    made = write_sites(workspace, root / "sites", names=names, data=root / "data")
    admit(workspace, made)
    for (name, directory), port in zip(made.items(), free_ports(len(names)), strict=True):
        config = load_site(directory)
        ledger = stack.enter_context(open_books(config))
        ledger.consent(study)
        worker = Worker(
            config=config,
            consent=Consent.of(study),
            ledger=ledger,
            voters=SameForAll(study.data),
            fetch=workspace.objects.get,
            tick_s=REPLY_TICK_S,
        )
        serving = serve(worker, socket=sockets / f"{name}.sock")
        stack.callback(_stop, serving)
        write_link(directory)
        nodes.append(site_node(directory / "node", socket=sockets / f"{name}.sock", port=port))
    group.start_all([_patient(daemon) for node in nodes for daemon in (supernode(node), launcher(node))])


def _stop(serving: grpc.Server) -> None:
    serving.stop(None).wait()


def _patient(spec: DaemonSpec) -> DaemonSpec:
    return replace(spec, ready_timeout_s=READY_S)


def _measured(group: ProcessGroup, workspace: Workspace, count: int) -> Iterator[Figure]:
    """Yield what :data:`ROUNDS` rounds of this many nodes took."""
    spent: list[Counter[str]] = []

    def reached(count: int) -> bool:
        return len(releases(workspace)) >= count

    def between(first: int) -> None:
        for released in (first + 1, first + 1 + ROUNDS):
            until(partial(reached, released))
            spent.append(_by_role(group.daemons, cpu_s))

    rounds = run_for(workspace, ROUNDS + 1, meanwhile=between)
    yield figure(f"a round of {count} nodes", rounds, "s")
    took = {role: (spent[1][role] - spent[0][role]) / ROUNDS for role in spent[0]}
    nodes = {role: took.pop(role) for role in ("supernode", "launcher")}
    yield Figure(f"server's processor a round, {count} nodes", round(sum(took.values()), 4), "s")
    yield Figure(f"of it SuperLink, {count} nodes", round(took["superlink"], 4), "s")
    yield Figure(f"of it the core, {count} nodes", round(took["core"], 4), "s")
    yield Figure(f"processor of a node a round, {count} nodes", round(sum(nodes.values()) / count, 4), "s")
    kept = _by_role(group.daemons, lambda daemon: sum(memory_mib(pid=pid) for pid in daemon.members()))
    yield Figure(f"memory of a node, {count} nodes", round((kept["supernode"] + kept["launcher"]) / count, 1), "MiB")
    yield Figure(f"memory of SuperLink, {count} nodes", round(kept["superlink"], 1), "MiB")


def _by_role(daemons: Sequence[Daemon], measure: Callable[[Daemon], float]) -> Counter[str]:
    found: Counter[str] = Counter()
    for daemon in daemons:
        found[daemon.spec.role] += measure(daemon)  # type: ignore[assignment]
    return found
