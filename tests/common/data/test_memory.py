"""Tests how much memory counts as free, in a container too."""

from __future__ import annotations

from pathlib import Path

from common.data.memory import assuming_free, free_memory_bytes, ignoring_other_programs

MEMINFO = "MemTotal:  8000000 kB\nMemFree: 100 kB\nMemAvailable:    4000 kB\n"


def write_container(root: Path) -> None:
    """Write the control group's files of a container that has 1,400,000 bytes left."""
    for name, text in (("max", "3000000\n"), ("current", "2000000\n"), ("stat", "anon 5\ninactive_file 400000\n")):
        (root / f"memory.{name}").write_text(text)


def test_the_least_of_container_and_machine_counts(tmp_path: Path) -> None:
    meminfo = tmp_path / "meminfo"
    meminfo.write_text(MEMINFO)
    assert free_memory_bytes(tmp_path, meminfo) == 4000 << 10
    write_container(tmp_path)
    assert free_memory_bytes(tmp_path, meminfo) == 1_400_000
    (tmp_path / "memory.max").write_text("max\n")
    assert free_memory_bytes(tmp_path, meminfo) == 4000 << 10
    assert free_memory_bytes(tmp_path, tmp_path / "absent") is None


def test_an_earlier_measurement_holds_until_its_block_ends(tmp_path: Path) -> None:
    meminfo = tmp_path / "meminfo"
    meminfo.write_text(MEMINFO)
    with assuming_free(7):
        assert free_memory_bytes(tmp_path, meminfo) == 7
        with assuming_free(None):
            assert free_memory_bytes(tmp_path, meminfo) == 4000 << 10
    assert free_memory_bytes(tmp_path, meminfo) == 4000 << 10


def test_what_other_programs_use_may_be_ignored_but_not_what_the_container_uses(tmp_path: Path) -> None:
    meminfo = tmp_path / "meminfo"
    meminfo.write_text(MEMINFO)
    with ignoring_other_programs():
        assert free_memory_bytes(tmp_path, meminfo) == 8_000_000 << 10
        write_container(tmp_path)
        assert free_memory_bytes(tmp_path, meminfo) == 1_400_000
        (tmp_path / "memory.max").write_text("max\n")
        assert free_memory_bytes(tmp_path, meminfo) == 8_000_000 << 10
        assert free_memory_bytes(tmp_path / "absent", tmp_path / "absent") is None
    assert free_memory_bytes(tmp_path, meminfo) == 4000 << 10


def test_the_first_version_of_control_groups_counts_too(tmp_path: Path) -> None:
    (tmp_path / "memory").mkdir()
    files = {"limit_in_bytes": "1000000", "usage_in_bytes": "900000", "stat": "total_inactive_file 50000\n"}
    for name, text in files.items():
        (tmp_path / "memory" / f"memory.{name}").write_text(text)
    assert free_memory_bytes(tmp_path, tmp_path / "absent") == 150_000
