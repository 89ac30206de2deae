"""Serves the dashboard's API below ``/api``: JSON for each page, tables as CSV, slices as PNG, event streams.

The application mounts the routes of this module. Each request needs a session, which
:func:`server.dashboard.security.admitted` checks; a request that changes anything also needs the session's token in the
header ``X-CSRF-Token``. Unknown names are answered 404, and values out of range 422.

FastAPI publishes the docstring of a route in the OpenAPI description, beside its parameters and answers.
"""

from __future__ import annotations

import asyncio
import io
import zipfile
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from typing import Annotated, Any, Literal

from fastapi import APIRouter, HTTPException, Query, Request
from fastapi import Path as InPath
from fastapi.responses import FileResponse, Response, StreamingResponse

from common.canonical import MAX_INTEGER
from common.errors import InvalidInput
from common.ledger.rows import SignedHead
from common.planes import PlaneName
from server.dashboard.jobs import JobState
from server.dashboard.labels import LabelsPage, LabelView, StudentPage, labels_page, student_page, take_decisions
from server.dashboard.live import MOST_STREAMS, LivePages
from server.dashboard.pictures import VOXELS, Picture, PictureLayer, VolumeFacts, draw, nifti, read_facts, voxels
from server.dashboard.planning import PlannerForm
from server.dashboard.reports import HospitalReport
from server.dashboard.rows import (
    KINDS,
    MAX_TEXT,
    MOST_ON_A_PAGE,
    RowDetail,
    RowPage,
    all_rows,
    newest_head,
    row_detail,
    row_page,
)
from server.dashboard.screens import LIVE
from server.dashboard.security import Decider, SessionReader, SignedIn
from server.dashboard.service import DashboardService, Here
from server.dashboard.tables import attached, csv_lines, csv_response, flat_label, flat_site, json_lines
from server.dashboard.views.overview import Overview
from server.dashboard.views.sites import SiteView
from server.dashboard.views.studies import StudyRow
from server.dashboard.views.study import NoiseView, StudyPage
from server.planning.codec_spread import codec_stds
from server.postprocess.decisions import Decision, Verdict
from server.study.gate import shown_gate, signed_files, statement_of
from server.study.status import bundle_problem

PageName = Annotated[str, InPath(description="A live page.", pattern="^[a-z]{1,16}$")]
Volume = Annotated[str, InPath(description="SHA-256 of a public volume.", pattern="^[0-9a-f]{64}$")]
Kind = Annotated[Literal[KINDS] | None, Query(description="Only rows of this kind.")]  # type: ignore[valid-type]
Text = Annotated[
    str, Query(max_length=MAX_TEXT, description="Only rows whose body contains this text, or whose hash equals it.")
]
RowNumber = Annotated[int, InPath(ge=1, le=MAX_INTEGER, description="Number of a row.")]


@dataclass(frozen=True, slots=True)
class SignedInUser:
    """The signed-in user.

    Attributes:
        user: The user's name.
        role: The user's role.
        csrf: Token that every changing request must send in ``X-CSRF-Token``.
    """

    user: str
    role: str
    csrf: str


@dataclass(frozen=True, slots=True)
class DecisionRequest:
    """A decision about a label, as sent by a user.

    Attributes:
        verdict: Whether the label is accepted or rejected.
        note: The user's reason.
    """

    verdict: Verdict
    note: str = ""


@dataclass(frozen=True, slots=True)
class ListedSite:
    """One registered site.

    Attributes:
        standing: The site's state according to the server's ledger and event log.
        report: The hospital's own report; None if it has not sent one.
    """

    standing: SiteView
    report: HospitalReport | None


@dataclass(frozen=True, slots=True)
class JobFacts:
    """State and result of a background job, for example of a verification of the ledger.

    Attributes:
        job: Whether the job runs, how it ended, and when.
        result: JSON that the job printed; None unless its last run succeeded.
    """

    job: JobState
    result: dict[str, Any] | None


_CSV: dict[str, Any] = {"content": {"text/csv": {}}, "description": "CSV with a header line"}
_PNG: dict[str, Any] = {"content": {"image/png": {}}, "description": "A picture"}
_ZIP: dict[str, Any] = {"content": {"application/zip": {}}, "description": "An archive"}
_NONE: dict[str, Any] = {"description": "Not found"}

routes = APIRouter(prefix="/api", responses={401: {"description": "Not signed in"}})


@routes.get("/me", tags=["session"])
def me(session: SignedIn) -> SignedInUser:
    """Return the signed-in user, the role, and the token for ``X-CSRF-Token``."""
    return SignedInUser(session.user, str(session.role), session.csrf)


# --- study


@routes.get("/overview", tags=["study"])
def overview(service: Here) -> Overview:
    """Return the Overview page: budget, sites, run and alarms."""
    return service.overview()


@routes.get("/study", tags=["study"])
def study(service: Here) -> StudyPage:
    """Return the Study page: ε after each charge, batches and refusals."""
    return service.study()


@routes.get("/study/noise", tags=["study"])
def noise(service: Here) -> NoiseView | None:
    """Return the standard deviation of each code coordinate over public shapes, and of the noise on an answer.

    The result is null before a codec is fitted, and for a codec without a spectrum.
    """
    return service.noise()


@routes.get("/studies", tags=["study"])
def studies(service: Here) -> tuple[StudyRow, ...]:
    """Return every study of the ledger, newest first, with its settings, spending and measured gain."""
    return service.studies()


@routes.get("/sites", tags=["study"])
def sites(service: Here) -> list[ListedSite]:
    """Return every registered site, with its own report if it has sent one."""
    reports = service.reports()
    return [ListedSite(site, reports.get(site.name)) for site in service.overview().sites]


@routes.get("/tables/{name}.csv", tags=["study"], response_class=Response, responses={200: _CSV})
def table(
    service: Here,
    name: Literal["sites", "batches", "refusals", "curve", "labels", "decisions", "studies"],
) -> Response:
    """Return the table of a page as CSV."""
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
    before: Annotated[
        int | None, Query(ge=1, le=MAX_INTEGER, description="Only rows with a smaller number than this.")
    ] = None,
    after: Annotated[
        int | None, Query(ge=0, le=MAX_INTEGER, description="Only rows with a larger number than this.")
    ] = None,
    limit: Annotated[int, Query(ge=1, le=MOST_ON_A_PAGE)] = 50,
) -> RowPage:
    """Return a page of the ledger's rows, newest first, with the numbers at which older and newer pages begin."""
    return row_page(service.ledger_file, kind=kind, text=text, before=before, after=after, limit=limit)


@routes.get("/ledger/rows/{seq}", tags=["ledger"], responses={404: {"description": "No such row"}})
def row(service: Here, seq: RowNumber) -> RowDetail:
    """Return one row of the ledger in full, with the first signed head (signed row hash) that covers the row."""
    found = row_detail(service.ledger_file, seq, ledger_id=service.ledger_id)
    if found is None:
        raise HTTPException(404, f"the ledger has no row {seq}")
    return found


@routes.get("/ledger/head", tags=["ledger"], responses={404: {"description": "No head yet"}})
def head(service: Here) -> SignedHead:
    """Return the newest signed head of the ledger: the hash of its newest row, signed with the ledger's key.

    A ledger that is cut or rewritten later no longer contains this head; keep a copy on another machine to detect that.
    """
    found = newest_head(service.ledger_file, ledger_id=service.ledger_id)
    if found is None:
        raise HTTPException(404, "the ledger has no signed head yet")
    return found


@routes.get("/ledger/rows.csv", tags=["ledger"], response_class=StreamingResponse, responses={200: _CSV})
def rows_csv(service: Here, kind: Kind = None, text: Text = "") -> StreamingResponse:
    """Return all matching rows as CSV, oldest first; the column ``body`` contains JSON."""
    names = ("seq", "time_utc", "kind", "body", "prev_hash", "hash")
    lines = csv_lines(names, all_rows(service.ledger_file, kind=kind, text=text))
    return StreamingResponse(lines, media_type="text/csv; charset=utf-8", headers=attached("ledger.csv"))


@routes.get("/ledger/rows.json", tags=["ledger"], response_class=StreamingResponse)
def rows_json(service: Here, kind: Kind = None, text: Text = "") -> StreamingResponse:
    """Return all matching rows as a JSON list, oldest first."""
    lines = json_lines(all_rows(service.ledger_file, kind=kind, text=text))
    return StreamingResponse(lines, media_type="application/json", headers=attached("ledger.json"))


@routes.get("/ledger/verify", tags=["ledger"])
def verified(service: Here) -> JobFacts:
    """Return the state of the newest verification of the ledger, and its result."""
    return JobFacts(service.verify.state, service.verify.result)


@routes.post("/ledger/verify", tags=["ledger"], status_code=202, responses={403: {"description": "No token"}})
def verify(service: Here) -> JobState:
    """Start a verification of the whole ledger: hash chain, signatures, totals and budgets.

    It runs in a process of its own. If one is running already, no second one is started.
    """
    return service.verify.start()


# --- certificate


@routes.get("/certificate", tags=["certificate"])
def certificate(service: Here) -> JobFacts:
    """Return the state of the newest job that writes a privacy certificate, without a result.

    The state is ``never`` if this dashboard cannot issue certificates.
    """
    if service.certificate is None:
        return JobFacts(JobState("never"), None)
    return JobFacts(service.certificate.state, None)


@routes.post("/certificate", tags=["certificate"], status_code=202, responses={403: {"description": "No token"}})
def issue(service: Here) -> JobState:
    """Start a job that verifies a copy of the ledger and writes a privacy certificate from it."""
    if service.certificate is None:
        raise HTTPException(409, "this dashboard cannot issue certificates; use `consilium certificate`")
    return service.certificate.start()


@routes.get("/certificate.{ending}", tags=["certificate"], response_class=FileResponse, responses={404: _NONE})
def certificate_file(service: Here, ending: Literal["pdf", "json"]) -> FileResponse:
    """Return the newest certificate as a PDF or JSON file."""
    path = service.newest_certificate_dir / f"certificate.{ending}"
    if not path.exists():
        raise HTTPException(
            404, "no certificate has been issued yet; issue one on the Ledger page, or with `consilium certificate`"
        )
    kinds = {"pdf": "application/pdf", "json": "application/json"}
    name = f"{service.follower.study.name}-certificate.{ending}"
    return FileResponse(path, media_type=kinds[ending], headers=attached(name))


# --- labels


@routes.get("/labels", tags=["labels"])
def labels(service: Here) -> LabelsPage:
    """Return every public volume, with the measures of its label and the newest decision of a person about it."""
    return labels_page(service)


@routes.get("/labels/{volume}", tags=["labels"], responses={404: _NONE})
def label(service: Here, volume: Volume) -> LabelView:
    """Return one public volume, with the measures of its label and the newest decision of a person about it."""
    found = next((one for one in labels_page(service).labels if one.volume == volume), None)
    if found is None:
        raise HTTPException(404, "this study has no public volume with this SHA-256")
    return found


@routes.get("/labels/{volume}/slice.png", tags=["labels"], response_class=Response, responses={200: _PNG, 404: _NONE})
def slice_png(
    service: Here,
    volume: Volume,
    plane: PlaneName = "axial",
    index: Annotated[int, Query(ge=0, le=4095, description="Number of the slice, from 0.")] = 0,
    layer: PictureLayer = "label",
    side: Annotated[int, Query(ge=64, le=1024, description="Longer side in pixels.")] = 420,
) -> Response:
    """Return one slice of a public volume as PNG, with one layer drawn over the image."""
    arrays, facts = _arrays(service, volume)
    png = draw(arrays, plane=plane, index=index, layer=layer, spacing_mm=facts.spacing_mm, side=side)
    return Response(png, media_type="image/png", headers={"cache-control": "private, max-age=600"})


@routes.get("/labels/{volume}/voxels", tags=["labels"], response_class=Response, responses={404: _NONE})
def label_voxels(service: Here, volume: Volume) -> Response:
    """Return the bytes of all arrays that the viewer draws, one after the other, in Fortran order (x fastest).

    The header ``X-Arrays`` lists the names of the arrays in the same order.
    """
    arrays, _ = _arrays(service, volume)
    names = ",".join(name for name in VOXELS if name in arrays)
    headers = {"x-arrays": names, "cache-control": "private, max-age=600"}
    return Response(voxels(arrays), media_type="application/octet-stream", headers=headers)


@routes.get("/labels/{volume}/{name}.nii.gz", tags=["labels"], response_class=Response, responses={404: _NONE})
def label_nifti(
    service: Here, volume: Volume, name: Literal["image", "label", "centre", "doubt", "student"]
) -> Response:
    """Return one array of a volume as a gzipped NIfTI file."""
    arrays, facts = _arrays(service, volume)
    if name not in arrays:
        raise HTTPException(404, f"this volume has no {name} yet")
    content = nifti(arrays[name], facts.spacing_mm)
    return Response(content, media_type="application/gzip", headers=attached(f"{volume[:12]}-{name}.nii.gz"))


@routes.get("/decisions", tags=["labels"])
def decisions(service: Here) -> list[Decision]:
    """Return every decision about a label, oldest first."""
    return list(service.decisions.decisions())


@routes.post(
    "/labels/{volume}/decision",
    tags=["labels"],
    responses={403: {"description": "No token, or not an operator"}, 404: _NONE},
)
def decide(service: Here, session: Decider, volume: Volume, wish: DecisionRequest) -> Decision:
    """Accept or reject the current label of a volume.

    If the newest decision about this label is the same, it is returned and nothing is stored. Answers 404 if the volume
    has no label, and 400 if the note is too long.
    """
    (taken,) = take_decisions(service, [volume], user=session.user, verdict=wish.verdict, note=wish.note)
    return taken


# --- student


@routes.get("/student", tags=["student"])
def student(service: Here) -> StudentPage:
    """Return the Student page: loss curve, weights, controls, exported bundle and example volumes.

    The examples are the volumes on which the student and the label agree least and most.
    """
    return student_page(service, labels_page(service))


@routes.get(
    "/student/bundle.zip",
    tags=["student"],
    response_class=Response,
    responses={
        200: _ZIP,
        404: _NONE,
        409: {"description": "The guarantee stated in the bundle no longer holds, or the bundle is not the signed one"},
    },
)
def bundle_zip(service: Here) -> Response:
    """Return the exported student as a zipped MONAI bundle.

    While the study's gate lacks verdicts, the file's name says that the student is not released.
    """
    workspace = service.follower.workspace
    statement = statement_of(workspace)
    if statement is None:
        raise HTTPException(404, "the student has not been exported yet; run `consilium student export`")
    try:
        signed = signed_files(workspace, statement)
    except InvalidInput as error:
        raise HTTPException(409, str(error)) from None
    if (problem := bundle_problem(workspace, service.spending())) is not None:
        raise HTTPException(409, problem)
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", zipfile.ZIP_DEFLATED) as archive:
        for path, content in signed.items():
            archive.writestr(f"{service.follower.study.name}/{path}", content)
    marked = "" if shown_gate(workspace).released else "-not-released"
    name = f"{service.follower.study.name}{marked}-bundle.zip"
    return Response(stream.getvalue(), media_type="application/zip", headers=attached(name))


# --- planner


@routes.get(
    "/plan",
    tags=["planner"],
    responses={
        400: {"description": "The values cannot be combined"},
        503: {"description": "Too many plans are waiting"},
    },
)
async def plan_(service: Here, form: Annotated[PlannerForm, Query()]) -> dict[str, Any]:
    """Return the plan for the given values: noise, information bound, expected error, verdict and advice."""
    stds = await asyncio.to_thread(codec_stds, service.follower.workspace)
    return (await service.planner_queue.plan(form, service.follower.study, stds)).to_json()


# --- live


@routes.get("/blocks/{page}", tags=["live"], responses={404: _NONE})
def blocks(live: LivePages, page: PageName) -> dict[str, dict[str, str]]:
    """Return the current HTML blocks of a live page, for clients that cannot receive event streams.

    The key ``blocks`` holds the HTML of each block by name.
    """
    _check_live(page)
    return {"blocks": live.render(page)}


@routes.get("/live/{page}", tags=["live"], response_class=StreamingResponse, responses={404: _NONE})
async def stream(request: Request, session: SignedIn, live: LivePages, page: PageName) -> StreamingResponse:
    """Stream the changed HTML blocks of a live page as server-sent events with JSON data.

    The session is checked again before each event, and the stream ends with the session. Answers 429 if the user has
    too many open streams.
    """
    _check_live(page)
    if live.open[session.user] >= MOST_STREAMS:
        raise HTTPException(
            429, f"you have {MOST_STREAMS} open streams, the largest number; request /api/blocks/{page} instead"
        )
    gate: SessionReader = request.app.state.gate
    events = live.stream(page, user=session.user, allowed=lambda: gate.session(request) is not None)
    return StreamingResponse(events, media_type="text/event-stream", headers={"x-accel-buffering": "no"})


def _check_live(page: str) -> None:
    """Answer 404 if there is no live page of this name."""
    if page not in LIVE:
        raise HTTPException(404, f"there is no live page of this name; the live pages are {', '.join(LIVE)}")


def _arrays(service: DashboardService, volume: str) -> tuple[Picture, VolumeFacts]:
    """Return a volume's arrays and figures; raise HTTP 404 if its picture is not prepared yet."""
    known = read_facts(service.pictures_dir, volume)
    if known is None:
        raise HTTPException(404, "the picture of this volume is not prepared yet")
    return service.arrays(volume, known[1]), known[0]
