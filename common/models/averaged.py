"""Networks that answer together: the mean of their class probabilities.

The logits are the logarithm of that mean, so that whatever takes a softmax of them has the mean itself.
"""

from __future__ import annotations

import torch
from jaxtyping import Float


class Averaged(torch.nn.ModuleList):  # type: ignore[misc]
    """The mean answer of the networks in it, all of the same inputs and classes."""

    def forward(self, image: Float[torch.Tensor, "n c x y z"]) -> Float[torch.Tensor, "n k x y z"]:
        """Logits whose softmax is the mean of the networks' softmax."""
        each = torch.stack([torch.log_softmax(network(image).float(), dim=1) for network in self])
        return torch.logsumexp(each, dim=0)
