"""Tests a site's ledger after any restore: it refuses with a remedy, or counts all accepted queries and keeps all
vetoes.

The oracle is what happened (``site_life``). One thing nobody can know (docs/ledger.md, "What nobody notices"): what was
accepted or said since the copy, if ledger and standing were both rolled back and no receipt shows it.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from fractions import Fraction
from functools import partial
from pathlib import Path
from unittest.mock import Mock

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from typer.testing import CliRunner

from client.ledger.site_ledger import SiteLedger
from client.operations import staff_decisions
from client.operations.staff_decisions import end_alarm, recover_own
from client.policy import load_site
from client.site.books import open_books
from common.config import render_study
from common.errors import InvalidInput, LedgerCorrupt
from common.ledger.keys import public_hex
from common.ledger.rows import START, SignedHead, head_message
from common.ledger.teacher_records import TrainingRecord
from common.privacy.training import Neighbours, Sampling, TrainingEvent
from common.witness.memory import HeadMemory
from common.witness.notes import CheckpointNote, origin_of
from consilium.cli.site import site_app
from tests.common.ledger.ledger_world import World, ledger_study
from tests.restores.harness import Case, Moment, cases, files, look_at, mixed, restored, unclassified
from tests.restores.site_life import HARMLESS, PARTS, Facts, hear, live, look, revived

DRAWN = TrainingEvent(Sampling.FIXED_PARTITION, Fraction(1), Fraction(4), steps=4)
PAGE = Path(__file__).parents[2] / "docs" / "lab" / "ledger-tried.md"
Lived = tuple[World, list[Moment[Facts]]]


@pytest.fixture(scope="module")
def lived(tmp_path_factory: pytest.TempPathFactory) -> Lived:
    return live(tmp_path_factory.mktemp("life"))


def test_every_file_of_a_sites_books_is_a_part_or_named_as_harmless(lived: Lived) -> None:
    for moment in lived[1]:
        assert unclassified(moment.folder, PARTS, HARMLESS) == []
    last = files(lived[1][-1].folder)
    assert [part.name for part in PARTS if not any(map(part.holds, last))] == []


def test_the_page_says_how_many_restores_there_are(lived: Lived) -> None:
    count = sum(1 for chosen in (cases, mixed) for _ in chosen(PARTS, lived[1]))
    assert re.search(rf"restores of .*, {count} of .*books,", PAGE.read_text(encoding="utf-8"))


@pytest.mark.slow
@pytest.mark.parametrize("chosen", [cases, mixed])
def test_no_restore_of_a_sites_ledger_makes_an_acceptance_free_or_loses_a_veto(
    lived: Lived, tmp_path: Path, chosen: Callable[..., Iterator[Case]]
) -> None:
    world, moments = lived
    restores = chosen(PARTS, moments)
    outcomes = look_at(restores, PARTS, moments, tmp_path / "site", partial(look, tmp_path, world, moments))
    assert "refused" in outcomes
    assert ("went on" in outcomes) is (chosen is not mixed), "a site goes on while one of its files is missing"


def test_a_site_whose_machine_was_rolled_back_states_no_epsilon_of_its_trainings_while_a_receipt_says_so(
    tmp_path: Path,
) -> None:
    """The receipt shows queries that this copy never accepted, so trainings since then are not known either."""
    world, moments = live(tmp_path)
    folder = restored(Case(("ledger", "standing"), 0, 6), PARTS, moments, tmp_path / "again" / "site")
    life = revived(folder.parent, world, moments[6].facts)
    with life.ledger() as ledger:
        ledger.record_training(TrainingRecord("a" * 64, 0, "d" * 64, "dp-sgd", (DRAWN,)))
        ledger.record_trained("a" * 64, "b" * 64)
        ledger.state_teachers(["b" * 64])
        trained = ledger.trainings()
    assert hear(life, moments[6].facts), "no receipt stopped it"
    with life.ledger() as ledger:
        assert "never accepted" in str(ledger.doubt())
        stopped = ledger.trainings()
    of = {"delta": 1e-3, "neighbours": Neighbours.ADD_REMOVE}
    assert trained.guarantee(**of) is not None
    assert stopped.guarantee(**of) is None


@pytest.mark.parametrize("ahead", [0, 1])
def test_a_standing_of_another_key_undoes_no_charge_of_a_site(lived: Lived, tmp_path: Path, ahead: int) -> None:
    folder = restored(Case(("ledger", "standing"), 0, 6), PARTS, lived[1], tmp_path / "site")
    path, own = folder / "site-ledger.sqlite", Ed25519PrivateKey.generate()
    with SiteLedger.read(path) as copy:
        seq, hashed, of = copy.row_count + ahead, "f" * 64 if ahead else copy.head().hash, copy._standing()
    signed = own.sign(head_message("site", ledger_id=of.head.ledger_id, seq=seq, row_hash=hashed)).hex()
    head = SignedHead("site", of.head.ledger_id, seq, hashed, public_hex(own), signed)
    replace(of, head=head).save(path, key=own)
    with pytest.raises(LedgerCorrupt, match="site recover --own-ledger"), open_books(load_site(folder)):
        pass
    with pytest.raises(InvalidInput, match="another key") as refused:
        recover_own(folder, standing=None, charge_all=False)
    assert f"delete {path.with_suffix('.standing')}, and --charge-all" in str(refused.value)
    path.with_suffix(".standing").unlink()
    recover_own(folder, standing=None, charge_all=True)
    with open_books(load_site(folder)) as ledger:
        assert ledger.spent().mu_squared == ledger._books.limit


def test_a_site_whose_key_alone_came_back_is_refused_until_a_copy_of_its_ledger_is_recovered(
    lived: Lived, tmp_path: Path
) -> None:
    folder = restored(Case(("ledger", "standing"), None, 6), PARTS, lived[1], tmp_path / "site")
    (folder / "request.json").unlink()
    with pytest.raises(InvalidInput, match="signing key is here") as refused:
        open_books(load_site(folder))
    assert "only an older copy, put it there and run `consilium site recover --own-ledger`" in str(refused.value)
    shutil.copy(lived[1][0].folder / "site-ledger.sqlite", folder)
    with pytest.raises(InvalidInput, match="--charge-all counts all remaining budget"):
        recover_own(folder, standing=None, charge_all=False)
    recover_own(folder, standing=None, charge_all=True)
    with open_books(load_site(folder)) as ledger:
        assert ledger.spent().mu_squared == ledger._books.limit


def test_ending_an_alarm_reads_the_policy_once(lived: Lived, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two readings could be of two policies, and so of two ledgers."""
    folder = restored(Case((), None, 1), PARTS, lived[1], tmp_path / "site")
    read = Mock(wraps=load_site)
    monkeypatch.setattr(staff_decisions, "load_site", read)
    assert staff_decisions.end_alarm(folder, server_restored=True)
    read.assert_called_once_with(folder)


def test_another_ledgers_standing_beside_a_sites_books_is_refused_with_a_remedy(lived: Lived, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    folder = restored(Case(("ledger", "standing"), 0, 6), PARTS, lived[1], tmp_path / "site")
    beside, own = folder / "site-ledger.standing", tmp_path / "own"
    beside.rename(own)
    with SiteLedger.open(tmp_path / "other" / "site-ledger.sqlite", "bergen-mri", caps=load_site(folder).caps):
        pass
    (tmp_path / "other" / "site-ledger.standing").rename(beside)
    for standing in (None, own):
        with pytest.raises(InvalidInput, match="of this ledger") as refused:
            recover_own(folder, standing=standing, charge_all=False)
        assert f"replace {beside} by the standing file of this ledger" in str(refused.value)
    own.rename(beside)
    with open_books(load_site(folder)):
        pass


def test_a_restored_server_is_accepted_in_a_study_of_which_only_another_study_shows_its_ledger(
    lived: Lived, tmp_path: Path
) -> None:
    world, moments = lived
    folder = tmp_path / "site"
    shutil.copytree(moments[1].folder, folder)
    (folder / "request.json").unlink()
    (folder / "study.toml").write_text(render_study(ledger_study("second")))
    assert end_alarm(folder, server_restored=True) == (world.ledger.ledger_id,)
    with open_books(load_site(folder)) as ledger:
        assert ledger.held(world.ledger.ledger_id) == START, "it still refuses what the restored ledger offers"


def test_ending_an_alarm_about_another_hospitals_ledger_names_that_ledger(lived: Lived, tmp_path: Path) -> None:
    folder = restored(Case((), None, 1), PARTS, lived[1], tmp_path / "site")
    note, memory = CheckpointNote(origin_of("site", "e" * 32), 3, b"f" * 32), HeadMemory(folder / "witnesses")
    memory.remember(note)
    memory.keep_conflict(note)
    done = CliRunner().invoke(site_app, ["recover", "--site-dir", str(folder)])
    assert "alarm ended for consilium/site-ledger/eeee" in done.output
    assert "server" not in done.output
    assert memory.conflicts() == ()
