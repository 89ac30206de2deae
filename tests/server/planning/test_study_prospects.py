"""Tests that every place states the same predicted gain, computed for the study as it is."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from common.config import SEALED_SUM, Study, render_study
from consilium.cli.main import app
from consilium.cli.study_words import say_outlook
from server.dashboard.views.verdict import verdict
from server.planning.recommend import recommend, study_prospects
from tests.commands import typed
from tests.federation import make_study

HOSPITALS = 5
GAIN = re.compile(r"(?:best control: |gain of about )([+-]\d\.\d{3})")


def terms(**privacy: object) -> Study:
    study = make_study(**{"planned_queries": 4, "quorum": 3} | privacy)
    return replace(study, codec=replace(study.codec, joint=True))


STUDIES = {
    "open": terms(),
    "two rounds": terms(planned_queries=2),
    "sealed with spare draws": terms(aggregation=SEALED_SUM, colluders=1, spare_draws=4),
    "many voters": terms(unit="patient", voters_per_site=7),
}


@pytest.mark.parametrize("name", STUDIES)
def test_every_place_predicts_the_same_gain_for_a_study(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    study = STUDIES[name]
    file = tmp_path / "study.toml"
    file.write_text(render_study(study), encoding="utf-8")
    say_outlook(study, hospitals=HOSPITALS)
    shown = verdict(study, gain=None, plan=None, hospitals=HOSPITALS, answers=0)
    planned = typed(app, "plan", "--study", file, "--hospitals", HOSPITALS, "--json")
    found = study_prospects(study, hospitals=HOSPITALS)
    assert found is not None
    said = [GAIN.search(capsys.readouterr().out), GAIN.search(shown.basis)]
    assert [one and one[1] for one in said] == [f"{found.gain:+.3f}"] * 2
    assert json.loads(planned.stdout)["study"]["gain"] == found.gain
    table = CliRunner().invoke(app, ["plan", "--study", str(file), "--hospitals", str(HOSPITALS)])
    assert f"{found.gain:+.3f}" in table.output


def test_the_prediction_is_of_the_studys_own_terms_and_not_of_the_recommended_ones() -> None:
    study = STUDIES["open"]
    privacy = study.privacy
    whole = recommend(
        budget=privacy.budget,
        accountant=privacy.accountant,
        protection=privacy.protection,
        hospitals=HOSPITALS,
        voters=privacy.voters_per_site,
    ).noise
    found = study_prospects(study, hospitals=HOSPITALS)
    assert found is not None
    assert found.noise == pytest.approx(whole, rel=1e-3), "one release, or four rounds that share its budget"

    def gain(name: str) -> float:
        one = study_prospects(STUDIES[name], hospitals=HOSPITALS)
        assert one is not None
        return one.gain

    assert gain("sealed with spare draws") < gain("open"), "spare draws and colluders cost noise"
    assert study_prospects(make_study(), hospitals=HOSPITALS) is None, "no formula is fitted to its protocol"
    few = study_prospects(study, hospitals=0)
    assert few is not None
    assert few.hospitals == privacy.quorum
