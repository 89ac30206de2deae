"""Defines ``consilium provision …`` and ``consilium server …``: certificates, kits, admission and daemons."""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from common.errors import DaemonFailed, InvalidInput, LedgerCorrupt, StorageFailed
from common.plain import joined
from consilium.cli.options import LOG_TO, AsJson, SiteName, StudyDir, folder_to_write, new_file
from consilium.cli.say import json_text, say
from consilium.cli.security_log import server_log
from consilium.cli.study_words import say_rooms
from server.study.workspace import Endpoint, Workspace

if TYPE_CHECKING:
    from server.operations.provision import SiteStanding

provision_app = typer.Typer(no_args_is_help=True, add_completion=False)
server_app = typer.Typer(no_args_is_help=True, add_completion=False)

_AGAIN = "run `consilium provision approve` again with its request"


@provision_app.command("server")
def server(
    directory: StudyDir,
    host: Annotated[str | None, typer.Option(help="Name or address by which sites reach the server.")] = None,
    port: Annotated[int | None, typer.Option(help="The port that sites connect to [8443].")] = None,
    more_names: Annotated[str, typer.Option(help="More names in the certificate, separated by commas.")] = "",
    internal_port: Annotated[
        int | None,
        typer.Option(help="SuperLink's port on loopback; by default the first from 8000 on that no other study has."),
    ] = None,
    behind: Annotated[
        Path | None,
        typer.Option(help="Directory of a study whose port, certificate and CA this study shares."),
    ] = None,
) -> None:
    """Create the consortium's CA and certificates, and set the server's address. Valid certificates are kept.

    With --behind, one port serves several studies. Each study has its own ledger, keys, sites and SuperLink.
    Example: consilium provision server trial --host pate.example.org --port 443
    Example: consilium provision server second --behind trial
    """
    from server.operations import provision

    workspace = Workspace(directory)
    before = workspace.endpoint().superlink if (workspace.root / "endpoint.json").exists() else ""
    if behind is None and host is None:
        raise InvalidInput(
            "--host is missing",
            limit="the name or address by which sites reach the server",
            remedy="give --host NAME, or --behind STUDY to share the port of another study",
        )
    outer = (8443 if port is None else port) if behind is None else Workspace(behind).endpoint().port
    inner, holder = internal_port, ""
    if inner is None:
        inner, holder = provision.internal_port_for(workspace, port=outer)
    if behind is not None:
        for option, given in (("--host", host), ("--port", port), ("--more-names", more_names or None)):
            if given is not None:
                raise InvalidInput(option, value=given, limit="not together with --behind", remedy="leave it out")
        until = provision.set_up_behind(workspace, Workspace(behind), internal_port=inner)
    else:
        endpoint = Endpoint(host=str(host), port=outer, internal_port=inner)
        names = tuple(name for name in more_names.split(",") if name)
        until = provision.set_up_server(workspace, endpoint, more_names=names)
    now = workspace.endpoint().superlink
    say(f"{now}; certificate valid until {until:%Y-%m-%d}")
    if before not in ("", now):
        say(
            f"warning: the server's address was {before}, and sites that have a kit connect only to that address; to "
            "fix: run this command again with the old --host and --port; or give the sites the new address, for "
            "objects_url and superlink under [server] in their site.toml, then make new kits",
            err=True,
        )
    if holder:
        say(
            f"SuperLink's port on loopback is {inner}, because study {holder} uses the default port; to change it: "
            "--internal-port"
        )
    say(
        f"next: `consilium server up {shlex.quote(str(directory))}`, and a kit for each site: `consilium provision kit`"
    )


@provision_app.command("kit")
def kit(
    directory: StudyDir,
    site: SiteName,
    out: Annotated[Path, typer.Option(help="Folder for the kit.", callback=folder_to_write)],
) -> None:
    """Write one site's startup kit: its name, public keys, address, CA and study. It contains no secret.

    Example: consilium provision kit trial north --out kits/north
    """
    from server.operations import provision

    provision.make_kit(Workspace(directory), site, out)
    say(f"{out}: kit for {site}; send it, and ask for the site's request.json and fingerprint")


@provision_app.command("approve")
def approve(
    directory: StudyDir,
    request: Annotated[Path, typer.Argument(help="The request.json that the site sent.")],
    site: Annotated[str, typer.Option(help="Name of the site that you want to admit.")],
    pool: Annotated[
        str, typer.Option(help="Name of the patient pool for which the site will answer, as agreed with the site.")
    ],
    fingerprint: Annotated[str, typer.Option(help="The request's fingerprint as the site read it out: SHA256:….")],
    pool_epsilon: Annotated[
        float | None,
        typer.Option(
            help="ε that the pool may ever spend in all studies; by default that of study.toml. It can never be raised."
        ),
    ] = None,
) -> None:
    """Admit a site: register its node key, its patient pool and its name. SuperLink must be running.

    Example: consilium provision approve trial request.json --site north --pool north --fingerprint SHA256:mVPwvez...
    """
    from common.admission import read_request
    from server.ledger.server_ledger import Ledger
    from server.operations import provision
    from server.operations.daemons import register_node
    from server.operations.supervisor import flower_server
    from server.study.create_study import claimant

    workspace, asked = Workspace(directory), read_request(request, to_admit=True)
    admitted = provision.approve(
        workspace,
        asked,
        site=site,
        pool=pool,
        fingerprint=fingerprint,
        register=lambda key, name: register_node(flower_server(workspace), key, name=name),
        pool_epsilon=pool_epsilon,
    )
    with Ledger.open(workspace.ledger_file) as ledger:
        counted = next(one.protection for one in ledger.pools() if one.pool == admitted.pool)
    say(f"admitted {admitted.name}, patient pool {admitted.pool} ({counted}), as node {admitted.node_id}")
    if counted != (stated := workspace.study().privacy.protection):
        say(
            f"warning: the study states {stated}; the budget of pool {admitted.pool} is counted for {counted}, as its "
            "join request asks, and may end sooner; ask the site whether it means this"
        )
    if (other := claimant(workspace, admitted.pool, asked.books)) is not None and asked.books is not None:
        say(
            f"warning: pools {other} and {admitted.pool} both state the site ledger {asked.books.ledger_id}, and their "
            "keys do not show whose it is; ask both hospitals for the id that `consilium verify` prints for their "
            "ledger, then `consilium provision revoke` the site that stated another one"
        )
    say_rooms(workspace)


@provision_app.command("list")
def list_sites(directory: StudyDir, as_json: AsJson = False) -> None:
    """List the admitted sites, which of them are online or revoked, and how long the certificate is valid.

    Example: consilium provision list trial
    """
    from server.operations import provision
    from server.operations.port_certificate import port_certificate

    workspace = Workspace(directory)
    workspace.endpoint()  # raises an error with the remedy if the server is not set up
    shown = port_certificate(workspace, now=datetime.now(UTC))
    nodes = _nodes(workspace)
    sites, broken_off = provision.standings(workspace, nodes=nodes or {}), provision.broken_off(workspace)
    unlisted = provision.unlisted(workspace)
    if as_json:
        records = [{**dataclasses.asdict(site), "node_id": str(site.node_id)} for site in sites]
        facts = {"certificate_until": shown.until.isoformat(), "sites": records, "broken_off": broken_off}
        say(json_text(facts))
        return
    say(shown.line + ("" if sites else "; no site is admitted yet"))
    for site in sites:
        state = "admitted" if site.admitted else "not listed" if site.site in unlisted else "revoked"
        say(
            f"{site.site}: {state}, {site.node}, patient pool {site.pool}, node {site.node_id}, "
            f"node key {site.fingerprint}"
        )
    if sites:
        say(
            "a node key is the one that `consilium site doctor` prints at the site, and not the request's fingerprint "
            "or the signing key (`consilium provision peers`)"
        )
    unknown = [] if nodes is None else [one.site for one in sites if one.admitted and one.node_id not in nodes]
    for name in unlisted:
        say(f"{name}: the gateway's list of admitted sites lacks it; to fix: {_AGAIN}, if it was not revoked")
    for name in unknown:
        say(f"{name}: SuperLink does not know its node; to fix: {_AGAIN}")
    for name in broken_off:
        say(f"{name}: its approval was interrupted; to fix: run the same `consilium provision approve` again")


def online_text(sites: Sequence[SiteStanding], *, disk_full: bool = False) -> str:
    """Return a line that says how many admitted sites are online; names the others and says what to do.

    Args:
        sites: The admitted sites.
        disk_full: True if the server's disk is full, so that SuperLink cannot record which sites are online.

    Returns:
        The line.
    """
    away = [f"{site.site} ({site.node})" for site in sites if site.node != "online"]
    line = f"sites: {len(sites) - len(away)} of {len(sites)} online"
    if not away:
        return line
    if disk_full:
        names = ", ".join(away)
        return f"{line}; not recorded as online: {names}; SuperLink can record sites again once the disk has room"
    unknown = [site for site in sites if site.node == "unknown"]
    remedies = []
    if unknown:
        remedies.append("`consilium provision list` says what to do for a site whose node SuperLink does not know")
    if len(away) == len(sites) > len(unknown):
        remedies.append("look at gateway.log, and restart `consilium server up` if the gateway does not answer")
    if len(away) > len(unknown):
        remedies.append("ask each of these hospitals to run `consilium site status`")
    return f"{line}; not online: {', '.join(away)}; to fix: {'; then '.join(remedies)}"


def _nodes(workspace: Workspace) -> dict[int, str] | None:
    """Return SuperLink's information about each node; None if it is not running."""
    from server.operations.daemons import list_nodes
    from server.operations.supervisor import flower_server

    try:
        return {node.node_id: node.status for node in list_nodes(flower_server(workspace))}
    except DaemonFailed:
        return None


@provision_app.command("peers")
def peers(
    directory: StudyDir,
    out: Annotated[
        Path | None,
        typer.Option(help="Also write the list to this new file, for sites without network access.", callback=new_file),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """List the admitted sites with the fingerprints of their signing keys, which the sites read out to each other.

    In a study with a sealed sum the list is published for the sites. A site does not trust it: each site confirms the
    others with `consilium site peers`.
    Example: consilium provision peers trial --out peers.json
    """
    from common.peers import fingerprint, write_peers
    from server.operations import provision

    listed = provision.publish_peers(Workspace(directory))
    if out is not None:
        write_peers(out, listed)
        say(f"{out}: for every site; there `consilium site peers --take {out.name}`", err=True)
    if as_json:
        say(json_text(listed.to_json()))
        return
    if not listed.peers:
        say("no site is admitted yet", err=True)
    width = max((len(peer.site) for peer in listed.peers), default=0)
    for peer in listed.peers:
        say(f"{peer.site:{width}}  {fingerprint(peer.key)}  signing key: the site reads this out to the other sites")


@provision_app.command("renew")
def renew(
    directory: StudyDir,
    days: Annotated[int, typer.Option(help="Days for which the new certificate is valid.")] = 365,
) -> None:
    """Renew the server's certificate with the same CA. Nothing is restarted, and sites need not change anything.

    Example: consilium provision renew trial
    """
    from server.operations import provision

    until = provision.renew(Workspace(directory), valid_days=days)
    say(f"certificate valid until {until:%Y-%m-%d}; a running gateway uses it within a second")


@provision_app.command("revoke")
def revoke(directory: StudyDir, site: SiteName) -> None:
    """Revoke a site's admission at once. Its past contributions stay released and charged.

    Example: consilium provision revoke trial north
    """
    from server.operations import provision
    from server.operations.daemons import unregister_node
    from server.operations.supervisor import flower_server
    from server.study.revocations import noted_revoked

    workspace = Workspace(directory)
    whole = provision.revoke(workspace, site, unregister=lambda node: unregister_node(flower_server(workspace), node))
    say(f"revoked {site}: the gateway refuses its key from now on")
    if site in workspace.revoked_names() and site not in noted_revoked(workspace):
        say("the ledger could not be written; the next run notes the revocation there, you need do nothing", err=True)
    if workspace.study().gate.verdicts:
        from server.study.gate import publish_verdicts

        publish_verdicts(workspace)  # the revoked site's verdict no longer counts
    if not whole:
        say("SuperLink is not running, so it still lists the site's node, which can no longer connect", err=True)


@provision_app.command("forget")
def forget(directory: StudyDir, site: SiteName) -> None:
    """Delete the server's data about a site that left, and print what must stay and why. Revoke the site first.

    Stop the server's daemons first, because their logs are deleted too. Delete backups, archives,
    published folders and the dashboard's state yourself.
    Example: consilium provision forget trial north
    """
    from server.operations.leaving import STAYS, forget

    done = forget(Workspace(directory), site)
    say("deleted:\n" + joined(f"  {what}" for what in done.deleted))
    say(f"stays ({done.rows} rows of the ledger name {site} or its pool):")
    say(joined(f"  {what}" for what in STAYS))
    say(
        "Your data protection officer decides whether this satisfies a request for erasure (in the EU, Art. 17 GDPR "
        "and its exceptions); use these lines in the answer to the request."
    )


@server_app.command("up")
def up(
    directory: StudyDir,
    bind: Annotated[
        str,
        typer.Option(
            help="Address on which the gateway listens for the sites: 0.0.0.0 for IPv4 only, :: for IPv4 and IPv6."
        ),
    ] = "0.0.0.0",
    only: Annotated[
        str | None,
        typer.Option(
            help="Run one part only: core (keys and ledger) or network (the other daemons), to give each its "
            "own user or container."
        ),
    ] = None,
    gateway: Annotated[bool, typer.Option(help="Run the gateway, too, to which the sites connect.")] = True,
    log_to: Annotated[list[str] | None, LOG_TO] = None,
) -> None:
    """Run the server's daemons in the foreground: core, SuperLink, SuperExec, gateway. One that dies is restarted.

    SuperLink listens on loopback and accepts commands only with the study's flower/operator.secret.
    Example: consilium server up trial
    """
    from server.operations import supervisor
    from server.study.run_state import run_state

    if only is not None and only not in supervisor.PARTS:
        raise InvalidInput("--only", value=only, limit=" or ".join(supervisor.PARTS))
    workspace = Workspace(directory)

    def on_ready() -> None:
        say("server is up", err=True)
        if only != "network" and (run := run_state(workspace)).name == "died":
            say(run.reason, err=True)

    supervisor.serve(
        workspace,
        bind=bind,
        parts=supervisor.PARTS if only is None else (only,),
        gateway=gateway,
        on_ready=on_ready,
        log_to=log_to or (),
    )


@server_app.command("status")
def status(directory: StudyDir, as_json: AsJson = False) -> None:
    """Show the server's daemons, why one ended, which sites are online, and if the ledger is the newest copy.

    Exit code 5: the ledger does not verify, or the standing file beside it shows that it is an older copy. 9: the disk
    is full or failing. 7: a daemon is not ready, or the certificate has expired.

    Example: consilium server status trial
    """
    from server.operations import provision
    from server.operations.port_certificate import port_certificate
    from server.operations.supervisor import daemon_standings, no_daemons
    from server.study.status import disk_problem, ledger_problem

    workspace = Workspace(directory)
    workspace.check_there()
    disk = disk_problem(workspace)
    found, ledger, shown = daemon_standings(workspace), ledger_problem(workspace), None
    running = any(one.daemon.startswith("superlink") and one.state == "ready" for one in found)
    nodes = _nodes(workspace) if running else None
    sites = [] if nodes is None else [one for one in provision.standings(workspace, nodes=nodes) if one.admitted]
    if (workspace.port_keeper().gateway_dir / "server.crt").exists():
        shown = port_certificate(workspace, now=datetime.now(UTC))
    if as_json:
        facts = {
            "daemons": [dataclasses.asdict(one) for one in found],
            "certificate": None if shown is None else shown.line,
            "certificate_until": None if shown is None else shown.until.isoformat(),
            "ledger": ledger,
            "disk": disk,
            "sites": {site.site: site.node for site in sites},
        }
        say(json_text(facts))
    else:
        say(joined(one.line for one in found) or f"daemons: {no_daemons(workspace)}")
        if shown is not None:
            say(shown.line)
        if sites:
            say(online_text(sites, disk_full=disk is not None))
        if disk is not None:
            say(f"DISK: {disk}. Until there is room, the daemons' states above may be old: their logs are on this disk")
        if ledger is not None:
            say(f"LEDGER: {ledger}")
    if ledger is not None:
        raise typer.Exit(LedgerCorrupt.exit_code)
    if disk is not None:
        raise typer.Exit(StorageFailed.exit_code)
    if not found or any(one.state != "ready" for one in found) or (shown is not None and shown.over):
        raise typer.Exit(DaemonFailed.exit_code)


server_app.command("log")(server_log)
