"""Stores what a site adapted: the bundle, the report, and trainings that a later run resumes.

All of it may hold what a patient taught. No torch here: a withdrawal reads it too.
"""

from __future__ import annotations

import shutil
from pathlib import Path

FOLDER = "adapted"
"""Below the site's directory."""

TRAININGS = "trainings"
"""Below :data:`FOLDER`: every training of an adaptation, by what it depends on."""

NAME = "has-seen-patients-must-not-leave"
"""What the folder of an adapted bundle is called, with the site's name behind it."""


def forget_adapted(site_dir: Path) -> tuple[Path, ...]:
    """Delete the trainings of a site's adaptations, as after a patient's withdrawal.

    Returns:
        The finished bundles in the site's directory, which a person deletes.
    """
    folder = site_dir / FOLDER
    shutil.rmtree(folder / TRAININGS, ignore_errors=True)
    return tuple(sorted(folder.glob(f"{NAME}-*")))
