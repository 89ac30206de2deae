from dataclasses import replace

import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from common.errors import InvalidInput, Refused
from common.sealing import SealContext, seal, unseal

CONTEXT = SealContext(study="a" * 64, query="b" * 64, site="north", attempt=1)
KEY = X25519PrivateKey.generate()
CODE = np.array([0, 1, -1, 2**40, -(2**40)], dtype=np.int64)


def sealed():
    return seal(CODE, public_key=KEY.public_key(), context=CONTEXT)


def test_the_core_reads_what_a_site_sealed():
    assert np.array_equal(unseal(sealed(), private_key=KEY, context=CONTEXT, dimension=5), CODE)


@pytest.mark.parametrize("change", [{"study": "c" * 64}, {"query": "c" * 64}, {"site": "south"}, {"attempt": 2}])
def test_a_code_opens_only_under_its_own_study_query_site_and_attempt(change):
    with pytest.raises(Refused, match="cannot be decrypted"):
        unseal(sealed(), private_key=KEY, context=replace(CONTEXT, **change), dimension=5)


def test_a_code_sealed_for_another_key_is_refused():
    with pytest.raises(Refused):
        unseal(sealed(), private_key=X25519PrivateKey.generate(), context=CONTEXT, dimension=5)


def test_every_flipped_byte_is_noticed():
    data = sealed()
    for index in range(len(data)):
        bad = bytearray(data)
        bad[index] ^= 1
        with pytest.raises(Refused):
            unseal(bytes(bad), private_key=KEY, context=CONTEXT, dimension=5)


def test_size_says_nothing_about_the_code():
    zero = seal(np.zeros(5, dtype=np.int64), public_key=KEY.public_key(), context=CONTEXT)
    assert len(zero) == len(sealed())
    assert zero != seal(np.zeros(5, dtype=np.int64), public_key=KEY.public_key(), context=CONTEXT)


@pytest.mark.parametrize("dimension", [4, 6, 0])
def test_a_code_of_another_length_is_refused(dimension):
    with pytest.raises(Refused, match="bytes"):
        unseal(sealed(), private_key=KEY, context=CONTEXT, dimension=dimension)


def test_floats_are_never_sealed():
    with pytest.raises(InvalidInput):
        seal(np.zeros(3), public_key=KEY.public_key(), context=CONTEXT)
