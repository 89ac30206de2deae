"""Collects the student's Dice that hospitals measured on their own cases and consented to send, and summarises it.

`consilium study evaluate` calls it. The summary also names the sites that sent no figures, because the means leave
these sites out. It refuses figures of another student or of a site that is not admitted, figures with a time in the
future, and figures older than the stored ones.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from common.intervals import mean_interval
from common.site_figures import LEAST_PATIENTS, SiteFigures
from common.site_verdict import genuine
from server.study.gate import read_kept, site_keys, statement_of, take_statement
from server.study.workspace import Workspace


@dataclass(frozen=True, slots=True)
class StructureAtSites:
    """Dice of one structure over the sites that sent it.

    Attributes:
        structure: The structure's name.
        sites: Number of sites that sent it.
        mean: Mean of the sites' Dice.
        half_width: Half of the width of the mean's 95 % interval; None if there is only one site.
        worst: Lowest Dice that a site measured.
        worst_site: The site that measured it.
    """

    structure: str
    sites: int
    mean: float
    half_width: float | None
    worst: float
    worst_site: str


@dataclass(frozen=True, slots=True)
class Evaluated:
    """Summary of the exported student's Dice, as hospitals measured it.

    Attributes:
        bundle: SHA-256 of the student's bundle.
        gave: Admitted sites that sent figures.
        silent: Admitted sites that sent no figures.
        structures: Summary of each structure.
    """

    bundle: str
    gave: tuple[str, ...]
    silent: tuple[str, ...]
    structures: tuple[StructureAtSites, ...]

    def to_json(self) -> dict[str, Any]:
        """Return the summary as plain JSON."""
        return {
            "schema": 1,
            "student": self.bundle,
            "sites": list(self.gave),
            "silent": list(self.silent),
            "structures": [
                asdict(one)
                | {
                    "mean": round(one.mean, 4),
                    "half_width": None if one.half_width is None else round(one.half_width, 4),
                }
                for one in self.structures
            ],
        }

    @property
    def lines(self) -> list[str]:
        """The summary for a reader: who sent figures and who did not, then a line for each structure."""
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
    """Check a hospital's figures of the exported student and store them.

    Args:
        workspace: The study.
        data: The signed figures.

    Returns:
        The figures.

    Raises:
        InvalidInput: If the figures are of another student, of a site that is not admitted, of structures that the
            study does not have, signed in the future, or older than the stored ones; or if no student is exported.
    """
    return take_statement(workspace, SiteFigures, data, folder=workspace.figures_dir)


def figures_on(workspace: Workspace) -> Mapping[str, SiteFigures]:
    """Return the stored figures of the exported student whose signatures are valid.

    Args:
        workspace: The study's directory.

    Returns:
        Figures by site name. If several sites have the same signing key, only one of them is included. Empty if no
        student is exported.
    """
    if (statement := statement_of(workspace)) is None:
        return {}
    kept, study = read_kept(workspace.figures_dir, SiteFigures), workspace.study()
    return {one.site: one for one in genuine(kept, site_keys(workspace), study=study, bundle=statement.bundle)}


def evaluated(workspace: Workspace) -> Evaluated:
    """Summarise the stored figures of the exported student over the sites.

    Args:
        workspace: The study's directory.

    Returns:
        The summary.
    """
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
