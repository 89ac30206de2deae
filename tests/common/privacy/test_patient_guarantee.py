"""Tests that training and releases are combined as the smaller of the two only if that is valid."""

from __future__ import annotations

from fractions import Fraction

import pytest

from common.errors import InvalidInput
from common.privacy.accounting import Guarantee, epsilon_exact, guarantee, max_mu_squared
from common.privacy.mechanism import AccountantName, Budget, Mechanism, Protection, Relation, Unit
from common.privacy.patient_guarantee import (
    APART,
    EXCHANGED,
    SMALLER,
    SUM,
    TRAINED,
    WITH_ADAPTED,
    PatientGuarantee,
    Training,
    Trainings,
    combine,
    of_each_patient,
    worst,
)
from common.privacy.training import Neighbours, Sampling, TrainingEvent, TrainingGuarantee, epsilon_of
from common.site_facts import TrainingFacts

EVENT = TrainingEvent(Sampling.POISSON, Fraction(1, 10), Fraction(4), 200)
ADD, REPLACE = Neighbours.ADD_REMOVE, Neighbours.REPLACE_ONE
ONE, OUT = Relation.REPLACE_ONE, Relation.ZERO_OUT
COMPOSED = {"every_release_used_it": False}
ZERO_OUT = Guarantee(4.0, 1e-5, "exact", Protection(Unit.HOSPITAL, OUT))
RELEASE = Guarantee(20.0, 1e-5, "exact", Protection(Unit.PATIENT, Relation.REPLACE_ONE))


def training(
    voter: int = 0, *, event: TrainingEvent | None = EVENT, deal: str = "a" * 64, served: bool = True
) -> Training:
    return Training(voter, deal, "standard" if event is None else "dp-sgd", event, served)


def test_the_smaller_holds_under_one_relation_and_delta_when_every_release_used_the_training() -> None:
    found = Trainings((training(0), training(1))).guarantee(delta=1e-5, neighbours=REPLACE)
    assert found is not None
    assert found.epsilon == pytest.approx(2.937, abs=0.01)
    both = combine(found, RELEASE, every_release_used_it=True)
    assert (both.rule, both.epsilon, both.delta) == (SMALLER, found.epsilon, 1e-5)
    assert combine(TrainingGuarantee(30.0, 1e-5, REPLACE), RELEASE, every_release_used_it=True).epsilon == 20.0


def test_one_teacher_without_a_guarantee_removes_the_smaller_of_the_two() -> None:
    mixed = Trainings((training(0), training(1, event=None)), every_code_traced=True)
    assert mixed.guarantee(delta=1e-5, neighbours=REPLACE) is None
    assert not mixed.covers_every_release
    both = combine(None, RELEASE, every_release_used_it=False)
    assert (both.rule, both.epsilon) == (APART, 20.0)
    assert "not every teacher" in str(both)


@pytest.mark.parametrize(
    ("guarantee", "used", "rule", "word"),
    [
        (TrainingGuarantee(8.0, 1e-5, ADD), True, APART, "relation"),
        (TrainingGuarantee(8.0, 1e-4, REPLACE), True, SUM, "δ"),
        (TrainingGuarantee(8.0, 1e-5, REPLACE), False, SUM, "every release"),
    ],
)
def test_each_unmet_condition_is_named_and_the_guarantees_are_added_or_only_the_releases_is_stated(
    guarantee: TrainingGuarantee, used: bool, rule: str, word: str
) -> None:
    both = combine(guarantee, RELEASE, every_release_used_it=used)
    assert both.rule == rule
    assert word in both.reasons[0]
    if rule == SUM:
        assert (both.epsilon, both.delta) == (28.0, pytest.approx(1e-5 + guarantee.delta))


def test_zero_out_releases_of_a_hospital_never_combine_with_an_add_remove_training() -> None:
    both = combine(TrainingGuarantee(2.0, 1e-5, ADD), ZERO_OUT, every_release_used_it=True)
    assert both.rule == APART
    assert both.epsilon == pytest.approx(9.0846, abs=1e-3)  # not the 4 that hides a hospital left out


def test_no_patient_is_ever_promised_what_protection_refuses() -> None:
    for protection in (Protection(Unit.HOSPITAL, relation) for relation in Relation):
        with pytest.raises(InvalidInput):
            PatientGuarantee(1.0, 1e-5, protection, APART)
        release = Guarantee(4.0, 1e-5, "exact", protection)
        for training_of in (None, TrainingGuarantee(2.0, 1e-5, ADD), TrainingGuarantee(2.0, 1e-5, REPLACE)):
            for used in (True, False):
                both = combine(training_of, release, every_release_used_it=used)
                assert both.protection == EXCHANGED
                assert "unit patient, relation replace-one" in str(both)
                assert "zero-out" not in str(both)
    with pytest.raises(InvalidInput):
        PatientGuarantee(1.0, 1e-5, "zero-out", APART)  # type: ignore[arg-type]
    with pytest.raises(InvalidInput):
        TrainingGuarantee(1.0, 1e-5, "zero-out")  # type: ignore[arg-type]


@pytest.mark.parametrize("accountant", ["exact", "rdp", "paper"])
@pytest.mark.parametrize("share", [Fraction(1, 1000), Fraction(1, 3), Fraction(1)])
def test_a_patient_inside_a_zeroed_hospital_costs_what_replacing_the_hospital_costs(
    accountant: str, share: Fraction
) -> None:
    """The oracle is the ledger's composition of the same releases under replace-one: Δ = 2mR instead of mR."""
    budget, mechanism = Budget(4.0, 1e-5), Mechanism(8, 1000, 3, Fraction(5000))
    zeroed, replaced = (mechanism.mu_squared(Protection(Unit.HOSPITAL, relation)) for relation in (OUT, ONE))
    count = share * max_mu_squared(AccountantName.EXACT, budget) / zeroed
    release = guarantee(count * zeroed, budget, Protection(Unit.HOSPITAL, OUT), accountant)
    wanted = guarantee(count * replaced, budget, Protection(Unit.HOSPITAL, ONE), accountant)
    found = of_each_patient(release)
    assert found.epsilon >= wanted.epsilon
    assert found.epsilon == pytest.approx(wanted.epsilon, rel=1e-10)
    assert (found.delta, found.accountant, found.protection) == (1e-5, accountant, EXCHANGED)


def test_a_patient_costs_what_its_exchanged_hospital_costs_and_nothing_while_nothing_is_released() -> None:
    for unit in Unit:
        assert of_each_patient(Guarantee(4.0, 1e-5, "rdp", Protection(unit, ONE))).epsilon == 4.0
    assert of_each_patient(Guarantee(0.0, 1e-5, "exact", Protection(Unit.HOSPITAL, OUT))).epsilon == 0.0
    with pytest.raises(InvalidInput):  # a group's ε is no bound for one patient
        of_each_patient(Guarantee(4.0, 1e-5, "exact", Protection(Unit.HOSPITAL, OUT), group=2))


def test_a_sum_of_two_guarantees_is_not_rounded_below_them() -> None:
    both = combine(TrainingGuarantee(0.1, 1e-5, REPLACE), Guarantee(0.7, 1e-5, "exact", EXCHANGED), **COMPOSED)
    assert Fraction(both.epsilon) >= Fraction(0.1) + Fraction(0.7)
    large = combine(TrainingGuarantee(0.1, 0.6, REPLACE), Guarantee(0.7, 0.6, "exact", EXCHANGED), **COMPOSED)
    assert (large.rule, large.epsilon, large.delta) == (APART, 0.7, 0.6)  # their sum would promise nothing


@pytest.mark.slow
def test_trainings_of_one_voter_add_up_and_voters_of_one_deal_do_not() -> None:
    once = epsilon_of(EVENT, delta=1e-5, neighbours=ADD)
    apart = Trainings((training(0), training(1))).guarantee(delta=1e-5, neighbours=ADD)
    again = Trainings((training(0), training(0))).guarantee(delta=1e-5, neighbours=ADD)
    redealt = Trainings((training(0), training(1, deal="b" * 64))).guarantee(delta=1e-5, neighbours=ADD)
    assert apart is not None
    assert again is not None
    assert redealt is not None
    assert apart.epsilon == once
    assert again.epsilon > 1.3 * once
    assert redealt.epsilon == again.epsilon


def test_patients_who_were_dealt_anew_may_have_met_a_voter_of_each_deal_so_everything_adds_up() -> None:
    """Full batches make one Gaussian of Σ1/z², whose ε follows from the exact curve."""
    z = Fraction(5)
    event = TrainingEvent(Sampling.FIXED_PARTITION, Fraction(1), z, 10)
    again = Trainings((Training(0, "first", "dp-sgd", event), Training(1, "second", "dp-sgd", event)))
    found = again.guarantee(delta=1e-5, neighbours=ADD)
    assert found is not None
    assert found.epsilon == pytest.approx(epsilon_exact(Fraction(20) / z**2, 1e-5), rel=1e-3)


def test_releases_are_covered_only_if_every_code_is_traced_to_private_trainings() -> None:
    private, plain = (training(0), training(1)), training(1, event=None)
    assert Trainings(private, every_code_traced=True).covers_every_release
    assert not Trainings(private).covers_every_release, "a code whose teachers nobody knows"
    assert not Trainings((*private, plain), every_code_traced=True).covers_every_release
    assert not Trainings((), every_code_traced=True).covers_every_release
    assert not Trainings((plain,), every_code_traced=True).covers_every_release


def test_a_training_without_a_guarantee_that_was_never_served_takes_nothing_from_the_others() -> None:
    private, shelved = (training(0), training(1)), training(0, event=None, deal="b" * 64, served=False)
    both = Trainings((*private, shelved), every_code_traced=True)
    assert both.covers_every_release
    alone = Trainings(private).guarantee(delta=1e-5, neighbours=ADD)
    assert alone is not None
    assert both.guarantee(delta=1e-5, neighbours=ADD) == alone


def test_a_private_training_whose_teacher_never_answered_still_costs_its_epsilon() -> None:
    once = Trainings((training(0),)).guarantee(delta=1e-5, neighbours=ADD)
    unused = Trainings((training(0), training(0, served=False))).guarantee(delta=1e-5, neighbours=ADD)
    assert once is not None
    assert unused is not None
    assert unused.epsilon > 1.3 * once.epsilon


def test_a_federation_is_as_safe_as_its_worst_site() -> None:
    good = combine(TrainingGuarantee(2.0, 1e-5, REPLACE), RELEASE, every_release_used_it=True)
    bad = combine(None, RELEASE, every_release_used_it=False)
    assert worst([good, bad]) == bad


def adapted(event: TrainingEvent = EVENT) -> Training:
    return Training(0, "f" * 64, "adapted-dp-sgd", event)


def test_with_a_network_that_may_leave_the_smaller_of_the_two_never_stands_for_a_patient() -> None:
    """The releases' ε of 1 does not cover a published network trained at ε = 2.9; the trainings' ε covers both."""
    small = Guarantee(1.0, 1e-5, "exact", Protection(Unit.PATIENT, ONE))
    trained = Trainings((training(0), adapted()))
    found, left = (each(delta=1e-5, neighbours=REPLACE) for each in (trained.guarantee, trained.adapted))
    assert found is not None
    assert left is not None
    assert left.epsilon == pytest.approx(epsilon_of(EVENT, delta=1e-5, neighbours=REPLACE))
    assert found.epsilon > left.epsilon  # a patient met both trainings
    both = combine(found, small, every_release_used_it=True, adapted=left)
    assert (both.rule, both.epsilon) == (TRAINED, found.epsilon)


def test_releases_never_stand_alone_beside_a_network_that_may_leave() -> None:
    left = Trainings((adapted(), training(1, event=None))).adapted(delta=1e-5, neighbours=REPLACE)
    assert left is not None
    both = combine(None, RELEASE, every_release_used_it=False, adapted=left)
    assert (both.rule, both.delta) == (WITH_ADAPTED, 2e-5)
    assert both.epsilon == pytest.approx(20.0 + left.epsilon, abs=1e-12)
    with pytest.raises(InvalidInput, match="relation"):
        combine(None, RELEASE, every_release_used_it=False, adapted=TrainingGuarantee(1.0, 1e-5, ADD))


def test_a_site_without_a_network_that_may_leave_reports_as_it_did() -> None:
    plain = Trainings((training(0),))
    assert plain.adapted(delta=1e-5, neighbours=REPLACE) is None
    assert "adapted" not in TrainingFacts.of(plain, delta=1e-5).to_json()
    found = TrainingFacts.of(Trainings((adapted(),)), delta=1e-5)
    assert found.adapted is not None
    assert found.adapted.neighbours is REPLACE
    assert TrainingFacts.from_json(found.to_json()) == found
