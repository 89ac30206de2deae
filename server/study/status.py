"""Where a study stands: its state, its answers, what was spent, and what each site did last."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from common.config import Study
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
class StudyStatus:
    """A study's standing by its ledger and its event log; ``epsilon`` is what it spent, by accountant."""

    study: Study
    state: str
    running: bool
    last_event: dict[str, object]
    answers: int
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
            "last_event": self.last_event,
            "answers": self.answers,
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
            "ledger_head": self.ledger_head,
        }

    def lines(self) -> list[str]:
        """The same for a reader."""
        privacy = self.study.privacy
        stated = f"δ = {delta_text(privacy.delta)}, unit {privacy.unit}, relation {privacy.relation}"
        spent = ", ".join(f"ε = {epsilon_text(value)} ({name})" for name, value in self.epsilon.items())
        lines = [
            f"study {self.study.name}: {self.state}",
            f"answers {self.answers} of {privacy.planned_queries} planned",
            f"guaranteed ε = {epsilon_text(privacy.epsilon)} ({privacy.accountant}), {stated}",
            f"spent of it {spent or 'ε = 0'}, {stated}",
        ]
        for name, site in sorted(self.sites.items()):
            last = f"; {site.newest['event']} at {site.newest['time']}" if site.newest else ""
            lines.append(
                f"site {name}: {'spent' if site.spent else 'open'}; in {site.batches} of {len(self.batches)} releases "
                f"with {site.answers} of {self.answers} answers{last}"
                + (f", {site.newest['reason']}" if site.newest.get("reason") else "")
            )
        lines += [f"warning: {warning}" for warning in self.warnings]
        for number, batch in enumerate(self.batches, start=1):
            absent = sorted(self.sites.keys() - set(batch.roster))
            if absent:
                lines.append(f"release {number} ({batch.queries} answers) was without {', '.join(absent)}")
        return lines


def study_status(workspace: Workspace) -> StudyStatus:
    """A study's standing, from the ledger and the event log."""
    study = workspace.study()
    with Ledger.open(workspace.ledger_file) as ledger:
        answers = ledger.answers(study.id)
        batches = rosters(answers)
        declared = {pool.pool for pool in ledger.pools()}
        spent = {
            site.name: is_spent(ledger, study, pool=site.pool)
            for site in workspace.registered()
            if site.pool in declared
        }
        epsilon = {str(name): one.epsilon for name, one in ledger.study_guarantees(study.id).items()}
        head = ledger.head().hash
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
    for event in read_events(workspace.events_file):
        kind = event["event"]
        if kind in _TURNS:
            last = event
        elif kind == "answers-weighed":
            weighed, warnings = {name: event[name] for name in EVENTS[kind]}, tuple(event["warnings"])
        elif kind in _OF_SITES:
            newest = {"event": kind, "time": event["time"], "reason": event.get("reason", "")}
            sites[event["site"]] = replace(sites.get(event["site"], SiteStatus(False, 0, 0)), newest=newest)
    running = workspace.busy()
    done = len(answers) >= study.privacy.planned_queries
    out_of_budget = bool(spent) and sum(not gone for gone in spent.values()) < study.privacy.quorum
    return StudyStatus(
        study=study,
        state="running" if running else "complete" if done else "budget spent" if out_of_budget else "not running",
        running=running,
        last_event=last,
        answers=len(answers),
        epsilon=epsilon,
        sites=sites,
        batches=batches,
        answers_weighed=weighed,
        warnings=warnings,
        ledger_head=head,
    )
