from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.canonical import canonical_bytes, digest, parse_canonical, parse_rational, rational
from common.errors import InvalidInput

plain = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63) + 1, 2**63 - 1) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=4),
    max_leaves=12,
)


@given(plain)
def test_canonical_bytes_read_back_to_the_same_bytes(value):
    data = canonical_bytes(value)
    assert canonical_bytes(parse_canonical(data)) == data


@pytest.mark.parametrize("value", [1.0, float("nan"), {"a": 0.5}, [b"x"], {1: 2}, {"a": {1, 2}}])
def test_values_without_one_spelling_are_refused(value):
    with pytest.raises(InvalidInput):
        canonical_bytes(value)


@pytest.mark.parametrize(
    "data", [b'{"b":1,"a":2}', b'{"a": 1}', b"1.5", b'{"a":1,"a":1}', b"\xff", b"", b"NaN", b'"\\u0041"']
)
def test_other_spellings_of_a_value_are_refused(data):
    with pytest.raises(InvalidInput):
        parse_canonical(data)


@pytest.mark.parametrize("digits", ["9223372036854775808", "-9223372036854775808", "1" * 400, "1" * 5001])
def test_integers_no_column_holds_are_refused_both_ways(digits):
    with pytest.raises(InvalidInput):
        canonical_bytes({"row": 10 ** (len(digits) - 1) if len(digits) > 20 else int(digits)})
    with pytest.raises(InvalidInput):
        parse_canonical(f'{{"row":{digits}}}')


def test_a_rational_that_could_not_be_written_down_again_is_refused_both_ways():
    with pytest.raises(InvalidInput, match="digits"):
        rational(Fraction(1, 10**4_000))
    with pytest.raises(InvalidInput, match="digits"):
        parse_rational("1/" + "3" * 4_200)
    with pytest.raises(InvalidInput, match="digits"):
        parse_rational("3" * 100_000 + "/1")
    assert parse_rational(rational(Fraction(1, 10**3_990))) == Fraction(1, 10**3_990)


def test_a_domain_keeps_kinds_of_hash_apart():
    assert digest("query", {"a": 1}) != digest("row", {"a": 1})


@given(st.fractions())
def test_rationals_travel_exactly(value):
    assert parse_rational(rational(value)) == value


@pytest.mark.parametrize("text", ["2/4", "1", "1/0", "1/-2", " 1/2", "1.0/2", "nan/1", ""])
def test_other_spellings_of_a_rational_are_refused(text):
    with pytest.raises(InvalidInput):
        parse_rational(text)


def test_rational_of_a_negative_number_keeps_its_sign_in_the_numerator():
    assert rational(Fraction(-3, 6)) == "-1/2"
