"""Runs a study from its open queries to the exported bundle, in stages that can each be resumed.

The core and the demo call it. A run has these stages; the code repeats their numbers:

1. ``collect``: the aggregator answers the open queries; the answers are in the ledger. During the following stages the
   sites countersign the ledger's head, the signed hash of its newest row.
2. ``decode``: stored answers become pseudo-labels.
3. ``student``: the student is trained on them.
4. ``controls``: the control networks are trained.
5. ``export``: the student is written as a bundle.

Stages 2 to 5 are post-processing of released answers. After a crash or a stop, the next run begins at the first
unfinished stage. It reads the stored answers and asks only the queries that have none. A run is refused while another
run holds the study's lock.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from pathlib import Path
from threading import Thread

from common.errors import ConsiliumError, LedgerCorrupt, StorageFailed
from common.events import EventLog, read_events
from common.ledger.keys import load_signing_key
from common.objects import write_atomically
from common.sealing_rotation import load_sealing_keys
from common.system_errors import DISK, explain, system_cause
from common.witness.memory import FOLDER as WITNESSES
from server.aggregation.aggregator import Aggregator
from server.aggregation.exchange import Transport
from server.aggregation.sealed_sums import aggregator_of
from server.aggregation.witnessing import Witnesses
from server.ledger.server_ledger import Ledger
from server.postprocess.labels import read_released, write_labels
from server.protocols.controls import CONTROLS
from server.protocols.query_protocol import protocol_of
from server.study.evidence import store_codes
from server.study.pools import check_answers
from server.study.revocations import check_revoked
from server.study.spoiled import check_answered
from server.study.workspace import Site, Workspace

log = logging.getLogger(__name__)


def run_study(workspace: Workspace, transport: Transport, *, run: str) -> None:
    """Run or resume a study; every outcome is logged as an event.

    Args:
        workspace: The study.
        transport: Carries messages to and from the sites.
        run: The run's name in the event log.

    Raises:
        StudyBusy: If another run holds the study.
        Exception: Any error that ended the run, after it was logged as ``run-failed``.
    """
    study = workspace.study()
    with workspace.locked():
        workspace.stop_file.unlink(missing_ok=True)
        resumed = any(event["event"] == "run-started" for event in read_events(workspace.events_file))
        events = EventLog(workspace.events_file, study=study.id)
        events.emit("run-started", run=run, pid=os.getpid(), resumed=resumed)
        started = time.monotonic()
        try:
            imports = Thread(target=_import_libraries)  # while the run waits for sites
            collect(workspace, transport, events=events, on_first=imports.start)  # stage 1
            with ThreadPoolExecutor(1) as beside:  # a site that does not countersign delays no student
                countersigned = beside.submit(countersign, workspace, transport, events=events)
                if not workspace.stop_file.exists():
                    with Ledger.open(workspace.ledger_file) as ledger:
                        check_answers(ledger, study, pools=[site.pool for site in workspace.admitted()])
                    if imports.is_alive():
                        imports.join()  # two threads that import torch at once may find it half imported
                    finish(workspace, events=events)
                countersigned.result()
        except Exception as error:
            reason, code = _why_failed(error)
            events.emit("run-failed", run=run, reason=reason, code=code)
            raise
        if workspace.stop_file.exists():
            events.emit("stop-requested", run=run)
        events.emit("run-finished", run=run, seconds=round(time.monotonic() - started, 3))


def _why_failed(error: Exception) -> tuple[str, int]:
    """Return the reason and the exit code of a failed run; an unforeseen error's reason is only its class's name."""
    known = error if isinstance(error, ConsiliumError) else system_cause(error)
    if isinstance(known, ConsiliumError):
        return str(known), known.exit_code
    if known is None:
        return type(error).__name__, ConsiliumError.exit_code
    code = StorageFailed.exit_code if known.errno in DISK else ConsiliumError.exit_code
    return "; to fix: ".join(explain(known)), code


def collect(
    workspace: Workspace, transport: Transport, *, events: EventLog, on_first: Callable[[], None] = lambda: None
) -> None:
    """Answer the study's open queries in the order of its protocol (stage 1).

    Args:
        workspace: The study.
        transport: Carries messages to and from the sites.
        events: The event log.
        on_first: Called once, when the first queries of the protocol are answered, in this run or an earlier one.
    """
    study = workspace.study()
    signing_key = load_signing_key(workspace.signing_key_file)
    with (
        Ledger.open(workspace.ledger_file, signing_key=signing_key) as ledger,
        stage(events, "collect", total=study.privacy.planned_queries, stopped=workspace.stop_file.exists),
    ):
        if (missing := ledger.study_missing(study.id)) is not None:
            raise LedgerCorrupt(missing)
        check_answered(workspace, ledger, study)
        check_revoked(workspace, ledger, study)
        core: Aggregator | None = None
        for number, queries in enumerate(protocol_of(study).configure(workspace.public(), ledger.answer)):
            core = aggregator_of(study)(
                study=study,
                queries=queries,
                sites=workspace.admitted,
                ledger=ledger,
                sealing_key=load_sealing_keys(workspace.sealing_key_file),
                events=events,
                before=queries[0].round - 1,
                keep_status=partial(keep_status, workspace.reports_dir),
                store_codes=partial(store_codes, workspace.evidence_dir),
                after=core,
            )
            core.run(transport, should_stop=workspace.stop_file.exists)
            if workspace.stop_file.exists():
                break
            if number == 0:
                on_first()


def countersign(workspace: Workspace, transport: Transport, *, events: EventLog) -> None:
    """Have the sites countersign the ledger's head, the signed hash of its newest row. This charges nothing.

    Args:
        workspace: The study, whose lock the caller holds.
        transport: Carries messages to and from the sites.
        events: The event log.
    """
    signing_key = load_signing_key(workspace.signing_key_file)
    with Ledger.open(workspace.ledger_file, signing_key=signing_key) as ledger:
        folder = workspace.root / WITNESSES
        witnesses = Witnesses(folder, study=workspace.study().id, ledger=ledger, events=events)
        witnesses.ask(workspace.admitted(), transport)


def _import_libraries() -> None:
    """Import torch and what post-processing needs besides, which takes seconds."""
    for name in ("torch._dynamo", "server.postprocess.bundle", "server.postprocess.networks"):
        import_module(name)  # the first is what the first optimiser would import


def keep_status(folder: Path, site: Site, text: str) -> None:
    """Store the newest report that a site shares about itself; readers verify its signature.

    If it cannot be written, the failure is logged and the run continues.

    Args:
        folder: Folder of the reports.
        site: The site; the file is named after it.
        text: The report.
    """
    try:
        write_atomically(folder / f"{site.name}.json", text.encode())
    except OSError as error:
        log.warning("event=status-not-kept site=%s cause=%s", site.name, type(error).__name__)


def finish(workspace: Workspace, *, events: EventLog) -> None:
    """Run stages 2 to 5: decode stored answers, train student and controls, export the bundle.

    This is post-processing: it costs no budget and can be repeated.

    Args:
        workspace: The study, whose lock the caller holds.
        events: The event log.
    """
    from server.postprocess.bundle import export_student  # imports torch
    from server.postprocess.networks import fit_controls, fit_student

    released = read_released(workspace)
    steps = released.public.study.student.steps
    with stage(events, "decode", total=len(released.public.volumes)):  # stage 2
        write_labels(released, events=events)
    with stage(events, "student", total=steps):  # stage 3
        fit_student(released, events=events)
    with stage(events, "controls", total=len(CONTROLS) * steps):  # stage 4
        fit_controls(released, events=events)
    with stage(events, "export", total=1):  # stage 5
        export_student(
            workspace,
            events=events,
            on_case=lambda done, total: events.emit("stage-progress", stage="export", done=done, total=total),
        )


@contextmanager
def locked_events(workspace: Workspace) -> Iterator[tuple[Workspace, EventLog]]:
    """Hold the study's lock, and yield the study and its event log, for post-processing outside a run.

    Args:
        workspace: The study.

    Yields:
        The same study and its event log, while the lock is held.

    Raises:
        StudyBusy: If a run holds the study.
    """
    with workspace.locked():
        yield workspace, EventLog(workspace.events_file, study=workspace.study().id)


@contextmanager
def stage(events: EventLog, name: str, *, total: int, stopped: Callable[[], bool] = lambda: False) -> Iterator[None]:
    """Log the start and the end of a stage around the block; no end is logged if the block raises or was stopped.

    Args:
        events: The event log.
        name: The stage's name.
        total: Number of steps it will take.
        stopped: Called after the block; returns True if somebody stopped the stage before its end.
    """
    events.emit("stage-started", stage=name, total=total)
    started = time.monotonic()
    yield
    if not stopped():
        events.emit("stage-finished", stage=name, seconds=round(time.monotonic() - started, 3))
