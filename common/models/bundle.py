"""A student's bundle, as ``student_bundle`` writes it → its network and the data settings it was trained for.

Reads the configuration as data: nothing in a bundle is executed, and its weights are read as weights alone.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import torch

from common.config import DataConfig
from common.data.input_ranges import InputRanges
from common.errors import InvalidInput
from common.models.unet import build_unet, load_weights, recipe_of


@dataclass(frozen=True, slots=True)
class Bundle:
    """``weights`` is the SHA-256 of models/model.pt; ``patch`` the size of the sliding window, empty for none."""

    network: torch.nn.Module
    data: DataConfig
    weights: str
    patch: tuple[int, ...] = ()
    inputs: InputRanges | None = None
    """What the public volumes look like that it was trained on; None where the bundle does not say."""


def open_bundle(directory: Path) -> Bundle:
    """Raises InvalidInput where there is no bundle, or not one that Consilium exported."""
    try:
        metadata = json.loads((directory / "configs" / "metadata.json").read_text(encoding="utf-8"))
        inference = json.loads((directory / "configs" / "inference.json").read_text(encoding="utf-8"))
        inputs = metadata["network_data_format"]["inputs"]["image"]
        labels = metadata["network_data_format"]["outputs"]["pred"]["channel_def"]
        recipe = recipe_of(inference["network_def"])
        steps = {t["_target_"]: t for t in inference["preprocessing"]["transforms"]}
        spacing = steps["Spacingd"]["pixdim"]
        window = inference.get("inferer", {}).get("roi_size", [])
        data = DataConfig(
            labels=tuple(labels[str(i)] for i in range(len(labels))),
            spacing_mm=tuple(spacing),
            grid=tuple(inputs["spatial_shape"]),
            channels=tuple(inputs["channel_def"][str(i)] for i in range(inputs["num_channels"])),
            regions=tuple(metadata.get("regions", ())),
            normalisation="nonzero" if steps["NormalizeIntensityd"].get("nonzero") else "volume",
        )
        ranges = metadata.get("input_ranges")
        seen = None if ranges is None else InputRanges.from_json(ranges, channels=len(data.channels))
    except FileNotFoundError as error:
        raise InvalidInput(
            "there is no student bundle",
            value=str(directory),
            remedy="run `consilium site student pull`, or give a bundle's directory",
        ) from error
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise InvalidInput(
            "bundle cannot be read", value=str(directory), limit="one that Consilium exported"
        ) from error
    network = build_unet(
        recipe.channels, network=recipe.network, in_channels=len(data.channels), out_channels=len(data.labels)
    )
    weights = load_weights(directory / "models" / "model.pt", network)
    network.eval()
    return Bundle(network=network, data=data, weights=weights, patch=tuple(int(n) for n in window), inputs=seen)
