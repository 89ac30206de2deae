"""Combines networks by the mean of their class probabilities.

The returned logits are the logarithm of that mean, so their softmax is the mean.
"""

from __future__ import annotations

import torch
from jaxtyping import Float


class Averaged(torch.nn.ModuleList):  # type: ignore[misc]
    """A module that averages the class probabilities of its networks, which have the same inputs and classes."""

    def forward(self, image: Float[torch.Tensor, "n c x y z"]) -> Float[torch.Tensor, "n k x y z"]:
        """Return logits whose softmax is the mean of the networks' softmax.

        Args:
            image: Tensor [n, c, x, y, z] of n volumes with c channels.

        Returns:
            Logits [n, k, x, y, z] for k classes.
        """
        each = torch.stack([torch.log_softmax(network(image).float(), dim=1) for network in self])
        return torch.logsumexp(each, dim=0)
