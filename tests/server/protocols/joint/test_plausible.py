"""Tests the operator's warnings about joint answers: they are rare in an honest study and never claim too much."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from common.protocols.frame import Frame, Observation, plan_frame
from server.protocols.plausible import FALSE_ALARMS, HONEST, REMEDY, NoiseShare, PlausibilityTest, shares

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
    """Draw released offsets: ``size`` times what the frame expects, plus the release's noise."""
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


def weighed(frame: Frame, seen: Observation) -> PlausibilityTest:
    asked = frame.weights > 0
    noise = (NOISE / frame.weights[asked]) ** 2
    return PlausibilityTest(
        frame.surprise(seen), frame.dimension, NoiseShare.of(noise / (frame.variances[asked] + noise))
    )


def warned(frame: Frame, seen: list[Observation]) -> float:
    return float(np.mean([bool(weighed(frame, each).warnings) for each in seen]))


@pytest.mark.parametrize("variance", [HONEST[0], 0.5, 1.0, 2.0, HONEST[1]])
def test_one_honest_study_in_a_hundred_is_warned_of_at_most(frame: Frame, variance: float) -> None:
    """For each size of an honest answer the test draws 2,000 studies; it allows four standard errors."""
    seen = draws(frame, 2000, size=math.sqrt(variance))
    error = math.sqrt(FALSE_ALARMS * (1 - FALSE_ALARMS) / len(seen))
    assert FALSE_ALARMS == 0.01
    assert warned(frame, seen) < FALSE_ALARMS + 4 * error
    values = [frame.surprise(each) for each in seen]
    share = NOISE**2 / (frame.weights[frame.weights > 0] ** 2 * frame.variances[frame.weights > 0] + NOISE**2)
    each = share + variance * (1 - share)
    assert np.mean(values) == pytest.approx(each.sum(), rel=0.05)
    assert np.var(values) == pytest.approx(2 * np.square(each).sum(), rel=0.2)


def test_at_either_end_of_the_honest_range_half_of_the_false_alarms_occur(frame: Frame) -> None:
    """A rule that never warns would pass the test above. At each end the rule must warn in half a percent of
    studies.
    """
    for variance in HONEST:
        seen = draws(frame, 4000, size=math.sqrt(variance))
        assert 0.25 * FALSE_ALARMS / 2 < warned(frame, seen) < 2.5 * FALSE_ALARMS / 2


def test_answers_that_cancel_each_other_and_answers_that_are_too_large_raise_different_warnings() -> None:
    noise_share = NoiseShare(20.0, 8.0)  # a fifth of what is expected is noise
    weak, large = PlausibilityTest(18.0, 100, noise_share), PlausibilityTest(400.0, 100, noise_share)
    assert "smaller" in weak.warnings[0]
    assert "larger" in large.warnings[0]
    assert weak.warnings[-1] == large.warnings[-1] == REMEDY
    assert PlausibilityTest(100.0, 100, noise_share).warnings == ()


def test_answers_far_larger_than_an_honest_studys_raise_a_warning(frame: Frame) -> None:
    assert warned(frame, draws(frame, 300, size=4.0)) > 0.9


def test_rounds_add_up_and_a_frame_is_surprised_by_what_it_did_not_expect(frame: Frame) -> None:
    """The test computes Σ y² / (w²v + σ²) of the mean code y."""
    asked = frame.weights > 0
    code = np.linspace(-1, 1, frame.dimension)
    expected = np.sum(code**2 / (frame.weights[asked] ** 2 * frame.variances[asked] + NOISE**2))
    assert frame.surprise(frame.read(code, noise_std=NOISE)) == pytest.approx(expected)
    wider = replace(frame, variances=frame.variances * 4)
    assert wider.surprise(frame.read(code, noise_std=NOISE)) < expected


def test_a_structure_that_left_the_labels_is_named() -> None:
    volumes = shares(("left", "right", "none"), [30, 400, 0], [100, 1000, 0])
    assert volumes == (("left", 0.3), ("right", 0.4), ("none", 1.0))
    (what, remedy) = PlausibilityTest(100.0, 100, NoiseShare(), volumes).warnings
    assert what.startswith("left has 0.3 times")
    assert remedy == REMEDY
    grown = PlausibilityTest(100.0, 100, NoiseShare(), shares(("new",), [5], [0]))
    assert grown.warnings[0].startswith("new has inf times")
    assert grown.event()["volumes"] == ["new inf"]
