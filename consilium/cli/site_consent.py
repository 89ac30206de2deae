"""Defines ``consilium site consent``: shows the consent sheet, asks for consent, and records the answer."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated

import typer

from common.errors import InvalidInput
from common.plain import plain
from consilium.cli.options import SiteDir
from consilium.cli.say import say

if TYPE_CHECKING:
    from client.policy import SiteConfig
    from common.config import Study


def consent(
    site_dir: SiteDir,
    by: Annotated[
        str, typer.Option(help="Name of the person who consents for the hospital; it stays in the site's own ledger.")
    ],
    yes: Annotated[
        bool, typer.Option("--yes", help="Record consent without asking, because the sheet was read before.")
    ] = False,
) -> None:
    """Show the consent sheet, ask for consent, and record who consented and when.

    Before consent is recorded nothing is trained, no daemon starts, and nothing is answered or charged. `site pause`
    suspends consent later.
    Example: consilium site consent --site-dir /srv/consilium --by "A. Noether, data protection"
    """
    from client.operations import staff_decisions as control
    from client.policy import load_site
    from client.site.books import joined_study

    control.check_name(by)
    config = load_site(site_dir)
    study = joined_study(config)
    sheet = consent_sheet(study, patients=patients_of(config, study))
    say(sheet)
    if not yes and (not sys.stdin.isatty() or not typer.confirm(plain(f"{by} consents to study {study.name}"))):
        raise InvalidInput(
            "consent was not given, so nothing was recorded and nothing is charged",
            remedy="to decline, tell the consortium; to consent later, run `consilium site consent` again at a "
            "terminal, or with --yes once the sheet was read",
        )
    control.consent(site_dir, by=by, sheet=sheet)
    say(f"recorded: {by} consented to study {study.name}; next: `consilium site train`, `consilium site up`")


def consent_sheet(study: Study, *, patients: int | None) -> str:
    """Return the consent sheet for a hospital whose patients were counted from its dataset.

    Args:
        study: The study.
        patients: Number of the hospital's patients; None if it is unknown.

    Returns:
        The text.
    """
    from server.study import consent_text

    counted = "not known: the dataset cannot be read now" if patients is None else "by your dataset"
    return consent_text.consent_sheet(study, patients=patients, counted=counted)


def patients_of(config: SiteConfig, study: Study) -> int | None:
    """Count the site's patients from the dataset's index, without withdrawn ones; None if that cannot be known."""
    from client.data.layouts import indexed
    from client.site.deals import read_withdrawn

    try:
        dataset = indexed(config.path(config.data), study.data, config.dataset)
        patients = {dataset.patient_of(case.id) for case in dataset.labelled}
        gone, _ = read_withdrawn(config, patients)
    except (InvalidInput, OSError):
        return None
    return len(patients - gone)
