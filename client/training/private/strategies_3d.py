"""Implements DP-SGD and DP-BBB on 3D networks as strategies of the engine: one patient is one example with one clip.

A patient's loss is the mean over all its patches or views. Patients are differentiated in chunks by ``torch.func``.

Patients' vectors are summed as integers, so their order changes no bit of the sum. But the floating-point rounding of
a patient's gradient depends on the chunk's size and on the patient's place in the chunk; it may differ by a few grid
steps. Every chunk of a training therefore has the same number c of places, and a patient's place is its slot's number
modulo c. A place without a patient, or with one that has no usable scan, holds zeros, and its vector is discarded. So a
patient's vector does not depend on who else is in the batch: adding or removing one patient changes that patient's
vector and no bit of another's.

A chunk's volumes are read when needed and cut to patches at once, so memory does not grow with the number of patients.
"""

from __future__ import annotations

import hmac
import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any, TypeAlias

import numpy as np
import torch
from jaxtyping import Int64

from client.training.private.bbb import PosteriorDescent, Prior, WeightPosterior, deviation
from client.training.private.clipped_sums import ClippingPlan, integer_sum, one_part, zeros_like
from client.training.private.descent import Rate, descend
from client.training.private.gradients import (
    Gradients,
    Weights,
    per_patient,
    plain_weights,
    refuse_coupling,
    refuse_pooled,
    segmentation_loss,
)
from common.data.volume_cache import StoredVolumes
from common.errors import InvalidInput
from common.models.fit import one_hot, shown, soft_dice_ce

Volumes: TypeAlias = torch.Tensor | np.ndarray | StoredVolumes

VOXELS_AT_ONCE = 1 << 21
"""Most voxels in a chunk, for any number of patients: one patch of 128³."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """Patients whose gradients are computed together.

    Attributes:
        images: Float tensor [b, k, c, x, y, z].
        targets: One-hot float tensor [b, k, l, x, y, z].
        filled: Bool tensor [b]; False for a place without a usable scan, whose zeros must not be counted.
    """

    images: torch.Tensor
    targets: torch.Tensor
    filled: torch.Tensor


@dataclass(frozen=True, slots=True)
class Patients:
    """A voter's scans, cut to the views at which gradients are taken.

    However many scans a patient has, they are one example: ``scans`` of them are averaged before the clip, and each
    step takes the next ones, beginning again after the last. Patches and hidden channels are drawn from ``key``, the
    number of the step, the slot and the number of the view, so no other patient can influence them. The sensitivity
    holds for every key drawn without looking at the patients; a training uses its journal's key, 32 random bytes of the
    operating system. A slot without a usable scan may be sampled and contributes zero, so the number n of patients does
    not depend on which scans are usable.

    Attributes:
        images: Scans [m, c, x, y, z].
        targets: One-hot [m, l, x, y, z], or label maps [m, x, y, z] with ``classes`` classes.
        slots: The slot of each scan.
        scans: Views averaged for each patient.
        classes: Number of labels if ``targets`` are label maps; None for one-hot targets.
        patch: Size of a random patch; empty for the whole grid.
        modality_dropout: Probability with which a channel is hidden.
        key: Key from which patches and hidden channels are drawn.

    Raises:
        InvalidInput: If a scan has no slot, or the patch exceeds the grid.
    """

    images: Volumes
    targets: Volumes
    slots: tuple[int, ...]
    scans: int = 1
    classes: int | None = None
    patch: tuple[int, ...] = ()
    modality_dropout: float = 0.0
    key: bytes = field(default=b"", repr=False)
    _rows: dict[int, list[int]] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not len(self.images) == len(self.targets) == len(self.slots) or self.scans < 1:
            raise InvalidInput("patients", value=len(self.slots), limit="one slot for every scan")
        grid = tuple(self.images.shape[2:])
        if self.patch and any(n > size for n, size in zip(self.patch, grid, strict=True)):
            raise InvalidInput("training patch", value=self.patch, limit=f"at most the grid {grid}")
        rows: dict[int, list[int]] = {}
        for row, slot in enumerate(self.slots):
            rows.setdefault(slot, []).append(row)
        object.__setattr__(self, "_rows", rows)

    def chunks(self, batch: Int64[np.ndarray, "b"], size: int, *, turn: int = 0) -> Iterator[Chunk]:
        """Yield a batch's patients in chunks of equal size. Only a patient's slot decides its place within a chunk.

        Args:
            batch: Slots in order.
            size: Number of patients in a chunk; a smaller number is used for large volumes.
            turn: Number of the step, which selects the scans and the patches.

        Yields:
            Chunks of patients.
        """
        size = max(1, min(size, VOXELS_AT_ONCE // (self.scans * math.prod(self._box))))
        of_place = [batch[batch % size == place].tolist() for place in range(size)]
        for slots in zip_longest(*of_place):  # None: no patient at this place
            views = [view for slot in slots for view in self._views(slot, turn)]
            images, targets = (torch.stack(both).unflatten(0, (-1, self.scans)) for both in zip(*views, strict=True))
            yield Chunk(images, targets, torch.tensor([slot in self._rows for slot in slots]))

    @property
    def _box(self) -> tuple[int, ...]:
        """The size of what the network receives."""
        return self.patch or tuple(self.images.shape[2:])

    def _views(self, slot: int | None, turn: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return the images and targets of a patient's patches in this step; zeros without a slot or a usable scan."""
        rows = None if slot is None else self._rows.get(slot)
        if slot is None or rows is None:
            classes = self.targets.shape[1] if self.classes is None else self.classes
            return [(torch.zeros(self.images.shape[1], *self._box), torch.zeros(classes, *self._box))] * self.scans
        return [
            self._view(rows[(turn * self.scans + scan) % len(rows)], self._draws(turn, slot, scan))
            for scan in range(self.scans)
        ]

    def _draws(self, turn: int, slot: int, scan: int) -> np.random.Generator:
        seed = hmac.digest(self.key, f"patch {turn} {slot} {scan}".encode(), "sha256")
        return np.random.default_rng(int.from_bytes(seed, "big"))

    def _view(self, row: int, draws: np.random.Generator) -> tuple[torch.Tensor, torch.Tensor]:
        """Return one scan or a patch of it, as float32 image [c, …] and one-hot target [l, …]."""
        image, target = self.images[row], self.targets[row]
        if self.patch:
            corner = [int(draws.integers(n - p + 1)) for n, p in zip(image.shape[1:], self.patch, strict=True)]
            box = tuple(slice(at, at + p) for at, p in zip(corner, self.patch, strict=True))
            image, target = image[(slice(None), *box)], target[(*[slice(None)] * (target.ndim - 3), *box)]
        if self.classes is not None:
            target = one_hot(np.asarray(target), self.classes)
        seen = _as_float(image)
        if self.modality_dropout:
            seen = seen * shown(draws.random((1, len(seen))), self.modality_dropout)[0]
        return seen, _as_float(target)


def _as_float(array: torch.Tensor | np.ndarray) -> torch.Tensor:
    return array.float() if isinstance(array, torch.Tensor) else torch.tensor(array, dtype=torch.float32)


@dataclass(frozen=True, slots=True)
class StepTerms:
    """How a private strategy on a 3D network takes a step.

    Attributes:
        rate: Learning-rate schedule.
        clip: Norm bound of a patient's gradient, or of each layer's part of it with ``per_layer``.
        chunk: Number of patients whose gradients are computed at once.
        per_layer: ``clip`` bounds each layer (:func:`layer_parts`) instead of all parameters together.
    """

    rate: Rate
    clip: float = 1.0
    chunk: int = 4
    per_layer: bool = False


class OnVolumes(ABC):
    """The parts that all private strategies on a 3D network share: patients, loss, clipping, and the step's number.

    Args:
        model: The network.
        patients: The voter's scans.
        terms: How a step is taken.

    Raises:
        InvalidInput: If the network or the loss makes patients' gradients depend on each other.
    """

    def __init__(self, model: torch.nn.Module, patients: Patients, terms: StepTerms) -> None:
        refuse_coupling(model)
        refuse_pooled(soft_dice_ce)
        self.start = plain_weights(model)
        self.patients, self.rate, self.chunk = patients, terms.rate, terms.chunk
        self.parts = clipped_parts(model, terms.clip, per_layer=terms.per_layer)
        self.gradients = per_patient(segmentation_loss(model, soft_dice_ce))
        self.turn = -1

    @property
    @abstractmethod
    def weights(self) -> dict[str, torch.Tensor]:
        """The weights of the network that the training would give now, by parameter name, detached."""

    def _weights_of_step(self) -> dict[str, torch.Tensor]:
        """Return the weights at which this step's gradients are computed: the current ones, or a sample of them."""
        return self.weights

    def total(self, batch: Int64[np.ndarray, "b"]) -> Mapping[str, torch.Tensor]:
        """Return the next step's clipped integer sum over the patients in these slots. # sensitive until noised"""
        weights, self.turn = self._weights_of_step(), self.turn + 1
        return total_over(weights, self.patients, batch, self.gradients, self.parts, chunk=self.chunk, turn=self.turn)


class VolumeSgd(OnVolumes):
    """DP-SGD on a 3D network: one clip over all parameters, Adam on the private mean.

    Args:
        model: The network.
        patients: The voter's scans.
        terms: How a step is taken.
    """

    def __init__(self, model: torch.nn.Module, patients: Patients, terms: StepTerms) -> None:
        super().__init__(model, patients, terms)
        self.leaves = {name: w.requires_grad_() for name, w in self.start.items()}
        self.optimizer = torch.optim.Adam(self.leaves.values())

    @property
    def weights(self) -> dict[str, torch.Tensor]:
        return {name: leaf.detach() for name, leaf in self.leaves.items()}

    @property
    def deviations(self) -> None:
        """None: DP-SGD has no posterior."""

    def apply(self, mean: Mapping[str, torch.Tensor], *, step: int, steps: int) -> None:
        """Take one Adam step along the private mean."""
        descend(
            list(self.leaves.values()), [mean[name] for name in self.leaves], self.optimizer, self.rate(step, steps)
        )

    def state(self) -> dict[str, Any]:
        """Return everything that a resumed training needs: weights, optimiser, and the number of the next step."""
        weights = {name: w.clone() for name, w in self.weights.items()}
        return {"weights": weights, "optimizer": self.optimizer.state_dict(), "turn": self.turn}

    def restore(self, state: dict[str, Any]) -> None:
        """Restore a saved state."""
        with torch.no_grad():
            for name, leaf in self.leaves.items():
                leaf.copy_(state["weights"][name])
        self.optimizer.load_state_dict(state["optimizer"])
        self.turn = int(state["turn"])


class VolumeBbb(OnVolumes):
    """DP-BBB on a 3D network.

    Each step samples the weights from the posterior, sums the patients' clipped gradients at this sample, and takes one
    step of the posterior.

    Args:
        model: The network.
        patients: The voter's scans.
        terms: How a step is taken.
        prior: The prior of the weights.
        initial_std: Standard deviation of every weight's posterior before the first step.
        seed: Seed of the weight samples.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        patients: Patients,
        terms: StepTerms,
        *,
        prior: Prior,
        initial_std: float,
        seed: int,
    ) -> None:
        super().__init__(model, patients, terms)
        self.descent = PosteriorDescent(WeightPosterior.around(self.start, std=initial_std), prior, seed=seed)

    @property
    def posterior(self) -> WeightPosterior:
        """The current posterior."""
        return self.descent.posterior

    @property
    def weights(self) -> dict[str, torch.Tensor]:
        """The weights of the mean network μ."""
        return {name: w.detach().float() for name, w in self.posterior.mean.items()}

    @property
    def deviations(self) -> dict[str, torch.Tensor]:
        """The posterior's standard deviations by parameter name."""
        return {name: deviation(rho).detach().float() for name, rho in self.posterior.rho.items()}

    def _weights_of_step(self) -> dict[str, torch.Tensor]:
        """Draw the weights of this step from the posterior."""
        return {name: w.float() for name, w in self.descent.sample().items()}

    def apply(self, mean: Mapping[str, torch.Tensor], *, step: int, steps: int) -> None:
        """Take one Adam step of the posterior along the private mean."""
        self.descent.apply(mean, self.rate(step, steps))

    def state(self) -> dict[str, Any]:
        """Return everything that a resumed training needs: the state of the descent, and the next step's number."""
        return {**self.descent.state(), "turn": self.turn}

    def restore(self, state: dict[str, Any]) -> None:
        """Restore a saved state."""
        self.descent.restore(state)
        self.turn = int(state["turn"])


def total_over(
    weights: Weights,
    patients: Patients,
    batch: Int64[np.ndarray, "b"],
    gradients: Gradients,
    parts: ClippingPlan,
    *,
    chunk: int,
    turn: int = 0,
) -> dict[str, torch.Tensor]:
    """Return the clipped integer sum over the patients in these slots. # sensitive until noised

    Guarantee: replacing, adding or removing scans of one patient moves the sum by at most 2·``RADIUS_INT`` in ℓ2.
    Emptying the patient's slot, or leaving it out of the batch, moves it by at most ``RADIUS_INT``. Every other
    patient's vector stays the same to the bit, on the same machine with the same number of threads.

    Args:
        weights: Parameters by name.
        patients: The voter's scans.
        batch: Slots of the step.
        gradients: Computes per-patient gradients.
        parts: How a contribution is divided and clipped.
        chunk: Number of patients whose gradients are computed at once; the same for a whole training.
        turn: Number of the step.

    Returns:
        int64 sums by parameter name; zeros for no patient.
    """
    total = zeros_like(weights, parts)
    for part in patients.chunks(batch, chunk, turn=turn):
        vectors, _ = gradients(weights, part.images, part.targets)
        for name, entry in integer_sum(vectors, parts, counted=part.filled).items():
            total[name] += entry
    return total


def clipped_parts(model: torch.nn.Module, clip: float, *, per_layer: bool) -> ClippingPlan:
    """Return how a gradient is divided for clipping: one part for all parameters, or one for each layer.

    Args:
        model: The network.
        clip: Norm bound of a patient's gradient, or of each layer's part of it with ``per_layer``.
        per_layer: True to clip each layer's gradient to ``clip`` instead of the whole gradient.

    Returns:
        The parts.
    """
    return layer_parts(model, clip) if per_layer else one_part(tuple(plain_weights(model)), clip)


def layer_parts(model: torch.nn.Module, clip: float) -> ClippingPlan:
    """Return a division with one part, clipped on its own, for each layer.

    With K layers, the norm of the whole vector is at most √K times the clip.

    A layer is a convolution and the parameters that follow it (norm, activation) up to the next convolution.

    Args:
        model: The network.
        clip: Norm bound of each layer.

    Returns:
        The parts.
    """
    layers: list[list[str]] = []
    for name, module in model.named_modules():
        own = [parameter for parameter, _ in module.named_parameters(name, recurse=False)]
        if own and (not layers or isinstance(module, torch.nn.modules.conv._ConvNd)):
            layers.append([])
        if own:
            layers[-1] += own
    return ClippingPlan(tuple(map(tuple, layers)), (clip,) * len(layers))
