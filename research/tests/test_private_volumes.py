"""Tests ``consilium bench private``: paired differences, ratios of time, and DP-MAC's gradients beside autograd's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from client.training.private.blocks import blocks_of
from client.training.private.settings import PrivateSettings
from common.config import TrainingConfig
from common.models.fit import one_hot, soft_dice_ce
from common.models.unet import build_unet
from research.private_volumes import LOOKED_AT, METHODS, SharedTerms, heard, private_markdown, rows_of
from research.roles import Cases

ROOT = Path(__file__).resolve().parents[2]


def cell(method: str, begun: bool, seed: int, score: float, seconds: float) -> dict[str, Any]:
    recipe = {"steps": "40"}
    found = {"method": method, "begun": begun, "seed": seed, "score": score, "recipe": recipe}
    return {**found, "seconds_a_step": seconds, "noise_multiplier": 2.0}


def test_rows_pair_seeds_and_compare_time_within_a_run() -> None:
    cells = [
        *(cell("dp-sgd", True, seed, 0.7 + 0.01 * seed, 0.2 + 0.1 * seed) for seed in (0, 1)),
        *(cell("dp-sgd-layers", True, seed, 0.72, 0.2) for seed in (0, 1)),
        *(cell("dp-mac", True, seed, 0.71 + 0.01 * seed, 0.6 + 0.3 * seed) for seed in (0, 1)),
    ]
    mac = next(row for row in rows_of(cells) if row["method"] == "dp-mac")
    assert mac["mean"] == pytest.approx(0.715)
    assert mac["over_dp_sgd"] == pytest.approx([0.01, 0.01])
    assert mac["over_dp_sgd_layers"] == pytest.approx([-0.01, 0.0])
    assert mac["times_dp_sgd"] == pytest.approx(3.0)
    text = private_markdown({"terms": {"epsilon": 8.0, "delta": 1e-5}, "rows": rows_of(cells)})
    assert "| public | dp-mac | 40 | 0.715 ± 0.007 | +0.010 | -0.005 | 0.75 s, 3.00 of dp-sgd's | 2 |" in text


def test_every_method_trains_at_the_same_terms_with_its_own_recipe() -> None:
    terms = SharedTerms(8.0, 1e-5, None, TrainingConfig())
    found = {method: terms.settings(method, begun=True) for method in METHODS}
    assert {(one.epsilon, one.delta, one.steps, one.rate) for one in found.values()} == {
        (8.0, 1e-5, 40, found["dp-sgd"].rate)
    }
    assert found["dp-sgd-layers"].per_layer
    assert found["dp-sgd-layers"].clip == found["dp-mac"].clip
    assert SharedTerms(8.0, 1e-5, 7, TrainingConfig()).settings("dp-mac", begun=False).steps == 7


@pytest.mark.parametrize(
    "file", sorted((ROOT / "benchmarks" / "results" / "private").glob("*.json")), ids=lambda file: file.stem
)
def test_recorded_cells_were_trained_by_todays_recipes(file: Path) -> None:
    """The documents' tables were measured with the present defaults of ``site train``."""
    for one in json.loads(file.read_text(encoding="utf-8"))["cells"]:
        # The same for both starts; other tasks use each start's default.
        steps = {"tumours": 40, "tumours-100": 100}.get(file.stem)
        settings = SharedTerms(8.0, 1e-5, steps, TrainingConfig()).settings(one["method"], begun=one["begun"])
        assert one["recipe"] == {name: str(value) for name, value in settings.facts().items()}


def test_what_blocks_hear_of_back_propagation_is_autograds_over_the_same_cases() -> None:
    rng = np.random.default_rng(0)
    labels = (rng.random((LOOKED_AT, 8, 8, 8)) < 0.3).astype(np.uint8)
    images = rng.normal(labels, 0.3).astype(np.float32)[:, None]
    model = build_unet((3, 4, 5), in_channels=1, out_channels=2, seed=1)
    settings = PrivateSettings("dp-mac", 8.0, 1e-3, clip=1e-3)
    found = heard(model, Cases(images, labels), settings, classes=2, mu=20.0)
    y = torch.tensor(np.stack([one_hot(label, 2) for label in labels]))
    soft_dice_ce(model(torch.tensor(images)), y).mean().backward()
    gradients = {name: weight.grad for name, weight in model.named_parameters()}
    norms = [
        float(torch.cat([g.flatten() for n in names if (g := gradients[n]) is not None]).norm())
        for names in blocks_of(model).weights
    ]
    assert len(found) == 5
    for row, norm in zip(found, norms, strict=True):
        assert row["back_propagation"] == pytest.approx(norm / norms[-1], rel=1e-3)
        assert 0 < row["cosine"] <= 1 + 1e-6
    assert found[-1]["length"] == 1
    assert any(row["apart"] > 0.02 for row in found[:-1])
