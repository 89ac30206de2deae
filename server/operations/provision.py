"""Admits and revokes sites, and makes certificates and startup kits.

`consilium provision` calls it. Admitting binds a site's name to its node key and to the Flower node id of that key.
Revoking takes effect at the gateway at once.

A join request is refused before anything is written:

* if it is for another study, or for another site or pool than the operator named;
* if its fingerprint differs from the one that the site reads out;
* if its name, pool or key belongs or belonged to another site.

Revoking a site that is not admitted is refused, too.
"""

from __future__ import annotations

import itertools
import os
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path

from cryptography.x509 import DNSName

from common import __version__
from common.admission import JoinRequest, StatedBooks
from common.canonical import check_name, sha256_bytes
from common.errors import ConsiliumError, DaemonFailed, InvalidInput
from common.node_auth import AdmittedNode, read_admitted, write_admitted
from common.objects import write_atomically
from common.peers import Peer, Peers, write_peers
from common.pki import (
    Authority,
    certificate_names,
    create_authority,
    expires,
    issue_server_certificate,
    node_fingerprint,
    read_node_public_key,
    subject_names,
)
from common.public_keys import is_fingerprint
from server.operations.one_port import BEHIND, BehindPort, read_behind, write_behind
from server.operations.supervisor import SOCKET, prepare_network
from server.public.public_files import PEERS, said_file
from server.study import create_study as setup
from server.study.revocations import note_revoked, noted_revoked
from server.study.workspace import LEFT, Endpoint, Site, Workspace

INTERNAL_DAYS = 3650
"""Validity in days of the certificates that only the server's own processes use among themselves."""

Register = Callable[[Path, str], int]
"""Function that registers a node key with SuperLink, given the key's file and the site's name; returns the node id."""


@dataclass(frozen=True, slots=True)
class SiteStanding:
    """State of a site, as `consilium provision list` prints it.

    Attributes:
        site: The site's name.
        pool: Name of the site's patient pool.
        node_id: Flower's id of the site's node.
        admitted: True if the site is admitted; False if it was revoked.
        fingerprint: Fingerprint of the site's node key, as ``ssh-keygen -l`` prints it; empty if the key's file is
            missing.
        node: The node's status at SuperLink, or ``unknown`` if SuperLink is down or does not know the node.
    """

    site: str
    pool: str
    node_id: int
    admitted: bool
    fingerprint: str
    node: str


INTERNAL_PORT = 8000
"""SuperLink's default port on loopback."""


def set_up_server(
    workspace: Workspace, endpoint: Endpoint, *, more_names: Sequence[str] = (), now: datetime | None = None
) -> datetime:
    """Create the consortium's CA and the certificates of the public port, of SuperLink and of the dashboard.

    A second call keeps certificates that are still valid, and all names of the public port's certificate.

    Args:
        workspace: The study.
        endpoint: Address and ports of the server.
        more_names: Further host names in the public port's certificate.
        now: The time, for tests.

    Returns:
        When the public port's certificate expires.

    Raises:
        InvalidInput: If a name is neither a DNS name nor an IP address, or is a DNS name whose last part is a number.
    """
    for name in subject_names([endpoint.host, *more_names]):  # before anything is written
        if isinstance(name, DNSName) and name.value.rpartition(".")[2].isdigit():
            raise InvalidInput(
                "--host or --more-names",
                value=name.value,
                limit="an IP address, or a DNS name whose last part is no number",
                remedy="correct the IPv4 address",
            )
    authority = create_authority(workspace.authority_dir, now=now)
    shown = workspace.gateway_dir / "server.crt"
    names = [endpoint.host, *more_names, *(certificate_names(shown) if shown.exists() else ())]
    issue_server_certificate(authority, workspace.gateway_dir, names=list(dict.fromkeys(names)), now=now)
    _set_up_inside(workspace, endpoint, authority, now=now)
    return expires(workspace.gateway_dir / "server.crt")


def _set_up_inside(workspace: Workspace, endpoint: Endpoint, authority: Authority, *, now: datetime | None) -> None:
    """Set up what sites do not reach: certificates of SuperLink and dashboard, the list of sites, the endpoint."""
    for folder in (workspace.flower_dir, workspace.dashboard_tls_dir):
        issue_server_certificate(authority, folder, names=["127.0.0.1", "localhost"], valid_days=INTERNAL_DAYS, now=now)
    with workspace.changing_sites():
        write_admitted(workspace.nodes_file, _admitted(workspace))
    workspace.save_endpoint(endpoint)
    prepare_network(workspace)


def internal_port_for(workspace: Workspace, *, port: int) -> tuple[int, str]:
    """Choose SuperLink's port on loopback for a study whose operator gave no port.

    Args:
        workspace: The study.
        port: The public port, which SuperLink cannot use.

    Returns:
        The port, and the name of the other study that has the default port; the name is empty if no other study has it.
        A study that was set up before keeps its port. A new study gets the first free port from :data:`INTERNAL_PORT`
        on. A port is free if it is not the public port, and if it is used neither by another study in the same folder
        nor by the study whose ledger this study shares.
    """
    if (workspace.root / "endpoint.json").exists():
        return workspace.endpoint().internal_port, ""
    holders = {port: ""}
    for directory in {*setup.studies_beside(workspace.root), workspace.books_dir.absolute()} - {workspace.root}:
        if (directory / "endpoint.json").exists():
            endpoint = Workspace(directory).endpoint()
            holders |= {endpoint.port: directory.name, endpoint.internal_port: directory.name}
    found = next(one for one in range(INTERNAL_PORT, INTERNAL_PORT + len(holders) + 1) if one not in holders)
    return found, holders.get(INTERNAL_PORT, "")


def set_up_behind(workspace: Workspace, keeper: Workspace, *, internal_port: int) -> datetime:
    """Serve a study through the gateway of another study, the keeper.

    The study gets no public port and no certificate authority of its own: sites reach it at the keeper's port, whose
    certificate is signed by the keeper's authority. It keeps a SuperLink, a core and a ledger of its own. A second call
    with the same arguments changes nothing.

    Args:
        workspace: The study to be served. It must not have been set up at a port of its own.
        keeper: The study whose gateway listens at the port. It must be set up and have a gateway of its own.
        internal_port: The port of this study's SuperLink on loopback.

    Returns:
        When the port's certificate expires.

    Raises:
        InvalidInput: If the keeper has no gateway of its own, if both arguments name the same study, if another study
            at the keeper's port already uses the internal port, or if the study already has a certificate authority of
            its own.
    """
    at = keeper.endpoint()
    if at.behind:
        raise InvalidInput(
            "--behind",
            value=str(keeper.root),
            limit="a study with a gateway of its own",
            remedy=f"give --behind {keeper.port_keeper().root.resolve()}",
        )
    if keeper.root.resolve() == workspace.root.resolve():
        raise InvalidInput("--behind", value=str(keeper.root), limit="another study than the one to set up")
    endpoint = Endpoint(
        at.host, at.port, internal_port, os.path.relpath(keeper.root.resolve(), workspace.root.resolve())
    )
    taken = {at.internal_port: keeper.root} | {
        Workspace(Path(other.directory)).endpoint().internal_port: Path(other.directory)
        for other in read_behind(keeper.gateway_dir / BEHIND)
        if other.study != workspace.study().id
    }
    if internal_port in taken:
        free = next(port for port in itertools.count(internal_port + 1) if port not in taken)
        raise InvalidInput(
            "--internal-port",
            value=internal_port,
            limit=f"a port that no other study uses; {taken[internal_port]} uses this one",
            remedy=f"give --internal-port {free}",
        )
    authority = Authority(certificate=keeper.authority_dir / "ca.crt", key=keeper.authority_dir / "ca.key")
    known, shared = workspace.gateway_dir / "ca.crt", (keeper.gateway_dir / "ca.crt").read_bytes()
    if known.exists() and known.read_bytes() != shared:
        raise InvalidInput(
            "this study has a certificate authority of its own",
            value=str(workspace.authority_dir),
            limit="--behind only for a study that was not set up yet, because its sites would refuse another authority",
            remedy="leave this study at its own port, or create another study and set that up with --behind",
        )
    write_atomically(known, shared)
    _set_up_inside(workspace, endpoint, authority, now=None)
    root = workspace.root.resolve()
    paths = (root, root / "objects", root / "gateway" / "nodes.json", root / "gateway" / "run" / SOCKET)
    write_behind(keeper.gateway_dir / BEHIND, BehindPort(workspace.study().id, *map(str, paths)))
    return expires(keeper.gateway_dir / "server.crt")


def renew(workspace: Workspace, *, valid_days: int = 365, now: datetime | None = None) -> datetime:
    """Issue a new certificate for the public port, by the same CA and with the same names.

    The running gateway loads the new certificate within a second.

    Args:
        workspace: The study whose gateway listens at the port, or another study that is served at this port.
        valid_days: Days until it expires.
        now: The time, for tests.

    Returns:
        When the new certificate expires.

    Raises:
        InvalidInput: If the study's directory does not exist, or the server has no certificate yet.
    """
    workspace.check_there()
    keeper = workspace.port_keeper()
    folder = keeper.gateway_dir
    if not (folder / "server.crt").exists():
        raise InvalidInput(
            "certificate to renew",
            value=str(folder / "server.crt"),
            limit="an existing certificate",
            remedy=f"make one with `consilium provision server {shlex.quote(str(keeper.root))} --host NAME`, "
            "or restore the file",
        )
    authority = Authority(certificate=keeper.authority_dir / "ca.crt", key=keeper.authority_dir / "ca.key")
    issue_server_certificate(
        authority,
        folder,
        names=certificate_names(folder / "server.crt"),
        valid_days=valid_days,
        renew_before_days=36500,
        now=now,
    )
    return expires(folder / "server.crt")


def make_kit(workspace: Workspace, site: str, out: Path) -> None:
    """Write the startup kit of one site, which contains no secret.

    Args:
        workspace: The study.
        site: The site's name.
        out: Folder in which to write the kit's files.

    Raises:
        InvalidInput: If the study's teachers may begin from weights that `consilium codec fit` makes, and it has not
            run yet. With a kit that lacks them, a hospital would train poorer teachers.
    """
    check_name(site, what="name of the site")
    study = workspace.study()
    if study.codec.terms.framed and study.one_network and not workspace.codec_file.exists():
        raise InvalidInput(
            f"startup kit of {site}",
            value=f"no codec.json in {workspace.root}",
            limit="a kit made after `consilium codec fit`, because that may make the weights that teachers begin from",
            remedy="run `consilium codec fit` first",
        )
    endpoint = workspace.endpoint()
    setup.write_kit(
        workspace,
        out,
        site=site,
        superlink=endpoint.superlink,
        objects_url=endpoint.objects_url,
        authority=workspace.gateway_dir / "ca.crt",
    )


def approve(
    workspace: Workspace,
    request: JoinRequest,
    *,
    site: str,
    pool: str,
    fingerprint: str,
    register: Register,
    pool_epsilon: float | None = None,
) -> Site:
    """Admit a site: register its node key at SuperLink, its pool in the ledger, and its name at the gateway.

    A site that an earlier version admitted may have no key on record that verifies its replies. The key in the site's
    new request is then added, and nothing else changes. If a call was interrupted, a second call completes it.

    A second call with the same pool and keys also repairs the records of a site that was not revoked: it registers the
    node's key again if SuperLink's database has lost it, and enters the node's id again if the gateway's list of
    admitted sites lacks it.

    Args:
        workspace: The study.
        request: The site's join request.
        site: Name of the site that the operator means to admit.
        pool: Patient pool that the operator means to admit.
        fingerprint: Fingerprint of the request, as the site read it out.
        register: Registers the node key with SuperLink.
        pool_epsilon: The pool's lifetime ε over all studies. If it is None, a pool that the ledger knows keeps its
            budget, and a new pool gets the budget that the study's configuration states.

    Returns:
        The site's entry in the study.

    Raises:
        InvalidInput: If study, site, pool or fingerprint of the request are not the expected ones, or if the name, pool
            or key in the request belongs or belonged to another site.
        DaemonFailed: If SuperLink does not register the key.
    """
    books = _check_asked(workspace, request, site=site, pool=pool, fingerprint=fingerprint)
    with workspace.changing_sites():
        publish_peers(workspace)  # an approval that was interrupted may not have published them
        return _admit(workspace, request, books, register=register, pool_epsilon=pool_epsilon)


def _admit(
    workspace: Workspace, request: JoinRequest, books: StatedBooks, *, register: Register, pool_epsilon: float | None
) -> Site:
    known, admitted = workspace.registered(), _admitted(workspace)
    entered = {site.name for site in known}
    begun = next((node for node in admitted if node.site == request.site and node.site not in entered), None)
    others = tuple(node for node in admitted if node is not begun)
    unsigned = {(one.name, one.pool): one for one in known if not one.answer_key}
    before = unsigned.get((request.site, request.pool))
    if before is not None and (request.site, request.node_key) in {(node.site, node.key) for node in admitted}:
        entry = replace(before, answer_key=books.answer_key)
        workspace.save_sites(tuple(entry if one == before else one for one in known))
        publish_peers(workspace)
        return entry
    left, was_revoked = workspace.left(), _was_revoked(workspace, request.site)
    same = Site(request.site, request.pool, 0, books.answer_key)
    if same in {replace(one, node_id=0) for one in known} and not was_revoked and pool_epsilon is None:
        listed = {node.key for node in admitted if node.site == request.site}
        if {request.node_key} >= listed | _node_key(workspace, request.site):
            return _admit_again(workspace, request, register=register)
    gone = entered - {node.site for node in admitted} | {site.name for site in left}
    if request.site in gone and not was_revoked:
        raise InvalidInput(
            "site is registered already with another pool or key, and is missing from the gateway's list of admitted "
            "sites",
            value=request.site,
            limit=f"a site that {workspace.nodes_file} lists, or a new one",
            remedy="if that file was lost or restored from an older copy, use the site's first request without "
            "--pool-epsilon, or put the file's newest copy back; if an earlier version of Consilium revoked the site, "
            "create a new study here (`consilium study init`)",
        )
    if was_revoked or sha256_bytes(request.node_key.encode()) in {one.key_sha256 for one in left}:
        raise InvalidInput(
            "site is registered already, and was revoked",
            value=request.site,
            limit="a site that was not revoked; a revoked one is never admitted to this study again, under any name, "
            "pool or key",
            remedy="create a new study here (`consilium study init`), which the site joins with `consilium site join`",
        )
    if unknown := noted_revoked(workspace) - entered - {site.name for site in left}:
        raise InvalidInput(
            "revoked sites are missing from the lists of registered and of deleted sites, so it is unknown which node "
            "keys are never admitted again",
            value=", ".join(sorted(unknown)),
            limit=f"each site that the ledger notes as revoked, in sites.json or {LEFT}",
            remedy=f"put the newest copies of sites.json and {LEFT} back into {workspace.root}; if they are lost, "
            "create a new study here (`consilium study init`)",
        )
    for what, value, taken in (
        ("site", request.site, entered | {node.site for node in others} | {site.name for site in left}),
        ("patient pool", request.pool, {site.pool for site in known}),
        ("key of the replies", books.answer_key, {site.answer_key for site in known}),
        ("node key", request.node_key, {node.key for node in others} | _other_keys(workspace, request.site)),
    ):
        if value.lower() in {one.lower() for one in taken}:  # files named after two sites must not be one file
            raise InvalidInput(
                f"{what} is registered already",
                value=value[:64],
                limit="a new name, pool and key; no site may use those of another one, even in other letter case",
                remedy="see `consilium provision list`",
            )
    setup.pool_to_declare(workspace, request.site, request.pool, books=books, pool_epsilon=pool_epsilon)
    key_file = workspace.node_keys_dir / f"{request.site}.pub"
    write_atomically(key_file, f"{request.node_key} {request.site}\n".encode())
    try:
        known_node = begun is not None and begun.key == request.node_key and begun.node_id
        node = AdmittedNode(request.site, request.node_key, known_node or register(key_file, request.site))
    except (ConsiliumError, OSError):
        key_file.unlink()  # the site was not admitted, so its key stays free
        raise
    write_admitted(workspace.nodes_file, (*others, node))  # before the entry: an entry without a node counts as revoked
    entry = Site(name=request.site, pool=request.pool, node_id=node.node_id, answer_key=books.answer_key)
    try:
        setup.add_site(workspace, entry, books=books, pool_epsilon=pool_epsilon)
    except (ConsiliumError, OSError):
        write_admitted(workspace.nodes_file, others)
        raise
    publish_peers(workspace)
    return entry


def _admit_again(workspace: Workspace, request: JoinRequest, *, register: Register) -> Site:
    """Register a registered site's node at SuperLink again, and list its key and node id again.

    SuperLink returns the node that it knows. It refuses a key that was withdrawn, also by a version that recorded a
    revocation nowhere else.
    """
    key_file = workspace.node_keys_dir / f"{request.site}.pub"
    write_atomically(key_file, f"{request.node_key} {request.site}\n".encode())
    node = AdmittedNode(request.site, request.node_key, register(key_file, request.site))
    sites = tuple(
        replace(one, node_id=node.node_id) if one.name == node.site else one for one in workspace.registered()
    )
    workspace.check_sites(sites)
    others = {one.site: one for one in _admitted(workspace)}
    write_admitted(workspace.nodes_file, tuple((others | {node.site: node}).values()))
    workspace.save_sites(sites)
    publish_peers(workspace)
    return next(one for one in sites if one.name == node.site)


def _node_key(workspace: Workspace, site: str) -> set[str]:
    """Return the node key on file for a site; empty if there is none."""
    path = workspace.node_keys_dir / f"{site}.pub"
    return {read_node_public_key(path)} if path.exists() else set()


def _check_asked(workspace: Workspace, request: JoinRequest, *, site: str, pool: str, fingerprint: str) -> StatedBooks:
    """Check that a join request is the one that the operator means, and return what it states about the site's ledger.

    Raises:
        InvalidInput: If study, site, pool or fingerprint differ, or if an earlier version wrote the request.
    """
    for what, asked, meant in (("site", request.site, site), ("patient pool", request.pool, pool)):
        if asked != meant:
            raise InvalidInput(
                f"{what} of the join request",
                value=asked,
                limit=meant[:80],
                remedy="admit nobody before you know who sent this request",
            )
    if request.study != workspace.study().id:
        raise InvalidInput(
            "study of the join request",
            value=request.study[:16],
            limit=f"this study, {workspace.study().id[:16]}",
            remedy="approve the request in the directory of its study, or have the site write one for this study",
        )
    if not is_fingerprint(fingerprint, request.fingerprint):  # never print the right one, or the operator copies it
        raise InvalidInput(
            "fingerprint of the join request",
            value=fingerprint[:80],
            limit="the one that the site reads out",
            remedy="have the site read it out again; if it still differs, somebody replaced the request on its way",
        )
    if request.books is None:
        raise InvalidInput(
            "join request of an earlier version",
            limit="a request that names the site's ledger and the key that signs its replies",
            remedy=f"upgrade Consilium at the site to {__version__}, which runs here, and write a new request there "
            "with `consilium site request`",
        )
    return request.books


def revoke(workspace: Workspace, name: str, *, unregister: Callable[[int], None]) -> bool:
    """Withdraw a site's admission: at the gateway at once, and at SuperLink if SuperLink runs.

    Answers to which the site contributed stay released and charged. Its key is never admitted again.

    Args:
        workspace: The study.
        name: The site's name.
        unregister: Function that withdraws the node with the given id at SuperLink.

    Returns:
        True if SuperLink withdrew the node; False if SuperLink could not be reached.

    Raises:
        InvalidInput: If the directory is no study's, or if no such site is admitted.
    """
    workspace.study()
    with workspace.changing_sites():
        admitted = _admitted(workspace)
        if name not in {node.site for node in admitted}:
            raise InvalidInput(
                "no such site is admitted",
                value=name,
                limit="name of an admitted site",
                remedy="see `consilium provision list`",
            )
        write_admitted(workspace.nodes_file, tuple(node for node in admitted if node.site != name))
        if name in {site.name for site in workspace.registered()}:  # a site may ask again after an interrupted approval
            workspace.save_revoked(workspace.revoked_names() | {name})
            note_revoked(workspace, name)
        publish_peers(workspace)
    node_id = next(node.node_id for node in admitted if node.site == name)
    try:
        unregister(node_id)
    except DaemonFailed:
        return False
    return True


def publish_peers(workspace: Workspace) -> Peers:
    """List the admitted sites with their signing keys; for a study with sealed sums, publish the list.

    Args:
        workspace: The study's directory.

    Returns:
        The list.
    """
    study, admitted = workspace.study(), {node.site for node in read_admitted(workspace.nodes_file)}
    sites = (site for site in workspace.registered() if site.name in admitted and site.answer_key)
    listed = Peers.of(study.id, (Peer(site.name, site.answer_key) for site in sites))
    if study.privacy.sealed:
        write_peers(said_file(workspace.objects_dir, PEERS, study.id), listed)
    return listed


def standings(workspace: Workspace, *, nodes: Mapping[int, str]) -> tuple[SiteStanding, ...]:
    """List every site that was ever admitted and not deleted since, in the order of admission.

    Args:
        workspace: The study.
        nodes: SuperLink's status of each node, by node id; empty if SuperLink is down.

    Returns:
        One entry for each site.
    """
    admitted = {node.site for node in read_admitted(workspace.nodes_file)}
    return tuple(
        SiteStanding(
            site=site.name,
            pool=site.pool,
            node_id=site.node_id,
            admitted=site.name in admitted,
            fingerprint=_fingerprint(workspace.node_keys_dir / f"{site.name}.pub"),
            node=nodes.get(site.node_id, "unknown"),
        )
        for site in workspace.registered()
    )


def broken_off(workspace: Workspace) -> list[str]:
    """Return the sites whose approval was interrupted after their key was admitted and before they were registered.

    Repeating the approval finishes it.

    Args:
        workspace: The study's directory.

    Returns:
        Names of the sites, sorted.
    """
    entered = {site.name for site in workspace.registered()}
    return sorted(node.site for node in read_admitted(workspace.nodes_file) if node.site not in entered)


def unlisted(workspace: Workspace) -> list[str]:
    """Return the registered sites that the gateway's list of admitted sites lacks, and that no record calls revoked.

    The list was lost or restored from an older copy, or an earlier version revoked the sites.

    Args:
        workspace: The study's directory.

    Returns:
        Names of the sites, sorted.
    """
    admitted = {node.site for node in read_admitted(workspace.nodes_file)}
    missing = {site.name for site in workspace.registered()} - admitted
    return sorted(name for name in missing if not _was_revoked(workspace, name))


def _was_revoked(workspace: Workspace, site: str) -> bool:
    """Return whether a list of the study or the ledger names a site as revoked or as deleted."""
    named = workspace.revoked_names() | {one.name for one in workspace.left()}
    return site in named | noted_revoked(workspace)


def _admitted(workspace: Workspace) -> tuple[AdmittedNode, ...]:
    """Return the admitted nodes. Node ids that an earlier version left out are added from the list of sites."""
    node_ids = {site.name: site.node_id for site in workspace.registered()}
    return tuple(
        replace(node, node_id=node.node_id or node_ids.get(node.site, 0))
        for node in read_admitted(workspace.nodes_file)
    )


def _other_keys(workspace: Workspace, site: str) -> set[str]:
    """Return the node keys that a new site must not use.

    In this study, these are the present and the former keys of all other sites, because a revoked key is never admitted
    again under another name. In the other studies that are served at the same port, these are the keys of all sites,
    because the gateway recognises by the key alone to which study a request belongs.
    """
    keeper = workspace.port_keeper()
    roots = [keeper.root, *(Path(other.directory) for other in read_behind(keeper.gateway_dir / BEHIND))]
    here = [path for path in workspace.node_keys_dir.glob("*.pub") if path.stem != site]
    others = (Workspace(root).node_keys_dir for root in roots if root.resolve() != workspace.root.resolve())
    return {read_node_public_key(path) for path in (*here, *(path for keys in others for path in keys.glob("*.pub")))}


def _fingerprint(path: Path) -> str:
    """Return the fingerprint of the node key in a file, or an empty string if there is none."""
    return node_fingerprint(read_node_public_key(path)) if path.exists() else ""
