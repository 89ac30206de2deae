"""Collects what a site states about itself, and signs it: its ledger's figures, its peers, what its policy shares.

`consilium site status`, the site's own page and the demo's report call it. It only reads. It refuses a site without its
pool's ledger.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from client.data.cases import counts_for_server, has_trained
from client.ledger.site_ledger import SiteLedger
from client.policy import SiteConfig, load_site
from client.site.books import read_books
from client.site.deals import lost_adaptation, present_teachers
from client.site.peers import PeerTrust, peers_view
from common.clock import utc_now
from common.errors import InvalidInput
from common.ledger.keys import load_signing_key
from common.site_account import signed_account
from common.site_facts import SiteFacts
from common.witness.memory import FOLDER as WITNESSES
from common.witness.memory import HeadMemory


def facts_in(ledger: SiteLedger, config: SiteConfig) -> SiteFacts:
    """Return the figures of a site's ledger: what was spent, accepted and trained, and the alarms.

    Args:
        ledger: The site's open ledger.
        config: The site's policy.

    Returns:
        The figures.
    """
    memory = HeadMemory(config.books_dir / WITNESSES)
    return ledger.facts(
        config.site,
        present=present_teachers(config, ledger),
        adapted_lost=lost_adaptation(config, ledger),
        conflicts=memory.conflicts(),
        forked=memory.server_forked,
    )


def facts_of(directory: Path) -> SiteFacts:
    """Return the figures of a site's ledger.

    Args:
        directory: The site's directory.

    Returns:
        The figures.

    Raises:
        InvalidInput: If the site has no ledger.
    """
    config = load_site(directory)
    with read_books(config) as ledger:
        return facts_in(ledger, config)


def site_status(directory: Path, facts: SiteFacts | None = None) -> dict[str, Any]:
    """Return what a site's status report states, as plain JSON.

    ``shared`` contains case counts only if the policy shares them and teachers were trained. ``peers`` is present in a
    sealed study: how many other hospitals are confirmed, and problems with the others.

    Args:
        directory: The site's directory.
        facts: The figures of the site's ledger; by default they are read from it.

    Returns:
        Plain values.
    """
    shared = counts_for_server(directory) if load_site(directory).share.case_counts and has_trained(directory) else {}
    said = {
        **(facts or facts_of(directory)).to_json(),
        "shared": {name: value for name, value in shared.items() if name != "site"},
    }
    view = peers_view(directory)
    if view.sealed:
        problems = [f"{problem.text}; to fix: {problem.remedy}" for problem in view.problems()]
        said["peers"] = {"confirmed": len(view.with_trust(PeerTrust.CONFIRMED)), "problems": problems}
    return said


def signed_status(directory: Path, said: Mapping[str, Any]) -> dict[str, Any]:
    """Sign a status report with the key of the site's ledger.

    Args:
        directory: The site's directory.
        said: The report.

    Returns:
        The signed report. It is unsigned if this user is not allowed to read the key.
    """
    try:
        key = load_signing_key(load_site(directory).ledger_file.with_suffix(".key"))
    except (InvalidInput, OSError):
        return dict(said)
    return signed_account(said, sign=key.sign, now=utc_now())
