"""What hospitals chose to hand over about themselves: ``site-reports/<site>.json`` in the study's directory.

Each is what ``consilium site status --json`` prints at a hospital: its own account of what it spent, and how its
teachers were trained, with the ε that gives one patient against everyone; or the account alone, as a site sends it
whenever receipts come if it shares its status. Figures of its own are shown only if the hospital adds them, as
``shared``: they are outside the guarantee. A report that is ill-formed, too large, or speaks for another site than its
file is named after is set aside and named, never guessed at.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from common.data.dataset import PatientIdentity
from common.errors import InvalidInput
from common.privacy.figures import delta_text, epsilon_text
from common.privacy.training import Neighbours
from server.dashboard.quarantine import MAX_NUMBER, read_json

MAX_REPORTS = 1_000
MAX_BYTES = 1 << 16
MAX_SHARED = 24
MAX_LISTED = 20
MAX_TEXT = 300


@dataclass(frozen=True, slots=True)
class SharedFigure:
    """One figure a hospital shares of its own accord, outside the guarantee."""

    name: str
    value: str


@dataclass(frozen=True, slots=True)
class SiteReport:
    """A hospital's own account. ``problem`` says why a report could not be read; the other fields are then empty."""

    site: str
    given: str
    problem: str = ""
    spent_epsilon: float | None = None
    cap_epsilon: float | None = None
    accountant: str = ""
    queries_accepted: int | None = None
    codes_stored: int | None = None
    receipted: int | None = None
    patients_withdrawn: int | None = None
    alarms: tuple[str, ...] = ()
    strategy: str = ""
    patient: tuple[str, ...] = ()
    patient_is: str = ""
    shared: tuple[SharedFigure, ...] = ()
    version: str = ""


def read_reports(folder: Path) -> dict[str, SiteReport]:
    """Every report by the site that its file is named after."""
    paths = sorted(folder.glob("*.json"))[:MAX_REPORTS] if folder.is_dir() else []
    return {path.stem: _read(path) for path in paths}


def _read(path: Path) -> SiteReport:
    given, site = "", path.stem
    try:
        given = datetime.fromtimestamp(path.stat().st_mtime, UTC).isoformat(timespec="seconds")
        return _report(read_json(path, most_bytes=MAX_BYTES), site=site, given=given)
    except (OSError, ValueError, LookupError, TypeError, AttributeError, ArithmeticError, InvalidInput) as error:
        why = f"{error}" if isinstance(error, InvalidInput) else type(error).__name__
        return SiteReport(
            site=site,
            given=given,
            problem=f"{path.name} is set aside: it is not what `consilium site status --json` prints there ({why})"[
                :MAX_TEXT
            ],
        )


def _report(data: dict[str, Any], *, site: str, given: str) -> SiteReport:
    if data["site"] != site:
        raise InvalidInput("site that the report speaks for", limit=f"{site}, after which its file is named")
    gate = str(data["cap"]["accountant"])
    trainings = data.get("trainings") or {"count": 0, "strategies": [], "guarantees": []}
    shared = data.get("shared") or {}
    stated = data.get("patient_identity") or []
    return SiteReport(
        site=site,
        given=given,
        spent_epsilon=_epsilon(data["spent"][gate]["epsilon"]),
        cap_epsilon=_epsilon(data["cap"]["epsilon"]),
        accountant=_text(gate),
        queries_accepted=_count(data["queries_accepted"]),
        codes_stored=_maybe(data, "codes_stored"),
        receipted=_count(data["receipted"]),
        patients_withdrawn=_maybe(data, "patients_withdrawn"),
        version=_text(data.get("version", "")),
        alarms=_texts(data["alarms"]),
        strategy=", ".join(_texts(trainings["strategies"])),
        patient=tuple(_patient(one) for one in trainings["guarantees"][:MAX_LISTED]) if trainings["count"] else (),
        patient_is=PatientIdentity(stated[-1]["identity"]).sentence if stated else "",
        shared=tuple(SharedFigure(_text(name), _text(value)) for name, value in list(shared.items())[:MAX_SHARED]),
    )


def _text(stated: Any) -> str:
    if isinstance(stated, bool) or not isinstance(stated, str | int | float):
        raise InvalidInput("field of a report", limit="a text or a number")
    return str(stated)[:MAX_TEXT]


def _texts(stated: Any) -> tuple[str, ...]:
    """The first few of a list of texts, and how many more there are."""
    if not isinstance(stated, list):
        raise InvalidInput("field of a report", limit="a list of texts")
    more = (f"and {len(stated) - MAX_LISTED:,} more",) if len(stated) > MAX_LISTED else ()
    return (*(_text(one) for one in stated[:MAX_LISTED]), *more)


def _count(stated: Any) -> int:
    if isinstance(stated, bool) or not isinstance(stated, int) or not 0 <= stated <= MAX_NUMBER:
        raise InvalidInput("count in a report", limit="an integer from 0")
    return stated


def _maybe(data: dict[str, Any], name: str) -> int | None:
    """A count that a site may leave out: what is sent by itself tells nothing of patients."""
    return _count(data[name]) if name in data else None


def _epsilon(stated: Any) -> float:
    """The number, if it can be written as an ε: InvalidInput for NaN and what is below 0."""
    value = float(stated)
    epsilon_text(value)
    return value


def _patient(guarantee: dict[str, Any] | None) -> str:
    if guarantee is None:
        return "a teacher was trained without a guarantee"
    epsilon, delta = epsilon_text(float(guarantee["epsilon"])), delta_text(float(guarantee["delta"]))
    return f"ε {epsilon} at δ = {delta}, unit patient, relation {Neighbours(guarantee['relation'])}"
