"""Checks a study that has ended: server and hospitals booked the same, and an open release follows the paper."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from client.ledger.site_ledger import SiteLedger
from common.privacy.mechanism import GRID_BITS
from server.ledger.server_ledger import Ledger
from server.ledger.verify import verify
from server.study.workspace import Workspace


@dataclass(frozen=True)
class Ended:
    """Holds a study that has run to its end, and the facts of its certificate."""

    workspace: Workspace
    sites: dict[str, Path]
    certificate: dict


def books_agree(study: Ended) -> None:
    """Check that all ledgers verify, that server and sites booked the same charges, and that the certificate agrees."""
    with Ledger.open(study.workspace.ledger_file) as ledger:
        answers = ledger.answers(study.workspace.study().id)
        spent = {site.name: ledger.spent(site.pool).mu_squared for site in study.workspace.sites()}
    assert len(study.sites) == len(spent) == 2
    assert len(answers) == study.workspace.study().privacy.planned_queries == study.certificate["answers"]
    for name, directory in study.sites.items():
        with SiteLedger.read(directory / "site-ledger.sqlite") as own:
            assert own.spent().mu_squared == spent[name] > 0
            assert own.alarms() == ()
        report = verify(directory / "site-ledger.sqlite")
        assert report.ok, report.problems
    report = verify(study.workspace.ledger_file)
    assert report.ok, report.problems


def is_the_papers_release(study: Ended, *, codec: str) -> None:
    """Check that the server added codes within the ball and the noise of eq (15), decoded, and trained the student."""
    books_agree(study)
    terms = study.workspace.study()
    log_term, radius = math.log(1 / terms.privacy.delta), terms.codec.radius
    largest = radius * 2 / len(study.sites)  # one hospital moves the mean code by 2C/K
    sigma = largest * math.sqrt(terms.privacy.planned_queries / 2) * (math.sqrt(log_term + 8) + math.sqrt(log_term)) / 8
    with Ledger.open(study.workspace.ledger_file) as ledger:
        answers = ledger.answers(terms.id)
    residuals = []
    for answer in answers:
        assert answer.query.mechanism.mean_noise_std(voters=len(study.sites)) == pytest.approx(sigma, rel=1e-6)
        codes = []
        for directory in study.sites.values():
            with SiteLedger.read(directory / "site-ledger.sqlite") as own:
                code = own.code(answer.query.id)
            assert code is not None
            assert np.linalg.norm(code / 2.0**GRID_BITS) <= radius
            codes.append(code)
        assert any(code.any() for code in codes)
        residuals.append((answer.noisy_sum - sum(codes)) / (sigma * len(study.sites) * 2.0**GRID_BITS))
    noise = np.concatenate(residuals)
    assert (
        0 < np.sum(noise**2) < len(noise) + 8 * math.sqrt(2 * len(noise)) + 20
    )  # each value is N(0, 1); this fails by chance once in a million
    assert terms.codec.name == codec
    assert study.workspace.codec().sha256 in json.dumps(study.certificate)
    assert (study.workspace.root / "bundle").exists()
