"""Tests that per-patient gradients equal plain autograd's, that patches share one clip, and that coupled networks are
refused.
"""

from __future__ import annotations

import pytest
import torch
from monai.losses import DiceLoss
from torch.func import functional_call

from client.training.private.clipped_sums import integer_sum, one_part
from client.training.private.gradients import (
    per_patient,
    plain_weights,
    refuse_coupling,
    refuse_pooled,
    segmentation_loss,
)
from common.errors import InvalidInput
from common.models.fit import soft_dice_ce
from common.models.unet import build_unet
from tests.client.training.private.one_at_a_time import one_at_a_time


def patients(n: int, patches: int = 1, grid: int = 8, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    rng = torch.Generator().manual_seed(seed)
    x = torch.randn(n, patches, 1, grid, grid, grid, generator=rng)
    labels = torch.randint(0, 3, (n, patches, grid, grid, grid), generator=rng)
    return x, torch.nn.functional.one_hot(labels, 3).movedim(-1, 2).float()


@pytest.fixture
def net() -> torch.nn.Module:
    return build_unet((4, 8), in_channels=1, out_channels=3, seed=1)


def test_patients_of_a_chunk_have_the_gradients_that_each_has_alone(net: torch.nn.Module) -> None:
    loss, weights, (x, y) = segmentation_loss(net, soft_dice_ce), plain_weights(net), patients(4, patches=2)
    fast, fast_losses = per_patient(loss)(weights, x, y)
    slow, slow_losses = one_at_a_time(loss)(weights, x, y)
    torch.testing.assert_close(fast_losses, slow_losses)
    for name in weights:
        torch.testing.assert_close(fast[name], slow[name], rtol=1e-4, atol=1e-6)


def test_the_patches_of_a_patient_are_averaged_before_the_one_clip(net: torch.nn.Module) -> None:
    loss, weights, (x, y) = segmentation_loss(net, soft_dice_ce), plain_weights(net), patients(1, patches=3)
    parts = one_part(tuple(weights), 1e-3)  # every gradient is clipped
    together = integer_sum(per_patient(loss)(weights, x, y)[0], parts)
    leaves = {name: w.clone().requires_grad_() for name, w in weights.items()}
    mean = soft_dice_ce(functional_call(net, leaves, (x[0],)), y[0]).mean()
    mean.backward()
    by_hand = integer_sum({name: leaf.grad[None] for name, leaf in leaves.items() if leaf.grad is not None}, parts)
    size = torch.cat([entry.flatten().double() for entry in together.values()]).norm()
    gap = torch.cat([(together[n] - by_hand[n]).flatten().double() for n in together]).norm()
    assert gap < 1e-3 * size
    as_rows = integer_sum(
        per_patient(loss)(weights, x[0][:, None], y[0][:, None])[0], parts
    )  # rows instead of patients
    rows = torch.cat([entry.flatten().double() for entry in as_rows.values()]).norm()
    assert rows > 1.5 * size  # three clips: the bound of one patient is broken


@pytest.mark.parametrize(
    "module",
    [
        torch.nn.BatchNorm3d(4),
        torch.nn.SyncBatchNorm(4),
        torch.nn.InstanceNorm3d(4, track_running_stats=True),
        torch.nn.Dropout(0.5),
    ],
)
def test_what_couples_patients_is_refused_with_the_reason(module: torch.nn.Module) -> None:
    with pytest.raises(InvalidInput, match="privately"):
        segmentation_loss(torch.nn.Sequential(torch.nn.Conv3d(1, 4, 1), module), soft_dice_ce)


def test_group_and_instance_norm_are_welcome(net: torch.nn.Module) -> None:
    refuse_coupling(torch.nn.Sequential(net, torch.nn.GroupNorm(2, 4), torch.nn.InstanceNorm3d(4)))


def test_a_pooled_dice_is_refused_and_the_training_loss_is_not() -> None:
    pooled = DiceLoss(softmax=True, batch=True, reduction="none")
    with pytest.raises(InvalidInput, match="pooled"):
        refuse_pooled(lambda logits, target: pooled(logits, target).flatten(1).mean(1))
    with pytest.raises(InvalidInput, match="pooled"):
        refuse_pooled(lambda logits, target: soft_dice_ce(logits, target) / len(logits))
    refuse_pooled(soft_dice_ce)
