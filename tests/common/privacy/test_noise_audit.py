"""Tests that the audit raises alarms on broken mechanisms and none on the true one.

Mutations patch the production objects themselves (the sampler inside ``noisy_sum``, the norm tests, calibration), so
what the suite shows is the audit's power over this code. The repetitions are marked slow; `make test-audit` makes
twenty of each.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Sequence
from fractions import Fraction

import numpy as np
import pytest
from scipy import stats

from common.privacy import accounting, calibration, mechanism, quantise, release
from common.privacy import audit as audit_module
from common.privacy.audit import (
    AuditReport,
    Code,
    Service,
    StudyUnderAudit,
    audit,
    memory_service,
    mu_lower_bound,
    residual_finding,
    spectral_finding,
)
from common.privacy.gaussian import rounded_gaussian
from common.privacy.mechanism import AccountantName, Budget, Protection, Relation, Unit
from common.privacy.release import noisy_sum

AUDITS = int(os.environ.get("CONSILIUM_AUDITS", "2"))
HOSPITAL = Protection(Unit.HOSPITAL, Relation.REPLACE_ONE)
PATIENT = Protection(Unit.PATIENT, Relation.REPLACE_ONE)


def study(
    protection: Protection = HOSPITAL, *, voters: int = 1, queries: int = 4, epsilon: float = 8.0
) -> StudyUnderAudit:
    return StudyUnderAudit(
        budget=Budget(epsilon, 1e-3),
        accountant=AccountantName.EXACT,
        protection=protection,
        queries=queries,
        voters_per_site=voters,
    )


def use_sampler(patch: pytest.MonkeyPatch, sampler: Callable[[int, Fraction], np.ndarray]) -> None:
    patch.setitem(noisy_sum.__kwdefaults__, "sampler", sampler)  # the production function, with other noise


def weaker_noise(factor: Fraction, *, epsilon: float = 8.0) -> Callable[[pytest.MonkeyPatch], StudyUnderAudit]:
    def mutate(patch: pytest.MonkeyPatch) -> StudyUnderAudit:
        use_sampler(patch, lambda size, std: rounded_gaussian(size, std * factor))
        return study(epsilon=epsilon)

    return mutate


def reused_noise(patch: pytest.MonkeyPatch, *, every: int) -> StudyUnderAudit:
    state: dict[str, object] = {"count": 0}

    def sampler(size: int, std: Fraction) -> np.ndarray:
        if state["count"] % every == 0:  # type: ignore[operator]
            state["noise"] = rounded_gaussian(size, std)
        state["count"] += 1  # type: ignore[operator]
        return state["noise"]  # type: ignore[return-value]

    use_sampler(patch, sampler)
    subject = study()
    fresh = memory_service(subject)

    def every_study_starts_anew(codes: Sequence[Sequence[Code]]) -> Sequence[Code]:
        state["count"] = 0
        return fresh(codes)

    patch.setattr(audit_module, "memory_service", lambda _study: every_study_starts_anew)
    return subject


def all_noise_reused(patch: pytest.MonkeyPatch) -> StudyUnderAudit:
    return reused_noise(patch, every=10**9)


def noise_reused_in_pairs(patch: pytest.MonkeyPatch) -> StudyUnderAudit:
    return reused_noise(patch, every=2)


def no_clip(patch: pytest.MonkeyPatch) -> StudyUnderAudit:
    patch.setattr(quantise, "clip", lambda code, *, radius: code)
    patch.setattr(quantise, "within", lambda code, *, bound_int: True)
    patch.setattr(release, "within", lambda code, *, bound_int: True)
    return study()


def half_the_queries_budgeted(patch: pytest.MonkeyPatch) -> StudyUnderAudit:
    real = calibration.calibrate
    patch.setattr(audit_module, "calibrate", lambda **plan: real(**{**plan, "queries": plan["queries"] // 2}))
    honest = accounting.admits  # the filter counts every charge at half its cost
    patch.setattr(audit_module, "admits", lambda spent, request, limit: honest(spent / 2, request / 2, limit))
    return study()


def zero_out_noise_under_replace_one(patch: pytest.MonkeyPatch) -> StudyUnderAudit:
    real = mechanism.sensitivity

    def halved(*, relation: Relation, **rest: object) -> int:
        return real(relation=Relation.ZERO_OUT, **rest)  # type: ignore[arg-type]

    patch.setattr(mechanism, "sensitivity", halved)
    patch.setattr(calibration, "sensitivity", halved)
    return study()


def fixed_seed(patch: pytest.MonkeyPatch) -> StudyUnderAudit:
    def sampler(size: int, std: Fraction) -> np.ndarray:
        return np.rint(np.random.default_rng(0).normal(scale=float(std), size=size)).astype(np.int64)

    use_sampler(patch, sampler)
    return study()


def patient_moves_two_radii_but_one_is_claimed(patch: pytest.MonkeyPatch) -> StudyUnderAudit:
    real = mechanism.sensitivity

    def one_radius(*, radius_int: int, unit: Unit, **rest: object) -> int:
        return radius_int if unit is Unit.PATIENT else real(radius_int=radius_int, unit=unit, **rest)  # type: ignore[arg-type]

    patch.setattr(mechanism, "sensitivity", one_radius)
    patch.setattr(calibration, "sensitivity", one_radius)
    return study(PATIENT, voters=4)


MUTATIONS = {
    "noise 20 % too small": weaker_noise(Fraction(4, 5)),
    "all noise reused": all_noise_reused,
    "noise reused in pairs": noise_reused_in_pairs,
    "no clip": no_clip,
    "budget for half the queries": half_the_queries_budgeted,
    "zero-out noise under replace-one": zero_out_noise_under_replace_one,
    "fixed seed": fixed_seed,
    "patient's teacher flipped against a claimed C": patient_moves_two_radii_but_one_is_claimed,
}


def run(subject: StudyUnderAudit, *, runs: int = 2000, all_tests: bool = False) -> AuditReport:
    return audit(subject, runs=runs, stop_at_first_alarm=not all_tests, service=audit_module.memory_service(subject))


def test_the_audited_release_is_the_production_function() -> None:
    assert audit_module.noisy_sum is release.noisy_sum
    assert audit_module.quantise is quantise.quantise
    assert audit_module.calibrate is calibration.calibrate
    assert noisy_sum.__kwdefaults__["sampler"] is rounded_gaussian


@pytest.mark.parametrize(
    "subject",
    [
        study(),
        study(Protection(Unit.HOSPITAL, Relation.ZERO_OUT), voters=3),
        study(PATIENT, voters=4),
    ],
    ids=["hospital", "zero-out", "patient"],
)
@pytest.mark.slow
def test_the_true_mechanism_raises_no_alarm(subject: StudyUnderAudit) -> None:
    report = audit(subject, runs=400)
    assert report.alarms == ()
    assert 0.3 < report.mu_lower_bound < subject.claimed_mu
    assert "No fault found" in report.summary
    json.dumps(report.to_json(), allow_nan=False)


@pytest.mark.parametrize("name", MUTATIONS)
@pytest.mark.slow
def test_each_broken_mechanism_raises_an_alarm(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    report = run(MUTATIONS[name](monkeypatch), runs=1000)
    assert report.exceeded
    assert "BROKEN" in report.summary
    json.dumps(report.to_json(), allow_nan=False)


@pytest.mark.slow
def test_audits_of_the_true_mechanism_raise_no_alarm() -> None:
    assert [run(study(), all_tests=True).alarms for _ in range(AUDITS)] == [()] * AUDITS


@pytest.mark.slow
@pytest.mark.parametrize("name", MUTATIONS)
def test_all_audits_but_one_of_each_broken_mechanism_raise_an_alarm(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    alarms = 0
    for _ in range(AUDITS):
        with monkeypatch.context() as patch:
            alarms += run(MUTATIONS[name](patch)).exceeded
    assert alarms >= AUDITS - 1


@pytest.mark.slow
def test_five_per_cent_less_noise_is_seen_by_the_tests_of_the_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    report = run(weaker_noise(Fraction(19, 20))(monkeypatch), all_tests=True)
    assert "noise distribution" in report.alarms
    assert "spectrum over queries" in report.alarms


@pytest.mark.slow
def test_at_epsilon_one_and_a_half_the_tests_of_the_noise_see_what_the_pairs_mostly_cannot() -> None:
    """The pairs find a fifth less noise in about one audit of 75; the tests of the noise find it in every audit."""
    times = min(AUDITS, 4)
    assert [run(study(epsilon=1.5), all_tests=True).alarms for _ in range(times)] == [()] * times
    seen = 0
    for _ in range(times):
        with pytest.MonkeyPatch.context() as patch:
            report = run(weaker_noise(Fraction(4, 5), epsilon=1.5)(patch), all_tests=True)
        assert {"spectrum over queries", "spectrum over coordinates", "noise distribution"} <= set(report.alarms)
        seen += report.mu_lower_bound > report.study.claimed_mu
    assert seen <= times // 2  # more happens by chance in one test of 100,000 for four audits, of 5,600 for two


def test_a_service_that_answers_one_query_too_many_is_caught() -> None:
    subject = study()
    honest = memory_service(subject)

    def generous(codes: Sequence[Sequence[Code]]) -> Sequence[Code]:
        return [*honest(codes[: subject.queries]), *(honest([query])[0] for query in codes[subject.queries :])]

    report = audit(subject, runs=20, service=generous)
    assert report.alarms[0] == "budget filter"


def gaussian_pair(mu: float, runs: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    return rng.normal(mu / 2, 1, runs), rng.normal(-mu / 2, 1, runs)


@pytest.mark.slow
def test_the_bound_on_mu_is_valid_at_its_confidence_and_close_below() -> None:
    """In 1000 audits of a mechanism with known μ, the 90 % bound may exceed μ at most in every tenth."""
    bounds = np.array([mu_lower_bound(*gaussian_pair(2.0, 1000, seed), confidence=0.9) for seed in range(1000)])
    assert (bounds > 2.0).mean() < 0.10
    assert 1.6 < float(np.median(bounds)) < 2.0


def test_the_bound_separates_twenty_per_cent_at_the_audits_size() -> None:
    caught = [mu_lower_bound(*gaussian_pair(2.083 / 0.8, 2000, s), confidence=0.9995) > 2.083 for s in range(40)]
    assert np.mean(caught) > 0.6  # for one pair; an audit has three pairs and the tests of the noise


def test_perfectly_separated_worlds_give_a_large_finite_bound_and_identical_ones_none() -> None:
    first = np.full(1000, 1.0)
    assert 4 < mu_lower_bound(first, -first, confidence=0.9995) < 10
    assert mu_lower_bound(first, first, confidence=0.9995) == -math.inf


def test_the_spectral_test_accepts_independent_noise_and_sees_five_per_cent_and_reuse() -> None:
    rows = np.random.default_rng(1).normal(size=(8, 48_000))
    assert not spectral_finding("queries", rows).alarm
    assert spectral_finding("queries", rows * 0.95).alarm
    assert spectral_finding("queries", rows[[0, 0, 2, 3, 4, 5, 6, 7]]).alarm


def test_the_distribution_test_accepts_sigma_and_rejects_five_per_cent_and_other_shapes() -> None:
    rng = np.random.default_rng(2)
    noise = np.rint(rng.normal(scale=1000, size=48_000))
    assert not residual_finding(noise, 1000.0).alarm
    assert residual_finding(noise * 0.95, 1000.0).alarm
    assert residual_finding(np.rint(rng.laplace(scale=1000 / math.sqrt(2), size=48_000)), 1000.0).alarm


def test_the_confidence_bound_on_a_rate_matches_its_definition() -> None:
    """By Clopper–Pearson, the bound is the rate at which so few events have probability α."""
    for count, of in [(0, 50), (3, 100), (40, 1000)]:
        rate = float(audit_module._upper_rate(np.array([count]), of, 0.01)[0])
        assert stats.binom.cdf(count, of, rate) == pytest.approx(0.01, rel=1e-9)
    assert audit_module._upper_rate(np.array([7]), 7, 0.01).tolist() == [1.0]


def test_the_claimed_noise_is_written_out_independently_and_agrees_with_calibration() -> None:
    for subject in (study(), study(Protection(Unit.HOSPITAL, Relation.ZERO_OUT), voters=3), study(PATIENT, voters=4)):
        assert float(audit_module.audited_mechanism(subject).noise_std) == pytest.approx(
            subject.claimed_noise_std, rel=1e-12
        )


def test_progress_is_reported_from_first_to_last_run() -> None:
    told: list[tuple[int, int]] = []
    audit(study(), runs=20, progress=lambda done, of: told.append((done, of)))
    assert told == [(n, 120) for n in range(1, 121)]


def test_an_infinite_measurement_survives_json() -> None:
    def constant(codes: Sequence[Sequence[Code]]) -> Sequence[Code]:
        return memory_service(study())(codes)[:4] if len(codes) > 4 else [np.zeros(4, dtype=np.int64)] * 4

    service: Service = constant
    report = audit(study(), runs=20, service=service)
    json.dumps(report.to_json(), allow_nan=False)
