"""Makes a study's directory on disk, its server, and hospitals that join it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from client.site.enrolment import SiteKit, create_site
from client.site.registry import Registry
from common.admission import JoinRequest, read_request
from common.config import Study
from common.pki import create_authority
from server.operations import provision
from server.study.create_study import create_study, write_kit
from server.study.workspace import Endpoint, Site, Workspace
from tests.worlds import make_study

ENDPOINT = Endpoint(host="localhost", port=8443, internal_port=8000)


def made_study(folder: Path, study: Study | None = None, **given: Any) -> Workspace:
    """Make a new study in this folder; ``given`` are further arguments of :func:`create_study`."""
    workspace = Workspace(folder)
    create_study(workspace, study or make_study(), **given)
    return workspace


def served_study(folder: Path, study: Study | None = None, *, endpoint: Endpoint = ENDPOINT, **given: Any) -> Workspace:
    """Make a new study whose server has its keys and certificates."""
    workspace = made_study(folder, study, **given)
    provision.set_up_server(workspace, endpoint)
    return workspace


def kit_without_keys(workspace: Workspace, folder: Path) -> Path:
    """Write the kit of site north into ``folder``, for a study whose server is not set up."""
    workspace.save_endpoint(ENDPOINT)
    authority = create_authority(folder / "authority").certificate
    addresses = {"superlink": "localhost:8443", "objects_url": "https://localhost:8443"}
    write_kit(workspace, folder / "kit", site="north", authority=authority, **addresses)
    return folder / "kit"


def kit_folder(workspace: Workspace, name: str = "north") -> Path:
    """Make the kit that the operator gives a hospital."""
    folder = workspace.root.parent / f"kit-{workspace.root.name}-{name}"
    provision.make_kit(workspace, name, folder)
    return folder


def kit_of(workspace: Workspace, name: str = "north") -> SiteKit:
    return SiteKit.load(kit_folder(workspace, name))


def join(workspace: Workspace, folder: Path, name: str = "north", *, pool: str = "") -> JoinRequest:
    """Set up a site from a kit, as a hospital does on its own machine."""
    (folder / "data").mkdir(parents=True, exist_ok=True)
    provision.make_kit(workspace, name, folder / "kit")
    machine, kit = Registry(folder / "pools.json"), SiteKit.load(folder / "kit")
    create_site(folder / "site", pool=pool or name, data=folder / "data", kit=kit, registry=machine)
    return read_request(folder / "site" / "request.json")


def approve(workspace: Workspace, request: JoinRequest, *, node_id: int = 7, **given: Any) -> Site:
    """Approve a join request, as an operator does who has compared it; ``given`` go to :func:`provision.approve`."""
    asked = {"site": request.site, "pool": request.pool, "fingerprint": request.fingerprint}
    return provision.approve(workspace, request, register=lambda _key, _name: node_id, **asked | given)
