"""Defines ``consilium site peers``: shows the other hospitals' key fingerprints, and records confirmations."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from common.errors import InvalidInput
from common.plain import joined
from consilium.cli.options import AsJson, SiteDir
from consilium.cli.say import ask_yes_no, json_text, say

if TYPE_CHECKING:
    from client.site.peers import PeersView


def peers(
    site_dir: SiteDir,
    take: Annotated[Path | None, typer.Option(help="Read the consortium's list from this file (peers.json).")] = None,
    fetch: Annotated[bool, typer.Option("--fetch", help="Fetch the consortium's list from the server.")] = False,
    confirm: Annotated[
        str | None,
        typer.Option(
            help="Name of a site to confirm; the command asks for the fingerprint that the site read out to you."
        ),
    ] = None,
    fingerprint: Annotated[
        str | None, typer.Option(help="With --confirm: the fingerprint as that site read it out, SHA256:….")
    ] = None,
    confirm_all: Annotated[
        bool,
        typer.Option(
            "--confirm-all",
            help="Show all hospitals that are not confirmed, and ask once whether you compared all fingerprints.",
        ),
    ] = False,
    distrust: Annotated[str | None, typer.Option(help="Name of a site whose confirmation is revoked at once.")] = None,
    as_json: AsJson = False,
) -> None:
    """List the study's other hospitals by key fingerprint: confirmed here, not confirmed, or changed.

    In a study with a sealed sum this site answers only together with sites that were confirmed here. Call each hospital
    at a number that you did not get from the consortium, and let it read its fingerprint to you. The consortium's list
    alone proves nothing.
    Example: consilium site peers --site-dir /srv/consilium --fetch --confirm south
    """
    from client.site import peers as known
    from common.peers import read_peers

    if fingerprint is not None and confirm is None:
        raise InvalidInput("--fingerprint", limit="only together with --confirm")
    if confirm is not None:
        known.check_other(site_dir, confirm)
    if take is not None:
        known.store_list(site_dir, read_peers(take))
    if fetch:
        known.fetch(site_dir, on_wait=partial(say, err=True))
    if distrust is not None:
        known.distrust(site_dir, distrust)
    if confirm is not None:
        said = fingerprint or _typed(confirm)
        known.confirm(site_dir, confirm, said)
    view = known.peers_view(site_dir)
    if confirm_all and view.with_trust(known.PeerTrust.NOT_CONFIRMED):
        say(peers_text(view), err=True)
        if not ask_yes_no("have you compared each NOT CONFIRMED fingerprint with that hospital itself?", err=True):
            say("nothing was confirmed; to fix: call these hospitals, then answer y at a terminal", err=True)
            raise typer.Exit(1)
        known.confirm_shown(site_dir, view)
        view = known.peers_view(site_dir)
    say(json_text(view.to_json()) if as_json else peers_text(view))


def _typed(site: str) -> str:
    """Ask for the fingerprint that a site read out; raise InvalidInput if the input ends without one."""
    try:
        return str(typer.prompt(f"the fingerprint that {site} read out", err=True))
    except typer.Abort:
        raise InvalidInput(
            "no fingerprint was typed, so nothing was confirmed",
            remedy="run the command at a terminal, or give --fingerprint SHA256:… as the hospital read it out",
        ) from None


def consent_to_peers(site_dir: Path) -> str:
    """Return the part of a consent sheet that says with which sites this site's codes are added up.

    Args:
        site_dir: The site's directory.

    Returns:
        The text.
    """
    from client.site.peers import peers_view

    said = "\n".join(f"  {line}" for line in peers_text(peers_view(site_dir)).splitlines())
    return f"""\
WITH WHOM YOUR CODES ARE ADDED UP
{said}
  Your site answers only together with those confirmed here. Confirm a hospital after it has read its fingerprint
  out to you itself: if the consortium invented a hospital, it could read your codes."""


def peers_text(view: PeersView) -> str:
    """Return the peers as text: one site and key on each line, then the problems and what to do about them."""
    from common.peers import fingerprint

    width = max(len(name) for name in (view.own.site, *(known.peer.site for known in view.peers)))
    lines = [f"{view.own.site:{width}}  {fingerprint(view.own.key)}  this site: read this out to the others"]
    for known in view.peers:
        told = "" if known.trust == "confirmed" else f" (from {', '.join(known.heard)})"
        lines.append(f"{known.peer.site:{width}}  {known.fingerprint}  {known.trust.value}{told}")
    return joined([*lines, *(f"{problem.text}; to fix: {problem.remedy}" for problem in view.problems())])
