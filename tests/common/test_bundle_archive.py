"""Tests a bundle as one file: its bytes are the same on every machine, and nothing is unpacked outside its folder."""

from __future__ import annotations

import io
import os
import stat
import time
import zipfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.bundle_archive import from_archive, to_archive
from common.errors import InvalidInput

NAMES = st.from_regex(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,8}(/[A-Za-z0-9_][A-Za-z0-9_.-]{0,8}){0,3}", fullmatch=True)


@given(st.dictionaries(NAMES, st.binary(max_size=40), min_size=1, max_size=6))
@pytest.mark.slow
def test_what_is_packed_comes_out_and_the_order_of_files_changes_no_byte(files: dict[str, bytes]) -> None:
    packed = to_archive(files)
    assert from_archive(packed) == files
    assert to_archive(dict(reversed(files.items()))) == packed


def test_the_bytes_depend_on_neither_time_nor_file_modes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = to_archive({"a/b": b"1"})
    monkeypatch.setattr(time, "localtime", lambda *_: time.struct_time((2040, 1, 1, 0, 0, 0, 0, 1, 0)))
    os.umask(os.umask(0o077))
    assert to_archive({"a/b": b"1"}) == before
    path = tmp_path / "bundle.zip"
    path.write_bytes(before)
    with zipfile.ZipFile(path) as archive:  # any unzip program can read it
        assert archive.testzip() is None
        assert archive.namelist() == ["a/b"]


@pytest.mark.parametrize(
    "name", ["../x", "a/../../x", "/etc/passwd", "a//b", "a/", "", "C:\\x", "a\\..\\b", ".hidden", "a/.x", "ü", "a\nb"]
)
def test_a_path_that_could_leave_the_folder_is_refused_on_both_sides(name: str) -> None:
    with pytest.raises(InvalidInput, match=r"^path"):
        to_archive({name: b"x"})
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as archive:
        entry = zipfile.ZipInfo("placeholder")
        entry.filename, entry.external_attr = name, (stat.S_IFREG | 0o644) << 16
        archive.writestr(entry, b"x")
    with pytest.raises(InvalidInput):
        from_archive(stream.getvalue())


def test_links_compression_and_doubled_names_are_refused() -> None:
    def archive(*entries: tuple[str, int, int]) -> bytes:
        stream = io.BytesIO()
        with zipfile.ZipFile(stream, "w") as target:
            for name, mode, method in entries:
                entry = zipfile.ZipInfo(name)
                entry.external_attr, entry.compress_type = mode << 16, method
                target.writestr(entry, b"/etc/passwd")
        return stream.getvalue()

    regular = stat.S_IFREG | 0o644
    assert from_archive(archive(("a", regular, zipfile.ZIP_STORED))) == {"a": b"/etc/passwd"}
    with pytest.raises(InvalidInput, match=r"entry of .*: got 'a'"):
        from_archive(archive(("a", stat.S_IFLNK | 0o777, zipfile.ZIP_STORED)))
    with pytest.raises(InvalidInput, match=r"entry of .*: got 'a'"):
        from_archive(archive(("a", regular, zipfile.ZIP_DEFLATED)))
    with pytest.warns(UserWarning, match="Duplicate name"):
        doubled = archive(("a", regular, zipfile.ZIP_STORED), ("a", regular, zipfile.ZIP_STORED))
    with pytest.raises(InvalidInput, match="twice"):
        from_archive(doubled)


def test_a_damaged_archive_is_refused() -> None:
    whole = to_archive({"a": b"0123456789"})
    for data in (b"", b"PK", whole[:-5], whole.replace(b"0123456789", b"0123456780")):
        with pytest.raises(InvalidInput, match="cannot be read"):
            from_archive(data)
