"""Reads the reports that hospitals make from their own ledgers, for a certificate, and checks their signatures.

The module refuses a file that is no report, that is another site's, or that was changed after it was signed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from common.errors import InvalidInput
from common.reading import naming_file, read_json
from common.site_account import read_account
from common.site_facts import PRINTED
from server.study.workspace import Workspace

MAX_REPORT_BYTES = 1 << 16


def site_facts(workspace: Workspace, given: Sequence[Path], handed_in: Path | None) -> dict[str, Any]:
    """Read the hospitals' own reports.

    Invalid reports in the study's directory or the dashboard's folder are left out and listed by name, so that one site
    cannot prevent a certificate. Of several reports of a site the newest signed report is used; an unsigned report is
    used only if no report is signed.

    Args:
        workspace: The study's directory.
        given: Files to use instead of all others.
        handed_in: Folder with reports that the dashboard received; None if there is none.

    Returns:
        The reports under ``sites``, and under ``reports_set_aside`` the names of files left out, if there are any.

    Raises:
        InvalidInput: If a file in ``given`` is no valid report.
    """
    keys = {site.name: site.answer_key for site in workspace.registered()}
    if given:
        return {"sites": [_site_report(path, keys) for path in given]}
    reports: dict[str, dict[str, Any]] = {}
    aside = []
    for folder in (workspace.reports_dir, *([] if handed_in is None else [handed_in])):
        for path in sorted(folder.glob("*.json")):
            try:
                report = _site_report(path, keys)
                if report["site"] != path.stem:
                    raise InvalidInput(
                        "site of the report", value=report["site"], limit=f"{path.stem}, as the file's name says"
                    )
            except InvalidInput:
                aside.append(path.name)
                continue
            if path.stem not in reports or report["signed"] > reports[path.stem]["signed"]:
                reports[path.stem] = report
    return {
        "sites": [reports[name] for name in sorted(reports)],
        **({"reports_set_aside": sorted(set(aside))} if aside else {}),
    }


def _site_report(path: Path, keys: Mapping[str, str]) -> dict[str, Any]:
    """Read one report: the output of ``consilium site status --json``, or the report that a site sends itself.

    ``signed`` is the time (UTC) of a valid signature by the site's key; empty if it is unsigned or no key is known. An
    invalid signature is refused.
    """
    with naming_file(path, remedy=f"give {PRINTED}, unchanged"):
        facts, signed = read_account(read_json(path, most_bytes=MAX_REPORT_BYTES), keys=keys)
        return {
            **facts.account(),
            "patient": list(facts.patient_lines),
            "patient_is": list(facts.identity_lines) or ["its ledger does not say what counts as one patient"],
            "signed": "" if signed is None else signed.isoformat(timespec="seconds"),
        }
