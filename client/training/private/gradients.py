"""Computes per-patient gradients, and refuses networks and losses that couple patients.

A patient's loss is a function of that patient only. A patient's patches are averaged within its loss, so they give one
gradient and one clip. BatchNorm and other statistics over patients would make one patient's gradient depend on
another's, and clipping would then bound nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from jaxtyping import Float
from torch.func import functional_call, grad_and_value, vmap

from common.errors import InvalidInput

Weights = Mapping[str, torch.Tensor]

PatientLoss = Callable[[Weights, torch.Tensor, torch.Tensor], Float[torch.Tensor, ""]]
"""A function from the weights, one patient's k patches [k, c, x, y, z] and their targets to that patient's loss."""

Gradients = Callable[[Weights, torch.Tensor, torch.Tensor], tuple[dict[str, torch.Tensor], torch.Tensor]]
"""A function from the weights, k patches of each of b patients [b, k, c, x, y, z] and their targets to gradients
[b, *shape] by parameter name and losses [b]. # sensitive"""

_COUPLING = (torch.nn.modules.batchnorm._BatchNorm,)


def refuse_coupling(model: torch.nn.Module) -> None:
    """Refuse a network that mixes the patients of a batch, keeps statistics, or draws randomness of its own.

    Args:
        model: The network.

    Raises:
        InvalidInput: For BatchNorm, running statistics or dropout.
    """
    for name, module in model.named_modules():
        reason = ""
        if isinstance(module, _COUPLING) and not isinstance(module, torch.nn.modules.instancenorm._InstanceNorm):
            reason = "no BatchNorm: it makes one patient's gradient depend on the other patients of the batch"
        elif getattr(module, "track_running_stats", False):
            reason = "no running statistics: they would be released without noise"
        elif isinstance(module, torch.nn.modules.dropout._DropoutNd) and module.p > 0:
            reason = "no dropout: its masks are drawn for the batch, not for each patient"
        if reason:
            raise InvalidInput(
                f"module {name or type(module).__name__} cannot be trained privately",
                value=type(module).__name__,
                limit=reason,
                remedy="use group or instance normalisation, without running statistics",
            )


def refuse_pooled(loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> None:
    """Refuse a loss that does not give one value for each patient as a function of that patient only.

    The loss of the first of three random patients is compared with the loss of that patient alone. A Dice loss that is
    pooled over the batch is therefore refused.

    Args:
        loss: Loss of logits and targets [b, l, x, y, z].

    Raises:
        InvalidInput: If the loss is pooled.
    """
    rng = torch.Generator().manual_seed(1)
    logits = torch.randn(3, 2, 4, 4, 4, generator=rng, dtype=torch.float64)
    target = torch.softmax(torch.randn(3, 2, 4, 4, 4, generator=rng, dtype=torch.float64), dim=1)
    both, alone = loss(logits, target), loss(logits[:1], target[:1])
    if both.shape != (3,) or alone.shape != (1,) or not torch.allclose(both[:1], alone, rtol=1e-12, atol=1e-12):
        raise InvalidInput(
            "the loss is pooled over patients",
            value=tuple(both.shape),
            limit="one value for each patient, which depends on this patient only",
            remedy="reduce over voxels and classes, not over the batch",
        )


def segmentation_loss(
    model: torch.nn.Module, each: Callable[[torch.Tensor, torch.Tensor], Float[torch.Tensor, "k"]]
) -> PatientLoss:
    """Return a function that computes a network's loss on one patient, the mean over the patient's patches.

    Args:
        model: The network.
        each: Loss of each patch.

    Returns:
        The loss as a function of weights, patches and targets.

    Raises:
        InvalidInput: If the network makes one patient's gradient depend on another patient.
    """
    refuse_coupling(model)

    def loss(weights: Weights, patches: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return each(functional_call(model, dict(weights), (patches,)), targets).mean()

    return loss


def per_patient(loss: PatientLoss) -> Gradients:
    """Return a function that computes the gradients and losses of all patients in a chunk at once.

    Args:
        loss: Loss of one patient.

    Returns:
        The function. The weights that it is given must not require gradients.
    """
    each = vmap(grad_and_value(loss), in_dims=(None, 0, 0))
    return lambda weights, patches, targets: each(dict(weights), patches, targets)


def plain_weights(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return a model's trainable parameters, copied and detached.

    Args:
        model: The network.

    Returns:
        Parameters by name.

    Raises:
        InvalidInput: If the network has buffers, which would keep state outside the parameters.
    """
    if next(model.buffers(), None) is not None:
        raise InvalidInput(
            "a network with buffers cannot be trained privately",
            limit="networks with parameters only",
            remedy="use group or instance normalisation, without running statistics",
        )
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def load_weights_into(model: torch.nn.Module, weights: Weights) -> None:
    """Copy weights into a model's parameters.

    Args:
        model: The network; it is changed in place.
        weights: Parameters by name.
    """
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(weights[name])
