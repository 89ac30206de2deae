"""Defines ``consilium site log`` and ``consilium server log``: print security events, or follow and send them."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from consilium.cli.options import LOG_TO, SiteDir, StudyDir
from consilium.cli.say import json_text, say

if TYPE_CHECKING:
    from common.security_log.follow import Source

Schema = Annotated[bool, typer.Option("--schema", help="Print the JSON Schema of a line, and nothing else.")]
Targets = Annotated[list[str] | None, LOG_TO]


class _Printed:
    def send(self, record: Mapping[str, Any]) -> None:
        from common.security_log.events import line_of

        say(line_of(record))


def site_log(site_dir: SiteDir, log_to: Targets = None, schema: Schema = False) -> None:
    """Print this site's security events as JSON lines: offers, charges, refusals, vetoes, disclosures, alarms.

    With --log-to the command keeps running and sends each event, as `site up --log-to` does. How far each target
    has received the events is stored in logs/. No line contains a patient, a case, a code, a note or a path.
    Example: consilium site log --site-dir /srv/consilium --log-to journald
    """
    from client.operations.security_events import site_sources

    _log(site_dir, party="site", sources=site_sources, targets=log_to, schema=schema)


def server_log(directory: StudyDir, log_to: Targets = None, schema: Schema = False) -> None:
    """Print the server's security events as JSON lines: charges, refusals, offers answered, alarms, refused requests.

    With --log-to the command keeps running and sends each event, as `server up --log-to` does. Sign-ins are logged by
    `dashboard --log-to`.
    Example: consilium server log trial
    """
    from server.operations.security_events import server_sources

    _log(directory, party="server", sources=server_sources, targets=log_to, schema=schema)


def _log(directory: Path, *, party: str, sources: Any, targets: list[str] | None, schema: bool) -> None:
    from common.security_log.events import json_schema
    from common.security_log.follow import send_all
    from common.security_log.program import follower

    if schema:
        say(json_text(json_schema()))
    elif targets:
        follower(directory, party=party, open_sources=sources, targets=targets).run(stop=threading.Event().wait)
    else:
        found: tuple[str, list[Source]] = sources(directory)
        send_all(found[1], party=party, name=found[0], sink=_Printed())
