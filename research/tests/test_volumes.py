"""Tests the 3D cells: no case has two roles, a private cell equals the product's training, the table is correct."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from client.training.private.settings import defaults
from research.roles import Cases
from research.volumes import (
    LAYER_CLIP,
    PATIENTS,
    PUBLIC_IMAGES,
    PUBLIC_MAPS,
    TEST,
    changed_volume,
    scores,
    split,
    volume_cells,
    volume_markdown,
    volume_rows,
)

SMALL = (2, 2, 2)


def result(method: str, seed: int, cases: list[float], **changes: str) -> dict[str, object]:
    cell = next(c for c in volume_cells(3) if (c.name, c.seed) == (method, seed) and c.delta in (None, 1e-5))
    cell = changed_volume(cell, changes) if changes else cell
    score = float(np.mean(cases))
    facts = {"score": score, "structures": [score, score], "cases": cases, "ece": 0.12}
    return {"cell": cell.to_json(), "noise_multiplier": 2.0, **facts}


def test_the_split_gives_every_case_one_part_and_the_site_its_160_patients() -> None:
    labels = np.zeros((200, *SMALL), np.uint8)
    labels[:, 0, 0, 0] = np.arange(200)
    roles = split(Cases(np.zeros((200, 1, *SMALL)), labels))
    parts = [part.labels[:, 0, 0, 0].tolist() for part in (roles.held_out, roles.public, roles.maps, roles.private[0])]
    assert [len(part) for part in parts] == [TEST, PUBLIC_IMAGES, PUBLIC_MAPS, PATIENTS]
    assert sorted(case for part in parts for case in part) == list(range(200))


def test_every_cell_has_a_name_of_its_own_and_private_ones_take_the_products_own_recipe() -> None:
    cells = volume_cells(3)
    assert len({cell.id for cell in cells}) == len(cells)
    assert len({cell.training for cell in cells}) == len(cells)  # each has a journal of its own
    for cell in cells:
        private = cell.settings()
        assert (private is None) == (cell.epsilon is None)
        if private is not None:
            own = defaults(cell.method.removesuffix("-layers"), epsilon=8, delta=private.delta, begun=cell.begun)
            assert private == (replace(own, clip=LAYER_CLIP, per_layer=True) if own.strategy != cell.method else own)
            assert cell.to_json()["recipe"]["steps"] == str(private.steps)


def test_the_gap_to_dp_sgd_is_paired_by_seed_and_case() -> None:
    rows = volume_rows(
        [
            result("dp-sgd", 0, [0.7, 0.8]),
            result("dp-sgd", 1, [0.6, 0.8]),
            result("dp-sgd-layers", 1, [0.65, 0.85]),
            result("public-start", 0, [0.5, 0.7]),
            result("dp-sgd", 0, [0.6, 0.6], steps="10"),
            result("dp-sgd-layers", 0, [0.7, 0.6], steps="10"),
        ]
    )
    changed = next(row for row in rows if row["method"] == "dp-sgd-layers[steps=10]")
    assert changed["over_dp_sgd"] == pytest.approx(0.05)  # beside DP-SGD of the same steps
    layers = next(row for row in rows if row["method"] == "dp-sgd-layers")
    assert layers["over_dp_sgd"] == pytest.approx(0.05)
    sgd = next(row for row in rows if row["method"] == "dp-sgd")
    assert (sgd["seeds"], sgd["mean"]) == (2, pytest.approx(0.725))
    text = "\n".join(volume_markdown(rows))
    assert "| dp-sgd | 8 | 1e-05 | 2 | 0.7250 ± 0.0354 | 0.725, 0.725 | +0.0000 | 0.120 | 2 |" in text
    assert "| public-start | ∞ | – | – | 0.6000 | 0.600, 0.600 | – | 0.120 | 1 |" in text


def test_dice_is_the_mean_of_the_structures_means() -> None:
    label = np.zeros((1, 4, 4, 4), np.uint8)
    label[0, :2], label[0, 2] = 1, 2
    cases = Cases(np.zeros((1, 1, 4, 4, 4)), label)
    perfect = scores(lambda _: np.stack([(label[0] == k).astype(float) for k in range(3)]), cases)
    assert perfect["score"] == pytest.approx(1)
    blind = scores(lambda _: np.stack([np.full((4, 4, 4), p) for p in (0.1, 0.8, 0.1)]), cases)
    assert blind["structures"] == [pytest.approx(2 * 32 / (64 + 32)), pytest.approx(0)]
