"""A TLS server on loopback that stands in for a study's gateway, and a site made from its kit."""

from __future__ import annotations

import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from client.site.enrolment import SiteKit, create_site
from server.operations import provision
from server.study import create_study as setup
from server.study.workspace import Endpoint, Workspace
from tests.federation import make_study


@contextmanager
def answering(
    root: Path, handler: type[BaseHTTPRequestHandler], *, now: datetime | None = None
) -> Iterator[tuple[Path, Workspace, ssl.SSLContext]]:
    """The site's directory, the study's, and what the server presents; its certificate was made at ``now``."""
    workspace = Workspace(root / "study")
    setup.create_study(workspace, make_study())
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.handle_error = lambda *_: None  # type: ignore[method-assign]  # clients that do not trust us hang up
    endpoint = Endpoint(host="localhost", port=server.server_port, internal_port=1)
    provision.set_up_server(workspace, endpoint, now=now)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(workspace.gateway_dir / "server.crt", workspace.gateway_dir / "server.key")
    server.socket = context.wrap_socket(server.socket, server_side=True, do_handshake_on_connect=False)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    provision.make_kit(workspace, "north", root / "kit")
    (root / "data").mkdir()
    (root / "data" / "cases.csv").write_text("image,label,patient_id\na.nii,b.nii,p1\n")
    for name in ("a.nii", "b.nii"):
        (root / "data" / name).touch()
    create_site(root / "site", pool="north", data=root / "data", kit=SiteKit.load(root / "kit"))
    yield root / "site", workspace, context
    server.shutdown()
    server.server_close()
    thread.join()
