"""Defines ``consilium site disclose``: discloses one draw of a sealed sum to an auditor that this hospital chose."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import typer

from common.errors import InvalidInput
from consilium.cli.options import AsJson, SiteDir
from consilium.cli.say import agreed, json_text, say


def disclose(
    draw: Annotated[str, typer.Argument(help="The draw: at least the first twelve digits of its id.")],
    site_dir: SiteDir,
    to: Annotated[
        str,
        typer.Option(
            "--to", help="The auditor's key: 64 hex digits, or the file auditor.json that the auditor sent you."
        ),
    ],
    out: Annotated[
        Path | None, typer.Option(help="The new file for the auditor; disclosure-SITE-DRAW.json by default.")
    ] = None,
    yes: Annotated[
        bool,
        typer.Option(
            "--yes",
            help="Ask no question. Compare the fingerprint of the auditor's key, and read the cost, before you use it.",
        ),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Disclose one draw (attempt at a sealed sum) to an auditor, who determines which hospital spoiled or distorted it.

    The auditor learns this site's code with its own noise share for every query of that draw, and nothing else. The
    file is encrypted to the auditor's key. The site's ledger records the auditor's key, and the cost to the patient
    pool if the auditor published the code. Compare the key's fingerprint with the auditor first.
    Example: consilium site disclose 3f9a1c04b7d2 --to auditor.json --site-dir /srv/consilium
    """
    from client.policy import load_site
    from client.site.disclose import disclose as disclose_draw
    from client.site.disclose import look_at_draw
    from common.disclosure import auditor_fingerprint

    auditor = _auditor_key(to)
    shown = look_at_draw(site_dir, draw)
    target = out or Path(f"disclosure-{load_site(site_dir).site.replace('/', '-')}-{shown.roster[:12]}.json")
    say(
        f"draw {shown.roster[:16]}: your code with your share of the noise, of {shown.queries} queries, to the auditor "
        f"with the key {auditor_fingerprint(auditor)}. While the auditor keeps it secret, nothing more is released. If "
        f"the auditor published it, your patient pool would have spent {shown.if_told} at most",
        err=as_json,
    )
    question = "Have you compared this fingerprint with the auditor, and may they have the code?"
    if not yes and not agreed(question, err=as_json):
        raise InvalidInput(
            "the disclosure was not confirmed, so nothing was disclosed",
            limit="the answer y",
            remedy="compare the fingerprint with the auditor; then answer y at a terminal, or give --yes",
        )
    disclose_draw(site_dir, shown.roster, auditor=auditor, out=target, now=datetime.now(UTC))
    if as_json:
        facts = {"draw": shown.roster, "auditor": auditor, "queries": shown.queries, "file": str(target)}
        say(json_text({**facts, "if_told": shown.if_told.to_json()}))
        return
    say(f"{target}: send it to the auditor; the site's ledger records the disclosure")


def _auditor_key(given: str) -> str:
    """Return an auditor's disclosure key as 64 hex digits; accept the digits or the path of ``auditor.json``."""
    if len(given) == 64 and not set(given) - set("0123456789abcdef"):
        return given
    from consilium.audit.auditor import read_auditor

    path = Path(given)
    if not path.is_file():
        raise InvalidInput(
            "--to",
            value=given[:80],
            limit="64 hex digits, or an existing file auditor.json of the auditor",
            remedy="check the path; the auditor makes the file with `consilium dispute keys`",
        )
    return read_auditor(path).sealing_key
