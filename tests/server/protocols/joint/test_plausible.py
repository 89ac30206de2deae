"""What the operator is told of a joint query: seldom a thing where all is as expected, never more than is known."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from common.protocols.joint.frame import Frame, Observation, plan_frame
from server.protocols.joint.plausible import FALSE_ALARMS, REMEDY, Plausible, shares

NOISE = 0.2


@pytest.fixture(scope="module")
def frame() -> Frame:
    rng = np.random.default_rng(0)
    root = rng.normal(size=(24, 24))
    return plan_frame(
        kernel=root @ root.T,
        centre=np.zeros((4, 6)),
        variances=np.linspace(2, 1, 6),
        residual=0.5,
        temperature=1.0,
        noise_std=NOISE,
        radius=1.0,
        codec="a" * 64,
    )


def draws(frame: Frame, count: int, *, size: float = 1.0) -> list[Observation]:
    """Released offsets drawn by hand: what the frame expects, ``size`` times as large, and the release's noise."""
    rng = np.random.default_rng(1)
    asked = frame.weights > 0
    variances, weights = frame.variances[asked], frame.weights[asked]
    found = []
    for _ in range(count):
        mean_code = weights * size * rng.normal(size=len(weights)) * np.sqrt(variances) + NOISE * rng.normal(
            size=len(weights)
        )
        found.append(frame.read(mean_code, noise_std=NOISE))
    return found


def warned(frame: Frame, seen: list[Observation]) -> float:
    return float(np.mean([bool(Plausible(frame.surprise(each), frame.dimension).warnings) for each in seen]))


def test_releases_as_large_as_expected_warn_as_seldom_as_promised(frame: Frame) -> None:
    """2,000 draws: within four standard errors of the 5 % that is stated; with the mean and variance of a χ²."""
    seen = draws(frame, 2000)
    values = [frame.surprise(each) for each in seen]
    assert np.mean(values) == pytest.approx(frame.dimension, rel=0.05)
    assert np.var(values) == pytest.approx(2 * frame.dimension, rel=0.2)
    error = math.sqrt(FALSE_ALARMS * (1 - FALSE_ALARMS) / len(seen))
    assert abs(warned(frame, seen) - FALSE_ALARMS) < 4 * error


def test_answers_that_cancel_each_other_and_answers_that_are_too_large_are_told_apart(frame: Frame) -> None:
    silent, loud = draws(frame, 300, size=0.0), draws(frame, 300, size=3.0)
    assert warned(frame, silent) > 0.3 > FALSE_ALARMS
    assert warned(frame, loud) > 0.9
    weak = Plausible(40.0, 100)
    large = Plausible(170.0, 100)
    assert "weaker together than expected" in weak.warnings[0]
    assert "larger together than expected" in large.warnings[0]
    assert weak.warnings[-1] == large.warnings[-1] == REMEDY
    assert Plausible(100.0, 100).warnings == ()


def test_rounds_add_up_and_a_frame_is_surprised_by_what_it_did_not_expect(frame: Frame) -> None:
    """By hand: Σ y² / (w²v + σ²) of the mean code y."""
    asked = frame.weights > 0
    code = np.linspace(-1, 1, frame.dimension)
    expected = np.sum(code**2 / (frame.weights[asked] ** 2 * frame.variances[asked] + NOISE**2))
    assert frame.surprise(frame.read(code, noise_std=NOISE)) == pytest.approx(expected)
    wider = replace(frame, variances=frame.variances * 4)
    assert wider.surprise(frame.read(code, noise_std=NOISE)) < expected


def test_a_structure_that_left_the_labels_is_named() -> None:
    volumes = shares(("left", "right", "none"), [40, 900, 0], [100, 1000, 0])
    assert volumes == (("left", 0.4), ("right", 0.9), ("none", 1.0))
    (what, remedy) = Plausible(100.0, 100, volumes).warnings
    assert what.startswith("left has 0.4 times the volume")
    assert remedy == REMEDY
    grown = Plausible(100.0, 100, shares(("new",), [5], [0]))
    assert grown.warnings[0].startswith("new has inf times")
    assert grown.event()["volumes"] == ["new inf"]
