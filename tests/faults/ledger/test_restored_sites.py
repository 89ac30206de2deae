"""Tests a hospital that restored an older copy of its ledger, with the real worker, core and command line.

The site must not forget what was released, nor queries that it accepted and has no receipt for. The standing on the
same machine shows that the ledger is an older copy. Without it, the server's receipts show it before any code leaves.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from common.errors import LedgerCorrupt
from common.privacy.accounting import max_mu_squared
from consilium.cli.site import site_app
from server.ledger.backup import backup
from server.ledger.verify import verify
from tests.backups import put_copy
from tests.commands import typed
from tests.federation import Federation, make_study
from tests.worlds import HURRIED

pytestmark = pytest.mark.slow

RUN = CliRunner()


@pytest.fixture
def fed(tmp_path: Path) -> Iterator[Federation]:
    study = make_study(planned_queries=10, collection=HURRIED)
    with Federation(tmp_path, study=study) as federation:
        federation.write_site_files()
        yield federation


def run_batches(fed: Federation, count: int) -> None:
    stops = iter([*[False] * count, True])
    fed.core().run(fed.transport, should_stop=stops.__next__)


def put_back(fed: Federation, copy: Path, *, machine: bool = False) -> Path:
    """Stop site 1 and restore an older copy of its ledger; with ``machine`` also of all files beside it."""
    folder = fed.root / "site-1"
    fed.site_ledgers["site-1"].close()
    put_copy(copy, folder / "site-ledger.sqlite")
    if machine:
        shutil.copy(fed.root / "monday.standing", folder / "site-ledger.standing")
    return folder


def restart(fed: Federation) -> None:
    fed.hospitals.open(fed.sites[1])


def command(folder: Path, *words: str) -> str:
    result = typed(site_app, *words, "--site-dir", folder)
    return result.stdout


def test_a_restored_site_is_charged_for_all_it_forgot_and_goes_on(fed: Federation) -> None:
    run_batches(fed, 1)
    backup(fed.root / "site-1/site-ledger.sqlite", fed.root / "monday")
    run_batches(fed, 2)
    spent = fed.site_ledgers["site-1"].spent()
    folder = put_back(fed, fed.root / "monday")
    with pytest.raises(LedgerCorrupt, match=r"older copy.*site recover --own-ledger"):
        restart(fed)
    assert "ALARM" in command(folder, "status")
    assert "missing rows: 4 queries" in command(folder, "recover", "--own-ledger")
    restart(fed)
    assert fed.site_ledgers["site-1"].spent() == spent
    command(folder, "resume", "test")
    fed.core().run(fed.transport)
    own = fed.site_ledgers["site-1"]
    assert len(fed.ledger.answers(fed.study.id)) == 10, "the study ends"
    assert {entry.site for entry in fed.ledger.answers(fed.study.id)[-1].roster} == {"site-0", "site-1", "site-2"}
    assert own.spent() == fed.ledger.spent("pool-1"), "nothing is counted twice where the server was honest"
    assert own.alarms() == ()
    assert own.held(fed.ledger.ledger_id).hash == fed.ledger.head().hash
    assert verify(folder / "site-ledger.sqlite", server_key=fed.signing_key.public_key()).ok


def test_acceptances_the_server_never_receipted_stay_charged(fed: Federation) -> None:
    """The site cannot know whether the server released an answer, so acceptances without a receipt stay charged."""
    run_batches(fed, 1)
    backup(fed.root / "site-1/site-ledger.sqlite", fed.root / "monday")
    hidden = [replace(query, round=2) for query in fed.core().open_queries()[:3]]
    fed.site_ledgers["site-1"].reserve(fed.study.id, hidden)
    spent = fed.site_ledgers["site-1"].spent()
    folder = put_back(fed, fed.root / "monday")
    command(folder, "recover", "--own-ledger")
    command(folder, "resume", "test")
    restart(fed)
    assert fed.site_ledgers["site-1"].spent() == spent
    fed.core().run(fed.transport)
    own = fed.site_ledgers["site-1"]
    assert own.spent().mu_squared > fed.ledger.spent("pool-1").mu_squared
    assert own.spent().mu_squared <= max_mu_squared(fed.study.privacy.accountant, fed.study.privacy.budget)
    assert own.alarms() == ()


def test_a_machine_rolled_back_as_a_whole_is_told_by_receipts_before_a_code_leaves(fed: Federation) -> None:
    backup(fed.root / "site-1/site-ledger.sqlite", fed.root / "monday")
    shutil.copy(fed.root / "site-1/site-ledger.standing", fed.root / "monday.standing")
    run_batches(fed, 2)
    folder = put_back(fed, fed.root / "monday", machine=True)
    restart(fed)
    calls = fed.voters["site-1"].calls
    run_batches(fed, 1)
    own = fed.site_ledgers["site-1"]
    assert "never accepted" in own.alarms()[0]
    assert fed.voters["site-1"].calls == calls, "no code was made, so none left"
    refused = RUN.invoke(site_app, ["recover", "--own-ledger", "--site-dir", str(folder)])
    assert "--charge-all" in str(refused.exception), "there is no standing to tell the sum"
    command(folder, "recover", "--own-ledger", "--charge-all")
    fed.core().run(fed.transport)
    limit = max_mu_squared(fed.study.privacy.accountant, fed.study.privacy.budget)
    assert own.alarms() == ()
    assert own.spent().mu_squared == limit >= fed.ledger.spent("pool-1").mu_squared
    assert len(fed.ledger.answers(fed.study.id)) == 10, "the others go on"
