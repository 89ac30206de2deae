"""Measures the gradients behind a tangent kernel: all rows of a volume together, beside one backward pass each.

One thread.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from benchmarks.run import RATIO, Figure, figure, ratios
from benchmarks.training import GRID, in_turn
from common.models.unet import build_unet
from server.protocols.joint.kernel import ROWS_AT_ONCE, weight_gradients

ROWS = 2 * ROWS_AT_ONCE


def figures() -> Iterator[Figure]:
    """Yield the ratio of both ways, the time of a row and the largest difference between their results."""
    torch.set_num_threads(1)
    model = build_unet((16, 32, 64), in_channels=1, out_channels=3, seed=1)
    weights, generator = list(model.parameters()), torch.Generator().manual_seed(0)
    image, slopes = torch.randn(1, *GRID, generator=generator), torch.randn(ROWS, 3, *GRID, generator=generator)

    def one_by_one() -> torch.Tensor:
        logits = model(image[None])
        rows = [torch.autograd.grad(logits, weights, slope[None], retain_graph=True) for slope in slopes]
        return torch.stack([torch.cat([gradient.flatten() for gradient in row]) for row in rows])

    def together() -> torch.Tensor:
        found = [weight_gradients(model, image, part) for part in slopes.split(ROWS_AT_ONCE)]
        return torch.cat([torch.cat([rows[weight] for weight in weights], dim=1) for rows in found])

    expected = one_by_one()
    error = float((together() - expected).abs().max() / expected.abs().max())
    took = in_turn({"one by one": one_by_one, "together": together})
    beside = ratios(took["together"], took["one by one"])
    yield figure("rows together beside a backward pass each", beside, RATIO)
    yield figure("a row", [each / ROWS for each in took["together"]], "s")
    yield Figure("largest difference, of the largest entry", error, "")
