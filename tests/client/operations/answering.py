"""Stands in for a study's gateway with a TLS server on loopback, and makes a site from the study's kit."""

from __future__ import annotations

import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from http.server import BaseHTTPRequestHandler
from pathlib import Path

from client.site.enrolment import create_site
from server.operations import provision
from server.study.workspace import Endpoint, Workspace
from tests.small_servers import http_server, serving, tls_of
from tests.studies import kit_of, made_study


@contextmanager
def answering(
    root: Path, handler: type[BaseHTTPRequestHandler], *, now: datetime | None = None
) -> Iterator[tuple[Path, Workspace, ssl.SSLContext]]:
    """Yield the site's directory, the study's workspace and the server's TLS context. ``now`` dates its certificate."""
    workspace = made_study(root / "study")
    server = http_server(handler)
    endpoint = Endpoint(host="localhost", port=server.server_port, internal_port=1)
    provision.set_up_server(workspace, endpoint, now=now)
    context = tls_of(workspace.gateway_dir / "server.crt", workspace.gateway_dir / "server.key")
    with serving(server, tls=context):
        (root / "data").mkdir()
        (root / "data" / "cases.csv").write_text("image,label,patient_id\na.nii,b.nii,p1\n")
        for name in ("a.nii", "b.nii"):
            (root / "data" / name).touch()
        create_site(root / "site", pool="north", data=root / "data", kit=kit_of(workspace))
        yield root / "site", workspace, context
