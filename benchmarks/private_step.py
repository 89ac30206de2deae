"""Measures a training step per patient: plain, by torch.func in chunks, one patient at a time, and by Opacus' hooks.

All four ways use one thread and the same network (the teachers'), batch and loss. A time is the best of ``--rounds``
after a warm-up. The ways take turns, so that other load affects all of them. The peak memory of a way is measured in
its own process: the highest resident memory minus the resident memory before the first step.

    python -m benchmarks.private_step --rounds 5
"""

from __future__ import annotations

import argparse
import json
import warnings
from collections.abc import Callable
from pathlib import Path

import torch

from benchmarks.run import cpu_s, measured_alone, memory_mib
from client.training.private.clipped_sums import integer_sum
from client.training.private.gradients import per_patient, plain_weights, segmentation_loss
from client.training.private.strategies_3d import clipped_parts
from common.models.fit import soft_dice_ce
from common.models.unet import build_unet

CHANNELS, GRID = (16, 32, 64), (32, 48, 32)
Step = Callable[[], None]


def data(patients: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return random volumes [n, 1, x, y, z] and one-hot labels [n, 3, x, y, z]."""
    rng = torch.Generator().manual_seed(0)
    x = torch.randn(patients, 1, *GRID, generator=rng)
    labels = torch.randint(0, 3, (patients, *GRID), generator=rng)
    return x, torch.nn.functional.one_hot(labels, 3).movedim(-1, 1).float()


def network() -> torch.nn.Module:
    """Return the teachers' network, untrained."""
    return build_unet(CHANNELS, in_channels=1, out_channels=3, seed=0)


def plain(patients: int, chunk: int) -> Step:
    """Return a step without privacy: forward, backward, gradient of the mean loss."""
    net, (x, y) = network(), data(patients)

    def step() -> None:
        net.zero_grad()
        soft_dice_ce(net(x), y).mean().backward()

    return step


def private(patients: int, chunk: int, *, per_layer: bool = False) -> Step:
    """Return a step with per-patient gradients, clipped and summed as integers.

    Args:
        patients: Size of the batch.
        chunk: Patients whose gradients are computed together.
        per_layer: Clip every layer by itself.
    """
    net, (x, y) = network(), data(patients)
    weights = plain_weights(net)
    parts = clipped_parts(net, 0.1, per_layer=per_layer)
    gradients = per_patient(segmentation_loss(net, soft_dice_ce))

    def step() -> None:
        total = None
        for start in range(0, patients, chunk):
            vectors, _ = gradients(weights, x[start : start + chunk, None], y[start : start + chunk, None])
            found = integer_sum(vectors, parts)
            total = found if total is None else {name: total[name] + entry for name, entry in found.items()}

    return step


def opacus(patients: int, chunk: int) -> Step:
    """Return a step with Opacus' GradSampleModule, which clips and sums in floating point."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from opacus import GradSampleModule

        net, (x, y) = GradSampleModule(network(), loss_reduction="sum", strict=False), data(patients)

    def step() -> None:
        net.zero_grad()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            soft_dice_ce(net(x), y).sum().backward()
        samples = [p.grad_sample for p in net.parameters() if p.grad_sample is not None]
        norms = torch.stack([g.flatten(1).square().sum(1) for g in samples]).sum(0).sqrt()
        factor = (0.1 / norms).clamp(max=1.0)
        for sample in samples:
            torch.einsum("n,n...->...", factor, sample)

    return step


WAYS: dict[str, Callable[[int, int], Step]] = {
    "plain": plain,
    "per patient (vmap)": private,
    "a clip a layer (vmap)": lambda patients, chunk: private(patients, chunk, per_layer=True),
    "one at a time": lambda patients, chunk: private(patients, 1),
    "opacus hooks": opacus,
}


def peak_mb(way: str, patients: int, chunk: int) -> float:
    """Return the resident memory in MB that a step adds, measured in a process of its own."""
    options = ("--memory-of", way, "--patients", patients, "--chunk", chunk)
    return float(measured_alone("benchmarks.private_step", *options))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--patients", type=int, default=8)
    parser.add_argument("--chunk", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--memory-of", default="", help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.memory_of:
        step = WAYS[options.memory_of](options.patients, options.chunk)
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # reset the highest resident memory
        before = memory_mib()
        step()
        step()
        print(memory_mib("VmHWM") - before)
        return
    steps = {name: make(options.patients, options.chunk) for name, make in WAYS.items()}
    best = dict.fromkeys(steps, float("inf"))
    for step in steps.values():
        step()
    for _ in range(options.rounds):
        for name, step in steps.items():
            best[name] = min(best[name], cpu_s(step))
    rows = [
        {
            "way": name,
            "cpu_s": round(seconds, 4),
            "times_plain": round(seconds / best["plain"], 3),
            "peak_mb": round(peak_mb(name, options.patients, options.chunk)),
        }
        for name, seconds in best.items()
    ]
    print(json.dumps({"patients": options.patients, "chunk": options.chunk, "grid": GRID, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
