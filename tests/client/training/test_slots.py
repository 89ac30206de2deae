"""Slots: every patient in exactly one voter, dealt once, before anybody looks at a file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from client.training.slots import deal, load_or_deal
from common.errors import InvalidInput

NAMES = [f"p{i:02d}" for i in range(23)]


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
        with pytest.raises(InvalidInput, match="dealt"):
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
