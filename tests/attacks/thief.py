"""Submits an app that tries to steal keys, by Flower's client with SuperLink's address and certificate authority."""

from __future__ import annotations

import json
import ssl
import subprocess
import urllib.error
import urllib.request
from dataclasses import dataclass
from pathlib import Path

from common.engine import flower_env
from common.process import executable
from server.operations.daemons import FlowerServer

THIEF = {
    "pyproject.toml": """
[project]
name = "thief"
version = "1.0.0"
description = "reads what lies at the server"
license = "Apache-2.0"
dependencies = []
[tool.flwr.app]
publisher = "somebody"
fab-include = ["thief/**/*.py"]
[tool.flwr.app.components]
serverapp = "thief.app:app"
clientapp = "thief.app:client"
[tool.flwr.app.config]
study = ""
out = ""
""",
    "thief/__init__.py": "",
    "thief/app.py": """
from pathlib import Path
from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp
app = ServerApp()
client = ClientApp()
@app.main()
def main(grid, context):
    study, out = Path(context.run_config["study"]), Path(context.run_config["out"])
    read, wanted = [], ("keys/sealing.key", "keys/ledger.key", "tls/authority/ca.key", "ledger.sqlite")
    for name in (*wanted, "flower/operator.secret"):
        try:
            read += [name] if (study / name).read_bytes() else []
        except OSError:
            pass
    out.with_suffix(".part").write_text("\\n".join(read))
    out.with_suffix(".part").rename(out)
""",
}
"""An app whose server half tries to read four private files of a study and one of SuperLink's."""


@dataclass(frozen=True)
class Attacker:
    """Attacks with Flower's own client and SuperLink's address and authority, from the server's machine or
    the gateway.
    """

    home: Path

    @classmethod
    def make(cls, server: FlowerServer, home: Path) -> Attacker:
        home.mkdir()
        (home / "ca.crt").write_bytes(server.identity.authority.read_bytes())
        (home / "config.toml").write_text(
            f'[superlink]\ndefault = "s"\n[superlink.s]\naddress = "{server.address}"\n'
            f'root-certificates = "{home / "ca.crt"}"\n'
        )
        for name, text in THIEF.items():
            path = home / "app" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        return cls(home)

    def flwr(self, *words: str) -> str:
        """Return everything that one of Flower's commands prints."""
        done = subprocess.run(
            [executable("flwr"), *words],
            env=flower_env(self.home, HOME=str(self.home)),
            cwd=self.home,
            capture_output=True,
            text=True,
            check=False,
            timeout=600,
        )
        return done.stdout + done.stderr

    def submit(self, study: Path, out: Path) -> str:
        """Submit the thief, which is to write to ``out``; return what Flower's client prints."""
        config = self.home / "run.toml"
        config.write_text(f'study = "{study}"\nout = "{out}"\n')
        return self.flwr("run", str(self.home / "app"), "s", "--run-config", str(config), "--format", "json")


def described_routes(server: FlowerServer) -> tuple[str, ...]:
    """Return every route that SuperLink lists."""
    context = ssl.create_default_context(cafile=str(server.identity.authority))
    with urllib.request.urlopen(f"https://{server.address}/openapi.json", context=context, timeout=600) as answer:
        return tuple(json.load(answer)["paths"])


def open_routes(server: FlowerServer) -> set[str]:
    """Return the routes that answer a call with no or a wrong secret by anything but 401 or an empty answer."""
    context = ssl.create_default_context(cafile=str(server.identity.authority))
    routes = [path for path in described_routes(server) if path != "/health"]
    assert len(routes) > 60
    headers = {"content-type": "application/protobuf", "accept": "application/protobuf"}
    found = set()
    for path in routes:
        for said in ({}, {"authorization": "Bearer " + "0" * 64}, {"authorization": "Basic bm9vcDpub29w"}):
            request = urllib.request.Request(
                f"https://{server.address}{path}", data=b"", headers=headers | said, method="POST"
            )
            try:
                with urllib.request.urlopen(request, context=context, timeout=600) as answer:
                    found |= {path} if answer.read() else set()
            except urllib.error.HTTPError as error:
                found |= set() if error.code == 401 else {path}
    return found
