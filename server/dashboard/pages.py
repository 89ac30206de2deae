"""The pages: views rendered by templates, each usable without a script; scripts only keep them current."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any

import jinja2
from fastapi import APIRouter, HTTPException, Query, Request
from fastapi.responses import HTMLResponse, RedirectResponse, Response
from markupsafe import Markup, escape
from pydantic import ValidationError

from common.errors import InvalidInput
from common.privacy.figures import delta_text, epsilon_text
from server.dashboard import views
from server.dashboard.auth import Session
from server.dashboard.labels import labels_page, student_page, take_decision
from server.dashboard.pictures import LAYERS, PLANES, picture_key
from server.dashboard.planning import Wishes, planned, wishes_of
from server.dashboard.rows import KINDS, newest_head, row_detail, row_page
from server.dashboard.security import Gate, check_may_decide, check_origin, check_token, read_form
from server.dashboard.service import Service
from server.postprocess.decisions import Verdict

LIVE: Mapping[str, tuple[str, ...]] = {
    "overview": ("status", "alarms", "budget", "sites", "run", "recent"),
    "study": ("status", "budget", "batches", "refusals"),
    "sites": ("status", "sites"),
    "ledger": ("status",),
    "labels": ("status", "list"),
    "student": ("status", "facts"),
    "planner": ("status",),
}
"""Live pages and their blocks; each block is ``templates/blocks/<page>_<block>.html``, ``status`` is every page's."""

NAVIGATION = (
    ("/", "overview", "Overview"),
    ("/study", "study", "Study"),
    ("/sites", "sites", "Sites"),
    ("/ledger", "ledger", "Ledger"),
    ("/labels", "labels", "Labels"),
    ("/student", "student", "Student"),
    ("/planner", "planner", "Planner"),
)
ROWS = 40


def live_facts(service: Service, page: str) -> dict[str, Any]:
    """What the blocks of a live page are rendered from."""
    facts: dict[str, Any] = {"overview": service.overview(), "page": page}
    match page:
        case "study":
            facts["study"] = service.study()
        case "sites":
            facts["reports"] = service.reports()
        case "labels" | "student":
            facts["labels"] = labels_page(service, service.label_files)
            if page == "student":
                facts["student"] = student_page(service, facts["labels"])
    return facts


def live_blocks(service: Service, templates: jinja2.Environment, page: str) -> dict[str, str]:
    """The HTML of every block of a live page."""
    facts = live_facts(service, page)
    return {name: templates.get_template(block_file(page, name)).render(facts) for name in LIVE[page]}


def block_file(page: str, block: str) -> str:
    return f"blocks/{'all' if block == 'status' else page}_{block}.html"


def router(service: Service, gate: Gate, templates: jinja2.Environment) -> APIRouter:
    """Every page but the sign-in."""
    routes = APIRouter(include_in_schema=False)
    follower, files = service.follower, service.label_files
    ledger = follower.workspace.ledger_file

    def show(name: str, session: Session, facts: dict[str, Any], *, template: str = "") -> HTMLResponse:
        everything = {
            "user": session,
            "navigation": NAVIGATION,
            "live": not template,
            **live_facts(service, name),
            **facts,
        }
        return HTMLResponse(templates.get_template(template or f"{name}.html").render(everything))

    @routes.get("/")
    def overview(request: Request) -> HTMLResponse:
        return show("overview", gate.for_page(request), {})

    @routes.get("/study")
    def study(request: Request) -> HTMLResponse:
        return show("study", gate.for_page(request), {"noise": service.noise()})

    @routes.get("/sites")
    def sites(request: Request) -> HTMLResponse:
        return show("sites", gate.for_page(request), {})

    @routes.get("/ledger")
    def rows(
        request: Request,
        kind: str = "",
        text: Annotated[str, Query(max_length=128)] = "",
        before: Annotated[str, Query(pattern="^[0-9]{0,18}$")] = "",
        after: Annotated[str, Query(pattern="^[0-9]{0,18}$")] = "",
    ) -> HTMLResponse:
        session = gate.for_page(request)
        found = row_page(
            ledger,
            kind=kind or None,
            text=text,
            before=int(before) if before else None,
            after=int(after) if after else None,
            limit=ROWS,
        )
        facts = {
            "rows": found,
            "kinds": KINDS,
            "kind": kind,
            "text": text,
            "verify": service.verify.state,
            "report": json.loads(service.verify.out.read_bytes()) if service.verify.state.state == "done" else None,
            "certificate": None if service.certificate is None else service.certificate.state,
            "certified": (service.certificate_dir / "certificate.pdf").exists(),
            "head": newest_head(ledger, ledger_id=follower.ledger.books.key.ledger_id),
        }
        return show("ledger", session, facts)

    @routes.get("/ledger/{seq}")
    def row(request: Request, seq: int) -> HTMLResponse:
        session = gate.for_page(request)
        found = row_detail(ledger, seq, ledger_id=follower.ledger.books.key.ledger_id) if 0 < seq < 2**63 else None
        if found is None:
            raise HTTPException(404, f"The ledger has no row {seq}.")
        body = json.dumps(found.body, indent=1, ensure_ascii=False)
        return show("ledger", session, {"row": found, "body": body}, template="row.html")

    @routes.post("/ledger/verify")
    async def verify(request: Request) -> Response:
        await changing(request)
        service.verify.start()
        return RedirectResponse("/ledger#verify", 303)

    @routes.post("/certificate")
    async def certificate(request: Request) -> Response:
        await changing(request)
        if service.certificate is not None:
            service.certificate.start()
        return RedirectResponse("/ledger#certificate", 303)

    @routes.get("/labels")
    def labels(request: Request) -> HTMLResponse:
        return show("labels", gate.for_page(request), {})

    @routes.get("/labels/{volume}")
    def label(
        request: Request,
        volume: str,
        layer: str = "label",
        axial: int | None = None,
        coronal: int | None = None,
        sagittal: int | None = None,
    ) -> HTMLResponse:
        session = gate.for_page(request)
        everything = labels_page(service, files)
        index = next((i for i, one in enumerate(everything.labels) if one.volume == volume), None)
        if index is None:
            raise HTTPException(404, "No public volume of that name belongs to this study.")
        one = everything.labels[index]
        asked = {"axial": axial, "coronal": coronal, "sagittal": sagittal}
        planes = []
        if one.facts is not None:
            for name, plane in PLANES.items():
                size = one.facts.grid[plane.fixed]
                wanted = asked[name]
                at = one.facts.centre[plane.fixed] if wanted is None else min(max(wanted, 0), size - 1)
                planes.append({"name": name, "letters": plane.letters, "last": size - 1, "at": at})
        facts = {
            "one": one,
            "version": picture_key(files.hash(volume) or "", files.student())[:8],
            "labels": everything,
            "planes": planes,
            "layer": layer if layer in LAYERS else "label",
            "layers": [name for name in LAYERS if one.facts and (one.facts.has_student or name not in NEED_STUDENT)],
            "previous": everything.labels[index - 1].volume if index else None,
            "next": everything.labels[index + 1].volume if index + 1 < len(everything.labels) else None,
            "history": [past for past in service.decisions.decisions() if past.volume == volume],
        }
        return show("labels", session, facts, template="label.html")

    @routes.post("/labels/{volume}/decision")
    async def decide(request: Request, volume: str) -> Response:
        session, fields = await changing(request)
        check_may_decide(session)
        try:
            verdict = Verdict(fields.get("verdict", ""))
        except ValueError as error:
            raise InvalidInput("verdict", limit="accept or reject") from error
        take_decision(service, files, volume, user=session.user, verdict=verdict, note=fields.get("note", "").strip())
        return RedirectResponse(f"/labels/{volume}#decision", 303)

    @routes.get("/student")
    def student(request: Request) -> HTMLResponse:
        return show("student", gate.for_page(request), {})

    @routes.get("/planner")
    def planner(request: Request) -> HTMLResponse:
        session = gate.for_page(request)
        spectrum = service.spectra.get()
        own = wishes_of(follower.study, hospitals=len(follower.sites), dimension=len(spectrum.stds) if spectrum else 64)
        wishes, problem = own, ""
        if request.query_params:
            try:
                wishes = read_wishes(request.query_params, own)
            except InvalidInput as error:
                problem = str(error)
        try:
            result = planned(wishes, follower.study, spectrum)
        except InvalidInput as error:
            problem, result = str(error), planned(own, follower.study, spectrum)
        facts = {"own": own, "wishes": wishes, "plan": result, "problem": problem, "spectrum": spectrum is not None}
        return show("planner", session, facts)

    async def changing(request: Request) -> tuple[Session, dict[str, str]]:
        check_origin(request)
        session = gate.for_page(request)
        fields = await read_form(request)
        check_token(session, fields.get("csrf"))
        return session, fields

    return routes


NEED_STUDENT = ("student", "disagreement")


def read_wishes(given: Mapping[str, str], own: Wishes) -> Wishes:
    """Wishes of a form sent without a script; InvalidInput for what is not a number or out of range."""
    values = {name: given.get(name, getattr(own, name)) for name in Wishes.model_fields}
    try:
        return Wishes(**values)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise InvalidInput(where, limit=first["msg"]) from error


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

    def percent(share: float | None) -> str:
        if share is None:
            return "–"
        return f"{100 * share:.1f} %" if 0 < share < 0.1 else f"{100 * share:.0f} %"

    def size(count: int) -> str:
        return f"{count / 1e6:.1f} MB" if count >= 1e6 else f"{count / 1e3:.1f} kB"

    def maybe(make: Callable[[Any], str]) -> Callable[[Any], str]:
        return lambda value: "–" if value is None else make(value)

    def marked(text: str) -> Markup:
        """Commands between backticks are set as code; the rest is escaped."""
        parts = str(text).split("`")
        return Markup("").join(
            Markup("<code>{}</code>").format(part) if number % 2 else escape(part) for number, part in enumerate(parts)
        )

    environment.filters.update(
        marked=marked,
        clock=clock,
        day=day,
        percent=percent,
        epsilon=maybe(epsilon_text),
        delta=maybe(delta_text),
        size=size,
        short=lambda name: name[:10],
        duration=maybe(views.duration),
        count=maybe(lambda value: f"{value:,}"),
        number=maybe(lambda value: f"{value:.4g}"),
        dice=maybe(lambda value: f"{value:.3f}"),
        json=lambda value: json.dumps(value, indent=1, ensure_ascii=False),
    )
