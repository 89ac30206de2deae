"""Measures a teacher's training step beside the loops a user would write: plain, with MONAI, and with Opacus.

One thread, the teachers' network, a batch of two volumes of 32 × 48 × 32; all in turn within one run.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from functools import partial

import numpy as np
import torch
from monai.losses import DiceLoss
from monai.transforms import Compose

from benchmarks.private_step import WAYS
from benchmarks.run import RATIO, Figure, cpu_s, figure, ratios
from common.config import TrainingConfig
from common.models.fit import MAX_GRADIENT_NORM, WEIGHT_DECAY, fit
from common.models.unet import build_unet
from tests.common.models.monai_augmentation import monais

GRID, CLASSES, CASES = (32, 48, 32), 3, 6
RECIPE = TrainingConfig(steps=10, batch_size=2, learning_rate=1e-3)
REPEATS, PATIENTS, CHUNK = 11, 8, 4


def figures() -> Iterator[Figure]:
    """Yield the ratios of our training steps to those loops."""
    torch.set_num_threads(1)
    rng = np.random.default_rng(0)
    images = rng.normal(size=(CASES, 1, *GRID)).astype(np.float32)
    labels = rng.integers(0, CLASSES, (CASES, *GRID)).astype(np.uint8)
    took = in_turn(
        {
            "fit": lambda: fit(_network(), images, labels, RECIPE, seed=1, classes=CLASSES),
            "still": lambda: fit(_network(), images, labels, RECIPE, seed=1, classes=CLASSES, augment=False),
            "plain": lambda: loop(images, labels, None),
            "monai": lambda: loop(images, labels, monais(GRID)),
        }
    )
    beside = {other: ratios(took["fit"], took[other]) for other in ("plain", "monai")}
    yield figure("fit beside a plain loop without augmentation", beside["plain"], RATIO, aim="≤ 1.25 ×")
    yield figure("fit beside a MONAI loop, same augmentation", beside["monai"], RATIO, aim="≤ 1.05 ×")
    yield figure("fit without augmentation beside a plain loop", ratios(took["still"], took["plain"]), RATIO)
    yield figure("a step of fit", [each / RECIPE.steps for each in took["fit"]], "s")
    try:
        opacus = WAYS["opacus hooks"](PATIENTS, CHUNK)
    except ImportError as error:
        print(f"training: no figure beside Opacus: {error}", file=sys.stderr)
        return
    ours = WAYS["per patient (vmap)"](PATIENTS, CHUNK)
    took = in_turn({"ours": ours, "opacus": opacus, "plain": WAYS["plain"](PATIENTS, CHUNK)})
    yield figure("private gradients beside Opacus' hooks", ratios(took["ours"], took["opacus"]), RATIO)
    yield figure("private gradients beside plain ones", ratios(took["ours"], took["plain"]), RATIO)


def loop(images: np.ndarray, labels: np.ndarray, transform: Compose | None) -> None:
    """Train as a user of torch and MONAI would, with the network, loss, optimiser and clipping of ``fit``.

    Args:
        images: Volumes [n, c, x, y, z].
        labels: Label maps [n, x, y, z].
        transform: MONAI augmentation, if any.
    """
    model, dice = _network(), DiceLoss(softmax=True, soft_label=True, reduction="none")
    optimizer = torch.optim.AdamW(model.parameters(), lr=RECIPE.learning_rate, weight_decay=WEIGHT_DECAY)
    volumes = torch.tensor(images)
    targets = torch.nn.functional.one_hot(torch.tensor(labels, dtype=torch.int64), CLASSES).movedim(-1, 1).float()
    rng = np.random.default_rng(0)
    for _ in range(RECIPE.steps):
        pairs = [{"image": volumes[i], "target": targets[i]} for i in rng.choice(CASES, RECIPE.batch_size, False)]
        if transform is not None:
            pairs = [{name: each.as_tensor() for name, each in transform(pair).items()} for pair in pairs]
        image, target = (torch.stack([pair[name] for pair in pairs]) for name in ("image", "target"))
        optimizer.zero_grad()
        logits = model(image)
        cross_entropy = torch.nn.functional.cross_entropy(logits, target, reduction="none")
        loss = (dice(logits, target).flatten(1).mean(1) + cross_entropy.flatten(1).mean(1)).mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_GRADIENT_NORM)
        optimizer.step()


def in_turn(ways: Mapping[str, Callable[[], object]]) -> dict[str, list[float]]:
    """Return the processor seconds of each way, run in turn, without a first round."""
    took: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(REPEATS + 1):
        for name, way in ways.items():
            took[name].append(cpu_s(way))
    return {name: each[1:] for name, each in took.items()}


_network = partial(build_unet, RECIPE.channels, in_channels=1, out_channels=CLASSES, seed=1)
