"""Computes per-patient gradients by plain autograd, one patient at a time: the oracle of ``per_patient``."""

from __future__ import annotations

import torch

from client.training.private.gradients import Gradients, PatientLoss, Weights


def one_at_a_time(loss: PatientLoss) -> Gradients:
    def gradients(
        weights: Weights, patches: torch.Tensor, targets: torch.Tensor
    ) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        rows, losses = [], []
        for own, wanted in zip(patches, targets, strict=True):
            leaves = {name: tensor.detach().clone().requires_grad_() for name, tensor in weights.items()}
            value = loss(leaves, own, wanted)
            found = torch.autograd.grad(value, list(leaves.values()), allow_unused=True, materialize_grads=True)
            rows.append(dict(zip(leaves, found, strict=True)))
            losses.append(value.detach())
        return {name: torch.stack([row[name] for row in rows]) for name in weights}, torch.stack(losses)

    return gradients
