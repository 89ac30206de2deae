"""The papers' benchmark: cells are used again for the same recipe only, and tables say what a number rests on."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from consilium.cli.bench import app
from consilium.research.cells import PUBLISHED, all_cells, event_of, expected_calibration_error
from consilium.research.papers import _stored, figure, markdown, table


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
            assert {
                (data, name, epsilon) for epsilon in printed if not (name.endswith("noise") and epsilon is None)
            } <= covered


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


def test_the_figure_is_drawn_from_what_is_there(tmp_path: Path) -> None:
    figure([result("mnist", "dp-sgd", 2.0, seed, 0.95) for seed in (0, 1)], tmp_path / "f.png")
    assert (tmp_path / "f.png").read_bytes()[:4] == b"\x89PNG"


def test_a_confident_guesser_who_is_right_half_the_time_is_half_off() -> None:
    right = np.array([1.0, 0.0] * 50)
    assert expected_calibration_error(np.full(100, 0.99), right) == pytest.approx(0.49)
    assert expected_calibration_error(np.full(100, 0.5), right) == pytest.approx(0)


def test_cells_without_privacy_claim_none() -> None:
    cell = next(c for c in all_cells(1) if c.epsilon is None)
    assert event_of(cell, examples=5000).noise_multiplier == 10_000


def test_a_name_that_fits_no_cell_is_refused_and_report_only_trains_nothing(tmp_path: Path) -> None:
    run = lambda *more: CliRunner().invoke(app, ["papers", "--data", "x", "--out", str(tmp_path), *more])  # noqa: E731
    assert run("--only", "imagenet").exit_code != 0
    done = run("--report-only", "--only", "mnist/dp-sgd")
    assert done.exit_code == 0
    assert "dp-cdbn" in done.stdout
