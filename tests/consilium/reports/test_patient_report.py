"""The report and the certificate say of one patient what the rule says, and nothing where nothing was promised."""

from __future__ import annotations

import pytest

from common.errors import InvalidInput
from consilium.reports.patient_report import identity_lines, patient_lines, release_guarantee

SPENT = {"accountant": "exact", "delta": 1e-5, "epsilon": 20.0, "relation": "replace-one", "unit": "patient"}
ADD = {"delta": 1e-5, "epsilon": 8.0, "relation": "add-remove", "unit": "patient"}
REPLACE = {"delta": 1e-5, "epsilon": 13.375, "relation": "replace-one", "unit": "patient"}


def trainings(*guarantees: object, covers: bool = True) -> dict[str, object]:
    return {"count": 2, "strategies": ["dp-sgd"], "guarantees": list(guarantees), "covers_every_release": covers}


def test_a_sites_trainings_and_the_smaller_of_the_two_are_printed_with_all_their_terms() -> None:
    lines = patient_lines(trainings(ADD, REPLACE), release_guarantee(SPENT))
    assert len(lines) == 3
    assert "ε = 8 at δ = 1e-05, unit patient, relation add-remove" in lines[0]
    assert "ε = 13.38 at δ = 1e-05, unit patient, relation replace-one (the smaller" in lines[2]


def test_one_teacher_without_a_guarantee_leaves_the_releases_alone() -> None:
    lines = patient_lines(trainings(None, None, covers=False), release_guarantee(SPENT))
    assert "no patient-level ε of training" in lines[0]
    assert "ε = 20 " in lines[1]
    assert "smaller of the two, because" in lines[1]


def test_releases_before_the_training_make_it_a_sum() -> None:
    (*_, both) = patient_lines(trainings(ADD, REPLACE, covers=False), release_guarantee(SPENT))
    assert "ε = 33.38 at δ = 2e-05" in both


def test_zero_out_releases_are_said_of_a_patient_as_replace_one_at_twice_the_mu() -> None:
    zeroed = release_guarantee({**SPENT, "epsilon": 4.0, "unit": "hospital", "relation": "zero-out"})
    for found in ((ADD, REPLACE), (None, None), (REPLACE,)):
        (*_, both) = patient_lines(trainings(*found, covers=False), zeroed)
        assert "zero-out" not in both
        assert "unit patient, relation replace-one" in both
    (*_, alone) = patient_lines(trainings(None, covers=False), zeroed)
    assert "ε = 9.085 at δ = 1e-05" in alone  # (4, 1e-5) has μ 0.9249; twice that is (9.085, 1e-5) by the exact curve
    (*_, beyond) = patient_lines(
        trainings(None, covers=False),
        release_guarantee({**SPENT, "epsilon": 1500.0, "unit": "hospital", "relation": "zero-out"}),
    )
    assert beyond == "with all releases: nothing of use for unit patient, relation replace-one"


def test_a_site_without_private_trainings_adds_no_line_and_a_broken_report_is_refused() -> None:
    assert patient_lines(None, release_guarantee(SPENT)) == []
    assert patient_lines({"count": 0}, release_guarantee(SPENT)) == []
    with pytest.raises(InvalidInput):
        patient_lines({"count": 1, "guarantees": [{}]}, release_guarantee(SPENT))


def test_the_certificate_repeats_what_a_sites_ledger_says_a_patient_is() -> None:
    rows = [{"row": 3, "identity": "file"}, {"row": 9, "identity": "table"}]
    first, then = identity_lines(rows)
    assert "row 3" in first
    assert "every file counts as a patient of its own" in first
    assert "row 9" in then
    assert "table" in then
    assert identity_lines(None) == identity_lines([]) == ["its ledger does not say what counts as one patient"]
    with pytest.raises(InvalidInput):
        identity_lines([{"row": 3, "identity": "family"}])
