"""The JSON under every page, tables as CSV, slices as PNG, and the event stream of the live pages.

Everything needs a session; what changes anything also needs its token in ``X-CSRF-Token``.
"""

from __future__ import annotations

import csv
import io
import json
import zipfile
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Annotated, Any, Literal

from fastapi import APIRouter, HTTPException, Query, Request
from fastapi import Path as InPath
from fastapi.responses import FileResponse, Response, StreamingResponse

from server.dashboard import views
from server.dashboard.jobs import Job, JobState
from server.dashboard.labels import LabelsPage, StudentPage, bundle, labels_page, student_page, take_decision
from server.dashboard.live import Live, Render
from server.dashboard.pages import LIVE
from server.dashboard.pictures import PictureLayer, PlaneName, draw, load_picture, read_facts
from server.dashboard.planning import Wishes, planned
from server.dashboard.reports import SiteReport
from server.dashboard.rows import (
    KINDS,
    MAX_TEXT,
    MOST_ON_A_PAGE,
    HeadView,
    RowDetail,
    RowPage,
    all_rows,
    newest_head,
    row_detail,
    row_page,
)
from server.dashboard.security import Gate, check_may_decide
from server.dashboard.service import Service
from server.postprocess.decisions import Decision, Verdict

BIGGEST = 2**63 - 1
PageName = Annotated[str, InPath(description="A live page.", pattern="^[a-z]{1,16}$")]
Volume = Annotated[str, InPath(description="SHA-256 of a public volume.", pattern="^[0-9a-f]{64}$")]
Kind = Annotated[Literal[KINDS] | None, Query(description="Rows of this kind only.")]  # type: ignore[valid-type]
Text = Annotated[str, Query(max_length=MAX_TEXT, description="Rows whose body holds this text, or with this hash.")]
RowNumber = Annotated[int, InPath(ge=1, le=BIGGEST, description="Number of a row.")]


@dataclass(frozen=True, slots=True)
class Me:
    """Who is signed in, and the token that changes must carry."""

    user: str
    role: str
    csrf: str


@dataclass(frozen=True, slots=True)
class DecisionWish:
    """What is to be decided about a label, and why."""

    verdict: Verdict
    note: str = ""


@dataclass(frozen=True, slots=True)
class SiteFacts:
    """A site by the server's ledger and log, beside what the hospital handed over itself, if anything."""

    standing: views.SiteView
    report: SiteReport | None


@dataclass(frozen=True, slots=True)
class JobFacts:
    """A job's state, and its result once there is one."""

    job: JobState
    result: dict[str, Any] | None


def router(service: Service, gate: Gate, live: Live, render: Render) -> APIRouter:
    """Every route below ``/api``."""
    routes = APIRouter(prefix="/api", responses={401: {"description": "Not signed in"}})
    follower = service.follower
    ledger = follower.workspace.ledger_file
    files = service.label_files

    @routes.get("/me", tags=["session"])
    def me(request: Request) -> Me:
        """Who is signed in, as what, and the token for ``X-CSRF-Token``."""
        session = gate.for_api(request)
        return Me(session.user, str(session.role), session.csrf)

    # --- study

    @routes.get("/overview", tags=["study"])
    def overview(request: Request) -> views.Overview:
        """Budget, sites, run, alarms: the first page."""
        gate.for_api(request)
        return service.overview()

    @routes.get("/study", tags=["study"])
    def study(request: Request) -> views.StudyPage:
        """ε over releases, batches, refusals."""
        gate.for_api(request)
        return service.study()

    @routes.get("/study/noise", tags=["study"])
    def noise(request: Request) -> views.NoiseView | None:
        """The code's public spectrum against the noise; null before a codec is fitted."""
        gate.for_api(request)
        return service.noise()

    @routes.get("/sites", tags=["study"])
    def sites(request: Request) -> list[SiteFacts]:
        """Every site."""
        gate.for_api(request)
        return site_facts(service)

    @routes.get("/tables/{name}.csv", tags=["study"], response_class=Response, responses={200: _CSV})
    def table(
        request: Request,
        name: Literal["sites", "batches", "refusals", "curve", "labels", "decisions"],
    ) -> Response:
        """A page's table as CSV."""
        gate.for_api(request)
        rows: dict[str, Callable[[], Iterable[Any]]] = {
            "sites": lambda: (_flat_site(site) for site in service.overview().sites),
            "batches": lambda: map(asdict, service.study().batches),
            "refusals": lambda: map(asdict, service.study().refusals),
            "curve": lambda: map(asdict, service.study().curve),
            "labels": lambda: map(_flat_label, labels_page(service, files).labels),
            "decisions": lambda: map(asdict, service.decisions.decisions()),
        }
        return csv_response(name, list(rows[name]()))

    # --- ledger

    @routes.get("/ledger", tags=["ledger"])
    def rows(
        request: Request,
        kind: Kind = None,
        text: Text = "",
        before: Annotated[int | None, Query(ge=1, le=BIGGEST, description="Rows older than this one.")] = None,
        after: Annotated[int | None, Query(ge=0, le=BIGGEST, description="Rows newer than this one.")] = None,
        limit: Annotated[int, Query(ge=1, le=MOST_ON_A_PAGE)] = 50,
    ) -> RowPage:
        """A page of the ledger's rows, newest first."""
        gate.for_api(request)
        return row_page(ledger, kind=kind, text=text, before=before, after=after, limit=limit)

    @routes.get("/ledger/rows/{seq}", tags=["ledger"], responses={404: {"description": "No such row"}})
    def row(request: Request, seq: RowNumber) -> RowDetail:
        """One row in full, with the signed head that covers it."""
        gate.for_api(request)
        found = row_detail(ledger, seq, ledger_id=follower.ledger.books.key.ledger_id)
        if found is None:
            raise HTTPException(404, f"the ledger has no row {seq}")
        return found

    @routes.get("/ledger/head", tags=["ledger"], responses={404: {"description": "No head yet"}})
    def head(request: Request) -> HeadView:
        """The newest signed head: keep it elsewhere, and a cut or rewritten ledger will be noticed."""
        gate.for_api(request)
        found = newest_head(ledger, ledger_id=follower.ledger.books.key.ledger_id)
        if found is None:
            raise HTTPException(404, "the ledger has no signed head yet")
        return found

    @routes.get("/ledger/rows.csv", tags=["ledger"], response_class=StreamingResponse, responses={200: _CSV})
    def rows_csv(request: Request, kind: Kind = None, text: Text = "") -> StreamingResponse:
        """Every matching row as CSV, oldest first; the body as JSON in its column."""
        gate.for_api(request)
        names = ("seq", "time_utc", "kind", "body", "prev_hash", "hash")
        lines = _csv_lines(names, all_rows(ledger, kind=kind, text=text))
        return StreamingResponse(lines, media_type="text/csv; charset=utf-8", headers=_attached("ledger.csv"))

    @routes.get("/ledger/rows.json", tags=["ledger"], response_class=StreamingResponse)
    def rows_json(request: Request, kind: Kind = None, text: Text = "") -> StreamingResponse:
        """Every matching row as a JSON list, oldest first."""
        gate.for_api(request)
        lines = _json_lines(all_rows(ledger, kind=kind, text=text))
        return StreamingResponse(lines, media_type="application/json", headers=_attached("ledger.json"))

    @routes.get("/ledger/verify", tags=["ledger"])
    def verified(request: Request) -> JobFacts:
        """How the newest verification went."""
        gate.for_api(request)
        return job_facts(service.verify)

    @routes.post("/ledger/verify", tags=["ledger"], status_code=202, responses={403: {"description": "No token"}})
    def verify(request: Request) -> JobState:
        """Verify the whole ledger now, in a process of its own: chain, signatures, sums, budgets."""
        gate.for_change(request)
        return service.verify.start()

    # --- certificate

    @routes.get("/certificate", tags=["certificate"])
    def certificate(request: Request) -> JobFacts:
        """How the newest certificate came about."""
        gate.for_api(request)
        if service.certificate is None:
            return JobFacts(JobState("never"), None)
        return JobFacts(service.certificate.state, None)

    @routes.post("/certificate", tags=["certificate"], status_code=202, responses={403: {"description": "No token"}})
    def issue(request: Request) -> JobState:
        """Write a certificate from a verified copy of the ledger, in a process of its own."""
        gate.for_change(request)
        if service.certificate is None:
            raise HTTPException(409, "this dashboard was started without a certificate command")
        return service.certificate.start()

    @routes.get("/certificate.{ending}", tags=["certificate"], response_class=FileResponse, responses={404: _NONE})
    def certificate_file(request: Request, ending: Literal["pdf", "json"]) -> FileResponse:
        """The newest certificate."""
        gate.for_api(request)
        path = service.certificate_dir / f"certificate.{ending}"
        if not path.exists():
            raise HTTPException(404, "no certificate has been issued here yet; ask for one on the Ledger page")
        kinds = {"pdf": "application/pdf", "json": "application/json"}
        name = f"{follower.study.name}-certificate.{ending}"
        return FileResponse(path, media_type=kinds[ending], headers=_attached(name))

    # --- labels

    @routes.get("/labels", tags=["labels"])
    def labels(request: Request) -> LabelsPage:
        """Every public volume: its label's figures and what was decided about it."""
        gate.for_api(request)
        return labels_page(service, files)

    @routes.get(
        "/labels/{volume}/slice.png", tags=["labels"], response_class=Response, responses={200: _PNG, 404: _NONE}
    )
    def slice_png(
        request: Request,
        volume: Volume,
        plane: PlaneName = "axial",
        index: Annotated[int, Query(ge=0, le=4095, description="Which slice, from 0.")] = 0,
        layer: PictureLayer = "label",
        side: Annotated[int, Query(ge=64, le=1024, description="Longer side in pixels.")] = 420,
    ) -> Response:
        """One slice of a public volume with an overlay."""
        gate.for_api(request)
        known = read_facts(service.pictures_dir, volume)
        if known is None:
            raise HTTPException(404, "no picture of this volume has been prepared")
        arrays = service.arrays(volume, known[1], lambda: load_picture(service.pictures_dir, volume))
        png = draw(arrays, plane=plane, index=index, layer=layer, spacing_mm=known[0].spacing_mm, side=side)
        return Response(png, media_type="image/png", headers={"cache-control": "private, max-age=600"})

    @routes.get("/decisions", tags=["labels"])
    def decisions(request: Request) -> list[Decision]:
        """Every decision ever taken, in order."""
        gate.for_api(request)
        return list(service.decisions.decisions())

    @routes.post(
        "/labels/{volume}/decision",
        tags=["labels"],
        responses={403: {"description": "No token, or not an operator"}, 404: _NONE},
    )
    def decide(request: Request, volume: Volume, wish: DecisionWish) -> Decision:
        """Accept or reject a label as it is now; the same again returns the decision that stands."""
        session = gate.for_change(request)
        check_may_decide(session)
        return take_decision(service, files, volume, user=session.user, verdict=wish.verdict, note=wish.note)

    # --- student

    @routes.get("/student", tags=["student"])
    def student(request: Request) -> StudentPage:
        """Loss, weights, controls, bundle, and volumes where label and student differ most and least."""
        gate.for_api(request)
        return student_page(service, labels_page(service, files))

    @routes.get("/student/bundle.zip", tags=["student"], response_class=Response, responses={200: _ZIP, 404: _NONE})
    def bundle_zip(request: Request) -> Response:
        """The student as a MONAI bundle."""
        gate.for_api(request)
        found = bundle(follower.workspace)
        if not found:
            raise HTTPException(404, "there is no bundle yet: `consilium student export` makes it")
        stream = io.BytesIO()
        with zipfile.ZipFile(stream, "w", zipfile.ZIP_DEFLATED) as archive:
            for path in found:
                archive.write(path, f"{follower.study.name}/{path.relative_to(follower.workspace.bundle_dir)}")
        name = f"{follower.study.name}-bundle.zip"
        return Response(stream.getvalue(), media_type="application/zip", headers=_attached(name))

    # --- planner

    @routes.get("/plan", tags=["planner"], responses={400: {"description": "An unsound combination"}})
    def plan_(request: Request, wishes: Annotated[Wishes, Query()]) -> dict[str, Any]:
        """What a budget would buy: noise, information, expected error, a verdict, and what would help."""
        gate.for_api(request)
        return planned(wishes, follower.study, service.spectra.get())

    # --- live

    @routes.get("/blocks/{page}", tags=["live"], responses={404: _NONE})
    def blocks(request: Request, page: PageName) -> dict[str, dict[str, str]]:
        """The blocks of a live page as they stand: what a page asks for where event streams do not get through."""
        gate.for_api(request)
        check_live(page)
        return {"blocks": render(page)}

    @routes.get("/live/{page}", tags=["live"], response_class=StreamingResponse, responses={404: _NONE})
    def stream(request: Request, page: PageName) -> StreamingResponse:
        """Server-sent events: the blocks of a page that changed, as HTML in JSON."""
        gate.for_api(request)
        check_live(page)

        def allowed() -> bool:
            return gate.session(request) is not None

        async def events() -> AsyncIterator[bytes]:
            async for chunk in live.stream(page, allowed=allowed):
                yield chunk

        return StreamingResponse(events(), media_type="text/event-stream", headers={"x-accel-buffering": "no"})

    return routes


def check_live(page: str) -> None:
    if page not in LIVE:
        raise HTTPException(404, f"no live page of that name; there are {', '.join(LIVE)}")


def site_facts(service: Service) -> list[SiteFacts]:
    """Every site with its report."""
    reports = service.reports()
    return [SiteFacts(site, reports.get(site.name)) for site in service.overview().sites]


def job_facts(job: Job) -> JobFacts:
    """A job with the JSON it printed."""
    result = json.loads(job.out.read_bytes()) if job.state.state == "done" else None
    return JobFacts(job.state, result)


def csv_response(name: str, rows: Sequence[dict[str, Any]]) -> Response:
    """A table as CSV; an empty one has no columns either."""
    names = tuple(rows[0]) if rows else ()
    text = "".join(_csv_lines(names, ([row[key] for key in names] for row in rows)))
    return Response(text, media_type="text/csv; charset=utf-8", headers=_attached(f"{name}.csv"))


def _csv_lines(names: Sequence[str], rows: Iterable[Sequence[Any]]) -> Iterator[str]:
    for row in _with_header(names, rows):
        stream = io.StringIO()
        csv.writer(stream).writerow([_cell(value) for value in row])
        yield stream.getvalue()


def _with_header(names: Sequence[str], rows: Iterable[Sequence[Any]]) -> Iterator[Sequence[Any]]:
    yield names
    yield from rows


def _cell(value: Any) -> Any:
    """A spreadsheet must not take a text for a formula."""
    if isinstance(value, str) and value[:1] in ("=", "+", "-", "@", "\t", "\r"):
        return f"'{value}"
    return value


def _json_lines(rows: Iterable[tuple[int, str, str, str, str, str]]) -> Iterator[str]:
    yield "["
    for number, (seq, time, kind, body, prev_hash, row_hash) in enumerate(rows):
        fact = {"seq": seq, "time_utc": time, "kind": kind, "body": json.loads(body)}
        fact |= {"prev_hash": prev_hash, "hash": row_hash}
        yield ("," if number else "") + "\n" + json.dumps(fact, ensure_ascii=False)
    yield "\n]\n"


def _flat_site(site: views.SiteView) -> dict[str, Any]:
    facts = {name: value for name, value in asdict(site).items() if name != "budget"}
    budget = site.budget
    return facts | {
        "epsilon_spent": None if budget is None else budget.epsilon,
        "epsilon_budget": None if budget is None else budget.budget,
        "accountant": None if budget is None else budget.accountant,
        "delta": None if budget is None else budget.delta,
        "unit": None if budget is None else budget.unit,
        "relation": None if budget is None else budget.relation,
        "answers_left": None if budget is None else budget.answers_left,
    }


def _flat_label(label: Any) -> dict[str, Any]:
    facts = label.facts
    return {
        "number": label.number,
        "volume": label.volume,
        "state": label.state,
        "verdict": label.verdict,
        "confidence": None if facts is None else facts.confidence,
        "agreement_with_student": None if facts is None else facts.agreement,
        "decided_by": None if label.decision is None else label.decision.user,
        "decided": None if label.decision is None else label.decision.time,
    }


def _attached(name: str) -> dict[str, str]:
    safe = "".join(c if c.isascii() and (c.isalnum() or c in "._-") else "-" for c in name)
    return {"content-disposition": f'attachment; filename="{safe}"'}


_CSV: dict[str, Any] = {"content": {"text/csv": {}}, "description": "CSV with a header line"}
_PNG: dict[str, Any] = {"content": {"image/png": {}}, "description": "A picture"}
_ZIP: dict[str, Any] = {"content": {"application/zip": {}}, "description": "An archive"}
_NONE: dict[str, Any] = {"description": "There is none"}
