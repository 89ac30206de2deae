"""Summarises a study: its state, its answers, what was spent, and what each site did last.

`consilium study status` and the dashboard use it. It changes nothing.
"""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from common.config import Study
from common.errors import InvalidInput, LedgerCorrupt
from common.event_kinds import EVENTS
from common.events import read_events
from common.ledger.spending import Spending
from common.objects import check_room
from common.privacy.accounting import Guarantee
from common.privacy.figures import delta_text, epsilon_text
from common.reading import lenient_json
from common.study_facts import StudyFacts
from common.system_errors import DISK, explain
from common.wording import MISSED, local_time, many
from server.ledger.server_ledger import Ledger
from server.study.consent_text import BatchRoster, rosters
from server.study.gate import shut_line
from server.study.read_facts import facts_in
from server.study.run_state import RunState, run_state
from server.study.spoiled import accepted_row, question, spoiled_draws
from server.study.waiting import SLOW_REMEDY, Waiting
from server.study.workspace import Workspace

_TURNS = ("stage-started", "run-started", "run-finished", "run-failed", "quorum-missed")
_OF_SITES = ("offer-answered", "reply-received", "reply-missing")


@dataclass(frozen=True, slots=True)
class SiteStatus:
    """What one site has contributed to a study, and its last event.

    Attributes:
        spent: True if the site's pool cannot pay for a further query.
        batches: Number of releases in which it took part.
        answers: Number of answers in which it took part.
        newest: Kind, time and reason of the last event about the site; empty if there was none.
        charged: In a sealed study, number of charges to its pool: one for each query of each draw. None in an open
            study.
        spoiled: Number of these charges whose sum was spoiled by some site of the roster, possibly by this one.
        refused: Number of its codes that were refused and counted as zero.
        revoked: True if its admission was revoked, so that it answers no further query. Its records may be deleted.
    """

    spent: bool
    batches: int
    answers: int
    newest: dict[str, str] = field(default_factory=dict)
    charged: int | None = None
    spoiled: int = 0
    refused: int = 0
    revoked: bool = False

    @property
    def state(self) -> str:
        """The site's state, the first that holds of: ``revoked``; ``spent`` if its pool cannot pay for a further query;
        ``offline`` if the newest event about the site says that it did not answer an offer, or got none because it sent
        no codes in time; ``withdrawn`` if that event says that it left the study for good; ``declined`` if it says that
        it declined an offer; ``open``.
        """
        reason = self.newest["reason"] if self.newest.get("event") == "offer-answered" else "accepted"
        words = {"accepted": "open", "withdrawn": "withdrawn", **dict.fromkeys((*MISSED, "left-out"), "offline")}
        return "revoked" if self.revoked else "spent" if self.spent else words.get(reason, "declined")

    def to_json(self) -> dict[str, object]:
        """Return the status as plain JSON."""
        draws = {} if self.charged is None else {"charged": self.charged, "spoiled": self.spoiled}
        refused = {"refused": self.refused} if self.refused else {}
        return {
            "state": self.state,
            "batches": self.batches,
            "answers": self.answers,
            **draws,
            **refused,
            **self.newest,
        }


@dataclass(frozen=True, slots=True)
class Stage:
    """The stage that a run is in, or was in when it ended.

    Attributes:
        name: The stage's name, such as ``collect``.
        since: Time at which it began, as the event log states it.
        done: Number of its steps that are done.
        total: Number of its steps.
    """

    name: str
    since: str
    done: int
    total: int


@dataclass(frozen=True, slots=True)
class StudyStatus:
    """A study's state, from its ledger and its event log.

    Attributes:
        study: The study's terms.
        state: The study's state in a word or two, such as ``running`` or ``budget spent``.
        running: True if a run is active.
        admitted: Number of registered sites that are not revoked.
        stage: The run's stage; None before the first run and after a run has ended well.
        waiting: What the active run waits for, and the slow sites of the newest run.
        last_event: The newest event about the run as a whole.
        facts: Answers, lost draws, spending and gain.
        gate: The hospitals' verdicts on the exported student, and what the operator can do; empty if it is released or
            needs none.
        sites: What each site has contributed, by the site's name.
        batches: The releases so far.
        answers_weighed: Result of the newest test of whether the answers are as large as expected; None before the
            first test.
        warnings: Warnings for the operator.
        ledger_head: Hash of the ledger's newest row.
    """

    study: Study
    state: str
    running: bool
    admitted: int
    stage: Stage | None
    waiting: Waiting
    last_event: dict[str, object]
    facts: StudyFacts
    gate: str
    sites: dict[str, SiteStatus]
    batches: tuple[BatchRoster, ...]
    answers_weighed: dict[str, object] | None
    warnings: tuple[str, ...]
    ledger_head: str

    def to_json(self) -> dict[str, object]:
        """Return the status as plain JSON."""
        privacy, facts = self.study.privacy, self.facts
        spending = facts.spending
        return {
            "study": self.study.name,
            "id": self.study.id,
            "state": self.state,
            "running": self.running,
            "stage": None if self.stage is None else asdict(self.stage),
            "waits_for": self.waits_for,
            "sites_admitted": self.admitted,
            "last_event": self.last_event,
            "answers": facts.answers,
            "answers_left": facts.answers_left,
            **({"lost_draws": facts.lost_draws} if privacy.sealed else {}),
            "planned_queries": privacy.planned_queries,
            "epsilon": {str(name): one.epsilon for name, one in spending.readings().items()},
            "accountant": str(privacy.accountant),
            "budget_epsilon": privacy.epsilon,
            "guaranteed_epsilon": None if spending.doubt else spending.guaranteed.epsilon,
            "at_least": spending.doubt,
            "guess_right_at_most": {
                "guaranteed": None if spending.doubt else spending.odds_guaranteed,
                "spent": spending.odds_spent,
            },
            "gain": None if facts.gain is None else facts.gain.to_json(),
            "gate": self.gate,
            "delta": privacy.delta,
            "unit": str(privacy.unit),
            "relation": str(privacy.relation),
            "sites": {name: site.to_json() for name, site in self.sites.items()},
            "batches": [asdict(batch) for batch in self.batches],
            "answers_weighed": self.answers_weighed,
            "warnings": list(self.warnings),
            "ledger_head": self.ledger_head,
        }

    @property
    def waits_for(self) -> list[str]:
        """Names of the sites whose codes the active run waits for."""
        return sorted(self.waiting.sites) if self.running else []

    @property
    def _charged_already(self) -> str:
        """Remark that the number of answers left does not count draws under way; empty if there can be none.

        A draw under way is charged already, but its sum is not stored yet.
        """
        if self.running and self.study.privacy.sealed and self.facts.answers_left < self.facts.unanswered:
            return ", not counting draws under way, which are charged already"
        return ""

    def lines(self) -> list[str]:
        """Return the status for a reader, with times in this machine's time zone."""
        privacy, facts = self.study.privacy, self.facts
        lines = [
            f"study {self.study.name}: {self.state}",
            *([] if self.stage is None else [_stage_line(self.stage)]),
            *(
                [f"waits for {', '.join(names)}, since {local_time(self.waiting.since)}"]
                if (names := self.waits_for)
                else []
            ),
            f"{facts.answers_line}{self._charged_already}",
            *_spending_lines(facts.spending),
            *([] if facts.gain is None else [facts.gain_line]),
            *([self.gate] if self.gate else []),
        ]
        if facts.lost_draws:
            lines.append(
                f"draws lost {facts.lost_draws} of {privacy.spare_draws} to spare, charged and without an answer"
            )
        if self.admitted < privacy.quorum:
            lines.append(f"sites admitted: {self.admitted}, of the {privacy.quorum} that a release needs")
        refused = any(site.refused for site in self.sites.values())
        if self.sites:
            lines += _table(
                (
                    *("site", "state", *(("charged", "spoiled") if privacy.sealed else ())),
                    *("releases", "answers", *(("refused",) if refused else ()), "last event", ""),
                ),
                [
                    (
                        name,
                        site.state,
                        *([many(site.charged or 0, "draw"), str(site.spoiled)] if privacy.sealed else []),
                        f"{site.batches} of {len(self.batches)}",
                        f"{site.answers} of {facts.answers}",
                        *([many(site.refused, "code")] if refused else []),
                        local_time(site.newest["time"]) if site.newest else "never",
                        " ".join(filter(None, (site.newest.get("event", ""), site.newest.get("reason", "")))),
                    )
                    for name, site in sorted(self.sites.items())
                ],
            )
        lines += [f"warning: {warning}" for warning in self.warnings]
        for number, batch in enumerate(self.batches, start=1):
            absent = sorted(self.sites.keys() - set(batch.roster))
            if absent:
                lines.append(f"release {number} ({many(batch.queries, 'answer')}) was without {', '.join(absent)}")
        return lines


def _spending_lines(found: Spending) -> list[str]:
    """Return lines with the guaranteed and the spent ε, each with its accountant, δ, unit and relation."""
    stated = f"δ = {delta_text(found.budget.delta)}, {found.protection}"
    spent = ", ".join(f"ε = {epsilon_text(one.epsilon)} ({name})" for name, one in found.readings().items())
    if found.doubt:
        return [
            "guaranteed: not known, for more may have been spent than the ledger shows; "
            f"{_epsilon_words(found.guaranteed)} at the least, {stated}",
            f"spent at least {spent}, {stated}",
        ]
    return [
        f"guaranteed {_epsilon_words(found.guaranteed)}, {stated}",
        f"spent {'' if found.passed else 'of it '}{spent}, {stated}",
        *([] if found.warning is None else [f"warning: {found.warning}"]),
    ]


def _epsilon_words(one: Guarantee) -> str:
    return f"ε = {epsilon_text(one.epsilon)} ({one.accountant})"


def _stage_line(stage: Stage) -> str:
    return f"stage {stage.name}: {stage.done} of {stage.total}, since {local_time(stage.since)}"


def _table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    return ["  ".join(map(str.ljust, row, widths)).rstrip() for row in (head, *rows)]


def _stage(before: Stage | None, event: dict[str, Any]) -> Stage | None:
    """Return the run's stage after one more event; None if the run has just begun, or has ended well."""
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


def _state(run: RunState, *, done: bool, student: bool, out_of_budget: bool) -> str:
    """Return a study's state in a word or two.

    If the newest run is active, died, failed or was stopped, the state is that of the run. Otherwise it depends on
    ``done``, which is True if all queries have an answer. If so, the state tells whether there is a student. If not, it
    tells whether the budget is spent.
    """
    if run.name in ("running", "died", "failed", "stopped"):
        return run.name
    if done:
        return "complete" if run.name == "finished" or student else "answered, no student"
    return "budget spent" if out_of_budget else "not running"


def ledger_problem(workspace: Workspace) -> str | None:
    """Return the reason why no run can start on the study's ledger: it is damaged, or an older copy.

    Args:
        workspace: The study's directory.

    Returns:
        The reason; None if there is no problem, or if this process has no permission to read the ledger, as the network
        processes have none.
    """
    if not os.access(workspace.ledger_file, os.R_OK):
        return None
    try:
        with Ledger.open(workspace.ledger_file) as ledger:
            return ledger.standing_problem() or ledger.study_missing(workspace.study().id)
    except (LedgerCorrupt, InvalidInput) as error:
        return str(error)


def disk_problem(workspace: Workspace) -> str | None:
    """Return why nothing can be written to the study's disk: it is full or failing.

    Args:
        workspace: The study's directory.

    Returns:
        The folder and the reason, with a remedy; None if there is room, or if this user may not write there.
    """
    for folder in filter(Path.is_dir, (workspace.root, workspace.flower_dir)):
        try:
            check_room(folder)
        except OSError as error:
            if error.errno in DISK:
                return "; to fix: ".join(explain(error))
    return None


def bundle_problem(workspace: Workspace, spending: Spending) -> str | None:
    """Return why the exported bundle understates the study's ε.

    Charges that were recovered after the export may exceed the ε that the bundle states. If the ledger may be an older
    copy (``doubt``), the reason returned is the warning about this.

    Args:
        workspace: The study.
        spending: What was spent, from the ledger.

    Returns:
        The reason; None if the bundle states enough, or if there is no bundle.
    """
    path = workspace.bundle_dir / "configs" / "privacy.json"
    if not path.exists():
        return None
    if spending.doubt:
        return spending.warning
    try:
        stated = lenient_json(path.read_bytes())
        said = max(_stated(stated["budget_epsilon"]), _stated(stated["epsilon"]))
    except (OSError, ValueError, LookupError, TypeError):
        return "The exported bundle does not state its ε; to fix: run `consilium student export`."
    guaranteed = spending.guaranteed.epsilon
    if said >= guaranteed:
        return None
    return (
        f"The exported bundle states ε = {epsilon_text(said)}, but the study's guarantee is now ε = "
        f"{epsilon_text(guaranteed)}; to fix: run `consilium student export`."
    )


def _stated(value: Any) -> float:
    found = float(value)
    if not found >= 0:  # NaN too
        raise ValueError("not an epsilon")
    return found


def study_status(workspace: Workspace) -> StudyStatus:
    """Summarise a study's state from its ledger and its event log.

    Args:
        workspace: The study's directory.

    Returns:
        The summary.

    Raises:
        LedgerCorrupt: If the ledger is damaged.
        InvalidInput: If the directory holds no study, or its files are invalid.
    """
    study = workspace.study()
    with Ledger.open(workspace.ledger_file) as ledger:
        facts = facts_in(ledger, workspace)
        batches = rosters(ledger.answers(study.id))
        registered, head = workspace.registered(), ledger.head().hash
        spoiled = spoiled_draws(ledger, study)
        asked = question(ledger, study, accepted=accepted_row(workspace))
    names = {site.pool: site.name for site in registered}
    pools = {
        names.get(pool.pool, pool.site): pool for pool in facts.pools.values() if pool.pool in names or pool.revoked
    }
    sites = {
        name: SiteStatus(
            spent=name in pools and pools[name].exhausted,
            batches=sum(name in batch.roster for batch in batches),
            answers=sum(batch.queries for batch in batches if name in batch.roster),
            charged=(pools[name].in_study.spend.releases if name in pools else 0) if study.privacy.sealed else None,
            spoiled=sum(len(draw.query_ids) for draw in spoiled if name in draw.sites),
            revoked=name in pools and pools[name].revoked,
        )
        for name in sorted(pools.keys() | {name for batch in batches for name in batch.roster})
    }
    last: dict[str, object] = {}
    weighed: dict[str, object] | None = None
    warnings: tuple[str, ...] = ()
    at: Stage | None = None
    waiting = Waiting()
    for event in read_events(workspace.events_file):
        kind, at = event["event"], _stage(at, event)
        waiting.enter(event)
        if kind in _TURNS:
            last = event
        elif kind == "answers-weighed":
            weighed, warnings = {name: event[name] for name in EVENTS[kind].fields}, tuple(event["warnings"])
        elif kind in _OF_SITES:
            newest = {"event": kind, "time": event["time"], "reason": event.get("reason", "")}
            known = sites.get(event["site"], SiteStatus(False, 0, 0))
            sites[event["site"]] = replace(known, newest=newest)
        elif kind == "code-refused":
            known = sites.get(event["site"], SiteStatus(False, 0, 0))
            sites[event["site"]] = replace(known, refused=known.refused + event["codes"])
    run = run_state(workspace)
    admitted = [pool for pool in pools.values() if not pool.revoked]
    enough = len(admitted) >= study.privacy.quorum  # otherwise sites are missing, not budgets
    out_of_budget = enough and sum(pool.can_answer for pool in admitted) < study.privacy.quorum
    done = not facts.unanswered
    slow = [] if done else [f"{waiting.slow_words(name)}. {SLOW_REMEDY}" for name in sorted(waiting.slow)]
    return StudyStatus(
        study=study,
        state=_state(run, done=done, student=workspace.bundle_dir.exists(), out_of_budget=out_of_budget),
        running=run.name == "running",
        admitted=workspace.admitted_count(),
        stage=at,
        waiting=waiting,
        last_event=last,
        facts=facts,
        gate=shut_line(workspace),
        sites=sites,
        batches=batches,
        answers_weighed=weighed,
        warnings=(*dict.fromkeys(filter(None, (run.reason, facts.spending.doubt, asked))), *slow, *warnings),
        ledger_head=head,
    )
