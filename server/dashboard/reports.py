"""Reads the reports that hospitals hand over: ``site-reports/<site>.json`` in the study's directory.

The pages use it. A report is the output of `consilium site status --json` at a hospital. It contains what the site has
spent according to its own ledger, how its teachers were trained, and the ε of that training for one patient.

- A site that shares its status sends a report each time it receives receipts. That report does not contain the part on
  training.
- The printed report is signed with the key of the site's ledger. It can also be handed in on the Sites page, which
  accepts only signed reports.
- Other figures are shown only if the hospital adds them under ``shared``; the privacy guarantee does not cover them.
- The number of withdrawn patients, which earlier versions stated, is ignored.
- A report that is invalid, too large, or of a site other than its file's name is shown as a problem and not used.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from types import MappingProxyType
from typing import Any

from common.clock import CLOCKS_DIFFER
from common.errors import InvalidInput
from common.objects import write_atomically
from common.reading import FINITE_JSON, parse_json, parsing, read_json
from common.site_account import check_account, read_account
from common.site_facts import MAX_TEXT, PRINTED, few

MAX_REPORTS = 1_000
MAX_BYTES = 1 << 16
MAX_SHARED = 24

NO_KEYS: Mapping[str, str] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class SharedFigure:
    """A figure that a hospital chose to share, with its name; the privacy guarantee does not cover it."""

    name: str
    value: str


@dataclass(frozen=True, slots=True)
class HospitalReport:
    """A hospital's own report.

    Attributes:
        site: Name of the site.
        given: Time at which the report was written.
        problem: Reason why the report is not used, in which case the other fields are empty; otherwise empty.
        spent_epsilon: ε spent according to the site's own ledger.
        at_least: True if ``spent_epsilon`` is only a lower bound.
        cap_epsilon: ε that the site allows itself to spend.
        accountant: Accountant that decides at the site.
        queries_accepted: Number of queries that the site accepted.
        codes_stored: Number of codes that the site stores, if stated.
        receipted: Number of queries for which the site has a receipt.
        alarms: Alarms of the site's own ledger.
        strategy: Strategies by which its teachers were trained, separated by commas.
        patient: Sentences on the privacy loss of one patient through the trainings and through all releases.
        patient_is: How the site identifies a patient.
        shared: Figures that the hospital chose to share.
        version: Version of the site's software.
        signed: True if the report's signature was verified.
    """

    site: str
    given: str
    problem: str = ""
    spent_epsilon: float | None = None
    at_least: bool = False
    cap_epsilon: float | None = None
    accountant: str = ""
    queries_accepted: int | None = None
    codes_stored: int | None = None
    receipted: int | None = None
    alarms: tuple[str, ...] = ()
    strategy: str = ""
    patient: tuple[str, ...] = ()
    patient_is: str = ""
    shared: tuple[SharedFigure, ...] = ()
    version: str = ""
    signed: bool = False


def read_reports(*folders: Path, keys: Mapping[str, str] = NO_KEYS) -> dict[str, HospitalReport]:
    """Return the newest report of each site.

    Args:
        folders: Folders of reports; each file is named after its site.
        keys: The sites' public signing keys, by site name.

    Returns:
        The reports by site name, including those with a problem.
    """
    found: dict[str, HospitalReport] = {}
    for folder in folders:
        for path in sorted(folder.glob("*.json"))[:MAX_REPORTS] if folder.is_dir() else []:
            report = _read(path, keys=keys)
            if path.stem not in found or report.given > found[path.stem].given:
                found[path.stem] = report
    return found


def take_report(text: str, folder: Path, *, keys: Mapping[str, str], now: datetime) -> str:
    """Check a report that was handed in, and store it.

    A stored report with a time in the future does not count as newer: it was stored while this machine's clock was
    ahead.

    Args:
        text: The report.
        folder: Folder in which to store it.
        keys: The sites' public signing keys, by site name.
        now: The current time.

    Returns:
        Name of the site that wrote it.

    Raises:
        InvalidInput: Unless the report is valid, signed by a registered site, and newer than the stored one.
    """
    data = parse_json(text.encode("utf-8", "replace"), what="the content", limit=FINITE_JSON)
    site = data.get("site") if isinstance(data, dict) else None
    if not isinstance(site, str) or site not in keys:
        raise InvalidInput("the site named in the report", limit="a site that is registered in this study")
    said = check_account(data, key=keys[site])
    latest = now + CLOCKS_DIFFER
    if said > latest:
        raise InvalidInput("the report's time", limit="no later than now", remedy="set the clock at the site")
    path = folder / f"{site}.json"
    report = _report(data, site=site, keys=keys)
    before = _read(path, keys=keys) if path.exists() else None
    until = latest.isoformat(timespec="seconds")
    if before is not None and not before.problem and report.given <= before.given <= until:
        raise InvalidInput(
            "the report is not newer than the stored one", limit=f"a report of {site} written after {before.given}"
        )
    write_atomically(path, text.encode())
    return site


def _read(path: Path, *, keys: Mapping[str, str]) -> HospitalReport:
    given = ""
    try:
        given = datetime.fromtimestamp(path.stat().st_mtime, UTC).isoformat(timespec="seconds")
        return _report(read_json(path, most_bytes=MAX_BYTES), site=path.stem, given=given, keys=keys)
    except (OSError, InvalidInput) as error:
        why = f"{error}" if isinstance(error, InvalidInput) else type(error).__name__
        words = f"{path.name} is set aside: it is not what `consilium site status --json` prints there ({why})"
        return HospitalReport(site=path.stem, given=given, problem=words[:MAX_TEXT])


def _report(data: Any, *, site: str, keys: Mapping[str, str], given: str = "") -> HospitalReport:
    """Return the report in a parsed JSON document; ``given`` is used as its time if it is not signed."""
    facts, signed = read_account(data, keys=keys)
    if facts.site != site:
        raise InvalidInput("the report names another site than its file", limit=site)
    with parsing("status report of a site cannot be read", limit=PRINTED):
        shared = list((data.get("shared") or {}).items())
        return HospitalReport(
            site=site,
            given=given if signed is None else signed.isoformat(timespec="seconds"),
            spent_epsilon=facts.spent.epsilon,
            at_least=facts.doubt is not None,
            cap_epsilon=facts.cap.epsilon,
            accountant=facts.cap.accountant,
            queries_accepted=facts.accepted,
            codes_stored=facts.codes,
            receipted=facts.receipted,
            version=_text(data.get("version", "")),
            alarms=few(facts.alarms),
            strategy=", ".join(few(facts.trainings.strategies)),
            patient=few(facts.patient_lines),
            patient_is="; ".join(few(facts.identity_lines)),
            shared=tuple(SharedFigure(_text(name), _text(value)) for name, value in shared[:MAX_SHARED]),
            signed=signed is not None,
        )


def _text(stated: Any) -> str:
    if isinstance(stated, bool) or not isinstance(stated, str | int | float):
        raise InvalidInput("field of a report", limit="a text or a number")
    return str(stated)[:MAX_TEXT]
