"""Tests what the consent sheet says about the use of the student."""

from __future__ import annotations

from common.plain import RESEARCH_ONLY
from server.study.consent_text import consent_sheet
from tests.worlds import make_study


def test_the_consent_sheet_says_that_the_student_is_for_research_and_no_medical_device() -> None:
    assert RESEARCH_ONLY in consent_sheet(make_study(), patients=None, counted="not counted")
