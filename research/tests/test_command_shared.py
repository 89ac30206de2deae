"""Tests the names of data and commit that `consilium bench` writes into a stored result."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from research import command_shared
from research import commit as module_of_commit


def test_a_result_names_its_data_as_the_user_named_them(tmp_path: Path) -> None:
    (tmp_path / "prepared").mkdir()
    (tmp_path / "ACDC_ED").symlink_to("prepared")
    assert command_shared._made_by(tmp_path / "ACDC_ED")["data"] == "ACDC_ED"


def test_only_a_change_outside_the_records_marks_the_commit_of_a_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module, record = tmp_path / "research" / "module.py", tmp_path / "benchmarks" / "results" / "record.json"
    for file in (module, record):
        file.parent.mkdir(parents=True)
        file.write_text("before")
    name = ("-c", "user.name=n", "-c", "user.email=n@example.org")
    for words in (("init", "-q"), ("add", "."), (*name, "commit", "-q", "-m", "begin")):
        subprocess.run(["git", "-C", str(tmp_path), *words], check=True)
    monkeypatch.setattr(module_of_commit, "__file__", str(module))
    record.write_text("after")  # as `bench utility --report` writes its register before measuring
    assert "-dirty" not in module_of_commit.commit()
    module.write_text("after")
    assert module_of_commit.commit().endswith("-dirty")
