"""Tests the papers' studies over real daemons: private teachers by every strategy, and both PATE algorithms.

Each study has two hospitals, two volumes and a few training steps, and runs from trained teachers to a certificate.
Three things are checked. Each hospital's ledger holds its training with the ε that this file's own accountant computes.
Server and hospitals agree on what was released. With aggregation ``open``, the server's answer is the sum of the
hospitals' codes and of noise that the server drew.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import dp_accounting
import pytest
from dp_accounting.pld import PLDAccountant

from client.ledger.site_ledger import SiteLedger
from client.training.private.settings import STRATEGIES, PrivateSettings
from common.codecs.paper import codec_terms
from common.config import CodecConfig, CollectionConfig, PrivacyConfig
from common.privacy.mechanism import AccountantName, Unit
from consilium.reports.certificate import Sources, issue_certificate
from server.operations.supervisor import supervise
from tests.e2e.daemons import running
from tests.e2e.ended import Ended, books_agree, is_the_papers_release
from tests.e2e.road import CODEC, build
from tests.worlds import make_privacy

pytestmark = pytest.mark.slow

NAMES = ("site-0", "site-1")
QUERIES, DELTA = 2, 1e-3
OPEN = make_privacy(delta=DELTA, planned_queries=QUERIES, unit=Unit.PATIENT)
PAPER = replace(OPEN, unit=Unit.HOSPITAL, accountant=AccountantName.PAPER)
STEPS = 3
OTHERS = [pytest.param(name, marks=pytest.mark.faults) for name in sorted(STRATEGIES.keys() - {"dp-mac"})]
"""Strategies whose study ``make test-experiment`` runs and ``make test-slow`` does not."""


def ended(
    root: Path, *, privacy: PrivacyConfig, codec: CodecConfig = CODEC, private: PrivateSettings | None = None
) -> Ended:
    collection = CollectionConfig(offer_deadline_s=30.0, patience_s=90.0)
    workspace, sites = build(
        root, NAMES, collection=collection, privacy=privacy, codec=codec, private=private, patients=4
    )
    with running(workspace, sites):
        supervise(workspace)
    issued = issue_certificate(workspace, root / "certificate", Sources())
    return Ended(workspace, sites, json.loads(issued.json.read_text(encoding="utf-8")))


@pytest.mark.parametrize("strategy", ["dp-mac", *OTHERS])
def test_hospitals_with_private_teachers_answer_a_study_and_both_books_say_what_it_cost(
    strategy: str, tmp_path: Path
) -> None:
    settings = PrivateSettings(strategy, 4.0, DELTA, steps=STEPS, chunk=4)
    study = ended(tmp_path, privacy=OPEN, private=settings)
    books_agree(study)
    for directory in study.sites.values():
        with SiteLedger.read(directory / "site-ledger.sqlite") as own:
            trainings = [json.loads(row.body) for row in own.rows() if row.kind == "training"]
        (training,) = trainings
        assert training["strategy"] == strategy
        (event,) = training["events"]
        assert event["steps"] == STEPS
        multiplier, rate = (_number(event[name]) for name in ("noise_multiplier", "rate"))
        accountant = PLDAccountant(dp_accounting.NeighboringRelation.ADD_OR_REMOVE_ONE)
        step = dp_accounting.PoissonSampledDpEvent(rate, dp_accounting.GaussianDpEvent(multiplier))
        accountant.compose(step, STEPS)
        assert 3.9 < accountant.get_epsilon(DELTA) <= 4.001


@pytest.mark.faults  # only make test-experiment runs it
@pytest.mark.parametrize("name", ["ball-ae", "paper-pca"])
def test_both_algorithms_of_pate_run_open_with_the_papers_accountant(name: str, tmp_path: Path) -> None:
    """The server adds up ball codes or projections, adds the noise of eq (15), decodes, and trains the student."""
    from common.data.synthetic import study_data

    data = study_data(2)
    codec = replace(codec_terms(name, labels=len(data.labels), grid=data.grid), augmentations=20, max_dimension=6)
    is_the_papers_release(ended(tmp_path, privacy=PAPER, codec=codec), codec=name)


def _number(text: object) -> float:
    top, _, bottom = str(text).partition("/")
    return float(top) / float(bottom or 1)
