"""A hospital that asks to join a study, and the operator who admits it, for tests."""

from __future__ import annotations

from pathlib import Path

from client.site.enrolment import SiteKit, create_site
from client.site.registry import Registry
from common.admission import JoinRequest, read_request
from server.operations import provision
from server.study.workspace import Site, Workspace


def join(workspace: Workspace, folder: Path, name: str, *, pool: str = "") -> JoinRequest:
    """What a hospital does with its kit."""
    provision.make_kit(workspace, name, folder / "kit")
    (folder / "data").mkdir(exist_ok=True)
    machine = Registry(folder / "pools.json")  # every hospital has one of its own
    kit = SiteKit.load(folder / "kit")
    create_site(folder / "site", pool=pool or name, data=folder / "data", kit=kit, registry=machine)
    return read_request(folder / "site" / "request.json")


def approve(workspace: Workspace, request: JoinRequest, *, node_id: int = 7, fingerprint: str = "") -> Site:
    return provision.approve(
        workspace,
        request,
        site=request.site,
        pool=request.pool,
        fingerprint=fingerprint or request.fingerprint,
        register=lambda _key, _name: node_id,
    )
