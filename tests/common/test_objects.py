import errno
import os
import stat
import tracemalloc
from functools import partial
from pathlib import Path

import pytest

from common.canonical import sha256_bytes
from common.errors import InvalidInput
from common.ledger.keys import create_sealing_key, public_hex
from common.ledger.receipts import read_receipts
from common.ledger.sqlite_file import appearing
from common.objects import ObjectStore, read_given, write_atomically
from common.sealing_rotation import load_sealing_keys, rotate_sealing_key
from consilium.cli.options import file_to_write, read_file


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


def test_the_error_of_a_full_disk_names_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A person must know on which disk to free space."""

    def full(_descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("common.objects.os.fsync", full)
    with pytest.raises(OSError, match=str(tmp_path)):
        write_atomically(tmp_path / "verdict.json", b"{}")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("new", [False, True])
def test_a_file_that_root_writes_belongs_to_the_user_of_the_service(
    tmp_path: Path, new: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner = 65534 if os.geteuid() == 0 else os.geteuid()
    path = tmp_path / "standing"
    path.write_bytes(b"old")
    os.chown(tmp_path if new else path, owner, -1)
    if new:
        path.unlink()
    given = []
    chown = os.fchown
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(os, "fchown", lambda file, user, group: given.append(user) or chown(file, user, group))
    write_atomically(path, b"new", mode=0o600)
    assert given == [owner]
    assert (path.stat().st_uid, path.stat().st_mode & 0o777) == (owner, 0o600)


def test_root_does_not_give_a_file_away_in_a_folder_of_everybody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In /tmp another user can put a file where root writes next."""
    tmp_path.chmod(0o1777)
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(os, "fchown", lambda *_: pytest.fail("root gave the file away"))
    write_atomically(tmp_path / "file", b"new")


@pytest.fixture
def no_links(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make links fail, as on a file system such as exFAT."""

    def link(*_: object) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "link", link)


@pytest.mark.usefixtures("no_links")
def test_without_hard_links_a_new_file_appears_and_replaces_none(tmp_path: Path) -> None:
    path = tmp_path / "backup.sqlite"
    with appearing(path, what="backup") as draft:
        draft.write_bytes(b"whole")
    assert path.read_bytes() == b"whole"
    with pytest.raises(InvalidInput, match="a new file"), appearing(path, what="backup") as draft:
        draft.write_bytes(b"other")
    with pytest.raises(FileExistsError):
        write_atomically(path, b"other", replace=False)
    assert path.read_bytes() == b"whole"
    assert [entry.name for entry in tmp_path.iterdir()] == ["backup.sqlite"]


@pytest.mark.usefixtures("no_links")
def test_without_hard_links_a_sealing_key_is_replaced_and_the_old_one_kept(tmp_path: Path) -> None:
    create_sealing_key(tmp_path / "sealing.key")
    (before,) = load_sealing_keys(tmp_path / "sealing.key")
    rotate_sealing_key(tmp_path / "sealing.key")
    now, kept = load_sealing_keys(tmp_path / "sealing.key")
    assert public_hex(now) != public_hex(before) == public_hex(kept)


def test_no_more_is_read_of_a_file_that_another_hospital_made_than_its_kind_may_have(tmp_path: Path) -> None:
    """A sparse file of a terabyte is only a few bytes in a mail."""
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


def test_an_output_never_replaces_a_device_or_a_pipe(tmp_path: Path) -> None:
    """Formerly root replaced /dev/null by an output file, for every program of the machine."""
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", Path("/dev/no-such-device")):
        with pytest.raises(InvalidInput, match="name a file"):
            write_atomically(path, b"output")
        with pytest.raises(InvalidInput, match="name a file"):
            file_to_write(path)
    assert (tmp_path / "pipe").is_fifo()


def test_a_file_is_written_where_the_file_system_cannot_flush_a_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """fsync(2) returns EINVAL for what "does not support synchronization", such as folders of some network shares."""
    flush = os.fsync

    def of_files_only(descriptor: int) -> None:
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        flush(descriptor)

    monkeypatch.setattr(os, "fsync", of_files_only)
    write_atomically(tmp_path / "file", b"old")
    write_atomically(tmp_path / "file", b"new")
    assert (tmp_path / "file").read_bytes() == b"new"
