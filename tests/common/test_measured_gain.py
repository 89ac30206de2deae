"""Tests the one rule for gains: proven, not proven or worse, by Student's interval of the paired differences."""

from __future__ import annotations

import math

import pytest
from scipy.stats import ttest_rel

from common.errors import InvalidInput
from common.measured_gain import GainVerdict, MeasuredGain, Score, measured_gain, over_best

OURS, THEIRS = [0.71, 0.64, 0.8, 0.69, 0.75], [0.66, 0.66, 0.71, 0.65, 0.72]


def test_the_gain_and_its_interval_are_students_of_the_paired_differences() -> None:
    found = measured_gain(list(zip(OURS, THEIRS, strict=True)), reference="x")
    expected = ttest_rel(OURS, THEIRS).confidence_interval(0.95)
    assert found is not None
    assert found.interval == pytest.approx((expected.low, expected.high))
    assert found.gain == pytest.approx(sum(OURS) / 5 - sum(THEIRS) / 5)
    assert found.cases == 5


@pytest.mark.parametrize(
    ("gain", "half", "word"),
    [
        (0.04, 0.01, "proven"),  # formerly reported as "little, if anything"
        (0.001, 0.0005, "proven"),
        (0.058, 0.06, "not proven"),  # formerly reported both as a gain and as no more than public data
        (0.0, 0.0, "not proven"),
        (-0.02, 0.03, "not proven"),
        (0.3, None, "not proven"),
        (-0.3, None, "not proven"),
        (-0.034, 0.008, "worse"),
    ],
)
def test_the_verdict_on_a_gain_depends_on_the_interval_only(gain: float, half: float | None, word: str) -> None:
    found = MeasuredGain(0.5 + gain, 0.5, "the control zero code", gain, half, 12)
    assert found.word == word
    assert found.title.lower().startswith({"worse": "worse than"}.get(word, f"gain {word} over"))
    assert found.to_json()["word"] == word


def test_an_interval_that_contains_zero_is_called_not_proven_with_its_figures() -> None:
    sentence = MeasuredGain(0.558, 0.5, "the control zero code", 0.058, 0.06, 12).sentence
    for fact in ("not proven", "zero code: +0.058", "95 % interval -0.002 to +0.118", "12 cases", "0.558", "0.500"):
        assert fact in sentence


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_figure_that_is_none_counts_for_nothing_and_is_never_a_gain(bad: float) -> None:
    assert measured_gain([(bad, 0.5), (0.5, bad)], reference="x") is None
    found = measured_gain([(bad, 0.5), (0.7, 0.5)], reference="x")
    assert found is not None
    assert (found.student, found.cases, found.half_width) == (0.7, 1, None)
    with pytest.raises(InvalidInput, match="gain"):
        MeasuredGain(bad, 0.5, "x", bad - 0.5, None, 0)


def test_the_best_control_is_the_one_that_is_hardest_to_beat() -> None:
    student = Score((), 0.718, tuple(OURS))
    controls = {
        "zero_code": Score((), 0.1, (0.1,) * 5),
        "public_only": Score((), 0.68, tuple(THEIRS)),
        "shuffled_codes": None,
        "unscored": Score((), math.nan, ()),
    }
    found = over_best(student, controls)
    assert found is not None
    assert found.reference == "the control public only"
    assert found.word is GainVerdict.NOT_PROVEN
    assert over_best(student, {}) is None
    assert over_best(student, {"shuffled_codes": None}) is None
    alone = over_best(student, {"zero_code": Score((), 0.1, ())})
    assert alone is not None
    assert (alone.gain, alone.interval, alone.word) == (pytest.approx(0.618), None, GainVerdict.NOT_PROVEN)


def test_the_best_control_is_chosen_by_the_cases_that_measure_the_gain() -> None:
    """Formerly the mean over structures chose it: a gain was proven although another control was better in
    every case.
    """
    student = Score((), 0.6, (0.60, 0.61, 0.62, 0.63))
    controls = {
        "zero_code": Score((), 0.65, (0.30, 0.31, 0.32, 0.33)),
        "public_only": Score((), 0.5, (0.70, 0.71, 0.72, 0.73)),
    }
    found = over_best(student, controls)
    assert found is not None
    assert (found.reference, found.word) == ("the control public only", GainVerdict.WORSE)
    unpaired = over_best(student, {**controls, "shuffled_codes": Score((), 0.9, ())})
    assert unpaired is not None
    assert (unpaired.reference, unpaired.word) == ("the control shuffled codes", GainVerdict.NOT_PROVEN)


def test_json_keeps_every_digit_so_that_figures_are_rounded_once() -> None:
    student, other = 0.7084989, 0.5761  # 0.70850 in five digits, 0.709 in three
    found = MeasuredGain(student, other, "the control zero code", student - other, None, 0)
    told = found.to_json()
    assert f"{told['student']:.3f}" == f"{found.student:.3f}" == "0.708"
    assert told["gain"] == found.gain
