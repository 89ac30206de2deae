"""Writes an adapted network as a MONAI bundle whose name and privacy file state that it was trained on patients.

The bundle has a student's layout, so that MONAI and ``consilium predict`` read it; its files are readable by the site's
user only. No command of Consilium accepts it as a student, a start or a teacher.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from client.adapting.adapted import SEEN, Adapted, shown
from client.adapting.methods import WORDS
from client.records.adapted_folder import SEEN_FILE
from common.config import Study, TrainingConfig
from common.errors import InvalidInput
from common.models.averaged import Averaged
from common.models.bundle import SECOND, SEEN_WEIGHTS, Bundle
from common.models.bundle_configs import inference, metadata_of
from common.models.bundle_facts import LibraryVersions
from common.models.student_bundle import INFERENCE, LICENCE, METADATA, PRIVACY, README, WEIGHTS, as_json, write_bundle
from common.models.unet import weights_to_bytes
from common.plain import RESEARCH_ONLY
from common.wording import many

_LICENCE = f"""\
{SEEN}

The configuration files of this bundle are licensed under the Apache License, Version 2.0
(SPDX-License-Identifier: Apache-2.0, https://www.apache.org/licenses/LICENSE-2.0).
No licence of the weights is granted here. They come without warranty of any kind and are not a medical device.
"""


def write_seen_bundle(
    directory: Path,
    network: torch.nn.Module,
    result: Adapted,
    *,
    study: Study,
    bundle: Bundle,
    recipe: TrainingConfig,
    seen: Mapping[str, Sequence[str]],
) -> None:
    """Write the adapted network's bundle; an interrupted call leaves no partial bundle.

    Args:
        directory: The bundle's folder.
        network: The network.
        result: The adaptation.
        study: The study.
        bundle: The student from which it was made; its input ranges are copied.
        recipe: The network's training recipe.
        seen: Keyed hashes of the patients it was trained on, by deal (assignment of patients to voters). They show
            later whether one of these patients was withdrawn.

    Raises:
        InvalidInput: If the folder holds something else.
    """
    check_place(directory)
    files = {
        METADATA: as_json(_metadata(result, study, bundle)),
        INFERENCE: as_json(_inference(study, recipe, together=isinstance(network, Averaged))),
        PRIVACY: as_json(_privacy(result, study)),
        SEEN_FILE: as_json(dict(seen)),
        SEEN_WEIGHTS: weights_to_bytes(network),
        README: _readme(result, study).encode(),
        LICENCE: _LICENCE.encode(),
    }
    write_bundle(directory, files, mode=0o600)
    directory.chmod(0o700)


def check_place(directory: Path) -> None:
    """Refuse a folder that holds anything but an earlier bundle of this kind.

    Args:
        directory: The folder.

    Raises:
        InvalidInput: If the folder holds something else.
    """
    if directory.exists() and not (directory / SEEN_WEIGHTS).is_file():
        raise InvalidInput(
            "folder of the adapted network holds something else", value=str(directory), remedy="choose another --out"
        )


def _privacy(result: Adapted, study: Study) -> dict[str, Any]:
    return {
        "has_seen_patients": True,
        "must_not_leave": True,
        "statement": SEEN,
        "site": result.site,
        "way": str(result.way),
        "patients": result.patients,
        "steps": result.steps,
        "recipe_steps": result.recipe_steps,
        "even_if_unfit": bool(result.unfit),
        "student": result.student,
        "study": study.id,
    }


def _metadata(result: Adapted, study: Study, bundle: Bundle) -> dict[str, object]:
    figures = next((one.interval for one in result.figures if one.way == result.way), None)
    return metadata_of(
        study,
        description=f"{SEEN} Made at {result.site} from the student of the study {study.name}: {WORDS[result.way]}.",
        owner=result.site,
        source=f"{many(result.patients, 'patient')} of {result.site}, and the student of the study {study.name}",
        dice={} if figures is None else {"cross_validated_dice": figures[0]},
        libraries=LibraryVersions.here(),
        inputs=bundle.inputs,
    )


def _inference(study: Study, recipe: TrainingConfig, *, together: bool) -> dict[str, object]:
    """Return the student's inference workflow, changed to load the adapted network's weights.

    With ``together``, the workflow averages the predictions of the adapted network and a second network.
    """
    own = inference(study, recipe)
    found: dict[str, object] = json.loads(json.dumps(own).replace(WEIGHTS, SEEN_WEIGHTS))
    if together:
        found[SECOND] = found["network_def"]
        found["network"] = _AVERAGED
    return found


_AVERAGED = (
    "$type('Averaged', (torch.nn.ModuleList,), {'forward': lambda self, image: torch.logsumexp(torch.stack("
    f"[torch.log_softmax(each(image), dim=1) for each in self]), dim=0)}})([@network_def, @{SECOND}]).to(@device)"
)
"""The same computation as :class:`~common.models.averaged.Averaged`, in MONAI's configuration language."""


def _readme(result: Adapted, study: Study) -> str:
    table = "".join(f"| {one.what} | {shown(one.interval)} |\n" for one in result.figures)
    measured = (
        f"| Dice over {many(result.patients, 'patient')}, each left out of training | |\n|---|---|\n{table}"
        if table
        else "Nothing was measured: there were too few patients.\n"
    )
    warnings = "".join(f"\n{warning}.\n" for warning in result.warnings)
    return f"""# {result.site}: adapted from the student of {study.name}

**{SEEN}**

Chosen: {WORDS[result.way]}; {result.why}. {result.length}
{warnings}
{measured}
`consilium predict IMAGES --model THIS-FOLDER --out predictions` uses it; so does `python -m monai.bundle run
--config_file configs/inference.json --meta_file configs/metadata.json --workflow_type inference` from this folder, with
volumes in `images/`. {RESEARCH_ONLY}
"""
