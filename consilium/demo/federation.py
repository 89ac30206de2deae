"""Starts the demo's daemons, at the server and at every hospital.

The server runs core, SuperLink, fleet routes, SuperExec and gateway. A hospital runs worker, launcher and SuperNode.
These are the daemons of a real deployment, on loopback, with TLS, node keys and process isolation. The process group
stops all of them at the end, even after an error.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from client.operations.daemons import SiteNode, expect_refused, launcher, site_node, supernode, worker
from client.operations.staff_decisions import consent, has_consented
from client.site.enrolment import SiteKit, create_site
from client.site.peers import confirm_shown, peers_view, store_list
from client.site.registry import Registry
from common.admission import read_request
from common.errors import InvalidInput
from common.peers import fingerprint
from common.pki import create_node_keys
from common.process import ProcessGroup
from common.sockets import free_ports
from server.operations import provision
from server.operations.daemons import FlowerServer, list_nodes, register_node, superexec, superlink
from server.operations.supervisor import (
    core_daemon,
    fleet_daemon,
    flower_server,
    gateway_daemon,
    prepare_network,
    stop_open_runs,
)
from server.study.workspace import Endpoint, Workspace

HOST = "127.0.0.1"

KILLED_NODES_S = 90.0
"""Longest wait in seconds for a killed demo's SuperNodes, which SuperLink counts as online for 60 s."""


@dataclass(frozen=True, slots=True)
class Federation:
    """A running federation.

    Attributes:
        group: The processes of the federation.
        daemons: Role and process id of each daemon.
        refusal: SuperLink's answer to an unregistered node; empty if none tried to connect.
    """

    group: ProcessGroup
    daemons: tuple[tuple[str, int], ...]
    refusal: str


def write_server(workspace: Workspace) -> None:
    """Choose loopback ports, and create the certificate authority and the certificates.

    Args:
        workspace: The study's directory.
    """
    port, internal_port = free_ports(2, host=HOST)
    provision.set_up_server(workspace, Endpoint(host=HOST, port=port, internal_port=internal_port))


def write_sites(
    workspace: Workspace, root: Path, *, names: Sequence[str], data: Path, absent: Mapping[str, str] | None = None
) -> dict[str, Path]:
    """Create one directory for each hospital from its kit, as a hospital's staff would.

    Args:
        workspace: The study's directory.
        root: Folder of the sites.
        names: Names of the hospitals.
        data: Folder with one dataset for each hospital.
        absent: By hospital, a channel that none of its patients has; it is written to ``site.toml``.

    Returns:
        Directory by name.
    """
    registry = Registry(root / "pools.json")
    directories = {}
    for name in names:
        directory = root / name
        if not (directory / "site.toml").exists():
            kit = root.with_name("kits") / name
            provision.make_kit(workspace, name, kit)
            create_site(directory, pool=f"{name}/patients", data=data / name, kit=SiteKit.load(kit), registry=registry)
            if absent and name in absent:
                with (directory / "site.toml").open("a", encoding="utf-8") as file:
                    file.write(f'\n[dataset]\nabsent = "{absent[name]}"\n')
        directories[name] = directory
    return directories


def agree(sites: Mapping[str, Path]) -> None:
    """Record each hospital's consent unless it is recorded already. In the demo one person acts for all hospitals.

    Args:
        sites: Directory of each hospital by name.
    """
    for directory in sites.values():
        if not has_consented(directory):
            consent(directory, by="one person who runs every hospital on one machine", sheet="none was shown")


def admit(
    workspace: Workspace,
    sites: Mapping[str, Path],
    *,
    pool_epsilon: float | None = None,
    register: provision.Register | None = None,
) -> None:
    """Admit the hospitals that are not admitted yet, each by its own request.

    In the demo the fingerprint is taken from the request itself; in a real study a person reads it by telephone.

    Args:
        workspace: The study's directory.
        sites: Directory of each hospital by name.
        pool_epsilon: Lifetime ε of each pool; by default the study's.
        register: Registers a node's key; by default with SuperLink, which must be running.
    """
    known = {site.name for site in workspace.registered()}
    for name, directory in sites.items():
        if name not in known:
            request = read_request(directory / "request.json", to_admit=True)
            provision.approve(
                workspace,
                request,
                site=name,
                pool=request.pool,
                fingerprint=request.fingerprint,
                register=register or (lambda key, name: register_node(flower_server(workspace), key, name=name)),
                pool_epsilon=pool_epsilon,
            )


@contextmanager
def serving(workspace: Workspace) -> Iterator[ProcessGroup]:
    """Start the server's daemons without waiting for them, so that hospitals can train meanwhile; stop them at the end.

    Args:
        workspace: The study's directory.

    Yields:
        The processes.
    """
    prepare_network(workspace)
    with ProcessGroup() as group:
        for spec in (
            core_daemon(workspace),
            superlink(flower_server(workspace)),
            fleet_daemon(workspace),
            gateway_daemon(workspace, bind=HOST),
        ):
            group.begin(spec)
        yield group


def enrolled(
    group: ProcessGroup,
    workspace: Workspace,
    sites: Mapping[str, Path],
    *,
    pool_epsilon: float | None = None,
    on_step: Callable[[str], None],
) -> None:
    """Admit the hospitals, and have them confirm each other's keys.

    Another thread may call it while the hospitals train. The group must not be stopped before it returns.

    Args:
        group: The server's processes, from :func:`serving`.
        workspace: The study's directory.
        sites: Directory of each hospital by name.
        pool_epsilon: Lifetime ε of each pool; by default the study's.
        on_step: Called with the name of each step.
    """
    on_step("superlink")
    for daemon in group.daemons:
        daemon.wait_ready()
    on_step("admission")
    agree(sites)
    admit(workspace, sites, pool_epsilon=pool_epsilon)
    if workspace.study().privacy.sealed:
        on_step("hospitals compare each other's keys")
        introduce(workspace, sites)


@contextmanager
def joined(
    group: ProcessGroup,
    workspace: Workspace,
    sites: Mapping[str, Path],
    *,
    refusal: str = "",
    on_step: Callable[[str], None],
) -> Iterator[Federation]:
    """Start the hospitals' daemons and the server's SuperExec, after the hospitals have trained.

    Args:
        group: The server's processes.
        workspace: The study's directory.
        sites: Directory of each hospital by name, as admitted by :func:`enrolled`.
        refusal: What :func:`refuse_stranger` returned, if it was called.
        on_step: Called with the name of each step.

    Yields:
        The federation.
    """
    with tempfile.TemporaryDirectory(prefix="consilium-") as sockets:
        ports = free_ports(len(sites), host=HOST)
        nodes = [
            site_node(directory / "node", socket=Path(sockets) / f"{number}.sock", port=port)
            for number, (directory, port) in enumerate(zip(sites.values(), ports, strict=True))
        ]
        on_step("workers")
        workers = [
            group.begin(worker(directory, socket=node.socket))
            for directory, node in zip(sites.values(), nodes, strict=True)
        ]
        on_step("nodes")
        server = flower_server(workspace)
        if any(node.log.exists() for node in nodes):
            _wait_for_killed_nodes(server)
        stop_open_runs(workspace)  # SuperExec would begin what an earlier demo left, and the study would be busy
        others = [superexec(server, relay=workspace.relay_dir), *map(supernode, nodes), *map(launcher, nodes)]
        started = (*workers, *group.start_all(others))
        for daemon in workers:
            daemon.wait_ready()
        daemons = tuple((daemon.spec.role, daemon.pid) for daemon in group.daemons)
        yield Federation(group=group, daemons=daemons, refusal=refusal)
        group.stop(*started)  # together, while the server can still record that the nodes leave


def _wait_for_killed_nodes(server: FlowerServer) -> None:
    """Wait until SuperLink counts no SuperNode of an earlier demo as online; until then it refuses a new one."""
    until = time.monotonic() + KILLED_NODES_S
    while any(node.status == "online" for node in list_nodes(server)) and time.monotonic() < until:
        time.sleep(1.0)


def introduce(workspace: Workspace, sites: Mapping[str, Path]) -> None:
    """Confirm at every hospital the keys of the others, after comparing each listed fingerprint with its owner's.

    Args:
        workspace: The study's directory.
        sites: Directory of each hospital by name.

    Raises:
        InvalidInput: If a listed fingerprint differs.
    """
    listed = provision.publish_peers(workspace)
    read_out = {name: fingerprint(peers_view(directory).own.key) for name, directory in sites.items()}
    for name, directory in sites.items():
        store_list(directory, listed)
        view = peers_view(directory)
        for known in view.peers:
            if known.fingerprint != read_out[known.peer.site]:
                raise InvalidInput(
                    f"key of {known.peer.site} in the list of peers",
                    limit=f"the key that {known.peer.site} itself reads out to {name}",
                )
        confirm_shown(directory, view)


def refuse_stranger(group: ProcessGroup, workspace: Workspace) -> str:
    """Show that SuperLink refuses a node whose key is not registered.

    If this process is killed meanwhile, the unregistered node ends by itself when its retries are used up.

    Args:
        group: The server's processes, from :func:`serving`; they must be ready.
        workspace: The study's directory.

    Returns:
        SuperLink's answer.
    """
    folder = workspace.root / "stranger"
    folder.mkdir(exist_ok=True)
    stranger = SiteNode(
        site="stranger",
        folder=folder,
        superlink=workspace.endpoint().superlink,
        root_certificates=workspace.gateway_dir / "ca.crt",
        keys=create_node_keys(folder),
        socket=folder / "none.sock",
        port=free_ports(1, host=HOST)[0],
    )
    return expect_refused(group, stranger)
