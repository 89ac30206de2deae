"""Tests that every public function of the privacy core refuses NaN, infinite, zero and negative parameters.

One table names every public function and every number it takes; a function that is not in it fails the first test.
"""

from __future__ import annotations

import importlib
import inspect
import math
import pkgutil
from collections.abc import Callable, Iterator
from fractions import Fraction
from types import ModuleType
from typing import Any

import numpy as np
import pytest

import common.privacy
import server.planning
from common.errors import InvalidInput
from common.privacy import (
    accounting,
    calibration,
    checks,
    claim,
    coalitions,
    consent,
    figures,
    gaussian,
    patient_guarantee,
    quantise,
    release,
    shares,
    training,
)
from common.privacy import audit as auditing
from common.privacy import mechanism as facts
from common.privacy.mechanism import AccountantName, Budget, Mechanism, Protection, Relation, Unit
from common.study_mechanism import study_mechanism
from server.planning import planner
from server.planning import recommend as advice
from server.planning.public_shapes import PublicShapes
from tests.worlds import make_study

HOSPITAL = Protection(Unit.HOSPITAL, Relation.REPLACE_ONE)
BUDGET = Budget(8.0, 1e-3)
EXACT = AccountantName.EXACT
ADD_REMOVE = training.Neighbours.ADD_REMOVE
CODE = np.zeros(2, dtype=np.int64)
NUMBERS = [math.nan, math.inf, -math.inf, 0, 0.0, -1, -1.0, Fraction(-1, 2)]
KINDS = [True, None, "1", 1j]
HASH = "a" * 64
STUDY = make_study(planned_queries=4)


def mechanism(**changes: Any) -> Mechanism:
    return Mechanism(**{"dimension": 2, "radius_int": 9, "voters_per_site": 1, "noise_std": Fraction(9), **changes})


def spec(**changes: Any) -> facts.QuerySpec:
    fields = {"edition": 1, "codec": HASH, "volumes": (HASH,), "round": 1, "centre": "zero", "weights": "codec"}
    return facts.QuerySpec(**{**fields, "mechanism": mechanism(), **changes})


def event(**changes: Any) -> training.TrainingEvent:
    fields = {"sampling": "poisson", "rate": Fraction(1, 10), "noise_multiplier": Fraction(2), "steps": 10}
    return training.TrainingEvent(**{**fields, **changes})


def plan_noise(**changes: Any) -> training.TrainingEvent:
    fields = {"epsilon": 8.0, "delta": 1e-3, "rate": Fraction(1, 10), "steps": 10}
    return training.plan_noise(**{**fields, "neighbours": training.Neighbours.ADD_REMOVE, **changes})


def calibrate(**changes: Any) -> Fraction:
    fields = {"budget": BUDGET, "accountant": EXACT, "queries": 4, "radius_int": 65536, "voters_per_site": 1}
    return calibration.calibrate(**{**fields, "protection": HOSPITAL, **changes})


def plan(**changes: Any) -> planner.Plan:
    fields = {"budget": BUDGET, "accountant": EXACT, "protection": HOSPITAL, "queries": 4, "hospitals": 2}
    return planner.plan(**{**fields, "voters_per_site": 1, "radius": 1.0, "dimension": 3, **changes})


def recommend(**changes: Any) -> advice.Recommendation:
    fields = {"budget": BUDGET, "accountant": EXACT, "protection": HOSPITAL, "hospitals": 2}
    return advice.recommend(**{**fields, **changes})


def study(**changes: Any) -> auditing.StudyUnderAudit:
    fields = {"budget": BUDGET, "accountant": EXACT, "protection": HOSPITAL, "queries": 2}
    return auditing.StudyUnderAudit(**{**fields, **changes})


def release_at(**changes: Any) -> object:
    return release.noisy_sum([CODE], mechanism(**changes))


def sensitivity(**changes: Any) -> int:
    fields = {"radius_int": 9, "voters_per_site": 1, "unit": Unit.HOSPITAL, "relation": Relation.REPLACE_ONE}
    return facts.sensitivity(**{**fields, **changes})


Call = Callable[[Any], object]


def each(call: Callable[..., object], *names: str) -> list[Call]:
    """Return calls that try the number as each of these settings in turn; the others are valid."""
    return [lambda x, name=name: call(**{name: x}) for name in names]


def turned(call: Callable[..., object], *sound: object) -> list[Call]:
    """Return calls that try the number in place of each argument in turn."""
    return [lambda x, at=at: call(*sound[:at], x, *sound[at + 1 :]) for at in range(len(sound))]


CHECKED: dict[str, list[Call]] = {
    "checks.check_number": [lambda x: checks.check_number("x", x)],
    "checks.check_rational": [lambda x: checks.check_rational("x", x)],
    "checks.check_delta": [lambda x: checks.check_delta("x", x)],
    "accounting.delta_exact": [
        lambda x: accounting.delta_exact(x, 1.0),
        lambda x: accounting.delta_exact(1.0, x or -1),
    ],
    "accounting.epsilon_exact": turned(accounting.epsilon_exact, 1.0, 1e-3),
    "accounting.epsilon_rdp": turned(accounting.epsilon_rdp, 1.0, 1e-3),
    "accounting.epsilon_rdp_library": turned(accounting.epsilon_rdp_library, 1.0, 1e-3),
    "accounting.epsilon_pld": turned(accounting.epsilon_pld, 1.0, 1e-3),
    "accounting.epsilon_paper": turned(accounting.epsilon_paper, 1.0, 1e-3),
    "accounting.epsilon_by": [
        lambda x: accounting.epsilon_by("exact", x, 1e-3),
        lambda x: accounting.epsilon_by("rdp", 1.0, x),
    ],
    "accounting.compose": [lambda x: accounting.compose([mechanism(noise_std=x)], HOSPITAL)],
    "accounting.max_mu_squared": [
        lambda x: accounting.max_mu_squared(EXACT, Budget(x, 1e-3)),
        lambda x: accounting.max_mu_squared(EXACT, Budget(1.0, x)),
    ],
    "accounting.group_mu_squared": [
        lambda x: accounting.group_mu_squared(x, size=2),
        lambda x: accounting.group_mu_squared(1.0, size=x),
    ],
    "accounting.admits": [
        lambda x: accounting.admits(x or -1, Fraction(1), Fraction(2)),  # type: ignore[arg-type]
        lambda x: accounting.admits(Fraction(0), x, Fraction(2)),
        lambda x: accounting.admits(Fraction(0), Fraction(1), x),
    ],
    "accounting.guarantee": [
        lambda x: accounting.guarantee(x or -1, BUDGET, HOSPITAL, "exact"),  # type: ignore[arg-type]
        lambda x: accounting.guarantee(Fraction(1), BUDGET, HOSPITAL, "exact", group=x),
    ],
    "accounting.Guarantee": [
        lambda x: accounting.Guarantee(x or -1, 1e-3, "exact", HOSPITAL),
        lambda x: accounting.Guarantee(1.0, x, "exact", HOSPITAL),
        lambda x: accounting.Guarantee(1.0, 1e-3, "exact", HOSPITAL, group=x),
    ],
    "audit.StudyUnderAudit": [
        *each(study, "queries", "hospitals", "voters_per_site", "radius", "dimension"),
        lambda x: study(budget=Budget(x, 1e-3)),
    ],
    "audit.audit": [
        lambda x: auditing.audit(study(), runs=x),
        lambda x: auditing.audit(study(), runs=20, confidence=x),
    ],
    "audit.memory_service": [lambda x: auditing.memory_service(study(radius=x))],
    "audit.audited_mechanism": [lambda x: auditing.audited_mechanism(study(queries=x))],
    "audit.mu_lower_bound": [
        lambda x: auditing.mu_lower_bound(np.ones(9), np.zeros(9), confidence=x),
        lambda x: auditing.mu_lower_bound(np.full(9, x if x != x else math.inf), np.zeros(9), confidence=0.9),
    ],
    "audit.spectral_finding": [lambda x: auditing.spectral_finding("q", np.full((2, 9), x if x != x else math.inf))],
    "audit.residual_finding": [
        lambda x: auditing.residual_finding(np.ones(9), x),
        lambda x: auditing.residual_finding(np.full(9, x if x != x else math.inf), 1.0),
    ],
    "claim.claimed_reach": [lambda x: claim.claimed_reach("hospital", "replace-one", voters_per_site=x)],
    "claim.claimed_mu": turned(claim.claimed_mu, 8.0, 1e-3),
    "claim.shares_carry": [
        lambda x: claim.shares_carry(x, Fraction(9), sites=3, colluders=1),
        lambda x: claim.shares_carry(Fraction(9), x, sites=3, colluders=1),
        lambda x: claim.shares_carry(Fraction(9), Fraction(9), sites=x, colluders=1),
        lambda x: claim.shares_carry(Fraction(9), Fraction(9), sites=3, colluders=x or -1),
    ],
    "claim.claimed_epsilon": turned(claim.claimed_epsilon, 2.0, 1e-3),
    "calibration.sqrt_up": [calibration.sqrt_up],
    "calibration.calibrate": [
        *each(calibrate, "queries", "radius_int", "voters_per_site"),
        lambda x: calibrate(budget=Budget(1.0, x)),
    ],
    "study_mechanism.study_mechanism": [lambda x: study_mechanism(STUDY, dimension=x)],
    "calibration.noise_multiplier": [lambda x: calibration.noise_multiplier(mechanism(noise_std=x), HOSPITAL)],
    "calibration.queries_left": [
        lambda x: calibration.queries_left(
            mechanism(),
            protection=HOSPITAL,
            spent=x or -1,  # type: ignore[arg-type]
            limit=Fraction(1),
        ),
        lambda x: calibration.queries_left(mechanism(), protection=HOSPITAL, spent=Fraction(0), limit=x),
    ],
    "calibration.epsilon_of_plan": [
        lambda x: calibration.epsilon_of_plan(
            mechanism(), queries=x, budget=BUDGET, protection=HOSPITAL, accountant=EXACT
        )
    ],
    "gaussian.rounded_gaussian": turned(gaussian.rounded_gaussian, 2, Fraction(9)),
    "gaussian.sample": [
        lambda x: gaussian.sample(2, x, entropy=bytes),
        lambda x: gaussian.sample(x, Fraction(9), entropy=bytes),
    ],
    "mechanism.sensitivity": each(sensitivity, "radius_int", "voters_per_site"),
    "mechanism.Budget": turned(Budget, 1.0, 1e-3),
    "mechanism.Mechanism": [
        *each(mechanism, "dimension", "radius_int", "voters_per_site", "noise_std"),
        lambda x: mechanism(colluders=x or -1),
    ],
    "mechanism.QuerySpec": each(spec, "edition", "round"),
    "mechanism.radius_int": [facts.radius_int],
    "planner.plan": [
        *each(plan, "queries", "hospitals", "voters_per_site", "radius", "dimension"),
        lambda x: plan(spent=x or -1),
        lambda x: plan(spectrum=[1.0, 1.0, x or -1]),
    ],
    "recommend.recommend": [*each(recommend, "hospitals", "voters", "patients"), lambda x: recommend(paired=x or -1)],
    "public_shapes.PublicShapes": [lambda x: PublicShapes(x or -1, 0.5), lambda x: PublicShapes(0.5, x or -1)],
    "recommend.Rehearsal": [lambda x: advice.Rehearsal(x, (0.5,) * 4, (0.5,) * 4)],
    "recommend.study_prospects": [lambda x: advice.study_prospects(STUDY, hospitals=x or -1)],
    "recommend.recovered_share": [advice.recovered_share],
    "recommend.predicted_gain": [advice.predicted_gain],
    "planner.capacity_bits": turned(planner.capacity_bits, 1.0, 3),
    "planner.explained_at_most": [
        lambda x: planner.explained_at_most(x, [1.0]),
        lambda x: planner.explained_at_most(1.0, [x]),
    ],
    "planner.verdict_of": [lambda x: planner.verdict_of(x or -1, 0.5), lambda x: planner.verdict_of(1.0, x or -1)],
    "planner.spectrum_errors": [
        lambda x: planner.spectrum_errors([1.0], noise_variance=x, power=1.0),
        lambda x: planner.spectrum_errors([1.0], noise_variance=1.0, power=x),
        lambda x: planner.spectrum_errors([x], noise_variance=1.0, power=1.0),
    ],
    "quantise.clip": [
        lambda x: quantise.clip(np.ones(2), radius=x),
        lambda x: quantise.clip(np.array([1.0, x if x != x else math.inf]), radius=1.0),
    ],
    "quantise.quantise": [
        lambda x: quantise.quantise(np.ones(2), radius_int=x),
        lambda x: quantise.quantise(np.array([1.0, x if x != x else math.inf]), radius_int=9),
    ],
    "quantise.within": [lambda x: quantise.within(CODE, bound_int=x)],
    "training.TrainingEvent": [
        *each(event, "rate", "noise_multiplier"),
        lambda x: event(steps=x or -1),
        lambda x: event(releases=(x,)),
    ],
    "training.epsilon_of": [lambda x: training.epsilon_of(event(), delta=x, neighbours=ADD_REMOVE)],
    "training.epsilon_of_all": [lambda x: training.epsilon_of_all((event(),), delta=x, neighbours=ADD_REMOVE)],
    "training.guarantee_of": [lambda x: training.guarantee_of(event(), delta=x, neighbours=ADD_REMOVE)],
    "training.plan_noise": each(plan_noise, "epsilon", "delta", "rate", "steps"),
    "consent.guess_right_at_most": [lambda x: consent.guess_right_at_most(x or -1)],  # type: ignore[arg-type]
    "consent.guess_sentence": [lambda x: consent.guess_sentence(HOSPITAL, x or -1, colluders=None)],  # type: ignore[arg-type]
    "consent.spent_sentence": [lambda x: consent.spent_sentence(x or -1, sealed=False)],  # type: ignore[arg-type]
    "consent.group_guarantees": [lambda x: consent.group_guarantees(x or -1, BUDGET, HOSPITAL, EXACT)],  # type: ignore[arg-type]
    "consent.delta_rule": [lambda x: consent.delta_rule(x, unit=Unit.PATIENT)],
    "consent.warn_about": [
        lambda x: consent.warn_about(x, unit=Unit.PATIENT, units=10),
        lambda x: consent.warn_about(1e-5, unit=Unit.PATIENT, units=x),
    ],
    "figures.epsilon_text": [
        lambda x: figures.epsilon_text(-1 if x in (0, math.inf) else x),  # both are written
        lambda x: figures.epsilon_text(1.0, x),
    ],
    "figures.delta_text": [lambda x: figures.delta_text(x or -1)],
    "figures.noise_text": [
        lambda x: figures.noise_text(-1 if x == 0 else x),  # 0 is written
        lambda x: figures.noise_text(1.0, x),
    ],
    "figures.percent_text": [lambda x: figures.percent_text(x or -1)],
    "figures.spent_text": [lambda x: figures.spent_text(x or -1)],
    "patient_guarantee.PatientGuarantee": [
        lambda x: patient_guarantee.PatientGuarantee(
            x or -1, 1e-5, patient_guarantee.EXCHANGED, patient_guarantee.APART
        ),
        lambda x: patient_guarantee.PatientGuarantee(1.0, x, patient_guarantee.EXCHANGED, patient_guarantee.APART),
    ],
    "release.CodeSum": [lambda x: release.CodeSum(mechanism()).released(sites=x)],
    "release.noisy_sum": each(release_at, "noise_std", "dimension"),
    "coalitions.mu_squared_against": [
        lambda x: coalitions.mu_squared_against(x or -1, sites=5, colluders=1, knowing=1),  # type: ignore[arg-type]
        lambda x: coalitions.mu_squared_against(Fraction(1), sites=x, colluders=1, knowing=1),
        lambda x: coalitions.mu_squared_against(Fraction(1), sites=5, colluders=x or -1, knowing=1),
        lambda x: coalitions.mu_squared_against(Fraction(1), sites=5, colluders=1, knowing=x or -1),
    ],
    "coalitions.against_whom": [
        lambda x: coalitions.against_whom(x or -1, BUDGET, HOSPITAL, EXACT, least=5, most=5, colluders=1),  # type: ignore[arg-type]
        lambda x: coalitions.against_whom(Fraction(1), BUDGET, HOSPITAL, EXACT, least=x, most=5, colluders=1),
        lambda x: coalitions.against_whom(Fraction(1), BUDGET, HOSPITAL, EXACT, least=5, most=x, colluders=1),
    ],
    "shares.share_std": [lambda x: shares.share_std(mechanism(noise_std=Fraction(99), colluders=1), sites=x)],
    "shares.sum_bound": [lambda x: shares.sum_bound(mechanism(noise_std=Fraction(99), colluders=1), sites=x)],
    "shares.site_bound": [
        lambda x: shares.site_bound(mechanism(noise_std=Fraction(99), colluders=1), sites=x),
        lambda x: shares.site_bound(mechanism(noise_std=Fraction(99), colluders=1), sites=4, queries=x),
    ],
    "shares.push_unseen": [lambda x: shares.push_unseen(mechanism(noise_std=Fraction(99), colluders=1), sites=x)],
    "shares.Length": [
        lambda x: shares.Length.of(CODE, mechanism(noise_std=Fraction(99), colluders=1), sites=x),
    ],
    "shares.norm_within": [lambda x: shares.norm_within(CODE, x)],
    "shares.unmasked": [
        lambda x: shares.unmasked(CODE.view(np.uint64), mechanism(noise_std=Fraction(99), colluders=1), sites=x),
    ],
}
"""Calls by function and argument: ``x or -1`` where zero is allowed, an array where the number is an element."""

REAL: dict[str, tuple[int, ...]] = {
    **dict.fromkeys(("checks.check_number", "accounting.epsilon_exact", "accounting.epsilon_rdp"), (0,)),
    **dict.fromkeys(("accounting.epsilon_rdp_library", "accounting.epsilon_pld", "accounting.epsilon_paper"), (0,)),
    **dict.fromkeys(("accounting.epsilon_by", "accounting.max_mu_squared", "accounting.group_mu_squared"), (0,)),
    **dict.fromkeys(("accounting.Guarantee", "audit.memory_service", "audit.residual_finding"), (0,)),
    **dict.fromkeys(("claim.claimed_mu", "claim.claimed_epsilon", "mechanism.Budget", "mechanism.radius_int"), (0,)),
    **dict.fromkeys(("planner.capacity_bits", "quantise.clip", "training.plan_noise", "figures.epsilon_text"), (0,)),
    **dict.fromkeys(("figures.delta_text", "figures.noise_text", "figures.spent_text"), (0,)),
    **dict.fromkeys(
        ("patient_guarantee.PatientGuarantee", "recommend.recovered_share", "recommend.predicted_gain"), (0,)
    ),
    **dict.fromkeys(("accounting.delta_exact", "planner.explained_at_most", "planner.verdict_of"), (0, 1)),
    "audit.StudyUnderAudit": (3, 5),
    "planner.plan": (3, 6),
    "planner.spectrum_errors": (0, 1, 2),
}
"""Arguments that accept 1.5; the others are counts, shares of one, or rationals."""

ANY_KIND = {
    *(("recommend.recommend", 1), ("recommend.recommend", 2)),  # None lets the recommendation choose
    # Set by our own code.
    *(("recommend.recovered_share", 0), ("recommend.predicted_gain", 0), ("coalitions.against_whom", 1)),
}

PAST_A_LIMIT: dict[str, Callable[[], object]] = {
    "queries": lambda: calibrate(queries=1_000_001),
    "queries of a plan": lambda: calibration.epsilon_of_plan(
        mechanism(), queries=1_000_001, budget=BUDGET, protection=HOSPITAL, accountant=EXACT
    ),
    "noise too small to draw": lambda: gaussian.rounded_gaussian(4, gaussian.MIN_NOISE_STD / 2),
    "noise too large to draw": lambda: gaussian.rounded_gaussian(4, gaussian.MAX_NOISE_STD * 2),
    "noise of an integer": lambda: gaussian.rounded_gaussian(4, 1),  # type: ignore[arg-type]
    "draws at once": lambda: gaussian.rounded_gaussian(2**24 + 1, Fraction(5)),
    "runs too few to tell": lambda: auditing.audit(study(), runs=19),
    "certainty": lambda: auditing.audit(study(), runs=20, confidence=1.0),
    "hospitals": lambda: plan(hospitals=10_001),
    **{
        f"delta of 1: {of.__name__}": lambda of=of: of(1.0, 1.0)
        for of in (accounting.epsilon_exact, accounting.epsilon_rdp, accounting.epsilon_pld, accounting.epsilon_paper)
    },
}

TAKES_NO_NUMBER = {
    "patient_guarantee.Training",  # read from a site's record
    "patient_guarantee.Trainings",
    "consent.group_sentence",  # takes checked guarantees
    "coalitions.coalition_sentences",
    "coalitions.spare_sentence",
    "coalitions.trade_sentences",
    "study_mechanism.sealed_sentences",  # takes checked terms
    "study_mechanism.pool_sentence",
    "study_mechanism.usual_pool_epsilon",  # takes a checked budget
    "patient_guarantee.of_each_patient",
    "patient_guarantee.combine",
    "patient_guarantee.worst",
    "training.Sampling",
    "training.Neighbours",
    "training.TrainingGuarantee",
    "audit.AuditFinding",
    "audit.AuditOutcome",  # an audit's result
    "audit.AuditReport",
    "checks.check_kind",
    "mechanism.Unit",
    "mechanism.Relation",
    "mechanism.AccountantName",
    "mechanism.Protection",
    "planner.PlanVerdict",
    "planner.SpectrumErrors",  # the planner's result
    "planner.Plan",
    "recommend.Recommendation",
    "recommend.protocol_for",  # chooses protocol and training, on which no guarantee depends
    "recommend.training_for",
    "recommend.check_voters",  # takes numbers that recommend and plan check
    "study_mechanism.usual_verdicts",
    "study_mechanism.mean_noise_std",  # takes a study, and checks the number of sites
    "codec_spread.codec_stds",  # takes a study's directory
    "public_shapes.public_shapes",  # takes label maps that their reader has checked
    "public_shapes.mean_shape_dice",
    "public_shapes.codec_of",
    "public_shapes.halves",
    "public_shapes.load_maps",
    "public_shapes.map_files",
    "public_shapes.read_maps",
    "public_shapes.read_shapes",
}


def walk(package: ModuleType) -> Iterator[str]:
    return (found.name for found in pkgutil.iter_modules(package.__path__, f"{package.__name__}."))


def test_the_table_names_every_public_function_and_class() -> None:
    public = set()
    for path in (*walk(common.privacy), *walk(server.planning), "common.study_mechanism"):
        module = importlib.import_module(path)
        for name, value in vars(module).items():
            if name.startswith("_") or not (inspect.isfunction(value) or inspect.isclass(value)):
                continue
            if value.__module__ == module.__name__:
                public.add(f"{path.rpartition('.')[2]}.{name}")
    assert public - set(CHECKED) - TAKES_NO_NUMBER == set()
    assert set(CHECKED) - public == set()


EACH = pytest.mark.parametrize(
    ("name", "at"), [(name, i) for name, calls in CHECKED.items() for i in range(len(calls))]
)


@EACH
def test_nan_infinite_zero_and_negative_parameters_are_refused(name: str, at: int) -> None:
    for bad in NUMBERS:
        with pytest.raises(InvalidInput):
            CHECKED[name][at](bad)


@EACH
def test_a_value_of_another_kind_and_a_fraction_of_what_is_counted_are_refused(name: str, at: int) -> None:
    kinds = [] if (name, at) in ANY_KIND else KINDS
    for bad in kinds if at in REAL.get(name, ()) else [*kinds, 1.5]:
        with pytest.raises(InvalidInput):
            CHECKED[name][at](bad)


@pytest.mark.parametrize("what", PAST_A_LIMIT)
def test_a_number_past_its_limit_is_refused(what: str) -> None:
    with pytest.raises(InvalidInput):
        PAST_A_LIMIT[what]()


def test_the_table_calls_what_it_says_and_sound_numbers_pass() -> None:
    """The same calls succeed with a valid number, so each refusal above is about the number."""
    for sound in (
        lambda: mechanism(),
        lambda: spec(),
        lambda: calibrate(),
        lambda: plan(),
        lambda: study(),
        lambda: release_at(),
        lambda: sensitivity(),
        lambda: accounting.guarantee(Fraction(1), BUDGET, HOSPITAL, "exact", group=2),
        lambda: auditing.mu_lower_bound(np.ones(9), np.zeros(9), confidence=0.9),
        lambda: auditing.residual_finding(np.ones(9), 1.0),
        lambda: auditing.spectral_finding("q", np.ones((2, 9))),
        lambda: planner.verdict_of(1.0, 0.5),
        lambda: checks.check_number("x", 2),
        lambda: checks.check_number("x", 0.0, zero=True),
        lambda: checks.check_rational("x", Fraction(1, 3)),
        lambda: checks.check_rational("x", Fraction(0), zero=True),
        lambda: checks.check_delta("x", 1e-5),
    ):
        sound()


def test_the_error_for_a_float_in_place_of_a_rational_says_how_to_give_a_rational() -> None:
    for call in (
        lambda: checks.check_rational("noise", 0.1),
        lambda: event(rate=0.1),
    ):
        with pytest.raises(
            InvalidInput, match=r'got 0\.1; .*to fix: give a fractions\.Fraction, such as Fraction\("0\.1"\)'
        ):
            call()
