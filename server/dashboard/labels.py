"""Labels and student: what can be said of each volume's pseudo-label, and what somebody decided about it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from fastapi import HTTPException

from common.config import Study
from common.errors import ConsiliumError, InvalidInput
from server.dashboard.pictures import VolumeFacts, picture_key, read_facts
from server.dashboard.quarantine import read_json
from server.dashboard.service import DashboardService
from server.postprocess.decisions import MAX_NOTE_CHARACTERS, Decision, Verdict, standing
from server.protocols.controls import CONTROLS
from server.protocols.query_protocol import protocol_of
from server.study.gate import gate_state
from server.study.status import bundle_problem
from server.study.workspace import Workspace

MAX_FACTS_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class LabelView:
    """One public volume. ``state`` is waiting (no answer), answered (not decoded), preparing (no picture) or ready;
    ``verdict`` is what stands about the label as it is now: none, accept or reject."""

    volume: str
    number: int
    state: str
    verdict: str
    decision: Decision | None
    facts: VolumeFacts | None


@dataclass(frozen=True, slots=True)
class LabelsPage:
    """Every public volume, in query order, and how the pictures are coming along.

    ``queue``: the volumes in the order to look at them, undecided first, most suspicious first; no student has a say.
    """

    labels: tuple[LabelView, ...]
    ready: int
    decoded: int
    accepted: int
    rejected: int
    preparing: str
    problem: str
    command: str
    queue: tuple[str, ...]
    undecided: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ControlView:
    """A control's training: its weights once they exist. Several of one network are one, by all their names."""

    name: str
    weights: str | None
    time: str | None


@dataclass(frozen=True, slots=True)
class StudentPage:
    """The student: its loss curve, weights, controls, and the bundle if it was exported. ``passes``: their last steps.

    ``validation`` is how many labelled cases score student and controls. ``problem`` says why the bundle's own
    statement no longer holds, ``gate`` what hospitals said of it, if they are asked.
    """

    losses: tuple[tuple[int, float], ...]
    passes: tuple[int, ...]
    steps: int
    weights: str | None
    trained: str | None
    seconds: float | None
    labels_used: int
    labels_rejected: int
    controls: tuple[ControlView, ...]
    validation: int
    bundle: str | None
    exported: str | None
    files: tuple[tuple[str, int], ...]
    guarantee: str
    gate: str
    problem: str | None
    examples: tuple[VolumeFacts, ...]


def published(workspace: Workspace, study: Study) -> tuple[str, ...]:
    """The public volumes that are queried, in order; none before they are published."""
    if not (workspace.root / "public.json").exists():
        return ()
    return protocol_of(study).agenda(study).asked(workspace.volumes())


def labels_page(service: DashboardService) -> LabelsPage:
    """The Labels page; starts the preparation of pictures that are missing or out of date."""
    follower, files = service.follower, service.label_files
    study, workspace = follower.study, follower.workspace
    decided = standing(service.decided(), study.id)
    answers, student = follower.facts().answers, files.student()
    volumes = published(workspace, study)
    answered = protocol_of(study).agenda(study).labelled(answers, asked=len(volumes))
    found = []
    stale = False
    for number, volume in enumerate(volumes, start=1):
        label = files.hash(volume)
        known = read_facts(service.pictures_dir, volume)
        facts = known[0] if known is not None and known[0].label == label else None
        stale = stale or (label is not None and (known is None or known[1] != picture_key(label, student)))
        decision = decided.get(volume)
        verdict = str(decision.verdict) if decision is not None and decision.label == label else "none"
        state = "ready" if facts else "preparing" if label else "answered" if number <= answered else "waiting"
        found.append(LabelView(volume, number, state, verdict, decision, facts))
    if stale and service.pictures.state.state != "failed":
        service.pictures.start()
    job = service.pictures.state
    return LabelsPage(
        labels=tuple(found),
        ready=sum(one.state == "ready" for one in found),
        decoded=sum(one.state in ("ready", "preparing") for one in found),
        accepted=sum(one.verdict == Verdict.ACCEPT for one in found),
        rejected=sum(one.verdict == Verdict.REJECT for one in found),
        preparing=job.state,
        problem=job.words if job.state == "failed" else "",
        undecided=tuple(one.volume for one in found if one.verdict == "none" and one.facts is not None),
        queue=tuple(one.volume for one in sorted(found, key=_turn)),
        command=f"consilium student train {workspace.root} --decisions {service.decisions.path}",
    )


def _turn(one: LabelView) -> tuple[bool, float, int]:
    return one.verdict != "none", -(one.facts.suspicion if one.facts else 0.0), one.number


def take_decisions(
    service: DashboardService, volumes: Sequence[str], *, user: str, verdict: Verdict, note: str
) -> list[Decision]:
    """Enter a decision about each volume's label as it is now. 404 where one has none: then nothing is entered."""
    study, files = service.follower.study, service.label_files
    known = set(published(service.follower.workspace, study))
    labels = {volume: files.hash(volume) if volume in known else None for volume in volumes}
    if None in labels.values():
        raise HTTPException(404, "there is no label of this volume")
    if len(note) > MAX_NOTE_CHARACTERS:
        raise HTTPException(400, f"a note has at most {MAX_NOTE_CHARACTERS} characters")
    return [
        service.decisions.decide(user=user, study=study.id, volume=volume, label=label, verdict=verdict, note=note)
        for volume, label in labels.items()
        if label is not None
    ]


def student_page(service: DashboardService, labels: LabelsPage) -> StudentPage:
    """The Student page."""
    events, workspace = service.follower.events, service.follower.workspace
    exported = bundle(workspace)
    ready = [one.facts for one in labels.labels if one.facts is not None and one.facts.has_student]
    by_agreement = sorted(ready, key=lambda facts: -1.0 if facts.agreement is None else facts.agreement)
    examples = [*by_agreement[:3], *by_agreement[-3:]] if len(by_agreement) > 6 else by_agreement
    return StudentPage(
        losses=tuple(events.losses),
        passes=tuple(events.passes),
        steps=events.loss_total or service.follower.study.student.steps,
        weights=events.student[0] if events.student else None,
        trained=events.student[1] if events.student else None,
        seconds=events.student[2] if events.student else None,
        labels_used=labels.decoded - labels.rejected,
        labels_rejected=labels.rejected,
        controls=_controls(events.controls),
        validation=len(workspace.validation()),
        bundle=events.bundle[0] if events.bundle else None,
        exported=events.bundle[1] if events.bundle else None,
        files=tuple((path.relative_to(workspace.bundle_dir).as_posix(), path.stat().st_size) for path in exported),
        guarantee=_guarantee(workspace.bundle_dir),
        gate=_gate(workspace),
        problem=bundle_problem(workspace, service.spending()),
        examples=tuple(examples),
    )


def _controls(trained: Mapping[str, tuple[str, str]]) -> tuple[ControlView, ...]:
    """The controls in their order; those whose weights are the same are one network under all its names."""
    found: dict[str, ControlView] = {}
    for name in CONTROLS:
        weights, time = trained.get(name, (None, None))
        key = weights or name
        found[key] = ControlView(f"{found[key].name}, {name}" if key in found else name, weights, time)
    return tuple(found.values())


def bundle(workspace: Workspace) -> list[Path]:
    """The exported bundle's files by name; none before it is exported."""
    folder = workspace.bundle_dir
    return sorted(path for path in folder.rglob("*") if path.is_file()) if folder.is_dir() else []


def _gate(workspace: Workspace) -> str:
    """What hospitals said of the exported student; empty without a gate or an export that can be read."""
    try:
        return gate_state(workspace).words
    except (ConsiliumError, OSError):
        return ""


def _guarantee(folder: Path) -> str:
    """The bundle's own statement of what is guaranteed and what its labels spent of it; empty before it is exported."""
    try:
        facts = read_json(folder / "configs" / "privacy.json", most_bytes=MAX_FACTS_BYTES)
        spent = f"; spent of it {facts['spent']}" if "spent" in facts else ""
        return f"guaranteed {facts['guarantee']}{spent}"
    except (InvalidInput, LookupError, TypeError):
        return ""
