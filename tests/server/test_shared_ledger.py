"""Tests that a consortium's studies share one ledger: each patient pool has one sum and one budget for life."""

from __future__ import annotations

import copy
import re
import shutil
import threading
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from client.policy import load_site
from client.site.enrolment import join_site
from common.admission import read_request, write_request
from common.config import PoolConfig, Study
from common.errors import InvalidInput, LedgerCorrupt, QuorumNotReached
from common.events import EventLog, read_events
from common.ledger.charges import RosterEntry
from common.ledger.keys import load_signing_key
from common.ledger.records import ALL_CHARGED
from common.ledger.rollback_guard import ServerStanding, standing_path
from common.node_auth import read_admitted
from common.privacy.accounting import max_mu_squared
from common.privacy.mechanism import Protection, Relation, Unit
from consilium.cli.provision import provision_app
from consilium.cli.study import study_app
from consilium.in_process import Wire
from server.aggregation.pipeline import collect
from server.dashboard.read_model import Follower
from server.ledger.recovery import recover_charges
from server.ledger.server_ledger import Ledger
from server.ledger.verify import verify
from server.operations import provision
from server.protocols.per_volume import plan_queries
from server.public.material import CodecRecord
from server.study import create_study as setup
from server.study.consent_text import for_site
from server.study.pools import PoolsSpent, check_answers
from server.study.status import ledger_problem, study_status
from server.study.workspace import Endpoint, Workspace
from tests.backups import copy_of, put_copy
from tests.commands import typed
from tests.federation import Federation, make_codec, make_study
from tests.studies import ENDPOINT, approve, join, kit_of, made_study, served_study
from tests.worlds import pool_of

pytestmark = pytest.mark.slow


@pytest.fixture
def first(tmp_path: Path) -> Workspace:
    return served_study(tmp_path / "first", replace(make_study(), name="first"))


@pytest.fixture
def second(first: Workspace, tmp_path: Path) -> Workspace:
    return served_study(tmp_path / "second", replace(make_study(epsilon=2.0), name="second"), ledger=first.root)


def ledger_of(workspace: Workspace) -> Ledger:
    return Ledger.open(workspace.ledger_file)


# --- a second study of the consortium


def test_a_second_study_shares_ledger_and_signing_key_and_has_a_sealing_key_of_its_own(
    first: Workspace, second: Workspace, tmp_path: Path
) -> None:
    ours, theirs = setup.server_keys(first), setup.server_keys(second)
    assert ours.signing_key == theirs.signing_key
    assert ours.sealing_key != theirs.sealing_key
    assert not (second.root / "ledger.sqlite").exists()
    third = served_study(tmp_path / "third", replace(make_study(), name="third"), ledger=second.root)
    assert third.ledger_file.resolve() == first.ledger_file.resolve()
    with ledger_of(third) as ledger:
        assert [terms.name for terms in ledger.books.studies.values()] == ["first", "second", "third"]
    assert study_status(second).to_json()["answers"] == 0
    assert verify(first.ledger_file).ok


def test_study_init_shares_a_ledger_and_mentions_this_choice_if_another_study_is_in_the_folder(
    first: Workspace, tmp_path: Path
) -> None:
    def init(name: str, *more: str):
        terms = ["--labels", "background,body", "--grid", "8,8,8", "--queries", "6", "--quorum", "2", "--name", name]
        return CliRunner().invoke(study_app, ["init", str(tmp_path / name), *terms, *more])

    alone = init("alone")
    assert f"--ledger {tmp_path / 'first'}" in alone.stdout
    shared = init("shared", "--ledger", str(tmp_path / "first" / "ledger.sqlite"))
    assert shared.exit_code == 0, shared.output
    assert "--ledger" not in shared.stdout
    assert Workspace(tmp_path / "shared").ledger_file.samefile(first.ledger_file)
    assert isinstance(init("nowhere", "--ledger", str(tmp_path)).exception, InvalidInput)
    assert not (tmp_path / "nowhere").exists()


def test_the_standing_may_lie_on_another_disk(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    workspace = made_study(tmp_path / "study", standing=tmp_path / "disk" / "trial.standing")
    assert standing_path(workspace.ledger_file) == tmp_path / "disk" / "trial.standing"
    assert ServerStanding.load(tmp_path / "disk" / "trial.standing").pools == {}
    (tmp_path / "disk" / "trial.standing").unlink()
    with pytest.raises(LedgerCorrupt, match="mount"):
        setup.open_ledger(workspace)


@pytest.mark.parametrize("what", ["a budget without an accountant", "a full disk", "a folder that is not there"])
def test_a_study_that_fails_leaves_nothing_behind_wherever_its_standing_lies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    def full(_study: Study) -> str:
        raise OSError(28, "No space left on device")

    (tmp_path / "disk").mkdir()
    study, standing = make_study(), tmp_path / "disk" / "trial.standing"
    match what:
        case "a full disk":  # at the last of its files
            monkeypatch.setattr(setup, "render_study", full)
        case "a budget without an accountant":
            study = make_study(epsilon=1e6)
        case _:
            standing = tmp_path / "unmounted" / "trial.standing"
    with pytest.raises(OSError if what == "a full disk" else InvalidInput):
        setup.create_study(Workspace(tmp_path / "studies" / "trial"), study, standing=standing)
    assert sorted(tmp_path.rglob("*")) == [tmp_path / "disk"]


@pytest.mark.parametrize("what", ["another's standing", "a folder", "a link that leads nowhere"])
def test_a_standing_takes_nothing_s_place(tmp_path: Path, what: str) -> None:
    standing = tmp_path / "trial.standing"
    match what:
        case "a folder":
            standing.mkdir()
        case "another's standing":
            standing.write_text("{}")
        case _:
            standing.symlink_to(tmp_path / "nowhere")
    with pytest.raises(InvalidInput, match="a new file"):
        setup.create_study(Workspace(tmp_path / "trial"), make_study(), standing=standing)
    assert sorted(tmp_path.rglob("*")) == [standing]


# --- pools


def test_a_pool_keeps_its_lifetime_budget_when_a_smaller_study_joins(
    first: Workspace, second: Workspace, tmp_path: Path
) -> None:
    approve(first, join(first, tmp_path / "n"), pool_epsilon=20.0)
    _, request = join_site(None, kit=kit_of(second), existing=tmp_path / "n" / "site")
    approve(second, request)
    with ledger_of(second) as ledger:
        (pool,) = ledger.pools()
        assert pool.budget.epsilon == 20.0
        assert len([row for row in ledger.rows() if row.kind == "pool"]) == 1
        assert ledger.books.pool_books["north"] == request.books.ledger_id


def test_a_pools_lifetime_budget_is_tightened_only_on_request_and_never_loosened(
    first: Workspace, second: Workspace, tmp_path: Path
) -> None:
    approve(first, join(first, tmp_path / "n"))
    _, request = join_site(None, kit=kit_of(second), existing=tmp_path / "n" / "site")
    with pytest.raises(InvalidInput, match=r"got 9.*tighter"):
        approve(second, request, pool_epsilon=9.0)
    assert second.registered() == ()
    assert read_admitted(second.nodes_file) == ()
    approve(second, request, pool_epsilon=3.0)
    with ledger_of(second) as ledger:
        assert ledger.pools()[0].budget.epsilon == 3.0


def test_a_doubled_pool_is_refused_by_the_server_whatever_the_sites_machine_knows(
    first: Workspace, second: Workspace, tmp_path: Path
) -> None:
    approve(first, join(first, tmp_path / "n"))
    doubled = join(second, tmp_path / "elsewhere")
    with pytest.raises(InvalidInput, match=r"^site ledger of pool") as refused:
        approve(second, doubled)
    assert "site join --from" in str(refused.value)
    assert second.registered() == ()
    assert not second.node_keys_dir.exists()


def test_a_request_that_says_nothing_of_its_books_is_refused(
    first: Workspace, second: Workspace, tmp_path: Path
) -> None:
    request = join(first, tmp_path / "n")
    key = tmp_path / "n" / "site" / "node" / "keys" / "node"
    old = write_request(tmp_path / "old.json", study=request.study, site="north", pool="north", node_key=key)
    with pytest.raises(InvalidInput, match="earlier version"):
        approve(first, old)
    approve(first, request)
    _, joined = join_site(None, kit=kit_of(second), existing=tmp_path / "n" / "site")
    approve(second, joined)
    with ledger_of(second) as ledger:
        assert ledger.books.pool_books["north"] == joined.books.ledger_id, "known from now on"


def test_books_under_a_second_pool_name_and_a_second_pool_of_a_site_are_refused(
    first: Workspace, second: Workspace, tmp_path: Path
) -> None:
    approve(first, join(first, tmp_path / "n"))
    join_site(None, kit=kit_of(second), existing=tmp_path / "n" / "site")
    joined = tmp_path / "n" / "site" / "studies" / "second"
    books = read_request(joined / "request.json").books
    key = joined / "node" / "keys" / "node"
    for site, pool, match in (
        ("south", "fresh", "a site ledger of its own for each pool"),
        ("north", "fresh", "patient pool of site"),
    ):
        renamed = write_request(
            tmp_path / "r.json", study=second.study().id, site=site, pool=pool, node_key=key, books=books
        )
        with pytest.raises(InvalidInput, match=match):
            approve(second, renamed)


def spend_in(workspace: Workspace, study: Study, fed: Federation, number: int) -> None:
    """Release one of the study's queries on the workspace's ledger, paid by the pools north and south."""
    record = CodecRecord(sha256=fed.codec_hash, dimension=fed.codec.dimension)
    query = plan_queries(study, codec=record, volumes=fed.volumes)[number]
    with setup.open_ledger(workspace) as ledger:
        ledger.release_batch(
            study_id=study.id,
            batch_id=f"b{number}",
            roster=(RosterEntry("north", "north"), RosterEntry("south", "south")),
            queries=[query],
            draw=lambda _: np.zeros(query.mechanism.dimension, dtype=np.int64),
        )


def test_books_that_show_less_than_the_ledger_charged_are_refused(
    first: Workspace, second: Workspace, tmp_path: Path
) -> None:
    approve(first, join(first, tmp_path / "n"))
    request = join(first, tmp_path / "s", "south")
    approve(first, request, node_id=8)
    spend_in(first, first.study(), Federation(tmp_path / "fed", study=first.study()), 0)
    _, joined = join_site(None, kit=kit_of(second), existing=tmp_path / "n" / "site")
    with pytest.raises(InvalidInput, match="shows less"):
        approve(second, joined)
    with ledger_of(first) as ledger:
        spent = ledger.spent("north").mu_squared
    protection = Protection(unit=Unit.HOSPITAL, relation=Relation.REPLACE_ONE)
    honest = replace(joined, books=replace(joined.books, mu_squared=spent, protection=protection))
    assert approve(second, honest).pool == "north"


def spend_all(first: Workspace, tmp_path: Path, *, queries: int) -> None:
    """Admit two hospitals to the first study and let it ask so many queries."""
    approve(first, join(first, tmp_path / "n"))
    approve(first, join(first, tmp_path / "s", "south"), node_id=8)
    fed = Federation(tmp_path / "fed", study=first.study())
    for number in range(queries):
        spend_in(first, first.study(), fed, number)


def test_a_second_study_on_spent_pools_is_refused_before_anything_is_made(first: Workspace, tmp_path: Path) -> None:
    spend_all(first, tmp_path, queries=first.study().privacy.planned_queries)
    with pytest.raises(InvalidInput, match="budget for life") as refused:
        served_study(tmp_path / "late", replace(make_study(), name="late"), ledger=first.root)
    assert "north" in str(refused.value)
    assert "smaller ε" in str(refused.value)
    assert not (tmp_path / "late").exists()
    with ledger_of(first) as ledger:
        assert [terms.id for terms in ledger.books.studies.values()] == [first.study().id]


def test_a_study_that_the_shared_ledger_has_gets_no_second_directory(
    first: Workspace, second: Workspace, tmp_path: Path
) -> None:
    again = Workspace(tmp_path / "again")

    def refused() -> str:
        with pytest.raises(InvalidInput, match=r"shared ledger already has.*another name") as error:
            setup.create_study(again, study, ledger=first.root)
        assert not again.root.exists()
        return str(error.value)

    study = second.study()
    assert str(second.root) in refused()
    spend_all(second, tmp_path, queries=1)
    second.root.rename(tmp_path / "lost")
    (tmp_path / "lost" / "study.toml").unlink()
    assert "charges, but no directory" in refused()


def test_a_study_whose_creation_was_killed_is_created_by_the_same_command(first: Workspace, tmp_path: Path) -> None:
    study = replace(make_study(), name="second")
    shutil.rmtree(made_study(tmp_path / "second", study, ledger=first.root).root)
    assert made_study(tmp_path / "second", study, ledger=first.root).study() == study


def test_a_study_that_its_ledger_lacks_asks_nothing_until_the_ledger_is_recovered(
    first: Workspace, tmp_path: Path
) -> None:
    copy_of(first.ledger_file, tmp_path / "ledger.sqlite")
    second = served_study(tmp_path / "second", replace(make_study(), name="second"), ledger=first.root)
    assert ledger_problem(second) is None
    put_copy(tmp_path / "ledger.sqlite", first.ledger_file, standing=True)  # so that the standing shows nothing
    assert ledger_problem(first) is None
    assert re.search("lacks study .* --study", ledger_problem(second) or "")
    assert "guaranteed: not known" in "\n".join(study_status(second).lines())
    follower = Follower(second)
    follower.poll()
    assert "lacks this study" in (follower.doubt or "")
    with pytest.raises(LedgerCorrupt, match=r"lacks study .* --study"):
        collect(second, Wire({}), events=EventLog(second.events_file, study=second.study().id))
    key = load_signing_key(first.signing_key_file)
    recover_charges(first.ledger_file, signing_key=key, receipts=(), standing=None, studies=(second.study(),))
    assert ledger_problem(second) is None
    assert "not known" not in "\n".join(study_status(second).lines())


def test_a_second_study_is_told_what_an_earlier_one_left_it(first: Workspace, tmp_path: Path) -> None:
    spend_all(first, tmp_path, queries=3)
    asked = ["--labels", "background,body", "--grid", "8,8,8", "--queries", "6", "--quorum", "2", "--delta", "1e-3"]
    shared = ["--name", "second", "--ledger", str(first.root)]
    done = typed(study_app, "init", tmp_path / "second", *asked, *shared)
    for pool in ("north", "south"):  # half of the lifetime budget pays for half as many equal queries
        assert re.search(f"warning: pool {pool} of {pool}: .*3 of the 6 releases", done.stdout)


def begun(directory: Path, *more: str) -> tuple[Workspace, str]:
    asked = ["--labels", "background,body", "--grid", "8,8,8", "--queries", "6", "--quorum", "2", "--delta", "1e-3"]
    done = typed(study_app, "init", directory, "--name", directory.name, *asked, *more)
    workspace = Workspace(directory)
    provision.set_up_server(workspace, ENDPOINT)
    return workspace, " ".join(done.stdout.split())


def test_a_first_study_leaves_room_for_a_second_one_like_it_in_both_books_and_says_so(tmp_path: Path) -> None:
    first, said = begun(tmp_path / "first")
    assert "50 % of that" in said
    assert "--pool-epsilon" in said
    spend_all(first, tmp_path, queries=6)
    second, said = begun(tmp_path / "second", "--ledger", str(first.root))
    for pool in ("north", "south"):
        assert re.search(f"pool {pool} of {pool}: .*6 of the 6 releases", said)
    assert "warning: pool" not in said
    with ledger_of(first) as ledger:
        spent, left = ledger.spent("north").mu_squared, ledger.remaining("north")
    assert spent <= left  # a lifetime of at least twice the first study
    caps = load_site(tmp_path / "n" / "site").caps
    assert max_mu_squared(caps.accountant, caps.budget) >= 2 * spent
    assert f"ε = {caps.epsilon:g} (exact)" in for_site(second.study())


@pytest.mark.parametrize(("epsilon", "said"), [("8", "all of that"), ("20", "% of that")])
def test_the_operator_decides_which_lifetime_budget_a_first_study_declares(
    tmp_path: Path, epsilon: str, said: str
) -> None:
    first, text = begun(tmp_path / "first", "--pool-epsilon", epsilon)
    assert said in text
    approve(first, join(first, tmp_path / "n"))
    with ledger_of(first) as ledger:
        assert ledger.pools()[0].budget.epsilon == float(epsilon)


def test_a_pool_cannot_have_less_for_life_than_its_first_study(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match=r"at least .*ε, 8"):
        replace(make_study(), privacy=replace(make_study().privacy, epsilon=8.0), pool=PoolConfig(4.0))
    for wrong in (-1.0, float("nan"), float("inf"), True):
        with pytest.raises(InvalidInput, match="pool"):
            PoolConfig(wrong)


def test_a_study_whose_pools_would_have_a_budget_that_protects_nobody_is_refused_before_anything_is_made(
    tmp_path: Path,
) -> None:
    """No site could be admitted to such a study."""
    for epsilon in (2001.0, 1e308):
        with pytest.raises(InvalidInput, match=r"epsilon of a budget.*at most 2000"):
            setup.create_study(Workspace(tmp_path / "study"), replace(make_study(), pool=PoolConfig(epsilon)))
        assert not (tmp_path / "study").exists()
    setup.create_study(Workspace(tmp_path / "study"), replace(make_study(), pool=PoolConfig(2000.0)))


def test_a_second_server_of_the_machine_gets_a_port_of_its_own_on_loopback_and_names_the_option(tmp_path: Path) -> None:
    first, _ = begun(tmp_path / "first")
    second, _ = begun(tmp_path / "second", "--ledger", str(first.root))
    (second.root / "endpoint.json").unlink()  # as before its own `provision server`
    asked = ["server", str(second.root), "--host", "localhost", "--port", "8444"]
    for _again in range(2):  # and the same command changes nothing
        typed(provision_app, *asked)
        assert second.endpoint() == Endpoint(host="localhost", port=8444, internal_port=8001)
    done = CliRunner().invoke(provision_app, [*asked, "--internal-port", "9000"])
    assert second.endpoint().internal_port == 9000, done.output
    (second.root / "endpoint.json").unlink()
    said = CliRunner().invoke(provision_app, asked).stdout
    assert re.search("study first .*default port.*--internal-port", said)


def test_a_run_that_no_pool_can_answer_says_so_and_ends_with_the_runbooks_code(
    first: Workspace, tmp_path: Path
) -> None:
    second = served_study(tmp_path / "late", replace(make_study(), name="late"), ledger=first.root)
    spend_all(first, tmp_path, queries=first.study().privacy.planned_queries)
    with ledger_of(second) as ledger, pytest.raises(PoolsSpent, match="pool north") as ended:
        check_answers(ledger, second.study(), pools=["north", "south"])
    assert ended.value.exit_code == 3  # docs/runbook.md: the budget is spent
    assert "admit pools of other patients" in str(ended.value)
    key = load_signing_key(first.signing_key_file)
    with Ledger.open(first.ledger_file, signing_key=key) as ledger:
        ledger.note(ALL_CHARGED)  # as after `ledger recover --charge-all`: the ledger admits no new pool
    with ledger_of(second) as ledger, pytest.raises(PoolsSpent, match="without --ledger"):
        check_answers(ledger, second.study(), pools=["north", "south"])


# --- runs


@pytest.fixture
def two_studies(tmp_path: Path):
    """Yield two studies on one server ledger and one ledger for each of three hospitals; a pool has room for six
    queries.
    """
    (tmp_path / "fed").mkdir()
    one = Federation(tmp_path / "fed")
    two = copy.copy(one)
    two.study = replace(make_study(), name="second")
    two.codec = make_codec(two.study)
    two.volumes = tuple(one.objects.put(f"other {i}".encode()) for i in range(6))
    two.ledger = Ledger.open(one.root / "ledger.sqlite", signing_key=one.signing_key)
    two.ledger.register_study(two.study)
    two.open_sites()
    two.events_file = two.root / "events-2.jsonl"
    yield one, two
    one.close()
    two.close()


def queries_of(fed: Federation, count: int):
    record = CodecRecord(sha256=fed.codec_hash, dimension=fed.codec.dimension)
    return plan_queries(fed.study, codec=record, volumes=fed.volumes)[:count]


def test_two_studies_run_on_one_ledger_at_once_and_every_book_shows_the_sum(two_studies) -> None:
    errors: list[BaseException] = []

    def run(fed: Federation) -> None:
        try:
            fed.core(queries_of(fed, 3)).run(fed.transport)
        except BaseException as error:  # noqa: BLE001  shown in the test's own thread
            errors.append(error)

    threads = [threading.Thread(target=run, args=(fed,)) for fed in two_studies]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    one, two = two_studies
    assert len(one.ledger.answers(one.study.id)) == len(two.ledger.answers(two.study.id)) == 3
    expected = sum(
        (query.mechanism.mu_squared(one.study.privacy.protection) for query in queries_of(one, 3)), Fraction(0)
    )
    for site in one.sites:
        assert one.ledger.spent(site.pool).mu_squared == 2 * expected
        assert two.site_ledgers[site.name].spent().mu_squared == 2 * expected
        assert one.site_ledgers[site.name].alarms() == ()
        held = {query for receipt in one.site_ledgers[site.name].receipts() for query in receipt.query_ids}
        assert len(held) == 6, "receipts of both studies, in one line"
    assert one.ledger.forgotten() is None
    assert verify(one.root / "ledger.sqlite", public_key=one.signing_key.public_key()).ok


def test_a_study_that_would_overdraw_the_pool_is_refused_by_each_book_alone(two_studies) -> None:
    one, two = two_studies
    one.core(queries_of(one, 6)).run(one.transport)
    before = one.ledger.spent("pool-0")
    two.core(queries_of(two, 3)).run(two.transport)  # by the server's ledger no pool has room, so it offers nothing
    assert two.ledger.answers(two.study.id) == ()
    assert [event["event"] for event in read_events(two.events_file)].count("offer-answered") == 0
    assert two.ledger.spent("pool-0") == before
    two.ledger.close()
    two.ledger = Ledger.create(two.root / "elsewhere.sqlite", signing_key=two.signing_key)
    two.ledger.register_study(two.study)
    for site in two.sites:
        two.ledger.declare_pool(pool_of(site, two.study))
    with pytest.raises(QuorumNotReached):  # another server's ledger has room, but each site's own ledger refuses
        two.core(queries_of(two, 3)).run(two.transport)
    assert {(event["site"], event["reason"]) for event in two.events("offer-answered")} == {
        (site.name, "budget") for site in two.sites
    }
    assert two.ledger.answers(two.study.id) == ()
    for site in one.sites:
        assert one.site_ledgers[site.name].spent().releases == 6, "nothing was charged by either refusal"
