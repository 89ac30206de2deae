"""Writes the student as a MONAI bundle, with the privacy facts of its training data beside the weights.

The server calls this module to export the student. Sites call it to make the same files themselves. A bundle contains
``configs/{metadata,inference,privacy}.json``, ``models/model.pt`` (a plain state dict), ``docs/README.md`` and
``LICENSE``. Every file except the weights is generated from the study, the privacy facts, a few numbers and the
versions of four libraries. A site can therefore generate these files itself, if the server sends it these values and
the weights. A directory that holds something other than a bundle is not overwritten.
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
from common.models.bundle_facts import BundlePrivacy, LibraryVersions, checked_figures
from common.models.unet import weights_to_bytes
from common.objects import write_atomically

METADATA, INFERENCE, PRIVACY = "configs/metadata.json", "configs/inference.json", "configs/privacy.json"
WEIGHTS, README, LICENCE = "models/model.pt", "docs/README.md", "LICENSE"
FILES = (METADATA, INFERENCE, PRIVACY, WEIGHTS, README, LICENCE)
"""Paths of all files of a bundle."""


def bundle_files(
    study: Study,
    *,
    weights: bytes,
    privacy: BundlePrivacy,
    dice: Mapping[str, float] | None = None,
    libraries: LibraryVersions | None = None,
    inputs: InputRanges | None = None,
) -> dict[str, bytes]:
    """Return every file of a bundle by its path. Equal arguments give equal bytes.

    Args:
        study: The study.
        weights: Bytes of the weights file.
        privacy: The privacy facts.
        dice: Measured figures by name.
        libraries: Versions of the libraries; this process's if None.
        inputs: Value ranges of the public volumes.

    Returns:
        File contents by path.

    Raises:
        InvalidInput: If a figure is invalid.
    """
    figures = checked_figures(dice or {})
    return {
        METADATA: as_json(
            metadata(study, privacy, dice=figures, libraries=libraries or LibraryVersions.here(), inputs=inputs)
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
    """Write a bundle. An earlier bundle in the directory is replaced only when the new one is complete.

    Args:
        directory: The bundle's directory.
        study: The study.
        model: The student's network.
        privacy: The privacy facts.
        dice: Measured figures by name.
        inputs: Value ranges of the public volumes.

    Returns:
        SHA-256 of each file by relative path.

    Raises:
        InvalidInput: If the directory holds something that is no bundle.
    """
    if directory.exists() and not (directory / METADATA).is_file() and any(directory.iterdir()):
        raise InvalidInput(
            "directory holds something other than a bundle", value=str(directory), remedy="choose another one"
        )
    weights = weights_to_bytes(model)
    write_bundle(directory, bundle_files(study, weights=weights, privacy=privacy, dice=dice, inputs=inputs))
    return {
        str(path.relative_to(directory)): sha256_file(path) for path in sorted(directory.rglob("*")) if path.is_file()
    }


def write_bundle(directory: Path, files: Mapping[str, bytes], *, mode: int = 0o644) -> None:
    """Write a bundle's files. An earlier directory is replaced only when all new files are written.

    Args:
        directory: The bundle's directory.
        files: File contents by path.
        mode: Permissions of the files; 0o600 if only their owner may read them.
    """
    fresh = directory.with_name(
        f".{directory.name}.tmp"
    )  # a fixed name, so that the next export removes the rest of a crashed one
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
    """Return a configuration's bytes as a bundle stores it.

    Args:
        value: The document.

    Returns:
        Indented JSON in UTF-8.
    """
    return (json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n").encode()
