"""Tests a site's status report: it is read as written, and states a patient's ε only by the rule."""

from __future__ import annotations

import re
from fractions import Fraction

import pytest

from common.data.dataset import PatientIdentity
from common.errors import InvalidInput
from common.privacy.accounting import Guarantee
from common.privacy.patient_guarantee import ADAPTED, UNPROTECTED, Training, Trainings
from common.privacy.training import Sampling, TrainingEvent
from common.site_facts import SiteFacts, TrainingFacts, read_guarantee

SPENT = {"accountant": "exact", "delta": 1e-5, "epsilon": 20.0, "relation": "replace-one", "unit": "patient"}
ADD = {"delta": 1e-5, "epsilon": 8.0, "relation": "add-remove", "unit": "patient"}
REPLACE = {"delta": 1e-5, "epsilon": 13.375, "relation": "replace-one", "unit": "patient"}


def patient_lines(stated: dict[str, object], release: Guarantee) -> tuple[str, ...]:
    return TrainingFacts.from_json(stated).lines(release)


def report(**stated: object) -> dict[str, object]:
    """Return a status report with only its required fields."""
    spent = {name: {**SPENT, "accountant": name} for name in ("exact", "rdp", "paper")}
    cap = {"accountant": "exact", "epsilon": 24.0, "delta": 1e-5}
    counts = {"queries_accepted": 4, "receipted": 3, "refusals": 2}
    return {"site": "north", "pool": "p", "spent": spent, "cap": cap, **counts, "alarms": [], **stated}


def trainings(*guarantees: object, covers: bool = True) -> dict[str, object]:
    return {"count": 2, "strategies": ["dp-sgd"], "guarantees": list(guarantees), "covers_every_release": covers}


def test_a_sites_trainings_and_the_smaller_of_the_two_are_printed_with_all_their_terms() -> None:
    lines = patient_lines(trainings(ADD, REPLACE), read_guarantee(SPENT))
    assert len(lines) == 3
    for line, facts in ((lines[0], ("ε = 8 ", "add-remove")), (lines[2], ("ε = 13.38 ", "replace-one", "smaller"))):
        assert all(fact in line for fact in (*facts, "δ = 1e-05", "unit patient"))


def test_no_epsilon_of_trainings_is_stated_while_a_network_that_may_leave_may_be_missing() -> None:
    """Formerly `site status` withheld it, but `site status --json` stated a smaller ε than the patients had spent."""
    event = TrainingEvent(Sampling.POISSON, Fraction(1, 10), Fraction(4), 200)
    known = tuple(Training(0, "d" * 64, strategy, event, served=True) for strategy in ("dp-sgd", f"{ADAPTED}dp-sgd"))
    whole = TrainingFacts.of(Trainings(known, every_code_traced=True), delta=1e-5)
    assert None not in (*whole.guarantees, whole.adapted)
    said = TrainingFacts.of(Trainings(known, every_code_traced=True, adapted_unknown=True), delta=1e-5).to_json()
    assert (said["guarantees"], said["adapted_unknown"], "adapted" in said) == ([None, None], True, False)


def test_if_one_teacher_has_no_guarantee_only_that_of_the_releases_is_stated() -> None:
    lines = patient_lines(trainings(None, None, covers=False), read_guarantee(SPENT))
    assert UNPROTECTED in lines[0]
    assert "ε = 20 " in lines[1]
    assert re.search("smaller .*because", lines[1])


def test_releases_before_the_training_make_it_a_sum() -> None:
    (*_, both) = patient_lines(trainings(ADD, REPLACE, covers=False), read_guarantee(SPENT))
    assert "ε = 33.38 at δ = 2e-05" in both


def test_zero_out_releases_are_said_of_a_patient_as_replace_one_at_twice_the_mu() -> None:
    zeroed = read_guarantee({**SPENT, "epsilon": 4.0, "unit": "hospital", "relation": "zero-out"})
    for found in ((ADD, REPLACE), (None, None), (REPLACE,)):
        (*_, both) = patient_lines(trainings(*found, covers=False), zeroed)
        assert "zero-out" not in both
        assert "unit patient, relation replace-one" in both
    (*_, alone) = patient_lines(trainings(None, covers=False), zeroed)
    assert "ε = 9.085 at δ = 1e-05" in alone  # (4, 1e-5) has μ 0.9249; twice that is (9.085, 1e-5) by the exact curve
    (*_, beyond) = patient_lines(
        trainings(None, covers=False),
        read_guarantee({**SPENT, "epsilon": 1500.0, "unit": "hospital", "relation": "zero-out"}),
    )
    assert "ε" not in beyond
    assert "unit patient, relation replace-one" in beyond


def test_a_site_without_private_trainings_adds_no_line_and_a_broken_report_is_refused() -> None:
    assert SiteFacts.from_json(report()).patient_lines == ()
    assert SiteFacts.from_json(report(trainings={"count": 0, "strategies": [], "guarantees": []})).patient_lines == ()
    for wrong in ({"guarantees": [{}]}, {"guarantees": "abc"}, {"strategies": {}}, {"count": -1}):
        with pytest.raises(InvalidInput, match="status report"):
            SiteFacts.from_json(report(trainings={"count": 1, "strategies": [], "guarantees": [], **wrong}))


def test_a_report_repeats_what_a_sites_ledger_says_a_patient_is() -> None:
    rows = [{"row": 3, "identity": "file"}, {"row": 9, "identity": "table"}]
    first, then = SiteFacts.from_json(report(patient_identity=rows)).identity_lines
    assert "row 3" in first
    assert PatientIdentity.FILE.sentence in first
    assert "row 9" in then
    assert "table" in then
    assert SiteFacts.from_json(report()).identity_lines == ()
    with pytest.raises(InvalidInput):
        SiteFacts.from_json(report(patient_identity=[{"row": 3, "identity": "family"}]))


def test_a_status_report_is_read_as_written_with_its_doubt() -> None:
    stated = report(at_least="the ledger is an older copy", alarms=["the ledger is an older copy"])
    found = SiteFacts.from_json(stated)
    assert found.account() == stated
    assert (found.least, found.spent.epsilon) == ("at least ", 20.0)
    assert SiteFacts.from_json(report()).least == ""


@pytest.mark.parametrize(
    "wrong",
    [{"alarms": "x"}, {"site": 3}, {"queries_accepted": True}, {"spent": {"exact": SPENT}}, {"cap": {"epsilon": 1.0}}],
)
def test_a_report_of_another_form_is_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(InvalidInput, match="status report"):
        SiteFacts.from_json(report(**wrong))
