"""Tests slots: every patient is in exactly one voter, assigned once, before anybody reads a file."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from contextlib import nullcontext
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from client.records.patient_deal import Slots, by_os, by_seed, load_or_deal, load_slots, look_alikes, save_slots
from client.records.patient_deal import deal as deal_by
from client.site.deals import withdrawn
from client.training import command
from common.errors import InvalidInput
from tests.own_site import make_own_site

NAMES = [f"p{i:02d}" for i in range(23)]


def deal(listed: Iterable[str], *, voters: int, seed: int, before: Slots | None = None) -> Slots:
    """Deal patients by a seed, so that the deal can be repeated."""
    return deal_by(listed, voters=voters, seed=seed, shuffle=by_seed(seed, before), before=before)


def test_every_patient_is_in_exactly_one_voter_and_parts_differ_by_at_most_one() -> None:
    slots = deal(NAMES, voters=4, seed=7)
    parts = [slots.part(voter) for voter in range(4)]
    assert sorted(name for part in parts for name in part) == NAMES
    assert {len(part) for part in parts} == {5, 6}


def test_the_deal_depends_on_the_seed_and_not_on_the_order_of_files() -> None:
    assert deal(NAMES, voters=4, seed=7) == deal(NAMES[::-1], voters=4, seed=7)
    assert deal(NAMES, voters=4, seed=7) != deal(NAMES, voters=4, seed=8)


def test_every_patient_is_equally_likely_in_every_voter() -> None:
    counts = [0, 0, 0]
    for seed in range(600):
        slots = deal(NAMES[:6], voters=3, seed=seed)
        counts[next(v for v in range(3) if "p00" in slots.part(v))] += 1
    assert all(140 < count < 260 for count in counts)  # 200 ± 5 standard deviations


def test_the_operating_systems_deal_is_uniform_over_all_orders() -> None:
    counts = Counter(tuple(by_os("abcd")) for _ in range(2400))
    assert len(counts) == 24
    assert all(50 < count < 150 for count in counts.values())  # 100 ± 5 standard deviations


@settings(max_examples=80)
@given(st.data())
def test_an_exchanged_patient_takes_the_slot_and_nobody_else_moves(data: st.DataObject) -> None:
    """This is the proof's coupling: if the shuffle puts one patient in the other's place, the deals differ in that name
    only.
    """
    names = data.draw(st.lists(st.text("abc", min_size=1), min_size=2, max_size=9, unique=True))
    newcomer = data.draw(st.text("abc", min_size=1).filter(lambda name: name not in names))
    leaver, voters = data.draw(st.sampled_from(names)), data.draw(st.integers(1, 4))
    ranks = dict(zip(names, data.draw(st.permutations(range(len(names)))), strict=True))
    ranks[newcomer] = ranks[leaver]
    shuffle = lambda listed: sorted(listed, key=ranks.__getitem__)  # noqa: E731
    one = deal_by(names, voters=voters, seed=0, shuffle=shuffle)
    other = deal_by([newcomer if name == leaver else name for name in names], voters=voters, seed=0, shuffle=shuffle)
    assert other.order == tuple(newcomer if name == leaver else name for name in one.order)
    changed = [voter for voter in range(voters) if one.part(voter) != other.part(voter)]
    assert changed == [one.place(leaver).voter]
    assert [one.voter_seed(voter) for voter in range(voters)] == [other.voter_seed(voter) for voter in range(voters)]


def test_at_a_known_seed_one_exchange_moves_others_so_a_seed_is_not_for_patients() -> None:
    moved = []
    for leaver in NAMES:
        others = [name for name in NAMES if name != leaver]
        one, other = deal(NAMES, voters=4, seed=7), deal([*others, "zz"], voters=4, seed=7)
        moved.append(sum(one.place(name).voter != other.place(name).voter for name in others))
    assert max(moved) == 16


def test_without_a_seed_nothing_stored_tells_how_newcomers_will_be_dealt(tmp_path: Path) -> None:
    path = tmp_path / "slots.json"
    first = load_or_deal(path, NAMES[:3], voters=3)
    stored = path.read_bytes()
    orders = set()
    for _ in range(3):
        path.write_bytes(stored)
        orders.add(load_or_deal(path, NAMES, voters=3).order)
    assert len(orders) == 3  # 20 newcomers: a repetition has a chance of 1 in 10^17
    assert all(order[:3] == first.order for order in orders)


def test_of_fewer_patients_than_voters_each_is_in_one_voter_and_nobody_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "slots.json"
    with pytest.raises(InvalidInput, match="patients"):
        load_or_deal(path, [], voters=4)
    assert not path.exists()
    slots = load_or_deal(path, NAMES[:3], voters=4)
    assert sorted(len(slots.part(voter)) for voter in range(4)) == [0, 1, 1, 1]
    later = load_or_deal(path, NAMES[:5], voters=4)
    assert later.order[:3] == slots.order
    assert load_or_deal(path, NAMES[:1], voters=4) == later == load_slots(path)


def test_stored_slots_are_kept_when_patients_come_and_go(tmp_path: Path) -> None:
    path = tmp_path / "slots.json"
    first = load_or_deal(path, NAMES[:20], voters=4)
    assert load_or_deal(path, NAMES[:20], voters=4) == first
    later = load_or_deal(path, NAMES[5:], voters=4)
    assert later.order[:20] == first.order
    assert set(later.order[20:]) == set(NAMES[20:])
    assert path.stat().st_mode & 0o777 == 0o600


def test_dealing_again_for_other_voters_or_another_seed_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "slots.json"
    load_or_deal(path, NAMES, voters=4, seed=7)
    for voters, seed in ((3, None), (4, 8)):
        with pytest.raises(InvalidInput, match="stored assignment"):
            load_or_deal(path, NAMES, voters=voters, seed=seed)


def test_a_damaged_slots_file_is_not_replaced_by_a_new_deal(tmp_path: Path) -> None:
    path = tmp_path / "slots.json"
    slots = load_or_deal(path, NAMES, voters=4)
    for text in (
        "{",
        "[]",
        json.dumps({"schema": 1, "seed": 1, "voters": 4, "order": ["p00", "p00"]}),
        json.dumps({"schema": 9, "seed": 1, "voters": 4, "order": list(slots.order)}),
    ):
        path.write_text(text)
        with pytest.raises(InvalidInput, match="slots"):
            load_or_deal(path, NAMES, voters=4)


def test_voters_train_from_different_seeds_that_the_stored_one_decides() -> None:
    slots = deal(NAMES, voters=4, seed=7)
    seeds = [slots.voter_seed(voter) for voter in range(4)]
    assert len(set(seeds)) == 4
    assert seeds == [deal(NAMES[:9], voters=4, seed=7).voter_seed(voter) for voter in range(4)]


def test_a_replacement_takes_the_slot_of_the_patient_who_was_withdrawn_and_moves_nobody() -> None:
    before = deal(NAMES, voters=4, seed=7)
    place = before.place("p05")
    after = deal([*(name for name in NAMES if name != "p05"), "new"], voters=4, seed=7, before=before.without("p05"))
    assert after.order == tuple("new" if name == "p05" else name for name in before.order)
    assert after.place("new").voter == after.place("p05").voter == place.voter


@settings(max_examples=80)
@given(st.data())
@pytest.mark.slow
def test_no_patient_is_ever_in_two_voters_whatever_comes_and_goes(data: st.DataObject) -> None:
    """Deals, additions, absences, returns, withdrawals and replacements happen in any order."""
    people = [f"p{i}" for i in range(12)]
    voters = data.draw(st.integers(1, 5))
    slots = deal(data.draw(st.sets(st.sampled_from(people))), voters=voters, seed=data.draw(st.integers(0, 99)))
    seen: dict[str, int] = {}
    gone: set[str] = set()
    for _ in range(data.draw(st.integers(0, 8))):
        sitting = [name for name in slots.order if not slots.is_empty(name)]
        if sitting and data.draw(st.booleans()):
            leaver = data.draw(st.sampled_from(sitting))
            slots = slots.without(leaver)
            gone.add(leaver)
        listed = data.draw(st.lists(st.sampled_from(people)))
        slots = deal(listed, voters=voters, seed=slots.seed, before=slots)
        parts = [[name for name in slots.part(voter) if not slots.is_empty(name)] for voter in range(voters)]
        everybody = [name for part in parts for name in part]
        assert len(everybody) == len(set(everybody))
        assert set(listed) - gone <= set(everybody)
        assert not gone & set(everybody)
        for voter, part in enumerate(parts):
            for name in part:
                assert seen.setdefault(name, voter) == voter


COMPOSED, DECOMPOSED = "M\u00fcller-1", "Mu\u0308ller-1"


@pytest.mark.parametrize(("first", "then"), [(COMPOSED, DECOMPOSED), (DECOMPOSED, COMPOSED)])
def test_a_patient_whose_name_a_copy_spells_in_other_characters_gets_no_second_slot(first: str, then: str) -> None:
    """A dataset restored from another file system may spell ü as one character or as two."""
    slots = deal([*NAMES, first], voters=4, seed=7)
    for listed in ([*NAMES, then], [*NAMES, first, then]):
        with pytest.raises(InvalidInput, match="spelling"):
            deal(listed, voters=4, seed=7, before=slots)
    with pytest.raises(InvalidInput, match="spelling"):
        deal([first, then], voters=4, seed=7)
    assert deal([*NAMES, first, "new"], voters=4, seed=7, before=slots).order[-1] == "new"


def test_a_withdrawn_patient_does_not_come_back_in_another_spelling(tmp_path: Path) -> None:
    path = tmp_path / "teachers" / "slots.json"
    path.parent.mkdir()
    save_slots(path, deal([*NAMES, COMPOSED], voters=4, seed=7).without(COMPOSED))
    assert withdrawn(tmp_path, None, [*NAMES, DECOMPOSED]) == {DECOMPOSED}
    again = load_or_deal(path, [*NAMES, DECOMPOSED], voters=4)
    assert DECOMPOSED not in again.order
    assert again == load_slots(path)


@pytest.mark.parametrize(("first", "then"), [("p00a", "P00A"), ("B\u00e4r", "BA\u0308R"), ("Gro\u00df", "GROSS")])
def test_a_patient_whose_name_a_copy_spells_in_upper_case_gets_no_second_slot(first: str, then: str) -> None:
    """A file system without upper and lower case may change the names of a restored dataset."""
    slots = deal([*NAMES, first], voters=4, seed=7)
    for listed in ([*NAMES, then], [*NAMES, first, then]):
        with pytest.raises(InvalidInput, match="spelling"):
            deal(listed, voters=4, seed=7, before=slots)


@pytest.mark.parametrize(("first", "then"), [("p00a.", "p00a"), ("p00a", "P00A. "), ("p00a ", "p00a.")])
def test_a_patient_whose_folder_loses_its_last_dot_or_blank_gets_no_second_slot(
    tmp_path: Path, first: str, then: str
) -> None:
    """Copying a dataset over a Windows share removes dots and blanks at the end of a folder's name."""
    slots = deal([*NAMES, first], voters=4, seed=7)
    for listed in ([*NAMES, then], [*NAMES, first, then]):
        with pytest.raises(InvalidInput, match="dots and blanks at its end"):
            deal(listed, voters=4, seed=7, before=slots)
    (tmp_path / "teachers").mkdir()
    save_slots(tmp_path / "teachers" / "slots.json", slots.without(first))
    assert withdrawn(tmp_path, None, [*NAMES, then]) == {then}


@pytest.mark.parametrize(
    "then",
    ["p 0\u200b1", "p 01\u200b", "\ufeffp 01", "p\u00a001", "p  01", "p \uff10\uff11", "p\u00ad 01", "P\u202f01"],
)
def test_a_patient_whose_name_a_spreadsheet_spells_with_characters_that_nobody_sees_gets_no_second_slot(
    tmp_path: Path, then: str
) -> None:
    first = "p 01"
    slots = deal([*NAMES, first], voters=4, seed=7)
    for listed in ([*NAMES, then], [*NAMES, first, then]):
        with pytest.raises(InvalidInput, match="invisible characters"):
            deal(listed, voters=4, seed=7, before=slots)
    (tmp_path / "teachers").mkdir()
    save_slots(tmp_path / "teachers" / "slots.json", slots.without(first))
    assert withdrawn(tmp_path, None, [*NAMES, then]) == {then}


def test_two_new_names_that_differ_only_in_case_are_refused_with_what_to_rename() -> None:
    with pytest.raises(InvalidInput, match="rename the new case"):
        deal(["a1", "A1"], voters=1, seed=0)


def test_names_that_an_earlier_version_dealt_apart_stay_two_patients(tmp_path: Path) -> None:
    save_slots(tmp_path / "slots.json", Slots(seed=1, voters=2, order=("a1", "A1", "b"), key="0" * 64))
    assert load_or_deal(tmp_path / "slots.json", ["a1", "A1", "b", "c"], voters=2).order == ("a1", "A1", "b", "c")
    assert set(load_or_deal(tmp_path / "slots-4.json", ["a1", "A1", "b"], voters=4).order) == {"a1", "A1", "b"}
    with pytest.raises(InvalidInput, match="spelling"):
        load_or_deal(tmp_path / "slots-4.json", ["a1", "A1", "B"], voters=4)


@pytest.mark.parametrize("name", ["LÖWE", "löwe", "Löwe", "LO\u0308WE"])
def test_a_withdrawn_patient_does_not_come_back_in_upper_or_lower_case(tmp_path: Path, name: str) -> None:
    path = tmp_path / "teachers" / "slots.json"
    path.parent.mkdir()
    save_slots(path, deal([*NAMES, "Löwe"], voters=4, seed=7).without("Löwe"))
    assert withdrawn(tmp_path, None, [*NAMES, name]) == {name}
    assert name not in load_or_deal(path, [*NAMES, name], voters=4).order


def test_a_name_that_the_slots_file_could_not_be_read_with_is_never_stored(tmp_path: Path) -> None:
    path = tmp_path / "slots.json"
    with pytest.raises(InvalidInput, match="rename the file"):
        load_or_deal(path, ["p0", "M\udcfcller"], voters=1)
    assert not path.exists()


def test_a_name_that_would_pass_for_an_empty_slot_is_refused() -> None:
    with pytest.raises(InvalidInput, match="'#withdrawn-0'"):
        deal(["a", "#withdrawn-0"], voters=1, seed=0)


def test_a_training_warns_of_a_patient_whose_name_looks_like_an_earlier_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site, warnings = make_own_site(tmp_path, "consented"), list[str]()
    load_or_deal(site / "teachers" / "slots.json", ["ph\u0430ntom_0000", "p9"], voters=1)  # a Cyrillic letter

    def stop(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(command, "record_trainings", stop)
    with pytest.raises(KeyboardInterrupt):
        command.train(command.TrainOptions(site), progress=lambda *_: nullcontext(print), on_warning=warnings.append)
    (warning,) = (
        one for one in warnings if one.startswith("warning, patients: 2 names of patients look like other names")
    )
    assert r"'phantom_0000', 'ph\u0430ntom_0000'" in warning
    stored = set(load_slots(site / "teachers" / "slots.json").order)
    assert {"phantom_0000", "ph\u0430ntom_0000"} <= stored  # they stay two


@pytest.mark.parametrize("names", [["Müller", "Möller"], ["p1", "p-1"], ["10", "1O"], ["#withdrawn-1", "#withdrawn–1"]])
def test_names_that_a_person_tells_apart_do_not_look_alike(names: list[str]) -> None:
    assert look_alikes(None, names) == ()
