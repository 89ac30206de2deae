"""The student as a MONAI bundle, with the privacy facts of its training data beside the weights.

Layout: ``configs/{metadata,inference,privacy}.json``, ``models/model.pt`` (a plain state dict), ``docs/README.md``,
``LICENSE``. The inference workflow repeats the study's preprocessing and writes label maps on each file's own voxels;
it needs MONAI and nibabel only. Every file but the weights is made from the study, the privacy facts, a few numbers and
the versions of four libraries, so that a site can make them anew and take nothing but values from the server: MONAI
evaluates what a bundle's configuration says. Refuses to write over a directory that is not a bundle, and files that are
not what this program makes of the values in them.
"""

from __future__ import annotations

import json
import math
import re
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import monai
import nibabel
import numpy as np
import torch

from common.canonical import check_hash, checked_fields, sha256_file
from common.config import Study, TrainingConfig, check_text
from common.errors import InvalidInput
from common.models.fit import WINDOW_OVERLAP, inferer_of
from common.models.unet import build_unet, weights_from_bytes, weights_to_bytes
from common.objects import write_atomically
from common.privacy.figures import delta_text, epsilon_text
from common.privacy.mechanism import AccountantName, Protection, Relation, Unit

METADATA_SCHEMA = (
    "https://github.com/Project-MONAI/MONAI-extra-test-data/releases/download/0.8.1/meta_schema_20240725.json"
)

VERSION = "0.1.0"
"""Of the layout, in every bundle's metadata."""

METADATA, INFERENCE, PRIVACY = "configs/metadata.json", "configs/inference.json", "configs/privacy.json"
WEIGHTS, README, LICENCE = "models/model.pt", "docs/README.md", "LICENSE"
FILES = (METADATA, INFERENCE, PRIVACY, WEIGHTS, README, LICENCE)
"""All that a bundle consists of."""

MAX_TEXT_BYTES = 1 << 20
"""Of all files but the weights together."""

MAX_FIGURES = 64
_SENTENCES = ("guarantee", "spent")

LICENSE = """\
The configuration files of this bundle are licensed under the Apache License, Version 2.0
(SPDX-License-Identifier: Apache-2.0, https://www.apache.org/licenses/LICENSE-2.0).

The weights in models/model.pt were trained on public volumes with pseudo-labels released by the study named in
configs/privacy.json. Their use is subject to what the study's members agreed; no other licence is granted here.
They come without warranty of any kind and are not a medical device.
"""


@dataclass(frozen=True, slots=True)
class PrivacyFacts:
    """What the study guarantees, and what the student's pseudo-labels have spent of it by the ledger.

    ε values hold at ``delta`` for ``protection`` (unit and relation); ``accountant`` is the one the budget was kept by.
    ``budget_epsilon`` was promised, and can still be spent under the same consent; the others are what was spent.
    ``noise_multiplier`` is z = σ/Δ of one release; ``ledger_head`` the hash of the ledger's signed head; ``study`` and
    ``codec`` are content hashes.
    """

    budget_epsilon: float
    epsilon_exact: float
    epsilon_rdp: float
    delta: float
    protection: Protection
    accountant: AccountantName
    noise_multiplier: float
    queries: int
    sites: int
    voters_per_site: int
    ledger_head: str
    study: str
    codec: str
    epsilon_paper: float | None = None
    """By eq (14) of Fay et al. 2021; needed where it is the accountant."""

    def __post_init__(self) -> None:
        paper = ("epsilon_paper",) if self.accountant is AccountantName.PAPER else ()
        for name in ("budget_epsilon", "epsilon_exact", "epsilon_rdp", "noise_multiplier", *paper):
            value = getattr(self, name)
            if not isinstance(value, int | float) or not math.isfinite(value) or value < 0:
                raise InvalidInput(f"privacy facts: {name}", value=value, limit="a finite number ≥ 0")
        for name in ("queries", "sites", "voters_per_site"):
            value = getattr(self, name)
            if type(value) is not int or not 1 <= value <= 1_000_000_000:
                raise InvalidInput(f"privacy facts: {name}", value=value, limit="an integer from 1 to 10^9")
        if not isinstance(self.delta, float) or not 0 < self.delta < 1:
            raise InvalidInput("privacy facts: delta", value=self.delta, limit="above 0 and below 1")
        for name in ("ledger_head", "study", "codec"):
            check_hash(getattr(self, name))

    @property
    def epsilon(self) -> float:
        """ε spent, by the accountant that kept the budget."""
        by = {AccountantName.RDP: self.epsilon_rdp, AccountantName.PAPER: self.epsilon_paper}
        return by.get(self.accountant) or self.epsilon_exact

    def guarantee(self) -> str:
        """The study's budget in one line: no unit loses more, whatever is still released. What was spent, if more."""
        return f"(ε, δ) = ({epsilon_text(max(self.budget_epsilon, self.epsilon))}, {self._terms()}"

    def spent(self) -> str:
        """What the releases so far have spent of it, in one line."""
        return f"(ε, δ) = ({epsilon_text(self.epsilon)}, {self._terms()}, by {self.queries} releases"

    def sentence(self) -> str:
        """Guarantee and spend in one line, each with everything an ε must stand beside."""
        return f"guaranteed {self.guarantee()}; spent of it {self.spent()}"

    def _terms(self) -> str:
        return f"{delta_text(self.delta)}) by the {self.accountant} accountant, {self.protection}"

    def to_json(self) -> dict[str, object]:
        facts = asdict(self) | {
            "accountant": str(self.accountant),
            "epsilon": self.epsilon,
            "unit": str(self.protection.unit),
            "relation": str(self.protection.relation),
            "guarantee": self.guarantee(),
            "spent": self.spent(),
        }
        del facts["protection"]
        if self.epsilon_paper is None:
            del facts["epsilon_paper"]
        return dict(sorted(facts.items()))

    @classmethod
    def from_json(cls, record: object) -> PrivacyFacts:
        """Read what :meth:`to_json` gave, derived fields left aside; InvalidInput for anything else."""
        if not isinstance(record, dict):
            raise InvalidInput("privacy facts", value=type(record).__name__, limit="a mapping")
        floats = ("budget_epsilon", "epsilon_exact", "epsilon_rdp", "delta", "noise_multiplier")
        kinds: dict[str, type] = dict.fromkeys(floats, float)
        kinds |= dict.fromkeys(("queries", "sites", "voters_per_site"), int)
        kinds |= dict.fromkeys(("accountant", "unit", "relation", "ledger_head", "study", "codec"), str)
        kinds |= dict.fromkeys(_SENTENCES, str)
        kinds |= {name: float for name in ("epsilon", "epsilon_paper") if name in record}
        given = checked_fields(record, kinds)
        for derived in (*_SENTENCES, "epsilon"):
            given.pop(derived, None)
        try:
            protection = Protection(unit=Unit(given.pop("unit")), relation=Relation(given.pop("relation")))
            return cls(**{**given, "accountant": AccountantName(given["accountant"]), "protection": protection})
        except ValueError as error:
            raise InvalidInput("privacy facts", limit="a known unit, relation and accountant") from error


@dataclass(frozen=True, slots=True)
class Libraries:
    """Versions of what the student was trained with, as the metadata names them."""

    monai: str
    pytorch: str
    numpy: str
    nibabel: str

    def __post_init__(self) -> None:
        for name in ("monai", "pytorch", "numpy", "nibabel"):
            if not re.fullmatch(r"[0-9][0-9A-Za-z.+-]{0,63}", getattr(self, name)):
                raise InvalidInput(f"version of {name} in a bundle", value=getattr(self, name)[:64], limit="a version")

    @classmethod
    def here(cls) -> Libraries:
        """Those of this process."""
        return cls(
            monai=monai.__version__,
            pytorch=str(torch.__version__),
            numpy=np.__version__,
            nibabel=nibabel.__version__,
        )


def bundle_files(
    study: Study,
    *,
    weights: bytes,
    privacy: PrivacyFacts,
    dice: Mapping[str, float] | None = None,
    libraries: Libraries | None = None,
) -> dict[str, bytes]:
    """Every file of the bundle by its path; equal arguments give equal bytes. ``libraries``: this process's by default.

    ``dice``: figures measured on labelled public cases, by name.
    """
    figures = _checked_figures(dice or {})
    return {
        METADATA: _json(metadata(study, privacy, dice=figures, libraries=libraries or Libraries.here())),
        INFERENCE: _json(inference(study)),
        PRIVACY: _json(privacy.to_json()),
        WEIGHTS: weights,
        README: _readme(study, privacy, figures).encode(),
        LICENCE: LICENSE.encode(),
    }


@dataclass(frozen=True, slots=True)
class BundleValues:
    """All that is taken from a bundle somebody else packed: numbers, names, and the bytes of its weights.

    ``channels`` and ``patch`` are the network's; a recipe is no part of what a site consents to.
    """

    channels: tuple[int, ...]
    patch: tuple[int, ...]
    weights: bytes
    privacy: PrivacyFacts
    figures: Mapping[str, float]
    libraries: Libraries


def read_values(files: Mapping[str, bytes]) -> BundleValues:
    """The values in a bundle's files, each within its bounds; InvalidInput for files no export writes."""
    if files.keys() != set(FILES):
        wrong = sorted(files.keys() ^ set(FILES))
        raise InvalidInput("files of a bundle", value=wrong[:8], limit=f"exactly {', '.join(FILES)}")
    if sum(len(content) for name, content in files.items() if name != WEIGHTS) > MAX_TEXT_BYTES:
        raise InvalidInput("text in a bundle", limit=f"{MAX_TEXT_BYTES} bytes in all")
    try:
        described, workflow = json.loads(files[METADATA]), json.loads(files[INFERENCE])
        recipe = TrainingConfig(
            channels=tuple(workflow["network_def"]["channels"]), patch=tuple(workflow["inferer"].get("roi_size", ()))
        )
        return BundleValues(
            channels=recipe.channels,
            patch=recipe.patch,
            weights=files[WEIGHTS],
            privacy=PrivacyFacts.from_json(json.loads(files[PRIVACY])),
            figures=_checked_figures(described["eval_metrics"]),
            libraries=Libraries(
                monai=described["monai_version"],
                pytorch=described["pytorch_version"],
                numpy=described["numpy_version"],
                nibabel=described["required_packages_version"]["nibabel"],
            ),
        )
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError, RecursionError) as error:
        raise InvalidInput("a bundle's configuration cannot be read", limit="one that Consilium exported") from error


def regenerate(values: BundleValues, study: Study) -> dict[str, bytes]:
    """The bundle that ``values`` make here: this program's own words about ``study``, the weights written anew.

    InvalidInput unless the weights are tensors of the network that ``values`` describe, and nothing else.
    """
    network = build_unet(values.channels, in_channels=len(study.data.channels), out_channels=len(study.data.labels))
    weights_from_bytes(values.weights, network)
    return bundle_files(
        replace(study, student=replace(study.student, channels=values.channels, patch=values.patch)),
        weights=weights_to_bytes(network),
        privacy=values.privacy,
        dice=values.figures,
        libraries=values.libraries,
    )


def check_same(files: Mapping[str, bytes], own: Mapping[str, bytes]) -> None:
    """InvalidInput naming the first of ``files`` that is not, byte for byte, what was made here; weights are values."""
    for name in FILES:
        if name != WEIGHTS and own[name] != files[name]:
            raise InvalidInput(
                "a bundle's file is not what this program makes of the study",
                value=name,
                remedy="run the same release of Consilium here and at the server; if it is the same, the bundle was "
                "tampered with: tell the consortium",
            )


def export_bundle(
    directory: Path,
    *,
    study: Study,
    model: torch.nn.Module,
    privacy: PrivacyFacts,
    dice: Mapping[str, float] | None = None,
) -> dict[str, str]:
    """Write the bundle and return the SHA-256 of each of its files by relative path.

    ``model``: the student, ``build_unet`` of ``study.student.channels``. ``dice``: figures measured on labelled public
    cases, by name; they go to the metadata. An earlier bundle at ``directory`` is replaced only once the new one is
    complete. Raises InvalidInput for a directory that holds something else.
    """
    if directory.exists() and not (directory / METADATA).is_file() and any(directory.iterdir()):
        raise InvalidInput("bundle directory holds something else", value=str(directory), remedy="choose another one")
    write_bundle(directory, bundle_files(study, weights=weights_to_bytes(model), privacy=privacy, dice=dice))
    return {
        str(path.relative_to(directory)): sha256_file(path) for path in sorted(directory.rglob("*")) if path.is_file()
    }


def write_bundle(directory: Path, files: Mapping[str, bytes]) -> None:
    """Put a bundle's files where ``directory`` is, whole or not at all."""
    fresh = directory.with_name(f".{directory.name}.tmp")  # one name, so that the next one clears what a crash left
    shutil.rmtree(fresh, ignore_errors=True)
    try:
        for name, content in files.items():
            write_atomically(fresh / name, content)
        if directory.exists():
            shutil.rmtree(directory)
        fresh.rename(directory)
    finally:
        shutil.rmtree(fresh, ignore_errors=True)


def metadata(
    study: Study, privacy: PrivacyFacts, *, dice: Mapping[str, float], libraries: Libraries
) -> dict[str, object]:
    """``configs/metadata.json``: the fields of MONAI's bundle specification."""
    structures = ", ".join(study.data.labels[1:])
    shared = {"spatial_shape": list(study.data.grid), "dtype": "float32", "value_range": [], "is_patch_data": False}
    return {
        "schema": METADATA_SCHEMA,
        "version": VERSION,
        "changelog": {VERSION: "exported by Consilium"},
        "monai_version": libraries.monai,
        "pytorch_version": libraries.pytorch,
        "numpy_version": libraries.numpy,
        "required_packages_version": {"nibabel": libraries.nibabel},
        "task": f"Segmentation of {structures} in MRI",
        "description": f"Student of the study {study.name}, trained on privately aggregated pseudo-labels: "
        f"{privacy.sentence()}",
        "authors": f"members of the study {study.name}",
        "copyright": f"members of the study {study.name}",
        "data_source": "public unlabelled volumes, with pseudo-labels from teachers at the study's sites",
        "data_type": "nibabel",
        "image_classes": f"{len(study.data.channels)} channel(s), z-scored",
        "pred_classes": f"{len(study.data.labels)} channels of logits",
        "eval_metrics": dict(dice),
        "intended_use": "research; not a medical device, not for diagnosis",
        "references": [],
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


def inference(study: Study) -> dict[str, object]:
    """``configs/inference.json``: the workflow, in MONAI's configuration language.

    ``preprocessing`` is what ``common.data.volume`` does; ``run`` needs nothing but MONAI and nibabel. ``evaluator`` is
    there for tools that expect one and needs pytorch-ignite.
    """
    return {
        "imports": ["$import glob", "$import torch"],
        "bundle_root": ".",
        "device": "$torch.device('cuda:0' if torch.cuda.is_available() else 'cpu')",
        "dataset_dir": "$@bundle_root + '/images'",
        "output_dir": "$@bundle_root + '/predictions'",
        "datalist": "$sorted(glob.glob(@dataset_dir + '/*.nii') + glob.glob(@dataset_dir + '/*.nii.gz'))",
        "network_def": {
            "_target_": "UNet",
            "spatial_dims": 3,
            "in_channels": len(study.data.channels),
            "out_channels": len(study.data.labels),
            "channels": list(study.student.channels),
            "strides": [2] * (len(study.student.channels) - 1),
            "num_res_units": 0,
            "norm": "INSTANCE",
        },
        "network": "$@network_def.to(@device)",
        "preprocessing": {
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
                    "pixdim": list(study.data.spacing_mm),
                    "mode": "bilinear",
                    "padding_mode": "border",
                },
                {"_target_": "NormalizeIntensityd", "keys": "image", "channel_wise": True},
                {"_target_": "ResizeWithPadOrCropd", "keys": "image", "spatial_size": list(study.data.grid)},
            ],
        },
        "dataset": {
            "_target_": "Dataset",
            "data": "$[{'image': path} for path in @datalist]",
            "transform": "@preprocessing",
        },
        "dataloader": {"_target_": "DataLoader", "dataset": "@dataset", "batch_size": 1, "num_workers": 0},
        "inferer": _inferer(study),
        "postprocessing": {
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
                    "_target_": "Lambdad",  # outside the grid every probability is 0 here: call that background
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
        },
        "weights": "$torch.load(@bundle_root + '/models/model.pt', map_location=@device, weights_only=True)",
        "predict": "$torch.inference_mode()(lambda image: @inferer(image[None].to(@device), @network)[0])",
        "run": [
            "$@network.load_state_dict(@weights)",
            "$@network.eval()",
            "$[@postprocessing({**case, 'pred': @predict(case['image'])})['pred'] for case in @dataset]",
        ],
        "evaluator": {
            "_target_": "SupervisedEvaluator",
            "device": "@device",
            "val_data_loader": "@dataloader",
            "network": "@network",
            "inferer": "@inferer",
            "postprocessing": "@postprocessing",
        },
    }


def _inferer(study: Study) -> dict[str, object]:
    """How ``common.models.fit.predict`` gives a volume on the grid to a network of this recipe."""
    from monai.inferers import SlidingWindowInferer

    chosen = inferer_of(study.student.patch, study.data.grid)
    if not isinstance(chosen, SlidingWindowInferer):
        return {"_target_": "SimpleInferer"}
    return {
        "_target_": "SlidingWindowInferer",
        "roi_size": list(chosen.roi_size),
        "sw_batch_size": 1,
        "overlap": WINDOW_OVERLAP,
        "mode": "gaussian",
    }


def _readme(study: Study, privacy: PrivacyFacts, dice: Mapping[str, float]) -> str:
    measured = "".join(f"| {name} | {value:.3f} |\n" for name, value in dice.items())
    table = (
        f"\n| Dice on labelled public cases | |\n|---|---|\n{measured}" if measured else "\nNo figures were measured.\n"
    )
    spacing = " × ".join(f"{s:g}" for s in study.data.spacing_mm)
    grid = " × ".join(map(str, study.data.grid))
    return f"""# {study.name}

A 3D U-Net that segments {", ".join(study.data.labels[1:])} in MRI volumes. It was trained on public volumes whose
labels are noisy aggregates of the predictions of teachers at {privacy.sites} sites; no private volume reached it.

## What it reveals about patients
Guaranteed by the study: {privacy.guarantee()}.
Spent of it when this was exported: {privacy.spent()}.

Whoever trusts the study's aggregator to have added the noise can rely on this for the weights and for anything computed
from them. Every figure behind it is in `configs/privacy.json`, with the hash of the ledger's
signed head.

## Use
Put volumes (`.nii`, `.nii.gz`) into `images/` and run, from this directory, with monai, nibabel and fire installed:

    python -m monai.bundle run --config_file configs/inference.json --meta_file configs/metadata.json \\
        --workflow_type inference

Label maps appear in `predictions/`, on each file's own voxels. Volumes are brought to RAS+ at
{spacing} mm and cropped or padded to {grid} voxels about their centre; what lies outside is called background.

## How good it is
{table}
Research only: not a medical device, not for diagnosis.
"""


def _checked_figures(figures: object) -> dict[str, float]:
    """Measured figures by name, as they stand in the metadata."""
    if not isinstance(figures, Mapping) or len(figures) > MAX_FIGURES:
        raise InvalidInput("figures of a bundle", limit=f"at most {MAX_FIGURES}, by name")
    for name, value in figures.items():
        check_text(name, what="name of a bundle's figure")
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise InvalidInput(f"figure {name} of a bundle", value=str(value)[:32], limit="a finite number")
    return {name: float(value) for name, value in figures.items()}


def _json(value: object) -> bytes:
    return (json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n").encode()
