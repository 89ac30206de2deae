"""Tests the audit of a running study: every kind of study passes, and the audit reads what the ledgers contain."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from common.errors import InvalidInput
from consilium.audit.books import allowed, life_findings, noise_of
from consilium.audit.run import audit_service
from consilium.audit.service import Service, read_life
from consilium.audit.subject import Limit, Subject, stand_in
from consilium.audit.world import VoterAnswers
from server.ledger.server_ledger import Ledger
from tests.worlds import make_privacy


def subject(
    *, sites: int = 3, dimension: int = 16, joint: bool = False, limits: object = (), **more: object
) -> Subject:
    terms = make_privacy(**{"planned_queries": 3} | more)
    return stand_in(terms, hospitals=sites, dimension=dimension, radius=1.0, framed=joint, limits=tuple(limits))


STUDIES: dict[str, dict[str, object]] = {
    "zero-out, three voters": {"relation": "zero-out", "voters_per_site": 3},
    "rdp, rounds": {"accountant": "rdp", "joint": True, "voters_per_site": 2},
    "the paper's accountant": {"accountant": "paper", "planned_queries": 5},
    "one round for patients": {"unit": "patient", "planned_queries": 1, "joint": True},
    "an odd dimension in many rounds": {"joint": True, "dimension": 7, "planned_queries": 9},
    "two numbers": {"dimension": 2},
    "a small budget": {"epsilon": 0.2, "delta": 1e-6},
    "a large budget": {"epsilon": 1000.0, "planned_queries": 1},
    "every site needed": {"quorum": 3},
    "one site": {"quorum": 1, "sites": 1},
    "sealed, two of five collude": {"aggregation": "sealed-sum", "colluders": 2, "quorum": 4, "sites": 5},
    "sealed rounds with draws to spare": {"aggregation": "sealed-sum", "quorum": 3, "joint": True, "spare_draws": 2},
    "pools of three sizes": {"limits": [Limit(8.0, 1e-3, "exact"), Limit(5.0, 1e-3, "exact"), Limit(7.0, 1e-4, "rdp")]},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", STUDIES)
def test_every_kind_of_study_passes_as_it_is(name: str) -> None:
    report = audit_service(subject(**STUDIES[name]), draws=200)
    assert report.alarms == (), [str(finding) for finding in report.findings if finding.alarm]


def test_answers_read_by_sql_equal_the_ledgers_and_the_noise_is_answer_minus_codes(tmp_path: Path) -> None:
    service = Service(tmp_path, subject(joint=True), VoterAnswers("far+"))
    assert service.live() == ""
    life = read_life(service)
    with Ledger.open(service.workspace.ledger_file) as ledger:
        answers = ledger.answers(service.study.id)
    assert [release.query for release in life.releases] == [answer.query.id for answer in answers]
    for release, answer, noise in zip(life.releases, answers, noise_of(service, life), strict=True):
        assert np.array_equal(release.answer, answer.noisy_sum)
        codes = [life.sites[site].codes[release.query] for site in release.roster]
        assert all(np.linalg.norm(code) <= 65536 for code in codes)
        assert np.array_equal(release.answer - np.sum(codes, axis=0), noise)
        assert 0.3 < noise.std() / float(answer.query.mechanism.noise_std) < 2


def test_a_pool_tighter_than_the_study_is_expected_to_stop_first(tmp_path: Path) -> None:
    """The budget (5, 1e-3) allows μ 1.43, and (8, 1e-3) allows 2.08 for three releases. By these figures it pays for
    one.
    """
    tight = [Limit(8.0, 1e-3, "exact"), Limit(5.0, 1e-3, "exact"), Limit(8.0, 1e-3, "exact")]
    service = Service(tmp_path, subject(limits=tight), VoterAnswers())
    assert allowed(service) == {"site-0": 3, "site-1": 1, "site-2": 3}
    assert service.live() == ""
    assert [len(release.roster) for release in read_life(service).releases] == [3, 2, 2]


def test_pools_without_room_for_a_release_are_nothing_to_audit() -> None:
    with pytest.raises(InvalidInput, match="without a release"):
        subject(limits=[Limit(0.5, 1e-3, "exact")] * 3)
    with pytest.raises(InvalidInput, match="quorum"):
        subject(sites=1)


@pytest.mark.slow
def test_an_audit_leaves_the_systems_entropy_as_it_was_and_tells_every_life() -> None:
    real, told = os.urandom, []
    report = audit_service(
        subject(sites=2), draws=1, parts=("exchange",), progress=lambda done, of: told.append((done, of))
    )
    assert os.urandom is real
    assert report.lives == 6
    assert [done for done, _ in told] == [1, 2, 3, 4, 5, 6]
    assert report.to_json()["hospitals"] == 2


@pytest.mark.parametrize("bad", [0, -1, 1.5, True, None])
def test_nonsense_draws_are_refused(bad: int) -> None:
    with pytest.raises(InvalidInput):
        audit_service(subject(), draws=bad)


def test_no_figure_of_a_shorter_run_stands_beside_the_claim(tmp_path: Path) -> None:
    """A pool that stops after one of three releases ends the run at a lower ε than the study's 8."""
    tight = [Limit(5.0, 1e-3, "exact")] * 3
    service = Service(tmp_path, subject(limits=tight), VoterAnswers())
    assert service.live() == ""
    findings = {finding.test: finding for finding in life_findings(service, read_life(service), ended="")}
    reported = findings["reported ε"]
    assert (reported.limit, reported.alarm) == (1.0, False)
    assert reported.measured == pytest.approx(1.0)
