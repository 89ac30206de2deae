"""Defines ``consilium site dashboard``: serves the hospital's own page on loopback, read only."""

from __future__ import annotations

import secrets
import sys
from pathlib import Path
from typing import Annotated

import typer

from consilium.cli.options import SiteDir, check_port
from consilium.cli.say import say


def dashboard(
    site_dir: SiteDir,
    data: Annotated[
        Path | None, typer.Option(help="Labelled cases to show, in any layout; by default all of this site's own.")
    ] = None,
    port: Annotated[int, typer.Option(help="Port on 127.0.0.1.", min=1, max=65535)] = 8051,
) -> None:
    """Serve this hospital's own page: consent, budget, peers, answers, alarms, and its networks side by side.

    Only browsers on this machine can open it, at the printed address, which contains a key that is new at each start.
    The page changes nothing; it shows the command that pauses the study. Ctrl-C ends it.
    Example: consilium site dashboard --site-dir /srv/consilium
    """
    from client.operations.own_page import SitesOwnPage
    from consilium.cli.site_consent import consent_sheet
    from server.dashboard.hospital import serve_hospital

    check_port("127.0.0.1", port)
    page = SitesOwnPage(site_dir, sheet=lambda study, patients: consent_sheet(study, patients=patients), data=data)
    key = secrets.token_urlsafe(24)
    say(f"this site's page: http://localhost:{port}/?key={key}")
    sys.stdout.flush()
    serve_hospital(page, key=key, port=port)
