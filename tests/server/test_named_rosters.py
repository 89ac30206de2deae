"""Tests that every reader names the same sites whether a roster has a row of its own or stands in the release's row."""

from __future__ import annotations

import re
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from common.config import CollectionConfig
from common.ledger import charges
from common.ledger.row_text import row_text
from consilium.audit.service import Service, read_life, read_rows
from consilium.reports.certificate import _history
from server.dashboard.ledger_fold import LedgerFold
from server.dashboard.rows import row_page
from server.ledger.server_ledger import Ledger
from server.ledger.verify import verify
from tests.federation import Federation, make_study

pytestmark = pytest.mark.slow


def told(root: Path, monkeypatch: pytest.MonkeyPatch, *, aggregation: str, longest: int) -> dict[str, Any]:
    """Return what every reader states of the study; rosters of more than ``longest`` sites have rows of their own."""
    root.mkdir()
    collection = CollectionConfig(batch_size=2)
    study = make_study(planned_queries=4, quorum=3, aggregation=aggregation, collection=collection)
    with monkeypatch.context() as patched:
        patched.setattr(charges, "MAX_REPEATED_ROSTER", longest)
        federation = Federation(root, study=study, sites=3)
        federation.core().run(federation.transport)
        federation.close()
    ledger = root / "ledger.sqlite"
    kinds = verify(ledger, public_key=federation.signing_key.public_key()).kinds
    assert verify(ledger).ok
    for site in federation.sites:
        report = verify(root / site.name / "site-ledger.sqlite", server_key=federation.signing_key.public_key())
        assert report.ok
        assert report.kinds["receipt"] == 2
    assert kinds.get("roster", 0) == (0 if longest else 1)
    fold = LedgerFold(ledger, study_id=study.id)
    list(fold.steps(threading.RLock()))
    assert fold.problem is None
    service = SimpleNamespace(
        workspace=SimpleNamespace(ledger_file=ledger),
        study=study,
        sites=federation.sites,
        site_file=lambda index: root / federation.sites[index].name / "site-ledger.sqlite",
    )
    life = read_life(cast(Service, service))
    subjects = [row.subject for row in row_page(ledger, kind="release", text="", before=None, after=None, limit=9).rows]
    subjects += [row_text("release", body) for kind, body in read_rows(ledger, "answers")[0] if kind == "release"]
    assert all(("of roster" in subject) == (longest == 0) for subject in subjects)
    assert all(bool(re.search(r"\b(3 sites|sites 3)\b", subject)) == (longest > 0) for subject in subjects)
    with Ledger.open(ledger) as opened:
        return {
            "history": {sites for one in fold.histories.values() for sites in one.sites},
            "batches": [(batch.roster, batch.voters) for batch in fold.batches.values()],
            "certificate": [
                (one["sites"], one["voters"]) for one in _history(opened, study, opened.study_facts(study))["releases"]
            ],
            "audit": [(one.roster, one.query) for one in life.releases],
            "answers": [([entry.site for entry in one.roster], one.voters) for one in opened.answers(study.id)],
        }


@pytest.mark.parametrize("aggregation", ["open", "sealed-sum"])
def test_every_reader_of_the_ledger_says_the_same_of_a_named_roster(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, aggregation: str
) -> None:
    short = told(tmp_path / "short", monkeypatch, aggregation=aggregation, longest=16)
    assert short["certificate"]
    assert len(short["audit"]) == 4
    assert told(tmp_path / "long", monkeypatch, aggregation=aggregation, longest=0) == short
