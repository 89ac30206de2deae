"""Tests the papers' benchmark: stored cells are used for the same recipe only, and tables state their basis."""

from __future__ import annotations

import dataclasses
import json
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from common.calibration import binned
from common.privacy.training import epsilon_of
from research import cells
from research.cells import (
    _in_fixed_batches,
    event_of,
)
from research.command import app
from research.papers import _stored, figure1, figure3, markdown, papers, table
from research.recipes import DELTA, PUBLISHED, RELATION, all_cells, exponential_decay
from tests.commands import refusal_of

RECORDED = sorted((Path(__file__).parents[2] / "benchmarks" / "results" / "digits").glob("*.json"))


def result(data: str, name: str, epsilon: float | None, seed: int, score: float, **more: object) -> dict[str, object]:
    cell = next(c for c in all_cells(3) if (c.data, c.name, c.epsilon, c.seed) == (data, name, epsilon, seed))
    curve = [{"epoch": epoch, "test": score, "train": score} for epoch in (1, 2)]
    facts = {"noise_multiplier": 1.0, "delta": 1e-5, "relation": "add-remove", "curve": curve, "seconds": 1.0}
    return {
        "cell": json.loads(json.dumps(cell.to_json())),
        "id": cell.id,
        "epsilon": epsilon,
        "score": score,
        **facts,
        **more,
    }


def test_every_cell_has_a_name_of_its_own_and_the_papers_columns_are_covered() -> None:
    cells = all_cells(2)
    assert len({cell.id for cell in cells}) == len(cells)
    covered = {(cell.data, cell.name, cell.epsilon) for cell in cells}
    for (data, name), printed in PUBLISHED.items():
        if name != "dp-cdbn":
            assert {(data, name, epsilon) for epsilon in printed} <= covered


def test_a_finished_cell_is_used_again_only_while_its_recipe_stays_the_same(tmp_path: Path) -> None:
    cell = all_cells(1)[0]
    path = tmp_path / "cells" / f"{cell.id.replace('/', '_')}.json"
    path.parent.mkdir()
    path.write_text(json.dumps({"cell": cell.to_json(), "score": 0.9}))
    assert _stored(tmp_path, cell.id, cell.to_json()) is not None
    changed = cell.to_json()
    changed["recipe"]["clip"] = 7.0
    assert _stored(tmp_path, cell.id, changed) is None
    path.write_text("{")
    assert _stored(tmp_path, cell.id, cell.to_json()) is None


def test_the_table_has_mean_deviation_seeds_the_papers_number_and_a_true_epsilon_where_noise_was_halved() -> None:
    rows = table(
        [
            result("mnist", "dp-mac", 8.0, 0, 0.96),
            result("mnist", "dp-mac", 8.0, 1, 0.98),
            result("usps", "dp-sgd-half-noise", 8.0, 0, 6.5) | {"epsilon": 21.25},
        ]
    )
    mac = next(row for row in rows if row["method"] == "dp-mac")
    assert (mac["mean"], mac["seeds"], mac["published"]) == (pytest.approx(0.97), 2, 0.97)
    assert mac["sd"] == pytest.approx(0.0141421, rel=1e-4)
    text = markdown(rows)
    assert "| dp-mac | 8 | 0.9700 ± 0.0141 | 2 | 0.97 |" in text
    assert "| dp-sgd-half-noise | 8 claimed, 21.3 true | 6.50 | 1 | 6.4 |" in text
    assert "| dp-cdbn | 2 | – | 0 | 0.95 |" in text
    assert "| dp-sgd | ∞ | – | 0 | 3.6 |" in text  # a published value has its row before a run of ours


def test_the_figure_is_drawn_from_what_is_there(tmp_path: Path) -> None:
    figure3([result("mnist", "dp-sgd", 2.0, seed, 0.95) for seed in (0, 1)], tmp_path / "3.png")
    figure1([result("usps", "dp-mac", None, seed, 4.4) for seed in (0, 1)], tmp_path / "1.png")
    assert all((tmp_path / f"{number}.png").read_bytes()[:4] == b"\x89PNG" for number in (1, 3))


@pytest.mark.parametrize(("epsilon", "poisson", "fixed"), [(8.0, 4.47, 37.68), (2.0, 1.10, 9.75), (0.5, 0.27, 1.56)])
def test_the_printed_noise_costs_what_the_accountant_says(epsilon: float, poisson: float, fixed: float) -> None:
    cell = next(c for c in all_cells(1) if (c.name, c.epsilon) == ("dp-mac-paper", epsilon))
    event = event_of(cell, examples=60_000)
    assert epsilon_of(event, delta=DELTA, neighbours=RELATION) == pytest.approx(poisson, abs=0.01)
    assert _in_fixed_batches(event) == pytest.approx(fixed, abs=0.01)


TABLE_2 = {
    ("mnist", "dp-mac-paper", 8.0): {"batch": 1000, "epochs": 30, "rate": 0.01, "decay": 0.95, "noise": "1"},
    ("mnist", "dp-mac-paper", 2.0): {"batch": 1000, "epochs": 30, "rate": 0.01, "decay": 0.95, "noise": "14/5"},
    ("mnist", "dp-mac-paper", 0.5): {"batch": 1000, "epochs": 10, "rate": 0.03, "decay": 0.7, "noise": "8"},
    ("usps", "dp-mac", 8.0): {"batch": 500, "epochs": 50, "rate": 0.003, "decay": 0.97, "z_rate": 0.001},
    ("usps", "dp-mac", 2.0): {"batch": 250, "epochs": 50, "clip": 0.001, "optimizer": "adam"},
    ("usps", "dp-sgd-paper", 8.0): {"batch": 500, "epochs": 100, "rate": 100, "clip": 0.01, "optimizer": "sgd"},
    ("usps", "dp-sgd-paper", 1.0): {"batch": 250, "epochs": 100, "rate": 50, "clip": 0.01, "decay": 0.99},
}
"""Table 2 of the DP-MAC paper, whose last column is printed one row off. The values are those of the authors' program.
"""
TABLES = {
    ("mnist", "dp-mac", 2.0): {"batch": 2000, "epochs": 30, "rate": 0.03, "decay": 0.92, "clip": 0.3, "output": "bce"}
    | {"z_rate": 0.003, "z_steps": 30, "pca_noise": 8, "whiten": True, "hidden": 300, "initial": "he", "offset": 0.0},
    ("mnist", "dp-sgd", 8.0): {"batch": 2000, "epochs": 30, "rate": 0.01, "decay": None, "clip": 1.0, "pca_noise": 4}
    | {"output": "softmax", "whiten": True, "optimizer": "adam", "hidden": 300},
    ("mnist", "dp-bbb", 8.0): {"batch": 1000, "epochs": 30, "rate": 0.01, "decay": None, "clip": 1.0, "pca_noise": 4},
    ("usps", "dp-mac", 8.0): {"batch": 500, "epochs": 50, "rate": 0.003, "decay": 0.97, "clip": 0.001, "offset": 0.25}
    | {"z_rate": 0.001, "z_steps": 30, "initial": "glorot", "output": "mse", "pca_noise": None},
    ("usps", "dp-sgd", 1.0): {"batch": 250, "epochs": 50, "rate": 0.003, "decay": None, "clip": 0.1, "offset": 0.25}
    | {"initial": "glorot", "output": "mse", "pca_noise": None},
}
"""The recipes of the tables in docs/private-training.md."""
CLASSIFIER = {"z_rate": 0.003, "z_steps": 30, "clip": 0.3, "hidden": 300, "whiten": False}


def test_the_recipes_are_those_of_table_2_and_of_the_documented_tables() -> None:
    known = {(cell.data, cell.name, cell.epsilon): cell.recipe for cell in all_cells(1)}
    for key, printed in TABLE_2.items():
        more = CLASSIFIER if key[0] == "mnist" else {"z_steps": 30} if key[1] == "dp-mac" else {}
        for name, value in (printed | more).items():
            assert getattr(known[key], name) == value, (key, name)
    assert {epsilon: known["mnist", "dp-mac-paper", epsilon].pca_noise for epsilon in (8.0, 2.0, 0.5)} == {
        8.0: 4,
        2.0: 8,
        0.5: 16,
    }
    plain = {"temperature": 0.03, "prior_std": 0.2, "initial_std": 0.02, "noise_share": 1.0, "noise": None, "order": 1}
    for key, own in TABLES.items():
        for name, value in (plain | own).items():
            assert getattr(known[key], name) == value, (key, name)


@pytest.mark.parametrize("file", RECORDED, ids=lambda file: file.stem)
def test_recorded_cells_were_trained_by_todays_recipes(file: Path) -> None:
    known = {(cell.data, cell.name, cell.epsilon): cell.recipe for cell in all_cells(1)}
    for found in json.loads(file.read_text(encoding="utf-8"))["cells"]:
        cell = found["cell"]
        today = json.loads(json.dumps(dataclasses.asdict(known[cell["data"], cell["name"], cell["epsilon"]])))
        assert cell["recipe"] == today, found["id"]


def test_half_the_noise_is_half_the_noise_and_is_charged_what_it_costs() -> None:
    halved, whole = (
        next(c for c in all_cells(1) if (c.data, c.name, c.epsilon) == ("usps", name, 8.0))
        for name in ("dp-sgd-half-noise", "dp-sgd")
    )
    size = Fraction(10_000)
    assert cells._noise(halved)(20_000, size).std() == pytest.approx(5_000, rel=0.03)
    assert cells._noise(whole)(20_000, size).std() == pytest.approx(10_000, rel=0.03)
    event = event_of(halved, examples=5_000)
    assert cells._true_epsilon(event, halved.recipe) > 2 * epsilon_of(event, delta=DELTA, neighbours=RELATION)


@pytest.fixture
def digits(tmp_path: Path) -> Path:
    """Write 2,000 training images in place of MNIST: a bright block on noise, whose position tells the digit."""
    rng = np.random.default_rng(0)
    labels = rng.integers(0, 10, 2400)
    images = rng.integers(0, 60, (2400, 28, 28)).astype(np.uint8)
    for image, label in zip(images, labels, strict=True):
        image[2 * label : 2 * label + 6, label : label + 9] += 180
    (tmp_path / "mnist").mkdir()
    parts = {"x_train": images[:2000], "y_train": labels[:2000], "x_test": images[2000:], "y_test": labels[2000:]}
    np.savez(tmp_path / "mnist" / "mnist.npz", **parts)
    return tmp_path


SHORT = {"batch": "500", "epochs": "2", "hidden": "8", "noise": "2"}


@pytest.mark.parametrize(
    "changes",
    [
        {"order": "2", "w_steps": "3"},
        {"order": "2", "value_bound": "4"},
        {"order": "2", "activation": "softplus", "norm_bound": "3", "clip": "1e9", "curvature_clip": "1e9"},
    ],
)
def test_second_order_three_partitions_and_analytic_bounds_are_reached_by_the_command(
    digits: Path, tmp_path: Path, changes: dict[str, str]
) -> None:
    made = papers(digits, tmp_path / "out", seeds=1, only="mnist/dp-mac/8", changes=SHORT | changes)
    (row,) = [row for row in made.rows if row["mean"] is not None]
    assert row["recipe"]["order"] == 2
    assert row["method"].startswith("dp-mac[")
    assert 0 <= row["mean"] <= 1  # 0 can occur: two epochs are few, and the noise cannot be seeded
    assert row["true_epsilon"] <= 8


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"order": "2", "output": "softmax"}, "--set order=1"),
        ({"norm_bound": "3"}, "--set activation=softplus"),
        ({"value_bound": "3"}, "--set order=2"),
        ({"colour": "3"}, "--set"),
        ({"clip": "wide"}, "--set clip"),
    ],
)
def test_what_a_recipe_cannot_do_is_refused_with_an_option_that_exists(
    digits: Path, tmp_path: Path, changes: dict[str, str], said: str
) -> None:
    words = [word for name, value in (SHORT | changes).items() for word in ("--set", f"{name}={value}")]
    refused = refusal_of(app, "papers", "--data", digits, "--out", tmp_path / "o", "--only", "mnist/dp-mac/8", *words)
    assert said in str(refused)
    assert "--set" in CliRunner().invoke(app, ["papers", "--help"], env={"COLUMNS": "200"}).output


def test_a_cell_that_is_stopped_goes_on_at_its_last_epoch(
    digits: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = {"seeds": 1, "only": "mnist/dp-sgd/8", "changes": SHORT | {"epochs": "3"}}
    scores, inputs = [], []

    class Pulled(Exception):
        pass

    def pulled(_strategy: object, x: torch.Tensor, _y: object) -> float:
        scores.append(0)
        inputs.append(x)
        if len(scores) == 4:  # in the second epoch
            raise Pulled
        return 0.5

    monkeypatch.setattr(cells, "_score", pulled)
    with pytest.raises(Pulled):
        papers(digits, tmp_path / "out", **given)  # type: ignore[arg-type]
    assert [path.suffix for path in (tmp_path / "out" / "cells").iterdir()] == [".checkpoint"]
    papers(digits, tmp_path / "out", **given)  # type: ignore[arg-type]
    kept = json.loads(next((tmp_path / "out" / "cells").iterdir()).read_text())
    assert [point["epoch"] for point in kept["curve"]] == [1, 2, 3]
    assert len(scores) == 4 + 2 * 2 + 1  # two epochs more and the end, not three
    assert torch.equal(inputs[0], inputs[-1])  # the private projection is drawn once; its noise never comes twice alike
    assert [path.suffix for path in (tmp_path / "out" / "cells").iterdir()] == [".json"]


def test_a_confident_guesser_who_is_right_half_the_time_is_half_off() -> None:
    right = np.array([True, False] * 50)
    assert binned(np.full(100, 0.99), right).error == pytest.approx(0.49)
    assert binned(np.full(100, 0.5), right).error == pytest.approx(0)


def test_cells_without_privacy_claim_none() -> None:
    cell = next(c for c in all_cells(1) if c.epsilon is None)
    assert event_of(cell, examples=5000).noise_multiplier == 10_000


def test_a_name_that_fits_no_cell_is_refused_and_report_only_trains_nothing(tmp_path: Path) -> None:
    run = lambda *more: CliRunner().invoke(app, ["papers", "--data", "x", "--out", str(tmp_path), *more])  # noqa: E731
    assert run("--only", "imagenet").exit_code != 0
    done = run("--report-only", "--only", "mnist/dp-sgd")
    assert done.exit_code == 0
    assert "dp-cdbn" in done.stdout


def test_exponential_decay_multiplies_the_rate_once_an_epoch() -> None:
    """Takes the rates of Table 2's classifier at ε 8: .01 · .95^epoch over 30 epochs of 60 steps."""
    rate = exponential_decay(0.01, 0.95, passes=30)
    assert [rate(step, 1800) for step in (0, 59)] == [0.01, 0.01]
    assert rate(60, 1800) == pytest.approx(0.0095)
    assert rate(1799, 1800) == pytest.approx(0.01 * 0.95**29)
