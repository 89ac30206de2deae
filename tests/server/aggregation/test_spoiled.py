"""Tests that the first spoiled draw ends the run with a question, is charged to all, and wastes no further budget."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from scipy.stats import ncx2
from typer.testing import CliRunner

from common.config import Study
from common.errors import Refused
from common.events import EventLog, read_events
from common.ledger.charges import RosterEntry
from common.masking import MaskedRoster, MaskKey, Member
from consilium.cli.study import study_app
from consilium.reports.certificate import certificate_facts
from server.aggregation.pipeline import collect
from server.ledger.server_ledger import Ledger
from server.protocols.per_volume import plan_queries
from server.public.material import CodecRecord
from server.study import create_study as setup
from server.study.spoiled import accept_spoiled, accepted_row, question, spoiled_draws
from server.study.status import study_status
from server.study.workspace import Site, Workspace
from tests.federation import Federation, make_study
from tests.studies import made_study
from tests.worlds import HURRIED, pool_of, silent

pytestmark = pytest.mark.slow

SITES = 4


def sealed_study(**privacy: object) -> Study:
    terms = {"quorum": 3, "planned_queries": 3, "aggregation": "sealed-sum", "spare_draws": 2} | privacy
    return make_study(collection=HURRIED, **terms)


@pytest.fixture
def world(tmp_path: Path) -> Iterator[Federation]:
    with Federation(tmp_path, study=sealed_study(planned_queries=4, spare_draws=4), sites=SITES) as federation:
        yield federation


def spoil_the_first_query(world: Federation, *, by: int = 101) -> None:
    """Let one site spoil its answer to the first query by a number far above any noise, and answer all others
    honestly.
    """
    honest, asked = world.workers[by]._sampler, []

    def sampler(size: int, std):  # type: ignore[no-untyped-def]
        asked.append(size)
        return honest(size, std) + (1 << 40) * (len(asked) == 1)

    world.workers[by]._sampler = sampler


def test_the_first_spoiled_draw_ends_the_run_with_a_question_and_the_budgets_state(world: Federation) -> None:
    world.workers[101]._sampler = lambda size, std: np.full(size, 1 << 60, dtype=np.int64)
    with pytest.raises(Refused) as stopped:
        world.core().run(world.transport)
    said = str(stopped.value)
    assert stopped.value.reason == "sum-spoiled"
    assert "0 of 4 answers" in said
    assert "6 of 8 charges left" in said
    assert "site-0, site-1, site-2, site-3" in said
    assert "--despite-spoiled" in said
    assert world.ledger.spent("pool-0").releases == 2  # the one batch that was asked, of 8 charges


def test_a_push_that_every_sum_hides_alone_is_found_in_the_sums_together(tmp_path: Path) -> None:
    """The other sites add neither codes nor noise, so both draws consist of this site's push alone."""
    world = Federation(
        tmp_path, study=sealed_study(planned_queries=4, spare_draws=4), sites=SITES, share_sampler=silent
    )
    for voters in world.voters.values():
        voters.failure = "nan"
    mechanism = world.planned()[0].mechanism
    std = float(mechanism.noise_std) * (SITES / (SITES - 1)) ** 0.5
    worst = (SITES * mechanism.site_radius_int / std) ** 2
    alone, two, four = (float(ncx2.isf(1e-6, n * mechanism.dimension, n * worst)) / n for n in (1, 2, 4))
    push = np.zeros(mechanism.dimension, dtype=np.int64)
    push[0] = int(std * ((two + four) / 2) ** 0.5)
    assert four < (two + four) / 2 < two < alone
    world.workers[101]._sampler = lambda size, std: push.copy()
    world.core().run(world.transport, should_stop=iter([False, True]).__next__)
    assert len(world.ledger.answers(world.study.id)) == 2
    with pytest.raises(Refused, match="spoiled"):
        world.core().run(world.transport)  # a new core reads the earlier draws from the ledger
    (lost,) = spoiled_draws(world.ledger, world.study)
    assert len(lost.query_ids) == 2
    assert len(world.ledger.answers(world.study.id)) == 2
    world.core().run(world.transport)  # the count starts anew after a person continued
    assert len(world.ledger.answers(world.study.id)) == 4
    world.close()


def test_a_question_is_answered_once_and_the_next_spoiled_draw_asks_anew(world: Federation) -> None:
    assert question(world.ledger, world.study) is None
    world.workers[101]._sampler = lambda size, std: np.full(size, 1 << 60, dtype=np.int64)
    rows = []
    for _ in range(2):
        with pytest.raises(Refused):
            world.core().run(world.transport)
        assert question(world.ledger, world.study, accepted=rows[-1] if rows else "") is not None
        rows.append(spoiled_draws(world.ledger, world.study)[-1].row_hash)
        assert question(world.ledger, world.study, accepted=rows[-1]) is None
    assert question(world.ledger, world.study, accepted="f" * 64) is not None  # a row of the ledger before its restore


def test_what_was_accepted_ahead_of_a_spoiled_draw_is_not_charged_again_after_a_restart(world: Federation) -> None:
    """One sum of the first batch is spoiled when the sites have already accepted the second batch."""
    spoil_the_first_query(world)
    with pytest.raises(Refused):
        world.core().run(world.transport)
    own = {name: ledger.spent().releases for name, ledger in world.site_ledgers.items()}
    assert set(own.values()) == {4}  # two of the batch, two ahead
    world.core().run(world.transport)
    assert len(world.core().answers()) == 4
    assert {ledger.spent().releases for ledger in world.site_ledgers.values()} == {5}
    assert {world.ledger.spent(site.pool).releases for site in world.sites} == {5}


def test_a_restarted_core_never_puts_a_query_that_was_accepted_ahead_beside_one_drawn_before(world: Federation) -> None:
    spoil_the_first_query(world)
    with pytest.raises(Refused):
        world.core().run(world.transport)
    world.core().run(world.transport)
    draws = [release.draw for _, release in world.ledger._books.releases.by_row()]
    assert draws == [1, 1, 1, 1, 2]


# --- what the operator sees


def fresh_key() -> str:
    return X25519PrivateKey.generate().public_key().public_bytes_raw().hex()


@pytest.fixture
def spoiled(tmp_path: Path) -> Workspace:
    """Return a study's directory whose ledger holds a spoiled first draw over three sites."""
    study = sealed_study(planned_queries=4, spare_draws=2)
    workspace = made_study(tmp_path / "study", study)
    names = ("site-0", "site-1", "site-2")
    query = plan_queries(study, codec=CodecRecord(sha256="c" * 64, dimension=4), volumes=["d" * 64])[0]
    with setup.open_ledger(workspace) as ledger:
        for name in names:
            ledger.declare_pool(pool_of(Site(name, f"{name}/patients", node_id=1), study))
        members = tuple(Member(name, MaskKey(fresh_key(), bytes(64))) for name in names)
        masks = MaskedRoster(study.id, ledger.ledger_id, "b" * 64, 1, members)
        roster = tuple(RosterEntry(name, f"{name}/patients") for name in names)
        draw = ledger.charge_draw(study_id=study.id, roster=roster, masks=masks, queries=[query]).draw
        assert draw is not None
        ledger.lose_draw(draw, "spoiled")
    sites = [Site(name, f"{name}/patients", i + 1) for i, name in enumerate(names)]
    workspace._write("sites.json", [site.to_json() for site in sites])
    return workspace


def test_a_spoiled_draw_shows_as_charged_to_every_site_of_its_roster(spoiled: Workspace) -> None:
    status = study_status(spoiled)
    assert {(one.charged, one.spoiled) for one in status.sites.values()} == {(1, 1)}
    assert len(status.sites) == 3
    shown = "\n".join(status.lines())
    assert shown.count("1 draw ") == 3
    assert "--despite-spoiled" in shown
    assert all(site["charged"] == site["spoiled"] == 1 for site in status.to_json()["sites"].values())  # type: ignore[union-attr, attr-defined]


def test_a_certificate_counts_no_roster_of_a_draw_among_the_answers_that_it_checked(spoiled: Workspace) -> None:
    def checked() -> tuple[int, int]:
        facts = certificate_facts(spoiled)
        return facts["answers"], facts["ledger"]["answers_checked"]

    assert checked() == (0, 0)
    study, names = spoiled.study(), [site.name for site in spoiled.sites()]
    volumes = [f"{number:064x}" for number in range(2)]
    queries = plan_queries(study, codec=CodecRecord(sha256="c" * 64, dimension=4), volumes=volumes)[:2]
    members = tuple(Member(name, MaskKey(fresh_key(), bytes(64))) for name in names)
    with setup.open_ledger(spoiled) as ledger:
        masks = MaskedRoster(study.id, ledger.ledger_id, "e" * 64, 2, members)
        roster = tuple(RosterEntry(name, f"{name}/patients") for name in names)
        draw = ledger.charge_draw(study_id=study.id, roster=roster, masks=masks, queries=queries).draw
        assert draw is not None
        for query in queries:
            ledger.store_answer(query.id, 2, np.zeros(4, dtype=np.int64))
    assert checked() == (2, 2)


def test_the_question_that_ended_a_run_is_shown_once(spoiled: Workspace) -> None:
    with Ledger.open(spoiled.ledger_file) as ledger:
        asked = question(ledger, spoiled.study())
    events = EventLog(spoiled.events_file, study=spoiled.study().id)
    events.emit("run-started", run="1", pid=1, resumed=False)
    events.emit("run-failed", run="1", reason=asked, code=6)
    assert study_status(spoiled).warnings == (asked,)


def test_no_command_begins_a_run_before_the_question_is_answered(spoiled: Workspace) -> None:
    done = CliRunner().invoke(study_app, ["resume", str(spoiled.root)])
    assert isinstance(done.exception, Refused)
    assert done.exception.exit_code == 6
    events = EventLog(spoiled.events_file, study=spoiled.study().id)
    with pytest.raises(Refused, match="--despite-spoiled"):  # a run that was started in another way stops, too
        collect(spoiled, None, events=events)  # type: ignore[arg-type]
    accept_spoiled(spoiled)
    assert len(accepted_row(spoiled)) == 64
    assert study_status(spoiled).warnings == ()
    done = CliRunner().invoke(study_app, ["resume", str(spoiled.root), "--despite-spoiled"])
    assert not isinstance(done.exception, Refused)  # it now fails only because no server runs


def test_a_study_that_ended_without_its_answers_does_not_end_with_exit_code_0(spoiled: Workspace) -> None:
    events = EventLog(spoiled.events_file, study=spoiled.study().id)
    events.emit("run-started", run="1", pid=1, resumed=False)
    events.emit("run-finished", run="1", seconds=1.0)
    done = CliRunner().invoke(study_app, ["watch", str(spoiled.root)])
    assert getattr(done.exception, "exit_code", 0) == 3
    assert "0 of 4 answers" in str(done.exception)
    spoiled.stop_file.touch()  # as if a person had asked the run to stop
    assert CliRunner().invoke(study_app, ["watch", str(spoiled.root)]).exit_code == 0


@pytest.mark.parametrize(("code", "expected"), [({"code": 6}, 6), ({}, 1), ({"code": "6"}, 1), ({"code": 0}, 1)])
def test_a_run_that_failed_ends_the_command_with_the_code_of_its_reason(
    spoiled: Workspace, code: dict[str, object], expected: int
) -> None:
    events = EventLog(spoiled.events_file, study=spoiled.study().id)
    events.emit("run-started", run="1", pid=1, resumed=False)
    events.emit("run-failed", run="1", reason="because", **code)
    assert list(read_events(spoiled.events_file))[-1]["reason"] == "because"
    done = CliRunner().invoke(study_app, ["watch", str(spoiled.root)])
    assert getattr(done.exception, "exit_code", None) == expected


def test_an_honest_sealed_study_asks_nothing(tmp_path: Path) -> None:
    world = Federation(tmp_path, study=sealed_study(), sites=SITES)
    world.core().run(world.transport)
    assert question(world.ledger, world.study) is None
    assert world.ledger.ended_without_answer(world.study.id) == ()
    world.close()
