"""Finds the blocks of a MONAI U-Net and the order in which they are computed, for DP-MAC.

DP-MAC is the private form of the method of auxiliary coordinates (:mod:`client.training.private.mac`). A block is a
convolution with its norm and activation, or a MONAI unit that contains several convolutions. The output of every block
but the last is a coordinate z_k, an auxiliary variable of the method. The last block gives the logits. The order of
the blocks is found by one pass that computes shapes and no values.

The module refuses a network with weights outside such blocks, with a block that is used twice, or whose last block is
not its output.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from monai.networks.blocks import Convolution, ResidualUnit, UnetBasicBlock, UnetOutBlock, UpSample
from monai.networks.nets.basic_unet import TwoConv
from torch.func import functional_call

from client.training.private.clipped_sums import ClippingPlan
from client.training.private.gradients import Weights, plain_weights
from common.errors import InvalidInput

KINDS = (
    *(Convolution, ResidualUnit, TwoConv, UpSample, UnetBasicBlock, UnetOutBlock),
    *(torch.nn.Conv3d, torch.nn.ConvTranspose3d),
)
"""Modules that count as a block unless they are inside a larger one."""

Visit = Callable[[str, torch.Tensor], torch.Tensor]
"""A function from a block and its output to the value that later blocks receive instead."""


@dataclass(frozen=True)
class Blocks:
    """A network's blocks in the order in which they are computed.

    Attributes:
        model: The network.
        names: Names of the blocks; the last one gives the logits.
        weights: Parameter names of each block. Every parameter belongs to exactly one block.
    """

    model: torch.nn.Module
    names: tuple[str, ...]
    weights: tuple[tuple[str, ...], ...]
    _shapes: dict[torch.Size, dict[str, torch.Size]] = field(default_factory=dict, init=False, repr=False)

    @property
    def hidden(self) -> tuple[str, ...]:
        """The hidden blocks, whose output is a coordinate z_k: all but the last."""
        return self.names[:-1]

    def parts(self, clip: float) -> ClippingPlan:
        """Return how a patient's gradient is divided for clipping: one part for each of the K blocks.

        Each part is clipped to norm Θ, so the norm of the whole vector is at most √K·Θ. This is the bound √(M·K)·Θ of
        DP-MAC with M = 1 vector of coefficients for each block.

        Args:
            clip: Norm bound Θ of each block's part.

        Returns:
            The parts.
        """
        return ClippingPlan(self.weights, (clip,) * len(self.weights))

    def run(self, weights: Weights, patches: torch.Tensor, visit: Visit) -> torch.Tensor:
        """Compute the logits while replacing each block's output by what ``visit`` returns for it.

        Args:
            weights: Parameters by name.
            patches: Images [k, c, x, y, z].
            visit: Called with each block's name and output; returns the value that later blocks receive.

        Returns:
            Logits [k, l, x, y, z].
        """
        return _run(self.model, self.names, weights, patches, visit)

    def shapes(self, patches: torch.Size) -> dict[str, torch.Size]:
        """Return the shape of each block's output, for all blocks but the last; no values are computed.

        Args:
            patches: Shape of the images, [k, c, x, y, z].

        Returns:
            Shape by block.
        """
        if patches not in self._shapes:
            found: dict[str, torch.Size] = {}
            _run(self.model, self.names, _meta(self.model), torch.empty(patches, device="meta"), _into(found))
            self._shapes[patches] = {name: found[name] for name in self.hidden}
        return self._shapes[patches]


def blocks_of(model: torch.nn.Module) -> Blocks:
    """Find a network's blocks.

    Args:
        model: A 3D segmentation network from images [n, c, x, y, z] to logits.

    Returns:
        Its blocks in the order in which they are computed.

    Raises:
        InvalidInput: If there are fewer than two blocks, a weight is outside them, a block is not used exactly once, or
            the last block's output is not the network's.
    """
    outermost: list[str] = []
    for name, module in model.named_modules():
        inside = any(name.startswith(f"{outer}.") for outer in outermost)
        if isinstance(module, KINDS) and not inside and next(module.parameters(), None) is not None:
            outermost.append(name)
    owner = {name: next((o for o in outermost if name.startswith(f"{o}.")), None) for name in plain_weights(model)}
    loose = [name for name, block in owner.items() if block is None]
    if loose or len(outermost) < 2:
        raise _refused(model, f"weights outside its blocks: {loose[0]}" if loose else "fewer than two blocks")
    calls: list[str] = []
    last: list[torch.Tensor] = []

    def visit(name: str, output: torch.Tensor) -> torch.Tensor:
        calls.append(name)
        last[:] = [output]
        return output

    first = next(module for module in model.modules() if isinstance(module, torch.nn.Conv3d))
    image = torch.empty(1, first.in_channels, 64, 64, 64, device="meta")
    logits = _run(model, tuple(outermost), _meta(model), image, visit)
    if sorted(calls) != sorted(outermost):
        odd = next(name for name in outermost if calls.count(name) != 1)
        raise _refused(model, f"a block, {odd}, that is used {calls.count(odd)} times")
    if last[0] is not logits:
        raise _refused(model, f"a last block, {calls[-1]}, that is not its output")
    weights = tuple(tuple(name for name, block in owner.items() if block == called) for called in calls)
    return Blocks(model, tuple(calls), weights)


def _refused(model: torch.nn.Module, reason: str) -> InvalidInput:
    return InvalidInput(
        "network for dp-mac",
        value=type(model).__name__,
        limit=f"a sequence of blocks; this network has {reason}",
        remedy="use --strategy dp-sgd --per-layer",
    )


def _run(
    model: torch.nn.Module, names: tuple[str, ...], weights: Mapping[str, torch.Tensor], x: torch.Tensor, visit: Visit
) -> torch.Tensor:
    handles = [
        model.get_submodule(name).register_forward_hook(lambda _module, _given, output, name=name: visit(name, output))
        for name in names
    ]
    try:
        logits: torch.Tensor = functional_call(model, dict(weights), (x,))
        return logits
    finally:
        for handle in handles:
            handle.remove()


def _meta(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return the network's weights as shapes without values."""
    return {name: torch.empty(weight.shape, device="meta") for name, weight in model.named_parameters()}


def _into(found: dict[str, torch.Size]) -> Visit:
    def visit(name: str, output: torch.Tensor) -> torch.Tensor:
        found[name] = output.shape
        return output

    return visit
