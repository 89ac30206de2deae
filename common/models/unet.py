"""The segmentation networks: MONAI's own U-Nets by name, with instance norm, initialised from an explicit seed.

Instance norm without parameters keeps no running statistics, so nothing about training volumes is stored outside the
weights. Weights are read with ``weights_only`` and checked against the network: a file that holds anything else is
refused.
"""

from __future__ import annotations

import contextlib
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


def definition(network: str, channels: tuple[int, ...], *, in_channels: int, out_channels: int) -> dict[str, object]:
    """A network as MONAI's configuration language has it, and a bundle says it.

    ``unet``: UNet with one convolution a level, stride 2 from the first on, so that its finest features are at half
    resolution: small and fast. ``residual``: the same with two convolutions a level and shortcuts. ``paper-unet``:
    BasicUNet of five levels, two convolutions each, max-pooling between them, the finest skip at full resolution: the
    "vanilla 3D U-Net with four layers of pooling" of Fay et al. 2021. ``dynunet``: nnU-Net's plain network, two
    convolutions a level, strides for pooling, the finest skip at full resolution.
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


def recipe_of(found: Mapping[str, Any]) -> TrainingConfig:
    """The network and channels of a :func:`definition`; KeyError or TypeError for what is none."""
    match found["_target_"]:
        case "BasicUNet":
            return TrainingConfig(channels=tuple(found["features"][:-1]), network="paper-unet")
        case "DynUNet":
            return TrainingConfig(channels=tuple(found["filters"]), network="dynunet")
        case "UNet":
            network = "residual" if found["num_res_units"] else "unet"
            return TrainingConfig(channels=tuple(found["channels"]), network=network)
    raise KeyError(found["_target_"])


def build_unet(
    channels: tuple[int, ...], *, in_channels: int, out_channels: int, network: str = "unet", seed: int = 0
) -> torch.nn.Module:
    """The named network of ``len(channels)`` levels, mapping [n, in, x, y, z] to logits [n, out, x, y, z].

    The same ``seed`` gives the same weights; the process's global random state is neither read nor advanced. Grid
    sizes must be multiples of 2^(levels - 1).
    """
    words = definition(network, channels, in_channels=in_channels, out_channels=out_channels)
    kind = _KINDS[str(words.pop("_target_"))]
    with torch.device("meta"), contextlib.redirect_stdout(io.StringIO()):  # no random numbers: all is set below
        model: torch.nn.Module = kind(**words)
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
    """The network that a recipe names, for a study's channels and labels (:func:`build_unet`)."""
    sizes = {"in_channels": len(data.channels), "out_channels": len(data.labels)}
    return build_unet(recipe.channels, network=recipe.network, seed=seed, **sizes)


_KINDS: dict[str, type[torch.nn.Module]] = {"UNet": UNet, "BasicUNet": BasicUNet, "DynUNet": DynUNet}


def input_weights(model: torch.nn.Module) -> tuple[str, ...]:
    """Names of the weights that the image itself is multiplied with: those of every convolution that is given it."""
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
    """The state dict as ``torch.save`` writes it; equal weights give equal bytes, so their SHA-256 names a model."""
    return tensors_to_bytes(model.state_dict())


def tensors_to_bytes(tensors: Mapping[str, torch.Tensor]) -> bytes:
    """Named tensors as ``torch.save`` writes them; equal tensors give equal bytes."""
    stream = io.BytesIO()
    torch.save({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}, stream)
    return stream.getvalue()


def save_weights(path: Path, model: torch.nn.Module, *, mode: int = 0o644) -> str:
    """Write the weights so that a crash leaves the old file or the new one; returns the file's SHA-256."""
    content = weights_to_bytes(model)
    write_atomically(path, content, mode=mode)
    return sha256_bytes(content)


def load_weights(path: Path, model: torch.nn.Module, *, expected_hash: str | None = None) -> str:
    """Load what :func:`save_weights` wrote into ``model``; returns the file's SHA-256.

    Raises InvalidInput for a missing file, another hash than expected, anything that is not plain weights, or weights
    of another network.
    """
    try:
        if path.stat().st_size > MAX_WEIGHTS_BYTES:
            raise InvalidInput("weights file is too large", value=path.name, limit=f"{MAX_WEIGHTS_BYTES} bytes")
        content = path.read_bytes()
    except OSError as error:
        raise InvalidInput("weights file cannot be read", value=str(path), remedy="train again") from error
    found = sha256_bytes(content)
    if expected_hash is not None and found != expected_hash:
        raise InvalidInput(
            "the weights file differs from the one on record", value=found, limit=expected_hash, remedy="train again"
        )
    weights_from_bytes(content, model)
    return found


def weights_from_bytes(content: bytes, model: torch.nn.Module) -> None:
    """Load the bytes of :func:`weights_to_bytes` into ``model``; InvalidInput unless they are exactly its weights."""
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
    """torch.save writes a zip file of stored entries. Older pickles, and entries that unpack to more, are not read."""
    if content[:4] != b"PK\x03\x04":
        raise pickle.UnpicklingError("no zip file")
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        entries = archive.infolist()
    stored = all(e.compress_type == zipfile.ZIP_STORED and e.compress_size == e.file_size for e in entries)
    if not stored or sum(entry.file_size for entry in entries) > len(content):
        raise pickle.UnpicklingError("entries that unpack to more than they are")
