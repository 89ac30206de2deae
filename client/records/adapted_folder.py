"""Defines where a site keeps its adaptations: the bundle, the report, and trainings that a later run resumes.

All files may contain what was learnt from a patient. A bundle records on which patients it was trained; one without
this record gives no patients. The module does not import torch, because the command that withdraws a patient uses it
too.
"""

from __future__ import annotations

from pathlib import Path

from common.reading import lenient_json

FOLDER = "adapted"
"""Folder of adaptations, below the site's directory."""

TRAININGS = "trainings"
"""Folder below :data:`FOLDER` of trainings that a later run resumes. A training's file is named by the hash of its data
and settings."""

NAME = "has-seen-patients-must-not-leave"
"""Name of an adapted bundle's folder; the site's name follows."""

LEAVES = "may-leave"
"""Part of the name of a bundle's folder that may leave the hospital, between strategy and site."""

REPORT = "report"
"""Name of the report's folder, beside the bundle's folder."""

SEEN_FILE = "configs/seen.json"
"""File of an adapted bundle: the keyed hashes of the patients it was trained on, by deal."""


def private_folder(site_dir: Path) -> Path:
    """Return the folder of a site's private adaptations, which has a folder for each strategy.

    Args:
        site_dir: The site's directory.

    Returns:
        The folder.
    """
    return site_dir / FOLDER / "private"


def private_slots(site_dir: Path) -> Path:
    """Return the file that assigns patients to the slots of private adaptations. A withdrawal deletes this file.

    Args:
        site_dir: The site's directory.

    Returns:
        The path; the file need not exist.
    """
    return site_dir / FOLDER / TRAININGS / "slots.json"


def adapted_bundles(site_dir: Path) -> tuple[Path, ...]:
    """Return the finished bundles of a site's adaptations, with those that may leave the hospital.

    Args:
        site_dir: The site's directory.

    Returns:
        Their folders.
    """
    return tuple(sorted({one for form in (f"{NAME}-*", f"*-{LEAVES}-*") for one in (site_dir / FOLDER).glob(form)}))


def seen_by(bundle: Path) -> dict[str, frozenset[str]]:
    """Read from a bundle on which patients its adapted network was trained.

    Args:
        bundle: The bundle's folder.

    Returns:
        Keyed hashes of the patients, by the deal (assignment of patients to voters) whose key made the hashes; empty if
        the bundle does not contain them.
    """
    try:
        found = lenient_json((bundle / SEEN_FILE).read_text(encoding="utf-8"))
        return {deal: frozenset(map(str, subjects)) for deal, subjects in found.items()}
    except (OSError, ValueError, TypeError, AttributeError):
        return {}
