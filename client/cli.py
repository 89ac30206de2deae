"""``consilium site …``: what a hospital runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from client.setup import SiteKit, create_site
from client.train_cli import train

site_app = typer.Typer(
    no_args_is_help=True, add_completion=False, help="A hospital's side: train teachers, serve codes."
)
site_app.command("train")(train)

SiteDir = Annotated[Path, typer.Option("--site-dir", help="The site's directory.")]


@site_app.command("init")
def init(
    name: Annotated[str, typer.Argument(help="The site's name, as registered with the consortium.")],
    kit: Annotated[Path, typer.Option(help="Startup kit from `consilium study kit`.")],
    data: Annotated[Path, typer.Option(help="The site's own dataset, in MSD layout.")],
    site_dir: SiteDir,
    pool: Annotated[
        str | None, typer.Option(help="Stable name of the patient pool; the site's name by default.")
    ] = None,
) -> None:
    """Create a site's directory: its node key, its policy (site.toml) and its copy of the study.

    Example: consilium site init north --kit kit --data /data/north --site-dir /srv/consilium
    """
    create_site(site_dir, name=name, pool=pool or name, data=data, kit=SiteKit.load(kit))
    typer.echo(f"{site_dir}: created; send {site_dir / 'keys' / 'node.pub'} to the consortium")


@site_app.command("serve")
def serve(
    site_dir: SiteDir,
    socket: Annotated[Path | None, typer.Option(help="Unix socket; worker.sock in the site's directory.")] = None,
) -> None:
    """Serve codes until stopped: the long-lived teacher worker behind a Unix socket.

    Example: consilium site serve --site-dir /srv/consilium
    """
    from client.worker import run_worker

    run_worker(site_dir, socket=socket or site_dir / "worker.sock")


@site_app.command("up")
def up(site_dir: SiteDir) -> None:
    """Run the site's daemons in the foreground: the teacher worker and the SuperNode.

    Example: consilium site up --site-dir /srv/consilium
    """
    from client.daemons import site_up

    site_up(site_dir, on_ready=lambda: typer.echo("site is up", err=True))


@site_app.command("status")
def status(
    site_dir: SiteDir,
    as_json: Annotated[bool, typer.Option("--json", help="Machine-readable output.")] = False,
) -> None:
    """What this site has spent of its patient pool's budget, by its own ledger.

    Example: consilium site status --site-dir /srv/consilium
    """
    from client.setup import site_status

    facts = site_status(site_dir)
    if as_json:
        typer.echo(json.dumps(facts, indent=1))
    else:
        for key, value in facts.items():
            typer.echo(f"{key}: {value}")
