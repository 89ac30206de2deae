"""The segmentation network: MONAI's UNet with instance norm, initialised from an explicit seed.

Instance norm keeps no running statistics, so nothing about training volumes is stored outside the weights. Weights
are read with ``weights_only`` and checked against the network: a file that holds anything else is refused.
"""

from __future__ import annotations

import io
import math
import pickle
import struct
import zipfile
from collections.abc import Mapping
from pathlib import Path

import torch
from monai.networks.nets import UNet

from common.canonical import sha256_bytes
from common.errors import InvalidInput
from common.objects import write_atomically

MAX_WEIGHTS_BYTES = 1 << 30


def build_unet(channels: tuple[int, ...], *, in_channels: int, out_channels: int, seed: int = 0) -> torch.nn.Module:
    """A UNet of ``len(channels)`` levels, stride 2 between them, mapping [n, in, x, y, z] to logits [n, out, x, y, z].

    The same ``seed`` gives the same weights; the process's global random state is neither read nor advanced. Grid
    sizes must be multiples of 2^(levels - 1).
    """
    with torch.device("meta"):  # draws no random numbers: every parameter is set below
        model: torch.nn.Module = UNet(
            spatial_dims=3,
            in_channels=in_channels,
            out_channels=out_channels,
            channels=channels,
            strides=(2,) * (len(channels) - 1),
            num_res_units=0,
            norm="INSTANCE",
        )
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
            "weights file is not the one recorded", value=found, limit=expected_hash, remedy="train again"
        )
    weights_from_bytes(content, model)
    return found


def weights_from_bytes(content: bytes, model: torch.nn.Module) -> None:
    """Load the bytes of :func:`weights_to_bytes` into ``model``; InvalidInput unless they are exactly its weights."""
    try:
        _check_plain_zip(content)
        state = torch.load(io.BytesIO(content), weights_only=True, map_location="cpu")
    except _UNREADABLE as error:
        raise InvalidInput(
            "weights file holds something other than weights", remedy="train or fetch it again"
        ) from error
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
        raise InvalidInput("weights are of another network", remedy="check the recipe's channels, labels and channels")
    if not all(torch.isfinite(tensor).all() for tensor in state.values()):
        raise InvalidInput("weights hold NaN or infinite values", remedy="train again with a lower learning rate")
    model.load_state_dict(state)


_UNREADABLE = (
    *(pickle.UnpicklingError, RuntimeError, EOFError, ValueError, LookupError, OSError, TypeError, AttributeError),
    *(ArithmeticError, AssertionError, ImportError, zipfile.BadZipFile, struct.error),
)
"""What torch and zipfile raise for bytes nobody honest wrote."""


def _check_plain_zip(content: bytes) -> None:
    """torch.save writes a zip file of stored entries. Older pickles, and entries that unpack to more, are not read."""
    if content[:4] != b"PK\x03\x04":
        raise pickle.UnpicklingError("no zip file")
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        entries = archive.infolist()
    stored = all(e.compress_type == zipfile.ZIP_STORED and e.compress_size == e.file_size for e in entries)
    if not stored or sum(entry.file_size for entry in entries) > len(content):
        raise pickle.UnpicklingError("entries that unpack to more than they are")
