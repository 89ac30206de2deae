"""Trains and applies networks: teachers learn from label maps, the student from pseudo-label probabilities.

All trainings without differential privacy call :func:`fit`; those with differential privacy use parts of this module.
Every random draw (the order of the cases, the augmentation) depends only on the seed and the number of the step. A run
that was stopped and continues from its checkpoint therefore ends with bit-identical weights, on the same machine with
the same number of threads. No global random state is read or changed. Shapes that do not match, targets that are not
probabilities, and a loss that is not finite are refused.
"""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import EllipsisType
from typing import TypeAlias

import numpy as np
import torch
from jaxtyping import Float, UInt8
from monai.inferers import Inferer, SimpleInferer, SlidingWindowInferer

from common.canonical import sha256_bytes
from common.config import TrainingConfig
from common.data.grid import WHOLE_VOXELS
from common.data.label_maps import one_hot as one_hot
from common.data.volume_cache import StoredVolumes
from common.errors import InvalidInput
from common.models.augmentation import AUGMENTS, Augment
from common.models.checkpoint import load_checkpoint, save_checkpoint
from common.models.unet import tensors_to_bytes, weights_to_bytes

CHECKPOINT_SCHEMA = 2
"""Version of the training. Every change that leads to other weights raises it, so that no older run is continued."""
CHECKPOINT_EVERY = 50  # steps
WARM_UP = 0.1  # share of the steps
WEIGHT_DECAY = 1e-4
_SMOOTH = 1e-5  # keeps Dice defined for an absent structure
MAX_GRADIENT_NORM = 5.0
WINDOW = (128, 128, 128)
WINDOW_OVERLAP = 0.25

OnStep: TypeAlias = Callable[[int, float], None]
"""A function that is called after every step with the number of steps done and that step's loss."""


@dataclass(frozen=True, slots=True)
class FitResult:
    """The result of a training run.

    Attributes:
        steps: Number of steps done.
        loss: Mean loss of the last tenth of the steps.
        seconds: Wall time of this process.
    """

    steps: int
    loss: float
    seconds: float


NEAR = 0.3
"""Weight of the trained network in :func:`average_with_start`."""


def average_with_start(start: Mapping[str, torch.Tensor], model: torch.nn.Module) -> None:
    """Replace a model's weights by the average :data:`NEAR` · trained + (1 − :data:`NEAR`) · start, in place.

    ``start`` is a network that was trained on public pairs of image and label map. Training on few patients partly
    forgets what that network learned; an average of the weights keeps what both learned (Wortsman et al. 2022).
    docs/lab/utility-tried.md has the measurements.

    Args:
        start: Weights of the network that was trained on public pairs, by name.
        model: The trained network, changed in place.
    """
    with torch.no_grad():
        for name, weights in model.state_dict().items():
            if weights.is_floating_point():
                weights.lerp_(start[name].to(weights), 1 - NEAR)


@dataclass(frozen=True, slots=True)
class Pull:
    """A proximal term that pulls a training towards given weights w₀.

    A step of learning rate r moves the weights by the fraction r·``strength`` towards w₀. This is the term
    (``strength``/2)·‖w − w₀‖² of MR-MTL (Liu et al. 2022) for weights w, applied without AdamW's scaling, as AdamW's
    weight decay is.

    Attributes:
        weights: The weights w₀ by name.
        strength: From 0 to :data:`MOST_PULL`.

    Raises:
        InvalidInput: If the strength is outside its range.
    """

    weights: Mapping[str, torch.Tensor]
    strength: float

    def __post_init__(self) -> None:
        if not (math.isfinite(self.strength) and 0 <= self.strength <= MOST_PULL):
            raise InvalidInput("pull towards other weights", value=self.strength, limit=f"0 to {MOST_PULL:g}")

    @property
    def identity(self) -> tuple[str, str]:
        """The strength as text, and the SHA-256 of the weights. They identify the pull, because a training's result
        depends on both.
        """
        return repr(self.strength), sha256_bytes(tensors_to_bytes(self.weights))

    def apply(self, model: torch.nn.Module, *, rate: float) -> None:
        """Move a model's weights towards the reference weights w₀ by one step, in place.

        Args:
            model: The network.
            rate: Learning rate of the step.
        """
        share = min(1.0, rate * self.strength)
        with torch.no_grad():
            for name, weights in model.named_parameters():
                weights.lerp_(self.weights[name].to(weights), share)


MOST_PULL = 1000.0


def fit(
    model: torch.nn.Module,
    images: Float[np.ndarray, "n c x y z"] | StoredVolumes,
    targets: Float[np.ndarray, "n k x y z"] | UInt8[np.ndarray, "n x y z"] | StoredVolumes,
    recipe: TrainingConfig,
    *,
    seed: int,
    classes: int | None = None,
    augment: bool = True,
    pull: Pull | None = None,
    checkpoint: Path | None = None,
    on_step: OnStep | None = None,
) -> FitResult:
    """Train a model in place for ``recipe.steps`` steps of cross-entropy + Dice, with AdamW, warm-up and cosine decay.

    It runs on the model's device, in mixed precision if ``recipe.amp`` is set. With ``recipe.patch`` every step trains
    on random patches.

    Args:
        model: The network.
        images: Float array [n, c, x, y, z] of n volumes with c channels, or
            :class:`~common.data.volume_cache.StoredVolumes` of that shape, from which each step reads only the volumes
            that it uses.
        targets: Probabilities [n, k, x, y, z] of k classes that sum to 1 in every voxel, or label maps [n, x, y, z] of
            ``classes`` classes, which need less memory and give the same weights.
        recipe: Network, steps, learning rate and the other settings.
        seed: Seed of order and augmentation.
        classes: Number of classes if ``targets`` are label maps, else None.
        augment: False to train on the volumes unchanged.
        pull: Reference weights towards which every step also moves the network; None for no such term.
        checkpoint: File that is written every 50 steps and from which an interrupted run continues. A checkpoint of
            other data, seed, recipe or start weights is ignored. The caller deletes it.
        on_step: Called after every step.

    Returns:
        Steps, loss and time.

    Raises:
        InvalidInput: If shapes or values are wrong, or the loss diverges.
    """
    _check(images, targets, classes=classes)
    started = time.monotonic()
    device = next(model.parameters()).device
    if device.type == "cuda":
        model.to(memory_format=torch.channels_last_3d)
    optimizer = torch.optim.AdamW(model.parameters(), lr=recipe.learning_rate, weight_decay=WEIGHT_DECAY, fused=True)
    run = {"identity": _identity(model, images, targets, recipe, seed=seed, augment=augment, pull=pull)}
    step, losses = _resume(checkpoint, run, model, optimizer)
    if recipe.patch and any(n > size for n, size in zip(recipe.patch, images.shape[2:], strict=True)):
        raise InvalidInput("training patch", value=recipe.patch, limit=f"within the grid {images.shape[2:]}")
    recipe.check_grid(images.shape[2:])
    changes = AUGMENTS[recipe.augmentation] if augment else None
    model.train()
    while step < recipe.steps:
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, recipe)
        picks = batch_of(step, cases=len(images), batch_size=recipe.batch_size, seed=seed)
        draws = np.random.default_rng([_AUGMENT, seed, step])
        samples = [
            _sample(images[i], targets[i], recipe.patch, changes, seed=draw, classes=classes, device=device)
            for i, draw in zip(picks, draws.integers(1 << 32, size=len(picks)).tolist(), strict=True)
        ]
        image, target = (torch.stack(each) for each in zip(*samples, strict=True))
        if recipe.modality_dropout:
            image = image * kept_channels(image.shape[:2], recipe.modality_dropout, seed=seed, step=step).to(image)
        losses.append(_descend(model, optimizer, image, target, amp=recipe.amp))
        if pull is not None:
            pull.apply(model, rate=learning_rate(step, recipe))
        step += 1
        if checkpoint is not None and (step % CHECKPOINT_EVERY == 0 or step == recipe.steps):
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            save_checkpoint(checkpoint, {"step": step, "losses": losses, **state}, run=run)
        if on_step is not None:
            on_step(step, losses[-1])
    model.eval()
    last = losses[-max(1, recipe.steps // 10) :]
    return FitResult(steps=step, loss=math.fsum(last) / len(last), seconds=time.monotonic() - started)


def _resume(
    checkpoint: Path | None, run: Mapping[str, object], model: torch.nn.Module, optimizer: torch.optim.Optimizer
) -> tuple[int, list[float]]:
    """Load the checkpoint into model and optimiser, if it belongs to exactly this run.

    Returns the number of steps done and their losses; 0 and an empty list without such a checkpoint.
    """
    saved = load_checkpoint(checkpoint, run=run)
    if saved is None:
        return 0, []
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    return int(saved["step"]), list(saved["losses"])


def _descend(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    image: torch.Tensor,
    target: torch.Tensor,
    *,
    amp: bool,
) -> float:
    """Do one optimiser step on a batch on the model's device; return its loss, or raise if the loss is not finite."""
    optimizer.zero_grad()
    with mixed_precision(image.device, enabled=amp):
        logits = model(image)
    loss = soft_dice_ce(logits.float(), target).mean()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_GRADIENT_NORM)
    optimizer.step()
    value = float(loss.detach())  # synchronises with the GPU, so it comes last
    if not math.isfinite(value):
        raise InvalidInput("training diverged", value=value, remedy="lower the learning rate")
    return value


def predict(
    model: torch.nn.Module,
    image: Float[np.ndarray, "c x y z"],
    *,
    patch: tuple[int, ...] = (),
    amp: bool = False,
) -> Float[np.ndarray, "k x y z"]:
    """Return class probabilities of one volume on the grid.

    Args:
        model: The network; it is set to evaluation mode.
        image: Float array [c, x, y, z] with c channels.
        patch: Size of a sliding window (Gaussian weights, a quarter's overlap); empty for the whole volume. Volumes of
            more than :data:`WHOLE_VOXELS` voxels are always tiled.
        amp: True for mixed precision.

    Returns:
        Float32 array [k, x, y, z] for k classes, summing to 1 in every voxel.
    """
    device = next(model.parameters()).device
    model.eval()
    with torch.inference_mode(), mixed_precision(device, enabled=amp):
        batch = torch.tensor(image, dtype=torch.float32, device=device)[None]
        logits = inferer_of(patch, image.shape[1:])(batch, model)
        del batch
        result: np.ndarray = torch.softmax(logits[0].float(), dim=0).cpu().numpy()
    return result


def inferer_of(patch: tuple[int, ...], grid: tuple[int, ...]) -> Inferer:
    """Return the inferer with which a network is applied to a volume.

    Args:
        patch: Patch size of the training; empty if it used whole volumes.
        grid: Shape of the volume.

    Returns:
        A simple inferer, or a sliding window if the network was trained on patches or the volume is large.
    """
    if not patch and math.prod(grid) <= WHOLE_VOXELS:
        return SimpleInferer()
    window = tuple(min(n, size) for n, size in zip(patch or WINDOW, grid, strict=True))
    return SlidingWindowInferer(roi_size=window, sw_batch_size=1, overlap=WINDOW_OVERLAP, mode="gaussian")


def best_device() -> torch.device:
    """Return the first GPU if there is one, else the CPU."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def mixed_precision(device: torch.device, *, enabled: bool) -> torch.autocast:
    """Return a context in which PyTorch computes suitable operations in bfloat16, which needs no loss scaling.

    Args:
        device: The device.
        enabled: False for a context without effect.

    Returns:
        The context. It has no effect on a GPU without bfloat16.
    """
    able = device.type == "cpu" or torch.cuda.is_bf16_supported()
    return torch.autocast(device.type, dtype=torch.bfloat16, enabled=enabled and able)


def soft_dice_ce(
    logits: Float[torch.Tensor, "n k x y z"], target: Float[torch.Tensor, "n k x y z"]
) -> Float[torch.Tensor, "n"]:
    """Return the sum of cross-entropy and soft Dice loss of each volume.

    The sum is smallest where softmax(logits) equals the target, for hard and for soft targets. The Dice loss is the one
    for soft labels (Wang et al. 2023, Dice semimetric losses; MONAI's option ``soft_label``). On one-hot targets it
    equals the usual soft Dice loss.

    Args:
        logits: Tensor [n, k, x, y, z] of n volumes and k classes.
        target: Probabilities of the same shape.

    Returns:
        Tensor [n].
    """
    logs = torch.log_softmax(logits, dim=1)
    cross_entropy = -(target * logs).sum(dim=1).flatten(1).mean(dim=1)
    found, true = logs.exp().flatten(2), target.flatten(2)
    sizes = found.sum(dim=2) + true.sum(dim=2)
    missed = (found - true).abs().sum(dim=2)
    dice = (sizes - missed + _SMOOTH) / (sizes + _SMOOTH)
    return (1 - dice).mean(dim=1) + cross_entropy


def learning_rate(step: int, recipe: TrainingConfig) -> float:
    """Return the learning rate of a step: linear warm-up over the first tenth, then a cosine down to zero.

    Args:
        step: Step from 0.
        recipe: Gives the number of steps and the largest rate.

    Returns:
        The rate.
    """
    warm = max(1, round(WARM_UP * recipe.steps))
    if step < warm:
        return recipe.learning_rate * (step + 1) / warm
    return recipe.learning_rate * 0.5 * (1 + math.cos(math.pi * (step - warm) / max(1, recipe.steps - warm)))


def batch_of(step: int, *, cases: int, batch_size: int, seed: int) -> list[int]:
    """Return the indices of the cases of one step. Every epoch is a new permutation, and a batch may span two epochs.

    Args:
        step: Number of the step, from 0.
        cases: Number of cases.
        batch_size: Cases in a step.
        seed: Seed of the training.

    Returns:
        ``batch_size`` indices below ``cases``.
    """
    picks = []
    for position in range(step * batch_size, (step + 1) * batch_size):
        epoch, place = divmod(position, cases)
        picks.append(int(np.random.default_rng([_ORDER, seed, epoch]).permutation(cases)[place]))
    return picks


_ORDER, _AUGMENT = 1, 2  # parts of the seeds, so that order and augmentation use different random numbers


Arrays: TypeAlias = "np.ndarray | StoredVolumes"


def kept_channels(shape: Sequence[int], chance: float, *, seed: int, step: int) -> torch.Tensor:
    """Draw which channels of a batch are shown in a step (modality dropout).

    Args:
        shape: Shape [n, c, …] of the batch: n volumes with c channels.
        chance: Probability that a channel is hidden.
        seed: Seed of the training.
        step: Number of the step.

    Returns:
        Tensor [n, c, 1, 1, 1]: 1 for a shown channel, 0 for a hidden one.
    """
    return shown(np.random.default_rng([seed, step, 7]).random((shape[0], shape[1])), chance)


def shown(draws: Float[np.ndarray, "n c"], chance: float) -> torch.Tensor:
    """Return which channels are shown, given uniform random numbers. At least one channel of each volume is shown.

    Args:
        draws: Uniform random numbers, [n, c] for n volumes with c channels.
        chance: Probability that a channel is hidden.

    Returns:
        Tensor [n, c, 1, 1, 1]: 1 for a shown channel, 0 for a hidden one.
    """
    kept = draws >= chance
    kept[np.arange(len(draws)), draws.argmax(axis=1)] = True
    return torch.from_numpy(kept.astype(np.float32))[:, :, None, None, None]


def _sample(
    image: np.ndarray,
    target: np.ndarray,
    patch: tuple[int, ...],
    changes: Augment | None,
    *,
    seed: int,
    classes: int | None,
    device: torch.device,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return image and target of one training sample: cropped to a patch, converted to one-hot, and augmented.

    Cropping comes first, so that only the patch needs memory for the one-hot form. The tensors are on the device.
    """
    if patch:
        where = _corner(image.shape[1:], patch, seed=seed)
        image, target = image[where], target[where]
    image_there, target_there = _onto(image, device), _onto(target, device)
    if classes is not None:
        target_there = (target_there == torch.arange(classes, device=device).view(-1, 1, 1, 1)).float()
    return changes(image_there, target_there, seed) if changes is not None else (image_there, target_there)


def _corner(grid: tuple[int, ...], patch: tuple[int, ...], *, seed: int) -> tuple[slice | EllipsisType, ...]:
    """Draw a patch's position. The result equals that of MONAI's ``RandSpatialCropd`` with the same seed."""
    draws = np.random.RandomState(seed)
    draws.seed(int(draws.randint(1 << 32, dtype="uint32")))
    starts = [int(draws.randint(0, n - size + 1)) if n > size else 0 for n, size in zip(grid, patch, strict=True)]
    return (..., *(slice(start, start + size) for start, size in zip(starts, patch, strict=True)))


def _onto(array: np.ndarray, device: torch.device) -> torch.Tensor:
    """Return a copy of the array on the device. A copy to a GPU uses pinned memory and does not wait."""
    tensor = torch.tensor(array)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor


def _check(images: Arrays, targets: Arrays, *, classes: int | None) -> None:
    if len(images) == 0:
        raise InvalidInput("no volume to train on", remedy="check the data and the problems reported above")
    grid = targets.shape[2:] if classes is None else targets.shape[1:]
    if (
        images.ndim != 5
        or targets.ndim != (5 if classes is None else 4)
        or (len(targets), *grid) != (len(images), *images.shape[2:])
    ):
        raise InvalidInput(
            "training arrays",
            value=(images.shape, targets.shape),
            limit="[n, c, x, y, z] and [n, k, x, y, z], or [n, x, y, z] with a number of classes",
        )
    for i in range(len(images)):
        if not np.isfinite(images[i]).all():
            raise InvalidInput("training images hold NaN or infinite voxels", limit="finite numbers")
        target = targets[i]
        if classes is not None:
            if target.dtype != np.uint8 or target.max() >= classes:
                raise InvalidInput("training label maps", limit=f"uint8 below {classes}")
            continue
        sums = target.sum(axis=0)
        if not (np.isfinite(sums).all() and target.min() >= -1e-4 and abs(sums - 1).max() < 1e-2):
            raise InvalidInput("training targets", limit="probabilities that sum to 1 in every voxel")


def _identity(
    model: torch.nn.Module,
    images: Arrays,
    targets: Arrays,
    recipe: TrainingConfig,
    *,
    seed: int,
    augment: bool,
    pull: Pull | None = None,
) -> str:
    """Return a hash of everything that the result of a training depends on."""
    total = hashlib.sha256(repr((CHECKPOINT_SCHEMA, recipe, seed, augment, images.shape, targets.shape)).encode())
    for arrays in (images, targets):
        for i in range(len(arrays)):
            total.update(np.ascontiguousarray(arrays[i]).tobytes())
    total.update(np.ones(len(images)).tobytes())  # version 0.1.0 could weight volumes; its checkpoints stay valid
    total.update(weights_to_bytes(model))
    if pull is not None:
        total.update(repr(pull.identity).encode())
    return total.hexdigest()
