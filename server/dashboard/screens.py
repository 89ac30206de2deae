"""Renders pages from templates, and defines the templates' filters for numbers, times and hashes.

The pages and the live stream use it. An undefined name in a template raises an error.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cache
from pathlib import Path
from typing import Annotated, Any

import jinja2
from fastapi import Depends, Request
from fastapi.responses import HTMLResponse
from markupsafe import Markup, escape

from common import __version__
from common.planes import PLANES
from common.privacy.figures import delta_text, epsilon_text, noise_text
from common.wording import ACCOUNTANTS, MISSED, declined_words, duration
from server.dashboard.auth import Session
from server.dashboard.labels import labels_page, student_page
from server.dashboard.security import SignedIn
from server.dashboard.service import DashboardService, Here

HERE = Path(__file__).parent
LIVE: Mapping[str, tuple[str, ...]] = {
    "overview": ("status", "verdict", "alarms", "budget", "sites", "run", "recent"),
    "study": ("status", "budget", "batches", "refusals"),
    "sites": ("status", "sites"),
    "ledger": ("status",),
    "labels": ("status", "list"),
    "student": ("status", "facts", "loss", "examples"),
    "studies": ("status", "table"),
    "planner": ("status",),
}
"""Every page of the navigation, in its order, with the names of the blocks that are refreshed while it is open.

All pages share the block ``status``.
"""

NAVIGATION = tuple(("/" if name == "overview" else f"/{name}", name, name.capitalize()) for name in LIVE)
"""Address, name and title of each page of :data:`LIVE`."""


def _live_facts(service: DashboardService, page: str) -> dict[str, Any]:
    """Return the variables of the templates of a live page's blocks, by name."""
    facts: dict[str, Any] = {"overview": service.overview(), "page": page}
    match page:
        case "study":
            facts["study"] = service.study()
        case "sites":
            facts["reports"], facts["certificate_ends"] = service.reports(), service.certificate_ends()
        case "studies":
            facts["studies"] = service.studies()
        case "labels" | "student":
            facts["labels"] = labels_page(service)
            if page == "student":
                facts["student"] = student_page(service, facts["labels"])
    return facts


def live_blocks(service: DashboardService, templates: jinja2.Environment, page: str) -> dict[str, str]:
    """Render every block of a live page.

    Args:
        service: The dashboard's service.
        templates: The templates.
        page: Name of the page.

    Returns:
        The HTML of each block by name.
    """
    facts = _live_facts(service, page)
    files = {name: f"blocks/{'all' if name == 'status' else page}_{name}.html" for name in LIVE[page]}
    return {name: templates.get_template(file).render(facts) for name, file in files.items()}


@dataclass(frozen=True, slots=True)
class PageContext:
    """The objects with which a page is rendered: the dashboard's service, the user's session and the templates."""

    service: DashboardService
    session: Session
    templates: jinja2.Environment

    def show(self, name: str, facts: Mapping[str, Any] = {}, *, template: str = "") -> HTMLResponse:
        """Render a page.

        Args:
            name: Name of the page.
            facts: Further variables of the template, besides those of the page's live blocks.
            template: Template to use instead of the page's own.

        Returns:
            The page.
        """
        everything = {
            "user": self.session,
            "navigation": NAVIGATION,
            **_live_facts(self.service, name),
            **facts,
        }
        return HTMLResponse(self.templates.get_template(template or f"{name}.html").render(everything))


async def _screen(request: Request, service: Here, session: SignedIn) -> PageContext:
    return PageContext(service, session, request.app.state.templates)


OnScreen = Annotated[PageContext, Depends(_screen)]
"""Dependency that gives a page's handler its :class:`PageContext`."""


@cache
def environment() -> jinja2.Environment:
    """Return the templates' environment, which is created once in a process.

    Undefined names raise an error, and text is escaped.
    """
    made = jinja2.Environment(
        loader=jinja2.FileSystemLoader(HERE / "templates"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=_shown,
        auto_reload=False,
    )
    made.filters.update(FILTERS)
    made.globals["asset_version"] = __version__ + "-" + static_version(HERE / "static")
    return made


def error_page(status: int, title: str, words: str, *, headers: Mapping[str, str] | None = None) -> HTMLResponse:
    """Return the page that tells of an error.

    Args:
        status: The HTTP status.
        title: The page's title.
        words: What is wrong.
        headers: Further headers.

    Returns:
        The page.
    """
    html = environment().get_template("error.html").render(status=status, title=title, words=words)
    return HTMLResponse(html, status_code=status, headers=headers)


def viewer_planes(
    grid: Sequence[int], centre: Sequence[int], asked: Mapping[str, int | None] = {}
) -> list[dict[str, Any]]:
    """Return the viewer's three planes, each with the requested slice or the one through the centre.

    Args:
        grid: Numbers of voxels.
        centre: The voxel through which the slices go by default.
        asked: Requested slices by plane.

    Returns:
        Name, letters, last slice and shown slice of each plane.
    """
    planes = []
    for name, plane in PLANES.items():
        size, wanted = grid[plane.fixed], asked.get(name)
        at = centre[plane.fixed] if wanted is None else min(max(wanted, 0), size - 1)
        planes.append({"name": name, "letters": plane.letters, "last": size - 1, "at": at})
    return planes


def static_version(folder: Path) -> str:
    """Return a short hash of all static files, which pages add to their URLs so that browsers fetch changed files."""
    total = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            total.update(path.read_bytes())
    return total.hexdigest()[:8]


def _day(time: str | None) -> str:
    return "" if time is None else datetime.fromisoformat(time).strftime("%Y-%m-%d %H:%M:%S")


def _percent(share: float | None) -> str:
    if share is None:
        return "–"
    return f"{100 * share:.1f}\N{NO-BREAK SPACE}%" if 0 < share < 0.1 else f"{100 * share:.0f}\N{NO-BREAK SPACE}%"


def _size(count: int) -> str:
    return f"{count / 1e6:.1f} MB" if count >= 1e6 else f"{count / 1e3:.1f} kB"


def _maybe(make: Callable[[Any], str]) -> Callable[[Any], str]:
    return lambda value: "–" if value is None else make(value)


_UNSEEN = {
    code: f"\\u{code:04x}"
    for codes in (
        (0, 9),
        (0x0B, 0x0D),
        (0x0E, 0x20),
        (0x7F, 0xA0),
        (0x200B, 0x2010),
        (0x2028, 0x202F),
        (0x2060, 0x2070),
    )
    for code in (*range(*codes), 0x061C, 0xFEFF)
}
"""Characters that are invisible or reverse the order of others; they are shown as code points."""


def _shown(value: Any) -> Any:
    """Return a text with a no-break space after ε, and with invisible characters as code points."""
    if not isinstance(value, str):
        return value
    return (value if value.isprintable() else value.translate(_UNSEEN)).replace("ε ", "ε\N{NO-BREAK SPACE}")


def _marked(text: str) -> Markup:
    """Return a text as HTML: commands between backticks become ``<code>``, and the rest is escaped."""
    parts = str(text).split("`")
    return Markup("").join(
        Markup("<code>{}</code>").format(part) if number % 2 else escape(part) for number, part in enumerate(parts)
    )


FILTERS: Mapping[str, Callable[..., Any]] = {
    "declined": lambda reason: MISSED.get(reason, declined_words(reason)),
    "queued": lambda labels, queue: sorted(labels, key=lambda one: queue.index(one.volume)),
    "accountant": lambda name: ACCOUNTANTS[str(name)],
    "marked": _marked,
    "day": _day,
    "percent": _percent,
    "epsilon": _maybe(epsilon_text),
    "delta": _maybe(delta_text),
    "noise": _maybe(lambda value: noise_text(value, 4)),
    "size": _size,
    "short": lambda name: name[:10],
    "duration": _maybe(duration),
    "count": _maybe(lambda value: f"{value:,}"),
    "number": _maybe(lambda value: f"{value:.4g}"),
    "dice": _maybe(lambda value: f"{value:.3f}"),
    "json": lambda value: json.dumps(value, indent=1, ensure_ascii=False),
}
