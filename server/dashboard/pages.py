"""The pages: views rendered by templates, each usable without a script; scripts only keep them current."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2
from fastapi import APIRouter, Request
from fastapi.responses import HTMLResponse

from server.dashboard import views
from server.dashboard.auth import Session
from server.dashboard.security import Gate
from server.dashboard.service import Service

LIVE: Mapping[str, tuple[str, ...]] = {
    "overview": ("status", "alarms", "budget", "run", "sites", "recent"),
}
"""Live pages and their blocks; each block is ``templates/blocks/<page>_<block>.html``, ``status`` is every page's."""

NAVIGATION = (("/", "overview", "Overview"),)


def live_facts(service: Service, page: str) -> dict[str, Any]:
    """What the blocks of a live page are rendered from."""
    return {"overview": service.overview()}


def live_blocks(service: Service, templates: jinja2.Environment, page: str) -> dict[str, str]:
    """The HTML of every block of a live page."""
    facts = live_facts(service, page)
    return {name: templates.get_template(block_file(page, name)).render(facts) for name in LIVE[page]}


def block_file(page: str, block: str) -> str:
    return f"blocks/{'all' if block == 'status' else page}_{block}.html"


def router(service: Service, gate: Gate, templates: jinja2.Environment) -> APIRouter:
    """Every page but the sign-in."""
    routes = APIRouter(include_in_schema=False)

    def page(request: Request, name: str, make: Callable[[Session], dict[str, Any]]) -> HTMLResponse:
        session = gate.for_page(request)
        facts = {
            "page": name,
            "user": session,
            "navigation": NAVIGATION,
            "live": LIVE.get(name, ()),
            "block_file": block_file,
            "overview": service.overview(),
            **make(session),
        }
        return HTMLResponse(templates.get_template(f"{name}.html").render(facts))

    @routes.get("/")
    def overview(request: Request) -> HTMLResponse:
        return page(request, "overview", lambda _session: {})

    return routes


def static_version(folder: Path) -> str:
    """A short hash of every static file: a page asks for them under it, so a new release is never half old."""
    total = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            total.update(path.read_bytes())
    return total.hexdigest()[:8]


def add_filters(environment: jinja2.Environment) -> None:
    """How templates write numbers, times and hashes."""

    def clock(time: str | None) -> str:
        return "" if time is None else datetime.fromisoformat(time).strftime("%H:%M:%S")

    def day(time: str | None) -> str:
        return "" if time is None else datetime.fromisoformat(time).strftime("%Y-%m-%d %H:%M:%S")

    def percent(share: float) -> str:
        return f"{100 * share:.1f} %" if 0 < share < 0.1 else f"{100 * share:.0f} %"

    def short(name: str) -> str:
        return name[:10]

    def epsilon(value: float | None) -> str:
        return "–" if value is None else views.up(value)

    environment.filters.update(
        clock=clock,
        day=day,
        percent=percent,
        short=short,
        epsilon=epsilon,
        duration=views.duration,
        count=lambda value: f"{value:,}",
        number=lambda value: f"{value:.4g}",
    )
