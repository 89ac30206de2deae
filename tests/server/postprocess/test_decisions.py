"""Tests decisions: they are only appended, asking again returns the valid one, and a broken line is named and
refused.
"""

from __future__ import annotations

import pytest

from common.canonical import sha256_bytes
from common.errors import InvalidInput
from server.postprocess.decisions import DecisionStore, Verdict, read_decisions, rejected_labels

STUDY, VOLUME, LABEL = (sha256_bytes(name) for name in (b"study", b"volume", b"label"))


@pytest.fixture
def store(tmp_path) -> DecisionStore:
    return DecisionStore(tmp_path / "decisions.jsonl")


def decide(store, verdict, *, label=LABEL, volume=VOLUME, note=""):
    return store.decide(user="ada", study=STUDY, volume=volume, label=label, verdict=verdict, note=note)


def test_a_repeated_decision_returns_the_valid_one_and_writes_nothing(store):
    first = decide(store, Verdict.REJECT, note="the tail is missing")
    before = store.path.read_bytes()
    assert decide(store, Verdict.REJECT, note="another note") == first
    assert store.path.read_bytes() == before


def test_the_newest_decision_counts_and_every_earlier_one_stays(store):
    for verdict in (Verdict.REJECT, Verdict.ACCEPT, Verdict.REJECT):
        decide(store, verdict)
    assert [one.verdict for one in store.decisions()] == ["reject", "accept", "reject"]
    assert rejected_labels(store.path, STUDY) == {(VOLUME, LABEL)}
    decide(store, Verdict.ACCEPT)
    assert rejected_labels(store.path, STUDY) == frozenset()


def test_a_decision_is_about_one_label_of_one_study(store):
    decide(store, Verdict.REJECT)
    assert rejected_labels(store.path, sha256_bytes(b"another study")) == frozenset()
    other = sha256_bytes(b"decoded anew")
    assert (VOLUME, other) not in rejected_labels(store.path, STUDY)


def test_earlier_lines_are_never_touched(store):
    decide(store, Verdict.REJECT)
    before = store.path.read_bytes()
    decide(store, Verdict.ACCEPT)
    assert store.path.read_bytes().startswith(before)
    assert store.path.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("what", ["dropped", "changed", "swapped", "noise"])
def test_a_file_that_was_changed_is_refused_by_its_line(store, what):
    for verdict in (Verdict.REJECT, Verdict.ACCEPT, Verdict.REJECT):
        decide(store, verdict)
    lines = store.path.read_bytes().splitlines(keepends=True)
    changed = {
        "dropped": [lines[0], lines[2]],
        "changed": [lines[0].replace(b"reject", b"accept"), *lines[1:]],
        "swapped": [lines[1], lines[0], lines[2]],
        "noise": [lines[0], b"not json\n"],
    }[what]
    store.path.write_bytes(b"".join(changed))
    with pytest.raises(InvalidInput, match=r"line [12]"):
        read_decisions(store.path)
    with pytest.raises(InvalidInput):
        decide(store, Verdict.ACCEPT)


def test_a_line_torn_by_a_crash_was_never_a_decision(store):
    decide(store, Verdict.REJECT)
    whole = store.path.read_bytes()
    store.path.write_bytes(whole + b'{"seq":2,"torn')
    assert len(store.decisions()) == 1
    decide(store, Verdict.ACCEPT)
    assert [one.seq for one in store.decisions()] == [1, 2]


@pytest.mark.parametrize("note", ["x" * 501, "two\nlines", "bell\a"])
def test_a_note_is_one_printable_line(store, note):
    with pytest.raises(InvalidInput, match="note"):
        decide(store, Verdict.REJECT, note=note)
    assert store.decisions() == ()
