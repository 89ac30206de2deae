"""A spoiled draw of a sealed study, which stops the run with a question: go on with these sites or not.

A sum that honest sites cannot have made does not say who made it so. Each further draw is charged to the whole roster,
so one dishonest site could spend the study's budget to its end. Nobody is asked again until a person at the server has
answered (``consilium study resume --despite-spoiled``); every later spoiled draw asks anew.
"""

from __future__ import annotations

from common.config import Study
from common.errors import Refused
from common.objects import write_atomically
from common.privacy.figures import epsilon_text
from server.ledger.server_draws import LostDraw
from server.ledger.server_ledger import Ledger
from server.study.workspace import Workspace

GO_ON = "consilium study resume --despite-spoiled"


def spoiled_draws(ledger: Ledger, study: Study) -> tuple[LostDraw, ...]:
    """The study's spoiled draws in order."""
    return tuple(lost for lost in ledger.ended_without_answer(study.id) if lost.reason == "spoiled")


def budget_state(ledger: Ledger, study: Study) -> str:
    """How many answers there are, how many charges are left, and what was spent, in words."""
    privacy, facts = study.privacy, ledger.study_facts(study)
    charged = max((pool.in_study.spend.releases for pool in facts.pools.values()), default=0)
    spending = facts.spending
    least = "at least " if spending.doubt else ""
    return (
        f"the study has {facts.answers} of {privacy.planned_queries} answers and "
        f"{max(0, privacy.charges - charged)} of {privacy.charges} charges left, "
        f"{least}ε = {epsilon_text(spending.spent.epsilon)} of {epsilon_text(privacy.epsilon)} spent "
        f"({privacy.accountant})"
    )


def question(ledger: Ledger, study: Study, *, accepted: str = "") -> str | None:
    """What a person must decide before the study may go on; None where no spoiled draw waits for it.

    Args:
        accepted: Hash of the ledger row of the newest spoiled draw after which somebody chose to go on; empty for none.
    """
    spoiled = spoiled_draws(ledger, study)
    if not spoiled or spoiled[-1].row_hash == accepted:
        return None
    last = spoiled[-1]
    return (
        f"a site of the roster {', '.join(last.sites)} sent what no honest code with its noise is: "
        f"{len(last.query_ids)} sums of draw {last.masks[:16]} are spoiled, charged to all of them and not released. "
        f"A sum does not say who it was; {budget_state(ledger, study)}; to fix: have the sites disclose the draw to an "
        "auditor (`consilium dispute evidence`), or `consilium provision revoke` the one in doubt; then, or knowing "
        f"that a site may spoil what is left: `{GO_ON}`"
    )


def check_answered(workspace: Workspace, ledger: Ledger, study: Study) -> None:
    """Refused (``sum-spoiled``) while a spoiled draw waits for a person's decision."""
    asked = question(ledger, study, accepted=accepted_row(workspace))
    if asked is not None:
        raise Refused("sum-spoiled", asked)


def accept_spoiled(workspace: Workspace) -> None:
    """Put down that a person chose to go on after all draws that are spoiled by now."""
    with Ledger.open(workspace.ledger_file) as ledger:
        spoiled = spoiled_draws(ledger, workspace.study())
    if spoiled:
        write_atomically(workspace.spoils_file, f"{spoiled[-1].row_hash}\n".encode())


def accepted_row(workspace: Workspace) -> str:
    """The row that :func:`accept_spoiled` put down; empty for none."""
    try:
        return workspace.spoils_file.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError):
        return ""
