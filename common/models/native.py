"""Predicts a label map on the voxels of a case's own file, and scores it there if the case has a label map.

`consilium predict` and a site's evaluation call this module. A case whose image or label map is unusable is refused.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float, UInt8

from common.calibration import NOTHING, Reliability, entropy, reliability
from common.config import DataConfig
from common.data.box import Box
from common.data.dataset import Case
from common.data.geometry import voxel_sizes
from common.data.volume import Volume, load_case, load_native_label, to_native
from common.metrics import dice_per_class, hd95_mm, lesion_wise
from common.models.fit import predict


@dataclass(frozen=True, slots=True)
class NativePrediction:
    """A prediction on the voxels of the volume's file, with scores if the case has a label map.

    Attributes:
        volume: The volume.
        label_map: Predicted label map on the file's voxels.
        dice: Dice of each structure; empty without a label map.
        hd95_mm: HD95 of each structure in mm; empty without a label map.
        sure: Calibration of the probabilities (:class:`common.calibration.Reliability`). Without a label map it counts
            no voxel.
        uncertainty: Entropy of each voxel's probabilities divided by its largest possible value, from 0 (certain) to 1;
            None unless requested.
        lesions: For each structure its lesion-wise (Dice, HD95 in mm), where each lesion is scored separately; empty
            unless requested.
    """

    volume: Volume
    label_map: UInt8[np.ndarray, "x y z"]
    dice: tuple[float, ...] = ()
    hd95_mm: tuple[float, ...] = ()
    sure: Reliability = NOTHING
    uncertainty: Float[np.ndarray, "x y z"] | None = None
    lesions: tuple[tuple[float, float], ...] = ()


def predict_native(
    case: Case,
    network: torch.nn.Module,
    data: DataConfig,
    *,
    patch: tuple[int, ...] = (),
    uncertainty: bool = False,
    lesions: bool = False,
    box: Box | None = None,
) -> NativePrediction:
    """Predict a case on the study's grid and resample the probabilities to the file's own voxels.

    Args:
        case: A case that was matched to the study.
        network: The network.
        data: The study's data settings.
        patch: Size of the sliding window in voxels; empty to predict whole volumes.
        uncertainty: True to add the map of uncertainty.
        lesions: True to add scores lesion by lesion.
        box: The part of the file to predict; all other voxels become background. None for the whole file.

    Returns:
        Prediction and scores. HD95 uses the file's own voxel sizes.

    Raises:
        InvalidInput: If the image or the label map is unusable.
    """
    volume, truth = load_native(case, data, box=box)
    found = predict(network, volume.image, patch=patch)
    return on_native(found, volume, truth, data, uncertainty=uncertainty, lesions=lesions)


def load_native(
    case: Case, data: DataConfig, *, box: Box | None = None
) -> tuple[Volume, UInt8[np.ndarray, "x y z"] | None]:
    """Read a case's volume, and its label map on the file's own voxels if it has one.

    Args:
        case: A case that was matched to the study.
        data: The study's data settings.
        box: The part of the file to use; None for the whole file.

    Returns:
        The volume, and the label map; None instead of a label map if the case has none.

    Raises:
        InvalidInput: If a file is unusable.
    """
    volume = load_case(case, data, box=box)
    if case.label is None:
        return volume, None
    return volume, load_native_label(
        case.label, data, volume=volume, mapping=dict(case.label_map), structures=dict(case.structures)
    )


def on_native(
    probabilities: Float[np.ndarray, "k x y z"],
    volume: Volume,
    truth: UInt8[np.ndarray, "i j l"] | None,
    data: DataConfig,
    *,
    uncertainty: bool = False,
    lesions: bool = False,
) -> NativePrediction:
    """Resample probabilities from the study's grid to the file's own voxels, and score them there.

    Args:
        probabilities: Float array [k, x, y, z] on the grid.
        volume: The volume.
        truth: Label map on the file's voxels; None for no scores.
        data: The study's data settings.
        uncertainty: True to add the map of uncertainty.
        lesions: True to add scores lesion by lesion.

    Returns:
        Prediction and scores.
    """
    native = to_native(probabilities, volume)
    found = native.argmax(axis=0).astype(np.uint8)
    unsure = (entropy(native) / np.log(len(native))).astype(np.float32) if uncertainty else None
    if truth is None:
        return NativePrediction(volume, found, uncertainty=unsure)
    x, y, z = voxel_sizes(volume.native_affine).tolist()
    return NativePrediction(
        volume,
        found,
        dice_per_class(found, truth, data.members),
        hd95_mm(found, truth, data.members, spacing_mm=(x, y, z)),
        reliability(native, truth),
        unsure,
        lesion_wise(found, truth, data.members, spacing_mm=(x, y, z)) if lesions else (),
    )
