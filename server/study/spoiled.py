"""Stops a sealed study after a spoiled draw until a person decides whether to continue with these sites.

The aggregator, the pipeline and the status use it. A *draw* is one attempt at a sealed sum; it is *spoiled* if honest
sites cannot have produced its sum. The sum does not show which site spoiled it. Each further draw charges the whole
roster, so one dishonest site could spend the whole budget of the study. No site is asked again until a person at the
server has decided to continue (`consilium study resume --despite-spoiled`). Every later spoiled draw needs a new
decision.
"""

from __future__ import annotations

from common.config import Study
from common.errors import Refused
from common.objects import write_atomically
from common.privacy.figures import epsilon_text
from common.wording import many
from server.ledger.server_draws import LostDraw
from server.ledger.server_ledger import Ledger
from server.study.workspace import Workspace

GO_ON = "consilium study resume --despite-spoiled"


def spoiled_draws(ledger: Ledger, study: Study) -> tuple[LostDraw, ...]:
    """Return the study's spoiled draws.

    Args:
        ledger: The server's ledger.
        study: The study.

    Returns:
        The draws, in the order of their rows.
    """
    return tuple(lost for lost in ledger.ended_without_answer(study.id) if lost.reason == "spoiled")


def budget_state(ledger: Ledger, study: Study) -> str:
    """Return a sentence with the number of answers, the number of charges left, and the ε spent."""
    privacy, facts = study.privacy, ledger.study_facts(study)
    charged = max((pool.in_study.spend.releases for pool in facts.pools.values()), default=0)
    spending = facts.spending
    least = "at least " if spending.doubt else ""
    left = "an unknown number" if spending.doubt else max(0, min(privacy.charges - charged, facts.room or 0))
    return (
        f"the study has {facts.answers} of {privacy.planned_queries} answers and "
        f"{left} of {privacy.charges} charges left, "
        f"{least}ε = {epsilon_text(spending.spent.epsilon)} of {epsilon_text(privacy.epsilon)} spent "
        f"({privacy.accountant})"
    )


def question(ledger: Ledger, study: Study, *, accepted: str = "") -> str | None:
    """Return a text that states which decision a person must take before the study continues.

    Args:
        ledger: The server's ledger.
        study: The study.
        accepted: Hash of the ledger row of the newest spoiled draw after which somebody chose to continue; empty if
            nobody has chosen this yet.

    Returns:
        The text; None if no spoiled draw awaits a decision.
    """
    spoiled = spoiled_draws(ledger, study)
    if not spoiled or spoiled[-1].row_hash == accepted:
        return None
    last = spoiled[-1]
    return (
        f"a site of the roster {', '.join(last.sites)} sent a value that no honest site can send: "
        f"the attempt at {many(len(last.query_ids), 'sum')} (draw {last.masks[:16]}) is spoiled, charged to all these "
        "sites and not released. A sum does not show which site sent the value; "
        f"{budget_state(ledger, study)}; to fix: have the sites disclose this draw to an auditor (`consilium dispute "
        "evidence`), or revoke the suspected site (`consilium provision revoke`). Then, or if you accept the risk that "
        f"a site spoils the remaining budget: `{GO_ON}`"
    )


def check_answered(workspace: Workspace, ledger: Ledger, study: Study) -> None:
    """Check that no spoiled draw awaits a person's decision.

    Args:
        workspace: The study's directory, with the last decision.
        ledger: The server's ledger.
        study: The study.

    Raises:
        Refused: With code ``sum-spoiled`` while a spoiled draw awaits a decision.
    """
    asked = question(ledger, study, accepted=accepted_row(workspace))
    if asked is not None:
        raise Refused("sum-spoiled", asked)


def accept_spoiled(workspace: Workspace) -> None:
    """Record that a person chose to continue the study in spite of all draws spoiled so far.

    Args:
        workspace: The study's directory.
    """
    with Ledger.open(workspace.ledger_file) as ledger:
        spoiled = spoiled_draws(ledger, workspace.study())
    if spoiled:
        write_atomically(workspace.spoils_file, f"{spoiled[-1].row_hash}\n".encode())


def accepted_row(workspace: Workspace) -> str:
    """Return the row hash that :func:`accept_spoiled` recorded.

    Args:
        workspace: The study's directory.

    Returns:
        The hash; empty if there is none.
    """
    try:
        return workspace.spoils_file.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError):
        return ""
