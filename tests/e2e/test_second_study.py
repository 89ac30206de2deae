"""Tests a second study of the same hospitals over real daemons: server and sites add both studies to one total.

``tests/server/test_shared_ledger.py`` tests that each ledger by itself refuses a study beyond the budget.
It runs real daemons for minutes, so only ``make test-experiment`` runs it.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from consilium.demo.federation import write_sites
from consilium.demo.training import train_all
from server.ledger.verify import verify
from tests.e2e.consortium import POOL_EPSILON, SITES, collect, consortium_of, costs
from tests.e2e.daemons import running

pytestmark = pytest.mark.faults


def test_both_ledgers_show_the_sum_of_two_studies(tmp_path: Path) -> None:
    consortium = consortium_of(tmp_path)
    first = consortium.study("first", epsilon=8.0, ledger=None)
    consortium.sites = write_sites(first, tmp_path / "sites", names=SITES, data=tmp_path / "data")
    train_all(consortium.sites, seed=0, processes=1, on_steps=lambda done, total: None)
    with running(first, consortium.sites, pool_epsilon=POOL_EPSILON):
        collect(first)
    assert consortium.spent() == dict.fromkeys(SITES, (costs(first), costs(first)))

    second = consortium.study("second", epsilon=4.0, ledger=first.root)
    joined = consortium.join(second)
    consortium.set_caps(POOL_EPSILON)
    with running(second, joined):
        collect(second)
    total = costs(first) + costs(second)
    assert consortium.spent() == dict.fromkeys(SITES, (total, total))
    for path in (first.ledger_file, *(directory / "site-ledger.sqlite" for directory in consortium.sites.values())):
        assert verify(path).ok
