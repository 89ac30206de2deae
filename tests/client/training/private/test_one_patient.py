"""Tests what one patient's scans change in a step of a private training: the patient's own vector and no other.

Both worlds have the same random draws (batch, patches, weights), as in the proof. The difference of their sums is
compared with R, the radius of the clipped integer vectors. The oracle uses only arithmetic on the sums.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import sqrt

import numpy as np
import pytest
import torch

from client.training.private.blocks import blocks_of
from client.training.private.clipped_sums import RADIUS_INT, ClippingPlan, zeros_like
from client.training.private.gradients import per_patient, plain_weights, segmentation_loss
from client.training.private.mac import Penalty, mac_loss
from client.training.private.strategies_3d import Patients, clipped_parts, total_over
from common.models.fit import soft_dice_ce
from common.models.unet import build_unet

GRID, CLASSES, PEOPLE, VICTIM = (10, 8, 8), 3, 7, 2
SCANS = {slot: 1 + slot % 3 for slot in range(PEOPLE)}
"""Number of scans of each patient; the victim has three."""


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def scan(slot: int, number: int, *, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng([seed, slot, number])
    label = np.zeros(GRID, np.uint8)
    x, y, z = rng.integers(0, 4, 3)
    label[x : x + 5, y : y + 3, z : z + 3], label[x : x + 5, y + 3 : y + 5, z : z + 3] = 1, 2
    return rng.normal(2.0 * label, 0.5).astype(np.float32)[None], label


def world(change: str = "as it is") -> dict[int, list[tuple[np.ndarray, np.ndarray]]]:
    """Return everybody's scans; ``change`` says how the victim's scans differ."""
    own = {slot: [scan(slot, number) for number in range(count)] for slot, count in SCANS.items()}
    match change:
        case "gone":
            own[VICTIM] = []
        case "fewer scans":
            del own[VICTIM][1:]
        case "more scans":
            own[VICTIM] += [scan(VICTIM, number) for number in range(3, 6)]
        case "other scans":
            own[VICTIM] = [scan(VICTIM, number, seed=9) for number in range(3)]
        case "twice the same":
            own[VICTIM] *= 2
        case "not finite":
            own[VICTIM] = [(np.full_like(image, np.nan), label) for image, label in own[VICTIM]]
        case "enormous":
            own[VICTIM] = [(image * np.float32(1e30), label) for image, label in own[VICTIM]]
        case "constant":
            own[VICTIM] = [(np.zeros_like(image), np.zeros_like(label)) for image, label in own[VICTIM]]
    return own


@dataclass(frozen=True)
class Way:
    """Holds how a private trainer computes its sum."""

    gradients: Callable
    parts: ClippingPlan
    weights: Mapping[str, torch.Tensor]


def way(strategy: str) -> Way:
    model = build_unet((4, 8), in_channels=1, out_channels=CLASSES, seed=3)
    weights = plain_weights(model)
    if strategy == "dp-mac":
        blocks = blocks_of(model)
        loss = mac_loss(blocks, soft_dice_ce, mu=500.0, how=Penalty(500.0, 1.0, 2, 0.5))
        return Way(per_patient(loss), blocks.parts(0.02), weights)
    parts = clipped_parts(model, 0.02, per_layer=strategy.endswith("per layer"))
    return Way(per_patient(segmentation_loss(model, soft_dice_ce)), parts, weights)


def release(
    people: dict[int, list[tuple[np.ndarray, np.ndarray]]], how: Way, *, patch: tuple[int, ...], views: int, turn: int
) -> tuple[dict[str, torch.Tensor], list[dict[str, torch.Tensor]]]:
    """Return the step's integer sum, and each place's vector before clipping."""
    rows = [(slot, *one) for slot, own in people.items() for one in own]
    images = np.stack([image for _, image, _ in rows]) if rows else np.zeros((0, 1, *GRID), np.float32)
    labels = np.stack([label for _, _, label in rows]) if rows else np.zeros((0, *GRID), np.uint8)
    everybody = Patients(
        images, labels, tuple(slot for slot, _, _ in rows), scans=views, classes=CLASSES, patch=patch, key=b"k" * 32
    )
    seen: list[dict[str, torch.Tensor]] = []

    def spied(*given: object) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        vectors, losses = how.gradients(*given)
        seen.extend({name: entry[i].clone() for name, entry in vectors.items()} for i in range(len(losses)))
        return vectors, losses

    batch = np.array([0, 1, 2, 4, 5, 6])
    return total_over(how.weights, everybody, batch, spied, how.parts, chunk=4, turn=turn), seen


def moved(one: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor]) -> float:
    """Return ‖a − b‖₂ / R; the squares are summed as Python's integers."""
    steps = [int(step) for name in one for step in (one[name] - other[name]).flatten().tolist()]
    return sqrt(sum(step * step for step in steps)) / RADIUS_INT


CHANGES = {
    "gone": 1.0,
    "not finite": 1.0,
    "fewer scans": 2.0,
    "more scans": 2.0,
    "other scans": 2.0,
    "twice the same": 2.0,
    "enormous": 2.0,
    "constant": 2.0,
}
"""Largest movement by a change, in R: 1 if the patient counts in only one of the worlds, else 2."""


WAYS = ("dp-sgd", "dp-sgd per layer")
PATCHES: tuple[tuple[int, ...], ...] = ((), (6, 4, 4))
MET = [
    (strategy, PATCHES[(number + place) % 2], change)
    for number, change in enumerate(CHANGES)
    for place, strategy in enumerate(WAYS)
]
"""Combinations in which every change meets every way and both patches, and every way meets both patches."""


@pytest.mark.parametrize(("strategy", "patch", "change"), MET)
def test_one_patients_scans_move_the_step_by_no_more_than_is_charged_and_nobody_elses_vector(
    strategy: str, patch: tuple[int, ...], change: str
) -> None:
    how = way(strategy)
    for turn, views in ((0, 1), (3, 2)):
        before, mine = release(world(), how, patch=patch, views=views, turn=turn)
        after, theirs = release(world(change), how, patch=patch, views=views, turn=turn)
        assert moved(before, after) <= CHANGES[change]
        others = [place for place in range(len(mine)) if place != VICTIM]
        assert all(torch.equal(mine[at][name], theirs[at][name]) for at in others for name in mine[at])


@pytest.mark.parametrize("strategy", ["dp-sgd", "dp-sgd per layer", "dp-mac"])
def test_whether_a_patient_is_in_the_batch_changes_nobody_elses_vector(strategy: str) -> None:
    """One more patient changes the sum by a vector of norm at most R. The rest of the batch does not matter."""
    how = way(strategy)
    images, labels = zip(*(scan(slot, 0) for slot in range(12)), strict=True)
    people = Patients(np.stack(images), np.stack(labels), tuple(range(12)), classes=CLASSES)

    def total(batch: list[int]) -> dict[str, torch.Tensor]:
        return total_over(how.weights, people, np.array(sorted(batch)), how.gradients, how.parts, chunk=4)

    own = total([VICTIM])
    assert 0 < moved(own, zeros_like(how.weights, how.parts)) <= 1
    for others in ([], [1, 3], [0, 1, 4, 5, 6, 9, 10]):
        with_it, without = total([*others, VICTIM]), total(others)
        assert all(torch.equal(with_it[name] - without[name], own[name]) for name in own)


def test_the_sum_over_empty_slots_is_zero_and_costs_as_many_gradients_as_a_full_one() -> None:
    how = way("dp-sgd")
    full, of_full = release(world(), how, patch=(), views=2, turn=0)
    empty, of_empty = release({slot: [] for slot in SCANS}, how, patch=(), views=2, turn=0)
    assert all(not entry.any() for entry in empty.values())
    assert {name: entry.shape for name, entry in empty.items()} == {name: entry.shape for name, entry in full.items()}
    assert len(of_full) == len(of_empty) == 8  # two chunks of four places


def test_a_patch_lies_elsewhere_under_another_key_and_for_another_slot_turn_or_view() -> None:
    image = np.arange(np.prod(GRID), dtype=np.float32).reshape(1, 1, *GRID)
    label = np.zeros((1, *GRID), np.uint8)

    def corners(slot: int, key: bytes) -> list[float]:
        people = Patients(image, label, (slot,), scans=3, classes=CLASSES, patch=(2, 2, 2), key=key)
        return [
            float(view.flatten()[0])
            for turn in range(4)
            for chunk in people.chunks(np.array([slot]), 1, turn=turn)
            for view in chunk.images[0]
        ]

    assert corners(0, b"a") == corners(0, b"a")
    assert len({tuple(corners(slot, key)) for slot in (0, 1) for key in (b"a", b"b")}) == 4
    assert len(set(corners(0, b"a"))) > 6
