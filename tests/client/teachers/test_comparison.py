"""Tests the comparison of a student with public data and the site's teachers: a worse student is reported."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from client.teachers.comparison import (
    ALL,
    MEAN_SHAPE,
    OWN_TEACHERS,
    PUBLIC_START,
    CaseComparison,
    Dice,
    Reference,
    compare,
    missed_structures,
)

START = Reference(PUBLIC_START, lambda image: image, public=True)
TEACHERS = Reference(OWN_TEACHERS, lambda image: image, public=False)
NAMES = ("anterior", "posterior")


def rows(student: Sequence[Dice], other: Sequence[Dice], reference: Reference = START) -> dict[str, CaseComparison]:
    return {row.structure: row for row in compare(reference, NAMES, student, other)}


def test_a_structure_that_vanished_is_named_even_where_the_mean_is_better() -> None:
    """The student misses this structure in every case, but gains more than that on the other one."""
    student = [(0.95, 0.0), (0.9, 0.0), (0.97, 0.0)]
    found = rows(student, [(0.3, 0.2), (0.3, 0.3), (0.4, 0.1)])
    assert found[ALL].measured.gain > 0
    assert not found[ALL].alarming
    assert re.search(r"in 3 of .* in 0\b", found["posterior"].sentence())
    assert not found["anterior"].alarming
    (lost,) = missed_structures(NAMES, student)
    assert re.search("^posterior: GONE: .* 3 of 3 cases", lost.sentence())


def test_a_vanished_structure_is_reported_even_without_a_reference_that_finds_it() -> None:
    (lost,) = missed_structures(NAMES, [(0.8, 0.0)])
    assert lost.structure == "posterior"
    assert [
        each.missed for each in missed_structures(NAMES, [(0.8, 0.0), (0.8, math.nan), (0.0, 0.0), (0.8, 0.5)])
    ] == [2]
    assert missed_structures(NAMES, [(0.8, 0.0), (0.8, 0.1)]) == []
    assert missed_structures(NAMES, [(0.8, math.nan)]) == []


def test_a_student_below_the_start_or_the_teachers_is_called_worse_and_only_the_start_raises_an_alarm() -> None:
    student = [(0.60, 0.61), (0.55, 0.60), (0.62, 0.58), (0.61, 0.57)]
    better = [(0.70, 0.69), (0.66, 0.71), (0.71, 0.70), (0.70, 0.66)]
    for row in rows(student, better).values():
        assert row.alarming
        assert "the public start" in row.sentence()
        assert row.measured.word == "worse"
    for row in rows(student, better, TEACHERS).values():
        assert not row.alarming
        assert "own teachers" in row.sentence()


def test_a_structure_seen_where_there_is_none_counts_against_the_student() -> None:
    """The structure is absent in three of four cases. The start finds none there (no Dice); the student does (0)."""
    nothing = math.nan
    student = [(0.8, 0.7), (0.8, 0.0), (0.8, 0.0), (0.8, 0.0)]
    start = [(0.8, 0.7), (0.8, nothing), (0.8, nothing), (0.8, nothing)]
    found = rows(student, start)["posterior"]
    assert (found.measured.cases, found.measured.gain) == (4, pytest.approx(-0.75))
    assert re.search(r"not proven .*: -0\.750", found.sentence())
    assert [lost.structure for lost in missed_structures(NAMES, student)] == ["posterior"]
    assert rows(start, student)["posterior"].measured.gain == pytest.approx(0.75)
    assert rows([(0.8, nothing)], [(0.8, nothing)]).keys() == {ALL, "anterior"}


def test_a_difference_that_chance_explains_raises_no_alarm_and_is_reported() -> None:
    found = rows([(0.70, 0.7), (0.60, 0.7), (0.71, 0.7)], [(0.60, 0.7), (0.75, 0.7), (0.70, 0.7)])["anterior"]
    assert found.measured.gain < 0
    assert not found.alarming
    assert re.search(r"not proven .*: -0\.0", found.sentence())


def test_a_difference_over_a_single_case_is_not_proven() -> None:
    found = rows([(0.5, 0.5)], [(0.6, 0.6)])[ALL]
    assert (found.measured.half_width, found.alarming) == (None, False)
    assert found.measured.word == "not proven"
    assert "no interval" in found.sentence()


@given(st.lists(st.tuples(st.floats(0.01, 1), st.floats(0.01, 1)), min_size=2, max_size=12))
def test_intervals_are_those_of_the_paired_t_test(pairs: list[tuple[float, float]]) -> None:
    """SciPy's paired test is the oracle: the alarm means exactly a two-sided p below .05 and a lower mean."""
    found = rows([(a, a) for a, _ in pairs], [(b, b) for _, b in pairs])["anterior"]
    differences = np.array([a - b for a, b in pairs])
    if np.ptp(differences) < 1e-9:
        return
    test = stats.ttest_rel([a for a, _ in pairs], [b for _, b in pairs])
    low, high = test.confidence_interval(0.95)
    assert found.measured.half_width == pytest.approx((high - low) / 2, rel=1e-6)
    if abs(test.pvalue - 0.05) > 1e-6:
        assert found.alarming == (test.pvalue < 0.05 and differences.mean() < 0)


def test_the_mean_shape_is_a_public_reference_too() -> None:
    found = rows([(0.2, 0.2)] * 3, [(0.5, 0.5)] * 3, Reference(MEAN_SHAPE, lambda image: image, public=True))
    assert found[ALL].alarming
    assert found[ALL].to_json()["sentence"] == found[ALL].sentence()
