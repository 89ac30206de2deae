"""Measures DP-MAC in 3D with second-order information of the last block, beside plain DP-MAC: Dice at one ε.

The last block of ``unet`` is linear, a transposed convolution. Besides every block's first-order coefficients, one more
part is released: the diagonal of C = ½Σ∂²T for the cross-entropy, averaged over a patient's images and clipped by
``CURVATURE``. It takes ``--share`` of Σ1/r², so all parts remain one Gaussian mechanism, and all noise grows by 1/√(1 −
share). The mean curvature over steps is post-processing. It serves either five steps of Adam on the noisy quadratic
(``quadratic``) or one damped Newton step (``newton``).

    python -m benchmarks.second_order --data Task04_Hippocampus --start public --seeds 2
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch.func import grad, vmap

from client.records.journal import TrainingJournal
from client.training.contract import VoterData
from client.training.private import teachers
from client.training.private.clipped_sums import ClippingPlan, integer_sum
from client.training.private.mac import Penalty, VolumeMac, coordinates, objective
from client.training.private.teachers import Setup, train_privately
from common.config import TrainingConfig
from common.data.split import SplitCounts
from common.models.fit import predict, soft_dice_ce
from research.command_shared import study_data
from research.private_volumes import SharedTerms, bench_of, scores
from research.roles import BenchData

NETWORK = TrainingConfig(channels=(16, 32, 64))
CURVATURE = 0.04
"""Clipping norm of a patient's diagonal; the median norm at the start of training is .03 to .04."""

KEPT, TIMES = 0.9, 5
"""Weight of the earlier mean curvature, and number of steps on a quadratic."""


@dataclass(frozen=True, slots=True)
class How:
    """The variant that is tried.

    Attributes:
        use: ``quadratic``, ``newton``, or empty for plain DP-MAC.
        share: Share of Σ1/r² for the curvature.
        damping: Damping of the Newton step.
        newton_rate: Learning rate of the Newton step.
    """

    use: str
    share: float
    damping: float
    newton_rate: float


class SecondOrder(VolumeMac):
    """Trains by DP-MAC with the noisy diagonal of the last block's curvature."""

    def __init__(self, setup: Setup, how: How) -> None:
        s = setup.settings
        penalty = Penalty(s.mu, s.mu_growth, s.z_steps, s.z_rate)
        super().__init__(setup.model, setup.patients, setup.terms, penalty=penalty, steps=s.steps)
        self.how, blocks = how, self.blocks.weights
        self.last = blocks[-1]
        r = (((1 - how.share) / len(blocks)) ** -0.5,) * len(blocks)
        names, clips = (*blocks, tuple(f"{name}.c" for name in self.last)), (s.clip,) * len(blocks)
        self.parts = ClippingPlan(names, (*clips, CURVATURE), (*r, how.share**-0.5))
        self.curvature: dict[str, torch.Tensor] = {}

    def total(self, batch: np.ndarray) -> Mapping[str, torch.Tensor]:
        self.turn += 1
        mu, weights = self.penalty.at(self.turn, self.steps), self.weights
        total = {n: torch.zeros(weights[n.removesuffix(".c")].shape, dtype=torch.int64) for n in self.parts.order}
        for part in self.patients.chunks(batch, self.chunk, turn=self.turn):
            one = lambda x, y: self._terms(weights, x, y, mu)  # noqa: E731
            vectors = vmap(one)(part.images, part.targets)
            for name, entry in integer_sum(vectors, self.parts, counted=part.filled).items():
                total[name] += entry
        return total

    def _terms(
        self, weights: dict[str, torch.Tensor], x: torch.Tensor, y: torch.Tensor, mu: float
    ) -> dict[str, torch.Tensor]:
        """Return one patient's ∂T of every block, and the diagonal of ½∂²T of the last block."""
        z = coordinates(self.blocks, soft_dice_ce, weights, x, y, mu, self.penalty)
        slopes = grad(lambda w: objective(self.blocks, soft_dice_ce, w, x, y, z, mu).mean())(weights)
        block: Any = self.blocks.model.get_submodule(self.blocks.names[-1])
        given, of = torch.cat([z[self.blocks.names[0]], z[self.blocks.names[-2]]], dim=1), block.conv
        shape = {"stride": of.stride, "padding": of.padding, "output_padding": of.output_padding}

        def logits(given: torch.Tensor, *own: torch.Tensor) -> torch.Tensor:
            return torch.nn.functional.conv_transpose3d(given, *own, **shape)

        own = tuple(weights[name] for name in self.last)
        s = torch.softmax(logits(given, *own), dim=1)
        bend = s * (1 - s) / (2 * s[:, 0].numel())
        diagonal = grad(lambda *v: (logits(given.square(), *v) * bend).sum(), argnums=(0, 1))(*own)
        curvature = {f"{name}.c": entry for name, entry in zip(self.last, diagonal, strict=True)}
        return {**slopes, **curvature}

    def apply(self, mean: Mapping[str, torch.Tensor], *, step: int, steps: int) -> None:
        for name in self.last:
            new = mean[f"{name}.c"]
            self.curvature[name] = KEPT * self.curvature.get(name, new) + (1 - KEPT) * new
        before = {name: self.leaves[name].detach().clone() for name in self.last}
        super().apply(mean, step=step, steps=steps)
        bends = {name: 2 * self.curvature[name].clamp_min(0) for name in self.last}
        if self.how.use == "newton":
            far = self.how.newton_rate * self.rate(step, steps) / self.rate(0, steps)
            for name, was in before.items():
                self.leaves[name].data.copy_(was - far * mean[name] / (bends[name] + self.how.damping))
            return
        for leaf in self.leaves.values():
            leaf.grad = None
        for _ in range(TIMES - 1):
            for name, was in before.items():
                leaf = self.leaves[name]
                leaf.grad = (mean[name] + bends[name] * (leaf.detach() - was)).to(leaf.dtype)
            self.optimizer.step()


def dice(source: BenchData, cache: Path, *, begun: bool, seed: int, how: How) -> float:
    """Return the mean Dice on the held-out fifth.

    Args:
        source: The dataset.
        cache: Folder of public starts.
        begun: Start from the public start.
        seed: Seed and rotation.
        how: The variant.
    """
    data = study_data(source, grid="16,24,16", spacing="2,2,2")
    terms, roles = SharedTerms(8.0, 1e-5, None, NETWORK), source.roles(data, seed=seed)
    settings, site, start = terms.settings("dp-mac", begun=begun), roles.private[0], None
    if begun:
        bench = bench_of(roles, data, terms, seed=seed, cache=cache)
        bench.start()
        start = bench.start_file()
    made = (lambda setup: SecondOrder(setup, how)) if how.use else teachers.mac
    with patch.object(teachers, "registered", lambda _name: made):
        journal = TrainingJournal(settings.plan(patients=len(site)))
        part = VoterData(site.images, site.labels, len(data.labels))
        model = train_privately(part, NETWORK, settings, journal, seed=seed, start=start).model
    found = scores(lambda image: predict(model, image), roles.held_out, len(data.labels))
    return float(found["score"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--cache", type=Path, default=Path("bench-cache"))
    parser.add_argument("--start", choices=("public", "random"), default="public")
    parser.add_argument("--use", choices=("", "quadratic", "newton"), default="")
    parser.add_argument("--share", type=float, default=0.05)
    parser.add_argument("--damping", type=float, default=0.003)
    parser.add_argument("--newton-rate", type=float, default=0.1)
    parser.add_argument("--seeds", type=int, default=2)
    given = parser.parse_args()
    torch.set_num_threads(1)
    given.cache.mkdir(parents=True, exist_ok=True)
    source = BenchData(given.data, SplitCounts(1, public_images=12, label_maps=8), "auto", None, None, (), ())
    how = How(given.use, given.share, given.damping, given.newton_rate)
    for seed in range(given.seeds):
        found = dice(source, given.cache, begun=given.start == "public", seed=seed, how=how)
        print(json.dumps({**asdict(how), "start": given.start, "seed": seed, "dice": found}), flush=True)


if __name__ == "__main__":
    main()
