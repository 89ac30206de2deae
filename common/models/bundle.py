"""Opens a bundle that ``student_bundle`` wrote: returns its network and the data settings that the network needs.

Predictions and evaluations call this module. A bundle is the folder in which a student, or a network that a hospital
adapted, is stored (MONAI's bundle format). Its configuration is read as data: nothing in a bundle is executed, and the
weights file may contain weights only. Bundles that Consilium did not export are refused.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import torch

from common.config import DataConfig, TrainingConfig
from common.data.input_ranges import InputRanges
from common.errors import InvalidInput
from common.models.averaged import Averaged
from common.models.unet import load_weights, network_for, recipe_of
from common.reading import parse_json, parsing

SEEN_WEIGHTS = "models/has-seen-patients-must-not-leave.pt"
"""Weights file of a network that a hospital adapted to its patients. It replaces models/model.pt."""

SECOND = "second_network_def"
"""Key in the workflow of a bundle whose network is the mean of two networks."""


@dataclass(frozen=True, slots=True)
class Bundle:
    """An opened bundle.

    Attributes:
        network: The network with its weights, in evaluation mode.
        data: The data settings it was trained for.
        weights: SHA-256 of the weights file.
        inputs: Value ranges of its public training volumes; None if the bundle does not state them.
        recipe: Training recipe, of which only the network's definition and the patch come from the bundle.
        adapted: True if a hospital trained the network on its patients.
    """

    network: torch.nn.Module
    data: DataConfig
    weights: str
    inputs: InputRanges | None = None
    """Value ranges of its public training volumes; None if the bundle does not state them."""
    recipe: TrainingConfig = field(default_factory=TrainingConfig)
    """Training recipe, of which only the network's definition and the patch come from the bundle."""
    adapted: bool = False
    """True if a hospital trained the network on its patients, with or without differential privacy."""

    @property
    def patch(self) -> tuple[int, ...]:
        """Size of the sliding window in voxels; empty if the network predicts whole volumes."""
        return self.recipe.patch

    @property
    def who(self) -> str:
        """Name of this kind of network in texts and files: ``student`` or ``adapted network``."""
        return "adapted network" if self.adapted else "student"


def open_bundle(directory: Path) -> Bundle:
    """Read a bundle from a directory.

    Args:
        directory: The bundle's directory.

    Returns:
        The opened bundle.

    Raises:
        InvalidInput: If there is no bundle, or Consilium did not export it.
    """
    with parsing("bundle cannot be read", value=str(directory), limit="a bundle that Consilium exported"):
        try:
            names = "metadata.json", "inference.json"
            metadata, inference = (parse_json((directory / "configs" / n).read_bytes(), what=n) for n in names)
        except FileNotFoundError as error:
            raise InvalidInput(
                "there is no student bundle",
                value=str(directory),
                remedy="run `consilium site student pull`, or give a bundle's directory",
            ) from error
        inputs = metadata["network_data_format"]["inputs"]["image"]
        labels = metadata["network_data_format"]["outputs"]["pred"]["channel_def"]
        recipe = recipe_of(inference)
        steps = {t["_target_"]: t for t in inference["preprocessing"]["transforms"]}
        spacing = steps["Spacingd"]["pixdim"]
        data = DataConfig(
            labels=tuple(labels[str(i)] for i in range(len(labels))),
            spacing_mm=tuple(spacing),
            grid=tuple(inputs["spatial_shape"]),
            channels=tuple(inputs["channel_def"][str(i)] for i in range(inputs["num_channels"])),
            regions=tuple(metadata.get("regions", ())),
            normalisation="nonzero" if steps["NormalizeIntensityd"].get("nonzero") else "volume",
        )
        together = SECOND in inference
        ranges = metadata.get("input_ranges")
        inputs_seen = None if ranges is None else InputRanges.from_json(ranges, channels=len(data.channels))
    network = network_for(recipe, data)
    if together:
        network = Averaged([network, network_for(recipe, data)])
    seen = directory / SEEN_WEIGHTS
    weights = load_weights(seen if seen.is_file() else directory / "models" / "model.pt", network)
    network.eval()
    return Bundle(network, data, weights, inputs_seen, recipe, adapted=has_seen_patients(directory))


def has_seen_patients(directory: Path) -> bool:
    """Return whether a bundle's network was trained on a hospital's patients, by its privacy file or its weights' name.

    Args:
        directory: The bundle's directory.

    Returns:
        True if the bundle states it. A student was trained on public volumes and released labels only.
    """
    if (directory / SEEN_WEIGHTS).exists():
        return True
    try:
        facts = parse_json((directory / "configs" / "privacy.json").read_bytes(), what="privacy.json")
        return facts.get("has_seen_patients") is True
    except (OSError, InvalidInput, AttributeError):
        return False
