"""Tests that with --json stdout has JSON only; questions and remarks for a person go to stderr."""

from __future__ import annotations

import json
from fractions import Fraction
from pathlib import Path

import pytest
from typer.testing import CliRunner

from client.ledger.site_sealed import DisclosedDraw
from common.masking import DrawId
from common.privacy.accounting import guarantee
from common.privacy.mechanism import Budget, Protection, Relation, Unit
from consilium.cli.site import site_app
from consilium.cli.study import study_app
from server.operations import supervisor
from tests.commands import refusal_of, typed
from tests.studies import made_study


def test_a_detached_run_states_the_study_as_json(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made_study(tmp_path / "trial")
    monkeypatch.setattr(supervisor, "detach", lambda _workspace: None)
    done = typed(study_app, "run", tmp_path / "trial", "--detach", "--json")
    assert json.loads(done.stdout)["answers"] == 0
    assert "study watch" in done.stderr


def test_a_status_that_is_refreshed_for_a_person_is_refused_as_json(tmp_path: Path) -> None:
    made_study(tmp_path / "trial")
    assert "--watch with --json" in str(refusal_of(study_app, "status", tmp_path / "trial", "--watch", "--json"))


@pytest.mark.parametrize("answer", ["y", "n"])
def test_a_disclosure_is_asked_about_beside_its_json(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answer: str
) -> None:
    """The person who answers sees the fingerprint and the cost that the question is about."""
    budget = Budget(epsilon=8.0, delta=1e-5)
    cost = guarantee(Fraction(1), budget, Protection(Unit.HOSPITAL, Relation.REPLACE_ONE), "exact")
    draw = DisclosedDraw("a" * 64, DrawId("b" * 64, "c" * 64, "d" * 64, 1), 2, Fraction(1), cost)
    disclosed: list[int] = []
    monkeypatch.setattr("client.site.disclose.disclosure_cost", lambda *_: draw)
    monkeypatch.setattr("client.site.disclose.disclose", lambda *_, **__: disclosed.append(1))
    words = ["disclose", "a" * 12, "--site-dir", str(tmp_path), "--to", "e" * 64, "--out", str(tmp_path / "out.json")]
    done = CliRunner().invoke(site_app, [*words, "--json"], input=f"{answer}\n")
    assert len(disclosed) == (answer == "y")
    assert "SHA256:" in done.stderr
    assert str(cost) in done.stderr
    if answer == "y":
        assert json.loads(done.stdout)["queries"] == 2
    else:
        assert done.stdout == ""
