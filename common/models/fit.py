"""The one training loop: teachers learn one-hot label maps, the student learns pseudo-label probabilities.

Every random draw is a function of (seed, step): the order of the cases and the augmentation. So a run that was stopped
resumes from its checkpoint to bit-identical weights (same machine, same thread count), and no global random state is
touched. Refuses shapes that do not match, targets that are not probabilities, and a loss that is no longer finite.
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
from common.models.augmentation import Augment, augmentation
from common.models.checkpoint import load_checkpoint, save_checkpoint
from common.models.unet import tensors_to_bytes, weights_to_bytes

CHECKPOINT_SCHEMA = 2
"""Another one for every change that gives other weights: a run goes on only where it gives what it began."""
CHECKPOINT_EVERY = 50  # steps
WARM_UP = 0.1  # share of the steps
WEIGHT_DECAY = 1e-4
_SMOOTH = 1e-5  # of Dice where a structure is absent
MAX_GRADIENT_NORM = 5.0
WINDOW = (128, 128, 128)
WINDOW_OVERLAP = 0.25

OnStep: TypeAlias = Callable[[int, float], None]
"""Called after every step with the number of steps done and that step's loss."""


@dataclass(frozen=True, slots=True)
class FitResult:
    """What a training run did: ``loss`` is the mean of the last tenth of the steps, ``resumed_from`` a step."""

    steps: int
    loss: float
    seconds: float
    resumed_from: int = 0


NEAR = 0.3
"""Of the way from a network of paired public cases to the trained weights that teachers and students go."""


def near(start: Mapping[str, torch.Tensor], model: torch.nn.Module) -> None:
    """Take ``model`` back to :data:`NEAR` of the way from the weights ``start`` of a network of public pairs, in place.

    What such a network knows is forgotten over a few patients, or over labels of them; on the way back a model keeps
    both (Wortsman et al. 2022). Measured in docs/lab/utility-tried.md.
    """
    with torch.no_grad():
        for name, weights in model.state_dict().items():
            if weights.is_floating_point():
                weights.lerp_(start[name].to(weights), 1 - NEAR)


@dataclass(frozen=True, slots=True)
class Pull:
    """Weights that a training stays near: a step of learning rate r takes it r·``strength`` of the way back there.

    The proximal term (``strength``/2)·‖w - w₀‖² of MR-MTL (Liu et al. 2022), taken apart from AdamW's own scaling, as
    its weight decay is.
    """

    weights: Mapping[str, torch.Tensor]
    strength: float

    def __post_init__(self) -> None:
        if not (math.isfinite(self.strength) and 0 <= self.strength <= MOST_PULL):
            raise InvalidInput("pull towards other weights", value=self.strength, limit=f"0 to {MOST_PULL:g}")

    @property
    def identity(self) -> tuple[str, str]:
        """Names what a result depends on."""
        return repr(self.strength), sha256_bytes(tensors_to_bytes(self.weights))

    def apply(self, model: torch.nn.Module, *, rate: float) -> None:
        """Take ``model`` back by one step of learning rate ``rate``, in place."""
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
    weights: Float[np.ndarray, "n"] | None = None,
    pull: Pull | None = None,
    checkpoint: Path | None = None,
    on_step: OnStep | None = None,
) -> FitResult:
    """Train ``model`` in place for ``recipe.steps`` steps of cross-entropy + Dice, AdamW, warm-up and cosine decay.

    ``targets`` are probabilities (one-hot maps among them), summing to 1 in every voxel, or label maps [n, x, y, z] of
    ``classes`` classes, which take a fraction of the memory and give the same weights. Both arrays may be
    :class:`~common.data.volume_cache.StoredVolumes`, of which a step reads only its own. ``weights`` ≥ 0 says how much
    each volume counts (normalised to mean 1). ``pull`` keeps the weights near others. With ``checkpoint``, state is
    saved every 50 steps and an interrupted run goes on from there; a checkpoint of other data, seed, recipe or starting
    weights is ignored. The caller deletes the file when the result is safe.

    With ``recipe.patch`` every step trains on random patches of its volumes. See :mod:`common.models.augmentation`.
    Runs on the model's device, with ``recipe.amp`` in mixed precision.

    Raises InvalidInput for wrong shapes or values, and when the loss diverges.
    """
    _check(images, targets, weights, classes=classes)
    started = time.monotonic()
    device = next(model.parameters()).device
    if device.type == "cuda":
        model.to(memory_format=torch.channels_last_3d)
    optimizer = torch.optim.AdamW(model.parameters(), lr=recipe.learning_rate, weight_decay=WEIGHT_DECAY, fused=True)
    share = np.ones(len(images)) if weights is None else weights / weights.mean()
    run = {"identity": _identity(model, images, targets, share, recipe, seed=seed, augment=augment, pull=pull)}
    step, losses = _resume(checkpoint, run, model, optimizer)
    resumed_from = step
    if recipe.patch and any(n > size for n, size in zip(recipe.patch, images.shape[2:], strict=True)):
        raise InvalidInput("training patch", value=recipe.patch, limit=f"within the grid {images.shape[2:]}")
    changes = augmentation(recipe.augmentation) if augment else None
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
        losses.append(_descend(model, optimizer, image, target, share[picks], amp=recipe.amp))
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
    return FitResult(
        steps=step, loss=math.fsum(last) / len(last), seconds=time.monotonic() - started, resumed_from=resumed_from
    )


def _resume(
    checkpoint: Path | None, run: Mapping[str, object], model: torch.nn.Module, optimizer: torch.optim.Optimizer
) -> tuple[int, list[float]]:
    """Load the checkpoint of exactly this run; the steps it has done and their losses."""
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
    share: Float[np.ndarray, "b"],
    *,
    amp: bool,
) -> float:
    """One step on one batch, which is where the model is; its loss. InvalidInput where that is not finite."""
    optimizer.zero_grad()
    with mixed_precision(image.device, enabled=amp):
        logits = model(image)
    each = soft_dice_ce(logits.float(), target)
    loss = (each * torch.tensor(share, dtype=each.dtype).to(each.device, non_blocking=True)).mean()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_GRADIENT_NORM)
    optimizer.step()
    value = float(loss.detach())  # waits for a GPU, so it comes last
    if not math.isfinite(value):
        raise InvalidInput("training diverged", value=value, remedy="lower the learning rate")
    return value


def predict(
    model: torch.nn.Module,
    image: Float[np.ndarray, "c x y z"],
    *,
    patch: tuple[int, ...] = (),
    amp: bool = False,
    inferer: Inferer | None = None,
) -> Float[np.ndarray, "k x y z"]:
    """Class probabilities (float32, summing to 1) of one volume on the grid.

    With ``patch`` by a sliding window of that size (Gaussian weights, a quarter's overlap); volumes of more than
    :data:`WHOLE_VOXELS` are tiled whatever ``patch`` says. ``inferer`` decides instead where it is given.
    """
    device = next(model.parameters()).device
    model.eval()
    with torch.inference_mode(), mixed_precision(device, enabled=amp):
        batch = torch.tensor(image, dtype=torch.float32, device=device)[None]
        logits = (inferer or inferer_of(patch, image.shape[1:]))(batch, model)
        del batch
        result: np.ndarray = torch.softmax(logits[0].float(), dim=0).cpu().numpy()
    return result


def inferer_of(patch: tuple[int, ...], grid: tuple[int, ...]) -> Inferer:
    """How a volume on ``grid`` is given to a network trained on ``patch`` (empty: on whole volumes)."""
    if not patch and math.prod(grid) <= WHOLE_VOXELS:
        return SimpleInferer()
    window = tuple(min(n, size) for n, size in zip(patch or WINDOW, grid, strict=True))
    return SlidingWindowInferer(roi_size=window, sw_batch_size=1, overlap=WINDOW_OVERLAP, mode="gaussian")


def best_device() -> torch.device:
    """The first GPU, where there is one."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def mixed_precision(device: torch.device, *, enabled: bool) -> torch.autocast:
    """bfloat16 for what tolerates it, where ``enabled`` and the device has it; it needs no scaling of the loss."""
    able = device.type == "cpu" or torch.cuda.is_bf16_supported()
    return torch.autocast(device.type, dtype=torch.bfloat16, enabled=enabled and able)


def soft_dice_ce(
    logits: Float[torch.Tensor, "n k x y z"], target: Float[torch.Tensor, "n k x y z"]
) -> Float[torch.Tensor, "n"]:
    """Cross-entropy + soft Dice of each volume, both minimal where softmax(logits) = target, hard or soft.

    Dice is that of soft labels (Wang et al. 2023, Dice semimetric losses, as in MONAI's ``soft_label``), which equals
    the usual soft Dice on one-hot targets.
    """
    logs = torch.log_softmax(logits, dim=1)
    cross_entropy = -(target * logs).sum(dim=1).flatten(1).mean(dim=1)
    found, true = logs.exp().flatten(2), target.flatten(2)
    sizes = found.sum(dim=2) + true.sum(dim=2)
    missed = (found - true).abs().sum(dim=2)
    dice = (sizes - missed + _SMOOTH) / (sizes + _SMOOTH)
    return (1 - dice).mean(dim=1) + cross_entropy


def learning_rate(step: int, recipe: TrainingConfig) -> float:
    """Linear warm-up over the first tenth of the steps, then a cosine down to zero."""
    warm = max(1, round(WARM_UP * recipe.steps))
    if step < warm:
        return recipe.learning_rate * (step + 1) / warm
    return recipe.learning_rate * 0.5 * (1 + math.cos(math.pi * (step - warm) / max(1, recipe.steps - warm)))


def batch_of(step: int, *, cases: int, batch_size: int, seed: int) -> list[int]:
    """The cases of one step: a fresh permutation every epoch, batches running over the seam."""
    picks = []
    for position in range(step * batch_size, (step + 1) * batch_size):
        epoch, place = divmod(position, cases)
        picks.append(int(np.random.default_rng([_ORDER, seed, epoch]).permutation(cases)[place]))
    return picks


_ORDER, _AUGMENT = 1, 2  # keep the two kinds of draws apart


Arrays: TypeAlias = "np.ndarray | StoredVolumes"


def kept_channels(shape: Sequence[int], chance: float, *, seed: int, step: int) -> torch.Tensor:
    """1 where a channel of a volume of the batch is shown in this step, else 0: [n, c, 1, 1, 1]; one always is."""
    return shown(np.random.default_rng([seed, step, 7]).random((shape[0], shape[1])), chance)


def shown(draws: Float[np.ndarray, "n c"], chance: float) -> torch.Tensor:
    """Uniform draws → 1 for a channel that is shown, else 0: [n, c, 1, 1, 1]; one of each volume always is."""
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
    """Crop first, then one-hot, then augment on the device: no more than a patch is ever made into probabilities."""
    if patch:
        where = _corner(image.shape[1:], patch, seed=seed)
        image, target = image[where], target[where]
    image_there, target_there = _onto(image, device), _onto(target, device)
    if classes is not None:
        target_there = (target_there == torch.arange(classes, device=device).view(-1, 1, 1, 1)).float()
    return changes(image_there, target_there, seed) if changes is not None else (image_there, target_there)


def _corner(grid: tuple[int, ...], patch: tuple[int, ...], *, seed: int) -> tuple[slice | EllipsisType, ...]:
    """Where a patch is cut; drawn as MONAI's ``RandSpatialCropd`` is from the same seed."""
    draws = np.random.RandomState(seed)
    draws.seed(int(draws.randint(1 << 32, dtype="uint32")))
    starts = [int(draws.randint(0, n - size + 1)) if n > size else 0 for n, size in zip(grid, patch, strict=True)]
    return (..., *(slice(start, start + size) for start, size in zip(starts, patch, strict=True)))


def _onto(array: np.ndarray, device: torch.device) -> torch.Tensor:
    """A copy of the array on the device; through pinned memory, and without waiting, where that is a GPU."""
    tensor = torch.tensor(array)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor


def _check(images: Arrays, targets: Arrays, weights: np.ndarray | None, *, classes: int | None) -> None:
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
    if weights is not None and not (
        weights.shape == images.shape[:1] and np.isfinite(weights).all() and weights.min() >= 0 and weights.max() > 0
    ):
        raise InvalidInput("training weights", value=weights.shape, limit="one finite number ≥ 0 per volume, not all 0")


def _identity(
    model: torch.nn.Module,
    images: Arrays,
    targets: Arrays,
    share: np.ndarray,
    recipe: TrainingConfig,
    *,
    seed: int,
    augment: bool,
    pull: Pull | None = None,
) -> str:
    """A hash of everything the result depends on."""
    total = hashlib.sha256(repr((CHECKPOINT_SCHEMA, recipe, seed, augment, images.shape, targets.shape)).encode())
    for arrays in (images, targets):
        for i in range(len(arrays)):
            total.update(np.ascontiguousarray(arrays[i]).tobytes())
    total.update(np.ascontiguousarray(share).tobytes())
    total.update(weights_to_bytes(model))
    if pull is not None:
        total.update(repr(pull.identity).encode())
    return total.hexdigest()
