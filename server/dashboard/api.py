"""Serves the JSON behind every page, tables as CSV, slices as PNG, and the event stream of the live pages.

Every route needs a session; a route that changes anything also needs the session's token in ``X-CSRF-Token``. It
refuses unknown names and out-of-range numbers.
"""

from __future__ import annotations

import asyncio
import io
import json
import zipfile
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from typing import Annotated, Any, Literal

from fastapi import APIRouter, HTTPException, Query, Request
from fastapi import Path as InPath
from fastapi.responses import FileResponse, Response, StreamingResponse

from common.planes import PlaneName
from server.dashboard.jobs import Job, JobState
from server.dashboard.labels import (
    LabelsPage,
    LabelView,
    StudentPage,
    bundle,
    labels_page,
    student_page,
    take_decisions,
)
from server.dashboard.live import MOST_STREAMS, LivePages
from server.dashboard.pictures import (
    VOXELS,
    Picture,
    PictureLayer,
    VolumeFacts,
    draw,
    load_picture,
    nifti,
    read_facts,
    voxels,
)
from server.dashboard.planning import Wishes
from server.dashboard.reports import HandedReport
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
from server.dashboard.screens import LIVE
from server.dashboard.security import Decider, Gate, SignedIn
from server.dashboard.service import DashboardService, Here
from server.dashboard.tables import attached, csv_lines, csv_response, flat_label, flat_site, json_lines
from server.dashboard.views.overview import Overview
from server.dashboard.views.sites import SiteView
from server.dashboard.views.studies import StudyRow
from server.dashboard.views.study import NoiseView, StudyPage
from server.postprocess.decisions import Decision, Verdict
from server.study.status import bundle_problem

BIGGEST = 2**63 - 1
PageName = Annotated[str, InPath(description="A live page.", pattern="^[a-z]{1,16}$")]
Volume = Annotated[str, InPath(description="SHA-256 of a public volume.", pattern="^[0-9a-f]{64}$")]
Kind = Annotated[Literal[KINDS] | None, Query(description="Rows of this kind only.")]  # type: ignore[valid-type]
Text = Annotated[str, Query(max_length=MAX_TEXT, description="Rows whose body holds this text, or with this hash.")]
ArrayName = Literal["image", "label", "centre", "doubt", "student"]
RowNumber = Annotated[int, InPath(ge=1, le=BIGGEST, description="Number of a row.")]


@dataclass(frozen=True, slots=True)
class Me:
    """Who is signed in, and the token that changes must carry.

    Attributes:
        user: The user's name.
        role: The user's role.
        csrf: The token.
    """

    user: str
    role: str
    csrf: str


@dataclass(frozen=True, slots=True)
class DecisionWish:
    """A decision about a label to be entered.

    Attributes:
        verdict: The decision.
        note: Why.
    """

    verdict: Verdict
    note: str = ""


@dataclass(frozen=True, slots=True)
class SiteFacts:
    """A site according to the server's ledger and log, and the hospital's own report, if it handed one over."""

    standing: SiteView
    report: HandedReport | None


@dataclass(frozen=True, slots=True)
class JobFacts:
    """A job's state, and its result once it is done."""

    job: JobState
    result: dict[str, Any] | None


_CSV: dict[str, Any] = {"content": {"text/csv": {}}, "description": "CSV with a header line"}
_PNG: dict[str, Any] = {"content": {"image/png": {}}, "description": "A picture"}
_ZIP: dict[str, Any] = {"content": {"application/zip": {}}, "description": "An archive"}
_NONE: dict[str, Any] = {"description": "There is none"}

routes = APIRouter(prefix="/api", responses={401: {"description": "Not signed in"}})


@routes.get("/me", tags=["session"])
def me(session: SignedIn) -> Me:
    """Return who is signed in, with which role, and the token for ``X-CSRF-Token``."""
    return Me(session.user, str(session.role), session.csrf)


# --- study


@routes.get("/overview", tags=["study"])
def overview(service: Here) -> Overview:
    """Return the first page: budget, sites, run and alarms."""
    return service.overview()


@routes.get("/study", tags=["study"])
def study(service: Here) -> StudyPage:
    """Return the Study page: ε over releases, batches, refusals."""
    return service.study()


@routes.get("/study/noise", tags=["study"])
def noise(service: Here) -> NoiseView | None:
    """Return the code's public spectrum beside the noise; null before a codec is fitted."""
    return service.noise()


@routes.get("/studies", tags=["study"])
def studies(service: Here) -> tuple[StudyRow, ...]:
    """Return every study of the ledger: its settings, spending and gain."""
    return service.studies()


@routes.get("/sites", tags=["study"])
def sites(service: Here) -> list[SiteFacts]:
    """Return every site."""
    return site_facts(service)


@routes.get("/tables/{name}.csv", tags=["study"], response_class=Response, responses={200: _CSV})
def table(
    service: Here,
    name: Literal["sites", "batches", "refusals", "curve", "labels", "decisions", "studies"],
) -> Response:
    """Return a page's table as CSV."""
    doubt = service.overview().budget.doubt
    rows: dict[str, Callable[[], Iterable[Any]]] = {
        "sites": lambda: (flat_site(site) for site in service.overview().sites),
        "batches": lambda: map(asdict, service.study().batches),
        "refusals": lambda: map(asdict, service.study().refusals),
        "curve": lambda: (asdict(point) | {"at_least": doubt} for point in service.study().curve),
        "labels": lambda: map(flat_label, labels_page(service).labels),
        "decisions": lambda: map(asdict, service.decisions.decisions()),
        "studies": lambda: map(asdict, service.studies()),
    }
    return csv_response(name, list(rows[name]()))


# --- ledger


@routes.get("/ledger", tags=["ledger"])
def rows(
    service: Here,
    kind: Kind = None,
    text: Text = "",
    before: Annotated[int | None, Query(ge=1, le=BIGGEST, description="Rows older than this one.")] = None,
    after: Annotated[int | None, Query(ge=0, le=BIGGEST, description="Rows newer than this one.")] = None,
    limit: Annotated[int, Query(ge=1, le=MOST_ON_A_PAGE)] = 50,
) -> RowPage:
    """Return a page of the ledger's rows, newest first."""
    return row_page(service.ledger_file, kind=kind, text=text, before=before, after=after, limit=limit)


@routes.get("/ledger/rows/{seq}", tags=["ledger"], responses={404: {"description": "No such row"}})
def row(service: Here, seq: RowNumber) -> RowDetail:
    """Return one row in full, with the signed head that covers it."""
    found = row_detail(service.ledger_file, seq, ledger_id=service.ledger_id)
    if found is None:
        raise HTTPException(404, f"the ledger has no row {seq}")
    return found


@routes.get("/ledger/head", tags=["ledger"], responses={404: {"description": "No head yet"}})
def head(service: Here) -> HeadView:
    """Return the newest signed head. Keep it elsewhere to detect a cut or rewritten ledger."""
    found = newest_head(service.ledger_file, ledger_id=service.ledger_id)
    if found is None:
        raise HTTPException(404, "the ledger has no signed head yet")
    return found


@routes.get("/ledger/rows.csv", tags=["ledger"], response_class=StreamingResponse, responses={200: _CSV})
def rows_csv(service: Here, kind: Kind = None, text: Text = "") -> StreamingResponse:
    """Every matching row as CSV, oldest first; the body as JSON in its column."""
    names = ("seq", "time_utc", "kind", "body", "prev_hash", "hash")
    lines = csv_lines(names, all_rows(service.ledger_file, kind=kind, text=text))
    return StreamingResponse(lines, media_type="text/csv; charset=utf-8", headers=attached("ledger.csv"))


@routes.get("/ledger/rows.json", tags=["ledger"], response_class=StreamingResponse)
def rows_json(service: Here, kind: Kind = None, text: Text = "") -> StreamingResponse:
    """Every matching row as a JSON list, oldest first."""
    lines = json_lines(all_rows(service.ledger_file, kind=kind, text=text))
    return StreamingResponse(lines, media_type="application/json", headers=attached("ledger.json"))


@routes.get("/ledger/verify", tags=["ledger"])
def verified(service: Here) -> JobFacts:
    """Return the state and result of the newest verification."""
    return job_facts(service.verify)


@routes.post("/ledger/verify", tags=["ledger"], status_code=202, responses={403: {"description": "No token"}})
def verify(service: Here) -> JobState:
    """Start verifying the whole ledger in a process of its own: chain, signatures, totals, budgets."""
    return service.verify.start()


# --- certificate


@routes.get("/certificate", tags=["certificate"])
def certificate(service: Here) -> JobFacts:
    """Return the state of the newest certificate job."""
    if service.certificate is None:
        return JobFacts(JobState("never"), None)
    return JobFacts(service.certificate.state, None)


@routes.post("/certificate", tags=["certificate"], status_code=202, responses={403: {"description": "No token"}})
def issue(service: Here) -> JobState:
    """Start writing a certificate from a verified copy of the ledger, in a process of its own."""
    if service.certificate is None:
        raise HTTPException(409, "this dashboard was started without a certificate command")
    return service.certificate.start()


@routes.get("/certificate.{ending}", tags=["certificate"], response_class=FileResponse, responses={404: _NONE})
def certificate_file(service: Here, ending: Literal["pdf", "json"]) -> FileResponse:
    """Return the newest certificate."""
    path = service.certificate_dir / f"certificate.{ending}"
    if not path.exists():
        raise HTTPException(404, "no certificate has been issued here yet; ask for one on the Ledger page")
    kinds = {"pdf": "application/pdf", "json": "application/json"}
    name = f"{service.follower.study.name}-certificate.{ending}"
    return FileResponse(path, media_type=kinds[ending], headers=attached(name))


# --- labels


@routes.get("/labels", tags=["labels"])
def labels(service: Here) -> LabelsPage:
    """Return every public volume, with its label's figures and its decision."""
    return labels_page(service)


@routes.get("/labels/{volume}", tags=["labels"], responses={404: _NONE})
def label(service: Here, volume: Volume) -> LabelView:
    """Return one public volume, with its label's figures and its decision."""
    found = next((one for one in labels_page(service).labels if one.volume == volume), None)
    if found is None:
        raise HTTPException(404, "no public volume of that name belongs to this study")
    return found


@routes.get("/labels/{volume}/slice.png", tags=["labels"], response_class=Response, responses={200: _PNG, 404: _NONE})
def slice_png(
    service: Here,
    volume: Volume,
    plane: PlaneName = "axial",
    index: Annotated[int, Query(ge=0, le=4095, description="Which slice, from 0.")] = 0,
    layer: PictureLayer = "label",
    side: Annotated[int, Query(ge=64, le=1024, description="Longer side in pixels.")] = 420,
) -> Response:
    """Return one slice of a public volume as PNG, with an overlay."""
    arrays, facts = _arrays(service, volume)
    png = draw(arrays, plane=plane, index=index, layer=layer, spacing_mm=facts.spacing_mm, side=side)
    return Response(png, media_type="image/png", headers={"cache-control": "private, max-age=600"})


@routes.get("/labels/{volume}/voxels", tags=["labels"], response_class=Response, responses={404: _NONE})
def label_voxels(service: Here, volume: Volume) -> Response:
    """Return all arrays that the viewer draws, one after the other, x fastest; their names are in ``X-Arrays``."""
    arrays, _ = _arrays(service, volume)
    names = ",".join(name for name in VOXELS if name in arrays)
    headers = {"x-arrays": names, "cache-control": "private, max-age=600"}
    return Response(voxels(arrays), media_type="application/octet-stream", headers=headers)


@routes.get("/labels/{volume}/{name}.nii.gz", tags=["labels"], response_class=Response, responses={404: _NONE})
def label_nifti(
    service: Here, volume: Volume, name: Literal["image", "label", "centre", "doubt", "student"]
) -> Response:
    """Return one array as NIfTI."""
    arrays, facts = _arrays(service, volume)
    if name not in arrays:
        raise HTTPException(404, f"this volume has no {name} yet")
    content = nifti(arrays[name], facts.spacing_mm)
    return Response(content, media_type="application/gzip", headers=attached(f"{volume[:12]}-{name}.nii.gz"))


@routes.get("/decisions", tags=["labels"])
def decisions(service: Here) -> list[Decision]:
    """Return every decision about labels, in order."""
    return list(service.decisions.decisions())


@routes.post(
    "/labels/{volume}/decision",
    tags=["labels"],
    responses={403: {"description": "No token, or not an operator"}, 404: _NONE},
)
def decide(service: Here, session: Decider, volume: Volume, wish: DecisionWish) -> Decision:
    """Accept or reject a label as it is now; the same decision again returns the existing one."""
    (taken,) = take_decisions(service, [volume], user=session.user, verdict=wish.verdict, note=wish.note)
    return taken


# --- student


@routes.get("/student", tags=["student"])
def student(service: Here) -> StudentPage:
    """Return the student's loss, weights, controls and bundle, and the volumes on which it and the label differ most
    and least.
    """
    return student_page(service, labels_page(service))


@routes.get(
    "/student/bundle.zip",
    tags=["student"],
    response_class=Response,
    responses={200: _ZIP, 404: _NONE, 409: {"description": "It guarantees more than still holds"}},
)
def bundle_zip(service: Here) -> Response:
    """Return the student as a MONAI bundle."""
    found = bundle(service.follower.workspace)
    if not found:
        raise HTTPException(404, "there is no bundle yet: `consilium student export` makes it")
    if (problem := bundle_problem(service.follower.workspace, service.spending())) is not None:
        raise HTTPException(409, problem)
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", zipfile.ZIP_DEFLATED) as archive:
        for path in found:
            archive.write(
                path, f"{service.follower.study.name}/{path.relative_to(service.follower.workspace.bundle_dir)}"
            )
    name = f"{service.follower.study.name}-bundle.zip"
    return Response(stream.getvalue(), media_type="application/zip", headers=attached(name))


# --- planner


@routes.get(
    "/plan",
    tags=["planner"],
    responses={400: {"description": "An unsound combination"}, 503: {"description": "Many plans are being worked out"}},
)
async def plan_(service: Here, wishes: Annotated[Wishes, Query()]) -> dict[str, Any]:
    """Return what a budget would buy: noise, information, expected error, a verdict, and what would improve it."""
    spectrum = await asyncio.to_thread(service.spectra.get)
    return (await service.desk.plan(wishes, service.follower.study, spectrum)).to_json()


# --- live


@routes.get("/blocks/{page}", tags=["live"], responses={404: _NONE})
def blocks(live: LivePages, page: PageName) -> dict[str, dict[str, str]]:
    """Return the current blocks of a live page, for clients that cannot receive event streams."""
    check_live(page)
    return {"blocks": live.render(page)}


@routes.get("/live/{page}", tags=["live"], response_class=StreamingResponse, responses={404: _NONE})
async def stream(request: Request, session: SignedIn, live: LivePages, page: PageName) -> StreamingResponse:
    """Stream the changed blocks of a page as server-sent events, HTML in JSON. 429 for a user with too many open
    streams.
    """
    check_live(page)
    if live.open[session.user] >= MOST_STREAMS:
        raise HTTPException(429, f"{MOST_STREAMS} pages of yours are live already; ask for the blocks instead")
    gate: Gate = request.app.state.gate
    events = live.stream(page, user=session.user, allowed=lambda: gate.session(request) is not None)
    return StreamingResponse(events, media_type="text/event-stream", headers={"x-accel-buffering": "no"})


def check_live(page: str) -> None:
    """Raise HTTP 404 unless a live page has this name."""
    if page not in LIVE:
        raise HTTPException(404, f"no live page of that name; there are {', '.join(LIVE)}")


def _arrays(service: DashboardService, volume: str) -> tuple[Picture, VolumeFacts]:
    """Return a volume's arrays and facts; HTTP 404 before they are prepared."""
    known = read_facts(service.pictures_dir, volume)
    if known is None:
        raise HTTPException(404, "no picture of this volume has been prepared")
    return service.arrays(volume, known[1], lambda: load_picture(service.pictures_dir, volume)), known[0]


def site_facts(service: DashboardService) -> list[SiteFacts]:
    """Return every site with its report."""
    reports = service.reports()
    return [SiteFacts(site, reports.get(site.name)) for site in service.overview().sites]


def job_facts(job: Job) -> JobFacts:
    """Return a job's state, with the JSON that it printed."""
    result = json.loads(job.out.read_bytes()) if job.state.state == "done" else None
    return JobFacts(job.state, result)
