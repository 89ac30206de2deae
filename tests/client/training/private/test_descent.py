"""Tests learning-rate schedules against numbers worked out by hand."""

from __future__ import annotations

import math

import pytest

from client.training.private.descent import cosine


def test_cosine_falls_from_the_rate_to_a_hundredth_of_it() -> None:
    rate = cosine(0.4)
    assert rate(0, 100) == pytest.approx(0.4)
    assert rate(50, 100) == pytest.approx(0.4 * (1 + 0.01) / 2)
    assert rate(100, 100) == pytest.approx(0.004)
    assert rate(25, 100) == pytest.approx(0.4 * (0.505 + 0.495 * math.sqrt(0.5)))
