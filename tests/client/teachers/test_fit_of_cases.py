"""Tests that a hospital's own mistake in its cases is not blamed on the student or on other hospitals."""

from __future__ import annotations

import pytest

from client.teachers.fit_of_cases import FitScores
from common.errors import InvalidInput

HOME = (0.83, 0.85, 0.80, 0.84)


@pytest.mark.parametrize(
    "here",
    [
        (0.03, 0.02, 0.04, 0.02),  # labels exchanged
        (0.008, 0.01, 0.0, 0.02),  # a CT
        (0.60, 0.62, 0.61, 0.61),  # image and label mirrored
        (0.45, 0.44, 0.47, 0.45),  # labels mirrored only
    ],
)
def test_cases_that_the_own_teachers_do_not_fit_get_no_verdict(here: tuple[float, ...]) -> None:
    fit = FitScores(here, HOME, {"the student": 0.6, "the public start": 0.6})
    assert fit.refused
    assert "do not fit" in fit.sentence
    with pytest.raises(InvalidInput, match="--even-if-unfit"):
        fit.check("verdict")
    FitScores(here, HOME, accepted=True).check("verdict")


def test_cases_like_those_at_home_do_fit_however_bad_the_student_is() -> None:
    assert FitScores((0.81, 0.84, 0.78), HOME, {"the student": 0.05, "the public start": 0.7}).sentence == ""
    assert FitScores((), (), {"the student": 0.05, "the public start": 0.7}).sentence == ""


def test_a_difference_that_chance_explains_is_no_finding() -> None:
    assert FitScores((0.1, 0.9), (0.2, 0.99)).sentence == ""


def test_where_no_model_finds_anything_the_cases_are_to_be_checked_first() -> None:
    """The site's own cases have two labels exchanged, and its teachers learnt them that way."""
    fit = FitScores((0.8, 0.8), (), {"the student": 0.03, "the public start": 0.029})
    assert "fit no model" in fit.sentence
    assert FitScores((), (), {"the student": 0.03}).sentence == ""  # one model alone shows nothing
