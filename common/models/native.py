"""A case predicted on its own file's voxels, and scored there where somebody drew it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float, UInt8

from common.calibration import NOTHING, Reliability, entropy, reliability
from common.config import DataConfig
from common.data.dataset import Case
from common.data.geometry import voxel_sizes
from common.data.volume import Volume, load_case, load_native_label, to_native
from common.metrics import dice_per_class, hd95_mm, lesion_wise
from common.models.fit import predict


@dataclass(frozen=True, slots=True)
class NativePrediction:
    """``label_map`` on the voxels of ``volume``'s file; the scores, one a structure, are empty where nobody drew it.

    ``uncertainty``, where it was asked for: entropy over log k, 0 where the network is certain, 1 where it is lost.
    ``lesions``, where asked for: (Dice, HD95) of every structure, lesion by lesion.
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
) -> NativePrediction:
    """Predict on the study's grid and take the probabilities back; HD95 in mm by the file's own voxel sizes.

    InvalidInput for a case that cannot be used, in image or label map.
    """
    volume, truth = load_native(case, data)
    found = predict(network, volume.image, patch=patch)
    return on_native(found, volume, truth, data, uncertainty=uncertainty, lesions=lesions)


def load_native(case: Case, data: DataConfig) -> tuple[Volume, UInt8[np.ndarray, "x y z"] | None]:
    """A case's volume, and its label map on the file's own voxels where somebody drew it."""
    volume = load_case(case, data)
    if case.label is None:
        return volume, None
    return volume, load_native_label(case.label, data, volume=volume, mapping=dict(case.label_map))


def on_native(
    probabilities: Float[np.ndarray, "k x y z"],
    volume: Volume,
    truth: UInt8[np.ndarray, "i j l"] | None,
    data: DataConfig,
    *,
    uncertainty: bool = False,
    lesions: bool = False,
) -> NativePrediction:
    """Probabilities on the study's grid taken to the file's own voxels, and scored there."""
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
