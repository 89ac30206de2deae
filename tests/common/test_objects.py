import pytest

from common.canonical import sha256_bytes
from common.errors import InvalidInput
from common.objects import ObjectStore, write_atomically


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
