"""Tests what the server's ledger promises about charging; each test's name states one promise."""

from __future__ import annotations

import os
import re
import sqlite3
import stat
import subprocess
from collections.abc import Callable
from contextlib import closing
from copy import deepcopy
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mpmath
import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from common.clock import utc_now
from common.errors import InvalidInput, LedgerCorrupt, QuorumNotReached
from common.ledger import base_ledger, chain, sqlite_file
from common.ledger.charges import (
    PoolDeclaration,
    RosterEntry,
    Spend,
    StudyTerms,
    charge_of,
)
from common.ledger.keys import public_hex
from common.ledger.receipts import Receipt
from common.ledger.records import KeyRecord, NoteRecord, ReuseRecord
from common.ledger.rows import Position
from common.privacy.accounting import MAX_POOL_COORDINATES
from common.privacy.mechanism import AccountantName, Budget, Mechanism, QuerySpec
from server.ledger import server_receipts
from server.ledger.backup import backup
from server.ledger.server_ledger import Ledger
from server.ledger.verify import verify
from tests.backups import delete_ledger
from tests.common.ledger.ledger_world import (
    BUDGET,
    HOSPITAL,
    PATIENT,
    SITES,
    World,
    declare,
    ledger_study,
    make_mechanism,
    make_query,
    roster_of,
    write_raw,
)
from tests.worlds import receipts_of

MECHANISM = make_mechanism(room_for=10)
STRANGER = Ed25519PrivateKey.generate()


def queries(*numbers: int, mechanism: Mechanism = MECHANISM, edition: int = 1) -> list[QuerySpec]:
    return [make_query(number, mechanism, edition=edition) for number in numbers]


def test_replayed_query_costs_nothing_and_returns_the_same_bytes(world: World) -> None:
    first = world.release(queries(1, 2))
    head, spent, drawn = world.ledger.head(), world.ledger.spent("aachen-mri"), list(world.answers.drawn)
    again = world.release(queries(2, 1), batch="another-batch")
    assert [a.noisy_sum.tobytes() for a in again.answers] == [a.noisy_sum.tobytes() for a in first.answers[::-1]]
    assert (world.ledger.head(), world.ledger.spent("aachen-mri"), world.answers.drawn) == (head, spent, drawn)


def test_replay_after_reopening_returns_the_stored_answer(world: World) -> None:
    first = world.release(queries(1))
    world.reopen()
    again = world.release(queries(1))
    assert again.answers[0].noisy_sum.tobytes() == first.answers[0].noisy_sum.tobytes()
    assert world.answers.drawn == [first.answers[0].query.id]
    assert again.answers[0].query == first.answers[0].query


def test_the_longest_prefix_that_fits_is_admitted(world: World) -> None:
    result = world.release(queries(*range(14)))
    assert len(result.answers) == 10
    assert result.refused == tuple(query.id for query in queries(10, 11, 12, 13))
    assert len(world.answers.drawn) == 10
    assert world.ledger.spent("aachen-mri").releases == 10


def test_a_smaller_query_behind_one_that_does_not_fit_is_not_admitted(world: World) -> None:
    world.release(queries(*range(9)))
    large = make_query(100, make_mechanism(room_for=1))
    result = world.release([large, *queries(9)])
    assert result.answers == ()
    assert len(result.refused) == 2


def test_refusal_is_on_record_once_and_draws_no_noise(world: World) -> None:
    world.release(queries(*range(10)))
    world.release(queries(10, 11), batch="b2")
    rows = world.ledger.row_count
    world.release(queries(10, 11), batch="b2")
    assert world.ledger.row_count == rows
    assert [row.kind for row in world.ledger.rows()][-1] == "refusal"
    assert len(world.answers.drawn) == 10


def test_stored_answers_are_returned_from_behind_a_refusal(world: World) -> None:
    world.release(queries(*range(10)))
    result = world.release(queries(77, 3), batch="b2")
    assert [answer.query.id for answer in result.answers] == [queries(3)[0].id]
    assert result.refused == (queries(77)[0].id,)


def test_every_planned_query_fits_and_the_guarantee_is_the_budget(world: World) -> None:
    world.release(queries(*range(10)))
    guarantee = world.ledger.study_spending(world.study.id).readings()[AccountantName.EXACT]
    assert BUDGET.epsilon * (1 - 1e-3) < guarantee.epsilon <= BUDGET.epsilon


def test_study_guarantee_agrees_with_numerical_integration(world: World) -> None:
    """The oracle integrates the hockey-stick divergence between two Gaussians by mpmath to get δ(ε)."""
    world.release(queries(*range(6)))
    stated = world.ledger.study_spending(world.study.id).readings()[AccountantName.EXACT]
    sigma = float(MECHANISM.noise_std)
    mu = mpmath.sqrt(6) * 2 * MECHANISM.radius_int / sigma

    def difference(x: mpmath.mpf) -> mpmath.mpf:
        return max(mpmath.npdf(x, mu, 1) - mpmath.exp(stated.epsilon) * mpmath.npdf(x, 0, 1), 0)

    start = stated.epsilon / mu + mu / 2
    delta = mpmath.quad(difference, [start, start + 2, start + 5, start + 12])
    assert float(delta) == pytest.approx(1e-3, rel=1e-6)


def test_editing_the_study_buys_no_budget(world: World) -> None:
    world.release(queries(*range(10)))
    edited = ledger_study(planned_queries=81)
    world.ledger.register_study(edited)
    result = world.release(queries(50), study=edited.id)
    assert result.answers == ()
    assert world.ledger.spent("aachen-mri").releases == 10


def test_a_new_edition_buys_no_budget(world: World) -> None:
    world.release(queries(*range(10)))
    retrained = ledger_study(edition=2)
    world.ledger.register_study(retrained)
    assert world.release(queries(1, edition=2), study=retrained.id).answers == ()


def test_a_second_study_continues_the_pools_sum(world: World) -> None:
    world.release(queries(*range(6)))
    second = ledger_study("second")
    world.ledger.register_study(second)
    result = world.release(queries(*range(20, 30)), study=second.id)
    assert len(result.answers) == 4
    expected = 10 * (Fraction(2 * MECHANISM.radius_int) / MECHANISM.noise_std) ** 2
    assert world.ledger.spent("aachen-mri").mu_squared == expected
    assert world.ledger.books.spent_in(second.id, "aachen-mri").releases == 4


def test_the_studys_own_budget_binds_where_the_pool_has_more(tmp_path: Path) -> None:
    world = World.create(tmp_path, study=ledger_study(epsilon=4.0))
    with world.ledger:
        result = world.release(queries(*range(10)))
        assert 0 < len(result.answers) < 10
        assert '"reason":"study-budget"' in list(world.ledger.rows())[-1].body


def test_every_pool_of_the_roster_must_have_room(world: World) -> None:
    world.release(queries(*range(7)), sites=("aachen", "bergen"))
    result = world.release(queries(*range(20, 30)), sites=("bergen", "cadiz"))
    assert len(result.answers) == 3
    assert world.ledger.spent("cadiz-mri").releases == 3
    refusal = list(world.ledger.rows())[-1]
    assert '"pool":"bergen-mri"' in refusal.body


def test_a_release_below_quorum_leaves_no_row(world: World) -> None:
    rows = world.ledger.row_count
    with pytest.raises(QuorumNotReached, match="needs at least 2"):
        world.release(queries(1), sites=("aachen",))
    assert world.ledger.row_count == rows
    assert world.answers.drawn == []
    assert world.ledger.answer(queries(1)[0].id) is None


def test_a_sealed_study_needs_two_sites_beside_its_colluders_whatever_quorum_its_text_states() -> None:
    """``PrivacyConfig`` refuses such a quorum, but a ledger may read a text that another program wrote."""
    text = ledger_study(quorum=4, aggregation="sealed-sum", colluders=2).to_json()
    low = {**text, "privacy": {**text["privacy"], "quorum": 2}}
    assert StudyTerms.from_json(low).least_roster == 4


@pytest.mark.parametrize(
    "bad",
    [
        np.array([1.0, np.nan, 0.0, 0.0]),
        np.array([np.inf, 0.0, 0.0, 0.0]),
        np.zeros(4, dtype=np.int32),
        np.zeros(3, dtype=np.int64),
        np.zeros((2, 2), dtype=np.int64),
        [0, 0, 0, 0],
        None,
    ],
    ids=["nan", "infinity", "int32", "short", "matrix", "list", "none"],
)
def test_anything_but_the_mechanisms_integers_is_refused_and_nothing_is_charged(world: World, bad: object) -> None:
    rows = world.ledger.row_count
    with pytest.raises(InvalidInput, match="noisy answer"):
        world.ledger.release_batch(
            study_id=world.study.id,
            batch_id="b1",
            roster=roster_of(),
            queries=queries(1, 2),
            draw=lambda query: bad if query in queries(2) else world.answers.draw(query),  # type: ignore[arg-type, return-value]
        )
    assert world.ledger.row_count == rows
    assert world.ledger.spent("aachen-mri") == Spend()
    assert world.ledger.answer(queries(1)[0].id) is None
    assert len(world.release(queries(1, 2)).answers) == 2


def test_a_failing_sampler_charges_nothing_and_the_ledger_goes_on(world: World) -> None:
    def fail(_query: QuerySpec) -> np.ndarray:
        raise OSError("no randomness")

    with pytest.raises(OSError, match="no randomness"):
        world.ledger.release_batch(
            study_id=world.study.id,
            batch_id="b1",
            roster=roster_of(),
            queries=queries(1),
            draw=fail,
        )
    assert world.ledger.spent("aachen-mri") == Spend()
    assert len(world.release(queries(1)).answers) == 1


def test_a_failing_commit_charges_nothing_in_memory_either(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    original = chain.head_message

    def fail(*_args: object, **_kwargs: object) -> bytes:
        raise MemoryError

    monkeypatch.setattr(chain, "head_message", fail)
    with pytest.raises(MemoryError):
        world.release(queries(1, 2))
    monkeypatch.setattr(chain, "head_message", original)
    assert world.ledger.spent("aachen-mri") == Spend()
    assert world.release(queries(1)).answers[0].seq == 6


def test_an_undeclared_pool_or_another_sites_pool_is_refused(world: World) -> None:
    for entry in (RosterEntry("dublin", "dublin-mri"), RosterEntry("dublin", "aachen-mri")):
        with pytest.raises(InvalidInput):
            world.ledger.release_batch(
                study_id=world.study.id,
                batch_id="b1",
                roster=(entry, *roster_of(("bergen",))),
                queries=queries(1),
                draw=world.answers.draw,
            )
    assert world.answers.drawn == []


def test_a_site_or_pool_cannot_be_on_the_roster_twice(world: World) -> None:
    entry = roster_of(("aachen",))[0]
    for twice in (entry, RosterEntry("aachen", "bergen-mri"), RosterEntry("bergen", "aachen-mri")):
        with pytest.raises(InvalidInput, match="twice"):
            world.ledger.release_batch(
                study_id=world.study.id, batch_id="b", roster=(entry, twice), queries=[], draw=world.answers.draw
            )


def test_a_query_twice_in_a_batch_is_refused(world: World) -> None:
    with pytest.raises(InvalidInput, match="each query once"):
        world.release(queries(1, 1))


def test_unknown_studies_and_wrong_voters_are_refused(world: World) -> None:
    with pytest.raises(InvalidInput, match="registered"):
        world.release(queries(1), study="0" * 64)
    with pytest.raises(InvalidInput, match="voters"):
        world.release(queries(1, mechanism=make_mechanism(voters=2)))


def test_a_pools_budget_can_only_be_tightened(world: World) -> None:
    for changes in (
        {"budget": Budget(8.5, 1e-3)},
        {"budget": Budget(8.0, 2e-3)},
        {"budget": Budget(7.0, 2e-3)},
        {"protection": PATIENT},
    ):
        with pytest.raises(InvalidInput):
            declare(world.ledger, **changes)  # type: ignore[arg-type]
    with pytest.raises(InvalidInput, match="site of pool"):
        world.ledger.declare_pool(
            PoolDeclaration(
                pool="aachen-mri",
                site="bergen",
                budget=BUDGET,
                accountant=AccountantName.EXACT,
                protection=HOSPITAL,
            )
        )
    rows = world.ledger.row_count
    declare(world.ledger)
    assert world.ledger.row_count == rows
    declare(world.ledger, budget=Budget(4.0, 1e-3))
    assert len(world.release(queries(*range(10))).answers) < 10
    with pytest.raises(InvalidInput):
        declare(world.ledger)


def test_loosening_by_the_choice_of_accountant_is_refused(tmp_path: Path, world: World) -> None:
    declare(world.ledger, sites=("dublin",), accountant=AccountantName.RDP)
    with pytest.raises(InvalidInput, match="tighter"):
        declare(world.ledger, sites=("dublin",), accountant=AccountantName.EXACT)
    declare(world.ledger, sites=("aachen",), accountant=AccountantName.RDP)


def test_a_budget_tightened_below_what_is_spent_admits_nothing(world: World) -> None:
    world.release(queries(*range(8)))
    declare(world.ledger, budget=Budget(1.0, 1e-3))
    assert world.ledger.remaining("aachen-mri") < 0
    assert world.release(queries(9)).answers == ()
    world.reopen()
    assert world.ledger.spent("aachen-mri").releases == 8


def test_a_pool_per_patient_pays_for_all_voters_of_a_study_per_hospital(tmp_path: Path) -> None:
    """Only unit ``patient`` promises disjoint teachers; without the promise a patient may move all m codes."""
    mechanism = make_mechanism(room_for=10, voters=3)
    per_patient = ledger_study(unit="patient", voters_per_site=3)
    per_hospital = ledger_study(unit="hospital", voters_per_site=3)
    with Ledger.create(tmp_path / "l.sqlite", signing_key=Ed25519PrivateKey.generate()) as ledger:
        declare(ledger, protection=PATIENT)
        one_voter = (Fraction(2 * mechanism.radius_int) / mechanism.noise_std) ** 2
        spent = Fraction(0)
        for number, (study, factor) in enumerate(((per_patient, 1), (per_hospital, 9))):
            ledger.register_study(study)
            ledger.release_batch(
                study_id=study.id,
                batch_id="b",
                roster=roster_of(),
                queries=[make_query(number, mechanism)],
                draw=lambda _: np.zeros(4, dtype=np.int64),
            )
            spent += factor * one_voter
            assert ledger.spent("aachen-mri").mu_squared == spent


def test_the_number_of_noisy_coordinates_is_limited(tmp_path: Path) -> None:
    """Each coordinate uses up a little of the δ that is set aside for the noise sampler."""
    wide = Mechanism(dimension=1 << 20, radius_int=1, voters_per_site=1, noise_std=Fraction(2**20))
    room = MAX_POOL_COORDINATES // wide.dimension
    world = World.create(tmp_path)
    with world.ledger as ledger:
        # The totals of all but the last release are set by hand, because 16 answers of 8 MiB would test nothing more.
        books = ledger._books
        for site in SITES:
            books._spent[f"{site}-mri"] = Spend(Fraction(1, 2**20), room - 1, (room - 1) * wide.dimension)
        result = ledger.release_batch(
            study_id=world.study.id,
            batch_id="b",
            roster=roster_of(),
            queries=[make_query(n, wide) for n in range(2)],
            draw=lambda _: np.zeros(1 << 20, dtype=np.int64),
        )
        assert len(result.answers) == 1
        assert '"reason":"coordinates"' in list(ledger.rows())[-1].body


def test_another_study_may_use_a_stored_answer_and_its_own_sum_counts_it(world: World) -> None:
    first = world.release(queries(1, 2))
    second = ledger_study("second")
    world.ledger.register_study(second)
    before = world.ledger.spent("aachen-mri")
    reused = world.release(queries(1, 2, 3), study=second.id)
    assert [a.noisy_sum.tobytes() for a in reused.answers[:2]] == [a.noisy_sum.tobytes() for a in first.answers]
    assert world.ledger.spent("aachen-mri").releases == before.releases + 1
    assert world.ledger.books.spent_in(second.id, "aachen-mri").releases == 3
    assert [answer.seq for answer in world.ledger.answers(second.id)] == [a.seq for a in reused.answers]
    guarantees = world.ledger.study_spending(second.id).readings()[AccountantName.EXACT]
    assert guarantees.epsilon > world.ledger.study_spending(world.study.id).readings()[AccountantName.EXACT].epsilon
    rows = world.ledger.row_count
    world.release(queries(1, 2, 3), study=second.id)
    assert world.ledger.row_count == rows
    world.reopen()
    assert world.ledger.books.spent_in(second.id, "aachen-mri").releases == 3


def test_a_stricter_study_cannot_reuse_what_its_own_budget_does_not_cover(world: World) -> None:
    world.release(queries(1, 2))
    strict = ledger_study("strict", epsilon=0.5)
    world.ledger.register_study(strict)
    result = world.release(queries(1, 2), study=strict.id)
    assert result.answers == ()
    assert world.ledger.answers(strict.id) == ()


def test_an_answer_of_fewer_sites_than_a_studys_quorum_is_not_reused_by_it(world: World) -> None:
    """The study's request for it is refused, and so is a row that enters the reuse."""
    world.release(queries(1), sites=SITES[:2])
    larger = ledger_study("larger", quorum=3)
    world.ledger.register_study(larger)
    rows = world.ledger.row_count
    with pytest.raises(QuorumNotReached, match="2 sites"):
        world.release(queries(1), study=larger.id)
    with pytest.raises(LedgerCorrupt, match=r"roster .*quorum"), world.ledger._writing():
        write_raw(world.ledger, "reuse", ReuseRecord(larger.id, (queries(1)[0].id,)).to_json())
    assert world.ledger.row_count == rows
    assert world.ledger.answers(larger.id) == ()


def test_no_row_lets_a_study_use_an_answer_whose_noise_it_does_not_state(world: World) -> None:
    """The operator knows the noise of an open answer, and a sealed study promises that nobody does."""
    world.release(queries(1))
    sealed = ledger_study("sealed", quorum=3, aggregation="sealed-sum", colluders=1)
    world.ledger.register_study(sealed)
    row = ReuseRecord(sealed.id, (queries(1)[0].id,)).to_json()
    with pytest.raises(LedgerCorrupt, match="colluders"), world.ledger._writing():
        write_raw(world.ledger, "reuse", row)
    assert world.ledger.answers(sealed.id) == ()


def test_answers_are_read_only_and_independent_of_the_callers_array(world: World) -> None:
    mine = np.arange(4, dtype=np.int64)
    result = world.ledger.release_batch(
        study_id=world.study.id,
        batch_id="b1",
        roster=roster_of(),
        queries=queries(1),
        draw=lambda _: mine,
    )
    mine[:] = 7
    assert result.answers[0].noisy_sum.tolist() == [0, 1, 2, 3]
    stored = world.ledger.answer(queries(1)[0].id)
    assert stored is not None
    for answer in (stored, result.answers[0]):
        with pytest.raises(ValueError, match="read-only"):
            answer.noisy_sum[0] = 1


def test_stored_bytes_are_little_endian_int64(world: World) -> None:
    values = np.array([1, -2, 2**40, -(2**62)], dtype=np.int64)
    world.ledger.release_batch(
        study_id=world.study.id, batch_id="b", roster=roster_of(), queries=queries(1), draw=lambda _: values
    )
    connection = sqlite3.connect(world.path)
    blob = connection.execute("SELECT data FROM answers").fetchone()[0]
    connection.close()
    assert blob == b"".join(int(value).to_bytes(8, "little", signed=True) for value in values)


def test_answer_names_roster_voters_and_row(world: World) -> None:
    answer = world.release(queries(1), sites=("cadiz", "aachen")).answers[0]
    assert [entry.site for entry in answer.roster] == ["aachen", "cadiz"]
    assert answer.voters == 2
    rows = {row.seq: row for row in world.ledger.rows()}
    assert rows[answer.seq].hash == answer.row_hash
    assert rows[answer.seq].kind == "release"


def test_registering_a_study_twice_adds_no_row(world: World) -> None:
    rows = world.ledger.row_count
    assert world.ledger.register_study(world.study) == world.study.id
    assert world.ledger.row_count == rows


def test_update_delete_and_replace_are_blocked_by_the_file_itself(world: World) -> None:
    world.release(queries(1, 2))
    world.ledger.close()
    connection = sqlite3.connect(world.path, isolation_level=None)
    try:
        for statement in (
            "UPDATE rows SET body = '{}' WHERE seq = 2",
            "DELETE FROM rows WHERE seq = 6",
            "UPDATE answers SET data = x'00'",
            "DELETE FROM answers",
            "UPDATE heads SET signature = ''",
            "DELETE FROM heads",
            "INSERT OR REPLACE INTO rows SELECT seq, time_utc, kind, '{}', prev_hash, hash FROM rows WHERE seq = 2",
            "INSERT OR REPLACE INTO answers SELECT query_id, seq, x'00' FROM answers",
            "INSERT OR REPLACE INTO heads SELECT seq, hash, public_key, '' FROM heads",
            "INSERT INTO rows VALUES (99, '', 'note', '{}', '', '')",
        ):
            with pytest.raises(sqlite3.IntegrityError):
                connection.execute(statement)
    finally:
        connection.close()


def test_the_file_keeps_wal_and_is_private_to_its_owner(world: World) -> None:
    world.release(queries(1))
    for path in world.path.parent.iterdir():
        assert stat.S_IMODE(path.stat().st_mode) == 0o600, path.name
    journal = world.ledger._chain._db.execute("PRAGMA journal_mode").fetchone()[0]
    synchronous = world.ledger._chain._db.execute("PRAGMA synchronous").fetchone()[0]
    assert (journal, synchronous) == ("wal", 2)


def test_creating_over_an_existing_file_is_refused_and_leaves_it_alone(tmp_path: Path) -> None:
    path = tmp_path / "ledger.sqlite"
    path.write_bytes(b"something else")
    with pytest.raises(InvalidInput, match="exists"):
        Ledger.create(path, signing_key=Ed25519PrivateKey.generate())
    assert path.read_bytes() == b"something else"
    assert os.listdir(tmp_path) == ["ledger.sqlite"]


def test_a_ledger_file_with_a_second_name_is_refused_until_it_has_bytes_of_its_own(
    world: World, tmp_path: Path
) -> None:
    """Each name has a write-ahead log of its own, so rows that one process appends are invisible to another one."""
    (tmp_path / "snapshot").mkdir()
    linked = tmp_path / "snapshot" / world.path.name
    os.link(world.path, linked)
    for path, key in ((linked, None), (linked, world.key), (world.path, None), (world.path, world.key)):
        with pytest.raises(InvalidInput, match=r"hard link.*cp -p") as refused:
            Ledger.open(path, signing_key=key)
    world.ledger.close()
    (remedy,) = re.findall(r"`(cp .*)`", str(refused.value))
    subprocess.run(remedy, shell=True, check=True)
    world.reopen()
    assert world.ledger.row_count == 5
    assert linked.stat().st_nlink == 1


def test_a_draft_that_a_killed_creation_left_is_no_second_name(world: World) -> None:
    os.link(world.path, world.path.with_name(f".{world.path.name}.{'0' * 16}.new"))
    world.reopen()
    world.release(queries(1))


def test_opening_something_else_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="does not exist"):
        Ledger.open(tmp_path / "missing.sqlite")
    other = tmp_path / "other.sqlite"
    connection = sqlite3.connect(other)
    connection.execute("CREATE TABLE rows (a)")
    connection.commit()
    connection.close()
    with pytest.raises(LedgerCorrupt, match=f"{other}.* not "):
        Ledger.open(other)
    other.write_bytes(b"not a database at all" * 100)
    with pytest.raises(LedgerCorrupt):
        Ledger.open(other)


def test_without_the_key_a_ledger_can_only_be_read(world: World) -> None:
    world.release(queries(1))
    with Ledger.open(world.path) as reader:
        assert reader.spent("aachen-mri").releases == 1
        with pytest.raises(InvalidInput, match="open for reading"):
            reader.note("hello")
        world.release(queries(2), batch="b2")
        assert reader.spent("aachen-mri").releases == 2, "a reader sees what is committed while it is open"


def test_another_key_cannot_append(world: World) -> None:
    with pytest.raises(InvalidInput, match="signing key"):
        Ledger.open(world.path, signing_key=Ed25519PrivateKey.generate())


def test_two_writers_see_each_others_charges(world: World) -> None:
    with Ledger.open(world.path, signing_key=world.key) as other:
        world.release(queries(*range(6)))
        result = other.release_batch(
            study_id=world.study.id,
            batch_id="b2",
            roster=roster_of(),
            queries=queries(*range(3, 20)),
            draw=world.answers.draw,
        )
        assert len(result.answers) == 3 + 4
        assert world.ledger.spent("aachen-mri").releases == 10


def test_a_rotated_key_takes_over_and_the_old_one_is_refused(world: World) -> None:
    world.release(queries(1))
    old, new = world.key, Ed25519PrivateKey.generate()
    with Ledger.open(world.path, signing_key=old) as stale:
        world.ledger.rotate_key(new)
        world.release(queries(2), batch="b2")
        with pytest.raises(InvalidInput, match="replaced"):
            stale.note("by the old key")
    with pytest.raises(InvalidInput, match="signing key"):
        Ledger.open(world.path, signing_key=old)
    world.key = new
    world.reopen()
    assert len(world.release(queries(3), batch="b3").answers) == 1


def test_an_open_ledger_refuses_a_key_that_another_process_appended_without_the_ledgers_key(world: World) -> None:
    with closing(chain.Chain.open(world.path, role="server", signing_key=STRANGER, clock=utc_now)) as forged:
        forged.ledger_id, rows = world.ledger.ledger_id, list(forged.new_rows())
        with forged.transaction():
            forged.append("key", KeyRecord(public_hex(STRANGER), forged.possession(STRANGER)).to_json())
    for _ in range(2):
        with pytest.raises(LedgerCorrupt, match="not by the ledger's key") as refused:
            world.ledger.spent("aachen-mri")
        assert refused.value.row == len(rows) + 1
    assert world.ledger.public_keys == {public_hex(world.key)}


def test_an_open_ledger_covers_no_row_with_its_head_that_another_process_appended_without_the_key(world: World) -> None:
    with closing(chain.Chain.open(world.path, role="server", signing_key=STRANGER, clock=utc_now)) as forged:
        forged.ledger_id, rows = world.ledger.ledger_id, list(forged.new_rows())
        with forged.transaction():
            forged.append("note", NoteRecord("not by this ledger").to_json())
    for use in (
        lambda: world.ledger.spent("aachen-mri"),
        lambda: world.ledger.note("mine"),
        lambda: world.ledger.books,
    ):
        with pytest.raises(LedgerCorrupt, match="not by the ledger's key") as refused:
            use()
        assert refused.value.row == len(rows) + 1


def test_a_new_schema_is_refused_and_an_old_one_without_a_migration_too(world: World) -> None:
    world.ledger.close()
    for version, word in ((99, "upgrade"), (0, "can migrate")):
        connection = sqlite3.connect(world.path)
        connection.execute(f"PRAGMA user_version = {version}")
        connection.close()
        with pytest.raises(InvalidInput, match=word):
            Ledger.open(world.path)


def test_an_old_schema_is_migrated_once_by_its_hook(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    world.release(queries(1))
    world.ledger.close()
    calls: list[str] = []

    def upgrade(connection: sqlite3.Connection, role: str) -> None:
        calls.append(role)
        connection.execute("CREATE TABLE extra (a INTEGER) STRICT")

    monkeypatch.setattr(sqlite_file, "SCHEMA_VERSION", 2)
    monkeypatch.setitem(sqlite_file.MIGRATIONS, 1, upgrade)
    with pytest.raises(InvalidInput, match="consilium study run"):
        Ledger.open(world.path)
    for _ in range(2):
        with Ledger.open(world.path, signing_key=world.key) as ledger:
            assert ledger.spent("aachen-mri").releases == 1
    assert calls == ["server"]


def test_a_failed_migration_leaves_the_old_file(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    world.ledger.close()

    def fail(connection: sqlite3.Connection, _role: str) -> None:
        connection.execute("CREATE TABLE extra (a INTEGER) STRICT")
        raise OSError("disk full")

    with monkeypatch.context() as patch:
        patch.setattr(sqlite_file, "SCHEMA_VERSION", 2)
        patch.setitem(sqlite_file.MIGRATIONS, 1, fail)
        with pytest.raises(OSError, match="disk full"):
            Ledger.open(world.path, signing_key=world.key)
    with Ledger.open(world.path, signing_key=world.key) as ledger:
        assert ledger.row_count == 5


def test_rewriting_under_an_open_ledger_is_noticed(world: World) -> None:
    world.release(queries(1))
    connection = sqlite3.connect(world.path, isolation_level=None)
    for statement in ("DROP TRIGGER rows_no_delete", "PRAGMA foreign_keys = OFF", "DELETE FROM rows WHERE seq = 6"):
        connection.execute(statement)
    connection.close()
    with pytest.raises(LedgerCorrupt, match="row 6"):
        world.release(queries(2), batch="b2")
    assert len(world.answers.drawn) == 1


def test_a_file_that_an_older_copy_replaces_in_the_middle_of_a_release_is_noticed(world: World, tmp_path: Path) -> None:
    """Otherwise this commit, and all later ones of the run, would go to the deleted file."""
    backup(world.path, tmp_path / "old.sqlite")
    world.release(queries(1))

    def draw(_query: QuerySpec) -> np.ndarray:
        for suffix in ("-wal", "-shm"):
            Path(f"{world.path}{suffix}").unlink(missing_ok=True)
        (tmp_path / "old.sqlite").replace(world.path)
        return np.zeros(MECHANISM.dimension, dtype=np.int64)

    with pytest.raises(LedgerCorrupt, match="rewritten while it was open"):
        world.ledger.release_batch(
            study_id=world.study.id, batch_id="b2", roster=roster_of(), queries=queries(2), draw=draw
        )
    with pytest.raises(LedgerCorrupt, match="rewritten while it was open"):
        world.release(queries(3), batch="b3")
    assert len(world.answers.drawn) == 1
    world.ledger.close()
    with pytest.raises(LedgerCorrupt, match="older copy"):
        Ledger.open(world.path, signing_key=world.key)


REWRITTEN = {
    "a body": "UPDATE rows SET body = replace(body, 'aachen', 'bergen') WHERE seq = 3",
    "a time": "UPDATE rows SET time_utc = '2020' || substr(time_utc, 5) WHERE seq = 2",
    "a hash": "UPDATE rows SET hash = printf('%064d', 7) WHERE seq = 1",
    "one row gone": "DELETE FROM rows WHERE seq = 4",
}


@pytest.mark.parametrize("what", REWRITTEN)
def test_an_old_row_that_is_changed_under_an_open_ledger_is_noticed_before_anything_more_is_charged(
    world: World, what: str
) -> None:
    """The newest row and the totals in memory are unchanged, so formerly only a newly opened ledger showed
    the change.
    """
    world.release(queries(1))
    rows = world.ledger.row_count
    with closing(sqlite3.connect(world.path, isolation_level=None)) as connection:
        for statement in ("DROP TRIGGER rows_no_update", "DROP TRIGGER rows_no_delete", "PRAGMA foreign_keys = OFF"):
            connection.execute(statement)
        connection.execute("PRAGMA ignore_check_constraints = ON")
        connection.execute(REWRITTEN[what])
        assert connection.execute("SELECT changes()").fetchone() == (1,)
        with pytest.raises(LedgerCorrupt):
            world.release(queries(2), batch="b2")
        assert connection.execute("SELECT max(seq) FROM rows").fetchone() == (rows,)


def overwrite(path: Path, old: bytes, new: bytes) -> None:
    """Change bytes of the file and of SQLite's log as a disk editor does, unnoticed by SQLite."""
    changed = 0
    for file in (path, Path(f"{path}-wal")):
        content = file.read_bytes()
        changed += content.count(old)
        with file.open("r+b") as raw:
            for at in (found.start() for found in re.finditer(re.escape(old), content)):
                raw.seek(at)
                raw.write(new)
    assert changed


@pytest.mark.parametrize("settled", [False, True], ids=["in the log", "in the file"])
def test_bytes_of_an_old_row_that_are_changed_past_sqlite_are_noticed_before_anything_more_is_charged(
    world: World, settled: bool
) -> None:
    """The open connection still has the old page, so formerly only a newly opened ledger showed the change."""
    world.release(queries(1))
    if settled:
        world.ledger._chain.settle()
    row = next(row for row in world.ledger.rows() if row.seq == 3)
    overwrite(world.path, row.body.encode(), row.body.replace("aachen", "bergen").encode())
    drawn = len(world.answers.drawn)
    with pytest.raises(LedgerCorrupt, match="row 3"):
        world.release(queries(2), batch="b2")
    assert len(world.answers.drawn) == drawn
    assert verify(world.path).problems


@pytest.mark.parametrize("what", ["an older copy", "nothing"])
def test_a_file_that_another_is_put_in_place_of_is_charged_nothing_more(world: World, what: str) -> None:
    """SQLite would keep writing into the file that no longer has a name, and every charge would be lost."""
    copy = world.path.with_name("copy.sqlite")
    with closing(sqlite3.connect(world.path)) as connection:
        connection.execute("VACUUM INTO ?", (str(copy),))
    world.release(queries(1))
    delete_ledger(world.path)
    if what == "an older copy":
        copy.rename(world.path)
    drawn = len(world.answers.drawn)
    with pytest.raises(LedgerCorrupt, match=r"while .*open"):
        world.release(queries(2), batch="b2")
    assert len(world.answers.drawn) == drawn


def test_rows_appended_by_another_process_are_no_rewriting_and_checking_them_takes_a_small_share_of_the_time(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, looks = [0.0], [0]
    check = chain.Chain.check_rows

    def takes_a_second(one: chain.Chain) -> None:
        check(one)
        looks[0] += 1
        now[0] += 1.0

    monkeypatch.setattr(chain.Chain, "check_rows", takes_a_second)
    monkeypatch.setattr(base_ledger, "time", SimpleNamespace(monotonic=lambda: now[0]))
    for number in range(5):
        world.release(queries(number), batch=f"b{number}")  # a lone writer has no new rows to check
    assert looks == [0]
    with Ledger.open(world.path, signing_key=world.key) as other:
        opened = looks[0]
        for number in range(5, 9):
            world.release(queries(number), batch=f"b{number}")
            assert other.row_count == world.ledger.row_count
        assert looks[0] - opened <= 2  # each of the two ledgers checks once in half a minute
        now[0] += 31.0
        world.release(queries(9), batch="b9")
        assert other.row_count == world.ledger.row_count
        assert looks[0] > opened


def test_an_answer_that_was_tampered_with_is_not_returned(world: World) -> None:
    world.release(queries(1))
    connection = sqlite3.connect(world.path, isolation_level=None)
    connection.execute("DROP TRIGGER answers_no_update")
    connection.execute("UPDATE answers SET data = zeroblob(32)")
    connection.close()
    with pytest.raises(LedgerCorrupt, match="row 6"):
        world.ledger.answer(queries(1)[0].id)


def test_a_clock_without_a_zone_is_refused(tmp_path: Path) -> None:
    from datetime import datetime

    with pytest.raises(InvalidInput, match="clock"):
        Ledger.create(
            tmp_path / "l.sqlite", signing_key=Ed25519PrivateKey.generate(), clock=lambda: datetime(2025, 1, 1)
        )
    assert os.listdir(tmp_path) == []


def test_receipts_past_a_row_read_no_charge_before_it(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """The cost of a site's receipts after each batch does not grow with the ledger; together they equal all
    receipts.
    """
    for number in range(8):
        world.release(queries(number), sites=SITES if number % 3 else SITES[:2], batch=f"b{number}")
    everything = {site: receipts_of(world.ledger, site) for site in SITES}
    for site, receipts in everything.items():
        ends = [receipt.head.seq for receipt in receipts]
        assert [receipt.previous.seq for receipt in receipts] == [0, *ends[:-1]]
        assert [receipt.before for receipt in receipts] == [Spend(), *(receipt.after for receipt in receipts[:-1])]
        assert receipts[-1].after == world.ledger.spent(f"{site}-mri")
        for row in range(world.ledger.row_count + 1):
            assert receipts_of(world.ledger, site, after=row) == tuple(r for r in receipts if r.head.seq > row)
    charged: list[object] = []
    monkeypatch.setattr(server_receipts, "charge_of", lambda *args: charged.append(args) or charge_of(*args))
    world.release(queries(8), batch="b8")
    for site in SITES:
        (receipt,) = receipts_of(world.ledger, site, after=everything[site][-1].head.seq)
        assert receipt.is_genuine(world.key.public_key())
        assert receipt.before == everything[site][-1].after
    assert len(charged) == 1  # for all sites together


def test_a_ledger_contains_its_own_rows_and_no_others(world: World) -> None:
    world.release(queries(0))
    for row in world.ledger.rows():
        assert world.ledger.contains(Position(row.seq, row.hash))
        assert not world.ledger.contains(Position(row.seq, "f" * 64))
    assert not world.ledger.contains(Position(row.seq + 1, row.hash))
    assert world.ledger.contains(Position())


@pytest.mark.parametrize(
    "change",
    [
        lambda data: data.pop("roster"),
        lambda data: data.update(schema=1),
        lambda data: data.update(schema=3),
        lambda data: data.update(releases=[1]),
        lambda data: data["releases"][0]["body"].update(roster=[]),
        lambda data: data["releases"][0].pop("body"),
    ],
)
def test_a_receipt_of_the_second_schema_is_read_whole_or_refused(world: World, change: Callable[[Any], object]) -> None:
    world.release(queries(0))
    data = replace(receipts_of(world.ledger, "aachen")[0], schema=2).to_json()
    assert Receipt.from_json(deepcopy(data)).schema == 2
    change(data)
    with pytest.raises(InvalidInput):
        Receipt.from_json(data)
