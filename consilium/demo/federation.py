"""The demo's daemons: SuperLink, SuperExec, public objects, and for each hospital a worker and a SuperNode.

They are the daemons a real deployment runs, on loopback, with TLS, node keys and process isolation. Whatever happens,
the process group leaves none of them behind.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from client.daemons import Refusal, SiteNode, expect_refused, launcher, supernode, worker
from client.setup import SiteKit, create_site
from common.pki import NodeKeys, create_node_keys
from common.process import ProcessGroup, free_ports
from server import setup
from server.daemons import prepare, register_node, superexec, superlink
from server.supervisor import create_tls, flower_server, objects_daemon
from server.workspace import Endpoint, Site, Workspace

HOST = "127.0.0.1"


@dataclass(frozen=True, slots=True)
class Federation:
    """A running federation: its processes by role and pid, and the evidence that a stranger's node was turned away."""

    group: ProcessGroup
    daemons: tuple[tuple[str, int], ...]
    refusal: Refusal


def write_server(workspace: Workspace, *, kit: Path) -> None:
    """Choose loopback ports, make the CA and the certificate, and write the sites' kit."""
    port, objects_port = free_ports(2, host=HOST)
    workspace.save_endpoint(Endpoint(host=HOST, port=port, objects_port=objects_port))
    identity = create_tls(workspace, names=[HOST, "localhost"])
    endpoint = workspace.endpoint()
    setup.write_kit(
        workspace, kit, superlink=endpoint.superlink, objects_url=endpoint.objects_url, authority=identity.authority
    )


def write_sites(root: Path, *, names: Sequence[str], data: Path, kit: Path) -> dict[str, Path]:
    """One directory a hospital, made from the kit as a hospital would."""
    directories = {}
    for name in names:
        directory = root / name
        if not (directory / "site.toml").exists():
            create_site(directory, name=name, pool=f"{name}/patients", data=data / name, kit=SiteKit.load(kit))
        directories[name] = directory
    return directories


@contextmanager
def running(
    workspace: Workspace, sites: dict[str, Path], *, on_step: Callable[[str], None] = lambda _text: None
) -> Iterator[Federation]:
    """Start everything, register the sites' node keys, show that a stranger is refused; stop everything at the end."""
    server = flower_server(workspace)
    prepare(server)
    with ProcessGroup() as group, tempfile.TemporaryDirectory(prefix="consilium-") as sockets:
        on_step("superlink")
        group.start_all([superlink(server), objects_daemon(workspace, bind=HOST)])
        on_step("registration")
        known = {site.name for site in workspace.sites()} if (workspace.root / "sites.json").exists() else set()
        for name, directory in sites.items():
            if name not in known:
                node_id = register_node(server, _keys(directory).public, name=name)
                setup.add_site(workspace, Site(name=name, pool=f"{name}/patients", node_id=node_id))
        on_step("workers and nodes")
        ports = free_ports(len(sites) + 1, host=HOST)
        nodes = [
            _node(workspace, name=name, directory=directory, socket=Path(sockets) / f"{number}.sock", port=port)
            for number, ((name, directory), port) in enumerate(zip(sites.items(), ports, strict=False))
        ]
        group.start(superexec(server))
        group.start_all(
            [worker(directory, socket=node.socket) for directory, node in zip(sites.values(), nodes, strict=True)]
        )
        group.start_all([*map(supernode, nodes), *map(launcher, nodes)])
        on_step("a stranger")
        daemons = tuple((daemon.spec.role, daemon.pid) for daemon in group.daemons)
        yield Federation(group=group, daemons=daemons, refusal=_refuse_stranger(group, workspace, port=ports[-1]))


def _node(workspace: Workspace, *, name: str, directory: Path, socket: Path, port: int) -> SiteNode:
    return SiteNode(
        site=name,
        folder=directory / "node",
        superlink=workspace.endpoint().superlink,
        root_certificates=directory / "ca.crt",
        keys=_keys(directory),
        socket=socket,
        port=port,
    )


def _keys(directory: Path) -> NodeKeys:
    return NodeKeys(private=directory / "keys" / "node", public=directory / "keys" / "node.pub")


def _refuse_stranger(group: ProcessGroup, workspace: Workspace, *, port: int) -> Refusal:
    folder = workspace.root / "stranger"
    folder.mkdir(exist_ok=True)
    stranger = SiteNode(
        site="stranger",
        folder=folder,
        superlink=workspace.endpoint().superlink,
        root_certificates=workspace.tls_dir / "ca.crt",
        keys=create_node_keys(folder),
        socket=folder / "none.sock",
        port=port,
    )
    return expect_refused(group, stranger)
