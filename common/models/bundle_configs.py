"""Makes the texts of a bundle from a study and its facts: MONAI's metadata and inference workflow, README and licence.

The server calls this module when it exports a bundle. A site calls it to generate the same texts itself, so that it
need not trust those of the server. The inference workflow repeats the study's preprocessing and writes label maps on
the voxels of each input file; it needs only MONAI and nibabel. MONAI executes expressions in a bundle's configuration.
The whole configuration is therefore generated here, and nothing in it is copied from received files.
"""

from __future__ import annotations

from collections.abc import Mapping

from common.config import Study, TrainingConfig
from common.data.input_ranges import InputRanges
from common.models.bundle_facts import BundlePrivacy, LibraryVersions
from common.models.fit import WINDOW_OVERLAP, inferer_of
from common.models.unet import definition
from common.plain import RESEARCH_ONLY
from common.study_mechanism import sealed_sentences
from common.wording import many

METADATA_SCHEMA = (
    "https://github.com/Project-MONAI/MONAI-extra-test-data/releases/download/0.8.1/meta_schema_20240725.json"
)

_WORKFLOW_PACKAGES = {"pytorch-ignite": "0.5.5", "fire": "0.7.1"}
"""Packages that MONAI's own tools need for a workflow in addition to MONAI, in the versions that were tested."""

VERSION = "0.1.0"
"""Version of the bundle's layout, stated in its metadata."""

LICENSE = """\
The configuration files of this bundle are licensed under the Apache License, Version 2.0
(SPDX-License-Identifier: Apache-2.0, https://www.apache.org/licenses/LICENSE-2.0).

The weights in models/model.pt were trained on public volumes with pseudo-labels released by the study named in
configs/privacy.json. Their use is subject to what the study's members agreed; no other licence is granted here.
They come without warranty of any kind and are not a medical device.
"""


def metadata(
    study: Study,
    privacy: BundlePrivacy,
    *,
    dice: Mapping[str, float],
    libraries: LibraryVersions,
    inputs: InputRanges | None,
) -> dict[str, object]:
    """Return ``configs/metadata.json`` of a student: the fields of MONAI's bundle specification, and the input ranges.

    Args:
        study: The study.
        privacy: The privacy facts, stated in the description.
        dice: Measured figures by name.
        libraries: Versions of the libraries.
        inputs: Value ranges of the public volumes; None to leave them out.

    Returns:
        The document.
    """
    return metadata_of(
        study,
        description=f"Student of the study {study.name}, trained on privately aggregated pseudo-labels: "
        f"{privacy.sentence()}",
        owner=f"members of the study {study.name}",
        source="public unlabelled volumes, with pseudo-labels from teachers at the study's sites",
        dice=dice,
        libraries=libraries,
        inputs=inputs,
    )


def metadata_of(
    study: Study,
    *,
    description: str,
    owner: str,
    source: str,
    dice: Mapping[str, float],
    libraries: LibraryVersions,
    inputs: InputRanges | None,
) -> dict[str, object]:
    """Return ``configs/metadata.json`` of any network for this study's data.

    Args:
        study: The study.
        description: What the network is.
        owner: Author and copyright holder.
        source: Which data it was trained on.
        dice: Measured figures by name.
        libraries: Versions of the libraries.
        inputs: Value ranges of the training volumes; None to leave them out.

    Returns:
        The document.
    """
    structures = ", ".join(study.data.labels[1:])
    shared = {
        "spatial_shape": list(study.data.student.grid),
        "dtype": "float32",
        "value_range": [],
        "is_patch_data": False,
    }
    return {
        "schema": METADATA_SCHEMA,
        "version": VERSION,
        "changelog": {VERSION: "exported by Consilium"},
        "monai_version": libraries.monai,
        "pytorch_version": libraries.pytorch,
        "numpy_version": libraries.numpy,
        "required_packages_version": {"nibabel": libraries.nibabel, **_WORKFLOW_PACKAGES},
        "task": f"Segmentation of {structures} in MRI",
        "description": description,
        "authors": owner,
        "copyright": owner,
        "data_source": source,
        "data_type": "nibabel",
        "image_classes": f"{many(len(study.data.channels), 'channel')}, z-scored",
        "pred_classes": f"{len(study.data.labels)} channels of logits",
        "eval_metrics": dict(dice),
        "intended_use": "research; not a medical device, not for diagnosis",
        "references": [],
        **({} if inputs is None else {"input_ranges": inputs.to_json()}),
        **({"regions": list(study.data.regions)} if study.data.regions else {}),
        "network_data_format": {
            "inputs": {
                "image": {
                    "type": "image",
                    "format": "magnitude",
                    "modality": "MR",
                    "num_channels": len(study.data.channels),
                    **shared,
                    "channel_def": {str(i): name for i, name in enumerate(study.data.channels)},
                }
            },
            "outputs": {
                "pred": {
                    "type": "image",
                    "format": "segmentation",
                    "num_channels": len(study.data.labels),
                    **shared,
                    "channel_def": {str(i): name for i, name in enumerate(study.data.labels)},
                }
            },
        },
    }


def inference(study: Study, recipe: TrainingConfig | None = None) -> dict[str, object]:
    """Return ``configs/inference.json``: the workflow in MONAI's configuration language.

    ``preprocessing`` repeats ``common.data.volume``. ``run`` needs only MONAI and nibabel. ``evaluator``, which MONAI
    requires of an inference bundle, needs pytorch-ignite, and MONAI's command line needs fire; the metadata lists both.

    Args:
        study: The study.
        recipe: The network's recipe; the study's student if None.

    Returns:
        The document.
    """
    recipe = recipe or study.student
    return {
        "imports": ["$import glob", "$import torch"],
        "bundle_root": ".",
        "device": "$torch.device('cuda:0' if torch.cuda.is_available() else 'cpu')",
        "dataset_dir": "$@bundle_root + '/images'",
        "output_dir": "$@bundle_root + '/predictions'",
        "datalist": "$sorted(glob.glob(@dataset_dir + '/*.nii') + glob.glob(@dataset_dir + '/*.nii.gz'))",
        "network_def": _network(study, recipe),
        "network": "$@network_def.to(@device)",
        "preprocessing": _preprocessing(study),
        "dataset": {
            "_target_": "Dataset",
            "data": "$[{'image': path} for path in @datalist]",
            "transform": "@preprocessing",
        },
        "dataloader": {"_target_": "DataLoader", "dataset": "@dataset", "batch_size": 1, "num_workers": 0},
        "inferer": _inferer(study, recipe),
        "postprocessing": _POSTPROCESSING,
        "weights": "$torch.load(@bundle_root + '/models/model.pt', map_location=@device, weights_only=True)",
        "predict": "$torch.inference_mode()(lambda image: @inferer(image[None].to(@device), @network)[0])",
        "run": [
            "$@network.load_state_dict(@weights)",
            "$@network.eval()",
            "$[@postprocessing({**case, 'pred': @predict(case['image'])})['pred'] for case in @dataset]",
        ],
        "handlers": [
            {
                "_target_": "CheckpointLoader",
                "load_path": "$@bundle_root + '/models/model.pt'",
                "load_dict": {"model": "@network"},
                "map_location": "@device",
            }
        ],
        "evaluator": {
            "_target_": "SupervisedEvaluator",
            "device": "@device",
            "val_data_loader": "@dataloader",
            "network": "@network",
            "inferer": "@inferer",
            "postprocessing": "@postprocessing",
            "val_handlers": "@handlers",
        },
    }


def _network(study: Study, recipe: TrainingConfig) -> dict[str, object]:
    ends = {"in_channels": len(study.data.channels), "out_channels": len(study.data.labels)}
    return definition(recipe.network, recipe.channels, **ends)


def _preprocessing(study: Study) -> dict[str, object]:
    return {
        "_target_": "Compose",
        "transforms": [
            {"_target_": "LoadImaged", "keys": "image"},
            {"_target_": "EnsureChannelFirstd", "keys": "image"},
            {
                "_target_": "Orientationd",
                "keys": "image",
                "axcodes": "RAS",
                "labels": [["L", "R"], ["P", "A"], ["I", "S"]],
            },
            {
                "_target_": "Spacingd",
                "keys": "image",
                "pixdim": list(study.data.student.spacing_mm),
                "mode": "bilinear",
                "padding_mode": "border",
            },
            {
                "_target_": "NormalizeIntensityd",
                "keys": "image",
                "channel_wise": True,
                **({"nonzero": True} if study.data.normalisation == "nonzero" else {}),
            },
            {"_target_": "ResizeWithPadOrCropd", "keys": "image", "spatial_size": list(study.data.student.grid)},
        ],
    }


_POSTPROCESSING: dict[str, object] = {
    "_target_": "Compose",
    "transforms": [
        {"_target_": "Activationsd", "keys": "pred", "softmax": True},
        {
            "_target_": "Invertd",
            "keys": "pred",
            "transform": "@preprocessing",
            "orig_keys": "image",
            "nearest_interp": False,
            "to_tensor": True,
        },
        {
            "_target_": "Lambdad",  # outside the grid all probabilities are 0 here, so background gets the rest
            "keys": "pred",
            "func": "$lambda p: torch.cat([p[:1] + (1 - p.sum(0, keepdim=True)).clamp(min=0), p[1:]])",
        },
        {"_target_": "AsDiscreted", "keys": "pred", "argmax": True},
        {
            "_target_": "SaveImaged",
            "keys": "pred",
            "output_dir": "@output_dir",
            "output_postfix": "seg",
            "output_dtype": "$torch.uint8",
            "resample": False,
            "separate_folder": False,
        },
    ],
}


def _inferer(study: Study, recipe: TrainingConfig) -> dict[str, object]:
    """Return the configuration of the inferer that ``common.models.fit.predict`` uses for this recipe."""
    from monai.inferers import SlidingWindowInferer

    chosen = inferer_of(recipe.patch, study.data.student.grid)
    if not isinstance(chosen, SlidingWindowInferer):
        return {"_target_": "SimpleInferer"}
    return {
        "_target_": "SlidingWindowInferer",
        "roi_size": list(chosen.roi_size),
        "sw_batch_size": 1,
        "overlap": WINDOW_OVERLAP,
        "mode": "gaussian",
    }


def _rests_on(study: Study, privacy: BundlePrivacy) -> str:
    if study.privacy.sealed:
        told = sealed_sentences(study, sites=privacy.sites, spent=privacy.spent_beyond)
        return "\n\n".join((*told, "This covers the weights and anything computed from them."))
    return (
        "The guarantee covers the weights and anything computed from them. It relies on the study's aggregator "
        "having\nadded the noise."
    )


def readme(study: Study, privacy: BundlePrivacy, dice: Mapping[str, float]) -> str:
    """Return the README of a student's bundle, with its guarantee and the measured figures.

    Args:
        study: The study.
        privacy: The privacy facts.
        dice: Measured figures by name.

    Returns:
        Markdown text.
    """
    measured = "".join(f"| {name} | {value:{'.0f' if name == 'cases' else '.3f'}} |\n" for name, value in dice.items())
    table = (
        f"\n| Dice on labelled public cases | |\n|---|---|\n{measured}" if measured else "\nNo figures were measured.\n"
    )
    if "cases" in dice:
        table += (
            "\nControls are students trained by the same recipe without the hospitals' information. The gain is over\n"
            "the best control on these cases; its interval is Student's t over the cases' paired differences.\n"
        )
    spacing = " × ".join(f"{s:g}" for s in study.data.student.spacing_mm)
    grid = " × ".join(map(str, study.data.student.grid))
    return f"""# {study.name}

A 3D U-Net that segments {", ".join(study.data.labels[1:])} in MRI volumes. It was trained on public volumes whose
labels are noisy aggregates of the predictions of teachers at {privacy.sites} sites; no private volume reached it.

## What it reveals about patients
Guaranteed by the study: {privacy.guarantee()}.
Spent of it when this was exported: {privacy.spent()}.

{_rests_on(study, privacy)} The figures are in `configs/privacy.json`, with the hash of the
ledger's signed head.

## Use
Put volumes (`.nii`, `.nii.gz`) into `images/` and run, from this directory, with what `configs/metadata.json` lists:

    python -m monai.bundle run --config_file configs/inference.json --meta_file configs/metadata.json \\
        --workflow_type inference

Label maps appear in `predictions/`, on each file's own voxels. Volumes are resampled to RAS+ at
{spacing} mm and cropped or padded to {grid} voxels about their centre; voxels outside are labelled background.

## How good it is
{table}
{RESEARCH_ONLY}
"""
