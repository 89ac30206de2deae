"""Words what hospitals state about their own ledgers, for a certificate: who states it, and when it was signed.

Refuses what is no report, speaks for another site, or was changed after it was signed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC
from pathlib import Path
from typing import Any

from common.errors import InvalidInput
from common.privacy.mechanism import AccountantName
from common.site_account import check_account
from consilium.reports.patient_report import identity_lines, patient_lines, release_guarantee
from server.dashboard.quarantine import read_json
from server.study.workspace import Workspace

MAX_REPORT_BYTES = 1 << 16


def site_facts(workspace: Workspace, given: Sequence[Path], handed_in: Path | None) -> dict[str, Any]:
    """What hospitals say their own ledgers say: InvalidInput for a file that was given by name and is no report.

    Of those that lie in the study's directory, where sites put them themselves, or were ``handed_in``, one that does
    not hold is set aside by name: no site keeps the others from their certificate. Of two of one site the one that was
    signed last stands; one that is not signed only where none is.
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
                    raise InvalidInput("site that the report speaks for", limit=path.stem)
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
    """What ``consilium site status --json`` printed, or the account alone that a site sends by itself.

    ``signed`` is when the key that the site was admitted with signed it, in UTC; empty where nothing is signed, or no
    key of the site is known. A signature that does not hold is InvalidInput.
    """
    try:
        data = read_json(path, most_bytes=MAX_REPORT_BYTES)
        wanted = ("site", "pool", "spent", "cap", "queries_accepted", "receipted", "alarms")
        report: dict[str, Any] = {key: data[key] for key in wanted}
        gate = release_guarantee(report["spent"][report["cap"]["accountant"]])
        report["patient"] = patient_lines(data.get("trainings"), gate)
        report["patient_is"] = identity_lines(data.get("patient_identity"))
        _ = [report["spent"][str(name)]["epsilon"] for name in AccountantName]
        report["signed"] = ""
        if "signature" in data and (key := keys.get(str(report["site"]))):
            report["signed"] = check_account(data, key=key).astimezone(UTC).isoformat(timespec="seconds")
        if not all(isinstance(alarm, str) for alarm in report["alarms"]):
            raise InvalidInput("alarms of a site", limit="texts")
    except (ValueError, LookupError, TypeError, AttributeError, ArithmeticError, InvalidInput) as error:
        raise InvalidInput(
            "site report", value=str(path), limit="what `consilium site status --json` prints"
        ) from error
    return report
