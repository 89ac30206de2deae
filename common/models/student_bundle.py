"""The student as a MONAI bundle, with the privacy facts of its training data beside the weights.

Layout: ``configs/{metadata,inference,privacy}.json``, ``models/model.pt`` (a plain state dict), ``docs/README.md``,
``LICENSE``. Every file but the weights is made from the study, the privacy facts, a few numbers and the versions of
four libraries, so that a site can make them anew and take nothing but values from the server. Refuses to write over a
directory that is not a bundle.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path

import torch

from common.canonical import sha256_file
from common.config import Study
from common.data.input_ranges import InputRanges
from common.errors import InvalidInput
from common.models.bundle_configs import LICENSE, inference, metadata, readme
from common.models.bundle_facts import BundlePrivacy, Libraries, checked_figures
from common.models.unet import weights_to_bytes
from common.objects import write_atomically

METADATA, INFERENCE, PRIVACY = "configs/metadata.json", "configs/inference.json", "configs/privacy.json"
WEIGHTS, README, LICENCE = "models/model.pt", "docs/README.md", "LICENSE"
FILES = (METADATA, INFERENCE, PRIVACY, WEIGHTS, README, LICENCE)
"""All that a bundle consists of."""


def bundle_files(
    study: Study,
    *,
    weights: bytes,
    privacy: BundlePrivacy,
    dice: Mapping[str, float] | None = None,
    libraries: Libraries | None = None,
    inputs: InputRanges | None = None,
) -> dict[str, bytes]:
    """Every file of the bundle by its path; equal arguments give equal bytes. ``libraries``: this process's by default.

    ``dice``: figures measured on labelled public cases, by name. ``inputs``: what the public volumes look like.
    """
    figures = checked_figures(dice or {})
    return {
        METADATA: as_json(
            metadata(study, privacy, dice=figures, libraries=libraries or Libraries.here(), inputs=inputs)
        ),
        INFERENCE: as_json(inference(study)),
        PRIVACY: as_json(privacy.to_json()),
        WEIGHTS: weights,
        README: readme(study, privacy, figures).encode(),
        LICENCE: LICENSE.encode(),
    }


def export_bundle(
    directory: Path,
    *,
    study: Study,
    model: torch.nn.Module,
    privacy: BundlePrivacy,
    dice: Mapping[str, float] | None = None,
    inputs: InputRanges | None = None,
) -> dict[str, str]:
    """Write the bundle and return the SHA-256 of each of its files by relative path.

    ``model``: the student, ``build_unet`` of ``study.student.channels``. ``dice``: figures measured on labelled public
    cases, by name, and ``inputs`` go to the metadata. An earlier bundle at ``directory`` is replaced only once the new
    one is complete. Raises InvalidInput for a directory that holds something else.
    """
    replace_bundle(
        directory, bundle_files(study, weights=weights_to_bytes(model), privacy=privacy, dice=dice, inputs=inputs)
    )
    return {
        str(path.relative_to(directory)): sha256_file(path) for path in sorted(directory.rglob("*")) if path.is_file()
    }


def replace_bundle(directory: Path, files: Mapping[str, bytes], *, mode: int = 0o644) -> None:
    """:func:`write_bundle` over nothing or another bundle; InvalidInput where something else lies there."""
    if directory.exists() and not (directory / METADATA).is_file() and any(directory.iterdir()):
        raise InvalidInput("bundle directory holds something else", value=str(directory), remedy="choose another one")
    write_bundle(directory, files, mode=mode)


def write_bundle(directory: Path, files: Mapping[str, bytes], *, mode: int = 0o644) -> None:
    """Put a bundle's files where ``directory`` is, whole or not at all; with ``mode`` 0o600 for its owner alone."""
    fresh = directory.with_name(f".{directory.name}.tmp")  # one name, so that the next one clears what a crash left
    shutil.rmtree(fresh, ignore_errors=True)
    try:
        for name, content in files.items():
            write_atomically(fresh / name, content, mode=mode)
        if directory.exists():
            shutil.rmtree(directory)
        fresh.rename(directory)
    finally:
        shutil.rmtree(fresh, ignore_errors=True)


def as_json(value: object) -> bytes:
    """A bundle's configuration as it is written."""
    return (json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n").encode()
