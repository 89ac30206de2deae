import tracemalloc
from functools import partial
from pathlib import Path

import pytest

from common.canonical import sha256_bytes
from common.errors import InvalidInput
from common.ledger.receipts import read_receipts
from common.objects import ObjectStore, read_given, write_atomically
from consilium.cli.options import read_file


def test_an_object_comes_back_under_its_hash(tmp_path):
    store = ObjectStore(tmp_path)
    assert store.get(store.put(b"public")) == b"public"
    assert store.put(b"public") == sha256_bytes(b"public")


def test_an_altered_object_is_refused(tmp_path):
    store = ObjectStore(tmp_path)
    name = store.put(b"public")
    (tmp_path / name).write_bytes(b"changed")
    with pytest.raises(InvalidInput, match="altered"):
        store.get(name)


@pytest.mark.parametrize("name", ["../secret", "", "A" * 64, "a" * 63, "a" * 65])
def test_a_name_that_is_no_hash_reads_nothing(tmp_path, name):
    with pytest.raises(InvalidInput):
        ObjectStore(tmp_path).get(name)


def test_a_missing_object_says_so(tmp_path):
    with pytest.raises(InvalidInput, match="0" * 64):
        ObjectStore(tmp_path).get("0" * 64)


def test_a_failed_write_leaves_the_old_file(tmp_path):
    path = tmp_path / "file"
    write_atomically(path, b"old")
    with pytest.raises(TypeError):
        write_atomically(path, "not bytes")
    assert path.read_bytes() == b"old"
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


def test_no_more_is_read_of_a_file_that_another_hospital_made_than_its_kind_may_have(tmp_path: Path) -> None:
    """A sparse file of a terabyte is a few bytes by mail."""
    with (tmp_path / "receipts.jsonl").open("wb") as file:
        file.truncate(1 << 40)
    tracemalloc.start()
    try:
        for read in (partial(read_given, most_bytes=1000), read_receipts, read_file):
            with pytest.raises(InvalidInput, match="size of the file"):
                read(tmp_path / "receipts.jsonl")
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()
    (tmp_path / "receipts.jsonl").write_bytes(b"x" * 1000)
    assert len(read_given(tmp_path / "receipts.jsonl", most_bytes=1000)) == 1000
