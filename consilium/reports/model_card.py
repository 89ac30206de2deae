"""Writes the model card of a published student: its intended use, how good it is, its limits, and what is not known.

``publication.publish_student`` calls it. Every figure is one of the study's stored scores on labelled public cases or
of the bundle; a figure that was not measured is stated as missing.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from common.config import Study
from common.data.input_ranges import InputRanges
from common.errors import InvalidInput
from common.intervals import mean_interval
from common.models.bundle import open_bundle
from common.models.student_bundle import README
from common.plain import RESEARCH_ONLY
from common.wording import many
from server.public.public_files import read_record
from server.study.evaluated import evaluated
from server.study.workspace import Workspace

Column = Sequence[float | None]


def model_card(workspace: Workspace) -> str:
    """Return the model card of a study's exported student.

    Args:
        workspace: The study with its bundle.

    Returns:
        Markdown text.
    """
    study, bundle = workspace.study(), open_bundle(workspace.bundle_dir)
    told = _sections((workspace.bundle_dir / README).read_text(encoding="utf-8"))
    structures, channels = ", ".join(study.data.structures), ", ".join(study.data.channels)
    hospitals = evaluated(workspace)
    measured = "".join(f"- {line}.\n" for line in hospitals.lines) if hospitals.gave else ""
    return f"""# Model card: {study.name}

{told[""]}
**{RESEARCH_ONLY}**

## Intended use
Research on the segmentation of {structures} in 3D MRI. It takes {many(len(study.data.channels), "channel")}, which
the study names {channels}. It is not intended for diagnosis, for decisions about a patient, or for other modalities.

## How good it is
{_scores(workspace, study)}
{told["How good it is"]}
## As hospitals measured it
{measured or "No hospital sent figures, so it is not known how good the student is at the hospitals."}
{"Each hospital's signed figures are in `figures/`." if measured else ""}

## Limits
{_limits(study, bundle.inputs)}

## Not known
- Scanners, field strengths and sequences of the public volumes and of the hospitals' data: not recorded.
- Age, sex and diseases of the patients: not recorded. The student may be worse for groups that are rare in the data.
- Whether it is good at another hospital: label some of its cases and run `consilium site evaluate` or `consilium
  predict --labels` before any use.

## Use
With Consilium, from this folder; results lie on each file's own voxels:

    consilium predict SCANS --model bundle --out predictions
    consilium predict --dicom STUDY --model bundle --out segmentations

`SCANS` are NIfTI files or a folder of them. `STUDY` is the folder of one DICOM study; a DICOM Segmentation is written.
An input unlike the public volumes is refused. With MONAI, from the folder `bundle`:

{told["Use"]}
## What it reveals about patients
{told["What it reveals about patients"]}"""


def _sections(readme: str) -> Mapping[str, str]:
    """Return the texts of a bundle's README by heading; the text under its title by the empty heading."""
    first, *others = re.split(r"^## (.+)\n", readme.replace(RESEARCH_ONLY, "").rstrip() + "\n", flags=re.MULTILINE)
    return {"": first.partition("\n")[2].strip("\n") + "\n", **dict(zip(others[::2], others[1::2], strict=True))}


def _scores(workspace: Workspace, study: Study) -> str:
    """Return the student's scores by structure, its worst case and its calibration."""
    try:
        record: Mapping[str, Any] = read_record(workspace.scores_file, remedy="")
    except InvalidInput:
        record = {}
    cases = record.get("student_cases")
    if not cases:
        return (
            "Dice by structure, HD95, calibration and the worst case were not measured. The study has no labelled "
            "public\ncases, or its scores are of an earlier version; `consilium study publish --validation` and "
            "`student export` measure\nthem.\n"
        )
    lines = ["| structure | Dice (95 %) | lowest Dice | HD95, mm | cases |", "|---|---|---|---|---|"]
    dice, far = (list(zip(*cases[name], strict=True)) for name in ("dice", "hd95_mm"))
    for name, column, distances in zip(study.data.structures, dice, far, strict=True):
        found = _known(column)
        lowest = f"{min(found):.3f}" if found else "–"
        lines.append(
            f"| {name} | {_interval(found)} | {lowest} | {_interval(_known(distances), '.1f')} | {len(found)} |"
        )
    lines.append("")
    means = [sum(known) / len(known) for row in cases["dice"] if (known := _known(row))]
    if means:
        lines.append(f"On the worst of {many(len(means), 'case')} its mean Dice is {min(means):.3f}.")
    lines.append("HD95 is the mean over cases in which both the label and the prediction have the structure.")
    if cases["ece"] is not None:
        lines.append(
            f"Calibration: its confidence differs from the share of correct voxels by {cases['ece']:.3f} on average "
            "(expected calibration error; 0 is best)."
        )
    lines.append("The cases are public; no hospital's case is among them.")
    return "\n".join(lines) + "\n"


def _limits(study: Study, seen: InputRanges | None) -> str:
    data = study.data.student
    box = " × ".join(f"{n * size:.0f}" for n, size in zip(data.grid, data.spacing_mm, strict=True))
    lines = [
        f"It sees one box of {box} mm (left-right, back-front, bottom-top) about the centre of the volume. Everything "
        "outside is\n  labelled background. In a larger scan, such as a whole head, give the structure's place with\n"
        "  `consilium predict --centre X,Y,Z`.",
    ]
    if seen is not None:
        extent = " × ".join(f"{low:.0f}–{high:.0f}" for low, high in seen.extent_mm)
        lines.append(f"It was trained on {many(seen.volumes, 'public volume')} with fields of view of {extent} mm.")
    lines.append("Its labels are noisy aggregates, so structures may be missed or shifted; check every result.")
    return "\n".join(f"- {line}" for line in lines)


def _known(column: Column) -> list[float]:
    return [value for value in column if value is not None]


def _interval(values: Sequence[float], form: str = ".3f") -> str:
    if not values:
        return "not measured"
    mean, half = mean_interval(values)
    return f"{mean:{form}}" if half is None else f"{mean:{form}} ± {half:{form}}"
