"""Tests that a document is read only in exactly the form in which it is written."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum
from fractions import Fraction
from typing import Annotated, Any, ClassVar

import pytest

from common.document import AS_TEXT, FLAT, LATER, Between, Count, Document, Key, OneOf, OrEmpty, Sha256
from common.errors import InvalidInput

A = "a" * 64


class Colour(StrEnum):
    RED = "red"


@dataclass(frozen=True, slots=True)
class Place(Document):
    x: int
    y: Annotated[int, Between("y", 0, 9)] = 0


@dataclass(frozen=True, slots=True)
class Pair(Document):
    AS_LIST: ClassVar = True

    first: str
    second: Sha256


@dataclass(frozen=True, slots=True)
class Thing(Document):
    SCHEMA: ClassVar = ("thing", 2)
    STATED: ClassVar = {"unit": "patient"}

    study_id: Annotated[Sha256, Key("study")]
    place: Annotated[Place, FLAT]
    inside: Place
    colour: Colour
    share: Fraction
    width: float
    data: bytes
    flag: bool
    node: Annotated[int, AS_TEXT]
    word: Annotated[str, OneOf("word", ("yes", "no"))]
    pairs: Annotated[tuple[Pair, ...], Count("pairs", most=2)]
    sums: dict[Sha256, Fraction]
    anything: dict[str, object]
    later: Annotated[str, OrEmpty(len), LATER] = ""
    maybe: Place | None = None


THING = Thing(
    study_id=A,
    place=Place(1, 2),
    inside=Place(3),
    colour=Colour.RED,
    share=Fraction(1, 3),
    width=0.5,
    data=b"\x00\xff",
    flag=True,
    node=2**63,
    word="yes",
    pairs=(Pair("one", A),),
    sums={A: Fraction(2)},
    anything={"a": [1]},
)
FORM: dict[str, Any] = {
    "anything": {"a": [1]},
    "colour": "red",
    "data": "AP8=",
    "flag": True,
    "inside": {"x": 3, "y": 0},
    "later": "",
    "node": "9223372036854775808",
    "pairs": [["one", A]],
    "schema": 2,
    "share": "1/3",
    "study": A,
    "sums": {A: "2/1"},
    "unit": "patient",
    "width": "0x1.0000000000000p-1",
    "word": "yes",
    "x": 1,
    "y": 2,
}


def test_a_document_is_read_back_from_the_form_its_annotations_say() -> None:
    assert THING.to_json() == FORM
    assert Thing.from_json(FORM) == THING
    full = replace(THING, maybe=Place(5), later="x")
    assert full.to_json() == FORM | {"maybe": {"x": 5, "y": 0}, "later": "x"}
    assert Thing.from_json(full.to_json()) == full


def test_a_field_of_later_versions_may_be_missing_and_no_other() -> None:
    old = {key: value for key, value in FORM.items() if key != "later"}
    assert Thing.from_json(old) == THING
    for key in FORM.keys() - {"later"}:
        with pytest.raises(InvalidInput):
            Thing.from_json({name: value for name, value in FORM.items() if name != key})
    with pytest.raises(InvalidInput, match="record keys"):
        Thing.from_json(FORM | {"more": 1})


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("x", True),
        ("x", 1.0),
        ("y", 10),
        ("y", -1),
        ("flag", 1),
        ("colour", "blue"),
        ("share", "2/6"),
        ("share", "1/0"),
        ("width", "0.5"),
        ("width", "nan"),
        ("width", "inf"),
        ("width", "0x1p+99999"),
        ("data", "AP8"),
        ("data", "?"),
        ("node", 1),
        ("node", "01"),
        ("node", "+1"),
        ("node", "٣"),
        ("word", "maybe"),
        ("pairs", [["one", A]] * 3),
        ("pairs", [["one"]]),
        ("pairs", [["one", A, A]]),
        ("pairs", [[1, A]]),
        ("pairs", [{"first": "one", "second": A}]),
        ("sums", {"b": "1/1"}),
        ("sums", {A: 1}),
        ("inside", None),
        ("inside", [1, 0]),
        ("later", None),
        ("maybe", None),
        ("study", A.upper()),
        ("unit", "hospital"),
        ("schema", 1),
        ("schema", True),
        ("anything", []),
    ],
    ids=str,
)
def test_a_value_of_another_kind_or_out_of_bounds_is_refused(key: str, value: object) -> None:
    with pytest.raises(InvalidInput):
        Thing.from_json(FORM | {key: value})


def test_a_newer_form_is_named_before_its_fields_are_looked_at() -> None:
    with pytest.raises(InvalidInput, match=r"thing schema .*: got 3; allowed: 2, .*; to fix: upgrade .*here"):
        Thing.from_json({"schema": 3, "of": "another kind"})


def test_a_list_is_counted_before_anything_of_it_is_read() -> None:
    with pytest.raises(InvalidInput, match=r"^pairs: got 1000"):
        Thing.from_json(FORM | {"pairs": [object()] * 1000})


@pytest.mark.parametrize("data", [None, [], "x", 1, [FORM]])
def test_a_value_that_is_no_mapping_is_refused_as_a_document(data: object) -> None:
    with pytest.raises(InvalidInput):
        Thing.from_json(data)


def test_a_type_without_a_form_is_noticed_when_it_is_declared() -> None:
    @dataclass(frozen=True, slots=True)
    class Wrong(Document):
        anything: object

    with pytest.raises(TypeError, match="no JSON form"):
        Wrong(1).to_json()
