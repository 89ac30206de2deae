"""Serves the HTML pages, which templates render from the views.

The application mounts the routes of this module. Every page works without JavaScript; scripts only keep it up to date.
Unknown rows, volumes and verdicts are refused.
"""

from __future__ import annotations

import asyncio
import json
import re
import sqlite3
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated

from fastapi import APIRouter, HTTPException, Query, Request
from fastapi.responses import HTMLResponse, RedirectResponse, Response
from pydantic import ValidationError

from common.canonical import MAX_INTEGER
from common.errors import InvalidInput, LedgerCorrupt, StorageFailed
from common.ledger.rows import SignedHead
from common.privacy.coalitions import trade_sentences
from server.dashboard.labels import labels_page, take_decisions
from server.dashboard.pictures import DOWNLOADS, LAYERS, VolumeFacts, label_hash, picture_key, student_hash
from server.dashboard.planning import PlannerForm, form_of
from server.dashboard.rows import KINDS, MAX_TEXT, RowPage, in_words, newest_head, row_detail, row_page
from server.dashboard.screens import NAVIGATION, OnScreen, viewer_planes
from server.dashboard.security import Decider, Form
from server.dashboard.service import DashboardService, Here
from server.dashboard.views.promise import issued, promise
from server.planning.codec_spread import codec_stds
from server.postprocess.decisions import Verdict

ROWS = 40
VOLUME = re.compile(r"[0-9a-f]{64}")
NEED_STUDENT = ("student", "disagreement")
NEED_ANSWERS = ("centre", "doubt")

routes = APIRouter(include_in_schema=False)


@routes.get("/study")
def study(screen: OnScreen) -> HTMLResponse:
    """Show the Study page: the study's guarantee, its newest certificate, and the signed hash of the newest ledger row.

    Args:
        screen: The request's screen.

    Returns:
        The page.
    """
    service = screen.service
    follower = service.follower
    spending = service.spending()
    most = max(len(follower.admitted), spending.largest_roster)
    facts = {
        "noise": service.noise(),
        "promise": promise(follower.study, spending, sites=most),
        "issued": issued(service.newest_certificate_dir),
        "head": newest(service),
    }
    return screen.show("study", facts)


def newest(service: DashboardService) -> SignedHead | None:
    """Return the ledger's newest head, which is the signed hash of its newest row.

    Args:
        service: The dashboard's service.

    Returns:
        The head. None if no head was signed yet, or if the ledger cannot be read; the Overview page then shows an
        alarm.
    """
    try:
        return newest_head(service.ledger_file, ledger_id=service.ledger_id)
    except (LedgerCorrupt, StorageFailed, sqlite3.Error):
        return None


@routes.post("/sites/report")
def report(service: Here, session: Decider, form: Form) -> Response:
    """Store a site's report that was handed in on the Sites page.

    Args:
        service: The dashboard's service.
        session: The session of a user who may hand in reports.
        form: The form's fields; ``report`` is the text of the report.

    Returns:
        A redirection to the site's entry on the Sites page.

    Raises:
        InvalidInput: If :func:`server.dashboard.reports.take_report` refuses the report.
    """
    return RedirectResponse(f"/sites#site-{service.take_report(form.get('report', ''))}", 303)


@routes.get("/ledger")
def rows(
    screen: OnScreen,
    kind: str = "",
    text: Annotated[str, Query(max_length=MAX_TEXT)] = "",
    before: Annotated[str, Query(pattern="^[0-9]{0,18}$")] = "",
    after: Annotated[str, Query(pattern="^[0-9]{0,18}$")] = "",
) -> HTMLResponse:
    """Show the Ledger page with a page of rows, newest first. If the ledger cannot be read, show the reason.

    Args:
        screen: The request's screen.
        kind: Only rows of this kind; empty for all.
        text: Only rows whose body contains this text, or whose hash equals it; empty for all.
        before: Only rows with a smaller number; empty for all.
        after: Only rows with a larger number; empty for all.

    Returns:
        The page.

    Raises:
        InvalidInput: If the kind is unknown, or the text contains a null character.
    """
    service = screen.service
    found, head, problem = RowPage((), None, None, 0), None, ""
    try:
        found = row_page(
            service.ledger_file,
            kind=kind or None,
            text=text,
            before=int(before) if before else None,
            after=int(after) if after else None,
            limit=ROWS,
        )
        head = newest_head(service.ledger_file, ledger_id=service.ledger_id)
    except (LedgerCorrupt, StorageFailed, sqlite3.Error) as error:
        problem = str(error)
    facts = {
        "rows": found,
        "problem": problem,
        "kinds": KINDS,
        "kind": kind,
        "text": text,
        "verify": service.verify.state,
        "report": service.verify.result,
        "certificate": None if service.certificate is None else service.certificate.state,
        "certified": (service.newest_certificate_dir / "certificate.pdf").exists(),
        "head": head,
    }
    return screen.show("ledger", facts)


@routes.get("/ledger/{seq}")
def row(screen: OnScreen, seq: int) -> HTMLResponse:
    """Show one row of the ledger in full.

    Args:
        screen: The request's screen.
        seq: Number of the row.

    Returns:
        The page.

    Raises:
        HTTPException: 404 if there is no such row.
    """
    service = screen.service
    found = row_detail(service.ledger_file, seq, ledger_id=service.ledger_id) if 0 < seq <= MAX_INTEGER else None
    if found is None:
        raise HTTPException(404, f"The ledger has no row {seq}.")
    body = json.dumps(in_words(found.body), indent=1, ensure_ascii=False)
    return screen.show("ledger", {"row": found, "body": body}, template="row.html")


@routes.post("/ledger/verify")
def verify(service: Here) -> Response:
    """Start a verification of the whole ledger, unless one is running.

    Args:
        service: The dashboard's service.

    Returns:
        A redirection to the Ledger page.
    """
    service.verify.start()
    return RedirectResponse("/ledger#verify", 303)


@routes.post("/certificate")
def certificate(service: Here) -> Response:
    """Start writing a privacy certificate, if this dashboard can issue one.

    Args:
        service: The dashboard's service.

    Returns:
        A redirection to the Ledger page.
    """
    if service.certificate is not None:
        service.certificate.start()
    return RedirectResponse("/ledger#certificate", 303)


@routes.get("/labels/{volume}")
def label(
    screen: OnScreen,
    volume: str,
    layer: str = "label",
    axial: int | None = None,
    coronal: int | None = None,
    sagittal: int | None = None,
) -> HTMLResponse:
    """Show the page of one public volume with its label.

    Args:
        screen: The request's screen.
        volume: SHA-256 of the volume.
        layer: Layer to draw over the image.
        axial: Number of the axial slice to show first; None for the default.
        coronal: Number of the coronal slice; None for the default.
        sagittal: Number of the sagittal slice; None for the default.

    Returns:
        The page.

    Raises:
        HTTPException: 404 if the study has no such volume.
    """
    service, workspace = screen.service, screen.service.follower.workspace
    everything = labels_page(service)
    index = next((i for i, one in enumerate(everything.labels) if one.volume == volume), None)
    if index is None:
        raise HTTPException(404, "This study has no public volume with this SHA-256.")
    one = everything.labels[index]
    asked = {"axial": axial, "coronal": coronal, "sagittal": sagittal}
    queue = everything.queue
    at = queue.index(volume)
    facts = {
        "one": one,
        "version": picture_key(label_hash(workspace, volume) or "", student_hash(workspace))[:8],
        "labels": everything,
        "planes": viewer_planes(one.facts.grid, one.facts.centre, asked) if one.facts else [],
        "layer": layer if layer in LAYERS else "label",
        "layers": [name for name in LAYERS if one.facts and _has(one.facts, name)],
        "downloads": [name for name in DOWNLOADS if one.facts and _has(one.facts, name)],
        "viewed": _viewed(one.facts, service.follower.study.data.labels),
        "previous": queue[at - 1] if at else None,
        "next": queue[at + 1] if at + 1 < len(queue) else None,
        "then": next((name for name in (*queue[at + 1 :], *queue[:at]) if name in everything.undecided), None),
        "history": [past for past in service.decided() if past.volume == volume],
    }
    return screen.show("labels", facts, template="label.html")


def _has(facts: VolumeFacts, layer: str) -> bool:
    if layer in NEED_STUDENT:
        return facts.has_student
    return layer not in NEED_ANSWERS or facts.doubt is not None


def _viewed(facts: VolumeFacts | None, labels: Sequence[str]) -> dict[str, object]:
    """Return the facts about a volume that the viewer's script needs."""
    if facts is None:
        return {}
    return {"grid": facts.grid, "spacing_mm": facts.spacing_mm, "centre": facts.centre, "labels": list(labels)}


@routes.post("/labels/{volume}/decision")
def decide(service: Here, session: Decider, form: Form, volume: str) -> Response:
    """Store a decision about the label of one volume.

    Args:
        service: The dashboard's service.
        session: The session of a user who may decide.
        form: The form's fields: ``verdict`` (``accept`` or ``reject``, with ``-next`` to continue with the volume
            in ``then``), ``note`` and ``then``.
        volume: SHA-256 of the volume.

    Returns:
        A redirection to the page of this volume or of the next.

    Raises:
        InvalidInput: If the verdict is unknown.
        HTTPException: 404 if the volume has no label, 400 if the note is too long.
    """
    _decide(service, session.user, form, [volume], verdict=form.get("verdict", "").removesuffix("-next"))
    then = form.get("then", "")
    if form["verdict"].endswith("-next") and VOLUME.fullmatch(then):
        return RedirectResponse(f"/labels/{then}", 303)
    return RedirectResponse(f"/labels/{volume}#decision", 303)


@routes.post("/labels/decisions")
def decide_many(service: Here, session: Decider, form: Form) -> Response:
    """Store the same decision about every label that is selected on the Labels page; refuse if none is."""
    volumes = [name for name in form if VOLUME.fullmatch(name)]
    if not volumes:
        raise InvalidInput("no label is chosen", remedy="tick the labels on the Labels page, then press the button")
    _decide(service, session.user, form, volumes, verdict=form.get("verdict", ""))
    return RedirectResponse("/labels", 303)


def _decide(service: DashboardService, user: str, form: Form, volumes: list[str], *, verdict: str) -> None:
    if verdict not in tuple(Verdict):
        raise InvalidInput("verdict", limit="accept or reject")
    note = form.get("note", "").strip()
    take_decisions(service, volumes, user=user, verdict=Verdict(verdict), note=note)


@routes.get("/planner")
async def planner(request: Request, screen: OnScreen) -> HTMLResponse:
    follower, planner_queue = screen.service.follower, screen.service.planner_queue
    stds = await asyncio.to_thread(codec_stds, follower.workspace)
    own = form_of(follower.study, hospitals=len(follower.admitted), stds=stds)
    form, problem = own, ""
    if request.query_params:
        try:
            form = _read_form(request.query_params, own)
        except InvalidInput as error:
            problem = str(error)
    try:
        result = await planner_queue.plan(form, follower.study, stds)
    except InvalidInput as error:
        problem, result = str(error), await planner_queue.plan(own, follower.study, stds)
    facts = {
        "own": own,
        "form": form,
        "plan": result.to_json(),
        "problem": problem,
        "spectrum": bool(stds),
        "trade": {kind: trade_sentences(sealed=kind == "sealed") for kind in ("sealed", "open")},
    }
    return await asyncio.to_thread(screen.show, "planner", facts)


def _read_form(given: Mapping[str, str], own: PlannerForm) -> PlannerForm:
    """Return the values of the planner's form; ``own`` has those of missing fields. Refuse numbers out of range."""
    values = {name: given.get(name, getattr(own, name)) for name in PlannerForm.model_fields}
    try:
        return PlannerForm(**values)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise InvalidInput(where, limit=first["msg"]) from error


def _handler(name: str) -> Callable[[OnScreen], HTMLResponse]:
    """Return a handler that shows a page which needs no variables except those of its live blocks."""

    def show(screen: OnScreen) -> HTMLResponse:
        return screen.show(name)

    return show


for _path, _name, _ in NAVIGATION:  # the first route of a path answers: a function above, if the page has one
    routes.get(_path)(_handler(_name))
