"""Tests stand-in teachers on public cases: whether they know more than public data alone, before budget is spent."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from common.config import DataConfig, TrainingConfig
from common.data.synthetic import write_phantoms
from common.errors import InvalidInput
from common.privacy.mechanism import AccountantName, Budget, Protection, Relation, Unit
from consilium.cli.main import app
from server.planning.recommend import Recommendation, Rehearsal, recommend
from server.protocols.rehearsal import PublicCases, rehearse
from tests.commands import refusal_of

GRID = (16, 16, 16)
DATA = DataConfig(labels=("background", "ball"), spacing_mm=(1.0, 1.0, 1.0), grid=GRID)
PLACE = np.stack(np.meshgrid(*[np.arange(16)] * 3, indexing="ij"), axis=-1)
RECIPES = TrainingConfig(channels=(4, 8), steps=60, batch_size=1), TrainingConfig(channels=(4, 8), steps=40)


def drawn(count: int, *, contrast: float, seed: int) -> PublicCases:
    """Draw balls at random places; ``contrast`` sets how clearly the images show them."""
    draws = np.random.default_rng(seed)
    labels = np.stack(
        [(np.linalg.norm(PLACE - draws.uniform(4, 12, 3), axis=-1) < draws.uniform(3, 4)) for _ in range(count)]
    ).astype(np.uint8)
    images = contrast * labels + draws.normal(size=labels.shape)
    images = (images - images.mean()) / images.std()
    return PublicCases(images[:, None].astype(np.float32), labels, DATA)


MAPS = list(drawn(6, contrast=0, seed=1).labels)


def rehearsed(contrast: float, **changes) -> Rehearsal:
    terms = {"protocol": "appearance", "patients": 2, "recipes": RECIPES}
    return rehearse(drawn(8, contrast=contrast, seed=0), MAPS, **{**terms, **changes})


def advised(found: Rehearsal, *, epsilon: float = 8.0) -> Recommendation:
    given = recommend(
        budget=Budget(epsilon, 1e-5),
        accountant=AccountantName.EXACT,
        protection=Protection(Unit.PATIENT, Relation.REPLACE_ONE),
        hospitals=8,
        patients=15,
    )
    return replace(given, rehearsal=found)


def test_a_case_given_twice_is_refused_since_a_stand_in_may_be_scored_on_what_it_learnt() -> None:
    cases = drawn(8, contrast=1.0, seed=0)
    twice = PublicCases(cases.images[[*range(7), 2]], cases.labels[[*range(7), 2]], DATA)
    with pytest.raises(InvalidInput, match=r"case 8.*a copy of public case 3"):
        rehearse(twice, MAPS, protocol="appearance", patients=2, recipes=RECIPES)


@pytest.mark.slow
def test_stand_in_teachers_lead_only_if_images_show_what_is_labelled() -> None:
    shown, hidden = rehearsed(6.0), rehearsed(0.0)
    mean, half = shown.ahead
    assert mean - half > 0
    assert shown.patients == 2
    assert hidden.ahead[0] - hidden.ahead[1] <= 0.0
    assert advised(shown).worth_asking
    assert not advised(hidden).worth_asking
    assert "Do not spend" in advised(hidden).summary


@pytest.mark.slow
def test_a_rehearsal_of_the_studys_own_pairs_trains_starts_on_half_of_them() -> None:
    trained = []
    found = rehearsed(6.0, protocol="joint", paired=True, patients=2, on_training=trained.append)
    assert sum("control" in one for one in trained) == 2
    assert sum("teacher" in one for one in trained) == 4
    assert len(found.control) == 8


@pytest.mark.parametrize(("count", "paired"), [(3, False), (7, True)])
def test_too_few_public_cases_are_refused(count: int, paired: bool) -> None:
    with pytest.raises(InvalidInput, match="public cases"):
        rehearse(drawn(count, contrast=1, seed=0), MAPS, protocol="joint", patients=2, recipes=RECIPES, paired=paired)


def test_an_interval_that_holds_nothing_says_do_not_spend_and_less_noise_makes_it_no_better() -> None:
    even = Rehearsal(3, (0.5, 0.6, 0.4, 0.55), (0.5, 0.55, 0.45, 0.56))
    for epsilon in (2.0, 8.0, 100.0):
        found = advised(even, epsilon=epsilon)
        assert found.low < 0 < found.high
        assert "Do not spend" in found.summary


def test_a_lead_is_worth_more_the_more_of_it_comes_through() -> None:
    lead = Rehearsal(3, (0.7, 0.72, 0.69, 0.71), (0.5, 0.51, 0.5, 0.5))
    ends = [(found.low, found.gain, found.high) for found in (advised(lead, epsilon=each) for each in (0.5, 2.0, 8.0))]
    assert ends == sorted(ends)
    assert all(low < gain < high for low, gain, high in ends)
    assert "3 patients" in advised(lead).summary


@pytest.mark.slow
def test_the_plan_rehearses_on_the_given_cases_and_prints_its_evidence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_phantoms(tmp_path / "cases", cases=4, seed=0)
    write_phantoms(tmp_path / "others", cases=4, first=4, seed=0)
    seen = []

    def stand_in(cases, label_maps, **terms):
        seen.append((cases.images.shape, cases.labels.shape, len(label_maps), terms["patients"], terms["paired"]))
        return Rehearsal(terms["patients"], (0.7, 0.72, 0.69, 0.71), (0.5, 0.51, 0.5, 0.5))

    monkeypatch.setattr("server.protocols.rehearsal.rehearse", stand_in)
    given = ["plan", "--unit", "patient", "--delta", "1e-5", "--queries", "1", "--patients", "15", "--json"]
    maps = ["--label-maps", str(tmp_path / "others" / "labelsTr")]
    cases = ["--cases", str(tmp_path / "cases")]
    found = CliRunner().invoke(app, [*given, *maps, *cases])
    advice = json.loads(found.stdout)["recommended"]
    (images, labels, count, patients, paired), grid = seen[0], seen[0][1][1:]
    assert (images, labels, count) == ((4, 1, *grid), (4, *grid), 4)
    assert (patients, paired) == (15 // advice["voters"], False)
    assert advice["rehearsal"]["control"] == [0.5, 0.51, 0.5, 0.5]
    assert 0 < advice["gain_low"] < advice["gain"] < advice["gain_high"]
    refusal_of(app, *given, *cases)
