"""Runs a MONAI bundle or a TorchScript file on one volume as a program of its own: NIfTI in, NIfTI out.

:mod:`client.foreign.teacher` starts it, confined, because it runs code that came with the model (a bundle's
expressions, a TorchScript's graph). This program uses a bundle's ``network_def``, ``preprocessing`` and ``inferer``. It
ignores a bundle's handlers, which could unpickle files, and reads weights as tensors only. It refuses a model whose
output has another shape than its input's grid with one channel for each declared label.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import nibabel as nib
import numpy as np
import torch
from monai.data import MetaTensor
from monai.inferers import Inferer, SimpleInferer, SlidingWindowInferer
from monai.transforms import (
    Compose,
    DivisiblePad,
    EnsureChannelFirst,
    LoadImage,
    NormalizeIntensity,
    Orientation,
    ScaleIntensity,
    Spacing,
)

from client.records.declared import Activation, ForeignKind, Intensity, TeacherDeclaration
from common.errors import ConsiliumError, InvalidInput

LARGEST_STEP = 32
"""Whole volumes are padded to a multiple of this size, because networks halve a volume up to five times."""

INTENSITY: Mapping[Intensity, Callable[[], list[Any]]] = {
    Intensity.Z_SCORE: lambda: [NormalizeIntensity(channel_wise=True)],
    Intensity.UNIT: lambda: [ScaleIntensity(channel_wise=True)],
    Intensity.AS_IS: list,
}


def _find_config(bundle: Path) -> Path:
    """Return the file of a bundle's inference workflow. Refuse a bundle without one."""
    for name in ("inference", "evaluate"):
        for ending in ("json", "yaml", "yml"):
            if (path := bundle / "configs" / f"{name}.{ending}").is_file():
                return path
    raise InvalidInput("MONAI bundle without a workflow", value=bundle.name, limit="configs/inference.json or .yaml")


def _find_weights(bundle: Path) -> Path:
    """Return the file of a bundle's model: TorchScript, or weights for its network. Refuse a bundle without one."""
    for name in ("model.ts", "model.pt"):
        if (path := bundle / "models" / name).is_file():
            return path
    raise InvalidInput("MONAI bundle without a model", value=bundle.name, limit="models/model.pt or models/model.ts")


def answer(declared: TeacherDeclaration, model: Path, image: Path) -> MetaTensor:
    """Predict one volume, on the voxel grid that the model's preprocessing produces.

    Args:
        declared: The teacher's declaration.
        model: The model.
        image: The volume as NIfTI.

    Returns:
        Class probabilities [k, x, y, z] with their affine. # sensitive

    Raises:
        InvalidInput: If the bundle lacks a part, or the output has another shape than declared.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    make = _bundle if declared.kind is ForeignKind.BUNDLE else _torchscript
    network, prepared, inferer = make(declared, model, image, device)
    with torch.inference_mode():
        raw = inferer(prepared[None].as_tensor().to(device, torch.float32), network.to(device).eval())
    if isinstance(raw, list | tuple):  # deep supervision: the first output has full resolution
        raw = raw[0]
    expected = (1, declared.outputs, *prepared.shape[1:])
    if not isinstance(raw, torch.Tensor) or tuple(raw.shape) != expected:
        got = tuple(raw.shape) if isinstance(raw, torch.Tensor) else type(raw).__name__
        raise InvalidInput("the model's output", value=got, limit=f"{expected}: one channel for each declared label")
    return MetaTensor(_activated(raw[0].float().cpu(), declared.activation), affine=prepared.affine)


def _activated(raw: torch.Tensor, activation: Activation) -> torch.Tensor:
    if activation is Activation.SOFTMAX:
        return torch.softmax(raw, dim=0)
    if activation is Activation.NONE:
        return raw
    apart = torch.sigmoid(raw)  # channel 0 is background; overlapping structures are scaled to sum to at most 1
    structures = apart[1:] / apart[1:].sum(dim=0, keepdim=True).clamp(min=1)
    return torch.cat([1 - structures.sum(dim=0, keepdim=True), structures])


Made = tuple[torch.nn.Module, MetaTensor, Inferer]


def _torchscript(declared: TeacherDeclaration, model: Path, image: Path, device: torch.device) -> Made:
    steps: list[Any] = [LoadImage(image_only=True), EnsureChannelFirst()]
    steps.append(Orientation(axcodes="RAS", labels=(("L", "R"), ("P", "A"), ("I", "S"))))
    steps += [Spacing(pixdim=declared.spacing_mm, mode="bilinear", padding_mode="border")]
    steps += INTENSITY[declared.intensity]()
    inferer: Inferer = SimpleInferer()
    if declared.patch:
        inferer = SlidingWindowInferer(roi_size=declared.patch, sw_batch_size=1, overlap=0.25, mode="gaussian")
    else:
        steps.append(DivisiblePad(k=LARGEST_STEP))
    return torch.jit.load(str(model), map_location=device), Compose(steps)(str(image)), inferer


def _bundle(declared: TeacherDeclaration, model: Path, image: Path, device: torch.device) -> Made:
    from monai.bundle import ConfigParser

    os.chdir(model)
    sys.path.insert(0, str(model))  # a bundle's own scripts
    parser = ConfigParser()
    parser.read_config(str(_find_config(model)))
    if (model / "configs" / "metadata.json").is_file():
        parser.read_meta(str(model / "configs" / "metadata.json"))
    for name, value in (("bundle_root", str(model)), ("device", device)):
        parser[name] = value
    missing = [name for name in ("network_def", "preprocessing") if name not in parser.get()]
    if missing:
        raise InvalidInput("the bundle's workflow lacks parts", value=missing, limit="network_def and preprocessing")
    weights = _find_weights(model)
    if weights.suffix == ".ts":
        network: torch.nn.Module = torch.jit.load(str(weights), map_location=device)
    else:
        network = parser.get_parsed_content("network_def")
        network.load_state_dict(_state(weights))
    inferer = parser.get_parsed_content("inferer") if "inferer" in parser.get() else SimpleInferer()
    prepared = parser.get_parsed_content("preprocessing")({"image": str(image)})["image"]
    if not isinstance(prepared, MetaTensor) or prepared.ndim != 4:
        raise InvalidInput("the bundle's preprocessing", limit="one image [c, x, y, z] with its affine")
    return network, prepared, inferer


def _state(path: Path) -> Mapping[str, torch.Tensor]:
    """Read weights as tensors only, stored either plainly or under the key ``model`` or ``state_dict``."""
    state = torch.load(path, weights_only=True, map_location="cpu")
    for name in ("model", "state_dict"):
        if isinstance(state, Mapping) and isinstance(state.get(name), Mapping):
            state = state[name]
    return dict(state)


def main() -> None:
    """Predict one volume: ``python -m client.foreign.model DECLARED MODEL IN OUT``."""
    declared, model, image, out = sys.argv[1:]
    try:
        probabilities = answer(TeacherDeclaration.read(Path(declared)), Path(model), Path(image))
    except ConsiliumError as error:
        sys.exit(str(error))
    except Exception as error:  # noqa: BLE001  # report any error of the model in one line
        sys.exit(f"{type(error).__name__}: {error}")
    array = np.moveaxis(probabilities.numpy(), 0, -1)
    nib.save(nib.Nifti1Image(array, np.asarray(probabilities.affine, dtype=np.float64)), out)


if __name__ == "__main__":
    main()
