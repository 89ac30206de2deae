"""The student as hospitals measured it: figures they consented to send, taken in, and what they amount to.

The sites that sent none are named beside those that did: a mean over the willing is no mean over the study. Refuses
figures on another student, of a site that is not admitted, and older ones than are kept.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from common.errors import InvalidInput
from common.intervals import mean_interval
from common.site_figures import LEAST_PATIENTS, SiteFigures
from common.site_verdict import genuine
from server.study.gate import keep_newest, read_kept, site_keys, statement_of
from server.study.workspace import Workspace


@dataclass(frozen=True, slots=True)
class StructureAtSites:
    """One structure's Dice over the sites that sent one: their mean, half of its 95 % interval (None for one site),
    and the lowest, with the site that has it."""

    structure: str
    sites: int
    mean: float
    half_width: float | None
    worst: float
    worst_site: str


@dataclass(frozen=True, slots=True)
class Evaluated:
    """What sites sent of the exported student. ``silent``: admitted sites that sent nothing."""

    bundle: str
    gave: tuple[str, ...]
    silent: tuple[str, ...]
    structures: tuple[StructureAtSites, ...]

    def to_json(self) -> dict[str, Any]:
        return {
            "schema": 1,
            "student": self.bundle,
            "sites": list(self.gave),
            "silent": list(self.silent),
            "structures": [
                {
                    "structure": one.structure,
                    "sites": one.sites,
                    "mean": round(one.mean, 4),
                    "half_width": None if one.half_width is None else round(one.half_width, 4),
                    "worst": one.worst,
                    "worst_site": one.worst_site,
                }
                for one in self.structures
            ],
        }

    @property
    def lines(self) -> list[str]:
        """The same for a reader: who sent figures and who did not, then a line for each structure."""
        if not self.gave:
            return ["no hospital has sent figures of this student"]
        sites = f"{len(self.gave)} of {len(self.gave) + len(self.silent)} hospitals"
        found = [
            f"Dice of the student on hospitals' own cases, as {sites} measured and signed it ({', '.join(self.gave)}); "
            f"each figure is of {LEAST_PATIENTS} patients or more"
        ]
        if self.silent:
            found.append(f"nothing sent: {', '.join(self.silent)}; the means say nothing of them")
        for one in self.structures:
            half = "" if one.half_width is None else f" ± {one.half_width:.3f} (95 % over hospitals)"
            found.append(
                f"{one.structure}: mean {one.mean:.3f}{half} of {one.sites}; worst {one.worst:.2f} at {one.worst_site}"
            )
        return found


def take_figures(workspace: Workspace, data: bytes) -> SiteFigures:
    """Check a hospital's figures of the exported student and keep them.

    Raises:
        InvalidInput: If they are on another student, of no admitted site, of other structures, older than those kept,
            or if there is no student.
    """
    study, statement = workspace.study(), statement_of(workspace)
    if statement is None:
        raise InvalidInput(
            "student that was measured", value=str(workspace.bundle_dir), remedy="`consilium student export`"
        )
    figures = SiteFigures.parse(data)
    figures.check_is_of(site_keys(workspace), study=study.id, bundle=statement.bundle, structures=study.data.structures)
    keep_newest(workspace.figures_dir, figures, SiteFigures.parse, what="figures")
    return figures


def figures_on(workspace: Workspace) -> Mapping[str, SiteFigures]:
    """Every kept site's figures of the exported student that are genuine, by site, one for each key."""
    study, statement = workspace.study(), statement_of(workspace)
    if statement is None:
        return {}
    keys = site_keys(workspace)
    check = partial(
        SiteFigures.check_is_of,
        keys=keys,
        study=study.id,
        bundle=statement.bundle,
        structures=study.data.structures,
    )
    return {one.site: one for one in genuine(read_kept(workspace.figures_dir, SiteFigures.parse), keys, check=check)}


def evaluated(workspace: Workspace) -> Evaluated:
    """What all kept figures amount to."""
    statement, found = statement_of(workspace), figures_on(workspace)
    of_structure: dict[str, dict[str, float]] = {}
    for site, figures in sorted(found.items()):
        for one in figures.dice:
            of_structure.setdefault(one.structure, {})[site] = one.hundredths / 100
    rows = []
    for structure in workspace.study().data.structures:
        if sites := of_structure.get(structure):
            mean, half = mean_interval(list(sites.values()))
            worst = min(sites, key=lambda site: (sites[site], site))
            rows.append(StructureAtSites(structure, len(sites), mean, half, sites[worst], worst))
    silent = sorted(site for site in site_keys(workspace) if site not in found)
    return Evaluated("" if statement is None else statement.bundle, tuple(sorted(found)), tuple(silent), tuple(rows))
