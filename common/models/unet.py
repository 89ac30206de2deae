"""Builds the segmentation networks, MONAI's own U-Nets with instance norm, and reads and writes their weights.

Every training and every prediction calls this module. A network is initialised from an explicit seed. Its instance norm
has no parameters and keeps no running statistics, so the weights are all that a network stores about its training
volumes. Weights are read with ``weights_only`` and compared with the network's names and shapes. A file that holds
anything but the network's weights is refused.
"""

from __future__ import annotations

import atexit
import gc
import io
import math
import pickle
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from monai.networks.nets import BasicUNet, DynUNet, UNet

from common.canonical import sha256_bytes
from common.config import DataConfig, TrainingConfig
from common.errors import InvalidInput
from common.objects import write_atomically
from common.reading import parsing

MAX_WEIGHTS_BYTES = 1 << 30

# At exit Python searches all objects of PyTorch and MONAI for garbage, for .7 s; it skips frozen objects.
atexit.register(gc.freeze)


def definition(network: str, channels: tuple[int, ...], *, in_channels: int, out_channels: int) -> dict[str, object]:
    """Return a network's definition in MONAI's configuration language, which bundles contain.

    ``unet``        MONAI's UNet with one convolution per level and stride 2 from the first level on. It is small and
                    fast; its finest features have half the image's resolution.
    ``residual``    As ``unet``, with two convolutions per level and residual connections.
    ``paper-unet``  BasicUNet of five levels with two convolutions each, max-pooling between them, and the finest skip
                    at full resolution: the "vanilla 3D U-Net with four layers of pooling" of Fay et al. 2021.
    ``dynunet``     nnU-Net's plain network: two convolutions per level, strides for pooling, the finest skip at full
                    resolution.

    Args:
        network: One of these names.
        channels: Feature maps of each level.
        in_channels: Channels of the image.
        out_channels: Number of classes.

    Returns:
        The definition, with its class under ``_target_``.

    >>> definition("unet", (2, 4), in_channels=1, out_channels=2)["_target_"]
    'UNet'
    """
    ends = {"spatial_dims": 3, "in_channels": in_channels, "out_channels": out_channels}
    levels, plain = len(channels), ["INSTANCE", {"affine": False}]
    if network == "paper-unet":
        return {"_target_": "BasicUNet", **ends, "features": [*channels, channels[0]], "norm": plain}
    if network == "dynunet":
        sizes = {"kernel_size": [3] * levels, "strides": [1] + [2] * (levels - 1)}
        sizes |= {"upsample_kernel_size": [2] * (levels - 1), "filters": list(channels)}
        return {"_target_": "DynUNet", **ends, **sizes, "norm_name": plain}
    strides = [2] * (levels - 1)
    units = 2 if network == "residual" else 0
    sizes = {"channels": list(channels), "strides": strides}
    return {"_target_": "UNet", **ends, **sizes, "num_res_units": units, "norm": "INSTANCE"}


def recipe_of(workflow: Mapping[str, Any]) -> TrainingConfig:
    """Return the network's name and channels, and the patch, from the workflow of a bundle.

    Args:
        workflow: The workflow, with a result of :func:`definition` under ``network_def``.

    Returns:
        A recipe with default training settings.

    Raises:
        KeyError: If a field is missing or the network is unknown.
        TypeError: If a field has another type.
    """
    found, patch = workflow["network_def"], tuple(workflow.get("inferer", {}).get("roi_size", ()))
    match found["_target_"]:
        case "BasicUNet":
            return TrainingConfig(channels=tuple(found["features"][:-1]), network="paper-unet", patch=patch)
        case "DynUNet":
            return TrainingConfig(channels=tuple(found["filters"]), network="dynunet", patch=patch)
        case "UNet":
            network = "residual" if found["num_res_units"] else "unet"
            return TrainingConfig(channels=tuple(found["channels"]), network=network, patch=patch)
    raise KeyError(found["_target_"])


def build_unet(
    channels: tuple[int, ...], *, in_channels: int, out_channels: int, network: str = "unet", seed: int = 0
) -> torch.nn.Module:
    """Build a network that maps [n, in, x, y, z] to logits [n, out, x, y, z], with weights drawn from a seed.

    Equal seeds give equal weights. The process's global random state is neither read nor changed.

    Args:
        channels: Feature maps of each level. Grid sizes must be multiples of 2^(levels − 1), except for ``paper-unet``,
            which pads other sizes.
        in_channels: Channels of the image.
        out_channels: Number of classes.
        network: Name of the network (:func:`definition`).
        seed: Seed of the weights.

    Returns:
        The network on the CPU.

    Raises:
        TypeError: If the network has a layer for which no initialisation is defined.
    """
    words = definition(network, channels, in_channels=in_channels, out_channels=out_channels)
    kind = _KINDS[str(words.pop("_target_"))]
    with torch.device("meta"):  # no random numbers; weights are set below
        model: torch.nn.Module = kind(**words).float()  # whatever the process's default type
    model.to_empty(device="cpu")
    generator = torch.Generator().manual_seed(seed)
    for module in model.modules():
        if isinstance(module, torch.nn.Conv3d | torch.nn.ConvTranspose3d):
            bound = 1 / math.sqrt(module.weight[0].numel())  # PyTorch's own default, with our generator
            torch.nn.init.uniform_(module.weight, -bound, bound, generator=generator)
            if module.bias is not None:
                torch.nn.init.uniform_(module.bias, -bound, bound, generator=generator)
        elif isinstance(module, torch.nn.PReLU):
            torch.nn.init.constant_(module.weight, 0.25)
        elif next(module.parameters(recurse=False), None) is not None or next(module.buffers(recurse=False), None):
            raise TypeError(f"no initialisation for {type(module).__name__}")
    return model


def network_for(recipe: TrainingConfig, data: DataConfig, *, seed: int = 0) -> torch.nn.Module:
    """Build the network of a recipe for a study's channels and labels.

    Args:
        recipe: Names the network and its channels.
        data: The study's data settings.
        seed: Seed of the weights.

    Returns:
        The network of :func:`build_unet`.
    """
    return network_of(recipe, channels=len(data.channels), classes=len(data.labels), seed=seed)


def network_of(recipe: TrainingConfig, *, channels: int, classes: int, seed: int = 0) -> torch.nn.Module:
    """Build the network of a recipe for images with a number of channels.

    Args:
        recipe: Names the network and its feature maps.
        channels: Channels of the image.
        classes: Number of classes, the background included.
        seed: Seed of the weights.

    Returns:
        The network of :func:`build_unet`.
    """
    return build_unet(recipe.channels, network=recipe.network, in_channels=channels, out_channels=classes, seed=seed)


_KINDS: dict[str, type[torch.nn.Module]] = {"UNet": UNet, "BasicUNet": BasicUNet, "DynUNet": DynUNet}


def input_weights(model: torch.nn.Module) -> tuple[str, ...]:
    """Return the names of the weights of every convolution whose input is the image itself.

    Args:
        model: The network.

    Returns:
        Names in the state dict.
    """
    first = next(module for module in model.modules() if isinstance(module, torch.nn.Conv3d))
    image = torch.zeros(1, first.in_channels, 64, 32, 32)
    found: list[str] = []
    hooks = [
        module.register_forward_pre_hook(
            lambda _module, given, name=name: found.append(f"{name}.weight") if given[0] is image else None
        )
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Conv3d)
    ]
    with torch.no_grad():
        model(image)
    for hook in hooks:
        hook.remove()
    return tuple(found)


def weights_to_bytes(model: torch.nn.Module) -> bytes:
    """Return a network's state dict as ``torch.save`` writes it. Equal weights give equal bytes, so their SHA-256
    identifies the weights.

    Args:
        model: The network.

    Returns:
        The bytes.
    """
    return tensors_to_bytes(model.state_dict())


def tensors_to_bytes(tensors: Mapping[str, torch.Tensor]) -> bytes:
    """Return named tensors as ``torch.save`` writes them. Equal tensors give equal bytes.

    Args:
        tensors: Tensors by name.

    Returns:
        The bytes.
    """
    stream = io.BytesIO()
    torch.save({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}, stream)
    return stream.getvalue()


def save_weights(path: Path, model: torch.nn.Module, *, mode: int = 0o644) -> str:
    """Write a network's weights. A crash leaves either the old file or the new one.

    Args:
        path: The file.
        model: The network.
        mode: Permissions of the file.

    Returns:
        SHA-256 of the file.
    """
    content = weights_to_bytes(model)
    name = sha256_bytes(content)
    write_atomically(path, content, mode=mode)
    return name


def load_weights(path: Path, model: torch.nn.Module, *, expected_hash: str | None = None) -> str:
    """Load the file that :func:`save_weights` wrote into a network.

    Args:
        path: The file.
        model: The network; its weights are replaced.
        expected_hash: SHA-256 that the file must have; None for any.

    Returns:
        SHA-256 of the file.

    Raises:
        InvalidInput: If the file is missing, too large, has another hash, or does not hold exactly this network's
            weights.
    """
    try:
        if path.stat().st_size > MAX_WEIGHTS_BYTES:
            raise InvalidInput("weights file is too large", value=path.name, limit=f"at most {MAX_WEIGHTS_BYTES} bytes")
        content = path.read_bytes()
    except OSError as error:
        raise InvalidInput(
            f"weights file cannot be read ({error.strerror or type(error).__name__})",
            value=str(path),
            remedy="check that the file is there and readable; if it is lost, train again",
        ) from error
    found = sha256_bytes(content)
    if expected_hash is not None and found != expected_hash:
        raise InvalidInput(
            "SHA-256 of the weights file differs from the one on record",
            value=found,
            limit=expected_hash,
            remedy="put the recorded file back from a backup, or train again",
        )
    weights_from_bytes(content, model)
    return found


def weights_from_bytes(content: bytes, model: torch.nn.Module) -> None:
    """Load the bytes of :func:`weights_to_bytes` into a network.

    Args:
        content: The bytes.
        model: The network; its weights are replaced.

    Raises:
        InvalidInput: If the bytes do not hold this network's weights and nothing else, or if a weight is not finite.
    """
    with parsing("weights file holds something other than weights", remedy="train or fetch it again"):
        _check_plain_zip(content)
        state = torch.load(io.BytesIO(content), weights_only=True, map_location="cpu")
    expected = model.state_dict()
    fits = (
        isinstance(state, dict)
        and state.keys() == expected.keys()
        and all(
            isinstance(tensor, torch.Tensor)
            and tensor.shape == expected[name].shape
            and tensor.dtype == expected[name].dtype
            and tensor.layout == torch.strided
            and tensor.device.type == "cpu"
            for name, tensor in state.items()
        )
    )
    if not fits:
        raise InvalidInput(
            "the weights belong to another network",
            remedy="check the recipe's network and channels, and the study's labels",
        )
    if not all(torch.isfinite(tensor).all() for tensor in state.values()):
        raise InvalidInput("weights hold NaN or infinite values", remedy="train again with a lower learning rate")
    model.load_state_dict(state)


def _check_plain_zip(content: bytes) -> None:
    """Refuse anything but a zip file of uncompressed entries, which is what torch.save writes."""
    if content[:4] != b"PK\x03\x04":
        raise pickle.UnpicklingError("no zip file")
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        entries = archive.infolist()
    stored = all(e.compress_type == zipfile.ZIP_STORED and e.compress_size == e.file_size for e in entries)
    if not stored or sum(entry.file_size for entry in entries) > len(content):
        raise pickle.UnpicklingError("compressed entries")
