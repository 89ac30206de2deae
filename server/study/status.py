"""Where a study stands: its state, its answers, what was spent, and what each site did last."""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime
from typing import Any

from common.config import Study
from common.errors import InvalidInput, LedgerCorrupt
from common.events import EVENTS, read_events
from common.privacy.figures import delta_text, epsilon_text
from server.ledger.server_ledger import Ledger
from server.study.consent_text import BatchRoster, is_spent, rosters
from server.study.workspace import Workspace

_TURNS = ("stage-started", "run-started", "run-finished", "run-failed", "quorum-missed")
_OF_SITES = ("offer-answered", "reply-received", "reply-missing")


@dataclass(frozen=True, slots=True)
class SiteStatus:
    """One site: ``spent`` says that its pool takes no further answer; ``newest`` is the last event about it."""

    spent: bool
    batches: int
    answers: int
    newest: dict[str, str] = field(default_factory=dict)

    def to_json(self) -> dict[str, object]:
        state = "spent" if self.spent else "open"
        return {"state": state, "batches": self.batches, "answers": self.answers, **self.newest}


@dataclass(frozen=True, slots=True)
class Stage:
    """The stage a run is in, or was in when it ended: its name, since when, and how much of it is done."""

    name: str
    since: str
    done: int
    total: int


@dataclass(frozen=True, slots=True)
class StudyStatus:
    """A study's standing by its ledger and its event log; ``epsilon`` is what it spent, by accountant.

    ``admitted`` is how many sites are; ``stage`` is None before the first run and where a run has ended well.
    """

    study: Study
    state: str
    running: bool
    admitted: int
    stage: Stage | None
    last_event: dict[str, object]
    answers: int
    lost_draws: int
    epsilon: dict[str, float]
    sites: dict[str, SiteStatus]
    batches: tuple[BatchRoster, ...]
    answers_weighed: dict[str, object] | None
    warnings: tuple[str, ...]
    ledger_head: str

    def to_json(self) -> dict[str, object]:
        privacy = self.study.privacy
        return {
            "study": self.study.name,
            "id": self.study.id,
            "state": self.state,
            "running": self.running,
            "stage": None if self.stage is None else asdict(self.stage),
            "sites_admitted": self.admitted,
            "last_event": self.last_event,
            "answers": self.answers,
            "answers_left": self.answers_left,
            **({"lost_draws": self.lost_draws} if privacy.sealed else {}),
            "planned_queries": privacy.planned_queries,
            "epsilon": self.epsilon,
            "accountant": str(privacy.accountant),
            "budget_epsilon": privacy.epsilon,
            "delta": privacy.delta,
            "unit": str(privacy.unit),
            "relation": str(privacy.relation),
            "sites": {name: site.to_json() for name, site in self.sites.items()},
            "batches": [{"batch": b.batch, "queries": b.queries, "roster": list(b.roster)} for b in self.batches],
            "answers_weighed": self.answers_weighed,
            "warnings": list(self.warnings),
            "ledger_head": self.ledger_head,
        }

    @property
    def answers_left(self) -> int:
        """Planned queries that are not answered yet."""
        return max(0, self.study.privacy.planned_queries - self.answers)

    def lines(self) -> list[str]:
        """The same for a reader; times are this machine's."""
        privacy = self.study.privacy
        stated = f"δ = {delta_text(privacy.delta)}, unit {privacy.unit}, relation {privacy.relation}"
        spent = ", ".join(f"ε = {epsilon_text(value)} ({name})" for name, value in self.epsilon.items())
        lines = [
            f"study {self.study.name}: {self.state}",
            *([] if self.stage is None else [_stage_line(self.stage)]),
            f"answers {self.answers} of {privacy.planned_queries} planned, {self.answers_left} left",
            f"guaranteed ε = {epsilon_text(privacy.epsilon)} ({privacy.accountant}), {stated}",
            f"spent of it {spent or 'ε = 0'}, {stated}",
        ]
        if self.lost_draws:
            lines.append(
                f"draws lost {self.lost_draws} of {privacy.spare_draws} to spare, charged and without an answer"
            )
        if self.admitted < privacy.quorum:
            lines.append(f"sites admitted: {self.admitted}, of the {privacy.quorum} that a release needs")
        if self.sites:
            lines += _table(
                ("site", "budget", "releases", "answers", "last heard", ""),
                [
                    (
                        name,
                        "spent" if site.spent else "open",
                        f"{site.batches} of {len(self.batches)}",
                        f"{site.answers} of {self.answers}",
                        _local(site.newest["time"]) if site.newest else "never",
                        " ".join(filter(None, (site.newest.get("event", ""), site.newest.get("reason", "")))),
                    )
                    for name, site in sorted(self.sites.items())
                ],
            )
        lines += [f"warning: {warning}" for warning in self.warnings]
        for number, batch in enumerate(self.batches, start=1):
            absent = sorted(self.sites.keys() - set(batch.roster))
            if absent:
                lines.append(f"release {number} ({batch.queries} answers) was without {', '.join(absent)}")
        return lines


def _stage_line(stage: Stage) -> str:
    return f"stage {stage.name}: {stage.done} of {stage.total}, since {_local(stage.since)}"


def _table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    return ["  ".join(map(str.ljust, row, widths)).rstrip() for row in (head, *rows)]


def _local(time: str) -> str:
    """A time of the event log in this machine's zone."""
    return datetime.fromisoformat(time).astimezone().strftime("%Y-%m-%d %H:%M:%S")


def _stage(before: Stage | None, event: dict[str, Any]) -> Stage | None:
    """The stage after one more event."""
    match event["event"]:
        case "stage-started":
            return Stage(event["stage"], event["time"], 0, event["total"])
        case "stage-progress" if before is not None:
            return replace(before, done=event["done"], total=event["total"])
        case "student-step" if before is not None:
            return replace(before, done=event["step"], total=event["total"])
        case "label-decoded" if before is not None:
            return replace(before, done=before.done + 1)
        case "run-started" | "run-finished":
            return None
    return before


def ledger_problem(workspace: Workspace) -> str | None:
    """Why no run would start on the study's ledger: it does not hold, or its standing shows that it is an older copy.

    None where it does hold, and where it is not here to be read: the network's part of a server has none.
    """
    if not os.access(workspace.ledger_file, os.R_OK):
        return None
    try:
        with Ledger.open(workspace.ledger_file) as ledger:
            return ledger.standing_problem()
    except (LedgerCorrupt, InvalidInput) as error:
        return str(error)


def study_status(workspace: Workspace) -> StudyStatus:
    """A study's standing, from the ledger and the event log."""
    study = workspace.study()
    with Ledger.open(workspace.ledger_file) as ledger:
        answers = ledger.answers(study.id)
        batches = rosters(answers)
        registered = workspace.registered()
        declared = {pool.pool for pool in ledger.pools()}
        spent = {site.name: is_spent(ledger, study, pool=site.pool) for site in registered if site.pool in declared}
        epsilon = {str(name): one.epsilon for name, one in ledger.study_guarantees(study.id).items()}
        lost, head, standing = ledger.lost_draws(study.id), ledger.head().hash, ledger.standing_problem()
    sites = {
        name: SiteStatus(
            spent=spent.get(name, False),
            batches=sum(name in batch.roster for batch in batches),
            answers=sum(batch.queries for batch in batches if name in batch.roster),
        )
        for name in sorted(spent.keys() | {name for batch in batches for name in batch.roster})
    }
    last: dict[str, object] = {}
    weighed: dict[str, object] | None = None
    warnings: tuple[str, ...] = ()
    at: Stage | None = None
    for event in read_events(workspace.events_file):
        kind, at = event["event"], _stage(at, event)
        if kind in _TURNS:
            last = event
        elif kind == "answers-weighed":
            weighed, warnings = {name: event[name] for name in EVENTS[kind]}, tuple(event["warnings"])
        elif kind in _OF_SITES:
            newest = {"event": kind, "time": event["time"], "reason": event.get("reason", "")}
            sites[event["site"]] = replace(sites.get(event["site"], SiteStatus(False, 0, 0)), newest=newest)
    running = workspace.busy()
    done = len(answers) >= study.privacy.planned_queries
    enough = len(spent) >= study.privacy.quorum  # else sites are missing, not their budgets
    out_of_budget = enough and sum(not gone for gone in spent.values()) < study.privacy.quorum
    return StudyStatus(
        study=study,
        state="running" if running else "complete" if done else "budget spent" if out_of_budget else "not running",
        running=running,
        admitted=len(registered),
        stage=at,
        last_event=last,
        answers=len(answers),
        lost_draws=lost,
        epsilon=epsilon,
        sites=sites,
        batches=batches,
        answers_weighed=weighed,
        warnings=warnings if standing is None else (standing, *warnings),
        ledger_head=head,
    )
