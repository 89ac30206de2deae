"""Computes the content of the Labels and Student pages, and stores decisions about labels.

A label here is the pseudo-label of a public volume, decoded from noisy answers. The pages and the API use this module.
It refuses a decision about a volume without a label, and a note that is too long.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from fastapi import HTTPException

from common.config import Study
from common.errors import InvalidInput
from common.reading import read_json
from server.dashboard.pictures import VolumeFacts, label_hash, picture_key, read_facts, student_hash
from server.dashboard.service import DashboardService
from server.postprocess.decisions import MAX_NOTE_CHARACTERS, Decision, Verdict, newest_decisions
from server.protocols.controls import controls_of
from server.protocols.query_protocol import protocol_of
from server.study.gate import shown_gate
from server.study.status import bundle_problem
from server.study.workspace import Workspace

MAX_FACTS_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class LabelView:
    """One public volume with the state of its label.

    Attributes:
        volume: SHA-256 of the volume.
        number: The volume's number in query order, from 1.
        state: ``waiting`` (not answered yet), ``answered`` (not decoded yet), ``preparing`` (the picture is being made)
            or ``ready``.
        verdict: Decision about the current label: ``none``, ``accept`` or ``reject``.
        decision: The newest decision about the volume; it may concern an earlier label.
        facts: Figures of the label and the picture; None before they are prepared.
    """

    volume: str
    number: int
    state: str
    verdict: str
    decision: Decision | None
    facts: VolumeFacts | None


@dataclass(frozen=True, slots=True)
class LabelsPage:
    """The content of the Labels page.

    Attributes:
        labels: Every public volume, in query order.
        ready: Number of volumes whose picture is ready.
        decoded: Number of volumes with a label.
        accepted: Number of accepted labels.
        rejected: Number of rejected labels.
        preparing: State of the job that prepares the pictures.
        problem: Error message of this job, if it failed.
        command: Command that trains the student and applies the decisions.
        queue: Volumes in the order in which to review them: those without a decision first, and of these the most
            suspicious first. The student's prediction has no influence on the order.
        undecided: Volumes that have a picture and no decision.
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
    """A control: a network trained for comparison without the hospitals' answers.

    Attributes:
        name: The control's name; several names, separated by commas, if these controls are the same network.
        weights: SHA-256 of the control's weights; None before it is trained.
        time: Time at which the training ended; None until then.
    """

    name: str
    weights: str | None
    time: str | None


@dataclass(frozen=True, slots=True)
class StudentPage:
    """The content of the Student page.

    Attributes:
        losses: Step and loss of each logged training step.
        passes: Last step of each training pass.
        validated: Training step, mean Dice and number of validation cases, for each time that the student was scored.
        steps: Total number of training steps.
        weights: SHA-256 of the student's weights; None before it is trained.
        trained: Time at which the student's training ended; None until then.
        seconds: Duration of this training in seconds; None before its end.
        labels_used: Number of labels that are not rejected.
        labels_rejected: Number of rejected labels.
        controls: The controls with which the student is compared.
        validation: Number of labelled cases on which the student and the controls are scored.
        bundle: SHA-256 of the exported bundle; None before the export.
        exported: Time of the export; None until then.
        files: Path and size in bytes of each file of the bundle; empty before the export.
        guarantee: The privacy guarantee that the bundle states; empty before the export.
        gate: The hospitals' verdicts on the student and, until it is released, what the operator can do; empty if the
            study has no gate. A study with a gate releases the student only after enough hospitals' verdicts for it.
        released: False while the gate lacks verdicts; then the bundle is for evaluation only.
        problem: Reason why the bundle's statement no longer holds; None if it holds.
        examples: Volumes on which label and student agree least and most.
    """

    losses: tuple[tuple[int, float], ...]
    passes: tuple[int, ...]
    validated: tuple[tuple[int, float, int], ...]
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
    released: bool
    problem: str | None
    examples: tuple[VolumeFacts, ...]


def published(workspace: Workspace, study: Study) -> tuple[str, ...]:
    """Return the public volumes that the study's queries ask about.

    Args:
        workspace: The study's directory.
        study: The study.

    Returns:
        SHA-256 of each volume, in query order; empty before the volumes are published.
    """
    if not workspace.published():
        return ()
    return protocol_of(study).query_plan(study).asked(workspace.volumes())


def labels_page(service: DashboardService) -> LabelsPage:
    """Return the content of the Labels page, and start the job that makes missing and outdated pictures.

    Args:
        service: The dashboard's service.

    Returns:
        The page's content.
    """
    follower = service.follower
    study, workspace = follower.study, follower.workspace
    decided = newest_decisions(service.decided(), study.id)
    answers, student = follower.facts().answers, student_hash(workspace)
    volumes = published(workspace, study)
    answered = protocol_of(study).query_plan(study).labelled(answers, asked=len(volumes))
    found = []
    stale = False
    for number, volume in enumerate(volumes, start=1):
        label = label_hash(workspace, volume)
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
    """Store the same decision about the current label of each volume.

    Args:
        service: The dashboard's service.
        volumes: SHA-256 of each volume.
        user: Name of the user who decides.
        verdict: The decision.
        note: The user's reason.

    Returns:
        The stored decisions, in the order of ``volumes``.

    Raises:
        HTTPException: 404 if a volume has no label, 400 if the note is too long. Nothing is stored in these cases.
    """
    study, workspace = service.follower.study, service.follower.workspace
    known = set(published(workspace, study))
    labels = {volume: label_hash(workspace, volume) if volume in known else None for volume in volumes}
    if None in labels.values():
        raise HTTPException(404, "this study has no volume with this SHA-256 whose label is decoded")
    if len(note) > MAX_NOTE_CHARACTERS:
        raise HTTPException(400, f"a note has at most {MAX_NOTE_CHARACTERS} characters")
    return [
        service.decisions.decide(user=user, study=study.id, volume=volume, label=label, verdict=verdict, note=note)
        for volume, label in labels.items()
        if label is not None
    ]


def student_page(service: DashboardService, labels: LabelsPage) -> StudentPage:
    """Return the content of the Student page.

    Args:
        service: The dashboard's service.
        labels: The content of the Labels page.

    Returns:
        The page's content.
    """
    events, workspace = service.follower.events, service.follower.workspace
    exported, gate = bundle(workspace), shown_gate(workspace)
    ready = [one.facts for one in labels.labels if one.facts is not None and one.facts.has_student]
    by_agreement = sorted(ready, key=lambda facts: -1.0 if facts.agreement is None else facts.agreement)
    examples = [*by_agreement[:3], *by_agreement[-3:]] if len(by_agreement) > 6 else by_agreement
    return StudentPage(
        losses=tuple(events.losses),
        passes=tuple(events.passes),
        validated=tuple(events.validated),
        steps=events.loss_total or service.follower.study.student.steps,
        weights=events.student[0] if events.student else None,
        trained=events.student[1] if events.student else None,
        seconds=events.student[2] if events.student else None,
        labels_used=labels.decoded - labels.rejected,
        labels_rejected=labels.rejected,
        controls=_controls(controls_of(workspace.study()), events.controls),
        validation=len(workspace.validation()),
        bundle=events.bundle[0] if events.bundle else None,
        exported=events.bundle[1] if events.bundle else None,
        files=tuple((path.relative_to(workspace.bundle_dir).as_posix(), path.stat().st_size) for path in exported),
        guarantee=_guarantee(workspace.bundle_dir),
        gate=gate.sentence,
        released=gate.released,
        problem=bundle_problem(workspace, service.spending()),
        examples=tuple(examples),
    )


def _controls(names: Sequence[str], trained: Mapping[str, tuple[str, str]]) -> tuple[ControlView, ...]:
    """Return the facts of each control; controls with the same weights become one entry with all their names."""
    found: dict[str, ControlView] = {}
    for name in names:
        weights, time = trained.get(name, (None, None))
        key = weights or name
        found[key] = ControlView(f"{found[key].name}, {name}" if key in found else name, weights, time)
    return tuple(found.values())


def bundle(workspace: Workspace) -> list[Path]:
    """Return the files of the exported bundle.

    Args:
        workspace: The study's directory.

    Returns:
        Paths, sorted; empty before the export.
    """
    folder = workspace.bundle_dir
    return sorted(path for path in folder.rglob("*") if path.is_file()) if folder.is_dir() else []


def _guarantee(folder: Path) -> str:
    """Return the guarantee that the bundle states, and the ε that its labels have spent; empty before the export."""
    try:
        facts = read_json(folder / "configs" / "privacy.json", most_bytes=MAX_FACTS_BYTES)
        spent = f"; spent of it {facts['spent']}" if "spent" in facts else ""
        return f"guaranteed {facts['guarantee']}{spent}"
    except (InvalidInput, LookupError, TypeError):
        return ""
