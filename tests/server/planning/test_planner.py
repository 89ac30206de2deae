"""Tests what a budget buys. Oracles: formulas written out by hand, brute force, and a general-purpose optimiser."""

from __future__ import annotations

import itertools
import json
import math
import re
import time
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import optimize

from common.errors import InvalidInput
from common.privacy.mechanism import AccountantName, Budget, Protection, Relation, Unit
from server.planning.planner import (
    Plan,
    PlanVerdict,
    capacity_bits,
    explained_at_most,
    plan,
    spectrum_errors,
    verdict_of,
)
from server.planning.recommend import check_voters, recommend

REPLACE = Protection(Unit.HOSPITAL, Relation.REPLACE_ONE)
ZERO_OUT = Protection(Unit.HOSPITAL, Relation.ZERO_OUT)
PATIENT = Protection(Unit.PATIENT, Relation.REPLACE_ONE)
WORST_FIRST = (PlanVerdict.PRIOR, PlanVerdict.WEAK, PlanVerdict.INFORMATIVE)


def make(**changes: Any) -> Plan:
    fields: dict[str, Any] = {
        "budget": Budget(8.0, 1e-3),
        "accountant": AccountantName.EXACT,
        "protection": REPLACE,
        "queries": 80,
        "hospitals": 8,
        "voters_per_site": 1,
        "radius": 1.0,
        "dimension": 128,
    }
    return plan(**{**fields, **changes})


def test_the_summary_states_no_bound_for_codes_of_another_length() -> None:
    """Short codes carry far fewer bits than the upper bound for all lengths."""
    short = make(hospitals=64, dimension=2)
    assert short.ceiling_bits > 2 * short.queries * short.bits_per_query
    assert re.findall(r"([\d.]+) bits", short.summary) == [f"{short.bits_per_query:.2g}"]


def test_the_papers_headline_is_planned_with_its_published_noise_and_fifty_bits_and_warned_about() -> None:
    result = make()
    assert result.noise_per_coordinate == pytest.approx(1.073343, abs=1e-6)
    assert result.ceiling_bits == pytest.approx(50, abs=0.2)
    assert result.verdict is PlanVerdict.PRIOR
    assert "80 answers with at most 0.62 bits each" in result.summary  # 50 in all
    assert result.queries_left == 80
    assert result.code_norm == 1.0 < result.noise_per_coordinate
    for dimension in (1, 2, 3, 8, 1024):
        assert make(dimension=dimension).verdict is PlanVerdict.PRIOR


@pytest.mark.parametrize(("teachers", "bits"), [(16, 200), (32, 801), (64, 3206)])
def test_the_information_ceiling_grows_with_the_square_of_the_hospitals(teachers: int, bits: int) -> None:
    assert make(hospitals=teachers).ceiling_bits == pytest.approx(bits, rel=2e-3)
    assert make(hospitals=teachers).ceiling_bits == pytest.approx(
        teachers**2 / (8 * 0.480014**2) / math.log(2), rel=1e-4
    )


def test_voters_at_patient_unit_buy_what_hospitals_do() -> None:
    many = make(hospitals=8, voters_per_site=8, protection=PATIENT)
    assert many.ceiling_bits == pytest.approx(make(hospitals=64).ceiling_bits, rel=1e-9)
    assert make(voters_per_site=8).ceiling_bits == pytest.approx(
        make().ceiling_bits, rel=1e-9
    )  # hospital unit: nothing
    assert make(protection=ZERO_OUT).ceiling_bits == pytest.approx(4 * make().ceiling_bits, rel=1e-9)


def test_the_note_says_why_rdp_reads_higher_than_the_exact_gate() -> None:
    note = make().accountant_note
    assert "ε = 8." in note
    assert "8.876" in note
    assert "8.873" in note
    epsilons = [g.epsilon for g in make().guarantees]
    assert epsilons == sorted(epsilons)
    assert epsilons[0] == pytest.approx(8.0, abs=1e-9)


def test_the_plan_says_what_its_epsilon_means_for_somebody_known_at_two_hospitals() -> None:
    for protection in (REPLACE, PATIENT):
        twice = make(protection=protection).known_twice
        assert twice is not None
        assert twice.epsilon == pytest.approx(20.8, rel=3e-3)
        assert (twice.group, twice.accountant, twice.protection) == (2, "exact", protection)
    assert make(budget=Budget(1500.0, 1e-3), radius=1e4).known_twice is None  # no accountant computes this ε


def test_every_printed_epsilon_carries_its_meaning() -> None:
    for text in map(str, make().guarantees):
        assert all(word in text for word in ("δ = 0.001", "unit hospital", "relation replace-one"))


@pytest.mark.slow
@settings(max_examples=80)
@given(
    hospitals=st.integers(1, 200),
    more=st.integers(0, 200),
    queries=st.integers(2, 2000),
    fewer=st.integers(0, 2000),
    epsilon=st.floats(0.1, 20),
    extra=st.floats(0, 20),
    dimension=st.integers(1, 256),
    decay=st.floats(0.5, 1.0),
    protection=st.sampled_from([REPLACE, ZERO_OUT, PATIENT]),
    voters=st.integers(1, 8),
)
def test_the_verdict_never_worsens_with_more_hospitals_more_budget_or_fewer_queries(
    hospitals: int,
    more: int,
    queries: int,
    fewer: int,
    epsilon: float,
    extra: float,
    dimension: int,
    decay: float,
    protection: Protection,
    voters: int,
) -> None:
    base: dict[str, Any] = {
        "hospitals": hospitals,
        "queries": queries,
        "budget": Budget(epsilon, 1e-5),
        "dimension": dimension,
        "spectrum": [decay**i for i in range(dimension)],
        "protection": protection,
        "voters_per_site": voters,
    }
    first = make(**base)
    for change in (
        {"hospitals": hospitals + more},
        {"queries": max(1, queries - fewer)},
        {"budget": Budget(epsilon + extra, 1e-5)},
    ):
        second = make(**{**base, **change})
        assert WORST_FIRST.index(second.verdict) >= WORST_FIRST.index(first.verdict)
        assert second.bits_per_query >= first.bits_per_query * (1 - 1e-9)
        assert second.explained_at_most >= first.explained_at_most - 1e-9


def test_following_one_line_of_the_advice_makes_the_plan_informative() -> None:
    spectrum = [0.8**i for i in range(64)]
    base = make(dimension=64, spectrum=spectrum, hospitals=12)
    assert base.verdict is not PlanVerdict.INFORMATIVE
    advice = {line.split(":")[0]: line for line in base.advice}
    hospitals = int(advice["hospitals"].split()[1])
    queries = int(advice["queries"].split()[1])
    voters = int(advice["another guarantee"].split("with ")[1].split()[0])
    for change, worse in (
        ({"hospitals": hospitals}, {"hospitals": hospitals - 1}),
        ({"queries": queries}, {"queries": queries + 1}),
        (
            {"voters_per_site": voters, "protection": PATIENT},
            {"voters_per_site": voters - 1, "protection": PATIENT},
        ),
    ):
        assert make(dimension=64, spectrum=spectrum, **{"hospitals": 12, **change}).verdict is PlanVerdict.INFORMATIVE
        assert (
            make(dimension=64, spectrum=spectrum, **{"hospitals": 12, **worse}).verdict is not PlanVerdict.INFORMATIVE
        )


def test_thresholds_are_the_documented_ones() -> None:
    assert verdict_of(0.99, 0.99) is PlanVerdict.PRIOR
    assert verdict_of(1.0, 0.2499) is PlanVerdict.PRIOR
    assert verdict_of(1.0, 0.25) is PlanVerdict.WEAK
    assert verdict_of(9.0, 0.5999) is PlanVerdict.WEAK
    assert verdict_of(9.0, 0.60) is PlanVerdict.INFORMATIVE


@settings(max_examples=60)
@given(ratio=st.floats(1e-4, 1e4), dimension=st.integers(1, 4096))
def test_capacity_stays_below_the_ceiling_for_any_length(ratio: float, dimension: int) -> None:
    bits = capacity_bits(ratio, dimension)
    assert bits == pytest.approx(dimension / 2 * math.log2(1 + ratio / dimension), rel=1e-6)
    assert bits <= ratio / 2 / math.log(2) * (1 + 1e-12)


spectra = st.lists(st.floats(1e-3, 10), min_size=1, max_size=6)


@settings(max_examples=30)
@given(values=spectra, bits=st.floats(0.05, 12))
def test_no_split_of_the_bits_explains_more_than_the_rate_distortion_bound(values: list[float], bits: float) -> None:
    """The oracle minimises Σλ·4^(−b_i) over Σb_i = b by a general optimiser, and over random splits.

    The optimiser works on its logarithm: it stops too early where the distortion itself is tiny.
    """
    lam = np.array(values)

    def distortion(split: np.ndarray) -> float:
        return float((lam * 4.0**-split).sum())

    rng = np.random.default_rng(0)
    best = min(distortion(bits * w) for w in rng.dirichlet(np.ones(lam.size), 300))
    solved = optimize.minimize(
        lambda split: np.log(distortion(split)),
        np.full(lam.size, bits / lam.size),
        bounds=[(0, bits)] * lam.size,
        constraints={"type": "eq", "fun": lambda b: b.sum() - bits},
        method="SLSQP",
        options={"ftol": 1e-12, "maxiter": 1000},
    )
    ours = (1 - explained_at_most(bits, values)) * lam.sum()
    assert ours <= best * (1 + 1e-9)
    assert ours == pytest.approx(float(np.exp(solved.fun)), rel=1e-3, abs=1e-6 * lam.sum())


@settings(max_examples=30)
@given(values=spectra, noise=st.floats(1e-2, 5), power=st.floats(1e-2, 5))
def test_no_split_of_the_clipping_budget_beats_water_filling(values: list[float], noise: float, power: float) -> None:
    lam = np.array(values)

    def error(p: np.ndarray) -> float:
        return float((lam * noise / (p + noise)).sum())

    ours = spectrum_errors(values, noise_variance=noise, power=power).water_filled
    rng = np.random.default_rng(0)
    assert ours <= min(error(power * w) for w in rng.dirichlet(np.ones(lam.size), 300)) * (1 + 1e-9)


@settings(max_examples=50)
@given(values=spectra, noise=st.floats(1e-3, 20))
def test_eq_7_is_the_best_of_all_cut_offs_and_wiener_beats_it_by_at_most_two(values: list[float], noise: float) -> None:
    ordered = sorted(values, reverse=True)
    errors = spectrum_errors(values, noise_variance=noise, power=1.0)
    by_cut = [sum(ordered[l:]) + l * noise for l in range(len(ordered) + 1)]  # noqa: E741
    by_subset = min(
        sum(noise if kept else v for v, kept in zip(values, mask, strict=True))
        for mask in itertools.product([False, True], repeat=len(values))
    )
    assert errors.hard_threshold == pytest.approx(min(by_cut)) == pytest.approx(by_subset)
    assert by_cut[errors.kept] == pytest.approx(min(by_cut))
    assert errors.hard_threshold / 2 <= errors.wiener <= errors.hard_threshold
    assert errors.wiener == pytest.approx(sum(v * noise / (v + noise) for v in values))


def test_eq_7_may_keep_nothing_at_all() -> None:
    errors = spectrum_errors([0.5, 0.1], noise_variance=1.0, power=1.0)
    assert errors.kept == 0
    assert errors.hard_threshold == errors.total == pytest.approx(0.6)


def test_a_plan_survives_json() -> None:
    data = json.loads(json.dumps(make(spectrum=[1.0] * 128).to_json()))
    assert data["verdict"] == "prior"
    assert data["unit"] == "hospital"
    assert Fraction(data["noise_std"]) == make().noise_std


@pytest.mark.parametrize(
    "spectrum", [[1.0] * 127, [1.0] * 127 + [math.nan], [1.0] * 127 + [-1.0], [0.0] * 128, [1.0] * 127 + [math.inf]]
)
def test_nonsense_spectra_are_refused(spectrum: list[float]) -> None:
    with pytest.raises(InvalidInput):
        make(spectrum=spectrum)


@pytest.mark.parametrize(("hospitals", "colluders"), [(3, 1), (8, 1), (8, 2), (64, 5), (4, 0)])
def test_a_sealed_sum_is_planned_with_the_noise_of_all_its_shares(hospitals: int, colluders: int) -> None:
    """With the same budget and plan, the mean has √(K/(K − t)) times the noise, so less is learned."""
    open_plan, sealed = make(hospitals=hospitals), make(hospitals=hospitals, colluders=colluders)
    overhead = (hospitals / (hospitals - colluders)) ** 0.5
    assert sealed.noise_overhead == pytest.approx(overhead)
    assert sealed.noise_per_coordinate == pytest.approx(overhead * open_plan.noise_per_coordinate)
    assert sealed.power_ratio == pytest.approx(open_plan.power_ratio / overhead**2)
    assert sealed.noise_std == open_plan.noise_std
    assert [one.epsilon for one in sealed.guarantees] == [one.epsilon for one in open_plan.guarantees]
    assert WORST_FIRST.index(sealed.verdict) <= WORST_FIRST.index(open_plan.verdict)
    assert (sealed.smallest_roster, open_plan.smallest_roster) == (colluders + 2, None)
    assert "sealed_sum" in sealed.to_json()
    assert "sealed_sum" not in open_plan.to_json()


@pytest.mark.parametrize("colluders", [1, 2])
def test_a_sealed_sum_needs_two_hospitals_beside_the_colluders(colluders: int) -> None:
    with pytest.raises(InvalidInput, match="roster"):
        make(hospitals=colluders + 1, colluders=colluders)
    make(hospitals=colluders + 2, colluders=colluders)


def test_draws_that_may_be_lost_are_paid_like_answers() -> None:
    spare, more = make(queries=60, colluders=1, spare_draws=20), make(queries=80, colluders=1)
    assert spare.noise_std == more.noise_std
    assert spare.guarantees == more.guarantees
    assert spare.ceiling_bits == pytest.approx(more.ceiling_bits * 60 / 80)


def test_more_hospitals_as_advised_make_a_sealed_sum_informative() -> None:
    poor = make(hospitals=8, colluders=2)
    line = next(line for line in poor.advice if line.startswith("hospitals"))
    needed = int(line.split()[1])
    assert make(hospitals=needed, colluders=2).verdict is PlanVerdict.INFORMATIVE
    assert make(hospitals=needed - 1, colluders=2).verdict is not PlanVerdict.INFORMATIVE


def test_the_recommendation_for_a_sealed_sum_counts_its_larger_noise() -> None:
    terms = {"budget": Budget(8.0, 1e-3), "accountant": AccountantName.EXACT, "hospitals": 8}
    hidden = Protection(Unit.HOSPITAL, Relation.REPLACE_ONE)
    apart, sealed = (recommend(**terms, protection=hidden, colluders=t) for t in (None, 2))  # type: ignore[arg-type]
    assert sealed.noise == pytest.approx(apart.noise * (8 / 6) ** 0.5)
    assert sealed.gain < apart.gain


def test_the_advice_for_a_very_long_code_takes_no_minutes() -> None:
    result = make(dimension=1 << 20)
    started = time.process_time()
    assert result.advice
    assert time.process_time() - started < 20  # 100 s before


@pytest.mark.parametrize(("patients", "refused"), [(0, "patients a site: got 0"), (2, "voters a site: got 3")])
def test_a_number_of_patients_too_small_is_refused_by_the_name_of_the_wrong_number(patients: int, refused: str) -> None:
    with pytest.raises(InvalidInput, match=refused):
        check_voters(3, patients=patients)
