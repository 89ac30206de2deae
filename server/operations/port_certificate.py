"""States whether the certificate of the port that sites reach is valid, and what to do if it is not."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from common.errors import InvalidInput
from common.pki import validity
from server.study.workspace import Workspace

RENEW_DAYS = 21
"""If the public port's certificate has fewer days left than this, the operator is told to renew it."""


@dataclass(frozen=True, slots=True)
class CertificateStanding:
    """State of the public port's certificate.

    Attributes:
        until: Time at which the certificate expires.
        over: True if it is not valid now: it has expired, or it begins later.
        line: One line for the operator, with the remedy if the certificate is not valid now or expires within
            :data:`RENEW_DAYS` days.
    """

    until: datetime
    over: bool
    line: str


def port_certificate(workspace: Workspace, *, now: datetime) -> CertificateStanding:
    """Return the state of the public port's certificate, which sites see when they connect.

    Args:
        workspace: The study.
        now: The time to compare with.

    Returns:
        The state.
    """
    since, until = validity(workspace.port_keeper().gateway_dir / "server.crt")
    line, clock, over = f"certificate valid until {until:%Y-%m-%d}", "", not since <= now < until
    if now >= until:
        line = f"CERTIFICATE EXPIRED on {until:%Y-%m-%d %H:%M} UTC: no site can open a new connection"
    elif now < since:
        line = f"CERTIFICATE NOT YET VALID, only from {since:%Y-%m-%d %H:%M} UTC: no site can open a new connection"
        clock = "set this server's clock if it is wrong, otherwise "
    if over or until - now < timedelta(days=RENEW_DAYS):
        line += f"; to fix: {clock}`consilium provision renew {shlex.quote(str(workspace.root))}`"
    return CertificateStanding(until, over, line)


def certificate_obstacle(workspace: Workspace) -> str:
    """Explain why the gateway must not start with its certificate.

    With an expired certificate it would start, and no site could connect.

    Args:
        workspace: The study whose gateway it is.

    Returns:
        The reason with its remedy; empty if the certificate is valid now.
    """
    try:
        certificate = port_certificate(workspace, now=datetime.now(UTC))
    except InvalidInput as error:  # the other daemons run without it
        return str(error)
    return certificate.line if certificate.over else ""
