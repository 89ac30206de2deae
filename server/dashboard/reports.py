"""What hospitals chose to hand over about themselves: ``site-reports/<site>.json`` in the study's directory.

Each is what ``consilium site status --json`` prints at a hospital: its own account of what it spent, and how its
teachers were trained, with the ε that gives one patient against everyone. Figures of its own are shown only if the
hospital adds them, as ``shared``: they are outside the guarantee. An ill-formed report is named, never guessed at.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from common.data.dataset import PatientIdentity
from common.errors import InvalidInput
from common.privacy.figures import delta_text, epsilon_text
from common.privacy.training import Neighbours

MAX_SHARED = 24


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


def read_reports(folder: Path) -> dict[str, SiteReport]:
    """Every report by the site it names."""
    found = {}
    for path in sorted(folder.glob("*.json")) if folder.is_dir() else ():
        report = _read(path)
        found[report.site] = report
    return found


def _read(path: Path) -> SiteReport:
    given = datetime.fromtimestamp(path.stat().st_mtime, UTC).isoformat(timespec="seconds")
    try:
        data: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        gate = str(data["cap"]["accountant"])
        trainings = data.get("trainings") or {"count": 0, "strategies": [], "guarantees": []}
        shared = data.get("shared") or {}
        stated = data.get("patient_identity") or []
        return SiteReport(
            site=str(data["site"]),
            given=given,
            spent_epsilon=_epsilon(data["spent"][gate]["epsilon"]),
            cap_epsilon=_epsilon(data["cap"]["epsilon"]),
            accountant=gate,
            queries_accepted=int(data["queries_accepted"]),
            codes_stored=int(data["codes_stored"]),
            receipted=int(data["receipted"]),
            patients_withdrawn=int(data["patients_withdrawn"]),
            alarms=tuple(str(alarm) for alarm in data["alarms"]),
            strategy=", ".join(str(name) for name in trainings["strategies"]),
            patient=tuple(_patient(one) for one in trainings["guarantees"]) if trainings["count"] else (),
            patient_is=PatientIdentity(stated[-1]["identity"]).sentence if stated else "",
            shared=tuple(SharedFigure(str(name), str(value)) for name, value in list(shared.items())[:MAX_SHARED]),
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError, InvalidInput) as error:
        return SiteReport(
            site=path.stem,
            given=given,
            problem=f"{path.name} is not what `consilium site status --json` prints ({type(error).__name__})",
        )


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
