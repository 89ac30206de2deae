"""Tests the demo's last lines: plain sentences with the report's figures, and no gain that was not proven."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from consilium.cli.demo import summary

WORTH = {
    "word": "proven",
    "gain": 0.125,
    "interval": [0.086, 0.164],
    "cases": 45,
    "student": 0.685,
    "other": 0.56,
    "reference": "the control zero code",
}


def said(folder: Path, worth: dict[str, Any] | None, *, alarms: tuple[str, ...] = ()) -> list[str]:
    """Return the demo's lines for a report written by hand."""
    scored = {"dice": {"mean": 0.685}}
    privacy = {"delta": 1e-5, "unit": "patient", "relation": "replace-one", "accountant": "exact", "queries": 4}
    privacy |= {"epsilon_exact": 7.9999999, "epsilon_rdp": 8.6, "guaranteed_epsilon": 8.0, "voters": 24}
    report = {
        "privacy": privacy,
        "worth": worth,
        "student": scored,
        "ensemble": {"dice": {"mean": 0.717}},
        "mean_teacher": {"dice": {"mean": 0.66}},
        "data": {"used": 160, "left_out": []},
    }
    home = folder / "sites" / "hospital-01" / "evaluation" / "1"
    home.mkdir(parents=True)
    (folder / "report.json").write_text(json.dumps(report))
    (home / "evaluation.json").write_text(json.dumps({"all": {"mean_dice": 0.7, "cases": 24}, "alarms": list(alarms)}))
    return summary(folder).splitlines()


def test_a_demo_ends_in_plain_sentences_with_the_gain_first(tmp_path: Path) -> None:
    gain, teachers, guarantee, home = said(tmp_path, WORTH)
    for figure in ("0.685", "zero code 0.560", "+0.125", "95 % interval +0.086 to +0.164", "45 cases"):
        assert figure in gain
    for figure in ("24 teachers", "0.717", "0.660"):
        assert figure in teachers
    for fact in ("ε = 8 (exact)", "δ = 1e-05", "unit patient", "relation replace-one", "4 answers spent ε = 8"):
        assert fact in guarantee
    assert home.startswith("hospital-01 ")
    assert home.endswith(".")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"word": "not proven", "gain": 0.02, "interval": [-0.01, 0.05]}, "no gain is proven: +0.020"),
        ({"word": "worse", "gain": -0.1, "interval": [-0.2, -0.05]}, "worse: -0.100"),
        ({"word": "not proven", "interval": None}, "no interval"),
    ],
)
def test_what_is_not_proven_is_not_called_a_gain(tmp_path: Path, change: dict[str, Any], words: str) -> None:
    gain = said(tmp_path, WORTH | change)[0]
    assert words in gain
    assert "gained" not in gain


def test_the_demo_prints_alarms_about_the_student_and_says_if_nothing_was_measured(tmp_path: Path) -> None:
    lines = said(tmp_path, None, alarms=("anterior: GONE",))
    assert re.search("0.685; .*could not be measured", lines[0])
    assert re.search("^hospital-01 .*: anterior: GONE$", lines[-1])
